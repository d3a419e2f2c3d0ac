"""The conformance kit: a good environment passes, and each fault that one can have is found."""

from __future__ import annotations

import asyncio
import contextlib
import io
import mmap
import os
import random
import re
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar

import numpy as np
import pytest

from agentfly.cli import main
from agentfly.envs.check import Report, check_env
from agentfly.errors import ConfigError, WorldError
from agentfly.testing import GuessEnv
from agentfly.types import Task, ToolResult

TASKS: list[dict[str, Any]] = [{"secret": 3}, {"secret": 8}]


class Door:
    """A good one: turn the knob to the right number, then it is open and done. The hint depends on the seed of the task."""

    def __init__(self) -> None:
        self.secret = 0
        self.done = self.open = False
        self.tries = 0

    def reset(self, task: Task) -> str:
        self.secret, self.done, self.open, self.tries = task.fields["secret"], False, False, 0
        return f"a door with a knob; hint {random.Random(self.secret).randint(0, 99)}"

    def turn(self, n: int) -> ToolResult:
        if self.done:
            raise WorldError("it is over")
        self.tries += 1
        self.open = n == self.secret
        self.done = self.open
        return ToolResult(observation=f"click {self.tries}", reward=1.0 if self.open else 0.0, done=self.open)

    def score(self) -> float:
        return 1.0 if self.open else 0.0

    def close(self) -> None:
        self.done = True


class AsyncDoor(Door):
    async def state_key(self) -> str:
        return f"{self.open} after {self.tries}"

    async def reset(self, task: Task) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return Door.reset(self, task)

    async def turn(self, n: int) -> ToolResult:  # type: ignore[override]
        await asyncio.sleep(0)
        return Door.turn(self, n)


def act(rng: random.Random, observation: Any) -> tuple[str, dict[str, Any]]:
    return "turn", {"n": rng.randint(1, 50)}


def solve(door: Any, task: Task) -> Any:
    return door.turn(n=task.fields["secret"])


def check(make: Any, **options: Any) -> Report:
    return check_env(make, TASKS, **{"actions": act, "solver": solve, "timeout_s": 2.0, **options})


@pytest.mark.parametrize("make", [Door, AsyncDoor], ids=["sync", "async"])
def test_a_good_environment_passes(make: type) -> None:
    report = check(make)
    assert report.complete, str(report)
    assert report["states have names"].detail == ("" if make is AsyncDoor else "it has no `state_key`")
    assert set(report.figures) == {"start_s", "reset_s", "steps_per_s", "memory_kb"}
    assert re.search(r"start [\d.]+ (s|ms|µs), reset [\d.]+ (s|ms|µs), steps [\d,.]+/s, memory [-\d,.]+ (KB|MB)$", str(report))


def test_what_is_not_declared_is_reported_as_not_checked() -> None:
    report = check_env(GuessEnv, TASKS)
    assert report.ok
    assert not report.complete
    skipped = {each.name for each in report.checks if each.status == "not checked"}
    assert skipped >= {"same seed, same episode", "the solver's score is full", "no reward without acting"}
    assert report["reset leaves no trace"].detail.startswith("of the first observation alone")


def test_the_example_environment_passes_with_few_words() -> None:
    report = check_env(
        "guess",
        TASKS,
        actions=[("guess", {"n": n}) for n in range(1, 11)],
        solver=lambda env, task: env.guess(task.fields["secret"]),
        score=lambda env, task: float(env.solved),
    )
    assert report.ok, str(report)
    assert report["the solver's score is full"].status == "passed"


def test_an_environment_that_does_not_start_is_reported_and_not_raised() -> None:
    report = check_env(GuessEnv)
    assert not report.ok
    assert "'secret' must be a whole number" in report["starts and resets"].detail
    assert all(each.status == "not checked" for each in report.checks[1:])


def test_a_wrong_call_of_the_check_itself_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no method 'push'"):
        check(Door, actions=[("push", {})])
    with pytest.raises(ConfigError, match="at least one task"):
        check_env(Door, [])


# ---- one fault each

COUNT = iter(range(1_000_000))


