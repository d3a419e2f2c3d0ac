"""Placement `http`: an environment behind `agentfly envs serve`, on this machine or another. Needs `agentfly[serve]`.

One WebSocket connection is one instance: the server creates it for the connection and closes it afterwards. Every wait has a
deadline: connecting, each call (the lease's), and silence (pings). If the server ends or falls silent, the calls in flight fail
with a WorldError and the pool replaces the instance. A server that serves another environment is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from ...errors import ConfigError, WorldError
from ...net.guard import token_from
from ..placements import HttpOptions
from ..rpc import websocket_limits
from ..rpc.client import Worker
from ..rpc.frames import MAX_FRAME, SANDBOXED, FrameLimits
from .remote import RemoteBackend

CONNECT_S = 30.0


class HttpWorker(Worker):
    kind = "server"
    limits: FrameLimits | None = SANDBOXED._replace(frame=MAX_FRAME)

    _url = ""
    _socket: Any = None
    _ended_by = ""

    @property
    def ping_s(self) -> float:
        return float(self.options.ping_s)

    async def connect(self, number: int) -> None:
        options: HttpOptions = self.options
        self._url = options.urls[number % len(options.urls)]
        token = token_from(options.token_env, "token_env")
        self._socket = await open_socket(self._url, token, min(CONNECT_S, self.spec.start_timeout_s), self.ping_s)
        self.read_from(self._messages())

    async def _messages(self) -> AsyncIterator[bytes]:
        closed = websocket_limits.websockets().exceptions.ConnectionClosed
        try:
            while True:
                data = await self._socket.recv()
                if isinstance(data, str):
                    self._ended_by = "it sent text"
                    break
                yield data
        except closed as error:
            self._ended_by = websocket_limits.reason_of(error)
            if "ping timeout" in self._ended_by:
                self._ended_by = f"nothing was heard for {3 * self.ping_s:g} s"

    def write(self, data: bytes) -> None:
        websocket_limits.websockets().asyncio.server.broadcast([self._socket], data)  # the library's `send` that never waits

    async def terminate(self, wanted: bool) -> str:
        if self._socket is None:
            return f"before it started ({self._url})"
        await self._socket.close()  # aborts the connection after CLOSE_S
        return f"the connection ({self._ended_by or 'it is gone'}): {self._url}"


async def open_socket(url: str, token: str | None, timeout_s: float, ping_s: float = 20.0) -> Any:
    """A connection to an environment server. Raises ConfigError if the token is wrong, WorldError if there is no server."""
    websockets = websocket_limits.websockets()
    connect: Any = websockets.asyncio.client.connect

    class Connect(connect):  # type: ignore[misc]
        def process_redirect(self, exc: Exception) -> Exception:
            return exc  # the pool names its server: a redirect is a refusal

    try:
        return await Connect(
            f"ws{url.removeprefix('http')}" if url.startswith("http") else url,  # https becomes wss
            additional_headers={"Authorization": f"Bearer {token}"} if token is not None else {},
            user_agent_header=None,
            proxy=None,
            open_timeout=timeout_s,
            create_connection=websocket_limits.limited(websockets.asyncio.client.ClientConnection),
            **websocket_limits.settings(ping_s),
        )
    except websockets.exceptions.InvalidStatus as error:
        said = bytes(error.response.body or b"")[:500].decode("utf-8", "replace").strip()
        refusal = f"the server at {url} refused: {said or error.response.status_code}"
        if error.response.status_code == 401:
            raise ConfigError(f"{refusal}; name the variable with its token in token_env") from None
        raise WorldError(refusal) from None
    except TimeoutError:
        raise WorldError(f"the server at {url} did not answer within {timeout_s:g} s") from None
    except (OSError, EOFError, ValueError, websockets.exceptions.WebSocketException) as error:
        raise WorldError(f"no environment server answers at {url} ({error}); start one: agentfly envs serve NAME") from None


class HttpBackend(RemoteBackend):
    worker_class = HttpWorker

    def check_usable(self) -> None:
        token_from(self.options.token_env, "token_env")
        websocket_limits.websockets()

    def check(self, about: Any) -> None:
        served = about.get("environment") if isinstance(about, dict) else None
        wanted = getattr(self.spec.make, "__name__", self.spec.name)
        if served != wanted:
            raise WorldError(f"{self.spec.name}: the server of its pool serves {served!r}, not {wanted!r}: mend the pool's url")
