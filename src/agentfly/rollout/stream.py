"""A stream of groups: tasks are drawn, their chains run, and complete groups are handed over in batches for training.

    draw -> in flight (chains wait for admission, run, end) -> complete -> next_batch -> handed over

At most (depth + 1) x num_tasks groups are drawn and not handed over, so sampling runs at most `depth` steps ahead of training.
Every group that is drawn is handed over once: a slow task is waited for or trained late, and never dropped or drawn again.

A batch holds the oldest complete groups. While the weights move on, the tokens of a group in flight grow older. With
`at_limit = "wait"` a batch is not handed over until every group that the next update would make older than `max_lag` versions
is complete, and such groups come first. At most `num_tasks` groups are that old, because `depth` is at most `max_lag`: a batch
has room for all of them. With "mask" no batch waits for an old group, and the learner masks the tokens that are too old.

With depth 0 a batch is exactly the tasks drawn for it, and nothing is sampled between `next_batch` and the next call of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError, InvariantError
from ..types import Task, Trajectory
from .chain import Opening, Plan, run_chain
from .scheduler import admission_timeout_s, fewer_collections, make_ready, open_task

AtLimit = Literal["wait", "mask"]
WATCH_S = 60.0
"""Seconds without a finished chain until the stream says what it waits for; then twice as long, and so on."""


@dataclass(slots=True, eq=False)
class Group:
    """The chains of one draw of a task.

    `step` and `position` are those that the task was drawn for; they name the chains and choose their seeds. The group may be
    trained in a later step. `place` is where the task cursor stood before the draw. `version` is that of the weights when the
    first chain started, so no token of the group is older; None until then. `missing` counts the chains that have not ended.
    """

    step: int
    position: int
    draw: int
    task: Task
    place: tuple[int, int]
    chains: list[Trajectory | None]
    missing: int
    version: int | None = None
    opening: Opening | None = None
    deadline: float | None = None

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def trajectories(self) -> list[Trajectory]:
        """The finished chains, in order."""
        return [trajectory for trajectory in self.chains if trajectory is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How many groups a batch has, and how far sampling may run ahead of training.

    No group is drawn for a step after `num_steps`.
    """

    num_tasks: int
    num_chains: int
    num_steps: int | None = None
    max_lag: int = 0
    depth: int = 0
    at_limit: AtLimit = "wait"
    group_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= self.max_lag:
            raise ConfigError(f"rollout.depth ({self.depth}) must be between 0 and rollout.max_lag ({self.max_lag})")


