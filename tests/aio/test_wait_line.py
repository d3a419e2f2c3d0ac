"""A waiting line keeps order, deadlines and cancellation apart from what is waited for."""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import Any

import pytest

from agentfly.aio.deadline import Deadlines, deadlines_of
from agentfly.aio.wait_line import Waiter, WaitLine
from tests.virtual_time import virtual_time

__all__ = ["virtual_time"]
pytestmark = pytest.mark.usefixtures("virtual_time")


class Tickets:
    """Numbered tickets, handed to waiters in the order they came."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self.line: WaitLine[str, int] = WaitLine(self.serve, self.free.append, self.late)
        self.postponed = 0.0

    async def take(self, name: str = "", timeout_s: float = math.inf, front: bool = False) -> int:
        if self.free and not self.line.waiting:
            return self.free.pop()
        return await self.line.wait(self.line.join(name, time.monotonic() + timeout_s, front=front))

    def put(self, ticket: int) -> None:
        self.free.append(ticket)
        self.serve()

    def serve(self) -> None:
        while self.free and (waiter := self.line.first()) is not None:
            self.line.assign(waiter, self.free.pop())

    def late(self, waiter: Waiter[str, int]) -> Exception | None:
        if self.postponed:
            waiter.deadline, self.postponed = time.monotonic() + self.postponed, 0.0
            return None
        return TimeoutError(f"{waiter.request} waited, {self.line.waiting} more wait")


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_waiters_are_served_first_come_first_served_and_those_at_the_front_before_them() -> None:
    async def main() -> None:
        tickets, order = Tickets(0), []

        async def take(name: str, front: bool = False) -> None:
            order.append((await tickets.take(name, front=front), name))

        tasks = [asyncio.create_task(take(name)) for name in "abc"]
        await turn()
        tasks.append(asyncio.create_task(take("again", front=True)))
        await turn()
        assert [waiter.request for waiter in tickets.line] == ["again", "a", "b", "c"]
        for number in range(4):
            tickets.put(number)
        await asyncio.gather(*tasks)
        assert order == [(0, "again"), (1, "a"), (2, "b"), (3, "c")]
        assert tickets.line.waiting == 0

    asyncio.run(main())


def test_a_ticket_assigned_in_the_tick_of_a_cancellation_goes_to_the_next() -> None:
    async def main() -> None:
        tickets = Tickets(0)
        first, second = (asyncio.create_task(tickets.take()) for _ in range(2))
        await turn()
        tickets.put(7)
        first.cancel()
        assert await second == 7
        assert first.cancelled()
        assert tickets.line.waiting == 0

    asyncio.run(main())


def test_a_newcomer_behind_a_cancelled_waiter_is_served() -> None:
    async def main() -> None:
        tickets = Tickets(0)
        first = asyncio.create_task(tickets.take())
        await turn()
        first.cancel()
        tickets.put(7)  # finds only the cancelled waiter, and keeps the ticket
        assert tickets.line.waiting == 1
        assert await tickets.take() == 7

    asyncio.run(main())


def test_deadlines_pass_in_their_order_and_can_be_postponed() -> None:
    async def main() -> None:
        tickets, ended = Tickets(0), []

        async def take(timeout_s: float) -> None:
            with pytest.raises(TimeoutError, match="waited"):
                await tickets.take(timeout_s=timeout_s)
            ended.append(timeout_s)

        await asyncio.gather(*(take(timeout_s) for timeout_s in (0.4, 0.1, 0.7)))
        assert ended == [0.1, 0.4, 0.7]
        tickets.postponed = 0.2
        started = time.monotonic()
        await take(0.05)
        assert time.monotonic() - started > 0.2
        assert tickets.line.waiting == 0

    asyncio.run(main())


def test_a_waiter_put_in_front_with_a_late_deadline_does_not_delay_the_timeouts_behind_it() -> None:
    async def main() -> None:
        tickets = Tickets(0)
        early = asyncio.create_task(tickets.take("early", 0.2))
        await turn()
        front = asyncio.create_task(tickets.take("front", 600, front=True))
        with pytest.raises(TimeoutError, match="early waited, 1 more wait"):
            await asyncio.wait_for(asyncio.shield(early), 60)
        assert not front.done()
        tickets.put(7)
        assert await front == 7

    asyncio.run(main())


def test_a_line_can_be_used_in_one_event_loop_after_another() -> None:
    tickets = Tickets(0)

    async def served_late() -> None:
        waiting = asyncio.create_task(tickets.take(timeout_s=600))
        await turn()
        tickets.put(7)
        assert await waiting == 7

    async def never_served() -> None:
        with pytest.raises(TimeoutError, match="waited"):
            await asyncio.wait_for(tickets.take(timeout_s=0.05), 60)

    asyncio.run(served_late())
    asyncio.run(never_served())


def test_closing_refuses_all_waiters_and_leaves_no_deadline_behind() -> None:
    async def main() -> None:
        tickets = Tickets(0)
        tasks = [asyncio.create_task(tickets.take(timeout_s=600)) for _ in range(5)]
        await turn()
        tasks[0].cancel()
        tickets.line.close(lambda: ValueError("closed"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result).__name__ for result in results] == ["CancelledError", *["ValueError"] * 4]
        assert tickets.line.waiting == 0
        deadlines_of(asyncio.get_running_loop()).compact()
        assert len(deadlines_of(asyncio.get_running_loop())) == 0

    asyncio.run(main())


def test_random_cancellations_and_timeouts_lose_no_ticket_and_no_waiter() -> None:
    async def main() -> None:
        rng, tickets, got = random.Random(5), Tickets(3), 0

        async def chain() -> None:
            nonlocal got
            try:
                ticket = await tickets.take(timeout_s=rng.choice([0.001, 60]), front=rng.random() < 0.1)
            except TimeoutError:
                return
            got += 1
            try:
                await asyncio.sleep(0)
            finally:
                tickets.put(ticket)

        running: set[asyncio.Task[None]] = set()
        for number in range(3_000):
            running.add(asyncio.create_task(chain()))
            if number % 3 == 0:
                rng.choice(sorted(running, key=id)).cancel()
            if len(running) > 40:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*running, return_exceptions=True)
        assert got > 200  # the load of the machine decides how many time out
        assert sorted(tickets.free) == [0, 1, 2]
        assert tickets.line.waiting == 0
        assert list(tickets.line) == []
        assert len(tickets.line._queue) < 100

    asyncio.run(main())


class Item:
    def __init__(self, passed: list[Any], name: str) -> None:
        self.wanted = True
        self.passed, self.name = passed, name

    def expire(self) -> None:
        self.passed.append(self.name)


def test_cancelled_deadlines_are_removed_from_the_heap_and_the_others_pass() -> None:
    async def main() -> None:
        heap, passed = Deadlines(asyncio.get_running_loop()), []
        items = [Item(passed, str(number)) for number in range(200)]
        for number, item in enumerate(items):
            heap.add(time.monotonic() + 600 + number, item)
        for item in items[5:]:
            heap.cancel(item)
        assert len(heap) < 100
        heap.add(time.monotonic() + 0.01, Item(passed, "soon"))
        async with asyncio.timeout(60):
            while not passed:
                await asyncio.sleep(0.005)
        assert passed == ["soon"]

    asyncio.run(main())
