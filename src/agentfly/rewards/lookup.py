"""`as_reward`: the reward of a `Reward`, a function, a name, a list, or a table of weights.

A name is "exact_match", "module:attribute" or "file.py:attribute". Unknown options raise ConfigError.

    as_reward({"math_equal": 0.8, "length": {"weight": 0.2, "max_tokens": 256}})
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec

from .. import plugins
from ..errors import ConfigError
from .base import Reward
from .function import FunctionReward

P = ParamSpec("P")


class Factory(Generic[P]):
    """A function that makes a reward from options. A name that stands for one is called with the options of the config."""

    def __init__(self, make: Callable[P, Reward], name: str) -> None:
        self.make = make
        self.name = name
        self.description = next(iter((inspect.getdoc(make) or "").strip().splitlines()), "")
        functools.update_wrapper(self, make, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Reward:
        return self.make(*args, **kwargs)

    def with_options(self, options: Mapping[str, Any]) -> Reward:
        """Calls the function with options from a config. Raises ConfigError for options that it does not have."""
        signature = inspect.signature(self.make)
        try:
            signature.bind(**options)
        except TypeError as error:
            options_text = ", ".join(signature.parameters)
            raise ConfigError(f"reward {self.name!r}: {error}; its options are {options_text}") from error
        return self.make(**options)  # type: ignore[call-arg]


def factory(name: str) -> Callable[[Callable[P, Reward]], Factory[P]]:
    """Decorates a function that makes rewards; `name` is its name in the table of rewards."""
    return lambda make: Factory(make, name)


def as_reward(thing: object) -> Reward:
    """The reward that a value stands for. Raises ConfigError."""
    if isinstance(thing, Reward):
        return thing
    if isinstance(thing, Factory):
        return thing.with_options({})
    if isinstance(thing, str):
        return as_reward(plugins.resolve("rewards", thing))
    if isinstance(thing, Mapping):
        return _total([_part(name, value) for name, value in thing.items()])
    if isinstance(thing, Sequence):
        return _total([as_reward(part) for part in thing])
    if inspect.isclass(thing) or not callable(thing):
        shown = thing.__name__ if inspect.isclass(thing) else f"{type(thing).__name__} {thing!r}"
        raise ConfigError(f"not a reward: {shown}; give a function, a name, a list of them or a table of weights")
    return FunctionReward(thing)


def _part(name: object, value: object) -> Reward:
    """One row of a table of weights: a number, or a table with `weight` and the options of a reward that has some."""
    options = dict(value) if isinstance(value, Mapping) else {"weight": value}
    weight, alias = options.pop("weight", 1.0), options.pop("name", None)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"reward {name!r}: its weight must be a number, not {weight!r}")
    thing = plugins.resolve("rewards", name) if isinstance(name, str) else name
    if isinstance(thing, Factory):
        made = thing.with_options(options)
    elif options:
        raise ConfigError(f"reward {name!r} has no option {next(iter(options))!r}; only weight and name can be set")
    else:
        made = as_reward(thing)
    if alias is not None:
        if not isinstance(made, FunctionReward) or not isinstance(alias, str):
            raise ConfigError(f"reward {name!r} cannot be renamed to {alias!r}")
        made = made.named(alias)
    return made * weight


def _total(parts: Sequence[Reward]) -> Reward:
    if not parts:
        raise ConfigError("an empty list of rewards scores nothing; name at least one")
    return functools.reduce(operator.add, parts)
