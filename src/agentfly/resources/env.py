"""What an environment is and what it costs: a class in, the `Spec` of a pool of it out.

An environment is any class with `reset(task)` and `close()`, sync or async, and methods of its own. `Environment` spells
out what it may declare; a class that is not derived from it may declare the same names, and what it leaves out has the
defaults below. `Spec` is one kind of environment with the settings of its pool; `spec_of` makes one from a class, a name, a
function that builds one, or a `Spec`. Nothing is started here.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from .. import plugins
from ..errors import ConfigError
from ..types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one instance takes from its host: a share of a CPU, memory, and how long it takes to start."""

    cpu: float = 0.05
    memory_mb: float = 20.0
    start_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("cpu", "memory_mb", "start_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"an environment's cost {name!r} must be 0 or more, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a host can give to all kinds together. None: no limit."""

    cpu: float | None = None
    memory_mb: float | None = None

    def __post_init__(self) -> None:
        for name in ("cpu", "memory_mb"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not 0 < value < math.inf):
                raise ConfigError(f"the budget of {name!r} must be above 0, not {value!r}")


class Environment:
    """A stateful world. Derive from it, or write any class with `reset` and `close`.

    A world that is shared (`max_chains` above 1) is reset when its first chain comes, not for those that join it.
    """

    cost: ClassVar[Cost] = Cost()
    reusable: ClassVar[bool] = True
    max_chains: ClassVar[int] = 1
    placement: ClassVar[str] = "loop"

    def reset(self, task: Task) -> Any:
        """Forget everything of the last chain and open `task`; the first observation, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no reset(task)")

    def close(self) -> Any:
        """Give back what the world holds; called once or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One kind of environment and how its pool is run. Times in seconds; every one of them is a deadline.

    `name`                     what messages and metrics call it; the class's name
    `make`, `options`          called with the options to build an instance
    `placement`                "loop", "thread" or "process"; `per_process` instances share one worker process
    `max`, `min_warm`          the pool's size: at most (left out: 64, or what the budget holds), and at least
    `idle_s`                   an instance beyond `min_warm` that nobody wanted for so long is closed
    `max_uses`, `max_age_s`, `max_growth_mb`     when an instance is closed and replaced (growth: of a worker process)
    `max_hold_s`, `heartbeat_s`                  when a lease is taken back: held too long, or no sign of life
    `pass_env`                 names of environment variables that a worker process may see, beside the harmless ones
    """

    name: str
    make: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    reusable: bool = True
    max_chains: int = 1
    placement: str = "loop"
    per_process: int = 1
    max: int | None = None
    min_warm: int = 0
    idle_s: float = 60.0
    max_uses: int | None = None
    max_age_s: float | None = None
    max_growth_mb: float | None = None
    start_timeout_s: float = 60.0
    reset_timeout_s: float = 60.0
    call_timeout_s: float = 120.0
    close_timeout_s: float = 10.0
    max_hold_s: float = 3600.0
    heartbeat_s: float | None = None
    pass_env: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole = ("max_chains", "per_process")
        times = ("idle_s", "start_timeout_s", "reset_timeout_s", "call_timeout_s", "close_timeout_s", "max_hold_s")
        optional = ("max_uses", "max_age_s", "max_growth_mb", "heartbeat_s")
        checks = [(_is_whole(getattr(self, name), 1), name, "a whole number from 1") for name in whole]
        checks += [(_is_positive(getattr(self, name)), name, "a number above 0") for name in times]
        checks += [(getattr(self, n) is None or _is_positive(getattr(self, n)), n, "above 0, or left out") for n in optional]
        checks.append((self.max is None or _is_whole(self.max, 1), "max", "a whole number from 1, or left out"))
        checks.append((_is_whole(self.min_warm, 0), "min_warm", "a whole number from 0"))
        checks.append((isinstance(self.cost, Cost), "cost", "a Cost(cpu=..., memory_mb=...)"))
        for ok, name, wanted in checks:
            if not ok:
                raise ConfigError(f"environment {self.name!r}: {name} must be {wanted}, not {getattr(self, name)!r}")
        if self.max is not None and self.min_warm > self.max:
            raise ConfigError(f"environment {self.name!r}: min_warm is {self.min_warm}, but max is only {self.max}")
        if not self.reusable and self.max_chains > 1:
            raise ConfigError(
                f"environment {self.name!r}: a single-use environment cannot be shared by {self.max_chains} chains"
            )

    @property
    def cls(self) -> type | None:
        return self.make if isinstance(self.make, type) else None


DECLARED = ("cost", "reusable", "max_chains", "placement")
SETTINGS = tuple(each.name for each in fields(Spec))


def spec_of(thing: Any, **settings: Any) -> Spec:
    """The spec of a class, a name of one (`plugins`), a function that builds one, or a spec; `settings` override what it
    declares.
    """
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise ConfigError(f"an environment's pool has no setting {unknown[0]!r}; known: {', '.join(SETTINGS)}")
    if isinstance(thing, Spec):
        return replace(thing, **settings)
    name = None
    if isinstance(thing, str):
        name, thing = thing, plugins.resolve("envs", thing)
        if isinstance(thing, Spec):
            return replace(thing, **{"name": name, **settings})
    if not callable(thing):
        raise ConfigError(f"an environment is a class, a name or a function that builds one, not {thing!r}")
    if isinstance(thing, type):
        missing = [method for method in ("reset", "close") if not callable(getattr(thing, method, None))]
        if missing:
            raise ConfigError(f"{thing.__name__} is not an environment: it has no method {missing[0]!r}")
    declared = {key: value for key in DECLARED if (value := getattr(thing, key, None)) is not None}
    label = name or getattr(thing, "__name__", type(thing).__name__)
    return Spec(**{"name": label, "make": thing, **declared, **settings})


def importable(spec: Spec) -> tuple[str, dict[str, Any]]:
    """The words a worker process builds an instance from: "module:name" (or "file.py:name"), and options that JSON can
    carry.
    """
    options = dict(spec.options)
    stand_in: tuple[str, dict[str, Any]] | None = getattr(spec.make, "__agentfly_target__", None)
    if stand_in is None:
        target = target_of(spec.make, spec.name)
    else:
        target = stand_in[0]
        options = {**stand_in[1], **({"options": options} if options else {})}
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment {spec.name!r}: options for a worker process must have a JSON form: {error}") from None
    return target, options


def target_of(make: Any, name: str) -> str:
    """How another process finds a class or function again."""
    module, qualname = getattr(make, "__module__", None), getattr(make, "__qualname__", "<")
    if not module or "<" in qualname:
        raise ConfigError(
            f"environment {name!r}: a worker process must be able to import what builds it; {qualname!r} is defined "
            f"inside a function: move it to the top of a module, or use placement 'thread'"
        )
    if module == "__main__" or module.startswith("agentfly_user_"):
        try:
            module = inspect.getfile(make)
        except (TypeError, OSError):
            module = ""
        if not module.endswith(".py"):
            raise ConfigError(
                f"environment {name!r}: a worker process cannot import it from an interactive session; put it into a file, "
                f"or use placement 'thread'"
            )
    return f"{module}:{qualname}"


def _is_whole(value: Any, low: int) -> bool:
    return type(value) is int and value >= low


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
