"""Generated tokens per second of the local engine, beside `model.generate` on a padded batch.

In: nothing (a Llama with random weights is made here). Out: a table, or with --json the figures by name. Both sides play the
same chains: mixed prompt lengths, three turns, a reply length drawn per chain and turn, 16 to 64 new tokens of observation
after each reply; same weights, same plain sampling at temperature 1. `generate` pads the batch, runs each turn to its longest
reply and reads every prompt again; only the tokens that a chain asked for are counted, on both sides. Nothing is shared
between chains: no two prompts begin alike.

    python benchmarks/engine.py                  # table
    python benchmarks/engine.py --json out.json  # figures: tokens_per_s_32, generate_tokens_per_s_32, speedup_32, ...
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NUM_TURNS = 3
BAR = 3.0  # times `generate`, at 32 chains


@dataclass(frozen=True)
class Chain:
    """One chain's script: its prompt, then per turn how long the reply is and what comes back."""

    prompt: list[int]
    replies: list[int]
    observations: list[list[int]]


class NoText:
    """The text of a reply is not measured, so no tokenizer is needed."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""


def make_model(hidden: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = hidden // 32
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if heads % 2 else heads // 2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def make_chains(count: int, seed: int) -> list[Chain]:
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(1, 2048) for _ in range(rng.randint(low, high))]

    return [
        Chain(ids(40, 160), [rng.randint(8, 96) for _ in range(NUM_TURNS)], [ids(16, 64) for _ in range(NUM_TURNS)])
        for _ in range(count)
    ]


def by_generate(model: Any, chains: list[Chain]) -> float:
    """Seconds for all chains, turn by turn, as one left-padded batch."""
    began = time.perf_counter()
    histories = [list(chain.prompt) for chain in chains]
    for turn in range(NUM_TURNS):
        width = max(map(len, histories))
        ids = torch.tensor([[0] * (width - len(history)) + history for history in histories])
        mask = torch.tensor([[0] * (width - len(history)) + [1] * len(history) for history in histories])
        longest = max(chain.replies[turn] for chain in chains)
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0)
        for chain, history, row in zip(chains, histories, out[:, width:].tolist(), strict=True):
            history += row[: chain.replies[turn]] + chain.observations[turn]
    return time.perf_counter() - began


def by_engine(engine: Any, chains: list[Chain]) -> float:
    """Seconds for all chains, each at its own pace."""
    from agentfly.types import Request, Sampling

    async def play(chain: Chain, session: str) -> None:
        history = list(chain.prompt)
        for length, observation in zip(chain.replies, chain.observations, strict=True):
            completion = await engine.generate(Request(history, Sampling(max_tokens=length), session))
            assert len(completion.token_ids) == length
            history += completion.token_ids + observation
        engine.release(session)

    async def play_all() -> None:
        await asyncio.gather(*(play(chain, f"{i}") for i, chain in enumerate(chains)))

    engine.publish(engine.version + 1)  # nothing may be left over from the last repeat
    began = time.perf_counter()
    asyncio.run(play_all())
    return time.perf_counter() - began


def measure(model: Any, engine: Any, count: int, repeats: int) -> dict[str, float]:
    """Medians over repeats that alternate between the two sides, so that a busy machine is busy for both."""
    ours, theirs = [], []
    by_engine(engine, make_chains(count, 99))
    by_generate(model, make_chains(1, 99))
    for repeat in range(repeats):
        chains = make_chains(count, repeat)
        tokens = sum(sum(chain.replies) for chain in chains)
        theirs.append(tokens / by_generate(model, chains))
        ours.append(tokens / by_engine(engine, chains))
    return {
        f"tokens_per_s_{count}": statistics.median(ours),
        f"generate_tokens_per_s_{count}": statistics.median(theirs),
        f"speedup_{count}": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here instead of printing a table")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()

    from agentfly.engines.local import LocalEngine

    torch.set_num_threads(options.threads)
    model = make_model(options.hidden, options.layers)
    engine = LocalEngine(model, NoText(), stop_ids=())
    size = sum(weights.numel() for weights in model.parameters()) / 1e6
    figures: dict[str, float] = {"million_parameters": size}
    for count in options.chains:
        figures |= measure(model, engine, count, options.repeats)
    engine.shut()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
        return
    print(f"Llama with {size:.1f} million parameters, {options.threads} thread(s), {NUM_TURNS} turns; useful tokens per second")
    print(f"{'chains':>8} {'generate':>10} {'engine':>10} {'speedup':>9}")
    for count in options.chains:
        row = [figures[f"{name}_{count}"] for name in ("generate_tokens_per_s", "tokens_per_s", "speedup")]
        print(f"{count:>8} {row[0]:>10.0f} {row[1]:>10.0f} {row[2]:>8.2f}x")
    if 32 in options.chains:
        met = "met" if figures["speedup_32"] >= BAR else "MISSED"
        print(f"bar: {BAR:g}x at 32 chains: {met}")


if __name__ == "__main__":
    main()
