"""Agents for a workspace: `WorkspaceAgent` calls its tools natively, `BashAgent` writes one block of bash per reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ..errors import ConfigError
from ..protocols import Engine
from ..render.parsers.reply import after_thinking, broken
from ..tools import as_tool
from ..types import Action, Completion, Message, Task, ToolCall
from .base import BaseAgent, tool_list, with_system
from .code import fenced_blocks
from .tool import ToolAgent

TOOLS = ("bash", "read", "edit", "grep", "run_tests", "submit")
SYSTEM = (
    "You repair a repository. Look at its files, change what is wrong, run the tests, and submit when the task is done. "
    "The files are in the folder in which commands run."
)
HOW_TO_REPLY = """Each reply holds one block:
```bash
a command
```
You then see its output and exit status. The folder and variables are kept. When the task is done, reply:
```bash
submit
```"""
SHELLS = frozenset(("bash", "sh", "shell"))


class WorkspaceAgent(ToolAgent):
    """Repairs a repository with the tools bash, read, edit, grep, run_tests and submit, called natively.

    agent = WorkspaceAgent("Qwen/Qwen2.5-Coder-7B-Instruct", reward="workspace_success")
    """

    def __init__(self, model: str | Path | Engine = "", **options: Any) -> None:
        super().__init__(model, **{"system": SYSTEM, "max_turns": 40, **options, "tools": options.get("tools") or TOOLS})


class BashAgent(BaseAgent):
    """A block of bash per reply, for models without a format of calls.

        agent = BashAgent("Qwen/Qwen2.5-Coder-7B-Instruct", reward="workspace_success")

    The last ```bash block of a reply runs. A block that is the word `submit` ends the chain; a reply without a block is asked
    for one.
    """

    required_tools: ClassVar[tuple[str, ...]] = ("bash", "submit")
    default_on_no_tool_call = "continue"
    default_nudge: ClassVar[str] = "Reply with one ```bash block; submit in a block ends the task."

    def __init__(self, model: str | Path | Engine = "", **options: Any) -> None:
        given = [as_tool(tool) for tool in tool_list(options.pop("tools", ()))]
        given += [as_tool(name) for name in self.required_tools if name not in [tool.name for tool in given]]
        super().__init__(model, tools=given, **{"max_turns": 40, **options})
        if others := [name for name in self.tools if name not in self.required_tools]:
            raise ConfigError(f"BashAgent acts by bash and cannot call {others[0]!r}: use WorkspaceAgent or ReactAgent")

    def start(self, task: Task) -> list[Message]:
        return with_system(f"{self.system or SYSTEM}\n{HOW_TO_REPLY}", task.messages)

    def write(self, action: Action) -> Message:
        if not action.calls:
            return Message("assistant", action.answer or "")
        text = str(next(iter(action.calls[0].arguments.values()), action.calls[0].name))
        return Message("assistant", f"```bash\n{text}\n```")

    def parse(self, completion: Completion) -> Action:
        text = completion.text[after_thinking(completion.text) :]
        blocks, _ = fenced_blocks(text, SHELLS)
        if not blocks:
            return Action()
        command = blocks[-1]
        if command is None:
            return Action(calls=(broken("bash", "the block is not closed with ```"),))
        if not command.strip():
            return Action(calls=(broken("bash", "the block is empty"),))
        if command.strip() == "submit":
            return Action(calls=(ToolCall("submit", {}),))
        return Action(calls=(ToolCall("bash", {"command": command.encode("utf-8", "replace").decode()}),))
