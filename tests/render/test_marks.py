"""Marks are found by probing, replies are split with them, and a context never doubles or loses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from render_families import FAMILIES, TOOLS, completion, make_tokenizer, squeeze, template_text

from agentfly import plugins
from agentfly.data import parse_message
from agentfly.errors import ConfigError, RolloutError, TemplateError
from agentfly.render import HFRenderer
from agentfly.render.parsers import find_parser, get_parser
from agentfly.render.template import ChatTemplate
from agentfly.types import Message, ToolCall

CALL = ToolCall("multiply", {"a": 2, "b": 3}, "call00000")
NEW = ("wrapped", "sections", "segments", "tagged")


def renderer_for(name: str, **options: Any) -> HFRenderer:
    return HFRenderer(make_tokenizer(template_text(name)), **options)


def text(renderer: HFRenderer, ids: Sequence[int]) -> str:
    return str(renderer.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


# ---- what is found ----


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        ("qwen3", ("<think>", "</think>")),
        ("deepseek", ("<think>", "</think>")),
        ("glm", ("<think>", "</think>")),
        ("gptoss", ("<|channel|>analysis<|message|>", "<|end|>")),
        ("wrapped", ("<|START_THINKING|>", "<|END_THINKING|>")),
        ("sections", ("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
        ("segments", ("<|think|>", "<|end|>")),
        ("tagged", ("<think:x>", "</think:x>")),
        ("chatml", None),
        ("llama3", None),
    ],
)
def test_the_marks_of_thinking_are_those_that_the_template_writes(name: str, pair: tuple[str, str] | None) -> None:
    assert renderer_for(name).marks.thinking == ((pair,) if pair else ())


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("qwen25", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("deepseek", "<｜tool▁call▁begin｜>"),
        ("gptoss", "<|channel|>commentary"),
        ("wrapped", "<|START_ACTION|>"),
        ("sections", "<|open|>tools"),
        ("segments", "<|tool_calls|>"),
        ("tagged", "<calls:x>"),
    ],
)
def test_the_marks_of_calls_are_those_that_the_template_writes(name: str, first: str) -> None:
    assert renderer_for(name).marks.calls[0] == first


def test_renamed_marks_are_found_as_well() -> None:
    source = template_text("wrapped").replace("<|START_THINKING|>", "<|open|>").replace("<|END_THINKING|>", "<|close|>")
    source = (
        source.replace("<|START_ACTION|>", "[ACT]")
        .replace("<|START_RESPONSE|>", "<say-it>")
        .replace("<|END_RESPONSE|>", "</say-it>")
    )
    marks = HFRenderer(make_tokenizer(source)).marks
    assert marks.thinking == (("<|open|>", "<|close|>"),)
    assert marks.responses == (("<say-it>", "</say-it>"),)
    assert marks.calls == ("[ACT]",)


def test_both_templates_of_a_tokenizer_give_marks() -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = {"default": template_text("chatml"), "tool_use": template_text("wrapped")}
    assert HFRenderer(tokenizer).marks.thinking == (("<|START_THINKING|>", "<|END_THINKING|>"),)


def test_a_mark_inside_a_reply_does_not_end_it() -> None:
    for name, not_first in (("sections", "<|close|>"), ("wrapped", "<|END_THINKING|>"), ("segments", "<|end|>")):
        renderer = renderer_for(name)
        assert renderer.tokenizer.convert_tokens_to_ids(not_first) not in renderer.stop_ids, name


def test_eos_behind_the_last_reply_is_not_its_end() -> None:
    renderer = renderer_for("trailing")
    assert text(renderer, renderer.stop_ids) == "<|end|></s>"
    more = renderer_for("trailing", stop_ids=[renderer.tokenizer.convert_tokens_to_ids("<|endoftext|>")])
    assert text(renderer, more.stop_ids) == "<|end|></s><|endoftext|>"


# ---- demonstrations ----

CLOSED = {"deepseek": "\n</think>\n\n", "tagged": "</think:x>"}  # where the prompt opens a thought


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_demonstration_is_what_the_model_would_sample(name: str) -> None:
    renderer, family = renderer_for(name), FAMILIES[name]
    before = [Message("user", "2 * 3?")]
    _, ids = renderer.write_reply(before, Message("assistant", "It is 6."))
    written = family.reply("", "It is 6.", ()) if renderer.marks.responses else "It is 6."
    assert text(renderer, ids) == CLOSED.get(name, "") + written + family.end(())
    if not family.native or name in ("tagged", "deepseek"):
        return
    _, ids = renderer.write_reply(before, Message("assistant", "", (CALL,)), TOOLS)
    assert squeeze(text(renderer, ids)) == squeeze(family.reply("", "", (CALL,)) + family.end((CALL,)))


def test_a_demonstration_with_a_call_closes_the_thought_that_the_prompt_opens() -> None:
    renderer = renderer_for("tagged")
    written, _ = renderer.write_reply([Message("user", "2 * 3?")], Message("assistant", "", (CALL,)), TOOLS)
    assert written.startswith("</think:x><calls:x>")
    assert find_parser(renderer, ["multiply"])(written).calls[0].arguments == {"a": "2", "b": "3"}


@pytest.mark.parametrize(("name", "prefix"), [("deepseek", "2 and 3.\n</think>\n\n"), ("tagged", "2 and 3.</think:x>")])
def test_a_demonstration_with_a_thought_goes_on_where_the_prompt_opens_it(name: str, prefix: str) -> None:
    row = {"role": "assistant", "content": "It is 6.", "reasoning_content": "2 and 3."}
    written, _ = renderer_for(name).write_reply([Message("user", "2 * 3?")], parse_message(row, 1, "row 0"))
    assert written == prefix + "It is 6."


def test_a_demonstration_that_closes_the_thought_itself_stays_as_it_is() -> None:
    reply = "2 and 3.\n</think>\n\nIt is 6."
    assert renderer_for("deepseek").write_reply([Message("user", "2 * 3?")], Message("assistant", reply))[0] == reply


TURN = "<|im_start|>assistant\n"
REST = "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"


def thinking(history: str, prompt: str) -> HFRenderer:
    """A template that writes `history` before the words of a reply, and ends a prompt with `prompt`."""
    head = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    said = "{{ m.content.split('</think>')[-1].lstrip() }}"
    source = head + history + said + REST + TURN + prompt + "{% endif %}"
    return HFRenderer(make_tokenizer(source, eos="<|im_end|>"))


ROW = {"role": "assistant", "content": "It is 6.", "reasoning_content": "2 and 3."}


@pytest.mark.parametrize("space", ["", "\n\n"])
def test_a_thought_stands_where_the_template_writes_an_empty_one(space: str) -> None:
    renderer = thinking(f"<think>{space}</think>", "")
    written, _ = renderer.write_reply([Message("user", "2 * 3?")], parse_message(ROW, 1, "row 0"))
    half = space[: len(space) // 2]
    assert written == f"<think>{half}2 and 3.{half}</think>It is 6."


def test_a_thought_that_the_prompt_has_closed_is_neither_closed_again_nor_written() -> None:
    renderer = thinking("</think>", "<think></think>")
    written, _ = renderer.write_reply([Message("user", "2 * 3?")], Message("assistant", "It is 6."))
    assert written == "It is 6."
    for history in ("</think>", ""):
        with pytest.raises(ConfigError, match="the prompt closes the thought before the reply"):
            thinking(history, "</think>").write_reply([Message("user", "2 * 3?")], parse_message(ROW, 1, "row 0"))


def test_words_beside_a_call_are_refused_where_the_template_wraps_them() -> None:
    source = template_text("wrapped").replace("m.content and not m.tool_calls", "m.content")
    renderer = HFRenderer(make_tokenizer(source))
    written, _ = renderer.write_reply([Message("user", "2 * 3?")], Message("assistant", "", (CALL,)), TOOLS)
    assert "<|START_RESPONSE|>" not in written
    with pytest.raises(ConfigError, match="does not write the calls of multiply and the words beside them"):
        renderer.write_reply([Message("user", "2 * 3?")], Message("assistant", "I multiply.", (CALL,)), TOOLS)


def test_a_call_that_the_template_leaves_out_is_written_by_the_parser() -> None:
    said = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    listed = "{% if tools %}<|im_start|>system\nList of tools: [{{ tools | tojson }}]<|im_end|>\n{% endif %}"
    asked = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = HFRenderer(make_tokenizer(listed + said + asked, eos="<|im_end|>"))
    call = ToolCall("multiply", {"a": 12, "note": 'it\'s "two"'})
    written, _ = renderer.write_reply([Message("user", "2 * 3?")], Message("assistant", "I multiply.", (call,)), TOOLS)
    assert written.startswith("I multiply.")
    assert find_parser(renderer, ["multiply"])(written).calls == (call,)
    renderer = HFRenderer(make_tokenizer(said + asked, eos="<|im_end|>"))
    with pytest.raises(ConfigError, match="use ReactAgent, or give a parser"):
        renderer.write_reply([Message("user", "2 * 3?")], Message("assistant", "", (call,)), TOOLS)


@pytest.mark.parametrize("name", plugins.BUILTIN["parsers"])
def test_what_a_parser_writes_it_reads(name: str) -> None:
    parser, calls = (
        get_parser(name),
        (ToolCall("find", {"q": 'a "b"\n漢', "n": 3, "deep": {"x": [1, None]}}), ToolCall("now", {})),
    )
    written = parser.write(calls)
    if written:
        read = parser(written).calls
        assert [(call.name, call.arguments, call.error) for call in read] == [(c.name, c.arguments, None) for c in calls]


# ---- contexts ----


def play(renderer: HFRenderer, name: str, turns: Sequence[tuple[str, str, tuple[ToolCall, ...]]], tools: Sequence[Any]) -> str:
    """The context after these turns (thought, text, calls)."""
    family, messages = FAMILIES[name], [Message("user", "Q0")]
    ids = list(renderer.start(messages, tools))
    for i, (thought, said, calls) in enumerate(turns):
        end = renderer.tokenizer.convert_tokens_to_ids(family.end(calls))
        sampled = [*renderer.encode(family.reply(thought, said, calls)), end]
        messages.append(Message("assistant", renderer.decode(sampled), calls))
        new = [Message("tool", f"R{i}", name=c.name, tool_call_id=c.id) for c in calls] or [Message("user", f"Q{i + 1}")]
        messages += new
        extension = renderer.extend(messages, len(new), completion(sampled), tools)
        ids = list(extension.ids) if extension.restarts else ids + sampled + list(extension.ids)
    return text(renderer, ids)


def test_response_marks_stand_once_in_a_chain_of_plain_text() -> None:
    shown = play(renderer_for("wrapped"), "wrapped", [("", f"A{i}", ()) for i in range(3)], ())
    for i in range(3):
        assert f"<|BOT|><|START_RESPONSE|>A{i}<|END_RESPONSE|><|END_TURN|>" in shown
    assert shown.count("<|START_RESPONSE|>") == 3


def test_a_sampled_section_is_not_put_into_a_second_one() -> None:
    shown = play(renderer_for("sections"), "sections", [("T", "A", (CALL,)), ("", "B", ())], TOOLS)
    assert shown.count("<|open|>response<|sep|>") == shown.count("<|close|>response<|sep|>") == 2
    assert shown.count("<|open|>tools<|sep|>") == 1


def test_a_call_stands_once_and_results_keep_their_frame_after_restarts() -> None:
    turns = [("T", "", (CALL,)), ("", "", (CALL,)), ("T", "", (CALL,)), ("", "Done", ())]
    shown = play(renderer_for("tagged"), "tagged", turns, TOOLS)
    assert shown.count("<calls:x>") == shown.count("<results:x>") == shown.count("</results:x>") == 3
    assert "<think:x>T" not in shown  # the template drops thoughts before the last question


def test_a_call_that_a_thought_quotes_is_part_of_the_thought() -> None:
    shown = play(renderer_for("tagged"), "tagged", [("I write <calls:x> now", "", (CALL,)), ("", "Done", ())], TOOLS)
    assert shown.count("<calls:x>") == shown.count("<results:x>") == 1
    assert "I write" not in shown


def test_the_result_of_a_call_in_plain_text_needs_no_structured_call() -> None:
    renderer = renderer_for("tagged")
    react = '</think:x>Action: multiply\nInput: {"a": 2, "b": 3}'
    sampled = [*renderer.encode(react), renderer.stop_ids[0]]
    messages = [Message("user", "Q"), Message("assistant", react, (CALL,)), Message("tool", "6", tool_call_id=CALL.id)]
    shown = text(renderer, renderer.extend(messages, 1, completion(sampled), TOOLS).ids)
    assert shown.count("multiply\n") == 1
    assert "<calls:x>" not in shown
    assert "<|user|>6" in shown


# ---- the guard ----

BARE_CALLS = """{{ '<s>' }}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ '<|bot|>' ~ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ call.function.name ~ '(' ~ call.function.arguments.values() | join(', ') ~ ')' }}
{%- endfor -%}
{{ '<|eos:x|>' }}
{%- elif message.role == 'tool' -%}
{%- if not messages[loop.index0 - 1].tool_calls -%}{{ raise_exception('A result without a call.') }}{%- endif -%}
{{ '<result:x>' ~ message.content ~ '</result:x>' }}
{%- else -%}{{ '<|' ~ message.role ~ '|>' ~ message.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|bot|>' }}{%- endif -%}"""


def test_a_form_of_reply_that_cannot_be_read_back_is_refused_and_other_forms_are_not() -> None:
    renderer = HFRenderer(make_tokenizer(BARE_CALLS))
    result = Message("tool", "6", name="multiply", tool_call_id=CALL.id)
    messages = [Message("user", "Q"), Message("assistant", "I call multiply(2, 3)", (CALL,)), result]
    with pytest.raises(TemplateError, match=r"'<result:x>' is lost .* chat_template="):
        renderer.extend(messages, 1, completion([90]), TOOLS)
    alone = [Message("user", "Q"), Message("assistant", "multiply(2, 3)", (CALL,)), result]
    assert "<result:x>6</result:x>" in text(renderer, renderer.extend(alone, 1, completion([90]), TOOLS).ids)
    plain = [Message("user", "Q"), Message("assistant", "Yes"), Message("user", "Q2")]
    assert renderer.extend(plain, 1, completion([90]), TOOLS).ids


def test_marks_that_appear_with_some_contents_only_end_the_chain_and_not_the_run() -> None:
    source = template_text("wrapped").replace(
        "{{ '<|START_RESPONSE|>' ~ message.content ~ '<|END_RESPONSE|><|END_TURN|>' }}",
        "{{ ('<|START_RESPONSE|>' ~ message.content ~ '<|END_RESPONSE|>' if message.content | length > 30 else message.content)"
        " ~ '<|END_TURN|>' }}",
    )
    renderer = HFRenderer(make_tokenizer(source))
    reply = "<|START_RESPONSE|>A long answer that the template puts into marks.<|END_RESPONSE|>"
    sampled = [*renderer.encode(reply), renderer.stop_ids[0]]
    messages = [Message("user", "Q"), Message("assistant", reply), Message("user", "Q2")]
    with pytest.raises(RolloutError, match="stands twice in a row where the reply has it once"):
        renderer.extend(messages, 1, completion(sampled))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_guard_has_no_objection_to_any_family(name: str) -> None:
    assert renderer_for(name)._renderer(())._guard._problems == {}


# ---- restarts ----


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "wrapped", "segments", "tagged", "deepseek", "glm", "mistral"])
def test_a_prompt_that_keeps_text_of_the_last_one_equals_a_full_render(name: str) -> None:
    renderer, family = renderer_for(name, template_args={"date_string": "today"}), FAMILIES[name]
    tools = TOOLS if family.native else []
    messages = [Message("user", "Q")]
    restarts = 0
    for i in range(24):
        calls = (ToolCall("multiply", {"a": i, "b": 2}, f"call{i:05d}"),) if family.native and i % 5 == 1 else ()
        thought = f"Thought {i}" if family.thinks and i % 3 and (family.says_with_calls or not calls) else ""
        said = "" if calls else ["Yes", "<b>No</b>", "Line\nline", "é世🙂", "  spaced  "][i % 5].strip()
        sampled = [
            *renderer.encode(family.reply(thought, said, calls)),
            renderer.tokenizer.convert_tokens_to_ids(family.end(calls)),
        ]
        messages.append(Message("assistant", renderer.decode(sampled), calls))
        seen = [f"R{i}", "{{ x }}<|im_end|>", " padded \n", "<tool_response>\nx\n</tool_response>", "R0", ""][i % 6]
        messages.append(Message("tool", seen, name="multiply", tool_call_id=f"call{i:05d}") if calls else Message("user", seen))
        extension = renderer.extend(messages, 1, completion(sampled), tools)
        if extension.restarts:
            restarts += 1
            assert extension.ids == renderer.start(messages, tools), i
    assert restarts >= 4


def test_the_work_for_a_new_prompt_does_not_grow_with_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, tools: Any, generate: bool) -> str:
        rendered.append(len(messages))
        return render(self, messages, tools, generate)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    for name in ("qwen3", "gptoss", "wrapped", "segments", "tagged"):
        renderer, family = renderer_for(name), FAMILIES[name]
        tokenised: list[int] = []
        pieces = renderer._renderer(()).codec.pieces
        plain = pieces._plain
        pieces._plain = lambda text, plain=plain, seen=tokenised: seen.append(len(text)) or plain(text)  # type: ignore[func-returns-value]
        messages = [Message("user", "Q")]
        for i in range(60):
            if i == 5:
                rendered.clear()
                tokenised.clear()
            sampled = [*renderer.encode(family.reply("hm", f"A{i}", ())), renderer.stop_ids[0]]
            messages += [Message("assistant", renderer.decode(sampled)), Message("user", f"Q{i} " + "x" * 50)]
            assert renderer.extend(messages, 1, completion(sampled)).restarts
        assert max(rendered) <= 6, name
        assert len(rendered) == 55, name
        assert max(tokenised) < 500, name
