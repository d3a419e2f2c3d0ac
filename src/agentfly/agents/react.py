"""ReactAgent: Thought, Action, Input as plain text; works with any chat model.

The parser tolerates small deviations (case, "Action Input:", fences, text after the JSON) and tells the model about the rest.
It ignores everything after an "Observation:" that the model wrote itself. A reply is read in one pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..render.parsers.reply import MAX_CALLS, after_thinking, broken, clean_name
from ..render.parsers.strict_json import BadJson, json_end, load_json, load_object
from ..tools.scalars import argument_text
from ..types import Action, Completion, Message, Task, ToolCall
from .base import BaseAgent, with_system

WITH_TOOLS = "You solve tasks step by step with tools."
WITHOUT_TOOLS = "You solve tasks step by step."
HOW_TO_ACT = """To use a tool, reply:
Thought: what to do next
Action: the tool's name
Input: its arguments as JSON"""
HOW_TO_ANSWER = """When you know the answer, reply:
Thought: why
Answer: the answer"""
NO_ACTION = {"none", "n/a", "no action", "nothing", "null"}

# A label at the start of a line, optionally bold or a list item: `Action:`, `**Action:**`, `- Final Answer :`.
_LABEL = re.compile(
    r"^[ \t]{0,8}(?:[*#>-]{1,4}[ \t]?)?(thought|action input|action|input|final answer|answer|observation)"
    r"[ \t]?\*{0,2}:\*{0,2}[ \t]*",
    re.IGNORECASE | re.MULTILINE,
)
_SAME = {"action input": "input", "final answer": "answer"}


class ReactAgent(BaseAgent):
    """Thought / Action / Input.

        agent = ReactAgent("pocket", tools=[multiply], reward=exact)
        result = agent.run_sync([{"question": "What is 12 times 7?", "answer": "84"}], num_chains=8)

    The model reads how to act in the system message and replies

        Thought: I need the product.             or      Thought: The product is 84.
        Action: multiply                                 Answer: 84
        Input: {"a": 12, "b": 7}

    and each result comes back as a line `Observation: 84`. `system` replaces the first line of the prompt.
    """

    default_nudge: ClassVar[str] = "Reply with an Action and its Input, or with an Answer."

    def start(self, task: Task) -> list[Message]:
        return with_system(self.prompt, task.messages)

    @property
    def prompt(self) -> str:
        """The system message: the tools and the reply format."""
        if not self.tools:
            return f"{self.system or WITHOUT_TOOLS}\n{HOW_TO_ANSWER}"
        tools = describe_tools([tool.schema for tool in self.tools.values()])
        return f"{self.system or WITH_TOOLS}\nTools:\n{tools}\n{HOW_TO_ACT}\n{HOW_TO_ANSWER}"

    def write(self, action: Action) -> Message:
        if not action.calls:
            return Message("assistant", f"Thought: I know the answer.\nAnswer: {action.answer}")
        calls = (f"\nAction: {call.name}\nInput: {json.dumps(call.arguments)}" for call in action.calls)
        return Message("assistant", f"Thought: I use {action.calls[0].name}.{''.join(calls)}")

    def parse(self, completion: Completion) -> Action:
        text = completion.text
        if (call := self._exactly_as_asked(text)) is not None:
            return Action(calls=(call,))
        sections = _split(text, after_thinking(text))
        calls: list[ToolCall] = []
        answer: str | None = None
        for index, (label, start, end) in enumerate(sections):
            if label == "answer" and calls:
                break
            if label == "answer":
                answer = text[start : _end_of_answer(sections, index, end)].strip()
            elif label == "action" and (name := self._tool_name(text[start:end])) is not None:
                if answer is not None:
                    break
                if len(calls) >= MAX_CALLS:
                    calls.append(broken("", f"only the first {MAX_CALLS} actions of a reply are read"))
                    break
                following = sections[index + 1] if index + 1 < len(sections) else ("", 0, 0)
                calls.append(self._call(name, text[following[1] : following[2]] if following[0] == "input" else None))
        return Action(calls=tuple(calls), answer=answer)

    def _exactly_as_asked(self, text: str) -> ToolCall | None:
        """Returns the call of a reply that follows the prompt exactly, else None: a fast path for trained models."""
        lines = text.split("\n", 3)
        if len(lines) != 3 or "think>" in text:
            return None
        thought, action, given = lines
        if not (thought.startswith("Thought: ") and action.startswith("Action: ") and given.startswith("Input: {")):
            return None
        name = action[8:]
        if name not in self.tools or not given.endswith("}"):
            return None
        try:
            return ToolCall(name, load_object(given[7:]))
        except BadJson:
            return None

    def _tool_name(self, body: str) -> str | None:
        """Returns the tool that an Action names; None if it says that there is none."""
        written = body.strip().partition("\n")[0][:200]
        bare = written.strip(" \t\r`\"'*[]().")
        for name in (written.strip(), bare):
            if name in self.tools:
                return name
        if bare.lower() in NO_ACTION:
            return None
        same = [name for name in self.tools if name.lower() == bare.lower()]
        return same[0] if len(same) == 1 else clean_name(bare)

    def _call(self, name: str, body: str | None) -> ToolCall:
        if not name:
            return broken("", "after Action: comes the name of a tool")
        if name not in self.tools:
            return ToolCall(name)  # running the call tells the model which tools exist
        parameters = self.tools[name].schema["function"]["parameters"]
        properties, required = parameters.get("properties", {}), parameters.get("required", [])
        if body is None:
            return broken(name, f"write its arguments on a line Input: {_example(required)}") if required else ToolCall(name)
        body = _unfence(body.strip())
        if body.startswith("{"):
            end, complete = json_end(body, 0)
            try:
                return ToolCall(name, load_object(body[:end] if complete else body))
            except BadJson as error:
                return broken(name, str(error))
        if not body and not required:
            return ToolCall(name)
        only = list(properties) if len(properties) == 1 else required
        if body and len(only) == 1:
            return ToolCall(name, {only[0]: _plain(body, properties.get(only[0], {}))})
        return broken(name, f"its Input must be a JSON object: {_example(required or list(properties))}")


def describe_tools(schemas: Sequence[Mapping[str, Any]]) -> str:
    """One line per tool: `- multiply(a: number, b: number = 3): Multiply two numbers. a: first factor; b: second factor`."""
    return "\n".join(f"- {_describe(schema.get('function', schema))}" for schema in schemas)


def _describe(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    arguments = ", ".join(argument_text(name, schema, name in required) for name, schema in properties.items())
    described = {name: _line(schema["description"]) for name, schema in properties.items() if schema.get("description")}
    notes = "; ".join(f"{name}: {text}" for name, text in described.items())
    summary = _line(function.get("description") or "")
    if summary and notes and summary[-1] not in ".!?:;":
        summary += "."
    says = " ".join(filter(None, (summary, notes)))
    return f"{function['name']}({arguments})" + (f": {says}" if says else "")


def _example(names: Sequence[str]) -> str:
    """`{"a": ..., "b": ...}`."""
    return "{" + ", ".join(f'"{name}": ...' for name in names) + "}"


def _line(text: str) -> str:
    return " ".join(text.split())


def _split(text: str, start: int) -> list[tuple[str, int, int]]:
    """Returns the sections of a reply as (label, start, end). An observation ends the reading."""
    sections: list[tuple[str, int, int]] = []
    label, begin = "", start
    for mark in _LABEL.finditer(text, start):
        if label:
            sections.append((label, begin, mark.start()))
        label = mark[1].lower()
        label, begin = _SAME.get(label, label), mark.end()
        if label == "observation":
            return sections
    if label:
        sections.append((label, begin, len(text)))
    return sections


def _end_of_answer(sections: list[tuple[str, int, int]], index: int, end: int) -> int:
    """An answer continues over lines that look like an Input."""
    while index + 1 < len(sections) and sections[index + 1][0] == "input":
        index += 1
        end = sections[index][2]
    return end


def _unfence(text: str) -> str:
    """Returns the content of a fenced block, or the text itself if it is none."""
    if not text.startswith("```"):
        return text
    _, _, inside = text.partition("\n")
    closed = inside.find("```")
    return (inside if closed < 0 else inside[:closed]).strip()


def _plain(text: str, schema: Mapping[str, Any]) -> Any:
    """Parse the only argument of a tool, written without JSON around it."""
    quoted = len(text) > 1 and text[0] == text[-1] == '"'
    if quoted or schema.get("type") != "string":
        try:
            return load_json(text)
        except BadJson:
            return text.encode("utf-8", "replace").decode()
    return text.encode("utf-8", "replace").decode()
