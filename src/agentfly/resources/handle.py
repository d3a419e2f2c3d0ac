"""A chain's use of an environment: a `Slot` is one place of a pool with its instance, a `Handle` is one chain's use of a slot.

Pool, lease, proxy, claims and manager all import this module; it imports none of them.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..aio.deadline import Expired, within
from ..errors import DeadlineError, WorldError, mark_as_environments
from .backends.base import Instance
from .spec import Spec


class LeaseState(Protocol):
    """The fields of a lease that handles and claims use."""

    holder: str
    """The name of the chain, for messages."""
    claim: frozenset[str]
    """The kinds that it has a claim on: see `claims`."""
    handles: dict[str, Handle]
    """By kind."""
    num_held: int
    """Instances that it holds. A handle that the pool took back is still in `handles` and does not count."""


class SlotOwner(Protocol):
    """The part of a pool that handles use. `home_thread` is the thread of its event loop."""

    spec: Spec
    loop: asyncio.AbstractEventLoop
    home_thread: int

    def spoil(self, slot: Slot, why: str) -> None: ...
    def retire(self, slot: Slot) -> None: ...


@dataclass(slots=True, eq=False)
class Slot:
    """One place of a pool, with a started instance in it. `pool` draws its states.

    `kind`         the name of the pool
    `num_chains`   chains that use it now: at most 1, or the kind's `max_chains` if it is shared
    `live`         False from the moment the pool closes it
    `retiring`     it takes no new chain and is closed when the last one leaves
    `baseline_mb`  the memory of its process after the first lease; growth is measured from there
    """

    pool: SlotOwner
    instance: Instance
    kind: str
    started_at: float = field(default_factory=time.monotonic)
    idle_since: float = field(default_factory=time.monotonic)
    baseline_mb: float | None = None
    handles: list[Handle] = field(default_factory=list)
    num_chains: int = 0
    uses: int = 0
    live: bool = True
    retiring: bool = False


@dataclass(slots=True, eq=False)
class Handle:
    """One chain's use of one slot. `why` is None while the handle is valid, then the reason why it is not.

    `busy` counts calls that run now. `active_at` is the time of the last sign of life, for `heartbeat_s`. `view` is the
    `EnvProxy` of this handle, once it was asked for.
    """

    lease: LeaseState
    slot: Slot
    observation: Any
    since: float
    active_at: float
    busy: int = 0
    why: str | None = None
    view: Any = None

    @property
    def spec(self) -> Spec:
        return self.slot.instance.spec

    def end(self, why: str) -> None:
        """Refuse every further use with this reason; the first reason stays."""
        if self.why is None:
            self.why = why
        if self.view is not None:
            self.view.__dict__.clear()  # bound methods that the proxy has cached

    def spoil(self, why: str) -> None:
        """End the handle and close the instance, whose state is unknown after a call that was given up. On the loop only."""
        self.end(why)
        self.slot.pool.spoil(self.slot, why)

    def check(self) -> None:
        """Raise a WorldError with the reason if the handle is no longer valid."""
        if self.why is not None:
            raise WorldError(self.why)

    async def call(self, name: str, awaitable: Any) -> Any:
        """Await a call of the environment within `call_timeout_s`. A call that is cancelled or too late spoils the handle."""
        if self.why is not None:
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise WorldError(self.why)
        spec = self.spec
        self.busy += 1
        try:
            return await within(awaitable, spec.call_timeout_s)
        except Expired:
            what = f"{spec.name}.{name} took longer than {spec.call_timeout_s:g} s"
            self.spoil(f"{what}; the environment was closed")
            raise DeadlineError(what) from None
        except Exception as error:
            mark_as_environments(error, f"{spec.name}.{name}")
            raise
        except BaseException:
            self.spoil(f"a call of {spec.name}.{name} was cancelled; the environment was closed")
            raise
        finally:
            self.busy -= 1
            self.active_at = time.monotonic()

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a call on the event loop and block until it returns. For other threads than the loop's."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.slot.pool.loop)
        try:
            # `call` has the deadline; the 10 s more are for a loop that is busy.
            return future.result(self.spec.call_timeout_s + 10.0)
        except BaseException:
            future.cancel()  # no effect if it is done; otherwise this thread was abandoned, and so is the call
            raise
