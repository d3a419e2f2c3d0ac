"""Families of chat templates for the tests: a small tokenizer, and for each template how its model would write a reply.

`Family.reply` writes a reply the way the template itself would show it, so that a full render by transformers can be the
reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentfly.types import Completion, Message, ToolCall

TEMPLATES = Path(__file__).parent / "templates"

# fmt: off
SPECIAL = [
    "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "[gMASK]",
    "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|TURN|>", "<|END_TURN|>", "<|SYSTEM|>", "<|USER|>", "<|BOT|>", "<|START_THINKING|>", "<|END_THINKING|>",
    "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESULT|>", "<|END_RESULT|>",
    "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|begin|>", "<|content|>", "<|think|>", "<|tool_calls|>",
    "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>", "<|flush|>",
    "<|tool_response|>", "<|bot|>", "<|eos:x|>",
]
# fmt: on
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added tokens that are not special, as Qwen has them

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.title()} two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
    for name in ("multiply", "add")
]


@lru_cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [
        "The user asks the assistant to multiply and add numbers with a tool; the result is said in a system message.\n\n"
    ] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=450, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    return str(tokenizer.to_str())


def make_tokenizer(template: str | None, more: Sequence[str] = (), eos: str = "</s>") -> Any:
    """A small byte-level BPE with the marks of every family, and one template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained()), bos_token="<s>", eos_token=eos)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in more])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    tokenizer.chat_template = template
    return tokenizer


