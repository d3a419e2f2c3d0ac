"""Rewards that compare the prediction with the field `answer`: exact match, and SQuAD's exact match and token F1.

The answer may be a list of alternatives; the score is the best over them, from 0 to 1. An answer that is not text is compared
by its `str` (84 is "84"). An empty list of answers is an error.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .function import FunctionReward

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset(("a", "an", "the"))


def alternatives(answer: Any) -> list[str]:
    """The answers as texts. Raises ValueError if there is none."""
    if hasattr(answer, "tolist"):  # a column of a Parquet file
        answer = answer.tolist()
    many = list(answer) if isinstance(answer, Sequence) and not isinstance(answer, (str, bytes)) else [answer]
    if not many or any(one is None for one in many):
        raise ValueError(f"the field 'answer' holds no answer: {answer!r}")
    return [str(one) for one in many]


def normalize(text: str) -> str:
    """SQuAD's normalisation: lower case, no ASCII punctuation, no articles, single spaces (arXiv:1606.05250, evaluate-v1.1)."""
    words = text.lower().translate(_NO_PUNCTUATION).split()
    return " ".join(word for word in words if word not in _ARTICLES)


@FunctionReward
def exact_match(prediction: str, answer: Any) -> float:
    """1 if the prediction is exactly the answer, or one of the answers, apart from white space around it."""
    return float(prediction.strip() in {one.strip() for one in alternatives(answer)})


@FunctionReward
def qa_exact_match(prediction: str, answer: Any) -> float:
    """1 if the prediction equals an answer after SQuAD's normalisation: case, punctuation and articles do not count."""
    return float(normalize(prediction) in {normalize(one) for one in alternatives(answer)})


@FunctionReward
def qa_f1(prediction: str, answer: Any) -> float:
    """The F1 of the words that prediction and answer share, after SQuAD's normalisation; the best over the answers."""
    words = normalize(prediction).split()
    return max(_f1(words, normalize(one).split()) for one in alternatives(answer))


def _f1(words: list[str], gold: list[str]) -> float:
    if not words or not gold:  # as in SQuAD 2.0: an empty text matches only an empty text
        return float(words == gold)
    shared = sum((Counter(words) & Counter(gold)).values())
    return 2 * shared / (len(words) + len(gold))
