"""Faults that make a training silently wrong are planted here, one at a time, and each of them stops the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly.engines.local import LocalEngine
from agentfly.engines.local.slot_allocator import SlotAllocator
from agentfly.errors import InvariantError
from agentfly.learn import experience
from agentfly.rollout import GroupStream
from tests.tiny import ROWS, save_tiny_model, tiny_agent

MODES: list[dict[str, Any]] = [{}, {"max_lag": 1}, {"max_lag": 2, "depth": 2, "at_limit": "mask"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=MODES, ids=["in-turn", "wait", "mask"])
def train(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Callable[[], Any]:
    def run() -> Any:
        return agentfly.train(
            tiny_agent(model), ROWS, run={"dir": str(tmp_path), "name": "run"}, num_tasks=3, num_chains=2, threads=1, lr=5e-2,
            validation_count=4, validate_at_start=False, validate_every=0, steps=12, **request.param,
        )  # fmt: skip

    return run


def test_without_a_fault_the_run_ends(train: Callable[[], Any]) -> None:
    assert train().steps == 12


def test_a_skipped_publish_is_caught(train: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalEngine.publish
    monkeypatch.setattr(LocalEngine, "publish", lambda self, version: real(self, version) if version < 3 else None)
    with pytest.raises(InvariantError, match="version"):
        train()


def test_weights_that_do_not_reach_the_engine_are_caught(train: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine claims each new version and samples from a copy of the first weights."""
    import copy

    from agentfly.engines.local.replica import make_replica

    def publish(self: LocalEngine, version: int) -> None:
        if not hasattr(self, "frozen"):
            self.frozen = copy.deepcopy(self.model)  # type: ignore[attr-defined]
            self._scheduler.use_model(make_replica(self.frozen))  # type: ignore[attr-defined]
        self.version = version
        self._published += 1

    monkeypatch.setattr(LocalEngine, "publish", publish)
    with pytest.raises(InvariantError, match="log-probs"):
        train()


def test_a_cache_of_older_weights_that_is_reused_is_caught(train: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotAllocator, "renew", lambda self, publication, keep=(): {})
    with pytest.raises(InvariantError, match="cached tokens of older weights|log-probs"):
        train()


def test_a_mask_shifted_by_one_is_caught(train: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    real = experience.rows_of_chains

    def shifted(trajectories: Any) -> Any:
        return [[replace(row, mask=np.roll(row.mask, -1)) for row in rows] for rows in real(trajectories)]

    monkeypatch.setattr(experience, "rows_of_chains", shifted)
    with pytest.raises(InvariantError, match="mask"):
        train()


def test_a_corrupted_log_prob_is_caught(train: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs at twice the temperature: every one is plausible, and wrong."""
    real = LocalEngine.generate

    async def generate(self: LocalEngine, request: Any) -> Any:
        completion = await real(self, request)
        return replace(completion, logprobs=[0.5 * logprob for logprob in completion.logprobs])

    monkeypatch.setattr(LocalEngine, "generate", generate)
    with pytest.raises(InvariantError, match="log-probs"):
        train()


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5])
def test_an_impossible_log_prob_is_caught(train: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    real = LocalEngine.generate

    async def generate(self: LocalEngine, request: Any) -> Any:
        completion = await real(self, request)
        return replace(completion, logprobs=[value, *completion.logprobs[1:]])

    monkeypatch.setattr(LocalEngine, "generate", generate)
    with pytest.raises(InvariantError, match="log-prob"):
        train()


def test_a_dropped_task_is_caught(train: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = GroupStream._draw_ahead

    def drop(self: GroupStream) -> None:
        real(self)
        if self.drawn > 12:
            self._groups.pop()
            real(self)

    monkeypatch.setattr(GroupStream, "_draw_ahead", drop)
    with pytest.raises(InvariantError, match="tasks were drawn"):
        train()


def test_a_group_that_is_trained_twice_is_caught(train: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = GroupStream.next_batch
    first: list[Any] = []

    async def again(self: GroupStream, version: int) -> Any:
        batch = await real(self, version)
        first[:] = first or batch
        return [first[0], *batch[1:]] if batch[0] is not first[0] else batch

    monkeypatch.setattr(GroupStream, "next_batch", again)
    with pytest.raises(InvariantError, match="trained in an earlier step|version"):
        train()
