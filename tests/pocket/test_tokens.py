"""The tokenizer and the chat template: nothing is lost, digits stand alone, and a rollout meets the ids that were learnt."""

from __future__ import annotations

from chat import IM_END, react_system, start_text
from dialogues import demonstrations
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import ADDED, demo_pieces, encode_demo

from agentfly.pocket.demos import CANONICAL, DemoTool
from agentfly.render import HFRenderer
from agentfly.types import Completion, Message

TRIO = [DemoTool(kind, kind, CANONICAL[kind], (("a", "number"), ("b", "number"))) for kind in CANONICAL]


def pieces(tokenizer, text):
    return [tokenizer.decode([token]) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def test_any_text_comes_back_as_it_was(tokenizer):
    @settings(max_examples=150, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
    def comes_back(text: str) -> None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    comes_back()


def test_digits_stand_alone(tokenizer):
    assert pieces(tokenizer, "12345") == list("12345")
    assert pieces(tokenizer, 'Input: {"a": 120, "b": 7}').count("1") == 1
    learned = [token for token in tokenizer.get_vocab() if token not in ADDED]
    assert not any(len(token) > 1 and any(c.isdigit() for c in token) for token in learned)


def test_a_tools_name_is_the_same_token_where_it_is_listed_and_where_it_is_called(tokenizer):
    listed = pieces(tokenizer, "Tools:\n- multiply(a: number, b: number): Multiply two numbers.")
    called = pieces(tokenizer, "Thought: multiply first\nAction: multiply\nInput: {")
    assert " multiply" in listed
    assert " multiply" in called


def test_the_marks_of_the_format_are_single_tokens(tokenizer):
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", *ADDED):
        assert pieces(tokenizer, token) == [token]
    assert tokenizer.eos_token == IM_END
    assert tokenizer.pad_token == "<|endoftext|>"


def test_a_two_step_dialogue_is_short(tokenizer):
    solved = [demo for demo in demonstrations("short", "good", 300) if demo.kind == "two_step" and not demo.schemas]
    lengths = sorted(len(encode_demo(tokenizer.backend_tokenizer, demo)[0]) for demo in solved)
    assert lengths[len(lengths) // 2] < 110
    start = start_text(
        [
            {"role": "system", "content": react_system([tool.line() for tool in TRIO])},
            {"role": "user", "content": "What is 2 plus 3?"},
        ]
    )
    assert len(tokenizer(start)["input_ids"]) < 60


def test_the_mask_of_a_dialogue_covers_the_replies_to_be_learnt(tokenizer):
    demo = next(demo for demo in demonstrations("mask", "good", 50) if demo.kind == "one_step" and not demo.schemas)
    ids, mask = encode_demo(tokenizer.backend_tokenizer, demo)
    learnt = tokenizer.decode([token for token, bit in zip(ids, mask, strict=True) if bit], skip_special_tokens=False)
    assert learnt == "".join(m["content"] + IM_END for m in demo.messages if m["role"] == "assistant")


def test_a_rollout_meets_exactly_the_ids_that_were_trained_on(tokenizer):
    renderer = HFRenderer(tokenizer)
    for demo in demonstrations("rollout", "mixed", 60):
        encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for _, text in demo_pieces(demo)]
        messages = [Message(message["role"], message["content"]) for message in demo.messages]
        first = next(i for i, message in enumerate(messages) if message.role == "assistant")
        assert renderer.start(messages[:first], demo.schemas) == encoded[0]
        for turn, at in enumerate(range(first, len(messages) - 1, 2)):
            ids = encoded[1 + 2 * turn]
            reply = Completion(text=messages[at].content, token_ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids))
            extension = renderer.extend(messages[: at + 2], 1, reply, demo.schemas)
            assert (extension.ids, extension.restarts) == (encoded[2 + 2 * turn], False)


def test_the_template_renders_as_transformers_does(tokenizer):
    for demo in demonstrations("template", "good", 60):
        first = next(i for i, message in enumerate(demo.messages) if message["role"] == "assistant")
        theirs = tokenizer.apply_chat_template(
            demo.messages[:first], tools=demo.schemas or None, add_generation_prompt=True, tokenize=False
        )
        assert start_text(demo.messages[:first], demo.schemas) == theirs


def test_the_template_writes_calls_results_and_rich_schemas(tokenizer):
    schema = TRIO[2].schema()
    schema["function"]["parameters"]["properties"]["mode"] = {"enum": ["fast", "slow"], "type": "string"}
    conversation = [
        {"role": "user", "content": "What is 12 times 7?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "multiply", "arguments": {"a": 12, "b": 7}}}],
        },
        {"role": "tool", "content": "84"},
        {"role": "tool", "content": "85"},
        {"role": "assistant", "content": "84"},
    ]
    text = tokenizer.apply_chat_template(conversation, tools=[schema], tokenize=False)
    assert '"mode?": {"enum": ["fast", "slow"], "type": "string"}}}\n</tools>' in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 7}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n84\n</tool_response>\n<tool_response>\n85\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n84<|im_end|>\n"
    ) in text
