"""One process of a fleet, from its start to its end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

from ..errors import ConfigError, EngineError
from ..resources.rpc.frames import error_of
from .bare import PACKAGES, software
from .launcher import Launched
from .link import Link, LinkMessage

_numbers = itertools.count(1)


class MemberLost(EngineError):
    """A process ended before it replied."""


class Member:
    """One process of a fleet. `name` is for sentences, such as "sampler 0"."""

    def __init__(self, kind: str, index: int, attempt: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.kind, self.index, self.attempt = kind, index, attempt
        self.process: Launched | None = None
        self.link: Link | None = None
        self.about: dict[str, Any] = {}
        """What its hello says: pid, machine, software."""
        self.live = False
        """Whether `Role.prepare` is done and the process was not lost since."""
        self.connected: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.seen_ended = False
        self.unreported_s = 0.0
        """Seconds since the last "status", which the main thread sends."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.index}"

    @property
    def node(self) -> str:
        """The name of its node in a cluster; "" on this machine."""
        return "" if self.process is None else self.process.node

    @property
    def alive(self) -> bool:
        """Whether the process has not been found lost."""
        return not self.ended.done()

    def send(self, kind: str, message_id: int = 0, value: Any = None) -> None:
        """Send a message; dropped before the process is connected and after it is lost."""
        if self.link is not None:
            self.link.send(kind, message_id, value)

    async def call(self, kind: str, value: Any = None) -> Any:
        """Send a message and wait for the reply. Raises what the process raised, or MemberLost. A cancel travels, too."""
        if not self.alive:
            raise MemberLost(f"{self.name} {self.ended.result()}")
        number = next(_numbers)
        reply = self.calls[number] = self._loop.create_future()
        try:
            self.send(kind, number, value)
            return await reply
        except asyncio.CancelledError:
            self.send("cancel", number)
            raise
        finally:
            self.calls.pop(number, None)

    def post(self, kind: str, value: Mapping[str, Any]) -> Future[Any]:
        """`call` from another thread."""
        return asyncio.run_coroutine_threadsafe(self.call(kind, value), self._loop)

    def answer(self, message: LinkMessage) -> bool:
        """Hand a reply to the call that waits for it. Returns whether one did."""
        future = self.calls.get(message.id)
        if future is None or future.done():
            return False
        if message.kind == "reply":
            future.set_result(message.value)
        else:
            error = error_of(message.value[:2])
            error.add_note(f"In {self.name}: {message.value[2]}")
            future.set_exception(error)
        return True

    def lose(self, why: str) -> None:
        """The process is lost: fail what waits for it."""
        self.live = False
        self.ended.set_result(why)
        if self.link is not None:
            self.link.close()
        for future in (*self.calls.values(), self.connected):
            if not future.done():
                future.set_exception(MemberLost(f"{self.name} {why}"))
                future.exception()  # marks it as retrieved: the caller may have been cancelled


def check_software(theirs: Mapping[str, str], where: str, names: Collection[str] = PACKAGES) -> None:
    """Raises ConfigError if a process or a node has other versions than this process. `where` names it."""
    for name, ours in software().items():
        if name in names and theirs.get(name) != ours:
            raise ConfigError(
                f"{where} has {name} {theirs.get(name)}, but the trainer has {ours}: install the same versions on every machine"
            )
