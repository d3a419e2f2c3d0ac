"""The kinds of environments of one resource manager: their names, and the size of each pool within the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..types import Task
from .lease import EnvKind
from .spec import Budget, Spec, ready_of, spec_of

DEFAULT_MAX = 64


class Kinds:
    """`pools`: the spec and the size of the pool of every kind, by its name."""

    def __init__(self, budget: Budget) -> None:
        self.pools: dict[str, tuple[Spec, int]] = {}
        self.ready: dict[str, Callable[[Task | None], Any]] = {}
        """The kinds with something to make before their instances can be used: see `spec.ready_of`."""
        self._budget = budget
        self._names: dict[Any, str] = {}
        """The name of every class, function or string that was added."""

    def add(self, thing: object, **settings: object) -> Spec:
        """Add a kind. Raises ConfigError if the budget cannot hold its pool."""
        spec = spec_of(thing, **settings)
        if spec.name in self.pools:
            raise ConfigError(
                f"two kinds of environment are called {spec.name!r}: give one another name, spec_of(..., name='...')"
            )
        size = self._size(spec)
        kinds = [*(each for each, _ in self.pools.values()), spec]
        exceeded = self._budget.exceeded_by((each.cost, max(1, each.min_warm)) for each in kinds)
        if exceeded is not None:
            part, least, limit = exceeded
            names = ", ".join(each.name for each in kinds)
            raise ConfigError(
                f"the environments {names} need at least {least:g} of {part} (max(1, min_warm) of each), but the budget is "
                f"{limit:g}"
            )
        self.pools[spec.name] = (spec, size)
        if (ready := ready_of(spec)) is not None:
            self.ready[spec.name] = ready
        self._names.setdefault(thing if not isinstance(thing, Spec) else spec.make, spec.name)
        self._names.setdefault(spec.make, spec.name)
        return spec

    def name_of(self, kind: EnvKind) -> str | None:
        """The name of a kind; None if it was not added."""
        if isinstance(kind, str) and kind in self.pools:
            return kind
        try:
            return self._names.get(kind)
        except TypeError:  # it has no hash
            return None

    def _size(self, spec: Spec) -> int:
        fits = self._budget.holds(spec.cost)
        size = spec.max if spec.max is not None else max(1, spec.min_warm, min(DEFAULT_MAX, fits))
        if size > fits:
            cpu, memory = size * spec.cost.cpu, size * spec.cost.memory_mb
            cure = f"set max to {fits} or less, or raise the budget" if fits else "raise the budget: it does not hold even one"
            raise ConfigError(
                f"{size} instance{'s' * (size > 1)} of {spec.name!r} need {cpu:g} CPUs and {memory:g} MB, but the budget is "
                f"{_limit(self._budget.cpu)} CPUs and {_limit(self._budget.memory_mb)} MB: {cure}"
            )
        return size


def _limit(value: float | None) -> str:
    return "any number of" if value is None else f"{value:g}"
