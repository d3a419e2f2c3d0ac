"""A pool: the instances of one kind, the chains that wait for one, and when an instance is started or closed.

Each instance is in a slot. Starting and closing run as tasks of the manager. A slot counts against the budget from `starting`
until `closing` is over.

                        take               reset done
    starting --> idle --------> resetting ------------> leased      `leased`: up to `max_chains` chains use it
        |         ^ |               |                    |  |
        |         | |               | failed             |  |
        |         +-|---------------|--------------------+  |       the last chain leaves, and it may be used again
        | failed    | old, idle     v                       | used up, died, spoiled, retired
        +---------> +----------> closing <------------------+
                                    |
                                    v
                                  closed

Invariants: a slot is in `slots` while it is idle, resetting or leased. It is in `idle` exactly while no chain uses it, and in
`joinable` exactly while it is leased, shared, has room and is not retiring. `leased` is the sum of `num_chains` over slots,
those included that were closed while a chain holds them.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

from ..aio.deadline import within
from ..aio.wait_line import Waiter, WaitLine
from ..errors import ConfigError, WorldError
from ..types import Task
from .gauge import Gauge
from .instance import Instance, backend_of
from .lease import Handle, Slot
from .spec import Spec, failure_of

MAX_STARTING = 8
"""Starts of one kind at the same time; more only slow each other down."""
START_TRIES = 3
"""Starts that may fail in a row before a waiting chain ends with the reason."""
BACKOFF_S, MAX_BACKOFF_S = 0.2, 10.0
DEMAND_WINDOW = 64
"""How many of the last chains predict what the next ones ask for."""
STATS_WINDOW = 1024
"""Latencies and lease times are kept of so many leases."""


class PoolOwner(Protocol):
    """The part of the resource manager that a pool uses."""

    closed: bool
    leased: Gauge

    def room_for(self, pool: Pool) -> bool:
        """Whether the budget has room for one more instance."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that the manager waits for when it is closed."""

    def freed(self) -> None:
        """A share of the budget is free again."""


