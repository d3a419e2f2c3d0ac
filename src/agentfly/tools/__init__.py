"""Tools: what a model can call, how it is described to the model, and how its calls are run.

`@tool` makes one; `call_tools` runs the calls of one turn; `Context` is what a chain lends to them. The built-in tools are
found by name (`tools=["calculator", "python"]`) and are not imported before they are asked for.
"""

from __future__ import annotations

from .calls import call_tools
from .context import Context
from .definition import Tool, as_tool, tool, tools_of
from .signature import FromTask

__all__ = ["Context", "FromTask", "Tool", "as_tool", "call_tools", "tool", "tools_of"]
