"""Lanes: the chains that sample, side by side at fixed addresses, so that one CUDA graph serves every step.

In: seats (whose lane it is, where it stands, how it draws) and how many steps. Out: a flight, which lands with the tokens and
log-probs of those steps. What a step does is a function of the lanes' tensors alone:

    token, position -> model -> logits -> draw -> token', position + 1, left - 1      a lane with nothing left stands still

so it is captured once for each size of batch and replayed (on a CPU it is simply called). A lane ends at a stop id or when it
has drawn all it may; what else ends a reply (stop strings) the host sees afterwards, and ignores what was drawn beyond. The
host sends only what changes: a lane that goes on needs new pages now and then, and a new window of uniform numbers. So the next
flight can leave before the last one has landed, and the device never waits for the host.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import Row
from .paged import Decoding, Pools, fused_kernels
from .pages import PAGE, PagedSlot
from .sampler import draw_lanes

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)
COARSE = (1, 8, 32, 64, 128, 256, 512, 1024)
PATIENCE = 24
"""Flights that could have done with a smaller graph before it is recorded: recording takes as long as many steps."""

MAX_STEPS = 8  # of one flight
MAX_STOPS = 16  # stop ids that the lanes can look for; a row with more is ended by the host
WINDOW = 64  # uniform numbers that a lane is given at once
TOKEN, POSITION, LEFT, TOP_K, DRAWN, STOPS = range(6)  # columns of the lanes' whole numbers; the stops are the last ones


class Seat:
    """A row in a lane. `launched` counts the steps that were sent on their way, landed or not."""

    __slots__ = ("cuts", "gone", "landed", "lane", "launched", "left", "position", "row", "sent_pages", "window_end")

    def __init__(self, row: Row, lane: int, position: int, left: int) -> None:
        self.row, self.lane, self.position, self.left = row, lane, position, left
        self.launched = self.landed = 0
        self.sent_pages = self.window_end = 0
        self.gone = False
        sampling = row.sampling
        self.cuts = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0

    @property
    def slot(self) -> PagedSlot:
        slot: Any = self.row.slot
        assert slot is not None
        return slot  # type: ignore[no-any-return]

    def length(self, steps: int) -> int:
        """Tokens that are cached once `steps` more have been drawn."""
        return self.position + min(self.launched + steps, self.left)


class Flight:
    """Steps on their way. `seats` are those who take part."""

    def __init__(self, seats: Sequence[Seat], steps: int, tokens: Tensor, logprobs: Tensor, events: Any) -> None:
        self.seats, self.steps = seats, steps
        self._tokens, self._logprobs, self._events = tokens, logprobs, events

    def land(self) -> tuple[list[list[int]], list[list[float]], bool, float | None]:
        """Wait for the device. Tokens and log-probs by lane, whether all are numbers, and a step's milliseconds, if known."""
        took = None
        if self._events is not None:
            first, last = self._events
            last.synchronize()
            took = first.elapsed_time(last) / self.steps
        return self._tokens.T.tolist(), self._logprobs.T.tolist(), bool(torch.isfinite(self._logprobs).all()), took


