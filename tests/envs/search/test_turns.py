"""Turns at a rate: in order, none wasted by those who give up, none promised that comes too late."""

from __future__ import annotations

import asyncio
import math

import pytest

from agentfly.envs.search.turns import TooLate, Turns


def test_turns_come_at_the_rate_and_in_order():
    async def main() -> None:
        turns, loop = Turns(50.0), asyncio.get_running_loop()
        begun, came = loop.time(), []

        async def turn(number: int) -> None:
            await turns.take(math.inf)
            came.append((number, loop.time()))

        await asyncio.gather(*map(turn, range(6)))
        assert [number for number, _ in came] == list(range(6))
        assert all(at >= begun + number * 0.02 - 0.001 for number, at in came)

    asyncio.run(main())


def test_those_who_give_up_leave_their_turns_to_others():
    async def main() -> None:
        turns, loop = Turns(20.0), asyncio.get_running_loop()
        await turns.take(math.inf)
        begun = loop.time()
        leaving = [asyncio.create_task(turns.take(math.inf)) for _ in range(200)]
        last = asyncio.create_task(turns.take(math.inf))
        await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await last
        assert loop.time() - begun < 5, "two hundred turns of 0.05 s would be 10 s"
        assert not turns._line

    asyncio.run(main())


def test_one_who_leaves_in_the_moment_of_being_called_leaves_the_turn_too():
    async def main() -> None:
        turns = Turns(1 / 3600)
        await turns.take(math.inf)
        first, second = (asyncio.create_task(turns.take(math.inf)) for _ in range(2))
        await asyncio.sleep(0)
        turns._call()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        async with asyncio.timeout(60):
            await second  # without waiting for an hour

    asyncio.run(main())


def test_one_who_leaves_in_that_moment_does_not_end_the_rest_of_a_provider():
    async def main() -> None:
        turns = Turns(1000)
        await turns.take(math.inf)
        leaving = asyncio.create_task(turns.take(math.inf))
        await asyncio.sleep(0)
        turns._call()
        turns.rest(3600)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        with pytest.raises(TooLate):
            await turns.take(asyncio.get_running_loop().time() + 60)

    asyncio.run(main())


def test_a_turn_that_would_come_too_late_is_refused_at_once_and_used_by_nobody():
    async def main() -> None:
        turns, loop = Turns(1 / 100), asyncio.get_running_loop()
        await turns.take(math.inf)
        for _ in range(1000):
            with pytest.raises(TooLate) as found:
                await turns.take(loop.time() + 50)
        assert 90 < found.value.seconds <= 100
        waiting = asyncio.create_task(turns.take(loop.time() + 150))
        await asyncio.sleep(0)
        with pytest.raises(TooLate) as found:
            await turns.take(loop.time() + 150)
        assert 190 < found.value.seconds <= 200
        waiting.cancel()

    asyncio.run(main())


def test_one_who_asks_again_goes_first_and_a_rest_holds_for_all():
    async def main() -> None:
        turns, loop, order = Turns(1000.0), asyncio.get_running_loop(), []
        begun = loop.time()
        turns.rest(0.2)

        async def turn(name: str, again: bool) -> None:
            await turns.take(math.inf, again=again)
            order.append(name)

        await asyncio.gather(turn("one", False), turn("two", False), turn("again", True))
        assert order == ["again", "one", "two"]
        assert loop.time() >= begun + 0.2

    asyncio.run(main())
