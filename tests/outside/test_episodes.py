"""Episodes of text from other packages: Gymnasium, TextArena and reasoning-gym, each against the real package."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from agentfly import ReactAgent
from agentfly.data import load_tasks
from agentfly.errors import ConfigError
from agentfly.resources import Budget, ResourceManager, spec_of
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Outcome, Request, RunResult, Task

GUESS = "gym:tests.outside.games:Guess-v0"


def play(env: Any, seed: int, actions: list[str], **settings: Any) -> tuple[str, list[Any], float]:
    """The first observation of an episode, what each action gave, and the score."""

    async def run() -> tuple[str, list[Any], float]:
        spec = spec_of(env, **settings)
        task = Task("t", (), {"seed": seed})
        async with ResourceManager(Budget(), spec) as manager, manager.lease([spec.name], task) as lease:
            steps = [await lease.call(spec.name, "step", action) for action in actions]
            return lease.observation(spec.name), steps, await lease.call(spec.name, "result")

    return asyncio.run(run())


def solve(env: str, tasks: list[Task], low: int = 1, high: int = 8, **settings: Any) -> RunResult:
    """Chains that halve the interval."""

    def reply(request: Request) -> str:
        ends = [low, high]
        for message in request.messages:
            if message.role == "assistant":
                (tried,) = map(int, re.findall(r'"action": "(\d+)"', message.content))
            elif "higher" in message.content and "Observation" in message.content:
                ends[0] = tried + 1
            elif "lower" in message.content and "Observation" in message.content:
                ends[1] = tried - 1
        return f'Action: act\nInput: {{"action": "{sum(ends) // 2}"}}'

    resources = {"pools": settings}
    agent = ReactAgent(
        ScriptedEngine(reply), renderer=ByteRenderer(), env=env, tools=["act"], reward="episode_score", resources=resources
    )
    return agent.run_sync(tasks)


# ---- Gymnasium


@pytest.fixture
def gymnasium() -> Any:
    return pytest.importorskip("gymnasium", reason="needs the package gymnasium: pip install gymnasium")


def test_an_episode_ends_by_termination_or_truncation_and_is_worth_the_sum_of_its_rewards(gymnasium: Any) -> None:
    first, steps, score = play(GUESS, 3, [str(n) for n in range(1, 9)])
    assert first == play(GUESS, 3, [])[0], "a seed is an episode"
    assert len({play(GUESS, seed, [])[0] for seed in range(4)}) > 1
    assert first.startswith("A number from 1 to 8")
    ended = next(at for at, step in enumerate(steps) if step["done"])
    assert ended <= 2, "max_episode_steps = 3"
    assert score == (1.0 if steps[ended]["observation"] == "right" else 0.0)
    assert [step["observation"] for step in steps[ended + 1 :]] == ["The episode is over."] * (7 - ended)


def test_an_agent_plays_rows_of_seeds_and_gets_the_score(gymnasium: Any) -> None:
    tasks = load_tasks(GUESS, count=6)
    assert [task.fields["seed"] for task in tasks] == list(range(6))
    assert tasks == load_tasks(GUESS, count=6)
    assert not {task.id for task in tasks} & {task.id for task in load_tasks(GUESS, split="validation", count=6)}
    found = solve(GUESS, tasks).trajectories
    assert {chain.outcome for chain in found} == {Outcome.FINISHED}
    assert [chain.reward for chain in found] == [float("right" in str(chain.prediction)) for chain in found]
    assert 1.0 in {chain.reward for chain in found}


def test_options_reach_the_environment_and_a_worker_process_can_hold_it(gymnasium: Any) -> None:
    first, _, _ = play(GUESS, 3, [], placement="process", options={"n": 5})
    assert first.startswith("A number from 1 to 5")


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("gym:tests.outside.games:NoSuch-v0", {}, "cannot be made"),
        ("gym:no_such_module_here:A-v0", {}, "cannot be made"),
        ("gym:tests.outside.games:Numbers-v0", {}, "wrap it so that its actions are text"),
        (GUESS, {"nn": 3}, "cannot be made: TypeError"),
    ],
)
def test_an_environment_that_cannot_be_used_is_one_sentence(gymnasium: Any, name: str, options: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        play(name, 0, [], options=options)


def test_a_family_needs_a_name_and_rows_a_count() -> None:
    with pytest.raises(ConfigError, match="write gym:ID"):
        spec_of("gym:")
    with pytest.raises(ConfigError, match="say how many"):
        load_tasks(GUESS)
    with pytest.raises(ConfigError, match="has no split 'dev'"):
        load_tasks(GUESS, split="dev", count=1)


# ---- TextArena

TICTACTOE, ONE_PLAYER = "textarena:TicTacToe-v0", "textarena:GuessTheNumber-v0"


@pytest.fixture
def textarena() -> Any:
    return pytest.importorskip("textarena", reason="needs the package textarena: pip install textarena")


def test_a_game_of_one_player_is_won_by_halving(textarena: Any) -> None:
    first, steps, score = play(ONE_PLAYER, 5, [f"[{number}]" for number in range(1, 21)])
    assert "number" in first
    assert any(step["done"] for step in steps)
    assert -1.0 <= score <= 1.0
    assert first == play(ONE_PLAYER, 5, [])[0]


def test_an_opponent_plays_the_other_side(textarena: Any) -> None:
    options = {"opponent": "tests.outside.games:random_marker"} if _has("gymnasium") else {"opponent": "builtins:str"}
    first, steps, score = play(TICTACTOE, 1, ["[4]", "[4]", "[4]"], options=options)
    assert first
    assert any(step["done"] for step in steps)
    assert score in (-1.0, 0.0, 1.0)


def test_a_game_that_cannot_begin_is_one_sentence(textarena: Any) -> None:
    for name, options, problem in [
        ("textarena:NoSuchGame-v0", {}, "cannot be made"),
        (TICTACTOE, {}, "does not begin with 1 players"),
        (TICTACTOE, {"num_players": 2}, "needs the option opponent"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            play(name, 0, [], options=options)


# ---- reasoning-gym


def test_rows_of_reasoning_gym_are_scored_by_their_verifier() -> None:
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym: pip install reasoning-gym")
    tasks = load_tasks("reasoning_gym:chain_sum", count=4)
    assert tasks == load_tasks("reasoning_gym:chain_sum", count=4)
    question, right = tasks[0].fields["question"], tasks[0].fields["answer"]

    def reply(request: Request) -> str:
        is_first = question in request.messages[-1].content
        return f"Answer: <answer> {right} </answer>" if is_first else "Answer: 1234567"

    agent = ReactAgent(ScriptedEngine(reply), renderer=ByteRenderer(), reward="reasoning_score")
    chains = agent.run_sync(tasks).trajectories
    assert chains[0].reward == 1.0
    assert all(chain.reward is not None and chain.reward < 1.0 for chain in chains[1:])
    with pytest.raises(ConfigError, match="cannot be made"):
        load_tasks("reasoning_gym:no_such_dataset", count=1)


def _has(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None
