"""The arithmetic tools: `add`, `subtract`, `multiply` and `divide` on two numbers, and `calculator` on an expression.

Results of integers stay integers where possible; floats are rounded to 12 significant digits. An expression is parsed, never
executed as Python: it may hold numbers, operators, and the functions and constants listed below. Its length, its depth and the
size of results (3,000 digits) are limited, so every input takes little time.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from ..errors import ToolError
from .definition import tool

RealNumber = int | float
_MAX_BITS = 10_000
_MAX_LENGTH = 1_000
_MAX_DEPTH = 100


def _tidy(value: object) -> RealNumber:
    """The result, rounded to 12 digits if it is a float. Raises ToolError if it is not finite, not real or too large."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ToolError("the result is too large")
        return float(f"{value:.12g}")
    if not isinstance(value, int):
        raise ToolError("the result is not a real number")
    if value.bit_length() > _MAX_BITS:
        raise ToolError("the result is too large")
    return value


def _divide(a: RealNumber, b: RealNumber) -> RealNumber:
    if b == 0:
        raise ToolError("division by zero")
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return a / b


def _round(a: RealNumber, digits: RealNumber = 0) -> RealNumber:
    if not isinstance(digits, int) or abs(digits) > 100:
        raise ToolError("the number of digits must be a whole number, at most 100")
    return round(a, digits) if digits else round(a)


def _power(a: RealNumber, b: RealNumber) -> Any:
    if isinstance(a, int) and isinstance(b, int) and abs(a) > 1 and abs(b) * a.bit_length() > _MAX_BITS:
        raise ToolError("the result is too large")
    return a**b


def _apply(fn: Callable[..., Any], *numbers: RealNumber) -> RealNumber:
    """Applies one operation. Errors of Python become a ToolError."""
    try:
        return _tidy(fn(*numbers))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except (ValueError, TypeError) as error:
        raise ToolError(f"this cannot be computed: {error}") from None


# Coroutines run on the event loop; a plain function would be sent to a thread, which costs more than the arithmetic.


@tool(register=False)
async def add(a: float, b: float) -> float:
    """Add two numbers."""
    return _apply(operator.add, a, b)


@tool(register=False)
async def subtract(a: float, b: float) -> float:
    """Subtract b from a."""
    return _apply(operator.sub, a, b)


@tool(register=False)
async def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return _apply(operator.mul, a, b)


@tool(register=False)
async def divide(a: float, b: float) -> float:
    """Divide a by b."""
    return _apply(_divide, a, b)


_BINARY: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[..., Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "floor": math.floor, "ceil": math.ceil, "gcd": math.gcd,
    "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "log2": math.log2, "log10": math.log10,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "asin": math.asin, "acos": math.acos, "atan": math.atan,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}
_WORD = re.compile(r"\d[\w.]*?(?:and|else|for|if|in|is|not|or)(?!\w)|\\")
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})


@tool(register=False)
async def calculator(expression: str) -> float:
    """Evaluate an arithmetic expression, such as (3 + 4) * 2 ** 3 or sqrt(2)."""
    if len(expression) > _MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {_MAX_LENGTH} are allowed")
    try:
        if _WORD.search(expression):
            raise SyntaxError  # Python reads "18or 25" with a warning on the terminal
        tree = ast.parse(expression.strip().translate(_SIGNS), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("this is not an arithmetic expression; write for example (3 + 4) * 2") from None
    return _evaluate(tree.body, 0)


def _evaluate(node: ast.expr, depth: int) -> RealNumber:
    if depth > _MAX_DEPTH:
        raise ToolError("the expression is nested too deeply")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _tidy(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _apply(_BINARY[type(node.op)], _evaluate(node.left, depth + 1), _evaluate(node.right, depth + 1))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _apply(_UNARY[type(node.op)], _evaluate(node.operand, depth + 1))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        return _apply(_FUNCTIONS[node.func.id], *(_evaluate(argument, depth + 1) for argument in node.args))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        raise ToolError("^ is not understood; write ** for a power")
    if isinstance(node, ast.Name | ast.Call):
        named = node if isinstance(node, ast.Name) else node.func
        word = named.id if isinstance(named, ast.Name) else "this call"
        raise ToolError(f"{word[:50]} is not known; known: {', '.join((*_CONSTANTS, *_FUNCTIONS))}")
    raise ToolError("only numbers, + - * / // % **, parentheses and functions such as sqrt are understood")
