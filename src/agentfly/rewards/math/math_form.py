"""Whether an expression is an answer, or the problem over again: 37*48 is not 1776, and x^2 - 5x + 6 is not (x - 2)(x - 3).

A number is written as a number, a fraction, a mixed number or with a power of ten. What has still to be worked out is no
answer, nor is an expression that stands in the question.
"""

from __future__ import annotations

import math
import re
from typing import Any

from .math_parse import Expression, read_math
from .math_value import has_decimal, is_rational

_FORMULA = re.compile(r"\$([^$]{1,300})\$|\\\((.{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.S)
_TERM = r"[\w\\{}()!.]{1,60}"
_RUN = re.compile(rf"{_TERM}(?:\s?[-+*/^]\s?{_TERM}){{0,20}}")
_OPEN = frozenset(("sqrt", "abs", "exp"))  # roots of numbers are values that have no other form
MAX_FORMS = 50


def is_answer_form(found: Expression, reference: Expression) -> bool:
    """Whether an expression has the form of an answer with this reference."""
    if is_number(reference) and (is_number(found) or not has_decimal(reference) or is_rational(found)):
        return is_number(found)  # 6.2831853 is what a data set writes for 2 pi
    if not _functions(found) <= _functions(reference) or (_has_like_terms(found) and not _has_like_terms(reference)):
        return False
    wanted = _factors(reference)
    return sum(factor[0] in ("add", "sub") for factor in wanted) < 2 or len(_factors(found)) >= len(wanted)


def is_number(tree: Expression) -> bool:
    """Whether the expression is a number as it is written: 18, -1/2, 3 1/2, 1.5 * 10^3. 36/2 is a calculation."""
    match tree:
        case ("num", *_):
            return True
        case ("neg", inner):
            return is_number(inner)
        case ("div", top, below):
            ends = _integer(top), _integer(below)
            return None not in ends and bool(ends[1]) and (ends[1] == 1 or ends[0] % ends[1] != 0)  # type: ignore[operator]
        case ("add", whole, ("div", top, below)):
            return _integer(whole) is not None and is_number(("div", top, below)) and _integer(top) < _integer(below)  # type: ignore[operator]
        case ("mul", ("num", *_), ("pow", base, exponent)) | ("pow", base, exponent):
            return _integer(base) == 10 and _integer(exponent) is not None
    return False


def _integer(tree: Expression) -> int | None:
    if tree[0] == "neg":
        inner = _integer(tree[1])
        return None if inner is None else -inner
    return int(tree[1]) if tree[0] == "num" and tree[1].denominator == 1 else None


def _functions(tree: Expression) -> set[str]:
    """Returns the functions of constants that have still to be worked out."""
    own: set[str] = set()
    if tree[0] == "fn" and tree[1] not in _OPEN and not _has_variable(tree):
        own = {"ln" if tree[1] == "log" else tree[1]}
    return own.union(*(_functions(part) for part in tree[1:] if isinstance(part, tuple)))


def _has_like_terms(tree: Expression) -> bool:
    """Whether terms of a sum differ in their number alone, as in 2x + 3x."""
    kinds = [_kind(term) for term in _terms(tree)] if _has_variable(tree) else []
    return len(kinds) > len(set(kinds))


def _terms(tree: Expression) -> list[Expression]:
    if tree[0] in ("add", "sub", "neg"):
        return [term for part in tree[1:] for term in _terms(part)]
    return [tree]


def _kind(term: Expression) -> str:
    if term[0] == "div" and is_rational(term[2]):
        return _kind(term[1])
    factors = _operands(term, True, False) if term[0] == "mul" else [(False, _form(term))]
    return repr(sorted(repr(form) for _, form in factors if form[0] != "num"))


def _has_variable(tree: Expression) -> bool:
    if tree[0] == "var":
        return tree[1] not in ("pi", "e")
    return any(_has_variable(part) for part in tree[1:] if isinstance(part, tuple))


def _factors(tree: Expression) -> list[Expression]:
    """Returns the factors with variables, each as often as its power says."""
    match tree:
        case ("neg", inner):
            return _factors(inner)
        case ("mul", left, right):
            return [*_factors(left), *_factors(right)]
        case ("pow", base, ("num", power, _)) if power.denominator == 1 and 1 < power < 20:
            return _factors(base) * int(power)
    return [tree] if _has_variable(tree) else []


def stands_in(question: str, found: Expression, reference: Expression | None) -> bool:
    """Whether the question holds this expression, in any order of its terms, and asks for another form of it."""
    form = _form(found)
    if reference is not None and (form == _form(reference) or (is_number(reference) and not _is_unreduced(found))):
        return False
    if is_number(found) and not _is_unreduced(found):
        return False
    texts = ["".join(groups) for groups in _FORMULA.findall(question)] + _RUN.findall(question)
    sides = [side for text in texts[:MAX_FORMS] for side in text.rstrip(".?!,").split("=")]
    return any(form == _form(tree) for side in sides if (tree := read_math(side.strip())) is not None)


def _is_unreduced(tree: Expression) -> bool:
    ends = [_integer(part) for part in tree[1:]] if tree[0] == "div" else []
    return len(ends) == 2 and None not in ends and math.gcd(*ends) > 1  # type: ignore[arg-type]


def _form(tree: Expression) -> Any:
    """Returns the tree without the order of terms and factors, and without the signs of factors."""
    match tree:
        case ("pow", base, ("div", ("num", 1, _), ("num", 2, _))):
            tree = ("fn", "sqrt", base)
        case ("mul", top, ("pow", below, ("neg", ("num", 1, _)))):
            tree = ("div", top, below)
    kind, *parts = tree
    if kind in ("add", "sub", "mul", "neg"):
        return ("sum" if kind != "mul" else "product", tuple(sorted(map(repr, _operands(tree, kind == "mul", False)))))
    return (kind, *(_form(part) if isinstance(part, tuple) else part for part in parts))


def _operands(tree: Expression, product: bool, negative: bool) -> list[Any]:
    kind = tree[0]
    if product and kind == "mul":
        return [one for part in tree[1:] for one in _operands(part, True, False)]
    if not product and kind in ("add", "sub"):
        return [*_operands(tree[1], False, negative), *_operands(tree[2], False, negative ^ (kind == "sub"))]
    if not product and kind == "neg":
        return _operands(tree[1], False, not negative)
    if product and kind in ("add", "sub", "neg"):
        return [(False, min((_sum(tree, False), _sum(tree, True)), key=repr))]
    return [(negative, _form(tree))]


def _sum(tree: Expression, negative: bool) -> Any:
    return ("sum", tuple(sorted(map(repr, _operands(tree, False, negative)))))
