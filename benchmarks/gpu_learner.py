"""The learner: tokens per second, share of the device's matrix speed and memory of one update, in its several ways.

In: a shape. Out: a row of figures for each way: a plain loop of transformers, and ours padded, packed, with layers run again,
and with LoRA. All see the same rows (lengths from a quarter of the longest to the longest, a prompt of 64, the rest sampled) in
the same budget of tokens per pass. The plain loop keeps bfloat16 weights and optimizer states; ours keeps float32 masters. What
is computed twice is not counted twice, and the head is counted for sampled tokens alone, on both sides.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu_models import Limits, Shape, clean, make_model, num_body, peak_gib, seconds_of, update_flops

from agentfly.learn.batching import micro_batches
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.lora import adapt
from agentfly.learn.settings import LoraSettings, OptimSettings
from agentfly.types import Completion, Outcome, Task, Trajectory, Turn

PROMPT = 64
LONGEST = 1024
GROUP = 8


@dataclass(frozen=True, slots=True)
class Way:
    """How an update is computed. `optim` None: by a plain loop of transformers."""

    name: str
    optim: dict[str, Any] | None = None
    rank: int = 0


WAYS = (
    Way("plain transformers"),
    Way("padded", {"packing": "off"}),
    Way("packed", {"packing": "on"}),
    Way("packed, layers again", {"packing": "on", "gradient_checkpointing": True}),
    Way("packed, LoRA 32", {"packing": "on"}, rank=32),
)


@dataclass(frozen=True, slots=True)
class Row:
    prompt: list[int]
    reply: list[int]

    @property
    def length(self) -> int:
        """Tokens that go in: the last is only ever a target."""
        return len(self.prompt) + len(self.reply) - 1


def make_rows(num_tokens: int, vocabulary: int, longest: int = LONGEST, seed: int = 0) -> list[Row]:
    """Rows of together about `num_tokens` tokens, and as many as fill whole groups."""
    rng = random.Random(seed)
    prompt = min(PROMPT, max(2, longest // 8))
    rows: list[Row] = []
    while sum(row.length for row in rows) < num_tokens or len(rows) % GROUP:
        length = rng.randint(max(prompt + 2, longest // 4), longest)
        drawn = [rng.randrange(1, vocabulary) for _ in range(length)]
        rows.append(Row(drawn[:prompt], drawn[prompt:]))
    return rows


def as_groups(rows: list[Row], version: int, vocabulary: int) -> list[list[Trajectory]]:
    """Groups of siblings in which every second chain succeeded."""
    chains = []
    even = -math.log(vocabulary)
    for number, row in enumerate(rows):
        count = len(row.reply)
        completion = Completion(text="", token_ids=row.reply, logprobs=[even] * count, versions=[version] * count)
        task = Task(f"{number // GROUP}", ())
        chains.append(
            Trajectory(
                f"{number}", task, number % GROUP, turns=[Turn(row.prompt, True, completion)], outcome=Outcome.FINISHED,
                reward=float(number % 2),
            )
        )  # fmt: skip
    return [chains[start : start + GROUP] for start in range(0, len(chains), GROUP)]


def plain_step(model: Any, rows: list[Row], micro_tokens: int) -> Callable[[], None]:
    """What one writes without a framework: padded batches of like length, labels, AdamW on the weights as they are."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batches = micro_batches([row.length for row in rows], micro_tokens)
    sampled = sum(len(row.reply) for row in rows)

    def step() -> None:
        for members in batches:
            width = max(rows[number].length + 1 for number in members)
            whole = [rows[number].prompt + rows[number].reply for number in members]
            ids = torch.tensor([line + [0] * (width - len(line)) for line in whole], device=device)
            mask = torch.tensor([[1] * len(line) + [0] * (width - len(line)) for line in whole], device=device)
            labels = ids.masked_fill(mask == 0, -100)
            for at, number in enumerate(members):
                labels[at, : len(rows[number].prompt)] = -100
            counted = sum(len(rows[number].reply) for number in members)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
            (loss * counted / sampled).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def learner_row(
    shape: Shape, way: Way, limits: Limits, *, device: torch.device, dtype: torch.dtype, num_tokens: int, longest: int,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    clean(device)
    rows = make_rows(num_tokens, shape.vocabulary, longest)
    lengths, sampled = [row.length for row in rows], sum(len(row.reply) for row in rows)
    model = make_model(shape, device, dtype)
    body = num_body(model)
    found: dict[str, Any] = {
        "shape": shape.name,
        "way": way.name,
        "rows": len(rows),
        "tokens": sum(lengths),
        "sampled": sampled,
    }
    if way.optim is None:
        step = plain_step(model, rows, shape.micro_tokens)
        step()
        times = [seconds_of(step, device) for _ in range(repeats)]
    else:
        if way.rank:
            adapt(model, LoraSettings(rank=way.rank))
        optim = OptimSettings(lr=1e-6, max_tokens_per_batch=shape.micro_tokens, **way.optim)
        learner = PolicyLearner(model, "grpo", optim=optim)
        times = []
        for number in range(1 + repeats):
            groups = as_groups(rows, learner.version, shape.vocabulary)
            metrics: dict[str, float] = {}
            seconds = seconds_of(lambda g=groups, m=metrics: m.update(learner.update(g)), device)
            assert metrics["train/optimizer_steps"] == 1.0
            found["padding"] = metrics["train/padding_waste"]
            times += [seconds] if number else []  # the first makes kernels ready
    seconds = statistics.median(times)
    flops = update_flops(body, shape, lengths, sampled, frozen=bool(way.rank))
    return found | {
        "seconds": seconds,
        "tokens_per_s": sum(lengths) / seconds,
        "mfu": flops / seconds / limits.flops_per_s,
        "peak_gib": peak_gib(device),
    }
