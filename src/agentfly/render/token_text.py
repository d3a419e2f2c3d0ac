"""`TokenDecoder`: the text of single tokens, from the file of a tokenizer alone. No template and no model is needed.

A character may be spread over several tokens. Its last token then shows the character, and the tokens before it show their
bytes as `<0xF0>`; so the pieces of a text, read one after the other, never contain a replacement character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import ConfigError

FILE = "tokenizer.json"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenDecoder:
    """Opens `tokenizer.json` of a model's folder. Raises ConfigError if the file cannot be read."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ConfigError(f"{file} is not a tokenizer: {error}") from error
        self._byte_level = "ByteLevel" in repr(self._tokenizer.decoder)
        self._whole: dict[int, str] = {}  # tokens that hold whole characters, most of all
        self._added = {number: str(token.content) for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One text per id. Control tokens are spelled out; an id outside of the vocabulary is shown as `<id 7>`."""
        shown: list[str] = []
        begun = b""  # the first bytes of a character that the tokens so far have not completed
        for token in ids:
            if not begun and (whole := self._whole.get(token)) is not None:
                shown.append(whole)
                continue
            data = self._bytes(token)
            if data is None:
                shown.append(self._spelled(token))
                begun = b""
                continue
            text, rest = _decode(begun + data)
            if text is None:  # the character is never completed: its tokens keep showing their bytes
                text, rest = _decode(data)
            if text and not rest and not begun:
                self._whole[token] = text
            begun = rest
            # A token that adds no whole character shows its own bytes.
            shown.append(_visible(data) if text is None else text + _hexadecimal(rest) if text else _hexadecimal(data))
        return shown

    def _spelled(self, token: int) -> str:
        return self._added.get(token) or f"<id {token}>"

    def _bytes(self, token: int) -> bytes | None:
        """The bytes of a token; None for a control token or an unknown id."""
        if token in self._added or not 0 <= token < 1 << 31:
            return None
        raw = self._tokenizer.id_to_token(token)
        if raw is None:
            return None
        if self._byte_level:
            table = _byte_of()
            return bytes(table[letter] for letter in raw) if all(letter in table for letter in raw) else raw.encode()
        if match := _BYTE.fullmatch(raw):
            return bytes([int(match[1], 16)])
        return bytes(raw.replace("\u2581", " ").encode("utf-8", "replace"))


def _decode(data: bytes) -> tuple[str | None, bytes]:
    """The text of whole characters, and the bytes of one that has only begun; (None, b"") if the bytes are not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(data), decoder.getstate()[0]
    except UnicodeDecodeError:
        return None, b""


def _hexadecimal(data: bytes) -> str:
    return "".join(f"<0x{byte:02X}>" for byte in data)


def _visible(data: bytes) -> str:
    """Text with the invalid bytes written out."""
    return "".join(
        f"<0x{ord(letter) - 0xDC00:02X}>" if "\udc80" <= letter <= "\udcff" else letter
        for letter in data.decode("utf-8", "surrogateescape")
    )


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (the table of GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
