"""Looking at runs: list them side by side, print trajectories, export what was stored, and check it.

agentfly runs [DIR]
agentfly show RUN [--step N] [--outcome NAME] [--split SPLIT] [--limit N]
agentfly export RUN FILE [--split SPLIT]       FILE: .jsonl for the trajectories, .csv for the metrics, a row per step
agentfly export-model RUN FOLDER               the model of a run or checkpoint, as one folder that from_pretrained loads
agentfly doctor RUN [--json]                   exit status 1 if something is wrong with the run
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from .runs.store import RunStore, TrajectoryRow

SPLITS = ("train", "validation")
COMPARES_SIBLINGS = ("grpo", "dr_grpo", "rloo")
"""The algorithms whose advantage is 0 if all chains of a task have the same reward."""


def add_parsers(commands: Any) -> None:
    """Add `runs`, `show`, `export`, `export-model` and `doctor` to the command line."""
    runs = commands.add_parser("runs", help="list runs with their steps and their held-out success, before and after")
    runs.add_argument("folder", nargs="?", default="runs", help="the folder of the runs (default: runs)")
    runs.set_defaults(run=run_list)

    show = commands.add_parser("show", help="print trajectories of a run and mark the trained tokens")
    show.add_argument("run_dir", metavar="RUN", help="the folder of the run")
    show.add_argument("--step", type=int, help="only of this step")
    show.add_argument("--outcome", help="only with this outcome, for example finished or world_failure")
    show.add_argument("--split", choices=SPLITS, help="only of this split")
    show.add_argument("--limit", type=int, default=1, help="how many to print (default 1)")
    show.set_defaults(run=run_show)

    export = commands.add_parser("export", help="write trajectories (.jsonl) or metrics (.csv) of a run to a file")
    export.add_argument("run_dir", metavar="RUN", help="the folder of the run")
    export.add_argument("file", help="FILE.jsonl: one trajectory a line; FILE.csv: the metrics, one row a step")
    export.add_argument("--split", choices=SPLITS, help="only trajectories of this split")
    export.set_defaults(run=run_export)

    model = commands.add_parser("export-model", help="write the model of a run's newest checkpoint to a folder of its own")
    model.add_argument("run_dir", metavar="RUN", help="the folder of the run, or of one of its checkpoints")
    model.add_argument("folder", help="the folder to write, which from_pretrained, vLLM and others load")
    model.set_defaults(run=run_export_model)

    doctor = commands.add_parser("doctor", help="check a finished or running training run from its folder alone")
    doctor.add_argument("run_dir", metavar="RUN", help="the folder of the run")
    doctor.add_argument("--json", action="store_true", help="print the checks as JSON")
    doctor.set_defaults(run=run_doctor)


def run_list(arguments: argparse.Namespace) -> int:
    """Print one line per run, oldest first."""
    from rich.console import Console
    from rich.table import Table

    root = Path(arguments.folder)
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}: give the folder of the runs")
    found = sorted((path.parent for path in root.glob("*/run.db")), key=lambda path: (path / "run.db").stat().st_mtime)
    if not found:
        print(f"no runs in {root}")
        return 0
    table = Table("run", "algorithm", "model", "steps", "held-out success", "reward", "chains")
    for path in found:
        table.add_row(path.name, *_summary(path))
    Console().print(table)
    return 0


def _summary(path: Path) -> list[str]:
    from .config import Config
    from .runs import RunStore
    from .watch.progress import number

    try:
        config = Config.load(path / "config.toml")
        names = [str(config.algorithm) if not path.name.startswith("eval-") else "-", config.agent.model]
    except ConfigError:
        names = ["-", "-"]
    with RunStore(path / "run.db", readonly=True) as store:
        held = [row.value for row in store.metrics("validation/success") if math.isfinite(row.value)]
        rewards = [row.value for row in store.metrics("reward/mean") if math.isfinite(row.value)]
        steps = max((row.step for row in store.metrics()), default=0)
        chains = store.count()
    success = " -> ".join(number(value, 3) for value in ([held[0], held[-1]] if len(held) > 1 else held)) or "-"
    return [*names, str(steps), success, number(rewards[-1], 3) if rewards else "-", f"{chains:,}"]


def run_show(arguments: argparse.Namespace) -> int:
    """Print the trajectories that match."""
    from rich.console import Console

    from .runs import RunDirectory, RunStore
    from .watch.tables import show_trajectory, why_untrained

    query: Any = {name: getattr(arguments, name) for name in ("step", "split", "outcome", "limit")}
    with RunStore(RunDirectory.existing(Path(arguments.run_dir)).database, readonly=True) as store:
        skipped = {row.step: row.value for row in store.metrics("train/skipped")}
        found = list(zip(store.rows(**query), store.trajectories(**query), strict=True))
        reasons = [
            why_untrained(trajectory, row.split, row.step, skipped) or _why_no_advantage(store, row)
            for row, trajectory in found
        ]
    for (_, trajectory), reason in zip(found, reasons, strict=True):
        show_trajectory(Console(), trajectory, reason)
    if not found:
        print("no trajectory matches")
    return 0


def _why_no_advantage(store: RunStore, row: TrajectoryRow) -> str | None:
    """Says if the chain's advantage is 0: its algorithm compares siblings, and all of them have the same reward."""
    from .config import Config
    from .types import Outcome

    try:
        config = Config.load(store.path.with_name("config.toml"))
    except ConfigError:
        return None
    if config.algorithm not in COMPARES_SIBLINGS or config.loss.kl_coef or config.loss.entropy_coef:
        return None
    group = row.id.rpartition("-")[0]  # ids are t<step>-<task>-<chain>
    rows = store.rows(step=row.step, split="train", limit=store.count(step=row.step, split="train"))
    siblings = [each for each in rows if each.id.rpartition("-")[0] == group and each.reward is not None]
    rewards = {each.total_reward for each in siblings if Outcome(each.outcome).trainable}
    return "its siblings have the same reward, so its advantage is 0" if len(rewards) == 1 else None


