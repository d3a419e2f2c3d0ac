"""Decides whether two trees of `math_parse` have the same value, by three methods that are bounded in time and memory:

    exact       both are rational numbers of a reasonable size: compared as fractions
    modular     only + - * / and whole powers: evaluated at random points modulo a random prime, so that variables and huge
                powers cost nothing
                (Schwartz-Zippel: two different expressions agree at three random points with a chance far below 1e-15)
    numeric     roots, pi, logarithms, trigonometry: evaluated in floating point at random positive points

Nothing is simplified symbolically.
"""

from __future__ import annotations

import cmath
import functools
import math
import operator
import random
import secrets
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeVar

from .math_parse import Expression

T = TypeVar("T")

_SECRET = secrets.SystemRandom().getrandbits(64)
"""Makes the prime and the points of this process unknown to a policy, which could else write `x + PRIME y` for x."""
MAX_BITS = 20_000
DECIMAL_TOLERANCE = 2e-6  # six digits: 0.333333 for 1/3, 1.414214 for sqrt(2)
TOLERANCE = 1e-9

# The operations that fractions, residues and complex numbers have alike.
_RING: Mapping[str, Callable[..., Any]] = {
    "neg": operator.neg, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[[complex], complex]] = {
    "sqrt": cmath.sqrt, "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "exp": cmath.exp, "ln": cmath.log,
    "log": cmath.log10, "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan, "abs": abs,
}  # fmt: skip


class _Undecided(Exception):
    """This way of evaluating does not apply. Never leaves this file."""


@functools.cache
def prime() -> int:
    """Returns the random prime of 61 bits of this process, found by Fermat's test to 20 bases."""
    draw = random.Random(_SECRET)
    while True:
        number = draw.getrandbits(61) | 1 << 60 | 1
        if all(pow(draw.randrange(2, number - 1), number - 1, number) == 1 for _ in range(20)):
            return number


def same_value(left: Expression, right: Expression) -> bool | None:
    """Whether two expressions are equal; a decimal may stand for a number that no decimal can write."""
    exact = _both(exact_value, left, right)
    if exact is not None:
        return _same_rational(exact[0], exact[1], has_decimal(left), has_decimal(right))
    modular = _at_points(_modular, left, right, operator.eq)
    if modular is not None:
        return modular
    tolerance = DECIMAL_TOLERANCE if has_decimal(left) or has_decimal(right) else TOLERANCE
    return _at_points(_numeric, left, right, lambda a, b: cmath.isclose(a, b, rel_tol=tolerance, abs_tol=1e-12))


def _at_points(
    evaluate: Callable[[Expression, int], T], left: Expression, right: Expression, same: Callable[[T, T], bool]
) -> bool | None:
    for point in range(3):
        values = _both(lambda tree, point=point: evaluate(tree, point), left, right)  # type: ignore[misc]
        if values is None:
            return None
        if not same(*values):
            return False
    return True


def _both(evaluate: Callable[[Expression], T], left: Expression, right: Expression) -> tuple[T, T] | None:
    """Both values, or None where this way does not apply or leaves the range of numbers."""
    try:
        values = evaluate(left), evaluate(right)
    except (_Undecided, ZeroDivisionError, OverflowError, ValueError):
        return None
    return values if all(not isinstance(value, complex) or cmath.isfinite(value) for value in values) else None


def scaled(tree: Expression, factor: Fraction) -> Expression:
    return ("mul", tree, ("num", factor, False))


def is_rational(tree: Expression) -> bool:
    """Whether the tree is a plain number that can be written as a fraction."""
    return _both(exact_value, tree, tree) is not None


