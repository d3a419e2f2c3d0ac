"""The ids of a text, piece by piece: a text is split before each control token, and the ids of recent pieces are cached.

    text      \\n<|im_start|>user\\n42<|im_end|>\\n<|im_start|>assistant\\n
    pieces    \\n   <|im_start|>user\\n42   <|im_end|>\\n   <|im_start|>assistant\\n

A tokenizer of the package `tokenizers` finds these tokens first and tokenises the text between two of them separately, so the
ids of the pieces are the ids of the text. `Pieces` compares the two once with difficult texts. A tokenizer that fails, or whose
tokens absorb white space around them, gets whole texts. Neither class is thread-safe: a renderer belongs to one event loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any

Encode = Callable[[str], list[int]]

_MAX_LENGTH = 1 << 15  # characters of a text whose ids are cached
_MAX_MARKS = 64  # marks that are compared
_DIFFICULT = ("", "a", " a", "a ", "\n", "\n\n a\n", "  ", "é世界🙂", "<", '{"a": [1]}\n', "Ab1 2.5\t|>")


class TokenCache:
    """Ids by text, or by a key with the text in it. The least recently used are dropped beyond `max_bytes` (an estimate)."""

    def __init__(self, max_bytes: int = 16 << 20) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_hits = self.num_misses = 0
        self._entries: dict[Hashable, tuple[list[int], int]] = {}

    def get(self, key: Hashable) -> list[int] | None:
        """The ids, which the caller must not change, or None."""
        entry = self._entries.pop(key, None)
        if entry is None:
            self.num_misses += 1
            return None
        self._entries[key] = entry  # now the most recently used
        self.num_hits += 1
        return entry[0]

    def put(self, key: Hashable, text: str, ids: list[int]) -> None:
        """Keeps the ids, unless the text is very long."""
        if len(text) > _MAX_LENGTH or key in self._entries:
            return
        size = 250 + 4 * len(text) + 40 * len(ids)
        self._entries[key] = ids, size
        self.num_bytes += size
        while self._entries and self.num_bytes > self.max_bytes:
            self.num_bytes -= self._entries.pop(next(iter(self._entries)))[1]


class Pieces:
    """Encodes with `plain`, the tokenizer itself. `backend` is its fast tokenizer, if it has one; `marks` are compared."""

    def __init__(self, plain: Encode, backend: object, marks: Iterable[str]) -> None:
        self._plain = plain
        # With dropout, a text has other ids each time.
        self._cache = TokenCache(0 if getattr(getattr(backend, "model", None), "dropout", None) else 16 << 20)
        self._pattern = None if backend is None else _splitting(backend)
        if self._pattern is not None and not self._is_exact([mark for mark in marks if self._pattern.fullmatch(mark)]):
            self._pattern = None
            self._cache = TokenCache(self._cache.max_bytes)

    @property
    def splits(self) -> bool:
        """Whether texts are split."""
        return self._pattern is not None

    @property
    def cache(self) -> TokenCache:
        return self._cache

    def encode(self, text: str) -> list[int]:
        """The ids of a text, a new list."""
        if self._pattern is None:
            return list(self._ids_of(text))
        first, *parts = self._pattern.split(text)
        ids = list(self._ids_of(first)) if first else []
        for mark, rest in zip(parts[::2], parts[1::2], strict=True):
            ids += self._ids_of(mark + rest)
        return ids

    def split(self, text: str) -> list[str]:
        """Text and control tokens in turn, beginning and ending with text; one text if texts are not split."""
        return [text] if self._pattern is None else self._pattern.split(text)

    def encode_between(self, mark: str, text: str, closing: str) -> list[int] | None:
        """The ids of `mark + text` before `closing`, not cached; None if these are not its only control tokens."""
        if self.split(f"{mark}{text}{closing}") != ["", mark, text, closing, ""]:
            return None
        return self._plain(mark + text)

    def _ids_of(self, piece: str) -> list[int]:
        ids = self._cache.get(piece)
        if ids is None:
            ids = self._plain(piece)
            self._cache.put(piece, piece, ids)
        return ids

    def _is_exact(self, marks: list[str]) -> bool:
        texts = ["".join(mark + text for mark in marks[:_MAX_MARKS]) for text in _DIFFICULT]
        return all(self.encode(text) == self._plain(text) for text in (*texts, *(f"a{text}" for text in texts)))


def _splitting(backend: Any) -> re.Pattern[str] | None:
    """Matches the tokens that the tokenizer finds first, the longest at each place; None if a text may not be split there."""
    tokens = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized and token.content]
    if not tokens or any(token.lstrip or token.rstrip or token.single_word for token in tokens):
        return None
    return re.compile(f"({longest_of(token.content for token in tokens)})")


def longest_of(texts: Iterable[str]) -> str:
    """A pattern that matches the longest of the texts at a place. It is a prefix tree, as there may be thousands of texts."""
    return _branch(prefix_tree(texts), longest=True)


def first_letter_of(texts: Iterable[str]) -> str:
    """A pattern of the first character of each text, with the rest as a lookahead, so that overlapping texts are all found."""
    # The first characters stand outside the lookahead, so that the search skips all text without them.
    tree = prefix_tree(texts)
    return "|".join(f"{re.escape(first)}(?={_branch(node)})" for first, node in tree.items()) or r"(?!)"


def prefix_tree(texts: Iterable[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return tree


def _branch(tree: dict[str, Any], longest: bool = False) -> str:
    ends = "" in tree
    if ends and (not longest or len(tree) == 1):
        return ""
    parts = []
    for letter, node in tree.items():
        if letter:
            text = letter
            while len(node) == 1 and "" not in node:
                [(letter, node)] = node.items()
                text += letter
            parts.append(re.escape(text) + _branch(node, longest))
    if ends:
        return f"(?:{'|'.join(parts)})?"
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
