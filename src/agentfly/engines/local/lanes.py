"""Lanes: the chains that sample, side by side at fixed addresses, so that one CUDA graph serves every step.

In: for a round of a few steps, each lane's last token, its position and pages, how it draws, and a uniform number per step.
Out: the tokens and log-probs of the whole round, read by the host at its end and not before. What a step does is a function of
the lanes' tensors alone:

    token, position -> model -> logits -> draw -> token', position + 1, out[step]      a lane that has ended stands still

so it is captured once for each size of batch and replayed (on a CPU it is simply called). A lane ends at a stop id or when it
has drawn all it may; what else ends a reply (stop strings) the host sees afterwards, and ignores what was drawn beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .paged import Decoding, Pools
from .pages import PAGE
from .sampler import draw_lanes

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
STEPS = 8  # of a round, at most
MAX_STOPS = 16  # stop ids that the lanes can look for; a row with more is ended by the host


@dataclass(frozen=True, slots=True)
class Lane:
    """What one lane begins a round with. `left` is how many tokens it may still draw."""

    token: int
    position: int
    pages: Sequence[int]
    left: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stops: Sequence[int]
    uniforms: Sequence[float]

    @property
    def cuts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class Lanes:
    """The tensors of all lanes, and the graphs over them."""

    def __init__(self, model: Any, pools: Pools, *, count: int, max_context: int, device: torch.device) -> None:
        self.model, self.pools, self.device = model, pools, device
        self.sizes = sorted({size for size in SIZES if size < count} | {count})
        self.width = -(-max_context // PAGE)
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        real: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.token, self.position, self.left = (torch.zeros(count, **whole) for _ in range(3))
        self.table = torch.zeros(count, self.width, dtype=torch.int32, device=device)
        self.alive = torch.zeros(count, dtype=torch.bool, device=device)
        self.stops = torch.full((count, MAX_STOPS), -1, **whole)
        self.temperature, self.top_p = torch.ones(count, **real), torch.ones(count, **real)
        self.top_k, self.min_p = torch.zeros(count, **whole), torch.zeros(count, **real)
        self.uniforms = torch.zeros(STEPS, count, **real)
        self.tokens, self.logprobs = torch.zeros(STEPS, count, **whole), torch.zeros(STEPS, count, **real)
        self.at = torch.zeros(1, **whole)
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        self._memory: Any = None

    def round(self, lanes: Sequence[Lane], steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """Run `steps` steps; for each, the tokens and log-probs of all lanes. The one wait for the device is at the end."""
        size = next(size for size in self.sizes if size >= len(lanes))
        self._upload(lanes, size)
        step = self._graph(size, any(lane.cuts for lane in lanes))
        for _ in range(steps):
            step()
        count = len(lanes)
        out = torch.stack([self.tokens[:steps, :count].double(), self.logprobs[:steps, :count].double()]).tolist()
        return [[int(token) for token in line] for line in out[0]], out[1]

    def _upload(self, lanes: Sequence[Lane], size: int) -> None:
        """The host's view into the first `size` lanes; lanes beyond the given ones stand still."""
        count, idle = len(lanes), size - len(lanes)
        whole = [[lane.token, lane.position, lane.left, lane.top_k] for lane in lanes] + [[0, 0, 0, 0]] * idle
        real = [[lane.temperature, lane.top_p, lane.min_p] for lane in lanes] + [[1.0, 1.0, 0.0]] * idle
        for tensor, line in zip((self.token, self.position, self.left, self.top_k), self._send(whole).unbind(1), strict=True):
            tensor[:size] = line
        numbers = self._send(real, torch.float32).unbind(1)
        for tensor, line in zip((self.temperature, self.top_p, self.min_p), numbers, strict=True):
            tensor[:size] = line
        self.alive[:size] = self.left[:size] > 0
        width = max(len(lane.pages) for lane in lanes)
        pages = [[*lane.pages, *[0] * (width - len(lane.pages))] for lane in lanes]
        self.table[:count, :width] = self._send(pages, torch.int32)
        stops = [[*lane.stops[:MAX_STOPS], *[-1] * (MAX_STOPS - len(lane.stops))] for lane in lanes]
        self.stops[:count] = self._send(stops)
        steps = len(lanes[0].uniforms)
        self.uniforms[:steps, :count] = self._send([list(lane.uniforms) for lane in lanes], torch.float32).T
        self.at.zero_()

    def _send(self, rows: list[list[Any]], dtype: torch.dtype = torch.int64) -> Tensor:
        tensor = torch.tensor(rows, dtype=dtype)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _graph(self, size: int, cuts: bool) -> Callable[[], None]:
        found = self._graphs.get((size, cuts))
        if found is None:
            made = self._capture if self.device.type == "cuda" else self._plain
            found = self._graphs[size, cuts] = made(size, cuts)
        return found

    def _plain(self, size: int, cuts: bool) -> Callable[[], None]:
        return lambda: self._step(size, cuts)

    def _capture(self, size: int, cuts: bool) -> Callable[[], None]:
        """Record one step. Kernels are made ready first by steps in which every lane stands still."""
        kept = [tensor.clone() for tensor in self._state()]
        self.alive.zero_()
        side: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self.at.zero_()
                self._step(size, cuts)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.at.zero_()
        with torch.cuda.graph(graph, pool=self._memory):
            self._step(size, cuts)
        self._memory = self._memory or graph.pool()
        for tensor, before in zip(self._state(), kept, strict=True):
            tensor.copy_(before)
        return graph.replay

    def _state(self) -> tuple[Tensor, ...]:
        return self.token, self.position, self.left, self.alive, self.at

    def _step(self, size: int, cuts: bool) -> None:
        """One token for every lane that is alive. No size, no branch and no address here depends on what the tensors hold."""
        token, position, alive = self.token[:size], self.position[:size], self.alive[:size]
        page = self.table[:size].gather(1, (position // PAGE)[:, None])[:, 0].long()
        places = torch.where(alive, page * PAGE + position % PAGE, position % PAGE)  # page 0 is nobody's
        lengths = torch.where(alive, position + 1, 0).to(torch.int32)
        out = self.model(
            input_ids=token[None],
            position_ids=position[None],
            use_cache=False,
            agentfly_plan=Decoding(self.pools, self.table[:size], places, lengths),
        )
        ids, logprobs = draw_lanes(
            out.logits[0],
            self.uniforms.index_select(0, self.at)[0, :size],
            self.temperature[:size],
            self.top_k[:size] if cuts else None,
            self.top_p[:size],
            self.min_p[:size],
        )
        self.tokens[:, :size].index_copy_(0, self.at, ids[None])
        self.logprobs[:, :size].index_copy_(0, self.at, logprobs[None])
        ended = (ids[:, None] == self.stops[:size]).any(dim=1) | (self.left[:size] <= 1)
        token.copy_(torch.where(alive, ids, token))
        position += alive.long()
        self.left[:size] -= alive.long()
        alive &= ~ended
        self.at += 1
