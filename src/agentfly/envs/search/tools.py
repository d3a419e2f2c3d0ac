"""`search(query)` and `retrieve(id)`: the model's way into the chain's `SearchEnv`. `open` is another spelling of `retrieve`.

In: what the model wrote. Out: an observation. The environment is lent to the chain because the tools ask for one; what it
searches is its own business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...tools import Tool, tool
from ...types import ToolResult
from .env import SearchEnv
from .retrieve.types import MAX_DEADLINE_S

SYSTEM = (
    "You answer questions by searching. Search for one name at a time, read what is found, follow it from page to page, "
    "and answer with a name or a number alone."
)
"""A first line of the prompt (`system` of `ReactAgent` or `SearchAgent`) for models that were not trained here."""
TIMEOUT_S = MAX_DEADLINE_S + 10.0
"""Beyond what a server's client or a provider takes with all its retries."""


async def _search(query: str, library: SearchEnv) -> ToolResult:
    """Search for passages.

    Args:
        query: what to look for
    """
    return await library.search(query)


async def _retrieve(id: str, library: SearchEnv) -> ToolResult:  # noqa: A002
    """Read a whole passage.

    Args:
        id: as a search shows it in brackets
    """
    return await library.retrieve(id)


def _made(function: Callable[..., Any], name: str) -> Tool:
    # Stateful: what a turn has shown is written down in the order in which the model asked.
    return tool(function, name=name, stateful=True, timeout_s=TIMEOUT_S, register=False)


search = _made(_search, "search")
retrieve = _made(_retrieve, "retrieve")
open_passage = _made(_retrieve, "open")
