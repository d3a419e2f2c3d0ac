"""The decode batch: running sequences in rows of tensors at fixed addresses, so that one CUDA graph serves every step.

A step is a function of these tensors alone:

    token, position -> model -> logits -> sample -> token', position + 1, left - 1      a row with left = 0 does not change

On a GPU it is captured once per batch size and replayed; elsewhere it is called. A row ends at a stop id or when `left` reaches
0. Other ends (stop strings) are found by the host later, which ignores the tokens after them. The host uploads changes only:
new and removed rows, new pages, and now and then a window of uniform numbers. So it can launch the next steps before the last
ones have arrived, and the device never waits for the host. When many rows have ended, rows at the far end move into the gaps
(`_compact`), and a smaller graph does.

Every call of torch releases the interpreter, and another thread may keep it for a while. So with Triton a launch is few calls:
one upload of all changes, one kernel that applies them, the steps, and one download of all results.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Callable
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...kernels import has_kernels
from .cuda_graphs import NUM_BUFFERS, ChangeBuffers, Changes, GraphSizes, IntArray, capture, new_stream, pinned, spending
from .page_allocator import PAGE_SIZE, PagedSequence
from .paged_attention import DecodeMetadata, KVPools, runs
from .sampler import draw_batch
from .scheduler import UNIFORMS, SequenceState, uniform_numbers

if TYPE_CHECKING:
    from ...kernels.decode import DecodeRows

FINE_SIZES = (2, 4, 16, 24, 48, 96, 160, 192, 224, 320, 384, 448, 640, 768)
COARSE_SIZES = (1, 8, 32, 64, 128, 256, 512, 1024)
MAX_STEPS = 8  # per launch
MAX_STOPS = 16  # stop ids that a row holds; a sequence with more is ended by the host
TOKEN, POSITION, LEFT, TOP_K, DRAWN, STOPS = range(6)  # columns of `ints`; the stop ids are the last columns
COLUMNS = (TOKEN, POSITION, LEFT, DRAWN)


class DecodeEntry:
    """A sequence in a row of the batch.

    `collected` counts the tokens that the sequence has received. `host_ends`: only the host can tell where the reply ends.
    """

    __slots__ = ("collected", "host_ends", "removed", "row", "seq", "truncates", "uploaded_pages", "version")

    def __init__(self, seq: SequenceState, row: int, version: int) -> None:
        sampling = seq.sampling
        self.seq, self.row, self.version = seq, row, version
        self.collected = self.uploaded_pages = 0
        self.removed = False
        self.host_ends = seq.stream is not None or len(seq.stop_ids) > MAX_STOPS
        self.truncates = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0

    @property
    def kv(self) -> PagedSequence:
        kv = self.seq.kv
        assert isinstance(kv, PagedSequence)
        return kv


class InFlight:
    """Launched steps whose results have not arrived.

    `launched_rows` took part. `rows` are the rows in which the same sequences are now (`_compact` moves them), and
    `generations` the generations of those rows: removing a sequence increments its row's generation, so a result for a removed
    sequence never reaches the next sequence in that row.
    """

    def __init__(self, rows: IntArray, generations: IntArray, steps: int, results: IntArray, events: Any) -> None:
        """`results` is what the device writes: see `DecodeBatch.results`."""
        self.launched_rows, self.rows, self.generations, self.steps = rows, rows.copy(), generations, steps
        self._results, self._events = results, events

    def wait_until_near_end(self) -> None:
        """Wait until the device has begun the last steps: see `DecodeBatch.launch`."""
        if self._events is not None:
            self._events[1].synchronize()

    def wait(self) -> tuple[IntArray, IntArray, IntArray, float | None]:
        """Wait for the device. Returns tokens and log-probs [steps, rows], each row's `left`, and ms per step if known."""
        took = None
        if self._events is not None:
            first, _, last = self._events
            last.synchronize()
            took = first.elapsed_time(last) / self.steps
        results, steps = self._results, self.steps
        return results[:steps], results[MAX_STEPS : MAX_STEPS + steps].view(np.float32), results[2 * MAX_STEPS], took