class Moody(Door):
    def reset(self, task: Task) -> str:
        return super().reset(task) + f" {next(COUNT)}"


class Dicey(Door):
    def turn(self, n: int) -> ToolResult:
        result = super().turn(n)
        return ToolResult(observation=f"{result.observation} {next(COUNT)}", reward=result.reward, done=result.done)


class Forgetful(Door):
    """Forgets to forget."""

    def reset(self, task: Task) -> str:
        tries = self.tries
        text = super().reset(task)
        self.tries = tries
        return text


class Generous(Door):
    """The last chain's open door pays the next one."""

    paid = False

    def turn(self, n: int) -> ToolResult:
        result = super().turn(n)
        self.paid |= self.open
        return result

    def score(self) -> float:
        return 1.0 if self.paid else 0.0


class Handout(Door):
    """A closed door is half the score."""

    def score(self) -> float:
        return 1.0 if self.open else 0.5


class Communal(Door):
    shared: ClassVar[dict[str, int]] = {"tries": 0}

    def reset(self, task: Task) -> str:
        self.shared["tries"] = 0
        return super().reset(task)

    def turn(self, n: int) -> ToolResult:
        self.shared["tries"] += 1
        result = super().turn(n)
        return ToolResult(observation=f"click {self.shared['tries']}", reward=result.reward, done=result.done)


class Halfway(AsyncDoor):
    """A call that is cancelled leaves its lock taken; nothing but a new instance helps."""

    jammed = False

    async def turn(self, n: int) -> ToolResult:  # type: ignore[override]
        was, self.jammed = self.jammed, True
        await asyncio.sleep(0)
        result = Door.turn(self, n)
        self.jammed = False
        return ToolResult(observation="jammed", error="raised") if was else result


class Stubborn(AsyncDoor):
    jammed = False

    async def turn(self, n: int) -> ToolResult:  # type: ignore[override]
        if self.jammed:
            await asyncio.sleep(3600)
        self.jammed = True
        await asyncio.sleep(0)
        self.jammed = False
        return Door.turn(self, n)


class ClosesOnce(Door):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True


class Endless(Door):
    def turn(self, n: int) -> ToolResult:
        self.done = False
        return super().turn(n)


class Unsolvable(Door):
    def score(self) -> float:
        return 0.9 if self.open else 0.0


class Open(Door):
    def score(self) -> float:
        return 1.0


class AnyKnob(Door):
    def score(self) -> float:
        return 1.0 if self.tries else 0.0


class Hoarder(Door):
    kept: ClassVar[list[bytes]] = []

    def reset(self, task: Task) -> str:
        self.kept.append(os.urandom(4096))
        return super().reset(task)


class Leaky(Door):
    def reset(self, task: Task) -> str:
        self.handles = [*getattr(self, "handles", []), open(os.devnull)]  # noqa: SIM115
        return super().reset(task)

    def close(self) -> None:
        for handle in getattr(self, "handles", []):
            handle.close()


class Thready(Door):
    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()
        STOPS.append(self.stop)
        threading.Thread(target=self.stop.wait, args=(30,), daemon=True).start()


STOPS: list[threading.Event] = []


class Hanging(Door):
    def turn(self, n: int) -> ToolResult:
        while True:
            time.sleep(0.01)


FIRST = random.Random(0).randint(1, 50)
"""The dials that a random policy turns first: these two take their time for it, so that it can be given up."""


class Locked(Door):
    """A call that is given up leaves a lock of the class taken."""

    busy: ClassVar[list[int]] = []

    def turn(self, n: int) -> ToolResult:
        jammed = bool(self.busy)
        self.busy.append(n)
        for _ in range(40 if n == FIRST else 0):
            time.sleep(0.001)
        self.busy.pop()
        return ToolResult(observation="jammed", error="raised") if jammed else super().turn(n)


class Deaf(Door):
    """Goes on when it is told to stop."""

    def turn(self, n: int) -> ToolResult:
        try:
            for _ in range(40 if n == FIRST else 0):
                time.sleep(0.001)
        finally:
            if n == FIRST and sys.exc_info()[0] is not None:
                time.sleep(5)
        return super().turn(n)


