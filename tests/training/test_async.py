"""Sampling while learning: no token is older than allowed, no task is lost, and with max_lag 0 nothing changes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import agentfly
from agentfly import Action, Completion, tool
from agentfly.build import build_tasks
from agentfly.errors import ConfigError
from agentfly.health import diagnose
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.storage import seed_torch
from agentfly.rollout import make_plan, open_environments, run_chains
from agentfly.runs import RunStore
from agentfly.runs.checkpoints import latest_checkpoint
from agentfly.training.draws import TaskDraws
from tests.tiny import ROWS, TwoTurns, even, save_tiny_model, tiny_agent

SMALL: dict[str, Any] = {
    "num_tasks": 3, "num_chains": 2, "threads": 1, "lr": 1e-2, "validation_count": 4, "validate_at_start": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def slow_look(seed: int = 0) -> Any:
    """A tool whose time varies by a factor of a hundred."""
    times = random.Random(seed)

    @tool(name="look", register=False)
    async def look() -> str:
        """Look around."""
        await asyncio.sleep(min(0.2, 0.004 * times.lognormvariate(0, 1.5)))
        return "nothing here"

    return look


def train(model: Path, folder: Path, name: str = "run", **options: Any) -> Any:
    agent = tiny_agent(model, tools=[slow_look()])
    return agentfly.train(agent, ROWS, run={"dir": str(folder), "name": name}, **(SMALL | options))


def stored(folder: Path) -> list[tuple[int, Any]]:
    with RunStore(folder / "run.db", readonly=True) as store:
        steps = max(row.step for row in store.metrics())
        return [
            (step, each) for step in range(1, steps + 1) for each in store.trajectories(step=step, split="train", limit=999)
        ]


def lags(result: Any) -> list[int]:
    """The age of every stored token when its step was trained."""
    versions = {step: int(row["train/version"]) for step, row in enumerate(result.history, 1)}
    return [
        versions[step] - version
        for step, trajectory in stored(result.directory)
        for turn in trajectory.turns
        for version in turn.completion.versions
    ]


@pytest.mark.parametrize(("max_lag", "depth"), [(1, None), (3, 1), (3, 3)])
def test_no_token_is_older_than_max_lag_and_every_task_is_trained_once(
    model: Path, tmp_path: Path, max_lag: int, depth: int | None
) -> None:
    options = {} if depth is None else {"depth": depth}
    result = train(model, tmp_path, steps=12, max_lag=max_lag, **options)
    found = lags(result)
    assert max(found) <= max_lag
    assert max(found) >= 1  # sampling did run ahead
    drawn = Counter(trajectory.task.id for _, trajectory in stored(result.directory))
    assert sum(drawn.values()) == 12 * 6
    assert set(drawn.values()) == {2}  # 36 of 40 rows, each once with both chains
    assert result.history[-1]["ledger/drawn"] == 36
    assert result.history[-1]["ledger/in_flight"] == 0
    assert not [check.problems for check in diagnose(result.directory).checks if not check.ok]


def test_with_max_lag_0_the_weights_are_those_of_sampling_and_learning_in_turn(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    result = train(model, tmp_path, steps=3)
    agent = tiny_agent(model, tools=[slow_look()])
    asyncio.run(in_turn(agent, agentfly.Config.load(result.directory / "config.toml")))
    ours = agent.engine.model.state_dict()
    for name, tensor in load_file(result.checkpoint / "model.safetensors").items():
        assert torch.equal(tensor, ours[name]), name


async def in_turn(agent: Any, config: Any) -> None:
    """The textbook loop: sample a step's chains, update, publish."""
    seed_torch(config.seed, 1)
    draws = TaskDraws(build_tasks(config, ROWS)[0], config.data, config.seed)
    optim = replace(config.train, total_steps=config.train.steps)
    learner = PolicyLearner(agent.engine.model, config.algorithm, loss=config.loss, optim=optim, seed=config.seed)
    async with open_environments(agent, make_plan(agent, sampling=config.sampling), None) as plan:
        for step in range(1, config.train.steps + 1):
            seeded = replace(plan, sampling=replace(plan.sampling, seed=config.seed * 1_000_003 + step))
            chains = await run_chains(
                seeded, [draws.draw()[1] for _ in range(3)], num_chains=2, max_concurrency=None, prefix=f"t{step}-"
            )
            learner.update([chains[i : i + 2] for i in range(0, len(chains), 2)])
            agent.engine.publish(learner.version)


