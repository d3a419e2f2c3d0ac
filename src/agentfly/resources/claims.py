"""Room for several kinds at once: the names of the kinds that a chain may need go in, a claim on all of them comes out.

Chains that take scarce kinds one after the other and in different orders could each hold what the next one waits for. So
whoever may need several kinds waits here first, in line, and claims a place of every one of them together; with a claim it
takes the instances when it needs them, in any order, and none of those who have a claim can lock the others out. A claim
starts nothing and holds no instance. How many claims there is room for is also what bounds the chains in flight (see
`controller`): `Claims.most`. Every wait has a deadline, and its error says who has a claim and what they hold.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ..errors import WorldError
from .deadlines import Deadlines
from .spec import Budget, Spec

if TYPE_CHECKING:
    from .lease import Lease

NO_LIMIT = 1 << 30


class _Waiter:
    __slots__ = ("claims", "deadlines", "future", "lease", "names", "since", "wanted")

    def __init__(
        self, claims: Claims, lease: Lease, names: frozenset[str], future: asyncio.Future[None], deadlines: Deadlines
    ) -> None:
        self.claims = claims
        self.deadlines = deadlines
        self.lease = lease
        self.names = names
        self.future = future
        self.since = time.monotonic()
        self.wanted = True

    def expire(self) -> None:
        self.claims.expire(self)


class Claims:
    """The books of one manager. `specs` is the manager's own table of kinds and pool sizes, which may grow."""

    def __init__(self, specs: Mapping[str, tuple[Spec, int]], budget: Budget) -> None:
        self._specs = specs
        self._budget = budget
        self._strict = budget.cpu is not None or budget.memory_mb is not None
        self._counts: Counter[str] = Counter()
        self._leases: dict[Lease, None] = {}
        self._line: deque[_Waiter] = deque()
        self._in_line: Counter[str] = Counter()
        self._most: dict[tuple[int, frozenset[str]], int] = {}

    @property
    def waiting(self) -> int:
        return sum(waiter.wanted and not waiter.future.done() for waiter in self._line)

    @property
    def taken(self) -> int:
        return len(self._leases)

    def most(self, names: Collection[str]) -> int:
        """How many chains can each hold one of all these kinds at the same time; at least 1."""
        key = (len(self._specs), frozenset(names))
        found = self._most.get(key)
        if found is None:
            places = min((self._places(name) for name in names), default=NO_LIMIT)
            if self._strict and names:
                places = bisect.bisect_right(range(places + 1), 0, key=lambda n: self._too_much(names, n)) - 1
            found = self._most[key] = max(1, places)
        return found

    async def take(self, lease: Lease, names: frozenset[str], deadline: float, deadlines: Deadlines) -> None:
        """Wait until there is room for all of them, and claim it. `drop` gives it back, once."""
        if not self._in_line.total() and self._room(names):
            self._enter(lease, names)
            return
        waiter = _Waiter(self, lease, names, asyncio.get_running_loop().create_future(), deadlines)
        self._line.append(waiter)
        self._in_line.update(names)
        deadlines.add(deadline, waiter)
        self._serve()  # those before may wait for other kinds
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter.wanted:
                waiter.wanted = False
                deadlines.drop_one()
                self._in_line.subtract(names)
            elif not waiter.future.cancelled() and waiter.future.exception() is None:
                self.drop(lease)  # served and cancelled in the same moment
            self._serve()
            raise

    def drop(self, lease: Lease) -> None:
        """The claim is given back; those who wait are served."""
        if lease in self._leases:
            del self._leases[lease]
            self._counts.subtract(lease.claim)
            lease.claim = frozenset()
            self._serve()

    def close(self, why: str) -> None:
        """Tell those who wait."""
        for waiter in self._line:
            if waiter.wanted:
                waiter.wanted = False
                _refuse(waiter, why)
        self._line.clear()
        self._in_line.clear()

    def expire(self, waiter: _Waiter) -> None:
        self._in_line.subtract(waiter.names)
        _refuse(waiter, self._explain(waiter))
        self._serve()

    def _enter(self, lease: Lease, names: frozenset[str]) -> None:
        lease.claim = names
        self._leases[lease] = None
        self._counts.update(names)

    def _serve(self) -> None:
        """Whoever has room, first come first served: nobody passes one who waits for a kind that it wants too."""
        if not self._line:
            return
        blocked: set[str] = set()
        left: deque[_Waiter] = deque()
        kinds = +self._in_line
        while self._line:
            waiter = self._line.popleft()
            if not waiter.wanted or waiter.future.done():
                continue
            if blocked.isdisjoint(waiter.names) and self._room(waiter.names):
                waiter.wanted = False
                waiter.deadlines.drop_one()
                self._in_line.subtract(waiter.names)
                self._enter(waiter.lease, waiter.names)
                waiter.future.set_result(None)
                continue
            left.append(waiter)
            blocked |= waiter.names
            if self._strict or len(blocked) >= len(kinds):
                break  # kinds share a budget, or everything that is waited for is blocked: the others wait as well
        self._line.extendleft(reversed(left))

    def _room(self, names: frozenset[str]) -> bool:
        if any(self._counts[name] >= self._places(name) for name in names):
            return False
        return not self._strict or not self._leases or self._affordable(self._counts + Counter(names))

    def _places(self, name: str) -> int:
        spec, size = self._specs[name]
        return size * spec.max_chains

    def _affordable(self, claims: Mapping[str, int]) -> bool:
        """Whether the budget holds the instances for so many claims, and what is kept of the kinds that have none."""
        for part in ("cpu", "memory_mb"):
            limit = getattr(self._budget, part)
            if limit is None:
                continue
            used = 0.0
            for name, (spec, _) in self._specs.items():
                instances = -(-claims.get(name, 0) // spec.max_chains)
                used += getattr(spec.cost, part) * max(1, spec.min_warm, instances)
            if used > limit + 1e-9:
                return False
        return True

    def _too_much(self, names: Collection[str], claims: int) -> bool:
        return not self._affordable(dict.fromkeys(names, claims))

    def _explain(self, waiter: _Waiter) -> str:
        wanted = " and ".join(sorted(waiter.names))
        places = ", ".join(f"{self._counts[name]} of {self._places(name)} {name}" for name in sorted(waiter.names))
        some = [lease for _, lease in zip(range(5), self._leases, strict=False)]
        holders = "; ".join(f"{lease.holder} holds {', '.join(lease.handles) or 'nothing yet'}" for lease in some)
        more = f"; and {self.taken - len(some)} more" if self.taken > len(some) else ""
        seconds = time.monotonic() - waiter.since
        return (
            f"{waiter.lease.holder} waited {seconds:.1f} s for {wanted} together and got none: claimed are {places} "
            f"({holders}{more}), {self.waiting} more wait"
        )


def _refuse(waiter: _Waiter, why: str) -> None:
    if not waiter.future.done():
        waiter.future.set_exception(WorldError(why))
        waiter.future.exception()  # it may be cancelled before it looks
