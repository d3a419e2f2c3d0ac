"""The text between two replies, determined once per shape of turn and then filled in without the template.

A `Profile` says whether the template rewrites history at this turn and, if not, holds the text from the end of the reply to the
beginning of the next one, with holes for the new contents:

    "\\n<|im_start|>user\\n" + content + "<|im_end|>\\n<|im_start|>assistant\\n"

History is rewritten unless the new rendering begins, ignoring white space, with the old prompt and the text of the reply,
followed by the sampled end-of-turn token. How the template writes a *call* is ignored, because the sampled ids are kept. Holes
are used only if difficult contents come through unchanged or changed in a known way (trimmed, escaped as JSON), and a profile
only if a history of twice the length gives the same result.
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

_STAND_IN = re.compile(r"(zq[cnm]\d+[cnm]qz|zq[de]\d{5}q)")

DIFFICULT = (
    ' \n\t{"a": [1, \'b\'], "c\\d": "é世界🙂"} <b>&amp;</b> {{ x }} {% y %} {# z #} \r\n\n end. \n ',
    "\n\nlines\n\nand lines\n\n",
    "0",
    '"quoted" \\n',
    "long " * 2000 + "end",
)

CHANGES: tuple[Callable[[str], str], ...] = (
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
    """The result of one rendering: `restarts`, or the text after the reply and its distance from the last word of the reply."""

    restarts: bool
    tail: str = ""
    gap: int = 0
    whole: bool = True  # every new content shows


@dataclass(frozen=True, slots=True)
class Profile:
    """The result for one shape of turn.

    `glue` are the texts around the holes; `holes` names the value of each hole and how the template changes it. `glue` is None
    if the template must be rendered each time: with placeholders or, if it counts messages (`counts`), the real history.
    """

    manner: int
    turn: TurnShape
    restarts: bool = False
    gap: int = 0
    counts: bool = False
    glue: tuple[str, ...] | None = None
    holes: tuple[tuple[str, Callable[[str], str]], ...] = ()
    blank: tuple[str, ...] = ()  # placeholders of contents that are empty
    names: tuple[str, ...] = ()  # placeholders of names and ids
    # The place of the new message of each hole, if all holes are contents and none is blank: nothing else can vary.
    contents: tuple[tuple[str, int], ...] | None = None

    def fill(self, values: Mapping[str, str]) -> str:
        assert self.glue is not None
        text = [self.glue[0]]
        for (word, change), piece in zip(self.holes, self.glue[1:], strict=True):
            text += (change(values[word]), piece)
        return "".join(text)


class Prober:
    """Finds the profile of a shape by rendering placeholder messages. `stops` are the texts of the end-of-turn tokens."""

    def __init__(self, dialect: Dialect, stops: Sequence[str], special: Iterable[str]) -> None:
        self.dialect = dialect
        self._special = tuple(special)
        # A call is written in the template's notation, but no thought and no response may appear that was not sampled.
        marks = dialect.marks
        self._added = [squeeze(text) for pair in (*marks.thinking, *marks.responses) for text in pair[1:] if squeeze(text)]
        self._stops = re.compile("|".join(map(re.escape, sorted(stops, key=len, reverse=True))) or r"(?!)")

    def profile(self, history: History, turn: TurnShape, plain: TurnShape, stop: str | None, tools: Tools) -> Profile:
        """The profile in the first manner that the template accepts and that shows every new content.

        `plain` is the same turn with its calls as text, for the manners that write calls so. Raises TemplateRefused.
        """
        reasons: list[TemplateRefused] = []
        profiles: list[Profile] = []
        for manner in range(NUM_MANNERS):
            try:
                profile, whole = self._in_manner(manner, history, plain if manner else turn, stop, tools)
            except TemplateRefused as refused:
                reasons.append(refused)
                continue
            if whole:
                return profile
            profiles.append(profile)
        if profiles:
            return profiles[0]
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
        """Renders the prompt before and after the turn, and compares them."""
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
        """Whether a text begins with the old one, ignoring white space, and adds no thinking before the calls."""
        shown, old_text = squeeze(text), squeeze(old)
        if not shown.startswith(old_text):
            return False
        calls = [at for word in turn.reply_words()[-turn.reply.num_calls :] if (at := shown.find(word, len(old_text))) >= 0]
        added = shown[len(old_text) : min(calls)] if turn.reply.num_calls and calls else ""
        return not any(mark in added for mark in self._added)

    def text(self, profile: Profile, history: list[Message], values: Mapping[str, str], tools: Tools) -> str:
        """The text after the reply with real contents, rendered by the template. Raises TemplateRefused."""
        turn = profile.turn
        text = self.dialect.render([*history, *turn.make(values)], tools, True, profile.manner)
        old = "" if turn.reply_words() else self.dialect.render(history, tools, True, profile.manner)
        end = reply_end(text, old, turn)
        if end is None:
            raise TemplateRefused("the reply cannot be found again in the rendered text")
        return text[end + profile.gap :]

    def _tail_start(self, text: str, end: int, stop: str | None, calls: bool) -> int | None:
        """Where the extension begins: after the sampled end of turn, or directly after the reply if none was sampled."""
        if stop is None and not calls:
            return end
        match = self._stops.search(text, end)
        if match is None:
            return None
        between = text[end : match.start()]
        # Only closing marks may stand between a reply and its end of turn. With other text, or a new message, between them, the
        # end of turn that was found belongs to a later message.
        if "zqc" in between or (not calls and without(between, self._special).strip()):
            return None
        if stop is None:
            return match.start()
        return match.end() if match.group() == stop else None

    def _with_glue(self, profile: Profile, tail: str, history: list[Message], tools: Tools) -> Profile:
        """The profile with glue and holes, or unchanged if difficult contents do not come through in a known way."""
        new = profile.turn.new
        # The template may treat a content differently if it holds a mark that the template searches for.
        if any(shape.skeleton not in ((), ("",)) for shape in new):
            return profile
        pieces = _STAND_IN.split(tail)
        glue, words = tuple(pieces[::2]), pieces[1::2]
        names = {word: "abcDEF123" if is_id(word) else "get_weather-2" for word in words if not is_content(word)}
        stay = {word: word for word in words} | names
        changes: dict[str, Callable[[str], str]] = dict.fromkeys(words, CHANGES[0])
        contents = [(word, shape.role) for word, shape in zip(profile.turn.content_words(), new, strict=True) if shape.skeleton]
        for role in {role for _, role in contents}:
            trials = [names | {word: difficult for word, mine in contents if mine == role} for difficult in DIFFICULT]
            shown = [self.text(profile, history, trial, tools) for trial in trials]
            for change in CHANGES:
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
        if not filled.blank and not names:
            places = {word: place for place, word in enumerate(profile.turn.content_words())}
            filled = replace(filled, contents=tuple((word, places[word]) for word in words))
        together = stay | {word: f"{DIFFICULT[0]}{i}" for i, (word, _) in enumerate(contents)}
        return filled if self.text(profile, history, together, tools) == filled.fill(together) else profile


def reply_end(text: str, old: str, turn: TurnShape) -> int | None:
    """Where the placeholder reply ends in a rendered text; a reply without words ends where the old prompt ends."""
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
