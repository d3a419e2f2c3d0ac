"""CodeAgent: the model acts by writing Python.

In: replies with a fenced ```python block, or with an answer. Out: an `Action` for each. The last block of a reply is run by the
tool `python`, whose names stay defined from block to block. Refuses other tools: nothing in a block could reach them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ConfigError
from ..render.parsers.reply import after_thinking, broken, without_thinking
from ..tools import as_tool
from ..types import Action, Completion, Engine, Message, Task, ToolCall
from .base import BaseAgent, with_system

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

    The model replies with a ```python block and reads what it printed as `Observation: ...`. A line `Answer: ...` outside a
    block ends the chain; so does a reply without a block, which is then the answer as a whole. The tool `python`, a
    sandboxed session for each chain, is added unless one of that name is given (`agentfly.tools.python.python_tool()` makes
    one without a sandbox).
    """

    required_tools: ClassVar[tuple[str, ...]] = ("python",)
    default_nudge: ClassVar[str] = "Reply with a ```python block to run, or with a line Answer: and your answer."

    def __init__(self, model: str | Path | Engine, *, tools: Iterable[Any] = (), **options: Any) -> None:
        given = tools if isinstance(tools, str) else [as_tool(tool) for tool in tools]
        if not any(getattr(tool, "name", tool) == "python" for tool in given) and not isinstance(given, str):
            given = [as_tool("python"), *given]
        super().__init__(model, tools=given, **options)
        if others := [name for name in self.tools if name != "python"]:
            raise ConfigError(f"CodeAgent acts by running Python and cannot call {others[0]!r}: use ReactAgent or ToolAgent")

    def start(self, task: Task) -> list[Message]:
        return with_system(f"{self.system or FIRST_LINE}\n{HOW_TO_REPLY}", task.messages)

    def parse(self, completion: Completion) -> Action:
        text = completion.text[after_thinking(completion.text) :]
        blocks, outside = _blocks(text)
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


def _blocks(text: str) -> tuple[list[str | None], list[tuple[int, int]]]:
    """The Python blocks of a reply (None for one that is not closed), and the stretches of text outside all blocks."""
    blocks: list[str | None] = []
    outside: list[tuple[int, int]] = []
    begin, inside, python = 0, False, False
    for fence in _FENCE.finditer(text):
        info = fence[1].strip().lower().partition(" ")[0]
        if inside and not info:
            if python:
                blocks.append(text[begin : fence.start()].removeprefix("\n"))
            begin, inside = fence.end(), False
            continue
        if not inside:
            outside.append((begin, fence.start()))
        begin, inside, python = fence.end(), True, info in _PYTHON
    if not inside:
        outside.append((begin, len(text)))
    elif python:
        blocks.append(None)
    return blocks, outside