def template_text(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def _json_calls(calls: Sequence[ToolCall], said: str) -> str:
    texts = [f'<tool_call>\n{{"name": "{c.name}", "arguments": {json.dumps(c.arguments)}}}\n</tool_call>' for c in calls]
    return "\n".join(([said] if said else []) + texts)


def _hermes(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + _json_calls(calls, said)


def _qwen25(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    # Thinking and a call: what stands before the call is the content, with its white space cut at the end.
    head = ((f"<think>\n{thought}\n</think>\n\n" if thought else "") + said).rstrip() if calls else _hermes(thought, said, ())
    return _json_calls(calls, head)


def _llama(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    if calls:
        return f'{{"name": "{calls[0].name}", "parameters": {json.dumps(calls[0].arguments)}}}'
    return _hermes(thought, said, ())


def _mistral(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    texts = [f'{{"name": "{c.name}", "arguments": {json.dumps(c.arguments)}, "id": "{c.id}"}}' for c in calls]
    return said + ("[TOOL_CALLS][" + ", ".join(texts) + "]" if calls else "")


def _deepseek(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    texts = [f"<｜tool▁call▁begin｜>{c.name}\n{json.dumps(c.arguments)}<｜tool▁call▁end｜>" for c in calls]
    return (f"{thought}\n</think>\n\n" if thought else "") + said + "".join(texts)


def _gptoss(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    if calls:
        head = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        return f"{head} to=functions.{calls[0].name}<|channel|>commentary json<|message|>{json.dumps(calls[0].arguments)}"
    head = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    return f"{head}<|channel|>final<|message|>{said}"


def _glm(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    texts = [f"\n<tool_call>{c.name}\n{json.dumps(c.arguments)}\n</tool_call>" for c in calls]
    return (f"<think>{thought}</think>" if thought else "") + said + "".join(texts)


def _counting(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    return said + "".join(f"<tool_call>{c.name}{json.dumps(c.arguments)}</tool_call>" for c in calls)


def _wrapped(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    head = f"<|START_THINKING|>{thought}<|END_THINKING|>" if thought else ""
    if not calls:
        return f"{head}<|START_RESPONSE|>{said}<|END_RESPONSE|>"
    texts = [f'\n    {{"tool_name": "{c.name}", "parameters": {json.dumps(c.arguments)}}}' for c in calls]
    return f"{head}<|START_ACTION|>[{','.join(texts)}\n]<|END_ACTION|>"


def _sections(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    def section(tag: str, text: str, *more: str) -> str:
        return f"<|open|>{' '.join([tag, *more])}<|sep|>{text}<|close|>{tag}<|sep|>"

    texts = []
    for i, call in enumerate(calls):
        values = [section("argument", json.dumps(value), f'key="{key}"') for key, value in call.arguments.items()]
        texts.append(section("call", "".join(values), f'tool="{call.name}"', f'index="{i + 1}"'))
    # The prompt has opened the thought.
    parts = f"{thought}<|close|>think<|sep|>" + section("response", said) + (section("tools", "".join(texts)) if texts else "")
    return f"{parts}<|close|>message<|sep|>"


def _segments(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    parts = [f"<|think|>{thought}"] if thought else []
    parts += [f"<|content|>{said}"] if said else []
    texts = [
        f"<|tool_call:begin|>{c.id}<|tool_call:name|>{c.name}<|tool_call:args|>{json.dumps(c.arguments)}<|tool_call:end|>"
        for c in calls
    ]
    parts += ["<|tool_calls|>" + "".join(texts)] if calls else []
    return "<|end|><|begin|>assistant".join(parts)


def _tagged(thought: str, said: str, calls: Sequence[ToolCall]) -> str:
    texts = []
    for call in calls:
        values = [f"<key:x>{key}</key:x><value:x>{value}</value:x>\n" for key, value in call.arguments.items()]
        texts.append(f"<call:x>{call.name}<sep:x>\n{''.join(values)}</call:x>\n")
    # The prompt has opened the thought.
    return f"{thought}</think:x>{said}" + (f"<calls:x>\n{''.join(texts)}</calls:x>" if calls else "")


@dataclass(frozen=True)
class Family:
    """A template and its model's habits. `ends` are the end-of-turn tokens after a plain reply and after calls."""

    name: str
    reply: Callable[[str, str, Sequence[ToolCall]], str]
    ends: tuple[str, str]
    thinks: bool = True
    says_with_calls: bool = True
    max_calls: int = 2
    native: bool = True  # knows tools
    field: str = ""  # the key of the thought; without one the thought is a part of the content

    def end(self, calls: Sequence[ToolCall]) -> str:
        return self.ends[bool(calls)]

    def dicts(self, messages: Sequence[Message], parts: dict[int, tuple[str, str]]) -> list[dict[str, Any]]:
        """The messages as this template's users write them; `parts` has thought and text of the replies by index."""
        written: list[dict[str, Any]] = []
        for i, message in enumerate(messages):
            entry: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "assistant" and self.native:
                thought, said = parts[i]
                entry["content"] = said if self.field else self.reply(thought, said, ())
                if self.field and thought:
                    entry[self.field] = thought
                if message.tool_calls:
                    if self.name == "deepseek":
                        entry["content"] = entry["content"] or None
                    entry["content"] = entry["content"].rstrip() if entry["content"] else entry["content"]
                    entry["tool_calls"] = [self._call(call) for call in message.tool_calls]
            elif message.role == "tool":
                if self.native:
                    entry |= {"tool_call_id": message.tool_call_id, "name": message.name}
                else:
                    entry["role"] = "user"
            written.append(entry)
        return written

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = json.dumps(call.arguments) if self.name == "deepseek" else call.arguments
        return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", _hermes, ("<|im_end|>", "<|im_end|>"), max_calls=0, native=False),
        Family("qwen25", _qwen25, ("<|im_end|>", "<|im_end|>")),
        Family("qwen3", _hermes, ("<|im_end|>", "<|im_end|>")),
        Family("llama3", _llama, ("<|eot_id|>", "<|eot_id|>"), says_with_calls=False, max_calls=1),
        Family("mistral", _mistral, ("</s>", "</s>"), thinks=False),
        Family("gemma", _hermes, ("<end_of_turn>", "<end_of_turn>"), max_calls=0, native=False),
        Family("deepseek", _deepseek, ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>")),
        Family("gptoss", _gptoss, ("<|return|>", "<|call|>"), says_with_calls=False, max_calls=1, field="thinking"),
        Family("glm", _glm, ("<|user|>", "<|observation|>")),
        Family("counting", _counting, ("<|im_end|>", "<|im_end|>"), thinks=False),
        Family("wrapped", _wrapped, ("<|END_TURN|>", "<|END_TURN|>"), says_with_calls=False, field="reasoning_content"),
        Family("sections", _sections, ("<|end_of_msg|>", "<|end_of_msg|>"), field="reasoning_content"),
        Family("segments", _segments, ("<|flush|>", "<|calls|>"), field="reasoning"),
        Family("tagged", _tagged, ("<|eos:x|>", "<|eos:x|>"), field="reasoning_content"),
        Family("trailing", _hermes, ("<|end|>", "<|end|>"), max_calls=0, native=False),
    )
}


def completion(ids: Sequence[int], stop: str = "stop") -> Completion:
    zeros = [0] * len(ids)
    return Completion(text="", token_ids=list(ids), logprobs=[0.0] * len(ids), versions=zeros, stop=stop)  # type: ignore[arg-type]


def squeeze(text: str) -> str:
    return "".join(text.split())
