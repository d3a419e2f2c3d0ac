"""Tasks that teach nothing are followed by others: a step has as many that teach as it asks for, and no task is lost."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly import reward
from agentfly.errors import ConfigError
from agentfly.health import diagnose
from agentfly.runs import RunStore
from tests.tiny import ROWS, sample_in_float64, save_tiny_model, tiny_agent

SMALL: dict[str, Any] = {
    "num_tasks": 3, "num_chains": 2, "threads": 1, "lr": 1e-2, "validation_count": 4, "validate_at_start": False,
    "validate_every": 0,
}  # fmt: skip


@reward(name="even_unless_easy")
def even_unless_easy(trajectory: Any) -> dict[str, float]:
    """Two of three tasks are solved by every chain; else the share of tokens with an even id."""
    ids = [token for turn in trajectory.turns for token in turn.completion.token_ids]
    easy = int(trajectory.task.fields["answer"]) % 3
    return {"reward": 1.0 if easy else sum(token % 2 == 0 for token in ids) / len(ids)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(model: Path, folder: Path, name: str = "run", **options: Any) -> Any:
    agent = tiny_agent(model, reward=even_unless_easy)
    rows = folder / "rows.json"
    rows.write_text(json.dumps([{**row, "question": f"{row['question']} {number}"} for number in range(4) for row in ROWS]))
    return agentfly.train(agent, rows, run={"dir": str(folder), "name": name}, **(SMALL | options))


def draws(folder: Path) -> list[tuple[int, int, str]]:
    """Step, position and task of every group that the store holds, in the order of the draws."""
    with RunStore(folder / "run.db", readonly=True) as store:
        chains = store.trajectories(split="train", limit=9999)
    places = Counter((*map(int, chain.id[1:].split("-")[:2]), chain.task.id) for chain in chains)
    assert set(places.values()) == {2}, "a group is whole"
    return sorted(places)


def problems(folder: Path) -> list[Any]:
    return [check.problems for check in diagnose(folder).checks if not check.ok]


def taught(row: dict[str, float]) -> float:
    return row["rollout/chains"] / 2 - row["train/zero_advantage_groups"]


def test_a_step_has_as_many_tasks_that_teach_as_it_asks_for(model: Path, tmp_path: Path) -> None:
    result = train(model, tmp_path, steps=6, refill=20)
    assert [taught(row) for row in result.history] == [3] * 6
    assert [row["rollout/refilled"] for row in result.history] == [row["train/zero_advantage_groups"] for row in result.history]
    assert sum(row["rollout/refilled"] for row in result.history) >= 6
    last = result.history[-1]
    assert last["ledger/drawn"] == last["ledger/trained"] + last["ledger/filtered"] == len(draws(result.directory))
    assert last["ledger/trained"] == 18
    tasks = [task for _, _, task in draws(result.directory)]
    assert len(set(tasks)) == len(tasks), "no task is drawn again in the first pass over the rows"
    assert not problems(result.directory)


def test_the_bound_holds_if_no_task_teaches(model: Path, tmp_path: Path) -> None:
    agent = tiny_agent(model, reward=reward(name="always")(lambda prediction: 1.0))
    result = agentfly.train(agent, ROWS, run={"dir": str(tmp_path), "name": "run"}, **SMALL, steps=2, refill=4)
    assert [row["rollout/chains"] for row in result.history] == [14, 14]
    assert [row["rollout/refilled"] for row in result.history] == [4, 4]


def test_refill_draws_on_in_the_order_of_the_cursor(model: Path, tmp_path: Path) -> None:
    result = train(model, tmp_path, steps=3, refill=20)
    for step in (1, 2, 3):
        positions = [position for number, position, _ in draws(result.directory) if number == step]
        assert positions == list(range(len(positions)))
    [check] = [check for check in diagnose(result.directory).checks if check.name == "draws"]
    assert check.ok
    assert not check.skipped  # it has compared the tasks with the cursor's


@pytest.mark.parametrize(("max_lag", "depth"), [(1, 1), (3, 2)])
def test_sampling_ahead_refills_too_and_no_token_is_too_old(model: Path, tmp_path: Path, max_lag: int, depth: int) -> None:
    result = train(model, tmp_path, steps=8, refill=4, max_lag=max_lag, depth=depth)
    assert max(row["train/lag_max"] for row in result.history) <= max_lag
    assert all(taught(row) >= 3 or row["rollout/chains"] >= 14 for row in result.history[:-1])
    last = result.history[-1]
    parts = sum(last[f"ledger/{part}"] for part in ("trained", "filtered", "failed", "in_flight"))
    assert last["ledger/drawn"] == parts
    assert last["ledger/in_flight"] == 0
    assert not problems(result.directory)


@pytest.mark.slow
def test_a_policy_learns_sooner_with_refill_where_most_tasks_teach_nothing(model: Path, tmp_path: Path) -> None:
    def hard_reward(refill: int) -> float:
        """The mean reward of the tasks that are not easy, in the last steps."""
        result = train(model, tmp_path, f"refill{refill}", steps=40, refill=refill, num_chains=4)
        with RunStore(result.directory / "run.db", readonly=True) as store:
            chains = [chain for step in range(36, 41) for chain in store.trajectories(step=step, split="train", limit=99)]
        rewards = [chain.total_reward for chain in chains if int(chain.task.fields["answer"]) % 3 == 0]
        return sum(rewards) / len(rewards)

    assert hard_reward(12) > hard_reward(0) + 0.05  # about 0.8 and 0.6


def test_a_resumed_run_refills_as_an_unbroken_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample_in_float64(monkeypatch)
    whole = train(model, tmp_path, "whole", steps=4, refill=6)
    train(model, tmp_path, "parts", steps=2, refill=6)
    again = train(model, tmp_path, "parts", steps=4, refill=6, resume=tmp_path / "parts")
    assert draws(again.directory) == draws(whole.directory)
    assert again.history[-1]["ledger/drawn"] == whole.history[-1]["ledger/drawn"]
    assert not problems(again.directory)


def test_an_algorithm_that_learns_from_equal_rewards_refuses_refill(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.refill has no use for reinforce\+\+"):
        train(model, tmp_path, steps=1, refill=2, algorithm="reinforce++")
