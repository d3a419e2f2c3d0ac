"""Held-out success of a pocket model, measured by a small rollout with a key-value cache and simulated tools.

The build uses it to judge a model without the package's engine and agents.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from chat import IM_END, code_system, extension_text, react_system, start_text
from dialogues import Lookup, lookup
from toolbox import arithmetic_tools

from agentfly.envs.code.env import CodeInterpreter
from agentfly.envs.code.tasks import easy_code_tasks
from agentfly.envs.code.tools import describe
from agentfly.pocket.demos import CANONICAL, DemoTool
from agentfly.pocket.tasks import OPERATIONS, arithmetic, one_step_arithmetic

KINDS = ("one_step", "readme", "two_step", "two_step_native", "lookup", "code")
MAX_TURNS, MAX_NEW = 5, 48
AB = (("a", "number"), ("b", "number"))
Form = Literal["react", "native", "code"]
BLOCK = re.compile(r"```python\n(.*?)\n```", re.DOTALL)


@dataclass(slots=True)
class Chain:
    """One attempt: its ids so far, which of them were sampled, and how it ended."""

    ids: list[int]
    answer: str
    observe: Callable[[str, dict[str, Any]], str]
    form: Form = "react"
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prediction: str | None = None
    text: str = ""
    turns: int = 0

    def __post_init__(self) -> None:
        self.mask, self.logprobs = [0] * len(self.ids), [0.0] * len(self.ids)

    @property
    def right(self) -> bool:
        return self.prediction is not None and self.prediction.strip() == self.answer


@torch.inference_mode()
def sample(
    model: Any, prompts: Sequence[list[int]], stop: int, pad: int, temperature: float, generator: torch.Generator
) -> Any:
    """Replies and their log-probs, one per prompt, sampled together with a cache, up to `stop` or MAX_NEW tokens."""
    from transformers import DynamicCache

    device = model.device
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    replies: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    going = [True] * len(prompts)
    for _ in range(MAX_NEW):
        output = model(input_ids=ids, attention_mask=attention, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        scores = torch.log_softmax(output.logits[:, -1].float() / max(temperature, 1e-4), dim=-1)
        # Drawn on the CPU, so that a seed gives the same chains on every device.
        new = torch.multinomial(scores.exp().cpu(), 1, generator=generator).to(device)
        for row, (token, score) in enumerate(zip(new[:, 0].tolist(), scores.gather(1, new)[:, 0].tolist(), strict=True)):
            if going[row]:
                replies[row].append(token)
                logprobs[row].append(score)
                going[row] = token != stop
        if not any(going):
            break
        ids, positions = new, positions[:, -1:] + 1
        attention = torch.cat([attention, torch.ones_like(new)], dim=1)
    return replies, logprobs


def play(
    model: Any, tokenizer: Any, chains: Sequence[Chain], *, temperature: float = 1.0, seed: int = 0, batch: int = 256
) -> None:
    """Run chains to their end, in place."""
    stop, pad = tokenizer.convert_tokens_to_ids(IM_END), tokenizer.pad_token_id
    generator = torch.Generator().manual_seed(seed)
    for offset in range(0, len(chains), batch):
        going = list(chains[offset : offset + batch])
        for _ in range(MAX_TURNS):
            if not going:
                break
            replies, logprobs = sample(model, [chain.ids for chain in going], stop, pad, temperature, generator)
            for chain, reply, scores in zip(going, replies, logprobs, strict=True):
                chain.ids = chain.ids + reply
                chain.mask = chain.mask + [1] * len(reply)
                chain.logprobs = chain.logprobs + scores
                chain.turns += 1
            texts = [tokenizer.decode(reply, skip_special_tokens=True) if reply[-1] == stop else "" for reply in replies]
            # Cells of Python run in processes of their own, so threads are enough to run several at once.
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                observations = list(pool.map(read, going, texts))
            for chain, text, seen in zip(going, texts, observations, strict=True):
                chain.text += text + "\n"
                if seen is not None:
                    native = chain.form == "native"
                    message = {
                        "role": "tool" if native else "user",
                        "content": seen if native else f"Observation: {seen}",
                    }
                    new = tokenizer(extension_text([message]), add_special_tokens=False)["input_ids"]
                    chain.ids = chain.ids + new
                    chain.mask = chain.mask + [0] * len(new)
                    chain.logprobs = chain.logprobs + [0.0] * len(new)
                    chain.text += f"[{seen}]\n"
            going = [chain for chain in going if chain.prediction is None and chain.mask[-1] == 0]


def read(chain: Chain, text: str) -> str | None:
    """What comes back to the model, or None when the chain is over (an answer, or a reply that is neither)."""
    if chain.form == "code":
        block, answered = BLOCK.search(text), re.search(r"^Answer: (.*)$", text, re.MULTILINE)
        chain.prediction = answered[1] if answered else None
        return chain.observe("python", {"code": block[1]}) if block and not answered else None
    if chain.form == "native":
        found = re.search(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
        if not found:
            chain.prediction = text if "<tool_call>" not in text else None
            return None
        call = _load(found[1])
        name, arguments = (call.get("name"), call.get("arguments")) if call else (None, None)
    else:
        found = re.search(r"\nAction: (\w+)\nInput: (.*)$", text, re.DOTALL)
        if not found:
            answered = re.search(r"\nAnswer: (.*)$", text, re.DOTALL)
            chain.prediction = answered[1] if answered else None
            return None
        name, arguments = found[1], _load(found[2])
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "Error: the input is not valid JSON"
    return chain.observe(name, arguments)


def _load(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Case:
    """A held-out task and the world it is tried in."""

    question: str
    tools: Sequence[DemoTool]
    answer: str
    observe: Callable[[str, dict[str, Any]], str]
    form: Form = "react"

    def chain(self, tokenizer: Any) -> Chain:
        user = {"role": "user", "content": self.question}
        if self.form == "native":
            text = start_text([user], [tool.schema() for tool in self.tools])
        else:
            system = code_system() if self.form == "code" else react_system([tool.line() for tool in self.tools])
            text = start_text([{"role": "system", "content": system}, user])
        return Chain(tokenizer(text, add_special_tokens=False)["input_ids"], self.answer, self.observe, self.form)


def arithmetic_world(tools: Sequence[DemoTool]) -> Callable[[str, dict[str, Any]], str]:
    """Simulated arithmetic tools: strict about names and types, as the real ones are."""
    by_name = {tool.name: tool for tool in tools}

    def observe(name: str, arguments: dict[str, Any]) -> str:
        tool = by_name.get(name)
        if tool is None or tool.kind not in OPERATIONS:
            return "Error: unknown tool; use one of the tools above"
        values: list[Any] = [arguments.get(argument) for argument, _ in tool.arguments]
        if len(arguments) != len(values) or not all(isinstance(value, int) for value in values):
            return "Error: wrong type: expected a number"
        return tool.observe(*values)

    return observe


def lookup_world(task: Lookup) -> Callable[[str, dict[str, Any]], str]:
    """The facts of one task, found only by the right query; arithmetic works as ever."""
    facts = {tool.input(*values): observation for tool, values, observation in task.calls}
    arithmetic = arithmetic_world(task.tools)
    tool_names = {tool.name for tool, _, _ in task.calls if tool.kind == "lookup"}

    def observe(name: str, arguments: dict[str, Any]) -> str:
        if name in tool_names:
            return facts.get(json.dumps(arguments, ensure_ascii=False), "nothing found")
        return arithmetic(name, arguments)

    return observe


def run_cell(name: str, arguments: dict[str, Any]) -> str:
    """One cell in a sandbox: what a model writes is run nowhere else."""

    async def run() -> str:
        interpreter = CodeInterpreter()
        try:
            return describe(await interpreter.run(arguments["code"]), interpreter.limit_s)
        finally:
            await interpreter.close()

    return asyncio.run(run())


def held_out(kind: str, count: int, seed: int = 0) -> list[Case]:
    """Tasks that no demonstration used."""
    rng = random.Random(f"{kind} {seed}")
    if kind == "lookup":
        tasks = [lookup(rng) for _ in range(count)]
        return [Case(task.question, task.tools, task.answer, lookup_world(task)) for task in tasks]
    if kind == "readme":
        tool = DemoTool("multiply", "multiply", CANONICAL["multiply"], AB, ("first factor", "second factor"), floats=True)
        return [Case("What is 12 times 7?", [tool], "84", arithmetic_world([tool]))] * count
    if kind == "code":
        return [Case(row["question"], (), row["answer"], run_cell, "code") for row in easy_code_tasks("test", count, seed)]
    found = []
    form: Form = "native" if kind == "two_step_native" else "react"
    for row in one_step_arithmetic("test", count, seed) if kind == "one_step" else arithmetic("test", count, seed):
        tools = list(arithmetic_tools(rng, set(row["operations"]), plain=kind != "one_step").values())
        found.append(Case(row["question"], tools, row["answer"], arithmetic_world(tools), form))
    return found


def success(model: Any, tokenizer: Any, kind: str, count: int = 800, temperature: float = 1.0, seed: int = 0) -> float:
    """The share of held-out chains that end with the right answer."""
    chains = [case.chain(tokenizer) for case in held_out(kind, count, seed)]
    play(model, tokenizer, chains, temperature=temperature, seed=seed, batch=1024 if model.device.type == "cuda" else 128)
    return sum(chain.right for chain in chains) / len(chains)
