"""The inside of a worker process: calls in over the socket, an environment's answers out.

One instance: its sync methods run on the main thread, so a call costs little, and one that hangs is ended with the process.
Several instances: each has a thread of its own, so none waits for another. Async methods run on the event loop. An
environment that raises is an answer like any other; what has no JSON form is refused with a sentence. Refuses to guess: a
frame it cannot read ends the process.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ... import plugins
from ...errors import ConfigError, WorldError
from ..threads import OwnThread
from .frames import BadFrame, Frames, pack, pack_error, pack_value, unpack_argument

NEW, GET, DROP = "@new", "@get", "@drop"
"""Methods of the host itself; the name of an environment's method never begins with @."""


class _HostedInstance:
    __slots__ = ("env", "tasks", "thread")

    def __init__(self, thread: OwnThread | None) -> None:
        self.env: Any = None
        self.thread = thread
        self.tasks: set[asyncio.Task[None]] = set()


class Host(asyncio.Protocol):
    def __init__(self, hello: dict[str, Any], ended: asyncio.Future[None]) -> None:
        self.hello = hello
        self.ended = ended
        self.loop = ended.get_loop()
        self.frames = Frames()
        self.instances: dict[int, _HostedInstance] = {}
        self.make: Callable[..., Any] | None = None
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        self.answer(0, os.getpid(), None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self.frames.feed(data)
        except BadFrame as error:
            sys.exit(f"unreadable frame: {error}")
        for message in messages:
            self.handle(message)

    def handle(self, message: dict[str, Any]) -> None:
        call_id, number, method = message["id"], message["i"], message["m"]
        if method == NEW:
            thread = None if self.hello["per_process"] == 1 else OwnThread(f"instance-{number}")
            instance = self.instances[number] = _HostedInstance(thread)
            self.dispatch(call_id, instance, partial(self.build, instance), False)
            return
        found = self.instances.get(number)
        if found is None:
            self.answer(call_id, None, WorldError("the environment is closed"))
            return
        if method == DROP:
            self.drop(call_id, number, found)
            return
        args = [unpack_argument(value) for value in message.get("a", ())]
        if method == GET:
            self.dispatch(call_id, found, partial(getattr, found.env, args[0]), False)
            return
        kwargs = {name: unpack_argument(value) for name, value in message.get("k", {}).items()}
        try:
            function = getattr(found.env, method)
        except AttributeError as error:
            self.answer(call_id, None, error)
            return
        self.dispatch(call_id, found, partial(function, *args, **kwargs), inspect.iscoroutinefunction(function))

    def build(self, instance: _HostedInstance) -> None:
        if self.make is None:
            self.make = plugins.resolve("envs", self.hello["target"])
        assert self.make is not None
        instance.env = self.make(**self.hello["options"])

    def dispatch(self, call_id: int, instance: _HostedInstance, call: Callable[[], Any], is_async: bool) -> None:
        if instance.thread is not None and not is_async:

            def done(value: Any, error: BaseException | None) -> None:
                self.loop.call_soon_threadsafe(self.finish, call_id, instance, value, error)

            instance.thread.submit(partial(_shield, call), done)
            return
        try:
            value, error = call(), None
        except BaseException as raised:  # noqa: BLE001 - an answer like any other
            value, error = None, raised
        self.finish(call_id, instance, value, error)

    def finish(self, call_id: int, instance: _HostedInstance, value: Any, error: BaseException | None) -> None:
        if isinstance(value, _Waiting):
            value = value.awaitable
        if error is None and inspect.isawaitable(value):
            task = self.loop.create_task(self.wait(call_id, value))
            instance.tasks.add(task)
            task.add_done_callback(instance.tasks.discard)
        else:
            self.answer(call_id, value, error)

    async def wait(self, call_id: int, awaitable: Any) -> None:
        try:
            value = await awaitable
        except BaseException as error:  # noqa: BLE001 - as above; a cancelled call is answered too
            self.answer(call_id, None, error)
        else:
            self.answer(call_id, value, None)

    def drop(self, call_id: int, number: int, instance: _HostedInstance) -> None:
        """End an instance whose call was given up: stop what it does, close it, say so."""
        del self.instances[number]
        for task in instance.tasks:
            task.cancel()
        if instance.thread is not None:
            instance.thread.leave(getattr(instance.env, "close", _nothing))
        self.answer(call_id, None, None)

    def answer(self, call_id: int, value: Any, error: BaseException | None) -> None:
        if error is None:
            try:
                data = pack({"id": call_id, **pack_value(value)})
            except (TypeError, ValueError, RecursionError) as refused:
                error = TypeError(
                    f"what it returned cannot leave its worker process: {refused}; return text, numbers, lists, dicts or a "
                    f"ToolResult, or place it in 'loop' or 'thread'"
                )
        if error is not None:
            data = pack({"id": call_id, "e": pack_error(error)})
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)


class _Waiting:
    """Carries an awaitable out of an instance's thread, which would await it there."""

    __slots__ = ("awaitable",)

    def __init__(self, awaitable: Any) -> None:
        self.awaitable = awaitable


def _shield(call: Callable[[], Any]) -> Any:
    value = call()
    return _Waiting(value) if inspect.isawaitable(value) else value


def _nothing() -> None:
    """An instance that was never built has nothing to close."""


def serve(channel: socket.socket, hello: dict[str, Any]) -> None:
    """Answer calls until the socket is closed, and end with all that the environment has started.

    When the trainer dies, its end of the socket may be closed before the ties of `worker` pull: nobody else would end them.
    """
    if not isinstance(hello.get("target"), str):
        raise ConfigError("the first frame names no environment")
    asyncio.run(_serve(channel, hello))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)  # threads of the environment must not hold the process up


async def _serve(channel: socket.socket, hello: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    channel.setblocking(False)
    await loop.create_connection(lambda: Host(hello, ended), sock=channel)
    await ended  # the worker's whole life; it ends with the socket, and the kernel ends it with the trainer