class Pool:
    """`size` bounds the instances, `order` is the fixed order in which a chain takes several kinds."""

    def __init__(self, owner: PoolOwner, spec: Spec, size: int, order: int, loop: asyncio.AbstractEventLoop) -> None:
        self.owner = owner
        self.spec = spec
        self.size = size
        self.order = order
        self.loop = loop
        self.home_thread = threading.get_ident()
        self.backend = backend_of(spec)
        self.shared = spec.max_chains > 1
        self.has_health = callable(getattr(spec.cls, "healthy", None))
        self.resets_inline = spec.placement == "loop" and not self.has_health
        self._never_wears_out = (spec.max_uses, spec.max_age_s, spec.max_growth_mb, spec.reusable) == (None, None, None, True)
        self.slots: dict[Slot, None] = {}
        self.idle: deque[Slot] = deque()
        self.joinable: deque[Slot] = deque()
        self.line: WaitLine[str, Slot] = WaitLine(self.serve, self.put_back, lambda waiter: WorldError(self.explain(waiter)))
        self.starting = self.closing = self.target = 0
        self.leased = Gauge(owner.leased)
        self.most_waiting = 0
        self.recycled = self.failed = self.started = self.reaped = 0
        self._could_ask = self._asked = 0
        self.latencies: deque[float] = deque(maxlen=STATS_WINDOW)
        self.lease_times: deque[float] = deque(maxlen=STATS_WINDOW)
        self.changed = asyncio.Event()
        """Set, and replaced by a new one, when a start or a close has ended."""
        self._start_tasks: set[asyncio.Task[None]] = set()
        self.last_error: Exception | None = None
        self._failures = 0
        self.retry_at = 0.0

    # ---- taking and giving back

    def take(self) -> Slot | None:
        """A slot with a place for one more chain, or None if there is none or others wait for it."""
        return None if self.line.waiting else self._take_free()

    def _take_free(self) -> Slot | None:
        if self.joinable:
            slot = self.joinable[0]
            slot.num_chains += 1
            if slot.num_chains >= self.spec.max_chains:
                self.joinable.popleft()
        elif self.idle:
            slot = self.idle.pop()  # the last used is the warmest; those that are not needed grow old and are closed
            slot.num_chains = 1
        else:
            return None
        self.leased.add(1)
        return slot

    def enqueue(self, holder: str, deadline: float, front: bool) -> Waiter[str, Slot]:
        """Join the line for a slot; the caller awaits `line.wait`. More instances are started if the pool may grow."""
        waiter = self.line.join(holder, deadline, front=front)
        if self.line.waiting > self.most_waiting:
            self.most_waiting = self.line.waiting
        self.grow()
        return waiter

    def begin_reset(self, slot: Slot) -> None:
        """Let no chain join during the reset.

        A shared slot may be in `joinable` here: a chain joined it, then all chains that had used it left.
        """
        if self.shared and slot in self.joinable:
            self.joinable.remove(slot)

    async def reset(self, slot: Slot, task: Task, deadline: float) -> Any:
        """Reset an instance, after `healthy` if its class has that method. Returns the first observation."""
        instance, limit_s = slot.instance, self.spec.reset_timeout_s
        if self.resets_inline and instance.alive:
            observation = instance.env.reset(task)
            if observation is not None and type(observation) is not str and inspect.isawaitable(observation):
                observation = await within(instance.at_home(observation), _time_left(limit_s, deadline))
            return observation
        if not instance.alive:
            raise WorldError(instance.why or f"{self.spec.name} is closed")
        if self.has_health and not await within(instance.call("healthy", (), {}), _time_left(limit_s, deadline)):
            raise WorldError(f"{self.spec.name} says that it is not healthy")
        return await within(instance.reset(task), _time_left(limit_s, deadline))

    def end_reset(self, slot: Slot) -> None:
        """A shared slot was reset for its first chain: others may join."""
        if slot.live and not slot.retiring and slot.num_chains < self.spec.max_chains:
            self.joinable.append(slot)
            self.serve()

    def reset_failed(self, slot: Slot, given_up: bool) -> None:
        """Close a slot whose reset failed, or was given up in the middle."""
        slot.num_chains -= 1
        self.leased.add(-1)
        if given_up:
            slot.instance.abandon()
        self.discard(slot, failed=True)

    def give_back(self, slot: Slot, spoiled: bool, now: float) -> None:
        """A chain leaves a slot. Every lease of a slot ends here or in `reset_failed`."""
        slot.num_chains -= 1
        self.leased.add(-1)
        slot.uses += 1
        if not slot.live:
            return
        if slot.num_chains:
            if spoiled:
                self.retire(slot)
            elif not slot.retiring and slot not in self.joinable:
                self.joinable.append(slot)
        elif spoiled:
            self.discard(slot, failed=True)
        elif slot.retiring or self._used_up(slot):
            self.discard(slot)
        else:
            if self.shared and slot in self.joinable:
                self.joinable.remove(slot)
            slot.idle_since = now
            self.idle.append(slot)
        if self.line.waiting:
            self.serve()

    def put_back(self, slot: Slot) -> None:
        """Give back a slot that was taken and not used."""
        slot.uses -= 1
        self.give_back(slot, False, time.monotonic())

    def serve(self) -> None:
        """Assign free places to the chains that wait, first come first served; start more instances if some still wait."""
        while (self.idle or self.joinable) and (waiter := self.line.first()) is not None:
            slot = self._take_free()
            assert slot is not None
            self.line.assign(waiter, slot)
        self.grow()

    def _used_up(self, slot: Slot) -> bool:
        if not slot.instance.alive or slot.instance.worn:
            return True
        if self._never_wears_out:
            return False
        spec = self.spec
        if slot.uses and not spec.reusable:
            return True
        if spec.max_uses is not None and slot.uses >= spec.max_uses:
            return True
        if spec.max_age_s is not None and time.monotonic() - slot.started_at >= spec.max_age_s:
            return True
        return spec.max_growth_mb is not None and _growth_mb(slot) >= spec.max_growth_mb

    def explain(self, waiter: Waiter[str, Slot]) -> str:
        """Why a chain has no instance: who holds what."""
        now = time.monotonic()
        handles = [handle for _, handle in zip(range(5), self.handles(), strict=False)]
        holders = ", ".join(f"{handle.lease.holder} for {now - handle.since:.1f} s" for handle in handles) or "no chain"
        num_held = sum(slot.num_chains for slot in self.slots)
        more = f" and {num_held - len(handles)} more" if handles and num_held > len(handles) else ""
        failed = f"; the last start failed: {self.last_error}" if self.last_error is not None else ""
        return (
            f"{waiter.request} waited {now - waiter.since:.1f} s for {self.spec.name} and got none: {num_held} of "
            f"{self.size * self.spec.max_chains} are lent (to {holders}{more}), {self.starting} start, {self.closing} are "
            f"being closed, {self.line.waiting} more wait{failed}"
        )

    def handles(self) -> Iterator[Handle]:
        for slot in self.slots:
            yield from slot.handles

    # ---- demand

    def count_use(self, asked: bool) -> None:
        """A chain that could have asked for this kind has ended; `asked` says whether it did."""
        self._could_ask += 1
        self._asked += asked
        if self._could_ask >= 2 * DEMAND_WINDOW:
            self._could_ask, self._asked = self._could_ask // 2, self._asked // 2

    @property
    def demand(self) -> float:
        """The share of recent chains that asked for this kind; 1.0 until there were enough to tell."""
        return 1.0 if self._could_ask < DEMAND_WINDOW // 4 else self._asked / self._could_ask

    @property
    def count(self) -> int:
        """Instances that take a share of the budget."""
        return len(self.slots) + self.starting + self.closing

    @property
    def floor(self) -> int:
        """Instances that are kept even if no chain uses them."""
        return min(self.size, max(self.spec.min_warm, self.target))

    # ---- starting

    def grow(self) -> None:
        """Start as many instances as chains wait for, or as `floor` wants, within the pool's size and the budget."""
        if len(self.slots) + self.starting + self.closing >= self.size or self.owner.closed:
            return
        waiting = -(-self.line.waiting // self.spec.max_chains) - self.starting
        warm = self.floor - len(self.slots) - self.starting
        if self._failures and (waiting <= 0 or self.slots) and time.monotonic() < self.retry_at:
            return  # the last start failed; the sweep tries again
        for _ in range(max(waiting, warm)):
            if self.starting >= MAX_STARTING or self.count >= self.size or not self.owner.room_for(self):
                break
            self.starting += 1
            self.started += 1
            task = self.owner.spawn(self._start(self.started))
            self._start_tasks.add(task)
            task.add_done_callback(self._start_tasks.discard)

    async def _start(self, number: int) -> None:
        instance = self.backend.create(number)
        error: Exception | None = None
        try:
            await within(instance.start(), self.spec.start_timeout_s)
        except Exception as raised:  # noqa: BLE001 - any way a user's environment can fail to start
            late = WorldError(f"{self.spec.name} did not come up within {self.spec.start_timeout_s:g} s")
            error = failure_of(raised, f"{self.spec.name} did not start", late)
        except BaseException:
            self.starting -= 1
            self._close_later(instance)
            raise
        self.starting -= 1
        if error is not None or self.owner.closed:
            self._close_later(instance)
        if error is not None:
            self._start_failed(error)
        elif not self.owner.closed:
            self._failures, self.last_error = 0, None
            slot = Slot(self, instance, self.spec.name)
            instance.on_death = lambda: self.discard(slot, failed=True, why=instance.why)
            self.slots[slot] = None
            self.idle.append(slot)
            self.serve()
        self._notify()

    def _start_failed(self, error: Exception) -> None:
        self.failed += 1
        self._failures += 1
        self.last_error = error
        self.retry_at = time.monotonic() + min(BACKOFF_S * 2 ** min(self._failures, 10), MAX_BACKOFF_S)
        if not self.slots and (waiter := self.line.first()) is not None:
            # No chain holds an instance, so none will be given back. After several failures in a row the first in line ends
            # with the reason, and another start is tried for the next.
            if self._failures >= START_TRIES or isinstance(error, ConfigError):
                self.line.refuse(waiter, error)
            self.grow()

    # ---- closing

    def spoil(self, slot: Slot, why: str) -> None:
        """A call of a chain was given up in the middle. Other chains of a shared slot may finish."""
        if not slot.live:
            return
        if slot.num_chains > 1:
            self.retire(slot)
        else:
            slot.instance.abandon()
            self.discard(slot, failed=True, why=why)

    def retire(self, slot: Slot) -> None:
        """Let no more chains in; the slot is closed when the last one leaves."""
        slot.retiring = True
        if slot in self.joinable:
            self.joinable.remove(slot)

    def discard(self, slot: Slot, failed: bool = False, why: str = "") -> None:
        """Close a slot now. Chains that hold it get `why` at their next call."""
        if not slot.live:
            return
        slot.live = False
        del self.slots[slot]
        for queue in (self.idle, self.joinable):
            if slot in queue:
                queue.remove(slot)
        if failed:
            self.failed += 1
        else:
            self.recycled += 1
        for handle in slot.handles:
            handle.end(why or f"{self.spec.name} was closed")
        self._close_later(slot.instance)

    def _close_later(self, instance: Instance) -> None:
        instance.on_death = None
        self.closing += 1
        self.owner.spawn(self._close(instance))

    async def _close(self, instance: Instance) -> None:
        try:
            await instance.close(self.spec.close_timeout_s)
        finally:
            self.closing -= 1
            self.owner.freed()
            self._notify()

    def close(self, why: str) -> None:
        """Refuse the chains that wait, end every handle, and close every instance."""
        self.line.close(lambda: WorldError(why))
        for handle in list(self.handles()):
            handle.end(why)
        for task in list(self._start_tasks):
            task.cancel()
        for slot in list(self.slots):
            if slot.num_chains:
                slot.instance.abandon()
            self.discard(slot)

    def sweep(self, now: float, take_back: Callable[[Handle, str], None]) -> None:
        """Periodically: take back what is held too long, close what is not needed, start what is missing."""
        spec = self.spec
        for handle in list(self.handles()):
            if now - handle.since > spec.max_hold_s:
                take_back(
                    handle, f"{handle.lease.holder} held {spec.name} for more than {spec.max_hold_s:g} s; it was taken back"
                )
            elif spec.heartbeat_s is not None and not handle.busy and now - handle.active_at > spec.heartbeat_s:
                silence = f"{handle.lease.holder} gave no sign of life for {spec.heartbeat_s:g} s"
                take_back(handle, f"{silence}; {spec.name} was taken back")
        for slot in list(self.idle):
            unneeded = now - slot.idle_since > spec.idle_s and len(self.slots) > self.floor
            if unneeded or self._used_up(slot):
                self.discard(slot)
        for slot in self.slots:
            slot.instance.tidy()
        self.grow()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def _growth_mb(slot: Slot) -> float:
    """Growth since the end of the first lease, when what an environment loads once is loaded."""
    now = slot.instance.memory_mb()
    if now is None:
        return 0.0
    if slot.baseline_mb is None:
        slot.baseline_mb = now
    return now - slot.baseline_mb


def _time_left(most: float, deadline: float) -> float:
    return min(most, max(0.001, deadline - time.monotonic()))
