"""Lanes: the chains that sample, side by side at fixed addresses, so that one CUDA graph serves every step.

In: seats (whose lane it is, where it stands, how it draws) and how many steps. Out: a flight, which lands with the tokens and
log-probs of those steps. What a step does is a function of the lanes' tensors alone:

    token, position -> model -> logits -> draw -> token', position + 1, left - 1      a lane with nothing left stands still

so it is captured once for each size of batch and replayed (on a CPU it is simply called). A lane ends at a stop id or when it
has drawn all it may; what else ends a reply (stop strings) the host sees afterwards, and ignores what was drawn beyond. The
host sends only what changes: a lane that goes on needs new pages now and then, and a new window of uniform numbers. So the next
flight can leave before the last one has landed, and the device never waits for the host. When many have left, those at the far
end move up to the lanes between the others, and a smaller graph does.
"""

from __future__ import annotations

import gc
import heapq
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .batch import Row
from .ladder import Ladder
from .paged import Decoding, Pools, fused_kernels
from .pages import PAGE, PagedSlot
from .sampler import draw_lanes

SIZES = (2, 4, 16, 24, 48, 96, 160, 192, 224, 320, 384, 448, 640, 768)
COARSE = (1, 8, 32, 64, 128, 256, 512, 1024)
MAX_STEPS = 8  # of one flight
MAX_STOPS = 16  # stop ids that the lanes can look for; a row with more is ended by the host
WINDOW = 64  # uniform numbers that a lane is given at once
Numbers = npt.NDArray[Any]
TOKEN, POSITION, LEFT, TOP_K, DRAWN, STOPS = range(6)  # columns of the lanes' whole numbers; the stops are the last ones


class Seat:
    """A row in a lane. `taken` counts the tokens that it has been given; `watched`: only the host can see where it ends."""

    __slots__ = ("cuts", "gone", "lane", "row", "sent_pages", "taken", "version", "watched")

    def __init__(self, row: Row, lane: int, version: int) -> None:
        sampling = row.sampling
        self.row, self.lane, self.version = row, lane, version
        self.taken = self.sent_pages = 0
        self.gone = False
        self.watched = row.stream is not None or len(row.stop_ids) > MAX_STOPS
        self.cuts = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0

    @property
    def slot(self) -> PagedSlot:
        slot: Any = self.row.slot
        assert slot is not None
        return slot  # type: ignore[no-any-return]


class Flight:
    """Steps on their way.

    `lanes` take part; `homes` are the lanes in which the same rows sit now, and `turns` the turns of those lanes: a row that
    has left has ended its lane's turn.
    """

    def __init__(self, lanes: Numbers, turns: Numbers, steps: int, results: Sequence[Tensor], events: Any) -> None:
        self.lanes, self.homes, self.turns, self.steps = lanes, lanes.copy(), turns, steps
        self._results, self._events = results, events

    def land(self) -> tuple[Numbers, Numbers, Numbers, float | None]:
        """Wait for the device. Tokens and log-probs [steps, lanes], what each lane has left, a step's milliseconds if known."""
        took = None
        if self._events is not None:
            first, last = self._events
            last.synchronize()
            took = first.elapsed_time(last) / self.steps
        tokens, logprobs, left = (result.numpy() for result in self._results)
        return tokens, logprobs, left, took


