"""What each running chain waits for now, and for how long chains waited for what.

An `Activities` holds one `Activity` per running chain; `describe` names the chains that have waited longest. It also counts the
seconds that a run spends in each state. The state is the first of these phases that a chain is in:

    sampling     a chain waits for the engine
    tools        no chain waits for the engine, one waits for its tools
    environment  no chain waits for either, one waits for an environment
    scoring      only rewards are computed
    host         no chain waits: this process renders, parses, schedules or records
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Literal

from ..types import ToolCall, Trajectory

Phase = Literal["sampling", "tools", "environment", "scoring", "host"]
PHASES: tuple[Phase, ...] = ("sampling", "tools", "environment", "scoring", "host")
PATIENCE_S = 60.0
"""A watchdog names chains that have waited this long for one thing."""


class Activity:
    """What one chain waits for: its `phase` since `since` (`time.perf_counter`); between two phases, the phase before.

    `calls` are those that its tools execute.
    """

    __slots__ = ("_registry", "calls", "phase", "since", "trajectory", "waits")

    def __init__(self, trajectory: Trajectory, registry: Activities) -> None:
        self.trajectory = trajectory
        self.phase: Phase = "host"
        self.calls: tuple[ToolCall, ...] = ()
        self.since = perf_counter()
        self.waits = False
        self._registry = registry

    def enter(self, phase: Phase, now: float, calls: tuple[ToolCall, ...] = ()) -> None:
        """Begins a phase."""
        self.phase, self.since, self.calls, self.waits = phase, now, calls, True
        registry = self._registry
        registry.counts[phase] += 1
        if registry.state != "sampling":
            registry.settle(now)

    def leave(self, now: float) -> None:
        """Ends the phase."""
        self.waits = False
        registry = self._registry
        counts = registry.counts
        counts[self.phase] -= 1
        if registry.state != "sampling" or not counts["sampling"]:
            registry.settle(now)

    def end(self) -> None:
        """The chain has ended."""
        if self.waits:
            self.leave(perf_counter())
        if self._registry.get(self.trajectory.id) is self:
            del self._registry[self.trajectory.id]
            self._registry.report(self.trajectory, ended=True)

    @property
    def what(self) -> tuple[str, ...]:
        """The names of the tools that the chain waits for, each once, in the order of the calls."""
        return tuple(dict.fromkeys(call.name for call in self.calls))

    @property
    def turn(self) -> int:
        """The number of the current turn, counted from 1."""
        return len(self.trajectory.turns) + (self.waits and self.phase == "sampling")


class Activities(dict[str, Activity]):
    """The running chains by trajectory id, and the seconds that passed in each state. Chains change it in one thread.

    `report(trajectory, ended=...)` is called when a chain starts, and when it has ended.
    """

    def __init__(self, report: Callable[..., object] = lambda *_, **__: None) -> None:
        super().__init__()
        self.report = report
        self.counts = dict.fromkeys(PHASES, 0)
        self.state: Phase = "host"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._cpu = dict.fromkeys(PHASES, 0.0)
        self._thread = threading.get_ident()
        self._last, self._last_cpu = perf_counter(), time.thread_time()

    def add(self, trajectory: Trajectory) -> Activity:
        """Lists a chain until its `Activity.end`."""
        activity = self[trajectory.id] = Activity(trajectory, self)
        self.report(trajectory, ended=False)
        return activity

    def settle(self, now: float) -> None:
        """Called after `counts` changed in a way that may change the state."""
        state = next((phase for phase in PHASES[:-1] if self.counts[phase] > 0), PHASES[-1])
        if state != self.state:
            self._add(now)
            self.state = state

    def read(self) -> tuple[dict[Phase, float], dict[Phase, float]]:
        """The seconds in each state so far, and the CPU seconds that the thread of the chains used in it."""
        if threading.get_ident() == self._thread:
            self._add(perf_counter())
            return dict(self._seconds), dict(self._cpu)
        # Another thread must not write, and cannot read the CPU time of the thread of the chains.
        seconds, state, last = dict(self._seconds), self.state, self._last
        seconds[state] += max(0.0, perf_counter() - last)
        return seconds, dict(self._cpu)

    def _add(self, now: float) -> None:
        ident = threading.get_ident()
        cpu = time.thread_time()
        if ident != self._thread:  # the chains run in another thread than the one that made this object
            self._thread, self._last_cpu = ident, cpu
        self._seconds[self.state] += max(0.0, now - self._last)
        self._cpu[self.state] += cpu - self._last_cpu
        self._last, self._last_cpu = now, cpu


def told(phase: Phase, calls: Sequence[ToolCall]) -> str:
    """A phase in words, for example `tools: python, search`."""
    names = ", ".join(dict.fromkeys(call.name for call in calls))
    return f"{phase}: {names}" if names else phase


def describe(activities: Mapping[str, Activity], limit: int = 3) -> str:
    """The chains that have waited longest, for example

    2 chains: t12-3-1 (task 'x', turn 4, tools: python, 73 s), t12-0-2 (task 'y', turn 1, sampling, 2 s)
    """
    now = perf_counter()
    waiting = sorted(activities.values(), key=lambda activity: activity.since)
    shown = []
    for each in waiting[:limit]:
        turn = f"turn {each.turn}, " if each.turn else ""
        phase = told(each.phase, each.calls)
        shown.append(f"{each.trajectory.id} (task {each.trajectory.task.id!r}, {turn}{phase}, {now - each.since:.0f} s)")
    if not shown:
        return "no chain"
    more = f" and {len(waiting) - limit} more" if len(waiting) > limit else ""
    return f"{len(waiting)} chain{'s' if len(waiting) > 1 else ''}: {', '.join(shown)}{more}"


@asynccontextmanager
async def watchdog(
    name: str,
    activities: Mapping[str, Activity],
    tell: Callable[[str], None],
    *,
    prefix: str = "",
    patience_s: float = PATIENCE_S,
) -> AsyncIterator[None]:
    """Tells which chains still run, if one of them has waited for the same thing for `patience_s`.

    `name` is what waits, such as "step 12". `prefix` selects the chains by their id. The watchdog tells again when the longest
    wait has doubled. If no chain runs for `patience_s`, it tells that: they wait for admission.
    """

    async def watch() -> None:
        ran, told_s = perf_counter(), patience_s
        while True:
            await asyncio.sleep(patience_s / 4)
            now = perf_counter()
            running = {key: each for key, each in activities.items() if key.startswith(prefix)}
            if running:
                ran = now
            longest = max((now - each.since for each in running.values()), default=now - ran)
            if longest < patience_s:
                told_s = patience_s  # the chains that were told about have gone on
            elif longest >= told_s:
                told_s = 2 * longest
                tell(f"{name} waits for {describe(running)}" if running else f"{name} waits: none of its chains runs")

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])
