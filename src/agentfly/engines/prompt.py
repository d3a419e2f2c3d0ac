"""What engines do with a request before and after the sampling, so that each of them does it alike.

In: a request, or sampled ids. Out: the limits it runs under, the text of a reply, a `Completion`. Refuses prompts that do not
fit. A reply ends with an id of the stop set (the id stays in the ids, its text is left out), at a stop string (which stays in
the text), or at its limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ..errors import EngineError
from ..types import Completion, Request, Sampling


def room_for(request: Request, max_context: int) -> int:
    """How many tokens the reply may have."""
    count = len(request.prompt_ids)
    if count == 0:
        raise EngineError("the prompt is empty: there is nothing to go on from")
    if count >= max_context:
        raise EngineError(
            f"the prompt has {count} tokens and the context holds {max_context}, reply included: "
            "shorten the prompt, end the chain earlier, or raise max_context"
        )
    return min(request.sampling.max_tokens, max_context - count)


def cuts(sampling: Sampling) -> str | None:
    """The first option that cuts the distribution, if one does; a temperature of 0 leaves nothing to cut."""
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
    """The completion of sampled ids; its text is theirs, without the id that ended it."""
    ended_by_id = stop == "stop" and bool(ids) and ids[-1] in stop_ids
    text = decode(tokenizer, ids[:-1] if ended_by_id else ids)
    return Completion(text=text, token_ids=ids, logprobs=logprobs, versions=versions, stop=stop)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
