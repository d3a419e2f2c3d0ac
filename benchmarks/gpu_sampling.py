"""Sampling: how fast the local engine decodes and plays chains of several turns, beside `model.generate`, and how true its
log-probs are.

In: a model, a number of chains, how many steps. Out: one row of figures.

decode   every prompt is read first (one token each, in its chain's session) and not timed; then all chains go on together for
         `steps` tokens. Of `generate` the time with one new token is taken off the time with several: prefill is in neither.
agent    chains of four turns, each at its own pace, `chains` of them in flight; up to eight in turn take each place. A reply
         has `reply` tokens, a tool sleeps up to `latency_s`, an observation has 16 to 64 tokens; eight siblings share a prompt.
         Only sampled tokens count, and all of the time. As many chains as are in flight are played before, untimed, so that
         what is prepared for each size of batch is there, as it is after the first step of a training. At last all are played
         once more with as many in flight as a rollout may admit, twice the engine's lanes ("full"): while some wait for their
         tools, others sample. `generate` plays as many chains as are in flight, turn by turn, padded, all waiting for the
         longest reply and the slowest tool; the first few steps of a turn are timed and their time is multiplied (a whole run
         would take minutes; `generate_steps` 0 runs it whole).
gap      mean and largest difference of the engine's log-probs and the learner's, over two turns; beside it what the format
         alone does: transformers' own forward pass on the same ids against the same weights in float32.
"""

from __future__ import annotations

import asyncio
import copy
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_models import Limits, NoText, Shape, clean, decode_limits, device_busy, peak_gib, seconds_of, sync

from agentfly.engines.local import LocalEngine
from agentfly.learn.batching import Rows
from agentfly.learn.model.logprobs import Scorer
from agentfly.learn.settings import OptimSettings
from agentfly.rollout.scheduler import fewer_collections
from agentfly.types import Request, Sample, Sampling

NUM_TURNS = 4
SIBLINGS = 8
WAVES = 8
MOST_CHAINS = 2048
STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Script:
    """One chain: its prompt, how long its replies are, what comes back, and how long the tool takes."""

    prompt: list[int]
    replies: list[int]
    observations: list[list[int]]
    latencies: list[float]


def open_engine(model: Any, cache: Any, chains: int, max_context: int) -> LocalEngine:
    """Room for every chain that is in flight, and half as much again for those that are over."""
    return LocalEngine(
        model,
        NoText(),
        max_context=max_context,
        max_batch=chains,
        max_step_tokens=STEP_TOKENS,
        kv_tokens=chains * max_context * 3 // 2,
        cache=cache,
        stop_ids=(),
    )


def ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(1, vocabulary) for _ in range(count)]


# ---- decode ----------------------------------------------------------------------------------------------------------------


def engine_decode(engine: LocalEngine, prompts: Sequence[list[int]], steps: int) -> float:
    """Seconds in which every chain draws `steps` tokens, its prompt being cached already."""

    async def ask(number: int, history: list[int], count: int) -> list[int]:
        completion = await engine.generate(Request(history, Sampling(max_tokens=count), f"{number}"))
        assert len(completion.token_ids) == count
        return history + completion.token_ids

    async def play() -> float:
        read = await asyncio.gather(*(ask(number, prompt, 1) for number, prompt in enumerate(prompts)))
        before = engine.stats()["prefilled_tokens"]
        began = time.perf_counter()
        await asyncio.gather(*(ask(number, history, steps) for number, history in enumerate(read)))
        seconds = time.perf_counter() - began
        again = engine.stats()["prefilled_tokens"] - before
        assert again == 0, f"{again:g} prompt tokens were read again while decoding was timed"
        return seconds

    engine.publish(engine.version + 1)  # nothing may be left over from the last time
    with fewer_collections():
        return asyncio.run(play())


def generate_decode(
    model: Any, prompts: Sequence[list[int]], steps: int, repeats: int, device: torch.device
) -> tuple[float, float]:
    """Seconds until the first token of a padded batch, and seconds of each step after it."""
    width = max(map(len, prompts))
    rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)

    def run(count: int) -> None:
        with torch.no_grad():
            model.generate(rows, attention_mask=mask, max_new_tokens=count, do_sample=True, temperature=1.0, top_k=0)

    run(2)
    first, whole = seconds_of(lambda: run(1), device, repeats), seconds_of(lambda: run(1 + steps), device, repeats)
    # On a noisy machine the difference can vanish; then the whole is the best that is known of a step, and not too kind to us.
    return first, (whole - first if whole > first else whole) / steps


