"""Forward and backward passes of packed lines as CUDA graphs: kernels of small models take less time than their launches.

A graph has fixed sizes, so a line is padded to the sizes of a graph that was captured before, or of a new one with some room:

    line      A A A A B B C C C . . . . . .       padding is rows that no other row sees and that no loss reads
    rows      4       2   3     6           0 0   rows of length 0 fill up the number of rows
    keys      4       2   5     6           - -   surplus keys belong to no row; their gradients are dropped

With the second line the first graph is captured, and with it those for lines that are somewhat longer and shorter: a capture
takes as long as several updates. While `settled` is False, lines have other sizes than they will have, and none is captured.
Later ones are captured for lines that come again and again, at most MAX_GRAPHS in all; other lines run without one. All graphs
use one memory pool: each is replayed forward and then backward before the next one is.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ..bucketed import Take
from ..packed import PackedLayout

log = logging.getLogger(__name__)

MAX_GRAPHS = 6
MAX_TOKENS = 24_576
"""Of a line with a graph. Longer ones would keep the device busy without, if no other thread needed the interpreter."""
MAX_WEIGHT_BYTES = 2**30
"""Of the model: the kernels of larger ones keep the device busy, and each graph has tensors for all gradients."""
MAX_MOVES = 3
ROOM, WASTE = 1.15, 1.4
"""A graph is captured with ROOM times the tokens of the line, and used for lines with at least 1 / WASTE of its tokens."""
SPARE = 8192
"""It is also used for lines with so many tokens less: to compute them in vain takes less time than to launch each kernel."""
NEXT = 1.3
"""The tokens of a graph over those of the next shorter one: less than WASTE, because sizes are rounded up."""
AGAIN = 6
"""Earlier lines without a graph that would fit one, before it is captured later in a run."""


class Sizes(NamedTuple):
    """Of a graph, or of a line: tokens, keys of all rows, rows, and queries and keys of the longest row."""

    tokens: int
    keys: int
    rows: int
    longest: int
    longest_key: int

    @classmethod
    def of(cls, layout: PackedLayout) -> Sizes:
        return cls(sum(layout.lengths), sum(layout.key_lengths), len(layout.lengths), layout.longest, layout.longest_key)

    def with_room(self, room: float = ROOM) -> Sizes:
        """The sizes of a new graph for such lines."""
        tokens, longest = _up(room * self.tokens, 256), _up(self.longest, 256)
        padding = max(tokens - int(tokens / WASTE), min(SPARE, tokens))
        rows = _up(room * self.rows + padding / longest + 1, 16)
        return Sizes(tokens, _up(room * self.keys, 512) + padding, rows, longest, max(longest, _up(self.longest_key, 256)))

    def hold(self, line: Sizes) -> bool:
        """Whether a graph of these sizes can run a line without computing much in vain."""
        return self.tokens <= max(WASTE * line.tokens, line.tokens + SPARE) and self.can_run(line)

    def can_run(self, line: Sizes) -> bool:
        """Whether a graph of these sizes can run a line."""
        padding = self.tokens - line.tokens
        return (
            padding >= 0
            and self.keys >= line.keys + padding
            and self.rows >= line.rows + -(-padding // self.longest)
            and self.longest >= line.longest
            and self.longest_key >= line.longest_key
        )


def _up(number: float, step: int) -> int:
    return -(-int(np.ceil(number)) // step) * step


def _beginning(layout: PackedLayout, sizes: Sizes) -> PackedLayout | None:
    """As many of a line's first rows as fit these sizes; None if none do. Rows share tokens with rows before them only."""
    for count in range(len(layout.lengths), 0, -1):
        lengths, keys = layout.lengths[:count], layout.keys[:count]
        part = Sizes(sum(lengths), sum(map(len, keys)), count, max(lengths), max(map(len, keys)))
        if sizes.can_run(part):
            return layout if count == len(layout.lengths) else PackedLayout(lengths, layout.positions.device, keys)
    return None


def pad_rows(layout: PackedLayout, sizes: Sizes) -> tuple[list[int], list[NDArray[np.int64]]]:
    """The lengths and keys of all rows of the padded line, which `sizes` hold."""
    lengths, keys = list(layout.lengths), list(layout.keys)
    at = sum(lengths)
    while at < sizes.tokens:
        own = min(sizes.tokens - at, sizes.longest)
        lengths.append(own)
        keys.append(np.arange(at, at + own))
        at += own
    empty = sizes.rows - len(lengths)
    return lengths + [0] * empty, keys + [np.zeros(0, np.int64)] * empty


