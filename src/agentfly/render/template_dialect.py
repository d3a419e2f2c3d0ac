"""What one chat template wants its messages to look like, found out by asking it.

In: our messages. Out: the dicts this template understands, and the text it makes of them. Templates differ in whether they
know a system role, a tool role and structured calls, in how they take arguments (a dict or JSON text), ids, thinking and
contents. Each is asked once, with made-up messages; what it refuses or silently drops is written another way, and that is
all the rewriting there is:

    no system role      the system text stands before the first user message, a blank line between
    no tool role        tool messages are sent as user messages
    no calls            the reply's own text, in which the calls are written out, is sent as it is
    strict alternation  messages of the same role in a row become one, joined by a newline

`render_somehow` tries five manners, each plainer than the one before, so that a reply the template has no form for (two
calls at once where only one is known) does not end a run; only when all are refused does the template's own reason come
back as `TemplateRefused`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from ..types import Message, ToolCall
from .template import ChatTemplate, TemplateRefused
from .template_reply import CHANNEL, THINKING, Parts, is_foreign, split
from .template_tokens import CUT, Codec

Tools = Sequence[Mapping[str, Any]] | None
# 0 as asked; 1 calls as text; 2 tools and later system messages as user messages; 3 same roles joined; 4 no marks in replies
NUM_MANNERS = 5

PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "zqtool",
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "X."}}, "required": ["x"]},
        },
    }
]


@dataclass(frozen=True, slots=True)
class Habits:
    """The answers of a template."""

    parts: bool = False  # contents as a list of parts
    system: bool = True
    calls: bool = True
    arguments_text: bool = False  # arguments as JSON text
    empty_is_none: bool = False  # no content is None
    nine_ids: bool = False  # ids are nine letters or digits
    tool_role: bool = True
    tool_needs_call: bool = False
    thinking_field: bool = False  # thinking apart from the content
    joins: bool = False  # never two messages of the same role in a row


class Dialect:
    """One template and its habits."""

    def __init__(self, template: ChatTemplate, codec: Codec) -> None:
        self.template = template
        self._codec = codec
        self.habits = Habits()
        self._ask()

    def read(self, message: Message, answered: bool) -> tuple[Parts, bool]:
        """The parts of a reply, and whether its calls are given structured. `answered`: a tool message follows."""
        structured = bool(message.tool_calls) and self.habits.calls
        if structured and is_foreign(message):
            structured = (
                answered
                and self.habits.tool_needs_call
                and all(call.error is None and call.name for call in message.tool_calls)
            )
            return split(message.content, False), structured
        return split(message.content, structured), structured

    def render(self, messages: Sequence[Message], tools: Tools, generate: bool, manner: int) -> str:
        """The template's text, in one manner."""
        return self.template.render(self.write(messages, manner), tools, generate)

    def render_somehow(self, messages: Sequence[Message], tools: Tools, manner: int = 0) -> str:
        """A whole prompt, in this manner or the first plainer one that is not refused."""
        reasons: list[TemplateRefused] = []
        for plainer in range(manner, NUM_MANNERS):
            try:
                return self.render(messages, tools, True, plainer)
            except TemplateRefused as refused:
                reasons.append(refused)
        raise reasons[0]

    def write(self, messages: Sequence[Message], manner: int) -> list[dict[str, Any]]:
        """Our messages as this template's dicts."""
        habits = self.habits
        if manner >= 1:
            messages = [replace(m, tool_calls=()) if m.tool_calls else m for m in messages]
        if manner >= 2 or not habits.tool_role:
            messages = [replace(m, role="user") if m.role == "tool" else m for m in messages]
        if manner >= 2:
            messages = [replace(m, role="user") if m.role == "system" and i else m for i, m in enumerate(messages)]
        if not habits.system:
            messages = _fold_system(messages)
        if manner >= 3 or habits.joins:
            messages = _join(messages)
        written: list[dict[str, Any]] = []
        open_calls: list[tuple[str, str]] = []  # (id, name) of calls that wait for their result
        for message, follower in zip_longest(messages, messages[1:]):
            if message.role == "assistant":
                if manner >= 4:
                    entry, open_calls = {"role": "assistant", "content": self._content(self._disarm(message.content))}, []
                else:
                    entry, open_calls = self._write_reply(message, follower is not None and follower.role == "tool")
            else:
                entry = {"role": message.role, "content": self._content(self._codec.guard(message.content))}
                if message.role == "tool":
                    self._link(entry, message, open_calls)
                elif message.name:
                    entry["name"] = self._codec.guard(message.name)
            written.append(entry)
        return written

    def _write_reply(self, message: Message, answered: bool) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        guard = self._codec.guard_reply
        parts, structured = self.read(message, answered)
        channels = CHANNEL in parts.head
        apart = channels or (parts.thinking is not None and self.habits.thinking_field)
        entry: dict[str, Any] = {"role": "assistant", "content": guard(parts.content if apart else parts.head)}
        if apart and parts.thinking is not None:
            entry["reasoning_content"] = entry["thinking"] = guard(parts.thinking)
        if not structured:
            entry["content"] = self._content(entry["content"])
            return entry, []
        # White space before a call belongs to how the call is written.
        text = entry["content"].rstrip()
        entry["content"] = self._content(text) if text or not self.habits.empty_is_none else None
        entry["tool_calls"] = [self._write_call(call, i) for i, call in enumerate(message.tool_calls)]
        return entry, [(call["id"], call["function"]["name"]) for call in entry["tool_calls"]]

    def _disarm(self, text: str) -> str:
        """A reply in which the template finds none of its marks: what a model writes must not end a run."""
        text = self._codec.guard(text)
        for mark in self.template.literals:
            text = text.replace(mark, mark[0] + CUT + mark[1:])
        return text

    def _write_call(self, call: ToolCall, index: int) -> dict[str, Any]:
        arguments: Any = self._codec.guard_data(call.arguments)
        if self.habits.arguments_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": self._codec.guard(call.name), "arguments": arguments}
        return {"type": "function", "id": self.identity(call.id or f"call_{index}"), "function": function}

    def _link(self, entry: dict[str, Any], message: Message, open_calls: list[tuple[str, str]]) -> None:
        """A result names its call: by its own id, or in order."""
        wanted = self.identity(message.tool_call_id) if message.tool_call_id else None
        place = next((i for i, (identity, _) in enumerate(open_calls) if identity == wanted), 0)
        identity, name = open_calls.pop(place) if open_calls else (wanted or self.identity("call_0"), "")
        entry["tool_call_id"] = wanted or identity
        name = self._codec.guard(message.name) if message.name else name
        if name:
            entry["name"] = name

    def identity(self, identity: str) -> str:
        """An id as this template takes it."""
        identity = self._codec.guard(identity)
        if not self.habits.nine_ids or (len(identity) == 9 and identity.isalnum()):
            return identity
        return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:9]

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.habits.parts else text

    # ---- asking ----

    def _ask(self) -> None:
        user = Message("user", "zquser")
        if not self._shows([user], ["zquser"]):
            self.template.no_tools = []
            if not self._shows([user], ["zquser"]):
                self.template.no_tools = None
        self._try(parts=True, shows=[user], words=["zquser"])
        self._try(system=False, shows=[Message("system", "zqsystem"), user], words=["zqsystem", "zquser"])
        self._ask_calls(user)
        reply = Message("assistant", "zqreply")
        self._try(joins=True, shows=[user, reply, user, user], words=["zquser"])
        self._ask_thinking(user)

    def _ask_calls(self, user: Message) -> None:
        call = ToolCall("zqtool", {"x": "zqvalue"}, "zqd00000q")
        # An id of another length shows whether nine letters are asked for.
        long = replace(call, id="zqd_0000000000q")
        result = Message("tool", "zqresult", name="zqtool", tool_call_id=call.id)
        choices = [(text, none, nine) for nine in (False, True) for text in (False, True) for none in (False, True)]
        for text, none, nine in choices:
            self.habits = replace(self.habits, arguments_text=text, empty_is_none=none, nine_ids=nine)
            if self._shows([user, Message("assistant", "", (long,))], ["zqtool", "zqvalue"], PROBE_TOOLS):
                break
        else:
            self.habits = replace(self.habits, arguments_text=False, empty_is_none=False, nine_ids=False, calls=False)
        called = Message("assistant", "", (call,)) if self.habits.calls else Message("assistant", "zqreply")
        if not self._shows([user, called, replace(result, tool_call_id=long.id)], ["zqresult"], PROBE_TOOLS):
            self.habits = replace(self.habits, nine_ids=self.habits.calls)
            self._try(tool_role=False, shows=[user, called, result], words=["zqresult"], tools=PROBE_TOOLS)
        uncalled = [user, Message("assistant", "zqreply"), result]
        needs = self.habits.tool_role and not self._shows(uncalled, ["zqresult"], PROBE_TOOLS)
        self.habits = replace(self.habits, tool_needs_call=needs and self.habits.calls)

    def _ask_thinking(self, user: Message) -> None:
        """Inside the content, or in a field of its own: whichever the template shows as it was sampled, in more places."""
        source = self.template.source
        opening, closing = next((pair for pair in THINKING if pair[1] in source), THINKING[0])
        call = (ToolCall("zqtool", {"x": "zqvalue"}, "zqd00000q"),) if self.habits.calls and self.habits.tool_role else ()
        after = Message("tool", "zqresult", tool_call_id="zqd00000q") if call else user

        def kept(field: bool) -> int:
            self.habits = replace(self.habits, thinking_field=field)
            try:
                prompt = squeeze(self.template.render(self.write([user], 0), PROBE_TOOLS, True))
            except TemplateRefused:
                return 0
            head = "" if prompt.endswith(squeeze(opening)) else squeeze(opening)
            wanted = prompt + f"{head}zqthought{closing}zqanswer"
            reply = Message("assistant", f"{head}\nzqthought\n{closing}\n\nzqanswer", call)
            count = 0
            for rest, generate in (((after,), True), ((), False)):
                try:
                    text = self.template.render(self.write([user, reply, *rest], 0), PROBE_TOOLS, generate)
                except TemplateRefused:
                    continue
                count += squeeze(text).startswith(wanted)
            return count

        inside, apart = kept(False), kept(True)
        self.habits = replace(self.habits, thinking_field=apart > inside)

    def _try(self, *, shows: list[Message], words: list[str], tools: Tools = None, **habit: bool) -> None:
        """Change a habit where the template does not show these words as things are, and does with the change."""
        if self._shows(shows, words, tools):
            return
        before = self.habits
        self.habits = replace(before, **habit)
        if not self._shows(shows, words, tools):
            self.habits = before

    def _shows(self, messages: list[Message], words: list[str], tools: Tools = None) -> bool:
        try:
            text = self.template.render(self.write(messages, 0), tools, False)
        except TemplateRefused:
            return False
        bare = self._bare(tools) if tools else ""
        # The list of tools may name the tool as well: a call has to show as one more mention.
        return all(text.count(word) > bare.count(word) for word in words)

    def _bare(self, tools: Tools) -> str:
        try:
            return self.template.render(self.write([Message("user", "Hello")], 0), tools, False)
        except TemplateRefused:
            return ""


def squeeze(text: str) -> str:
    """Without white space: what a template trims or pads does not count as rewriting."""
    return "".join(text.split())


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    folded: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "system":
            waiting.append(message.content)
        elif message.role == "user" and waiting:
            folded.append(replace(message, content="\n\n".join([*waiting, message.content])))
            waiting = []
        else:
            folded.append(message)
    if waiting:
        folded.append(Message("user", "\n\n".join(waiting)))
    return folded


def _join(messages: Sequence[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.role == message.role
            and not (last.tool_calls or message.tool_calls)
            and last.role != "tool"
        ):
            joined[-1] = replace(last, content=f"{last.content}\n{message.content}")
        else:
            joined.append(message)
    return joined
