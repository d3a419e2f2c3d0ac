"""A text environment of Gymnasium for tests, registered as tests.outside.games:Guess-v0, and opponents."""

import random
from typing import Any

import gymnasium
from gymnasium.spaces import Text

TEXT = Text(200)


class Guess(gymnasium.Env[str, str]):
    """Guess a number from 1 to `n` by text."""

    observation_space, action_space = TEXT, TEXT

    def __init__(self, n: int = 8) -> None:
        self.n = n

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(1, self.n + 1))
        return f"A number from 1 to {self.n}, game {int(self.np_random.integers(1000))}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = int(action) if action.isdigit() else 0
        right = guess == self.secret
        return "right" if right else "higher" if guess < self.secret else "lower", float(right), right, False, {}


class Numbers(Guess):
    action_space = gymnasium.spaces.Discrete(3)  # type: ignore[assignment]


gymnasium.register("Guess-v0", entry_point=Guess, max_episode_steps=3)
gymnasium.register("Numbers-v0", entry_point=Numbers)


def random_marker(observation: str) -> str:
    return f"[{random.randrange(9)}]"
