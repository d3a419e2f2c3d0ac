"""Rewards: from the record of a chain to a score with named components.

Comes in: a `Trajectory`, its task's fields and, where there is one, its env. Goes out: a `Score`. The built-in rewards live
in their own files and are loaded by name (`as_reward("exact_match")`); nothing here trains, samples or keeps state between
chains.
"""

from __future__ import annotations

from .base import Mix, Reward, Score
from .function import FunctionReward, reward
from .lookup import Factory, as_reward, factory

__all__ = ["Factory", "FunctionReward", "Mix", "Reward", "Score", "as_reward", "factory", "reward"]
