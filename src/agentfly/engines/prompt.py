"""What every engine does before and after sampling: check the prompt, limit the reply, build the Completion.

A reply ends with a stop id (kept in the ids, left out of the text), at a stop string (kept in the text), or at its limit.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import EngineError
from ..types import Completion, Request, Sampling


@dataclass(frozen=True, slots=True)
class Probe:
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


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    kind: Any = type(tokenizer)
    if _decodes_in_rust(kind):
        return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@functools.cache
def _decodes_in_rust(kind: type) -> bool:
    """Whether `decode` of these tokenizers is that of their Rust backend: then transformers need not check every id."""
    transformers: Any = sys.modules.get("transformers")  # loaded already, if the tokenizer is one of its own
    fast = getattr(transformers, "PreTrainedTokenizerFast", None)
    if fast is None or not issubclass(kind, fast):
        return False
    return all(getattr(kind, name) is getattr(fast, name) for name in ("decode", "_decode"))