@pytest.mark.parametrize("at_update", ["recompute", "keep", "finish"])
def test_replies_in_progress_go_on_with_new_weights_as_the_config_says(model: Path, tmp_path: Path, at_update: str) -> None:
    agent = tiny_agent(model, tools=[slow_look()], sampling={"max_tokens": 60})
    options = SMALL | {"steps": 8, "max_lag": 2, "at_update": at_update, "validate_every": 0}
    result = agentfly.train(agent, ROWS, run={"dir": str(tmp_path), "name": "run"}, **options)
    mixed = [turn for _, each in stored(result.directory) for turn in each.turns if len(set(turn.completion.versions)) > 1]
    assert not mixed or at_update != "finish"
    assert max(lags(result)) <= 2
    assert not [check.problems for check in diagnose(result.directory).checks if not check.ok]


@pytest.mark.parametrize("at_limit", ["wait", "mask"])
def test_a_run_that_stopped_with_chains_in_flight_loses_no_task_and_repeats_none(
    model: Path, tmp_path: Path, at_limit: str
) -> None:
    class Breaks(TwoTurns):
        """An agent with a bug that shows in its 50th reply."""

        replies = 0

        def parse(self, completion: Completion) -> Action:
            type(self).replies += 1
            if self.replies == 50:
                raise ZeroDivisionError("a bug of the agent")
            return super().parse(completion)

    options = SMALL | {"steps": 12, "max_lag": 2, "depth": 2, "at_limit": at_limit}
    broken = Breaks(str(model), tools=[slow_look()], reward=even, max_turns=2, sampling={"max_tokens": 12})
    with pytest.raises(ZeroDivisionError):
        agentfly.train(broken, ROWS, run={"dir": str(tmp_path), "name": "run"}, **options)
    state = torch.load(latest_checkpoint(tmp_path / "run") / "trainer.pt", weights_only=True)
    assert 0 < state["step"] < 12
    assert len(state["stream"]["pending"]) >= 3  # drawn, and not trained
    again = agentfly.train(
        tiny_agent(model), ROWS, run={"dir": str(tmp_path), "name": "run"}, resume=tmp_path / "run", **options
    )
    drawn = Counter(trajectory.task.id for _, trajectory in stored(again.directory))
    assert set(drawn.values()) == {2}
    assert len(drawn) == 36
    assert not [check.problems for check in diagnose(again.directory).checks if not check.ok]


@pytest.mark.parametrize(
    "options",
    [{"depth": 1}, {"max_lag": 1, "depth": 2}, {"max_lag": 1, "depth": 0}, {"at_limit": "mask"}, {"at_update": "keep"}],
)
def test_settings_that_contradict_each_other_are_refused(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rollout"):
        train(model, tmp_path, steps=1, **options)


def test_chains_that_outlast_their_group_are_cut_off_and_the_others_are_trained(model: Path, tmp_path: Path) -> None:
    calls = 0

    @tool(name="look", register=False)
    async def look() -> str:
        """Look around."""
        nonlocal calls
        calls += 1
        if calls % 9 == 4:
            await asyncio.sleep(3600)
        return "nothing here"

    agent = tiny_agent(model, tools=[look])
    options = SMALL | {"steps": 3, "num_chains": 3, "group_timeout_s": 1.0, "max_lag": 1}
    result = agentfly.train(agent, ROWS, run={"dir": str(tmp_path), "name": "run"}, validate_every=0, **options)
    ends = Counter(trajectory.outcome.value for _, trajectory in stored(result.directory))
    assert ends["max_time"] >= 1
    assert ends["max_turns"] == 27 - ends["max_time"]
    assert sum(row["train/untrainable_chains"] for row in result.history) == 0
    assert result.history[-1]["ledger/drawn"] == 9