class Graphs:
    """The graphs of one replica (see `packed`)."""

    def __init__(self, replica: nn.Module) -> None:
        self.settled = True
        self._replica = replica
        self._made: list[_Graph] = []
        self._pool: Any = None
        self._unserved: deque[Sizes] = deque(maxlen=16)  # lines that fitted no graph
        self._addresses: tuple[int, ...] = ()
        self._moves = 0
        parameters = list(replica.parameters())
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        plain = all(type(parameter.data) is Tensor and parameter.is_cuda for parameter in parameters)
        self._usable = plain and size <= MAX_WEIGHT_BYTES and any(parameter.requires_grad for parameter in parameters)

    def run(self, input_ids: Tensor, layout: PackedLayout) -> Tensor | None:
        """Hidden states [1, tokens, width] of a packed line, with gradients; None if it must run without a graph."""
        line = Sizes.of(layout)
        if not self._usable or not torch.is_grad_enabled() or line.tokens > MAX_TOKENS:
            return None
        if not self._weights_stay():
            return None
        graph = min((graph for graph in self._made if graph.sizes.hold(line)), key=lambda graph: graph.sizes, default=None)
        if graph is None:
            sizes = line.with_room()
            seen = sum(sizes.hold(earlier) for earlier in self._unserved) if self._made else len(self._unserved)
            enough = self.settled and seen >= (AGAIN if self._made else 1)
            self._unserved.append(line)
            if not enough or len(self._made) == MAX_GRAPHS:
                return None
            if not self._made:
                self._capture_neighbours(line, input_ids, layout)
            graph = self._capture(sizes, input_ids, layout)
            if graph is None:
                return None
        graph.load(input_ids, layout)
        out: Tensor = _Replay.apply(graph, *graph.parameters)  # type: ignore[no-untyped-call]
        return out[:, : line.tokens]

    @property
    def usable(self) -> bool:
        """Whether lines may run as graphs."""
        return self._usable

    def _weights_stay(self) -> bool:
        """Whether the weights are where the graphs read them. Weights that keep moving, as sharded ones, get no graphs."""
        addresses = tuple(parameter.data_ptr() for parameter in self._replica.parameters())
        if addresses != self._addresses:
            self._made, self._addresses = [], addresses
            self._moves += 1
            self._usable = self._moves <= MAX_MOVES
        return self._usable

    def _capture_neighbours(self, line: Sizes, input_ids: Tensor, layout: PackedLayout) -> None:
        """Capture the graphs for the next longer and the next shorter lines. The longer one comes first: it reserves memory."""
        for factor in (NEXT, 1 / NEXT):
            sizes = line.with_room(ROOM * factor)
            part = _beginning(layout, sizes)
            if sizes.tokens <= NEXT * MAX_TOKENS and part is not None:
                self._capture(sizes, input_ids[:, : sum(part.lengths)], part, spare=True)

    def _capture(self, sizes: Sizes, input_ids: Tensor, layout: PackedLayout, *, spare: bool = False) -> _Graph | None:
        """Returns the new graph; None if it cannot be captured. Then lines run without graphs, unless it was a spare one."""
        torch.cuda.empty_cache()  # a graph cannot use blocks that the allocator keeps for others
        try:
            graph = _Graph(self._replica, sizes, input_ids, layout, self._pool)
        except RuntimeError as error:  # an operation that cannot be captured, or too little memory
            torch.cuda.synchronize()
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if spare:
                log.info("no spare CUDA graph for the learner of %d tokens: %s", sizes.tokens, reason)
            else:
                self._usable, self._made = False, []
                log.warning("the learner uses no CUDA graphs: %s", reason)
            return None
        self._pool = graph.pool
        self._made.append(graph)
        log.info("CUDA graph for the learner: %d tokens, %d rows", sizes.tokens, sizes.rows)
        return graph


