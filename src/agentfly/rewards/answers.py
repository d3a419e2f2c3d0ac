"""Rewards that compare the prediction with the field `answer`: exact match, and SQuAD's exact match and token F1.

The answer may be a list of alternatives; the score is the best over them, from 0 to 1. An answer that is not text is compared
by its `str` (84 is "84"). An empty list of answers is an error.
"""

from __future__ import annotations

import ast
import re
import string
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from .function import FunctionReward

_NUMBER = re.compile(
    r"(?<![^\s(\[{$€£¥\"'<>=~≤≥≠:/^*])[-+]?(?:(?!0\d)(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:/[1-9]\d*)?(?![^\W_]|'s|[.,]\d)"
)
_SYMBOL = re.compile(r"(?<!\w)[a-z]+(?:\+\+|[+#*])(?!\w)|(?<!\w)[a-f]-(?!\w)|[<>≤≥≠]")
_KEPT = re.compile(f"({_NUMBER.pattern}|{_SYMBOL.pattern})")
_WARNS = re.compile(r"(?<![A-Za-z])\d[\da-zA-Z_.]*?(?:and|else|for|if|in|is|not|or)(?![A-Za-z])")
_ESCAPES = re.compile(r"(?:[^\\]|\\[\\'\"nrt])*")
_BETWEEN = re.compile(r"(?<=\d)[,/](?=\d)")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset(("a", "an", "the"))


def alternatives(answer: object) -> list[str]:
    """The answers as texts. Raises ValueError if there is none."""
    if hasattr(answer, "tolist"):  # a column of a Parquet file
        answer = answer.tolist()
    many = list(answer) if isinstance(answer, Sequence) and not isinstance(answer, (str, bytes)) else [answer]
    if not many or any(one is None for one in many):
        raise ValueError(f"the field 'answer' holds no answer: {answer!r}")
    return [str(one) for one in many]


def read_literal(text: str) -> Any:
    """The value of a text in Python's notation, or None. Never warns: "18or 25" and "\\d" would, on the trainer's terminal."""
    if _WARNS.search(text) or ("\\" in text and not _ESCAPES.fullmatch(text)):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def normalize(text: str) -> str:
    """SQuAD's normalisation: lower case, no ASCII punctuation, no articles, single spaces (arXiv:1606.05250, evaluate-v1.1).

    Signs that make another answer stay: numbers are their values (-5, 1.5, 1/2, 1,000), and C++ is not C. An article that ends
    the text is a word: choice A, vitamin A.
    """
    words: list[str] = []
    for place, part in enumerate(_KEPT.split(text.lower().replace("\u2212", "-"))):
        part = part if place % 2 else _BETWEEN.sub(" ", part)  # "1,5" is not 15
        words += [_value(part) if _NUMBER.fullmatch(part) else part] if place % 2 else part.translate(_NO_PUNCTUATION).split()
    return " ".join(word for place, word in enumerate(words, 1) if word not in _ARTICLES or place == len(words))


def _value(number: str) -> str:
    digits = number.replace(",", "")
    return (
        str(Fraction(digits)) if "/" not in digits else str(Fraction(digits.partition("/")[0]) / int(digits.partition("/")[2]))
    )


@FunctionReward
def exact_match(prediction: str, answer: object) -> float:
    """1 if the prediction is exactly the answer, or one of the answers, apart from white space around it."""
    return float(prediction.strip() in {one.strip() for one in alternatives(answer)})


@FunctionReward
def qa_exact_match(prediction: str, answer: object) -> float:
    """1 if the prediction equals an answer after SQuAD's normalisation: case, punctuation and articles do not count."""
    said = normalize(prediction)
    return float(said != "" and said in {normalize(one) for one in alternatives(answer)})


@FunctionReward
def qa_f1(prediction: str, answer: object) -> float:
    """The F1 of the words that prediction and answer share, after SQuAD's normalisation; the best over the answers."""
    words = normalize(prediction).split()
    return max(_f1(words, normalize(one).split()) for one in alternatives(answer))


def _f1(words: list[str], gold: list[str]) -> float:
    if not words or not gold:  # unlike SQuAD 2.0: an empty reply earns nothing
        return 0.0
    shared = sum((Counter(words) & Counter(gold)).values())
    return 2 * shared / (len(words) + len(gold))
