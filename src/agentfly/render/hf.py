"""`HFRenderer` renders messages to token ids with a Hugging Face tokenizer and its chat template, turn by turn.

It renders the first prompt in full, and after each reply only the ids that follow it:

    start     <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    sampled   Hello<|im_end|>                                             kept as sampled, never decoded and encoded again
    extend    \\n<|im_start|>user\\nHow are you?<|im_end|>\\n<|im_start|>assistant\\n

If the template changes earlier text (strips thinking, moves the tool list, replaces the end of turn), `extend` returns the
whole new prompt with `restarts` set. If a reply has no end-of-turn token (length limit, stop string), the token is added as
context. Control tokens that are spelled out in a message are encoded as plain text. ConfigError is raised for images, for a
tokenizer without a chat template, and for messages that the template refuses.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, InvariantError
from ..types import Completion, Extension, Message
from .demo_reply import reads_back, reply_text
from .frames import Frame, FramedTexts, OpeningFrames, make_frame
from .parsers.detect import find_parser
from .parsers.reply import CallParser, Parser
from .profile import History, Shaper, TurnShape, Unit, is_id, thinned, turn_shape
from .profile_glue import Prober, Profile
from .restart import RestartedPrompt, Restarter
from .template import ChatTemplate, TemplateRefused, sources
from .template_dialect import Dialect
from .template_guard import TemplateGuard, end_of_turn, foreign_marks, turn_marks
from .template_marks import Marks
from .template_pieces import TokenCache
from .template_tokens import Codec

_MAX_KNOWN = 4096  # size limit of the caches of shapes, chains and tools


class HFRenderer:
    """Implements `types.Renderer`. Not thread-safe: it is used in the event loop only, and engines decode with their tokenizer.

    chat_template   None: the tokenizer's own; "chatml"; the text of a template; or the path of a .jinja file.
    stop_ids        end-of-turn ids beyond eos and those found in the template (a model's generation config may list some).
    template_args   variables of the template, such as `enable_thinking=False` or `date_string="26 Jul 2024"`.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        stop_ids: Sequence[int] = (),
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        args = dict(template_args or {})
        texts = sources(tokenizer, chat_template)
        self._templates = {name: _TemplateRenderer(tokenizer, source, args, stop_ids) for name, source in texts.items()}
        self._parser: Parser | None = None  # of the template, for demonstrations
        self.stop_ids: tuple[int, ...] = tuple(
            dict.fromkeys(i for renderer in self._templates.values() for i in renderer.stop_ids)
        )
        if not self.stop_ids:
            raise ConfigError(
                "no end-of-turn token is known: the tokenizer has no eos token and the chat template ends a reply with none; "
                "give stop_ids="
            )

    @property
    def marks(self) -> Marks:
        """The marks of thinking, calls, responses and results that the template writes, also those of its form for tools."""
        own = self._renderer(()).marks
        return own.merged(self._templates["tool_use"].marks) if "tool_use" in self._templates else own

    @property
    def foreign_marks(self) -> tuple[str, ...]:
        """The texts with which the template begins a user's turn or the result of a call, and no part of a reply."""
        marks = (mark for renderer in self._templates.values() for mark in foreign_marks(renderer.dialect))
        return tuple(dict.fromkeys(marks))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts of `stop_ids`, which the text of a completion leaves out."""
        codec = self._renderer(()).codec
        return tuple(codec.text([index]) for index in self.stop_ids)

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The ids of the first prompt, up to the beginning of the first reply. Raises ConfigError."""
        if not messages:
            raise ConfigError("there is no message to render: a conversation begins with at least one")
        return self._renderer(tools).full(messages, tools)

    def extend(
        self, messages: Sequence[Message], num_new: int, completion: Completion, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Extension:
        """The ids after the reply `messages[-num_new - 1]`, up to the beginning of the next reply."""
        at = len(messages) - num_new - 1
        if num_new < 1 or at < 0 or messages[at].role != "assistant":
            raise InvariantError(
                f"extend wants a reply and then {max(num_new, 1)} new messages; it got {len(messages)} messages"
            )
        sampled = completion.token_ids
        stop = sampled[-1] if sampled and sampled[-1] in self.stop_ids else None
        return self._renderer(tools).extend(messages, at, stop, tools)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a reply with the marks of thinking and calls, without the end of turn and bos."""
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        return self._renderer(()).codec.decode(ids[:end])

    def encode(self, text: str) -> list[int]:
        """The ids of a reply given as text (for demonstrations), without its end of turn (`stop_ids[0]`)."""
        codec = self._renderer(()).codec
        return codec.encode(codec.guard_reply(text))

    def write_reply(
        self,
        before: Sequence[Message],
        reply: Message,
        tools: Sequence[Mapping[str, Any]] = (),
        parser: Parser | None = None,
    ) -> tuple[str, list[int]]:
        """A demonstration's reply as text and as the ids that a policy would have sampled for it, end of turn included.

        A thought, tool calls, and the marks around the visible text are written as the template writes them. Calls that the
        template does not write are written in the format of the parser. Raises ConfigError if the parser (None: that of the
        template) does not read the same calls.
        """
        renderer = self._renderer(tools)
        text = renderer.reply_text(before, reply, tools)
        parser = parser or (self._own_parser(text, reply) if reply.tool_calls else None)
        if parser is not None and reply.tool_calls and not reads_back(parser, text, reply, tools):
            bare = not (renderer.marks.responses and reply.content)  # marks of a response would stand around the calls, too
            calls = parser.write(reply.tool_calls) if bare and isinstance(parser, CallParser) else ""
            words = "\n".join(filter(None, (reply.content, calls)))
            text = renderer.reply_text(before, replace(reply, tool_calls=(), content=words), tools)
            if not (calls and reads_back(parser, text, reply, tools)):
                names = ", ".join(call.name for call in reply.tool_calls)
                raise ConfigError(
                    f"the chat template does not write the calls of {names} and the words beside them so that the parser reads "
                    "the same: give the reply as plain text, one call in a reply, or no words beside a call"
                )
        return text, [*self.encode(text), renderer.end_ids[bool(reply.tool_calls)]]

    def _own_parser(self, text: str, reply: Message) -> Parser | None:
        """The parser of the template; None if it is not known, but the template wrote every call into the text."""
        try:
            self._parser = self._parser or find_parser(self)
        except ConfigError:
            if not all(call.name in text and all(key in text for key in call.arguments) for call in reply.tool_calls):
                raise
        return self._parser

    def dialect_for(self, tools: Sequence[Mapping[str, Any]]) -> Dialect:
        """The template that renders prompts with these tools, and the form in which it takes messages."""
        return self._renderer(tools).dialect

    def _renderer(self, tools: Sequence[Mapping[str, Any]]) -> _TemplateRenderer:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default"]


@dataclass(slots=True)
class _CachedChain:
    """The cached state of a chain at one of its replies: the history before the reply, and the turn that it began.

    The cache key is the identity of the reply, a message object that belongs to this chain only.
    """

    reply: Message
    first: Message
    at: int
    history: History
    unit: Unit
    last: Message
    end: int
    last_prompt: RestartedPrompt | None = None  # of the last restart

    def is_at(self, messages: Sequence[Message], at: int) -> bool:
        return self.at == at and self.reply is messages[at] and self.first is messages[0]


class _TemplateRenderer:
    """Renders with one template. Most tokenizers have one; some have a second one for prompts with tools."""

    def __init__(self, tokenizer: Any, source: str, args: Mapping[str, Any], stop_ids: Sequence[int]) -> None:
        turn_end = "<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else tokenizer.eos_token or ""
        self.template = ChatTemplate(source, {"turn_end": turn_end, **tokenizer.special_tokens_map, **args})
        self.codec = Codec(tokenizer, self.template.written)
        self.dialect = Dialect(self.template, self.codec)
        self.marks = self.dialect.marks
        ends = end_of_turn(self.dialect, self.codec)
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_ids = tuple(dict.fromkeys([*ends, *eos, *stop_ids]))
        # The ends of a plain reply and of a reply with calls, for demonstrations.
        other = [*eos, *self.stop_ids]
        self.end_ids = tuple([self.codec.control[mark], *other][0] if mark else [*other, -1][0] for mark in self.marks.ends)
        self._stop_texts = {index: self.codec.text([index]) for index in self.stop_ids}
        self.codec.forbid_in_replies(turn_marks(self.dialect, self.codec, self._stop_texts.values()))
        self._guard = TemplateGuard(self.dialect, self.dialect.finder)
        self._shaper = Shaper(self.dialect)
        self._restarter = Restarter(self.dialect, self.codec, self._shaper)
        self._prober = Prober(self.dialect, list(self._stop_texts.values()), self.codec.special)
        self._profiles: OrderedDict[Any, tuple[Profile, int, Frame | None, Any]] = OrderedDict()
        self.extensions = TokenCache(self.codec.pieces.cache.max_bytes)
        self._framed = FramedTexts(self.codec, self.extensions)
        self._opening_frames = OpeningFrames(self.dialect, self.codec, self._shaper.skeletons)
        self._chains: OrderedDict[int, _CachedChain] = OrderedDict()
        self._openings: OrderedDict[Any, tuple[Any, History]] = OrderedDict()
        self._tools: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()
        self._tool_texts: OrderedDict[str, Any] = OrderedDict()

    def reply_text(self, before: Sequence[Message], reply: Message, tools: Sequence[Mapping[str, Any]]) -> str:
        """The text of a demonstration's reply, as the template writes it. Raises ConfigError."""
        try:
            return reply_text(self.dialect, self._stop_texts.values(), before, reply, tools)
        except TemplateRefused as refused:
            raise _refusal(before, refused) from refused

    def full(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], manner: int = 0) -> list[int]:
        _refuse_images(messages)
        shown = self._guarded(tools)
        if not manner and (ids := self._opening_frames.ids(messages, shown)) is not None:
            return ids
        try:
            text = self.dialect.render_somehow(messages, shown, manner)
        except TemplateRefused as refused:
            raise _refusal(messages, refused) from refused
        return self.codec.encode_start(text)

    def extend(self, messages: Sequence[Message], at: int, stop: int | None, tools: Sequence[Mapping[str, Any]]) -> Extension:
        reply, new = messages[at], messages[at + 1 :]
        _refuse_images(new)
        self._guard.check(reply, new[0].role == "tool")
        history, last = self._history(messages, at)
        turn = turn_shape(self._shaper, reply, new)
        unit = thinned((turn.reply, *turn.new))
        chain = _CachedChain(reply, messages[0], at, history, unit, messages[-1], len(messages), last)
        _remember(self._chains, id(reply), chain)
        shown = self._guarded(tools)
        try:
            profile, num_control, frame = self._profile(history, turn, reply, new, stop, shown)
            if profile.counts:
                return self._ask_in_full(profile, chain, messages, at, stop, tools)
            if profile.restarts:
                return self._restart(profile, chain, messages, tools)
            if profile.contents is not None:
                if frame is not None:
                    ids = self._framed.ids(frame, new[profile.contents[0][1]].content)
                    if ids is not None:
                        return Extension(ids)
                values = {word: new[place].content for word, place in profile.contents}
            else:
                values = profile.turn.values(_plain(reply) if profile.manner else reply, new)
                if profile.glue is None or not self._fits(profile, values):
                    text = self._prober.text(profile, history.messages(), values, shown)
                    return Extension(self.codec.encode(text, stop))
        except TemplateRefused:
            # The template refused the probe or the extension; it may still accept the whole conversation.
            return Extension(self.full(messages, tools), restarts=True)
        for word in profile.names:
            if is_id(word):
                values[word] = self.dialect.identity(values[word])
        return Extension(self._encode(profile, values, stop, num_control))

    def _encode(self, profile: Profile, values: Mapping[str, str], stop: int | None, num_control: int) -> list[int]:
        """The ids of an extension. Sibling chains often get the same observation, so recent texts are cached."""
        text = profile.fill(values)
        key = (text, stop, num_control)
        ids = self.extensions.get(key)
        if ids is None:
            ids = self.codec.encode(text, stop)
            if self.codec.num_control(ids) != num_control:
                # A message spells out a control token: encode again, with cuts that keep it plain text. These ids are not
                # cached, because the cuts depend on which part of the text is the message's.
                guarded = {word: self.codec.guard(value) for word, value in values.items()}
                return self.codec.encode(profile.fill(guarded), stop)
            self.extensions.put(key, text, ids)
        return list(ids)

    def _profile(
        self, history: History, turn: TurnShape, reply: Message, new: Sequence[Message], stop: int | None, tools: Any
    ) -> tuple[Profile, int, Frame | None]:
        key = (history, turn, stop, id(tools))
        cached = self._profiles.get(key)
        if cached is None or cached[3] is not tools:
            text = None if stop is None else self._stop_texts[stop]
            plain = turn_shape(self._shaper, _plain(reply), new) if reply.tool_calls else turn
            profile = self._prober.profile(history, turn, plain, text, tools)
            num_control = 0
            if profile.glue is not None:
                words = {word: "a" for word, _ in profile.holes}
                num_control = self.codec.num_control(self.codec.encode(profile.fill(words), stop))
            cached = profile, num_control, self._frame(profile, stop), tools
            _remember(self._profiles, key, cached)
        return cached[:3]

    def _frame(self, profile: Profile, stop: int | None) -> Frame | None:
        """The frame of a profile whose only hole is a content."""
        if profile.contents is None or len(profile.contents) != 1 or profile.glue is None or stop is None:
            return None
        before, after = profile.glue
        return make_frame(self.codec, before, after, profile.holes[0][1], stop)

    def _fits(self, profile: Profile, values: Mapping[str, str]) -> bool:
        """Whether the glue holds here: it was found for contents that are not blank and names that the template ignores."""
        if any(values[word] for word in profile.blank):
            return False
        words = self.template.words
        return not any(values[word] in words for word in profile.names)

    def _restart(
        self, profile: Profile, chain: _CachedChain, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Extension:
        history = chain.history.then(chain.unit)
        prompt = self._restarter.prompt(
            chain.last_prompt, messages, history, self._guarded(tools), profile.manner, profile.counts
        )
        self._guard.check_restart(prompt.text, chain.reply)
        chain.last_prompt = prompt
        return Extension(list(prompt.ids), restarts=True)

    def _ask_in_full(
        self,
        profile: Profile,
        chain: _CachedChain,
        messages: Sequence[Message],
        at: int,
        stop: int | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> Extension:
        """For templates that count messages or calls: renders the whole conversation and returns its last part."""
        reply, new, turn = messages[at], messages[at + 1 :], profile.turn
        text = None if stop is None else self._stop_texts[stop]
        shown = self._guarded(tools)
        names = {word: value for word, value in turn.values(reply, new).items() if word not in turn.content_words()}
        seen = self._prober.look(profile.manner, list(messages[:at]), turn, names, text, shown)
        if seen.restarts:
            return self._restart(profile, chain, messages, tools)
        values = turn.values(reply, new)
        tail = self._prober.text(replace(profile, gap=seen.gap), list(messages[:at]), values, shown)
        return Extension(self.codec.encode(tail, stop))

    def _history(self, messages: Sequence[Message], at: int) -> tuple[History, RestartedPrompt | None]:
        """The shapes before the reply, cached at the previous one if the chain is known, and the last prompt of the chain."""
        before = at - 1
        while before >= 0 and messages[before].role != "assistant":
            before -= 1
        previous = self._chains.pop(id(messages[before]), None) if before >= 0 else None
        if previous is not None and previous.is_at(messages, before):
            if previous.end == at and previous.last is messages[at - 1]:
                return previous.history.then(previous.unit), previous.last_prompt
            return previous.history.then(self._shaper.unit(messages[before:at])), None
        if before >= 0:
            return self._shaper.history(messages[:at]), None
        # The first reply: sibling chains share the objects of their opening messages.
        key = tuple(map(id, messages[:at]))
        opening = self._openings.get(key)
        if opening is None:
            opening = messages[:at], self._shaper.history(messages[:at])
            _remember(self._openings, key, opening)
        return opening[1], None

    def _guarded(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        """The tools with cuts. Equal tools give the same object; the cache is keyed by identity first and by text second."""
        if not tools:
            return None
        key = tuple(map(id, tools))
        cached = self._tools.get(key)
        if cached is None:
            text = json.dumps(list(tools), default=repr, sort_keys=False)
            guarded = self._tool_texts.get(text) or self.codec.guard_data(list(tools))
            _remember(self._tool_texts, text, guarded)
            cached = (list(tools), guarded)
            _remember(self._tools, key, cached)
        return cached[1]


def _plain(reply: Message) -> Message:
    return replace(reply, tool_calls=())


def _remember(known: OrderedDict[Any, Any], key: object, value: object) -> None:
    known[key] = value
    if len(known) > _MAX_KNOWN:
        known.popitem(last=False)


def _refuse_images(messages: Sequence[Message]) -> None:
    for message in messages:
        if message.images:
            raise ConfigError(
                "a message carries an image, and a tokenizer renders text alone: leave images out, or use a vision engine"
            )


def _refusal(messages: Sequence[Message], refused: TemplateRefused) -> ConfigError:
    roles = ", ".join(message.role for message in messages[:6]) + (", ..." if len(messages) > 6 else "")
    return ConfigError(
        f"the chat template refuses messages with the roles {roles}: {refused}; "
        "change the messages, set its variables with template_args=, or give another chat_template="
    )
