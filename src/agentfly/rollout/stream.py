"""A stream of groups: tasks are drawn, their chains run, and complete groups are handed over in batches for training.

    draw -> in flight (chains wait for admission, run, end) -> complete -> next_batch -> handed over

At most (depth + 1) x num_tasks groups are drawn and not handed over, so sampling runs at most `depth` steps ahead of training.
Every group that is drawn is handed over once: a slow task is waited for or trained late, and never dropped or drawn again.

A batch holds the oldest complete groups. While the weights move on, the tokens of a group in flight grow older: a group that
started at version v must be trained at version v + max_lag at the latest. With `at_limit = "wait"` newer groups overtake an old
one only while the batches until then have room for all groups that are as old:

    for every k in 0 .. max_lag - 1, after the batch of version V:
        groups in flight that started at V - max_lag + k or before  <=  k x num_tasks

Else the batch waits for the old ones. Because `depth` is at most `max_lag`, there is always a batch that keeps this. With
"mask" no batch waits for an old group, and the learner masks the tokens that are too old.

With depth 0 a batch is exactly the tasks drawn for it, and nothing is sampled between `next_batch` and the next call of it.

With `refill`, a complete group that teaches nothing is followed by one more draw, up to `refill` per batch. It stays in its
batch, which then has `num_tasks` groups that teach, or num_tasks + refill groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import ConfigError, InvariantError
from ..types import Task, Trajectory
from .chain import Opening, Plan
from .scheduler import admission_timeout_s, end_chain, fewer_collections, make_ready, open_task, start_chain

AtLimit = Literal["wait", "mask"]


@dataclass(slots=True, eq=False)
class Group:
    """The chains of one draw of a task.

    `step` and `position` are those that the task was drawn for; they name the chains and choose their seeds. The group may be
    trained in a later step. `row` is that of the task among all. `version` is that of the weights when the first chain
    started, so no token of the group is older; None until then. `missing` counts the chains without an end or a final score.
    `teaches` is false for a complete group without a learning signal. `plan` has the seed of the step.
    """

    step: int
    position: int
    draw: int
    task: Task
    row: int
    chains: list[Trajectory | None]
    missing: int
    version: int | None = None
    teaches: bool = True
    plan: Plan | None = None
    opening: Opening | None = None
    deadline: float | None = None

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def trajectories(self) -> list[Trajectory]:
        """The finished chains, in order. Those that are still to be compared with their siblings have no reward."""
        ended = [trajectory for trajectory in self.chains if trajectory is not None]
        if len(ended) == len(self.chains) - self.missing:
            return ended
        return [replace(trajectory, reward=None) for trajectory in ended]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How many groups a batch has, how many may be drawn in place of those that teach nothing, and how far sampling may run
    ahead of training. No group is drawn for a step after `num_steps`.
    """

    num_tasks: int
    num_chains: int
    num_steps: int | None = None
    max_lag: int = 0
    depth: int = 0
    at_limit: AtLimit = "wait"
    refill: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= self.max_lag:
            raise ConfigError(f"rollout.depth ({self.depth}) must be between 0 and rollout.max_lag ({self.max_lag})")


