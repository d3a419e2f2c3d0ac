"""Parses short mathematical text, LaTeX or plain, to a tree of tuples that `math_value` evaluates.

Examples are "3 1/2", "1,234.50", "\\frac{\\sqrt{3}}{2}" and "2x^2(y+1)". Nothing is computed here, so "10^{10^{10}}" is a tree
of five nodes.

    ("num", Fraction, written_as_decimal)   ("var", name)   ("neg", a)   ("fn", name, a)
    ("add" | "sub" | "mul" | "div" | "pow", a, b)
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

Expression = tuple[Any, ...]

MAX_LENGTH = 2000
MAX_DEPTH = 50  # of brackets in the text
MAX_TREE_DEPTH = 150
MAX_POWER_OF_TEN = 400

_FUNCTIONS = ("arcsin", "arccos", "arctan", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "abs")
_GREEK = (
    "pi", "alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "phi", "omega", "rho", "sigma", "infty", "varphi",
    "epsilon",
)  # fmt: skip
_ENGLISH = frozenset((  # never a product of variables
    "or", "and", "to", "not", "no", "the", "is", "are", "was", "of", "per", "for", "but", "out", "we", "get", "got", "so", "he",
    "she",
    "it", "its", "has", "had", "did", "can", "you", "her", "his", "all", "any", "now", "via", "let", "if", "in", "on", "my",
    "our",
    "who", "how", "why", "yes", "too", "do", "go",
))  # fmt: skip
_TOKEN = re.compile(
    r"\s+"
    r"|(?P<num>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)"
    r"|(?P<cmd>\\[A-Za-z]+)"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<op>\*\*|[-+*/^(){}\[\]!_|])"
)
_BRACKETS = {"(": ")", "{": "}", "|": "|"}
_OPERATORS = {"cdot": "*", "times": "*", "div": "/", "ast": "*"}


class _Unreadable(Exception):
    """The text is not an expression this file knows. Never leaves it."""


def read_math(text: str) -> Expression | None:
    """The tree of an expression, or None if the text is too long, too deep or not mathematics."""
    if not text or len(text) > MAX_LENGTH:
        return None
    try:
        reader = _Reader(_tokens(text))
        tree = reader.sum(0)
    except _Unreadable:
        return None
    return tree if reader.kind() == "end" and _is_shallow(tree) else None


def _is_shallow(tree: Expression) -> bool:
    """Whether recursion over the tree is safe: a sum of a thousand terms is a thousand levels deep."""
    level = [tree]
    for _ in range(MAX_TREE_DEPTH):
        level = [part for node in level for part in node[1:] if isinstance(part, tuple)]
        if not level:
            return True
    return False


def _tokens(text: str) -> list[tuple[str, str, bool]]:
    """(kind, text, stood after white space)."""
    tokens: list[tuple[str, str, bool]] = []
    position, spaced = 0, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _Unreadable
        position = match.end()
        kind, value = match.lastgroup, match.group()
        if kind is None:
            spaced = True
            continue
        if kind == "cmd":
            name = value[1:]
            if name in _OPERATORS:
                kind, value = "op", _OPERATORS[name]
            elif name in ("frac", "sqrt") or name in _FUNCTIONS:
                kind, value = "fn", name
            elif name in _GREEK:
                kind, value = "var", name
            else:
                raise _Unreadable
            tokens.append((kind, value, spaced))
        elif kind == "word":
            _add_word(tokens, value, spaced)
        else:
            tokens.append((kind, "^" if value == "**" else value, spaced))
        spaced = False
    return tokens


def _add_word(tokens: list[tuple[str, str, bool]], word: str, spaced: bool) -> None:
    if word in _FUNCTIONS:
        tokens.append(("fn", word, spaced))
    elif word == "pi":
        tokens.append(("var", word, spaced))
    elif len(word) <= 3 and word.lower() not in _ENGLISH:
        # xy is x times y; a longer run of letters is a word, and a word is not mathematics
        tokens.extend(("var", letter, spaced and i == 0) for i, letter in enumerate(word))
    else:
        raise _Unreadable


class _Reader:
    """Recursive descent: sum > product > power > atom. `depth` bounds the recursion, the tokens bound the rest."""

    def __init__(self, tokens: list[tuple[str, str, bool]]) -> None:
        self.tokens = [*tokens, ("end", "", False)]
        self.at = 0

    def kind(self) -> str:
        kind, value, _ = self.tokens[self.at]
        return value if kind == "op" else kind

    def take(self, kind: str | None = None) -> str:
        if self.kind() == "end" or (kind is not None and self.kind() != kind):
            raise _Unreadable
        self.at += 1
        return self.tokens[self.at - 1][1]

    def sum(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise _Unreadable
        tree = self.product(depth)
        while self.kind() in ("+", "-"):
            operator = "add" if self.take() == "+" else "sub"
            tree = (operator, tree, self.product(depth))
        return tree

    def product(self, depth: int) -> Expression:
        tree = self.signed(depth)
        while True:
            kind = self.kind()
            if kind in ("*", "/"):
                self.take()
                tree = ("mul" if kind == "*" else "div", tree, self.signed(depth))
            elif kind in ("num", "var", "fn", "(", "{"):
                tree = self.juxtaposed(tree, depth)
            else:
                return tree

    def juxtaposed(self, tree: Expression, depth: int) -> Expression:
        """Things side by side: a product, or "3 1/2" and 3\\frac{1}{2}, which are sums."""
        whole = tree[0] == "num" and not tree[2] and tree[1].denominator == 1
        spaced = self.tokens[self.at][2]
        if self.kind() == "num":
            after = [self.tokens[i][:2] for i in (self.at + 1, self.at + 2) if i < len(self.tokens)]
            if not (whole and spaced and len(after) == 2 and after[0] == ("op", "/") and after[1][0] == "num"):
                raise _Unreadable  # "12 7" is two numbers, not a product
            top = self.signed(depth)
            self.take("/")
            return ("add", tree, ("div", top, self.signed(depth)))
        mixed = whole and self.tokens[self.at][:2] == ("fn", "frac")
        right = self.power(depth)
        if mixed and right[0] == "div" and all(part[0] == "num" for part in right[1:]):
            return ("add", tree, right)
        return ("mul", tree, right)

    def signed(self, depth: int) -> Expression:
        negative = False
        while self.kind() in ("+", "-"):  # a loop, so that a line of a thousand minus signs is no recursion
            negative ^= self.take() == "-"
        tree = self.power(depth)
        return ("neg", tree) if negative else tree

    def power(self, depth: int) -> Expression:
        tree = self.atom(depth + 1)
        while self.kind() == "!":
            self.take()
            tree = ("fn", "factorial", tree)
        if self.kind() == "^":
            self.take()
            negative = self.kind() == "-"
            if negative:
                self.take()
            exponent = self.power(depth + 1)
            tree = ("pow", tree, ("neg", exponent) if negative else exponent)
        return tree

    def atom(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise _Unreadable
        kind = self.kind()
        if kind == "num":
            return _number(self.take())
        if kind == "var":
            name = self.take()
            if self.kind() == "_":
                self.take()
                name += "_" + (self.group(depth) if self.kind() == "{" else self.take())
            return ("var", name)
        if kind in _BRACKETS:
            self.take()
            tree = self.sum(depth + 1)
            self.take(_BRACKETS[kind])
            return ("fn", "abs", tree) if kind == "|" else tree
        if kind == "fn":
            return self.function(self.take(), depth)
        raise _Unreadable

    def function(self, name: str, depth: int) -> Expression:
        if name == "frac":
            top = self.argument(depth)
            return ("div", top, self.argument(depth))
        if name == "sqrt":
            if self.kind() == "[":
                self.take()
                root = self.sum(depth + 1)
                self.take("]")
                return ("pow", self.argument(depth), ("div", ("num", Fraction(1), False), root))
            return ("fn", "sqrt", self.argument(depth))
        if name == "log" and self.kind() == "_":
            self.take()
            base = self.argument(depth)
            return ("div", ("fn", "ln", self.power(depth + 1)), ("fn", "ln", base))
        if self.kind() == "^":  # \sin^2 x
            self.take()
            exponent = self.argument(depth)
            return ("pow", ("fn", name, self.power(depth + 1)), exponent)
        return ("fn", name, self.power(depth + 1))

    def argument(self, depth: int) -> Expression:
        """A braced argument, or what TeX takes without braces: one digit or letter, as in \\frac12."""
        if self.kind() == "num":
            _, digits, spaced = self.tokens[self.at]
            if len(digits) > 1 and digits.isdigit():
                self.tokens[self.at] = ("num", digits[1:], spaced)
                return _number(digits[0])
        return self.atom(depth + 1)

    def group(self, depth: int) -> str:
        """The plain text of a braced subscript."""
        self.take("{")
        parts = []
        while self.kind() not in ("}", "end"):
            parts.append(self.take())
        self.take("}")
        return "".join(parts)


def _number(text: str) -> Expression:
    """Exact, whatever its size; a power of ten that would not fit stays a power."""
    digits, _, power = text.replace(",", "").lower().partition("e")
    exact = Fraction(digits)
    decimal = "." in digits or bool(power)
    if not power:
        return ("num", exact, decimal)
    if len(power) > 12:
        raise _Unreadable
    exponent = int(power)
    if abs(exponent) <= MAX_POWER_OF_TEN:
        return ("num", exact * Fraction(10) ** exponent, decimal)
    return ("mul", ("num", exact, decimal), ("pow", ("num", Fraction(10), False), ("num", Fraction(exponent), False)))
