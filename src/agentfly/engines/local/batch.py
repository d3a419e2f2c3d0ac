"""The running batch: rows join and leave at every step.

In: rows (a prompt and how to sample). Out: after each step, the rows that have news. A row is one list of tokens of which the
first few are cached; a step computes some of the rest, and where none is left it draws the next token. So a new prompt, the
next turn of a chain, an ordinary decode step, a row sent back to the queue and a row whose weights changed under it are all
the same thing:

    tokens  [prompt ........ | sampled .....]
    cached  [=====================]           what is not cached is computed; then one token is drawn

Runs in one thread and knows neither threads nor asyncio. Refuses nothing: prompts are checked before they come here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...types import Request, Sampling
from .attention import Plan, order
from .sampler import draw
from .slots import Slot
from .text import TextStream


class Row:
    """One request while it runs. The last three fields are its news, read and cleared by whoever delivers them."""

    __slots__ = (
        "ahead", "error", "finished", "future", "logprobs", "loop", "new_text", "num_prompt", "on_text", "rng", "sampling",
        "session", "slot", "source", "stop_ids", "stream", "tokens", "versions",
    )  # fmt: skip

    def __init__(self, request: Request, stop_ids: frozenset[int], decode: Callable[[Sequence[int]], str]) -> None:
        self.sampling: Sampling = request.sampling
        self.session = request.session
        self.on_text = request.on_text
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.stop_ids = stop_ids.union(request.sampling.stop_ids)
        self.rng = random.Random(request.sampling.seed)
        self.ahead: list[float] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stream = TextStream(decode, request.sampling.stop) if request.on_text or request.sampling.stop else None
        self.slot: Slot | None = None
        self.source: tuple[Slot, list[int], int] | None = None
        self.loop: Any = None
        self.future: Any = None
        self.new_text = ""
        self.finished: Literal["stop", "length"] | None = None
        self.error: str | None = None

    def uniforms(self, count: int) -> list[float]:
        """The numbers of the next draws. They stay next until a token is accepted: a draw thrown away is drawn again."""
        draw = self.rng.random
        self.ahead += [draw() for _ in range(count - len(self.ahead))]
        return self.ahead[:count]

    def accept(self, token: int, logprob: float, version: int, max_context: int) -> None:
        """Take a drawn token, and see whether the reply ends with it."""
        if logprob != logprob:
            self.error = "the model's logits are not numbers (NaN): its weights are damaged, or training has diverged"
            return
        del self.ahead[0]
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
        """Take drawn tokens up to where the reply ends. How many it took."""
        total = sum(logprobs)
        if self.stream is not None or total != total:  # one by one: text to watch, or NaN to find
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
        if not self.stop_ids.isdisjoint(tokens[:count]):
            count = 1 + next(at for at, token in enumerate(tokens) if token in self.stop_ids)
            self.finished = "stop"
        del self.ahead[:count]
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.versions += [version] * count
        return count

    @property
    def ended_by_id(self) -> bool:
        return len(self.tokens) > self.num_prompt and self.tokens[-1] in self.stop_ids


class Batch:
    """The queue, the rows that run, and the step."""

    def __init__(
        self, model: Any, slots: Any, *, max_batch: int, max_step_tokens: int, max_context: int, device: torch.device
    ) -> None:
        self.model = model
        self.slots: Any = slots
        self.max_batch = max_batch
        self.max_step_tokens = max_step_tokens
        self.max_context = max_context
        self.device = device
        self.queue: deque[Row] = deque()
        self.running: list[Row] = []
        self.counts = {
            "steps": 0,
            "prefilled_tokens": 0,
            "sampled_tokens": 0,
            "reused_tokens": 0,
            "shared_tokens": 0,
            "preempted": 0,
        }

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.running)

    def use(self, model: Any) -> None:
        """Compute with another twin from now on."""
        self.model = model

    def forget(self) -> None:
        """The weights have changed: nothing cached is true any more."""
        self.slots.forget()

    def memory(self) -> dict[str, float]:
        """What the cache holds now."""
        cache = self.slots.cache
        return {"slots": cache.num_slots, "slot_length": cache.length, "kv_bytes": cache.num_bytes}

    def add(self, row: Row) -> None:
        self.queue.append(row)

    def remove(self, row: Row) -> None:
        """A row was cancelled, or has ended. What it cached stays where it is."""
        if row.slot is not None:
            self.slots.give_back(row.slot)
            row.slot = None
            self.running.remove(row)
        elif row in self.queue:
            self.queue.remove(row)

    def clear(self) -> list[Row]:
        """Take every row out, whatever its state."""
        rows = [*self.running, *self.queue]
        self.running, self.queue = [], deque()
        return rows

    def settle(self) -> None:
        """Whoever gets the memory next gets it after all that is under way on the device."""

    def step(self, version: int, valid: Callable[[], bool]) -> list[Row]:
        """One forward pass. Nothing of it is kept where `valid()` says afterwards that the weights changed meanwhile."""
        self._admit()
        picks = self._pick()
        while picks and not self.slots.ensure_length(max(_cached(row) + count for row, count in picks)):
            self._preempt()
            picks = self._pick()
        if not picks:
            return []
        ids: list[int] = []
        ends: list[int] = []
        drawing: list[Row] = []
        for row, count in picks:
            cached = _cached(row)
            ids += row.tokens[cached : cached + count]
            if cached + count == len(row.tokens):
                ends.append(len(ids) - 1)
                drawing.append(row)
        plan = Plan(self.slots.cache, [(_slot(row).index, _cached(row), count) for row, count in picks], self.device)
        logits = forward(self.model, ids, plan, ends or [0])
        if not valid():
            return []
        for row, count in picks:
            _slot(row).cached += count
        self.counts["steps"] += 1
        self.counts["prefilled_tokens"] += len(ids) - len(drawing)
        if drawing:
            self._draw(drawing, logits, version)
        news = [row for row in drawing if row.finished or row.error or row.new_text]
        for row in news:
            if row.finished or row.error:
                self.remove(row)
        return news

    def _draw(self, rows: list[Row], logits: Tensor, version: int) -> None:
        tokens, logprobs = draw(logits, [row.sampling for row in rows], [row.uniforms(1)[0] for row in rows])
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.accept(token, logprob, version, self.max_context)
        self.counts["sampled_tokens"] += len(rows)

    def _admit(self) -> None:
        while self.queue and len(self.running) < self.max_batch:
            row = self.queue[0]
            lent = self.slots.lend(row.tokens, row.session)
            if lent is None:
                return
            self.queue.popleft()
            row.slot, source, count = lent
            row.source = (source, source.tokens, count) if source is not None else None
            self.counts["reused_tokens"] += row.slot.cached
            self.running.append(row)

    def _pick(self) -> list[tuple[Row, int]]:
        """Who computes how many tokens in this step: every decoding row, and prompts in order of arrival up to the limit."""
        room = self.max_step_tokens
        picks: list[tuple[Row, int]] = []
        for row in self.running:
            if row.source is not None and not self._share(row):
                continue
            pending = len(row.tokens) - _cached(row)
            if pending == 1:
                picks.append((row, 1))
            elif room > 0:
                picks.append((row, min(pending, room)))
                room -= pending
        picks.sort(key=lambda pick: order((_slot(pick[0]).index, 0, pick[1])))
        return picks

    def _share(self, row: Row) -> bool:
        """Copy the beginning that another row has computed. False: it is still at it."""
        assert row.source is not None
        source, tokens, count = row.source
        slot = _slot(row)
        if source.tokens is tokens:
            if source.busy and source.cached < count:
                return False
            count = min(count, source.cached)
            if count > slot.cached:
                self.slots.cache.copy(source.index, [slot.index], count)
                slot.cached = count
                self.counts["shared_tokens"] += count
        row.source = None
        return True

    def _preempt(self) -> None:
        """The youngest row goes back to the front of the queue; it will be computed again when there is room."""
        row = self.running.pop()
        self.slots.drop(_slot(row))
        row.slot = row.source = None
        self.queue.appendleft(row)
        self.counts["preempted"] += 1


def forward(model: Any, ids: list[int], plan: Plan, ends: list[int]) -> Tensor:
    """Logits [ends, vocabulary] of a packed line of tokens."""
    keep = torch.tensor(ends, device=plan.positions.device)
    out = model(
        input_ids=torch.tensor([ids], device=plan.positions.device),
        position_ids=plan.positions[None],
        use_cache=False,
        logits_to_keep=keep,
        agentfly_plan=plan,
    )
    logits: Tensor = out.logits[0]
    return logits if logits.shape[0] == len(ends) else logits[keep]


def _slot(row: Row) -> Slot:
    assert row.slot is not None
    return row.slot


def _cached(row: Row) -> int:
    assert row.slot is not None
    return row.slot.cached
