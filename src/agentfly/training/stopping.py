"""Stopping a run by its budget (`Spending`) or a signal: SIGINT (Ctrl-C), SIGTERM (schedulers), SIGHUP (a closed terminal).

    first signal     before the loop runs: raised at once; afterwards the run finishes a running update, saves and ends
    second Ctrl-C    the process ends at once; what is kept is printed

A run that was stopped raises KeyboardInterrupt for SIGINT and SystemExit(128 + number) for the others, so the exit status of a
program is 130, 143 or 129. Only default handlers are replaced: a program that handles a signal itself keeps its handler.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

from ..config import Config
from ..planning.layout import layout_of
from ..schema import read_budget
from ..watch.progress import duration

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class StopSignals:
    """A context manager that handles the signals. `kept` returns the sentence for an end at once."""

    def __init__(self, kept: Callable[[], str]) -> None:
        self.received: signal.Signals | None = None
        self._kept = kept
        self._stop: Callable[[], Any] | None = None
        self._exits = True
        self._handled = ExitStack()

    def __enter__(self) -> StopSignals:
        self._handled.enter_context(handled_by(self._handle, (signal.SIG_DFL, signal.default_int_handler)))
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.close()

    @contextmanager
    def calling(self, stop: Callable[[], Any]) -> Iterator[None]:
        """While the body runs, the first signal calls `stop` in the main thread instead of raising."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """While the body runs, the first signal cancels the current task."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        # In a notebook the loop runs in another thread: an end at once would end the notebook.
        self._exits = threading.current_thread() is threading.main_thread()
        waking = _woken_by_signals(loop) if self._exits else nullcontext()
        with waking, self.calling(lambda: loop.call_soon_threadsafe(task.cancel)):
            if self.received is not None:  # between the last line of the caller and this one
                raise asyncio.CancelledError
            yield

    def error(self) -> BaseException:
        """Returns what a run raises that was stopped."""
        if self.received in (None, signal.SIGINT):
            return KeyboardInterrupt()
        return SystemExit(128 + self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            if self._stop is None:
                raise self.error()
            self._stop()
        elif number == signal.SIGINT and self._exits:
            self._end_at_once(number)

    def _end_at_once(self, number: int) -> None:
        # os.write and os._exit take no lock and run no clean-up, which may hang in what the signal interrupted. Workers end
        # with their parent, the system releases the lock of the run, and the next trainer removes a half-written checkpoint.
        restored = "\x1b[?25h" if sys.stderr.isatty() else ""  # the live display hides the cursor
        os.write(2, f"{restored}\nstopped at once; {self._kept()}\n".encode())
        os._exit(128 + number)


@contextmanager
def handled_by(handle: Callable[[int, FrameType | None], None], only: Collection[object] = ()) -> Iterator[None]:
    """While the body runs, `handle` receives the signals that stop a run; with `only`, in place of these handlers."""
    former: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only there can handlers be set
        for number in (signal.Signals[name] for name in NAMES if hasattr(signal, name)):
            if not only or signal.getsignal(number) in only:
                former[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """While the body runs, a signal wakes the loop, so that its handler runs.

    A signal that arrives after Python's last check and before the system call in which the loop waits does not interrupt the
    call: without the wake-up, its handler would run at the next event, which may be minutes away.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        loop.add_reader(reader, reader.recv, 4096)
        former = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(former)
            loop.remove_reader(reader)


def num_gpus(config: Config) -> int:
    """The GPUs that a run reserves: those of its learner ranks, and of samplers that have their own."""
    layout = layout_of(config)
    return 1 if layout is None else layout.gpus


class Spending:
    """What a run has used, also before it was resumed: wall time, device time and dollars.

    `devices` are GPUs or, on a CPU, the processors that this process may use; idle ones count. `meta` is what the store says of
    the run before it was resumed, whose last heartbeat ends its time: a crash loses at most two seconds. `meta` of this object
    is what the store keeps for the next resume. Dollars are those of the present price.
    """

    def __init__(
        self, config: Config, gpus: int, meta: Mapping[str, Any], began: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.devices = gpus or available_processors()
        self._on_gpu, self._clock, self._began = gpus > 0, clock, began
        self._price, self._budget = config.run.price, config.train.budget
        since = meta.get("began", meta.get("resumed", meta.get("started")))
        leg_s = max(0.0, meta.get("heartbeat", 0.0) - since) if since is not None else 0.0
        wall_s, device_s = meta.get("used", (0.0, 0.0))
        self._before = (wall_s + leg_s, device_s + leg_s * meta.get("devices", self.devices))
        self.meta = {"began": began, "used": list(self._before), "devices": self.devices}

    def metrics(self, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
        """The metrics cost/* at this moment, with those of the first and the latest validation."""
        now_s = max(0.0, self._clock() - self._began)
        wall_s, device_s = self._before[0] + now_s, self._before[1] + now_s * self.devices
        metrics = {"cost/wall_s": wall_s, "cost/gpu_s" if self._on_gpu else "cost/cpu_s": device_s}
        if self._price is not None:
            dollars = metrics["cost/dollars"] = self._price * (device_s if self._on_gpu else wall_s) / 3600
            gained = 100 * (after.get("validation/success", math.nan) - before.get("validation/success", math.nan))
            if dollars and math.isfinite(gained):
                metrics["cost/points_per_dollar"] = gained / dollars
        return metrics

    @property
    def reason(self) -> str | None:
        """Why the run ends; None while it has not used its budget."""
        if self._budget is None:
            return None
        (seconds, dollars), used = read_budget("train.budget", self._budget), self.metrics({}, {})
        if used["cost/wall_s"] < (seconds or 0.0) or used.get("cost/dollars", 0.0) < (dollars or 0.0):
            return None
        used_up = duration(used["cost/wall_s"]) if dollars is None else f"${used['cost/dollars']:.2f}"
        return f"the budget of {self._budget} is used up: {used_up}, resumed runs together (train.budget)"


def available_processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
