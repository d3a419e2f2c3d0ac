"""One simulator in one of the JVMs: load a task, act in it, read its score; every method is async and waits for the JVM's turn.

The Java object is called directly. Its Python wrapper lists all valid combinations of actions and objects at every step, which
takes ten times as long as the step itself; here they are not listed. A simulator whose JVM died raises `WorldError`.
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
    """What came of an action. `score` is from 0 to 1, or below 0 where the task has failed."""

    observation: str
    score: float
    completed: bool
    moves: int


class Simulator:
    """A place in a JVM, and from the first load on a Java object in it."""

    def __init__(self, pool: Jvms) -> None:
        self._pool = pool
        self._jvm: Jvm | None = pool.enter()
        self._shared = SimulatorGlobals()
        self._java: Any = None

    @property
    def alive(self) -> bool:
        return self._jvm is not None and not self._jvm.why

    async def load(self, task: str, variation: int, simplifications: str) -> tuple[str, SimulatorReply]:
        """Open a variation of a task: its description, and what is seen first."""

        def load(jvm: Jvm) -> tuple[str, SimulatorReply]:
            self._load(jvm, task, variation, simplifications, gold=False)
            return str(self._java.getTaskDescription()).strip(), self._step("look around")

        return await self._call(load)

    async def step(self, action: str) -> SimulatorReply:
        return await self._call(lambda jvm: self._step(action))

    async def actions(self) -> list[str]:
        """The forms that actions have, such as "open OBJ"."""
        return await self._call(lambda jvm: jvm.lines(self._java.getPossibleActions()))

    async def objects(self) -> list[str]:
        """What can stand for OBJ here and now."""
        return await self._call(lambda jvm: jvm.lines(self._java.getPossibleObjects()))

    async def gold(self, task: str, variation: int, simplifications: str) -> list[str]:
        """A sequence of actions that solves a task, from the simulator's own agent. It has to be loaded again afterwards."""

        def find(jvm: Jvm) -> list[str]:
            self._load(jvm, task, variation, simplifications, gold=True)
            return [action.strip() for action in jvm.lines(self._java.getGoldActionSequence())]

        return await self._call(find)

    async def close(self) -> None:
        """Leave the JVM. Calling it twice is fine."""
        jvm, self._jvm = self._jvm, None
        java, self._java = self._java, None
        if jvm is None:
            return
        try:
            if java is not None and not jvm.why:
                # Not waited for: whoever closes may be in a hurry, and the JVM does it in its turn.
                jvm.submit(lambda: jvm.drop(java))
        except WorldError:
            return  # the JVM ended in between, and the object with it
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
    """The descriptions of variations of tasks, without loading them whole: a few milliseconds each."""
    jvm = pool.enter()

    def read(part: Sequence[tuple[str, int]]) -> list[str]:
        java, found = jvm.gateway.jvm, []
        # A maker of our own, dropped after a while: it holds on to the houses that it was set up in.
        maker = java.scienceworld.tasks.TaskMaker1()
        for task, variation in part:
            house = java.scienceworld.environments.EnvironmentMaker.mkKitchenEnvironment(0)
            universe, agent = house._1(), house._2()
            both = maker.doTaskSetup(task, variation, universe, agent)
            option = both._1()
            inner = option.get() if option.isDefined() else None
            found.append("" if inner is None else str(inner.description()).strip())
            for each in (house, universe, agent, both, option, *([] if inner is None else [inner])):
                jvm.drop(each)
        jvm.drop(maker)
        return found

    try:
        descriptions: list[str] = []
        for start in range(0, len(wanted), DESCRIBED_TOGETHER):
            part = wanted[start : start + DESCRIBED_TOGETHER]
            descriptions += await asyncio.wrap_future(jvm.submit(partial(read, part)))
        return descriptions
    finally:
        pool.leave(jvm)


def run_apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a thread with a loop of its own: for sync functions that may be called where a loop is running."""
    found: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(asyncio.run(make()))
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            failed.append(error)

    thread = threading.Thread(target=work, name="scienceworld-apart", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
