"""ThinkAgent: reasoning between tags, without tools.

In: replies `<think>...</think><answer>...</answer>`. Out: an `Action` with the answer, or with nothing where there is none:
then the policy `on_no_tool_call` decides whether the chain ends or the model is asked again. Refuses tools: there is no tag to
call one.
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
    default) it ends the chain. An answer inside the thinking does not count.
    """

    default_nudge: ClassVar[str] = "Go on, and give your answer inside <answer> and </answer>."

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.tools:
            raise ConfigError(f"ThinkAgent uses no tools, {next(iter(self.tools))!r} neither: use ReactAgent or ToolAgent")

    def start(self, task: Task) -> list[Message]:
        return with_system(f"{self.system or FIRST_LINE}\n{HOW_TO_REPLY}", task.messages)

    def parse(self, completion: Completion) -> Action:
        reader = ReplyReader(completion.text)
        answer: str | None = None
        while reader.seek(ANSWER):
            found = read_tag(reader, ANSWER, ANSWER_END, completion)
            answer = answer if found is None else found
        return Action(answer=answer)


def read_tag(reader: ReplyReader, opener: str, closer: str, completion: Completion) -> str | None:
    """What a tag holds; the reader stands behind its opener and moves behind its closer. None where it was cut off.

    A stop string may have eaten the closer. So a tag that is open at the end of a reply counts, if the reply ended by itself.
    """
    end = reader.find(closer)
    text = reader.text[reader.pos : end if end >= 0 else None]
    reader.pos = len(reader.text) if end < 0 else end + len(closer)
    if end < 0 and completion.stop == "length":
        return None
    return text.rpartition(opener)[2].strip()
