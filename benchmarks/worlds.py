"""The worlds in figures: steps per second, start-up and memory of 1, 64 and 1,024 instances in our pools, beside the originals.

Each figure is measured in a fresh process (see `agentfly.envs.bench`). Beside them stand the originals: ScienceWorld's own
Python wrapper in the same run, with the same actions, where the package and Java are there; for ALFWorld and WebShop, which
cannot be installed beside ours, what was recorded when they were run on one two-core machine. One instance of ours is compared
with one of theirs. A world that cannot be used here is named as skipped, with what it lacks. `--json PATH` writes the figures.

    python benchmarks/worlds.py                                     # table
    python benchmarks/worlds.py --seconds 10 --json out.json        # figures: rows, originals, ratios, skipped
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

from agentfly import plugins
from agentfly.envs.bench import HEADER, Figures, bench_world, memory_of_tree
from agentfly.envs.worlds import describe_world

WORLDS = ("alfworld", "webshop", "scienceworld", "search", "code")
RECORDED = {"alfworld": 8.0, "webshop": 13.0}
BARS = {"alfworld": 100.0, "webshop": 100.0, "scienceworld": 4.0}
BAR_MB = 4096.0  # 1,024 instances of ALFWorld and as many of WebShop, together


def wrapper_figures(seconds: float) -> dict[str, float]:
    """ScienceWorld's own wrapper: the tasks and the actions that ours is measured with."""
    from scienceworld import ScienceWorldEnv

    from agentfly.envs.scienceworld.env import ScienceWorld

    told = ScienceWorld.conformance()
    before, began = memory_of_tree(os.getpid()), time.perf_counter()
    env = ScienceWorldEnv("", envStepLimit=10_000)
    start_s = time.perf_counter() - began
    rng, steps = random.Random(0), 0
    try:
        fields = told["tasks"][0].fields
        env.load(fields["task_name"], fields["variation"], fields["simplifications"])
        began = time.perf_counter()
        env.reset()
        reset_s = time.perf_counter() - began
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            _, _, done, _ = env.step(told["actions"](rng, "")[1]["action"])
            steps += 1
            if done:
                env.reset()
        took = time.perf_counter() - began
        memory_mb = memory_of_tree(os.getpid()) - before
    finally:
        env.close()
    return {"steps_per_s": steps / took, "start_s": start_s, "reset_s": reset_s, "memory_mb": memory_mb}


def originals(names: list[str], seconds: float) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        name: {"steps_per_s": value, "from": "recorded"} for name, value in RECORDED.items() if name in names
    }
    if "scienceworld" in names:
        found["scienceworld"] = {**wrapper_figures(seconds), "from": "its wrapper, in this run"}
    return found


def judge(rows: list[Figures], beside: dict[str, dict[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """How many times as fast one of ours is, and the bars that were missed."""
    ratios: dict[str, float] = {}
    missed: list[str] = []
    for name, original in beside.items():
        one = min((row for row in rows if row.world == name), key=lambda row: row.instances)
        ratios[name] = one.steps_per_s / original["steps_per_s"]
        if ratios[name] < BARS[name]:
            missed.append(f"{name}: {ratios[name]:.1f} times as fast as the original, the bar is {BARS[name]:g}")
    together = [row for row in rows if row.instances == 1024 and row.world in RECORDED]
    total = sum(row.memory_mb for row in together)
    if total > BAR_MB:
        missed.append(f"1,024 instances each of {' and '.join(row.world for row in together)}: {total:,.0f} MB")
    missed += [f"{row.world}, {row.instances} instances: {row.error}" for row in rows if row.error]
    return ratios, missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(WORLDS), metavar="NAME,...")
    parser.add_argument("--instances", default="1,64,1024", metavar="N,...")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    numbers = [int(word) for word in arguments.instances.split(",")]
    rows: list[Figures] = []
    skipped: dict[str, str] = {}
    print(HEADER)
    for name in arguments.worlds.split(","):
        problem = describe_world(name).problem if name in plugins.names("envs") else "there is no such world"
        if problem:
            skipped[name] = problem
            continue
        for figures in bench_world(name, numbers, seconds=arguments.seconds):
            print(figures, flush=True)
            rows.append(figures)
    for name, why in skipped.items():
        print(f"{name:<14} skipped: {why}")
    beside = originals(list(dict.fromkeys(row.world for row in rows)), arguments.seconds)
    ratios, missed = judge(rows, beside)
    print()
    for name, original in beside.items():
        more = f", {original['memory_mb']:,.0f} MB" if "memory_mb" in original else ""
        print(
            f"{name}: original {original['steps_per_s']:.1f} steps/s{more} ({original['from']}); ours {ratios[name]:,.1f} times"
        )
    for sentence in missed:
        print(f"MISSED  {sentence}")
    if arguments.json:
        record = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "seconds": arguments.seconds,
            "rows": [row.to_dict() for row in rows],
            "originals": beside,
            "ratios": {name: round(value, 2) for name, value in ratios.items()},
            "skipped": skipped,
            "missed": missed,
        }
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
