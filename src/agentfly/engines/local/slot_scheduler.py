"""The scheduler over the slot cache, the default without a GPU: one forward pass per step, prefill and decode together.

If the slots cannot hold the step, the youngest sequence is preempted until they can.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .sampler import draw
from .scheduler import BatchScheduler, SequenceState
from .slot_allocator import CacheSlot, SlotAllocator
from .slot_attention import SlotMetadata, forward, order


class SlotScheduler(BatchScheduler):
    """Continuous batching over slots."""

    allocator: SlotAllocator

    def memory(self) -> dict[str, float]:
        cache = self.allocator.cache
        return {"slots": cache.num_slots, "slot_length": cache.length, "kv_bytes": cache.num_bytes}

    def step(self, version: int, valid: Callable[[], bool]) -> list[SequenceState]:
        """One forward pass over prefill chunks and decoding sequences together."""
        self._admit()
        work = self._choose_work()
        while work and not self.allocator.ensure_length(max(_slot(seq).cached + count for seq, count in work)):
            self._preempt()
            work = self._choose_work()
        if not work:
            return []
        ids: list[int] = []
        ends: list[int] = []
        drawing: list[SequenceState] = []
        for seq, count in work:
            slot = _slot(seq)
            cached = slot.cached
            if not cached:
                slot.stamp = self.allocator.audit.publication
            ids += seq.tokens[cached : cached + count]
            if cached + count == len(seq.tokens):
                ends.append(len(ids) - 1)
                drawing.append(seq)
        rows = [(_slot(seq).index, _slot(seq).cached, count) for seq, count in work]
        began = time.perf_counter()
        metadata = SlotMetadata(self.allocator.cache, rows, self.device)
        logits = forward(self.model, ids, metadata, ends or [0])
        self._spend(time.perf_counter() - began, len(drawing) / len(ids))
        if not valid():  # published during the pass: nothing is marked as cached, so all of it is computed again
            return []
        for seq, count in work:
            _slot(seq).cached += count
        self.counts["steps"] += 1
        self.counts["prefilled_tokens"] += len(ids) - len(drawing)
        self.counts["sampled_tokens"] += len(drawing)
        if drawing:
            drawn = draw(logits, [seq.sampling for seq in drawing], [float(seq.uniforms(1)[0]) for seq in drawing])
            for seq, token, logprob in zip(drawing, *drawn, strict=True):
                seq.accept(token, logprob, version, self.max_context)
        news = [seq for seq in drawing if seq.finished or seq.error or seq.new_text]
        self._remove_ended(news)
        return news

    def _spend(self, seconds: float, sampling: float) -> None:
        """Count the time of a pass in which the share `sampling` of the tokens was sampled from."""
        self.times["decode_s"] += sampling * seconds
        self.times["prefill_s"] += (1.0 - sampling) * seconds

    def _admit(self) -> None:
        while self._may_start() and len(self.running) < self.max_batch:
            seq = self.queue[0]
            lent = self.allocator.allocate(seq.tokens, seq.session)
            if lent is None:
                return
            self.queue.popleft()
            self._start(seq, *lent)

    def _choose_work(self) -> list[tuple[SequenceState, int]]:
        """The tokens to compute in this step: one per decoding sequence, and prompts in order of arrival up to the limit."""
        room = self.max_step_tokens
        work: list[tuple[SequenceState, int]] = []
        for seq in self.running:
            if seq.source is not None and not self._share(seq):
                continue
            pending = len(seq.tokens) - _slot(seq).cached
            if pending == 1:
                work.append((seq, 1))
            elif room > 0:
                work.append((seq, min(pending, room)))
                room -= pending
        work.sort(key=lambda item: order((_slot(item[0]).index, 0, item[1])))
        return work

    def _share(self, seq: SequenceState) -> bool:
        """Copy the prefix from its source. Returns False while the source is still computing it."""
        assert seq.source is not None
        source, tokens, count = seq.source
        slot = _slot(seq)
        if source.tokens is tokens and source.publication == slot.publication:
            if source.busy and source.cached < count:
                return False
            self.counts["shared_tokens"] += self.allocator.share(slot, source, count)
        seq.source = None
        return True


def _slot(seq: SequenceState) -> CacheSlot:
    assert isinstance(seq.kv, CacheSlot)
    return seq.kv
