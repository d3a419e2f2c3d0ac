"""What a chain does with a history that grows: leave out old steps, or fold it into a summary that the model writes.

`agent.rewrite` returns the messages of the next request. Where they are not those that the model has read, a new training row
begins. Each sampled token is trained once, after what the model read before it; so the policy learns to write its summaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from ..errors import ConfigError
from ..rows import Aside, row_numbers
from ..types import Message, Turn

ASK = (
    "Your context is nearly full and will be cleared. Write a summary for yourself: what you know, what you have done with "
    "which result, and what is left to do. Write only the summary."
)
BEGINS = "\n\nSummary of your work so far:\n"


@runtime_checkable
class HistoryRule(Protocol):
    """A way to rewrite the history of a chain."""

    def rewrite(self, messages: Sequence[Message], turns: Sequence[Turn]) -> list[Message] | None:
        """See `BaseAgent.rewrite`."""


@dataclass(frozen=True)
class LastSteps:
    """Each request holds the opening messages and the last `steps` replies with what followed them."""

    steps: int

    def __post_init__(self) -> None:
        _check_number("steps", self.steps)

    def rewrite(self, messages: Sequence[Message], turns: Sequence[Turn]) -> list[Message] | None:
        if len(turns) <= self.steps:
            return None
        dropped, kept = _replies(messages)[-self.steps - 1 :][:2]
        return [*messages[:dropped], *messages[kept:]]


@dataclass(frozen=True)
class Fold:
    """Once a row holds more than `at` tokens, the model writes a summary of it, which takes the place of its steps.

    The context must have room for `at` tokens, one more observation, `ask` and the summary. The turn of a summary is a turn as
    any other: it counts for `max_turns`, and it is trained.
    """

    at: int
    ask: str = ASK

    def __post_init__(self) -> None:
        _check_number("at", self.at)

    def rewrite(self, messages: Sequence[Message], turns: Sequence[Turn]) -> list[Message] | None:
        last = messages[-1]
        if last.role == "assistant":  # the summary
            begins = max((number for number, turn in enumerate(turns) if turn.why == "rewritten"), default=0)
            *opening, question = messages[: _replies(messages)[begins - len(turns)]]
            task = question.content
            if begins:
                task = task.removesuffix(BEGINS + turns[begins - 1].text.strip())
            return [*opening, replace(question, content=task + BEGINS + last.content.strip())]
        if _size(turns) <= self.at:
            return None
        if last.role == "user":  # some templates refuse two messages of one role
            return Aside([*messages[:-1], replace(last, content=f"{last.content}\n\n{self.ask}")])
        return Aside([*messages, Message("user", self.ask)])


KINDS: dict[str, Callable[..., HistoryRule]] = {"last": LastSteps, "fold": Fold}


def as_history(value: object) -> HistoryRule | None:
    """Returns a way to rewrite history from None, from one, or from a table of its kind and options. Raises ConfigError."""
    if value is None or isinstance(value, HistoryRule):
        return value
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(
            f'history is a table such as {{kind = "last", steps = 4}} or {{kind = "fold", at = 2000}}, not {value!r}'
        )
    try:
        return KINDS[kind](**{name: option for name, option in value.items() if name != "kind"})
    except TypeError as error:
        raise ConfigError(f"history of kind {kind!r}: {error}") from error


def _check_number(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"history: {name} is a whole number of at least 1, not {value!r}")


def _replies(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def _size(turns: Sequence[Turn]) -> int:
    """The tokens of the last row, or those that a server reports of the last request."""
    numbers = row_numbers(turns)
    own = [turn for turn, number in zip(turns, numbers, strict=True) if number == numbers[-1]]
    reported = turns[-1].completion.prompt_tokens + turns[-1].completion.reply_tokens
    return max(reported, sum(len(turn.context_ids) + len(turn.completion.token_ids) for turn in own))
