"""Run a blocking reward off the event loop.

Comes in: a function and its arguments. Goes out: what it returned. A pool of the standard library would join its threads at
exit, so one reward that hangs would hang the program's end; these are daemon threads, at most `MAX_THREADS` at a time per
event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

MAX_THREADS = 32

_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """The caller sets the deadline; a thread that outlives it is left to end by itself and its result is dropped."""
    loop = asyncio.get_running_loop()
    async with _slots.setdefault(loop, asyncio.Semaphore(MAX_THREADS)):
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def work() -> None:
            result, failure = None, None
            try:
                result = context.run(lambda: function(**arguments))
            except BaseException as error:  # noqa: BLE001 - it is re-raised where it is awaited
                # StopIteration cannot travel through a future, and an exit is not this thread's to make.
                odd = isinstance(error, (StopIteration, SystemExit, KeyboardInterrupt))
                failure = RuntimeError(f"{type(error).__name__}: {error}") if odd else error
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, failure)

        threading.Thread(target=work, daemon=True, name="agentfly-reward").start()
        return await future