class DecodeBatch:
    """The tensors of all rows, the host's view of them, and the graphs over them.

    The host's view is arrays over rows: most rows just continue, and a Python loop over all of them would take as long as the
    steps themselves.
    """

    def __init__(
        self,
        model: Any,
        pools: KVPools,
        *,
        num_rows: int,
        max_context: int,
        device: torch.device,
        times: dict[str, float],
    ) -> None:
        """`times["prepared_s"]` counts the seconds of capturing graphs."""
        self.model, self.pools, self.device, self.times = model, pools, device, times
        self.width = -(-max_context // PAGE_SIZE)
        self.ints = torch.zeros(num_rows, STOPS + MAX_STOPS, dtype=torch.int64, device=device)
        self.floats = torch.zeros(num_rows, 3, dtype=torch.float32, device=device)  # temperature, top_p, min_p
        self.uniforms = torch.zeros(num_rows, UNIFORMS, dtype=torch.float32, device=device)
        self.table = torch.zeros(num_rows, self.width, dtype=torch.int32, device=device)
        # Of the steps of a launch: the tokens, then the bits of their log-probs, then what each row has left.
        self.results = torch.zeros(2 * MAX_STEPS + 1, num_rows, dtype=torch.int32, device=device)
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)  # of the step that runs; -1 before the first
        self.entries: list[DecodeEntry | None] = [None] * num_rows
        # Per row: position of the next token, tokens it may sample in all, steps launched, steps arrived, tokens that its
        # uploaded pages hold, steps that its uploaded uniforms serve, generation (see InFlight).
        self._position, self._left, self._launched, self._arrived, self._page_room, self._uniforms_end, self._generation = (
            np.zeros(num_rows, np.int64) for _ in range(7)
        )
        self._host_ends, self._truncates = np.zeros(num_rows, bool), np.zeros(num_rows, bool)  # as in the row's entry
        self._sampled = np.zeros((num_rows, 128), np.int64)
        self._sampled_logprobs = np.zeros((num_rows, 128), np.float32)
        self._free = list(range(num_rows))
        self._removed: list[int] = []  # to be uploaded
        self._added: list[DecodeEntry] = []  # to be uploaded
        self._inflight: weakref.WeakSet[InFlight] = weakref.WeakSet()
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        self._sizes = {truncates: GraphSizes(COARSE_SIZES, FINE_SIZES, num_rows) for truncates in (False, True)}
        self.sizes = self._sizes[False]  # chains that are trained do not truncate their distribution
        self._pool: Any = None
        self._capture_stream = new_stream(device)
        self._has_kernels = has_kernels(device)
        self._uploads = ChangeBuffers(device)
        self._downloads = itertools.cycle([pinned(self.results.shape, device) for _ in range(NUM_BUFFERS)])

    # ---- membership ------------------------------------------------------------------------------------------------------

    def add(self, seq: SequenceState, position: int, left: int, version: int) -> DecodeEntry:
        """Put a sequence into the free row with the lowest number: the fewer rows a graph has, the faster it is."""
        row = heapq.heappop(self._free)
        entry = self.entries[row] = DecodeEntry(seq, row, version)
        self._position[row], self._left[row] = position, left
        self._host_ends[row], self._truncates[row] = entry.host_ends, entry.truncates
        self._launched[row] = self._arrived[row] = self._page_room[row] = self._uniforms_end[row] = 0
        self._added.append(entry)
        return entry

    def remove(self, entry: DecodeEntry) -> None:
        """Free the row. It stops at the next launch; tokens that it samples until then are discarded."""
        row = entry.row
        entry.removed = True
        self.entries[row] = None
        self._generation[row] += 1
        self._left[row] = 0
        heapq.heappush(self._free, row)
        self._removed.append(row)

    def collect(self, entry: DecodeEntry) -> tuple[list[int], list[float]]:
        """Tokens and log-probs that have arrived for a row since the last call."""
        row, first, last = entry.row, entry.collected, int(self._arrived[entry.row])
        entry.collected = last
        return self._sampled[row, first:last].tolist(), self._sampled_logprobs[row, first:last].tolist()

    # ---- launching -------------------------------------------------------------------------------------------------------

    def active_rows(self) -> IntArray:
        """The rows that have steps left to launch."""
        return (self._launched < self._left).nonzero()[0]

    def max_remaining(self, rows: IntArray) -> int:
        """The largest number of steps that any of these rows has left."""
        return int((self._left[rows] - self._launched[rows]).max())

    def lacking_pages(self, rows: IntArray, steps: int) -> list[tuple[DecodeEntry, int]]:
        """The entries that need pages for that many steps, each with the number of tokens that its pages must hold."""
        length = self._position[rows] + np.minimum(self._launched[rows] + steps, self._left[rows])
        lacking = length > self._page_room[rows]
        needs = zip(rows[lacking].tolist(), length[lacking].tolist(), strict=True)
        return [(self._entry(row), end) for row, end in needs]

    def launch(self, rows: IntArray, steps: int, joining: int = 0, last_steps: int = 1) -> InFlight:
        """Launch `steps` steps. Nothing here waits for the device. `joining` sequences will soon take free rows.

        The launch is near its end when its `last_steps` begin.
        """
        rows = self._compact(rows, joining)
        step = self._graph(1 + int(rows[-1]), bool(self._truncates[rows].any()))
        self._upload_changes(rows, steps)
        cuda = self.device.type == "cuda"
        event: Any = torch.cuda.Event
        events = [event(enable_timing=timed) for timed in (True, False, True)] if cuda else None
        if events:
            events[0].record()
        for number in range(steps):
            if events and number == max(0, steps - last_steps):
                events[1].record()
            step()
        results = next(self._downloads)
        results.copy_(self.results, non_blocking=cuda)
        if events:
            events[2].record()
        self._launched[rows] += steps
        inflight = InFlight(rows, self._generation[rows], steps, results.numpy(), events)
        self._inflight.add(inflight)
        return inflight

    def _compact(self, rows: IntArray, joining: int) -> IntArray:
        """Move rows from the far end into free rows if a smaller graph then serves all. Returns the active rows.

        before   [A . C . . F G]      graph of 8 rows
        after    [A F C G . . .]      graph of 4 rows; steps in flight are told that F and G moved
        """
        size = self._fit(min(len(rows) + joining, len(self.entries)))
        if size >= self._fit(1 + int(rows[-1])):
            return rows
        far = rows[rows >= size]
        free = [row for row in self._free if row < size]  # a row whose last steps are in flight is neither active nor free
        if len(free) < len(far) or not self._launched[far].all():
            return rows  # a row that was never launched has not been uploaded, so there is nothing to move on the device
        near = np.array([heapq.heappop(self._free) for _ in far], np.int64)
        self._upload_removals()
        source, target = self._to_device(far), self._to_device(near)
        for tensor in (self.ints, self.floats, self.uniforms, self.table):
            tensor.index_copy_(0, target, tensor.index_select(0, source))
        self.ints[:, LEFT].index_fill_(0, source, 0)
        moved = np.arange(len(self.entries))
        moved[far] = near
        # Decide which results belong to moved sequences before the generations change.
        affected = [(each, self._present(each) & (moved[each.rows] != each.rows)) for each in self._inflight]
        self._generation[far] += 1
        self._generation[near] += 1
        for inflight, which in affected:
            inflight.rows[which] = moved[inflight.rows[which]]
            inflight.generations[which] = self._generation[inflight.rows[which]]
        for array in (
            self._position, self._left, self._launched, self._arrived, self._page_room, self._uniforms_end, self._sampled,
            self._sampled_logprobs, self._host_ends, self._truncates,
        ):  # fmt: skip
            array[near] = array[far]
        self._left[far] = self._launched[far] = 0
        for old, new in zip(far.tolist(), near.tolist(), strict=True):
            entry = self._entry(old)
            entry.row, self.entries[new], self.entries[old] = new, entry, None
            heapq.heappush(self._free, old)
        return self.active_rows()

    def _fit(self, rows: int) -> int:
        """The size of the smallest step that serves so many rows."""
        return self._sizes[False].fit(rows) if self.device.type == "cuda" else rows

    def finish(self, inflight: InFlight) -> tuple[list[DecodeEntry], int, float | None]:
        """Wait for launched steps and keep their results.

        Returns the entries that have ended, have NaN or need the host (`collect` gives their tokens), the number of tokens
        sampled, and ms per step if known.
        """
        tokens, logprobs, left, took = inflight.wait()
        self._inflight.discard(inflight)
        present = self._present(inflight)
        rows, columns = inflight.rows[present], inflight.launched_rows[present]
        first = self._arrived[rows]
        self._reserve(int(first.max(initial=0)) + inflight.steps)
        for number in range(inflight.steps):
            self._sampled[rows, first + number] = tokens[number, columns]
            self._sampled_logprobs[rows, first + number] = logprobs[number, columns]
        self._arrived[rows] += inflight.steps
        ended = (left[columns] == 0) | self._host_ends[rows] | ~np.isfinite(logprobs[:, columns]).all(axis=0)
        return [self._entry(row) for row in rows[ended]], inflight.steps * len(rows), took

    def still_present(self, inflight: InFlight) -> list[DecodeEntry]:
        """The entries that took part in these steps and have not been removed since."""
        return [self._entry(row) for row in inflight.rows[self._present(inflight)]]

    def _present(self, inflight: InFlight) -> IntArray:
        present: IntArray = self._generation[inflight.rows] == inflight.generations
        return present

    def _entry(self, row: Any) -> DecodeEntry:
        entry: DecodeEntry | None = self.entries[row]
        assert entry is not None
        return entry

    def _reserve(self, length: int) -> None:
        """Make room for that many sampled tokens in every row."""
        while self._sampled.shape[1] < length:
            self._sampled = np.concatenate([self._sampled, np.zeros_like(self._sampled)], axis=1)
            self._sampled_logprobs = np.concatenate([self._sampled_logprobs, np.zeros_like(self._sampled_logprobs)], axis=1)

    def _upload_changes(self, rows: IntArray, steps: int) -> None:
        new = [entry for entry in self._added if not entry.removed]
        taken = {entry.row for entry in new}  # a row that was removed and given to another sequence is only added
        removed = np.array([row for row in self._removed if row not in taken], np.int32)
        self._added, self._removed = [], []
        changes = Changes(self._added_rows(new), self._new_windows(rows, steps), self._new_pages(rows, steps), removed)
        if self._has_kernels:
            from ...kernels.decode import apply_changes

            uploaded = self._uploads.upload(changes)
            apply_changes(*uploaded, self._rows(), self.step_index, left=LEFT, drawn=DRAWN)
        else:
            self._apply_changes(changes)

    def _added_rows(self, entries: list[DecodeEntry]) -> IntArray:
        block = np.zeros((len(entries), 1 + self.ints.shape[1] + self.floats.shape[1]), np.int32)
        if entries:
            rows = block[:, 0] = [entry.row for entry in entries]
            seqs = [entry.seq for entry in entries]
            ints, floats = block[:, 1 : 1 + self.ints.shape[1]], block[:, 1 + self.ints.shape[1] :]
            ints[:, TOKEN] = [seq.tokens[-1] for seq in seqs]
            ints[:, POSITION], ints[:, LEFT] = self._position[rows], self._left[rows]
            ints[:, TOP_K] = [seq.sampling.top_k for seq in seqs]
            ints[:, STOPS:] = [_padded(seq.stop_ids) for seq in seqs]
            sampling = [(each.temperature, each.top_p, each.min_p) for each in (seq.sampling for seq in seqs)]
            floats[:] = np.array(sampling, np.float32).view(np.int32)
        return block

    def _new_windows(self, rows: IntArray, steps: int) -> IntArray:
        """Uniform numbers for the rows whose uploaded ones do not last for this launch."""
        short = rows[self._launched[rows] + steps > self._uniforms_end[rows]]
        block = np.zeros((len(short), 1 + UNIFORMS), np.int32)
        if len(short):
            entries = [self._entry(row) for row in short.tolist()]
            # A sequence counts from the last token that it collected.
            firsts = [launched - each.collected for launched, each in zip(self._launched[short].tolist(), entries, strict=True)]
            new = [not first and not len(each.seq.ahead) for first, each in zip(firsts, entries, strict=True)]
            numbers = np.zeros((len(short), UNIFORMS))
            numbers[new] = uniform_numbers([each.seq.rng for each in compress(entries, new)], UNIFORMS)
            for index, (first, entry, is_new) in enumerate(zip(firsts, entries, new, strict=True)):
                if is_new:
                    entry.seq.ahead = numbers[index]
                else:
                    numbers[index] = entry.seq.uniforms(first + UNIFORMS)[first:]
            block[:, 0], block[:, 1:] = short, numbers.astype(np.float32).view(np.int32)
            self._uniforms_end[short] = self._launched[short] + UNIFORMS
        return block

    def _new_pages(self, rows: IntArray, steps: int) -> IntArray:
        pages: list[int] = []
        places: list[int] = []  # of the first new page of each row
        counts: list[int] = []
        for entry, _ in self.lacking_pages(rows, steps):
            held, uploaded = entry.kv.pages, entry.uploaded_pages
            pages += held[uploaded:]
            places.append(entry.row * self.width + uploaded)
            counts.append(len(held) - uploaded)
            entry.uploaded_pages = len(held)
            self._page_room[entry.row] = len(held) * PAGE_SIZE
        block = np.zeros((len(pages), 2), np.int32)
        if pages:
            block[:, 0] = runs(np.array(places), np.array(counts))
            block[:, 1] = pages
        return block

    def _apply_changes(self, changes: Changes) -> None:
        """What the kernel of this name does, for devices without Triton."""

        def put(target: Tensor, where: IntArray, values: IntArray) -> None:
            target.index_copy_(0, self._to_device(where).long(), self._to_device(values).to(target.dtype))

        added, windows, pages, removed = changes
        columns = 1 + self.ints.shape[1]
        put(self.ints, added[:, 0], added[:, 1:columns])
        put(self.floats, added[:, 0], np.ascontiguousarray(added[:, columns:]).view(np.float32))
        put(self.uniforms, windows[:, 0], np.ascontiguousarray(windows[:, 1:]).view(np.float32))
        put(self.ints[:, DRAWN], windows[:, 0], np.zeros(len(windows)))
        put(self.table.view(-1), pages[:, 0], pages[:, 1])
        put(self.ints[:, LEFT], removed, np.zeros(len(removed)))
        self.step_index.fill_(-1)

    def _upload_removals(self) -> None:
        if self._removed:
            self.ints[:, LEFT].index_fill_(0, self._to_device(np.array(self._removed)), 0)
            self._removed = []

    def _to_device(self, numbers: IntArray) -> Tensor:
        tensor = torch.tensor(numbers)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    # ---- the step --------------------------------------------------------------------------------------------------------

    def _graph(self, rows: int, truncates: bool) -> Callable[[], None]:
        """A step of at least that many rows."""
        if self.device.type != "cuda":
            return lambda: self._step(rows, truncates)
        size = self._sizes[truncates].choose(rows)
        if (size, truncates) not in self._graphs:
            self._capture(size, truncates)
        return self._graphs[size, truncates]

    def prepare(self, size: int) -> None:
        """Capture the graph of this size in advance. No row may be in flight."""
        if (size, False) not in self._graphs:
            self._capture(size, False)
        self.sizes.add(size)

    def _capture(self, size: int, truncates: bool) -> None:
        with spending(self.times, "prepared_s"):
            saved = self.ints.clone(), self.step_index.clone()
            self.ints[:, LEFT] = 0  # the warm-up run must not advance any row
            self.step_index.fill_(-1)
            replay, self._pool = capture(lambda: self._step(size, truncates), self.device, self._pool, self._capture_stream)
            self.ints.copy_(saved[0])
            self.step_index.copy_(saved[1])
            self._graphs[size, truncates] = replay

    def _step(self, size: int, truncates: bool) -> None:
        """Sample one token in every row that has any left. No size, branch or address depends on the values of the tensors."""
        token, position, place, length, uniforms = self._begin(size)
        out = self.model(
            input_ids=token[None],
            position_ids=position[None],
            use_cache=False,
            agentfly_metadata=DecodeMetadata(self.pools, self.table[:size], place, length),
        )
        temperature, top_p, min_p = self.floats[:size].unbind(1)
        if self._has_kernels and not truncates:
            from ...kernels.decode import draw

            ids, logprobs = draw(out.logits[0], uniforms, temperature)
        else:
            top_k = self.ints[:size, TOP_K] if truncates else None
            ids, logprobs = draw_batch(out.logits[0], uniforms, temperature, top_k, top_p, min_p)
        self._end(ids, logprobs)

    def _begin(self, size: int) -> tuple[Tensor, ...]:
        """Count the step. Returns token, position, place of the new key, length and uniform number of the rows."""
        if self._has_kernels:
            from ...kernels.decode import begin_step

            return begin_step(self._rows(), self.step_index, size, PAGE_SIZE, columns=COLUMNS)
        self.step_index += 1
        ints = self.ints[:size]
        position, alive = ints[:, POSITION], ints[:, LEFT] > 0
        offset = position % PAGE_SIZE
        page = self.table[:size].gather(1, (position // PAGE_SIZE)[:, None])[:, 0].long()
        place = torch.where(alive, page * PAGE_SIZE + offset, offset)  # ended rows write to page 0, which nothing reads
        length = torch.where(alive, position + 1, 0).to(torch.int32)
        uniforms = self.uniforms[:size].gather(1, ints[:, DRAWN].clamp(max=UNIFORMS - 1)[:, None])[:, 0]
        return ints[:, TOKEN], position, place, length, uniforms

    def _rows(self) -> DecodeRows:
        from ...kernels.decode import DecodeRows

        return DecodeRows(self.ints, self.floats, self.uniforms, self.table)

    def _end(self, ids: Tensor, logprobs: Tensor) -> None:
        """Keep the results of the step and advance the rows."""
        if self._has_kernels:
            from ...kernels.decode import end_step

            columns, logprobs = (*COLUMNS, STOPS), logprobs.float()
            end_step(self._rows(), ids, logprobs, self.results, self.step_index, columns=columns, max_steps=MAX_STEPS)
            return
        size = len(ids)
        ints = self.ints[:size]
        left = ints[:, LEFT]
        alive = left > 0
        results = self.results[:, :size]
        results[:MAX_STEPS].index_copy_(0, self.step_index, ids.to(torch.int32)[None])
        results[MAX_STEPS:-1].index_copy_(0, self.step_index, logprobs.float().view(torch.int32)[None])
        stopped = (ids[:, None] == ints[:, STOPS:]).any(dim=1)
        ints[:, TOKEN] = torch.where(alive, ids, ints[:, TOKEN])
        ints[:, POSITION] += alive
        ints[:, DRAWN] += alive
        left.copy_(torch.where(stopped, 0, left - alive.long()))
        results[-1] = left


@lru_cache(maxsize=256)
def _padded(stop_ids: frozenset[int]) -> list[int]:
    stops = sorted(stop_ids) if len(stop_ids) <= MAX_STOPS else []
    return [*stops, *[-1] * (MAX_STOPS - len(stops))]
