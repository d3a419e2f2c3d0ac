"""The conformance kit finds faults that only whole episodes, other instances or another process show; each is planted here."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentfly import ToolError, ToolResult
from agentfly.envs.check import Report, check_env
from agentfly.types import Task

SHUFFLE = random.shuffle


class Box:
    """Open the right one of ten boxes."""

    def reset(self, task: Task) -> str:
        self.right, self.done, self.score = random.Random(task.fields["seed"]).randrange(10), False, 0.0
        return f"ten boxes, for seed {task.fields['seed']}"

    def open(self, number: int) -> Any:
        if self.done:
            raise ToolError("it is over")
        self.done, self.score = True, float(number == self.right)
        return ToolResult(observation="right" if self.score else "wrong", done=True)

    def close(self) -> None: ...


class AsyncBox(Box):
    async def reset(self, task: Task) -> str:  # type: ignore[override]
        return Box.reset(self, task)

    async def open(self, number: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return Box.open(self, number)


class RewardAboveOne(Box):
    def open(self, number: int) -> Any:
        result = super().open(number)
        self.score *= 25.0
        return result


class RewardNaN(Box):
    def open(self, number: int) -> Any:
        result = super().open(number)
        self.score = math.nan if self.score else 0.0
        return result


class RewardInfinite(Box):
    """In the rewards of its calls, beside a score that is fine."""

    def open(self, number: int) -> Any:
        return ToolResult(observation=super().open(number).observation, reward=math.inf if self.score else 0.0, done=True)


class IgnoresTheSeed(Box):
    def reset(self, task: Task) -> str:
        super().reset(task)
        self.right = 7
        return "ten boxes"


class DrawnAnew(Box):
    def reset(self, task: Task) -> str:
        said = super().reset(task)
        self.right = random.SystemRandom().randrange(10)
        return said


class DrawnOn(Box):
    """The first reset is seeded; later ones go on with the generator of the instance."""

    rng: random.Random | None = None

    def reset(self, task: Task) -> str:
        said = super().reset(task)
        self.rng = self.rng or random.Random(task.fields["seed"])
        self.right = self.rng.randrange(10)
        return said


class OpenStaysOpen(Box):
    """Once one has won, all win."""

    won: ClassVar[list[int]] = []

    def open(self, number: int) -> Any:
        result = super().open(number)
        if self.score:
            OpenStaysOpen.won.append(1)
        self.score = 1.0 if OpenStaysOpen.won else 0.0
        return result


VISITS: dict[str, int] = {}


class CountsVisits(Box):
    """The module remembers; only a fresh process shows it, as every reset here says the same from the second on."""

    def open(self, number: int) -> Any:
        result = super().open(number)
        first, VISITS["open"] = "open" not in VISITS, 1
        return ToolResult(observation=f"{result.observation}{', the first ever' if first else ''}", done=True)


class CannotTravel(Box):
    def open(self, number: int) -> Any:
        super().open(number)
        return {"observation": "opened", "done": True, "lock": threading.Lock()}


FIRST = random.Random(0).randrange(10)
"""What a random player opens first: slow environments take their time for it alone, so that the examination is quick."""


class BlocksTheLoop(AsyncBox):
    async def open(self, number: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        time.sleep(0.2 if number == FIRST else 0)  # noqa: ASYNC251 - the fault
        return Box.open(self, number)


class SlowReset(Box):
    def reset(self, task: Task) -> str:
        time.sleep(0.15 if task.fields["seed"] == 2 else 0)
        return super().reset(task)


class Prints(Box):
    def open(self, number: int) -> Any:
        print("DEBUG", number)
        return super().open(number)


class PrintsByDescriptor(Box):
    def reset(self, task: Task) -> str:
        os.write(1, b"reset\n")
        return super().reset(task)


class LeavesFolders(Box):
    def reset(self, task: Task) -> str:
        tempfile.mkdtemp(prefix="box-left-")
        return super().reset(task)


class LeavesFiles(Box):
    def __init__(self) -> None:
        tempfile.NamedTemporaryFile(delete=False).close()


class LeavesFilesHere(Box):
    def open(self, number: int) -> Any:
        Path(f"opened-{time.monotonic_ns()}.txt").write_text("")
        return super().open(number)


class ChangesFolder(Box):
    def reset(self, task: Task) -> str:
        os.chdir("/")
        return super().reset(task)


class ChangesVariables(Box):
    def reset(self, task: Task) -> str:
        os.environ["BOX"] = "1"
        return super().reset(task)


class ChangesUmask(Box):
    def open(self, number: int) -> Any:
        os.umask(0o007)
        return super().open(number)


class ChangesPath(Box):
    def reset(self, task: Task) -> str:
        sys.path.append(f"/box/{len(sys.path)}")
        return super().reset(task)


class SeedsAll(Box):
    def reset(self, task: Task) -> str:
        random.seed(task.fields["seed"])
        return super().reset(task)


class Stairs:
    """Three steps up, then it is over."""

    def reset(self, task: Task) -> str:
        self.place, self.height = 0, task.fields["seed"] + 2
        return "stairs"

    def go(self, up: bool) -> Any:
        if self.place >= self.height:
            raise ToolError("it is over")
        self.place += up
        return self.told()

    def told(self) -> ToolResult:
        return ToolResult(observation=f"step {self.place}", done=self.place >= self.height)

    def score(self) -> float:
        return float(self.place >= self.height)

    def close(self) -> None: ...


class DoneAtOnce(Stairs):
    def told(self) -> ToolResult:
        return ToolResult(observation=f"step {self.place}", done=True)


class NeverDone(Stairs):
    def told(self) -> ToolResult:
        return ToolResult(observation=f"step {self.place}")


class NeverDoneInResults(Box):
    """The attribute says it; a chain reads the results."""

    def open(self, number: int) -> Any:
        return ToolResult(observation=super().open(number).observation)


def check(make: type, **options: Any) -> Report:
    stairs = issubclass(make, Stairs)

    def climb(env: Any, task: Task) -> None:
        for _ in range(task.fields["seed"] + 2):
            env.go(up=True)

    def act(rng: random.Random, seen: Any) -> tuple[str, dict[str, Any]]:
        return ("go", {"up": rng.random() < 0.2}) if stairs else ("open", {"number": rng.randrange(10)})

    solver = climb if stairs else lambda env, task: env.open(number=env.right)
    return check_env(make, [{"seed": 1}, {"seed": 2}], actions=act, solver=solver, **{"timeout_s": 20.0, **options})


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The faults change the process and leave files: both end with the test."""
    (tmp_path / "boxes.txt").write_text("ten")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    umask, path = os.umask(0o022), list(sys.path)
    os.umask(umask)
    yield
    gc.enable()
    os.umask(umask)
    sys.path[:] = path


