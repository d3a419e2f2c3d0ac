"""Compares what a template makes of a reply with the reply itself: no mark may be doubled or lost.

Each form of a reply (text, thinking, calls) that the template writes is read back as if a model had sampled it, twice in one
conversation, and rendered again. If the marks of the second rendering differ, the form is refused with `TemplateError` when
a chain needs it. Marks that the template itself leaves out of earlier replies (old thinking) are missing in both renderings.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ..errors import RolloutError, TemplateError
from ..types import Message
from .template import TemplateRefused
from .template_dialect import Dialect
from .template_marks import ANSWER, CALL, NEXT, PROBE_TOOLS, RESULT, THOUGHT, TOOL, USER, VALUE, MarkFinder, Units
from .template_tokens import Codec

Form = tuple[bool, bool, bool]  # with a thought, with visible text, with calls
_FORMS: tuple[Form, ...] = tuple((t, s, c) for c in (False, True) for t in (False, True) for s in (True, False) if s or c)
_MAX_SEARCHED = 50_000  # characters at the end of a prompt


class TemplateGuard:
    """Knows the forms of replies whose marks a template doubles or loses."""

    def __init__(self, dialect: Dialect, finder: MarkFinder) -> None:
        self._dialect, self._finder = dialect, finder
        self._marks = dialect.marks
        self._problems = {form: problem for form in _FORMS if (problem := self._problem(form))}

    def check(self, reply: Message, answered: bool) -> None:
        """Raises TemplateError if the template cannot show a reply of this form again. `answered`: a tool message follows."""
        if self._problems:
            parts, calls = self._dialect.read(reply)
            calls = calls or (answered and bool(reply.tool_calls) and all(call.error is None for call in reply.tool_calls))
            problem = self._problems.get((parts.thinking is not None, bool(parts.content.strip()), calls))
            if problem:
                raise TemplateError(_sentence(problem))

    def check_restart(self, text: str, reply: Message) -> None:
        """Compares the newest reply with a new prompt that shows it.

        Raises RolloutError if a mark with which the reply begins or ends stands twice in a row in the prompt, and once in the
        reply. One chain ends, not the run, because a malformed reply may be the cause.
        """
        units = self._finder.units
        content = reply.content.strip()
        edges = {edge for edge in (*units.of(content[:200])[:1], *units.of(content[-200:])[-1:]) if units.is_mark(edge)}
        for mark in edges:
            twice = re.compile(re.escape(mark) + r"\s*" + re.escape(mark))
            if twice.search(text, max(0, len(text) - _MAX_SEARCHED)) and not twice.search(content):
                raise RolloutError(_sentence(f"{mark!r} stands twice in a row where the reply has it once"))

    def _problem(self, form: Form) -> str | None:
        thought, said, calls = form
        finder, template = self._finder, self._dialect.template
        sampled = self._sampled(thought, said, calls)
        entry = finder.probes.entry(thought, said, int(calls))
        if sampled is None:
            return None
        if calls:
            after = [Message("tool", RESULT, name=TOOL, tool_call_id=CALL.id)]
        else:
            after = [Message("user", NEXT)]
        made = (CALL,) if calls else ()
        # The messages after a reply are linked to its calls: `direct` takes them from a reply with nothing but the calls.
        sent, linked = (
            self._dialect.write([Message("user", USER), *(replace(message) for message in [reply, *after] * 2)], 0)
            for reply in (Message("assistant", sampled, made), Message("assistant", "" if calls else ANSWER, made))
        )
        direct = [entry if message["role"] == "assistant" else message for message in linked]
        tools = PROBE_TOOLS if calls else None
        try:
            wanted = template.render(direct, tools, True)
            shown = template.render(sent, tools, True)
        except TemplateRefused:
            return None
        return self._difference(wanted, shown)

    def _sampled(self, thought: bool, said: bool, calls: bool) -> str | None:
        """What a model samples for a reply of this form: the template's text after the prompt, up to the end of turn."""
        probes = self._finder.probes
        text = probes.reply(thought, said, int(calls))
        words = [word for word in (THOUGHT, ANSWER, VALUE) if text and word in text]
        if text is None or not words or (calls and VALUE not in words):
            return None
        prompt = probes.prompt(True, tools=calls)
        text = text[len(prompt) :] if prompt and text.startswith(prompt) else text.removeprefix(self._finder.base)
        if sorted(words, key=text.find) != words:
            return None  # The template moves the visible text behind the calls, where no model writes it.
        behind = text.rfind(words[-1]) + len(words[-1])
        end = self._marks.ends[calls]
        at = text.find(end, behind) if end else -1 if calls else behind
        return text[:at] if at >= 0 else text.rstrip()

    def _difference(self, wanted: str, shown: str) -> str | None:
        units = self._finder.units
        right, seen = (Counter(unit for unit in units.of(text) if units.is_mark(unit)) for text in (wanted, shown))
        doubled, lost = list((seen - right).elements()), list((right - seen).elements())
        if not doubled and not lost:
            return None
        return "; ".join(
            f"{names[0]!r} is {what} when the reply is rendered again"
            for names, what in ((doubled, "doubled"), (lost, "lost"))
            if names
        )


