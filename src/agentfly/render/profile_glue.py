"""What follows a reply, as glue with holes: found out once for a shape, then filled in without the template.

In: a shape of turn and the history before it. Out: a `Profile` that says whether the template rewrites history there, and
otherwise the text between the end of the reply and the next one, with holes for the new contents:

    "\\n<|im_start|>user\\n" + content + "<|im_end|>\\n<|im_start|>assistant\\n"

History counts as rewritten unless what the template shows after the new messages begins, white space aside, with the old
prompt and the reply's own text, and goes on with the end-of-turn token that was sampled. How a template would write a
*call* does not count: the sampled ids are kept. Holes are trusted only after nasty contents have come through unchanged, or
changed in a way that is known (trimmed, escaped as JSON); and a profile only after a history twice as long has given the
same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..types import Message
from .profile import History, TurnShape, is_content, is_id
from .template import TemplateRefused
from .template_dialect import NUM_MANNERS, Dialect, Tools, squeeze
from .template_reply import THINKING

_STAND_IN = re.compile(r"(zq[cnm]\d+[cnm]qz|zq[de]\d{5}q)")

_NASTY = (
    ' \n\t{"a": [1, \'b\'], "c\\d": "é世界🙂"} <b>&amp;</b> {{ x }} {% y %} {# z #} \r\n\n end. \n ',
    "\n\nlines\n\nand lines\n\n",
    "0",
    '"quoted" \\n',
    "long " * 2000 + "end",
)

_CHANGES: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: text.strip("\n"),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """One look: `restarts`, or the text after the reply and how far behind the reply's last word it begins."""

    restarts: bool
    tail: str = ""
    gap: int = 0
    whole: bool = True  # every new content shows


@dataclass(frozen=True, slots=True)
class Profile:
    """All that is known about a shape.

    `glue` are the pieces around the holes (`holes` names what goes between them, and how it is changed); None where the
    template must be asked each time: with a made-up history (`counts` false), or, where it counts messages, with the real one.
    """

    manner: int
    turn: TurnShape
    restarts: bool = False
    gap: int = 0
    counts: bool = False
    glue: tuple[str, ...] | None = None
    holes: tuple[tuple[str, Callable[[str], str]], ...] = ()
    blank: tuple[str, ...] = ()  # stand-ins of contents that are empty
    names: tuple[str, ...] = ()  # stand-ins of names and ids

    def fill(self, values: Mapping[str, str]) -> str:
        assert self.glue is not None
        text = [self.glue[0]]
        for (word, change), piece in zip(self.holes, self.glue[1:], strict=True):
            text += (change(values[word]), piece)
        return "".join(text)


