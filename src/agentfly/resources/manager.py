"""The resource manager: a chain asks for kinds of environments and a task, and gets a lease of instances reset for it.

Every wait has a deadline, and its `WorldError` says who holds what. All pools share one budget.

Chains cannot deadlock. A chain that asks for several kinds, or says that it may (`may`), first gets a claim on all of them
(see `claims`), and the kinds of one request are taken in one fixed order, `Pool.order`. A chain that holds something and asks
for a kind that it never mentioned is the remaining case: when it has to wait, `is_deadlocked` looks for a cycle of chains that
wait for each other, and the chain that closed the cycle is refused at once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..aio.deadline import Expired
from ..errors import ConfigError, DeadlineError, WorldError, contained
from ..types import Task
from .claims import Claims
from .gauge import Gauge
from .instance import backend_of
from .kinds import Kinds
from .lease import EnvKind, Handle, Lease, Slot
from .pool import Pool
from .spec import Budget, failure_of, make_ready
from .stats import is_deadlocked, measure

TIMEOUT_S = 300.0
SWEEP_S = 1.0
RESET_TRIES = 3
"""Fresh instances that may fail to reset for a task before the task is given up."""


class ResourceManager:
    """`specs` are classes, names or `Spec`s. A class that is not among them is registered when a chain first asks for it.

    Belongs to the event loop that first uses it. Use it as `async with ResourceManager(budget, *specs) as manager`.
    """

    def __init__(
        self, budget: Budget | None = None, *specs: object, timeout_s: float = TIMEOUT_S, sweep_s: float = SWEEP_S
    ) -> None:
        self.budget = budget or Budget()
        self.closed = False
        self._timeout_s = timeout_s
        self._sweep_s = sweep_s
        self.kinds = Kinds(self.budget)
        self.claims = Claims(self.kinds.pools, self.budget)
        self.leased = Gauge()
        self._pools: dict[str, Pool] = {}
        self._pool_of: dict[EnvKind, Pool] = {}
        self._held: dict[str, list[Handle]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._out_of_order = 0
        """Chains that wait for a kind although they hold one of a later order: without any there is no cycle."""
        self._lease_numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        for thing in specs:
            self.register(thing)

    # ---- kinds

    def register(self, thing: object, **settings: object) -> str:
        """Add a kind and return its name. Raises ConfigError if the budget cannot hold its pool."""
        spec = self.kinds.add(thing, **settings)
        if self._loop is not None:
            self._open(spec.name)
        else:
            backend_of(spec)  # raises now if the placement is unknown, or a worker could not import the environment
        return spec.name

    def name_of(self, kind: EnvKind) -> str:
        """The name of a kind. A class or plugin name that is new is registered."""
        return self.kinds.name_of(kind) or self.register(kind)

    def _pool(self, kind: EnvKind) -> Pool:
        pool = self._pool_of.get(kind)
        if pool is None:
            pool = self._pool_of[kind] = self._pools[self.name_of(kind)]
        return pool

    def capacity(self, kinds: Iterable[EnvKind]) -> int:
        """How many chains can hold one of each of these kinds at the same time."""
        return self.claims.most({self.name_of(kind) for kind in kinds})

    # ---- the interface of the pools (`pool.PoolOwner`)

    def room_for(self, pool: Pool) -> bool:
        """Whether the budget has room for one more instance of a pool. If not, an idle instance of another kind is closed."""
        if not self.budget.limited:
            return True
        instances = [(pool.spec.cost, pool.count + 1)]
        for other in self._pools.values():
            if other is not pool:
                instances.append((other.spec.cost, max(other.count, 1, other.spec.min_warm)))
        if self.budget.exceeded_by(instances) is None:
            return True
        self._evict(pool)
        return False

    def _evict(self, pool: Pool) -> None:
        """Close one idle instance of another kind: of the kind that starts fastest, then the one that is idle longest."""
        if not pool.line.waiting or any(other.closing for other in self._pools.values()):
            return  # one is being closed already
        others = (other for other in self._pools.values() if other is not pool and other.idle)
        spare = [other for other in others if len(other.slots) > max(1, other.spec.min_warm)]
        if spare:
            victim = min(spare, key=lambda other: (other.spec.cost.start_s, other.idle[0].idle_since))
            victim.target = 0
            victim.discard(victim.idle[0])

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that `close` waits for."""
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def freed(self) -> None:
        """A share of the budget is free again: serve every pool."""
        if not self.closed:
            for pool in self._pools.values():
                pool.serve()

    # ---- leasing

    @asynccontextmanager
    async def lease(
        self,
        kinds: Sequence[EnvKind],
        task: Task,
        holder: str | None = None,
        timeout_s: float | None = None,
        may: Sequence[EnvKind] = (),
    ) -> AsyncIterator[Lease]:
        """`acquire`, with the release at the end of the block."""
        lease = await self.acquire(kinds, task, holder, timeout_s, may)
        try:
            yield lease
        finally:
            lease.release_now()

    async def acquire(
        self,
        kinds: Sequence[EnvKind],
        task: Task,
        holder: str | None = None,
        timeout_s: float | None = None,
        may: Sequence[EnvKind] = (),
    ) -> Lease:
        """A lease of one instance of each kind, reset for `task`. `may` are kinds that the chain may ask for later.

        The caller gives it back with `release`. Raises WorldError if an instance cannot be had within `timeout_s`.
        """
        self._enter()
        lease = Lease(self, task, holder or f"lease {next(self._lease_numbers)}")
        if len(kinds) != 1 or may:
            lease.may = frozenset(map(self.name_of, may))
            await self._ready_for(lease, may)
            await self.add(lease, kinds, timeout_s)
            return lease
        pool = self._pool(kinds[0])  # the common case, without the detours of `add`
        if self.kinds.ready:
            await self._ready_for(lease, kinds)
        now = time.monotonic()
        await self._grant(pool, lease, now + (self._timeout_s if timeout_s is None else timeout_s), now)
        return lease

    async def add(self, lease: Lease, kinds: Sequence[EnvKind], timeout_s: float | None) -> None:
        """Add all of `kinds` to a lease, or none: what was taken before a failure is given back."""
        self._enter()
        await self._ready_for(lease, kinds)
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        pools = {pool for pool in map(self._pool, kinds) if pool.spec.name not in lease.handles}
        taken: list[str] = []
        try:
            if pools and not lease.num_held and not lease.claim:
                claim = lease.may.union(pool.spec.name for pool in pools)
                if len(claim) > 1:
                    await self.claims.take(lease, claim, deadline)
            for pool in sorted(pools, key=lambda pool: pool.order):
                await self._grant(pool, lease, deadline, time.monotonic())
                taken.append(pool.spec.name)
        except BaseException:
            for name in taken:
                if (handle := lease.handles.pop(name, None)) is not None:
                    self._give_back(handle)
            if lease.claim and not lease.num_held:
                self.claims.drop(lease)
            raise
        if lease.over:  # released by another task during the wait
            lease.release_now()

    async def _grant(self, pool: Pool, lease: Lease, deadline: float, started: float) -> None:
        """Add one instance of a pool, reset for the lease's task."""
        holder, again, num_failed = lease.holder, False, 0
        while True:
            slot = pool.take()
            if slot is None and holder in self._held:
                slot = await self._wait_holding(pool, holder, deadline, again)
            elif slot is None:
                slot = await pool.line.wait(pool.enqueue(holder, deadline, again))
            if not slot.live:  # its instance died after it was assigned, before this task ran
                pool.give_back(slot, True, time.monotonic())
                again = True
                continue
            if slot.num_chains > 1:
                observation = None  # shared and in use: it stays as the other chains have it
                break
            pool.begin_reset(slot)
            try:
                observation = await pool.reset(slot, lease.task, deadline)
                break
            except BaseException as raised:
                cancelled = isinstance(raised, asyncio.CancelledError) and _is_cancelled()
                pool.reset_failed(slot, given_up=cancelled or isinstance(raised, Expired))
                if cancelled:
                    raise
                error = contained(raised)
                num_failed += slot.uses == 0
                if num_failed >= RESET_TRIES or isinstance(error, ConfigError) or time.monotonic() >= deadline:
                    name, task = pool.spec.name, lease.task.id
                    late = DeadlineError(f"{name} could not be made ready in time for task {task}")
                    raise failure_of(error, f"{name} could not be reset for task {task}", late) from error
                again = True  # a used instance may have been broken by its last chain, a fresh one may fail by chance
        now = time.monotonic()
        handle = lease.handles[pool.spec.name] = Handle(lease, slot, observation, now, now)
        slot.handles.append(handle)
        lease.num_held += 1
        self._held.setdefault(holder, []).append(handle)
        pool.latencies.append(now - started)
        if pool.shared and slot.num_chains == 1:
            pool.end_reset(slot)

    async def _wait_holding(self, pool: Pool, holder: str, deadline: float, front: bool) -> Slot:
        """Wait for a slot while holding another: the only wait that can deadlock."""
        waiter = pool.enqueue(holder, deadline, front)
        backwards = any(self._pools[handle.slot.kind].order >= pool.order for handle in self._held[holder])
        self._out_of_order += backwards
        try:
            if self._out_of_order and is_deadlocked(holder, self._pools, self._held):
                why = f"{holder} waits for {pool.spec.name} in a ring that cannot end: {pool.explain(waiter)}"
                pool.line.leave(waiter)
                raise WorldError(why)
            return await pool.line.wait(waiter)
        finally:
            self._out_of_order -= backwards

    def release(self, lease: Lease) -> None:
        """End a lease: give back its instances and its claim. A second call does nothing."""
        if not lease.over:
            for name in lease.may:
                if (pool := self._pools.get(name)) is not None:
                    pool.count_use(name in lease.handles)
        lease.over = True
        while lease.handles:
            self._give_back(lease.handles.popitem()[1])
        if lease.claim:
            self.claims.drop(lease)

    def _give_back(self, handle: Handle) -> None:
        slot = handle.slot
        try:
            slot.handles.remove(handle)
        except ValueError:
            return  # the sweep took it back before
        spoiled = handle.why is not None or handle.busy != 0
        handle.end("the lease is over")
        lease = handle.lease
        lease.num_held -= 1
        if lease.claim and not lease.num_held:
            self.claims.drop(lease)  # here and not in `release`: a chain that hangs must not keep its claim
        held = self._held[lease.holder]
        held.remove(handle)
        if not held:
            del self._held[lease.holder]
        pool = self._pools[handle.slot.kind]
        now = time.monotonic()
        pool.lease_times.append(now - handle.since)
        if spoiled and slot.num_chains == 1 and (handle.busy or not slot.retiring):
            slot.instance.abandon()
        pool.give_back(slot, spoiled and not slot.retiring, now)

    def _take_back(self, handle: Handle, why: str) -> None:
        """Take an instance from a chain, which finds out at its next call."""
        self._pools[handle.slot.kind].reaped += 1
        handle.end(why)
        self._give_back(handle)

    # ---- ahead of demand

    async def make_ready(self, kinds: Iterable[EnvKind] | None = None, task: Task | None = None) -> None:
        """Call `make_ready` of these kinds, or of all, for `task` or for no task in particular: see `Environment`."""
        names = self.kinds.ready if kinds is None else self.kinds.ready.keys() & {self.name_of(kind) for kind in kinds}
        for name in list(names):
            await make_ready(name, self.kinds.ready[name], task)

    async def _ready_for(self, lease: Lease, kinds: Iterable[EnvKind]) -> None:
        """Make kinds ready for a lease's task, once per lease and kind."""
        names = {self.name_of(kind) for kind in kinds} - lease.ready
        if self.kinds.ready and names:
            await self.make_ready(names, lease.task)
            lease.ready |= names

    async def warm(self, kind: EnvKind, n: int, timeout_s: float | None = None) -> int:
        """Start instances until there are `n`, or as many as the pool may have. Returns how many there are.

        Raises the error of a start that failed, or WorldError if they do not come up within `timeout_s`.
        """
        self._enter()
        pool = self._pool(kind)
        await self.make_ready([kind])
        pool.target = max(pool.target, min(n, pool.size))
        pool.retry_at = 0.0  # an explicit request does not wait out the pause after a failed start
        pool.grow()
        failed = pool.failed
        until = pool.loop.time() + (self._timeout_s if timeout_s is None else timeout_s)
        try:
            while len(pool.slots) < min(n, pool.size) and (pool.starting or pool.closing):
                async with asyncio.timeout_at(until):
                    await pool.changed.wait()
                if pool.failed > failed and pool.last_error is not None:
                    raise pool.last_error
                pool.grow()
        except TimeoutError:
            raise WorldError(f"{pool.spec.name}: only {len(pool.slots)} of {n} instances came up in time") from None
        return len(pool.slots)

    def expect(self, n: int, kinds: Sequence[EnvKind] | None = None) -> None:
        """A hint that `n` chains come next: instances are started for them and kept. 0 lets the pools shrink again.

        Of a kind that only some of the recent chains asked for, only that share is started.
        """
        self._enter()
        names = list(self._pools) if kinds is None else [self.name_of(kind) for kind in kinds]
        for name in names:
            pool = self._pools[name]
            pool.target = min(pool.size, math.ceil(n * pool.demand / pool.spec.max_chains))
            pool.grow()

    # ---- opening and closing

    def _enter(self) -> None:
        if self.closed:
            raise WorldError("the resource manager is closed")
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            raise ConfigError("a resource manager belongs to the event loop it was first used in; make another for this one")
        self._loop = loop
        for name in self.kinds.pools:
            self._open(name)
        self._sweeper = loop.call_later(self._sweep_s, self._sweep)

    def _open(self, name: str) -> None:
        assert self._loop is not None
        spec, size = self.kinds.pools[name]
        pool = self._pools[name] = Pool(self, spec, size, len(self._pools), self._loop)
        pool.grow()

    def _sweep(self) -> None:
        assert self._loop is not None
        now = time.monotonic()
        for pool in list(self._pools.values()):
            pool.sweep(now, self._take_back)
        self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    async def __aenter__(self) -> ResourceManager:
        """Open the pools, which start `min_warm` instances each, and make all kinds ready."""
        self._enter()
        try:
            await self.make_ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Refuse the chains that wait, end all leases, close every instance. A second call only waits for that."""
        first, self.closed = not self.closed, True
        if self._loop is None:
            return
        if first:
            if self._sweeper is not None:
                self._sweeper.cancel()
            self.claims.close("the resource manager was closed")
            for pool in self._pools.values():
                pool.close("the resource manager was closed")
        specs = [spec for spec, _ in self.kinds.pools.values()]
        slack = 10.0 + max((max(spec.close_timeout_s, spec.start_timeout_s) for spec in specs), default=0.0)
        until = self._loop.time() + slack
        while self._tasks and self._loop.time() < until:
            await asyncio.wait(list(self._tasks), timeout=until - self._loop.time())

    # ---- figures

    def pids(self, kind: EnvKind) -> list[int]:
        """The worker processes of a kind."""
        pool = self._pools.get(self.name_of(kind))
        pids = (slot.instance.pid for slot in pool.slots) if pool is not None else ()
        return sorted({pid for pid in pids if pid is not None})

    def holders(self) -> Mapping[str, list[str]]:
        """The kinds that each chain holds, by the name of the chain."""
        return {holder: [handle.slot.kind for handle in handles] for holder, handles in self._held.items()}

    def who_holds_what(self) -> str:
        """`holders` in words, of the first five."""
        some = [f"{holder} holds {', '.join(kinds)}" for holder, kinds in list(self.holders().items())[:5]]
        more = f"; and {len(self._held) - len(some)} more" if len(self._held) > len(some) else ""
        return "; ".join(some) + more if some else "no environment is lent"

    def metrics(self) -> dict[str, float]:
        """Figures per kind and in total, by name: see `stats.measure`."""
        return measure(self._pools.values(), self.leased)

    def step_metrics(self) -> dict[str, float]:
        """`metrics` of the time since `mark`: `allocated` is its mean, because after a rollout no chain holds anything."""
        gauges = {**{name: pool.leased for name, pool in self._pools.items()}, "total": self.leased}
        return self.metrics() | {f"resources/{name}/allocated": gauge.mean for name, gauge in gauges.items()}

    def mark(self) -> None:
        """Begin a new step: its means and maxima start again."""
        self.leased.mark()
        for pool in self._pools.values():
            pool.leased.mark()
            pool.most_waiting = pool.line.waiting


def _is_cancelled() -> bool:
    """Whether the current task is being cancelled. A CancelledError out of a user's code does not mean that."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
