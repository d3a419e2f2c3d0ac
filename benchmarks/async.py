"""Training with long-tailed tools: chains trained per second when sampling and learning take turns, and when they overlap.

In: nothing (the bundled model, the two-call arithmetic task of recipes/quickstart.toml). Every tool call takes a time drawn
from a log-normal distribution (`--median-s`, `--sigma`). Out: a table with one row per mode, or with --json the figures by
name. All modes train the same number of steps from the same weights on the same tasks, one run after another, for each seed.
The reward is the mean over the last quarter of the steps. The age of tokens is in versions of the weights, when trained.

    python benchmarks/async.py --json out.json           # modes sync, wait and mask; three seeds
    python benchmarks/async.py --median-s 0 --modes sync wait --model smollm2 --device cuda   # tools that take no time
    python benchmarks/async.py --recipe smollm2_code --modes sync wait --seeds 1 --tasks 16   # a recipe, with its own tools

With --recipe the task, the tools and the learning rate are the recipe's; --model, --median-s and --sigma do not apply.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import agentfly
from agentfly.errors import AgentFlyError
from agentfly.tools import add, multiply, subtract
from agentfly.watch.progress import Progress

BAR = 2.0  # times the chains per second of taking turns
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "wait": {"max_lag": 3, "depth": 2, "at_limit": "wait"},
    "mask": {"max_lag": 3, "depth": 2, "at_limit": "mask"},
}


class Quiet(Progress):
    """Shows nothing but its notes."""

    def step(self, step: int, metrics: Any) -> None:
        pass

    def chains(self, done: int, total: int) -> None:
        pass


def slow_tools(median_s: float, sigma: float, seed: int) -> list[Any]:
    """The arithmetic tools, each call with a delay."""
    times = random.Random(seed)

    def slow(plain: Any) -> Any:
        @agentfly.tool(name=plain.name, description=plain.description, register=False)
        async def call(a: float, b: float) -> Any:
            if median_s:
                await asyncio.sleep(median_s * math.exp(times.gauss(0.0, sigma)))
            return await plain(a, b)

        return call

    return [slow(each) for each in (add, subtract, multiply)]


def train_recipe(mode: str, seed: int, options: argparse.Namespace, progress: Progress, folder: str) -> Any:
    """Train what the recipe describes, with the mode's keys."""
    keys: dict[str, Any] = {
        "seed": seed, "run.dir": folder, "run.name": "run", "run.trackers": ["jsonl"],
        "rollout.num_tasks": options.tasks, "rollout.num_chains": 8,
        "train.steps": options.steps, "train.save_every": 0, "train.validate_every": 0, "train.validate_at_start": False,
        "data.validation_count": 16, **{f"rollout.{key}": value for key, value in MODES[mode].items()},
    }  # fmt: skip
    if options.device:
        keys["agent.engine.device"] = options.device
    return agentfly.train(
        agentfly.Config.load(options.recipe, [f"{key}={json.dumps(value)}" for key, value in keys.items()] + options.set),
        progress=progress,
    )


def train_arithmetic(mode: str, seed: int, options: argparse.Namespace, progress: Progress, folder: str) -> Any:
    """Train the two-call arithmetic task with slow tools."""
    agent = agentfly.ReactAgent(
        options.model,
        tools=slow_tools(options.median_s, options.sigma, seed),
        reward="exact_match",
        max_turns=4,
        sampling={"max_tokens": 64},
        **({"engine": {"device": options.device}} if options.device else {}),
    )
    return agentfly.train(
        agent,
        "arithmetic",
        run={"dir": folder, "name": "run"},
        progress=progress,
        seed=seed,
        train_count=4000,
        validation_count=16,
        validate_at_start=False,
        validate_every=0,
        steps=options.steps,
        save_every=0,
        num_tasks=options.tasks,
        num_chains=8,
        lr=2e-4,
        warmup_steps=3,
        max_tokens_per_batch=4096,
        clip_high=0.28,
        **MODES[mode],
    )


def run(mode: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Train once. Returns the figures of the run."""
    started: list[float] = []

    class Timed(Quiet):
        def step(self, step: int, metrics: Any) -> None:
            started.append(time.perf_counter())

    train = train_recipe if options.recipe else train_arithmetic
    with tempfile.TemporaryDirectory() as folder:
        result = train(mode, seed, options, Timed(options.steps), folder)
    history = result.history
    tail = history[-max(1, len(history) // 4) :]
    # Without the first step, which has nothing to overlap with in any mode.
    seconds = started[-1] - started[0]
    return {
        "chains_per_s": options.tasks * 8 * (len(history) - 1) / seconds,
        "step_s": seconds / (len(history) - 1),
        "reward": statistics.fmean(row["reward/mean"] for row in tail),
        "lag_mean": statistics.fmean(row.get("train/lag_mean", 0.0) for row in history),
        "lag_max": max(row.get("train/lag_max", 0.0) for row in history),
        "masked": statistics.fmean(row.get("train/masked_tokens", 0.0) for row in history),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=8, help="tasks of a step, 8 chains each")
    parser.add_argument("--median-s", type=float, default=0.5, help="median seconds of a tool call")
    parser.add_argument("--sigma", type=float, default=1.0, help="sigma of the log-normal distribution")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--device", default="")
    parser.add_argument("--recipe", help="train this recipe instead of arithmetic with slow tools")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config key, with --recipe")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.set and not options.recipe:
        parser.error("--set needs --recipe")
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in options.modes}
    for seed in range(options.seeds):
        for mode in options.modes:  # modes in turn, so that a busy machine slows all of them down
            found[mode].append(run(mode, seed, options))
            print(f"seed {seed} {mode}: {found[mode][-1]}", file=sys.stderr, flush=True)
    figures: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items() if k != "json"}, "modes": MODES}
    print(f"{'mode':8} {'chains/s':>9} {'ratio':>6} {'reward':>14} {'lag mean':>9} {'lag max':>8} {'masked':>7}")
    for mode, runs in found.items():
        rates = [each["chains_per_s"] for each in runs]
        rewards = [each["reward"] for each in runs]
        base = [each["chains_per_s"] for each in found[options.modes[0]]]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates, base, strict=True))
        spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        row = {
            "chains_per_s": statistics.median(rates),
            f"times_{options.modes[0]}": ratio,
            "reward": statistics.fmean(rewards),
            "reward_stdev": spread,
            "lag_mean": statistics.fmean(each["lag_mean"] for each in runs),
            "lag_max": max(each["lag_max"] for each in runs),
            "masked": statistics.fmean(each["masked"] for each in runs),
            "runs": runs,
        }
        figures[mode] = row
        print(
            f"{mode:8} {row['chains_per_s']:9.2f} {ratio:6.2f} {row['reward']:7.3f} ± {spread:.3f} {row['lag_mean']:9.2f} "
            f"{row['lag_max']:8.0f} {row['masked']:7.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except AgentFlyError as error:
        sys.exit(str(error))
