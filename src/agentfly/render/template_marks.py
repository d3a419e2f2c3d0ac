"""The marks of one chat template, found by rendering placeholder replies and comparing what surrounds their words.

    reply with a thought     ...<|START_THINKING|>zqthought<|END_THINKING|><|START_RESPONSE|>zqanswer<|END_RESPONSE|>...
    reply without one        ...<|START_RESPONSE|>zqanswer<|END_RESPONSE|>...
    reply with a call        ...<|START_ACTION|>[{"tool_name": "zqtool", "parameters": {"x": "zqvalue"}}]<|END_ACTION|>...

What all of them begin with is the header of a reply. The rest of the text before, between and after the words are the marks.
No mark of any model family is written down here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from ..types import Message, ToolCall
from .template import ChatTemplate, TemplateRefused

USER, NEXT, THOUGHT, ANSWER, TOOL, VALUE, RESULT = "zquser", "zqnext", "zqthought", "zqanswer", "zqtool", "zqvalue", "zqresult"
CALL = ToolCall(TOOL, {"x": VALUE}, "zqd00000q")

PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "X."}}, "required": ["x"]},
        },
    }
]
# A tag (<think>, [/THINK], <invoke), white space, a word, or a single character.
_UNIT = r"<[^<>\s\"'{}]{1,60}>|<[/|]?[A-Za-z_][\w:.-]*=?|\[/?[A-Z_]{3,40}\]|\s+|\w+|."
_WORD = re.compile(r"[^\W\d_]{3,}")


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a template.

    thinking    the texts before and after a thought, such as ("<think>", "</think>"); empty if the template knows none
    responses   the texts before and after the visible text of a reply; most templates have none
    calls       texts that begin a call, such as "<tool_call>"
    results     the texts before and after the result of a call
    header      the text that begins another part of the same reply ("<|start|>assistant"), "" if there is none
    named_calls texts directly before the name of a tool where a call begins with no mark ("to=functions."); "" if with the name
    ends        the texts of the end of a plain reply and of a reply with calls; "" if the template writes none
    fields      the keys of a message in which the template looks for the thought
    opened      whether the prompt for a reply ends with the opening of a thought, so that a reply begins inside the thought
    """

    thinking: tuple[tuple[str, str], ...] = ()
    responses: tuple[tuple[str, str], ...] = ()
    calls: tuple[str, ...] = ()
    results: tuple[tuple[str, str], ...] = ()
    header: str = ""
    named_calls: tuple[str, ...] = ()
    ends: tuple[str, str] = ("", "")
    fields: tuple[str, ...] = ()
    opened: bool = False

    @property
    def in_replies(self) -> tuple[str, ...]:
        """All marks that a reply may contain, the longest first."""
        pairs = [text.strip() for pair in (*self.thinking, *self.responses) for text in pair]
        return tuple(sorted({text for text in (*pairs, *self.calls, self.header) if _is_mark(text)}, key=len, reverse=True))

    def merged(self, other: Marks) -> Marks:
        """The marks of two templates of one model; those of `self` come first."""

        def both(name: str) -> Any:
            return tuple(dict.fromkeys((*getattr(self, name), *getattr(other, name))))

        return replace(
            self,
            **{name: both(name) for name in ("thinking", "responses", "calls", "named_calls", "results", "fields")},
        )


class Writer(Protocol):
    """Writes messages as the template expects them (`Dialect`)."""

    template: ChatTemplate

    def write(self, messages: Sequence[Message], manner: int) -> list[dict[str, Any]]: ...

    def text_content(self, text: str) -> Any: ...


