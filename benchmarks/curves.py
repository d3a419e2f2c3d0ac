"""Learning curves of runs: collected from their folders, merged, drawn as SVG, and set in a table.

In: run folders (or JSON that `collect` wrote). Out: one JSON with what every step measured, an SVG with one line per algorithm,
or a markdown table of before and after. A run's command is worked out from its config: the recipe that it is closest to and
the keys that differ, checked by reading it back; a run that no recipe explains has none. Refuses to draw runs of different
recipes as if they were one, and metrics that no run has. Needs nothing but the package: no plotting library.

    python benchmarks/curves.py collect runs/ppo runs/grpo --json curves.json
    python benchmarks/curves.py merge a.json b.json --json both.json
    python benchmarks/curves.py draw both.json --svg curves.svg --metric reward/mean --metric rollout/success
    python benchmarks/curves.py draw turns.json --svg turns.svg --by agent.max_turns
    python benchmarks/curves.py table both.json --commands
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentfly.config import Config, parse_override, to_toml
from agentfly.errors import AgentFlyError, ConfigError
from agentfly.runs import RunDirectory, RunStore
from agentfly.watch.charts.svg import Line, Panel, draw
from agentfly.watch.metrics import describe

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
METRICS = (
    "reward/mean",
    "rollout/success",
    "rollout/turns",
    "rollout/tool_calls",
    "rollout/invalid_calls",
    "rollout/invalid_call_rate",
    "validation/success",
    "validation/reward",
    "validation/turns",
    "validation/tool_calls",
    "train/explained_variance",
    "train/entropy",
    "warm_start/loss_before",
    "warm_start/loss_after",
    "time/step_s",
    "time/rollout_s",
    "time/learn_s",
)
COMPONENT = "reward/component/"
DRAWN = ("reward/mean", "rollout/success")
IDENTITY = ("agent.kind", "agent.tools", "agent.reward", "data.train")
"""Keys that make a recipe that recipe: a run that differs in one of them was not made from it."""

Run = dict[str, Any]


# ---- collect ---------------------------------------------------------------------------------------------------------------


def read_run(folder: Path, recipe: Path | None = None) -> Run:
    """One run as JSON can hold it."""
    directory = RunDirectory.existing(folder)
    config = Config.load(directory.config)
    with RunStore(directory.database, readonly=True) as store:
        rows = store.metrics()
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row.name in METRICS or row.name.startswith(COMPONENT):
            # Not a number is written as null: a mean of nothing is neither 0 nor readable as JSON.
            steps.setdefault(row.step, {"step": row.step})[row.name] = row.value if math.isfinite(row.value) else None
    if not steps:
        raise ConfigError(f"{folder} has no metrics yet: let the run make a step first")
    for step, seconds in _clock(directory, steps).items():
        steps[step]["seconds"] = seconds
    if recipe is not None:
        Config.load(recipe)  # one that was named and cannot be read is an error, not a recipe that does not fit
    found, command = explain(config, sorted(RECIPES.glob("*.toml")) if recipe is None else [recipe])
    return {
        "name": directory.path.resolve().name,
        "algorithm": config.algorithm,
        "seed": config.seed,
        "model": config.agent.model,
        "recipe": found,
        "command": command,
        "config": flatten(config),
        "steps": [steps[step] for step in sorted(steps)],
    }


def _clock(directory: RunDirectory, steps: Iterable[int]) -> dict[int, float]:
    """Seconds from the run's beginning, warm start and validation included, to each step; from its log where it kept one."""
    if not directory.metrics.is_file():
        return {}
    times: dict[int, float] = {}
    for line in directory.metrics.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        times[row["step"]] = row["time"]
    if not times:
        return {}
    first = min(times.values())
    # The config is written before anything else is done. In a copied folder its time is that of the copy, and says nothing.
    written = directory.config.stat().st_mtime
    start = written if written <= first else first
    return {step: round(times[step] - start, 3) for step in steps if step in times}


def flatten(config: Config) -> dict[str, Any]:
    """Every key by its dotted name; tables inside a section stay whole. Where a run is kept is no part of what it is."""
    flat: dict[str, Any] = {}
    for section, value in config.to_dict().items():
        if isinstance(value, dict):
            flat |= {f"{section}.{key}": list(item) if isinstance(item, tuple) else item for key, item in value.items()}
        else:
            flat[section] = value
    for key in ("run.dir", "run.name"):
        flat.pop(key)
    return flat


