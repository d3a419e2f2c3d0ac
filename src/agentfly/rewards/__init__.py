"""Rewards: from the trajectory of a chain to a score with named components.

`@reward` makes a reward from a function; `as_reward` accepts a reward, a function, a name, a list or a table of weights. Every
built-in reward can be imported from here (`from agentfly.rewards import math_equal`) or given by name; its module is imported
on first use. A reward keeps no state between chains.
"""

from __future__ import annotations

from typing import Any

from .. import plugins
from .base import Mix, Reward, Score
from .function import FunctionReward, reward
from .lookup import Factory, as_reward, factory

__all__ = ["Factory", "FunctionReward", "Mix", "Reward", "Score", "as_reward", "factory", "reward"]


def __getattr__(name: str) -> Any:
    return plugins.builtin("rewards", name, __name__)


def __dir__() -> list[str]:
    return sorted([*__all__, *plugins.BUILTIN["rewards"]])
