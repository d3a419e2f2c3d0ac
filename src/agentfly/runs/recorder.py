"""Records what happens while a run goes on: its state, phases, running chains, pools, failures and warnings.

    chains, learner, pools  ---->  buffer  ---- look(), twice a second ---->  StoreWriter  ---->  run.db

Calls from the chains only append to a list. `look` hands the list to the writer, with the gauges that have changed, and every
BEAT_S seconds the heartbeat and the list of running chains. These records may be dropped, and their failure does not stop a
run: a store that cannot be written stops it at the next trajectory or metric.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ..errors import AgentFlyError, StorageError
from ..types import Outcome, TokenRecord, Trajectory
from .lock import process_mark
from .store import RunStore
from .writer import StoreWriter

if TYPE_CHECKING:
    from ..rollout.activity import Activities

BEAT_S = 2.0
"""Seconds between two heartbeats."""
MAX_LIVE = 200
"""Running chains that are listed, those that have waited longest."""
MAX_BUFFER = 1000
PASSING = ("chain_started", "chain_ended")
"""Events that are deleted when the step after theirs has ended: the summaries of the chains have the times."""
COUNTED = {"failed": "environment_failed", "recycled": "environment_recycled", "reaped": "environment_reaped"}
"""Counters of the pools whose growth is an event."""


@dataclass(frozen=True, slots=True)
class _Event:
    t: float
    step: int
    kind: str
    who: str | None
    data: dict[str, Any] | None


class Recorder:
    """One per run. `step` is the step that is running, which the loop sets. Its methods may be called in any thread.

    `stopped` is set by a loop that ends early without an exception, to the reason.
    """

    def __init__(self, writer: StoreWriter, clock: Callable[[], float] = time.time) -> None:
        self.writer = writer
        self.step = 0
        self.stopped: str | None = None
        self._clock = clock
        self._events: list[_Event] = []
        self._gauges: dict[str, float] = {}
        self._beat = 0.0

    # ---- the run ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, **meta: object) -> Iterator[None]:
        """Records who runs what while the body runs, and how it ended: "finished", or "stopped" with the reason."""
        now = self._clock()
        before = self.writer.store.meta()
        begun = {"status": "running", "started": before.get("started", now), "heartbeat": now, "error": None, "ended": None}
        resumed = {"resumed": now} if "started" in before else {}
        self._put(lambda store: store.set_meta({**begun, **resumed, **process_mark(), "version": package_version(), **meta}))
        try:
            yield
        except BaseException as error:
            stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit)
            reason = "stopped by a signal" if stopped else str(error) or type(error).__name__
            self._end("stopped", reason if isinstance(error, AgentFlyError) or stopped else f"{type(error).__name__}: {reason}")
            raise
        self._end("finished" if self.stopped is None else "stopped", self.stopped)

    def _end(self, status: str, error: str | None) -> None:
        if error is not None:
            self.event("stopped", data={"text": error})
        self.flush()
        now, dropped = self._clock(), self.writer.dropped
        values = {"status": status, "error": error, "ended": now, "heartbeat": now, "dropped": dropped}
        self._put(lambda store: _set_live(store, now, [], []))
        self._put(lambda store: store.set_meta(values))

    # ---- events ----------------------------------------------------------------------------------------------------------

    def event(self, kind: str, who: str | None = None, data: dict[str, Any] | None = None) -> None:
        """Buffer an event of the current step."""
        self._events.append(_Event(self._clock(), self.step, kind, who, data))
        if len(self._events) >= MAX_BUFFER:
            self.flush()

    def warn(self, text: str) -> None:
        """A sentence that the run tells its user."""
        self.event("note", data={"text": text})

    def span(self, name: str) -> None:
        """The step enters a phase: rollout, learn, publish, validate or save."""
        now, step = self._clock(), self.step
        if step:
            self._put(lambda store: store.set_phase(step, name, now))
        self.event("phase", name)

    def chain(self, trajectory: Trajectory, *, ended: bool) -> None:
        """A chain starts or has ended."""
        if not ended:
            self.event("chain_started", trajectory.id, {"task": trajectory.task.id})
            return
        outcome = trajectory.outcome
        data: dict[str, Any] = {
            "task": trajectory.task.id, "outcome": outcome.value, "reward": trajectory.reward, "seconds": trajectory.seconds,
        }  # fmt: skip
        self.event("chain_ended", trajectory.id, data)
        for (tool, limit), count in limits_reached(trajectory).items():
            self.event("sandbox_limit", trajectory.id, {"limit": limit, "tool": tool, "count": count})
        if outcome in (Outcome.WORLD_FAILURE, Outcome.TOOL_ERROR):
            self.event("chain_failed", trajectory.id, {**data, "error": trajectory.error})

    # ---- of a step -------------------------------------------------------------------------------------------------------

    def tokens(self, step: int, records: Sequence[TokenRecord]) -> None:
        """What the learner did with the chains of a step. Raises StorageError: these are never dropped."""
        self.writer.add_tokens(step, records)

    def checks(self, step: int, checked: Mapping[str, tuple[bool, float | None, float | None]]) -> None:
        """The invariants of a step; one that does not hold is an event too."""
        if not checked:
            return
        for name, (ok, value, bound) in checked.items():
            if not ok:
                self.event("check_failed", name, {"value": value, "bound": bound})
        self._put(lambda store: store.add_checks(step, checked))

    def end_step(self, step: int) -> None:
        """Hands over the events of a step and deletes those of earlier ones that only say what runs."""
        self.flush()
        self._put(lambda store: store.drop_events(PASSING, before_step=step))

    # ---- over time -------------------------------------------------------------------------------------------------------

    def look(
        self,
        metrics: Mapping[str, float],
        activities: Activities | None = None,
        holders: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Records the figures of the pools (`resources/<kind>/<figure>`), what chains do, and which chain holds what."""
        now = self._clock()
        figures = {name: value for name, value in metrics.items() if not name.startswith("resources/total/")}
        if activities is not None:
            figures |= {f"chains/{phase}": float(count) for phase, count in activities.counts.items() if phase != "host"}
            figures["chains/running"] = float(len(activities))
        changed = {name: value for name, value in figures.items() if self._gauges.get(name) != value}
        self._count_failures(changed)
        self._gauges |= changed
        if changed:
            self._put(lambda store: store.add_gauges(now, changed), droppable=True)
        if now - self._beat >= BEAT_S:
            self._beat = now
            running = [] if activities is None else list_running(activities)
            leases = [{"chain": chain, "kinds": list(kinds)} for chain, kinds in list((holders or {}).items())[:MAX_LIVE]]
            self._put(lambda store: _set_live(store, now, running, leases), droppable=True)
        self.flush()

    def flush(self) -> None:
        """Hand the buffered events to the writer."""
        events, self._events = self._events, []
        if events:
            self._put(lambda store: _add_events(store, events), droppable=True)

    def _count_failures(self, changed: Mapping[str, float]) -> None:
        for name, value in changed.items():
            room, _, rest = name.partition("/")
            kind, _, figure = rest.rpartition("/")
            if room == "resources" and figure in COUNTED:
                more = value - self._gauges.get(name, 0.0)
                if more > 0:
                    self.event(COUNTED[figure], kind, {"count": more})

    def _put(self, write: Callable[[RunStore], None], *, droppable: bool = False) -> None:
        with suppress(StorageError):  # raised by the next trajectory or metric, which stop the run
            self.writer.put(write, droppable=droppable)


