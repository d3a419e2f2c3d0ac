"""Tools: what a model can call, how each tool is described to the model, and how calls are executed.

`@tool` makes a tool, `call_tools` executes the calls of one turn, and a `Context` holds what a chain provides to its tools.
Every built-in tool can be imported from here (`from agentfly.tools import calculator`) or given by name
(`tools=["calculator"]`); its module is imported on first use.
"""

from __future__ import annotations

from typing import Any

from .. import plugins
from .calls import call_tools
from .context import Context
from .definition import Tool, as_tool, tool, tools_of
from .signature import FromTask

__all__ = ["Context", "FromTask", "Tool", "as_tool", "call_tools", "tool", "tools_of"]


def __getattr__(name: str) -> Any:
    return plugins.builtin("tools", "open" if name == "open_passage" else name, __name__)


def __dir__() -> list[str]:
    return sorted([*__all__, *plugins.BUILTIN["tools"], "open_passage"])
