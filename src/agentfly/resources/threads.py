"""One thread of its own for one environment: everything it does happens there, and the event loop only waits.

In: functions to run; out: their results, on the loop. Coroutines run on an event loop inside the thread, for the length of
the call. A call that is cancelled ends the thread: an exception is raised in it (which stops Python code, though not a
system call), the last words given to `leave` are run (the environment's `close`), and it takes no more work. It is a
daemon: one that is stuck in a system call lives until that returns, and never holds up the end of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..errors import WorldError
from ..tools.threads import Abandoned

log = logging.getLogger(__name__)
Result = tuple[Any, BaseException | None]


class _Job:
    __slots__ = ("done", "fn")

    def __init__(self, fn: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.fn = fn
        self.done = done


class OwnThread:
    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._job: _Job | None = None
        self._left = False
        self._last_words: Callable[[], Any] | None = None
        self._runner: asyncio.Runner | None = None
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"agentfly-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise WorldError(
                f"no thread is left for an environment ({threading.active_count()} are running): {error}"
            ) from error

    def submit(self, fn: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> _Job:
        """Run `fn` after what is queued; `done` is called in the thread."""
        job = _Job(fn, done)
        self._jobs.put(job)
        return job

    async def run(self, fn: Callable[[], Any]) -> Any:
        """`fn()`, awaited here. Cancelling it does not stop it: the caller then leaves the thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def done(value: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have been closed meanwhile: then nobody waits for this
                loop.call_soon_threadsafe(_deliver, future, value, error)

        self.submit(fn, done)
        value, error = await future
        if error is not None:
            try:
                raise error
            finally:
                error = None  # a traceback that holds its own frame is a cycle
        return value

    def stop(self) -> None:
        """End after what is queued."""
        self._jobs.put(None)

    def leave(self, last_words: Callable[[], Any]) -> None:
        """Stop what runs, say the last words, end."""
        with self._lock:
            if self._left:
                return
            self._left, self._last_words = True, last_words
            if self._job is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(Abandoned))
                if self._runner is not None:
                    with contextlib.suppress(
                        RuntimeError
                    ):  # the inner loop waits in a system call: wake it, to let the exception in
                        self._runner.get_loop().call_soon_threadsafe(_nothing)
        self._jobs.put(None)

    async def join(self, timeout_s: float) -> bool:
        """Wait for its end, at most so long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        pause = 0.0005
        while not self.ended.is_set():
            if loop.time() >= until:
                return False
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        return True

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None and self._begin(job):
                value, error = self._run(job.fn)
                with self._lock:
                    self._job = None
                    left = self._left
                job.done(value, error)
                del job, value, error  # an idle thread must not keep its last result alive
                if left:
                    break
        except Abandoned:
            log.debug("%s was left between two calls", self._thread.name)
        finally:
            self._end()

    def _begin(self, job: _Job) -> bool:
        with self._lock:
            if self._left:
                job.done(None, WorldError("the environment was closed before its call came"))
                return False
            self._job = job
            return True

    def _run(self, fn: Callable[[], Any]) -> Result:
        value: Any = None
        awaited = False
        try:
            value = fn()
            if inspect.isawaitable(value):
                if self._runner is None:
                    self._runner = asyncio.Runner()
                awaited = True
                value = self._runner.run(_await(value))
            return value, None
        except BaseException as raised:  # noqa: BLE001 - it belongs to the caller, on the other side
            if not awaited and inspect.iscoroutine(value):
                value.close()  # it was told to stop before it began
            return None, raised

    def _end(self) -> None:
        try:
            for _ in range(100):
                pass  # the exception may still be on its way; let it arrive here, where it is expected
        except Abandoned:
            log.debug("%s was told to stop", self._thread.name)
        if self._left and self._last_words is not None:
            _, error = self._run(self._last_words)
            if error is not None:
                log.warning("closing an environment whose call was given up failed: %s: %s", type(error).__name__, error)
        if self._runner is not None:
            self._runner.close()
        self.ended.set()
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job.done(None, WorldError("the environment was closed before its call came"))


def _deliver(future: asyncio.Future[Result], value: Any, error: BaseException | None) -> None:
    if not future.done():
        future.set_result((value, error))


async def _await(value: Any) -> Any:
    return await value


def _nothing() -> None:
    """Wakes an event loop."""
