"""The "token set ratio" of fuzzy matching: how similar two short texts are, from 0 to 100, whatever the order of their words.

Both texts are reduced to sets of words; the common words, alone and with the rest of either text, are compared by insertions
and deletions. Equal, after rounding, to the libraries that the original shop uses.
"""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=65_536)
def token_set_ratio(left: str, right: str) -> int:
    """100 if one text has all words of the other; 0 if either has no words."""
    ours, theirs = _words(left), _words(right)
    if not ours or not theirs:
        return 0
    shared = " ".join(sorted(ours & theirs))
    if shared and (ours <= theirs or theirs <= ours):
        return 100
    one, other = " ".join(sorted(ours - theirs)), " ".join(sorted(theirs - ours))
    gap = 1 if shared else 0
    with_one, with_other = len(shared) + gap + len(one), len(shared) + gap + len(other)
    best = _alike(distance(one, other), with_one + with_other)
    if shared:
        best = max(best, _alike(gap + len(one), len(shared) + with_one), _alike(gap + len(other), len(shared) + with_other))
    return round(best)


def distance(left: str, right: str) -> int:
    """Insertions and deletions that turn one text into the other."""
    return len(left) + len(right) - 2 * longest_common(left, right)


def longest_common(left: str, right: str) -> int:
    """Length of the longest common subsequence, one bit for each letter of `left` (Hyyrö 2004)."""
    if not left or not right:
        return 0
    places: dict[str, int] = {}
    for place, letter in enumerate(left):
        places[letter] = places.get(letter, 0) | (1 << place)
    full = (1 << len(left)) - 1
    row = full
    for letter in right:
        hits = row & places.get(letter, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(left) - row.bit_count()


def _alike(edits: int, length: int) -> float:
    return 100.0 - 100.0 * edits / length if length else 100.0


def _words(text: str) -> frozenset[str]:
    """Lower-case words of letters and digits. Latin-1 letters beyond ASCII are deleted, as in the original."""
    latin = "".join(letter for letter in text if not 128 <= ord(letter) < 256)
    return frozenset("".join(letter if letter.isalnum() else " " for letter in latin).lower().split())
