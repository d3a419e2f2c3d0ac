"""A run draws every chain with its own seed, saves only sound weights, and says when it learns nothing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import agentfly
from agentfly import reward
from agentfly.errors import ConfigError, InvariantError
from agentfly.learn.algorithms import Algorithm, Chains, Credit
from agentfly.runs import RunStore
from agentfly.runs.checkpoints import latest_checkpoint, list_checkpoints
from agentfly.training.idle import IdleSteps
from agentfly.training.ledger import Ledger
from agentfly.types import Outcome
from agentfly.watch.progress import Progress
from tests.learn.chains import chain
from tests.tiny import ROWS, sample_in_float64, save_tiny_model, tiny_agent

SMALL: dict[str, Any] = {"num_tasks": 2, "num_chains": 2, "threads": 1, "lr": 1e-2, "validate_at_start": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(model: Path, folder: Path, rows: Any = ROWS[:30], agent: Any = None, **options: Any) -> Any:
    agent = agent or tiny_agent(model)
    options = SMALL | {"run": {"dir": str(folder), "name": "run"}} | options
    return agentfly.train(agent, rows, validation=ROWS[30:31], **options)


def tokens_by_draw(folder: Path, step: int) -> dict[tuple[str, int], list[tuple[int, ...]]]:
    store = RunStore(folder / "run" / "run.db", readonly=True)
    found: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for trajectory in store.trajectories(step=step, split="train", limit=100):
        ids = tuple(token for turn in trajectory.turns for token in turn.completion.token_ids)
        found.setdefault((trajectory.task.id, trajectory.draw), []).append(ids)
    store.close()
    return found


def test_a_task_drawn_twice_in_a_step_gives_different_chains_each_time_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows and five tasks a step: every step draws each row at least twice."""
    sample_in_float64(monkeypatch)
    found = []
    for name in ("a", "b"):
        train(model, tmp_path / name, ROWS[:2], steps=2, num_tasks=5, validate_every=0)
        found.append([tokens_by_draw(tmp_path / name, step) for step in (1, 2)])
    for drawn in found[0]:
        assert len(drawn) == 5
        chains = [ids for group in drawn.values() for ids in group]
        assert len(chains) == len(set(chains)) == 10
    assert {key: sorted(ids) for key, ids in found[0][0].items()} == {key: sorted(ids) for key, ids in found[1][0].items()}


def test_an_algorithm_of_a_user_is_used_by_train(model: Path, tmp_path: Path) -> None:
    seen = []

    def credit(chains: Chains, settings: Any) -> Credit:
        seen.append((len(chains), len(chains.trajectories)))
        return Credit(chains.spread([1.0] * len(chains)))

    result = train(model, tmp_path, steps=2, algorithm=Algorithm(name="grpo", credit=credit))
    assert seen == [(4, 4)] * 2
    assert 'algorithm = "python:grpo"' in (result.directory / "config.toml").read_text()


def test_a_gap_stops_the_run_before_the_update_and_the_last_good_checkpoint_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load_file

    real, calls = Ledger.check_update, []

    def check(self: Ledger, metrics: Any) -> None:
        calls.append(dict(metrics))
        real(self, {"train/logprob_gap": 9.0} if len(calls) == 2 else metrics)

    monkeypatch.setattr(Ledger, "check_update", check)
    with pytest.raises(InvariantError, match="The weights were not changed"):
        train(model, tmp_path, steps=3, save_every=1)
    assert "train/logprob_gap" in calls[0]
    newest = latest_checkpoint(tmp_path / "run")
    assert newest.name == "step-000001"
    monkeypatch.undo()
    good = train(model, tmp_path / "good", steps=1)
    for name, tensor in load_file(good.checkpoint / "model.safetensors").items():
        assert torch.equal(tensor, load_file(newest / "model.safetensors")[name]), name


