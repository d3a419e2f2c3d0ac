"""Prefill: computes the keys and values of prompt tokens for several sequences in one forward pass.

The last token of a prompt is not prefilled: it is the first token of the decode step, whose logits are sampled. So prefill
needs no logits and the host waits for nothing. On a GPU a pass is a CUDA graph of the next larger size; its padding tokens
write to page 0, which belongs to no sequence. It runs on a separate stream:

    decode stream    launch 1 | launch 2 | launch 3 ...
    prefill stream            | pass ...............      starts after everything launched before it; later launches overlap it

Without a GPU a pass is an ordinary forward pass of the exact size, finished when `run` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, cycle
from typing import Any

import numpy as np
import torch

from .cuda_graphs import GraphSizes, capture, new_stream, spending
from .page_allocator import PAGE_SIZE
from .paged_attention import TILE, KVPools, PrefillArrays, PrefillMetadata

MAX_SEQUENCES = 256
"""Sequences in one pass. With fewer, chains whose tools have answered at the same time would wait for several passes."""

FINE_SIZES = (128, 192, 320, 384, 640, 768, 896, 1280, 1536, 3072, 6144)
COARSE_SIZES = (64, 256, 512, 1024, 2048, 4096, 16384)

PrefillChunk = tuple[Sequence[int], Sequence[int], int]
"""(token ids to compute, page table of the sequence, number of tokens cached before)"""


class PrefillPass:
    """A pass that runs on the prefill stream."""

    def __init__(self, first: Any, last: Any, device: torch.device) -> None:
        self._first, self._last, self._device = first, last, device

    def done(self) -> bool:
        return bool(self._last.query())

    def seconds(self) -> float:
        """How long the pass took on the device. It must be done."""
        return float(self._first.elapsed_time(self._last)) / 1000.0

    def block_stream(self) -> None:
        """Make later work on the current stream start after this pass. The host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self._last)


