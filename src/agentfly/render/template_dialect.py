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
from typing import Any

from ..types import Message, ToolCall
from .template import ChatTemplate, TemplateRefused
from .template_marks import PROBE_TOOLS, MarkFinder, Marks
from .template_reply import Parts, ReplySplitter
from .template_tokens import CUT, Codec

Tools = Sequence[Mapping[str, Any]] | None
# 0 as asked; 1 calls as text; 2 tools and later system messages as user messages; 3 same roles joined; 4 no marks in replies
NUM_MANNERS = 5
_MAX_READ = 256  # size limit of the cache of replies that were read


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
    one_text: bool = False  # thinking or visible text before a call, not both
    calls_alone: bool = False  # a call is shown only without visible text
    joins: bool = False  # never two messages of the same role in a row


class Dialect:
    """One template and its format."""

    def __init__(self, template: ChatTemplate, codec: Codec) -> None:
        self.template = template
        self._codec = codec
        self.format = TemplateFormat()
        self.marks = Marks()
        self._reader = ReplySplitter(self.marks)
        self._read: dict[int, tuple[Message, Parts, bool]] = {}
        self._ask()
        self.finder = MarkFinder(self, codec.control)
        self.marks = self.finder.find()
        self._reader = ReplySplitter(self.marks)
        self._read.clear()
        self._ask_thinking()

    def read(self, message: Message) -> tuple[Parts, bool]:
        """The parts of a reply, and whether its calls are passed as structured calls."""
        cached = self._read.get(id(message))
        if cached is None or cached[0] is not message:
            if len(self._read) >= _MAX_READ:
                self._read.clear()
            cached = self._read[id(message)] = message, *self._reader.read(message, self.format.calls)
        return cached[1], cached[2]

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
        called = False  # whether the last reply has structured calls
        for message in messages:
            if message.role == "assistant":
                if manner >= 4:
                    content = self.text_content(self._without_marks(message.content))
                    entry, open_calls = {"role": "assistant", "content": content}, []
                else:
                    entry, open_calls = self._write_reply(message)
                called = bool(open_calls)
            else:
                entry = {"role": message.role, "content": self.text_content(self._codec.guard(message.content))}
                if message.role == "tool" and habits.tool_needs_call and not called:
                    entry["role"] = "user"  # The call is plain text, so its result is, too.
                elif message.role == "tool":
                    self._link(entry, message, open_calls)
                elif message.name:
                    entry["name"] = self._codec.guard(message.name)
            written.append(entry)
        return written

    def _write_reply(self, message: Message) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        guard = self._codec.guard_reply
        parts, structured = self.read(message)
        apart = parts.wrapped or (parts.thinking is not None and self.format.thinking_field)
        thinking, content = (parts.thinking, parts.content) if apart else (None, parts.head)
        if structured and thinking and content and self.format.one_text:
            thinking, content = f"{thinking}\n{content}", ""
        if structured and self.format.calls_alone:
            content = ""
        entry: dict[str, Any] = {"role": "assistant", "content": guard(content)}
        if thinking is not None:
            entry |= dict.fromkeys(self.marks.fields, guard(thinking))
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
        arguments: object = self._codec.guard_data(call.arguments)
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

    def _ask_calls(self, user: Message) -> None:
        call = ToolCall("zqtool", {"x": "zqvalue"}, "zqd00000q")
        # Ids of another length show whether the template insists on nine characters, or on so many at least.
        short, long = (replace(call, id=name) for name in ("zqd_0", "zqd_0000000000q"))
        result = Message("tool", "zqresult", name="zqtool", tool_call_id=call.id)
        choices = [(text, none, nine) for nine in (False, True) for text in (False, True) for none in (False, True)]
        for text, none, nine in choices:
            self.format = replace(self.format, arguments_text=text, empty_is_none=none, nine_ids=nine)
            replies = [Message("assistant", "", (each,)) for each in (long, short)]
            if all(self._shows([user, reply], ["zqtool", "zqvalue"], PROBE_TOOLS) for reply in replies):
                break
        else:
            self.format = replace(self.format, arguments_text=False, empty_is_none=False, nine_ids=False, calls=False)
        called = Message("assistant", "", (call,)) if self.format.calls else Message("assistant", "zqreply")
        if not self._shows([user, called, replace(result, tool_call_id=long.id)], ["zqresult"], PROBE_TOOLS):
            self.format = replace(self.format, nine_ids=self.format.calls)
            self._try(tool_role=False, shows=[user, called, result], words=["zqresult"], tools=PROBE_TOOLS)
        if not (self.format.tool_role and self.format.calls):
            return
        frames = [self._frame([user, reply, result]) for reply in (called, Message("assistant", "zqreply"))]
        self.format = replace(self.format, tool_needs_call=frames[0] != frames[1])

    def _frame(self, turn: list[Message]) -> tuple[str, str] | None:
        """The text around the second of two results, up to the nearest words; None if the template does not show it."""
        user, reply, result = turn
        again = replace(result, content="zqsecond")
        try:
            written = self.write([user, reply, result, reply, again], 0)
            text = self.template.render(written, PROBE_TOOLS, True)
        except TemplateRefused:
            return None
        before, separator, after = text.partition("zqsecond")
        mark = max(before.rfind("zqreply"), before.rfind("zqvalue"))
        return (before[mark:].rpartition(">")[0][-40:], after) if separator else None

    def _ask_thinking(self) -> None:
        """Chooses the form of thinking (in the content, or a separate field) that is rendered as sampled in more places."""
        probes = self.finder.probes
        refused = probes.reply(True, True, 1) is None and probes.reply(True, False, 1) is not None
        alone = "zqvalue" not in (probes.reply(False, True, 1) or "zqvalue")
        self.format = replace(self.format, one_text=refused, calls_alone=alone and self.format.calls)
        if not self.marks.thinking:
            return
        opening, closing = self.marks.thinking[0]
        response = self.marks.responses[0][0] if self.marks.responses else ""
        user = Message("user", "zquser")
        thought = f"\nzqthought\n{closing}{self.marks.header}"
        turns: list[tuple[str, tuple[ToolCall, ...], Message]] = [
            (f"{thought}{response}\n\nzqanswer", (), replace(user, content="zqnext"))
        ]
        if self.format.calls and self.format.tool_role:
            call = ToolCall("zqtool", {"x": "zqvalue"}, "zqd00000q")
            turns.append((thought, (call,), Message("tool", "zqresult", tool_call_id=call.id)))

        def kept(field: bool) -> tuple[int, int, int]:
            """How often the thought stays as sampled, its closing mark is doubled (negative), and the thought is shown."""
            self.format = replace(self.format, thinking_field=field)
            try:
                prompt = squeeze(self.template.render(self.write([user], 0), PROBE_TOOLS, True))
            except TemplateRefused:
                return 0, 0, 0
            head = "" if prompt.endswith(squeeze(opening)) else opening
            count = doubled = shows = 0
            for text, calls, after in turns:
                reply = Message("assistant", head + text, calls)
                for rest, generate in (((after,), True), ((), False)):
                    try:
                        shown = self.template.render(self.write([user, reply, *rest], 0), PROBE_TOOLS, generate)
                    except TemplateRefused:
                        continue
                    count += squeeze(shown).startswith(prompt + squeeze(head + text))
                    shows += "zqthought" in shown
                    doubled += _until(shown.partition("zquser")[2], "zqanswer", "zqvalue").count(closing) > 1
            return count, -doubled, shows

        inside, apart = kept(False), kept(True)
        framed = bool(self.marks.fields and (self.marks.responses or self.marks.header))
        self.format = replace(self.format, thinking_field=apart > inside or (apart == inside and framed))

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


def _until(text: str, *words: str) -> str:
    for word in words:
        text = text.partition(word)[0]
    return text


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
