"""Faults on purpose: a seeded schedule that kills, hangs, slows, corrupts or crashes environments and their workers.

`faulty(EnvClass, schedule)` is a class like `EnvClass` whose calls sometimes go wrong, wherever its instances are placed,
worker processes included; `kill_worker(manager, kind)` ends one from outside. The same seed gives instance n of a kind the
same faults at the same calls. For tests, and for users who want to see what their run does when the world fails.

    kill      the worker process gets SIGKILL; elsewhere the instance is dead: this call and all later ones are WorldErrors
    crash     the call raises RuntimeError
    hang      the call does not return (until `hang_s`)
    slow      the call takes `slow_s` longer
    corrupt   the worker writes garbage over its socket; elsewhere the call returns garbage and reset is refused
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
from dataclasses import dataclass, field
from typing import Any

from . import plugins
from .errors import ConfigError, WorldError

KINDS = ("kill", "crash", "hang", "slow", "corrupt")
GARBAGE = "\x00\ufffd garbage"
_OURS = "_agentfly_fault"


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """`rates` maps a kind of fault to its chance per call; `spare` are methods that never fail; `after` calls go well first."""

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

    def instance(self, number: int) -> Faults:
        return Faults(self, number)

    def as_dict(self) -> dict[str, Any]:
        """Its JSON form; `FaultSchedule(**d)` reads it."""
        return {
            "seed": self.seed,
            "rates": dict(self.rates),
            "spare": list(self.spare),
            "after": self.after,
            "slow_s": self.slow_s,
            "hang_s": self.hang_s,
        }


class Faults:
    """The faults of one instance, in the order of its calls."""

    def __init__(self, schedule: FaultSchedule, number: int) -> None:
        self.schedule = schedule
        self.dead = False
        self.corrupt = False
        self.num_calls = 0
        self._random = random.Random(f"{schedule.seed}/{number}")

    def draw(self, method: str) -> str | None:
        """What happens to this call."""
        self.num_calls += 1
        point = self._random.random()
        if self.num_calls <= self.schedule.after:
            return None
        for kind, rate in self.schedule.rates.items():
            if point < rate:
                return kind
            point -= rate
        return None

    def strike(self, kind: str | None, method: str) -> float:
        """Do it; how many seconds the call has to wait first."""
        if self.dead:
            raise WorldError("this environment was killed by a fault")
        if self.corrupt and method == "reset":
            raise WorldError("this environment was corrupted by a fault and cannot be reset")
        in_worker = "AGENTFLY_CHANNEL" in os.environ
        if kind == "kill":
            if in_worker:
                os.kill(os.getpid(), signal.SIGKILL)
            self.dead = True
            raise WorldError("this environment was killed by a fault")
        if kind == "crash":
            raise RuntimeError(f"a fault made {method} crash")
        if kind == "corrupt":
            self.corrupt = True
            if in_worker:
                os.write(int(os.environ["AGENTFLY_CHANNEL"]), b"\xff" * 64)
        return {"hang": self.schedule.hang_s, "slow": self.schedule.slow_s}.get(kind or "", 0.0)


def faulty(cls: type, schedule: FaultSchedule) -> type:
    """A class like `cls` whose methods fail by the schedule. It can be placed in worker processes if `cls` can."""
    numbers = itertools.count(int(os.environ.get("AGENTFLY_WORKER", "0")))

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        setattr(self, _OURS, schedule.instance(next(numbers)))
        cls.__init__(self, *args, **kwargs)  # type: ignore[misc]

    body: dict[str, Any] = {"__init__": __init__, "__doc__": cls.__doc__, "__module__": cls.__module__}
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if not name.startswith("_") and name not in schedule.spare and inspect.isfunction(method):
            body[name] = _guard(name, method)
    made = type(f"Faulty{cls.__name__}", (cls,), body)
    target = f"{cls.__module__}:{cls.__qualname__}"
    if "<" not in target and cls.__module__ != "__main__":
        made.__agentfly_target__ = ("agentfly.faults:build", {"target": target, "schedule": schedule.as_dict()})  # type: ignore[attr-defined]
    return made


def build(target: str, schedule: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Any:
    """In a worker process: the instance that `faulty` stands for."""
    return faulty(plugins.resolve("envs", target), FaultSchedule(**schedule))(**(options or {}))


def _guard(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def strike_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            faults: Faults = getattr(self, _OURS)
            kind = faults.draw(name)
            await asyncio.sleep(faults.strike(kind, name))
            value = await method(self, *args, **kwargs)
            return GARBAGE if kind == "corrupt" else value

        return strike_async

    @functools.wraps(method)
    def strike(self: Any, *args: Any, **kwargs: Any) -> Any:
        faults: Faults = getattr(self, _OURS)
        kind = faults.draw(name)
        until = time.monotonic() + faults.strike(kind, name)
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.02))  # in short pieces: a thread that is told to stop hears it between two of them
        value = method(self, *args, **kwargs)
        return GARBAGE if kind == "corrupt" else value

    return strike


def kill_worker(manager: Any, kind: Any, seed: int = 0) -> int | None:
    """SIGKILL to one worker process of a kind, chosen by the seed; its pid, or None where there is none."""
    pids: list[int] = manager.pids(kind)
    if not pids:
        return None
    pid = random.Random(seed).choice(pids)
    os.kill(pid, signal.SIGKILL)
    return pid
