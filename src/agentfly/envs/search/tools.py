"""The tools `search(query)` and `retrieve(id)`, which call the chain's `SearchEnv`. `open` is another name of `retrieve`."""

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
"""A system prompt for models that were not trained in this world."""
TIMEOUT_S = MAX_DEADLINE_S + 10.0
"""Longer than a server's client or a provider takes with all retries."""


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


def _make_tool(function: Callable[..., Any], name: str) -> Tool:
    # Stateful: calls of one turn run in order, so the record of shown passages has the order of the calls.
    return tool(function, name=name, stateful=True, timeout_s=TIMEOUT_S, register=False)


search = _make_tool(_search, "search")
retrieve = _make_tool(_retrieve, "retrieve")
open_passage = _make_tool(_retrieve, "open")
