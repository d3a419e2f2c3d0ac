"""Saves a run's checkpoints while training goes on.

    step ends -> copy the state to the CPU's memory -> record the step -> write the copy in a thread -> rename, rotate

One checkpoint is written at a time: the next save waits for the last one (back-pressure). If the memory does not hold a copy,
training waits for the write instead. A save that fails is reported and tried again at the next one; the last one raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..aio.threads import WorkerThread
from ..config.sections import TrainSettings
from ..errors import AgentFlyError, StorageError
from ..runs.checkpoints import STATE, mark_best, staging_folder, write_checkpoint

MEMORY_SHARE = 0.5
"""A copy takes at most this share of the memory that is available."""


class Saver:
    """Writes the checkpoints of one run, and knows when one is due. `warn` receives the sentence if a save fails."""

    def __init__(
        self,
        folder: Path,
        settings: TrainSettings,
        model: object,
        tokenizer: object,
        warn: Callable[[str], None],
        before_write: Callable[[], None],
        snapshot: Callable[[Path], Callable[[Path], None]] | None = None,
    ) -> None:
        """`before_write` is called in the writing thread before each write: it flushes the records up to the checkpoint.

        `snapshot` is that of a sharded learner (`RankLearner.snapshot`), which writes the weights itself.
        """
        self.folder, self.settings, self.warn = folder, settings, warn
        self.model = model
        self.newest: Path | None = None
        self.saved_step: int | None = None
        # Step and figures of the best validation, which may still have to be saved, and of the one that `best` names.
        self._best: tuple[int, tuple[float, float]] | None = None
        self._linked: tuple[int, tuple[float, float]] | None = None
        self._before_write = before_write
        self._snapshot = snapshot
        # Read once: a tokenizer that chains use must not be saved in another thread at the same time.
        self._tokenizer = _files_of(tokenizer)
        self._thread: WorkerThread | None = None
        self._writing: asyncio.Task[None] | None = None
        self._last = time.monotonic()

    def loaded(self, step: int, checkpoint: Path) -> None:
        """The run was resumed from this checkpoint, so its step needs no other."""
        self.saved_step, self.newest = step, checkpoint

    def validated(self, step: int, metrics: Mapping[str, float], *, linked: bool = False) -> None:
        """A validation has ended. The checkpoint of its step is to be kept as the best if no earlier one was better.

        Success decides, then reward. `linked`: the link `best` names this step.
        """
        figures = metrics.get("validation/success", math.nan), metrics.get("validation/reward", 0.0)
        if self.settings.keep_best and math.isfinite(figures[0]) and (self._best is None or figures >= self._best[1]):
            self._best = (step, figures)
            if linked:
                self._linked = self._best

    def is_best(self, step: int) -> bool:
        return self._best is not None and self._best[0] == step

    def due(self, step: int) -> bool:
        """Whether to save after this step: the best, `save_every` steps, or `save_every_s` seconds since the last save."""
        settings = self.settings
        if self.is_best(step):
            return True
        if settings.save_every and step % settings.save_every == 0:
            return True
        idle = self._writing is None or self._writing.done()
        # A monotonic clock: the time of day may jump.
        return bool(settings.save_every_s) and idle and time.monotonic() - self._last >= settings.save_every_s

    async def save(self, step: int, state: dict[str, Any]) -> None:
        """Start to save. Returns when training may go on; a failed write is reported by `warn`."""
        from ..learn.model.storage import copy_to_memory, num_bytes

        await self.wait()
        self._last = time.monotonic()
        try:
            tree = await self._tree(step, state)
        except StorageError as error:
            self._not_saved(error)
            return
        copied = num_bytes(tree) <= MEMORY_SHARE * available_memory()
        if copied:  # of a sharded learner the rest of the state: `snapshot` has copied the shards
            try:
                tree = await finish_in_thread(copy_to_memory, tree)
            except (MemoryError, RuntimeError):  # torch's allocator raises RuntimeError
                copied = False
        self._writing = asyncio.create_task(self._report(step, tree))
        if not copied:
            await self.wait()

    async def save_last(self, step: int, state: dict[str, Any]) -> None:
        """Save the state that a run ends with, unless that step is saved. Raises StorageError."""
        await self.wait()
        if self.saved_step != step:
            await self._write(step, await self._tree(step, state))
        elif self.is_best(step):  # it was saved before it was validated
            mark_best(self.folder, step)

    async def _tree(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Returns what is written: the weights, or a function that writes those of all ranks, and the state."""
        from ..learn.model.storage import checkpoint_weights

        if self._snapshot is None:
            return {"weights": checkpoint_weights(self.model), "state": state}
        return {"write": await finish_in_thread(self._snapshot, staging_folder(self.folder, step)), "state": state}

    async def wait(self) -> None:
        """Wait for the write that is under way. A cancellation waits too: the write is not left half done."""
        if self._writing is not None:
            await finish(self._writing)
            self._writing = None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    async def _report(self, step: int, tree: dict[str, Any]) -> None:
        try:
            await self._write(step, tree)
        except AgentFlyError as error:
            self._not_saved(error)

    def _not_saved(self, error: AgentFlyError) -> None:
        self._best = self._linked
        self.warn(f"{error}. Training goes on")

    async def _write(self, step: int, tree: dict[str, Any]) -> None:
        if self._thread is None:
            self._thread = WorkerThread("save")
        best = self._best if self.is_best(step) else None
        self.newest = await self._thread.run(partial(self._write_files, step, tree, best is not None))
        self.saved_step, self._linked = step, best or self._linked

    def _write_files(self, step: int, tree: dict[str, Any], best: bool) -> Path:
        from ..learn.model.storage import save_checkpoint_model, save_state

        def write(folder: Path) -> None:
            if "write" in tree:
                tree["write"](folder)
            else:
                save_checkpoint_model(self.model, None, folder, tree["weights"])
            for name, data in self._tokenizer.items():
                (folder / name).write_bytes(data)
            save_state(folder / STATE, tree["state"])

        with contextlib.suppress(StorageError):  # the weights are worth more; the run stops at the next record it cannot write
            self._before_write()
        return write_checkpoint(self.folder, step, write, self.settings.keep_checkpoints, best)


def _files_of(tokenizer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        return {path.name: path.read_bytes() for path in Path(name).iterdir() if path.is_file()}


def available_memory() -> int:
    """Returns the bytes of memory that can be allocated: of the machine, and of the container if it has a limit."""
    limits = [sys.maxsize]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
        cgroup = Path("/sys/fs/cgroup")
        limits.append(int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
    except (OSError, KeyError, ValueError):
        return min(limits)  # no Linux, no limit ("max"), or another layout
    return min(limits)


async def finish(task: asyncio.Future[Any]) -> Any:
    """Await a task. A cancellation waits for its end, so that nothing is left half done; its error is raised first."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])  # no deadline: a second Ctrl-C exits at once
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise


async def finish_in_thread(work: Callable[..., Any], *args: object) -> Any:
    """Run blocking work in a thread and `finish` it."""
    return await finish(asyncio.get_running_loop().run_in_executor(None, work, *args))
