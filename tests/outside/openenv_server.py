"""A server of OpenEnv for tests: `python openenv_server.py PORT`. Needs the package openenv."""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    """Guess the number."""

    number: int
    comment: str = ""


class GuessObservation(Observation):
    text: str = ""


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> GuessObservation:
        self.secret = random.Random(seed).randrange(1, 9)
        self.steps = 0
        return GuessObservation(text=f"Guess a number from 1 to 8. {kwargs.get('hint', '')}".strip(), done=False)

    def step(self, action: GuessAction, **kwargs: Any) -> GuessObservation:
        if action.comment == "boom":
            raise ValueError("broken")
        right = action.number == self.secret
        self.steps += 1
        text = "right" if right else "higher" if action.number < self.secret else "lower"
        return GuessObservation(text=text, reward=1.0 if right else -0.1, done=right)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_fastapi_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
