"""The scheduler over the paged KV cache, the default on a GPU: prefill in chunks, decode in launches of several steps.

A call of `step` starts the next prefill pass and launches the next decode steps, and then finishes the launch before it. It is
due (`wait_until_due`) shortly before the launch in flight ends, so that every request which has arrived by then takes part:

    host      .. launch 2, finish 1 | .............. launch 3, finish 2 | ...
    device    ...... 1 ......|............ 2 ............|...... 3 ....      never waits for the host while it has work

The host sees the end of a reply when its launch is finished; the row is idle until the next launch but one. A prefill pass runs
beside the decode launches (see `prefill`); its sequences join the decode batch when it is done.

Freed pages and work in flight. A launch or pass may still write to pages that were taken from a removed sequence. The next
holder always writes later: a prefill pass starts after all launches before it, and a launch waits for the pass of a removed
sequence (`_orphaned`). Pages for all tokens of a launch are allocated before it; if none are left, the youngest sequence is
preempted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from .cuda_graphs import spending
from .decode_batch import MAX_STEPS, DecodeBatch, DecodeEntry, InFlight
from .page_allocator import PAGE_SIZE, PageAllocator, PagedSequence
from .paged_attention import KVPools
from .prefill import MAX_SEQUENCES, PrefillChunk, Prefiller, PrefillPass
from .scheduler import BatchScheduler, SequenceState

if TYPE_CHECKING:
    import torch

LAUNCH_MS = 10.0
"""Target duration of a launch: long enough for the host's work, and no longer, because an ended reply waits for its launch."""

HOST_MS = 2.0
"""A step is due so long before the launch in flight ends: about the time that the host needs until the next launch."""

PREFILL_STEPS = 1.0
PREFILL_TOKENS = 1024
"""On a GPU a prefill pass slows the concurrent decode launches down by about one step, however few tokens it has. So a pass
starts when the waiting sequences have together lost PREFILL_STEPS steps per decoding sequence, or when PREFILL_TOKENS tokens
wait. One pass runs at a time, so that sequences which arrive meanwhile share the next one."""

SPARE_TOKENS = 2 * PAGE_SIZE
"""Tokens for which a sequence gets pages in advance while there are many: a request for pages costs the host's time."""

LAUNCHES_AHEAD = {"cuda": 1}
"""Unfinished launches when `step` returns, by device type. A CPU computes a launch synchronously and gains nothing from one."""


@dataclass(frozen=True, slots=True)
class _Launch:
    inflight: InFlight
    version: int
    valid: Callable[[], bool]


