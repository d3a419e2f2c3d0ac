"""The resource manager: chains ask for kinds of environments and a task, and get a lease of instances that were reset for it.

Every wait has a deadline, and its `WorldError` says who holds what. Books are kept here: what is lent, by whom, and what
all pools together take of the host's budget.

No deadlock. Whoever asks for several kinds, or says that it may (`may`), first claims a place of each together: see
`claims`. The kinds of one request are taken in one fixed order, that in which the manager came to know them. A chain that
holds something and asks for a kind it never mentioned may wait like any other; whenever such a one waits, the books are
examined, and a wait that can never end (each of a ring of chains waits for what the next one holds) is refused at once to
the one that closed the ring.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..errors import AgentFlyError, ConfigError, DeadlineError, WorldError
from ..tools.deadline import Expired, within
from ..types import Task
from .claims import Claims
from .deadlines import Deadlines
from .lease import Kind, Lease
from .pool import Member, Pool
from .proxy import Handle, wrap
from .ready import make_ready
from .spec import Budget, Spec, ready_of, spec_of
from .stats import is_stuck, measure

DEFAULT_MAX = 64
TIMEOUT_S = 300.0
SWEEP_S = 1.0


class ResourceManager:
    """`specs` are classes, names or `Spec`s; a class that is not among them is taken up when a chain first asks for it."""

    def __init__(
        self, budget: Budget | None = None, *specs: Any, timeout_s: float = TIMEOUT_S, sweep_s: float = SWEEP_S
    ) -> None:
        self.budget = budget or Budget()
        self.closed = False
        self._timeout_s = timeout_s
        self._sweep_s = sweep_s
        self._specs: dict[str, tuple[Spec, int]] = {}
        self._slow: dict[str, Callable[[Task | None], Any]] = {}
        self.claims = Claims(self._specs, self.budget)
        self._names: dict[Any, str] = {}
        self._pools: dict[str, Pool] = {}
        self._by_kind: dict[Any, Pool] = {}
        self._held: dict[str, list[Handle]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._out_of_order = 0
        self._count = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.deadlines: Deadlines
        self._sweeper: asyncio.TimerHandle | None = None
        for thing in specs:
            self.register(thing)

    # ---- kinds

    def register(self, thing: Any, **settings: Any) -> str:
        """Make a kind known; its name. A pool that the budget cannot hold is refused here."""
        spec = spec_of(thing, **settings)
        if spec.name in self._specs:
            raise ConfigError(
                f"two kinds of environment are called {spec.name!r}: give one another name, spec_of(..., name='...')"
            )
        fits = self.budget.holds(spec.cost)
        size = spec.max if spec.max is not None else max(1, spec.min_warm, min(DEFAULT_MAX, fits))
        if size > fits:
            cpu, memory = size * spec.cost.cpu, size * spec.cost.memory_mb
            cure = f"set max to {fits} or less, or raise the budget" if fits else "raise the budget: it does not hold even one"
            raise ConfigError(
                f"{size} instance{'s' * (size > 1)} of {spec.name!r} need {cpu:g} CPUs and {memory:g} MB, but the budget is "
                f"{_limit(self.budget.cpu)} CPUs and {_limit(self.budget.memory_mb)} MB: {cure}"
            )
        floors = [*self._specs.values(), (spec, size)]
        for name in ("cpu", "memory_mb"):
            limit = getattr(self.budget, name)
            least = sum(getattr(each.cost, name) * max(1, each.min_warm) for each, _ in floors)
            if limit is not None and least > limit + 1e-9:
                names = ", ".join(each.name for each, _ in floors)
                raise ConfigError(
                    f"the environments {names} need at least {least:g} of {name} (max(1, min_warm) of each), but the budget "
                    f"is {limit:g}"
                )
        self._specs[spec.name] = (spec, size)
        if (ready := ready_of(spec)) is not None:
            self._slow[spec.name] = ready
        self._names.setdefault(thing if not isinstance(thing, Spec) else spec.make, spec.name)
        self._names.setdefault(spec.make, spec.name)
        if self._loop is not None:
            self._open(spec.name)
        else:
            from .backends.registry import backend_of

            backend_of(spec)  # an unknown placement, or what no worker can import, is refused before the run
        return spec.name

    def name_of(self, kind: Kind) -> str:
        """The name of a kind; a class that is new here is taken up."""
        if isinstance(kind, str):
            if kind in self._specs:
                return kind
            return self._names[kind] if kind in self._names else self.register(kind)
        try:
            return self._names[kind]
        except (KeyError, TypeError):
            return self.register(kind)

    def _pool(self, kind: Kind) -> Pool:
        pool = self._by_kind.get(kind)
        if pool is None:
            pool = self._by_kind[kind] = self._pools[self.name_of(kind)]
        return pool

    def capacity(self, kinds: Iterable[Kind]) -> int:
        """How many chains can hold one of each of these kinds at the same time."""
        return self.claims.most({self.name_of(kind) for kind in kinds})

    # ---- the pools' side

    def room_for(self, pool: Pool) -> bool:
        """Whether the budget has room for one more of a pool. Where it has none, an idle instance of another kind is closed."""
        if self.budget.cpu is None and self.budget.memory_mb is None:
            return True
        for name in ("cpu", "memory_mb"):
            limit = getattr(self.budget, name)
            if limit is None:
                continue
            used = getattr(pool.spec.cost, name)
            for other in self._pools.values():
                least = 0 if other is pool else max(1, other.spec.min_warm)
                used += getattr(other.spec.cost, name) * max(other.count, least)
            if used > limit + 1e-9:
                self._evict(pool)
                return False
        return True

    def _evict(self, pool: Pool) -> None:
        """Close the longest idle instance of another kind, unless one is on its way out already."""
        if any(other.closing for other in self._pools.values()):
            return
        others = (other for other in self._pools.values() if other is not pool and other.idle)
        spare = [other for other in others if len(other.members) > max(1, other.spec.min_warm)]
        if pool.waiting and spare:
            oldest = min(spare, key=lambda other: other.idle[0].idle_since)
            oldest.target = 0
            oldest.discard(oldest.idle[0])

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def freed(self) -> None:
        """Some of the budget has come back."""
        if not self.closed:
            for pool in self._pools.values():
                pool.pump()

    # ---- lending

    @asynccontextmanager
    async def lease(
        self,
        kinds: Sequence[Kind],
        task: Task,
        holder: str | None = None,
        timeout_s: float | None = None,
        may: Sequence[Kind] = (),
    ) -> AsyncIterator[Lease]:
        lease = await self.acquire(kinds, task, holder, timeout_s, may)
        try:
            yield lease
        finally:
            lease.release_now()

    async def acquire(
        self,
        kinds: Sequence[Kind],
        task: Task,
        holder: str | None = None,
        timeout_s: float | None = None,
        may: Sequence[Kind] = (),
    ) -> Lease:
        """A lease of one instance of each kind, reset for `task`. Give it back with `release`. `may`: what else it may need."""
        lease = Lease(self, task, holder or f"lease {next(self._count)}")
        self._enter()
        await self._ready_for(lease, (*kinds, *may))
        if len(kinds) == 1 and not may:
            now = time.monotonic()
            await self._grant(self._pool(kinds[0]), lease, now + (self._timeout_s if timeout_s is None else timeout_s), now)
        else:
            lease.may = frozenset(map(self.name_of, may))
            await self.add(lease, kinds, timeout_s)
        return lease

    async def add(self, lease: Lease, kinds: Sequence[Kind], timeout_s: float | None) -> None:
        """All of `kinds`, or none: what was taken before a failure is given back."""
        self._enter()
        await self._ready_for(lease, kinds)
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        pools = {pool for pool in map(self._pool, kinds) if pool.spec.name not in lease.handles}
        taken: list[str] = []
        try:
            if pools and not lease.held and not lease.claim:
                claim = lease.may.union(pool.spec.name for pool in pools)
                if len(claim) > 1:
                    await self.claims.take(lease, claim, deadline, self.deadlines)
            for pool in sorted(pools, key=lambda pool: pool.order):
                await self._grant(pool, lease, deadline, time.monotonic())
                taken.append(pool.spec.name)
        except BaseException:
            for name in taken:
                if (handle := lease.handles.pop(name, None)) is not None:
                    self.give_back(handle)
            if lease.claim and not lease.held:
                self.claims.drop(lease)
            raise
        if lease.over:
            lease.release_now()

    async def _grant(self, pool: Pool, lease: Lease, deadline: float, started: float) -> None:
        """One instance of a pool, ready for the lease's task."""
        holder, again = lease.holder, False
        while True:
            member = pool.take()
            if member is None and holder in self._held:
                member = await self._wait_holding(pool, holder, deadline, again)
            elif member is None:
                waiter = pool.enqueue(holder, deadline, again)
                try:
                    member = await waiter.future
                except BaseException as error:
                    pool.forsake(waiter, error)
                    raise
            if not member.live:  # it died between being handed out and here
                pool.give_back(member, True, time.monotonic())
                again = True
                continue
            if member.seats > 1:
                observation = None  # it is shared: those who are on it have it as it is
                break
            pool.shut(member)
            try:
                if pool.quick and member.instance.alive:
                    observation = member.instance.env.reset(lease.task)
                    if observation is not None and type(observation) is not str and inspect.isawaitable(observation):
                        observation = await within(wrap(observation), _time_left(pool.spec.reset_timeout_s, deadline))
                else:
                    observation = await self._ready(member, lease.task, deadline)
                break
            except BaseException as error:
                used = member.uses > 0
                member.seats -= 1
                pool.lent -= 1
                if isinstance(error, Expired) or not isinstance(error, Exception):
                    member.instance.abandon()
                pool.discard(member, failed=True)
                if not isinstance(error, Exception):
                    raise
                if not used or time.monotonic() >= deadline:
                    raise _why_not_ready(error, pool, lease.task) from error
                again = True  # an instance that was used before may be to blame; a fresh one shows whether the task is
        now = time.monotonic()
        handle = lease.handles[pool.spec.name] = Handle(lease, member, observation, now)
        member.handles.append(handle)
        lease.held += 1
        held = self._held.get(holder)
        if held is None:
            self._held[holder] = [handle]
        else:
            held.append(handle)
        pool.latencies.append(now - started)
        if pool.shared and member.seats == 1:
            pool.open(member)

    async def _wait_holding(self, pool: Pool, holder: str, deadline: float, front: bool) -> Member:
        """Wait in line while holding something else: the only way into a deadlock."""
        waiter = pool.enqueue(holder, deadline, front)
        backwards = any(handle.member.pool.order >= pool.order for handle in self._held[holder])
        self._out_of_order += backwards
        try:
            if self._out_of_order and is_stuck(holder, self._pools.values(), self._held):
                raise WorldError(f"{holder} waits for {pool.spec.name} in a ring that cannot end: {pool.explain(waiter)}")
            return await waiter.future
        except BaseException as error:
            pool.forsake(waiter, error)
            raise
        finally:
            self._out_of_order -= backwards

    async def _ready(self, member: Member, task: Task, deadline: float) -> Any:
        """Look whether it is well, and reset it."""
        instance, pool = member.instance, member.pool
        most = pool.spec.reset_timeout_s
        if not instance.alive:
            raise WorldError(instance.why or f"{pool.spec.name} is closed")
        if pool.has_health and not await within(instance.call("healthy", (), {}), _time_left(most, deadline)):
            raise WorldError(f"{pool.spec.name} says that it is not healthy")
        return await within(instance.reset(task), _time_left(most, deadline))

    def give_back(self, handle: Handle) -> None:
        """One instance comes back; those who wait are served."""
        member = handle.member
        try:
            member.handles.remove(handle)
        except ValueError:
            return  # it was taken back before
        spoiled = handle.why is not None or handle.busy != 0
        handle.end("the lease is over")
        lease = handle.lease
        lease.held -= 1
        if lease.claim and not lease.held:
            self.claims.drop(lease)  # also where the reaper took its last: a chain that hangs keeps no place
        held = self._held[lease.holder]
        if len(held) == 1:
            del self._held[lease.holder]
        else:
            held.remove(handle)
        pool = member.pool
        now = time.monotonic()
        pool.lease_times.append(now - handle.since)
        if spoiled and member.seats == 1 and (handle.busy or not member.retiring):
            member.instance.abandon()
        pool.give_back(member, spoiled and not member.retiring, now)

    def _take_back(self, handle: Handle, why: str) -> None:
        """The reaper's: the holder finds out at its next call."""
        handle.member.pool.reaped += 1
        handle.end(why)
        self.give_back(handle)

    # ---- ahead of demand

    async def make_ready(self, kinds: Iterable[Kind] | None = None, task: Task | None = None) -> None:
        """Have made what these kinds (left out: all) need before an instance is of use, for `task` or none in particular."""
        names = self._slow if kinds is None else self._slow.keys() & {self.name_of(kind) for kind in kinds}
        for name in list(names):
            await make_ready(name, self._slow[name], task)

    async def _ready_for(self, lease: Lease, kinds: Iterable[Kind]) -> None:
        """Once for a lease and a kind, however often its tools ask for it."""
        names = {self.name_of(kind) for kind in kinds} - lease.ready
        if self._slow and names:
            await self.make_ready(names, lease.task)
            lease.ready |= names

    async def warm(self, kind: Kind, n: int, timeout_s: float | None = None) -> int:
        """Have `n` instances ready (or as many as the pool may have); how many there are. A start that fails is raised."""
        self._enter()
        pool = self._pool(kind)
        await self.make_ready([kind])
        pool.target = max(pool.target, min(n, pool.size))
        pool.retry_at = 0.0  # somebody asks for it by name: do not wait out the pause after a failed start
        pool.grow()
        failed = pool.failed
        until = pool.loop.time() + (self._timeout_s if timeout_s is None else timeout_s)
        try:
            while len(pool.members) < min(n, pool.size) and (pool.starting or pool.closing):
                change = pool.loop.create_future()
                pool.changed.append(change)
                async with asyncio.timeout_at(until):
                    await change
                if pool.failed > failed and pool.last_error is not None:
                    raise pool.last_error
                pool.grow()
        except TimeoutError:
            raise WorldError(f"{pool.spec.name}: only {len(pool.members)} of {n} instances came up in time") from None
        return len(pool.members)

    def expect(self, n: int, kinds: Sequence[Kind] | None = None) -> None:
        """A hint: so many chains come next. Instances are started for them, and kept; 0 lets the pools shrink again.

        Of a kind that not every chain asked for lately, as many as they asked for.
        """
        self._enter()
        names = list(self._pools) if kinds is None else [self.name_of(kind) for kind in kinds]
        for name in names:
            pool = self._pools[name]
            pool.target = min(pool.size, math.ceil(n * pool.demand / pool.spec.max_chains))
            pool.grow()

    def count_use(self, lease: Lease) -> None:
        """A lease ends: which of the kinds that it might have asked for it did."""
        for name in lease.may:
            if (pool := self._pools.get(name)) is not None:
                pool.count_use(name in lease.handles)

    # ---- life

    def _enter(self) -> None:
        if self.closed:
            raise WorldError("the resource manager is closed")
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            raise ConfigError("a resource manager belongs to the event loop it was first used in; make another for this one")
        self._loop = loop
        self.deadlines = Deadlines(loop)
        for name in self._specs:
            self._open(name)
        self._sweeper = loop.call_later(self._sweep_s, self._sweep)

    def _open(self, name: str) -> None:
        assert self._loop is not None
        spec, size = self._specs[name]
        pool = self._pools[name] = Pool(self, spec, size, len(self._pools), self._loop)
        pool.grow()

    def _sweep(self) -> None:
        assert self._loop is not None
        now = time.monotonic()
        for pool in list(self._pools.values()):
            pool.sweep(now, self._take_back)
        self._sweeper = self._loop.call_later(self._sweep_s, self._sweep)

    async def __aenter__(self) -> ResourceManager:
        """Pools begin to warm up. What they make once is made now: the first chain starts when it is there."""
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
        """End everything: those who wait are told, leases are over, every instance is closed. Calling it twice is fine."""
        first, self.closed = not self.closed, True
        if self._loop is None:
            return
        if first:
            if self._sweeper is not None:
                self._sweeper.cancel()
            self.claims.close("the resource manager was closed")
            for pool in self._pools.values():
                for waiter in list(pool.waiters):
                    if waiter.wanted:
                        waiter.wanted = False
                        pool.refuse(waiter, WorldError("the resource manager was closed"))
                for handle in list(pool.handles()):
                    handle.end("the resource manager was closed")
                for task in list(pool.start_tasks):
                    task.cancel()
                for member in list(pool.members):
                    if member.seats:
                        member.instance.abandon()
                    pool.discard(member)
            self.deadlines.close()
        slack = 10.0 + max((max(spec.close_timeout_s, spec.start_timeout_s) for spec, _ in self._specs.values()), default=0.0)
        until = self._loop.time() + slack
        while self._tasks and self._loop.time() < until:
            await asyncio.wait(list(self._tasks), timeout=until - self._loop.time())

    # ---- what is seen

    def pids(self, kind: Kind) -> list[int]:
        """The worker processes of a kind."""
        pool = self._pools.get(self.name_of(kind))
        found = (member.instance.pid for member in pool.members) if pool is not None else ()
        return sorted({pid for pid in found if pid is not None})

    def holders(self) -> Mapping[str, list[str]]:
        """Who holds what."""
        return {holder: [handle.member.pool.spec.name for handle in handles] for holder, handles in self._held.items()}

    def who_holds_what(self) -> str:
        """The same in words, of the first few."""
        some = [f"{holder} holds {', '.join(kinds)}" for holder, kinds in list(self.holders().items())[:5]]
        more = f"; and {len(self._held) - len(some)} more" if len(self._held) > len(some) else ""
        return "; ".join(some) + more if some else "no environment is lent"

    def metrics(self) -> dict[str, float]:
        """Figures per kind and in total, by name: see `ledger.measure`."""
        return measure(self._pools.values())

    def mark(self) -> None:
        """A new step begins: the figures that are the most of a step begin again."""
        for pool in self._pools.values():
            pool.most_lent, pool.most_waiting = pool.lent, pool.waiting


def _time_left(most: float, deadline: float) -> float:
    return min(most, max(0.001, deadline - time.monotonic()))


def _why_not_ready(error: Exception, pool: Pool, task: Task) -> Exception:
    if isinstance(error, Expired):
        return DeadlineError(f"{pool.spec.name} could not be made ready in time for task {task.id}")
    if isinstance(error, AgentFlyError):
        return error
    return WorldError(f"{pool.spec.name} could not be reset for task {task.id}: {type(error).__name__}: {error}")


def _limit(value: float | None) -> str:
    return "any number of" if value is None else f"{value:g}"
