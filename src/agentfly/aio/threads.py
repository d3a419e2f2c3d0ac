"""Blocking work off the event loop: `WorkerThread` is a dedicated thread, `run_in_thread` runs one call in a pooled thread.

Both use daemon threads, so a call that hangs never holds up the end of the program, as the executors of the standard library
do. A call that is cancelled is abandoned: `Abandoned` is raised inside its thread, which ends Python code but not a system
call, and the thread takes no more work. It is raised again every `AGAIN_S` seconds while the call goes on: a bare `except`, or
a finalizer that ran at that moment, may have taken it. A thread that is stuck in a system call lives until the call returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ..errors import WorldError, contained

log = logging.getLogger(__name__)
T = TypeVar("T")
IDLE_S = 30.0
"""A thread of the pool that has had no call for so long ends."""
AGAIN_S = 5.0
"""An abandoned call has so long to clean up before it is interrupted again."""
Done = Callable[[Any, BaseException | None], None]
Outcome = tuple[Any, BaseException | None]


class Abandoned(BaseException):
    """Raised inside a call whose caller was cancelled."""


@dataclass(slots=True, eq=False)
class _Job:
    fn: Callable[[], Any]
    done: Done
    finished: bool = False


class WorkerThread:
    """A thread that runs the jobs it is given, one after the other, until it is stopped or abandoned.

        waiting for a job <-> running a job        `_lock` guards the step between the two
               |  stop            |  abandon
               v                  v
             ended  <-  running `final`

    Raises WorldError if the system has no thread left.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: _Job | None = None
        self._abandoned = False
        self._final: Callable[[], Any] | None = None
        self._runner: asyncio.Runner | None = None
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"agentfly-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise WorldError(f"no thread is left ({threading.active_count()} are running, some may hang): {error}") from error

    @property
    def usable(self) -> bool:
        """Whether it takes more work."""
        return not self._abandoned

    def submit(self, fn: Callable[[], Any], done: Done) -> _Job:
        """Run `fn` after the jobs that are queued. `done(value, error)` is called in the thread."""
        job = _Job(fn, done)
        self._jobs.put(job)
        return job

    async def run(self, fn: Callable[[], Any]) -> Any:
        """Return `fn()`. An awaitable that `fn` returns is awaited in the thread, on an event loop of the thread.

        Cancelling this call does not stop `fn`: call `abandon` for that.
        """
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.submit(partial(self._complete, fn), partial(_deliver, future))
        return _unwrap(await future)

    def stop(self) -> None:
        """End after the jobs that are queued."""
        self._jobs.put(None)

    def abandon(self, final: Callable[[], Any] | None = None, job: _Job | None = None) -> None:
        """Interrupt the running job, refuse those that are queued, call `final` in the thread, and end.

        With `job`, only if that job has not finished: a pooled thread may run the next call by now.
        """
        with self._lock:
            if self._abandoned or (job is not None and job.finished):
                return
            self._abandoned, self._final = True, final
        self._interrupt()
        self._jobs.put(None)

    def _interrupt(self) -> None:
        with self._lock:
            if self._running is None:
                return
            import ctypes  # late: most processes never abandon a call

            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(Abandoned))
            if self._runner is not None:
                # The loop in the thread sleeps in a system call, which the exception does not interrupt: wake it.
                with contextlib.suppress(RuntimeError):
                    self._runner.get_loop().call_soon_threadsafe(_nothing)
        with contextlib.suppress(RuntimeError):  # no event loop runs here any more
            asyncio.get_running_loop().call_later(AGAIN_S, self._interrupt)

    async def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread. Returns False if it takes longer than `timeout_s`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        pause = 0.0005
        while not self.ended.is_set():
            if loop.time() >= until:
                return False
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        return True

    def _next(self) -> _Job | None:
        return self._jobs.get()

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None and self._begin(job):
                value, error = _outcome(job.fn)
                with self._lock:
                    self._running, job.finished = None, True
                    abandoned = self._abandoned
                job.done(value, error)
                del job, value, error  # a waiting thread must not keep its last result alive
                if abandoned:
                    break
        except Abandoned:
            log.debug("%s was abandoned between two jobs", self._thread.name)
        finally:
            self._end()

    def _begin(self, job: _Job) -> bool:
        with self._lock:
            if self._abandoned:
                _refuse(job)
                return False
            self._running = job
            return True

    def _complete(self, fn: Callable[[], Any]) -> Any:
        value = None
        try:
            value = fn()
            if not inspect.isawaitable(value):
                return value
            runner = self._open_runner()
        except Abandoned:
            if inspect.iscoroutine(value):
                value.close()  # abandoned before its first step
            raise
        return runner.run(_await(value))

    def _open_runner(self) -> asyncio.Runner:
        """Returns the thread's runner, with its event loop.

        It is made with the lock: `abandon` must not interrupt that, because half an event loop does not close its descriptors.
        """
        with self._lock:
            if self._abandoned and self._running is not None:
                raise Abandoned
            if self._runner is None:
                runner = asyncio.Runner()
                runner.get_loop()
                self._runner = runner
            return self._runner

    def _end(self) -> None:
        try:
            for _ in range(100):
                pass  # an exception that `abandon` has set may be pending: a few instructions let it arrive here
        except Abandoned:
            log.debug("%s was abandoned", self._thread.name)
        with self._lock:
            self._running = None
        if self._final is not None:
            _, error = _outcome(partial(self._complete, self._final))
            if error is not None:
                log.warning("closing after an abandoned call failed: %s: %s", type(error).__name__, error)
        if self._runner is not None:
            self._runner.close()
        self.ended.set()
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                _refuse(job)