class PagedScheduler(BatchScheduler):
    """Continuous batching over pages.

    queue -> running, in `_prefilling` -> running, in `_entries` (the decode batch) -> removed
             ^ preempted: back to the queue     | published: back to `_prefilling`
    """

    allocator: PageAllocator

    def __init__(self, model: Any, allocator: PageAllocator, pools: KVPools, **sizes: Any) -> None:
        super().__init__(model, allocator, **sizes)
        self.pools = pools
        self.ahead = LAUNCHES_AHEAD.get(self.device.type, 0)
        self._launches: deque[_Launch] = deque()
        self._prefilling: dict[SequenceState, None] = {}  # running sequences outside the decode batch, in order of arrival
        self._entries: dict[SequenceState, DecodeEntry] = {}
        self._step_ms = 0.0
        self._passes: deque[tuple[int, PrefillPass]] = deque()  # numbered, unfinished
        self._last_pass = self._passes_done = 0
        self._untimed: deque[PrefillPass] = deque()  # passes whose time is not counted yet
        self._awaited_pass: dict[SequenceState, int] = {}  # the pass that must be done before the sequence can decode
        self._orphaned = False  # an unfinished pass contains a removed sequence
        self._lost_steps = 0  # steps that sequences waiting for prefill have lost together
        self._max_running: float = self.max_batch  # lower while pages are short
        self.use_model(model)

    def use_model(self, model: torch.nn.Module) -> None:
        """Compute with another replica. The graphs hold addresses of the old weights, so graphs and launches are dropped."""
        super().use_model(model)
        self._launches.clear()
        self._wait_for_prefill()
        for seq in list(self._entries):
            self._restart(seq)
        sizes: dict[str, Any] = {"device": self.device, "max_context": self.max_context, "times": self.times}
        self._decode = DecodeBatch(model, self.pools, num_rows=self.max_batch, **sizes)
        self._prefiller = Prefiller(model, self.pools, max_tokens=self.max_step_tokens, **sizes)

    @property
    def in_progress(self) -> bool:
        return super().in_progress or bool(self._launches)

    @property
    def launches_ahead(self) -> bool:
        return self.ahead > 0

    def memory(self) -> dict[str, float]:
        return {
            "pages": self.allocator.num_pages,
            "free_pages": self.allocator.num_free,
            "page_length": PAGE_SIZE,
            "kv_bytes": self.pools.num_bytes,
        }

    def wait_until_due(self) -> None:
        if self._launches:
            self._launches[-1].inflight.wait_until_near_end()

    def step(self, version: int, valid: Callable[[], bool]) -> list[SequenceState]:
        """Launch the next work, then finish the launch before it."""
        while self._passes and self._passes[0][1].done():
            self._passes_done = self._passes.popleft()[0]
        while self._untimed and self._untimed[0].done():
            self.times["prefill_s"] += self._untimed.popleft().seconds()
        self._admit()
        self._prefill()
        inflight = self._launch(version)
        if inflight is not None:
            self._launches.append(_Launch(inflight, version, valid))
        return self._finish_launches(self.ahead if inflight is not None else 0)

    def settle(self) -> list[SequenceState]:
        self._wait_for_prefill()
        return self._finish_launches(0)

    def remove(self, seq: SequenceState) -> None:
        self._detach(seq)
        self._max_running = min(self.max_batch, self._max_running + 0.25)
        super().remove(seq)

    def clear(self) -> list[SequenceState]:
        for seq in self.running:
            self._detach(seq)
        self._launches.clear()
        return super().clear()

    def drain(self) -> None:
        self._wait_for_prefill()

    def renew(self, publication: int, *, keep: bool) -> None:
        """The weights have changed: every running sequence leaves the decode batch and returns to it under the new version.

        With `keep` it returns at once; otherwise it is prefilled again. Launches in flight need no action here: their
        `valid()` is false by now, so `_finish` discards them.
        """
        self._orphaned = self._orphaned or bool(self._passes)
        self._max_running = self.max_batch
        for seq in list(self._entries):
            self._restart(seq)
        super().renew(publication, keep=keep)

    # ---- graphs ----------------------------------------------------------------------------------------------------------

    @property
    def wants_capture(self) -> bool:
        return any(part.sizes.missing for part in (self._decode, self._prefiller))

    def prepare(self, num_chains: int, limit_s: float) -> None:
        """See `BatchScheduler`. Decode and prefill sizes alternate: the largest of both are needed first."""
        began = time.perf_counter()
        decode = [(self._decode, size) for size in self._decode.sizes.to_prepare(min(num_chains, self.max_batch))]
        prefill = [(self._prefiller, size) for size in self._prefiller.sizes.to_prepare(self.max_step_tokens)]
        for pair in zip_longest(decode, prefill):
            for part, size in filter(None, pair):
                if time.perf_counter() - began < limit_s:
                    part.prepare(size)
        self._decode.sizes.freeze()
        self._prefiller.sizes.freeze()

    def refine(self) -> None:
        for part in (self._decode, self._prefiller):
            if part.sizes.missing:
                part.prepare(part.sizes.missing[0])
                return

    # ---- prefill ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._may_start() and len(self.running) < self.max_batch:
            if len(self.running) >= self._max_running and not self._has_room(self.queue[0]):
                break
            seq = self.queue.popleft()
            self._start(seq, *self.allocator.allocate(seq.tokens, seq.session))
            self._prefilling[seq] = None

    def _has_room(self, seq: SequenceState) -> bool:
        """Whether its pages fit beside those that the running sequences hold, still need, and one more page for each."""
        tables = [(_kv(each).pages, _num_pages(len(each.tokens))) for each in self.running]
        held = len({page for pages, _ in tables for page in pages})  # sequences share the pages of a common prefix
        more = sum(max(0, needed - len(pages)) + 1 for pages, needed in tables)
        return held + more + _num_pages(len(seq.tokens)) < self.allocator.num_pages

    def _prefill(self) -> None:
        """Start a pass over the next prompt tokens, all but the last of each prompt, in order of arrival."""
        if self._postpone_prefill():
            return
        self._lost_steps = 0
        room = self.max_step_tokens
        chosen: list[tuple[SequenceState, int]] = []
        for seq in list(self._prefilling):
            if room <= 0 or len(chosen) == MAX_SEQUENCES:
                break
            if seq.kv is None or (seq.source is not None and not self._share(seq)):
                continue
            cached = _kv(seq).cached
            count = min(len(seq.tokens) - 1 - cached, room)
            if count > 0 and self._grow(seq, cached + count):
                chosen.append((seq, count))
                room -= count
        # `_grow` for a later sequence may have preempted an earlier one.
        parts = [(_kv(seq), seq.tokens, count) for seq, count in chosen if seq.kv is not None]
        chunks: list[PrefillChunk] = []
        for kv, tokens, count in parts:
            chunks.append((tokens[kv.cached : kv.cached + count], kv.pages, kv.cached))
            kv.cached += count
        if chunks:
            self.counts["prefilled_tokens"] += sum([count for _, _, count in parts])
            self.counts["steps"] += 1
            if self.device.type == "cuda":
                started = self._prefiller.run(chunks)
                if started is not None:
                    self._untimed.append(started)
            else:
                with spending(self.times, "prefill_s"):
                    started = self._prefiller.run(chunks)
            if started is not None:
                self._last_pass += 1
                self._passes.append((self._last_pass, started))
                self._awaited_pass.update((seq, self._last_pass) for seq, _ in chosen if seq.kv is not None)

    def _postpone_prefill(self) -> bool:
        """Whether a pass now costs the decoding sequences more than one more launch costs the waiting ones."""
        if not self.ahead or not self._launches:
            return False
        if self._passes:
            return True
        lost = self._lost_steps + self._steps_per_launch() * len(self._prefilling)
        if lost >= PREFILL_STEPS * len(self._entries):
            return False
        return sum([len(seq.tokens) - 1 - _kv(seq).cached for seq in self._prefilling if seq.source is None]) < PREFILL_TOKENS

    def _share(self, seq: SequenceState) -> bool:
        """Share the pages of its prefix source. Returns False while the source has not computed them."""
        assert seq.source is not None
        source, tokens, count = seq.source
        # A source that was removed, reused, or computed by older weights is not waited for: the prefix is computed here.
        if source.tokens is tokens and source.publication == _kv(seq).publication:
            if source.busy and source.cached < count:
                return False
            self.counts["shared_tokens"] += self.allocator.share(_kv(seq), source, count)
            self._awaited_pass[seq] = self._last_pass  # the pass that computes the source may still run
        seq.source = None
        return True

    # ---- decode ----------------------------------------------------------------------------------------------------------

    def _launch(self, version: int) -> InFlight | None:
        """Launch a few steps of the sequences that can decode. Returns None if none can."""
        rows = self._decode.active_rows()
        if not len(rows):
            self._wait_for_prefill()
        awaited, done = self._awaited_pass, self._passes_done
        ready = [seq for seq in self._prefilling if seq.source is None and awaited.get(seq, 0) <= done]
        for seq in ready:
            cached = _kv(seq).cached
            if len(seq.tokens) - cached == 1:
                awaited.pop(seq, None)
                left = min(seq.sampling.max_tokens - len(seq.logprobs), self.max_context - len(seq.tokens))
                self._entries[seq] = self._decode.add(seq, cached, left, version)
                del self._prefilling[seq]
        if ready:
            rows = self._decode.active_rows()
        steps, preempted = self._steps_per_launch(), self.counts["preempted"]
        spare = SPARE_TOKENS if self.allocator.num_free > SPARE_TOKENS // PAGE_SIZE * len(self.running) else 0
        for entry, length in self._decode.lacking_pages(rows, steps):
            if not entry.removed:  # `_grow` for another sequence may have preempted this one
                self._grow(entry.seq, min(length + spare, self.max_context))
        if self.counts["preempted"] > preempted:
            rows = self._decode.active_rows()
        if not len(rows):
            return None
        if self._orphaned:
            self._wait_for_prefill()
        # The more sequences wait to join, the sooner the launch has to end.
        waiting = len(self._prefilling)
        steps = min(-(-steps * len(rows) // (len(rows) + waiting)), self._decode.max_remaining(rows))
        self.counts["steps"] += steps
        self._lost_steps += steps * len(self._prefilling)
        if self.device.type == "cuda":  # its time is counted when it is finished
            last_steps = max(1, round(HOST_MS / self._step_ms)) if self._step_ms else 1
            return self._decode.launch(rows, steps, waiting, last_steps)
        with spending(self.times, "decode_s"):
            return self._decode.launch(rows, steps, waiting)

    def _wait_for_prefill(self) -> None:
        """Make later launches start after every unfinished pass. The host does not wait."""
        if self._passes:
            self._passes_done, last = self._passes[-1]
            last.block_stream()
            self._passes.clear()
        self._orphaned = False

    def _steps_per_launch(self) -> int:
        if not self._step_ms:
            return MAX_STEPS if self.ahead == 0 else MAX_STEPS // 2
        return max(1, min(MAX_STEPS, round(LAUNCH_MS / self._step_ms)))

    def _finish_launches(self, ahead: int) -> list[SequenceState]:
        """Finish all launches but the last `ahead`. Returns the sequences that have news."""
        changed: list[SequenceState] = []
        while len(self._launches) > ahead:
            self._finish(self._launches.popleft(), changed)
        news = list(dict.fromkeys(changed))
        self._remove_ended(news)
        return news

    def _finish(self, launch: _Launch, changed: list[SequenceState]) -> None:
        if not launch.valid():
            # Weights were published after the launch: its tokens may come from a mix of both versions. Discard them all, and
            # prefill its sequences again. The uniform numbers were not consumed, so seeded replies stay reproducible.
            launch.inflight.wait()
            for entry in self._decode.still_present(launch.inflight):
                self._restart(entry.seq)
            return
        with self.while_waiting():
            launch.inflight.wait()
        ended, sampled, took = self._decode.finish(launch.inflight)
        if took is not None:
            self.times["decode_s"] += took * launch.inflight.steps / 1000.0
            self._step_ms = took if not self._step_ms else 0.8 * self._step_ms + 0.2 * took
        self.counts["sampled_tokens"] += sampled
        for entry in ended:
            seq = entry.seq
            self._collect(entry)
            if seq.finished or seq.error or seq.new_text:
                changed.append(seq)
                if seq.finished or seq.error:
                    self._detach(seq)

    def _collect(self, entry: DecodeEntry) -> None:
        """Move the tokens that have arrived from the decode batch to the sequence."""
        tokens, logprobs = self._decode.collect(entry)
        count = entry.seq.extend(tokens, logprobs, entry.version, self.max_context)
        entry.kv.cached += count
        self.counts["sampled_tokens"] -= len(tokens) - count  # sampled after the end of the reply

    def _restart(self, seq: SequenceState) -> None:
        """Leave the decode batch; whatever is not cached is prefilled again."""
        self._detach(seq)
        self._prefilling[seq] = None

    def _detach(self, seq: SequenceState) -> None:
        """Take the sequence out of prefill and decode, and keep the tokens that have arrived."""
        self._prefilling.pop(seq, None)
        self._orphaned = self._orphaned or self._awaited_pass.pop(seq, 0) > self._passes_done
        entry = self._entries.pop(seq, None)
        if entry is not None:
            if seq.finished is None and seq.error is None:
                self._collect(entry)
            self._decode.remove(entry)

    # ---- memory ----------------------------------------------------------------------------------------------------------

    def _grow(self, seq: SequenceState, length: int) -> bool:
        """Allocate pages for `length` tokens, preempting younger sequences. Returns False if `seq` itself was preempted."""
        while not self.allocator.grow(_kv(seq), length):
            victim = next(reversed(self.running))
            self._preempt()
            if victim is seq:
                return False
        return True

    def _preempt(self) -> None:
        self._detach(next(reversed(self.running)))  # also in the middle of its prefill
        super()._preempt()
        # Admit fewer for a while: otherwise the sequence would return at once, be prefilled again and be preempted again.
        self._max_running = max(1, len(self.running))


def _num_pages(length: int) -> int:
    return -(-length // PAGE_SIZE)


def _kv(seq: SequenceState) -> PagedSequence:
    assert isinstance(seq.kv, PagedSequence)
    return seq.kv
