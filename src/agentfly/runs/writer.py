"""Writes the records of a run to its `RunStore` in one thread, so that chains and the learner do not wait for the disk.

    event loop                     queue                             thread "agentfly-store"
    add_trajectories  ---->  t3 t3 m3 t4 t4 t4 ...  ---->  encode, insert, commit        in the order of the calls
         ^                        |
         +--- waits while more than `max_pending` trajectories, or `max_bytes` of them, are queued (back-pressure)

A killed process loses what is queued, and nothing that was written before: the commit of a batch is in the operating system's
hands. After `flush` nothing is queued, and a power cut loses nothing either.

The thread shares the interpreter with the chains. A write therefore waits for others, for at most LINGER_S, because few large
transactions disturb less than many small ones; inside `deferring` it waits for its end, for at most DEFER_S.

Notes (gauges, events) are small and many: they share transactions, and are dropped and counted if MAX_NOTES of them are queued.
Trajectories, metrics and what the learner records are never dropped.

Trajectories are encoded after the call returns: the caller must not change them. If a write fails, the writer drops what is
queued and every later call raises StorageError, so metrics are never stored without the trajectories before them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..aio.threads import WorkerThread
from ..errors import ConfigError, StorageError
from ..types import TokenRecord, Trajectory
from .store import SPLITS, RunStore, StoredSplit

MAX_PENDING = 4096
MAX_BYTES = 1 << 30
TIMEOUT_S = 600.0
"""Seconds that a call waits for the disk before it raises StorageError."""
BATCH = 64
"""Trajectories of one transaction, if they were added one by one."""
MAX_NOTES = 20_000
"""Notes that may be queued; more are dropped."""
LINGER_S = 0.1
"""Seconds that a write waits for others, unless BATCH trajectories are queued or a caller waits."""
DEFER_S = 1.0
"""Seconds that a write waits at most inside `deferring`."""
TRIES = 3
"""Attempts to encode a trajectory while another thread changes a field of its task."""


@dataclass(slots=True)
class _WriteJob:
    """One call: trajectories of a step, its metrics, or another write (`write`, which is a note if `droppable`)."""

    step: int = 0
    split: StoredSplit = "train"
    trajectories: list[Trajectory] = field(default_factory=list)
    replace: bool = False
    metrics: dict[str, float] | None = None
    num_bytes: int = 0
    write: Callable[[RunStore], None] | None = None
    droppable: bool = False
    queued_at: float = field(default_factory=time.monotonic)

    def joins(self, other: _WriteJob) -> bool:
        """Whether it may be written in the same transaction as the job before it."""
        if self.write is not None or other.write is not None:
            return self.write is not None and other.write is not None
        if self.metrics is not None or other.metrics is not None or self.replace:
            return False
        return (self.step, self.split) == (other.step, other.split)


class StoreWriter:
    """The writing side of one store. `warn` receives a sentence the first time a caller has to wait.

    `pending` is the number of trajectories that are queued, `dropped` that of the notes that were lost. `busy_s` are the
    seconds that the thread has worked, `waited_s` those that callers of `add_trajectories` and `drained` have waited.
    """

    def __init__(
        self,
        store: RunStore,
        *,
        max_pending: int = MAX_PENDING,
        max_bytes: int = MAX_BYTES,
        timeout_s: float = TIMEOUT_S,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        if max_pending < 1 or max_bytes < 1 or timeout_s <= 0:
            raise ConfigError("max_pending and max_bytes must be at least 1, and timeout_s above 0")
        self.store = store
        self.max_pending, self.max_bytes, self.timeout_s = max_pending, max_bytes, timeout_s
        self.busy_s = self.waited_s = 0.0
        self.pending = self.dropped = 0
        self._bytes = self._notes = 0
        self._warn = warn
        self._jobs: deque[_WriteJob] = deque()
        self._queued = self._done = 0  # calls
        self._defers = self._flushes = 0  # contexts of `deferring` and calls of `flush` that have not ended
        self._failure: StorageError | None = None
        self._closed = False
        self._changed = threading.Condition()  # guards all of the above
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._thread: WorkerThread | None = None  # from the first call on: a run that fails before it leaves no thread

    # ---- the caller's side -----------------------------------------------------------------------------------------------

    async def add_trajectories(
        self, step: int, split: StoredSplit, trajectories: Sequence[Trajectory], *, replace: bool = False
    ) -> None:
        """Queue trajectories, as `RunStore.add_trajectories` adds them. Returns at once unless the queue is full.

        A call that is cancelled while it waits has queued its trajectories. Raises StorageError if an earlier write failed.
        """
        self.put_trajectories(step, split, trajectories, replace=replace)
        if self._has_room():
            return
        if self._warn is not None:
            self._warn(
                f"the run waits for its store: {self.pending} trajectories are not yet written to {self.store.path}. "
                f"Is the disk slow?"
            )
            self._warn = None
        await self._until(self._has_room)

    def put_trajectories(
        self, step: int, split: StoredSplit, trajectories: Sequence[Trajectory], *, replace: bool = False
    ) -> None:
        """Queue trajectories, also if the queue is full: for a caller that keeps them in memory anyway."""
        if split not in SPLITS:
            raise ConfigError(f"a split is 'train' or 'validation', not {split!r}")
        chains = list(trajectories)
        self._put(_WriteJob(step, split, chains, replace, num_bytes=sum(map(_size, chains))))

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a step. They are written after all trajectories that were added before them."""
        self._put(_WriteJob(step, metrics={name: float(value) for name, value in metrics.items()}))

    def add_tokens(self, step: int, records: Sequence[TokenRecord]) -> None:
        """Queue what the learner did with the chains of a step, which were added before."""
        queued = list(records)
        size = sum(len(blob) for record in queued for _, blob in record.series.values())
        self._put(_WriteJob(step, write=lambda store: store.add_tokens(step, queued), num_bytes=size))

    def put(self, write: Callable[[RunStore], None], *, droppable: bool = False) -> None:
        """Queue another write: `write` is called in the thread, perhaps in one transaction with others.

        A note (`droppable`) is counted instead if too many are queued.
        """
        if droppable and self._notes >= MAX_NOTES:
            self.dropped += 1
            return
        self._put(_WriteJob(write=write, droppable=droppable))

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Inside, writes wait until the context ends, each for at most DEFER_S.

        They do not wait while a caller waits for them or half of the queue is full.
        """
        with self._changed:
            self._defers += 1
        try:
            yield
        finally:
            with self._changed:
                self._defers -= 1
                self._changed.notify_all()

    def flush(self) -> None:
        """Block until everything that was added is on the disk; for a thread other than the event loop's."""
        with self._changed:
            queued = self._queued
            self._flushes += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: self._done >= queued or self._failure is not None, self.timeout_s):
                    raise self._late()
            finally:
                self._flushes -= 1
        self._check()
        self.store.flush()

    async def drained(self) -> None:
        """Wait until everything that was added is written."""
        queued = self._queued
        await self._until(lambda: self._done >= queued)

    def close(self) -> None:
        """Write what is queued and end the thread. Raises StorageError if a write failed; the store stays open."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
            if thread is not None:
                thread.stop()
        if thread is not None and not thread.ended.wait(self.timeout_s):
            raise self._late()
        self._check()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> Literal[False]:
        """Closes. A failed write does not hide the error of the body."""
        with contextlib.suppress(*(() if error is None else (StorageError,))):
            self.close()
        return False

    def _put(self, job: _WriteJob) -> None:
        self._check()
        with self._changed:
            if self._closed:
                raise ConfigError("this writer is closed")
            self._jobs.append(job)
            self._queued += 1
            self.pending += len(job.trajectories)
            self._bytes += job.num_bytes
            self._notes += job.droppable
            if self._may_write():
                self._changed.notify_all()
            if self._thread is None:
                self._thread = WorkerThread("store")
            # With the lock: after `close` has stopped the thread, it runs nothing.
            self._thread.submit(self._write_next, self._fail)

    def _has_room(self) -> bool:
        return self.pending <= self.max_pending and self._bytes <= self.max_bytes

    def _half_full(self) -> bool:
        return 2 * self.pending > self.max_pending or 2 * self._bytes > self.max_bytes

    def _check(self) -> None:
        if self._failure is not None:
            raise StorageError(str(self._failure)) from self._failure

    def _late(self) -> StorageError:
        return StorageError(
            f"{self.pending} trajectories were not written to {self.store.path} within {self.timeout_s:.0f} s: the disk hangs"
        )

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait for a state of the queue, or raise the failure of the thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        entry = (ready, future)
        started = time.perf_counter()
        with self._changed:
            if ready() or self._failure is not None:
                future.set_result(None)
            else:
                self._waiting.append(entry)
                self._changed.notify_all()
        try:
            async with asyncio.timeout(self.timeout_s):
                await future
        except TimeoutError:
            raise self._late() from None
        finally:
            self.waited_s += time.perf_counter() - started
            with self._changed:
                if entry in self._waiting:
                    self._waiting.remove(entry)
        self._check()

    # ---- the thread ------------------------------------------------------------------------------------------------------

    def _write_next(self) -> None:
        """Write the oldest call, and with it the small ones that follow and belong to the same step."""
        with self._changed:
            while self._jobs and not self._may_write():
                waits_s = DEFER_S if self._defers else LINGER_S
                if (left_s := self._jobs[0].queued_at + waits_s - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s)
            if not self._jobs or self._failure is not None:
                return  # written together with an earlier call, or dropped
            taken = [self._jobs.popleft()]
            count = len(taken[0].trajectories)
            while self._jobs and self._jobs[0].joins(taken[0]):
                count += max(1, len(self._jobs[0].trajectories))
                if count > BATCH:
                    break
                taken.append(self._jobs.popleft())
        started = time.perf_counter()
        try:
            self._write(taken)
        finally:
            self.busy_s += time.perf_counter() - started
        with self._changed:
            self._done += len(taken)
            for job in taken:
                self.pending -= len(job.trajectories)
                self._bytes -= job.num_bytes
                self._notes -= job.droppable
            self._wake()

    def _may_write(self) -> bool:
        if self._flushes or self._waiting or self._closed or self._half_full() or self._failure is not None:
            return True
        return not self._defers and self.pending >= BATCH

    def _write(self, jobs: list[_WriteJob]) -> None:
        first = jobs[0]
        if first.write is not None:
            with self.store.transaction():
                for job in jobs:
                    assert job.write is not None
                    job.write(self.store)
            return
        if first.metrics is not None:
            self.store.add_metrics(first.step, first.metrics)
            return
        chains = [trajectory for job in jobs for trajectory in job.trajectories]
        for attempt in range(TRIES):
            try:
                self.store.add_trajectories(first.step, first.split, chains, replace=first.replace)
            except RecursionError:
                raise
            except (
                RuntimeError
            ):  # a dict changed its size: a tool or a reward of a sibling writes to a field of the shared task
                if attempt == TRIES - 1:
                    raise
            else:
                return

    def _fail(self, _: None, error: BaseException | None) -> None:
        if error is None:
            return
        with self._changed:
            sentence = str(error) if isinstance(error, StorageError) else f"a record cannot be stored: {error}"
            self._failure = StorageError(sentence)
            self._failure.__cause__ = error
            self._jobs.clear()
            self._wake()

    def _wake(self) -> None:
        """Wake the callers that wait for what is now so. The lock is held."""
        self._changed.notify_all()
        for entry in [each for each in self._waiting if self._failure is not None or each[0]()]:
            self._waiting.remove(entry)
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                entry[1].get_loop().call_soon_threadsafe(_settle, entry[1])


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _size(trajectory: Trajectory) -> int:
    """About how many bytes of memory a trajectory takes."""
    ids = sum(len(turn.context_ids) + 2 * len(turn.completion.token_ids) for turn in trajectory.turns)
    return 2000 + 36 * ids + sum(len(message.content) for message in trajectory.messages)
