"""`mcp_tools`: the tools of an MCP server as tools of an agent, over an environment that holds the connection of each chain."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..aio.threads import run_to_end
from ..errors import ConfigError
from ..resources import Cost
from ..tools import Tool
from ..types import Task, ToolResult
from .mcp_link import McpLink, McpSettings

GRACE_S = 10.0
SHARED_BY = 1 << 20
_SERVER = "agentfly_server"


class McpServer:
    """The connection of one chain to an MCP server; of all chains if it is shared. `server_kind` makes the class of a server.

    `revision` is the digest of the tools that the server listed when the agent was made. A server that lists others is refused,
    because the model would be shown tools that are not there.
    """

    server: ClassVar[str] = ""
    settings: ClassVar[McpSettings]
    revision: ClassVar[str] = ""
    cost: ClassVar[Cost] = Cost(cpu=0.05, memory_mb=64.0, start_s=0.7)
    reusable: ClassVar[bool] = False
    max_chains: ClassVar[int] = 1

    def __init__(self) -> None:
        self._link: McpLink | None = None
        self._opening = asyncio.Lock()

    async def reset(self, task: Task) -> None:
        await self._connect()

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The result of a tool, as `McpLink.call` returns it. A shared connection that was lost is opened again."""
        link = await self._connect() if self.settings.shared or self._link is None else self._link
        return await link.call(tool, arguments)

    async def _connect(self) -> McpLink:
        async with self._opening:
            if self._link is None or not self._link.is_open:
                if self._link is not None:
                    await self._link.close()
                self._link = McpLink(self.server, self.settings)
                await self._link.open()
                if (now := revision_of(await self._link.tools())) != self.revision:
                    raise ConfigError(
                        f"the MCP server {self.server!r} lists other tools than when the agent was made ({now}, not "
                        f"{self.revision}): start the run again"
                    )
            return self._link

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()

    @classmethod
    def longest_call_s(cls) -> float:
        return cls.settings.timeout_s + 2 * GRACE_S


def mcp_tools(name: str, **settings: object) -> list[Tool]:
    """The tools of an MCP server: `agent(tools=[*mcp_tools("files", command="files-server", args=["--read-only"])])`.

    The settings are those of `McpSettings`. The server is started once to list its tools, then for each chain, or once for all
    with `shared`. Raises ConfigError if it cannot be reached.
    """
    if unknown := [each for each in settings if each not in McpSettings.__slots__]:
        known = ", ".join(McpSettings.__slots__)
        raise ConfigError(f"the MCP server {name!r} has no setting {unknown[0]!r}; known: {known}")
    try:
        given = McpSettings(**settings)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"the MCP server {name!r}: {error}") from None
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
        raise ConfigError(f"{name!r} cannot be the name of an MCP server: letters, digits, _ and -, at most 40")
    listed = run_to_end(_listed(name, given))
    if absent := [tool for tool in given.only if tool not in {each["name"] for each in listed}]:
        names = ", ".join(each["name"] for each in listed) or "none"
        raise ConfigError(f"the MCP server {name!r} has no tool {absent[0]!r}; it has: {names}")
    kind = server_kind(name, given, revision_of(listed))
    return [_tool(kind, each) for each in listed if not given.only or each["name"] in given.only]


async def _listed(name: str, settings: McpSettings) -> list[dict[str, Any]]:
    link = McpLink(name, settings)
    try:
        await link.open()
        return await link.tools()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the tools of {name!r} cannot be listed: {error}") from error
    finally:
        await link.close()


def server_kind(name: str, settings: McpSettings, revision: str) -> type[McpServer]:
    """The class of environment of one server, whose pool is called `mcp-NAME`."""
    fields = {each: getattr(settings, each) for each in McpSettings.__slots__}
    shared = {"reusable": True, "max_chains": SHARED_BY} if settings.shared else {}
    elsewhere = ("agentfly.outside.mcp_in:rebuilt", {"name": name, "settings": fields, "revision": revision})
    members = {"server": name, "settings": settings, "revision": revision, "__agentfly_target__": elsewhere, **shared}
    return type(f"mcp-{name}", (McpServer,), {**members, "__module__": __name__})


def rebuilt(name: str, settings: Mapping[str, Any], revision: str) -> McpServer:
    """An instance in a worker process, which is told what `server_kind` was given."""
    return server_kind(name, McpSettings(**settings), revision)()


def revision_of(listed: Sequence[Mapping[str, Any]]) -> str:
    """A digest of the tools of a server: names, descriptions and schemas, in any order."""
    ordered = sorted(listed, key=lambda each: str(each["name"]))
    return hashlib.sha256(json.dumps(ordered, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def _tool(kind: type[McpServer], listed: Mapping[str, Any]) -> Tool:
    settings, name = kind.settings, str(listed["name"])

    async def call(agentfly_server: McpServer, **arguments: object) -> ToolResult:
        return _shown(await agentfly_server.call(name, arguments), settings.images)

    call.__annotations__[_SERVER] = kind
    parameters = {key: part for key, part in listed["parameters"].items() if key != "$schema"}
    if _SERVER in parameters.get("properties", {}):
        raise ConfigError(f"the MCP server {kind.server!r}: the tool {name!r} has an argument {_SERVER!r}, which is reserved")
    return Tool(
        call,
        name=re.sub(r"[^A-Za-z0-9_-]", "_", settings.prefix + name)[:64],
        description=listed["description"] or name,
        parameters={"type": "object", "properties": {}, **parameters},
        timeout_s=settings.timeout_s + GRACE_S,  # the connection's own time limit leaves the connection usable
        max_length=settings.max_length,
    )


def _shown(result: Mapping[str, Any], with_images: bool) -> ToolResult:
    images, text = list(result.get("images", ())), str(result["text"])
    shown = images[0] if images and with_images else None
    if left_out := len(images) - (shown is not None):
        text += f"{chr(10) if text else ''}[{left_out} {'image is' if left_out == 1 else 'images are'} not shown]"
    return ToolResult(observation=text, image=shown, error=result.get("error"))
