"""Trains a bundled model on a recipe with each algorithm and number of optimizer steps, over seeds, several runs at once.

Prints a table: held-out success before and after, and the mean success of the chains while training, which is higher the
sooner a run learns. `--json` stores every run as it ends, with what each of its steps measured, as `benchmarks/curves.py draw`
reads it; runs that the file holds already are not made again. Algorithms with a teacher are trained if `--teacher` names one.

    python benchmarks/algorithms.py --json algorithms.json                       # all algorithms, one step per update
    python benchmarks/algorithms.py --algorithms grpo gspo cispo --minibatches 1 2 4 --json minibatches.json
    python benchmarks/algorithms.py --recipe alfworld --set train.lr=1e-4 --seeds 0 1 2 3 4 --json alfworld.json
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

import agentfly
from agentfly.config import Config
from agentfly.learn.algorithms import ALGORITHMS
from agentfly.watch.progress import Progress

METRICS = ("rollout/success", "reward/mean", "train/explained_variance", "train/entropy", "validation/success")
"""What is stored of each step."""

Run = dict[str, Any]


def settings_of(algorithm: str, minibatches: int, seed: int, options: argparse.Namespace) -> list[str]:
    """What a run sets beside its recipe."""
    teacher = [f"loss.reference={options.teacher}"] if ALGORITHMS[algorithm].needs_reference else []
    return [
        f"algorithm={algorithm}", f"seed={seed}", f"train.num_minibatches={minibatches}", f"train.steps={options.steps}",
        f"rollout.num_tasks={options.tasks}", f"data.validation_count={options.held_out}",
        *options.set, *teacher, "run.threads=1",
    ]  # fmt: skip


def command_of(recipe: str, settings: list[str]) -> str:
    return " ".join(["agentfly train", recipe, *map(shlex.quote, settings)])


def train(algorithm: str, minibatches: int, seed: int, options: argparse.Namespace) -> Run:
    """One run: its settings, its held-out success before and after, and what was measured in each step."""
    settings = settings_of(algorithm, minibatches, seed, options)
    began = time.process_time()
    with TemporaryDirectory() as folder:
        progress = Progress(options.steps, Console(file=io.StringIO()))
        result = agentfly.train(Config.load(options.recipe, [*settings, f"run.dir={folder}"]), progress=progress)
    rows = [result.before, *result.history]
    rows[-1] = {**rows[-1], "validation/success": result.after["validation/success"]}
    steps = [{name: round(row[name], 4) for name in METRICS if name in row} for row in rows]
    return {
        "name": f"{algorithm}-{minibatches}-{seed}",
        "recipe": options.recipe,
        "algorithm": algorithm,
        "minibatches": minibatches,
        "seed": seed,
        "command": command_of(options.recipe, settings),
        "config": {"algorithm": algorithm, "train.num_minibatches": minibatches, "seed": seed},
        "before": result.before["validation/success"],
        "after": result.after["validation/success"],
        "held_out_chains": [result.after["validation/scored"], result.after["validation/chains"]],
        "success": [round(row["rollout/success"], 4) for row in result.history],
        "clip_fraction": [round(row.get("train/clip_fraction", 0.0), 4) for row in result.history],
        "steps": [{"step": number, **measured} for number, measured in enumerate(steps)],
        "cpu_s": round(time.process_time() - began, 1),
    }


def made_of(wanted: list[tuple[str, int, int]], options: argparse.Namespace) -> Iterator[Run]:
    """The runs in the order in which they end. After an error or Ctrl-C no other one is started."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(options.jobs, len(wanted)), mp_context=spawning) as pool:
        try:
            for future in as_completed([pool.submit(train, *each, options) for each in wanted]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def stored(path: Path, options: argparse.Namespace) -> list[Run]:
    """The runs of a file. One that was made with other settings must not become part of its means."""
    runs: list[Run] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    for run in runs:
        expected = command_of(options.recipe, settings_of(run["algorithm"], run["minibatches"], run["seed"], options))
        if run["command"] != expected:
            sys.exit(f"error: {path} holds runs with other settings ({run['command']}): give another --json")
    return runs


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
    learning = [name for name, row in ALGORITHMS.items() if not row.needs_reference]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), help="without: all that the options allow")
    parser.add_argument("--teacher", help="the reference of algorithms that need one: a run, a model directory")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of every run")
    parser.add_argument("--minibatches", nargs="+", type=int, default=[1], help="optimizer steps per update")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tasks", type=int, default=8, help="tasks of a step")
    parser.add_argument("--held-out", type=int, default=100, help="held-out tasks")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once; without: one per core")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    algorithms = options.algorithms or (list(ALGORITHMS) if options.teacher else learning)
    if not options.teacher and (lost := [name for name in algorithms if name not in learning]):
        parser.error(f"{lost[0]} needs --teacher")
    every = [(name, parts, seed) for seed in options.seeds for parts in options.minibatches for name in algorithms]
    runs = stored(options.json, options) if options.json and options.json.exists() else []
    made = {(run["algorithm"], run["minibatches"], run["seed"]) for run in runs}
    wanted = [each for each in every if each not in made]
    for run in made_of(wanted, options) if wanted else ():
        runs.append(run)
        told = f"{run['name']}: {run['before']:.2f} to {run['after']:.2f}, {run['cpu_s']} s"
        print(f"{len(runs)}/{len(made) + len(wanted)} {told}", file=sys.stderr, flush=True)
        if options.json:
            runs.sort(key=lambda run: (list(ALGORITHMS).index(run["algorithm"]), run["minibatches"], run["seed"]))
            command = f"python benchmarks/algorithms.py {shlex.join(sys.argv[1:])}"
            lines = ",\n".join(f"  {json.dumps(run)}" for run in runs)
            partial = options.json.with_suffix(".partial")
            partial.write_text(f'{{\n "command": {json.dumps(command)},\n "runs": [\n{lines}\n ]\n}}\n', encoding="utf-8")
            partial.replace(options.json)
    print(table(runs))


if __name__ == "__main__":
    main()