class _PoolThread(WorkerThread):
    """A thread of a pool. It is in the pool's idle list exactly while it waits for a job."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        super().__init__("tool")

    def _next(self) -> _Job | None:
        while True:
            try:
                return self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                if self._pool.retire(self):
                    return None
                # The pool has just chosen this thread: its job is on the way.


class ThreadPool:
    """Threads that are reused. The pool grows when all are busy, so no call queues behind one that hangs."""

    def __init__(self) -> None:
        self.forget()

    async def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Return `fn(*args)`, called in a thread with a copy of the current context.

        Cancelling this call (a deadline does) abandons it: see the module.
        """
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        if thread is None:
            thread = _PoolThread(self)
        job = thread.submit(partial(contextvars.copy_context().run, fn, *args), partial(self._done, thread, future))
        try:
            return _unwrap(await future)
        except asyncio.CancelledError:
            thread.abandon(job=job)
            raise

    def _done(self, thread: _PoolThread, future: asyncio.Future[Outcome], value: object, error: BaseException | None) -> None:
        _deliver(future, value, error)
        if thread.usable:
            with self._lock:
                self._idle.append(thread)

    def retire(self, thread: _PoolThread) -> bool:
        """Take an idle thread out of the pool. Returns False if a call has taken it already."""
        with self._lock:
            if thread not in self._idle:
                return False
            self._idle.remove(thread)
            return True

    def forget(self) -> None:
        """Start empty: the child of a fork has none of these threads."""
        self._lock = threading.Lock()
        self._idle: list[_PoolThread] = []


def _outcome(fn: Callable[[], Any]) -> Outcome:
    try:
        return fn(), None
    except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
        return None, error


def _deliver(future: asyncio.Future[Outcome], value: object, error: BaseException | None) -> None:
    """Complete a future from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits for this any more
        future.get_loop().call_soon_threadsafe(_settle, future, (value, error))


def _settle(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


def _unwrap(outcome: Outcome) -> Any:
    # The outcome is a value and an error, not an exception of the future: StopIteration cannot be set on a future.
    value, error = outcome
    if error is not None:
        try:
            raise (
                error if isinstance(error, Abandoned) else contained(error)
            )  # Python delivers Ctrl-C to the main thread only, so this is not one
        finally:
            del error, outcome  # a traceback that refers to its frame is a reference cycle
    return value


def _refuse(job: _Job) -> None:
    job.done(None, WorldError("the thread was abandoned before it came to this call"))


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _nothing() -> None:
    """Wakes an event loop."""


def run_to_end(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine from synchronous code. If this thread already runs an event loop, a new thread runs the coroutine."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "agentfly-run-sync") as executor:
        return executor.submit(asyncio.run, work).result()


_pool = ThreadPool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)
run_in_thread = _pool.run
