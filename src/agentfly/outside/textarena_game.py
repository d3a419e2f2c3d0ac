"""`env = "textarena:ID"`: a game of TextArena, against opponents that are functions or agents.

Games seed the global `random`, so each instance has a process of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar, cast

from .. import plugins
from ..errors import ConfigError, WorldError
from .episodes import TextEpisodes, game_kind, rows_of_game


class TextArenaGame(TextEpisodes):
    """The model is player 0. The score is the game's reward for it: from -1 to 1 in most games.

    `opponent` plays all other players: "module:NAME" or "file.py:NAME" of a function from the observation to the action, or of
    an agent, whose answer is the action. A game of one player needs none.
    """

    placement: ClassVar[str] = "process"
    _env = cast(Any, None)

    def __init__(self, opponent: str | None = None, num_players: int | None = None) -> None:
        super().__init__()
        self._opponent = None if opponent is None else _player(opponent)
        self._num_players = num_players or (1 if opponent is None else 2)
        if self._num_players > 1 and self._opponent is None:
            raise ConfigError(f"textarena:{self.game} with {self._num_players} players needs the option opponent")

    def begin(self, seed: int) -> str:
        self._env = _made(self.game)
        try:
            self._env.reset(num_players=self._num_players, seed=seed)
        except (AssertionError, ValueError) as error:
            raise ConfigError(f"textarena:{self.game} does not begin with {self._num_players} players: {error}") from error
        return self._play_others()[0]

    def act(self, action: str) -> tuple[str, float, bool]:
        done, _ = self._env.step(action=action)
        observation = ""
        if not done:
            observation, done = self._play_others()
        if not done:
            return observation, 0.0, False
        rewards, about = self._env.close()
        reason = str((about or {}).get(0, {}).get("reason", "")) if isinstance(about, dict) else ""
        return f"{observation}\n{reason or 'The game is over.'}".strip(), float((rewards or {}).get(0, 0.0)), True

    def _play_others(self) -> tuple[str, bool]:
        """Let the opponents play until it is the model's turn. Returns its observation, and whether the game has ended."""
        while True:
            player, observation = self._env.get_observation()
            if player == 0:
                return str(observation), False
            assert self._opponent is not None
            done, _ = self._env.step(action=self._opponent(str(observation)))
            if done:
                return "", True


def _made(game: str) -> Any:
    try:
        textarena = importlib.import_module("textarena")
    except ModuleNotFoundError as error:
        raise ConfigError(f"textarena:{game} needs the package textarena: pip install textarena") from error
    try:
        return textarena.make(env_id=game)
    except ValueError as error:
        raise ConfigError(f"textarena:{game} cannot be made: {error}") from error


def _player(name: str) -> Callable[[str], str]:
    """What answers an observation: a function, or an agent's `run_sync`."""
    thing = plugins.resolve("agents", name)
    if (run := getattr(thing, "run_sync", None)) is None:
        if not callable(thing):
            raise ConfigError(f"the opponent {name!r} is neither a function nor an agent")
        return lambda observation: str(thing(observation))

    def answer(observation: str) -> str:
        (trajectory,) = run([{"question": observation}]).trajectories
        if trajectory.error is not None and not trajectory.outcome.trainable:
            raise WorldError(f"the opponent {name!r} failed: {trajectory.error}")
        return trajectory.prediction or ""

    return answer


def env_of(game: str) -> type[TextEpisodes]:
    return game_kind(TextArenaGame, game, "textarena")


def tasks_of(game: str) -> Any:
    return rows_of_game(f"textarena:{game}")
