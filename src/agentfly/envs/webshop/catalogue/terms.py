"""Text to search terms, as an English analyser of a search engine does it.

Words are cut nearly at Unicode word boundaries (UAX 29), lower-cased, stripped of possessive 's, filtered by stop words and
stemmed. Products and queries use the same function. Long words and queries are cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .porter import stem

MAX_QUERY = 4_000
MAX_WORD = 255
_STOP = """a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
    was will with"""
STOP_WORDS = frozenset(_STOP.split())
_LETTER = r"[^\W\d_]"
# Letters may be joined by . ' : and digits by . , ; ' while any other character ends a word.
_JOIN = rf"(?:(?<={_LETTER})[.'’:](?={_LETTER})|(?<=\d)[.,;'’](?=\d))"
_WORD = re.compile(rf"\w+(?:{_JOIN}\w+)*")
_PLAIN = re.compile(r"[a-z0-9]+")


def terms(text: str) -> list[str]:
    """The search terms of a text, in order, with repetitions."""
    return [stem(word) for word in words(text) if word not in STOP_WORDS]


def words(text: str) -> Iterator[str]:
    """The words in lower case, without possessives."""
    for token in _WORD.findall(text):
        word = token.lower()
        if len(word) > 2 and word[-1] == "s" and word[-2] in "'’＇":
            word = word[:-2]
        if _PLAIN.fullmatch(word) and len(word) <= MAX_WORD:
            yield word
            continue
        if word.strip("_"):  # underscores alone are punctuation
            yield from (word[start : start + MAX_WORD] for start in range(0, len(word), MAX_WORD))
