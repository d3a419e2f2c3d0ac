"""Blocking functions in, their results on the event loop out.

A pool of daemon threads that grows when all are busy and shrinks when they idle. Unlike the executor of asyncio it never
makes a call queue behind one that hangs, and never holds up the end of the interpreter. A call that is cancelled is left
behind: its thread is told to stop (an exception is raised in it, which ends a Python loop but not a system call), is never
used again, and is replaced by the next call. It cannot end a thread that is stuck in a system call; such a thread lives until
the call returns or the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..errors import WorldError

IDLE_S = 30.0


class Abandoned(BaseException):
    """Raised inside a call that nobody waits for any more."""


class _Job:
    __slots__ = ("args", "context", "fn", "future", "loop")

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn, self.args = fn, args
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[tuple[Any, BaseException | None]] = self.loop.create_future()
        self.context = contextvars.copy_context()

    def run(self) -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = self.context.run(self.fn, *self.args)
        except BaseException as raised:  # noqa: BLE001 - it belongs to the caller, on the other side
            error = raised
        # The loop may have been closed meanwhile: then nobody waits for this.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_deliver, self.future, value, error)


def _deliver(future: asyncio.Future[tuple[Any, BaseException | None]], value: Any, error: BaseException | None) -> None:
    if not future.done():
        future.set_result((value, error))


class _Worker:
    """One thread. It is in the pool's idle list exactly while it waits for a job."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.job: _Job | None = None
        self.left = False
        self.thread = threading.Thread(target=self._work, name="agentfly-tool", daemon=True)

    def _work(self) -> None:
        with contextlib.suppress(Abandoned):
            while True:
                try:
                    job = self.jobs.get(timeout=IDLE_S)
                except queue.Empty:
                    if self.pool.retire(self):
                        return
                    continue  # it was chosen in this very moment; the job is on its way
                job.run()
                with self.lock:
                    self.job = None
                    if self.left:
                        for _ in range(100):
                            pass  # the exception is on its way; let it arrive here, where it is expected
                        return
                del job  # an idle thread must not keep its last result alive
                self.pool.give_back(self)

    def leave(self, job: _Job) -> None:
        """Nobody waits for `job` any more."""
        with self.lock:
            if self.job is not job:
                return
            self.left = True
            import ctypes  # late: most processes never leave a call behind

            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(Abandoned))


class Pool:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    async def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)` in a thread. Cancel it (or put a deadline around it) and the thread is left behind."""
        job = _Job(fn, args)
        worker = self._take()
        worker.job = job
        worker.jobs.put(job)
        try:
            value, error = await job.future
        except asyncio.CancelledError:
            worker.leave(job)
            raise
        if error is not None:
            try:
                raise error
            finally:
                error = None  # a traceback that holds its own frame is a cycle
        return value

    def _take(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        worker = _Worker(self)
        try:
            worker.thread.start()
        except RuntimeError as error:
            raise WorldError(
                f"no thread is left for a tool's call ({threading.active_count()} are running, some may hang): {error}"
            ) from error
        return worker

    def give_back(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def retire(self, worker: _Worker) -> bool:
        """An idle worker asks to end; False where it has just been taken."""
        with self._lock:
            if worker not in self._idle:
                return False
            self._idle.remove(worker)
            return True

    def forget(self) -> None:
        """After a fork the child has none of these threads."""
        self._lock = threading.Lock()
        self._idle = []


POOL = Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.forget)
run_in_thread = POOL.run