class Units:
    """Splits text into control tokens, tags, words and single characters, so that no comparison ends inside a mark."""

    def __init__(self, control: Iterable[str]) -> None:
        self.control = frozenset(control)
        tokens = "|".join(re.escape(token) for token in sorted(self.control, key=len, reverse=True))
        self._unit = re.compile(f"{tokens}|{_UNIT}" if tokens else _UNIT, re.DOTALL)

    def of(self, text: str) -> list[str]:
        return self._unit.findall(text)

    def is_mark(self, unit: str) -> bool:
        """Whether a unit is a control token or a tag."""
        return unit in self.control or (len(unit) > 2 and unit[0] in "<[")

    def common(self, first: str, second: str) -> str:
        """The longest common beginning of two texts that ends with a whole unit in both."""
        return "".join(_shared(self.of(first), self.of(second)))

    def common_end(self, first: str, second: str) -> str:
        return "".join(reversed(_shared(self.of(first)[::-1], self.of(second)[::-1])))

    def tokens(self, text: str) -> list[str]:
        """The control tokens of a text in order."""
        return [unit for unit in self.of(text) if unit in self.control]

    def before(self, text: str, stops: Iterable[str]) -> str:
        """The text before the first of these units, unless it begins with it."""
        stops = frozenset(stops)
        units_before: list[str] = []
        for unit in self.of(text):
            if unit in stops and "".join(units_before).strip():
                break
            units_before.append(unit)
        return "".join(units_before)


def _shared(first: Sequence[str], second: Sequence[str]) -> list[str]:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return list(first[:count])


def _is_mark(text: str) -> bool:
    """Whether a text is distinctive enough to be searched for in replies."""
    return len(text) >= 3 and not text.isalnum()


