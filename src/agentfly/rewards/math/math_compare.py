"""Whether two answers, without prose around them, are the same value.

Numbers, fractions, LaTeX, tuples, intervals, sets, lists and expressions with variables are compared by value; the rest as
text. Every step is linear in the text, which has at most `MAX_LENGTH` characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from .math_form import is_answer_form
from .math_parse import MAX_LENGTH, Expression, read_math
from .math_value import exact_value, is_rational, same_value, scaled
from .math_words import CENT, plain_numbers, read_words, spelled_number, split_words

MAX_SET = 40  # unordered lists are compared pair by pair
MAX_NESTING = 4

_BRACE = re.compile(r"\\(?:boxed|fbox)\s?\{|\\[{}]|[{}]")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|textit|mathbf|mbox|textrm|operatorname)\s?\{([^{}]*)\}")
_DIGIT_SPACE = re.compile(r"(?<=\d)\\[,!](?=\d{3}(?!\d))")
_NOTHING = re.compile(
    r"\\(?:left|right|displaystyle)\b|\\[()\[\]]"
    r"|(?:\b(?:US|CA|AU|NZ|HK))?\\?[$€£¥₹]|^(?:USD|EUR|GBP|INR|Rs\.?)\s?(?=[-\d.])"
)
_SPACE = re.compile(r"\\[,;: ]|\\q?quad\b|~")
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?|°|\\degree\b")
_NAME = re.compile(r"\s*(?:[A-Za-z](?:_\w|_\{\w{1,9}\})?(?:\s?\(\w\))?|\\[a-z]{2,10})\s*")
_LABEL = re.compile(r"[A-Za-z ]+")
_ABOUT = re.compile(
    r"(?:(?:about|approximately|approx\.?|around|roughly|circa|exactly|precisely|(?:a )?total of)\s+"
    r"|\\(?:approx|sim)\b\s?|(?:[=-]>|[~≈=→⇒])\s?)+",
    re.I,
)
_NEGATIVE = re.compile(r"(?:minus|negative)\s+(?=[\d.$\\a-z])", re.I)
_MIXED = re.compile(r"(\d)\s?([½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])")
_OFFERS = re.compile(r",?\s+(?:and/or|or|and)\s+")
_DECIMAL_COMMA = re.compile(r"(?<![\d.,])(\d{1,15}),(\d{1,2}|\d{4,15})(?![\d,])")
_COMPOUND = re.compile(r"(?P<large>[^,]{1,60}?[A-Za-z])(?:,|\s+and)?\s+(?P<small>\d[^,]{0,60})")
_VULGAR = {
    "½": "1/2", "¼": "1/4", "¾": "3/4", "⅓": "1/3", "⅔": "2/3", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5", "⅙": "1/6",
    "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
_SYMBOLS = {
    "−": "-", "–": "-", "‒": "-", "‐": "-", "‑": "-", "－": "-", "×": "*", "÷": "/", "·": "*", "⋅": "*", "∕": "/", "⁄": "/",
    "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "％": "%", "，": ",",
    "．": ".", "：": ":", "（": "(", "）": ")", "＄": "$", "’": "'", "\u200b": "", "\ufeff": "",  "\u2060": "",
    **{symbol: f"({value})" for symbol, value in _VULGAR.items()},
    **{symbol: f"^{digit}" for digit, symbol in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
}  # fmt: skip
_REPLACED = str.maketrans(_SYMBOLS)
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}"}
_HUNDREDTH = Fraction(1, 100)


@dataclass(frozen=True, slots=True)
class _Reading:
    """One way to read a text as a value. `written` is it without words of scale. A known unit is its dimension and size."""

    tree: Expression
    written: Expression
    percent: bool = False
    unit: tuple[str, Fraction] | None = None


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} that is closed, nested braces included."""
    spans = boxed_spans(text)
    if not spans:
        return None
    _, start, end, _ = spans[-1]
    return text[start:end] if end - start <= MAX_LENGTH else ""


