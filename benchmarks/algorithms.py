"""Trains the bundled model on the quick start with each algorithm and number of optimizer steps, over seeds.

Prints a table: held-out success before and after, and the mean success of the chains while training, which is higher the
sooner a run learns. `--json` stores every run; runs that it holds already are not made again.

    python benchmarks/algorithms.py --json algorithms.json                       # all algorithms, one step per update
    python benchmarks/algorithms.py --algorithms grpo gspo cispo --minibatches 1 2 4 --json minibatches.json
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

import agentfly
from agentfly.config import Config
from agentfly.learn.algorithms import ALGORITHMS
from agentfly.watch.progress import Progress

Run = dict[str, Any]


def train(algorithm: str, minibatches: int, seed: int, options: argparse.Namespace) -> Run:
    """One run: its settings, its held-out success before and after, and the success of the chains of each step."""
    settings = [
        f"algorithm={algorithm}", f"seed={seed}", f"train.num_minibatches={minibatches}", f"train.steps={options.steps}",
        f"rollout.num_tasks={options.tasks}", f"data.validation_count={options.held_out}", "run.threads=1",
    ]  # fmt: skip
    began = time.process_time()
    with TemporaryDirectory() as folder:
        progress = Progress(options.steps, Console(file=io.StringIO()))
        result = agentfly.train(Config.load("quickstart", [*settings, f"run.dir={folder}"]), progress=progress)
    return {
        "algorithm": algorithm,
        "minibatches": minibatches,
        "seed": seed,
        "command": " ".join(["agentfly train quickstart", *settings]),
        "before": result.before["validation/success"],
        "after": result.after["validation/success"],
        "held_out_chains": [result.after["validation/scored"], result.after["validation/chains"]],
        "success": [round(row["rollout/success"], 4) for row in result.history],
        "clip_fraction": [round(row.get("train/clip_fraction", 0.0), 4) for row in result.history],
        "cpu_s": round(time.process_time() - began, 1),
    }


def table(runs: list[Run]) -> str:
    lines = ["| algorithm | optimizer steps | seeds | held-out before | after | mean ± sd | while training | CPU s |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    rows: dict[tuple[str, int], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        rows.setdefault((run["algorithm"], run["minibatches"]), []).append(run)
    for (algorithm, minibatches), members in sorted(rows.items()):
        after, during = [run["after"] for run in members], [statistics.fmean(run["success"]) for run in members]
        cells = [
            algorithm, minibatches, len(members), _mean(run["before"] for run in members),
            ", ".join(f"{value:.3f}" for value in after), _spread(after), _spread(during),
            _mean(run["cpu_s"] for run in members),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _mean(values: Any) -> str:
    return f"{statistics.fmean(values):.3g}"


def _spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--minibatches", nargs="+", type=int, default=[1], help="optimizer steps per update")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=8, help="tasks of a step, with 8 chains each")
    parser.add_argument("--held-out", type=int, default=100, help="held-out tasks")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs: list[Run] = json.loads(options.json.read_text())["runs"] if options.json and options.json.exists() else []
    for seed in options.seeds:
        for minibatches in options.minibatches:
            for algorithm in options.algorithms:
                if any((run["algorithm"], run["minibatches"], run["seed"]) == (algorithm, minibatches, seed) for run in runs):
                    continue
                runs.append(train(algorithm, minibatches, seed, options))
                print(runs[-1], file=sys.stderr, flush=True)
                if options.json:
                    command = f"python benchmarks/algorithms.py {' '.join(sys.argv[1:])}"
                    options.json.write_text(json.dumps({"command": command, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    main()