def exact_value(tree: Expression) -> Fraction:
    """The tree as a fraction; raises where it is not one, or one too big to hold."""
    match tree:
        case ("num", value, _):
            result: Fraction = value
        case ("neg" | "add" | "sub" | "mul" as name, *parts):
            result = _RING[name](*map(exact_value, parts))
        case ("div", a, b):
            result = exact_value(a) / _nonzero(exact_value(b))
        case ("pow", a, b):
            result = _exact_power(exact_value(a), exact_value(b))
        case ("fn", name, a):
            result = _exact_function(name, exact_value(a))
        case _:
            raise _Undecided
    if result.numerator.bit_length() + result.denominator.bit_length() > MAX_BITS:
        raise _Undecided
    return result


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        root = _exact_root(base, exponent.denominator)
        return _exact_power(root, Fraction(exponent.numerator))
    power = exponent.numerator
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base not in (0, 1, -1) and abs(power) * bits > MAX_BITS:
        raise _Undecided
    if power < 0:
        base = 1 / _nonzero(base)
        power = -power
    if base in (0, 1, -1):
        power = min(power, 2 - power % 2)
    return base**power


def _exact_root(value: Fraction, degree: int) -> Fraction:
    """A root that is a fraction itself: 4^(1/2), 27^(1/3)."""
    if value < 0 or degree > 64:
        raise _Undecided
    parts = []
    for part in (value.numerator, value.denominator):
        root = math.isqrt(part) if degree == 2 else _nearest_root(part, degree)
        if root**degree != part:
            raise _Undecided
        parts.append(root)
    return Fraction(*parts)


def _nearest_root(value: int, degree: int) -> int:
    if value.bit_length() > 900:
        raise _Undecided
    return round(math.exp(math.log(value) / degree)) if value else 0


def _exact_function(name: str, value: Fraction) -> Fraction:
    if name == "sqrt":
        return _exact_root(value, 2)
    if name == "abs":
        return abs(value)
    if name == "factorial" and value.denominator == 1 and 0 <= value <= 1000:
        return Fraction(math.factorial(value.numerator))
    raise _Undecided


def _modular(tree: Expression, point: int) -> int:
    match tree:
        case ("num", value, _):
            return int(value.numerator * _inverse(value.denominator) % prime())
        case ("var", name) if name not in ("pi", "e"):
            return random.Random(f"{_SECRET} {name} {point}").randrange(2, prime())
        case ("neg" | "add" | "sub" | "mul" as name, *parts):
            return int(_RING[name](*(_modular(part, point) for part in parts)) % prime())
        case ("div", a, b):
            return _modular(a, point) * _inverse(_modular(b, point)) % prime()
        case ("pow", a, b):
            exponent = exact_value(b)
            if exponent.denominator != 1:
                raise _Undecided
            base = _modular(a, point)
            return pow(base if exponent >= 0 else _inverse(base), abs(exponent.numerator), prime())
        case _:
            raise _Undecided


def _inverse(value: int) -> int:
    if value % prime() == 0:
        raise _Undecided
    return pow(value, -1, prime())


def _numeric(tree: Expression, point: int) -> complex:
    match tree:
        case ("num", value, _):
            return complex(float(value))
        case ("var", "pi" | "e" as name):
            return complex(math.pi if name == "pi" else math.e)
        case ("var", name):
            return complex(random.Random(f"{_SECRET} {name} {point}").uniform(0.3, 2.3))
        case ("neg" | "add" | "sub" | "mul" as name, *parts):
            return complex(_RING[name](*(_numeric(part, point) for part in parts)))
        case ("div", a, b):
            return _numeric(a, point) / _numeric(b, point)
        case ("pow", a, b):
            return complex(_numeric(a, point) ** _numeric(b, point))
        case ("fn", name, a) if name in _FUNCTIONS:
            return complex(_FUNCTIONS[name](_numeric(a, point)))
        case _:
            raise _Undecided


def _same_rational(left: Fraction, right: Fraction, left_decimal: bool, right_decimal: bool) -> bool:
    if left == right:
        return True
    # A decimal may be cut short only where the other value has no last digit: 0.333333 is 1/3, but 0.49 is not 1/2.
    for decimal, other in ((left_decimal, right), (right_decimal, left)):
        if decimal and not _terminates(other):
            return abs(left - right) <= abs(other) * Fraction(DECIMAL_TOLERANCE)
    return False


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def has_decimal(tree: Expression) -> bool:
    """Whether a number in the tree is written as a decimal."""
    if tree[0] == "num":
        return bool(tree[2])
    return any(has_decimal(part) for part in tree[1:] if isinstance(part, tuple))


def _nonzero(value: Fraction) -> Fraction:
    if value == 0:
        raise _Undecided
    return value