def _sentence(problem: str) -> str:
    return (
        f"the chat template does not show this kind of reply as the model wrote it: {problem}. Give another template with "
        "chat_template=, or variables with template_args= (such as enable_thinking=False) under which replies have another form"
    )


def end_of_turn(dialect: Dialect, codec: Codec) -> list[int]:
    """The ids of the tokens that end a plain reply and a reply with a call."""
    return list(dict.fromkeys(codec.control[mark] for mark in dialect.marks.ends if mark))


def turn_marks(dialect: Dialect, codec: Codec, stops: Iterable[str]) -> list[str]:
    """The special tokens that begin and end turns, which a reply must not contain. Marks of its parts are allowed."""
    marks = set(stops)
    for messages in ([Message("user", "a")], [Message("system", "a"), Message("user", "a")]):
        try:
            text = dialect.render(messages, None, True, 0)
        except TemplateRefused:
            continue
        marks |= {token for token in codec.special if token in text}
    allowed = "\0".join(dialect.marks.in_replies)
    return [mark for mark in marks if len(mark) > 1 and mark not in allowed]


def foreign_marks(dialect: Dialect) -> tuple[str, ...]:
    """The texts with which the template begins a user's turn or a result, each as long as no rendered reply has it.

    <|im_start|>user\\n<tool_response>     ->  <|im_start|>user  and  <tool_response>
    <|start_header_id|>ipython<|end...      ->  <|start_header_id|>ipython
    """
    probes, units, end = dialect.finder.probes, dialect.finder.units, dialect.marks.ends[0]
    forms = [probes.reply(*form[:2], int(form[2])) or "" for form in _FORMS]
    later = probes.reply(False, True, 0, (Message("user", NEXT),)) or ""
    opening = later.partition(ANSWER)[2].partition(NEXT)[0]
    opening = (opening.partition(end)[2] if end else "").strip() or opening  # the user's turn may itself end the reply
    replies, marks = "\0".join([*forms, probes.prompt(True)]), []
    for text in (opening, *(before for before, _ in dialect.marks.results)):
        distinctive = _distinctive(units, text.strip(), replies)
        marks += distinctive or [line for line in (text.strip(),) if len(line) > 2 and line not in replies]
    return tuple(dict.fromkeys(marks))


def _distinctive(units: Units, text: str, others: str) -> list[str]:
    """The marks in `text`, each with the words after it on its line that are needed for a text that `others` does not have."""
    parts, marks = units.of(text), []
    for start, part in enumerate(parts):
        end = start + 1
        while units.is_mark(part) and "".join(parts[start:end]) in others and end < len(parts):
            if units.is_mark(parts[end]) or "\n" in parts[end]:
                break
            end += 1
        if units.is_mark(part) and (mark := "".join(parts[start:end]).rstrip()) not in others:
            marks.append(mark)
    return marks