class _Graph:
    """One forward and one backward graph, and the tensors that they read and write."""

    def __init__(self, replica: nn.Module, sizes: Sizes, input_ids: Tensor, layout: PackedLayout, pool: object) -> None:
        self.sizes = sizes
        trained = {name: parameter for name, parameter in replica.named_parameters() if parameter.requires_grad}
        self.parameters = list(trained.values())
        # Other leaves over the same memory: those of the parameters belong to the stream on which they were first used.
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in trained.items()}
        device = input_ids.device
        self._ids = torch.zeros(1, sizes.tokens, dtype=torch.int64, device=device)
        self._layout = PackedLayout(*_without_empty(pad_rows(layout, sizes), device))
        self._layout.longest, self._layout.longest_key = sizes.longest, sizes.longest_key
        self._layout.starts = torch.zeros(sizes.rows + 1, dtype=torch.int32, device=device)
        self._layout.key_starts = torch.zeros_like(self._layout.starts)
        self._layout.positions = torch.zeros(1, sizes.tokens, dtype=torch.int64, device=device)
        self._layout.take = self._take = SurplusTake(sizes.keys, sizes.tokens, device)
        self.load(input_ids, layout)
        self._grad: Tensor | None = None
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            # Before the capture kernels are compiled, and libraries allocate what they need.
            out = self._run(replica, leaves)
            self._grad = torch.zeros_like(out)
            torch.autograd.grad(out, list(leaves.values()), self._grad, allow_unused=True)
            del out
            side.synchronize()
            with _capturing(pool) as self._forward:
                out = self._run(replica, leaves)
            self.pool = pool or self._forward.pool()
            with _capturing(self.pool) as self._backward:
                self._gradients = torch.autograd.grad(out, list(leaves.values()), self._grad, allow_unused=True)
            self._out = out.detach()
        torch.cuda.current_stream(device).wait_stream(side)

    def _run(self, replica: nn.Module, leaves: dict[str, Tensor]) -> Tensor:
        inputs = {"input_ids": self._ids, "position_ids": self._layout.positions, "agentfly_layout": self._layout}
        output: Any = functional_call(replica, leaves, (), {**inputs, "use_cache": False})
        hidden: Tensor = output.last_hidden_state
        return hidden

    def load(self, input_ids: Tensor, layout: PackedLayout) -> None:
        """Write a line to the tensors that the graphs read."""
        lengths, keys = pad_rows(layout, self.sizes)
        count = input_ids.shape[1]
        self._ids[:, :count].copy_(input_ids)
        self._ids[:, count:].zero_()
        key_lengths = [len(places) for places in keys]
        positions = [np.arange(whole - own, whole) for own, whole in zip(lengths, key_lengths, strict=True)]
        _put(self._layout.starts, np.cumsum([0, *lengths]))
        _put(self._layout.key_starts, np.cumsum([0, *key_lengths]))
        _put(self._layout.positions[0], np.concatenate(positions))
        self._take.load(np.concatenate(keys))

    def replay_forward(self) -> Tensor:
        """Hidden states, valid until the next replay."""
        self._forward.replay()
        return self._out.detach()

    def replay_backward(self, grad: Tensor) -> list[Tensor | None]:
        """New tensors with the gradients of `parameters`."""
        assert self._grad is not None
        self._grad.copy_(grad)
        self._backward.replay()
        return [None if gradient is None else gradient.clone() for gradient in self._gradients]


@contextmanager
def _capturing(pool: object) -> Iterator[Any]:
    """Captures what is launched on the current stream. Other threads may use the device meanwhile.

    `torch.cuda.graph` is not used: it collects all garbage and returns all cached memory on each capture.
    """
    graph: Any = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # a tensor freed by the collector during the capture would become part of the graph
    try:
        graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


class SurplusTake(Take):
    """Copies up to `size` rows of a tensor with `count` rows. Surplus copies are of row 0, and their gradients are dropped."""

    def __init__(self, size: int, count: int, device: torch.device) -> None:
        super().__init__(np.zeros(size, np.int64), count, device)
        self._places = None
        self._back = torch.full_like(self.index, count)

    def load(self, index: NDArray[np.int64]) -> None:
        """Copy these rows."""
        surplus = len(self.index) - len(index)
        _put(self.index, np.concatenate([index, np.zeros(surplus, np.int64)]))
        _put(self._back, np.concatenate([index, np.full(surplus, self.count)]))

    def add_up(self, grad: Tensor) -> Tensor:
        full = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(self.count + 1, *grad.shape[1:], dtype=full, device=grad.device)
        return total.index_add_(0, self._back, grad.to(full))[:-1].to(grad.dtype)


class _Replay(torch.autograd.Function):
    """Replays the forward graph, and in the backward pass the backward graph."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, *parameters: Tensor) -> Tensor:
        ctx.graph = graph
        return graph.replay_forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.graph.replay_backward(grads[0])


def _without_empty(rows: tuple[list[int], list[NDArray[np.int64]]], device: torch.device) -> tuple[Any, ...]:
    lengths, keys = rows
    count = sum(own > 0 for own in lengths)
    return lengths[:count], device, keys[:count]


def _put(target: Tensor, numbers: NDArray[Any]) -> None:
    """Copy numbers from the host to a tensor of the same size. The host does not wait."""
    source = torch.from_numpy(numbers).to(target.dtype)
    if target.is_cuda:
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
