"""Many chains at once: tasks in, trajectories out, in the order of the tasks with siblings together.

At most `max_concurrency` chains run at a time (None: the engine's capacity), and no more than the environments can serve. A
failed chain is data. A bug cancels the other chains, waits until they have released their environments, and is raised.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..data import row_of
from ..errors import AgentFlyError, DataError, DeadlineError, InvariantError, RolloutError, WorldError
from ..protocols import BoundedEngine, Engine
from ..resources import Admission, ResourceManager
from ..rewards import Reward
from ..types import Message, Task, Trajectory
from .chain import Opening, Plan, add_score, fail, opening_messages, run_chain
from .limits import Limits

log = logging.getLogger(__name__)
MAX_CONCURRENCY = 256
"""Concurrent chains if neither the caller nor the engine sets a number."""

YOUNG_OBJECTS = 200_000
"""New objects after which Python's cyclic collector looks for cycles while chains run."""
TIMEOUT_S = 3600.0
"""Seconds that a chain may wait for admission; at least twice the time that a chain may take."""


def open_task(plan: Plan, task: Task, draw: int = 0) -> Opening:
    """Write and render a task's prompt. Raises DataError if it leaves no room for a reply."""
    if plan.runner is not None:
        return plan.runner.open(plan, task, draw)
    return replace(_render(plan, task, opening_messages(plan.agent, task), f"task {task.id!r}"), draw=draw)


def check_prompts(plan: Plan, tasks: Sequence[Task]) -> None:
    """Raises DataError if a task's prompt does not fit into the context.

    A tokenizer makes at most one token of a byte, so most prompts are short enough by their bytes alone. Only the others are
    rendered. Chat templates add marks; the first task's prompt gives a bound for them.
    """
    if plan.renderer is None or not tasks:
        return
    overhead = len(_render(plan, tasks[0], opening_messages(plan.agent, tasks[0]), row_of(tasks[0], 0)).prompt_ids)
    for index, task in enumerate(tasks):
        messages = opening_messages(plan.agent, task)
        bound = overhead + sum(len(message.content.encode("utf-8", "replace")) for message in messages)
        if bound >= plan.limits.max_context or any(message.images for message in messages):
            _render(plan, task, messages, row_of(task, index))


def _render(plan: Plan, task: Task, messages: list[Message], where: str) -> Opening:
    ids = [] if plan.renderer is None else plan.renderer.start(messages, plan.schemas)
    if len(ids) >= plan.limits.max_context:
        raise DataError(
            f"{where}: its prompt has {len(ids)} tokens, but the context holds {plan.limits.max_context}; shorten the row or "
            f"raise max_context"
        )
    return Opening(task, messages, ids)


async def start_chain(
    plan: Plan, opening: Opening, chain: int, trajectory_id: str, *, until: float | None = None
) -> Trajectory:
    """Run one chain where the plan says: by its runner, or in this process."""
    run = run_chain if plan.runner is None else plan.runner.run
    return await run(plan, opening, chain, trajectory_id, until=until)


