"""The running batch over pages and lanes: prompts are read in chunks, everybody else goes on in rounds of several steps.

In and out as in `batch`: rows, and after each step the rows that have news. A step is at most one pass over some prompt tokens
and one round of the lanes, so that nobody who samples waits for a long prompt, and the host waits for the device once per
round. Pages are found before a round for all the tokens that it may draw; where there are none, the youngest row goes back to
the queue and is computed again later. Runs in one thread; refuses nothing: prompts are checked before they come here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .batch import Batch, Row
from .lanes import MAX_STOPS, STEPS, Lane, Lanes
from .paged import Pools, Reading
from .pages import PAGE, PagedSlot, Pages

STEPS_WHILE_READING = 4
"""Steps of a round while prompts wait to be read: fewer, so that they do not wait long."""


class PagedBatch(Batch):
    """The queue, the rows that run, and the step, on pages."""

    def __init__(
        self,
        model: Any,
        pages: Pages,
        pools: Pools,
        *,
        max_batch: int,
        max_step_tokens: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        self.pools = pools
        super().__init__(
            model,
            pages,
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
            max_context=max_context,
            device=device,
        )
        self._lanes: Lanes | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "model":  # another twin: graphs hold the addresses of the old one's weights
            object.__setattr__(self, "_lanes", None)
        object.__setattr__(self, name, value)

    def memory(self) -> dict[str, float]:
        free: int = self.slots.num_free
        return {"pages": self.slots.num_pages, "free_pages": free, "page_length": PAGE, "kv_bytes": self.pools.num_bytes}

    def step(self, version: int, valid: Callable[[], bool]) -> list[Row]:
        self._admit()
        told: list[Row] = []
        if self._read(version, valid, told) and valid():
            self._round(version, valid, told)
        news = [row for row in told if row.finished or row.error or row.new_text]
        for row in news:
            if row.finished or row.error:
                self.remove(row)
        return news

    # ---- prompts ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.queue and len(self.running) < self.max_batch:
            row = self.queue.popleft()
            slot, source, count = self.slots.lend(row.tokens, row.session)
            row.slot = slot
            row.source = (source, source.tokens, count) if source is not None else None
            self.counts["reused_tokens"] += slot.cached
            self.running.append(row)

    def _read(self, version: int, valid: Callable[[], bool], told: list[Row]) -> bool:
        """Compute the next tokens of prompts, and draw where a prompt ends. False: the weights changed, nothing was kept."""
        picks = self._waiting()
        if not picks:
            return True
        ids: list[int] = []
        ends: list[int] = []
        drawing: list[Row] = []
        for row, count in picks:
            cached = _place(row).cached
            ids += row.tokens[cached : cached + count]
            if cached + count == len(row.tokens):
                ends.append(len(ids) - 1)
                drawing.append(row)
        plan = Reading(self.pools, [(_place(row).pages, _place(row).cached, count) for row, count in picks], self.device)
        keep = torch.tensor(ends or [0], device=self.device)
        out = self.model(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=plan.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            agentfly_plan=plan,
        )
        logits = out.logits[0] if out.logits.shape[1] == len(keep) else out.logits[0][keep]
        if not valid():
            return False
        for row, count in picks:
            _place(row).cached += count
        self.counts["steps"] += 1
        self.counts["prefilled_tokens"] += len(ids) - len(drawing)
        if drawing:
            self._draw(drawing, logits, version)
            told += drawing
        return True

    def _waiting(self) -> list[tuple[Row, int]]:
        """Who reads how many tokens now, in order of arrival, with their pages at hand."""
        room = self.max_step_tokens
        picks: list[tuple[Row, int]] = []
        for row in list(self.running):
            if room <= 0:
                break
            if row.slot is None or (row.source is not None and not self._share(row)):
                continue
            slot = _place(row)
            pending = len(row.tokens) - slot.cached
            if pending > 1:
                count = min(pending, room)
                if not self._grow(row, slot.cached + count):
                    continue
                picks.append((row, count))
                room -= count
        return [(row, count) for row, count in picks if row.slot is not None]

    def _share(self, row: Row) -> bool:
        assert row.source is not None
        source, tokens, count = row.source
        if source.tokens is tokens:
            if source.busy and source.cached < count:
                return False
            self.counts["shared_tokens"] += self.slots.share(_place(row), source, count)
        row.source = None
        return True

    # ---- lanes -----------------------------------------------------------------------------------------------------------

    def _round(self, version: int, valid: Callable[[], bool], told: list[Row]) -> None:
        """A few steps of everybody whose next token can be drawn."""
        ready = [row for row in self.running if self._is_ready(row)]
        if not ready:
            return
        steps = STEPS_WHILE_READING if len(ready) < len(self.running) or self.queue else STEPS
        for row in ready:
            if row.slot is not None:
                self._grow(row, min(_place(row).cached + steps, self.max_context))
        ready = [row for row in ready if row.slot is not None]
        if not ready:
            return
        if self._lanes is None:
            self._lanes = Lanes(self.model, self.pools, count=self.max_batch, max_context=self.max_context, device=self.device)
        tokens, logprobs = self._lanes.round([self._lane(row, steps) for row in ready], steps)
        if not valid():
            return
        self.counts["steps"] += steps
        for number, row in enumerate(ready):
            slot = _place(row)
            for ids, values in zip(tokens, logprobs, strict=True):
                row.accept(ids[number], values[number], version, self.max_context)
                if row.error is not None:
                    break
                slot.cached += 1
                self.counts["sampled_tokens"] += 1
                if row.finished is not None:
                    break
        told += [row for row in ready if row not in told]

    def _is_ready(self, row: Row) -> bool:
        if row.slot is None or row.finished is not None or row.error is not None:
            return False
        return row.source is None and len(row.tokens) - _place(row).cached == 1

    def _lane(self, row: Row, steps: int) -> Lane:
        slot, sampling = _place(row), row.sampling
        stops = sorted(row.stop_ids)
        left = min(sampling.max_tokens - len(row.logprobs), self.max_context - len(row.tokens))
        return Lane(
            token=row.tokens[-1],
            position=slot.cached,
            pages=slot.pages,
            left=left,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            stops=stops if len(stops) <= MAX_STOPS else (),
            uniforms=row.uniforms(steps),
        )

    # ---- room ------------------------------------------------------------------------------------------------------------

    def _grow(self, row: Row, length: int) -> bool:
        """Pages for `length` tokens; the youngest others make room for it. False: it went back to the queue itself."""
        while not self.slots.grow(_place(row), length):
            victim = self.running[-1]
            self._preempt()
            if victim is row:
                return False
        return True

    def _preempt(self) -> None:
        row = self.running.pop()
        self.slots.drop(_place(row))
        row.slot = row.source = None
        self.queue.appendleft(row)
        self.counts["preempted"] += 1


def _place(row: Row) -> PagedSlot:
    slot: Any = row.slot
    assert slot is not None
    return slot  # type: ignore[no-any-return]