def limits_reached(trajectory: Trajectory) -> Counter[tuple[str, str]]:
    """How often each tool of a chain reached each limit of its sandbox."""
    return Counter(
        (call.name, result.limit)
        for turn in trajectory.turns
        for call, result in zip(turn.calls, turn.results, strict=False)
        if result.limit is not None
    )


def list_running(activities: Activities) -> list[dict[str, Any]]:
    """The running chains, those that have waited longest first: what each does, for how long, with which tools."""
    now = time.perf_counter()
    waiting = sorted(activities.values(), key=lambda activity: activity.since)[:MAX_LIVE]
    return [
        {
            "id": each.trajectory.id, "task": each.trajectory.task.id, "turn": each.turn, "phase": each.phase,
            "tools": list(each.what), "seconds": round(now - each.since, 3),
        }
        for each in waiting
    ]  # fmt: skip


def package_version() -> str | None:
    """The version of agentfly; None if it is not installed as a package."""
    try:
        return version("agentfly")
    except PackageNotFoundError:
        return None


def _set_live(store: RunStore, now: float, running: list[Any], leases: list[Any]) -> None:
    store.set_meta({"heartbeat": now})
    store.set_live("chains", now, running)
    store.set_live("leases", now, leases)


def _add_events(store: RunStore, events: Sequence[_Event]) -> None:
    store.add_events((event.t, event.step, event.kind, event.who, event.data) for event in events)