class Breeder(Door):
    """Starts a process and forgets it."""

    def reset(self, task: Task) -> str:
        CHILDREN.append(subprocess.Popen(["sleep", "60"]))
        return super().reset(task)


class Native(Door):
    """Keeps memory that Python does not know of."""

    def reset(self, task: Task) -> str:
        memory = mmap.mmap(-1, 1 << 20)
        memory.write(b"x" * (1 << 20))
        MAPS.append(memory)
        return super().reset(task)


CHILDREN: list[subprocess.Popen[bytes]] = []
MAPS: list[mmap.mmap] = []


class Corridor:
    """A world with `step(action)` and thousands of actions, of which few do anything; it pays at the end of the corridor."""

    WORDS: ClassVar[list[str]] = ["go on", *(f"look at stone {n}" for n in range(5_000))]
    result: ClassVar[str] = "tuple"

    def __init__(self) -> None:
        self.place, self.length = 0, 1

    def reset(self, task: Task) -> dict[str, Any]:
        self.place, self.length = 0, task.fields["length"]
        return {"place": 0}

    def step(self, action: str) -> Any:
        if self.place >= self.length:
            raise WorldError("the episode is over")
        self.place += action == "go on"
        over = self.place >= self.length
        if self.result == "tuple":
            return {"place": self.place}, float(over), over, {}
        if self.result == "dict":
            return {"observation": self.place, "reward": float(over), "done": over}
        return {"place": self.place}, float(over), over, False, {}

    def words(self) -> list[str]:
        return self.WORDS

    def close(self) -> None:
        self.place = self.length


class DictCorridor(Corridor):
    result = "dict"


class GymCorridor(Corridor):
    result = "five"


class NumpyCorridor(Corridor):
    """Rewards and ends are NumPy's, as those of many Gymnasium environments."""

    def step(self, action: str) -> Any:
        seen, paid, over, more = super().step(action)
        return seen, np.float32(paid), np.bool_(over), more


class Unending(Corridor):
    def step(self, action: str) -> Any:
        self.place = min(self.place, self.length - 1)
        return super().step(action)


class Blank(Corridor):
    """Takes nothing for the way out."""

    def step(self, action: str) -> Any:
        if not action:
            self.place = self.length - 1
            action = "go on"
        return super().step(action)


def walk(world: Any, task: Task) -> None:
    for _ in range(task.fields["length"]):
        world.step("go on")


def check_corridor(make: type, actions: Any = Corridor.WORDS) -> Report:
    return check_env(make, [{"length": 2}, {"length": 4}], actions=actions, solver=walk, timeout_s=20.0)


@pytest.mark.parametrize("make", [Corridor, DictCorridor, GymCorridor, NumpyCorridor])
def test_a_world_with_steps_and_thousands_of_actions_passes_and_its_end_and_pay_are_seen(make: type) -> None:
    report = check_corridor(make)
    assert report.complete, str(report)


def test_actions_may_ask_the_world_what_can_be_done() -> None:
    asked: list[int] = []

    def choose(rng: random.Random, seen: Any, world: Corridor) -> str:
        words = world.words()
        asked.append(len(words))
        return rng.choice(words)

    report = check_corridor(Corridor, choose)
    assert report.complete, str(report)
    assert set(asked) == {5_001}


@pytest.mark.parametrize(("make", "name"), [(Unending, "calls after the end are refused"), (Blank, "no reward without acting")])
def test_a_fault_of_a_world_with_steps_is_found(make: type, name: str) -> None:
    report = check_corridor(make)
    assert [each.name for each in report.failed] == [name], str(report)


def test_a_world_of_ones_own_is_checked_by_its_file_and_its_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user does it, on the command line; what the class does not tell is not checked, and is said so."""
    source = """
class Lamp:
    def reset(self, task):
        self.lit = False
        return "dark"
    def switch(self):
        self.lit = True
    def close(self):
        self.lit = False
"""
    told = """
    @staticmethod
    def conformance():
        return {
            "actions": [("switch", {})],
            "solver": lambda lamp, task: lamp.switch(),
            "score": lambda lamp, task: float(lamp.lit),
        }
