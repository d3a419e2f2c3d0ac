"""Demonstrations are what the agent itself would have written, and what the world answered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentfly import plugins
from agentfly.agents.react import ReactAgent
from agentfly.build import build_agent, build_tasks
from agentfly.config import Config
from agentfly.envs.alfworld.demos import alfworld_demos, alfworld_games_demos, easy_alfworld_demos
from agentfly.envs.alfworld.tasks import open_game, split_of_game
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Request, Trajectory
from tests.envs.alfworld.house import GOALS, MISSING, SHARED
from tests.published import write_games

RECIPE = Path(__file__).parents[3] / "recipes" / "alfworld.toml"


def play(rows: Sequence[dict[str, Any]], max_turns: int = 60) -> list[Trajectory]:
    """The dialogues again, with the real agent, tool and world; only the replies are given."""
    replies = {
        row["messages"][0]["content"]: [m["content"] for m in row["messages"] if m["role"] == "assistant"] for row in rows
    }

    def reply(request: Request) -> str:
        question = next(message.content for message in request.messages if message.role == "user")
        return replies[question][sum(message.role == "assistant" for message in request.messages)]

    engine = ScriptedEngine(reply)
    agent = ReactAgent(engine, tools=["alfworld_step"], reward="alfworld_success", renderer=ByteRenderer(), max_turns=max_turns)
    tasks = [{"id": row["id"], "question": row["messages"][0]["content"], "game": row["game"]} for row in rows]
    return agent.run_sync(tasks).trajectories


def unique(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each question: the replies are found by it."""
    return list({row["messages"][0]["content"]: row for row in rows}.values())


@pytest.mark.parametrize("demos", [easy_alfworld_demos, alfworld_demos])
def test_good_dialogues_win_and_are_played_as_they_are_written(demos: Any) -> None:
    rows = unique(demos(60, 3))
    for row, trajectory in zip(rows, play(rows), strict=True):
        assert trajectory.reward == 1.0, row
        shown = [{"role": message.role, "content": message.content} for message in trajectory.messages[1:]]
        assert shown[: len(row["messages"])] == row["messages"]
        assert len(shown) == len(row["messages"]) + 1, "only the last observation, which ends the chain, is left out"
        assert split_of_game(open_game(row)) == "train"


def test_dialogues_with_slips_mostly_fail_and_are_still_played_as_they_are_written() -> None:
    rows = unique(easy_alfworld_demos(80, 4, mistakes=1.0))
    trajectories = play(rows, max_turns=8)
    for row, trajectory in zip(rows, trajectories, strict=True):
        shown = [{"role": message.role, "content": message.content} for message in trajectory.messages[1:]]
        assert shown[: len(row["messages"])] == row["messages"]
    won = sum(trajectory.reward or 0.0 for trajectory in trajectories) / len(rows)
    assert 0.02 < won < 0.4


def test_the_share_of_slips_is_as_asked_and_the_rest_stays_the_same() -> None:
    good, mixed = easy_alfworld_demos(200, 5), easy_alfworld_demos(200, 5, mistakes=0.5)
    assert mixed == easy_alfworld_demos(200, 5, mistakes=0.5)
    changed = sum(one["messages"] != other["messages"] for one, other in zip(good, mixed, strict=True))
    assert 60 < changed < 140
    assert {name for name in plugins.names("demos") if "alfworld" in name} == {"alfworld", "easy_alfworld", "alfworld_games"}


def test_easy_dialogues_are_short() -> None:
    turns = [sum(m["role"] == "assistant" for m in row["messages"]) for row in easy_alfworld_demos(200, 6)]
    assert min(turns) >= 3 and max(turns) <= 8


def test_games_in_the_published_form_are_demonstrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(write_games(tmp_path)))
    rows = alfworld_games_demos(20, 2)
    assert len(rows) == 20, "more than there are games"
    assert {row["id"].partition("/")[0] for row in rows} == {"train"}
    different = unique(rows)
    assert len(different) == len(GOALS)
    assert [trajectory.reward for trajectory in play(different)] == [1.0] * len(different)


@pytest.mark.skipif(not SHARED.is_dir(), reason=MISSING)
def test_real_games_are_demonstrated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(SHARED))
    rows = unique(alfworld_games_demos(40, 1))
    assert [trajectory.reward for trajectory in play(rows)] == [1.0] * len(rows)
    assert len(alfworld_games_demos(230, 1)) == 230, "more than there are games"


def test_the_recipe_reads_and_its_names_are_known() -> None:
    config = Config.load(RECIPE, ["data.train_count=20", "data.validation_count=5"])
    agent = build_agent(config)
    train, validation = build_tasks(config)
    agent.check(train)
    assert list(agent.tools) == ["alfworld_step"]
    assert (len(train), len(validation)) == (20, 5)
    assert config.agent.model == "pocket-worlds"
