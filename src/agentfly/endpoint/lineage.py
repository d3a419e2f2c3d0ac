"""Matches the history of each request with what its chain has read and sampled, so that sampled ids are never encoded again.

A chain's calls are a tree. A node is a sampled reply with all that was said before it, in the canonical form that clients keep:

    system user  A  tool  B             B's node continues A's row: its prompt is the ids of A's and those of `tool`
                 A  other C             A's node has been continued: C begins a row, with the ids up to A copied
    system user  A' tool  D             no node ends with A': the client edited it, so the prompt is rendered in full
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..protocols import Renderer
from ..rows import OpenRow
from ..types import Completion, Extension, Message, RowReason, ToolResult, Turn
from .calls import Answer, Call
from .replies import Replies
from .wire import refuse

Key = tuple[str, str]
"""A message in canonical form, and the thinking of an assistant message."""


@dataclass(slots=True, eq=False)
class CallNode:
    """A reply with what was said before it. `messages` are those that the renderer saw, `length` their ids in `row.prompt`."""

    messages: list[Message]
    keys: list[Key]
    tools: str
    completion: Completion
    row: OpenRow
    length: int
    turn: Turn
    ended_s: float
    continued: bool = False


@dataclass(slots=True)
class Place:
    """Where a request stands: the row that it goes on with, its messages, and those that are new to the chain."""

    row: OpenRow
    messages: list[Message]
    keys: list[Key]
    tools: str
    new: list[Message]


@dataclass(slots=True)
class Lineage:
    """The tree of one chain. `sessions` are the engine's, one for each row, to be released at its end.

    `keeps_thinking`: a reply that comes back without its thinking is still the reply; else it is another one, and a new row
    begins. `renderer` is None for an engine that reads messages.
    """

    chain: str
    renderer: Renderer | None
    replies: Replies
    keeps_thinking: bool = False
    sessions: list[str] = field(default_factory=list)
    _nodes: dict[tuple[str, tuple[Key, ...]], CallNode] = field(default_factory=dict)
    _said: set[Key] = field(default_factory=set)

    def place(self, call: Call, now: float) -> Place:
        """Claims the row that a call goes on with, or begins one. Raises Refused for messages that cannot be rendered."""
        messages = list(call.messages)
        if not messages or messages[-1].role == "assistant":
            refuse("the last message is one of the assistant: a reply that begins with given words is not supported")
        keys = [self._key(each, call.thinking.get(at, "")) for at, each in enumerate(messages)]
        count = max((at + 1 for at, message in enumerate(messages) if message.role == "assistant"), default=0)
        tools = _canonical([tool.get("function", tool) for tool in call.tools])
        node = self._nodes.get((tools, tuple(keys[:count])))
        try:
            if node is not None:
                row, history = self._go_on(node, messages[count:], call, now)
                new = messages[count:]
            else:
                history = self.replies.with_thinking(call)
                ids = [] if self.renderer is None else self.renderer.start(history, call.tools)
                row = self._begin(ids, self._reason(messages, keys, tools, count))
                new = [
                    each for each, key in zip(messages, keys, strict=True) if each.role != "assistant" and key not in self._said
                ]
        except ConfigError as error:
            refuse(str(error))
        self._said.update(keys)
        return Place(row, history, keys, tools, new)

    def add(self, place: Place, completion: Completion, answer: Answer, turn: Turn, now: float) -> None:
        """A reply has been sampled: later requests may go on from it."""
        row = place.row
        row.reply(completion.token_ids)
        messages = [*place.messages, Message("assistant", completion.text, turn.calls)]
        keys = [*place.keys, self._key(answer.message, answer.thinking)]
        node = CallNode(messages, keys, place.tools, completion, row, len(row.prompt), turn, now)
        self._nodes[place.tools, tuple(keys)] = node

    def _key(self, message: Message, thinking: str) -> Key:
        # Clients drop blank space around a reply, and write arguments anew. Ids of calls are ours.
        said = message.content.strip() if message.role == "assistant" else message.content
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        return _canonical((message.role, said, calls)), "" if self.keeps_thinking else thinking.strip()

    def _go_on(self, node: CallNode, new: Sequence[Message], call: Call, now: float) -> tuple[OpenRow, list[Message]]:
        history = [*node.messages, *new]
        extension = Extension([])
        if self.renderer is not None:
            extension = self.renderer.extend(history, len(new), node.completion, call.tools)
        if not node.turn.results:
            node.turn.results = _results(node.turn, new)
            node.turn.tools_s = now - node.ended_s if node.turn.results else 0.0
        if extension.restarts:
            return self._begin(extension.ids, "template restarts"), history
        if node.continued:
            return self._begin([*node.row.prompt[: node.length], *extension.ids], "history cut"), history
        node.continued = True
        return node.row.extend(extension), history

    def _begin(self, ids: Sequence[int], why: RowReason) -> OpenRow:
        number = len(self.sessions)
        self.sessions.append(f"{self.chain}/{number}")
        return OpenRow.begin(self.sessions[-1], number, ids, why)

    def _reason(self, messages: Sequence[Message], keys: Sequence[Key], tools: str, count: int) -> RowReason:
        """Why a request goes on with no row: what differs from the reply whose history it shares the most of."""
        common, node = max(
            ((_common(keys, each.keys), each) for each in self._nodes.values()), key=lambda pair: pair[0], default=(0, None)
        )
        systems = messages[0].role == "system"
        if node is None or common <= systems:
            others = [each for each in self._nodes.values() if each.messages[0].role == "system" or systems]
            tails = [_common(keys[systems:], each.keys[each.messages[0].role == "system" :]) for each in others]
            return "system changed" if any(tails) else "first"
        if common >= count and tools != node.tools:
            return "tools changed"
        if common < min(len(keys), len(node.keys)) and messages[common].role == node.messages[common].role == "assistant":
            return "thinking dropped" if keys[common][0] == node.keys[common][0] else "reply edited"
        return "history cut"


def _results(turn: Turn, new: Sequence[Message]) -> tuple[ToolResult, ...]:
    """What the client's tools answered to the calls of a turn: by their ids or, where it drops them, in their order."""
    said = [message for message in new if message.role == "tool"]
    if not said or not turn.calls:
        return ()
    by_id = {message.tool_call_id: message.content for message in said}
    in_order = dict(zip((call.id for call in turn.calls), (message.content for message in said), strict=False))
    known = any(call.id in by_id for call in turn.calls)
    return tuple(ToolResult(observation=(by_id if known else in_order).get(call.id, "")) for call in turn.calls)


def _common(one: Sequence[Key], two: Sequence[Key]) -> int:
    return next((at for at, (left, right) in enumerate(zip(one, two, strict=False)) if left != right), min(len(one), len(two)))


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
