"""SearchAgent: questions answered by searching, in tags.

A reply holds `<search>query</search>` or `<answer>...</answer>`; the first of the two counts. Reading stops at an
`<information>` tag, so results that the model made up have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ..errors import ConfigError
from ..render.parsers.reply import ReplyReader, broken
from ..types import Action, Completion, Message, Task, ToolCall, ToolResult
from .base import BaseAgent, with_system
from .think import ANSWER, ANSWER_END, read_tag

FIRST_LINE = "You answer questions by searching."
HOW_TO_REPLY = """To search, reply:
<think>what is missing</think>
<search>your query</search>
Results come back inside <information> and </information>.
When you know the answer, reply:
<think>why</think>
<answer>the answer</answer>"""

SEARCH, SEARCH_END, INFORMATION = "<search>", "</search>", "<information>"


class SearchAgent(BaseAgent):
    """`<search>` and `<answer>` tags.

        agent = SearchAgent("Qwen/Qwen2.5-3B-Instruct", tools=[search], reward="qa_f1")

    `<search>capital of Peru</search>` calls the tool `search` with the query as its first argument; the result comes back
    inside `<information>`. Tags inside `<think>` have no effect.
    """

    observation_mark: ClassVar[str] = INFORMATION
    required_tools: ClassVar[tuple[str, ...]] = ("search",)
    default_nudge: ClassVar[str] = "Reply with <search>your query</search> or with <answer>the answer</answer>."

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if others := [name for name in self.tools if name != "search"]:
            raise ConfigError(f"SearchAgent calls the tool 'search' alone and cannot call {others[0]!r}: use ReactAgent for it")
        properties = self.tools["search"].schema["function"]["parameters"].get("properties", {})
        if not properties:
            raise ConfigError("the tool 'search' needs a parameter that takes the query")
        self._argument: str = next(iter(properties))

    def start(self, task: Task) -> list[Message]:
        return with_system(f"{self.system or FIRST_LINE}\n{HOW_TO_REPLY}", task.messages)

    def write(self, action: Action) -> Message:
        if not action.calls:
            return Message("assistant", f"<think>I know the answer.</think>\n<answer>{action.answer}</answer>")
        queries = (f"\n<search>{next(iter(call.arguments.values()))}</search>" for call in action.calls)
        return Message("assistant", f"<think>I search for it.</think>{''.join(queries)}")

    def parse(self, completion: Completion) -> Action:
        reader = ReplyReader(completion.text)
        calls = 0
        while (tag := reader.seek(SEARCH, ANSWER, INFORMATION)) in (SEARCH, ANSWER):
            if tag == ANSWER:
                if not calls:
                    return Action(answer=read_tag(reader, ANSWER, ANSWER_END, completion))
                break
            calls += 1
            reader.add(self._call(read_tag(reader, SEARCH, SEARCH_END, completion)))
        return Action(calls=reader.done().calls)

    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        text = "\n".join(f"{INFORMATION}{result.observation}</information>" for result in results)
        return [Message("user", text, images=tuple(result.image for result in results if result.image is not None))]

    def _call(self, query: str | None) -> ToolCall:
        if query is None:
            return broken("search", f"the query is not closed with {SEARCH_END}")
        if not query:
            return broken("search", "the query is empty")
        return ToolCall("search", {self._argument: query.encode("utf-8", "replace").decode()})
