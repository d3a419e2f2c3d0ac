"""`EnvProxy`: what tools and rewards get in place of an environment. It behaves like the environment and can be taken back.

Methods are passed on with a deadline, until the handle ends; then every use is a `WorldError` with the reason. If the
environment lives in the event loop, methods and attributes are as its author wrote them. If it lives elsewhere (a thread, a
worker, a server), a method called on the event loop returns an awaitable, and one called from any other thread blocks that
thread and returns the value. So sync tools, which run in threads, and async tools read the same for every placement.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import WorldError, mark_as_environments
from .handle import Handle

_HANDLE = "__agentfly_handle__"


class EnvProxy:
    """Stands for the environment of one handle. `isinstance(proxy, TheEnvironment)` holds if its class is known."""

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
        if handle.why is not None:
            raise WorldError(handle.why)
        handle.busy += 1
        try:
            value = function(*args, **kwargs)
        except Exception as error:
            mark_as_environments(error, f"{handle.spec.name}.{name}")
            raise
        except BaseException:
            # The thread of a sync tool was abandoned in the middle of the call. `Handle.spoil` is for the loop's thread only,
            # so the handle ends here, and the instance is closed when the lease gives it back.
            handle.end(f"a call of {handle.spec.name}.{name} was stopped; the environment is closed")
            raise
        finally:
            handle.busy -= 1
            handle.active_at = time.monotonic()
        return handle.call(name, value) if inspect.isawaitable(value) else value

    return call


def _remote(handle: Handle, name: str) -> Callable[..., Any]:
    home = handle.slot.pool.home_thread

    def call(*args: Any, **kwargs: Any) -> Any:
        if handle.why is not None:
            raise WorldError(handle.why)
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
