"""Reading prompts: keys and values of many tokens of some rows, computed in one pass.

In: for each row its tokens, its pages and how much of it is cached. Out: the pass, on its way; when it is over the pages are
filled. The last token of a prompt is never read here: it is a lane's first, whose logits are drawn from, so no logits are
needed and nothing is waited for. On a GPU the pass is a CUDA graph, made for the next larger of a few sizes; what it has too
much goes to page 0, which is nobody's. It has a stream of its own: it begins when all that was sent before it has ended, and
the lanes' later flights go on beside it. Elsewhere it is an ordinary pass of the right size, over when it is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .ladder import Ladder
from .lanes import new_stream, record
from .paged import TILE, Pools, Reading
from .pages import PAGE

MAX_ROWS = 64
"""Rows of one pass."""

SIZES = (128, 192, 320, 384, 640, 768, 896, 1280, 1536, 3072, 6144)
COARSE = (64, 256, 512, 1024, 2048, 4096, 16384)

Pick = tuple[Sequence[int], Sequence[int], int]
"""(the tokens to read, the row's pages, tokens cached before)"""


class Pass:
    """A pass on its way on a stream of its own."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def over(self) -> bool:
        return bool(self._event.query())

    def hold_up(self) -> None:
        """What is sent to the device from now on begins when the pass is over. The host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class Reader:
    """Passes over prompts, and the graphs for them."""

    def __init__(self, model: Any, pools: Pools, *, max_tokens: int, max_context: int, device: torch.device) -> None:
        self.model, self.pools, self.device = model, pools, device
        self.width = -(-max_context // PAGE)
        self._ladder = Ladder(COARSE, SIZES, max_tokens, patience=8)  # what is too much is computed, not skipped
        self._graphs: dict[int, _Graph] = {}
        self._memory: Any = None
        self._side = new_stream(device)  # for recording
        self._stream = new_stream(device)

    @torch.no_grad()
    def read(self, picks: Sequence[Pick]) -> Pass | None:
        """The pass that reads them; None where it is over already."""
        if self.device.type != "cuda":
            rows = [(pages, past, len(ids)) for ids, pages, past in picks]
            ids = torch.tensor([[token for ids, _, _ in picks for token in ids]])
            self.compute(ids, Reading.of(self.pools, rows, self.device))
            return None
        size = self._ladder.pick(sum(len(ids) for ids, _, _ in picks))
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        if size not in self._graphs:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)  # it uses the memory of the others
            graph = _Graph(self, size)
            self._memory = graph.memory
            self._graphs[size] = graph
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._graphs[size].run(picks)
            event.record()
        return Pass(event, self.device)

    def compute(self, ids: torch.Tensor, plan: Reading) -> None:
        keep = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.model(input_ids=ids, position_ids=plan.positions[None], use_cache=False, logits_to_keep=keep, agentfly_plan=plan)


class _Graph:
    """A pass over up to `size` tokens of up to MAX_ROWS rows. One more row is there for tiles that have nothing to do."""

    def __init__(self, reader: Reader, size: int) -> None:
        self.size, self.width, self.device = size, reader.width, reader.device
        self.tiles = size // TILE + MAX_ROWS
        rows = MAX_ROWS + 1
        self.long = torch.zeros(3, size, dtype=torch.int64, device=self.device)  # ids, positions, places
        sizes = [rows * self.width, rows + 1, rows, self.tiles, self.tiles]
        self.short = torch.zeros(sum(sizes), dtype=torch.int32, device=self.device)
        table, starts, past, tile_rows, tile_queries = torch.split(self.short, sizes)
        plan = Reading(
            reader.pools, table.view(rows, self.width), self.long[2], self.long[1], starts, past, tile_rows, tile_queries, None
        )
        self._send([])
        run: Callable[[], None] = lambda: reader.compute(self.long[0][None], plan)  # noqa: E731
        self._replay, self.memory = record(run, self.device, reader._memory, reader._side)

    def run(self, picks: Sequence[Pick]) -> None:
        self._send(picks)
        self._replay()

    def _send(self, picks: Sequence[Pick]) -> None:
        long = np.zeros((3, self.size), np.int64)
        table = np.zeros((MAX_ROWS + 1, self.width), np.int32)
        starts = np.zeros(MAX_ROWS + 2, np.int32)
        past = np.zeros(MAX_ROWS + 1, np.int32)
        tile_rows, tile_queries = np.full(self.tiles, MAX_ROWS, np.int32), np.zeros(self.tiles, np.int32)
        token = tile = 0
        for number, (ids, pages, before) in enumerate(picks):
            end, at = token + len(ids), np.arange(before, before + len(ids))
            table[number, : len(pages)] = pages
            long[0, token:end], long[1, token:end] = ids, at
            long[2, token:end] = table[number, at // PAGE].astype(np.int64) * PAGE + at % PAGE
            past[number] = before
            first = np.arange(0, len(ids), TILE)
            tile_rows[tile : tile + len(first)], tile_queries[tile : tile + len(first)] = number, first
            token, tile = end, tile + len(first)
            starts[number + 1 :] = token
        short = np.concatenate([table.ravel(), starts, past, tile_rows, tile_queries])
        self.long.copy_(torch.from_numpy(long).pin_memory(), non_blocking=True)
        self.short.copy_(torch.from_numpy(short).pin_memory(), non_blocking=True)