class Lanes:
    """The tensors of all lanes, and the graphs over them."""

    def __init__(self, model: Any, pools: Pools, *, count: int, max_context: int, device: torch.device) -> None:
        self.model, self.pools, self.device = model, pools, device
        self.sizes = sorted({size for size in SIZES if size < count} | {count})
        self.width = -(-max_context // PAGE)
        self.whole = torch.zeros(count, STOPS + MAX_STOPS, dtype=torch.int64, device=device)
        self.real = torch.zeros(count, 3, dtype=torch.float32, device=device)  # temperature, top_p, min_p
        self.uniforms = torch.zeros(count, WINDOW, dtype=torch.float32, device=device)
        self.table = torch.zeros(count, self.width, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(MAX_STEPS, count, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(MAX_STEPS, count, dtype=torch.float32, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self._free = list(range(count))
        self._stopped: list[int] = []
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        self._missed: dict[tuple[int, bool], int] = {}
        self._memory: Any = None

    # ---- who sits where --------------------------------------------------------------------------------------------------

    def seat(self, row: Row, position: int, left: int) -> Seat:
        """The free lane with the lowest number: the fewer lanes a graph has, the faster it is."""
        return Seat(row, heapq.heappop(self._free), position, left)

    def vacate(self, seat: Seat) -> None:
        """The lane stands still from the next flight on; what it has drawn since, nobody reads."""
        seat.gone = True
        heapq.heappush(self._free, seat.lane)
        self._stopped.append(seat.lane)

    # ---- flights ---------------------------------------------------------------------------------------------------------

    def launch(self, seats: Sequence[Seat], steps: int) -> Flight:
        """Send `steps` steps on their way. Nothing here waits for the device."""
        size, step = self._graph(1 + max([seat.lane for seat in seats]), any(seat.cuts for seat in seats))
        self._send_changes(seats, steps)
        cuda = self.device.type == "cuda"
        event: Any = torch.cuda.Event
        events = [event(enable_timing=True) for _ in range(2)] if cuda else None
        if events:
            events[0].record()
        for _ in range(steps):
            step()
        results = []
        for whole in (self.tokens, self.logprobs):
            part = whole[:steps, :size]
            here = torch.empty(part.shape, dtype=part.dtype, pin_memory=cuda)
            results.append(here.copy_(part, non_blocking=cuda))
        if events:
            events[1].record()
        for seat in seats:
            seat.launched += steps
        return Flight(seats, steps, results[0], results[1], events)

    def _send_changes(self, seats: Sequence[Seat], steps: int) -> None:
        starts, pages, windows = [], [], []
        for seat in seats:
            row, held = seat.row, seat.slot.pages
            if seat.launched == 0:
                starts.append(seat)
            if len(held) > seat.sent_pages:
                first = seat.lane * self.width
                pages += [(first + at, held[at]) for at in range(seat.sent_pages, len(held))]
                seat.sent_pages = len(held)
            if seat.launched + steps > seat.window_end:
                ahead = seat.launched - seat.landed  # the row counts from the last token that has landed
                windows.append((seat.lane, row.uniforms(ahead + WINDOW)[ahead:]))
                seat.window_end = seat.launched + WINDOW
        if self._stopped:
            self.whole[:, LEFT].index_fill_(0, self._send(self._stopped), 0)
            self._stopped = []
        if starts:
            lanes = self._send([seat.lane for seat in starts])
            self.whole.index_copy_(0, lanes, self._send([_start(seat) for seat in starts]))
            drawing = [(s.temperature, s.top_p, s.min_p) for s in (seat.row.sampling for seat in starts)]
            self.real.index_copy_(0, lanes, self._send(drawing, torch.float32))
        if windows:
            lanes = self._send([lane for lane, _ in windows])
            self.uniforms.index_copy_(0, lanes, self._send([numbers for _, numbers in windows], torch.float32))
            self.whole[:, DRAWN].index_fill_(0, lanes, 0)
        if pages:
            where, page = self._send(pages).unbind(1)
            self.table.view(-1).index_copy_(0, where, page.to(torch.int32))
        self.at.zero_()

    def _send(self, numbers: Iterable[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        tensor = torch.tensor(numbers, dtype=dtype)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    # ---- graphs ----------------------------------------------------------------------------------------------------------

    def _graph(self, lanes: int, cuts: bool) -> tuple[int, Callable[[], None]]:
        """A graph for that many lanes, or for somewhat more: one that fits is recorded when it has been missed often."""
        best = next(size for size in self.sizes if size >= lanes)
        size = next((size for size in self.sizes if size >= lanes and (size, cuts) in self._graphs), None)
        if size != best:
            missed = self._missed[best, cuts] = self._missed.get((best, cuts), 0) + 1
            if size is None:
                coarse = next(size for size in (*COARSE, self.sizes[-1]) if size >= lanes)
                best = min(coarse, self.sizes[-1])
            if size is None or missed > PATIENCE or self.device.type != "cuda":
                size = best
                self._graphs[size, cuts] = self._record(size, cuts)
        return size, self._graphs[size, cuts]

    def _record(self, size: int, cuts: bool) -> Callable[[], None]:
        def step() -> None:
            self._step(size, cuts)

        if self.device.type != "cuda":
            return step
        kept = self.whole.clone(), self.at.clone()
        self.whole[:, LEFT] = 0  # kernels are made ready by steps in which every lane stands still
        self.at.zero_()
        replay, self._memory = record(step, self.device, self._memory)
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


def record(work: Callable[[], None], device: torch.device, memory: Any) -> tuple[Callable[[], None], Any]:
    """A CUDA graph of `work`, which is run a few times first, and the pool of memory that it shares with others."""
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):
        work()
    return graph.replay, memory or graph.pool()


def _start(seat: Seat) -> list[int]:
    row = seat.row
    stops = sorted(row.stop_ids) if len(row.stop_ids) <= MAX_STOPS else []
    numbers = [row.tokens[-1], seat.position, seat.left, row.sampling.top_k, 0]
    return [*numbers, *stops, *[-1] * (MAX_STOPS - len(stops))]
