"""`OpenEnvServer`: our tools and environments for clients of OpenEnv: sessions on `/ws`, and `/health` and `/schema`.

    reset {seed} -> the task of that number -> step {arguments} ... -> done        each session has its own environment

With one tool, an action is that tool's arguments; with several, `{"tool": NAME, "arguments": {...}}`. Needs `agentfly[serve]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigError, RolloutError
from ..net.address import url_of
from ..net.guard import Guard
from ..net.json_body import load_json
from ..resources.rpc import websocket_limits
from ..types import Task
from .mcp_out import ToolServer

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

PING_S = 20.0


class OpenEnvServer:
    """Serves until it is closed. `tasks` are those that a client's seed counts through; none: one without fields."""

    def __init__(
        self,
        tools: Sequence[object],
        *,
        env: object = None,
        tasks: Sequence[Task] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_sessions: int = 64,
    ) -> None:
        self._tools, self._env, self._tasks = list(tools), env, list(tasks) or [Task("openenv", (), {})]
        self._guard = Guard(host, token, cure="name its variable by --token-env")
        self._host, self._port, self._max_sessions = host, port, max_sessions
        self._functions = [tool.schema["function"] for tool in self._session(0).tools.values()]
        self._open = 0
        self._server = cast(Any, None)

    @property
    def url(self) -> str:
        return url_of("http", self._host, self._port)

    async def __aenter__(self) -> OpenEnvServer:
        serve = websocket_limits.websockets().asyncio.server.serve
        settings = {**websocket_limits.settings(PING_S), "process_request": self._answer_http}
        try:
            self._server = await serve(self._serve, self._host, self._port, **settings)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error.strerror or error}") from None
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    def schema(self) -> dict[str, Any]:
        """What `/schema` answers."""
        names = [function["name"] for function in self._functions]
        action = self._functions[0]["parameters"] if len(names) == 1 else {
            "type": "object",
            "description": "; ".join(f"{function['name']}: {function['description']}" for function in self._functions),
            "properties": {"tool": {"type": "string", "enum": names}, "arguments": {"type": "object"}},
            "required": ["tool"],
        }  # fmt: skip
        text = {"type": "object", "properties": {"text": {"type": "string"}}}
        state = {"type": "object", "properties": {"episode_id": {"type": "string"}, "step_count": {"type": "integer"}}}
        return {"action": action, "observation": text, "state": state}

    def _answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer to a request that is no session, or None for one that is."""
        if (refusal := self._guard.refuse(list(request.headers.raw_items()))) is not None:
            return connection.respond(HTTPStatus(refusal[0]), refusal[1] + "\n")
        path = request.path.partition("?")[0]
        if path == "/ws":
            return None
        bodies = {"/health": {"status": "healthy"}, "/schema": self.schema()}
        if path not in bodies:
            return connection.respond(HTTPStatus.NOT_FOUND, "there is /ws, /health and /schema\n")
        answer = connection.respond(HTTPStatus.OK, json.dumps(bodies[path]))
        del answer.headers["Content-Type"]
        answer.headers["Content-Type"] = "application/json"
        return answer

    def _session(self, seed: int) -> ToolServer:
        return ToolServer(self._tools, env=self._env, task=self._tasks[seed % len(self._tasks)])

    async def _serve(self, socket: ServerConnection) -> None:
        if self._open >= self._max_sessions:
            await socket.send(_refusal("CAPACITY_REACHED", f"this server has {self._max_sessions} sessions"))
            return
        self._open += 1
        episode = _Episode(self)
        try:
            async for text in socket:
                if (answer := await episode.answer(text)) is None:
                    return
                await socket.send(answer)
        except websocket_limits.websockets().exceptions.ConnectionClosed:
            return
        finally:
            self._open -= 1
            await episode.end()


class _Episode:
    """What one session plays."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._game: ToolServer | None = None
        self._steps, self._seed, self._done = 0, 0, False

    async def end(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            await game.__aexit__(None, None, None)

    async def answer(self, text: str | bytes) -> str | None:
        """The frame that answers a frame; None to `close`."""
        try:
            frame = load_json(text)
        except ValueError as error:
            return _refusal("INVALID_JSON", str(error))
        kind, data = (frame.get("type"), frame.get("data") or {}) if isinstance(frame, dict) else (None, {})
        if kind == "close":
            return None
        play = {"reset": self._reset, "step": self._step, "state": self._state}.get(str(kind))
        if play is None:
            return _refusal("UNKNOWN_TYPE", f"there are reset, step, state and close, not {kind!r}")
        if not isinstance(data, dict):
            return _refusal("VALIDATION_ERROR", "data must be an object")
        try:
            return await play(data)
        except (RolloutError, ConfigError) as error:
            return _refusal("EXECUTION_ERROR", str(error))

    async def _reset(self, data: Mapping[str, Any]) -> str:
        seed = data.get("seed")
        if seed is not None and type(seed) is not int:
            return _refusal("VALIDATION_ERROR", "seed must be a whole number")
        self._seed = self._seed + (self._steps > 0) if seed is None else seed
        await self.end()
        self._steps, self._done = 0, False
        self._game = await self._server._session(self._seed).__aenter__()
        return _observed(self._game.instructions, None, False)

    async def _step(self, data: dict[str, Any]) -> str:
        if self._game is None:
            await self._reset({})
        assert self._game is not None
        if self._done:
            return _observed("The episode is over.", None, True)
        names = list(self._game.tools)
        name, arguments = (names[0], data) if len(names) == 1 else (data.get("tool"), data.get("arguments") or {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return _refusal("VALIDATION_ERROR", 'an action is {"tool": NAME, "arguments": {...}}')
        result = await self._game.call(name, {key: value for key, value in arguments.items() if key != "metadata"})
        if result.invalid:
            return _refusal("VALIDATION_ERROR", result.observation)
        self._steps, self._done = self._steps + 1, result.done
        return _observed(result.observation, result.reward, result.done)

    async def _state(self, data: Mapping[str, Any]) -> str:
        return json.dumps({"type": "state", "data": {"episode_id": str(self._seed), "step_count": self._steps}})


def _observed(text: str, reward: float | None, done: bool) -> str:
    data = {"observation": {"text": text}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data}, ensure_ascii=False)


def _refusal(code: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code}}, ensure_ascii=False)
