"""The scheduler's interface, and the state of one sequence while the engine works on it.

A sequence is one list of tokens of which a prefix is cached. A step computes some of the rest; when one token is left, its
logits are sampled. A new prompt, a later turn of a chain, a decode step, a preempted sequence and a sequence whose weights
changed under it are therefore all the same case:

    tokens  [prompt ........ | sampled .....]
    cached  [=====================]           the rest is computed, then one token is sampled

    add -> queue -> running -> remove         preempt: running -> front of the queue

After a publication running sequences go on with the new weights. What they have cached is dropped and computed again, or kept
(`renew`); sampled tokens stay.

Schedulers run in the engine's thread only and know neither threads nor asyncio. Prompts are checked before they get here.
"""

from __future__ import annotations

from _random import Random  # the generator of `random.Random`, without its Python wrapper
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ...types import Request, Sampling
from ..text import TextStream
from .page_allocator import PageAllocator, PagedSequence
from .slot_allocator import CacheSlot, SlotAllocator

UNIFORMS = 64
"""Uniform numbers that a sequence draws at a time."""
Numbers = npt.NDArray[np.float64]


def uniform_numbers(generators: Sequence[Random], count: int) -> Numbers:
    """The next `count` numbers of each generator, a row for each: those that as many calls of its `random` would return."""
    drawn = b"".join([each.getrandbits(64 * count).to_bytes(8 * count, "little") for each in generators])
    words = np.frombuffer(drawn, "<u4").reshape(len(generators), count, 2)
    return ((words[..., 0] >> 5) * 2.0**26 + (words[..., 1] >> 6)) * 2.0**-53


def uniforms_of(seed: int, count: int) -> list[float]:
    """The uniform numbers of the first draws of a reply with this seed."""
    numbers: list[float] = uniform_numbers([Random(seed)], count)[0].tolist()
    return numbers


_NO_NUMBERS: Numbers = np.zeros(0)


class SequenceState:
    """One request. `new_text`, `finished` and `error` are its news, which the engine delivers to the event loop.

    `kv` is its entry in the KV cache, None while it is queued. `source` is a sequence whose prefix it waits to share:
    (entry, the entry's token list, prefix length). The list is compared by identity, because an entry may be reused. `started`
    says whether it has ever run.
    """

    __slots__ = (
        "ahead", "error", "finished", "future", "kv", "logprobs", "loop", "new_text", "num_prompt", "on_text", "rng",
        "sampling", "session", "source", "started", "stop_ids", "stream", "tokens", "versions",
    )  # fmt: skip

    def __init__(self, request: Request, stop_ids: frozenset[int], decode: Callable[[Sequence[int]], str]) -> None:
        self.sampling: Sampling = request.sampling
        self.session = request.session
        self.on_text = request.on_text
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.stop_ids = stop_ids.union(request.sampling.stop_ids) if request.sampling.stop_ids else stop_ids
        self.rng = Random(request.sampling.seed)
        self.ahead = _NO_NUMBERS  # drawn and not yet consumed
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stream = TextStream(decode, request.sampling.stop) if request.on_text or request.sampling.stop else None
        self.kv: CacheSlot | PagedSequence | None = None
        self.source: tuple[Any, list[int], int] | None = None
        self.started = False
        self.loop: Any = None
        self.future: Any = None
        self.new_text = ""
        self.finished: Literal["stop", "length"] | None = None
        self.error: str | None = None

    def share_from(self, source: Any, count: int) -> None:
        """Share the first `count` tokens of the entry `source` once it has computed them. None: share nothing."""
        self.source = (source, source.tokens, count) if source is not None else None

    def uniforms(self, count: int) -> Numbers:
        """The uniform numbers of the next `count` draws.

        A number is consumed when its token is accepted. A draw that is discarded (weights changed, preemption) is repeated with
        the same number, so a seeded reply does not depend on what else the engine does.
        """
        if len(self.ahead) < count:
            more = uniform_numbers([self.rng], max(UNIFORMS, count - len(self.ahead)))
            self.ahead = np.concatenate((self.ahead, more[0]))
        return self.ahead[:count]

    def accept(self, token: int, logprob: float, version: int, max_context: int) -> None:
        """Append a sampled token and decide whether the reply ends with it."""
        if logprob != logprob:
            self.error = "the model's logits are not numbers (NaN): its weights are damaged, or training has diverged"
            return
        self.ahead = self.ahead[1:]
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stop_ids:
            self.finished = "stop"
        elif self.stream is not None:
            self.new_text += self.stream.push(token)
            if self.stream.stopped:
                self.finished = "stop"
        if self.finished is None and (len(self.logprobs) >= self.sampling.max_tokens or len(self.tokens) >= max_context):
            self.finished = "length"
        if self.finished is not None and self.stream is not None:
            self.new_text += self.stream.flush()

    def extend(self, tokens: list[int], logprobs: list[float], version: int, max_context: int) -> int:
        """Append sampled tokens up to the end of the reply. Returns how many were appended."""
        total = sum(logprobs)
        if self.stream is not None or total != total:  # one by one: stop strings or NaN may end the reply anywhere
            for count, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
                self.accept(token, logprob, version, max_context)
                if self.error is not None:
                    return count
                if self.finished is not None:
                    return count + 1
            return len(tokens)
        count = len(tokens)
        room = min(self.sampling.max_tokens - len(self.logprobs), max_context - len(self.tokens))
        if count >= room:
            self.finished = "length"
            count = room
        for stop in self.stop_ids:
            if stop in tokens and (end := 1 + tokens.index(stop)) <= count:
                count, self.finished = end, "stop"
        self.ahead = self.ahead[count:]
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.versions += [version] * count
        return count


