"""Many chains at once: tasks in, trajectories out, in the order of the tasks with siblings together.

At most `max_concurrency` chains are in flight (None: as many as the engine serves well), and no more than can each have one of
every kind of environment that they may ask for; those are started ahead of them. A chain that fails is data; a bug stops the
others, waits until they have closed what they held, and is raised. Every finished trajectory is handed to `on_trajectory` at
once, so nothing already computed is lost then.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import AgentFlyError, DataError, InvariantError
from ..resources import Admission, ResourceManager
from ..types import Task, Trajectory
from .chain import Opening, Plan, run_chain

log = logging.getLogger(__name__)
MAX_CONCURRENCY = 256
"""Chains at once, where neither the caller nor the engine says."""

YOUNG_OBJECTS = 20_000
TIMEOUT_S = 3600.0
"""How long a run may stand still before it says so; at least twice as long as a chain may take."""


def prepare(plan: Plan, tasks: Sequence[Task]) -> list[Opening]:
    """Write and render every task's prompt, once for all its chains; a prompt with no room for a reply is refused here."""
    openings = []
    for index, task in enumerate(tasks):
        messages = plan.agent.start(task)
        ids = [] if plan.renderer is None else plan.renderer.start(messages, plan.schemas)
        if len(ids) >= plan.limits.max_context:
            raise DataError(
                f"row {index} (id {task.id!r}): its prompt has {len(ids)} tokens, but the context holds "
                f"{plan.limits.max_context}; shorten the row or raise max_context"
            )
        openings.append(Opening(task, messages, ids))
    return openings


async def run_chains(
    plan: Plan,
    openings: Sequence[Opening],
    *,
    num_chains: int,
    max_concurrency: int | None,
    prefix: str = "",
    step: int | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Run `num_chains` chains of every task. `step` is the training step they are for; None: for no training."""
    total = len(openings) * num_chains
    most = most_in_flight(plan.engine, max_concurrency)
    admission = plan.admission or controller(plan, most)
    timeout_s = max(TIMEOUT_S, 2 * (plan.limits.chain_timeout_s + plan.limits.score_timeout_s))
    results: list[Trajectory | None] = [None] * total
    order = iter(range(total))

    async def work() -> None:
        for index in order:
            position, chain = divmod(index, num_chains)
            opening = openings[position]
            async with admission.slot(admission.done if step is None else step, timeout_s):
                trajectory = await run_chain(plan, opening, chain, f"{prefix}{position}-{chain}")
            results[index] = trajectory
            if on_trajectory is not None:
                on_trajectory(trajectory)

    together = min(most, total, admission.limit or total)
    if plan.manager is not None:
        plan.manager.expect(together, plan.kinds)  # started ahead of the chains that will ask
        await _make_ready(plan, plan.manager, openings)
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


async def _make_ready(plan: Plan, manager: ResourceManager, openings: Sequence[Opening]) -> None:
    """Make what the environments need for these tasks, such as an index, before the deadlines of the chains begin."""
    for opening in openings:
        try:
            await manager.make_ready(plan.kinds, opening.task)
        except AgentFlyError as error:
            # The chain of this task fails with the same error, and decides whether that stops the run.
            log.warning("task %s: %s", opening.task.id, error)
            return


_collecting = {"runs": 0, "threshold": 0}


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let Python's cyclic collector run less often while chains do.

    Trajectories only grow and hold no cycles, yet by default the collector walks them all again every few hundred allocations,
    which at a thousand chains is a fifth of a turn. What was set before comes back with the end of the last run.
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


def most_in_flight(engine: Any, asked: int | None) -> int:
    """Chains at once: what was asked for, else what the engine says that it serves well."""
    capacity: int | None = getattr(engine, "capacity", None)
    return asked or capacity or MAX_CONCURRENCY


def controller(plan: Plan, max_concurrency: int, *, done: int = 0) -> Admission:
    """Who may start: as many as the engine serves and as can each hold one of every kind that they may ask for."""
    manager, kinds = plan.manager, plan.kinds
    engine: int | None = getattr(plan.engine, "capacity", None)
    return Admission(
        slots=(lambda: manager.capacity(kinds)) if manager is not None and kinds else None,
        engine_capacity=max_concurrency if engine is None else min(max_concurrency, engine),
        done=done,
        holders=manager.who_holds_what if manager is not None else None,
    )


async def _all(workers: list[asyncio.Task[None]]) -> None:
    """Wait for all; the first bug is raised at once. Each chain inside carries its own deadline."""
    done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    for worker in done:
        worker.result()
