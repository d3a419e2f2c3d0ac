"""CONTRIBUTING's table "Where does it go?": each thing is added to a copy of the package, and the table's command checks it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAME = "blinker"


def commands() -> dict[str, str]:
    """Returns the command that checks an addition, the last column of the table, by what is added."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where does it go?")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ") and "`" in line]
    return {cells[0]: cells[-1].strip("`") for cells in lines}


class Copy:
    """A copy of the package and its tests, without the weights of the bundled models, which it links."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        left_out = shutil.ignore_patterns("__pycache__", "pocket")
        shutil.copytree(ROOT / "src" / "agentfly", folder / "src" / "agentfly", ignore=left_out)
        (folder / "src" / "agentfly" / "pocket").symlink_to(ROOT / "src" / "agentfly" / "pocket")
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "recipes").symlink_to(ROOT / "recipes")
        shutil.copy(ROOT / "pyproject.toml", folder)

    def write(self, path: str, text: str) -> None:
        file = self.folder / "src" / "agentfly" / path
        assert not file.exists()
        file.write_text(text, encoding="utf-8")

    def insert(self, path: str, mark: str, text: str, *, after: bool = False) -> None:
        """Write a text before the first line that begins with `mark`, or after it. Paths of tests begin with tests/."""
        file = self.folder / path if path.startswith("tests/") else self.folder / "src" / "agentfly" / path
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        at = next(index for index, line in enumerate(lines) if line.lstrip().startswith(mark)) + after
        file.write_text("".join([*lines[:at], text, *lines[at:]]), encoding="utf-8")

    def name(self, kind: str, target: str) -> None:
        self.insert("builtin_names.toml", f"[{kind}]", f'{NAME} = "agentfly.{target}"\n', after=True)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(command.replace("NAME", NAME))
        program = [sys.executable, "-m", "agentfly"] if words[0] == "agentfly" else [sys.executable]
        environ = {**os.environ, "PYTHONPATH": str(self.folder / "src")}
        return subprocess.run(
            [*program, *words[1:]], cwd=self.folder, env=environ, capture_output=True, text=True, timeout=600, check=False
        )


def add_algorithm(copy: Copy) -> None:
    copy.insert(
        "learn/algorithms/advantages.py",
        "def rloo(",
        "def against_median(rewards: Sequence[float]) -> list[float]:\n"
        '    """Reward against the median of the group."""\n'
        "    return [reward - sorted(rewards)[len(rewards) // 2] for reward in rewards]\n\n\n",
    )
    copy.insert(
        "learn/algorithms/__init__.py",
        "ALGORITHMS:",
        f'SAMPLE = Algorithm(\n    name="{NAME}",\n    description="Reward against the group\'s median.",\n    paper="",\n'
        "    credit=lambda chains, settings: _per_group(chains, settings, adv.against_median),\n    needs_group=True,\n)\n\n",
    )
    copy.name("algorithms", "learn.algorithms:SAMPLE")


WORLD = '''"""A lamp that has to be switched on."""

from agentfly.errors import ToolError
from agentfly.types import Task, ToolResult


class Lamp:
    """The right one of ten switches lights it."""

    def reset(self, task: Task) -> str:
        self.right, self.score, self.done = task.fields["right"], 0.0, False
        return f"lamp {self.right * 7 % 10}, ten switches"

    def press(self, switch: int) -> ToolResult:
        if self.done:
            raise ToolError("it is over")
        self.done, self.score = True, float(switch == self.right)
        return ToolResult(observation="light" if self.score else "dark", done=True)

    def close(self) -> None: ...

    @staticmethod
    def conformance() -> dict:
        return {
            "tasks": [{"right": 1}, {"right": 2}],
            "actions": lambda rng, seen: ("press", {"switch": rng.randrange(10)}),
            "solver": lambda env, task: env.press(env.right),
            "score": lambda env, task: env.score,
        }
'''


def add_world(copy: Copy) -> None:
    copy.write(f"envs/{NAME}.py", WORLD)
    copy.name("envs", f"envs.{NAME}:Lamp")


def add_engine(copy: Copy) -> None:
    copy.write(
        f"engines/{NAME}_engine.py",
        "from ..schema import Count\nfrom .local import LocalEngine, load_model\nfrom .options import LocalOptions\n\n\n"
        "class SampleEngine(LocalEngine):\n"
        "    def __init__(self, name: str, *, max_batch: Count | None = None) -> None:\n"
        "        super().__init__(*load_model(name), LocalOptions(max_batch=max_batch))\n",
    )
    copy.name("engines", f"engines.{NAME}_engine:SampleEngine")


def add_tracker(copy: Copy) -> None:
    copy.write(
        f"watch/trackers/{NAME}_tracker.py",
        "class SampleTracker:\n    def __init__(self, directory, config, name):\n"
        "        self._file = open(directory / 'rows', 'a')\n\n"
        "    def log(self, metrics, step):\n        print(step, len(metrics), file=self._file)\n\n"
        "    def close(self):\n        self._file.close()\n",
    )
    copy.name("trackers", f"watch.trackers.{NAME}_tracker:SampleTracker")


def add_sampler(copy: Copy) -> None:
    copy.insert(
        "training/samplers.py",
        "class CurriculumSampler",
        "class SampleSampler(EpochSampler):\n"
        "    def draw(self) -> int:\n        return self._num_rows - 1 - super().draw()\n\n\n",
    )
    copy.name("samplers", "training.samplers:SampleSampler")


def add_agent(copy: Copy) -> None:
    copy.write(
        f"agents/{NAME}.py",
        "from ..types import Action, Completion, Message, Task\nfrom .base import BaseAgent\n\n\n"
        "class SampleAgent(BaseAgent):\n"
        "    def start(self, task: Task) -> list[Message]:\n        return list(task.messages)\n\n"
        "    def parse(self, completion: Completion) -> Action:\n"
        "        return Action(answer=completion.text.strip() or None)\n",
    )
    copy.name("agents", f"agents.{NAME}:SampleAgent")


def add_parser(copy: Copy) -> None:
    copy.insert("render/parsers/families.py", "hermes = ", f'{NAME} = JsonCalls(marks=(("<sample>", "</sample>"),))\n')
    copy.name("parsers", f"render.parsers.families:{NAME}")


def add_placement(copy: Copy) -> None:
    copy.write(
        f"resources/backends/{NAME}.py",
        "from .thread import ThreadBackend\n\n\nclass SampleBackend(ThreadBackend):\n    pass\n",
    )
    copy.insert("resources/placements.py", '"loop": (', f'    "{NAME}": ("{NAME}:SampleBackend", None),\n')


def add_check(copy: Copy) -> None:
    copy.insert(
        "envs/check_conduct.py",
        "async def readable(",
        "async def greets(exam: Examination) -> None:\n"
        "    async with exam.subject() as subject:\n"
        "        if await subject.reset(exam.tasks[0]) == '':\n"
        "            raise Failed('the first observation is empty')\n\n\n",
    )
    copy.insert(
        "envs/check.py",
        '("observations and scores can be read"',
        f'            ("{NAME}: the first observation says something", partial(check_conduct.greets, self)),\n',
    )
    copy.insert(
        "tests/envs/test_check.py",
        "FAULTS",
        "class Silent(Door):\n    def reset(self, task):\n        super().reset(task)\n        return ''\n\n\n",
    )
    copy.insert("tests/envs/test_check.py", "(Moody,", f'    (Silent, "{NAME}: the first observation says something"),\n')


ADDITIONS: dict[str, Callable[[Copy], None]] = {
    "an algorithm": add_algorithm,
    "a world": add_world,
    "an engine": add_engine,
    "a tracker": add_tracker,
    "a sampler of tasks": add_sampler,
    "an agent": add_agent,
    "a call parser": add_parser,
    "a placement": add_placement,
    "an environment check": add_check,
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("copy"))


def test_the_table_has_the_rows_that_are_tried() -> None:
    assert {*ADDITIONS, "an optional package"} == set(commands())


@pytest.mark.parametrize("thing", ADDITIONS)
def test_what_is_added_as_the_table_says_passes_its_command(thing: str, copy: Copy) -> None:
    ADDITIONS[thing](copy)
    # An unknown name is refused, and -k without a match fails: the command does look at what was added.
    run = copy.run(commands()[thing])
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
