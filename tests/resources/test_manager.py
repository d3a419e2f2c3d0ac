"""Pools and leases of environments in the event loop: who gets an instance, and what happens to it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentfly.errors import ConfigError, DeadlineError, UnknownName, WorldError
from agentfly.resources import Budget, Cost, Lease, ResourceManager, Spec, spec_of
from agentfly.resources.manager import RESET_TRIES
from agentfly.types import Task
from tests.virtual_time import virtual_time

from .worlds import TASK, Board, Chalk, Library, NeverUp, Once, Sickly, task

__all__ = ["virtual_time"]
pytestmark = pytest.mark.usefixtures("virtual_time")


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Any:
    Board.open.clear()
    yield
    assert not +Board.open


def gauge(manager: ResourceManager, kind: str, name: str) -> float:
    return manager.metrics()[f"resources/{kind}/{name}"]


def test_a_lease_is_reset_for_its_task_and_shows_nothing_of_the_last_chain() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=1)) as manager:
            async with manager.lease([Board], task(1), "first") as lease:
                assert lease.observation(Board) == "board of task-1"
                lease[Board].write("a secret")
            async with manager.lease(["Board"], task(2), "second") as lease:
                assert lease["Board"].read() == []
                assert isinstance(lease[Board], Board)
                assert lease[Board].task.id == "task-2"
            assert gauge(manager, "Board", "started") == 1

    run(main)


def test_waiting_chains_are_served_in_the_order_they_came() -> None:
    async def main() -> None:
        served: list[int] = []
        async with ResourceManager(None, spec_of(Board, max=2)) as manager:

            async def chain(number: int) -> None:
                async with manager.lease([Board], TASK, f"chain {number}"):
                    served.append(number)
                    await asyncio.sleep(0)

            await asyncio.gather(*(chain(number) for number in range(200)))
        assert served == list(range(200))

    run(main)


def test_a_wait_that_is_too_long_says_who_holds_what() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=1)) as manager:
            async with manager.lease([Board], TASK, "chain 7-0"):
                with pytest.raises(WorldError, match=r"chain 8-0 waited .* for Board .*1 of 1 are lent \(to chain 7-0 for"):
                    await manager.acquire([Board], TASK, "chain 8-0", 0.02)
            assert gauge(manager, "Board", "waiting") == 0
            async with manager.lease([Board], TASK, "chain 9-0", 60):
                assert manager.holders() == {"chain 9-0": ["Board"]}

    run(main)


def test_deadlines_pass_in_time_order_whatever_the_order_in_line() -> None:
    async def main() -> None:
        ended: list[float] = []
        async with ResourceManager(None, spec_of(Board, max=1)) as manager, manager.lease([Board], TASK, "holder"):

            async def wait(limit: float) -> None:
                with pytest.raises(WorldError, match="waited"):
                    await manager.acquire([Board], TASK, f"waits {limit}", limit)
                ended.append(limit)

            await asyncio.gather(*(wait(limit) for limit in (0.8, 0.3, 1.4, 0.5, 1.1, 0.01)))
            assert ended == sorted(ended)
            assert gauge(manager, "Board", "waiting") == 0

    run(main)


def test_a_chain_cancelled_while_it_waits_or_in_the_tick_it_is_served_leaks_nothing() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=1)) as manager:
            lease = await manager.acquire([Board], TASK, "holder")
            waiters = [asyncio.create_task(manager.acquire([Board], TASK, f"w{number}")) for number in range(3)]
            await asyncio.sleep(0)
            waiters[1].cancel()
            await asyncio.sleep(0)
            await lease.release()  # hands over to the first
            waiters[0].cancel()  # in the same tick of the loop
            done = await asyncio.wait_for(waiters[2], 60)
            assert waiters[0].cancelled()
            assert waiters[1].cancelled()
            await done.release()
            assert gauge(manager, "Board", "idle") == 1
            assert gauge(manager, "Board", "allocated") == 0

    run(main)


def test_a_newcomer_behind_a_cancelled_waiter_is_served() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=1)) as manager:
            lease = await manager.acquire([Board], TASK, "holder")
            waiter = asyncio.create_task(manager.acquire([Board], TASK, "waiter"))
            await asyncio.sleep(0)
            waiter.cancel()
            await lease.release()  # finds only the cancelled waiter in line, and the instance becomes idle
            newcomer = await manager.acquire([Board], TASK, "newcomer", 60)
            assert manager.holders() == {"newcomer": ["Board"]}
            await newcomer.release()

    run(main)


def test_a_call_that_is_cancelled_or_too_long_closes_the_instance_and_the_next_chain_gets_a_fresh_one() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=1, call_timeout_s=0.05)) as manager:
            lease = await manager.acquire([Board], TASK, "slow")
            waiting = asyncio.create_task(manager.acquire([Board], TASK, "next", 60))
            with pytest.raises(DeadlineError, match=r"Board\.linger took longer than 0\.05 s"):
                await lease[Board].linger(10)
            with pytest.raises(WorldError, match="the environment was closed"):
                lease[Board].write("more")
            second = await waiting  # served although the first has not released
            call = asyncio.create_task(second[Board].linger(0.04))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            with pytest.raises(WorldError, match="cancelled"):
                second[Board].read()
            await lease.release()
            await second.release()
            assert gauge(manager, "Board", "failed") == 2

    run(main)


def test_a_proxy_kept_beyond_its_lease_is_refused() -> None:
    async def main() -> None:
        async with ResourceManager(None, Board) as manager:
            async with manager.lease([Board], TASK) as lease:
                board, write = lease[Board], lease[Board].write
                write("fine")
            with pytest.raises(WorldError, match="the lease is over"):
                write("late")
            with pytest.raises(WorldError, match="the lease is over"):
                board.read()
            with pytest.raises(WorldError, match="is over"):
                lease[Board]

    run(main)


def test_after_a_failed_reset_a_fresh_instance_tells_whether_the_task_is_to_blame() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=1)) as manager:
            async with manager.lease([Board], TASK):
                pass
            bad = Task("bad", (), {"refuse": True})
            with pytest.raises(WorldError, match="Board could not be reset for task bad: RuntimeError: no such board"):
                await manager.acquire([Board], bad, "x", 60)
            assert gauge(manager, "Board", "failed") == 1 + RESET_TRIES  # the used one, then fresh ones
            async with manager.lease([Board], TASK, "y", 60):
                pass

    run(main)


def test_an_environment_that_never_starts_fails_each_chain_and_not_the_run() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(NeverUp, max=2)) as manager:
            results = await asyncio.gather(
                *(manager.acquire([NeverUp], TASK, f"c{n}", 60) for n in range(5)), return_exceptions=True
            )
            assert all(isinstance(result, WorldError) for result in results)
            assert "the display is missing" in str(results[0])
            with pytest.raises(WorldError, match="display"):
                await manager.warm(NeverUp, 2)

    run(main)


def test_an_unhealthy_instance_is_replaced_before_it_is_lent() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Sickly, max=1)) as manager:
            async with manager.lease([Sickly], TASK) as lease:
                lease[Sickly].sick = True
            async with manager.lease([Sickly], TASK) as lease:
                assert lease[Sickly].sick is False
            assert gauge(manager, "Sickly", "failed") == 1

    run(main)


def test_instances_for_single_use_and_those_past_max_uses_are_closed_and_replaced() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Once, max=2), spec_of(Board, max=1, max_uses=3)) as manager:
            for _ in range(6):
                async with manager.lease([Once, Board], TASK, timeout_s=5):
                    pass
            assert gauge(manager, "Once", "started") == 6
            assert gauge(manager, "Board", "started") == 2
            assert gauge(manager, "total", "failed") == 0

    run(main)


def test_an_instance_past_max_age_is_replaced_when_it_is_given_back_or_while_it_is_idle() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=1, max_age_s=3600), sweep_s=0.01) as manager:
            async with manager.lease([Board], TASK):
                (slot,) = manager._pools["Board"].slots
                slot.started_at -= 4000  # it became too old while it was leased
            async with manager.lease([Board], TASK, timeout_s=60):
                assert gauge(manager, "Board", "started") == 2
                assert gauge(manager, "Board", "recycled") == 1
            (slot,) = manager._pools["Board"].slots
            slot.started_at -= 4000  # and this one while it is idle: no request is needed
            async with asyncio.timeout(60):
                while gauge(manager, "Board", "recycled") < 2:
                    await asyncio.sleep(0.01)

    run(main)


def test_a_pool_grows_with_the_chains_that_wait_up_to_its_size() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=5)) as manager:
            leases = []
            for number in range(1, 6):
                leases.append(await manager.acquire([Board], TASK, f"c{number}", 60))
                assert gauge(manager, "Board", "started") == number
            waiting = asyncio.create_task(manager.acquire([Board], TASK, "late", 60))
            for _ in range(20):
                await asyncio.sleep(0)
            figures = manager.metrics()
            assert (figures["resources/Board/started"], figures["resources/Board/waiting"]) == (5, 1)
            assert (figures["resources/Board/most_allocated"], figures["resources/Board/most_waiting"]) == (5, 1)
            await leases.pop().release()
            leases.append(await waiting)
            for lease in leases:
                await lease.release()
            manager.mark()
            figures = manager.metrics()
            assert (figures["resources/Board/most_allocated"], figures["resources/Board/most_waiting"]) == (0, 0)

    run(main)


def test_a_shared_instance_serves_max_chains_and_is_reset_after_the_last_has_left() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Library, max=1)) as manager:
            first = await manager.acquire([Library], task(1), "a")
            first[Library].write("seen by all")
            others = [await manager.acquire([Library], task(n), f"b{n}", 60) for n in (2, 3)]
            assert others[1][Library].read() == ["seen by all"]
            with pytest.raises(WorldError, match="3 of 3 are lent"):
                await manager.acquire([Library], task(4), "c", 0.02)
            for lease in (first, *others):
                await lease.release()
            async with manager.lease([Library], task(5)) as lease:
                assert lease[Library].read() == []
            assert gauge(manager, "Library", "started") == 1

    run(main)


def test_a_shared_instance_whose_chains_left_while_another_came_is_reset_and_joinable_once() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Library, max=1)) as manager:
            early = [await manager.acquire([Library], task(n), f"early {n}") for n in range(3)]
            early[0][Library].write("old")
            coming = asyncio.create_task(manager.acquire([Library], task(9), "late", 60))
            await asyncio.sleep(0)
            for lease in early:  # the first to leave makes room; the others leave before the new chain runs
                await lease.release()
            late = await coming
            assert late[Library].read() == []
            assert len(manager._pools["Library"].joinable) == 1
            late.spoil("it burned down")
            await late.release()
            async with manager.lease([Library], task(10), "next", 60) as lease:
                assert lease.observation(Library) == "board of task-10"
            assert gauge(manager, "Library", "started") == 2

    run(main)


def test_a_chain_that_holds_too_long_or_gives_no_sign_of_life_loses_its_instance() -> None:
    async def main() -> None:
        specs = (spec_of(Board, max=1, max_hold_s=0.03), spec_of(Chalk, max=1, heartbeat_s=30))
        async with ResourceManager(None, *specs, sweep_s=0.01) as manager:
            greedy = await manager.acquire([Board], TASK, "greedy")
            async with manager.lease([Board], TASK, "patient", 60):
                with pytest.raises(WorldError, match=r"greedy held Board for more than 0\.03 s"):
                    greedy[Board].read()
            await greedy.release()
            silent = await manager.acquire([Chalk], TASK, "silent")
            silent.handles["Chalk"].active_at -= 60
            silent.beat()  # just in time
            await asyncio.sleep(0.05)
            assert silent[Chalk].read() == []
            silent.handles["Chalk"].active_at -= 60
            async with manager.lease([Chalk], TASK, "other", 60):
                with pytest.raises(WorldError, match="silent gave no sign of life"):
                    silent[Chalk].read()
            assert gauge(manager, "total", "reaped") >= 2

    run(main)


def test_two_kinds_asked_for_in_either_order_do_not_deadlock() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=2), spec_of(Chalk, max=2)) as manager:

            async def chain(number: int) -> None:
                kinds = [Board, Chalk] if number % 2 else [Chalk, Board]
                async with manager.lease(kinds, TASK, f"chain {number}", 20) as lease:
                    lease[Board].write("x")
                    await asyncio.sleep(0)
                    lease[Chalk].write("y")

            await asyncio.gather(*(chain(number) for number in range(300)))
            assert manager.holders() == {}
            assert gauge(manager, "total", "failed") == 0

    run(main)


def test_chains_that_ask_for_a_second_kind_later_cannot_deadlock() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=1), spec_of(Chalk, max=1)) as manager:
            one = await manager.acquire([Board], TASK, "one")
            two = await manager.acquire([Chalk], TASK, "two")
            waiting = asyncio.create_task(one.need([Chalk], 20))
            await asyncio.sleep(0)
            with pytest.raises(WorldError, match="two waits for Board in a ring that cannot end"):
                await two.need([Board], 20)  # refused at once, long before its deadline
            await two.release()
            await waiting
            assert set(manager.holders()["one"]) == {"Board", "Chalk"}
            await one.release()

            refused = 0

            async def chain(number: int) -> None:
                nonlocal refused
                order = [Board, Chalk] if number % 2 else [Chalk, Board]
                lease = await manager.acquire(order[:1], TASK, f"chain {number}", 20)
                try:
                    await asyncio.sleep(0)
                    await lease.need(order[1:], 20)
                except WorldError:
                    refused += 1
                finally:
                    await lease.release()

            await asyncio.gather(*(chain(number) for number in range(100)))
            assert 0 < refused < 100
            assert manager.holders() == {}

    run(main)


def test_tools_of_one_chain_that_need_a_kind_together_get_one_instance() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Board, max=4)) as manager:
            lease = await manager.acquire([], TASK, "chain")
            await asyncio.gather(*(lease.need([Board]) for _ in range(5)))
            assert gauge(manager, "Board", "allocated") == 1
            await lease.release()

    run(main)


def test_a_timeout_for_a_second_kind_leaves_the_first_with_the_chain() -> None:
    async def main() -> None:
        specs = (spec_of(Board, max=1), spec_of(Chalk, max=1))
        async with ResourceManager(None, *specs) as manager, manager.lease([Chalk], TASK, "other"):
            lease = await manager.acquire([Board], TASK, "chain")
            lease[Board].write("mine")
            with pytest.raises(WorldError, match="lent \\(to other for"):
                await lease.need([Chalk], 0.02)
            assert lease[Board].read() == ["mine"]
            await lease.release()
            with pytest.raises(WorldError):
                await manager.acquire([Board, Chalk], TASK, "both", 0.02)  # all or none
            assert gauge(manager, "Board", "idle") == 1

    run(main)


def test_pools_that_the_budget_cannot_hold_are_refused_before_anything_starts() -> None:
    budget = Budget(memory_mb=100)
    with pytest.raises(ConfigError, match=r"11 instances of 'Board' need 1\.1 CPUs and 110 MB.*set max to 10 or less"):
        ResourceManager(budget, spec_of(Board, max=11))
    with pytest.raises(ConfigError, match="Board, Chalk need at least 110 of memory_mb"):
        ResourceManager(budget, spec_of(Board, min_warm=6, max=6), spec_of(Chalk, min_warm=5, max=5))
    with pytest.raises(ConfigError, match="two kinds of environment are called 'Board'"):
        ResourceManager(None, Board, spec_of(Chalk, name="Board"))
    with pytest.raises(ConfigError, match="unknown placement 'moon'; known: loop, thread, process"):
        ResourceManager(None, spec_of(Board, placement="moon"))
    with pytest.raises(ConfigError, match="min_warm is 3, but max is only 2"):
        spec_of(Board, min_warm=3, max=2)
    with pytest.raises(ConfigError, match="has no setting 'pool_size'"):
        spec_of(Board, pool_size=3)
    with pytest.raises(ConfigError, match="int is not an environment"):
        spec_of(int)
    with pytest.raises(UnknownName, match="no env is called 'gess'; did you mean 'guess'"):
        spec_of("gess")


def test_kinds_share_the_budget_and_an_idle_one_makes_room() -> None:
    async def main() -> None:
        async with ResourceManager(Budget(memory_mb=40), spec_of(Board, max=4), spec_of(Chalk, max=4)) as manager:
            assert await manager.warm(Board, 4) == 3  # one share is kept for the other kind
            leases = [await manager.acquire([Chalk], TASK, f"c{n}", 60) for n in range(3)]
            assert gauge(manager, "total", "allocated") == 3
            with pytest.raises(WorldError):
                await manager.acquire([Chalk], TASK, "c4", 0.05)  # one share stays with the first kind
            for lease in leases:
                await lease.release()
            assert manager.capacity([Board, Chalk]) == 2

    run(main)


def test_the_kind_that_starts_fastest_makes_room_first() -> None:
    async def main() -> None:
        specs = [
            spec_of(Board, max=2, cost=Cost(memory_mb=10, start_s=5)),
            spec_of(Chalk, max=2, cost=Cost(memory_mb=10, start_s=0.1)),
            spec_of(Library, max=2, cost=Cost(memory_mb=10)),
        ]
        async with ResourceManager(Budget(memory_mb=50), *specs) as manager:
            await manager.warm(Board, 2)  # idle for longer, but slower to start again
            await manager.warm(Chalk, 2)
            many = [await manager.acquire([Library], TASK, f"c{n}", 60) for n in range(4)]
            assert (gauge(manager, "Board", "idle"), gauge(manager, "Chalk", "idle")) == (2, 1)
            for lease in many:
                await lease.release()

    run(main)


def test_warm_pools_shrink_when_idle_and_keep_their_minimum() -> None:
    async def main() -> None:
        spec = spec_of(Board, max=8, min_warm=2, idle_s=0.03)
        async with ResourceManager(None, spec, sweep_s=0.01) as manager:
            manager.expect(5)
            assert await manager.warm(Board, 5) == 5
            await asyncio.sleep(0.08)
            assert gauge(manager, "Board", "idle") == 5  # still expected
            manager.expect(0)
            async with asyncio.timeout(60):
                while gauge(manager, "Board", "idle") != 2:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert gauge(manager, "Board", "idle") == 2

    run(main)


def test_a_closed_manager_refuses_waiting_and_new_chains() -> None:
    async def main() -> None:
        manager = ResourceManager(None, spec_of(Board, max=1))
        lease = await manager.acquire([Board], TASK, "holder")
        waiting = asyncio.create_task(manager.acquire([Board], TASK, "waiter"))
        await asyncio.sleep(0)
        await manager.close()
        await manager.close()
        with pytest.raises(WorldError, match="was closed"):
            await waiting
        with pytest.raises(WorldError, match="is closed"):
            await manager.acquire([Board], TASK)
        with pytest.raises(WorldError, match="was closed"):
            lease[Board].read()
        await lease.release()

    run(main)


def test_a_manager_belongs_to_one_event_loop() -> None:
    manager = ResourceManager(None, Board)

    async def use() -> None:
        async with manager.lease([Board], TASK):
            pass
        if manager.holders() == {}:
            manager.expect(0)

    async def main() -> None:
        await use()
        with pytest.raises(ConfigError, match="belongs to the event loop"):
            await asyncio.to_thread(asyncio.run, use())
        await manager.close()

    run(main)


def test_metrics_name_every_kind_and_the_total() -> None:
    async def main() -> None:
        async with ResourceManager(None, Board, Chalk) as manager:
            async with manager.lease([Board, Chalk], TASK):
                figures = manager.metrics()
                await asyncio.sleep(0.01)
            names = {name.split("/")[2] for name in figures}
            assert {name.split("/")[1] for name in figures} == {"Board", "Chalk", "total"}
            assert names >= {
                "allocated",
                "idle",
                "warming",
                "waiting",
                "recycled",
                "failed",
                "acquire_s",
                "acquire_p95_s",
                "lease_s",
            }
            assert figures["resources/total/allocated"] == 2
            assert manager.metrics()["resources/total/lease_s"] > 0

    run(main)


def test_a_plain_class_and_a_function_are_environments_too() -> None:
    class Plain:
        async def reset(self, task: Task) -> dict[str, str]:
            return {"id": task.id}

        async def close(self) -> None:
            self.gone = True

    async def main() -> None:
        spec: Spec = spec_of(lambda: Plain(), name="made", cost=Cost(cpu=1))
        async with ResourceManager(Budget(cpu=2), spec) as manager:
            lease: Lease
            async with manager.lease(["made", Plain], TASK) as lease:
                assert lease.observation("made") == lease.observation(Plain) == {"id": "t"}
                with pytest.raises(ConfigError, match="does not hold 'Board'"):
                    lease[Board]

    run(main)
