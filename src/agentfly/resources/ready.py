"""What a kind of environment needs before an instance of it is of use: made outside the deadlines of its start and reset.

In: a kind's name and its `make_ready` (see `env.ready_of`), for a task or none in particular. Out: nothing, once it is made;
else an error that names the kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import AgentFlyError, DeadlineError, WorldError
from ..tools.deadline import Expired, within
from ..types import Task
from .proxy import wrap

READY_S = 86_400.0
"""For what a kind makes once for all its instances: an index of millions of passages takes hours."""


async def make_ready(name: str, make: Callable[[Task | None], Any], task: Task | None = None) -> None:
    try:
        made = make(task)
        if inspect.isawaitable(made):
            await within(wrap(made), READY_S)
    except AgentFlyError:
        raise
    except Expired:
        raise DeadlineError(f"{name} could not be made ready within {READY_S:g} s") from None
    except Exception as error:
        raise WorldError(f"{name} could not be made ready: {type(error).__name__}: {error}") from error
