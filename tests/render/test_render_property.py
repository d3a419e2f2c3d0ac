"""Random conversations over every template, beside a full render by transformers.

For each turn: the ids only grow (unless the renderer says `restarts`), what was sampled is kept as it was, the new ids are
the ones a full tokenisation ends with, the text is the template's own, and `restarts` is said exactly where the full render
no longer begins with what was there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from render_families import FAMILIES, TOOLS, Family, completion, make_tokenizer, squeeze, template_text

from agentfly.errors import ConfigError
from agentfly.render import HFRenderer
from agentfly.types import Message, ToolCall

# Not shrunk: a conversation of five turns can be read as it is, and shrinking one takes minutes.
PHASES = (Phase.explicit, Phase.generate)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"

# Contents with everything a template or a tokenizer might trip over, but for white space at the ends where templates trim.
words = st.text(st.sampled_from("ab Z0\n\t\"'\\{}[]<>|/é世🙂&%:,.-_"), min_size=1, max_size=24).filter(
    lambda text: text.strip()
)
clean = words.map(lambda text: "x" + text.strip() + "x")


@dataclass(frozen=True)
class Turn:
    """What happens in one turn: the reply, how it ended, and what came back."""

    thought: str
    said: str
    num_calls: int
    stopped: bool
    answers: tuple[str, ...] = field(default=())


turns = st.lists(
    st.builds(
        Turn,
        thought=st.one_of(st.just(""), clean),
        said=clean,
        num_calls=st.integers(0, 2),
        stopped=st.sampled_from([True, True, True, False]),
        answers=st.tuples(words, words),
    ),
    min_size=1,
    max_size=5,
)


def calls_of(number: int, turn: int) -> tuple[ToolCall, ...]:
    names = ("multiply", "add")
    return tuple(ToolCall(names[i], {"a": turn, "b": i}, f"call{turn:03d}{i:02d}") for i in range(number))


@lru_cache
def tools_for(name: str) -> tuple[Any, HFRenderer]:
    tokenizer = make_tokenizer(template_text(name))
    # One clock for both: transformers asks the time at every render.
    return tokenizer, HFRenderer(tokenizer, template_args={"date_string": "1 Jan 2030"})


class Play:
    """One conversation, kept twice: as the renderer's ids and as messages for the reference."""

    def __init__(self, family: Family, opening: list[Message], tools: list[Any]) -> None:
        self.family, self.tools = family, tools
        self.tokenizer, self.renderer = tools_for(family.name)
        self.messages = list(opening)
        self.parts: dict[int, tuple[str, str]] = {}
        self.ids = self.renderer.start(self.messages, tools)
        self.mask = [0] * len(self.ids)
        self.prompt = self.reference()
        assert self.text(self.ids) == self.prompt
        assert self.ids == self.encode(self.prompt)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def reference(self) -> str:
        dicts = self.family.dicts(self.messages, self.parts)
        return str(
            self.tokenizer.apply_chat_template(
                dicts, tools=self.tools or None, tokenize=False, add_generation_prompt=True, date_string="1 Jan 2030"
            )
        )

    def step(self, number: int, turn: Turn) -> None:
        family = self.family
        calls = calls_of(min(turn.num_calls, family.max_calls), number) if self.tools and turn.stopped else ()
        thought = turn.thought if family.thinks and (family.says_with_calls or not calls or family.field) else ""
        said = "" if calls and not (family.says_with_calls and turn.num_calls == 1) else turn.said
        reply = family.reply(thought, said, calls)
        end = family.end(calls)
        sampled = self.encode(reply) + ([self.tokenizer.convert_tokens_to_ids(end)] if turn.stopped else [])

        self.parts[len(self.messages)] = (thought, said)
        self.messages.append(Message("assistant", self.renderer.decode(sampled), calls))
        assert self.messages[-1].content == reply
        new = [Message("tool", text, name=c.name, tool_call_id=c.id) for c, text in zip(calls, turn.answers, strict=False)]
        new = new or [Message("user", turn.answers[0])]
        self.messages += new

        extension = self.renderer.extend(self.messages, len(new), completion(sampled), self.tools)
        full = self.reference()
        kept = self.prompt + reply + (end if turn.stopped else "")
        assert extension.restarts == (not squeeze(full).startswith(squeeze(kept))), (kept, full)
        if extension.restarts:
            self.ids, self.mask = list(extension.ids), [0] * len(extension.ids)
            assert self.ids == self.encode(full)
        else:
            before = len(self.ids)
            self.ids += sampled + extension.ids
            self.mask += [1] * len(sampled) + [0] * len(extension.ids)
            assert self.text(self.ids) == full
            assert extension.ids == self.encode(full)[-len(extension.ids) :]
            assert [i for i, m in zip(self.ids[before:], self.mask[before:], strict=True) if m] == sampled
        assert len(self.ids) == len(self.mask)
        self.prompt = full


