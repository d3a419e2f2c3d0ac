"""Chains that need several scarce kinds: in whatever order they ask, each is served, and no place is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentfly.errors import WorldError
from agentfly.resources import Budget, Cost, Lease, ResourceManager, spec_of
from tests.virtual_time import virtual_time

from .worlds import TASK, Board, Chalk, Library, Once, task

__all__ = ["virtual_time"]
pytestmark = pytest.mark.usefixtures("virtual_time")

BOTH = (Board, Chalk)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Any:
    Board.open.clear()
    yield
    assert not +Board.open


def empty(manager: ResourceManager) -> bool:
    return manager.holders() == {} and manager.claims.taken == manager.claims.waiting == 0 and not +manager.claims._counts


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("budget", [None, Budget(memory_mb=30)], ids=["pools", "budget"])
def test_sixty_chains_that_ask_for_two_scarce_kinds_in_either_order_are_all_served(budget: Budget | None) -> None:
    async def main() -> None:
        async with ResourceManager(budget, *(spec_of(kind, max=2) for kind in BOTH)) as manager:
            served: list[int] = []

            async def chain(number: int) -> None:
                first, second = BOTH if number % 2 else BOTH[::-1]
                async with manager.lease([], task(number), f"chain {number}", 60, may=BOTH) as lease:
                    for kind in (first, second):
                        await asyncio.sleep(0)
                        await lease.need([kind], 60)
                        lease[kind].write("mine")
                        await asyncio.sleep(0)
                    assert [lease[kind].read() for kind in BOTH] == [["mine"], ["mine"]]
                served.append(number)

            await asyncio.gather(*(chain(number) for number in range(60)))
            assert sorted(served) == list(range(60))
            assert empty(manager)

    run(main)


def test_without_a_claim_on_the_second_kind_some_of_them_are_refused() -> None:
    """The control of the test above: the claim makes the difference."""

    async def main() -> None:
        async with ResourceManager(None, *(spec_of(kind, max=2) for kind in BOTH)) as manager:
            lost = 0

            async def chain(number: int) -> None:
                nonlocal lost
                first, second = BOTH if number % 2 else BOTH[::-1]
                async with manager.lease([first], task(number), f"chain {number}", 60) as lease:
                    await asyncio.sleep(0)
                    try:
                        await lease.need([second], 60)
                    except WorldError:
                        lost += 1

            await asyncio.gather(*(chain(number) for number in range(60)))
            assert lost > 0
            assert empty(manager)

    run(main)


def test_a_claim_starts_nothing_and_is_given_back_with_the_lease() -> None:
    async def main() -> None:
        async with ResourceManager(None, *(spec_of(kind, max=1) for kind in BOTH)) as manager:
            async with manager.lease([], TASK, "idle", may=BOTH):
                assert manager.claims.taken == 0  # it has not asked for anything yet
            async with manager.lease([Board], TASK, "one", may=BOTH) as lease:
                assert lease.claim == {"Board", "Chalk"}
                assert Board.open == {"Board": 1}
                with pytest.raises(
                    WorldError, match=r"two waited .* for Board and Chalk together .*1 of 1 Board.*\(one holds Board\)"
                ):
                    await manager.acquire([Chalk], TASK, "two", 0.02, may=BOTH)
                await lease.need([Chalk], 60)
            assert empty(manager)

    run(main)


def test_a_chain_cancelled_while_it_waits_for_a_claim_or_in_the_tick_it_is_served_leaks_nothing() -> None:
    async def main() -> None:
        async with ResourceManager(None, *(spec_of(kind, max=1) for kind in BOTH)) as manager:
            first = await manager.acquire(BOTH, TASK, "first")
            waiting = [asyncio.create_task(manager.acquire([Chalk], TASK, f"w{n}", may=BOTH)) for n in range(3)]
            await until(lambda: manager.claims.waiting == 3)
            waiting[1].cancel()
            await asyncio.sleep(0)
            await first.release()  # serves the first in line
            waiting[0].cancel()  # in the same tick of the loop
            last = await asyncio.wait_for(waiting[2], 60)
            assert [each.cancelled() for each in waiting] == [True, True, False]
            await last.release()
            assert empty(manager)

    run(main)


def test_a_kind_that_fails_and_a_chain_that_hangs_give_their_claims_back() -> None:
    async def main() -> None:
        specs = [spec_of(Board, max=1, max_hold_s=0.5), spec_of(Chalk, max=1)]
        async with ResourceManager(None, *specs, sweep_s=0.01) as manager:
            bad = type(TASK)("bad", (), {"refuse": True})
            with pytest.raises(WorldError, match="no such board"):
                await manager.acquire(BOTH, bad, "unlucky", 60)
            assert empty(manager)
            hanging = await manager.acquire([Board], TASK, "hanging", may=BOTH)
            async with manager.lease(BOTH, TASK, "next", 60) as lease:  # served when the other's time is up
                assert hanging.claim == frozenset()
                with pytest.raises(WorldError, match="hanging held Board"):
                    hanging[Board].read()
                assert lease.claim == {"Board", "Chalk"}
            await hanging.release()
            assert empty(manager)

    run(main)


def test_a_waiter_overtakes_only_waiters_that_want_other_kinds() -> None:
    async def main() -> None:
        kinds = (Board, Chalk, Once, Library)
        async with ResourceManager(None, *(spec_of(kind, max=1) for kind in kinds)) as manager:
            holder = await manager.acquire([Board, Chalk], TASK, "holder")
            order: list[str] = []

            async def chain(name: str, wanted: list[type]) -> None:
                async with manager.lease(wanted, TASK, name, 60):
                    order.append(name)

            same = asyncio.create_task(chain("same", [Board, Chalk]))
            await until(lambda: manager.claims.waiting == 1)
            overlapping = asyncio.create_task(chain("overlapping", [Chalk, Once]))
            await until(lambda: manager.claims.waiting == 2)
            await chain("other", [Library])
            behind = asyncio.create_task(chain("behind", [Once, Library]))  # the one before it waits for Once too
            await until(lambda: manager.claims.waiting == 3)
            await holder.release()
            await asyncio.gather(same, overlapping, behind)
            assert order == ["other", "same", "overlapping", "behind"]
            assert empty(manager)
            both = await manager.acquire([Board, Chalk], TASK, "holder")
            waiting = asyncio.create_task(chain("waits", [Board, Chalk]))
            await until(lambda: manager.claims.waiting == 1)
            await asyncio.wait_for(chain("free", [Once, Library]), 60)  # shares no kind with the chains that wait
            await both.release()
            await waiting

    run(main)


def test_a_closed_manager_refuses_chains_that_wait_for_a_claim() -> None:
    async def main() -> None:
        manager = ResourceManager(None, *(spec_of(kind, max=1) for kind in BOTH))
        lease = await manager.acquire(BOTH, TASK, "holder")
        waiting = asyncio.create_task(manager.acquire(BOTH, TASK, "waiter"))
        await until(lambda: manager.claims.waiting == 1)
        await manager.close()
        with pytest.raises(WorldError, match="was closed"):
            await waiting
        await lease.release()
        assert empty(manager)

    run(main)


def test_capacity_is_what_pools_and_budget_hold_together() -> None:
    rng = random.Random(4)
    for _ in range(200):
        sizes = [rng.randint(1, 6) for _ in range(3)]
        shares = [rng.choice([1, 1, 2]) for _ in range(3)]
        costs = [rng.choice([0, 5, 10]) for _ in range(3)]
        limit = sum(costs) + rng.randint(1, 60)
        budget = Budget(memory_mb=limit)
        specs = [
            spec_of(
                Board,
                name=f"k{i}",
                max=min(sizes[i], limit // max(1, costs[i])),
                cost=Cost(memory_mb=costs[i]),
                max_chains=share,
            )
            for i, share in enumerate(shares)
        ]
        manager = ResourceManager(budget, *specs)
        for names in itertools.chain.from_iterable(itertools.combinations(["k0", "k1", "k2"], n) for n in (1, 2, 3)):
            by_hand = 0
            while True:
                instances = [-(-(by_hand + 1) // shares[i]) if f"k{i}" in names else 1 for i in range(3)]
                fits = all(
                    n <= (spec.max or 0) for i, (n, spec) in enumerate(zip(instances, specs, strict=True)) if f"k{i}" in names
                )
                if not fits or sum(n * cost for n, cost in zip(instances, costs, strict=True)) > limit:
                    break
                by_hand += 1
            assert manager.capacity(names) == max(1, by_hand), (names, sizes, shares, costs, limit)


def test_instances_are_warmed_for_the_share_of_chains_that_asked_for_the_kind_lately() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=40), spec_of(Chalk, max=40)) as manager:
            manager.expect(20, BOTH)
            await until(lambda: manager.metrics()["resources/total/idle"] == 40)  # nothing is known: one for each
            for number in range(40):
                async with manager.lease([Board], TASK, may=BOTH) as lease:
                    if number % 4 == 0:
                        await lease.need([Chalk])
            manager.expect(40, BOTH)
            assert (manager._pools["Board"].target, manager._pools["Chalk"].target) == (40, 10)

    run(main)


def test_random_claims_cancellations_and_timeouts_leave_no_claim_behind() -> None:
    async def main() -> None:
        rng = random.Random(11)
        kinds = (Board, Chalk, Once)
        async with ResourceManager(None, *(spec_of(kind, max=2) for kind in kinds), sweep_s=0.01) as manager:
            lost = served = 0

            async def chain(number: int) -> None:
                nonlocal lost, served
                wanted = rng.sample(kinds, rng.randint(1, 3))
                lease: Lease | None = None
                try:
                    lease = await manager.acquire(wanted[:1], task(number), None, rng.choice([0.001, 60]), may=wanted)
                    for kind in wanted[1:]:
                        await asyncio.sleep(0)
                        await lease.need([kind], 60)
                    served += 1
                except WorldError as error:
                    if "waited" not in str(error):
                        raise  # a deadline is fine; a ring is not
                    lost += 1
                finally:
                    if lease is not None:
                        await lease.release()

            running: set[asyncio.Task[None]] = set()
            for number in range(2_000):
                running.add(asyncio.create_task(chain(number)))
                if number % 3 == 0:
                    rng.choice(sorted(running, key=id)).cancel()
                if len(running) > 30:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for each in [each for each in running if each.done()]:
                    running.discard(each)
                    if not each.cancelled():
                        each.result()
            await asyncio.gather(*running, return_exceptions=True)
            assert served > 500
            assert empty(manager)

    run(main)
