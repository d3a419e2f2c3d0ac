"""A finished chain, made to order, for the tests of rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentfly.types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn

MakeChain = Callable[..., Trajectory]


def make_chain(
    prediction: str = "84",
    *,
    replies: Sequence[str] = ("a reply",),
    results: Sequence[ToolResult] = (),
    outcome: Outcome = Outcome.FINISHED,
    tokens: int = 3,
    **fields: Any,
) -> Trajectory:
    """`results` are those of the first turn; every reply has `tokens` sampled ids."""
    question = Message("user", "What is 12 times 7?")
    turns = [
        Turn([1], i == 0, Completion(text=text, token_ids=[7] * tokens, logprobs=[-0.5] * tokens, versions=[0] * tokens))
        for i, text in enumerate(replies)
    ]
    if results:
        turns[0].calls = tuple(ToolCall("multiply") for _ in results)
        turns[0].results = tuple(results)
    messages = [question, *(Message("assistant", text) for text in replies)]
    task = Task("t7", (question,), fields)
    return Trajectory("c1", task, 0, messages, turns, outcome, None, prediction)


@pytest.fixture(scope="session")
def chain() -> MakeChain:
    return make_chain
