"""Rewards that ask for `trajectories` score the chains of a group together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfly.cli import main
from agentfly.errors import ConfigError, RewardError
from agentfly.rewards import FunctionReward, Score, as_reward


def ranks(trajectories: Any, answer: str) -> list[float]:
    """The rank of each prediction's length, the shortest first; the right answer gets 10 more."""
    order = sorted(trajectories, key=lambda trajectory: len(trajectory.prediction))
    return [order.index(each) + 10.0 * (each.prediction == answer) for each in trajectories]


def score_group(reward: Any, *trajectories: Any) -> list[Score]:
    return asyncio.run(as_reward(reward).score_group(trajectories))


def test_a_function_that_asks_for_trajectories_is_called_once_with_the_group_and_the_fields(chain: Any) -> None:
    group = [chain("long one", answer="84"), chain("84", answer="84"), chain("mid", answer="84")]
    made = as_reward(ranks)
    assert made.grouped
    assert made.needs == {"answer"}
    assert [score.reward for score in score_group(made, *group)] == [2.0, 10.0, 1.0]
    assert asyncio.run(made.score(group[0])) == Score(0.0), "a chain alone has no score of it"


def test_a_mix_scores_its_parts_of_one_chain_and_of_the_group_apart(chain: Any) -> None:
    alone = FunctionReward(lambda prediction: float(prediction == "84"), name="right")

    async def place(trajectories: Any) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        return [{"reward": i, "place": i, "turn_rewards": [0.5]} for i, _ in enumerate(trajectories)]

    mixed = 0.7 * alone + 0.3 * FunctionReward(place) + 1
    group = [chain("84"), chain("85")]
    assert mixed.grouped and mixed.waits
    assert asyncio.run(mixed.score(group[0])) == Score(1.7, {"right": 1.0})
    assert score_group(mixed, *group) == [
        Score(0.0, {"place": 0.0, "place/place": 0.0}, (0.15,)),
        Score(0.3, {"place": 1.0, "place/place": 1.0}, (0.15,)),
    ]
    assert score_group(FunctionReward(place), *group)[1] == Score(1.0, {"place": 1.0}, (0.5,))
    assert not alone.grouped
    assert score_group(alone, *group) == [Score(0.0), Score(0.0)]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (1.0, r"returned 1.0 \(float\); it is a list with one reward per chain"),
        ("12", "it is a list with one reward per chain"),
        ([1.0], "returned 1 rewards for 2 chains"),
        ([1.0, float("nan")], "place 1, returned nan"),
        ([1.0, None], "place 1, returned None"),
    ],
)
def test_what_is_not_one_finite_number_per_chain_stops_the_run(chain: Any, value: Any, sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence):
        score_group(FunctionReward(lambda trajectories: value, name="odd"), chain(), chain())


def test_an_array_and_a_function_in_a_thread_are_fine(chain: Any) -> None:
    import numpy as np

    made = FunctionReward(lambda trajectories: np.array([1.0, 2.0]), thread=True)
    assert [score.reward for score in score_group(made * 2, chain(), chain())] == [2.0, 4.0]


def test_an_error_of_the_function_is_named_with_its_task(chain: Any) -> None:
    def broken(trajectories: Any) -> list[float]:
        raise KeyError("x")

    with pytest.raises(RewardError, match="reward 'broken' on task 't7' raised KeyError"):
        score_group(broken, chain(), chain())


def test_scoring_rows_one_by_one_refuses_a_comparison(tmp_path: Any, capsys: Any) -> None:
    (tmp_path / "ranks.py").write_text("def ranks(trajectories): return [0.0 for _ in trajectories]\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    assert main(["check-tests", str(tmp_path / "rows.jsonl"), "--reward", f"{tmp_path}/ranks.py:ranks"]) == 2
    assert "'ranks' compares the chains of a group" in capsys.readouterr().err


@pytest.mark.parametrize("function", [lambda trajectories, trajectory: [], lambda trajectories, env: []])
def test_what_belongs_to_one_chain_is_refused_beside_the_group(function: Any) -> None:
    with pytest.raises(ConfigError, match="asks for 'trajectories', the chains of a group, and cannot have"):
        as_reward(function)
