"""The clock of tests in virtual time."""

from __future__ import annotations

import threading
import time

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