class BatchScheduler(ABC):
    """The queue, the running sequences and the counters that both schedulers have in common."""

    def __init__(
        self,
        model: Any,
        allocator: SlotAllocator | PageAllocator,
        *,
        max_batch: int,
        max_step_tokens: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.max_batch = max_batch
        self.max_step_tokens = max_step_tokens
        self.max_context = max_context
        self.device = device
        self.queue: deque[SequenceState] = deque()
        self.running: dict[SequenceState, None] = {}  # in order of admission
        names = ("steps", "prefilled_tokens", "sampled_tokens", "reused_tokens", "shared_tokens", "preempted")
        self.counts = dict.fromkeys(names, 0)
        self.times = {"prefill_s": 0.0, "decode_s": 0.0, "prepared_s": 0.0}  # see `engines.options.COUNTERS`
        self.allocator: Any = allocator
        self.while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while `step` waits for the device."""
        self.draining = False
        """If true, no queued sequence starts; running and preempted sequences go on."""

    @property
    def in_progress(self) -> bool:
        """Whether any sequence has started and not ended. Preempted sequences are at the front of the queue."""
        return bool(self.running or (self.queue and self.queue[0].started))

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do."""
        return self.in_progress or self._may_start()

    @property
    def launches_ahead(self) -> bool:
        """Whether `step` computes on another device and waits for it in `while_waiting` only."""
        return False

    def wait_until_due(self) -> None:  # noqa: B027  only launches in flight are waited for
        """Wait until it is time for the next `step`. Requests that arrive meanwhile take part in it."""

    @abstractmethod
    def step(self, version: int, valid: Callable[[], bool]) -> list[SequenceState]:
        """Advance the batch. Returns the sequences that have news; sequences that have ended are removed.

        The caller may publish new weights while the step computes. `valid()` is false from then on, and the step discards what
        it computed: a token must never carry the version of weights that it was not sampled from.
        """

    @abstractmethod
    def memory(self) -> dict[str, float]:
        """Figures about the KV cache, for `LocalEngine.stats`."""

    @property
    def wants_capture(self) -> bool:
        """Whether `refine` has work to do."""
        return False

    def prepare(self, num_chains: int, limit_s: float) -> None:  # noqa: B027  only CUDA graphs need it
        """Capture what so many concurrent chains need, most likely sizes first, for at most about `limit_s` seconds."""

    def refine(self) -> None:  # noqa: B027  only CUDA graphs need it
        """Capture one of the sizes that were missing. Called while no sequence runs."""

    def use_model(self, model: torch.nn.Module) -> None:
        """Compute with another replica from now on."""
        self.model = model

    def settle(self) -> list[SequenceState]:
        """Finish what was launched. Returns the sequences that have news, as `step` does."""
        return []

    def renew(self, publication: int, *, keep: bool) -> None:
        """The weights have changed: nothing cached may be used again, except, with `keep`, by the replies in progress.

        A sequence without a sampled token is computed again also with `keep`. So if all tokens of a reply carry one version,
        the weights of that version have computed all of it.
        """
        sources = self.allocator.renew(publication, {seq.kv for seq in self.running if seq.logprobs} if keep else ())
        for seq in self.running:
            if seq.kv in sources:
                seq.share_from(*sources[seq.kv])

    def add(self, seq: SequenceState) -> None:
        self.queue.append(seq)

    def remove(self, seq: SequenceState) -> None:
        """The sequence has ended or was cancelled. Its keys and values stay in the cache for the chain's next turn."""
        if seq.kv is not None:
            self.allocator.finish(seq.kv)
            seq.kv = None
            del self.running[seq]
        elif seq in self.queue:
            self.queue.remove(seq)

    def _may_start(self) -> bool:
        """Whether the first sequence of the queue may start."""
        return bool(self.queue) and (not self.draining or self.queue[0].started)

    def _start(self, seq: SequenceState, kv: Any, source: object, count: int) -> None:
        """Run a sequence in its cache entry, as `allocate` returned it."""
        seq.kv, seq.started = kv, True
        seq.share_from(source, count)
        self.counts["reused_tokens"] += kv.cached
        self.running[seq] = None

    def _preempt(self) -> None:
        """Send the youngest sequence back to the front of the queue; it is computed again when there is room."""
        seq, _ = self.running.popitem()
        self.allocator.drop(seq.kv)
        seq.kv = seq.source = None
        self.queue.appendleft(seq)
        self.counts["preempted"] += 1

    def _remove_ended(self, seqs: Iterable[SequenceState]) -> None:
        for seq in seqs:
            if seq.finished or seq.error:
                self.remove(seq)

    def clear(self) -> list[SequenceState]:
        """Remove and return every sequence, queued or running."""
        seqs = [*self.running, *self.queue]
        self.running, self.queue = {}, deque()
        return seqs

    def drain(self) -> None:  # noqa: B027  only launches in flight need it
        """Order later work on the device after everything that this scheduler has launched.

        Called when the engine fails or closes. Without it the allocator could hand memory that a kernel still writes to the
        next user.
        """
