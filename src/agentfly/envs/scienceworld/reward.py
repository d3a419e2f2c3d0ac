"""Rewards of ScienceWorld, read from the chain's simulator.

scienceworld_score     the score at the end, from 0 to 1; a task that has failed is 0
scienceworld_success   1 if the task was completed with the full score
scienceworld_delta     each turn's change of the score, as step rewards; failing costs what was earned, and 1 more
"""

from __future__ import annotations

from typing import Any

from ...rewards.function import FunctionReward
from ...types import Trajectory
from .env import ScienceWorld

TOOL = "scienceworld_explorer"
FULL = 1.0 - 1e-6


def _score(world: ScienceWorld) -> dict[str, Any]:
    """The score at the end of the task, from 0 to 1."""
    return {"reward": max(0.0, world.score), "success": float(world.score >= FULL), "moves": float(world.moves)}


def _success(world: ScienceWorld) -> dict[str, Any]:
    """1 if the task was completed with the full score."""
    return {"reward": float(world.score >= FULL), "score": max(0.0, world.score), "moves": float(world.moves)}


def _delta(trajectory: Trajectory, world: ScienceWorld) -> dict[str, Any]:
    """Each turn's change of the score."""
    changes = iter(list(world.deltas))
    turns = []
    for turn in trajectory.turns:
        made = zip(turn.calls, turn.results, strict=False)
        acted = sum(call.name == TOOL and result.error is None for call, result in made)
        turns.append(sum(next(changes, 0.0) for _ in range(acted)))
    return {"reward": 0.0, "turn_rewards": tuple(turns), "score": max(0.0, world.score), "success": float(world.score >= FULL)}


scienceworld_score = FunctionReward(_score, name="scienceworld_score")
scienceworld_success = FunctionReward(_success, name="scienceworld_success")
scienceworld_delta = FunctionReward(_delta, name="scienceworld_delta")
