"""Each promise of the ledger is broken once here, and each time it is noticed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agentfly.errors import InvariantError
from agentfly.training.ledger import Ledger
from agentfly.types import Completion, Message, Outcome, Task, Trajectory, Turn


def chain(number: int, task: str = "a", version: int = 3, **changes: object) -> Trajectory:
    completion = Completion(text="x", token_ids=[5, 6], logprobs=[-0.1, -0.2], versions=[version] * 2)
    trajectory = Trajectory(
        f"{task}-{number}", Task(task, (Message("user", "q"),)), number, turns=[Turn([1, 2], True, completion)],
        outcome=Outcome.FINISHED, reward=1.0,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(trajectory, name, value)
    return trajectory


def check(groups: list[list[Trajectory]], num_tasks: int = 1, num_chains: int = 2) -> None:
    ledger = Ledger(max_logprob_gap=0.05, max_failed_share=0.5)
    ledger.check_rollout(groups, num_tasks=num_tasks, num_chains=num_chains, version=3)


def test_a_sound_step_passes() -> None:
    check([[chain(0), chain(1)]])


def test_a_lost_chain_is_noticed() -> None:
    with pytest.raises(InvariantError, match="2 chains were admitted so far but 1 came back"):
        check([[chain(0)]])


def test_a_group_of_two_tasks_is_noticed() -> None:
    with pytest.raises(InvariantError, match="different tasks"):
        check([[chain(0), chain(1, task="b")]])


def test_two_draws_of_a_task_are_two_groups() -> None:
    check([[chain(0), chain(1)], [chain(0, draw=1), chain(1, draw=1)]], num_tasks=2)
    with pytest.raises(InvariantError, match="the same draw of task 'a'"):
        check([[chain(0), chain(1)], [chain(0), chain(1)]], num_tasks=2)
    with pytest.raises(InvariantError, match="different tasks"):
        check([[chain(0), chain(1, draw=1)]])


def test_one_chain_twice_is_noticed() -> None:
    with pytest.raises(InvariantError, match="one chain twice"):
        check([[chain(0), chain(0)]])


def test_stale_tokens_are_noticed() -> None:
    with pytest.raises(InvariantError, match="tokens of version 2"):
        check([[chain(0), chain(1, version=2)]])


def test_a_reward_for_a_chain_that_the_world_broke_is_noticed() -> None:
    with pytest.raises(InvariantError, match="has a reward"):
        check([[chain(0), chain(1, outcome=Outcome.WORLD_FAILURE)]])


def test_a_step_that_loses_most_of_its_chains_says_why() -> None:
    lost = [chain(i, outcome=Outcome.WORLD_FAILURE, reward=None, error="WorldError: no server") for i in (1, 2)]
    with pytest.raises(InvariantError, match="2 of 3 chains .* no server"):
        check([[chain(0), *lost]], num_chains=3)


def test_log_probs_that_do_not_agree_are_noticed() -> None:
    ledger = Ledger(max_logprob_gap=0.05, max_failed_share=0.5)
    ledger.check_update({"train/logprob_gap": 0.01})
    for gap in (0.06, float("nan")):
        with pytest.raises(InvariantError, match="log-probs differ"):
            ledger.check_update({"train/logprob_gap": gap})


def test_an_engine_with_old_or_foreign_weights_is_noticed() -> None:
    ledger = Ledger(max_logprob_gap=0.05, max_failed_share=0.5)
    model = object()
    learner = SimpleNamespace(stats=dict, version=4, model=model)
    ledger.check_published(SimpleNamespace(stats=dict, version=4, model=model, shares_weights=True), learner)  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match="version 3"):
        ledger.check_published(SimpleNamespace(stats=dict, version=3, model=model), learner)  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match="never reach"):
        ledger.check_published(SimpleNamespace(stats=dict, version=4, model=object()), learner)  # type: ignore[arg-type]


@pytest.mark.parametrize("proof", [None, SimpleNamespace(stats=dict, version=3)])
def test_an_engine_with_a_copy_of_the_weights_needs_a_proof(proof: object) -> None:
    ledger = Ledger(max_logprob_gap=0.05, max_failed_share=0.5)
    learner = SimpleNamespace(stats=dict, version=4, model=object())
    engine = SimpleNamespace(stats=dict, version=4, model=learner.model, shares_weights=False, proof=SimpleNamespace(version=4))
    ledger.check_published(engine, learner)  # type: ignore[arg-type]
    engine.proof = proof
    with pytest.raises(InvariantError, match="no proof says that the engine's copy of the weights is version 4"):
        ledger.check_published(engine, learner)  # type: ignore[arg-type]
