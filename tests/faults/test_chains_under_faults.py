"""Chains whose environments fail on a seeded schedule: every chain ends, siblings finish, and nothing is left behind."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from agentfly import ReactAgent, reward, tool
from agentfly.testing import ByteRenderer, FaultSchedule, GuessEnv, ScriptedEngine, faulty

GUESS = 'Action: guess\nInput: {"n": 5}'
ANSWER = "Answer: done"


class Game(GuessEnv):
    """A game whose reward reads its state through a method."""

    def is_solved(self) -> bool:
        return self.solved


def agent_with(kind: type, placement: str, **options: Any) -> ReactAgent:
    @tool(name="guess", timeout_s=20, register=False)
    def guess(n: int, game: kind) -> str:  # type: ignore[valid-type]
        """Guess."""
        return str(game.guess(n))  # type: ignore[attr-defined]

    @reward(name="solved")
    def solved(game: kind) -> float:  # type: ignore[valid-type]
        return float(game.is_solved())  # type: ignore[attr-defined]

    pools = {kind.__name__: {"placement": placement, "max": 4, "call_timeout_s": 0.5, "reset_timeout_s": 5.0}}
    engine = ScriptedEngine([GUESS, GUESS, ANSWER])
    return ReactAgent(
        engine,
        tools=[guess],
        reward=solved,
        renderer=ByteRenderer(),
        resources={"pools": pools},
        on_tool_error="end",
        **options,
    )


def open_handles() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("placement", "rates", "num_chains"),
    [
        ("loop", {"kill": 0.1, "crash": 0.1, "slow": 0.1}, 200),
        ("thread", {"kill": 0.1, "crash": 0.1, "slow": 0.1}, 60),
        ("process", {"kill": 0.1, "crash": 0.1, "hang": 0.05, "corrupt": 0.05}, 12),
    ],
)
def test_every_chain_ends_with_a_typed_outcome_and_everything_is_given_back(
    placement: str, rates: dict[str, float], num_chains: int
) -> None:
    kind = faulty(Game, FaultSchedule(seed=7, rates=rates, slow_s=0.002))
    agent = agent_with(kind, placement, chain_timeout_s=60.0)
    agent.run_sync([{"question": "warm up", "secret": 5}])
    handles = open_handles()
    result = agent.run_sync([{"question": "q", "secret": 5}], num_chains=num_chains, max_concurrency=16)
    outcomes = result.outcomes
    assert len(result) == num_chains
    assert set(outcomes) <= {"finished", "tool_error", "world_failure"}
    assert outcomes["finished"] > 0, outcomes
    assert outcomes["finished"] < num_chains, outcomes
    for trajectory in result:
        # A chain whose environment failed has no reward; its siblings keep theirs.
        assert (trajectory.reward is None) == (not trajectory.outcome.trainable)
        if trajectory.scored:
            assert trajectory.reward == 1.0
    assert open_handles() <= handles + 2
    assert not [thread for thread in threading.enumerate() if "Game" in thread.name]


def test_the_same_seed_breaks_the_same_chains() -> None:
    def outcomes() -> list[str]:
        kind = faulty(Game, FaultSchedule(seed=3, rates={"crash": 0.3}))
        agent = agent_with(kind, "loop")
        result = agent.run_sync([{"question": "q", "secret": 5}], num_chains=20, max_concurrency=1)
        return [trajectory.outcome.value for trajectory in result]

    first = outcomes()
    assert len(set(first)) > 1
    assert first == outcomes()
