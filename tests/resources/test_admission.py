"""Admission: environment slots, engine capacity and staleness together, first come first served."""

from __future__ import annotations

import asyncio

import pytest

from agentfly.errors import ConfigError, DeadlineError, InvariantError
from agentfly.resources import Admission


def test_no_more_chains_run_than_slots_and_the_engine_allow_and_they_start_in_order() -> None:
    async def main() -> None:
        slots = 3
        admission = Admission(lambda: slots, engine_capacity=5)
        running, most, started = 0, 0, []

        async def chain(number: int) -> None:
            nonlocal running, most
            async with admission.slot():
                started.append(number)
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1

        await asyncio.gather(*(chain(number) for number in range(50)))
        assert most == 3
        slots = 9
        await asyncio.gather(*(chain(number) for number in range(50, 100)))
        assert most == 5
        assert started == list(range(100))
        assert admission.running == admission.waiting == 0

    asyncio.run(main())


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_a_chain_starts_at_most_max_lag_steps_ahead_of_the_weights(max_lag: int) -> None:
    async def main() -> None:
        admission = Admission(max_lag=max_lag)
        lags: list[int] = []

        async def chain(step: int) -> None:
            async with admission.slot(step):
                lags.append(step - admission.done)

        tasks = [asyncio.create_task(chain(step)) for step in range(8)]
        for done in range(8):
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(lags) == min(8, done + max_lag + 1)
            admission.advance(done + 1)
        await asyncio.gather(*tasks)
        assert max(lags) == max_lag

    asyncio.run(main())


def test_slots_engine_capacity_and_lag_count_together() -> None:
    async def main() -> None:
        slots = 3
        admission = Admission(lambda: slots, engine_capacity=2, max_lag=1)
        assert admission.limit == 2
        await admission.admit(0)
        assert admission.allows(1)  # one step ahead is allowed, and there is room for a second chain
        assert not admission.allows(2)  # two steps are not, though there is room
        await admission.admit(1)
        assert not admission.allows(1)  # the engine is full
        slots = 1
        admission.leave()
        assert not admission.allows(0)  # the environments are
        admission.leave()
        assert admission.allows(0)

    asyncio.run(main())


def test_a_wait_lasts_while_the_run_moves_and_the_error_of_a_run_that_stands_still_says_who_holds_what() -> None:
    async def main() -> None:
        admission = Admission(engine_capacity=1, holders=lambda: "chain 0-0 holds Shop")
        await admission.admit()
        first, second = (asyncio.create_task(admission.admit(timeout_s=50)) for _ in range(2))
        await asyncio.sleep(0)
        for waiter in admission._line:
            waiter.since -= 1000  # they came long ago
        admission.moved_at -= 40
        for waiter in list(admission._line):
            waiter.wanted = False
            waiter.expire()  # as the timer does; but the run moved less than 50 s ago
        assert admission.waiting == 2
        admission.leave()
        await first
        admission.moved_at -= 60
        (last,) = admission._line
        last.wanted = False
        last.expire()
        with pytest.raises(DeadlineError, match=r"for 50 s: 1 chains run and 1 may \(chain 0-0 holds Shop\); 0 more wait"):
            await second
        admission.leave()
        assert admission.running == admission.waiting == 0
        admission.close()

    asyncio.run(main())


def test_a_cancelled_or_late_chain_leaves_its_place_to_the_next() -> None:
    async def main() -> None:
        admission = Admission(engine_capacity=1)
        await admission.admit()
        first, second, third = (asyncio.create_task(admission.admit(timeout_s=limit)) for limit in (9, 0.01, 9))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineError, match="1 chains run and 1 may"):
            await second
        admission.leave()
        first.cancel()  # admitted in this tick
        await third
        assert admission.running == 1
        admission.leave()
        assert admission.running == admission.waiting == 0
        with pytest.raises(InvariantError):
            admission.leave()

    asyncio.run(main())


def test_closing_refuses_the_chains_that_wait() -> None:
    async def main() -> None:
        admission = Admission(lambda: 0)
        waiting = asyncio.create_task(admission.admit())
        await asyncio.sleep(0)
        admission.close()
        with pytest.raises(DeadlineError, match="closed"):
            await waiting

    asyncio.run(main())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="engine_capacity"):
        Admission(engine_capacity=0)
    with pytest.raises(ConfigError, match="max_lag"):
        Admission(max_lag=-1)