def boxed_spans(text: str) -> list[tuple[int, int, int, int]]:
    """Every closed \\boxed{...} in the order of closing: its start, the start and end of its content, its end."""
    open_braces: list[tuple[int, int, bool]] = []
    spans: list[tuple[int, int, int, int]] = []
    if "box" not in text:
        return spans
    for brace in _BRACE.finditer(text):
        token = brace.group()
        if token == "}":
            if open_braces:
                start, inner, boxed = open_braces.pop()
                if boxed:
                    spans.append((start, inner, brace.start(), brace.end()))
        elif not token.startswith(("\\{", "\\}")):
            open_braces.append((brace.start(), brace.end(), len(token) > 1))
    return spans


def same_answer(found: str, reference: str, formed: bool = False) -> bool:
    """Whether two answers, without prose around them, are the same. With `formed`, `found` must have the form of an answer."""
    if max(len(found), len(reference)) > MAX_LENGTH:
        return found.strip() == reference.strip()
    return _same(_clean(found), _clean(reference), 0, formed)


def expression_of(text: str) -> Expression | None:
    """The expression that a text without prose is, or None."""
    return read_math(plain_numbers(_right_sides(_clean(text), "")[0])) if len(text) <= MAX_LENGTH else None


def is_answer(text: str) -> bool:
    """Whether a text is a value by itself, not a sentence around one."""
    if len(text) > MAX_LENGTH:
        return False
    value = _right_sides(_clean(text), "")[0].removeprefix(r"\pm")
    if _sequence(value)[0]:
        return True
    pieces = [part for piece in _split(plain_numbers(value), r"\cup") for part in _split(piece, ",")]
    return all(_sequence(part)[0] or _readings(_right_sides(part, "")[0]) for part in pieces)


def plain_signs(text: str) -> str:
    """The text with one sign for each of the many that Unicode has for minus, times, spaces and fractions."""
    text = _MIXED.sub(lambda found: f"{found.group(1)} {_VULGAR[found.group(2)]}", text).translate(_REPLACED)
    text = _SPACE.sub(" ", _DIGIT_SPACE.sub("", text.replace(r"\!", "").replace("{,}", ",")))
    return text.replace("‰", " thousandths").replace("per mille", "thousandths")


def _clean(text: str) -> str:
    """Notation that does not change the value, taken away."""
    text = plain_signs(text)
    while (inner := last_boxed(text)) is not None and len(inner) < len(text):
        text = inner
    text = _TEXT.sub(r" \1 ", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")).replace("\\%", "%")
    text = _DEGREES.sub("", _NOTHING.sub("", text))
    text = re.sub(r"√\s?(\d+)", r"\\sqrt{\1}", text).replace("√", r"\sqrt")
    text = text.strip(" \t\n`*_\"'").rstrip(".,;:?").strip(" \t\n`*_\"'")
    about = _ABOUT.match(text)
    text = text[about.end() :] if about else text
    negative = _NEGATIVE.match(text)
    return f"-{spelled_number(text[negative.end() :])}" if negative else spelled_number(text)


def _same(found: str, reference: str, nesting: int, formed: bool) -> bool:
    if _as_text(found) == _as_text(reference):
        return bool(reference)
    if nesting > MAX_NESTING or not found or not reference:
        return False
    found, reference = _right_sides(found, reference)
    offered, wanted = _offers(found), _offers(reference)
    if len(offered) > 1 or len(wanted) > 1:
        if len(wanted) == 1 and "," not in reference:  # "1/2 or 0.5" is one value, "18 or 19" is not
            return all(_same(one, reference, nesting + 1, formed) for one in offered)
        return _same(", ".join(offered), ", ".join(wanted), nesting + 1, formed)
    left_kind, left_parts = _sequence(found)
    right_kind, right_parts = _sequence(reference)
    if left_kind or right_kind:
        return left_kind == right_kind and _same_parts(left_parts, right_parts, left_kind != r"\{", nesting, formed)
    found, reference = plain_numbers(found), plain_numbers(reference)
    if "," in found and "," not in reference:
        found = _DECIMAL_COMMA.sub(r"\1.\2", found)
    for mark, ordered in ((r"\cup", False), (",", False), ("=", True)):
        left, right = _split(found, mark), _split(reference, mark)
        if len(left) > 1 or len(right) > 1:
            return _same_parts(left, right, ordered, nesting, formed)
    return any(_same_readings(a, b, formed) for a in _readings(found) for b in _readings(reference))


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
        if all(_LABEL.fullmatch(side) or any(is_rational(one.tree) for one in _readings(side.strip())) for side in working):
            sides[0] = value.strip()
    return sides[0], sides[1]


def _offers(text: str) -> list[str]:
    """The values that a text names with "or", "and" or plus-minus; the text itself where it is one value."""
    if text.startswith(r"\pm"):
        value = text.removeprefix(r"\pm").strip()
        return [value, f"-({value})"]
    if not _OFFERS.search(text) or _readings(text):
        return [text]
    return [part.strip() for part in _OFFERS.split(text, maxsplit=MAX_SET)]


def _same_parts(left: list[str], right: list[str], ordered: bool, nesting: int, formed: bool) -> bool:
    if len(left) != len(right):
        return False
    if ordered:
        return all(_same(a, b, nesting + 1, formed) for a, b in zip(left, right, strict=True))
    if len(left) > MAX_SET:
        return sorted(left) == sorted(right)
    rest = list(right)
    for a in left:
        match = next((i for i, b in enumerate(rest) if _same(a, b, nesting + 1, formed)), None)
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
            parts = _split(inner, ",") if _is_balanced(inner) else []
            if len(parts) > 1 or (parts and opening in ("[", r"\{")):
                return (r"\{" if "{" in opening else opening + ending), parts
    return "", []


def _is_balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str, mark: str) -> list[str]:
    """Split at a mark outside all brackets."""
    if mark not in text:
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


