"""Episodes of text: environments in which the model writes an action and reads an observation, until the episode ends.

    env = "gym:ID" | "textarena:ID"      tools = ["act"]      reward = "episode_score"      data.train = the same name

A row is a seed, and its question is the first observation of that seed's episode, so equal seeds must give equal episodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypedDict

from ..aio.threads import run_to_end
from ..errors import ConfigError, WorldError
from ..resources import Budget, ResourceManager, spec_of
from ..rewards.function import FunctionReward
from ..tools import tool
from ..types import Task, ToolResult

SEEDS: dict[str, int] = {"train": 0, "validation": 1_000_000, "test": 2_000_000}
"""The seed of the first row of each split; the seed of a run comes on top."""
MAX_ROWS = 10_000


class EpisodeStep(TypedDict):
    """What follows an action. `score` counts from the beginning of the episode."""

    observation: str
    score: float
    done: bool


class TextEpisodes:
    """An environment of one game. A subclass writes `begin`, `act` and `end`; `game` is its name in its package."""

    game: ClassVar[str] = ""
    placement: ClassVar[str] = "thread"

    def __init__(self, **options: object) -> None:
        self.options = options
        self.score, self.done = 0.0, False

    def reset(self, task: Task) -> str:
        seed = task.fields.get("seed")
        if type(seed) is not int:
            raise ConfigError(f"task {task.id}: the field 'seed' must be a whole number, not {seed!r}")
        self.score, self.done = 0.0, False
        return self.begin(seed)

    def step(self, action: str) -> EpisodeStep:
        """Play an action. After the end of the episode nothing more is played."""
        if self.done:
            return EpisodeStep(observation="The episode is over.", score=self.score, done=True)
        observation, self.score, self.done = self.act(action)
        return EpisodeStep(observation=observation, score=self.score, done=self.done)

    def result(self) -> float:
        """The score of the episode so far."""
        return self.score

    def close(self) -> None:
        self.end()

    def begin(self, seed: int) -> str:
        """Begin the episode of a seed. Returns its first observation."""
        raise NotImplementedError

    def act(self, action: str) -> tuple[str, float, bool]:
        """Returns the next observation, the score so far, and whether the episode has ended."""
        raise NotImplementedError

    def end(self) -> None:
        """Free what the game holds. May be called more than once."""


def game_kind(cls: type[TextEpisodes], game: str, origin: str) -> type[TextEpisodes]:
    """The class of environment of one game, which a worker process finds by the same name."""
    if not game:
        raise ConfigError(f"{origin}: names no environment: write {origin}:ID")
    elsewhere = ("agentfly.outside.episodes:rebuilt", {"name": f"{origin}:{game}"})
    members = {"game": game, "__agentfly_target__": elsewhere, "__module__": cls.__module__}
    return type(game.rpartition(":")[2].replace("/", "-"), (cls,), members)


def rebuilt(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """An instance in a worker process."""
    return spec_of(name).make(**(options or {}))


def rows_of_game(name: str) -> Any:
    """The task set of a game: rows with a seed, and the first observation of its episode as the question."""

    def rows(split: Literal["train", "validation", "test"] = "train", count: int | None = None, seed: int = 0) -> list[Any]:
        if split not in SEEDS:
            raise ConfigError(f"{name} has no split {split!r}; it has {', '.join(SEEDS)}")
        if count is None or not 1 <= count <= MAX_ROWS:
            raise ConfigError(f"{name} has a row for every seed: say how many, from 1 to {MAX_ROWS}, as data.train_count")
        first = SEEDS[split] + seed * MAX_ROWS
        return run_to_end(_first_observations(name, range(first, first + count)))

    return rows


async def _first_observations(name: str, seeds: range) -> list[dict[str, Any]]:
    made = []
    spec = spec_of(name, max=1)
    async with ResourceManager(Budget(), spec) as manager:
        for seed in seeds:
            task = Task(f"{spec.name}-{seed}", (), {"seed": seed})
            async with manager.lease([spec.name], task) as lease:
                made.append({"id": task.id, "seed": seed, "question": str(lease.observation(spec.name)) or "Begin."})
    return made


@tool(register=False)
def act(action: str, env) -> ToolResult:  # type: ignore[no-untyped-def]
    """Take an action in the environment. Returns what happens next.

    Args:
        action: what to do
    """
    step = env.step(action)
    return ToolResult(observation=step["observation"] or "Nothing happens.", done=step["done"])


async def _episode_score(env) -> float:  # type: ignore[no-untyped-def]
    """What the environment says that the episode is worth, at its end or where the chain stopped."""
    score = env.result()
    if inspect.isawaitable(score):  # it lives in a thread or another process
        score = await score
    if not isinstance(score, int | float) or score != score:
        raise WorldError(f"the environment's score is {score!r}, which is no number")
    return float(score)


episode_score = FunctionReward(_episode_score, name="episode_score")