def explain(config: Config, recipes: Sequence[Path]) -> tuple[str | None, str | None]:
    """The recipe that a config was made from and the command that makes it again, or nothing."""
    wanted = flatten(config)
    best: tuple[int, str, str] | None = None
    for path in recipes:
        overrides = _overrides(wanted, path)
        if overrides is not None and (best is None or len(overrides) < best[0]):
            command = " ".join(["agentfly train", f"{path.parent.name}/{path.name}", *map(shlex.quote, overrides)])
            best = len(overrides), path.stem, command
    return (best[1], best[2]) if best else (None, None)


def _overrides(wanted: dict[str, Any], recipe: Path) -> list[str] | None:
    """What to write behind the recipe; None: nothing does it."""
    try:
        own = flatten(Config.load(recipe))
        if any(own[key] != wanted[key] for key in IDENTITY):
            return None
        first = [] if own["algorithm"] == wanted["algorithm"] else [_override("algorithm", wanted["algorithm"])]
        base = flatten(Config.load(recipe, first))
        differ = [key for key in wanted if wanted[key] != base[key]]
        if any(wanted[key] is None for key in differ):  # TOML has no way to take a value back
            return None
        overrides = first + [_override(key, wanted[key]) for key in differ]
        return overrides if flatten(Config.load(recipe, overrides)) == wanted else None
    except ConfigError:  # the recipe sets a key that this algorithm refuses, or cannot be read here
        return None


def _override(key: str, value: Any) -> str:
    plain = f"{key}={value}"
    if isinstance(value, str) and re.fullmatch(r"[\w.:/+-]+", value) and parse_override(plain)[1] == value:
        return plain
    return f"{key}={to_toml({'v': value}).partition('=')[2].strip()}" if not isinstance(value, dict) else _table(key, value)


def _table(key: str, value: dict[str, Any]) -> str:
    """An inline table, which `to_toml` writes only inside a list."""
    return f"{key}={to_toml({'v': [value]}).partition('=')[2].strip()[1:-1]}"


# ---- merge, draw, table ------------------------------------------------------------------------------------------------------


def load(path: Path) -> list[Run]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        runs = tree["runs"]
        assert all(run["steps"] and run["algorithm"] for run in runs)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ConfigError(f"{path} is not what `collect` writes ({type(error).__name__}): collect the runs again") from error
    return list(runs)


def merge(parts: Iterable[Sequence[Run]]) -> list[Run]:
    """All runs once. Two different runs of one name are refused, because the results would be ambiguous."""
    found: dict[str, Run] = {}
    for run in (run for part in parts for run in part):
        if found.setdefault(run["name"], run) != run:
            raise ConfigError(f"two different runs are called {run['name']!r}: rename a folder and collect it again")
    return list(found.values())


def one_recipe(runs: Sequence[Run], recipe: str | None) -> list[Run]:
    names = sorted({str(run["recipe"]) for run in runs})
    if recipe is not None:
        chosen = [run for run in runs if run["recipe"] == recipe]
        if not chosen:
            raise ConfigError(f"there is no run of the recipe {recipe!r}; there are runs of {', '.join(names)}")
        return chosen
    if len(names) > 1:
        raise ConfigError(f"the runs are of several recipes ({', '.join(names)}): choose one with --recipe")
    return list(runs)


def only(runs: Sequence[Run], algorithms: Sequence[str]) -> list[Run]:
    """The runs of some algorithms. Lines of more than seven share their colours."""
    if lost := [name for name in algorithms if all(run["algorithm"] != name for run in runs)]:
        raise ConfigError(
            f"there is no run of {lost[0]}; there are runs of {', '.join(sorted({r['algorithm'] for r in runs}))}"
        )
    return [run for run in runs if run["algorithm"] in algorithms]


def chart(runs: Sequence[Run], metrics: Sequence[str], by: str = "algorithm", x: str = "step") -> str:
    """One panel per metric, one line per value of the key `by`; several runs of one value become their mean and its band."""
    labels: dict[str, list[Run]] = {}
    for run in runs:
        if by not in run["config"]:
            raise ConfigError(f"--by {by}: the runs have no such key; `agentfly config` lists every key")
        value = run["config"][by]
        labels.setdefault(str(value) if by == "algorithm" else f"{by.rpartition('.')[2]} {value}", []).append(run)
    panels = []
    for metric in metrics:
        about = describe(metric)
        lines = [_line(label, members, metric, x) for label, members in sorted(labels.items())]
        if not any(line.points for line in lines):
            raise ConfigError(f"no run has the metric {metric!r}; `collect` keeps {', '.join(METRICS)}, {COMPONENT}...")
        share = (0.0, 1.0) if about.unit == "share" else None
        label = {"step": "step", "minutes": "minutes"}[x]
        panels.append(Panel(metric, label, about.unit or metric.rpartition("/")[2], lines, share))
    return draw(panels)


