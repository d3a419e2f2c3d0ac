"""With faults in 5 % of all resets, steps and closes, the chains whose own steps did not fail are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentfly import ReactAgent, reward, tool
from agentfly.testing import ByteRenderer, ScriptedEngine

from ..resources.far import ServerThread
from ..resources.worlds import Shaky

NUM_TASKS, NUM_CHAINS = 24, 8
GUESS = 'Action: guess\nInput: {"n": 5}'


@pytest.mark.parametrize("placement", ["loop", "thread", "process", "sandbox", "http"])
def test_at_least_97_percent_of_the_other_chains_are_trained(placement: str, tmp_path: Path) -> None:
    @tool(name="guess", timeout_s=60, register=False)
    def guess(n: int, game: Shaky) -> str:
        """Guess."""
        return str(game.guess(n))

    @reward(name="solved")
    def solved(game: Shaky) -> float:
        return float(game.is_solved())

    def run(pool: dict[str, Any]) -> list[Any]:
        agent = ReactAgent(
            ScriptedEngine([GUESS, GUESS, "Answer: done"]),
            tools=[guess],
            reward=solved,
            renderer=ByteRenderer(),
            resources={"pools": {"Shaky": {"max": 4, **pool}}},
        )
        rows = [{"question": f"q{i}", "secret": 5} for i in range(NUM_TASKS)]
        return list(agent.run_sync(rows, num_chains=NUM_CHAINS, max_concurrency=8))

    if placement == "http":
        with ServerThread(Shaky) as server:
            trajectories = run({"placement": "http", "place": {"url": server.url}})
    else:
        trajectories = run({"placement": placement})
    failed_in_a_step = [
        each for each in trajectories if any(result.error == "raised" for turn in each.turns for result in turn.results)
    ]
    trained = [each for each in trajectories if each.trainable]
    assert len(trajectories) == NUM_TASKS * NUM_CHAINS
    assert failed_in_a_step  # the faults are there
    # A step that raises is told to the model, so its chain goes on and is trained, too.
    assert len(trained) >= 0.97 * len(trajectories), [each.error for each in trajectories if each.error][:5]
