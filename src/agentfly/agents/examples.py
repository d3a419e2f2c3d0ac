"""Worked examples of a prompt: messages that are given, those of a file, or calls written from the schemas of the tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..data import parse_message
from ..errors import ConfigError, DataError
from ..tools import Tool
from ..types import Action, Completion, Message, ToolCall, ToolResult

TOOLS = "tools"
"""The value of `examples` that asks for one example of each tool."""
MAX_EXAMPLES = 4
"""Tools that are shown, the first ones of the agent."""
PLACEHOLDERS: Mapping[str, Any] = {"integer": 2, "number": 2, "boolean": True, "array": [], "object": {}, "null": None}


class ExampleWriter(Protocol):
    """The part of an agent that writes examples."""

    tools: dict[str, Tool]

    def write(self, action: Action) -> Message: ...
    def parse(self, completion: Completion) -> Action: ...
    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]: ...


def as_examples(source: str | Path | Iterable[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    """Returns the examples of a prompt as messages. Raises ConfigError unless they are whole dialogues."""
    if isinstance(source, str | Path):
        source = _read(source)
    try:
        made = tuple(
            each if isinstance(each, Message) else parse_message(each, number, "examples") for number, each in enumerate(source)
        )
    except DataError as error:
        raise ConfigError(str(error)) from error
    if made and (made[0].role != "user" or made[-1].role != "assistant"):
        raise ConfigError("examples begin with a user message and end with the assistant's reply")
    if any(message.role == "system" for message in made):
        raise ConfigError("examples hold no system message: `system` is the place for it")
    return made


def _read(path: str | Path) -> list[Any]:
    try:
        messages = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"examples: {path} is no JSON file with a list of messages: {error}") from error
    if not isinstance(messages, list):
        raise ConfigError(f"examples: {path} holds {type(messages).__name__}, and not a list of messages")
    return messages


def examples_of_tools(agent: ExampleWriter) -> tuple[Message, ...]:
    """Returns a dialogue for each of the first tools: a call in the agent's format, its result, and the answer."""
    if not agent.tools:
        raise ConfigError(f"examples = {TOOLS!r} shows a call of each tool, and the agent has none: remove it")
    messages: list[Message] = []
    for name, tool in list(agent.tools.items())[:MAX_EXAMPLES]:
        parameters = tool.schema["function"]["parameters"]
        properties = parameters.get("properties", {})
        arguments = {key: _placeholder(key, properties[key]) for key in parameters.get("required", properties)}
        call, result = ToolCall(name, arguments, f"{len(messages):09d}"), f"result of {name}"
        reply = agent.write(Action(calls=(call,)))
        if not reply.tool_calls and not _same(agent.parse(Completion(text=reply.content)).calls, call):
            raise ConfigError(f"{type(agent).__name__} does not read the example {reply.content!r}: give messages instead")
        shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
        messages += [Message("user", f"Example: what does {name} return{' for ' + shown if shown else ''}?"), reply]
        messages += [*agent.observe((call,), (ToolResult(observation=result),)), agent.write(Action(answer=result))]
    return tuple(messages)


def _same(calls: Sequence[ToolCall], written: ToolCall) -> bool:
    """Whether a reply is read as the one call that was written. White space around a text is not compared."""
    read = [
        (call.name, {key: value.strip() if isinstance(value, str) else value for key, value in call.arguments.items()})
        for call in calls
        if call.error is None
    ]
    return len(calls) == 1 and read == [(written.name, written.arguments)]


def _placeholder(name: str, schema: Mapping[str, Any]) -> Any:
    """A value that the schema of a parameter allows."""
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    if name == "code":
        return "print(2 + 3)"
    return PLACEHOLDERS.get(str(schema.get("type")), f"some {name}")
