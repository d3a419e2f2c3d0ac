"""The instances of one kind: who is idle, who is lent, who waits, and when one is started or closed.

In: requests for a seat and seats given back; out: members, to the first who waits. The waiting line is a deque of futures:
nobody is woken who is not served, and serving one costs the same however many wait. Starting and closing run as tasks of
the manager; a member that is being closed keeps its share of the budget until it is gone. Resetting belongs to the manager,
who knows the task.

    starting -> idle -> lent -> idle ...          lent: `seats` chains hold it, at most `max_chains`
                   \\       \\-> closing -> gone     closing: recycled (used up, old, unneeded) or failed (died, spoiled)
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import AgentFlyError, WorldError
from ..tools.deadline import Expired, within
from .backends.base import Instance
from .backends.registry import backend_of
from .deadlines import Deadlines
from .spec import Spec

if TYPE_CHECKING:
    from .proxy import Handle

MAX_STARTING = 8
"""Starts of one kind at the same time; more only slow each other down."""
BACKOFF_S, MAX_BACKOFF_S = 0.2, 10.0
LATELY = 64
"""How many chains tell what the next ones will ask for."""
WINDOW = 1024
"""Latencies and lease times are those of so many last leases."""


class Owner(Protocol):
    """What a pool needs of its manager."""

    deadlines: Deadlines
    closed: bool

    def room_for(self, pool: Pool) -> bool: ...
    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...
    def freed(self) -> None: ...


class Member:
    """One instance in the pool."""

    __slots__ = ("baseline_mb", "born", "handles", "idle_since", "instance", "live", "pool", "retiring", "seats", "uses")

    def __init__(self, pool: Pool, instance: Instance) -> None:
        self.pool = pool
        self.instance = instance
        self.born = self.idle_since = time.monotonic()
        self.baseline_mb: float | None = None
        self.handles: list[Handle] = []
        self.seats = 0
        self.uses = 0
        self.live = True
        self.retiring = False


class Waiter:
    """A place in the line. `future` gets a member with a seat taken, or the reason why not."""

    __slots__ = ("deadline", "future", "holder", "in_heap", "line", "since", "wanted")

    def __init__(self, line: Pool, holder: str, future: asyncio.Future[Member], deadline: float) -> None:
        self.line = line
        self.holder = holder
        self.future = future
        self.deadline = deadline
        self.since = time.monotonic()
        self.in_heap = False
        self.wanted = True

    def expire(self) -> None:
        self.line.refuse(self, WorldError(self.line.explain(self)))


class Pool:
    def __init__(self, owner: Owner, spec: Spec, size: int, order: int, loop: asyncio.AbstractEventLoop) -> None:
        self.owner = owner
        self.spec = spec
        self.size = size
        self.order = order
        self.loop = loop
        self.home_thread = threading.get_ident()
        self.backend = backend_of(spec)
        self.shared = spec.max_chains > 1
        self.has_health = callable(getattr(spec.cls, "healthy", None))
        self.quick = spec.placement == "loop" and not self.has_health
        self.plain_use = (spec.max_uses, spec.max_age_s, spec.max_growth_mb) == (None, None, None) and spec.reusable
        self.idle: deque[Member] = deque()
        self.part: deque[Member] = deque()
        self.members: dict[Member, None] = {}
        self.waiters: deque[Waiter] = deque()
        self.waiting = self.starting = self.closing = self.target = 0
        self.lent = self.most_lent = self.most_waiting = 0
        self._might = self._did = 0
        self.recycled = self.failed = self.started = self.reaped = 0
        self.latencies: deque[float] = deque(maxlen=WINDOW)
        self.lease_times: deque[float] = deque(maxlen=WINDOW)
        self.changed: list[asyncio.Future[None]] = []
        self.start_tasks: set[asyncio.Task[None]] = set()
        self.last_error: Exception | None = None
        self._failures = 0
        self.retry_at = 0.0
        self._stale = 0
        self._horizon = 0.0
        owner.deadlines.lines.append(self)

    # ---- seats

    def take(self) -> Member | None:
        """A free seat, now, if nobody is before us."""
        if self.waiting:
            return None
        return self._free_seat()

    def _free_seat(self) -> Member | None:
        if self.part:
            member = self.part[0]
            member.seats += 1
            if member.seats >= self.spec.max_chains:
                self.part.popleft()
        elif self.idle:
            member = self.idle.pop()  # the last used is the warmest; the others grow old and are closed
            member.seats = 1
        else:
            return None
        self.lent += 1
        if self.lent > self.most_lent:
            self.most_lent = self.lent
        return member

    def shut(self, member: Member) -> None:
        """It is about to be reset: nobody joins meanwhile, though it may have been open to others before they all left."""
        if self.shared and member in self.part:
            self.part.remove(member)

    def open(self, member: Member) -> None:
        """A shared member has been reset for its first chain: others may join."""
        if member.live and not member.retiring and member.seats < self.spec.max_chains:
            self.part.append(member)
            self.pump()

    def give_back(self, member: Member, spoiled: bool, now: float) -> None:
        """A seat is free again. Every way of giving back ends here, or in `discard`."""
        member.seats -= 1
        self.lent -= 1
        member.uses += 1
        if not member.live:
            return
        if member.seats:
            if spoiled:
                self.retire(member)
            elif not member.retiring and member not in self.part:
                self.part.append(member)
        elif spoiled:
            self.discard(member, failed=True)
        elif member.retiring or self._used_up(member):
            self.discard(member)
        else:
            if self.shared and member in self.part:
                self.part.remove(member)
            member.idle_since = now
            self.idle.append(member)
        if self.waiting:
            self.pump()

    def _used_up(self, member: Member) -> bool:
        if self.plain_use:
            return not member.instance.alive
        spec = self.spec
        if (member.uses and not spec.reusable) or not member.instance.alive:
            return True
        if spec.max_uses is not None and member.uses >= spec.max_uses:
            return True
        if spec.max_age_s is not None and time.monotonic() - member.born >= spec.max_age_s:
            return True
        return spec.max_growth_mb is not None and self._grown(member) >= spec.max_growth_mb

    @staticmethod
    def _grown(member: Member) -> float:
        """Measured from the end of its first lease, when what it loads once is loaded."""
        now = member.instance.memory_mb()
        if now is None:
            return 0.0
        if member.baseline_mb is None:
            member.baseline_mb = now
        return now - member.baseline_mb

    # ---- the line

    def enqueue(self, holder: str, deadline: float, front: bool) -> Waiter:
        waiter = Waiter(self, holder, self.loop.create_future(), deadline)
        if front:
            self.waiters.appendleft(waiter)
        else:
            self.waiters.append(waiter)
        self.waiting += 1
        if self.waiting > self.most_waiting:
            self.most_waiting = self.waiting
        if front or deadline < self._horizon:
            waiter.in_heap = True  # it may be due before those in front of it
            self.owner.deadlines.add(deadline, waiter)
        else:
            self._horizon = deadline
            self.owner.deadlines.wake_by(deadline)
        self.grow()
        return waiter

    def forsake(self, waiter: Waiter, error: BaseException) -> None:
        """Whoever waited waits no longer; what it has been given in the very moment it was cancelled goes to the next."""
        if not waiter.wanted and not isinstance(error, asyncio.CancelledError):
            return  # it was refused
        if waiter.wanted:
            self._unwant(waiter)
            self._gone_from_line()
        elif waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
            self.put_back(waiter.future.result())
        if self.waiting and (self.idle or self.part):
            self.pump()  # someone may have lined up behind one who no longer waited

    def put_back(self, member: Member) -> None:
        """A seat that was taken and never used."""
        member.uses -= 1
        self.give_back(member, False, time.monotonic())

    def refuse(self, waiter: Waiter, error: Exception) -> None:
        if not waiter.future.done():
            waiter.future.set_exception(error)
            waiter.future.exception()  # it may be cancelled before it looks
        self._gone_from_line()

    def _gone_from_line(self) -> None:
        self.waiting -= 1
        self._stale += 1
        if self._stale > 64 and self._stale * 2 > len(self.waiters):
            self.waiters = deque(waiter for waiter in self.waiters if waiter.wanted)
            self._stale = 0

    def _unwant(self, waiter: Waiter) -> None:
        waiter.wanted = False
        if waiter.in_heap:
            self.owner.deadlines.drop_one()

    def expire_until(self, now: float) -> float:
        """As a line of the manager's deadlines."""
        while self.waiters:
            waiter = self.waiters[0]
            if waiter.wanted and not waiter.future.done():
                if waiter.deadline > now:
                    return waiter.deadline
                self._unwant(waiter)
                waiter.expire()
            if self.waiters and self.waiters[0] is waiter:
                self.waiters.popleft()
                self._stale = max(0, self._stale - 1)
        self._horizon = 0.0
        return math.inf

    def _first(self) -> Waiter | None:
        while self.waiters:
            waiter = self.waiters.popleft()
            if waiter.wanted and not waiter.future.done():  # done: cancelled a moment ago, and not yet forsaken
                return waiter
            self._stale = max(0, self._stale - 1)
        return None

    def pump(self) -> None:
        """Serve those who wait, first come first served; start more where that is not enough."""
        while self.waiting and (self.idle or self.part):
            waiter = self._first()
            if waiter is None:
                break
            member = self._free_seat()
            assert member is not None
            self._unwant(waiter)
            self.waiting -= 1
            waiter.future.set_result(member)
        self.grow()

    def explain(self, waiter: Waiter) -> str:
        """Why there is none: who holds what."""
        now = time.monotonic()
        handles = [handle for _, handle in zip(range(5), self.handles(), strict=False)]
        holders = ", ".join(f"{handle.lease.holder} for {now - handle.since:.1f} s" for handle in handles) or "nobody"
        num_held = sum(member.seats for member in self.members)
        more = f" and {num_held - len(handles)} more" if handles and num_held > len(handles) else ""
        failed = f"; the last start failed: {self.last_error}" if self.last_error is not None else ""
        return (
            f"{waiter.holder} waited {now - waiter.since:.1f} s for {self.spec.name} and got none: {num_held} of "
            f"{self.size * self.spec.max_chains} are lent (to {holders}{more}), {self.starting} start, {self.closing} are "
            f"being closed, {self.waiting} wait{failed}"
        )

    def handles(self) -> Iterator[Handle]:
        for member in self.members:
            yield from member.handles

    # ---- birth and death

    def count_use(self, asked: bool) -> None:
        """A chain that might have asked for this kind has ended, and did or did not."""
        self._might += 1
        self._did += asked
        if self._might >= 2 * LATELY:
            self._might, self._did = self._might // 2, self._did // 2

    @property
    def demand(self) -> float:
        """The share of chains that asked for one lately; all of them, until there were enough to tell."""
        return 1.0 if self._might < LATELY // 4 else self._did / self._might

    @property
    def count(self) -> int:
        """Everything that takes a share of the budget."""
        return len(self.members) + self.starting + self.closing

    @property
    def floor(self) -> int:
        """How many are kept though nobody uses them."""
        return min(self.size, max(self.spec.min_warm, self.target))

    def grow(self) -> None:
        """Start what is wanted and allowed."""
        if len(self.members) + self.starting + self.closing >= self.size or self.owner.closed:
            return
        waiting = -(-self.waiting // self.spec.max_chains) - self.starting
        warm = self.floor - len(self.members) - self.starting
        if self._failures and (waiting <= 0 or self.members) and time.monotonic() < self.retry_at:
            return  # the last start failed; the sweep tries again
        for _ in range(max(waiting, warm)):
            if self.starting >= MAX_STARTING or self.count >= self.size or not self.owner.room_for(self):
                break
            self.starting += 1
            self.started += 1
            task = self.owner.spawn(self._start(self.started))
            self.start_tasks.add(task)
            task.add_done_callback(self.start_tasks.discard)

    async def _start(self, number: int) -> None:
        instance = self.backend.create(number)
        try:
            await within(instance.start(), self.spec.start_timeout_s)
        except Expired:
            error: Exception | None = WorldError(f"{self.spec.name} did not come up within {self.spec.start_timeout_s:g} s")
        except AgentFlyError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - any way a user's environment can fail to start
            error = WorldError(f"{self.spec.name} did not start: {type(raised).__name__}: {raised}")
        except BaseException:
            self.starting -= 1
            self._close_later(instance)
            raise
        else:
            error = None
        self.starting -= 1
        if error is not None or self.owner.closed:
            self._close_later(instance)
        if error is not None:
            self._start_failed(error)
        elif not self.owner.closed:
            self._failures, self.last_error = 0, None
            member = Member(self, instance)
            instance.on_death = lambda: self._died(member)
            self.members[member] = None
            self.idle.append(member)
            self.pump()
        self._tell()

    def _start_failed(self, error: Exception) -> None:
        self.failed += 1
        self._failures += 1
        self.last_error = error
        self.retry_at = time.monotonic() + min(BACKOFF_S * 2 ** min(self._failures, 10), MAX_BACKOFF_S)
        if self.waiting and not self.members and (waiter := self._first()) is not None:
            # Nobody will give one back: the first in line ends with the reason, and the next gets a start of its own.
            self._unwant(waiter)
            self.refuse(waiter, error)
            self._stale = max(0, self._stale - 1)
            self.grow()

    def _died(self, member: Member) -> None:
        if member.live:
            self.discard(member, failed=True, why=member.instance.why)

    def spoil(self, member: Member, why: str) -> None:
        """A call was given up in the middle."""
        if not member.live:
            return
        if member.seats > 1:
            self.retire(member)
        else:
            member.instance.abandon()
            self.discard(member, failed=True, why=why)

    def retire(self, member: Member) -> None:
        """No new chains; closed when the last one leaves."""
        member.retiring = True
        if member in self.part:
            self.part.remove(member)

    def discard(self, member: Member, failed: bool = False, why: str = "") -> None:
        """Close it, whoever holds it."""
        if not member.live:
            return
        member.live = False
        del self.members[member]
        for line in (self.idle, self.part):
            if member in line:
                line.remove(member)
        if failed:
            self.failed += 1
        else:
            self.recycled += 1
        for handle in member.handles:
            handle.end(why or f"{self.spec.name} was closed")
        self._close_later(member.instance)

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
            self._tell()

    def sweep(self, now: float, end: Callable[[Handle, str], None]) -> None:
        """Now and then: take back what is held too long, close what nobody needs, start what is missing."""
        spec = self.spec
        for handle in list(self.handles()):
            if now - handle.since > spec.max_hold_s:
                end(handle, f"{handle.lease.holder} held {spec.name} for more than {spec.max_hold_s:g} s; it was taken back")
            elif spec.heartbeat_s is not None and not handle.busy and now - handle.beat > spec.heartbeat_s:
                end(handle, f"{handle.lease.holder} gave no sign of life for {spec.heartbeat_s:g} s; {spec.name} is taken back")
        for member in list(self.idle):
            unneeded = now - member.idle_since > spec.idle_s and len(self.members) > self.floor
            if unneeded or self._used_up(member):
                self.discard(member)
        for member in self.members:
            member.instance.tidy()
        self.grow()

    def _tell(self) -> None:
        changed, self.changed = self.changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)
