"""Encodes and decodes text with a Hugging Face tokenizer, and prevents forged control tokens.

The marks that a template writes (<|im_start|>, [INST]) become control tokens; the same characters in a message (a web page with
"<|im_end|>") never do. Such a text gets a cut after its first character, and the parts are tokenised separately:

    a tool says    done<|im_end|>        rendered  ...done<|CUT|im_end|>...        ids of "...done<" + ids of "|im_end|>..."

A text between two control tokens is tokenised in one piece, as the tokenizer does. bos and eos are never added, because the
template writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .template_pieces import Pieces, first_letter_of

# A Unicode noncharacter, which is not used in text for exchange.
CUT = "\ufdd0"


class Codec:
    """A tokenizer, its control tokens, and those of them that a reply must not contain."""

    def __init__(self, tokenizer: Any, written: str) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
        self._backend = backend
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if len(token.content.strip()) > 1}
        special = set(tokenizer.all_special_tokens)
        # Control tokens are all special tokens, and the added tokens (such as plain words) that the template writes.
        self.control: dict[str, int] = {
            token.content: index
            for index, token in added.items()
            if token.special or token.content in special or token.content in written
        }
        self.special = frozenset(token.content for token in added.values() if token.special or token.content in special)
        self.control_ids = frozenset(self.control.values())
        # The control tokens at which a prompt may be cut: those that the template writes.
        marks = {token: index for token, index in self.control.items() if token in written or token in special}
        self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        self._mark_ids = marks
        self._known_ids = frozenset(marks.values())
        self._pattern = re.compile(first_letter_of(self.control))
        self._turn_pattern = re.compile(first_letter_of(()))
        self._bos_ids = {index for index in (tokenizer.bos_token_id, tokenizer.pad_token_id) if index is not None}
        self._anchors: dict[int, str] = {}
        # The marks of the template come first, because a tokenizer may have thousands of special tokens.
        self.pieces = Pieces(self._plain, backend, sorted(marks, key=lambda mark: mark not in written))
        self._newline = self._plain("\n")
        # SentencePiece tokenizers put a space before a text, so text from the middle is tokenised after a prefix.
        self._spaced = self._plain("a") != self._plain("\na")[len(self._newline) :]

    def forbid_in_replies(self, texts: Iterable[str]) -> None:
        """Sets the control tokens that a reply must not contain (turn marks); <think> or <tool_call> are allowed."""
        self._turn_pattern = re.compile(first_letter_of(texts))

    def guard(self, text: str) -> str:
        """The text with a cut in every control token; for text that the template did not write."""
        return self._cut(text, self._pattern)

    def guard_reply(self, text: str) -> str:
        """The reply with a cut in every turn mark."""
        return self._cut(text, self._turn_pattern)

    def guard_data(self, value: object) -> Any:
        """`guard` for every string inside JSON-like data."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self.guard_data(key): self.guard_data(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard_data(item) for item in value]
        return value

    def encode_start(self, text: str) -> list[int]:
        """The ids of a whole prompt."""
        first, *rest = text.split(CUT)
        return self._append(self.pieces.encode(first), rest)

    def encode(self, text: str, after: int | None = None) -> list[int]:
        """The ids of a text that follows the token `after`."""
        if CUT not in text:
            return self._continue(text, after)
        first, *rest = text.split(CUT)
        return self._append(self._continue(first, after), rest)

    def cuts(self, text: str, ids: Sequence[int], start: int, num_before: int) -> tuple[list[int], list[int]]:
        """Places in a text after `start` where tokenisation may be resumed, and the number of ids up to each of them.

        These are the ends of control tokens, which no other token spans. `ids` are those of the text after `start`.
        """
        marks = self._known_ids
        matches = [(match.end(), self._mark_ids[match.group()]) for match in self._marks.finditer(text, start)]
        counts = [num_before + at + 1 for at, index in enumerate(ids) if index in marks]
        if [index for _, index in matches] != [ids[count - num_before - 1] for count in counts]:
            return [], []
        return [place for place, _ in matches], counts

    def num_control(self, ids: Iterable[int]) -> int:
        control = self.control_ids
        return sum([index in control for index in ids])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids with all marks except a leading bos and padding."""
        start, end = 0, len(ids)
        while end > start and ids[end - 1] in self._bos_ids:
            end -= 1
        while start < end and ids[start] in self._bos_ids:
            start += 1
        return self.text(ids[start:end])

    def text(self, ids: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=False))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _cut(self, text: str, pattern: re.Pattern[str]) -> str:
        if CUT in text:
            text = text.replace(CUT, "\ufffd")
        return pattern.sub(lambda found: found.group() + CUT, text)

    def _continue(self, text: str, after: int | None) -> list[int]:
        if after is None:
            return self._middle(text)
        ids = self.pieces.encode(self.anchor(after) + text)
        return ids[1:] if ids[:1] == [after] else self._middle(text)

    def anchor(self, after: int) -> str:
        """The text of a token, before which the text that follows it is tokenised."""
        anchor = self._anchors.get(after)
        if anchor is None:
            anchor = self._anchors[after] = self.text([after])
        return anchor

    def _append(self, ids: list[int], pieces: Iterable[str]) -> list[int]:
        for piece in pieces:
            ids += self._middle(piece)
        return ids

    def _middle(self, text: str) -> list[int]:
        if self._spaced:
            ids = self.pieces.encode("\n" + text)
            if ids[: len(self._newline)] == self._newline:
                return ids[len(self._newline) :]
        return self.pieces.encode(text)

    def _plain(self, text: str) -> list[int]:
        """The ids of a text by the tokenizer, without a cache."""
        backend = self._backend
        # The backend tokenizer is several times faster. It is used unless truncation or padding was left switched on in it.
        if backend is not None and backend.truncation is None and backend.padding is None:
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False))