class Probes:
    """Renderings of a user message and one placeholder reply in every form; each is the text after the user's word."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        # Some templates show a thought only in a later turn. If this one does, every reply is rendered in a later turn.
        self._earlier: tuple[Message, ...] = ()
        self.fields = self._find_fields()
        if not self.fields:
            self._earlier = (Message("user", "zqfirst"), Message("assistant", "zqreply"))
            self.fields = self._find_fields()
            self._earlier = self._earlier if self.fields else ()

    def _find_fields(self) -> tuple[str, ...]:
        """The keys in which the template looks for a thought. More than one only if no single key serves every reply."""
        names = sorted(self.writer.template.message_keys, key=lambda name: (name != "reasoning_content", name))
        keys: list[str] = []
        for num_calls in (0, 1):
            if any(THOUGHT in (self.reply(True, said, num_calls, fields=keys) or "") for said in (True, False)):
                continue
            for name in names:
                if any(THOUGHT in (self.reply(True, said, num_calls, fields=[name]) or "") for said in (True, False)):
                    keys.append(name)
                    break
        return tuple(keys)

    def entry(self, thought: bool, said: bool, num_calls: int, fields: Iterable[str] | None = None) -> dict[str, Any]:
        """One reply with fields for its parts, as its author would pass it to `apply_chat_template`."""
        calls = tuple(replace(CALL, id=f"zqd{i:05d}q") for i in range(num_calls))
        entry = self.writer.write([Message("user", USER), Message("assistant", "", calls)], 0)[-1]
        if said:
            entry["content"] = self.writer.text_content(ANSWER)
        if thought:
            entry |= dict.fromkeys(self.fields if fields is None else fields, THOUGHT)
        return entry

    def reply(
        self,
        thought: bool,
        said: bool,
        num_calls: int,
        after: Sequence[Message] = (),
        generate: bool = False,
        fields: Iterable[str] | None = None,
    ) -> str | None:
        """The rendering of a reply with these parts, or None if the template refuses it."""
        user = Message("user", USER)
        calls = tuple(replace(CALL, id=f"zqd{i:05d}q") for i in range(num_calls))
        # The messages after the reply are written behind a reply with the same calls, for their links to these calls.
        reply = Message("assistant", "" if calls else ANSWER, calls)
        written = self.writer.write([*self._earlier, user, reply, *after], 0)
        written[len(self._earlier) + 1] = self.entry(thought, said, num_calls, fields)
        return self.render(written, bool(num_calls), generate)

    def content(self, text: str, after: Sequence[Message] = ()) -> str | None:
        """The rendering of a reply with this content."""
        written = self.writer.write([*self._earlier, Message("user", USER), Message("assistant", ANSWER), *after], 0)
        written[len(self._earlier) + 1]["content"] = self.writer.text_content(text)
        return self.render(written, False, bool(after))

    def prompt(self, generate: bool, tools: bool = False) -> str:
        return self.render(self.writer.write([*self._earlier, Message("user", USER)], 0), tools, generate) or ""

    def render(self, written: Sequence[Mapping[str, Any]], tools: bool, generate: bool) -> str | None:
        try:
            text = self.writer.template.render(written, PROBE_TOOLS if tools else None, generate)
        except TemplateRefused:
            return None
        return text.rpartition(USER)[2] if USER in text else None


@dataclass(frozen=True, slots=True)
class _Form:
    """One rendered reply: the text before its first word, and the words with the text after each of them."""

    lead: str
    words: tuple[str, ...]
    gaps: tuple[str, ...]

    def gap(self, word: str, until: str = "") -> str | None:
        """The text after a word up to the next one, which must be `until` if that is given."""
        for at, name in enumerate(self.words):
            if name == word and (not until or self.words[at + 1 : at + 2] == (until,)):
                return self.gaps[at]
        return None


_WORDS = re.compile(f"({THOUGHT}|{ANSWER}|{TOOL}|{VALUE}|{RESULT}|{NEXT})")


def _form(text: str | None, *needed: str) -> _Form | None:
    """The parts of a rendering, or None if one of the needed words is missing in it."""
    if text is None or any(word not in text for word in needed):
        return None
    pieces = _WORDS.split(text)
    return _Form(pieces[0], tuple(pieces[1::2]), tuple(pieces[2::2]))


class MarkFinder:
    """Finds the marks of a template."""

    def __init__(self, writer: Writer, control: Iterable[str]) -> None:
        self.units = Units(control)
        self.probes = Probes(writer)
        self._literals = writer.template.literals
        probe = self.probes.reply
        self._plain = _form(probe(False, True, 0), ANSWER)
        self._thinks = _form(probe(True, True, 0), THOUGHT, ANSWER)
        self._calls = _form(probe(False, False, 1), VALUE)
        self._says_calls = _form(probe(False, True, 1), ANSWER, VALUE)
        self._thinks_calls = _form(probe(True, False, 1), THOUGHT, VALUE)
        self._openers = self._find_openers()
        self.base = self._find_base()

    def find(self) -> Marks:
        thinking, header = self._thinking()
        if not thinking:
            thinking = self._inline_thinking() or self._empty_thinking()
        closing = thinking[0][1] if thinking else ""
        response = self._response_opening(closing)
        if header and response and header.endswith(response.strip()):
            header = header.removesuffix(response.strip()).rstrip()
        ends = self._ends()
        closings = self._response_closings(ends[0])
        header = header if _is_mark(header) else ""
        openings = self._call_openings(closing, header)
        return Marks(
            thinking=thinking,
            responses=tuple((response, text) for text in closings) if response.strip() or any(closings) else (),
            calls=self._call_marks(openings),
            named_calls=self._named_calls(openings),
            results=self._results(),
            header=header,
            ends=ends,
            fields=self.probes.fields,
            opened=bool(thinking) and self.probes.prompt(True).rstrip().endswith(thinking[0][0]),
        )

    # ---- headers ----

    def _find_openers(self) -> frozenset[str]:
        """The control tokens with which conversations begin, before any text: they begin a turn and never end one."""
        tokens: list[str] = []
        for messages in ([Message("user", USER)], [Message("system", "zqsystem"), Message("user", USER)]):
            try:
                written = self.probes.writer.write(messages, 0)
                units = self.units.of(self.probes.writer.template.render(written, None, True))
            except TemplateRefused:
                continue
            for unit in units:
                if unit not in self.units.control:
                    if unit.strip():
                        break
                    continue
                tokens.append(unit)
        return frozenset(tokens)

    def _find_base(self) -> str:
        """What every reply begins with: the end of the user message and the header of the reply."""
        forms = [form for form in (self._plain, self._thinks, self._calls, self._says_calls, self._thinks_calls) if form]
        texts = [form.lead for form in forms]
        prompt = self.probes.prompt(True)
        if prompt and prompt != self.probes.prompt(False):
            texts.append(prompt)
        base = texts[0] if texts else ""
        for text in texts[1:]:
            base = self.units.common(base, text)
        return base

    # ---- thinking ----

    def _thinking(self) -> tuple[tuple[tuple[str, str], ...], str]:
        """The marks of a thought that is passed in a field, and the header of the part after it."""
        form = self._thinks or self._thinks_calls
        if form is None:
            return (), ""
        behind = form.gap(THOUGHT) or ""
        opening = form.lead.removeprefix(self.base).strip()
        closing = self.units.before(behind, self._openers).strip()
        if not opening:
            # Every reply has marks of thinking, also one without a thought: the opening is the last mark before the thought.
            opening = self._paired_end(form.lead, closing)
        closing = self._paired_start(closing, opening)
        if not closing and self._plain is not None:
            closing = behind.removesuffix(self.units.common_end(behind, self._plain.lead)).strip()
        if not opening or not closing:
            return (), ""
        rest = behind.strip().removeprefix(closing).strip() if self._thinks else ""
        return ((opening, closing),), rest if any(unit in self._openers for unit in self.units.of(rest)) else ""

    def _paired_end(self, lead: str, closing: str) -> str:
        """The shortest ending of `lead` that begins with a mark and shares a word with `closing`, else its last mark."""
        units = self.units.of(lead)
        starts = [at for at, unit in enumerate(units) if self.units.is_mark(unit)]
        for at in reversed(starts):
            if _words(units[at:], self.units.of(closing)):
                return "".join(units[at:]).strip()
        return "".join(units[starts[-1] :]).strip() if starts else ""

    def _paired_start(self, behind: str, opening: str) -> str:
        """The shortest beginning of `behind` that shares a word with `opening`, else `behind` up to its second mark."""
        units = self.units.of(behind)
        marks = [at for at, unit in enumerate(units) if self.units.is_mark(unit)]
        for at in range(1, len(units) + 1):
            if _words(units[:at], self.units.of(opening)):
                # Punctuation that belongs to the mark: <|close|>think<|sep|>.
                following = [unit for unit in units[at:] if unit.strip()]
                if following and following[0] in opening and self.units.is_mark(following[0]):
                    at = units.index(following[0], at) + 1
                return "".join(units[:at]).strip()
        return "".join(units[: marks[1]] if len(marks) > 1 else units).strip()

    def _inline_thinking(self) -> tuple[tuple[str, str], ...]:
        """The marks that the template searches for in contents, and at which it drops or moves the text before them."""
        later = (Message("user", NEXT),)
        for closing in self._literals:
            if not self.units.is_mark(self.units.of(closing)[0]):
                continue
            texts = [self.probes.content(f"{THOUGHT}{closing}{ANSWER}", after) for after in (later, ())]
            if not any(text is not None and ANSWER in text and THOUGHT + closing not in text for text in texts):
                continue
            for opening in self._opening_candidates(closing):
                if _words(self.units.of(opening), self.units.of(closing)):
                    return ((opening, closing),)
        return ()

    def _empty_thinking(self) -> tuple[tuple[str, str], ...]:
        """The marks of an empty thought in front of every reply or prompt; what the template is given as a thought it drops."""
        for text in (self._plain.lead if self._plain else "", self.probes.prompt(True)):
            units = [unit for unit in self.units.of(text.removeprefix(self.base)) if unit.strip()]
            for opening, closing in pairwise(units):
                if self.units.is_mark(opening) and self.units.is_mark(closing) and _words([opening], [closing]):
                    return ((opening, closing),)
        return ()

    def _opening_candidates(self, closing: str) -> Iterator[str]:
        prompt = self.probes.prompt(True).rstrip()
        yield from (literal for literal in self._literals if literal != closing)
        if self._plain is not None:
            yield prompt.removeprefix(self.units.common(prompt, self._plain.lead)).strip()
        yield closing.replace("/", "", 1) if "/" in closing else ""

    # ---- visible text ----

    def _response_opening(self, closing: str) -> str:
        if self._plain is None:
            return ""
        lead = self._plain.lead.removeprefix(self.base)
        return (lead.rpartition(closing)[2] if closing else lead).lstrip()

    def _response_closings(self, end: str) -> tuple[str, ...]:
        """The texts after the visible text: up to the end of the turn and, if that is another one, up to a call."""
        text = self._behind_answer()
        shared = text.partition(end)[0] if end else self.units.common(text, self._until_next())
        closings = [self.units.before(shared, self._openers).strip()]
        gap = self._says_calls.gap(ANSWER, TOOL) if self._says_calls else None
        if gap is not None:
            closings.append(self.units.common(gap, text).strip())
        return tuple(dict.fromkeys(closings)) if any(closings) else ("",)

    def _behind_answer(self) -> str:
        return (self._plain.gap(ANSWER) or "") if self._plain else ""

    # ---- calls and results ----

    def _call_openings(self, closing: str, header: str) -> list[str]:
        """The texts before the name of the tool, without what belongs to the part of the reply before the call."""
        openings: list[str] = []
        if self._says_calls is not None and (gap := self._says_calls.gap(ANSWER, TOOL)) is not None:
            openings.append(gap.removeprefix(self.units.common(gap, self._behind_answer())))
        elif self._thinks_calls is not None and (gap := self._thinks_calls.gap(THOUGHT, TOOL)) is not None:
            openings.append(gap.strip().removeprefix(closing).strip().removeprefix(header))
        if self._calls is not None:
            lead = self._calls.lead.removeprefix(self.base)
            openings.append(lead.rpartition(closing)[2] if closing else lead)
        return openings

    def _call_marks(self, openings: Sequence[str]) -> tuple[str, ...]:
        form = self._says_calls or self._thinks_calls or self._calls
        if form is None or not openings:
            return ()
        opening = openings[0]
        for other in openings[1:]:
            # What stands before a call in one form only belongs to the text before it.
            opening = self.units.common_end(opening, other) or opening
        marks = self._distinctive(opening)
        if not any(self._has_mark(mark) for mark in marks):
            # The call begins with words; a mark may follow the name of the tool.
            at = form.words.index(TOOL)
            behind = self._distinctive("".join(form.gaps[at : form.words.index(VALUE)]))
            marks += [mark for mark in behind if self.units.is_mark(self.units.of(mark)[0])][:1]
        return tuple(dict.fromkeys(marks))

    def _named_calls(self, openings: Sequence[str]) -> tuple[str, ...]:
        leads = [opening.strip() for opening in openings if not self._has_mark(opening)]
        return tuple(dict.fromkeys(lead for lead in leads if not any(letter in "{[(\"'" for letter in lead)))

    def _has_mark(self, text: str) -> bool:
        return any(self.units.is_mark(unit) for unit in self.units.of(text))

    def _distinctive(self, opening: str) -> list[str]:
        """The marks of an opening, each with as many units after it as are needed for a text that no plain reply has."""
        forms = [form for form in (self._plain, self._thinks) if form is not None]
        others = [form.lead.removeprefix(self.base) + "\0" + "\0".join(form.gaps) for form in forms]
        units = self.units.of(opening.strip())
        marks: list[str] = []
        at = next((at for at, unit in enumerate(units) if self.units.is_mark(unit)), len(units))
        # Characters before the first mark are part of it: "function call<|role_sep|>".
        start = 0 if at < len(units) and units[0] not in "{[(\"'" else at
        while at < len(units):
            if self.units.is_mark(units[at]):
                end = at + 1
                while end < len(units) and any("".join(units[start:end]) in other for other in others):
                    end += 1
                text = "".join(units[start:end]).rstrip()
                if not any(text in other for other in others):
                    marks.append(text)
                    at = end - 1
            at += 1
            start = at
        return marks

    def _results(self) -> tuple[tuple[str, str], ...]:
        result = Message("tool", RESULT, name=TOOL, tool_call_id=CALL.id)
        form = None
        for after in ((result, Message("user", NEXT)), (result,)):
            form = form or _form(self.probes.reply(False, False, 1, after), VALUE, RESULT)
        if form is None:
            return ()
        before = (form.gap(VALUE) or "").strip()
        called = (self._calls.gap(VALUE) or "") if self._calls else ""
        opening = before.removeprefix(self.units.common(before, called.strip())).strip()
        closing = self.units.before((form.gap(RESULT) or "").strip(), self._openers).strip()
        return ((opening, closing),)

    # ---- ends ----

    def _ends(self) -> tuple[str, str]:
        """The control tokens that end a plain reply and a reply with a call."""
        inner = self._inner_tokens()
        plain = self._end(self._behind_answer(), self._until_next(), inner)
        if self._calls is None:
            return plain, plain
        twice = _form(self.probes.reply(False, False, 2), VALUE)
        if twice is not None:
            # A mark that closes each call, or stands between two of them, does not end the reply.
            ending = self.units.tokens(twice.gaps[-1])
            inner |= {token for token in ending if ending.count(token) > 1}
            inner |= {token for gap in twice.gaps[:-1] for token in self.units.tokens(gap)}
        result = Message("tool", RESULT, name=TOOL, tool_call_id=CALL.id)
        answered = _form(self.probes.reply(False, False, 1, (result,)), VALUE, RESULT)
        behind = (answered.gap(VALUE) or "") if answered else ""
        return plain, self._end(self._calls.gaps[-1], behind, inner)

    def _until_next(self) -> str:
        """The text between a plain reply and the next user message."""
        later = _form(self.probes.reply(False, True, 0, (Message("user", NEXT),)), ANSWER, NEXT)
        return (later.gap(ANSWER) or "") if later else ""

    def _inner_tokens(self) -> set[str]:
        """The control tokens between the parts of one reply: sampling goes on after them."""
        tokens: set[str] = set()
        for form in (self._thinks, self._says_calls, self._thinks_calls):
            if form is not None:
                first_value = form.words.index(VALUE) if VALUE in form.words else len(form.words) - 1
                tokens |= {token for gap in form.gaps[:first_value] for token in self.units.tokens(gap)}
        return tokens

    def _end(self, last: str, later: str, inner: Iterable[str]) -> str:
        """The end of a reply, from the text after the last message and the text between the reply and a later message."""
        inner = frozenset(inner)

        def ends(text: str) -> list[str]:
            tokens: list[str] = []
            for token in self.units.tokens(text):
                if token in self._openers:
                    break
                tokens.append(token)
            return [token for token in tokens if token not in inner]

        shared = ends(self.units.common(last, later))
        if shared:
            return shared[-1]
        own = ends(last)
        if own:
            return own[-1]
        # The template ends the reply with no mark, so the model ends it with the mark of the next turn.
        following = [token for token in self.units.tokens(later) if token not in inner]
        return following[0] if following else ""


def _words(first: Iterable[str], second: Iterable[str]) -> set[str]:
    """The words that two marks share, apart from units that are in both."""
    first, second = list(first), list(second)
    mine = {word.lower() for unit in first if unit not in second or unit.isalpha() for word in _WORD.findall(unit)}
    return mine & {word.lower() for unit in second if unit not in first or unit.isalpha() for word in _WORD.findall(unit)}
