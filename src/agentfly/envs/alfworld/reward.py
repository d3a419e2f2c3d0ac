"""Rewards of ALFWorld, read from the state of the chain's household.

alfworld_success    1 if the task is done; its component `idle` is the share of actions that had no effect
alfworld_progress   the largest share of the stages that was reached: thing in hand, treated, placed; 1 if the task is done
"""

from __future__ import annotations

from ...rewards.function import FunctionReward
from .env import AlfWorld


async def _success(world: AlfWorld) -> dict[str, float]:
    """1 if the task of the household is done."""
    return {"reward": await world.score(), "progress": await world.progress(), "idle": await world.idle()}


async def _progress(world: AlfWorld) -> dict[str, float]:
    """The share of the task's stages that was reached: the thing in hand, treated, placed."""
    return {"reward": await world.progress(), "success": await world.score()}


alfworld_success = FunctionReward(_success, name="alfworld_success")
alfworld_progress = FunctionReward(_progress, name="alfworld_progress")
