"""What belongs to a world is found by annotation and by folder, and a person can play any of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentfly import plugins
from agentfly.envs.check_report import Report
from agentfly.envs.play import play
from agentfly.envs.worlds import describe_world, find_world, rewards_of_world, tasks_of_world, tools_of_world
from agentfly.errors import ConfigError
from agentfly.resources.spec import Environment
from agentfly.rewards import reward
from agentfly.testing import GuessEnv
from agentfly.tools import tool
from agentfly.types import Task, ToolResult


class Lamp:
    """A lamp with a switch."""

    placement: ClassVar[str] = "loop"
    needs: ClassVar[str] = "a wall"

    def __init__(self) -> None:
        self.on = False
        self.thread = ""

    def reset(self, task: Task) -> str:
        self.on, self.thread = False, threading.current_thread().name
        return "It is dark."

    def press(self, how: str) -> ToolResult:
        if how == "softly":
            return ToolResult(observation="nothing", reward=0.25)
        self.on = True
        return ToolResult(observation=f"light, {how}", done=True)

    def admissible(self) -> list[str]:
        return ["softly", "hard"]

    def lit(self) -> bool:
        return self.on

    def close(self) -> None:
        self.on = False


class ThreadLamp(Lamp):
    placement: ClassVar[str] = "thread"


@pytest.fixture
def lamp(request: pytest.FixtureRequest) -> Iterator[type[Lamp]]:
    kind: Any = getattr(request, "param", Lamp)

    @tool(name="test_lamp_press")
    async def press(how: str, env: kind) -> ToolResult:
        """Press the switch.

        Args:
            how: softly or hard
        """
        value: Any = env.press(how)
        return value if isinstance(value, ToolResult) else await value

    @reward(name="test_lamp_lit")
    def lit(env: kind) -> float:
        return float(env.lit())

    plugins.register("envs", "test_lamp", kind)
    plugins.register("tasks", "test_lamp_tasks", make_tasks)
    yield kind
    for sort, name in (
        ("envs", "test_lamp"),
        ("tasks", "test_lamp_tasks"),
        ("tools", "test_lamp_press"),
        ("rewards", "test_lamp_lit"),
    ):
        del plugins._registered[sort][name]


def make_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"Make light ({split} {number})."} for number in range(count or 3)]


def lines(*given: str) -> Callable[[str], str]:
    waiting = list(given)

    def ask(prompt: str) -> str:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    return ask


def test_tools_and_rewards_belong_to_the_environment_they_ask_for(lamp: type[Lamp]) -> None:
    world = find_world("test_lamp")
    assert (world.summary, world.needs) == ("A lamp with a switch.", "a wall")
    assert world.tools == ("test_lamp_press",)
    assert world.rewards == ("test_lamp_lit",)
    assert world.tasks == ("test_lamp_tasks",)
    assert list(tools_of_world(world)) == ["test_lamp_press"]
    assert list(rewards_of_world(world)) == ["test_lamp_lit"]


def test_the_code_world_has_its_own_task_sets_and_tools() -> None:
    world = find_world("code")
    assert world.tasks == ("code", "easy_code", "gsm8k")
    assert {"code_interpreter", "python"} <= set(world.tools)
    assert "add" not in world.tools
    assert "arithmetic" not in world.tasks


def test_a_world_that_cannot_be_loaded_is_listed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    assert "nowhere_to_be_found" in describe_world(f"{tmp_path}/broken.py:World").problem


@pytest.mark.parametrize("lamp", [Lamp, ThreadLamp], indirect=True)
def test_a_person_plays_to_the_end_and_sees_the_reward(lamp: type[Lamp]) -> None:
    shown: list[str] = []
    world = find_world("test_lamp")
    (task,) = tasks_of_world(world, count=1)
    record = play(world, task, lines("help", "softly", 'test_lamp_press {"how": "hard"}', "never read"), shown.append)
    assert "Make light (train 0)." in shown[0]
    assert "It is dark." in shown[0]
    assert "softly\n  hard" in shown[1]
    assert shown[2:] == ["nothing", "light, hard", "test_lamp_lit: 1", "step rewards: 0.25"]
    assert [turn.calls[0].arguments["how"] for turn in record.turns] == ["softly", "hard"]


def test_quitting_early_is_scored_too(lamp: type[Lamp]) -> None:
    for ending in (("quit",), ()):
        shown: list[str] = []
        play(find_world("test_lamp"), tasks_of_world(find_world("test_lamp"), count=1)[0], lines(*ending), shown.append)
        assert shown[-1] == "test_lamp_lit: 0"


def test_a_bad_line_is_told_and_the_game_goes_on(lamp: type[Lamp]) -> None:
    shown: list[str] = []
    world = find_world("test_lamp")
    bad = ("test_lamp_press {", 'test_lamp_press {"hw": 1}', "test_lamp_press", "", "hard")
    play(world, tasks_of_world(world, count=1)[0], lines(*bad), shown.append)
    assert "not valid JSON" in shown[1]
    assert "hw" in shown[2]
    assert "missing argument" in shown[3]
    assert shown[4] == "light, hard"


def test_the_environment_is_closed_when_the_player_breaks_off(lamp: type[Lamp]) -> None:
    made: list[Lamp] = []

    class Seen(Lamp):
        def __init__(self) -> None:
            super().__init__()
            self.closed = False
            made.append(self)

        def close(self) -> None:
            self.closed = True

        def switch(self, how: str) -> str:
            """Press it."""
            return how

    plugins.register("envs", "test_lamp", Seen)
    before = threading.active_count()

    def ask(prompt: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(find_world("test_lamp"), Task("0", ()), ask, lambda text: None)
    assert [lamp.closed for lamp in made] == [True]  # type: ignore[attr-defined]
    assert threading.active_count() <= before


def test_a_world_without_tools_is_played_by_its_methods() -> None:
    shown: list[str] = []
    world = replace(find_world("guess"), rewards=(), tools=())  # whatever others in this process have registered for it
    tasks = tasks_of_world(world)
    assert [task.fields["secret"] for task in tasks] == [3, 8]
    play(world, tasks[1], lines("3", "guess 9", "8"), shown.append)
    assert shown[1:] == ["higher", "lower", "correct", "score: 1"]


def test_a_world_with_nothing_to_do_is_refused() -> None:
    class Silent(GuessEnv):
        def reset(self, task: Task) -> None: ...

    plugins.register("envs", "test_silent", Silent)
    try:
        with pytest.raises(ConfigError, match="nothing to play with"):
            play(find_world("test_silent"), Task("0", ()), lines(), lambda text: None)
    finally:
        del plugins._registered["envs"]["test_silent"]


def test_a_task_with_an_answer_is_scored_where_the_world_has_no_reward_for_it(lamp: type[Lamp]) -> None:
    shown: list[str] = []
    play(find_world("test_lamp"), Task("0", (), {"answer": "ten lux"}), lines("answer Ten lux."), shown.append)
    assert shown[-2:] == ["test_lamp_lit: 0", "qa_exact_match: 1"]


def test_an_answer_ends_the_game_and_is_what_rewards_read() -> None:
    shown: list[str] = []
    world = find_world("code")
    task = tasks_of_world(world, "easy_code", "test", 1)[0]
    play(world, task, lines(f"answer {task.fields['answer']}"), shown.append)
    assert "code_answer: 1" in shown


def test_play_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Environment):
        needs: ClassVar[str] = "Java"

        async def reset(self, task: Task) -> str:
            await asyncio.sleep(0.3)
            return "ready"

        async def step(self, text: str) -> str:
            """Wait and answer."""
            await asyncio.sleep(0.3)
            return "done"

    monkeypatch.setattr("agentfly.envs.play.PATIENCE_S", 0.05)
    plugins.register("envs", "test_slow", Slow)
    shown: list[str] = []
    play(find_world("test_slow"), Task("0", ()), lines("step x"), shown.append)
    assert shown[0].startswith("waiting for test_slow to start (it needs Java): 0.05 s so far")
    assert any(text.startswith("waiting for test_slow to answer") for text in shown)
    assert "done" in shown


def test_play_gives_up_at_once_where_its_words_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Environment):
        async def reset(self, task: Task) -> str:
            await asyncio.sleep(600)
            return ""

        async def step(self, text: str) -> str:
            """Never called."""
            return ""

    def say(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("agentfly.envs.play.PATIENCE_S", 0.05)
    plugins.register("envs", "test_stuck", Stuck)
    began = time.monotonic()
    with pytest.raises(BrokenPipeError):
        play(find_world("test_stuck"), Task("0", ()), lines(), say)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("figures", "shown"),
    [
        ({"start_s": 8.3659e-05}, "start 84 µs"),
        ({"start_s": 0.0123, "steps_per_s": 123456.7}, "start 12 ms, steps 123,457/s"),
        ({"start_s": 65.2, "memory_kb": 3.4}, "start 65 s, memory 3.4 KB"),
        ({"memory_kb": 250_000.0, "steps_per_s": 0.25}, "memory 244 MB, steps 0.25/s"),
        ({"start_s": 0.0, "memory_kb": -1.5}, "start 0 µs, memory -1.5 KB"),
    ],
)
def test_figures_of_a_check_are_in_units_of_their_size(figures: dict[str, float], shown: str) -> None:
    assert str(Report("w", [], figures)).endswith(f"  {shown}")
