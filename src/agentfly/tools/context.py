"""What a chain lends to its tools: the task, the trajectory so far, the environment, and its own instances of stateful tools.

One `Context` per chain. `close` ends the instances; it has a deadline, reports what goes wrong to the log, and never raises
for them: a chain that is over must not be lost because a tool would not close.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import WorldError
from ..types import Task, Trajectory
from .deadline import Expired, within
from .text import describe_error
from .threads import run_in_thread

log = logging.getLogger(__name__)
CLOSE_S = 10.0


@dataclass(slots=True)
class Context:
    """`instances` maps the class of a stateful tool (or a name of one's own) to this chain's instance."""

    task: Task
    trajectory: Trajectory
    env: Any = None
    lend: Callable[[type], Awaitable[Any]] | None = None
    instances: dict[Any, Any] = field(default_factory=dict)
    closed: bool = False

    async def environment(self, kind: type) -> Any:
        """This chain's environment of a class, lent when it is first asked for and the same one ever after."""
        if self.lend is None:
            raise WorldError(f"a tool or reward asks for a {kind.__name__}, but this chain has no environments")
        return await self.lend(kind)

    async def close(self) -> None:
        """Close every instance that has a `close`; calling it twice is fine."""
        self.closed = True
        instances, self.instances = list(self.instances.values()), {}
        if instances:
            await asyncio.gather(*(close_instance(instance) for instance in instances))


async def close_instance(instance: Any) -> None:
    """Call `instance.close()`, sync or async, within its deadline."""
    close = getattr(instance, "close", None)
    if not callable(close):
        return
    try:
        await within(_close(close), CLOSE_S)
    except Expired:
        log.warning("closing %s took longer than %g s and was given up", type(instance).__name__, CLOSE_S)
    except Exception as error:  # noqa: BLE001 - see the module's docstring
        log.warning("closing %s failed: %s", type(instance).__name__, describe_error(error))


async def _close(close: Any) -> None:
    done = close() if inspect.iscoroutinefunction(close) else await run_in_thread(close)
    if inspect.isawaitable(done):
        await done