async def run_chains(
    plan: Plan,
    tasks: Sequence[Task],
    *,
    num_chains: int,
    max_concurrency: int | None,
    prefix: str = "",
    step: int | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Run `num_chains` chains of every task. `step` is the training step of the chains (None: not for training).

    A task's prompt is rendered when its first chain starts and shared by its siblings. A task may occur more than once: each
    draw has its own siblings and seeds. `on_trajectory` receives each trajectory as soon as it has its reward, so an error in
    another group does not lose it.
    """
    total = len(tasks) * num_chains
    most = most_in_flight(plan.engine, max_concurrency)
    admission = plan.admission or controller(plan, most)
    timeout_s = admission_timeout_s(plan.limits)
    results: list[Trajectory | None] = [None] * total
    openings: dict[int, Opening] = {}
    deadlines: dict[int, float] = {}
    draws = _draws(tasks)
    order = iter(range(total))

    async def work() -> None:
        for index in order:
            position, chain = divmod(index, num_chains)
            async with admission.slot(admission.done if step is None else step, timeout_s):
                if position not in openings:
                    openings[position] = open_task(plan, tasks[position], draws[position])
                    if plan.limits.group_timeout_s is not None:
                        deadlines[position] = time.monotonic() + plan.limits.group_timeout_s
                name = f"{prefix}{position}-{chain}"
                trajectory = await start_chain(plan, openings[position], chain, name, until=deadlines.get(position))
            results[index] = trajectory
            first = position * num_chains
            for ended in await end_chain(plan, results[first : first + num_chains], trajectory):
                if on_trajectory is not None:
                    on_trajectory(ended)

    together = min(most, total, admission.limit or total)
    if plan.manager is not None:
        plan.manager.expect(together, plan.kinds)  # start environments before the chains request them
        await make_ready(plan, plan.manager, tasks)
    workers = [asyncio.create_task(work()) for _ in range(min(most, total))]
    with fewer_collections():
        try:
            await _all(workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    finished = [trajectory for trajectory in results if trajectory is not None]
    if len(finished) != total:
        raise InvariantError(f"{total} chains were admitted but {len(finished)} came back")
    return finished


async def end_chain(plan: Plan, group: Sequence[Trajectory | None], last: Trajectory) -> list[Trajectory]:
    """Returns the chains of a group whose rewards are final once `last` has ended.

    That is `last` alone or, with a reward that compares the group, none until all have ended. Chains without a score are left
    out of the comparison. If the world fails during it, no chain of the group has a reward.
    """
    if plan.reward is None or not plan.reward.grouped:
        return [last]
    ended = [chain for chain in group if chain is not None]
    if len(ended) < len(group):
        return []
    scored = [chain for chain in ended if chain.scored]
    error: RolloutError
    try:
        async with asyncio.timeout(plan.limits.score_timeout_s):
            await score_group(plan.reward, scored)
        return ended
    except TimeoutError:
        error = DeadlineError(f"scoring the group exceeded its time limit of {plan.limits.score_timeout_s:g} s")
    except RolloutError as failure:
        error = failure
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        error = WorldError("the reward of the group raised CancelledError")
    for chain in scored:
        fail(chain, error)
    return ended


async def score_group(reward: Reward, scored: Sequence[Trajectory]) -> None:
    """Add the parts of the reward that compare the chains of a group."""
    if reward.grouped and scored:
        for chain, result in zip(scored, await reward.score_group(scored), strict=True):
            add_score(chain, result)


def admission_timeout_s(limits: Limits) -> float:
    """Returns how long a chain may wait for admission while the run stands still."""
    return max(TIMEOUT_S, 2 * (limits.chain_timeout_s + limits.score_timeout_s))


def _draws(tasks: Sequence[Task]) -> list[int]:
    """Returns, for each task, how often it occurs before."""
    seen: Counter[str] = Counter()
    draws = []
    for task in tasks:
        draws.append(seen[task.id])
        seen[task.id] += 1
    return draws


async def make_ready(plan: Plan, manager: ResourceManager, tasks: Sequence[Task]) -> None:
    """Make what the environments need for these tasks, such as an index, before the deadlines of the chains begin."""
    for task in tasks:
        try:
            await manager.make_ready(plan.kinds, task)
        except AgentFlyError as error:
            # The chain of this task fails with the same error, and decides whether that stops the run.
            log.warning("task %s: %s", task.id, error)
            return


_collecting = {"runs": 0, "threshold": 0}


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Run Python's cyclic collector less often while chains run.

    Trajectories grow and hold no cycles, but by default the collector traverses them every few hundred allocations: with a
    thousand chains that takes a fifth of a turn. The end of the last concurrent run restores the previous threshold.
    """
    if not _collecting["runs"]:
        _collecting["threshold"] = gc.get_threshold()[0]
        if 0 < _collecting["threshold"] < YOUNG_OBJECTS:
            gc.set_threshold(YOUNG_OBJECTS)
    _collecting["runs"] += 1
    try:
        yield
    finally:
        _collecting["runs"] -= 1
        if not _collecting["runs"]:
            gc.set_threshold(_collecting["threshold"])


def most_in_flight(engine: Engine, wanted: int | None) -> int:
    """Returns the number of concurrent chains: the wanted number, else the engine's capacity, else MAX_CONCURRENCY."""
    return wanted or _capacity(engine) or MAX_CONCURRENCY


def controller(plan: Plan, max_concurrency: int, *, done: int = 0) -> Admission:
    """Returns the admission controller of a run: the engine's capacity and the environment slots limit the chains."""
    manager, kinds, capacity = plan.manager, plan.kinds, _capacity(plan.engine)
    return Admission(
        slots=(lambda: manager.capacity(kinds)) if manager is not None and kinds else None,
        engine_capacity=max_concurrency if capacity is None else min(max_concurrency, capacity),
        done=done,
        holders=manager.who_holds_what if manager is not None else None,
    )


def _capacity(engine: Engine) -> int | None:
    return engine.capacity if isinstance(engine, BoundedEngine) else None


async def _all(workers: list[asyncio.Task[None]]) -> None:
    """Wait for all workers; raise the first bug at once. No deadline here: each chain has one."""
    done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    for worker in done:
        worker.result()
