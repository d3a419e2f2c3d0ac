"""Each algorithm, from a random model, through the whole of `agentfly.train`: the reward must rise."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentfly
from agentfly.learn.algorithms import ALGORITHMS
from tests.tiny import ROWS, save_tiny_model, tiny_agent


# What learns from a reference reads no reward: tests/training/test_reference.py trains it.
@pytest.mark.parametrize("algorithm", sorted(name for name, row in ALGORITHMS.items() if not row.needs_reference))
def test_the_reward_rises(tmp_path: Path, algorithm: str) -> None:
    agent = tiny_agent(save_tiny_model(tmp_path / "model"))
    result = agentfly.train(
        agent,
        ROWS,
        algorithm=algorithm,
        steps=20,
        lr=2e-2,
        num_tasks=4,
        num_chains=4,
        num_minibatches=2 if algorithm in ("gspo", "cispo") else 1,  # with one step every ratio is 1, and both are GRPO
        threads=1,
        run={"dir": str(tmp_path / "runs"), "name": "rises"},
    )
    rewards = [metrics["reward/mean"] for metrics in result.history]
    assert result.before["validation/reward"] < 0.65
    assert result.after["validation/reward"] > result.before["validation/reward"] + 0.2, rewards
