"""Fault injection: a seeded schedule that kills, hangs, slows, corrupts or crashes environments and their workers.

`faulty(EnvClass, schedule)` is a class like `EnvClass` whose calls sometimes fail, in every placement; `kill_worker` kills a
worker from outside. With the same seed, instance n of a kind has the same faults at the same calls.

    kill      the worker process gets SIGKILL; without a worker, this call and all later ones raise WorldError
    crash     the call raises RuntimeError
    hang      the call does not return before `hang_s`
    slow      the call takes `slow_s` longer
    corrupt   the worker writes garbage to its socket; without a worker, the call returns garbage and reset is refused
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from . import plugins
from .errors import ConfigError, WorldError

KINDS = ("kill", "crash", "hang", "slow", "corrupt")
GARBAGE = "\x00\ufffd garbage"
_ATTRIBUTE = "_agentfly_fault"


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """`rates` maps a kind of fault to its probability per call. Methods in `spare`, and the first `after` calls, never fail."""

    seed: int = 0
    rates: Mapping[str, float] = field(default_factory=lambda: {"crash": 0.1})
    spare: tuple[str, ...] = ("close",)
    after: int = 0
    slow_s: float = 0.05
    hang_s: float = 3600.0

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.rates if kind not in KINDS]:
            raise ConfigError(f"there is no fault {unknown[0]!r}; known: {', '.join(KINDS)}")
        if min(self.rates.values(), default=0) < 0 or sum(self.rates.values()) > 1:
            raise ConfigError("the rates of faults must be 0 or more and add up to at most 1")


class Faults:
    """The faults of one instance. Each call draws one random number, so that the sequence depends on the seed alone."""

    def __init__(self, schedule: FaultSchedule, number: int) -> None:
        self.schedule = schedule
        self.dead = False
        self.corrupt = False
        self.num_calls = 0
        self._random = random.Random(f"{schedule.seed}/{number}")

    def draw(self) -> str | None:
        """The kind of fault of this call, or None."""
        self.num_calls += 1
        point = self._random.random()
        if self.num_calls <= self.schedule.after:
            return None
        for kind, rate in self.schedule.rates.items():
            if point < rate:
                return kind
            point -= rate
        return None

    def apply(self, kind: str | None, method: str) -> float:
        """Apply a fault and return how many seconds the call must wait. Raises the fault's exception."""
        in_worker = "AGENTFLY_CHANNEL" in os.environ
        if kind == "kill" and in_worker:
            os.kill(os.getpid(), signal.SIGKILL)
        self.dead = self.dead or kind == "kill"
        if self.dead:
            raise WorldError("this environment was killed by a fault")
        if self.corrupt and method == "reset":
            raise WorldError("this environment was corrupted by a fault and cannot be reset")
        if kind == "crash":
            raise RuntimeError(f"a fault made {method} crash")
        if kind == "corrupt":
            self.corrupt = True
            if in_worker:
                os.write(int(os.environ["AGENTFLY_CHANNEL"]), b"\xff" * 64)
        return {"hang": self.schedule.hang_s, "slow": self.schedule.slow_s}.get(kind or "", 0.0)


def faulty(cls: type, schedule: FaultSchedule) -> type:
    """A subclass of `cls` whose methods fail by the schedule. Worker processes can import it if they can import `cls`."""
    numbers = itertools.count(int(os.environ.get("AGENTFLY_WORKER", "0")))

    def __init__(self: Any, *args: object, **kwargs: object) -> None:  # noqa: N807
        setattr(self, _ATTRIBUTE, Faults(schedule, next(numbers)))
        cls.__init__(self, *args, **kwargs)  # type: ignore[misc]

    body: dict[str, Any] = {"__init__": __init__, "__doc__": cls.__doc__, "__module__": cls.__module__}
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if not name.startswith("_") and name not in schedule.spare and inspect.isfunction(method):
            body[name] = _with_faults(name, method)
    made = type(f"Faulty{cls.__name__}", (cls,), body)
    target = f"{cls.__module__}:{cls.__qualname__}"
    if "<" not in target and cls.__module__ != "__main__":
        made.__agentfly_target__ = ("agentfly.faults:build", {"target": target, "schedule": asdict(schedule)})  # type: ignore[attr-defined]
    return made


def build(target: str, schedule: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Any:
    """In a worker process: an instance of the class that `faulty` has made."""
    return faulty(plugins.resolve("envs", target), FaultSchedule(**schedule))(**(options or {}))


def _with_faults(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_async(self: Any, *args: object, **kwargs: object) -> Any:
            faults: Faults = getattr(self, _ATTRIBUTE)
            kind = faults.draw()
            await asyncio.sleep(faults.apply(kind, name))
            value = await method(self, *args, **kwargs)
            return GARBAGE if kind == "corrupt" else value

        return call_async

    @functools.wraps(method)
    def call(self: Any, *args: object, **kwargs: object) -> Any:
        faults: Faults = getattr(self, _ATTRIBUTE)
        kind = faults.draw()
        until = time.monotonic() + faults.apply(kind, name)
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.02))  # in short pieces: a thread that is abandoned gets its exception between two of them
        value = method(self, *args, **kwargs)
        return GARBAGE if kind == "corrupt" else value

    return call


def kill_worker(manager: Any, kind: Any, seed: int = 0) -> int | None:
    """Send SIGKILL to one worker process of a kind, chosen by the seed. Returns its pid, or None if there is no worker."""
    pids: list[int] = manager.pids(kind)
    if not pids:
        return None
    pid = random.Random(seed).choice(pids)
    os.kill(pid, signal.SIGKILL)
    return pid
