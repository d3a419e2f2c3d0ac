"""Placement `http`: an environment behind `agentfly envs serve`, on this machine or another, over one WebSocket each.

One connection is one instance, made when it is opened and closed by the server when it goes, however it goes. Every wait has a
deadline: connecting, each call (the lease's), and silence (pings). A server that dies or falls silent is a `WorldError` for the
calls in flight, and the pool replaces the instance. What is served is the server's choice: a server of another environment is
refused.
"""

from __future__ import annotations

import asyncio
import os

from ...errors import ConfigError, WorldError
from ..rpc.client import RemoteBackend, Worker, WorkerTransport
from ..rpc.websocket import WebSocket, connect
from ..spec import Spec
from .options import HttpPlace

CONNECT_S = 30.0


class HttpTransport(WorkerTransport):
    thing = "server"

    def __init__(self, spec: Spec, place: HttpPlace) -> None:
        super().__init__(spec)
        self._place = place
        self._url = ""
        self._socket: WebSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, worker: Worker, number: int) -> None:
        self._url = self._place.urls[number % len(self._place.urls)]
        self._socket = await connect(self._url, token_of(self._place), min(CONNECT_S, self.spec.start_timeout_s))
        make = asyncio.get_running_loop().create_task
        self._tasks = [make(self._carry(self._socket, worker)), make(self._socket.watch(self._place.ping_s))]

    async def _carry(self, socket: WebSocket, worker: Worker) -> None:
        while (data := await socket.receive()) is not None:
            worker.data_received(data)
        worker.connection_lost(None)

    def write(self, data: bytes) -> None:
        assert self._socket is not None
        self._socket.send(data)

    async def terminate(self, asked: bool) -> str:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
        if self._socket is None:
            return f"before it began ({self._url})"
        if asked:
            self._socket.end()
        else:
            self._socket.abort()
        await self._socket.finish()
        return f"the connection ({self._socket.why or 'it is gone'}): {self._url}"


def token_of(place: HttpPlace) -> str | None:
    if place.token_env is None:
        return None
    token = os.environ.get(place.token_env, "")
    if not token or not token.isascii() or any(letter.isspace() for letter in token):
        raise ConfigError(f"token_env names {place.token_env}, but that variable holds no token: set it to the server's")
    return token


class HttpBackend(RemoteBackend):
    def __init__(self, spec: Spec) -> None:
        place = spec.in_place
        if not isinstance(place, HttpPlace):
            raise ConfigError(f"environment {spec.name!r}: placement 'http' has no options to read")
        try:
            token_of(place)
        except ConfigError as error:
            raise ConfigError(f"environment {spec.name!r}: {error}") from None
        super().__init__(spec)
        self._place = place

    def transport(self) -> WorkerTransport:
        return HttpTransport(self.spec, self._place)

    def check(self, about: object) -> None:
        """The server says first what it serves."""
        served = about.get("environment") if isinstance(about, dict) else None
        wanted = getattr(self.spec.make, "__name__", self.spec.name)
        if served != wanted:
            raise WorldError(f"{self.spec.name}: the server of its pool serves {served!r}, not {wanted!r}: mend the pool's url")
