"""Text analysis for the index: lower case, no accents, no stop words, English plural and tense endings removed.

Passages and queries are analysed alike. Every text is accepted; control characters and surrogates are not words.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_WORD = re.compile(r"[^\W_]+")
_STOPPED = (
    "a an and are as at be but by did do does for from had has have he her his how i if in into is it its no not of on or "
    "she so such that the their then there these they this to was were what when where which who whom whose why will with"
)
STOP_WORDS = frozenset(_STOPPED.split())
VERSION = 1
"""Part of the key of every stored index: a change of the analysis invalidates them."""


def words(text: str) -> list[str]:
    """The stemmed words of a text, in order, without stop words."""
    if not text.isascii():
        text = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    return [stem(word) for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]


@lru_cache(maxsize=200_000)
def stem(word: str) -> str:
    """A light stem: "rivers" and "river" are equal, and so are "painted" and "painting"; most names do not change."""
    if len(word) < 4 or not word.isalpha():
        return word
    if word.endswith("ies") and len(word) > 4:
        word = word[:-3] + "y"
    elif word.endswith(("sses", "shes", "ches", "xes")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and any(vowel in word[: -len(ending)] for vowel in "aeiouy"):
            word = word[: -len(ending)]
            if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
                word = word[:-1]
            break
    return word[:-1] if word.endswith("e") and len(word) > 3 else word