"""
    (tmp_path / "lamps_of_mine.py").write_text(source + told)
    (tmp_path / "bare_lamp.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lamps_of_mine.py:Lamp", "lamps_of_mine:Lamp"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(["envs", "check", name]) == 1  # one random action solves it: that is a finding
        assert "FAILED  acting at random is not enough" in out.getvalue()
        assert "ok  the solver's score is full" in out.getvalue()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["envs", "check", "bare_lamp.py:Lamp"]) == 0
    assert "not checked  same seed, same episode: give `actions`" in out.getvalue()


def test_the_command_says_how_to_play_and_takes_rows_from_a_file(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cities.py").write_text(
        """
class City:
    def reset(self, task): return task.fields["city"]
    def close(self): pass
class Odd(City):
    def conformance(self): return {}
class Strange(City):
    @staticmethod
    def conformance(): return {"players": 2}
"""
    )
    (tmp_path / "rows.jsonl").write_text('{"city": "Oslo"}\n{"city": "Rome"}\n')
    monkeypatch.chdir(tmp_path)
    assert main(["envs", "check", "cities.py:City"]) == 1
    said = capsys.readouterr().out
    assert "reset reads 'city', which task check does not have: give `tasks` with that field" in said
    assert "say tasks and actions and solver in a static method `conformance()` of City" in said
    assert main(["envs", "check", "cities.py:City", "--tasks", "rows.jsonl"]) == 0
    assert "say actions and solver in" in capsys.readouterr().out
    for name, sentence in (("Odd", "make it a @staticmethod"), ("Strange", "returns 'players', which check_env does not take")):
        assert main(["envs", "check", f"cities.py:{name}"]) == 2
        assert sentence in capsys.readouterr().err


class Textless(Door):
    def state_key(self) -> Any:
        return self.open, self.tries


class Restless(Door):
    def state_key(self) -> Any:
        return f"reading {next(COUNT)}"


class Personal(Door):
    def __init__(self) -> None:
        super().__init__()
        self.number = next(COUNT)

    def state_key(self) -> Any:
        return f"door {self.number}"


class Touchy(Door):
    def state_key(self) -> Any:
        self.tries += 1
        return "a door"


FAULTS = [
    (Textless, "states have names"),
    (Restless, "states have names"),
    (Personal, "states have names"),
    (Touchy, "states have names"),
    (Locked, "a cancelled call leaves it usable or closed"),
    (Deaf, "a cancelled call leaves it usable or closed"),
    (Breeder, "memory and handles do not grow"),
    (Native, "memory and handles do not grow"),
    (Moody, "same seed, same first observation"),
    (Dicey, "same seed, same episode"),
    (Forgetful, "reset leaves no trace"),
    (Generous, "no reward without acting"),
    (Handout, "no reward without acting"),
    (Communal, "instances do not influence each other"),
    (Halfway, "a cancelled call leaves it usable or closed"),
    (Stubborn, "a cancelled call leaves it usable or closed"),
    (ClosesOnce, "closing twice is fine"),
    (Endless, "calls after the end are refused"),
    (Unsolvable, "the solver's score is full"),
    (Open, "doing nothing is not enough"),
    (Open, "no reward without acting"),
    (AnyKnob, "acting at random is not enough"),
    (Hoarder, "memory and handles do not grow"),
    (Leaky, "memory and handles do not grow"),
    (Thready, "memory and handles do not grow"),
    (Hanging, "observations and scores can be read"),
]


@pytest.mark.parametrize(("make", "name"), FAULTS, ids=[f"{make.__name__}-{name[:20]}" for make, name in FAULTS])
def test_each_fault_is_found(make: type, name: str) -> None:
    try:
        report = check(make, timeout_s=0.1 if make is Hanging else 0.5 if make is Stubborn else 2.0 if make is Deaf else 20.0)
    finally:
        for stop in STOPS:
            stop.set()
        for child in CHILDREN:
            child.kill()
            child.wait(60)
        CHILDREN.clear()
        MAPS.clear()
    assert report[name].status == "failed", str(report)
    assert report[name].detail
