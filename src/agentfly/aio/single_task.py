"""`SingleTask`: one asyncio task in which the async methods of an object run, from its first call to its closing.

A cancel scope or task group that one method enters and another leaves belongs to the task that entered it: anyio refuses to
leave it in another task, and cancels the task that entered it if the group fails. Here that is the object's own task, so the
failure ends the object alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import WorldError, contained
from .deadline import Alarm, Expired, within
from .threads import Abandoned


@dataclass(slots=True, eq=False)
class _Call:
    """A coroutine that has taken its first step and waits for the future `waiting`; `within` drives it as a coroutine.

    `cancelled` is a cancellation of the task that arrived before the task came to this call.
    """

    coroutine: Coroutine[Any, Any, Any]
    waiting: object
    done: asyncio.Future[tuple[Any, BaseException | None]]
    alarm: Alarm | None = None
    cancelled: BaseException | None = None
    resumed: bool = False

    def send(self, value: object) -> Any:
        if self.resumed:
            return self.coroutine.send(value)
        self.resumed = True
        if self.cancelled is not None:
            return self.coroutine.throw(self.cancelled)
        if asyncio.isfuture(self.waiting):
            self.waiting._asyncio_future_blocking = True  # another task may have awaited the same future meanwhile
        return self.waiting

    def throw(self, error: BaseException) -> Any:
        return self.coroutine.throw(error)

    def close(self) -> None:
        self.coroutine.close()

    def give_up(self) -> None:
        if self.alarm is not None and not self.alarm.rings:
            self.alarm.expire()

    def settle(self, value: object, error: BaseException | None) -> None:
        if not self.done.done():  # a value and an error: StopIteration cannot be set on a future
            self.done.set_result((value, error))


@dataclass(slots=True, eq=False)
class SingleTask:
    """The task starts with the first call. At the end it calls `final`, which has `final_s` seconds.

        waiting <-> running a call
           | end()       |  a scope that the object holds open is cancelled
           `-------------`--> final() --> over; `on_cancelled(why)` if it was cancelled

    `why` says why it takes no more calls; `error` is what `final` raised.
    """

    name: str
    final: Callable[[], Any]
    final_s: float
    on_cancelled: Callable[[str], None]
    why: str | None = None
    error: Exception | None = None
    _busy: bool = False
    _call: _Call | None = None
    _wake: asyncio.Future[None] | None = None
    _task: asyncio.Task[None] | None = None
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)

    @property
    def started(self) -> bool:
        return self._task is not None

    async def run(self, awaitable: Awaitable[Any]) -> Any:
        """Return what `awaitable` gives. Cancelling this call cancels `awaitable`.

        A call that overlaps another one runs in the task of its caller, because a chain may wait for several answers at once.
        """
        if self.why is not None:
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise WorldError(self.why)
        if self._busy:
            return await awaitable
        coroutine = awaitable if inspect.iscoroutine(awaitable) else _await(awaitable)
        self._busy = True
        try:
            waiting = self._first_step(coroutine)
        except StopIteration as stop:
            self._busy = False
            return stop.value
        except BaseException as raised:
            self._busy = False
            raise contained(raised) from raised
        call = self._call = _Call(coroutine, waiting, asyncio.get_running_loop().create_future())
        self._stir()
        try:
            value, error = await call.done
        except asyncio.CancelledError:
            call.give_up()
            raise
        if error is not None:
            raise error
        return value

    def _first_step(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Begin a coroutine as if the task ran it. Most calls end here, and cost no switch of tasks."""
        loop, caller = asyncio.get_running_loop(), asyncio.current_task()
        assert caller is not None
        if self._task is None:
            self._task = loop.create_task(self._work(), name=f"agentfly-{self.name}", context=self._context)
        asyncio.tasks._leave_task(loop, caller)
        asyncio.tasks._enter_task(loop, self._task)
        try:
            return self._context.run(coroutine.send, None)
        finally:
            asyncio.tasks._leave_task(loop, self._task)
            asyncio.tasks._enter_task(loop, caller)

    async def end(self) -> None:
        """Cancel the running call, run `final`, and wait for the end of the task. Raises what `final` raised."""
        self.why = self.why or f"{self.name} is closed"
        if self._call is not None:
            self._call.give_up()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work(), name=f"agentfly-{self.name}")
        self._stir()
        await asyncio.wait([self._task])
        if self.error is not None:
            raise self.error

    def _stir(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _work(self) -> None:
        task = asyncio.current_task()
        cancelled = False
        try:
            while self._call is not None or self.why is None:
                await (self._wait() if self._call is None else self._play(self._call))
        except (asyncio.CancelledError, Abandoned):
            cancelled = True
            self.why = self.why or f"{self.name} ended: a task group or cancel scope that it holds open was cancelled"
            while task is not None and task.uncancel():
                pass
        try:
            made = self.final()
            if inspect.isawaitable(made):
                await within(made, self.final_s)
        except BaseException as error:  # noqa: BLE001 - `end` raises it
            self.error = contained(error)
        if cancelled:
            self._tell()

    def _tell(self) -> None:
        """Say that the task was cancelled. A task group raises the reason when it is left, which is in `final`."""
        cause: BaseException | None = self.error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        self.why = f"{self.why}" if cause is None else f"{self.why}: {type(cause).__name__}: {cause}"
        self.error = None
        if self._call is not None:
            self._call.settle(None, WorldError(self.why))
        self.on_cancelled(self.why)

    async def _wait(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        except asyncio.CancelledError as error:
            if self._call is None:
                raise
            self._call.cancelled = error  # meant for the call that has just begun
        finally:
            self._wake = None

    async def _play(self, call: _Call) -> None:
        """Run one call. Raises CancelledError if the task was cancelled, unless the caller gave the call up."""
        call.alarm = Alarm(None)
        if call.done.done() or self.why is not None:
            call.give_up()  # before the task came to it
        value: object = None
        error: BaseException | None = None
        try:
            value = await within(cast(Awaitable[Any], call), None, call.alarm)
        except asyncio.CancelledError:
            raise
        except Expired:
            error = WorldError(self.why or "the call was given up")
        except BaseException as raised:  # noqa: BLE001 - `run` raises it
            error = raised
        self._call, self._busy, call.alarm = None, False, None
        call.settle(value, error)


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
