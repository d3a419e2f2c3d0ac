"""`env = "gym:ID"`: an environment of Gymnasium whose observations and actions are text."""

from __future__ import annotations

import importlib
from typing import Any, cast

from ..errors import ConfigError, WorldError
from .episodes import TextEpisodes, game_kind, rows_of_game


class GymText(TextEpisodes):
    """`gymnasium.make(ID, **options)`. The score is the sum of rewards; `terminated` and `truncated` both end the episode.

    `ID` may begin with the module that registers it: "my_games:Maze-v0". The check of a text against `Text.contains` is left
    out, because the standard character set has no space; an action that the environment refuses is the model's mistake there.
    """

    _env = cast(Any, None)

    def begin(self, seed: int) -> str:
        if self._env is None:
            self._env = _made(self.game, self.options)
        observation, _ = self._env.reset(seed=seed)
        return _text(self.game, observation)

    def act(self, action: str) -> tuple[str, float, bool]:
        observation, paid, terminated, truncated, _ = self._env.step(action)
        return _text(self.game, observation), self.score + float(paid), bool(terminated or truncated)

    def end(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _made(game: str, options: dict[str, object]) -> Any:
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ModuleNotFoundError as error:
        raise ConfigError(f"gym:{game} needs the package gymnasium: pip install gymnasium") from error
    try:
        env = gymnasium.make(game, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(f"gym:{game} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(env.action_space, gymnasium.spaces.Text):
        raise ConfigError(f"gym:{game} takes actions of {env.action_space}: wrap it so that its actions are text")
    return env


def _text(game: str, observation: object) -> str:
    if isinstance(observation, str):
        return observation
    raise WorldError(f"gym:{game} returned an observation of type {type(observation).__name__}, not a text")


def env_of(game: str) -> type[TextEpisodes]:
    return game_kind(GymText, game, "gym")


def tasks_of(game: str) -> Any:
    return rows_of_game(f"gym:{game}")