@pytest.mark.parametrize("make", [Box, AsyncBox, Stairs])
def test_a_good_environment_passes_all_checks(make: type) -> None:
    report = check(make)
    assert report.complete, str(report)
    assert report.figures["reset_s"] > 0


class LongText(Box):
    def open(self, number: int) -> Any:
        return ToolResult(observation="wood " * 40_000, done=Box.open(self, number).done)


class Transcript(Stairs):
    """Each observation repeats all earlier ones."""

    def reset(self, task: Task) -> str:
        self.said = ""
        return Stairs.reset(self, task)

    def told(self) -> ToolResult:
        self.said += "one more step, " * 50
        return ToolResult(observation=self.said, done=self.place >= self.height)


class ScoreIsText(Box):
    def open(self, number: int) -> Any:
        result = Box.open(self, number)
        self.score: Any = str(self.score)
        return result


class ScoreMovesWhenRead(Box):
    reads = 0

    @property
    def score(self) -> float:
        self.reads += 1
        return self._score + 0.001 * self.reads

    @score.setter
    def score(self, value: float) -> None:
        self._score = value


class ChangesTask(Box):
    def reset(self, task: Task) -> str:
        task.fields["opened"] = True  # type: ignore[index]
        return Box.reset(self, task)


class PaysForHaste(Box):
    def reset(self, task: Task) -> str:
        self.began = time.monotonic()
        return Box.reset(self, task)

    def open(self, number: int) -> Any:
        late = time.monotonic() - self.began > 1
        return ToolResult(observation=f"{Box.open(self, number).observation}{', late' if late else ''}", done=True)


class ReadsHere(Box):
    def reset(self, task: Task) -> str:
        return f"{Path('boxes.txt').read_text()} {Box.reset(self, task)}"


class LeavesTasks(AsyncBox):
    async def reset(self, task: Task) -> str:  # type: ignore[override]
        TICKING.append(asyncio.ensure_future(asyncio.sleep(1000)))
        return await AsyncBox.reset(self, task)


TICKING: list[Any] = []


class StopsCollection(Box):
    def reset(self, task: Task) -> str:
        gc.disable()
        return Box.reset(self, task)


class ReplacesStdout(Box):
    def reset(self, task: Task) -> str:
        sys.stdout = sys.stderr
        return Box.reset(self, task)


class Exits(Box):
    def open(self, number: int) -> Any:
        sys.exit("wrong box")


class ExitsInTheLoop(AsyncBox):
    async def open(self, number: int) -> Any:  # type: ignore[override]
        sys.exit("wrong box")


