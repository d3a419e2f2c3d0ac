"""The marks with which a template begins a user's turn or a result: no honest reply has one, and every made-up result does."""

from __future__ import annotations

import pytest
from render_families import FAMILIES, make_tokenizer, template_text

from agentfly.render import HFRenderer
from agentfly.types import Completion, Message, Task, ToolCall, Trajectory, Turn
from agentfly.watch.honesty import Honesty

CALL = ToolCall("multiply", {"a": 2, "b": 3}, "call00000")
TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": {
    "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}}}]  # fmt: skip


def written(reply: str, marks: tuple[str, ...]) -> int | None:
    turn = Turn([], True, Completion(text=reply), (CALL,))
    return Honesty.of(Trajectory("t", Task("t", ()), turns=[turn], foreign_marks=list(marks))).written


@pytest.mark.parametrize("name", FAMILIES)
def test_honest_replies_have_no_mark_and_a_made_up_continuation_has_one(name: str) -> None:
    family, renderer = FAMILIES[name], HFRenderer(make_tokenizer(template_text(name)))
    marks = renderer.foreign_marks
    start = [Message("user", "How much is 2 times 3?")]
    for thought in ("", "I multiply.")[: 1 + family.thinks]:
        for said in ("", "Let me see."):
            for calls in ([], [CALL], [CALL, CALL])[: 1 + family.max_calls]:
                if (said and calls and not family.says_with_calls) or not (said or calls):
                    continue
                reply = family.reply(thought, said, calls)
                assert written(reply, marks) == 0, (reply, marks)
                # What the template writes after the reply: the model goes on with it.
                follow = Message("tool", "6", name=CALL.name, tool_call_id=CALL.id) if calls else Message("user", "Go on.")
                message = Message("assistant", reply, (calls[0],) if calls else ())
                tools = TOOLS if family.native else []
                before, after = (renderer.start(messages, tools) for messages in (start, [*start, message, follow]))
                text = str(renderer.tokenizer.decode(after[len(before) :], skip_special_tokens=False))
                text = text.rpartition("6" if calls else "Go on.")[0]
                assert written(text + "6", marks) == 1, (text, marks)


def test_marks_of_another_template_are_its_own() -> None:
    source = template_text("qwen25").replace("tool_response", "came_back").replace("<|im_start|>", "<|begin|>")
    assert HFRenderer(make_tokenizer(source, more=["<|begin|>"])).foreign_marks == ("<|begin|>user", "<came_back>")


def test_a_template_of_words_alone_has_labels_as_marks() -> None:
    source = (
        "{% for m in messages %}{{ 'Human: ' if m['role'] == 'user' else 'Robot: ' }}{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}Robot: {% endif %}"
    )
    marks = HFRenderer(make_tokenizer(source)).foreign_marks
    assert marks == ("Human:",)
    assert written("It is 6.\nHuman: Thanks!\nRobot: You are welcome.", marks) == 1
    assert written("The label Human: begins a line.", marks) == 0
