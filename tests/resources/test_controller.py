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
def test_a_chain_starts_only_so_far_ahead_of_the_weights(max_lag: int) -> None:
    async def main() -> None:
        admission = Admission(max_lag=max_lag)
        lags: list[int] = []

        async def chain(step: int) -> None:
            async with admission.slot(step):
                lags.append(step - admission.done)

        tasks = [asyncio.create_task(chain(step)) for step in range(8)]
        for done in range(8):
            await asyncio.sleep(0.002)
            assert len(lags) == min(8, done + max_lag + 1)
            admission.advance(done + 1)
        await asyncio.gather(*tasks)
        assert max(lags) == max_lag

    asyncio.run(main())


def test_a_cancelled_or_late_chain_gives_its_place_to_the_next() -> None:
    async def main() -> None:
        admission = Admission(engine_capacity=1)
        await admission.admit()
        first, second, third = (asyncio.create_task(admission.admit(timeout_s=limit)) for limit in (9, 0.01, 9))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineError, match="1 chains run and 1 may"):
            await second
        admission.leave()
        first.cancel()  # admitted in this very moment
        await third
        assert admission.running == 1
        admission.leave()
        assert admission.running == admission.waiting == 0
        with pytest.raises(InvariantError):
            admission.leave()

    asyncio.run(main())


def test_closing_tells_those_who_wait() -> None:
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
