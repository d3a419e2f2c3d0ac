"""`ScienceWorld`: one simulator for one chain, as an environment.

A task is over when it is completed, has failed, or took too many moves; every later action is refused. The row of a task has
`task_name`, `variation` and optionally `simplifications`, `max_steps` (moves) and `clip` (`clip.py`). The simulator answers
unknown actions itself; an action that is no text, has control characters or is longer than `MAX_ACTION` is refused with one
sentence. A simulator whose JVM died is replaced at the next `reset`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...errors import ConfigError, MissingExtra, WorldError
from ...resources.spec import Cost, Environment
from ...types import Task, ToolResult
from .clip import clipped
from .java import NEEDS, missing
from .jvms import HEAP_MB, jvms
from .simulator import Simulator, SimulatorReply
from .tasks import check_row

MAX_ACTION = 500
MAX_STEPS = 100
OVER = "The task is over: no action counts any more."


class ScienceWorld(Environment):
    """A house with a laboratory: boil, measure, connect, grow, find and sort things by actions in words; needs Java."""

    cost: ClassVar[Cost] = Cost(cpu=0.1, memory_mb=2.0, start_s=2.0)
    task_set: ClassVar[str] = "scienceworld"
    needs: ClassVar[str] = NEEDS

    def __init__(
        self,
        simplifications: str = "",
        max_steps: int = MAX_STEPS,
        num_jvms: int | None = None,
        heap_mb: int = HEAP_MB,
    ) -> None:
        if sentence := missing():
            raise MissingExtra(sentence)
        self.simplifications = simplifications
        self.limit = _whole("max_steps", max_steps)
        self.description = ""
        self.score = 0.0
        """From 0 to 1; below 0 if the task has failed."""
        self.completed = self.done = False
        self.moves = 0
        self.deltas: list[float] = []
        """Change of the score by each action."""
        self._question = ""
        self._most = self.limit
        self._clip: int | None = None
        self._pool = jvms(num_jvms, heap_mb)
        self._simulator: Simulator | None = None

    async def reset(self, task: Task) -> str:
        """Load the variation of a task. Returns its description and the first observation."""
        name, variation, simplifications = check_row(task.fields, self.simplifications)
        self._most = _whole("max_steps", task.fields.get("max_steps", self.limit))
        clip = task.fields.get("clip")
        self._clip = None if clip is None else _whole("clip", clip)
        if self._simulator is None or not self._simulator.alive:
            await self.close()
            self._simulator = Simulator(self._pool)
        self.description, seen = await self._simulator.load(name, variation, simplifications)
        self.score, self.completed, self.done, self.moves, self.deltas = seen.score, False, False, seen.moves, []
        self._question = ""
        return f"{self.description}\n{clipped(seen.observation, self._clip)}"

    async def step(self, action: str) -> ToolResult:
        """Act. Returns the observation; `done` when the task is over."""
        simulator = self._open()
        if self.done:
            return ToolResult(observation=OVER, error="bad_arguments")
        text, refused = read_action(action)
        if refused:
            return ToolResult(observation=refused, error="bad_arguments")
        seen = await simulator.step(text)
        self._note(seen)
        return ToolResult(observation=clipped(seen.observation, self._clip), done=self.done)

    async def admissible(self) -> list[str]:
        """The forms of actions and the objects that can replace OBJ now; nothing after the end."""
        simulator = self._open()
        if self.done:
            return []
        names = ", ".join(sorted(await simulator.objects()))
        return [*(await simulator.actions()), f"OBJ is one of: {names}"]

    async def gold(self, task: Task) -> list[str]:
        """Actions that solve a task, from the simulator's agent. The task must be reset afterwards."""
        simulator = self._open()
        self.done = True
        return await simulator.gold(*check_row(task.fields, self.simplifications))

    async def state_key(self) -> str:
        """The room and what the agent holds, the score, and the question of an ambiguous action if one is open."""
        return "\n".join([*await self._open().surroundings(), f"{self.score:.6g}", self._question])

    async def close(self) -> None:
        simulator, self._simulator = self._simulator, None
        if simulator is not None:
            await simulator.close()

    missing = staticmethod(missing)

    @staticmethod
    def conformance() -> dict[str, Any]:
        """The arguments of `check_env`: the gold path has the full score, random actions do not."""
        tasks = [
            Task("lifespan", (), {"task_name": "lifespan-longest-lived", "variation": 8, "simplifications": "openDoors"}),
            Task("find", (), {"task_name": "find-non-living-thing", "variation": 60, "simplifications": "openDoors"}),
        ]
        actions = ["look around", "inventory", "open door to hallway", "go to hallway", "go to kitchen", "wait1", "dance"]
        return {
            "tasks": tasks,
            "actions": actions,
            "solver": play_gold,
            "do_nothing": lambda env, task: None,
            "timeout_s": 120.0,
        }

    def _open(self) -> Simulator:
        if self._simulator is None:
            raise WorldError("no task of ScienceWorld is open: call reset first")
        return self._simulator

    def _note(self, seen: SimulatorReply) -> None:
        """Note a reply. As in the published wrapper, a score below zero or too many moves end the task."""
        self.deltas.append(seen.score - self.score)
        self.score, self.moves = seen.score, seen.moves
        self.completed = seen.completed
        self._question = seen.observation if seen.observation.startswith("Ambiguous request") else ""
        self.done = seen.completed or seen.score < 0 or seen.moves > self._most


async def play_gold(env: ScienceWorld, task: Task) -> float:
    """Play a task by its gold path: full score on variation 0 of all 30 tasks. Returns the score."""
    actions = await env.gold(task)
    await env.reset(task)
    for action in actions:
        result = await env.step(action=action)
        if result.done:
            break
    return env.score


def read_action(action: object) -> tuple[str, str]:
    """The action as the simulator takes it and "", or "" and the reason of a refusal."""
    if not isinstance(action, str):
        return "", f"An action is a text, not {type(action).__name__}."
    if len(action) > MAX_ACTION:
        return "", f"The action has {len(action):,} characters; at most {MAX_ACTION} are read."
    text = " ".join(action.split())
    if not text:
        return "", "The action is empty."
    if not text.isprintable():
        return "", "The action has characters that cannot be shown; write plain words."
    return text, ""


def _whole(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"ScienceWorld: {name} must be a whole number from 1, not {value!r}")
    return value
