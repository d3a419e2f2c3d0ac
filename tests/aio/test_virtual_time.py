"""The clock of tests in virtual time."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings

from tests.virtual_time import Clock, virtual_time

__all__ = ["virtual_time"]


def test_a_thread_that_another_test_has_left_behind_passes_no_time(virtual_time: Clock) -> None:
    began = virtual_time.now
    thread = threading.Thread(target=time.sleep, args=(0.01,))
    thread.start()
    thread.join()
    assert time.monotonic() == began
    time.sleep(3600)
    assert time.monotonic() == began + 3600


def test_the_end_of_a_loop_waits_for_a_thread_that_is_still_at_work(virtual_time: Clock) -> None:
    ended: list[str] = []

    def work() -> None:
        time.sleep(0.3)  # of real time: the thread is not the clock's own
        ended.append("here")

    async def main() -> None:
        asyncio.get_running_loop().run_in_executor(None, work)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python 3.12 and newer warn if they have waited for the thread in vain
        asyncio.run(main())
    assert ended == ["here"]
