"""A lease: the environments one chain holds, from the moment it needs them until it ends.

`need` adds kinds, `lease[kind]` is what tools and rewards see, `release` gives all back, once, whatever happened. It never
waits for an environment to close, so it can be called while being cancelled. Using a lease that is over is a `WorldError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, WorldError
from ..types import Task
from .proxy import Handle

if TYPE_CHECKING:
    from .manager import ResourceManager

Kind = Any
"""A class, or the name of a kind."""


class Lease:
    """`may` are the kinds that it may ask for, `claim` those that it has a claim on (see `claims`), `held` how many it has.

    `ready` are those that were made ready for its task.
    """

    __slots__ = ("_lock", "_manager", "claim", "handles", "held", "holder", "may", "over", "ready", "task")

    def __init__(self, manager: ResourceManager, task: Task, holder: str, may: frozenset[str] = frozenset()) -> None:
        self._manager = manager
        self.task = task
        self.holder = holder
        self.may = may
        self.claim: frozenset[str] = frozenset()
        self.handles: dict[str, Handle] = {}
        self.held = 0
        self.ready: frozenset[str] = frozenset()
        self.over = False
        self._lock: asyncio.Lock | None = None

    async def need(self, kinds: Sequence[Kind], timeout_s: float | None = None) -> None:
        """Hold these kinds too. Calls of one lease come one after the other: a kind is held once, however many tools ask
        for it.
        """
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            await self._manager.add(self, kinds, timeout_s)
        if self.over:
            raise WorldError(f"the lease of {self.holder} is over")

    def __contains__(self, kind: Kind) -> bool:
        return self._name(kind) in self.handles

    def __getitem__(self, kind: Kind) -> Any:
        return self.handle(kind).proxy

    def handle(self, kind: Kind) -> Handle:
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

    def observation(self, kind: Kind) -> Any:
        """What `reset` returned."""
        return self.handle(kind).observation

    async def call(self, kind: Kind, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, wherever the environment lives."""
        handle = self.handle(kind)
        handle.check()
        return await handle.call(method, handle.member.instance.call(method, args, kwargs))

    async def get(self, kind: Kind, attribute: str) -> Any:
        """Read an attribute, wherever the environment lives."""
        handle = self.handle(kind)
        handle.check()
        return await handle.call(attribute, handle.member.instance.get(attribute))

    def beat(self) -> None:
        """A sign of life; calls are signs too."""
        now = time.monotonic()
        for handle in self.handles.values():
            handle.beat = now

    def spoil(self, why: str) -> None:
        """What it holds is not to be trusted any more: close all of it."""
        for handle in self.handles.values():
            handle.spoil(why)

    async def release(self) -> None:
        """Give everything back. Calling it twice is fine."""
        self.release_now()

    def release_now(self) -> None:
        """The same, where nothing can be awaited."""
        if self.may and not self.over:
            self._manager.count_use(self)
        self.over = True
        handles = self.handles
        while handles:
            self._manager.give_back(handles.popitem()[1])
        if self.claim:
            self._manager.claims.drop(self)

    def _name(self, kind: Kind) -> str:
        return kind if isinstance(kind, str) else self._manager.name_of(kind)
