"""The worker's end: calls arrive over the socket, run in the environment, and their values or exceptions go back.

If the worker has one instance, its sync methods run on the main thread: a call is cheap, and a call that hangs ends with the
process. If it has several, each instance has a thread, so that none waits for another. Async methods run on the event loop. An
exception of the environment is a reply. A frame that cannot be read ends the process.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ... import plugins
from ...aio.single_task import SingleTask
from ...aio.threads import WorkerThread
from ...errors import ConfigError, WorldError
from .frames import DROP, GET, HELLO_ID, NEW, BadFrame, CallFrame, FrameReader, pack_error, pack_reply

CLOSE_S = 10.0


@dataclass(slots=True)
class ServedInstance:
    """An environment in this worker, its thread, the tasks of its async calls, and the one in which they run."""

    thread: WorkerThread | None
    home: SingleTask
    env: Any = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    def make(cls, name: str, thread: WorkerThread | None) -> ServedInstance:
        def close() -> Any:
            return None if made.env is None else made.env.close()

        made = cls(thread, SingleTask(name, close, CLOSE_S, lambda why: None))  # the next call says why
        return made


class InstanceServer(asyncio.Protocol):
    """The instances of one worker, and the connection to the trainer."""

    def __init__(self, hello: dict[str, Any], ended: asyncio.Future[None]) -> None:
        self.hello = hello
        self.ended = ended
        self.loop = ended.get_loop()
        self.reader = FrameReader()
        self.instances: dict[int, ServedInstance] = {}
        self.make: Callable[..., Any] | None = None
        self.transport: asyncio.WriteTransport | None = None
        self.ending: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        self.reply(HELLO_ID, os.getpid(), None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            calls = self.reader.calls(data)
        except BadFrame as error:
            sys.exit(f"unreadable frame: {error}")
        for call in calls:
            self.handle(call)

    def handle(self, call: CallFrame) -> None:
        if call.method == NEW:
            thread = None if self.hello["per_process"] == 1 else WorkerThread(f"instance-{call.instance}")
            made = self.instances[call.instance] = ServedInstance.make(self.hello["target"].rpartition(":")[2], thread)
            self.dispatch(call.id, made, partial(self.build, made), False)
            return
        instance = self.instances.get(call.instance)
        if instance is None:
            self.reply(call.id, None, WorldError("the environment is closed"))
        elif call.method == DROP:
            self.drop(call.id, call.instance, instance)
        elif call.method == GET:
            self.dispatch(call.id, instance, partial(getattr, instance.env, *call.args), False)
        else:
            try:
                function = getattr(instance.env, call.method)
            except AttributeError as error:
                self.reply(call.id, None, error)
                return
            is_async = inspect.iscoroutinefunction(function)
            self.dispatch(call.id, instance, partial(function, *call.args, **call.kwargs), is_async)

    def build(self, instance: ServedInstance) -> None:
        if self.make is None:
            self.make = plugins.resolve("envs", self.hello["target"])
        assert self.make is not None
        instance.env = self.make(**self.hello["options"])

    def dispatch(self, call_id: int, instance: ServedInstance, call: Callable[[], Any], is_async: bool) -> None:
        if instance.thread is not None and not is_async:
            # `submit` does not await what `call` returns: an awaitable is awaited here, on the main loop.
            instance.thread.submit(call, partial(self.finish_later, call_id, instance))
            return
        try:
            value, error = call(), None
        except BaseException as raised:  # noqa: BLE001 - every exception is a reply
            value, error = None, raised
        self.finish(call_id, instance, value, error)

    def finish_later(self, call_id: int, instance: ServedInstance, value: object, error: BaseException | None) -> None:
        """`finish`, from the thread of the instance."""
        self.loop.call_soon_threadsafe(self.finish, call_id, instance, value, error)

    def finish(self, call_id: int, instance: ServedInstance, value: object, error: BaseException | None) -> None:
        if error is None and inspect.isawaitable(value):
            task = self.loop.create_task(self.wait(call_id, instance.home.run(value)))
            instance.tasks.add(task)
            task.add_done_callback(instance.tasks.discard)
        else:
            self.reply(call_id, value, error)

    async def wait(self, call_id: int, awaitable: Awaitable[Any]) -> None:
        try:
            value = await awaitable
        except BaseException as error:  # noqa: BLE001 - every exception is a reply, also the cancellation of a dropped call
            self.reply(call_id, None, error)
        else:
            self.reply(call_id, value, None)

    def drop(self, call_id: int, number: int, instance: ServedInstance) -> None:
        """End an instance whose call was given up: stop its calls and close it."""
        del self.instances[number]
        for task in instance.tasks:
            task.cancel()
        if instance.home.started:  # `close` belongs to the task of the other calls
            ending = self.loop.create_task(self.wait(call_id, instance.home.end()))
            self.ending.add(ending)
            ending.add_done_callback(self.ending.discard)
        if instance.thread is not None:
            instance.thread.abandon(None if instance.env is None or instance.home.started else instance.env.close)
        if not instance.home.started:
            self.reply(call_id, None, None)

    def reply(self, call_id: int, value: object, error: BaseException | None) -> None:
        data = pack_reply(call_id, value, "worker process") if error is None else pack_error(call_id, error)
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)


def serve(channel: socket.socket, hello: dict[str, Any]) -> None:
    """Answer calls until the socket is closed, then end this process and its group. Does not return.

    The group is killed here, too: when the trainer ends, the kernel may close the socket before the signals of `worker_main`
    arrive, and processes that the environment has started would be left.
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
    await loop.create_connection(lambda: InstanceServer(hello, ended), sock=channel)
    await ended  # for the worker's whole life
