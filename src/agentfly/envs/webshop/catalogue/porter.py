"""The Porter stemmer: an English word in lower case to its stem.

M. F. Porter, "An algorithm for suffix stripping", Program 14 (1980), with the two later changes of its author that search
engines use ("bli" becomes "ble", "logi" becomes "log"). Words of one or two letters are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ...task_sets import read_table

_VOWELS = frozenset("aeiou")
_STEPS: dict[str, Any] = read_table(__package__, "porter.json")
"""Steps 2 and 3: suffix and replacement, applied if the measure of the rest is above 0. Step 4: suffixes, longer ones first,
dropped if the measure of the rest is above 1."""


@lru_cache(maxsize=200_000)
def stem(word: str) -> str:
    if len(word) <= 2:
        return word
    word = _plural(word)
    word = _past(word)
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    word = _exchange(word, _STEPS["step 2"])
    word = _exchange(word, _STEPS["step 3"])
    word = _drop(word)
    return _tidy(word)


def _plural(word: str) -> str:
    if not word.endswith("s"):
        return word
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word if word.endswith("ss") else word[:-1]


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        if word.endswith(suffix) and _has_vowel(word[: -len(suffix)]):
            word = word[: -len(suffix)]
            if word.endswith(("at", "bl", "iz")):
                return word + "e"
            if _doubled(word):
                return word if word[-1] in "lsz" else word[:-1]
            return word + "e" if _measure(word) == 1 and _short_end(word) else word
    return word


def _exchange(word: str, table: Mapping[str, str]) -> str:
    for suffix, instead in table.items():
        if word.endswith(suffix):
            left = word[: -len(suffix)]
            return left + instead if _measure(left) > 0 else word
    return word


def _drop(word: str) -> str:
    for suffix in _STEPS["step 4"]:
        if word.endswith(suffix):
            left = word[: -len(suffix)]
            if suffix == "ion" and not left.endswith(("s", "t")):
                return word
            return left if _measure(left) > 1 else word
    return word


def _tidy(word: str) -> str:
    if word.endswith("e"):
        left = word[:-1]
        if _measure(left) > 1 or (_measure(left) == 1 and not _short_end(left)):
            word = left
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word


def _consonant(word: str, place: int) -> bool:
    letter = word[place]
    if letter in _VOWELS:
        return False
    return letter != "y" or place == 0 or not _consonant(word, place - 1)


def _measure(word: str) -> int:
    """The number of times a vowel is followed by a consonant."""
    count, was_vowel = 0, False
    for place in range(len(word)):
        consonant = _consonant(word, place) if word[place] == "y" else word[place] not in _VOWELS
        count += consonant and was_vowel
        was_vowel = not consonant
    return count


def _has_vowel(word: str) -> bool:
    return any(not _consonant(word, place) for place in range(len(word)))


def _doubled(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _consonant(word, len(word) - 1)


def _short_end(word: str) -> bool:
    """Whether the word ends in consonant, vowel, consonant, with the last not w, x or y."""
    last = len(word) - 1
    return (
        last >= 2
        and _consonant(word, last)
        and not _consonant(word, last - 1)
        and _consonant(word, last - 2)
        and word[last] not in "wxy"
    )
