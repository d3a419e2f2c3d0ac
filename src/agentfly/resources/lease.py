"""A lease: the environments that one chain holds, from the moment it needs them until it ends.

`need` adds kinds, `lease[kind]` is what tools and rewards see, `release` gives all of them back. Releasing never waits for an
environment to close, so it is safe during a cancellation. Every use of a lease that is over raises a `WorldError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import ConfigError, WorldError
from ..types import Task
from .handle import Handle
from .proxy import EnvProxy

EnvKind = Any
"""A kind of environment: its class, or its name."""


class LeaseManager(Protocol):
    """The part of the resource manager that a lease uses."""

    async def add(self, lease: Lease, kinds: Sequence[EnvKind], timeout_s: float | None) -> None: ...
    def release(self, lease: Lease) -> None: ...
    def name_of(self, kind: EnvKind) -> str: ...


class Lease:
    """`may` are the kinds that the chain may still ask for. `ready` are the kinds that were made ready for its task.

    `claim`, `handles` and `num_held` are those of `handle.LeaseState`.
    """

    __slots__ = ("_lock", "_manager", "claim", "handles", "holder", "may", "num_held", "over", "ready", "task")

    def __init__(self, manager: LeaseManager, task: Task, holder: str) -> None:
        self._manager = manager
        self.task = task
        self.holder = holder
        self.may: frozenset[str] = frozenset()
        self.claim: frozenset[str] = frozenset()
        self.handles: dict[str, Handle] = {}
        self.num_held = 0
        self.ready: frozenset[str] = frozenset()
        self.over = False
        self._lock: asyncio.Lock | None = None

    async def need(self, kinds: Sequence[EnvKind], timeout_s: float | None = None) -> None:
        """Hold these kinds too; kinds that the lease holds already are left as they are.

        Concurrent calls take turns, so a kind is held once however many tools ask for it. Raises WorldError if an instance
        cannot be had in time.
        """
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            await self._manager.add(self, kinds, timeout_s)
        if self.over:
            raise WorldError(f"the lease of {self.holder} is over")

    def __contains__(self, kind: EnvKind) -> bool:
        return self._name(kind) in self.handles

    def __getitem__(self, kind: EnvKind) -> Any:
        handle = self.handle(kind)
        if handle.view is None:
            handle.view = EnvProxy(handle)
        return handle.view

    def handle(self, kind: EnvKind) -> Handle:
        """Raises WorldError if the lease is over, ConfigError if it does not hold this kind."""
        if self.over:
            raise WorldError(f"the lease of {self.holder} is over")
        name = self._name(kind)
        try:
            return self.handles[name]
        except KeyError:
            held = ", ".join(self.handles) or "nothing"
            raise ConfigError(
                f"{self.holder} does not hold {name!r} (it holds {held}): ask for it with `await lease.need`"
            ) from None

    def observation(self, kind: EnvKind) -> Any:
        """The value that `reset` returned; None for a shared instance that other chains use already."""
        return self.handle(kind).observation

    async def call(self, kind: EnvKind, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, for every placement alike."""
        handle = self.handle(kind)
        handle.check()
        return await handle.call(method, handle.slot.instance.call(method, args, kwargs))

    async def get(self, kind: EnvKind, attribute: str) -> Any:
        """Read an attribute, for every placement alike."""
        handle = self.handle(kind)
        handle.check()
        return await handle.call(attribute, handle.slot.instance.get(attribute))

    def beat(self) -> None:
        """Give a sign of life, for a pool with `heartbeat_s`. Every call of an environment is one too."""
        now = time.monotonic()
        for handle in self.handles.values():
            handle.active_at = now

    def spoil(self, why: str) -> None:
        """Close every instance of this lease, because their state cannot be trusted any more."""
        for handle in self.handles.values():
            handle.spoil(why)

    async def release(self) -> None:
        """Give everything back. A second call does nothing."""
        self.release_now()

    def release_now(self) -> None:
        """`release` for code that cannot await."""
        self._manager.release(self)

    def _name(self, kind: EnvKind) -> str:
        return kind if isinstance(kind, str) else self._manager.name_of(kind)
