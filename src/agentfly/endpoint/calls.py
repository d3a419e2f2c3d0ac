"""One request of a client and the answer to it, whatever the client's dialect: the values between the server and what answers.

HTTP body -> (chat | responses | messages) -> Call -> (Answerer.answer) -> Answer -> (the same dialect) -> HTTP body or events
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..types import Message

Dialect = Literal["chat", "responses", "messages"]
"""OpenAI Chat Completions, OpenAI Responses, Anthropic Messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The sampling that a client asked for; None or empty where it left the choice to the server."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of a client.

    messages   system messages at the beginning are joined to one, `developer` is `system`; a later one stays in its place.
               The content of an assistant message is its text without thinking; its calls keep the client's ids and the
               order of their arguments. Results of tools have the role "tool" and the `tool_call_id` of their call. Marks of
               a client that change from call to call (cache control, ids of items, billing headers) are left out
    thinking   the thinking that the client sent back, by the index of its assistant message in `messages`
    tools      function schemas in OpenAI's form: {"type": "function", "function": {...}}
    digest     of the request's body: a repeat of a request has the same
    is_retry   the client says that it repeats a request; most clients that repeat one do not say so
    agent      what the client calls the agent within it that asks, such as a sub-agent; "" if it does not say
    on_text    for a stream: takes the text of the answer piece by piece, from its beginning; it need not be called
    """

    dialect: Dialect
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    asked: Asked = field(default_factory=Asked)
    model: str = ""
    digest: str = ""
    is_retry: bool = False
    agent: str = ""
    thinking: Mapping[int, str] = field(default_factory=dict)
    on_text: Callable[[str], None] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The reply to a Call. The content of `message` is its text without thinking; its calls have unique ids.

    Token counts are those of the engine: clients decide by them when to compact a history.
    """

    message: Message
    finish: Literal["stop", "length", "tool_calls"] = "stop"
    thinking: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Refused(Exception):
    """The client asked for something that it does not get. It reads the sentence in its own error shape, with the status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class Closed(Refused):
    """The key's chain takes no more calls: it has ended, or a limit of it is reached.

    The server chooses the status by dialect, so that clients end at once and do not repeat the call.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(401, sentence)


class Answerer(Protocol):
    """What a key stands for: a chain that is being played, or a served model."""

    async def answer(self, call: Call) -> Answer:
        """Raises Refused for a mistake of the client, RolloutError if the model failed. Cancelled if the client disconnects."""

    async def count(self, call: Call) -> int:
        """The tokens of the call's prompt."""
