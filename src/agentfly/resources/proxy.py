"""What a chain is given in place of an environment: it behaves like the environment, and can be taken back.

A `Handle` is one chain's hold on one instance; its `EnvProxy` is the object that tools and rewards see. Methods are passed on
with a deadline. A call that is cancelled or runs out of time spoils the handle: the instance is closed, never lent again, and
whatever the chain does with the proxy afterwards is a `WorldError` that says why.

Where the environment lives in the loop, methods and attributes are as its author wrote them. Where it lives elsewhere (a
thread, a worker, a server), a method called on the event loop returns an awaitable, and one called from any other thread (a
sync tool or reward runs in one) blocks that thread and returns the value: so sync tools and async methods read the same
wherever the environment lives.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ..errors import DeadlineError, WorldError, mark_as_environments
from ..tools.deadline import Expired, within

if TYPE_CHECKING:
    from .lease import Lease
    from .pool import Member


class Handle:
    """One chain's hold on one instance. `why` is None while it holds."""

    __slots__ = ("beat", "busy", "lease", "member", "observation", "since", "view", "why")

    def __init__(self, lease: Lease, member: Member, observation: Any, now: float) -> None:
        self.lease = lease
        self.member = member
        self.observation = observation
        self.since = self.beat = now
        self.busy = 0
        self.why: str | None = None
        self.view: EnvProxy | None = None

    @property
    def proxy(self) -> EnvProxy:
        if self.view is None:
            self.view = EnvProxy(self)
        return self.view

    def end(self, why: str) -> None:
        """From now on every use is refused with this reason."""
        if self.why is None:
            self.why = why
        if self.view is not None:
            self.view.__dict__.clear()

    def spoil(self, why: str) -> None:
        """A call was given up: the instance is not to be trusted any more. On the loop only."""
        self.end(why)
        self.member.pool.spoil(self.member, why)

    def check(self) -> None:
        if self.why is not None:
            raise WorldError(self.why)

    async def call(self, name: str, awaitable: Any) -> Any:
        """Await a call of the environment within its deadline."""
        if self.why is not None:
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise WorldError(self.why)
        spec = self.member.pool.spec
        coroutine = awaitable if inspect.iscoroutine(awaitable) else wrap(awaitable)
        self.busy += 1
        try:
            return await within(coroutine, spec.call_timeout_s)
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
            self.beat = time.monotonic()

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """From another thread: run it on the loop and block until it is done, at most its deadline and a little."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.member.pool.loop)
        try:
            return future.result(self.member.pool.spec.call_timeout_s + 10.0)
        except BaseException:
            future.cancel()  # no effect on one that is done; else it is a call given up
            raise


async def wrap(awaitable: Any) -> Any:
    return await awaitable


_KEPT = "__agentfly_grip__"


class EnvProxy:
    """Stands for the environment. `isinstance(proxy, TheEnvironment)` holds where its class is known."""

    __slots__ = ("__agentfly_grip__", "__dict__")

    def __init__(self, handle: Handle) -> None:
        object.__setattr__(self, _KEPT, handle)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        handle: Handle = _grips(self)
        handle.check()
        instance = handle.member.instance
        if name == "close":
            return lambda: _close(handle)
        if instance.local:
            value = getattr(instance.env, name)
            if not callable(value) or isinstance(value, type):
                return value
            bound = _local(handle, name, value)
        elif _is_method(handle, name):
            bound = _remote(handle, name)
        elif threading.get_ident() != handle.member.pool.home_thread:
            return handle.wait_for(handle.call(name, instance.get(name)))
        else:
            spec = instance.spec
            raise AttributeError(
                f"{spec.name}.{name} is not a method, and {spec.name} lives elsewhere (placement {spec.placement!r}): "
                f"read it in a sync function, or with `await lease.get({spec.name!r}, {name!r})`"
            )
        self.__dict__[name] = bound
        return bound

    def __setattr__(self, name: str, value: Any) -> None:
        handle: Handle = _grips(self)
        handle.check()
        instance = handle.member.instance
        if not instance.local:
            spec = instance.spec
            raise AttributeError(
                f"{spec.name} lives elsewhere (placement {spec.placement!r}): set {name!r} through a method of it"
            )
        setattr(instance.env, name, value)

    def __repr__(self) -> str:
        handle: Handle = _grips(self)
        return f"<{handle.member.pool.spec.name} lent to {handle.lease.holder}{'' if handle.why is None else ', over'}>"

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return _grips(self).member.pool.spec.cls or EnvProxy


def _grips(proxy: EnvProxy) -> Handle:
    handle: Handle = object.__getattribute__(proxy, _KEPT)
    return handle


def _local(handle: Handle, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if handle.why is not None:
            raise WorldError(handle.why)
        handle.busy += 1
        try:
            value = function(*args, **kwargs)
        except Exception as error:
            mark_as_environments(error, f"{handle.member.pool.spec.name}.{name}")
            raise
        except BaseException:
            # Its thread was told to stop in the middle (this may not be the loop's): the instance is closed when it comes back.
            handle.end(f"a call of {handle.member.pool.spec.name}.{name} was stopped; the environment is closed")
            raise
        finally:
            handle.busy -= 1
            handle.beat = time.monotonic()
        return handle.call(name, value) if inspect.isawaitable(value) else value

    return call


def _remote(handle: Handle, name: str) -> Callable[..., Any]:
    home = handle.member.pool.home_thread

    def call(*args: Any, **kwargs: Any) -> Any:
        if handle.why is not None:
            raise WorldError(handle.why)
        coroutine = handle.call(name, handle.member.instance.call(name, args, kwargs))
        return coroutine if threading.get_ident() == home else handle.wait_for(coroutine)

    return call


def _is_method(handle: Handle, name: str) -> bool:
    """Methods are told from attributes by the class; a function that builds environments does not say, so all are methods."""
    cls = handle.member.pool.spec.cls
    if cls is None:
        return True
    value = inspect.getattr_static(cls, name, None)
    return callable(value) or isinstance(value, staticmethod | classmethod)


def _close(handle: Handle) -> None:
    """The chain says that it is done with the environment for good: it is closed, not lent again."""
    loop = handle.member.pool.loop
    why = f"{handle.member.pool.spec.name} was closed by its chain"
    handle.end(why)
    loop.call_soon_threadsafe(handle.member.pool.retire, handle.member)