@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=40, deadline=None, derandomize=True, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(conversation=turns, system=st.one_of(st.none(), clean), question=words, with_tools=st.booleans())
def test_a_conversation_extends_as_the_full_render_does(
    name: str, conversation: list[Turn], system: str | None, question: str, with_tools: bool
) -> None:
    family = FAMILIES[name]
    opening = [Message("system", system)] if system and name != "gemma" else []
    play = Play(family, [*opening, Message("user", question)], TOOLS if with_tools and family.native else [])
    for number, turn in enumerate(conversation):
        play.step(number, turn)


SHARED_TEMPLATES = sorted(SHARED.glob("*.jinja")) if SHARED.is_dir() else []


@lru_cache
def published(path: Path) -> tuple[Any, HFRenderer]:
    source = path.read_text(encoding="utf-8")
    marks = re.findall(
        r"<\|[^|>'\"\n {}]{1,40}\|?>|<[a-z_]+\|>|<｜[^｜'\"\n]{1,40}｜>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_turn>", source
    )
    tokenizer = make_tokenizer(source, sorted(set(marks)))
    return tokenizer, HFRenderer(tokenizer)


@pytest.mark.skipif(
    not SHARED_TEMPLATES, reason="the folder ../shared/data/chat_templates with published templates is not here"
)
@pytest.mark.parametrize("path", SHARED_TEMPLATES, ids=lambda path: path.stem)
@settings(max_examples=12, deadline=None, derandomize=True, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(conversation=turns, system=st.one_of(st.none(), clean), with_tools=st.booleans())
def test_published_templates_extend_as_they_render(
    path: Path, conversation: list[Turn], system: str | None, with_tools: bool
) -> None:
    tokenizer, renderer = published(path)
    tools = TOOLS if with_tools else []
    messages = ([Message("system", system)] if system else []) + [Message("user", "xWhat is it?x")]
    try:
        ids = renderer.start(messages, tools)
    except ConfigError as error:
        sentence = str(error)
        assert "chat template refuses" in sentence
        assert "chat_template=" in sentence
        return

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    for number, turn in enumerate(conversation):
        calls = calls_of(turn.num_calls, number) if tools and turn.stopped else ()
        reply = FAMILIES["qwen25"].reply(turn.thought, "" if calls else turn.said, calls)
        stop = [renderer.stop_ids[0]] if turn.stopped else []
        sampled = renderer.encode(reply) + stop
        prompt = text(renderer.start(messages, tools))
        messages.append(Message("assistant", renderer.decode(sampled), calls))
        new = [Message("tool", text, name=c.name, tool_call_id=c.id) for c, text in zip(calls, turn.answers, strict=False)]
        # No two user messages are equal: there are templates that know their last one by its equality.
        messages += new or [Message("user", f"{number}{turn.answers[0]}")]
        extension = renderer.extend(messages, len(new) or 1, completion(sampled), tools)
        full_ids = renderer.start(messages, tools)
        full = text(full_ids)
        if extension.restarts:
            assert extension.ids == full_ids
            ids = list(extension.ids)
        else:
            assert full.endswith(text(extension.ids))
            assert extension.ids == full_ids[-len(extension.ids) :]
            ids += sampled + extension.ids
        if not calls:
            kept = squeeze(prompt + reply + (text(stop) if stop else ""))
            assert extension.restarts == (not squeeze(full).startswith(kept)), (kept, full)
