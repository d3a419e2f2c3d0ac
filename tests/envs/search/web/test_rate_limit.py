"""The rate limit: requests in order, cancelled requests without effect, late requests refused."""

from __future__ import annotations

import asyncio
import math

import pytest

from agentfly.envs.search.web.rate_limit import RateLimit, TooLate
from tests.virtual_time import virtual_time

__all__ = ["virtual_time"]
pytestmark = pytest.mark.usefixtures("virtual_time")


def fire(limit: RateLimit) -> None:
    """Admit the next waiter, as if its turn had come."""
    limit._free_at = 0.0
    limit._serve()


def test_requests_are_admitted_at_the_rate_and_in_order():
    async def main() -> None:
        limit, loop = RateLimit(50.0), asyncio.get_running_loop()
        begun, came = loop.time(), []

        async def turn(number: int) -> None:
            await limit.take(math.inf)
            came.append((number, loop.time()))

        await asyncio.gather(*map(turn, range(6)))
        assert [number for number, _ in came] == list(range(6))
        assert all(at >= begun + number * 0.02 - 0.001 for number, at in came)

    asyncio.run(main())


def test_cancelled_requests_use_no_turn():
    async def main() -> None:
        limit, loop = RateLimit(20.0), asyncio.get_running_loop()
        await limit.take(math.inf)
        begun = loop.time()
        leaving = [asyncio.create_task(limit.take(math.inf)) for _ in range(200)]
        last = asyncio.create_task(limit.take(math.inf))
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await last
        assert loop.time() - begun < 5, "two hundred turns of 0.05 s would be 10 s"
        assert limit._line.waiting == 0

    asyncio.run(main())


def test_a_request_that_is_cancelled_in_the_tick_of_its_turn_passes_the_turn_on():
    async def main() -> None:
        limit = RateLimit(1 / 3600)
        await limit.take(math.inf)
        first, second = (asyncio.create_task(limit.take(math.inf)) for _ in range(2))
        await asyncio.sleep(0)
        fire(limit)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        async with asyncio.timeout(60):
            await second  # without waiting for an hour

    asyncio.run(main())


def test_a_request_that_is_cancelled_in_the_tick_of_its_turn_does_not_end_a_pause():
    async def main() -> None:
        limit = RateLimit(1000)
        await limit.take(math.inf)
        leaving = asyncio.create_task(limit.take(math.inf))
        await asyncio.sleep(0)
        fire(limit)
        limit.pause(3600)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        with pytest.raises(TooLate):
            await limit.take(asyncio.get_running_loop().time() + 60)

    asyncio.run(main())


def test_a_request_whose_turn_comes_too_late_is_refused_at_once_and_uses_no_turn():
    async def main() -> None:
        limit, loop = RateLimit(1 / 100), asyncio.get_running_loop()
        await limit.take(math.inf)
        for _ in range(1000):
            with pytest.raises(TooLate) as found:
                await limit.take(loop.time() + 50)
        assert 90 < found.value.seconds <= 100
        waiting = asyncio.create_task(limit.take(loop.time() + 150))
        await asyncio.sleep(0)
        with pytest.raises(TooLate) as found:
            await limit.take(loop.time() + 150)
        assert 190 < found.value.seconds <= 200
        waiting.cancel()

    asyncio.run(main())


def test_a_retry_goes_first_and_a_pause_holds_for_all():
    async def main() -> None:
        limit, loop, order = RateLimit(1000.0), asyncio.get_running_loop(), []
        begun = loop.time()
        limit.pause(0.2)

        async def turn(name: str, again: bool) -> None:
            await limit.take(math.inf, again=again)
            order.append(name)

        await asyncio.gather(turn("one", False), turn("two", False), turn("again", True))
        assert order == ["again", "one", "two"]
        assert loop.time() >= begun + 0.2

    asyncio.run(main())