def _same_readings(found: _Reading, reference: _Reading, formed: bool) -> bool:
    a, b = found.tree, reference.tree
    if formed and not is_answer_form(found.written, reference.written):
        return False
    if found.unit and reference.unit:
        if found.unit[0] != reference.unit[0]:
            return False
        if found.unit != reference.unit:
            a, b = scaled(a, found.unit[1]), scaled(b, reference.unit[1])
    elif found.unit == CENT:  # a number without a unit is an amount of dollars
        a = scaled(a, CENT[1])
    elif reference.unit == CENT and same_value(a, scaled(b, CENT[1])):
        return True
    if same_value(a, b):
        return True
    if reference.percent and not found.percent:
        return bool(same_value(a, scaled(b, _HUNDREDTH)))
    # 50% is 50, and it is the share 0.5; 1800% is not the count 18.
    return found.percent and not reference.percent and _is_share(b) and bool(same_value(scaled(a, _HUNDREDTH), b))


def _is_share(tree: Expression) -> bool:
    return not is_rational(tree) or abs(exact_value(tree)) < 1


def _readings(text: str) -> list[_Reading]:
    """The text as mathematics, and as a number with words after it."""
    text = plain_numbers(text)
    tree = read_math(text)
    readings = [] if tree is None else [_Reading(tree, tree)]
    if len(text) <= 200:
        amount = _amount(text)
        readings += [amount] if amount else _compound(text)
    return readings


def _amount(text: str) -> _Reading | None:
    parts = split_words(text)
    words = read_words(parts[1]) if parts else None
    tree = read_math(parts[0].strip()) if parts and words else None
    if parts is None or tree is None or words is None:
        return None
    if not (is_rational(tree) or words.unit or words.percent or re.match(r"[A-Za-z]{4}", parts[1])):
        return None  # "x ab" is a product, not x of a unit
    written = tree
    if words.power != 1:
        tree = written = ("pow", tree, ("num", Fraction(words.power), False))
    if words.factor != 1:
        tree = scaled(tree, words.factor)
    return _Reading(tree, written, words.percent, words.unit)


def _compound(text: str) -> list[_Reading]:
    """ "5 dollars and 50 cents", "6 feet 2 inches": a value in the first unit."""
    match = _COMPOUND.fullmatch(text)
    large, small = (_amount(match["large"]), _amount(match["small"])) if match else (None, None)
    if not large or not small or not large.unit or not small.unit:
        return []
    if large.unit[0] != small.unit[0] or large.unit[1] <= small.unit[1]:
        return []
    return [replace(large, tree=("add", large.tree, scaled(small.tree, small.unit[1] / large.unit[1])))]


def _as_text(text: str) -> str:
    return re.sub(r"\s+", "", text).casefold()
