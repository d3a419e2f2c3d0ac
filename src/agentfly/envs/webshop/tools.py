"""Tools of the shop: `webshop_step(action)` and `webshop_browser(action, value)`.

They return the next page. If an action had no effect, a first line says so, unless the environment's option `notes` is off.
Buying ends the chain. The score is left to the
rewards (`webshop_score`, `webshop_success`), so that it is counted once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ...tools import tool
from ...tools.text import clean
from ...types import ToolResult
from .env import WebShop

SYSTEM = """You are shopping for what the user asks. Find a product that fits, open it, choose its options, then buy it.
search[words] searches from any page; click[...] clicks a product's id, an option, or a button such as next > or buy now."""
"""The first lines of the prompt (`system`) for models that were not trained in the shop."""


async def _act(shop: WebShop, action: str) -> ToolResult:
    result = await shop.step(action)
    return replace(result, observation=clean(result.observation), reward=None)


@tool(stateful=True, register=False)
async def webshop_step(action: str, shop: WebShop) -> ToolResult:
    """Act in the shop: search[words] or click[something on the page].

    Args:
        action: the action
    """
    return await _act(shop, action)


@tool(stateful=True, register=False)
async def webshop_browser(action: Literal["search", "click"], value: str, shop: WebShop) -> ToolResult:
    """Search the shop, or click something on the page.

    Args:
        action: what to do
        value: words to search for, or what to click
    """
    return await _act(shop, f"{action}[{value}]")
