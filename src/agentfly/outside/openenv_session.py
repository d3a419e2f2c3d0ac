"""`env = "openenv:URL"` and `tools = ["openenv:URL"]`: an environment on a server of OpenEnv, one session per chain.

    reset, step -> JSON frames on the WebSocket URL/ws        the tool `step` has the server's schema of an action

No package of OpenEnv is needed, so its pins do not meet the trainer's. Needs `agentfly[serve]`.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

from ..aio.threads import run_to_end
from ..errors import ConfigError, WorldError
from ..net.address import is_url
from ..net.client import HttpClient, Rejected, Transient
from ..resources.rpc import websocket_limits
from ..tools import Tool
from ..types import Task, ToolResult
from .episodes import rows_of_game

CONNECT_S = 30.0
MAX_FRAME = 16 << 20
_MISTAKES = ("VALIDATION_ERROR", "INVALID_JSON")
_AROUND = ("done", "reward", "metadata")


class OpenEnvSession:
    """One session. `session_kind` makes the class of a server. The score is the sum of the rewards.

    A row's field `seed`, and the fields in `reset_fields`, are passed to the environment's reset.
    """

    base: ClassVar[str] = ""
    pool_name: ClassVar[str] = "openenv"

    def __init__(self, reset_fields: tuple[str, ...] | list[str] = ()) -> None:
        self._reset_fields = ("seed", *reset_fields)
        self._socket = cast(Any, None)
        self._turn = asyncio.Lock()
        self.score, self.done = 0.0, False

    async def reset(self, task: Task) -> str:
        self.score, self.done = 0.0, False
        if self._socket is None:
            self._socket = await _connected(self.base)
        given = {name: task.fields[name] for name in self._reset_fields if name in task.fields}
        answer = await self._ask({"type": "reset", "data": given})
        if answer.get("type") == "error":
            raise WorldError(f"{self.base} could not be reset: {_said(answer)}")
        return self._seen(answer)

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Play an action. Returns the observation as text, whether the episode has ended, and perhaps an error."""
        if self.done:
            return {"observation": "The episode is over.", "done": True}
        answer = await self._ask({"type": "step", "data": action})
        if answer.get("type") == "error":
            if (answer.get("data") or {}).get("code") in _MISTAKES:
                return {"observation": _said(answer), "done": False, "error": "bad_arguments"}
            raise WorldError(f"{self.base} failed: {_said(answer)}")
        return {"observation": self._seen(answer), "done": self.done}

    async def result(self) -> float:
        """The sum of the rewards so far."""
        return self.score

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    def _seen(self, answer: Mapping[str, Any]) -> str:
        data = answer.get("data")
        if answer.get("type") != "observation" or not isinstance(data, dict):
            raise WorldError(f"{self.base} answered with a frame of type {answer.get('type')!r}, not with an observation")
        reward = data.get("reward")
        if isinstance(reward, int | float) and reward == reward:
            self.score += float(reward)
        self.done = bool(data.get("done"))
        return shown(data.get("observation"))

    async def _ask(self, frame: dict[str, Any]) -> dict[str, Any]:
        """One frame and its answer. A session whose answer was not awaited is closed: the next one would get it."""
        if self._socket is None:
            raise WorldError(f"the session of {self.base} is closed")
        async with self._turn:
            try:
                await self._socket.send(json.dumps(frame))
                answer = json.loads(await self._socket.recv())
            except (websocket_limits.websockets().exceptions.ConnectionClosed, OSError, ValueError) as error:
                raise WorldError(f"the session of {self.base} is gone: {type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise WorldError(f"{self.base} answered with JSON that is no object")
        return answer


async def _connected(base: str) -> Any:
    connect = websocket_limits.websockets().asyncio.client.connect
    try:
        return await connect(f"ws{base.removeprefix('http')}/ws", open_timeout=CONNECT_S, max_size=MAX_FRAME)
    except (OSError, TimeoutError, websocket_limits.websockets().exceptions.WebSocketException) as error:
        raise WorldError(f"there is no OpenEnv server at {base}: {type(error).__name__}: {error}") from error


def shown(observation: object) -> str:
    """An observation as text: of an object with one field that says something, the text in it; else JSON."""
    if isinstance(observation, Mapping):
        rest = {key: value for key, value in observation.items() if key not in _AROUND}
        if len(rest) == 1 and isinstance(only := next(iter(rest.values())), str):
            return only
        observation = rest
    return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False, default=str)


def _said(answer: Mapping[str, Any]) -> str:
    data = answer.get("data")
    return str(data.get("message", data) if isinstance(data, dict) else data)[:500]


def _base_of(url: str) -> str:
    url = url.rstrip("/")
    if not is_url(url):
        raise ConfigError(f"openenv:{url}: write openenv:http://host:port (or https)")
    return url


@functools.cache  # the tool and the agent name one environment, so they must find one class
def env_of(url: str) -> type[OpenEnvSession]:
    """The class of environment of a server. Its pool is called openenv-HOST-PORT."""
    parts = urlsplit(base := _base_of(url))
    name = f"openenv-{parts.hostname}-{parts.port or parts.scheme}"
    elsewhere = ("agentfly.outside.episodes:rebuilt", {"name": f"openenv:{base}"})
    members = {"base": base, "pool_name": name, "__agentfly_target__": elsewhere, "__module__": __name__}
    return type(name, (OpenEnvSession,), members)


def tool_of(url: str) -> Tool:
    """The tool `step` of a server, with its schema of an action as parameters. Raises ConfigError if there is no server."""
    base = _base_of(url)
    schema = run_to_end(_schema_of(base))
    properties = {name: part for name, part in (schema.get("properties") or {}).items() if name != "metadata"}

    async def call(openenv_session: OpenEnvSession, **action: object) -> ToolResult:
        made = await openenv_session.step(action)
        return ToolResult(observation=made["observation"], done=made["done"], error=made.get("error"))

    call.__annotations__["openenv_session"] = env_of(base)
    return Tool(
        call,
        name="step",
        description=str(schema.get("description") or "Take an action in the environment. Returns what happens next."),
        parameters={**schema, "type": "object", "properties": properties, "additionalProperties": False},
    )


async def _schema_of(base: str) -> dict[str, Any]:
    client = HttpClient(base, timeout_s=CONNECT_S)
    try:
        answer = (await client.send("GET", f"{base}/schema")).json()
    except (Transient, Rejected) as error:
        raise ConfigError(f"openenv:{base} cannot be reached: {error}") from error
    finally:
        await client.close()
    schema = answer.get("action") if isinstance(answer, dict) else None
    if not isinstance(schema, dict):
        raise ConfigError(f"openenv:{base}: /schema has no schema of an action")
    return schema


def tasks_of(url: str) -> Any:
    return rows_of_game(f"openenv:{_base_of(url)}")
