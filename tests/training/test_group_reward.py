"""Training on a reward that ranks the chains of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly import reward
from agentfly.health import diagnose, replay
from agentfly.runs import RunStore
from tests.tiny import ROWS, even, save_tiny_model, tiny_agent


@reward(name="most_even")
def most_even(trajectories: Any, answer: str) -> list[dict[str, float]]:
    """The rank of a chain by its share of tokens with an even id, from 0 to 1."""
    assert {each.task.fields["answer"] for each in trajectories} == {answer}
    shares = [even(each)["reward"] for each in trajectories]
    return [{"reward": sum(other < share for other in shares) / max(1, len(shares) - 1), "share": share} for share in shares]


@reward(name="brief_turns")
def brief_turns(trajectory: Any) -> float:
    """Always 0: a part that scores each chain alone."""
    return 0.0


def train(folder: Path, scores: object = None, **options: Any) -> Any:
    scores = scores or {most_even: 0.7, brief_turns: 0.3}
    agent = tiny_agent(save_tiny_model(folder / "model"), reward=scores, max_turns=2)
    settings = {
        "steps": 20, "lr": 3e-2, "num_tasks": 4, "num_chains": 6, "threads": 1, "validation_count": 4,
        "run": {"dir": str(folder), "name": "run"}, **options,
    }  # fmt: skip
    return agentfly.train(agent, ROWS, **settings)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_lag": 2, "depth": 1, "refill": 2, "group_timeout_s": 60.0}],
    ids=["in turn", "asynchronous, with refill and a time limit"],
)
def test_a_ranking_raises_what_it_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    result = train(tmp_path, **options)
    shares = [row["reward/component/most_even/share"] for row in result.history]
    assert sum(shares[-3:]) / 3 > sum(shares[:2]) / 2 + 0.1, shares
    with RunStore(result.directory / "run.db", readonly=True) as store:
        chains = store.trajectories(split="train", limit=9999)
    assert len(chains) == sum(row["rollout/chains"] for row in result.history)
    for chain in chains:
        assert chain.reward == pytest.approx(0.7 * chain.components["most_even"])
        assert chain.components["brief_turns"] == 0.0
    for report in (diagnose(result.directory), replay(result.directory)):
        assert not [check.problems for check in report.checks if not check.ok]


def test_a_run_whose_reward_has_a_name_says_that_the_comparison_is_not_computed_again(tmp_path: Path) -> None:
    result = train(tmp_path, most_even, steps=1)
    skipped = [check.skipped for check in diagnose(result.directory).checks + replay(result.directory).checks if check.skipped]
    assert any("compares the chains of a group" in why for why in skipped), skipped
