"""`Instance` and `Backend`: what a pool knows of an environment, wherever it lives.

    Backend.create -> Instance.start -> call, get, run, reset ... -> close
                                          |                            ^
                                          `--- abandon (given up) -----'

A call has no deadline in here: the lease puts one around it. `close` never raises and always ends within its time.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from ..aio.deadline import Expired, within
from ..errors import ConfigError
from ..types import Task
from .placements import PLACEMENTS
from .spec import Spec

log = logging.getLogger(__name__)


class Instance:
    """One environment. `on_death` is called once, on the event loop, if the instance ends by itself; `why` then says how."""

    local = False
    """Whether `env` is an object of this process that the event loop may use directly."""

    def __init__(self, spec: Spec, number: int) -> None:
        self.spec = spec
        self.number = number
        self.env: Any = None
        self.alive = False
        self.worn = False
        """Whether the pool is to close it as soon as no chain uses it."""
        self.why = ""
        self.on_death: Callable[[], None] | None = None

    @property
    def pid(self) -> int | None:
        """The instance's worker process, if it has one on this machine."""
        return None

    async def start(self) -> None:
        raise NotImplementedError

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    async def get(self, name: str) -> Any:
        raise NotImplementedError

    async def run(self, function: Callable[[], Any]) -> Any:
        """Call a function of this process in the instance's thread. Raises ConfigError in a worker: functions do not travel."""
        raise ConfigError(f"a function cannot be run where {self.spec.name} lives")

    def at_home(self, awaitable: Awaitable[Any]) -> Any:
        """What to await for an awaitable that a method of `env` has returned."""
        return awaitable

    async def reset(self, task: Task) -> Any:
        return await self.call("reset", (task,), {})

    def abandon(self) -> None:
        """A call was given up and may still be running. From now on the instance can only be closed."""
        self.alive = False

    async def close(self, timeout_s: float) -> None:
        """End the instance. Failures are logged."""
        try:
            await within(self._close(), timeout_s)
        except Expired:
            log.warning("closing %s took longer than %g s and was given up", self.spec.name, timeout_s)
        except Exception as error:  # noqa: BLE001 - an environment that cannot be closed must not hold up the others
            log.warning("closing %s failed: %s: %s", self.spec.name, type(error).__name__, error)
        finally:
            self.alive = False

    async def _close(self) -> None:
        raise NotImplementedError

    def memory_mb(self) -> float | None:
        """The memory of the instance's process; None if it has none to itself."""
        return None

    def tidy(self) -> None:
        """Called now and then while the instance lives."""


class Backend:
    """Creates the instances of one pool, of `instance_class` unless the placement overrides `create`."""

    instance_class: type[Instance]

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def create(self, number: int) -> Instance:
        return self.instance_class(self.spec, number)


def backend_of(spec: Spec) -> Backend:
    """The backend of a pool. Raises ConfigError if no worker can import the environment, or the placement is not usable."""
    module, _, name = PLACEMENTS[spec.placement][0].partition(":")
    backend: Backend = getattr(import_module(f".backends.{module}", __package__), name)(spec)
    return backend