class GroupStream:
    """Runs the chains of a training run. `async with stream:` around its use; leaving it cancels the chains in flight.

    `draw()` returns the row of the next task, and the task. `seeded(group)` returns the plan for its chains.
    `on_chain` receives each finished chain, and `learn` each group once it is trained, in the order of draws. `teaches` says
    of a complete group whether it has a learning signal.
    """

    def __init__(
        self,
        plan: Plan,
        pace: Pace,
        *,
        draw: Callable[[], tuple[int, Task]],
        seeded: Callable[[Group], Plan],
        on_chain: Callable[[Group, Trajectory], None] | None = None,
        teaches: Callable[[Group], bool] = lambda group: True,
        learn: Callable[[Group], object] = lambda group: None,
    ) -> None:
        if plan.admission is None:
            raise InvariantError("a stream of groups needs an admission controller: open the environments first")
        self.plan, self.pace, self.admission = plan, pace, plan.admission
        self.admission.max_lag = pace.depth
        self.drawn = 0
        self.trained = 0
        self.finished_chains = 0  # of the groups in flight
        self._draw, self._seeded, self._on_chain, self._teaches, self._learn = draw, seeded, on_chain, teaches, learn
        self._groups: list[Group] = []  # running and complete ones, in the order of their draws
        self._restored: list[Group] = []  # of a resumed run; drawn again before new ones
        self._untrained: list[Group] = []  # handed over, but `advance` was not called since
        self._next = (1, 0)  # step and position of the next draw
        self._draws: Counter[str] = Counter()  # tasks of that step so far
        self._failure: BaseException | None = None
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
        return [*self._untrained, *self._groups, *self._restored]

    # ---- handing over ----------------------------------------------------------------------------------------------------

    async def next_batch(self, version: int) -> list[Group]:
        """Wait for the groups of the next batch, in the order of their draws. `version` is that of the learner's weights.

        Raises what a chain raised if it stops the run. No deadline here: each chain has one.
        """
        if self._failure is not None:
            raise self._failure
        self._draw_ahead()
        while (batch := self._choose(version)) is None:
            self._news.clear()
            await self._news.wait()
            if self._failure is not None:
                raise self._failure
        self._groups = [group for group in self._groups if group not in batch]
        self._untrained = sorted(batch, key=lambda group: (group.step, group.position))
        self.finished_chains -= sum(len(group.chains) for group in batch)
        return self._untrained

    def advance(self, done: int) -> None:
        """`done` training steps are finished: the last batch counts as trained, and sampling may go on if it runs ahead."""
        self.trained += len(self._untrained)
        for group in self._untrained:
            self._learn(group)
        self._untrained = []
        self.admission.advance(done)
        if self.pace.depth:
            self._draw_ahead()
        else:
            self.start_at(done + 1)

    def _choose(self, version: int) -> set[Group] | None:
        """Returns the batch, or None while groups that it must hold are not complete."""
        ready = [group for group in self._groups if group.complete]
        ready.sort(key=lambda group: (group.version, group.step, group.position))
        size = self._size(ready)
        if size is None:
            return None
        batch = set(ready[:size])
        if self.pace.at_limit == "wait":
            for more in range(max(1, self.pace.max_lag)):
                limit = version - self.pace.max_lag + more
                old = [group for group in self._groups if group.version is not None and group.version <= limit]
                left = [group for group in old if group not in batch]
                if len(left) > more * self.pace.num_tasks:
                    if not all(group.complete for group in left):
                        return None
                    if not self.pace.refill:
                        raise InvariantError(
                            f"{len(old)} groups reach rollout.max_lag, and {more + 1} batches cannot hold them"
                        )
                    batch.update(left)
        return batch

    def _size(self, ready: Sequence[Group]) -> int | None:
        """Returns how many of the complete groups, the oldest first, fill a batch. None if there are too few."""
        pace, taught = self.pace, 0
        if pace.refill and self._steps_ahead() == 1:  # nothing is drawn for a later batch
            return len(ready) if len(ready) == len(self._groups) else None
        for size, group in enumerate(ready, 1):
            taught += group.teaches or not pace.refill
            if taught == pace.num_tasks or size == pace.num_tasks + pace.refill:
                return size
        return None

    # ---- drawing and running ---------------------------------------------------------------------------------------------

    def _steps_ahead(self) -> int:
        """Returns the number of batches whose groups may be drawn now."""
        steps = self.pace.depth + 1
        return steps if self.pace.num_steps is None else min(steps, self.pace.num_steps - self.admission.done)

    def _draw_ahead(self) -> None:
        steps, idle = self._steps_ahead(), sum(not group.teaches for group in self._groups)
        if self.pace.refill and not self.pace.depth:  # none of a stopped step is left for the next
            idle = max(idle, len(self._groups) + len(self._restored) - self.pace.num_tasks)
        while len(self._groups) < steps * self.pace.num_tasks + min(idle, steps * self.pace.refill):
            if self._restored:
                self._put(self._restored.pop(0))
                continue
            row, task = self._draw()
            self.drawn += 1
            step, position = self._next
            group = self._group(step, position, self._draws[task.id], task, row)
            self._draws[task.id] += 1
            self._next = (step, position + 1)
            if self.pace.depth and position + 1 == self.pace.num_tasks:  # else `advance` begins the next step
                self._next = (step + 1, 0)
                self._draws.clear()
            self._put(group)

    def _group(self, step: int, position: int, draw: int, task: Task, row: int) -> Group:
        count = self.pace.num_chains
        return Group(step, position, draw, task, row, [None] * count, count)

    def _put(self, group: Group) -> None:
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
        plan = group.plan = group.plan or self._seeded(group)  # the siblings share one
        await self.admission.admit(self.admission.done, admission_timeout_s(plan.limits))
        try:
            if group.version is None:
                group.version = plan.engine.version
                if plan.limits.group_timeout_s is not None:
                    group.deadline = time.monotonic() + plan.limits.group_timeout_s
            if group.opening is None:
                group.opening = open_task(plan, group.task, group.draw)
            name = f"t{group.step}-{group.position}-{chain}"
            trajectory = await start_chain(plan, group.opening, chain, name, until=group.deadline)
        finally:
            self.admission.leave()
        if group.chains[chain] is not None:
            raise InvariantError(f"chain {trajectory.id} came back twice")
        group.chains[chain] = trajectory
        for ended in await end_chain(plan, group.chains, trajectory):
            group.missing -= 1
            self.finished_chains += 1
            if self._on_chain is not None:
                self._on_chain(group, ended)
        if group.complete:
            group.teaches = self._teaches(group)
            if not group.teaches and self.pace.refill:
                self._draw_ahead()
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

    # ---- resume ----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs: the draws that are not trained, and the next one. Tokens are not kept."""
        return {
            "next": list(self._next),
            "draws": dict(self._draws),
            "pending": [[group.step, group.position, group.draw, group.row] for group in self.in_flight],
        }

    def restore(self, state: dict[str, Any], task_at: Callable[..., tuple[int, Task]]) -> None:
        """Draw again what `state` holds as not trained, under the same names and seeds, and go on after it."""
        step, position = state["next"]
        self._next = (int(step), int(position))
        self._draws = Counter(state["draws"])
        for step, position, draw, *place in state["pending"]:
            row, task = task_at(*place)
            self._restored.append(self._group(step, position, draw, task, row))
        self.drawn += len(self._restored)

    def start_at(self, step: int) -> None:
        """The next draw is the first of a step: for a run whose state holds no draws."""
        self._next = (step, 0)
        self._draws.clear()


def as_groups(batch: Sequence[Group]) -> list[list[Trajectory]]:
    """Returns the trajectories of each group."""
    return [group.trajectories for group in batch]
