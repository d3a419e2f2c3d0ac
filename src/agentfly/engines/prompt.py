"""What every engine does before and after sampling: check the prompt, limit the reply, build the Completion.

A reply ends with a stop id (kept in the ids, left out of the text), at a stop string (kept in the text), or at its limit.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import EngineError
from ..types import Completion, Request, Sampling


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An engine's answer to the probe of `copies`: log-probs of the prompt's ids from the second on (at temperature 1), and a
    sampled continuation.
    """

    scores: list[float]
    reply: Completion


def room_for(request: Request, max_context: int) -> int:
    """The largest number of tokens for the reply. Raises EngineError if the prompt is empty or fills the context."""
    count = len(request.prompt_ids)
    if count == 0:
        raise EngineError("the prompt is empty: there is nothing to continue")
    if count >= max_context:
        raise EngineError(
            f"the prompt has {count} tokens and the context holds {max_context}, reply included: "
            "shorten the prompt, end the chain earlier, or raise max_context"
        )
    return min(request.sampling.max_tokens, max_context - count)


def cuts(sampling: Sampling) -> str | None:
    """The first option that truncates the distribution, or None. At temperature 0 none does."""
    if sampling.temperature == 0:
        return None
    if sampling.top_p < 1.0:
        return "top_p"
    if sampling.top_k > 0:
        return "top_k"
    return "min_p" if sampling.min_p > 0 else None


def complete(
    tokenizer: Any,
    ids: list[int],
    logprobs: list[float],
    versions: list[int],
    stop: Literal["stop", "length"],
    stop_ids: Iterable[int],
) -> Completion:
    """A Completion whose text leaves out the id that ended the reply."""
    ended_by_id = stop == "stop" and bool(ids) and ids[-1] in stop_ids
    text = decode(tokenizer, ids[:-1] if ended_by_id else ids)
    return Completion(text=text, token_ids=ids, logprobs=logprobs, versions=versions, stop=stop)


def hand_over(request: Request, tokenizer: Any, ids: list[int], logprobs: list[float], versions: list[int]) -> None:
    """Pass the tokens of a cancelled call to `request.on_cut`. The engine's thread may append to the lists meanwhile."""
    count = min(len(ids), len(logprobs), len(versions))
    if request.on_cut is not None and count:
        request.on_cut(complete(tokenizer, ids[:count], logprobs[:count], versions[:count], "length", ()))


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    kind: Any = type(tokenizer)
    if not _decodes_in_rust(kind):
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    table = _tables.get(tokenizer, _tables)
    if table is _tables:
        table = _tables[tokenizer] = _byte_table(tokenizer.backend_tokenizer)
    if table is not None:
        return b"".join(map(table.__getitem__, ids)).decode("utf-8", "replace")
    return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))


@functools.cache
def _decodes_in_rust(kind: type) -> bool:
    """Whether `decode` of these tokenizers is that of their Rust backend: then transformers need not check every id."""
    transformers = sys.modules.get("transformers")  # a tokenizer of transformers has imported it
    fast = getattr(transformers, "PreTrainedTokenizerFast", None)
    if fast is None or not issubclass(kind, fast):
        return False
    return all(getattr(kind, name) is getattr(fast, name) for name in ("decode", "_decode"))


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level tokenizer: the text of a reply is that of its tokens' bytes, one after the other.

    For short replies this is several times as fast as the tokenizer, which makes an object of every token and releases the
    interpreter, so that a busy thread may keep it for a while.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._spelling = backend.id_to_token

    def __missing__(self, token: int) -> bytes:
        text = self._spelling(token)
        if text is None:  # left out, as the tokenizer does; it may be added later
            return b""
        letters = _byte_letters()
        try:
            data = bytes([letters[letter] for letter in text])
        except KeyError:  # an added token with other characters stands for itself
            data = text.encode()
        self[token] = data
        return data


_tables: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The `TokenBytes` of each tokenizer, or None if its decoder does more than join bytes."""


def _byte_table(backend: Any) -> TokenBytes | None:
    """The table, if it gives what the tokenizer gives for the first tokens, in both orders, and for the added tokens."""
    if type(backend.decoder).__name__ != "ByteLevel":
        return None
    table = TokenBytes(backend)
    first = list(range(min(512, backend.get_vocab_size())))
    added = list(backend.get_added_tokens_decoder())[:512]
    for ids in (first, first[::-1], added, [token for pair in zip(first, added, strict=False) for token in pair]):
        if b"".join(map(table.__getitem__, ids)).decode("utf-8", "replace") != backend.decode(ids, skip_special_tokens=False):
            return None
    return table


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte: its own if that is visible, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}
