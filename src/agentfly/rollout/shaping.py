"""What a training adds for a model that calls no tool: worked examples in some prompts, and a bonus for a call.

Both fall to 0 with the number of the step that a task was drawn for, so a resumed run and `agentfly replay` find them again.
"""

from __future__ import annotations

import random
from typing import Protocol

from ..errors import ConfigError
from ..rewards import Score
from ..types import Message, Task, Trajectory

CALL_BONUS = "call_bonus"
"""The component of the reward that shows the bonus."""


class Prompted(Protocol):
    """The part of an agent that writes prompts."""

    examples_steps: int | None

    @property
    def examples(self) -> tuple[Message, ...]: ...
    def start(self, task: Task) -> list[Message]: ...


def opening_messages(agent: Prompted, task: Task, shown: bool = False) -> list[Message]:
    """Returns what `agent.start` writes, with the agent's examples after the system messages at its beginning.

    With `examples_steps` the agent's prompts have no examples, except those of a training that are `shown`.
    """
    messages = agent.start(task)
    if not shown and agent.examples_steps is not None:
        return messages
    at = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    return [*messages[:at], *agent.examples, *messages[at:]]


def left_at(step: int, num_steps: int) -> float:
    """Returns what is left of 1 in a step: 1 in the first, then less by a line, and 0 after `num_steps`."""
    return max(0.0, 1.0 - (step - 1) / num_steps) if num_steps else 0.0


def shows_examples(num_steps: int, seed: int, step: int, position: int) -> bool:
    """Whether the prompt of the task that was drawn there shows the examples. All its chains have one prompt."""
    return random.Random(f"examples {seed}/{step}/{position}").random() < left_at(step, num_steps)


def call_bonus(trajectory: Trajectory, bonus: float) -> Score:
    """Pays `bonus` once per chain, to the turn of the first call that a tool answered without an error.

    It is the reward of a turn, so that the reward of the chain, which decides about success, stays as it is.
    """
    if not bonus:
        return Score(0.0)
    if CALL_BONUS in trajectory.components:
        raise ConfigError(
            f"the reward has a component {CALL_BONUS!r}, which is that of rollout.call_bonus: give it another name"
        )
    called = (any(result.error is None for result in turn.results) for turn in trajectory.turns)
    first = next((number for number, works in enumerate(called) if works), None)
    turns = tuple(bonus if number == first else 0.0 for number in range(len(trajectory.turns)))
    return Score(0.0, {CALL_BONUS: sum(turns)}, turns)
