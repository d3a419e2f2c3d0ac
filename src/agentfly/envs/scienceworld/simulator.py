"""One simulator in one of the JVMs: load a task, act in it, read its score. Methods are async and wait for the JVM's thread.

The Java object is called directly. Its Python wrapper lists all valid combinations of actions and objects at every step, which
takes ten times as long as the step. Calls raise `WorldError` after the JVM has died.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ...errors import ConfigError, WorldError
from .jvm import Jvm, SimulatorGlobals
from .jvms import Jvms

T = TypeVar("T")
DESCRIBED_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class SimulatorReply:
    """The reply to an action. `score` is from 0 to 1, or below 0 if the task has failed."""

    observation: str
    score: float
    completed: bool
    moves: int


class Simulator:
    """A simulator in a JVM. The first load makes its Java object."""

    def __init__(self, pool: Jvms) -> None:
        self._pool = pool
        self._jvm: Jvm | None = pool.enter()
        self._shared = SimulatorGlobals()
        self._java: Any = None

    @property
    def alive(self) -> bool:
        return self._jvm is not None and not self._jvm.why

    async def load(self, task: str, variation: int, simplifications: str) -> tuple[str, SimulatorReply]:
        """Open a variation of a task. Returns its description and the first reply."""

        def load(jvm: Jvm) -> tuple[str, SimulatorReply]:
            self._load(jvm, task, variation, simplifications, gold=False)
            return str(self._java.getTaskDescription()).strip(), self._step("look around")

        return await self._call(load)

    async def step(self, action: str) -> SimulatorReply:
        return await self._call(lambda jvm: self._step(action))

    async def actions(self) -> list[str]:
        """The forms of actions, such as "open OBJ"."""
        return await self._call(lambda jvm: jvm.lines(self._java.getPossibleActions()))

    async def objects(self) -> list[str]:
        """The objects that can replace OBJ now."""
        return await self._call(lambda jvm: jvm.lines(self._java.getPossibleObjects()))

    async def surroundings(self) -> tuple[str, str]:
        """The room and the inventory. Asking takes no time in the simulation."""
        return await self._call(lambda _: (str(self._java.freeActionLook()), str(self._java.freeActionInventory())))

    async def gold(self, task: str, variation: int, simplifications: str) -> list[str]:
        """Actions that solve a task, from the simulator's agent. The task must be loaded again afterwards."""

        def find(jvm: Jvm) -> list[str]:
            self._load(jvm, task, variation, simplifications, gold=True)
            return [action.strip() for action in jvm.lines(self._java.getGoldActionSequence())]

        return await self._call(find)

    async def close(self) -> None:
        """Leave the JVM. Idempotent."""
        jvm, self._jvm = self._jvm, None
        java, self._java = self._java, None
        if jvm is None:
            return
        try:
            if java is not None and not jvm.why:
                # Not awaited: the caller may be cancelled, and the JVM drops the object in its turn.
                jvm.submit(lambda: jvm.drop(java))
        except WorldError:
            return  # the JVM has ended, and the object with it
        finally:
            self._pool.leave(jvm)

    async def _call(self, function: Callable[[Jvm], T]) -> T:
        jvm = self._jvm
        if jvm is None:
            raise WorldError("this simulator of ScienceWorld is closed")
        return await asyncio.wrap_future(jvm.submit(lambda: function(jvm), self._shared))

    # ---- in the JVM's thread

    def _load(self, jvm: Jvm, task: str, variation: int, simplifications: str, *, gold: bool) -> None:
        if self._java is None:
            self._java = jvm.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        jvm.loading()
        error = str(self._java.load(task, variation, simplifications, gold) or "")
        jvm.spare(self._java)
        jvm.loaded(self._shared)
        if error:
            raise ConfigError(f"ScienceWorld cannot load {task} {variation} {simplifications!r}: {error}")

    def _step(self, action: str) -> SimulatorReply:
        java = self._java
        if java is None:
            raise WorldError("no task of ScienceWorld is loaded")
        observation = str(java.step(action))
        return SimulatorReply(observation, float(java.getScore()), bool(java.getCompleted()), int(java.getNumMoves()))


async def describe(pool: Jvms, wanted: Sequence[tuple[str, int]]) -> list[str]:
    """The descriptions of variations, without loading them: a few milliseconds each."""
    jvm = pool.enter()

    def read(part: Sequence[tuple[str, int]]) -> list[str]:
        java, descriptions = jvm.gateway.jvm, []
        # A separate task maker, dropped after each part: it keeps references to the houses it has set up.
        maker = java.scienceworld.tasks.TaskMaker1()
        for task, variation in part:
            house = java.scienceworld.environments.EnvironmentMaker.mkKitchenEnvironment(0)
            universe, agent = house._1(), house._2()
            both = maker.doTaskSetup(task, variation, universe, agent)
            option = both._1()
            inner = option.get() if option.isDefined() else None
            descriptions.append("" if inner is None else str(inner.description()).strip())
            for each in (house, universe, agent, both, option, *([] if inner is None else [inner])):
                jvm.drop(each)
        jvm.drop(maker)
        return descriptions

    try:
        descriptions: list[str] = []
        for start in range(0, len(wanted), DESCRIBED_TOGETHER):
            part = wanted[start : start + DESCRIBED_TOGETHER]
            descriptions += await asyncio.wrap_future(jvm.submit(partial(read, part)))
        return descriptions
    finally:
        pool.leave(jvm)


def run_apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a new thread and event loop, for sync functions called while a loop is running."""
    results: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            results.append(asyncio.run(make()))
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            failed.append(error)

    thread = threading.Thread(target=work, name="scienceworld-apart", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return results[0]