class ReplacesAFunction(Box):
    def reset(self, task: Task) -> str:
        random.shuffle = lambda items: None  # type: ignore[assignment]
        return Box.reset(self, task)


async def note() -> None: ...


class ForgetsToAwait(AsyncBox):
    async def open(self, number: int) -> Any:  # type: ignore[override]
        note()
        return Box.open(self, number)


class ForgetsToAwaitInAThread(Box):
    def open(self, number: int) -> Any:
        note()
        return Box.open(self, number)


FAULTS = [
    (RewardAboveOne, "scores are finite and at most full"),
    (RewardNaN, "scores are finite and at most full"),
    (RewardNaN, "the solver's score is full"),
    (RewardInfinite, "scores are finite and at most full"),
    (IgnoresTheSeed, "two tasks are two games"),
    (DrawnAnew, "the solver plays the same episode again"),
    (DrawnOn, "the solver plays the same episode again"),
    (OpenStaysOpen, None),
    (CountsVisits, None),
    (CannotTravel, "plays alike in a worker process"),
    (BlocksTheLoop, "the event loop is not held up"),
    (SlowReset, "the event loop is not held up"),
    (Prints, "the process stays as it was"),
    (PrintsByDescriptor, "the process stays as it was"),
    (LeavesFolders, "memory and handles do not grow"),
    (LeavesFiles, "memory and handles do not grow"),
    (LeavesFilesHere, "memory and handles do not grow"),
    (ChangesFolder, "the process stays as it was"),
    (ChangesVariables, "the process stays as it was"),
    (ChangesUmask, "the process stays as it was"),
    (ChangesPath, "the process stays as it was"),
    (SeedsAll, "the process stays as it was"),
    (DoneAtOnce, "the solver's last move ends the episode"),
    (NeverDone, "the solver's last move ends the episode"),
    (NeverDoneInResults, "the solver's last move ends the episode"),
    (LongText, "observations and scores can be read"),
    (Transcript, "observations and scores can be read"),
    (ScoreIsText, "observations and scores can be read"),
    (ScoreMovesWhenRead, "scores are finite and at most full"),
    (ChangesTask, "the process stays as it was"),
    (PaysForHaste, "plays alike in a worker process"),
    (ReadsHere, "plays alike in a worker process"),
    (LeavesTasks, "memory and handles do not grow"),
    (StopsCollection, "the process stays as it was"),
    (ReplacesStdout, "the process stays as it was"),
    (Exits, "observations and scores can be read"),
    (ExitsInTheLoop, "observations and scores can be read"),
    (ReplacesAFunction, "the process stays as it was"),
    (ForgetsToAwait, "the process stays as it was"),
    (ForgetsToAwaitInAThread, "the process stays as it was"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), FAULTS, ids=[f"{make.__name__}-{(name or '')[:12]}" for make, name in FAULTS])
def test_each_planted_fault_is_found(make: type, name: str | None) -> None:
    handler, here, variables = signal.getsignal(signal.SIGINT), os.getcwd(), dict(os.environ)
    OpenStaysOpen.won.clear()
    VISITS.clear()
    report = check(make)
    assert not report.ok, str(report)
    if name is not None:
        assert name in [each.name for each in report.failed], str(report)
        assert report[name].detail
    assert (signal.getsignal(signal.SIGINT), os.getcwd(), dict(os.environ)) == (handler, here, variables)
    assert random.shuffle is SHUFFLE


class HangsOnClose(Box):
    def close(self) -> None:
        STOP.wait(60)


class HangsInOpen(Box):
    def open(self, number: int) -> Any:
        STOP.wait(60)


class HangsInAsyncReset(AsyncBox):
    async def reset(self, task: Task) -> str:  # type: ignore[override]
        await asyncio.sleep(60)
        return ""


STOP = threading.Event()


@pytest.mark.parametrize(
    ("make", "call", "name"),
    [
        (HangsOnClose, "close", "starts and resets"),
        (HangsInOpen, "open", "observations and scores can be read"),
        (HangsInAsyncReset, "reset", "starts and resets"),
    ],
)
def test_the_first_hang_ends_the_examination_and_is_named(
    make: type, call: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    STOP.clear()
    try:
        with caplog.at_level(logging.WARNING):
            report = check(make, timeout_s=0.5)
    finally:
        STOP.set()
    assert [each.name for each in report.failed] == [name], str(report)
    assert f"{call} did not return within 0.5 s" in report[name].detail
    after = report.checks[report.checks.index(report[name]) + 1 :]
    assert {each.detail for each in after} == {f"{call} hangs: see {name!r}"}
    assert len(caplog.records) <= 2  # one instance, and not one for each check
    assert all(f"in the check {name!r}" in record.getMessage() for record in caplog.records)