class Prober:
    """Asks a template about shapes. `stops` are the texts of the end-of-turn tokens."""

    def __init__(self, dialect: Dialect, stops: Sequence[str], special: Iterable[str]) -> None:
        self.dialect = dialect
        self._special = tuple(special)
        self._stops = re.compile("|".join(map(re.escape, sorted(stops, key=len, reverse=True))) or r"(?!)")

    def profile(self, history: History, turn: TurnShape, plain: TurnShape, stop: str | None, tools: Tools) -> Profile:
        """The first manner that is not refused and shows every new content, or `TemplateRefused`.

        `plain` is the same turn where the calls are nothing but the reply's text, for the manners that write it so.
        """
        reasons: list[TemplateRefused] = []
        found: list[Profile] = []
        for manner in range(NUM_MANNERS):
            try:
                profile, whole = self._in_manner(manner, history, plain if manner else turn, stop, tools)
            except TemplateRefused as refused:
                reasons.append(refused)
                continue
            if whole:
                return profile
            found.append(profile)
        if found:
            return found[0]
        raise reasons[0]

    def _in_manner(
        self, manner: int, history: History, turn: TurnShape, stop: str | None, tools: Tools
    ) -> tuple[Profile, bool]:
        seen = self.look(manner, history.messages(), turn, {}, stop, tools)
        if history.units:
            longer = self.look(manner, history.messages(2), turn, {}, stop, tools)
            if longer != seen:
                return Profile(manner, turn, counts=True), seen.whole
        profile = Profile(manner, turn, restarts=seen.restarts, gap=seen.gap)
        if not seen.restarts:
            profile = self._with_glue(profile, seen.tail, history.messages(), tools)
        return profile, seen.whole

    def look(
        self, manner: int, history: list[Message], turn: TurnShape, values: Mapping[str, str], stop: str | None, tools: Tools
    ) -> TemplateProbe:
        """Render a prompt, and what becomes of it after the reply and the new messages."""
        messages = turn.make(values)
        old = self.dialect.render(history, tools, True, manner)
        text = self.dialect.render([*history, *messages], tools, True, manner)
        contents = [word for word, shape in zip(turn.content_words(), turn.new, strict=True) if "" in shape.skeleton]
        whole = bool(values) or all(word in text for word in contents)
        if not self._keeps(text, old + messages[0].content, turn):
            return TemplateProbe(True, whole=whole)
        end = reply_end(text, old, turn)
        if end is None:
            return TemplateProbe(True, whole=whole)
        start = self._tail_start(text, end, stop, bool(turn.reply.num_calls))
        if start is None:
            return TemplateProbe(True, whole=whole)
        return TemplateProbe(False, text[start:], start - end, whole)

    def _keeps(self, text: str, old: str, turn: TurnShape) -> bool:
        """Whether a text begins with the old one, white space aside, and slips no thinking in between that and the calls."""
        shown, kept = squeeze(text), squeeze(old)
        if not shown.startswith(kept):
            return False
        calls = [at for word in turn.reply_words()[-turn.reply.num_calls :] if (at := shown.find(word, len(kept))) >= 0]
        added = shown[len(kept) : min(calls)] if turn.reply.num_calls and calls else ""
        return not any(closing in added for _, closing in THINKING)

    def text(self, profile: Profile, history: list[Message], values: Mapping[str, str], tools: Tools) -> str:
        """What follows the reply, with real contents, from the template itself."""
        turn = profile.turn
        text = self.dialect.render([*history, *turn.make(values)], tools, True, profile.manner)
        old = "" if turn.reply_words() else self.dialect.render(history, tools, True, profile.manner)
        end = reply_end(text, old, turn)
        if end is None:
            raise TemplateRefused("the reply cannot be found again in the rendered text")
        return text[end + profile.gap :]

    def _tail_start(self, text: str, end: int, stop: str | None, calls: bool) -> int | None:
        """Where the extension begins: behind the sampled end of turn, or, where none was sampled, right behind the reply."""
        if stop is None and not calls:
            return end
        found = self._stops.search(text, end)
        if found is None:
            return None
        between = text[end : found.start()]
        # A plain reply is followed by its end of turn, but for closing marks; a call is closed in some way. Neither goes on
        # into a new message, whose end of turn this would be.
        if "zqc" in between or (not calls and without(between, self._special).strip()):
            return None
        if stop is None:
            return found.start()
        return found.end() if found.group() == stop else None

    def _with_glue(self, profile: Profile, tail: str, history: list[Message], tools: Tools) -> Profile:
        """Holes for the stand-ins, if the template can be trusted with them."""
        new = profile.turn.new
        # A content that holds a mark the template looks for may be treated apart.
        if any(shape.skeleton not in ((), ("",)) for shape in new):
            return profile
        pieces = _STAND_IN.split(tail)
        glue, words = tuple(pieces[::2]), pieces[1::2]
        names = {word: "abcDEF123" if is_id(word) else "get_weather-2" for word in words if not is_content(word)}
        stay = {word: word for word in words} | names
        changes: dict[str, Callable[[str], str]] = dict.fromkeys(words, _CHANGES[0])
        contents = [(word, shape.role) for word, shape in zip(profile.turn.content_words(), new, strict=True) if shape.skeleton]
        for role in {role for _, role in contents}:
            trials = [names | {word: nasty for word, mine in contents if mine == role} for nasty in _NASTY]
            shown = [self.text(profile, history, trial, tools) for trial in trials]
            for change in _CHANGES:
                changes |= {word: change for word, mine in contents if mine == role}
                filled = replace(profile, glue=glue, holes=tuple([(word, changes[word]) for word in words]))
                if all(text == filled.fill(stay | trial) for text, trial in zip(shown, trials, strict=True)):
                    break
            else:
                return profile
        filled = replace(
            profile,
            glue=glue,
            holes=tuple([(word, changes[word]) for word in words]),
            blank=tuple(word for word, shape in zip(profile.turn.content_words(), new, strict=True) if not shape.skeleton),
            names=tuple(names),
        )
        together = stay | {word: f"{_NASTY[0]}{i}" for i, (word, _) in enumerate(contents)}
        return filled if self.text(profile, history, together, tools) == filled.fill(together) else profile


def reply_end(text: str, old: str, turn: TurnShape) -> int | None:
    """Where the made-up reply ends in a rendered text; one without words ends where the old prompt does."""
    words = turn.reply_words()
    if words:
        ends = [at + len(word) for word in words if (at := text.rfind(word)) >= 0]
        end = max(ends, default=-1)
    else:
        end = len(old) if text.startswith(old) else -1
    if end < 0:
        return None
    skeleton = turn.reply.skeleton
    last = max([i for i, piece in enumerate(skeleton) if not piece], default=-1)
    for mark in skeleton[last + 1 :] if not turn.reply.num_calls else ():
        at = text.find(mark, end)
        if at >= 0 and not text[end:at].strip():
            end = at + len(mark)
    return end


def without(text: str, marks: Iterable[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text
