"""CUDA graphs: which sizes to capture (`GraphSizes`), how to capture one (`capture`), and what feeds them (`ChangeBuffers`).

Capturing a graph takes as long as many steps, and a graph that is larger than the batch wastes a little at every step. So the
first capture for a batch uses the next larger of a few coarse sizes; a finer size follows once it would have served `patience`
batches. After `freeze` finer sizes are only noted in `missing`, to be captured while the engine is idle: a capture would delay
every reply in progress. `patience` is large because a learner that works meanwhile loses more than a finer size soon saves.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[Any]
NUM_BUFFERS = 4  # in turn for uploads and downloads. A launch is finished before the second one after it begins


@contextmanager
def spending(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the context takes to `times[name]`."""
    began = time.perf_counter()
    try:
        yield
    finally:
        times[name] += time.perf_counter() - began


class GraphSizes:
    """The sizes in `coarse` and `fine` up to `largest`, which is always among them."""

    def __init__(self, coarse: Iterable[int], fine: Iterable[int], largest: int, patience: int = 192) -> None:
        self._coarse = sorted({size for size in coarse if size < largest} | {largest})
        self._all = sorted({size for size in fine if size < largest} | set(self._coarse))
        self._captured: set[int] = set()
        self._missed: Counter[int] = Counter()
        self._patience = patience
        self._frozen = False
        self.missing: list[int] = []

    def fit(self, wanted: int) -> int:
        """The smallest size that serves `wanted`, captured or not."""
        return next(size for size in self._all if size >= wanted)

    def choose(self, wanted: int) -> int:
        """The size to run `wanted` with. A size that is returned for the first time must be captured now."""
        best = self.fit(wanted)
        size = min((size for size in self._captured if size >= wanted), default=None)
        if size is None:
            size = next(size for size in self._coarse if size >= wanted)
        elif size != best:
            self._missed[best] += 1
            if self._missed[best] >= self._patience:
                if not self._frozen:
                    size = best
                elif best not in self.missing:
                    self.missing.append(best)
        self.add(size)
        return size

    def to_prepare(self, wanted: int) -> list[int]:
        """The sizes to capture in advance for up to `wanted`: the one that fits best, then the coarse ones below it."""
        fit = self.fit(min(wanted, self._all[-1]))
        return [fit, *(size for size in reversed(self._coarse) if size < fit)]

    def add(self, size: int) -> None:
        """The size is captured."""
        self._captured.add(size)
        if size in self.missing:
            self.missing.remove(size)

    def freeze(self) -> None:
        """From now on `choose` asks for a new capture only if no captured size is large enough."""
        self._frozen = True


def new_stream(device: torch.device) -> Any:
    """A new stream on a GPU; None elsewhere.

    Its kernels, also those captured on it, go first: they are small, and a learner's large ones fill the device meanwhile.
    """
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def capture(work: Callable[[], None], device: torch.device, pool: Any, side: Any) -> tuple[Callable[[], None], Any]:
    """Run `work` once, which compiles its kernels, then capture it. Returns the replay function and the graph's memory pool.

    `torch.cuda.graph` is not used: it collects all garbage and returns all cached memory on each capture. Other threads may use
    the device meanwhile (an embedding tool, a reward model), so the capture checks the calls of this thread only. `side` is the
    stream to capture on. cuBLAS keeps one workspace per stream, so graphs that may run concurrently need different streams.
    """
    side.wait_stream(torch.cuda.current_stream(device))
    graph: Any = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    with torch.cuda.stream(side):
        work()
        side.synchronize()
        gc.disable()  # a tensor freed by the collector during the capture would become part of the graph
        try:
            graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
    torch.cuda.current_stream(device).wait_stream(side)
    return graph.replay, pool or graph.pool()


class Changes(NamedTuple):
    """Changes of rows, each an int32 array with a line per change."""

    added: IntArray  # row, the values of `ints`, the bits of `floats`
    windows: IntArray  # row, the bits of its uniform numbers
    pages: IntArray  # place in the table, page
    removed: IntArray  # row


class ChangeBuffers:
    """Uploads the changes of a launch in one copy: pinned buffers in turn, and one on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._capacity = 0
        self._none: Tensor | None = None
        self._host: Any = None
        self._target: Tensor | None = None

    def upload(self, changes: Changes) -> tuple[Tensor, tuple[int, ...]]:
        """Returns the changes on the device, as `kernels.decode.apply_changes` reads them, and their four counts."""
        counts = tuple(map(len, changes))
        if not any(counts):
            if self._none is None:
                self._none = torch.zeros(4, dtype=torch.int32, device=self._device)
            return self._none, counts
        parts = [np.array(counts, np.int32), *(part.ravel() for part in changes)]
        total = sum(map(len, parts))
        if total > self._capacity:
            self._grow(total)
        assert self._target is not None
        array, views = next(self._host)
        np.concatenate(parts, out=array[:total])
        source, target = views[(total - 1).bit_length()]
        target.copy_(source, non_blocking=True)
        return self._target, counts

    def _grow(self, size: int) -> None:
        bits = max(12, (size - 1).bit_length())
        self._capacity = 1 << bits
        self._target = torch.zeros(self._capacity, dtype=torch.int32, device=self._device)
        pairs = []
        for _ in range(NUM_BUFFERS):
            host = pinned((self._capacity,), self._device)
            views = {power: (host[: 1 << power], self._target[: 1 << power]) for power in range(bits + 1)}
            pairs.append((host.numpy(), views))
        self._host = itertools.cycle(pairs)


def pinned(shape: Iterable[int], device: torch.device) -> Tensor:
    """A tensor of zeros that is copied to and from the device without waiting."""
    return torch.zeros(tuple(shape), dtype=torch.int32, pin_memory=device.type == "cuda")
