"""Task sets, splits and demonstrations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentfly.agents.react import ReactAgent
from agentfly.data import load_tasks
from agentfly.envs.scienceworld import tasks as module
from agentfly.envs.scienceworld.demos import easy_scienceworld_demos, scienceworld_demos
from agentfly.envs.scienceworld.jvms import jvms
from agentfly.envs.scienceworld.simulator import Simulator, describe, run_apart
from agentfly.envs.scienceworld.solver import EasyWay, lifespan
from agentfly.envs.scienceworld.tasks import EASY, VARIATIONS, variations
from agentfly.errors import ConfigError
from agentfly.training.demonstrations import to_trajectory


def test_the_splits_are_the_published_ones() -> None:
    assert len(VARIATIONS) == 30
    sizes = {split: sum(len(variations(task, split)) for task in VARIATIONS) for split in module.SPLITS}
    assert sizes == {"train": 3592, "validation": 1796, "test": 1819}
    for task, number in VARIATIONS.items():
        assert [index for split in module.SPLITS for index in variations(task, split)] == list(range(number))


def test_tasks_variations_and_descriptions_are_those_of_the_simulator(java: None) -> None:
    async def ask() -> tuple[dict[str, int], list[list[int]], dict[tuple[str, int], str]]:
        simulator = Simulator(jvms())
        await simulator.load("boil", 0, "")

        def read(jvm: object) -> tuple[dict[str, int], list[list[int]]]:
            names = simulator._jvm.lines(simulator._java.getTaskNames())  # type: ignore[union-attr]
            sets = [list(getattr(simulator._java, f"getVariations{name}")()) for name in ("Train", "Dev", "Test")]
            return {name: simulator._java.getTaskMaxVariations(name) for name in names}, sets

        counts, sets = await simulator._call(read)
        loaded = {}
        for task, variation in (("boil", 1), ("find-plant", 17), ("test-conductivity-of-unknown-substances", 5), ("melt", 2)):
            loaded[task, variation] = (await simulator.load(task, variation, ""))[0]
        await simulator.close()
        return counts, sets, loaded

    counts, sets, loaded = run_apart(ask)
    assert counts == VARIATIONS
    assert sets == [list(variations("boil", split)) for split in module.SPLITS]
    assert run_apart(lambda: describe(jvms(), list(loaded))) == list(loaded.values())


def test_rows_are_seeded_distinct_and_take_the_tasks_in_turn(java: None) -> None:
    rows = load_tasks("scienceworld", split="validation", count=60, seed=1)
    assert len({(row.fields["task_name"], row.fields["variation"]) for row in rows}) == 60
    assert {row.fields["task_name"] for row in rows[:30]} == set(VARIATIONS)
    assert rows == load_tasks("scienceworld", split="validation", count=60, seed=1)
    assert [row.id for row in rows] != [row.id for row in load_tasks("scienceworld", split="validation", count=60, seed=2)]
    assert all(row.messages[0].content.startswith("Your task is to") for row in rows)


def test_easy_questions_are_short(java: None) -> None:
    rows = load_tasks("easy_scienceworld", split="test", count=24)
    assert {row.fields["task_name"] for row in rows} == set(EASY)
    assert all(len(row.messages[0].content) < 100 for row in rows)
    assert all(row.fields["variation"] in variations(row.fields["task_name"], "test") for row in rows)


@pytest.mark.parametrize(("split", "count"), [("dev", 1), ("train", 0), ("train", -2)])
def test_a_bad_split_or_count_is_refused(split: str, count: int) -> None:
    with pytest.raises(ConfigError, match="tasks:"):
        module.easy_scienceworld_tasks(split, count)


def test_easy_demonstrations_solve_their_tasks_and_slips_do_not(java: None, cache: Path) -> None:
    agent = ReactAgent("pocket", tools=["scienceworld_explorer"], reward="scienceworld_success", max_turns=8)
    good = easy_scienceworld_demos(12, seed=3)
    for index, row in enumerate(good):
        replies = [message for message in row["messages"] if message["role"] == "assistant"]
        assert 3 <= len(replies) <= 6
        assert "Answer:" not in replies[-1]["content"]  # the last action ended it
        assert row["variation"] in variations(row["task_name"], "train")
        record = to_trajectory(row, index, agent, agent.renderer, agent.schemas)
        assert sum(len(turn.context_ids) + len(turn.completion.token_ids) for turn in record.turns) < 820
    bad = easy_scienceworld_demos(12, seed=3, mistakes=1.0)
    assert sum("Answer:" in row["messages"][-1]["content"] for row in bad) >= 3
    assert [row["id"] for row in bad] == [row["id"] for row in good]
    assert bad != good


def test_demonstrations_are_made_once_and_kept(java: None, cache: Path) -> None:
    first = easy_scienceworld_demos(2, seed=5, mistakes=0.5)
    (kept,) = (cache / "scienceworld").glob("easy_demos*/rows.json")
    assert json.loads(kept.read_text()) == first
    before = kept.stat().st_mtime_ns
    assert easy_scienceworld_demos(2, seed=5, mistakes=0.5) == first
    assert kept.stat().st_mtime_ns == before
    kept.write_text("[]")
    assert easy_scienceworld_demos(2, seed=5, mistakes=0.5) == first


def test_gold_demonstrations_end_with_the_task(java: None, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VARIATIONS", {"lifespan-longest-lived": 125, "find-non-living-thing": 300})
    rows = scienceworld_demos(2)
    assert {row["task_name"] for row in rows} == {"lifespan-longest-lived", "find-non-living-thing"}
    for row in rows:
        assert row["messages"][-1]["role"] == "assistant"
        assert "Answer:" not in row["messages"][-1]["content"]
        assert row["messages"][0]["content"].startswith("Your task is to")


@pytest.mark.parametrize(("count", "mistakes"), [(0, 0.0), (1, 1.5), (1, -0.1)])
def test_bad_numbers_of_demonstrations_are_refused(count: int, mistakes: float) -> None:
    with pytest.raises(ConfigError, match="demonstrations:"):
        easy_scienceworld_demos(count, mistakes=mistakes)


def test_the_solver_knows_what_to_look_for() -> None:
    way = EasyWay("find-plant", "Find a plant. Focus on it. Then move it to the red box in the kitchen.")
    assert way.where == "greenhouse"
    assert way.things("greenhouse: cherry tree, pea plant, jug") == ["cherry tree", "pea plant"]
    assert way.rest("pea plant") == ["pick up pea plant", "teleport to kitchen", "move pea plant to red box"]
    here = EasyWay("find-non-living-thing", "Find a non-living thing. Focus on it. Then move it to the red box in the kitchen.")
    assert here.things("kitchen: glass cup, painting, blue box, table") == ["painting", "glass cup"]
    assert here.rest("painting") == ["move painting to red box"]
    oldest = EasyWay("lifespan-longest-lived", "Focus on the animal with the longest life span. It is outside.")
    assert oldest.things("outside: baby beaver, giant tortoise egg, baby mouse, axe")[0] == "giant tortoise egg"
    assert lifespan("baby ant") < lifespan("adult elephant")
