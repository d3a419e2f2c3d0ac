"""The deadline against cancellation from outside, and against coroutines that will not stop."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from agentfly.aio import deadline
from agentfly.aio.deadline import Expired, TimeLimit, within
from tests.virtual_time import virtual_time

__all__ = ["virtual_time"]
pytestmark = pytest.mark.usefixtures("virtual_time")


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_coroutine_that_never_waits_arms_no_timer(monkeypatch):
    def no_alarm(timeout_s):
        raise AssertionError("a timer was armed")

    async def quick() -> int:
        return 5

    async def broken() -> None:
        raise ValueError("at once")

    async def main() -> None:
        monkeypatch.setattr(deadline, "Alarm", no_alarm)
        assert await within(quick(), 1) == 5
        with pytest.raises(ValueError, match="at once"):
            await within(broken(), 1)
        with pytest.raises(AssertionError, match="armed"):
            await within(asyncio.sleep(0), 1)

    asyncio.run(main())


def test_values_and_errors_pass_after_waiting():
    async def slow(error: bool) -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        if error:
            raise ValueError("late")
        return 7

    async def main() -> None:
        assert await within(slow(False), 5) == 7
        with pytest.raises(ValueError, match="late"):
            await within(slow(True), 5)

    asyncio.run(main())


def test_the_deadline_leaves_the_task_as_it_was():
    async def main() -> None:
        task = asyncio.current_task()
        for _ in range(3):
            with pytest.raises(Expired):
                await within(forever(), 0.001)
            assert task.cancelling() == 0
        await asyncio.sleep(0)  # no cancellation is left over

    asyncio.run(main())


def test_cancellation_from_outside_stays_cancellation():
    async def main() -> None:
        task = asyncio.create_task(_within_forever(10))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(main())


async def _within_forever(timeout_s: float) -> None:
    await within(forever(), timeout_s)


def test_cancellation_wins_when_both_come_at_once():
    async def main() -> None:
        task = asyncio.create_task(_within_forever(0.01))
        await asyncio.sleep(0)
        # The timer has rung and the outside has cancelled before the task gets to run.
        asyncio.get_running_loop().call_later(0.01, task.cancel)
        time.sleep(0.03)  # noqa: ASYNC251 - both timers are due in the same turn of the loop
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


@pytest.mark.parametrize("inner_s", [0.001, 10])
def test_it_nests_with_asyncio_timeout(inner_s):
    async def inner() -> str:
        try:
            async with asyncio.timeout(inner_s):
                await forever()
        except TimeoutError:
            return "inner"
        return "never"

    async def main() -> str:
        try:
            return await within(inner(), 0.05)
        except Expired:
            return "outer"

    assert asyncio.run(main()) == ("inner" if inner_s < 1 else "outer")


def test_an_outer_asyncio_timeout_still_works():
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await within(forever(), 10)
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(main())


def test_cleaning_up_may_take_a_moment():
    cleaned = []

    async def tidy() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    async def main() -> None:
        with pytest.raises(Expired):
            await within(tidy(), 0.01)

    asyncio.run(main())
    assert cleaned == [True]


def test_what_comes_after_the_deadline_comes_too_late():
    async def late() -> str:
        try:
            await forever()
        except asyncio.CancelledError:
            return "late"
        return "never"

    async def main() -> None:
        with pytest.raises(Expired):
            await within(late(), 0.01)
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(main())


def test_a_coroutine_that_ignores_cancellation_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(deadline, "GRACE_S", 0.02)

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()

    async def main() -> None:
        with pytest.raises(Expired):
            await within(stubborn(), 0.02)
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(main())
    assert "stubborn ignored its deadline and was closed" in caplog.text


def test_a_time_limit_ends_its_body_and_leaves_no_cancellation():
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with TimeLimit(time.monotonic() + 0.02) as limit:
                await forever()
        task = asyncio.current_task()
        assert limit.expired() and task is not None and not task.cancelling()
        async with TimeLimit(time.monotonic() + 60) as limit:
            await asyncio.sleep(0)
        assert not limit.expired()

    asyncio.run(main())


def test_a_time_limit_counts_from_the_time_that_was_set_last():
    async def shortened() -> None:
        async with TimeLimit(time.monotonic() + 60) as limit:
            limit.reschedule(time.monotonic() + 0.02)
            await forever()

    async def main() -> None:
        async with TimeLimit(time.monotonic() + 0.02) as limit:
            limit.reschedule(time.monotonic() + 60)
            await asyncio.sleep(0.1)
        assert not limit.expired()
        with pytest.raises(TimeoutError):
            await shortened()

    asyncio.run(main())


def test_a_cancellation_from_outside_passes_a_time_limit():
    async def limited() -> None:
        async with TimeLimit(time.monotonic() + 60):
            await forever()

    async def main() -> None:
        task = asyncio.create_task(limited())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_the_limits_of_ended_bodies_do_not_stay_in_the_heap():
    async def main() -> None:
        for _ in range(1000):
            async with TimeLimit(time.monotonic() + 60):
                await asyncio.sleep(0)
        assert len(deadline.deadlines_of(asyncio.get_running_loop())) < 200

    asyncio.run(main())
