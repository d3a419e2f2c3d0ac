"""Tools and environments that others wrote: servers of the Model Context Protocol (MCP), OpenEnv, Gymnasium, TextArena.

Each adapter is one file. Its package is imported late, and only where it runs: in the process of its environment's placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from .mcp_in import mcp_tools as mcp_tools

__all__ = ["mcp_tools", "with_servers"]
_SERVER = "mcp:"


def with_servers(tools: Sequence[str], servers: Mapping[str, Any]) -> list[Any]:
    """Tools of a config, with the tools of a server in the place of `mcp:NAME`. `servers` are the tables of `agent.mcp`.

    Raises ConfigError for a server without a table, and for a table that no tool names.
    """
    named = [name.removeprefix(_SERVER) for name in tools if name.startswith(_SERVER)]
    if absent := [name for name in named if name not in servers]:
        raise ConfigError(f"agent.tools names mcp:{absent[0]}, but there is no table [agent.mcp.{absent[0]}]")
    if unused := [name for name in servers if name not in named]:
        raise ConfigError(f'[agent.mcp.{unused[0]}] has no effect: add "mcp:{unused[0]}" to agent.tools, or remove it')
    if wrong := [name for name in servers if not isinstance(servers[name], Mapping)]:
        raise ConfigError(f"agent.mcp.{wrong[0]} is a table of settings, not {servers[wrong[0]]!r}")
    if not named:
        return list(tools)
    from .mcp_in import mcp_tools

    made: list[Any] = []
    for name in tools:
        server = name.removeprefix(_SERVER)
        made += [name] if server == name else mcp_tools(server, **servers[server])
    return made


def __getattr__(name: str) -> Any:
    if name == "mcp_tools":
        from .mcp_in import mcp_tools

        return mcp_tools
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
