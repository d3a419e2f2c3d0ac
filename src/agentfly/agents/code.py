"""CodeAgent: the model acts by writing Python.

The tool `python` runs the last fenced ```python block of a reply; names stay defined from block to block. Other tools are
refused, because code in a block cannot call them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ConfigError
from ..protocols import Engine
from ..render.parsers.reply import after_thinking, broken, without_thinking
from ..tools import as_tool
from ..types import Action, Completion, Message, Task, ToolCall
from .base import BaseAgent, tool_list, with_system

FIRST_LINE = "You solve tasks step by step with Python."
HOW_TO_REPLY = """To run code, reply with one block:
```python
print(6 * 7)
```
You then see what it printed; names stay defined in later blocks.
When you know the answer, reply:
Answer: the answer"""

_FENCE = re.compile(r"^[ \t]{0,3}```([^\n`]*)$", re.MULTILINE)
_ANSWER = re.compile(r"^[ \t]{0,8}\*{0,2}(?:final )?answer[ \t]?\*{0,2}:\*{0,2}", re.IGNORECASE | re.MULTILINE)
_PYTHON = {"python", "py", "python3"}


class CodeAgent(BaseAgent):
    """A fenced block runs in the interpreter.

        agent = CodeAgent("Qwen/Qwen2.5-Coder-7B-Instruct", reward="math_equal")

    The model replies with a ```python block and reads the printed output as `Observation: ...`. A line `Answer: ...` outside
    a block ends the chain; a reply without a block is the answer as a whole. The tool `python`, a sandboxed session for each
    chain, is added unless `tools` has one of that name.
    """

    required_tools: ClassVar[tuple[str, ...]] = ("python",)
    default_nudge: ClassVar[str] = "Reply with a ```python block to run, or with a line Answer: and your answer."

    def __init__(self, model: str | Path | Engine = "", *, tools: Any = (), **options: Any) -> None:
        given = [as_tool(tool) for tool in tool_list(tools)]
        if not any(tool.name == "python" for tool in given):
            given = [as_tool("python"), *given]
        super().__init__(model, tools=given, **options)
        if others := [name for name in self.tools if name != "python"]:
            raise ConfigError(f"CodeAgent acts by running Python and cannot call {others[0]!r}: use ReactAgent or ToolAgent")

    def start(self, task: Task) -> list[Message]:
        return with_system(f"{self.system or FIRST_LINE}\n{HOW_TO_REPLY}", task.messages)

    def write(self, action: Action) -> Message:
        if not action.calls:
            return Message("assistant", f"Answer: {action.answer}")
        return Message("assistant", f"```python\n{next(iter(action.calls[0].arguments.values()))}\n```")

    def parse(self, completion: Completion) -> Action:
        text = completion.text[after_thinking(completion.text) :]
        blocks, outside = fenced_blocks(text, _PYTHON)
        marks = [mark for start, end in outside for mark in _ANSWER.finditer(text, start, end)]
        if marks:
            return Action(answer=text[marks[-1].end() :].strip())
        if not blocks:
            return Action(answer=without_thinking(completion.text) or None)
        code = blocks[-1]
        if code is None:
            return Action(calls=(broken("python", "the code block is not closed with ```"),))
        if not code.strip():
            return Action(calls=(broken("python", "the code block is empty"),))
        argument = next(iter(self.tools["python"].schema["function"]["parameters"]["properties"]))
        return Action(calls=(ToolCall("python", {argument: code.encode("utf-8", "replace").decode()}),))


def fenced_blocks(text: str, languages: Collection[str]) -> tuple[list[str | None], list[tuple[int, int]]]:
    """Returns the blocks in these languages (None for one that is not closed) and the spans of text outside all blocks."""
    blocks: list[str | None] = []
    outside: list[tuple[int, int]] = []
    begin, inside, wanted = 0, False, False
    for fence in _FENCE.finditer(text):
        info = fence[1].strip().lower().partition(" ")[0]
        if inside and not info:
            if wanted:
                blocks.append(text[begin : fence.start()].removeprefix("\n"))
            begin, inside = fence.end(), False
            continue
        if not inside:
            outside.append((begin, fence.start()))
        begin, inside, wanted = fence.end(), True, info in languages
    if not inside:
        outside.append((begin, len(text)))
    elif wanted:
        blocks.append(None)
    return blocks, outside