class GroupStream:
    """Runs the chains of a training run. `async with stream:` around its use; leaving it cancels the chains in flight.

    `draw()` returns the place of the cursor and the next task. `seeded(step)` returns the plan for the chains of a step.
    `on_chain` receives each finished chain, `warn` a sentence if no chain ends for long.
    """

    def __init__(
        self,
        plan: Plan,
        pace: Pace,
        *,
        draw: Callable[[], tuple[tuple[int, int], Task]],
        seeded: Callable[[int], Plan],
        on_chain: Callable[[Group, Trajectory], None] | None = None,
        warn: Callable[[str], None] | None = None,
        watch_s: float = WATCH_S,
    ) -> None:
        if plan.admission is None:
            raise InvariantError("a stream of groups needs an admission controller: open the environments first")
        self.plan, self.pace, self.admission = plan, pace, plan.admission
        self.admission.max_lag = pace.depth
        self.drawn = 0
        self.trained = 0
        self.finished_chains = 0  # of the groups in flight
        self._draw, self._seeded, self._on_chain, self._warn, self._watch_s = draw, seeded, on_chain, warn, watch_s
        self._groups: list[Group] = []  # running and complete ones, in the order of their draws
        self._untrained: list[Group] = []  # handed over, but `advance` was not called since
        self._next = (1, 0)  # step and position of the next draw
        self._draws: Counter[str] = Counter()  # tasks of that step so far
        self._failure: BaseException | None = None
        self._moved_at = 0.0
        self._news = asyncio.Event()
        self._new_groups: asyncio.Queue[Group] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextlib.ExitStack()

    async def __aenter__(self) -> GroupStream:
        self._context.enter_context(fewer_collections())
        self._spawn(self._start_groups())
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._context.close()

    @property
    def in_flight(self) -> list[Group]:
        """The groups that are drawn and not trained, complete ones included."""
        return [*self._untrained, *self._groups]

    # ---- handing over ----------------------------------------------------------------------------------------------------

    async def next_batch(self, version: int) -> list[Group]:
        """Wait for the next `num_tasks` groups, in the order of their draws. `version` is that of the learner's weights.

        Raises what a chain raised if it stops the run. No deadline here: each chain has one.
        """
        self._draw_ahead()
        patience = self._watch_s
        since = self._moved_at = time.monotonic()
        while True:
            if self._failure is not None:
                raise self._failure
            batch = self._choose(version)
            if batch is not None:
                break
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._news.wait()
            if self._moved_at > since:
                since, patience = self._moved_at, self._watch_s
            elif time.monotonic() - since >= patience:
                if self._warn is not None:
                    self._warn(self._waiting_for(version, time.monotonic() - since))
                patience *= 2
        self._groups = [group for group in self._groups if group not in batch]
        self._untrained = sorted(batch, key=lambda group: (group.step, group.position))
        self.finished_chains -= sum(len(group.chains) for group in batch)
        return self._untrained

    def advance(self, done: int) -> None:
        """`done` training steps are finished: the last batch counts as trained, and sampling may go on if it runs ahead."""
        self.trained += len(self._untrained)
        self._untrained = []
        self.admission.advance(done)
        if self.pace.depth:
            self._draw_ahead()

    def _choose(self, version: int) -> set[Group] | None:
        """Returns the batch, or None while groups that it must hold are not complete."""
        batch = set(self._old_groups(version)) if self.pace.at_limit == "wait" else set()
        if not all(group.complete for group in batch):
            return None
        if len(batch) > self.pace.num_tasks:
            raise InvariantError(f"{len(batch)} groups reach the lag limit at once, but a batch has {self.pace.num_tasks}")
        others = [group for group in self._groups if group.complete and group not in batch]
        batch.update(others[: self.pace.num_tasks - len(batch)])
        return batch if len(batch) == self.pace.num_tasks else None

    def _old_groups(self, version: int) -> list[Group]:
        """The groups whose oldest token may be more than `max_lag` versions old after the next update."""
        return [group for group in self._groups if group.version is not None and group.version <= version - self.pace.max_lag]

    # ---- drawing and running ---------------------------------------------------------------------------------------------

    def _draw_ahead(self) -> None:
        steps = self.pace.depth + 1
        if self.pace.num_steps is not None:
            steps = min(steps, self.pace.num_steps - self.admission.done)
        while len(self._groups) < steps * self.pace.num_tasks:
            place, task = self._draw()
            step, position = self._next
            group = self._group(step, position, self._draws[task.id], task, place)
            self._draws[task.id] += 1
            self._next = (step, position + 1)
            if position + 1 == self.pace.num_tasks:
                self._next = (step + 1, 0)
                self._draws.clear()
            self._put(group)

    def _group(self, step: int, position: int, draw: int, task: Task, place: tuple[int, int]) -> Group:
        count = self.pace.num_chains
        return Group(step, position, draw, task, place, [None] * count, count)

    def _put(self, group: Group) -> None:
        self.drawn += 1
        self._groups.append(group)
        self._new_groups.put_nowait(group)

    async def _start_groups(self) -> None:
        """Start the chains of new groups, in order, once what their environments need is made."""
        manager = self.plan.manager
        while True:
            group = await self._new_groups.get()
            if manager is not None:
                manager.expect(self._together(), self.plan.kinds)  # start environments before the chains request them
                await make_ready(self.plan, manager, [group.task])
            for chain in range(self.pace.num_chains):
                self._spawn(self._run(group, chain))

    def _together(self) -> int:
        total = len(self._groups) * self.pace.num_chains
        return min(total, self.admission.limit or total)

    async def _run(self, group: Group, chain: int) -> None:
        plan = self._seeded(group.step)
        async with self.admission.slot(self.admission.done, admission_timeout_s(plan.limits)):
            if group.version is None:
                group.version = plan.engine.version
                if self.pace.group_timeout_s is not None:
                    group.deadline = asyncio.get_running_loop().time() + self.pace.group_timeout_s
            if group.opening is None:
                group.opening = open_task(plan, group.task, group.draw)
            name = f"t{group.step}-{group.position}-{chain}"
            trajectory = await run_chain(plan, group.opening, chain, name, until=group.deadline)
        if group.chains[chain] is not None:
            raise InvariantError(f"chain {trajectory.id} came back twice")
        group.chains[chain] = trajectory
        group.missing -= 1
        self.finished_chains += 1
        self._moved_at = time.monotonic()
        if self._on_chain is not None:
            self._on_chain(group, trajectory)
        if group.complete:
            self._news.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self._news.set()

    def _waiting_for(self, version: int, seconds: float) -> str:
        """Returns what the next batch waits for, as a sentence."""
        waiting = [group for group in self._groups if not group.complete]
        missing = sum(group.missing for group in waiting)
        limited = self.pace.max_lag and self.pace.at_limit == "wait"
        late = [group for group in self._old_groups(version) if not group.complete] if limited else []
        which = late or waiting
        names = ", ".join(repr(group.task.id) for group in which[:3]) + (", ..." if len(which) > 3 else "")
        why = "at the lag limit" if late else "in flight"
        return f"no chain has ended for {seconds:.0f} s: {missing} chains are missing; tasks {why}: {names}"

    # ---- resume ----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs: the draws that are not trained, and the next one. Tokens are not kept."""
        return {
            "next": list(self._next),
            "draws": dict(self._draws),
            "pending": [[group.step, group.position, group.draw, *group.place] for group in self.in_flight],
        }

    def restore(self, state: dict[str, Any], task_at: Callable[[int, int], Task]) -> None:
        """Draw again what `state` holds as not trained, under the same names and seeds, and go on after it."""
        step, position = state["next"]
        self._next = (int(step), int(position))
        self._draws = Counter(state["draws"])
        for step, position, draw, *place in state["pending"]:
            where = (int(place[0]), int(place[1]))
            self._put(self._group(step, position, draw, task_at(*where), where))

    def start_at(self, step: int) -> None:
        """The next draw is the first of a step: for a run whose state holds no draws."""
        self._next = (step, 0)
        self._draws.clear()


def as_groups(batch: Sequence[Group]) -> list[list[Trajectory]]:
    """Returns the trajectories of each group."""
    return [group.trajectories for group in batch]
