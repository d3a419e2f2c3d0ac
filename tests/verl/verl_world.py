"""What the tests of `backend = "verl"` share: an agent with a tool, a reward, and a client that stands for verl's servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from agentfly import Action, BaseAgent, Completion, ToolCall, ToolResult, reward, tool
from agentfly.types import Extension, Message

Script = Callable[[str, int], "str | Exception | SimpleNamespace"]


@tool(name="look", register=False)
async def look() -> str:
    """Look around."""
    return "nothing here"


@tool(name="dig", register=False)
async def dig() -> ToolResult:
    """Dig, for a reward of a half."""
    return ToolResult(observation="a coin", reward=0.5)


@reward(name="number")
def number(prediction: str) -> float:
    """The number that the model answers."""
    return float(prediction or 0)  # "" if a time limit cut off the reply


@reward(name="constant")
def constant(trajectory: Any) -> float:
    """1 for every chain."""
    return 1.0


class WordAgent(BaseAgent):
    """A reply is `look`, `dig` or the answer."""

    def parse(self, completion: Completion) -> Action:
        text = completion.text.strip()
        return Action(calls=(ToolCall(text),)) if text in ("look", "dig") else Action(answer=text)


class FakeClient:
    """Stands for verl's LLMServerClient: `script(session, turn)` is the reply. Keeps every call in `calls`."""

    def __init__(self, encode: Callable[[str], Sequence[int]], script: Script, extra: dict[str, Any] | None = None) -> None:
        self._encode, self._script = encode, script
        self._extra = {"global_steps": 4} if extra is None else extra
        self.calls: list[SimpleNamespace] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        turn = sum(call.session == request_id for call in self.calls)
        self.calls.append(SimpleNamespace(session=request_id, prompt_ids=list(prompt_ids), params=dict(sampling_params)))
        reply = self._script(request_id, turn)
        if isinstance(reply, Exception):
            raise reply
        if not isinstance(reply, str):
            return reply
        ids = list(self._encode(reply))[: sampling_params["max_tokens"]]
        return output(ids, self._extra)


def output(ids: list[int], extra: dict[str, Any], **changes: Any) -> SimpleNamespace:
    """verl's TokenOutput."""
    values: dict[str, Any] = {
        "token_ids": ids,
        "log_probs": [-0.1 - 0.01 * place for place in range(len(ids))],
        "stop_reason": "completed",
        "extra_fields": dict(extra),
    }
    return SimpleNamespace(**{**values, **changes})


def rewriting(renderer: Any) -> Any:
    """A renderer that writes the whole conversation anew at every turn, as templates do that strip thinking."""

    class Rewriting(type(renderer)):  # type: ignore[misc]
        def extend(
            self, messages: Sequence[Message], num_new: int, completion: Completion, tools: Sequence[Any] = ()
        ) -> Extension:
            return Extension(self.start(messages, tools), restarts=True)

    changed = Rewriting.__new__(Rewriting)
    changed.__dict__.update(vars(renderer))
    return changed
