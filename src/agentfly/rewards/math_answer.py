"""Math equality: is the answer in the prediction the same value as the reference?

Comes in: a prediction, prose and all, and the field `answer` (one or several). Goes out: 1 or 0. Numbers (1,234.5; 50%; 3
1/2; 2.5e3), fractions, LaTeX (\\boxed, \\frac, \\sqrt, powers, \\text, degrees), tuples, intervals, sets and
expressions with variables are compared by value; the rest as text. The answer is taken from the last \\boxed{}, else
after the last "####" or "answer is", else the whole, else its last number.

Only the last 20,000 characters of a prediction are read, in linear time, and no power is ever multiplied out beyond a
bound. Units are not compared ("5 cm" is 5); 50% is 50 and 0.5, because data sets write both. Equations other than "x = ..."
are compared side by side, not solved.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from typing import Any

from .answers import alternatives
from .function import FunctionReward
from .math_parse import MAX_LENGTH, Expression, read_math
from .math_value import is_rational, same_value, scaled

MAX_PREDICTION = 20_000
MAX_SET = 40  # unordered lists are compared pair by pair
MAX_NESTING = 4

_BRACE = re.compile(r"\\(?:boxed|fbox)\s?\{|\\[{}]|[{}]")
_CUE = re.compile(r"####|\banswer\s{0,3}(?:is|:|=)", re.I)
_DOLLARS = re.compile(r"\$([^$]{1,200})\$|\\\(([^\\$]{1,200})\\\)")
_NUMBER = re.compile(r"(?:(?<![\w)\]}.])[-−])?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?(?:\s?/\s?\d+)?\s?\\?%?")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|textit|mathbf|mbox|operatorname)\s?\{([^{}]*)\}")
_TEXT_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s?\{[^{}]*\}\s?(?:\^\s?\{?\d\}?)?")
_SPACING = re.compile(r"\\[!,;: ]|\\q?quad\b|\\(?:left|right|displaystyle)\b|[$€£]|\\\$|\\[()]|~")
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?|°|\\degree\b")
_NAME = re.compile(r"\s*(?:[A-Za-z](?:_\w|_\{\w{1,9}\})?(?:\s?\(\w\))?|\\[a-z]{2,10})\s*")
_WORDS = re.compile(r"[A-Za-z ]+")
_UNIT = re.compile(
    r"(?P<value>.*\d\s?\)?)"
    r"(?:\s+(?P<words>[A-Za-z]{2,}[A-Za-z /.^\d]*)"
    r"|\s?(?:cm|mm|km|kg|mg|ml|ft|lbs?|oz|hrs?|min|mph|sec|m|s|h)(?:\s?(?:\^|\*\*)\s?\{?\d\}?)?)"
)
_THOUSANDS = re.compile(r"[-+]?\s?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SYMBOLS = {
    "−": "-", "–": "-", "×": "*", "÷": "/", "·": "*", "π": r"\pi ", "∞": r"\infty ", "²": "^2", "³": "^3", "½": "(1/2)",
    "¼": "(1/4)", "¾": "(3/4)", "∪": r"\cup ", "∈": r"\in ", "≈": "=", "\u00a0": " ", "\u202f": " ",
}  # fmt: skip
_REPLACED = str.maketrans(_SYMBOLS)
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}"}


@FunctionReward
def math_equal(prediction: str, answer: Any) -> float:
    """1 if the answer in the prediction and the field `answer` are the same mathematical value."""
    answers = alternatives(answer)
    if prediction.strip() and prediction.strip() in answers:
        return 1.0
    found = extract_answer(prediction)
    return float(any(same_answer(found, _reference(one)) for one in answers))


def extract_answer(prediction: str) -> str:
    """The part of a prediction that is its answer. Only the end is read: an answer comes last, and a ramble must not cost
    more."""
    prediction = prediction[-MAX_PREDICTION:]
    boxed = last_boxed(prediction)
    if boxed is not None:
        return boxed
    cue = _last(_CUE, prediction)
    if cue is not None:
        rest = prediction[cue.end() :].lstrip(" \t\n:=*").partition("\n")[0].strip(" *")
        if rest:
            number = _NUMBER.search(rest)
            return rest if number is None or _is_math(rest) else number.group()
    whole = prediction.strip()
    if "\n" not in whole and _is_math(whole):
        return whole
    formula = None
    for found in _DOLLARS.finditer(whole):
        text = found.group(1) or found.group(2)
        formula = text if _is_math(text) else formula
    if formula is not None:
        return formula
    number = _last(_NUMBER, whole)
    return number.group() if number is not None else whole


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} that is closed, nested braces included."""
    open_braces: list[tuple[bool, int]] = []
    last: str | None = None
    for found in _BRACE.finditer(text):
        token = found.group()
        if token == "}":
            if open_braces:
                boxed, start = open_braces.pop()
                if boxed:
                    last = text[start : found.start()] if found.start() - start <= MAX_LENGTH else ""
        elif not token.startswith(("\\{", "\\}")):
            open_braces.append((len(token) > 1, found.end()))
    return last


def _reference(answer: str) -> str:
    boxed = last_boxed(answer)
    return boxed if boxed is not None else answer.rpartition("####")[2]


