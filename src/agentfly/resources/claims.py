"""Claims: places of several kinds, reserved together, so that chains cannot deadlock.

Two chains that take scarce kinds in different orders could each hold what the other waits for. So a chain that may need
several kinds first waits here for a claim on one place of each. A claim starts nothing and holds no instance. Chains with a
claim may take their instances in any order: there is a place for each of them. `Claims.most` also bounds the chains in flight
(see `admission`).
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Collection, Mapping

from ..aio.wait_line import Waiter, WaitLine
from ..errors import WorldError
from .lease import Lease
from .spec import Budget, Spec

NO_LIMIT = 1 << 30
Request = tuple[Lease, frozenset[str]]


class Claims:
    """The claims of one manager. `specs` is the manager's table of kinds and pool sizes, which may grow."""

    def __init__(self, specs: Mapping[str, tuple[Spec, int]], budget: Budget) -> None:
        self._specs = specs
        self._budget = budget
        self._counts: Counter[str] = Counter()
        self._leases: dict[Lease, None] = {}
        self._line: WaitLine[Request, Lease] = WaitLine(self._serve, self.drop, self._timed_out)
        self._wanted: Counter[str] = Counter()
        """Kinds that waiters in line want. A waiter that was served counts until its task runs."""
        self._most: dict[tuple[int, frozenset[str]], int] = {}

    @property
    def waiting(self) -> int:
        return self._line.waiting

    @property
    def taken(self) -> int:
        return len(self._leases)

    def most(self, names: Collection[str]) -> int:
        """How many chains can hold one of each of these kinds at the same time; at least 1."""
        key = (len(self._specs), frozenset(names))
        most = self._most.get(key)
        if most is None:
            places = min((self._slots_of(name) for name in names), default=NO_LIMIT)
            if self._budget.limited and names:

                def exceeds(claims: int) -> bool:
                    return self._exceeds(dict.fromkeys(names, claims))

                places = bisect.bisect_right(range(places + 1), False, key=exceeds) - 1
            most = self._most[key] = max(1, places)
        return most

    async def take(self, lease: Lease, names: frozenset[str], deadline: float) -> None:
        """Wait until there is room for all of `names`, and claim it. `drop` gives it back.

        Raises WorldError if there is none before `deadline`; the message says who has a claim and what they hold.
        """
        if not self._line.waiting and self._room(names):
            self._enter(lease, names)
            return
        waiter = self._line.join((lease, names), deadline)
        self._wanted.update(names)
        try:
            self._serve()  # waiters before this one may want other kinds
            await self._line.wait(waiter)
        finally:
            self._wanted.subtract(names)

    def drop(self, lease: Lease) -> None:
        """Give a claim back, if the lease has one, and serve the line."""
        if lease in self._leases:
            del self._leases[lease]
            self._counts.subtract(lease.claim)
            lease.claim = frozenset()
            self._serve()

    def close(self, why: str) -> None:
        """Refuse all that wait."""
        self._line.close(lambda: WorldError(why))

    def _enter(self, lease: Lease, names: frozenset[str]) -> None:
        lease.claim = names
        self._leases[lease] = None
        self._counts.update(names)

    def _serve(self) -> None:
        """Serve the waiters that there is room for, in order. A waiter never overtakes one that wants one of the same kinds."""
        blocked: set[str] = set()
        for waiter in self._line:
            lease, names = waiter.request
            if blocked.isdisjoint(names) and self._room(names):
                self._enter(lease, names)
                self._line.assign(waiter, lease)
                continue
            blocked |= names
            if self._budget.limited or len(blocked) >= len(+self._wanted):
                break  # kinds share a budget, or every kind that is waited for is blocked: the rest waits as well

    def _room(self, names: frozenset[str]) -> bool:
        if any(self._counts[name] >= self._slots_of(name) for name in names):
            return False
        return not self._budget.limited or not self._leases or not self._exceeds(self._counts + Counter(names))

    def _slots_of(self, name: str) -> int:
        spec, size = self._specs[name]
        return size * spec.max_chains

    def _exceeds(self, claims: Mapping[str, int]) -> bool:
        """Whether the instances for these claims, and one or `min_warm` of each other kind, are more than the budget."""
        instances = [
            (spec.cost, max(1, spec.min_warm, -(-claims.get(name, 0) // spec.max_chains)))
            for name, (spec, _) in self._specs.items()
        ]
        return self._budget.exceeded_by(instances) is not None

    def _timed_out(self, waiter: Waiter[Request, Lease]) -> WorldError:
        lease, names = waiter.request
        places = ", ".join(f"{self._counts[name]} of {self._slots_of(name)} {name}" for name in sorted(names))
        some = [lease for _, lease in zip(range(5), self._leases, strict=False)]
        holders = "; ".join(f"{each.holder} holds {', '.join(each.handles) or 'nothing yet'}" for each in some)
        more = f"; and {self.taken - len(some)} more" if self.taken > len(some) else ""
        return WorldError(
            f"{lease.holder} waited {time.monotonic() - waiter.since:.1f} s for {' and '.join(sorted(names))} together and got "
            f"none: claimed are {places} ({holders}{more}), {self.waiting} more wait"
        )