def test_weights_of_a_step_that_failed_after_the_update_are_not_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def check(self: Ledger, *_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise InvariantError("the engine samples from other weights")

    monkeypatch.setattr(Ledger, "check_published", check)
    with pytest.raises(InvariantError, match="other weights"):
        train(model, tmp_path, steps=3, save_every=1)
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000001"]


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1)])
@pytest.mark.parametrize("opened", [False, True])
def test_a_truncating_sampler_is_refused(model: Path, tmp_path: Path, name: str, value: float, opened: bool) -> None:
    agent = tiny_agent(model)
    if opened:
        agent = tiny_agent(agent.engine)  # an engine that is already open
    with pytest.raises(ConfigError, match=f"sampling.{name} cuts the distribution"):
        train(model, tmp_path, agent=agent, steps=1, **{f"sampling.{name}": value})
    assert not (tmp_path / "run").exists()


def test_a_run_in_which_nothing_is_learned_says_so_and_why(model: Path, tmp_path: Path) -> None:
    @reward(name="nothing")
    def nothing() -> float:
        return 0.0

    screen = io.StringIO()
    progress = Progress(4, Console(file=screen))
    result = train(model, tmp_path, agent=tiny_agent(model, reward=nothing), steps=4, progress=progress)
    lines = screen.getvalue().splitlines()
    assert sum("nothing was learned in the last 3 steps: every chain got the reward 0" in line for line in lines) == 1
    assert sum("nothing was learned in this run: every chain got the reward 0" in line for line in lines) == 1
    assert [metrics["train/idle_steps"] for metrics in result.history] == [1, 2, 3, 4]


SKIPPED = {"train/skipped": 1.0, "train/lr": 1e-3}
LEARNED = {"train/skipped": 0.0, "train/lr": 1e-3, "train/grad_norm": 0.5}


def pair(*rewards: float, replies: tuple[str, ...] = ("ab", "cd"), outcome: Outcome = Outcome.FINISHED) -> list[Any]:
    return [chain(("x", replies[i]), reward=r, number=i, outcome=outcome) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(
    ("metrics", "groups", "cause"),
    [
        (SKIPPED, [pair(1, 1)], "every chain got the reward 1: "),
        (SKIPPED, [pair(1, 1), pair(0, 0)], "the chains of each task got equal rewards: raise rollout.num_chains"),
        (SKIPPED, [pair(0, 0, outcome=Outcome.MAX_TOKENS)], "every chain was truncated: raise sampling.max_tokens"),
        (SKIPPED, [pair(0, 0, outcome=Outcome.MAX_TURNS)], "every chain ended at agent.max_turns"),
        (SKIPPED, [pair(0, 0, replies=("ab", "ab"))], "the same tokens: raise sampling.temperature"),
        (SKIPPED, [pair(1)], "no task has two chains"),
        (SKIPPED, [pair(1, 1, outcome=Outcome.WORLD_FAILURE)], "no chain could be trained on (world_failure)"),
        (LEARNED | {"train/lr": 0.0}, [pair(1, 0)], "the learning rate is 0"),
        (LEARNED | {"train/grad_norm": 0.0}, [pair(1, 0)], "the gradient is 0"),
        (LEARNED | {"train/explained_variance": 0.0}, [pair(1, 1)], "every chain got the reward 1"),
    ],
)
def test_the_cause_is_found(metrics: dict[str, float], groups: list[Any], cause: str) -> None:
    idle = IdleSteps()
    said = [idle.add(metrics, groups) for _ in range(10)]
    assert [number + 1 for number, text in enumerate(said) if text is not None] == [3, 10]
    assert cause in str(said[2])
    assert cause in str(idle.closing())


def test_a_run_that_learns_says_nothing() -> None:
    idle = IdleSteps()
    for number in range(20):
        quiet = SKIPPED if number % 3 else LEARNED
        assert idle.add(quiet if number < 3 else LEARNED, [pair(1, 1) if quiet is SKIPPED else pair(1, 0)]) is None
    assert idle.closing() is None
    assert idle.add(SKIPPED | {"train/critic_warmup": 1.0}, [pair(1, 1)]) is None
    assert idle.in_a_row == 0