def same_answer(found: str, reference: str) -> bool:
    """Whether two answers, without prose around them, are the same."""
    if max(len(found), len(reference)) > MAX_LENGTH:
        return found.strip() == reference.strip()
    return _same(_clean(found), _clean(reference), 0)


def _clean(text: str) -> str:
    """Notation that does not change the value, taken away."""
    text = text.translate(_REPLACED).replace("{,}", ",")
    while (inner := last_boxed(text)) is not None and len(inner) < len(text):
        text = inner
    text = _DEGREES.sub("", _SPACING.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")))
    text = re.sub(r"√\s?(\d+)", r"\\sqrt{\1}", text).replace("√", r"\sqrt")
    unwrapped = _TEXT.fullmatch(text.strip())
    text = unwrapped.group(1) if unwrapped else _TEXT_UNIT.sub("", text)
    return text.strip().rstrip(".,;:").strip()


def _same(found: str, reference: str, nesting: int) -> bool:
    if _as_text(found) == _as_text(reference):
        return bool(reference)
    if nesting > MAX_NESTING:
        return False
    found, reference = _right_sides(found, reference)
    for mark, ordered in (("=", True), (r"\cup", False), (",", False)):
        left, right = _split(found, mark), _split(reference, mark)
        if len(left) > 1 or len(right) > 1:
            return _same_parts(left, right, ordered, nesting)
    left_kind, left_parts = _sequence(found)
    right_kind, right_parts = _sequence(reference)
    if left_kind or right_kind:
        return left_kind == right_kind and _same_parts(left_parts, right_parts, left_kind != r"\{", nesting)
    return any(_same_trees(a, b) for a in _trees(found) for b in _trees(reference))


def _right_sides(found: str, reference: str) -> tuple[str, str]:
    """ "x = 5" and "x \\in [1, 2]" say no more than their right sides; a working-out before "=" counts only where the
    reference has none."""
    sides = []
    for text in (found, reference):
        for mark in (r"\in ", "="):
            name, _, value = text.partition(mark)
            if value and mark not in value and _NAME.fullmatch(name):
                text = value.strip()
        sides.append(text)
    if "=" in sides[0] and "=" not in sides[1]:
        *working, value = sides[0].split("=")
        if all(_WORDS.fullmatch(side) or any(is_rational(tree) for tree, _ in _trees(side.strip())) for side in working):
            sides[0] = value.strip()
    return sides[0], sides[1]


def _same_parts(left: list[str], right: list[str], ordered: bool, nesting: int) -> bool:
    if len(left) != len(right):
        return False
    if ordered:
        return all(_same(a, b, nesting + 1) for a, b in zip(left, right, strict=True))
    if len(left) > MAX_SET:
        return sorted(left) == sorted(right)
    rest = list(right)
    for a in left:
        match = next((i for i, b in enumerate(rest) if _same(a, b, nesting + 1)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _sequence(text: str) -> tuple[str, list[str]]:
    """The bracket of a tuple, interval, list or set, with the kind of its end, and its parts; no bracket where it is not
    one."""
    for opening in _CLOSING:
        if text.startswith(opening):
            ending = next((end for end in _CLOSING.values() if text.endswith(end)), "")
            inner = text[len(opening) : len(text) - len(ending)] if ending else ""
            parts = _split(inner, ",", thousands=False) if _is_balanced(inner) else []
            if len(parts) > 1 or (parts and opening != "("):
                return (r"\{" if "{" in opening else opening + ending), parts
    return "", []


def _is_balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str, mark: str, thousands: bool = True) -> list[str]:
    """Split at a mark outside all brackets; the comma of 1,234 is not one."""
    if mark not in text or (thousands and mark == "," and _THOUSANDS.fullmatch(text)):
        return [text]
    parts, start, depth, position = [], 0, 0, 0
    while position < len(text):
        letter = text[position]
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and text.startswith(mark, position):
            parts.append(text[start:position].strip())
            position += len(mark)
            start = position
        else:
            position += 1
    return [*parts, text[start:].strip()]


def _same_trees(left: tuple[Expression, bool], right: tuple[Expression, bool]) -> bool:
    (a, a_percent), (b, b_percent) = left, right
    if same_value(a, b):
        return True
    if a_percent == b_percent:
        return False
    hundredth = Fraction(1, 100)
    return bool(same_value(scaled(a, hundredth), b) if a_percent else same_value(a, scaled(b, hundredth)))


def _trees(text: str) -> list[tuple[Expression, bool]]:
    """The text as mathematics, and again without its unit where it has one; with each whether it is a percentage."""
    percent = text.endswith("%")
    if percent:
        text = text.rstrip("%").rstrip("\\").strip()
    tree = read_math(text)
    found = [] if tree is None else [(tree, percent)]
    unit = _UNIT.fullmatch(text) if len(text) <= 200 else None
    if unit:
        bare = read_math(unit.group("value").strip())
        if bare is not None and is_rational(bare):
            found.append((bare, percent or (unit.group("words") or "").startswith("percent")))
    return found


def _is_math(text: str) -> bool:
    """Whether a text is an answer by itself, not a sentence around one."""
    if len(text) > MAX_LENGTH:
        return False
    text = _clean(text)
    value = _right_sides(text, "")[0]
    return all(_trees(part) or _sequence(part)[0] for piece in _split(value, r"\cup") for part in _split(piece, ","))


def _as_text(text: str) -> str:
    return re.sub(r"\s+", "", text).casefold()
