"""Environments and the settings of their pools: `spec_of` turns a class into a `Spec`. Nothing is started here.

An environment is any class with `reset(task)` and `close()`, sync or async, and further methods. `Environment` lists what a
class may declare; a class that is not derived from it may declare the same names, and gets the defaults for the others.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar

from .. import plugins
from ..aio.deadline import Expired, within
from ..errors import AgentFlyError, ConfigError, DeadlineError, WorldError, blame
from ..schema import Name, check_fields, setting
from ..types import Task
from .placements import OPTIONS, PlacementOptions, read_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one instance takes from its machine: CPUs, memory, and how long it takes to start.

    If the budget is full and an idle instance has to make room for another kind, one with a small `start_s` is closed first.
    """

    cpu: float = setting(0.05, low=0)
    memory_mb: float = setting(20.0, low=0)
    start_s: float = setting(0.1, low=0)

    def __post_init__(self) -> None:
        check_fields(self, "the cost of an environment: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What this machine can give to all kinds together. None is no limit."""

    cpu: float | None = setting(None, above=0)
    memory_mb: float | None = setting(None, above=0)

    def __post_init__(self) -> None:
        check_fields(self, "the budget of ")

    @property
    def limited(self) -> bool:
        return self.cpu is not None or self.memory_mb is not None

    def exceeded_by(self, instances: Iterable[tuple[Cost, int]]) -> tuple[str, float, float] | None:
        """The part of the budget that so many instances of each cost exceed, with what they need and the limit.

        Returns None if they fit.
        """
        if not self.limited:
            return None
        instances = list(instances)
        for name in ("cpu", "memory_mb"):
            limit = getattr(self, name)
            needed = sum(getattr(cost, name) * count for cost, count in instances)
            if limit is not None and needed > limit + 1e-9:
                return name, needed, limit
        return None

    def holds(self, cost: Cost) -> int:
        """How many instances of this cost fit, if there are no others."""
        pairs = ((self.cpu, cost.cpu), (self.memory_mb, cost.memory_mb))
        return min((int((limit + 1e-9) / each) for limit, each in pairs if limit is not None and each > 0), default=1 << 30)


class Environment:
    """A stateful world. Derive from it, or write any class with `reset` and `close`.

    An instance that chains share (`max_chains` above 1) is reset for the first of them, not for those that join.

    A static method or class method `make_ready(task, **options)` makes what all instances need and what may take long, such as
    an index. It is async, or returns quickly with an awaitable or None. See `ready_of`.

    A method `state_key()`, sync or async, names the state: a text that is equal for two chains of one task if they are in the
    same state, however they came there, and empty if it cannot tell. It changes nothing. It is called before each turn and
    recorded as `Turn.state`; algorithms that compare turns read it. Instances that chains share are not asked.

    `revision` names the version of what stands behind the class, such as a digest of a server's tools. A run records it, and is
    not resumed with another.
    """

    cost: ClassVar[Cost] = Cost()
    reusable: ClassVar[bool] = True
    max_chains: ClassVar[int] = 1
    placement: ClassVar[str] = "loop"
    revision: ClassVar[str] = ""

    def reset(self, task: Task) -> Any:
        """Drop all state of the last chain and begin `task`. Returns the first observation, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no reset(task)")

    def close(self) -> Any:
        """Free what the environment holds. May be called more than once."""


CALL_TIMEOUT_S = 120.0
READY_S = 86_400.0
"""For `make_ready`: an index of millions of passages takes hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One kind of environment and the settings of its pool. Times are in seconds.

    `name`                     its name in messages and metrics; by default the name of the class
    `make`, `options`          `make(**options)` builds an instance
    `cost`, `reusable`, `max_chains`   see `Cost`; single use if not reusable; how many chains share an instance
    `placement`                "loop", "thread", "process", "sandbox", "container" or "http"; `per_process` instances share
                               one worker process, sandbox or container
    `place`                    options of the placement: see `placements`
    `max`, `min_warm`          the most and the fewest instances of the pool (`max` left out: 64, or what the budget holds)
    `idle_s`                   an instance beyond `min_warm` that is idle for so long is closed
    `max_uses`, `max_age_s`, `max_growth_mb`     when an instance is closed and replaced (growth: of a worker process)
    `start_timeout_s`, `reset_timeout_s`, `call_timeout_s`, `close_timeout_s`     deadlines
    `max_hold_s`, `heartbeat_s`                  when an instance is taken from its chain: held for so long, or neither a call
                                                 nor `Lease.beat` for so long
    `pass_env`                 environment variables that a worker process may see beside the harmless ones
    """

    name: str
    make: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    reusable: bool = True
    max_chains: int = setting(1, low=1)
    placement: str = "loop"
    place: Mapping[str, Any] = field(default_factory=dict)
    per_process: int = setting(1, low=1)
    max: int | None = setting(None, low=1)
    min_warm: int = setting(0, low=0)
    idle_s: float = setting(60.0, above=0)
    max_uses: int | None = setting(None, low=1)
    max_age_s: float | None = setting(None, above=0)
    max_growth_mb: float | None = setting(None, above=0)
    start_timeout_s: float = setting(60.0, above=0)
    reset_timeout_s: float = setting(60.0, above=0)
    call_timeout_s: float = setting(CALL_TIMEOUT_S, above=0)
    close_timeout_s: float = setting(10.0, above=0)
    max_hold_s: float = setting(3600.0, above=0)
    heartbeat_s: float | None = setting(None, above=0)
    pass_env: tuple[Name, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, f"environment {self.name!r}: ")
        if not isinstance(self.cost, Cost):
            raise ConfigError(f"environment {self.name!r}: cost must be a Cost(cpu=..., memory_mb=...), not {self.cost!r}")
        if self.max is not None and self.min_warm > self.max:
            raise ConfigError(f"environment {self.name!r}: min_warm is {self.min_warm}, but max is only {self.max}")
        if not self.reusable and self.max_chains > 1:
            raise ConfigError(
                f"environment {self.name!r}: a single-use environment cannot be shared by {self.max_chains} chains"
            )
        self._check_placement()
        self._check_options()

    def _check_options(self) -> None:
        """Refuse options that the environment does not take. A class may check values in `check_options(**options)`."""
        try:
            inspect.signature(self.make).bind_partial(**self.options)
        except TypeError as error:
            raise ConfigError(f"environment {self.name!r}: options do not fit: {error}") from None
        except ValueError:
            return  # a builtin without a signature
        if callable(check := getattr(self.make, "check_options", None)):
            check(**self.options)
        if callable(longest := getattr(self.make, "longest_call_s", None)):
            self._allow_calls_of(longest(**self.options))

    def _allow_calls_of(self, seconds: float) -> None:
        """Raise `call_timeout_s` to what the environment's options allow; refuse one that was set lower."""
        if self.call_timeout_s >= seconds:
            return
        if self.call_timeout_s != CALL_TIMEOUT_S:
            raise ConfigError(
                f"environment {self.name!r}: call_timeout_s is {self.call_timeout_s:g}, but with its options a call may take "
                f"{seconds:g} s: raise the one or lower the other"
            )
        object.__setattr__(self, "call_timeout_s", float(seconds))

    def _check_placement(self) -> None:
        place = self.placement_options
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
    def placement_options(self) -> PlacementOptions | None:
        return read_placement(self.placement, self.place, f"environment {self.name!r}")

    @property
    def cls(self) -> type | None:
        return self.make if isinstance(self.make, type) else None


DECLARED = ("cost", "reusable", "max_chains", "placement")
SETTINGS = tuple(each.name for each in fields(Spec))


def spec_of(thing: Any, **settings: Any) -> Spec:
    """The spec of a class, of a name (see `plugins`), of a function that builds an environment, or of a spec.

    `settings` override what the class or spec declares. Raises ConfigError for an unknown setting.
    """
    given, settings = settings, _with_placement(thing, settings)
    if isinstance(thing, Spec):
        return replace(thing, **settings)
    name = None
    if isinstance(thing, str):
        # "module:Class" and "file.py:Class" are called "Class", in metrics and in the keys of the config.
        name, thing = thing.rpartition(":")[2], plugins.resolve("envs", thing)
        name = getattr(thing, "pool_name", name)
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
    """The `make_ready` of a kind with its options bound, or None if its class has none.

    It is called with None before the first chain, and with the task before each lease. Its time counts for no deadline of a
    start or reset. A placement with another file system has to make things ready there, so None is returned for it.
    """
    make: Any = spec.cls
    if spec.placement_options is not None or not isinstance(
        inspect.getattr_static(make, "make_ready", None), staticmethod | classmethod
    ):
        return None
    return partial(make.make_ready, **spec.options)


def failure_of(error: Exception, what: str, late: Exception) -> Exception:
    """The error for chains when a user's environment failed: one of AgentFly as it is, `late` if the time was over."""
    if isinstance(error, AgentFlyError):
        return error
    return late if isinstance(error, Expired) else WorldError(f"{what}: {type(error).__name__}: {error}")


async def make_ready(name: str, make: Callable[[Task | None], Any], task: Task | None = None) -> None:
    """Call what `ready_of` has returned. Raises DeadlineError after `READY_S`, and WorldError for an unknown error."""
    with blame(WorldError, f"{name} could not be made ready"):
        made = make(task)
        try:
            if inspect.isawaitable(made):
                await within(made, READY_S)
        except Expired:
            raise DeadlineError(f"{name} could not be made ready within {READY_S:g} s") from None


def check_settings(pool: str, settings: Any) -> None:
    """Check the settings of a pool when a config is read, before its environment is known. Raises ConfigError."""
    who = f"resources.pools.{pool}"
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{who} is a table of settings, not {settings!r}")
    given = _with_placement(None, settings, who)
    if "placement" in given:
        read_placement(given["placement"], given.get("place", {}), who)


def _with_placement(thing: Any, settings: Mapping[str, Any], who: str = "an environment's pool") -> dict[str, Any]:
    """Move the options of the placement, which users write beside the other settings, into `place`."""
    if unknown := [name for name in settings if name not in SETTINGS and name not in OPTIONS]:
        raise ConfigError(f"{who} has no setting {unknown[0]!r}; known: {', '.join((*SETTINGS, *sorted(OPTIONS)))}")
    place = {name: value for name, value in settings.items() if name in OPTIONS}
    others = {name: value for name, value in settings.items() if name not in OPTIONS}
    same = isinstance(thing, Spec) and others.get("placement", thing.placement) == thing.placement
    if place or (isinstance(thing, Spec) and not same):  # options of another placement are not kept
        others["place"] = {**(thing.place if same else {}), **others.get("place", {}), **place}
    return others


def importable(spec: Spec) -> tuple[str, dict[str, Any]]:
    """What a worker process builds an instance from: "module:name" or "file.py:name", and options that JSON can carry.

    Raises ConfigError if the worker could not import it.
    """
    options = dict(spec.options)
    stand_in: tuple[str, dict[str, Any]] | None = getattr(spec.make, "__agentfly_target__", None)
    if stand_in is None:
        target = target_of(spec.make)
    else:
        target = stand_in[0]
        options = {**stand_in[1], **({"options": options} if options else {})}
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"options for a worker process must have a JSON form: {error}") from None
    return target, options


def target_of(make: Any) -> str:
    """The "module:name" by which another process imports a class or function."""
    module, qualname = getattr(make, "__module__", None), getattr(make, "__qualname__", "<")
    if not module or "<" in qualname:
        raise ConfigError(
            f"a worker process must be able to import what builds it; {qualname!r} is defined inside a function: move it to "
            f"the top of a module, or use placement 'thread'"
        )
    if module == "__main__" or module.startswith("agentfly_user_"):
        try:
            module = inspect.getfile(make)
        except (TypeError, OSError):
            module = ""
        if not module.endswith(".py"):
            raise ConfigError(
                "a worker process cannot import it from an interactive session; put it into a file, or use placement 'thread'"
            )
    return f"{module}:{qualname}"