def run_export(arguments: argparse.Namespace) -> int:
    """Write the file and say what is in it."""
    from .runs import RunDirectory, RunStore

    path = Path(arguments.file)
    if path.suffix not in (".jsonl", ".csv"):
        raise ConfigError(f"{path}: trajectories are exported to a .jsonl file, metrics to a .csv file")
    if arguments.split is not None and path.suffix == ".csv":
        raise ConfigError("--split selects trajectories; metrics have none: remove it")
    with RunStore(RunDirectory.existing(Path(arguments.run_dir)).database, readonly=True) as store:
        try:
            if path.suffix == ".jsonl":
                count, what = store.export_jsonl(path, split=arguments.split), "trajectories"
            else:
                count, what = _write_metrics(store, path), "steps"
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    print(f"{count} {what} in {path}")
    return 0


def run_export_model(arguments: argparse.Namespace) -> int:
    """Copy the model of a checkpoint."""
    from .training.checkpoint import export_model

    print(f"{arguments.folder}: the model of {export_model(Path(arguments.run_dir), Path(arguments.folder))}")
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print a line per check, with its problems. Returns 1 if there is a problem."""
    from rich.console import Console
    from rich.text import Text

    from .training.doctor import diagnose
    from .watch.tables import clean

    found = diagnose(arguments.run_dir)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=1))
        return 0 if found.ok else 1
    console = Console(soft_wrap=True)
    for check in found.checks:
        word, style = ("WRONG", "bold red") if not check.ok else ("skipped", "dim") if check.skipped else ("ok", "green")
        told = check.skipped if check.skipped and check.ok else check.evidence
        console.print(Text.assemble((f"{word:8}", style), f"{check.name:12}{check.promise}", (clean(f": {told}"), "dim")))
        more = check.num_problems - len(check.problems)
        for problem in [*check.problems, *([f"and {more:,} more"] if more else [])]:
            console.print(Text(clean(f"{'':8}{'':12}{problem}"), style="red"))
    wrong, skipped = (
        sum(not check.ok for check in found.checks),
        sum(check.ok and bool(check.skipped) for check in found.checks),
    )
    held = len(found.checks) - wrong - skipped
    print(f"{found.run}: {held} checks hold, {wrong} {'does' if wrong == 1 else 'do'} not, {skipped} skipped")
    return 0 if found.ok else 1


def _write_metrics(store: RunStore, path: Path) -> int:
    """One row per step and one column per metric; an absent or infinite value is an empty cell."""
    steps: dict[int, dict[str, Any]] = {}
    for row in store.metrics():
        steps.setdefault(row.step, {"step": row.step})[row.name] = row.value if math.isfinite(row.value) else None
    names = sorted({name for values in steps.values() for name in values} - {"step"})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["step", *names])
        writer.writeheader()
        writer.writerows(steps.values())
    return len(steps)
