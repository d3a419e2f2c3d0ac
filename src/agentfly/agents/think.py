"""ThinkAgent: reasoning between tags, without tools.

A reply is `<think>...</think><answer>...</answer>`. After a reply without an answer, `on_no_tool_call` decides whether the
chain ends or the model is asked again. Tools are refused, because no tag calls one.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..errors import ConfigError
from ..render.parsers.reply import ReplyReader
from ..types import Action, Completion, Message, Task
from .base import BaseAgent, with_system

FIRST_LINE = "You think first and then answer."
HOW_TO_REPLY = """Reply:
<think>your reasoning</think>
<answer>the answer</answer>"""

ANSWER, ANSWER_END = "<answer>", "</answer>"


class ThinkAgent(BaseAgent):
    """`<think>...</think><answer>...</answer>`, in one turn or several.

        agent = ThinkAgent("pocket", reward="math_equal", on_no_tool_call="continue")

    With "continue" a reply without an answer is followed by a nudge and another turn, up to `max_turns`; with "end" (the
    default) the chain ends. An answer inside the thinking has no effect.
    """

    default_nudge: ClassVar[str] = "Go on, and give your answer inside <answer> and </answer>."

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.tools:
            raise ConfigError(f"ThinkAgent calls no tools, so not {next(iter(self.tools))!r}: use ReactAgent or ToolAgent")

    def start(self, task: Task) -> list[Message]:
        return with_system(f"{self.system or FIRST_LINE}\n{HOW_TO_REPLY}", task.messages)

    def parse(self, completion: Completion) -> Action:
        reader = ReplyReader(completion.text)
        answer: str | None = None
        while reader.seek(ANSWER):
            tagged = read_tag(reader, ANSWER, ANSWER_END, completion)
            answer = answer if tagged is None else tagged
        return Action(answer=answer)


def read_tag(reader: ReplyReader, opener: str, closer: str, completion: Completion) -> str | None:
    """Returns the content of a tag, or None if the reply was cut off inside it. The reader moves behind the closing tag.

    A stop string may have removed the closing tag, so an open tag at the end counts unless the reply hit `max_tokens`.
    """
    end = reader.find(closer)
    text = reader.text[reader.pos : end if end >= 0 else None]
    reader.pos = len(reader.text) if end < 0 else end + len(closer)
    if end < 0 and completion.stop == "length":
        return None
    return text.rpartition(opener)[2].strip()
