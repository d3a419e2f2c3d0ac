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
from functools import partial
from typing import Any, ClassVar

from .. import plugins
from ..errors import ConfigError
from ..types import Task
from .backends.options import OPTION_CLASSES, OPTIONS, PlacementOptions, read_placement


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

    def holds(self, cost: Cost) -> int:
        """How many instances of this cost it holds, if there is nothing else."""
        most = 1 << 30
        for name in ("cpu", "memory_mb"):
            limit, each = getattr(self, name), getattr(cost, name)
            if limit is not None and each > 0:
                most = min(most, int((limit + 1e-9) / each))
        return most


class Environment:
    """A stateful world. Derive from it, or write any class with `reset` and `close`.

    A world that is shared (`max_chains` above 1) is reset when its first chain comes, not for those that join it.

    What all its instances need and what may take long to make, such as an index, belongs into a static method or class method
    `make_ready(task, **options)`: async, or quick and giving an awaitable or nothing. See `ready_of`.
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


CALL_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One kind of environment and how its pool is run. Times in seconds; every one of them is a deadline.

    `name`                     what messages and metrics call it; the class's name
    `make`, `options`          called with the options to build an instance
    `placement`                "loop", "thread", "process", "sandbox", "container" or "http"; `per_process` instances share
                               one worker process, sandbox or container
    `place`                    options of the placement: see `places`
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
    place: Mapping[str, Any] = field(default_factory=dict)
    per_process: int = 1
    max: int | None = None
    min_warm: int = 0
    idle_s: float = 60.0
    max_uses: int | None = None
    max_age_s: float | None = None
    max_growth_mb: float | None = None
    start_timeout_s: float = 60.0
    reset_timeout_s: float = 60.0
    call_timeout_s: float = CALL_TIMEOUT_S
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
        self._check_place()
        self._check_options()

    def _check_options(self) -> None:
        """What the environment does not take is refused now. A class may look closer, in `check_options(**options)`."""
        try:
            inspect.signature(self.make).bind_partial(**self.options)
        except TypeError as error:
            raise ConfigError(f"environment {self.name!r}: options do not fit: {error}") from None
        except ValueError:
            return  # a builtin, which does not say what it takes
        if callable(check := getattr(self.make, "check_options", None)):
            check(**self.options)
        if callable(longest := getattr(self.make, "longest_call_s", None)):
            self._allow_calls_of(longest(**self.options))

    def _allow_calls_of(self, seconds: float) -> None:
        """Deadlines nest: the pool's must not cut short what the environment's own options allow."""
        if self.call_timeout_s >= seconds:
            return
        if self.call_timeout_s != CALL_TIMEOUT_S:
            raise ConfigError(
                f"environment {self.name!r}: call_timeout_s is {self.call_timeout_s:g}, but with its options a call may take "
                f"{seconds:g} s: raise the one or lower the other"
            )
        object.__setattr__(self, "call_timeout_s", float(seconds))

    def _check_place(self) -> None:
        place = self.in_place
        if place is None:
            return
        who = f"environment {self.name!r}: placement {self.placement!r}"
        if self.max_growth_mb is not None:
            raise ConfigError(f"{who} does not measure growth: remove max_growth_mb and set memory_mb, or max_uses")
        if self.placement == "http":
            for name, empty in (("options", {}), ("pass_env", ()), ("per_process", 1)):
                if getattr(self, name) != empty:
                    raise ConfigError(f"{who} leaves {name!r} to the server: remove it here and set it there")
        if place.limit_s is not None:
            object.__setattr__(self, "call_timeout_s", min(self.call_timeout_s, place.limit_s))

    @property
    def in_place(self) -> PlacementOptions | None:
        return read_placement(self.placement, self.place, f"environment {self.name!r}")

    @property
    def cls(self) -> type | None:
        return self.make if isinstance(self.make, type) else None


DECLARED = ("cost", "reusable", "max_chains", "placement")
PLACEMENT_NAMES = ("loop", "thread", "process", *OPTION_CLASSES)
SETTINGS = tuple(each.name for each in fields(Spec))


def spec_of(thing: Any, **settings: Any) -> Spec:
    """The spec of a class, a name of one (`plugins`), a function that builds one, or a spec; `settings` override what it
    declares.
    """
    given, settings = settings, _with_place(thing, settings)
    if isinstance(thing, Spec):
        return replace(thing, **settings)
    name = None
    if isinstance(thing, str):
        # Of "module:Class" and "file.py:Class" the class's name: it stands in metrics and in the keys of the config.
        name, thing = thing.rpartition(":")[2], plugins.resolve("envs", thing)
        if isinstance(thing, Spec):
            return spec_of(thing, **{"name": name, **given})
    if not callable(thing):
        raise ConfigError(f"an environment is a class, a name or a function that builds one, not {thing!r}")
    if isinstance(thing, type):
        missing = [method for method in ("reset", "close") if not callable(getattr(thing, method, None))]
        if missing:
            raise ConfigError(f"{thing.__name__} is not an environment: it has no method {missing[0]!r}")
    declared = {key: value for key in DECLARED if (value := getattr(thing, key, None)) is not None}
    label = name or getattr(thing, "__name__", type(thing).__name__)
    return Spec(**{"name": label, "make": thing, **declared, **settings})


def ready_of(spec: Spec) -> Callable[[Task | None], Any] | None:
    """What makes the kind's instances ready, where its class says so: called before the first chain with None, and before each
    lease with its task. Its time is no part of a start's or reset's. Not for a placement with files of its own.
    """
    make: Any = spec.cls
    if spec.in_place is not None or not isinstance(
        inspect.getattr_static(make, "make_ready", None), staticmethod | classmethod
    ):
        return None
    return partial(make.make_ready, **spec.options)


def check_settings(pool: str, settings: Any) -> None:
    """Refuse what no pool could have, as far as it can be known before the environment is: for whoever reads a config."""
    who = f"resources.pools.{pool}"
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{who} is a table of settings, not {settings!r}")
    if unknown := [name for name in settings if name not in SETTINGS and name not in OPTIONS]:
        raise ConfigError(f"{who} has no setting {unknown[0]!r}; known: {', '.join((*SETTINGS, *sorted(OPTIONS)))}")
    placement = settings.get("placement")
    if placement is not None:
        if placement not in PLACEMENT_NAMES:
            raise ConfigError(f"{who}: unknown placement {placement!r}; known: {', '.join(PLACEMENT_NAMES)}")
        options = {name: value for name, value in settings.items() if name in OPTIONS}
        read_placement(placement, {**settings.get("place", {}), **options}, who)


def _with_place(thing: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the placement's options, which stand beside the others, gathered under `place`."""
    if unknown := [name for name in settings if name not in SETTINGS and name not in OPTIONS]:
        raise ConfigError(
            f"an environment's pool has no setting {unknown[0]!r}; known: {', '.join((*SETTINGS, *sorted(OPTIONS)))}"
        )
    place = {name: value for name, value in settings.items() if name in OPTIONS}
    found = {name: value for name, value in settings.items() if name not in OPTIONS}
    if isinstance(thing, Spec) and (found.get("placement", thing.placement) != thing.placement or place):
        kept = thing.place if found.get("placement", thing.placement) == thing.placement else {}
        found["place"] = {**kept, **found.get("place", {}), **place}
    elif place:
        found["place"] = {**found.get("place", {}), **place}
    return found


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
