"""The chat template of the pocket model, rendered without transformers, in the pieces that a rollout tokenises.

A dialogue is tokenised as it is met at run time: the opening in one piece, each reply alone, what follows a reply in one piece.

    start      <|im_start|>system\\n...<|im_end|>\\n<|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n
    reply      Thought: ...<|im_end|>
    extension  \\n<|im_start|>user\\nObservation: 84<|im_end|>\\n<|im_start|>assistant\\n
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from agentfly.errors import ConfigError

IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
Phase = Literal["good", "mixed"]
Messages = Sequence[Mapping[str, Any]]

REACT_FIRST_LINE = "You solve tasks step by step with tools."
REACT_HOW = (
    "\nTo use a tool, reply:\nThought: what to do next\nAction: the tool's name\nInput: its arguments as JSON"
    "\nWhen you know the answer, reply:\nThought: why\nAnswer: the answer"
)
CODE_FIRST_LINE = "You solve tasks step by step with Python."
CODE_HOW = (
    "\nTo run code, reply with one block:\n```python\nprint(6 * 7)\n```"
    "\nYou then see what it printed; names stay defined in later blocks."
    "\nWhen you know the answer, reply:\nAnswer: the answer"
)
REACT_NO_TOOLS = "You solve tasks step by step.\nWhen you know the answer, reply:\nThought: why\nAnswer: the answer"


def template_text() -> str:
    return (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


@cache
def _template() -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The same settings as transformers' own renderer, so that both write the same text.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template_text())


def _refuse(sentence: str) -> None:
    raise ConfigError(sentence)


def start_text(messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The opening of a chain: everything up to the first token the model samples."""
    return str(_template().render(messages=list(messages), tools=list(tools) or None, add_generation_prompt=True))


def extension_text(messages: Messages) -> str:
    """What stands between a reply's end-of-turn token and the next sampled token."""
    return "\n" + str(_template().render(messages=list(messages), tools=None, add_generation_prompt=True))


def react_system(tool_lines: Sequence[str], first_line: str = "") -> str:
    """The system message of the ReAct agent."""
    if not tool_lines:
        return REACT_NO_TOOLS
    lines = "".join(f"\n- {line}" for line in tool_lines)
    return f"{first_line or REACT_FIRST_LINE}\nTools:{lines}{REACT_HOW}"


def code_system(first_line: str = "") -> str:
    """The system message of the code agent."""
    return (first_line or CODE_FIRST_LINE) + CODE_HOW
