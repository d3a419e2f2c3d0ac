"""The JVMs of this process: `enter` assigns a simulator to one.

Simulators are spread over one JVM per core, at most MAX_JVMS (or `num_jvms`); with more than `PER_JVM` simulators in each,
further JVMs are added. A dead JVM is replaced. JVMs without simulators are terminated after `IDLE_S`, and all at exit.
`enter` does not block: the first call starts the JVM in its thread.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

from ...errors import ConfigError
from .jvm import CLOSE_S, Jvm

HEAP_MB = 384
PER_JVM = 512
MAX_JVMS = 4
IDLE_S = 60.0


class Jvms:
    """The JVMs of one heap size and number."""

    def __init__(self, num_jvms: int | None = None, heap_mb: int = HEAP_MB) -> None:
        for name, value, least in (("num_jvms", num_jvms, 1), ("heap_mb", heap_mb, 128)):
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"ScienceWorld: {name} must be a whole number from {least}, not {value!r}")
        self.num_jvms = num_jvms or max(1, min(MAX_JVMS, os.cpu_count() or 1))
        self.heap_mb = heap_mb
        self._lock = threading.Lock()
        self._alive: list[Jvm] = []
        self._timer: threading.Timer | None = None
        self._ended: list[Jvm] = []

    def enter(self) -> Jvm:
        """The JVM for one more simulator; call `leave` when it is closed."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._remove_dead()
            chosen = min(self._alive, key=lambda jvm: jvm.users, default=None)
            wanted = self.num_jvms if chosen is not None and chosen.users < PER_JVM else len(self._alive) + 1
            if chosen is None or (chosen.users and len(self._alive) < wanted):
                chosen = Jvm(self.heap_mb)
                self._alive.append(chosen)
            chosen.users += 1
            return chosen

    def leave(self, jvm: Jvm) -> None:
        with self._lock:
            jvm.users -= 1
            self._remove_dead()
            if self._alive and not any(each.users for each in self._alive) and self._timer is None:
                self._timer = threading.Timer(IDLE_S, self._end_idle)
                self._timer.daemon = True
                self._timer.start()

    def pids(self) -> list[int]:
        with self._lock:
            return [jvm.process.pid for jvm in self._alive if jvm.process is not None]

    def close(self) -> None:
        """Terminate all JVMs and wait for them."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._ended += self._alive
            self._alive = []
            ended, self._ended = self._ended, []
        for jvm in ended:
            jvm.close()
        until = time.monotonic() + CLOSE_S
        for jvm in ended:
            jvm.join(max(0.1, until - time.monotonic()))

    def _remove_dead(self) -> None:
        for jvm in [jvm for jvm in self._alive if jvm.why]:
            self._alive.remove(jvm)
            jvm.close()

    def _end_idle(self) -> None:
        with self._lock:
            self._timer = None
            if any(jvm.users for jvm in self._alive):
                return
            idle, self._alive = self._alive, []
        for jvm in idle:
            jvm.close()


_all: dict[tuple[int | None, int], Jvms] = {}
_guard = threading.Lock()


def jvms(num_jvms: int | None = None, heap_mb: int = HEAP_MB) -> Jvms:
    """The JVMs of this process with that number and heap size."""
    with _guard:
        key = num_jvms, heap_mb
        if key not in _all:
            _all[key] = Jvms(num_jvms, heap_mb)
        return _all[key]


def close_jvms() -> None:
    """Terminate every JVM of this process."""
    with _guard:
        pools = list(_all.values())
    for pool in pools:
        pool.close()


atexit.register(close_jvms)
