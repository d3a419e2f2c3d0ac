"""What a chain holds: a `Lease` of several kinds, with a `Handle` on one `Slot` of a pool for each.

`need` adds kinds, `lease[kind]` is the `EnvProxy` that tools and rewards see, `release` gives all of them back. Releasing never
waits for an environment to close, so it is safe during a cancellation. Every use of a lease that is over raises a `WorldError`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from ..aio.deadline import Expired, within
from ..aio.threads import Abandoned
from ..errors import ConfigError, DeadlineError, WorldError, blame, contained, mark_as_environments
from ..types import Task
from .instance import Instance
from .spec import Spec

_HANDLE = "__agentfly_handle__"
EnvKind = Any
"""A kind of environment: its class, or its name."""
MAX_STATE = 80
"""Characters of the name of a state. A digest stands for a longer one."""


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

    lease: Lease
    slot: Slot
    observation: Any
    since: float
    active_at: float
    busy: int = 0
    why: str | None = None
    view: EnvProxy | None = None

    @property
    def spec(self) -> Spec:
        return self.slot.instance.spec

    @property
    def names_states(self) -> bool:
        """Whether the environment has a `state_key` that tells of this chain alone."""
        cls = self.spec.cls or type(self.slot.instance.env)
        return self.spec.max_chains == 1 and callable(getattr(cls, "state_key", None))

    async def state(self) -> str:
        """What the environment calls its state. Raises ConfigError if that is no text."""
        with blame(WorldError, f"{self.spec.name}.state_key"):
            key = await self.call("state_key", self.slot.instance.call("state_key", (), {}))
        if isinstance(key, str):
            return key
        raise ConfigError(
            f"{self.spec.name}.state_key returned {type(key).__name__}: return a text, such as a digest of the state"
        )

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

    async def call(self, name: str, awaitable: Awaitable[Any]) -> Any:
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


class EnvProxy:
    """What tools and rewards get in place of an environment. It behaves like the environment and can be taken back.

    Methods are passed on with a deadline, until the handle ends; then every use is a `WorldError` with the reason. If the
    environment lives in the event loop, methods and attributes are as its author wrote them. If it lives elsewhere (a thread,
    a worker, a server), a method called on the event loop returns an awaitable, and one called from any other thread blocks
    that thread and returns the value. So sync tools, which run in threads, and async tools read the same for every placement.
    `isinstance(proxy, TheEnvironment)` holds if its class is known.
    """

    __slots__ = ("__agentfly_handle__", "__dict__")

    def __init__(self, handle: Handle) -> None:
        object.__setattr__(self, _HANDLE, handle)

    def __getattr__(self, name: str) -> Any:
        """Called for names that are not in `__dict__`, which caches bound methods until the handle ends."""
        if name[:2] == "__":
            raise AttributeError(name)
        handle = _handle_of(self)
        handle.check()
        instance = handle.slot.instance
        if name == "close":
            return lambda: _close(handle)
        if instance.local:
            value = getattr(instance.env, name)
            if not callable(value) or isinstance(value, type):
                return value
            bound = _local(handle, name, value)
        elif _is_method(handle, name):
            bound = _remote(handle, name)
        elif threading.get_ident() != handle.slot.pool.home_thread:
            return handle.wait_for(handle.call(name, instance.get(name)))
        else:
            spec = handle.spec
            raise AttributeError(
                f"{spec.name}.{name} is not a method, and {spec.name} lives elsewhere (placement {spec.placement!r}): "
                f"read it in a sync function, or with `await lease.get({spec.name!r}, {name!r})`"
            )
        self.__dict__[name] = bound
        return bound

    def __setattr__(self, name: str, value: Any) -> None:
        handle = _handle_of(self)
        handle.check()
        if not handle.slot.instance.local:
            spec = handle.spec
            raise AttributeError(
                f"{spec.name} lives elsewhere (placement {spec.placement!r}): set {name!r} through a method of the class"
            )
        setattr(handle.slot.instance.env, name, value)

    def __repr__(self) -> str:
        handle = _handle_of(self)
        return f"<{handle.spec.name} lent to {handle.lease.holder}{'' if handle.why is None else ', over'}>"

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return _handle_of(self).spec.cls or EnvProxy


def _handle_of(proxy: EnvProxy) -> Handle:
    handle: Handle = object.__getattribute__(proxy, _HANDLE)
    return handle


def _local(handle: Handle, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        handle.check()
        handle.busy += 1
        try:
            value = function(*args, **kwargs)
        except Exception as error:
            mark_as_environments(error, f"{handle.spec.name}.{name}")
            raise
        except BaseException as error:
            # The thread of a sync tool was abandoned in the middle of the call, or the environment raised KeyboardInterrupt.
            # `Handle.spoil` is for the loop's thread only, so the handle ends here, and the instance is closed when the lease
            # gives it back.
            handle.end(f"a call of {handle.spec.name}.{name} was stopped; the environment is closed")
            if isinstance(error, Abandoned):
                raise
            failure = contained(error)
            mark_as_environments(failure, f"{handle.spec.name}.{name}")
            raise failure from error
        finally:
            handle.busy -= 1
            handle.active_at = time.monotonic()
        return handle.call(name, handle.slot.instance.at_home(value)) if inspect.isawaitable(value) else value

    return call


def _remote(handle: Handle, name: str) -> Callable[..., Any]:
    home = handle.slot.pool.home_thread

    def call(*args: Any, **kwargs: Any) -> Any:
        handle.check()
        coroutine = handle.call(name, handle.slot.instance.call(name, args, kwargs))
        return coroutine if threading.get_ident() == home else handle.wait_for(coroutine)

    return call


def _is_method(handle: Handle, name: str) -> bool:
    """Whether the class has a method of this name. True for all names if a function builds the environment."""
    cls = handle.spec.cls
    if cls is None:
        return True
    value = inspect.getattr_static(cls, name, None)
    return callable(value) or isinstance(value, staticmethod | classmethod)


def _close(handle: Handle) -> None:
    """The chain has closed its environment: the instance is not lent again."""
    handle.end(f"{handle.spec.name} was closed by its chain")
    handle.slot.pool.loop.call_soon_threadsafe(handle.slot.pool.retire, handle.slot)


class LeaseManager(Protocol):
    """The part of the resource manager that a lease uses."""

    async def add(self, lease: Lease, kinds: Sequence[EnvKind], timeout_s: float | None) -> None: ...
    def release(self, lease: Lease) -> None: ...
    def name_of(self, kind: EnvKind) -> str: ...


class Lease:
    """The environments of one chain. `holder` is the name of the chain, for messages.

    `may`        kinds that the chain may still ask for
    `claim`      kinds that it has a claim on: see `claims`
    `handles`    by kind
    `num_held`   instances that it holds. A handle that the pool took back is still in `handles` and does not count
    `ready`      kinds that were made ready for its task
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

    async def state(self) -> str:
        """What the environments call the state that they are in together: see `Environment.state_key`.

        Empty if none has a name for its state, or one that has names has none for this state.
        """
        keys = {name: await handle.state() for name, handle in self.handles.items() if handle.names_states and not handle.why}
        if not all(keys.values()):
            return ""
        text = "\n".join(f"{name}: {keys[name]}" for name in sorted(keys))
        return text if len(text) <= MAX_STATE else blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

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
