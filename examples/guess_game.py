"""An environment with state, a tool that acts on it, and a reward that reads it. Run: python examples/guess_game.py

Each chain has its own game. The player is a script that bisects the range; replace it with the name of a model to let one play.
"""

from __future__ import annotations

import json

from agentfly import ReactAgent, RunResult, Task, ToolResult, reward, tool
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Request


class Game:
    """The environment: made once per chain, reset with the chain's task, closed at its end."""

    def reset(self, task: Task) -> None:
        self.secret, self.guesses, self.solved = task.fields["secret"], 0, False

    def close(self) -> None: ...


@tool
def guess(n: int, env: Game) -> ToolResult:
    """Guess the number; the result says whether to go higher or lower."""
    env.guesses, env.solved = env.guesses + 1, n == env.secret
    hint = "correct" if env.solved else "higher" if n < env.secret else "lower"
    return ToolResult(observation=hint, done=env.solved)


@reward
def quick(env: Game) -> dict[str, float]:
    """1 for a solved game, minus 0.05 for every guess."""
    return {"reward": max(0.0, 1.0 - 0.05 * env.guesses) if env.solved else 0.0, "guesses": env.guesses}


def halve(request: Request) -> str:
    """The player: reads the conversation so far and guesses the middle of the remaining range."""
    low, high, last = 1, 100, 0
    for message in request.messages:
        if message.role == "assistant":
            last = message.tool_calls[0].arguments["n"]
        elif message.content.startswith("Observation: "):
            low, high = (last + 1, high) if "higher" in message.content else (low, last - 1)
    return f"Thought: the middle\nAction: guess\nInput: {json.dumps({'n': (low + high) // 2})}"


def main(num_games: int = 4) -> RunResult:
    agent = ReactAgent(ScriptedEngine(halve), renderer=ByteRenderer(), env=Game, tools=[guess], reward=quick, max_turns=8)
    tasks = [{"question": "Guess a number from 1 to 100.", "secret": 1 + 37 * game % 100} for game in range(num_games)]
    result = agent.run_sync(tasks)
    for trajectory in result:
        print(trajectory.task.fields["secret"], trajectory.outcome.value, trajectory.reward, trajectory.components)
    return result


if __name__ == "__main__":
    main()
