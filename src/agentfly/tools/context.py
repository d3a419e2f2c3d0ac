"""`Context`: what one chain provides to its tools, namely task, trajectory, environments and instances of stateful tools.

`close` closes the instances within a time limit. It logs failures and never raises: a finished chain must not be lost because a
tool cannot be closed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ..aio.deadline import Expired, within
from ..aio.threads import run_in_thread
from ..errors import WorldError
from ..rows import OpenRow
from ..types import Task, Trajectory, Turn
from .text import describe_error

log = logging.getLogger(__name__)
CLOSE_S = 10.0


@dataclass(slots=True)
class Context:
    """`instances` maps the class of a stateful tool (or any other key) to the instance of this chain.

    `waited_before_turn_s` is what `trajectory.waited_s` was when the turn began, if turns are limited. `cut` is the reply that
    was in progress when the chain was cancelled. `state` asks the environments of the chain for the name of their state. `row`
    is the training row that the chain goes on with.
    """

    task: Task
    trajectory: Trajectory
    env: Any = None
    lend: Callable[[type], Awaitable[Any]] | None = None
    state: Callable[[], Awaitable[str]] | None = None
    instances: dict[Any, Any] = field(default_factory=dict)
    closed: bool = False
    waited_before_turn_s: float = 0.0
    cut: Turn | None = None
    row: OpenRow | None = None

    async def environment(self, kind: type) -> Any:
        """The environment of a class that is leased to this chain: acquired on the first call, the same one afterwards."""
        if self.lend is None:
            raise WorldError(f"a tool or reward asks for a {kind.__name__}, but this chain has no environments")
        return await self.lend(kind)

    async def close(self) -> None:
        """Closes all instances that have a `close`. May be called twice."""
        self.closed = True
        instances, self.instances = list(self.instances.values()), {}
        if instances:
            await asyncio.gather(*(close_instance(instance) for instance in instances))


async def close_instance(instance: object) -> None:
    """Calls `instance.close()`, sync or async, for at most CLOSE_S seconds."""
    close = getattr(instance, "close", None)
    if not callable(close):
        return
    try:
        await within(_close(close), CLOSE_S)
    except Expired:
        log.warning("closing %s took longer than %g s and was given up", type(instance).__name__, CLOSE_S)
    except Exception as error:  # noqa: BLE001 - `close` may raise anything, and the chain must not be lost
        log.warning("closing %s failed: %s", type(instance).__name__, describe_error(error))


async def _close(close: Any) -> None:
    done = close() if inspect.iscoroutinefunction(close) else await run_in_thread(close)
    if inspect.isawaitable(done):
        await done