class Lanes:
    """The tensors of all lanes, the host's view of them, and the graphs over them.

    The host's view is arrays by lane, because most lanes just go on, and a loop over all of them would cost as much as the
    steps themselves.
    """

    def __init__(self, model: Any, pools: Pools, *, count: int, max_context: int, device: torch.device) -> None:
        self.model, self.pools, self.device = model, pools, device
        self.width = -(-max_context // PAGE)
        self.whole = torch.zeros(count, STOPS + MAX_STOPS, dtype=torch.int64, device=device)
        self.real = torch.zeros(count, 3, dtype=torch.float32, device=device)  # temperature, top_p, min_p
        self.uniforms = torch.zeros(count, WINDOW, dtype=torch.float32, device=device)
        self.table = torch.zeros(count, self.width, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(MAX_STEPS, count, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(MAX_STEPS, count, dtype=torch.float32, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.seats: list[Seat | None] = [None] * count
        self._position, self._left, self._launched, self._landed, self._room, self._window_end, self._turn = (
            np.zeros(count, np.int64) for _ in range(7)
        )
        self._drawn = np.zeros((count, 128), np.int64)
        self._drawn_logprobs = np.zeros((count, 128), np.float32)
        self._free = list(range(count))
        self._stopped: list[int] = []
        self._new: list[Seat] = []
        self._flying: weakref.WeakSet[Flight] = weakref.WeakSet()
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        self._ladders = {cuts: Ladder(COARSE, SIZES, count) for cuts in (False, True)}
        self._memory: Any = None
        self._side = new_stream(device)  # for recording

    # ---- who sits where --------------------------------------------------------------------------------------------------

    def seat(self, row: Row, position: int, left: int, version: int) -> Seat:
        """The free lane with the lowest number: the fewer lanes a graph has, the faster it is."""
        lane = heapq.heappop(self._free)
        seat = self.seats[lane] = Seat(row, lane, version)
        self._position[lane], self._left[lane] = position, left
        self._launched[lane] = self._landed[lane] = self._room[lane] = self._window_end[lane] = 0
        self._new.append(seat)
        return seat

    def vacate(self, seat: Seat) -> None:
        """The lane stands still from the next flight on; what it has drawn since, nobody reads."""
        lane = seat.lane
        seat.gone = True
        self.seats[lane] = None
        self._turn[lane] += 1
        self._left[lane] = 0
        heapq.heappush(self._free, lane)
        self._stopped.append(lane)

    def take(self, seat: Seat) -> tuple[list[int], list[float]]:
        """What has landed of a lane since this was last asked."""
        lane, first, last = seat.lane, seat.taken, int(self._landed[seat.lane])
        seat.taken = last
        return self._drawn[lane, first:last].tolist(), self._drawn_logprobs[lane, first:last].tolist()

    # ---- flights ---------------------------------------------------------------------------------------------------------

    def going(self) -> Numbers:
        """The lanes that have steps left to launch."""
        return np.flatnonzero(self._launched < self._left)

    def most(self, lanes: Numbers) -> int:
        """How many steps the one with most left has."""
        return int((self._left[lanes] - self._launched[lanes]).max())

    def short(self, lanes: Numbers, steps: int) -> list[tuple[Seat, int]]:
        """Who needs pages for that many steps, and for how many tokens in all."""
        length = self._position[lanes] + np.minimum(self._launched[lanes] + steps, self._left[lanes])
        lacking = length > self._room[lanes]
        return [(self._seat(lane), int(end)) for lane, end in zip(lanes[lacking], length[lacking], strict=True)]

    def launch(self, lanes: Numbers, steps: int) -> Flight:
        """Send `steps` steps on their way. Nothing here waits for the device."""
        lanes = self._close_up(lanes)
        size, step = self._graph(1 + int(lanes[-1]), any(seat.cuts for seat in self.seats if seat is not None))
        self._send_changes(lanes, steps)
        cuda = self.device.type == "cuda"
        event: Any = torch.cuda.Event
        events = [event(enable_timing=True) for _ in range(2)] if cuda else None
        if events:
            events[0].record()
        for _ in range(steps):
            step()
        results = []
        for part in (self.tokens[:steps, :size], self.logprobs[:steps, :size], self.whole[:size, LEFT]):
            here = torch.empty(part.shape, dtype=part.dtype, pin_memory=cuda)
            results.append(here.copy_(part, non_blocking=cuda))
        if events:
            events[1].record()
        self._launched[lanes] += steps
        flight = Flight(lanes, self._turn[lanes], steps, results, events)
        self._flying.add(flight)
        return flight

    def _close_up(self, lanes: Numbers) -> Numbers:
        """The lanes that go on, after those at the far end have moved up if a smaller graph then serves all."""
        size = self._fit(len(lanes))
        far = lanes[lanes >= size]
        free = [lane for lane in self._free if lane < size]
        if size >= self._fit(1 + int(lanes[-1])) or len(free) < len(far) or not self._launched[far].all():
            return lanes  # one that has not started yet is not there to be moved
        near = np.array([heapq.heappop(self._free) for _ in far], np.int64)
        self._send_stops()
        source, target = self._send(far.tolist()), self._send(near.tolist())
        for tensor in (self.whole, self.real, self.uniforms, self.table):
            tensor.index_copy_(0, target, tensor.index_select(0, source))
        self.whole[:, LEFT].index_fill_(0, source, 0)
        moved = np.arange(len(self.seats))
        moved[far] = near
        here = [(flight, self._here(flight) & (moved[flight.homes] != flight.homes)) for flight in self._flying]
        self._turn[far] += 1
        self._turn[near] += 1
        for flight, who in here:
            flight.homes[who] = moved[flight.homes[who]]
            flight.turns[who] = self._turn[flight.homes[who]]
        for array in (
            self._position, self._left, self._launched, self._landed, self._room, self._window_end, self._drawn,
            self._drawn_logprobs,
        ):  # fmt: skip
            array[near] = array[far]
        self._left[far] = self._launched[far] = 0
        for old, new in zip(far.tolist(), near.tolist(), strict=True):
            seat = self._seat(old)
            seat.lane, self.seats[new], self.seats[old] = new, seat, None
            heapq.heappush(self._free, old)
        return self.going()

    def _fit(self, lanes: int) -> int:
        """The size of the smallest step that serves so many lanes."""
        return self._ladders[False].fit(lanes) if self.device.type == "cuda" else lanes

    def land(self, flight: Flight) -> tuple[list[Seat], int, float | None]:
        """Who has ended or is watched (what was drawn is then theirs to `take`), how many tokens were drawn, ms of a step."""
        tokens, logprobs, left, took = flight.land()
        self._flying.discard(flight)
        here = self._here(flight)
        lanes, columns = flight.homes[here], flight.lanes[here]
        seats = [self._seat(lane) for lane in lanes]
        first = self._landed[lanes]
        self._stretch(int(first.max(initial=0)) + flight.steps)
        for number in range(flight.steps):
            self._drawn[lanes, first + number] = tokens[number, columns]
            self._drawn_logprobs[lanes, first + number] = logprobs[number, columns]
        self._landed[lanes] += flight.steps
        bad = np.asarray(~np.isfinite(logprobs[:, columns]).all(axis=0)).tolist()
        over = (left[columns] == 0).tolist()
        told = [seat for seat, zero, nan in zip(seats, over, bad, strict=True) if zero or nan or seat.watched]
        return told, flight.steps * len(seats), took

    def still_seated(self, flight: Flight) -> list[Seat]:
        """Those who took part in a flight and have not left since."""
        return [self._seat(lane) for lane in flight.homes[self._here(flight)]]

    def _here(self, flight: Flight) -> Numbers:
        """Which of those who took part have not left since."""
        here: Numbers = self._turn[flight.homes] == flight.turns
        return here

    def _seat(self, lane: Any) -> Seat:
        seat: Seat | None = self.seats[lane]
        assert seat is not None
        return seat

    def _stretch(self, length: int) -> None:
        """Room for that many drawn tokens in every lane."""
        while self._drawn.shape[1] < length:
            self._drawn = np.concatenate([self._drawn, np.zeros_like(self._drawn)], axis=1)
            self._drawn_logprobs = np.concatenate([self._drawn_logprobs, np.zeros_like(self._drawn_logprobs)], axis=1)

    def _send_changes(self, lanes: Numbers, steps: int) -> None:
        starts = [seat for seat in self._new if not seat.gone]
        self._new = []
        pages: list[tuple[int, int]] = []
        for seat, _ in self.short(lanes, steps):
            held = seat.slot.pages
            where = seat.lane * self.width
            pages += [(where + at, held[at]) for at in range(seat.sent_pages, len(held))]
            seat.sent_pages = len(held)
            self._room[seat.lane] = len(held) * PAGE
        windows: list[tuple[int, list[float]]] = []
        for lane in lanes[self._launched[lanes] + steps > self._window_end[lanes]].tolist():
            seat = self._seat(lane)
            ahead = int(self._launched[lane]) - seat.taken  # the row counts from the last token that it was given
            windows.append((lane, seat.row.uniforms(ahead + WINDOW)[ahead:]))
            self._window_end[lane] = self._launched[lane] + WINDOW
        self._send_stops()
        if starts:
            who = self._send([seat.lane for seat in starts])
            self.whole.index_copy_(0, who, self._send([self._start(seat) for seat in starts]))
            drawing = [(s.temperature, s.top_p, s.min_p) for s in (seat.row.sampling for seat in starts)]
            self.real.index_copy_(0, who, self._send(drawing, torch.float32))
        if windows:
            who = self._send([lane for lane, _ in windows])
            self.uniforms.index_copy_(0, who, self._send([numbers for _, numbers in windows], torch.float32))
            self.whole[:, DRAWN].index_fill_(0, who, 0)
        if pages:
            place, page = self._send(pages).unbind(1)
            self.table.view(-1).index_copy_(0, place, page.to(torch.int32))
        self.at.zero_()

    def _send_stops(self) -> None:
        if self._stopped:
            self.whole[:, LEFT].index_fill_(0, self._send(self._stopped), 0)
            self._stopped = []

    def _start(self, seat: Seat) -> list[int]:
        row = seat.row
        stops = sorted(row.stop_ids) if len(row.stop_ids) <= MAX_STOPS else []
        position, left = int(self._position[seat.lane]), int(self._left[seat.lane])
        return [row.tokens[-1], position, left, row.sampling.top_k, 0, *stops, *[-1] * (MAX_STOPS - len(stops))]

    def _send(self, numbers: Iterable[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        tensor = torch.tensor(numbers, dtype=dtype)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    # ---- graphs ----------------------------------------------------------------------------------------------------------

    def _graph(self, lanes: int, cuts: bool) -> tuple[int, Callable[[], None]]:
        """A step of that many lanes, or of somewhat more."""
        if self.device.type != "cuda":
            return lanes, lambda: self._step(lanes, cuts)
        size = self._ladders[cuts].pick(lanes)
        if (size, cuts) not in self._graphs:
            self._graphs[size, cuts] = self._record(size, cuts)
        return size, self._graphs[size, cuts]

    def _record(self, size: int, cuts: bool) -> Callable[[], None]:
        def step() -> None:
            self._step(size, cuts)

        kept = self.whole.clone(), self.at.clone()
        self.whole[:, LEFT] = 0  # kernels are made ready by steps in which every lane stands still
        self.at.zero_()
        replay, self._memory = record(step, self.device, self._memory, self._side)
        self.whole.copy_(kept[0])
        self.at.copy_(kept[1])
        return replay

    def _step(self, size: int, cuts: bool) -> None:
        """One token for every lane that has any left. No size, no branch and no address depends on what the tensors hold."""
        whole = self.whole[:size]
        position, left = whole[:, POSITION], whole[:, LEFT]
        alive = left > 0
        offset = position % PAGE
        page = self.table[:size].gather(1, (position // PAGE)[:, None])[:, 0].long()
        out = self.model(
            input_ids=whole[:, TOKEN][None],
            position_ids=position[None],
            use_cache=False,
            agentfly_plan=Decoding(
                self.pools,
                self.table[:size],
                torch.where(alive, page * PAGE + offset, offset),  # page 0 is nobody's
                torch.where(alive, position + 1, 0).to(torch.int32),
            ),
        )
        uniforms = self.uniforms[:size].gather(1, whole[:, DRAWN].clamp(max=WINDOW - 1)[:, None])[:, 0]
        temperature, top_p, min_p = self.real[:size].unbind(1)
        fused = None if cuts else fused_kernels(self.device)
        if fused is not None:
            ids, logprobs = fused.draw(out.logits[0], uniforms, temperature)
        else:
            top_k = whole[:, TOP_K] if cuts else None
            ids, logprobs = draw_lanes(out.logits[0], uniforms, temperature, top_k, top_p, min_p)
        self.tokens[:, :size].index_copy_(0, self.at, ids[None])
        self.logprobs[:, :size].index_copy_(0, self.at, logprobs[None])
        stopped = (ids[:, None] == whole[:, STOPS:]).any(dim=1)
        whole[:, TOKEN] = torch.where(alive, ids, whole[:, TOKEN])
        position += alive
        whole[:, DRAWN] += alive
        left.copy_(torch.where(stopped, 0, left - alive.long()))
        self.at += 1


def new_stream(device: torch.device) -> Any:
    """A stream of one's own on a GPU; None elsewhere."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def record(work: Callable[[], None], device: torch.device, memory: Any, side: Any) -> tuple[Callable[[], None], Any]:
    """A CUDA graph of `work`, which is run once first (its kernels are ready then), and the memory that it shares with others.

    Not by `torch.cuda.graph`, which collects all garbage and gives all cached memory back each time. Other threads may use the
    device meanwhile (a tool that embeds, a reward model), so only this one's calls are watched. It is recorded on the stream
    `side`: products keep working memory for each stream, so graphs that may run at the same time need different ones.
    """
    side.wait_stream(torch.cuda.current_stream(device))
    graph: Any = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    with torch.cuda.stream(side):
        work()
        side.synchronize()
        gc.disable()  # what it frees on the device would end up in the graph
        try:
            graph.capture_begin(*(() if memory is None else (memory,)), capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
    torch.cuda.current_stream(device).wait_stream(side)
    return graph.replay, memory or graph.pool()