def decode_row(
    model: Any, shape: Shape, limits: Limits, chains: int, *, caches: Sequence[str], context: int, steps: int,
    generate_steps: int, repeats: int,
) -> dict[str, Any]:  # fmt: skip
    device = next(model.parameters()).device
    rng = random.Random(chains)
    prompts = [ids(rng, max(2, context - steps // 2), shape.vocabulary) for _ in range(chains)]
    row: dict[str, Any] = {"shape": shape.name, "chains": chains, "context": context, "steps": steps}
    row |= decode_limits(model, shape, limits, chains, context)
    clean(device)
    first, step = generate_decode(model, prompts, generate_steps or steps, repeats, device)
    row |= {"generate_tokens_per_s": chains / step, "generate_first_s": first, "generate_peak_gib": peak_gib(device)}
    for cache in caches:
        clean(device)
        engine = open_engine(model, cache, chains, context + steps + 16)
        try:
            engine_decode(engine, prompts, min(steps, 16))
            busy, times = engine.stats()["busy_s"], []
            began = time.perf_counter()
            for _ in range(repeats):
                times.append(engine_decode(engine, prompts, steps))
            whole = time.perf_counter() - began
            speed = chains * steps / statistics.median(times)
            row |= {
                f"{cache}_tokens_per_s": speed,
                f"{cache}_over_generate": speed / row["generate_tokens_per_s"],
                f"{cache}_share_of_roofline": speed / row["roofline_tokens_per_s"],
                f"{cache}_engine_busy": (engine.stats()["busy_s"] - busy) / whole,
                f"{cache}_peak_gib": peak_gib(device),
                f"{cache}_device_busy": device_busy(lambda e=engine: engine_decode(e, prompts, min(steps, 32)), device),
            }
        finally:
            engine.shut()
            del engine
    return row


# ---- agent -----------------------------------------------------------------------------------------------------------------


def scripts(count: int, vocabulary: int, reply: tuple[int, int], prompt: int, latency_s: float, seed: int) -> list[Script]:
    rng = random.Random(seed)
    made: list[Script] = []
    for number in range(count):
        shared = made[-1].prompt if number % SIBLINGS else ids(rng, prompt, vocabulary)
        made.append(
            Script(
                shared,
                [rng.randint(*reply) for _ in range(NUM_TURNS)],
                [ids(rng, rng.randint(16, 64), vocabulary) for _ in range(NUM_TURNS)],
                [rng.uniform(0.0, latency_s) for _ in range(NUM_TURNS)],
            )
        )
    return made


def engine_agent(engine: LocalEngine, chains: Sequence[Script], at_once: int) -> float:
    """Seconds for all chains, each at its own pace."""

    async def play_all() -> None:
        places = asyncio.Semaphore(at_once)

        async def play(number: int, chain: Script) -> None:
            async with places:
                history = list(chain.prompt)
                for turn, length in enumerate(chain.replies):
                    completion = await engine.generate(Request(history, Sampling(max_tokens=length), f"chain {number}"))
                    assert len(completion.token_ids) == length
                    if turn + 1 < len(chain.replies):
                        await asyncio.sleep(chain.latencies[turn])
                        history = history + completion.token_ids + chain.observations[turn]
                engine.release(f"chain {number}")

        await asyncio.gather(*(play(number, chain) for number, chain in enumerate(chains)))

    engine.publish(engine.version + 1)
    with fewer_collections():
        began = time.perf_counter()
        asyncio.run(play_all())
        return time.perf_counter() - began


def generate_agent(model: Any, chains: Sequence[Script], vocabulary: int, steps: int, device: torch.device) -> float:
    """Seconds for one batch of chains, turn by turn; `steps` of each turn are run, the rest is multiplied (0: all are run)."""
    rng = random.Random(0)
    histories = [list(chain.prompt) for chain in chains]
    seconds = 0.0
    for turn in range(NUM_TURNS):
        longest = max(chain.replies[turn] for chain in chains)
        counted = min(steps or longest, longest)
        first, each = generate_decode(model, histories, max(1, counted - 1), 1, device)
        seconds += first + each * (longest - 1)
        if turn + 1 < NUM_TURNS:
            seconds += max(chain.latencies[turn] for chain in chains)
            for chain, history in zip(chains, histories, strict=True):
                history += ids(rng, chain.replies[turn], vocabulary) + chain.observations[turn]
    return seconds


def agent_row(
    model: Any, shape: Shape, chains: int, *, caches: Sequence[str], reply: tuple[int, int], prompt: int, latency_s: float,
    generate_steps: int,
) -> dict[str, Any]:  # fmt: skip
    device = next(model.parameters()).device
    waves = max(1, min(WAVES, MOST_CHAINS // chains))
    played = scripts(waves * chains, shape.vocabulary, reply, prompt, latency_s, chains)
    tokens = sum(sum(chain.replies) for chain in played)
    row: dict[str, Any] = {"shape": shape.name, "chains": chains, "turns": NUM_TURNS, "reply": list(reply), "tokens": tokens}
    row |= {"latency_s": latency_s, "prompt": prompt, "waves": waves}
    clean(device)
    batch = played[:chains]
    seconds = generate_agent(model, batch, shape.vocabulary, generate_steps, device)
    row["generate_tokens_per_s"] = sum(sum(chain.replies) for chain in batch) / seconds
    max_context = prompt + NUM_TURNS * (reply[1] + 64) + 16
    for cache in caches:
        clean(device)
        engine = open_engine(model, cache, chains, max_context)
        try:
            engine_agent(engine, scripts(chains, shape.vocabulary, reply, prompt, latency_s, chains + 1), chains)
            before = engine.stats()
            seconds = engine_agent(engine, played, chains)
            after = engine.stats()
            row |= {
                f"{cache}_tokens_per_s": tokens / seconds,
                f"{cache}_over_generate": tokens / seconds / row["generate_tokens_per_s"],
                f"{cache}_engine_busy": (after["busy_s"] - before["busy_s"]) / seconds,
            }
            for name in ("prefilled_tokens", "reused_tokens", "shared_tokens", "preempted"):
                row[f"{cache}_{name}"] = after[name] - before[name]
            row |= {
                f"{cache}_full_in_flight": engine.capacity,
                f"{cache}_full_tokens_per_s": tokens / engine_agent(engine, played, engine.capacity),
                f"{cache}_peak_gib": peak_gib(device),
            }
        finally:
            engine.shut()
            del engine
    return row


# ---- log-probs -------------------------------------------------------------------------------------------------------------


def gap_row(model: Any, shape: Shape, *, caches: Sequence[str], chains: int, prompt: int, steps: int) -> dict[str, Any]:
    """Chains of two turns, sampled by the engine and scored by the learner's own scorer."""
    parameter = next(model.parameters())
    device, kind = parameter.device, str(parameter.dtype).removeprefix("torch.")
    row: dict[str, Any] = {"shape": shape.name, "dtype": kind, "chains": chains}
    for cache in caches:
        clean(device)
        engine = open_engine(model, cache, chains, 2 * (prompt + steps) + 16)
        try:
            samples = asyncio.run(_sample(engine, shape.vocabulary, chains, prompt, steps))
        finally:
            engine.shut()
            del engine
        scorer, rows = Scorer(model), Rows(samples)
        shape_of_batches = scorer.prepare(OptimSettings())
        drawn = torch.cat([torch.tensor(sample.logprobs[sample.mask], dtype=torch.float32) for sample in samples])
        gaps = []
        with torch.no_grad():
            for batch in rows.batches(range(len(rows)), STEP_TOKENS, device, shape_of_batches):
                gaps.append((scorer(batch).logprobs.cpu() - drawn[batch.tokens.cpu()]).abs())
        sync(device)
        whole = torch.cat(gaps)
        row |= {
            f"{cache}_mean_gap": float(whole.mean()),
            f"{cache}_largest_gap": float(whole.max()),
            "mean_logprob": float(drawn.mean()),
            "tokens": len(whole),
        }
    if parameter.dtype != torch.float32:
        row["format_mean_gap"] = _format_gap(model, samples)
    return row


@torch.no_grad()
def _format_gap(model: Any, samples: Sequence[Sample]) -> float:
    """How far the log-probs of transformers' own forward pass, row by row, are from those of the same weights in float32."""
    full = copy.deepcopy(model).float()
    gaps = []
    for sample in samples:
        line = torch.tensor(sample.token_ids, device=model.device)[None]
        sampled = torch.tensor(sample.mask[1:], device=model.device, dtype=torch.bool)
        ours, exact = (
            torch.log_softmax(each(input_ids=line, use_cache=False).logits[0, :-1].float()[sampled], -1).gather(
                1, line[0, 1:][sampled][:, None]
            )
            for each in (model, full)
        )
        gaps.append((ours - exact).abs().flatten())
    return float(torch.cat(gaps).mean())


async def _sample(engine: LocalEngine, vocabulary: int, chains: int, prompt: int, steps: int) -> list[Sample]:
    async def play(number: int) -> Sample:
        rng = random.Random(number)
        tokens: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for turn in range(2):
            context = ids(rng, rng.randint(max(2, prompt // 2), prompt), vocabulary)
            tokens += context
            sampling = Sampling(max_tokens=steps, seed=2 * number + turn)
            completion = await engine.generate(Request(list(tokens), sampling, f"{number}"))
            tokens += completion.token_ids
            mask += [0] * len(context) + [1] * len(completion.token_ids)
            logprobs += [0.0] * len(context) + completion.logprobs
        nothing = [0.0] * len(tokens)
        return Sample(tokens, mask, logprobs, [0] * len(tokens), nothing, nothing, trajectory=f"{number}")

    return list(await asyncio.gather(*(play(number) for number in range(chains))))
