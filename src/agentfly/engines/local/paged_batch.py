"""The running batch over pages and lanes: prompts are read in chunks, everybody else goes on in flights of several steps.

In and out as in `batch`: rows, and after each step the rows that have news. A step sends the next prompt tokens and the next
flight of the lanes on their way, and then lands the flight before it:

    host      send 2 | land 1 | send 3 | land 2 | ...
    device    ... 1 .|... 2 ........|... 3 .......      never waits for the host, while there is anything to draw

so a row that has ended is seen one flight late; its lane stands still meanwhile. Prompts are read beside the flights (see
`reader`), and who has been read sits down when the pass is over. What is on its way may still write to pages that were taken
from a row: those who get them write later, because a pass begins after all flights sent before it, and a flight that could
meet a pass of somebody who has left waits for it. Pages are found before a flight
for all the tokens that it may draw; where there are none, the youngest row goes back to the queue and is computed again. Runs
in one thread; refuses nothing: prompts are checked before they come here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .batch import Batch, Row
from .lanes import MAX_STEPS, Flight, Lanes, Seat
from .paged import Pools
from .pages import PAGE, PagedSlot, Pages
from .reader import MAX_ROWS, Pass, Pick, Reader

FLIGHT_MS = 6.0
"""What a flight should take: long enough for the host to do its part, and no longer, because who ends waits for it."""

READ_STEPS = 1.0
READ_TOKENS = 1024
"""On a GPU a pass over prompts runs beside the lanes' flights and slows them down, by about a step however few tokens it has.
So prompts are read as soon as those who wait have lost as many steps together as that costs the others together, or when so
many tokens wait; and one pass at a time, so that those who come meanwhile are read together."""

AHEAD = {"cuda": 1}
"""Flights on their way when a step ends, by kind of device. A CPU computes them itself: it gains nothing by sending any."""


@dataclass(frozen=True, slots=True)
class _Sent:
    flight: Flight
    version: int
    valid: Callable[[], bool]


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
        self.ahead = AHEAD.get(device.type, 0)
        self._sent: deque[_Sent] = deque()
        self._unread: dict[Row, None] = {}  # rows that run and have no seat, in order of arrival
        self._seats: dict[Row, Seat] = {}
        self._step_ms = 0.0
        self._passes: deque[tuple[int, Pass]] = deque()  # numbered, on their way
        self._last_pass = self._passes_over = 0
        self._needs: dict[Row, int] = {}  # the pass that a row waits for
        self._stray = False  # somebody left before the pass was over
        self._waited = 0  # steps that rows which are to be read have lost together
        self._most_running: float = max_batch  # fewer while pages are short
        super().__init__(
            model,
            pages,
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
            max_context=max_context,
            device=device,
        )
        self.use(model)

    def use(self, model: Any) -> None:
        """Another twin: graphs hold the addresses of the old one's weights, and nothing that is on its way is kept."""
        super().use(model)
        self._sent.clear()
        self._hold_up()
        for row in list(self._seats):
            self._stand_up(row)
        sizes: dict[str, Any] = {"device": self.device, "max_context": self.max_context}
        self._lanes = Lanes(model, self.pools, count=self.max_batch, **sizes)
        self._reader = Reader(model, self.pools, max_tokens=self.max_step_tokens, **sizes)

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.running or self._sent)

    def memory(self) -> dict[str, float]:
        free: int = self.slots.num_free
        return {"pages": self.slots.num_pages, "free_pages": free, "page_length": PAGE, "kv_bytes": self.pools.num_bytes}

    def step(self, version: int, valid: Callable[[], bool]) -> list[Row]:
        """Send what comes next on its way, and land what was sent before."""
        while self._passes and self._passes[0][1].over():
            self._passes_over = self._passes.popleft()[0]
        self._admit()
        self._read()
        flight = self._launch(version)
        if flight is not None:
            self._sent.append(_Sent(flight, version, valid))
        told: list[Row] = []
        while len(self._sent) > (self.ahead if flight is not None else 0):
            self._land(self._sent.popleft(), told)
        news = list(dict.fromkeys(told))
        for row in news:
            if row.finished or row.error:
                self.remove(row)
        return news

    def remove(self, row: Row) -> None:
        self._leave(row)
        self._most_running = min(self.max_batch, self._most_running + 0.25)
        super().remove(row)

    def clear(self) -> list[Row]:
        for row in self.running:
            self._leave(row)
        self._sent.clear()
        return super().clear()

    def settle(self) -> None:
        self._hold_up()

    def forget(self) -> None:
        """The weights have changed. Every row that runs is read again; what is on its way says by itself that it is void."""
        self._stray = self._stray or bool(self._passes)
        self._most_running = self.max_batch
        for row in list(self._seats):
            self._stand_up(row)
        self.slots.forget()

    # ---- prompts ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.queue and len(self.running) < self.max_batch:
            if len(self.running) >= self._most_running and not self._has_room(self.queue[0]):
                break
            row = self.queue.popleft()
            slot, source, count = self.slots.lend(row.tokens, row.session)
            row.slot = slot
            row.source = (source, source.tokens, count) if source is not None else None
            self.counts["reused_tokens"] += slot.cached
            self.running.append(row)
            self._unread[row] = None

    def _has_room(self, row: Row) -> bool:
        """Whether there are pages for it beside all that those who run hold and will hold after a page more each."""
        places = [(_place(each).pages, _num_pages(len(each.tokens))) for each in self.running]
        held = len({page for pages, _ in places for page in pages})  # siblings hold those of their prompt together
        more = sum(max(0, needed - len(pages)) + 1 for pages, needed in places)
        return held + more + _num_pages(len(row.tokens)) < self.slots.num_pages  # type: ignore[no-any-return]

    def _read(self) -> None:
        """The next tokens of prompts, all but each one's last, in order of arrival."""
        if self._can_wait():
            return
        self._waited = 0
        room = self.max_step_tokens
        reading: list[tuple[Row, int]] = []
        for row in list(self._unread):
            if room <= 0 or len(reading) == MAX_ROWS:
                break
            if row.slot is None or (row.source is not None and not self._share(row)):
                continue
            slot = _place(row)
            count = min(len(row.tokens) - 1 - slot.cached, room)
            if count > 0 and self._grow(row, slot.cached + count):
                reading.append((row, count))
                room -= count
        picks: list[Pick] = []
        for row, count in reading:
            if row.slot is not None:  # making room for others may have sent it back
                slot = _place(row)
                picks.append((row.tokens[slot.cached : slot.cached + count], slot.pages, slot.cached))
                slot.cached += count
                self.counts["prefilled_tokens"] += count
        if picks:
            self.counts["steps"] += 1
            sent = self._reader.read(picks)
            if sent is not None:
                self._last_pass += 1
                self._passes.append((self._last_pass, sent))
                self._needs.update((row, self._last_pass) for row, _ in reading if row.slot is not None)

    def _can_wait(self) -> bool:
        """Whether those who sample lose more by a pass now than those who wait lose by one more flight."""
        if not self.ahead or not self._sent:
            return False
        if self._passes:
            return True
        lost = self._waited + self._num_steps() * len(self._unread)
        return lost < READ_STEPS * len(self._seats) and self._num_unread() < READ_TOKENS

    def _num_unread(self) -> int:
        return sum([len(row.tokens) - 1 - _place(row).cached for row in self._unread if row.source is None])

    def _share(self, row: Row) -> bool:
        assert row.source is not None
        source, tokens, count = row.source
        if source.tokens is tokens:
            if source.busy and source.cached < count:
                return False
            self.counts["shared_tokens"] += self.slots.share(_place(row), source, count)
            self._needs[row] = self._last_pass  # its source may still be on its way
        row.source = None
        return True

    # ---- lanes -----------------------------------------------------------------------------------------------------------

    def _launch(self, version: int) -> Flight | None:
        """A few steps of everybody whose next token can be drawn; None where nobody's can."""
        if not len(self._lanes.going()):
            self._hold_up()
        for row in list(self._unread):
            ready = self._needs.get(row, 0) <= self._passes_over
            if ready and row.source is None and len(row.tokens) - _place(row).cached == 1:
                self._needs.pop(row, None)
                left = min(row.sampling.max_tokens - len(row.logprobs), self.max_context - len(row.tokens))
                self._seats[row] = self._lanes.seat(row, _place(row).cached, left, version)
                del self._unread[row]
        lanes, steps = self._lanes.going(), self._num_steps()
        for seat, length in self._lanes.short(lanes, steps):
            if not seat.gone:  # making room for others may have sent it back
                self._grow(seat.row, length)
        lanes = self._lanes.going()
        if not len(lanes):
            return None
        if self._stray:
            self._hold_up()
        steps = min(steps, self._lanes.most(lanes))
        self.counts["steps"] += steps
        self._waited += steps * len(self._unread)
        return self._lanes.launch(lanes, steps)

    def _hold_up(self) -> None:
        """What is sent from now on begins when every pass is over."""
        if self._passes:
            self._passes_over, last = self._passes[-1]
            last.hold_up()
            self._passes.clear()
        self._stray = False

    def _num_steps(self) -> int:
        if not self._step_ms:
            return MAX_STEPS if self.ahead == 0 else MAX_STEPS // 2
        return max(1, min(MAX_STEPS, round(FLIGHT_MS / self._step_ms)))

    def _land(self, sent: _Sent, told: list[Row]) -> None:
        if not sent.valid():  # the weights changed on the way: nothing of it is kept, and who took part is read again
            sent.flight.land()
            for seat in self._lanes.still_seated(sent.flight):
                self._stand_up(seat.row)
            return
        ended, drawn, took = self._lanes.land(sent.flight)
        if took is not None:
            self._step_ms = took if not self._step_ms else 0.8 * self._step_ms + 0.2 * took
        self.counts["sampled_tokens"] += drawn
        for seat in ended:
            row = seat.row
            self._take(seat)
            if row.finished or row.error or row.new_text:
                told.append(row)
                if row.finished or row.error:
                    self._leave(row)

    def _take(self, seat: Seat) -> None:
        """Give a row what its lane has drawn."""
        tokens, logprobs = self._lanes.take(seat)
        count = seat.row.extend(tokens, logprobs, seat.version, self.max_context)
        seat.slot.cached += count
        self.counts["sampled_tokens"] -= len(tokens) - count  # drawn beyond the end

    def _stand_up(self, row: Row) -> None:
        """Its lane is free; what it lacks is to be read again."""
        self._leave(row)
        self._unread[row] = None

    def _leave(self, row: Row) -> None:
        self._unread.pop(row, None)
        self._stray = self._stray or self._needs.pop(row, 0) > self._passes_over
        seat = self._seats.pop(row, None)
        if seat is not None:
            if row.finished is None and row.error is None:
                self._take(seat)
            self._lanes.vacate(seat)

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
        self._leave(row)
        self.slots.drop(_place(row))
        row.slot = row.source = None
        self.queue.appendleft(row)
        self._most_running = max(1, len(self.running))  # or it would come back at once, be read again and be sent back again
        self.counts["preempted"] += 1


def _num_pages(length: int) -> int:
    return -(-length // PAGE)


def _place(row: Row) -> PagedSlot:
    slot: Any = row.slot
    assert slot is not None
    return slot  # type: ignore[no-any-return]