def _line(label: str, runs: Sequence[Run], metric: str, x: str) -> Line:
    if x == "minutes" and len(runs) > 1:
        raise ConfigError(f"there are {len(runs)} runs of {label}: over minutes they have no common points; draw over steps")
    values: dict[float, list[float]] = {}
    for run in runs:
        for row in run["steps"]:
            at = row["step"] if x == "step" else row.get("seconds", math.nan) / 60
            if row.get(metric) is not None and math.isfinite(at):
                values.setdefault(at, []).append(row[metric])
    whole = {at: found for at, found in sorted(values.items()) if len(found) == len(runs)}
    band = [(at, min(found), max(found)) for at, found in whole.items()] if len(runs) > 1 else []
    return Line(label, [(at, statistics.fmean(found)) for at, found in whole.items()], band)


def table(runs: Sequence[Run], *, commands: bool = False) -> str:
    """Held-out figures before the first step and after the last (invalid calls: in the first and the last step)."""
    lines = [
        "| recipe | algorithm | seed | steps | held-out success | reward | turns | tool calls | invalid calls | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in sorted(runs, key=lambda run: (str(run["recipe"]), run["algorithm"], run["seed"], run["name"])):
        last = run["steps"][-1]
        seconds = last.get("seconds")
        cells = [
            run["recipe"] or run["name"], run["algorithm"], run["seed"], last["step"],
            *(_before_after(run, f"validation/{name}") for name in ("success", "reward", "turns", "tool_calls")),
            _before_after(run, "rollout/invalid_calls"),
            "-" if seconds is None else f"{seconds / 60:.1f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    told = [run["command"] for run in runs if run["command"]]
    if commands and told:
        lines += ["", "```bash", *told, "```"]
    return "\n".join(lines) + "\n"


def _before_after(run: Run, metric: str) -> str:
    values = [row[metric] for row in run["steps"] if row.get(metric) is not None]
    if not values:
        return "-"
    return f"{values[0]:.2f} → {values[-1]:.2f}" if len(values) > 1 else f"{values[0]:.2f}"


# ---- commands ----------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except AgentFlyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    collect = commands.add_parser("collect", help="read run folders")
    collect.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR")
    collect.add_argument("--json", type=Path, required=True, metavar="PATH")
    collect.add_argument("--recipe", type=Path, help="the recipe they were made from; found by itself among recipes/")
    collect.set_defaults(run=lambda a: _write(a.json, merge([[read_run(folder, a.recipe)] for folder in a.folders])))
    merging = commands.add_parser("merge", help="several files into one")
    merging.add_argument("files", nargs="+", type=Path, metavar="JSON")
    merging.add_argument("--json", type=Path, required=True, metavar="PATH")
    merging.set_defaults(run=lambda a: _write(a.json, merge(map(load, a.files))))
    drawing = commands.add_parser("draw", help="an SVG with one line per algorithm")
    drawing.add_argument("file", type=Path, metavar="JSON")
    drawing.add_argument("--svg", type=Path, required=True, metavar="PATH")
    drawing.add_argument("--metric", action="append", help=f"a panel each; without: {' and '.join(DRAWN)}")
    drawing.add_argument("--by", default="algorithm", help="config key that tells the lines apart")
    drawing.add_argument("--x", choices=("step", "minutes"), default="step")
    drawing.add_argument("--only", nargs="+", metavar="ALGORITHM", help="draw the runs of these algorithms only")
    drawing.add_argument("--recipe", help="draw the runs of this recipe only, by its file's name without .toml")
    drawing.set_defaults(run=_draw)
    showing = commands.add_parser("table", help="before and after, as markdown")
    showing.add_argument("file", type=Path, metavar="JSON")
    showing.add_argument("--commands", action="store_true", help="list the commands below it")
    showing.set_defaults(run=lambda a: print(table(load(a.file), commands=a.commands), end=""))
    return parser


def _draw(arguments: argparse.Namespace) -> None:
    runs = one_recipe(load(arguments.file), arguments.recipe)
    runs = only(runs, arguments.only) if arguments.only else runs
    arguments.svg.write_text(chart(runs, arguments.metric or DRAWN, arguments.by, arguments.x), encoding="utf-8")
    print(f"{arguments.svg}: {len(runs)} runs")


def _write(path: Path, runs: Sequence[Run]) -> None:
    path.write_text(json.dumps({"runs": runs}, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(f"{path}: {len(runs)} runs, {sum(len(run['steps']) for run in runs)} steps")


if __name__ == "__main__":
    sys.exit(main())
