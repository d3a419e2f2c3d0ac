"""Rewards of the shop, read from the chain's environment: a chain that buys nothing has 0.

webshop_score     the published score, from 0 to 1; components are its parts (type, attributes, options, price, bought) and
                  `idle`, the share of actions without effect
webshop_success   1 if the score is full, else 0
"""

from __future__ import annotations

from ...rewards.function import FunctionReward
from .env import WebShop

FULL = 1.0 - 1e-9


async def _webshop_score(shop: WebShop) -> dict[str, float]:
    """The published WebShop score of the purchase, with its parts."""
    parts = dict(await shop.result())
    return {"reward": parts.pop("score"), **parts}


async def _webshop_success(shop: WebShop) -> float:
    """1 if exactly what was asked for was bought: the published score is full."""
    return float((await shop.result())["score"] >= FULL)


webshop_score = FunctionReward(_webshop_score, name="webshop_score")
webshop_success = FunctionReward(_webshop_success, name="webshop_success")
