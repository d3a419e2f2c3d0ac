"""Converts the return value of a reward function to a `Score`.

A value that is not a finite number raises RewardError: a NaN in an advantage would silently spoil the gradients of the group.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RewardError
from .base import Score


def read(value: object, who: str, num_turns: int) -> Score:
    """`who` begins the sentence of an error: "reward 'exact' on task 't7'"."""
    if isinstance(value, Score):
        given: Mapping[str, Any] = {**value.components, "reward": value.reward, "turn_rewards": value.turn_rewards}
    elif isinstance(value, Mapping):
        given = value
    else:
        return Score(number(value, f"{who} returned"))
    if "reward" not in given:
        keys = ", ".join(map(repr, list(given)[:6])) or "no keys"
        raise RewardError(f"{who} returned a dict without the key 'reward' (it has {keys}).")
    components = {}
    for name, part in given.items():
        if not isinstance(name, str) or not name:
            raise RewardError(f"{who} returned a component named {name!r}; a component's name is a non-empty string.")
        if name not in ("reward", "turn_rewards"):
            components[name] = number(part, f"{who} returned component {name!r} =")
    turns = given.get("turn_rewards")
    return Score(
        number(given["reward"], f"{who} returned 'reward' ="),
        components,
        None if turns is None else _turns(turns, who, num_turns),
    )


def read_group(value: object, who: str, num_turns: Sequence[int]) -> list[Score]:
    """The scores of the chains of a group, which have so many turns, in their order."""
    rows = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(rows, str) or not isinstance(rows, Sequence):
        raise RewardError(f"{who} returned {_short(rows)} ({type(rows).__name__}); it is a list with one reward per chain.")
    if len(rows) != len(num_turns):
        raise RewardError(
            f"{who} returned {len(rows)} rewards for {len(num_turns)} chains; give one per chain, in their order."
        )
    return [read(row, f"{who}, place {i},", turns) for i, (row, turns) in enumerate(zip(rows, num_turns, strict=True))]


def number(value: object, returned: str) -> float:
    """A finite float. Booleans, ints and zero-dimensional arrays count as numbers; strings and None do not."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        shown = "None" if value is None else f"{_short(value)} ({type(value).__name__})"
        raise RewardError(f"{returned} {shown}; a reward is a finite number.")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise RewardError(f"{returned} {result}; a reward is a finite number.")
    return result


def _turns(turns: object, who: str, num_turns: int) -> tuple[float, ...]:
    if isinstance(turns, str) or not isinstance(turns, Sequence):
        raise RewardError(f"{who} returned turn_rewards of type {type(turns).__name__}; it is a list with one number per turn.")
    if len(turns) != num_turns:
        raise RewardError(f"{who} returned {len(turns)} turn_rewards, but the chain has {num_turns} turns; give one per turn.")
    return tuple(number(value, f"{who} returned turn_rewards[{i}] =") for i, value in enumerate(turns))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
