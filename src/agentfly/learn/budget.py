"""How many tokens a micro batch may have: a number, or chosen from the free memory of a GPU.

auto   first update: FIRST_TOKENS, and the memory that its largest batch takes is measured
       then: the tokens that take USABLE of the free memory, at most MAX_TOKENS, or what the model runs best
out of memory: half of it; gradients are cleared and the batches are made again. After RAISE_AFTER updates the tokens are
doubled, up to what they were: the memory may have been another program's. The next time it takes twice as many updates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..kernels.memory import ROOM
from .batching import MicroBatch

log = logging.getLogger(__name__)
Result = TypeVar("Result")

CPU_TOKENS = 4096
FIRST_TOKENS = 8192
MAX_TOKENS = 131_072
RAISE_AFTER = 8
"""Updates without running out of memory before the tokens are doubled again."""
USABLE = 0.5
"""The share of free memory to use: sampling allocates too, and the allocator cannot use all of it."""


ACTIVATION_BYTES = 48
"""Bytes of activations per token, layer and number of a hidden state, without recomputing layers: measured at 0.5B to 3B."""
MOST = 0.85
"""The share of a GPU that may be filled before layers are recomputed."""


def fills_gpu(model: nn.Module, ranks: int = 1) -> bool:
    """Whether a model's training fills its GPU if no layer is recomputed. `ranks` divide the weights."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return False
    states = sum(weight.numel() * (16 if weight.requires_grad else 2) for weight in model.parameters()) / ranks
    config = getattr(model, "config", None)
    layers, width = (getattr(config, name, 0) or 0 for name in ("num_hidden_layers", "hidden_size"))
    return states + FIRST_TOKENS * layers * width * ACTIVATION_BYTES > MOST * torch.cuda.mem_get_info(device)[1]


class Memory(Protocol):
    """The memory of a device, in bytes."""

    def allocated(self) -> int: ...

    def peak(self) -> int:
        """The most that was allocated since `reset_peak`."""

    def reset_peak(self) -> None: ...

    def free(self) -> int:
        """What can still be allocated, by this process."""

    def release(self) -> None:
        """Return cached blocks to the device."""


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def free(self) -> int:
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + unused

    def release(self) -> None:
        torch.cuda.empty_cache()


class TokenBudget:
    """The tokens of a micro batch. `tokens` changes when memory was measured or ran out."""

    def __init__(self, setting: int | Literal["auto"], device: torch.device, memory: Memory | None = None) -> None:
        if memory is None and device.type == "cuda":
            memory = CudaMemory(device)
        self._memory = memory
        self._measures = setting == "auto" and memory is not None
        self._bytes_per_token = 0.0
        self.alone = True
        """Whether a batch that does not fit may be divided again: not if other ranks wait for this one."""
        self.tokens = setting if isinstance(setting, int) else CPU_TOKENS if memory is None else FIRST_TOKENS
        self._most = 0  # the tokens before memory ran out; 0 if it has not
        self._calm, self._needed = 0, RAISE_AFTER  # updates since `tokens` changed, and those before they are doubled

    @property
    def settled(self) -> bool:
        """Whether `tokens` will stay, as long as memory does not run out."""
        return not self._measures

    def require(self, needed: int) -> None:
        """Raise ConfigError if the device has no room for `needed` bytes that the first optimizer step allocates."""
        if self._memory is not None and needed > (free := self._memory.free()):
            raise ConfigError(
                f"the first update needs {needed / 2**30:.1f} GiB for gradients and the optimizer's moments, "
                f"and {free / 2**30:.1f} GiB of the GPU are free: {ROOM}"
            )

    def plan(self, best: int | None = None) -> None:
        """Choose `tokens` from what was measured: as many as fit into memory, at most `best` (what the model runs fastest).

        Called before an update; only the first one after the measurement chooses.
        """
        self._raise()
        if not self._measures or self._memory is None or not self._bytes_per_token:
            return
        self._measures = False
        fits = int(USABLE * self._memory.free() / self._bytes_per_token)
        self.tokens = max(min(self.tokens, FIRST_TOKENS), min(best or MAX_TOKENS, fits // 1024 * 1024))
        mib = self._bytes_per_token / 2**20
        log.info("train.max_tokens_per_batch = %d: a token takes %.2f MiB of activations", self.tokens, mib)

    @contextmanager
    def measured(self, micro: Sequence[MicroBatch]) -> Iterator[None]:
        """Measure what the largest of these batches takes, if that is not known."""
        if not self._measures or self._memory is None or self._bytes_per_token or not any(batch.rows for batch in micro):
            yield
            return
        before = self._memory.allocated()
        self._memory.reset_peak()
        yield
        taken = self._memory.peak() - before
        self._bytes_per_token = max(1.0, taken / max(batch.input_ids.numel() for batch in micro))

    def _raise(self) -> None:
        """Double the tokens, up to what they were, if memory has been enough for long."""
        self._calm += 1
        if self.tokens < self._most and self._calm > self._needed:
            log.info("memory has been enough for %d updates: %d tokens in a batch", self._needed, 2 * self.tokens)
            self.tokens = min(2 * self.tokens, self._most)
            self._calm = 0
            self._needed *= 2

    def can_halve(self, micro: Sequence[MicroBatch]) -> bool:
        """Whether these rows may be divided into smaller batches."""
        return self.alone and any(len(batch.rows) > 1 for batch in micro)

    def halve(self, micro: Sequence[MicroBatch]) -> None:
        """After an OutOfMemoryError with these batches: half the tokens of the largest, from now on.

        Call it outside of the `except` block, where the tensors of the failed pass are free.
        """
        largest = max(batch.input_ids.numel() for batch in micro)
        self._most = max(self._most, min(self.tokens, largest))
        self._calm = 0
        self.tokens = max(1, min(self.tokens, largest) // 2)
        self._measures = False
        if self._memory is not None:
            self._memory.release()
        log.warning("out of memory in a batch of %d tokens: continuing with at most %d", largest, self.tokens)

    def run(
        self, divide: Callable[[], list[MicroBatch]], work: Callable[[list[MicroBatch]], Result], undo: Callable[[], None]
    ) -> Result:
        """Returns `work(divide())`. If memory runs out, `undo()` is called and the batches are made again, half as large."""
        while True:
            micro = divide()
            try:
                with self.measured(micro):
                    return work(micro)
            except torch.OutOfMemoryError:
                undo()
                if not self.can_halve(micro):
                    raise
            self.halve(micro)

    def each(
        self,
        divide: Callable[[Sequence[int]], Iterator[MicroBatch]],
        rows: Sequence[int],
        score: Callable[[MicroBatch], Tensor],
    ) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield each batch of `divide(rows)` with its scores. Rows of a batch that does not fit are divided again."""
        if not self.alone:
            yield from ((batch, score(batch)) for batch in divide(rows))
            return
        left = list(rows)
        while left:
            done: set[int] = set()
            for batch in divide(left):
                scores = self._try(score, batch)
                if scores is None:
                    break
                yield batch, scores
                done.update(batch.rows)
            left = [row for row in left if row not in done]

    def _try(self, score: Callable[[MicroBatch], Tensor], batch: MicroBatch) -> Tensor | None:
        try:
            return score(batch)
        except torch.OutOfMemoryError:
            if not self.can_halve([batch]):
                raise
        self.halve([batch])
        return None