class Prefiller:
    """Runs passes and owns their graphs."""

    def __init__(
        self,
        model: Any,
        pools: KVPools,
        *,
        max_tokens: int,
        max_context: int,
        device: torch.device,
        times: dict[str, float],
    ) -> None:
        """`times["prepared_s"]` counts the seconds of capturing graphs."""
        self.model, self.pools, self.device, self.times = model, pools, device, times
        self.width = -(-max_context // PAGE_SIZE)
        # Padding is computed, not skipped, so a better size pays off sooner than in decode.
        self.sizes = GraphSizes(COARSE_SIZES, FINE_SIZES, max_tokens, patience=64)
        self._graphs: dict[int, _PrefillGraph] = {}
        self._pool: Any = None
        self._capture_stream = new_stream(device)
        self._stream = new_stream(device)

    @torch.no_grad()
    def run(self, chunks: Sequence[PrefillChunk]) -> PrefillPass | None:
        """Start the pass over these chunks. Returns None if it has finished already."""
        if self.device.type != "cuda":
            rows = [(pages, past, len(ids)) for ids, pages, past in chunks]
            ids = torch.tensor([list(chain.from_iterable(ids for ids, _, _ in chunks))])
            self.forward(ids, PrefillMetadata.of(self.pools, rows, self.device))
            return None
        size = self.sizes.choose(sum(len(ids) for ids, _, _ in chunks))
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        if size not in self._graphs:
            self._capture(size)
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            first.record()
            self._graphs[size].run(chunks)
            last.record()
        return PrefillPass(first, last, self.device)

    def prepare(self, size: int) -> None:
        """Capture the graph of this size in advance."""
        if size not in self._graphs:
            self._capture(size)
        self.sizes.add(size)

    def _capture(self, size: int) -> None:
        with spending(self.times, "prepared_s"):
            # The new graph shares its memory pool with the graphs that may still run on the prefill stream.
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            graph = _PrefillGraph(self, size)
            self._pool = graph.pool
            self._graphs[size] = graph
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def forward(self, ids: torch.Tensor, metadata: PrefillMetadata) -> None:
        keep = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.model(
            input_ids=ids,
            position_ids=metadata.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            agentfly_metadata=metadata,
        )


class _PrefillGraph:
    """A pass over up to `size` tokens of up to MAX_SEQUENCES sequences. One more row serves the tiles that have no work."""

    def __init__(self, prefiller: Prefiller, size: int) -> None:
        self.size, self.width, self.device = size, prefiller.width, prefiller.device
        self.max_sequences = min(size, MAX_SEQUENCES)
        self.tiles = size // TILE + self.max_sequences
        rows = self.max_sequences + 1
        # One buffer, so that one copy uploads all: ids, positions, places as int64, then these parts as int32. The page tables
        # are last: the rows that a pass does not use are not copied.
        sizes = [rows + 1, rows, self.tiles, self.tiles, rows * self.width]
        self._bounds = np.cumsum(sizes)[:-1].tolist()
        self._tables_at = 6 * size + self._bounds[-1]
        self._buffer = torch.zeros(6 * size + sum(sizes), dtype=torch.int32, device=self.device)
        int64s, int32s = self._buffer[: 6 * size].view(torch.int64).view(3, size), self._buffer[6 * size :]
        self._uploads = cycle([_Upload(len(self._buffer)) for _ in range(2)])
        starts, past, tile_rows, tile_queries, table = torch.split(int32s, sizes)
        metadata = PrefillMetadata(
            prefiller.pools,
            table.view(rows, self.width),
            int64s[2],
            int64s[1],
            starts,
            past,
            tile_rows,
            tile_queries,
            None,
        )
        self._upload([])
        run: Callable[[], None] = lambda: prefiller.forward(int64s[0][None], metadata)  # noqa: E731
        self._replay, self.pool = capture(run, self.device, prefiller._pool, prefiller._capture_stream)

    def run(self, chunks: Sequence[PrefillChunk]) -> None:
        self._upload(chunks)
        self._replay()

    def _upload(self, chunks: Sequence[PrefillChunk]) -> None:
        upload = next(self._uploads)
        upload.wait()
        array, count = upload.array, len(chunks)
        array[: self._tables_at] = 0
        int64s = array[: 6 * self.size].view(np.int64).reshape(3, self.size)
        starts, past, tile_rows, tile_queries, tables = np.split(array[6 * self.size :], self._bounds)
        longest = max((len(pages) for _, pages, _ in chunks), default=0)
        arrays = PrefillArrays.of([(pages, cached, len(ids)) for ids, pages, cached in chunks], longest)
        tokens, tiles = len(arrays.positions), len(arrays.tile_rows)
        int64s[0, :tokens] = np.fromiter(chain.from_iterable([ids for ids, _, _ in chunks]), np.int64, tokens)
        int64s[1, :tokens], int64s[2, :tokens] = arrays.positions, arrays.places
        past[:count] = arrays.past
        starts[: len(arrays.starts)], starts[len(arrays.starts) :] = arrays.starts, tokens
        tile_rows[:tiles], tile_rows[tiles:], tile_queries[:tiles] = arrays.tile_rows, self.max_sequences, arrays.tile_queries
        tables.reshape(-1, self.width)[:count, :longest] = arrays.table  # no page after those of a sequence is ever read
        upload.copy_to(self._buffer, self._tables_at + count * self.width)


class _Upload:
    """A pinned buffer. It may be written again when its last copy has been made."""

    def __init__(self, size: int) -> None:
        self._tensor = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._copied: Any = None
        self.array = self._tensor.numpy()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, target: torch.Tensor, count: int) -> None:
        """Start the copy of the first `count` numbers on the current stream."""
        target[:count].copy_(self._tensor[:count], non_blocking=True)
        if self._copied is None:
            event: Any = torch.cuda.Event
            self._copied = event()
        self._copied.record()
