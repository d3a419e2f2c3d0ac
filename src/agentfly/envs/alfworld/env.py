"""`AlfWorld`: one household for one chain, as an environment.

Actions are texts; observations are those of the original engine. An action that is not possible, whatever it contains, gives
"Nothing happens.". After the task is won every action is refused. `reset` opens the game of a task, `restart` opens the same
game again. Games are shared between instances, so an instance needs a few hundred bytes.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...errors import WorldError
from ...resources.spec import Cost, Environment
from ...types import Task, ToolResult
from .engine import NOTHING, State
from .oracle import plan
from .tasks import easy_alfworld_tasks, open_game

OVER = "The game is over: the task is done, and no action counts any more."


class AlfWorld(Environment):
    """A household in text: go to receptacles, open them, take, clean, heat, cool and move things, until the task is done."""

    cost: ClassVar[Cost] = Cost(cpu=0.001, memory_mb=0.1, start_s=0.001)
    task_set: ClassVar[str] = "alfworld"

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_idle = 0
        """Number of actions that were answered by "Nothing happens."."""
        self.best = self._base = 0.0
        self._state: State | None = None

    async def reset(self, task: Task) -> str:
        """Open the game of a task. Returns the room and the objective."""
        state = self._state = State(open_game(task.fields))
        self.num_steps, self.num_idle, self.best = 0, 0, 0.0
        self._base = state.progress()  # of two things to place, one may be in place from the start
        return _seen(state)

    async def restart(self) -> ToolResult:
        """Start the same game again, unless it is won. Progress and counters are kept."""
        if self.done:
            return ToolResult(observation=OVER, error="bad_arguments")
        self._state = State(self.state.game)
        return ToolResult(observation=_seen(self._state))

    async def step(self, action: str) -> ToolResult:
        """Act. Returns the observation; `done` when the task is won."""
        state = self.state
        if state.won:
            return ToolResult(observation=OVER, error="bad_arguments")
        said = state.step(action)
        self.num_steps += 1
        if said == NOTHING:
            self.num_idle += 1
        else:
            left = 1.0 - self._base
            self.best = max(self.best, (state.progress() - self._base) / left if left else float(state.won))
        return ToolResult(observation=said, done=state.won)

    async def admissible(self) -> list[str]:
        """Every possible action in the order of the original; none after the end."""
        return [] if self.done else self.state.admissible()

    async def objective(self) -> str:
        return self.state.game.objective

    async def score(self) -> float:
        """1 once the task is done."""
        return float(self.done)

    async def progress(self) -> float:
        """The largest share of the stages that was reached: thing in hand, treated, placed."""
        return self.best

    async def idle(self) -> float:
        """The share of actions that were answered by "Nothing happens."; 0 without actions."""
        return self.num_idle / self.num_steps if self.num_steps else 0.0

    async def state_key(self) -> str:
        """A digest of the state: equal for two chains of one task exactly if their states are equal."""
        return self.state.key()

    @property
    def done(self) -> bool:
        return self._state is not None and self._state.won

    @property
    def state(self) -> State:
        if self._state is None:
            raise WorldError("no game of ALFWorld is open: call reset first")
        return self._state

    async def close(self) -> None:
        self._state = None

    def healthy(self) -> bool:
        return True

    @staticmethod
    def conformance() -> dict[str, Any]:
        """The arguments of `check_env`: the oracle wins three tasks, random moves do not."""
        from ...data import load_tasks
        from .tasks import alfworld_tasks

        async def play(env: AlfWorld, task: Task) -> None:
            for command in plan(State(open_game(task.fields))) or ():
                await env.step(action=command)

        verbs = ["look", "inventory", "go to desk 1", "go to shelf 1", "go to countertop 1", "go to bed 1", "open drawer 1"]
        return {
            "tasks": load_tasks([*easy_alfworld_tasks("test", 2), *alfworld_tasks("test", 1)]),
            "actions": verbs,
            "solver": play,
            "do_nothing": lambda env, task: None,
        }


def _seen(state: State) -> str:
    return f"{state.game.room}\n{state.game.objective}"
