"""The form in which one chat template accepts messages, determined by rendering placeholder messages.

Templates differ in whether they support a system role, a tool role and structured calls, and in the form of arguments, ids,
thinking and contents. Each of these is tested once. What a template refuses or silently drops is written another way:

    no system role      the system text is put before the first user message, separated by a blank line
    no tool role        tool messages become user messages
    no calls            the text of the reply, which contains the calls, is sent unchanged
    strict alternation  consecutive messages of one role are joined by a newline

`render_somehow` tries five manners, from the richest to the plainest, so that a reply that the template cannot express (two
calls at once, for example) does not end a run. If all are refused it raises `TemplateRefused` with the reason of the template.
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
from .template_marks import PROBE_TOOLS
from .template_reply import CHANNEL, THINKING, Parts, is_foreign, split
from .template_tokens import CUT, Codec

Tools = Sequence[Mapping[str, Any]] | None
# 0 as asked; 1 calls as text; 2 tools and later system messages as user messages; 3 same roles joined; 4 no marks in replies
NUM_MANNERS = 5


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """What a template supports and expects."""

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
    """One template and its format."""

    def __init__(self, template: ChatTemplate, codec: Codec) -> None:
        self.template = template
        self._codec = codec
        self.format = TemplateFormat()
        self._ask()

    def read(self, message: Message, answered: bool) -> tuple[Parts, bool]:
        """The parts of a reply, and whether its calls are passed as structured calls. `answered`: a tool message follows."""
        structured = bool(message.tool_calls) and self.format.calls
        if structured and is_foreign(message):
            structured = (
                answered
                and self.format.tool_needs_call
                and all(call.error is None and call.name for call in message.tool_calls)
            )
            return split(message.content, False), structured
        return split(message.content, structured), structured

    def render(self, messages: Sequence[Message], tools: Tools, generate: bool, manner: int) -> str:
        """The text of the messages in one manner. Raises TemplateRefused."""
        return self.template.render(self.write(messages, manner), tools, generate)

    def render_somehow(self, messages: Sequence[Message], tools: Tools, manner: int = 0) -> str:
        """A whole prompt in this manner, or in the first plainer one that the template accepts. Raises TemplateRefused."""
        reasons: list[TemplateRefused] = []
        for plainer in range(manner, NUM_MANNERS):
            try:
                return self.render(messages, tools, True, plainer)
            except TemplateRefused as refused:
                reasons.append(refused)
        raise reasons[0]

    def write(self, messages: Sequence[Message], manner: int) -> list[dict[str, Any]]:
        """The messages as the dicts that the template expects."""
        habits = self.format
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
                    content = self.text_content(self._without_marks(message.content))
                    entry, open_calls = {"role": "assistant", "content": content}, []
                else:
                    entry, open_calls = self._write_reply(message, follower is not None and follower.role == "tool")
            else:
                entry = {"role": message.role, "content": self.text_content(self._codec.guard(message.content))}
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
        apart = channels or (parts.thinking is not None and self.format.thinking_field)
        entry: dict[str, Any] = {"role": "assistant", "content": guard(parts.content if apart else parts.head)}
        if apart and parts.thinking is not None:
            entry["reasoning_content"] = entry["thinking"] = guard(parts.thinking)
        if not structured:
            entry["content"] = self.text_content(entry["content"])
            return entry, []
        # White space before a call is part of the notation of the call.
        text = entry["content"].rstrip()
        entry["content"] = self.text_content(text) if text or not self.format.empty_is_none else None
        entry["tool_calls"] = [self._write_call(call, i) for i, call in enumerate(message.tool_calls)]
        return entry, [(call["id"], call["function"]["name"]) for call in entry["tool_calls"]]

    def _without_marks(self, text: str) -> str:
        """The reply without the marks that the template searches for, so that no reply makes the template fail."""
        text = self._codec.guard(text)
        for mark in self.template.literals:
            text = text.replace(mark, mark[0] + CUT + mark[1:])
        return text

    def _write_call(self, call: ToolCall, index: int) -> dict[str, Any]:
        arguments: Any = self._codec.guard_data(call.arguments)
        if self.format.arguments_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": self._codec.guard(call.name), "arguments": arguments}
        return {"type": "function", "id": self.identity(call.id or f"call_{index}"), "function": function}

    def _link(self, entry: dict[str, Any], message: Message, open_calls: list[tuple[str, str]]) -> None:
        """Links a result to its call, by id or in order."""
        wanted = self.identity(message.tool_call_id) if message.tool_call_id else None
        place = next((i for i, (identity, _) in enumerate(open_calls) if identity == wanted), 0)
        identity, name = open_calls.pop(place) if open_calls else (wanted or self.identity("call_0"), "")
        entry["tool_call_id"] = wanted or identity
        name = self._codec.guard(message.name) if message.name else name
        if name:
            entry["name"] = name

    def identity(self, identity: str) -> str:
        """The id in the form that the template accepts."""
        identity = self._codec.guard(identity)
        if not self.format.nine_ids or (len(identity) == 9 and identity.isalnum()):
            return identity
        return hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:9]

    def text_content(self, text: str) -> Any:
        """The text in the form in which the template expects contents."""
        return [{"type": "text", "text": text}] if self.format.parts else text

    # ---- probing ----

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
        # An id of another length shows whether the template insists on nine characters.
        long = replace(call, id="zqd_0000000000q")
        result = Message("tool", "zqresult", name="zqtool", tool_call_id=call.id)
        choices = [(text, none, nine) for nine in (False, True) for text in (False, True) for none in (False, True)]
        for text, none, nine in choices:
            self.format = replace(self.format, arguments_text=text, empty_is_none=none, nine_ids=nine)
            if self._shows([user, Message("assistant", "", (long,))], ["zqtool", "zqvalue"], PROBE_TOOLS):
                break
        else:
            self.format = replace(self.format, arguments_text=False, empty_is_none=False, nine_ids=False, calls=False)
        called = Message("assistant", "", (call,)) if self.format.calls else Message("assistant", "zqreply")
        if not self._shows([user, called, replace(result, tool_call_id=long.id)], ["zqresult"], PROBE_TOOLS):
            self.format = replace(self.format, nine_ids=self.format.calls)
            self._try(tool_role=False, shows=[user, called, result], words=["zqresult"], tools=PROBE_TOOLS)
        uncalled = [user, Message("assistant", "zqreply"), result]
        needs = self.format.tool_role and not self._shows(uncalled, ["zqresult"], PROBE_TOOLS)
        self.format = replace(self.format, tool_needs_call=needs and self.format.calls)

    def _ask_thinking(self, user: Message) -> None:
        """Chooses the form of thinking (in the content, or a separate field) that is rendered as sampled in more places."""
        source = self.template.source
        opening, closing = next((pair for pair in THINKING if pair[1] in source), THINKING[0])
        call = (ToolCall("zqtool", {"x": "zqvalue"}, "zqd00000q"),) if self.format.calls and self.format.tool_role else ()
        after = Message("tool", "zqresult", tool_call_id="zqd00000q") if call else user

        def kept(field: bool) -> int:
            self.format = replace(self.format, thinking_field=field)
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
        self.format = replace(self.format, thinking_field=apart > inside)

    def _try(self, *, shows: list[Message], words: list[str], tools: Tools = None, **option: bool) -> None:
        """Changes an option if the template shows the words only with the change."""
        if self._shows(shows, words, tools):
            return
        before = self.format
        self.format = replace(before, **option)
        if not self._shows(shows, words, tools):
            self.format = before

    def _shows(self, messages: list[Message], words: list[str], tools: Tools = None) -> bool:
        try:
            text = self.template.render(self.write(messages, 0), tools, False)
        except TemplateRefused:
            return False
        bare = self._bare(tools) if tools else ""
        # The list of tools may name the tool, too, so a call must add one more mention.
        return all(text.count(word) > bare.count(word) for word in words)

    def _bare(self, tools: Tools) -> str:
        try:
            return self.template.render(self.write([Message("user", "Hello")], 0), tools, False)
        except TemplateRefused:
            return ""


def squeeze(text: str) -> str:
    """The text without white space: trimming and padding do not count as rewriting."""
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
