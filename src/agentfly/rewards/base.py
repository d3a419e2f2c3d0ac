"""The interface `Reward`, its result `Score`, and weighted sums of rewards.

`a * 0.8 + b * 0.2` is a `Mix`. Each part keeps its name, so two parts with the same name are refused. Rewards made from
functions are in `function.py`.
"""

from __future__ import annotations

import asyncio
import difflib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ConfigError
from ..types import Trajectory

RESERVED = ("prediction", "trajectory", "trajectories", "task", "env")

T = TypeVar("T")
Lend = Callable[[type], Awaitable[Any]]
"""Returns the environment of a class that is leased to the chain, the same one that its tools used."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one chain. Only `reward` and `turn_rewards` (one per turn) are trained on; `components` are logged."""

    reward: float
    components: dict[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] | None = None


class Reward(ABC):
    """Scores a chain. Rewards can be added, subtracted and summed, and scaled and shifted by numbers."""

    name: str
    description: str
    constant: float = 0.0

    @property
    @abstractmethod
    def needs(self) -> frozenset[str]:
        """The data fields that every row must have."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Reward, ...]:
        """The parts of a mix; for another reward, the reward itself."""

    @property
    @abstractmethod
    def waits(self) -> bool:
        """Whether scoring awaits something. A mix scores such parts concurrently."""

    @property
    def envs(self) -> frozenset[type]:
        """The classes of environments that the reward asks for."""
        return frozenset()

    @property
    def grouped(self) -> bool:
        """Whether a part compares the chains of a group: `score` leaves it out, `score_group` gives its scores."""
        return False

    @abstractmethod
    def scaled(self, factor: float) -> Reward:
        """The same reward with its score multiplied by `factor`."""

    @abstractmethod
    async def score(self, trajectory: Trajectory, env: Any = None, lend: Lend | None = None) -> Score:
        """Score a finished chain. `env` is the environment of the chain, if it has one."""

    @abstractmethod
    async def part_score(self, trajectory: Trajectory, env: Any = None, lend: Lend | None = None) -> Score:
        """The score as a part of a mix: weighted, with components prefixed by the name of the part."""

    async def score_group(self, trajectories: Sequence[Trajectory], *, part: bool = False) -> list[Score]:
        """The scores of the grouped parts, one per chain. `part`: as a part of a mix."""
        return [Score(0.0) for _ in trajectories]

    def check(self, fields: Collection[str]) -> None:
        """Raises ConfigError if the reward asks for a field that the data does not have."""
        for part in self.parts:
            for name in sorted(part.needs - set(fields)):
                near = difflib.get_close_matches(name, [*fields, *RESERVED], n=1, cutoff=0.5)
                names = ", ".join([*RESERVED, *sorted(fields)])
                hint = f"did you mean {near[0]!r}?" if near else f"it can ask for {names}."
                raise ConfigError(f"reward {part.name!r} asks for {name!r}, which the data does not have; {hint}")

    def __mul__(self, factor: float) -> Reward:
        return self.scaled(factor) if _is_number(factor) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Reward:
        if not _is_number(divisor):
            return NotImplemented
        if divisor == 0:
            raise ConfigError(f"reward {self.name!r} is divided by 0")
        return self.scaled(1.0 / divisor)

    def __neg__(self) -> Reward:
        return self.scaled(-1.0)

    def __add__(self, other: Reward | float) -> Reward:
        if isinstance(other, Reward):
            return Mix(self.parts + other.parts, self.constant + other.constant)
        if not _is_number(other):
            return NotImplemented
        return self if other == 0 else Mix(self.parts, self.constant + other)

    __radd__ = __add__

    def __sub__(self, other: Reward | float) -> Reward:
        return self + (-other) if isinstance(other, Reward) or _is_number(other) else NotImplemented

    def __rsub__(self, other: float) -> Reward:
        return -self + other


class Mix(Reward):
    """A weighted sum. Its components are the unweighted score of each part, and the parts' components as "part/component"."""

    def __init__(self, parts: Sequence[Reward], constant: float = 0.0) -> None:
        twice = [name for name, count in Counter(part.name for part in parts).items() if count > 1]
        if twice:
            raise ConfigError(f"two parts of a mixed reward are called {twice[0]!r}; rename one with .named('another_name')")
        if not math.isfinite(constant):
            raise ConfigError(f"a reward cannot be shifted by {constant}")
        self._parts = tuple(parts)
        self.constant = float(constant)
        self.name = " + ".join(part.name for part in parts)
        self.description = f"Weighted sum of {', '.join(part.name for part in parts)}."

    @property
    def parts(self) -> tuple[Reward, ...]:
        return self._parts

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(part.needs for part in self._parts))

    @property
    def waits(self) -> bool:
        return any(part.waits for part in self._parts)

    @property
    def envs(self) -> frozenset[type]:
        return frozenset().union(*(part.envs for part in self._parts))

    @property
    def grouped(self) -> bool:
        return any(part.grouped for part in self._parts)

    def scaled(self, factor: float) -> Mix:
        return Mix([part.scaled(factor) for part in self._parts], self.constant * factor)

    async def score(self, trajectory: Trajectory, env: Any = None, lend: Lend | None = None) -> Score:
        if sum(part.waits for part in self._parts) > 1:
            scores = await _together([part.part_score(trajectory, env, lend) for part in self._parts])
        else:
            scores = [await part.part_score(trajectory, env, lend) for part in self._parts]
        return _sum(scores, self.constant)

    async def part_score(self, trajectory: Trajectory, env: Any = None, lend: Lend | None = None) -> Score:
        return await self.score(trajectory, env, lend)

    async def score_group(self, trajectories: Sequence[Trajectory], *, part: bool = False) -> list[Score]:
        scores = await _together([each.score_group(trajectories, part=True) for each in self._parts if each.grouped])
        return [_sum(of_chain) for of_chain in zip(*scores, strict=True)]

    def __repr__(self) -> str:
        shift = f" + {self.constant:g}" if self.constant else ""
        return f"Mix({' + '.join(map(repr, self._parts))}{shift})"


def _sum(scores: Sequence[Score], constant: float = 0.0) -> Score:
    components: dict[str, float] = {}
    for score in scores:
        components |= score.components
    per_turn = [score.turn_rewards for score in scores if score.turn_rewards is not None]
    turns = tuple(map(sum, zip(*per_turn, strict=True))) if per_turn else None
    return Score(constant + sum(score.reward for score in scores), components, turns)


async def _together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all concurrently. If one fails, the others are cancelled and awaited before its error is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
