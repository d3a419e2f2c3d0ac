"""Words and signs around a number: "70 thousand dollars", "5 percent", "18 cents", "18 squared", "two dozen", "1.234,50 €".

`read_words` reads the words after a number. A word that may change the value and is in no table makes the text unreadable.
`plain_numbers` rewrites grouped digits (70 000, 70'000, 7,00,000, 1.234,50), ordinals, mixed numbers and spelled numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_WORDS = 12

SCALES: dict[str, Fraction] = {
    **{name: Fraction(value) for name, value in (
        ("dozen", 12), ("hundred", 100), ("thousand", 10**3), ("k", 10**3), ("lakh", 10**5), ("million", 10**6), ("mn", 10**6),
        ("crore", 10**7), ("billion", 10**9), ("bn", 10**9), ("trillion", 10**12), ("quadrillion", 10**15),
    )},
    "half": Fraction(1, 2), "halves": Fraction(1, 2),
    **{name: Fraction(1, value) for name, value in (
        ("thirds", 3), ("fourths", 4), ("fifths", 5), ("sixths", 6), ("sevenths", 7), ("eighths", 8), ("ninths", 9),
        ("tenths", 10), ("hundredths", 100), ("thousandths", 1000), ("millionths", 10**6),
    )},
}  # fmt: skip
SCALES |= {f"{name}s": factor for name, factor in SCALES.items() if factor > 1 and len(name) > 2}
LETTERS = {"M": 10**6, "B": 10**9, "K": 10**3}  # upper case only: m is a metre
POWERS = {"squared": 2, "cubed": 3}
PERCENT = frozenset(("%", "percent", "percents", "pct"))

# Units of one dimension are converted into each other. All other units are not compared.
_DIMENSIONS: dict[str, dict[str, Fraction]] = {
    "money": {"cent cents ¢": Fraction(1, 100), "dollar dollars usd buck bucks": Fraction(1)},
    "length": {
        "mm millimeter millimeters millimetre millimetres": Fraction(1, 1000),
        "cm centimeter centimeters centimetre centimetres": Fraction(1, 100),
        "meter meters metre metres": Fraction(1), "km kilometer kilometers kilometre kilometres": Fraction(1000),
        "inch inches": Fraction(254, 10000), "foot feet ft": Fraction(3048, 10000), "yard yards yd": Fraction(9144, 10000),
        "mile miles": Fraction(1609344, 1000),
    },
    "time": {
        "second seconds sec secs": Fraction(1), "minute minutes min mins": Fraction(60), "hour hours hr hrs": Fraction(3600),
        "day days": Fraction(86400), "week weeks": Fraction(604800),
    },
    "mass": {
        "mg milligram milligrams": Fraction(1, 1000), "gram grams": Fraction(1), "kg kilogram kilograms": Fraction(1000),
        "ounce ounces oz": Fraction(45359237, 1600000), "pound pounds lb lbs": Fraction(45359237, 100000),
    },
    "volume": {"ml milliliter milliliters millilitre millilitres": Fraction(1, 1000), "liter liters litre litres": Fraction(1)},
}  # fmt: skip
UNITS: dict[str, tuple[str, Fraction]] = {
    name: (dimension, size)
    for dimension, units in _DIMENSIONS.items()
    for names, size in units.items()
    for name in names.split()
}
CENT = ("money", Fraction(1, 100))

_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SPELLED = {name: value for value, name in enumerate(_SMALL)} | {name: 10 * value for value, name in enumerate(_TENS, 2)}
_LARGE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# A phrase with one of these is no unit: it offers a second value, denies the first, or computes with it.
_NO_UNIT = frozenset((
    "or", "nor", "not", "no", "to", "than", "but", "minus", "plus", "divided", "multiplied", "is", "are", "was", "isn't",
    "aren't",
    "wasn't", "be", "equals", "wrong", "incorrect", "false", "maybe", "perhaps", "possibly", "either", "neither", "between",
    "point",
    "factorial", "halved", "doubled", "tripled", "mod", "modulo", "choose", "vs", "versus", "sin", "cos", "tan", "log", "ln",
    "exp",
    "sqrt", "mille", "pi", "max", "abs", "third", "quarter", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
    *_SPELLED, *SCALES,
))  # fmt: skip

_START = re.compile(  # where the words after a value begin
    r"(?<![\\A-Za-z_^{])(?:[A-Za-z]{2,}|[mshgLl](?![A-Za-z])(?=\s?(?:[/^²³.)]|$))|[kKMB](?![A-Za-z(^_])|an?(?=\s+[A-Za-z]{2}))|\\?%|¢"
)
_EXPONENT = re.compile(r"(?<=[A-Za-z])(?:\s?(?:\^|\*\*)\s?\{?-?[1-4]\}?|[1-4](?![\d.]))")
_PHRASE = re.compile(r"[A-Za-z¢%\s/.\-'’(),&\\°*{}]{1,200}")
_TOKEN = re.compile(r"[A-Za-z]+(?:['’][a-z]+)?|[¢%]")

_GROUPED = re.compile(
    r"(?<![\d.,])(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?:[ '’_]\d{3})+(?!\s?/\s?\d)|\d{1,3}(?:\.\d{3}){2,})"
    r"(?!\s?\d|,\d)"
)
_EUROPEAN = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+|\d{1,3}(?: \d{3})+),(\d{1,2})(?![\d,])")
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b", re.I)
_AND_A = re.compile(
    r"(?<=\d)\s+and\s+(?:(?:a|one)\s+(half|third|quarter|fourth|fifth)\b|(three)[\s-]quarters\b|(?=\d{1,4}/\d))", re.I
)
_PARTS = {"half": " 1/2", "third": " 1/3", "quarter": " 1/4", "fourth": " 1/4", "fifth": " 1/5", "three": " 3/4"}
_TIMES_TEN = re.compile(r"(?<=\d)\s?[xX]\s?(?=\d)")


@dataclass(frozen=True, slots=True)
class Words:
    """What the words after a number say: a factor, a power, a percentage, a known unit."""

    factor: Fraction = Fraction(1)
    power: int = 1
    percent: bool = False
    unit: tuple[str, Fraction] | None = None


def split_words(text: str) -> tuple[str, str] | None:
    """The value at the start of a text and the words after it, or None where there are none."""
    match = _START.search(text)
    if match is None or not (value := text[: match.start()]).strip(" +-"):
        return None
    word = match.group()
    # "5ab" is an algebraic term: without a space, a short word is a unit only if a table has it.
    if value[-1] not in " /-" and len(word) in (2, 3) and word.isalpha() and not is_significant(word):
        return None
    return value.rstrip().rstrip("/-").rstrip(), text[match.start() :]


def is_significant(word: str) -> bool:
    """Whether a word after a number changes its value or is a unit that is compared."""
    lower = word.lower()
    return word in LETTERS or any(lower in table for table in (SCALES, POWERS, PERCENT, UNITS))


def read_words(words: str) -> Words | None:
    """What the words after a number say; None if they are no unit."""
    plain = _EXPONENT.sub("", words)
    if not _PHRASE.fullmatch(plain):
        return None
    tokens = [word if word in LETTERS else word.lower().replace("’", "'") for word in _TOKEN.findall(plain)]
    if not tokens or len(tokens) > MAX_WORDS:
        return None
    power, factor, percent = 1, Fraction(1), False
    if tokens[0] in POWERS:
        power = POWERS[tokens.pop(0)]
    while tokens and (tokens[0] in SCALES or tokens[0] in LETTERS):
        name = tokens.pop(0)
        factor *= SCALES.get(name) or LETTERS[name]
    if tokens[:2] == ["per", "cent"]:
        tokens[:2] = ["%"]
    if tokens and tokens[0] in PERCENT:
        percent = bool(tokens.pop(0))
    if any(token in _NO_UNIT for token in tokens):
        return None
    unit = next((UNITS[token] for token in tokens[:2] if token in UNITS), None) if plain == words else None
    return Words(factor, power, percent, unit)


def plain_numbers(text: str) -> str:
    """The text with every number in plain digits: 70 000, 70'000 and 7,00,00 are grouped, 1.234,50 is European, 18th is 18."""
    text = _EUROPEAN.sub(lambda found: re.sub(r"[. ]", "", found.group(1)) + "." + found.group(2), text)
    text = _GROUPED.sub(lambda found: re.sub(r"[ ,.'’_]", "", found.group()), text)
    text = _AND_A.sub(lambda found: _PARTS.get((found.group(1) or found.group(2) or "").lower(), " "), _ORDINAL.sub("", text))
    return _TIMES_TEN.sub("*", text)


def spelled_number(text: str) -> str:
    """The text with a spelled number at its start in digits: "twenty-five dollars" is "25 dollars"."""
    words = list(re.finditer(r"[A-Za-z]+", text[:200]))
    total = current = count = 0
    end = 0
    for index, word in enumerate(words):
        name = word.group().lower()
        if text[end : word.start()].strip(" -"):
            break
        after = words[index + 1].group().lower() if index + 1 < len(words) else ""
        if name in _SPELLED:
            current += _SPELLED[name]
        elif name == "hundred" and count:
            current = max(current, 1) * 100
        elif name in _LARGE and count:
            total, current = total + max(current, 1) * _LARGE[name], 0
        elif name in ("a", "an") and not count and (after in _LARGE or after == "dozen"):
            current = 1
        elif name != "and" or not count or after not in _SPELLED:
            break
        count, end = count + 1, word.end()
    if count:
        return f"{total + current}{text[end:]}"
    return re.sub(r"^(?:a |one )?half\b(?: an?\b)?(?! of)", "1/2", text, count=1, flags=re.I)
