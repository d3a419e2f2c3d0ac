"""`agentfly runs`: the runs of a folder as a table, filtered and sorted by what they are and by what they measured."""

from __future__ import annotations

import argparse
import json
import math
import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engines import short_name
from ...errors import AgentFlyError, ConfigError

if TYPE_CHECKING:
    from ...runs.catalog import RunSummary

WIDE = 200
STATES = {"running": "green", "finished": "blue", "stopped": "yellow", "dead": "red"}
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
    "~": lambda text, part: str(part).lower() in str(text).lower(),
}
_CONDITION = re.compile(r"\s*(?P<name>[\w/.@+-]+?)\s*(?P<operator>>=|<=|!=|==|>|<|=|~)\s*(?P<value>.*?)\s*")
ALIASES = {"validation": "best_validation", "best": "best_validation", "age": "age_s", "run": "name", "steps": "step"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `runs` to the command line."""
    runs = commands.add_parser("runs", help="list runs: state, model, world, algorithm, reward curve, held-out success")
    runs.add_argument("folder", nargs="?", default="runs", help="the folder of the runs (default: runs)")
    runs.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="COND",
        help="only runs that fit: state=running, model~qwen, reward/mean>0.5 (the last value); may be given several times",
    )
    runs.add_argument("--sort", metavar="KEY", help="a column or a metric; numbers from the largest (default: newest first)")
    runs.add_argument("--reverse", action="store_true", help="turn the order around")
    runs.add_argument("--json", action="store_true", help="print the runs as JSON")
    runs.set_defaults(run=run_list)


def run_list(arguments: argparse.Namespace) -> int:
    """Print one line per run."""
    from ...runs.catalog import find_runs

    root = Path(arguments.folder)
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}: give the folder of the runs")
    conditions = [Condition.parse(text) for text in arguments.where]
    runs = [run for run in find_runs(root) if all(condition.holds(run) for condition in conditions)]
    if arguments.sort:
        runs = sort_runs(runs, arguments.sort)
    if arguments.reverse:
        runs.reverse()
    if arguments.json:
        print(json.dumps([to_json(run) for run in runs], indent=1, allow_nan=False))
    elif not runs:
        print(f"no runs in {root}" + (" fit" if conditions else ""))
    else:
        _print_table(runs)
    return 0


@dataclass(frozen=True, slots=True)
class Condition:
    """One --where: a column or metric, an operator, a value."""

    name: str
    sign: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises ConfigError."""
        match = _CONDITION.fullmatch(text)
        if match is None or not match["value"]:
            raise ConfigError(f"--where {text!r} is not a condition: write NAME>VALUE, with {' '.join(OPERATORS)}")
        condition = cls(match["name"], match["operator"], match["value"])
        if condition.sign in (">", "<", ">=", "<=") and number_of(condition.value) is None:
            raise ConfigError(f"--where {text!r}: {condition.value!r} is not a number")
        if "/" not in condition.name and (ALIASES.get(condition.name, condition.name) not in columns()):
            raise ConfigError(f"runs have no column {condition.name!r}: use {', '.join(columns())}, or a metric")
        return condition

    def holds(self, run: RunSummary) -> bool:
        """Whether a run fits. A run without the value does not, whatever the operator."""
        value = value_of(run, self.name)
        if value is None:
            return False
        wanted: Any = self.value
        if self.sign != "~" and isinstance(value, int | float):
            wanted = number_of(self.value)
            if wanted is None:
                return self.sign == "!="
        return OPERATORS[self.sign](value, wanted)


def number_of(text: str) -> float | None:
    """The number that a text is; None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def value_of(run: RunSummary, name: str) -> Any:
    """A column of a run, or the last finite value of a metric; None if it has none."""
    if "/" not in name:
        return getattr(run, ALIASES.get(name, name), None)
    from ...runs import RunReader

    if run.problem is not None:
        return None
    try:
        with RunReader(run.path) as reader:
            values = [value for _, _, value in reader.series([name])[name] if value is not None]
    except AgentFlyError:
        return None
    return values[-1] if values else None


def sort_runs(runs: Sequence[RunSummary], key: str) -> list[RunSummary]:
    """Numbers from the largest, texts from a to z, runs without the value last. Raises ConfigError for an unknown column."""
    if "/" not in key and ALIASES.get(key, key) not in columns():
        raise ConfigError(f"runs cannot be sorted by {key!r}: use {', '.join(columns())}, or a metric")
    values = {id(run): value_of(run, key) for run in runs}
    if any(isinstance(value, str) for value in values.values()):
        return sorted(runs, key=lambda run: (values[id(run)] is None, str(values[id(run)])))
    return sorted(runs, key=lambda run: (values[id(run)] is None, -(values[id(run)] or 0.0)))


def to_json(run: RunSummary) -> dict[str, Any]:
    """All columns of a run, and its age in seconds."""
    row = {each.name: getattr(run, each.name) for each in fields(run)}
    age = run.age_s
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in {**row, "path": str(run.path), "age_s": age}.items()
    }


def columns() -> tuple[str, ...]:
    """The names that --where and --sort take, metrics aside."""
    from ...runs.catalog import RunSummary  # late: the command line starts without the store

    hidden = ("spark", "path", "problem")
    return (*(each.name for each in fields(RunSummary) if each.name not in hidden), "age_s", *ALIASES)


def _print_table(runs: Sequence[RunSummary]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ...watch.held_out import NEGLIGIBLE
    from ...watch.progress import duration, number, sparkline
    from ...watch.tables import clean

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, WIDE))  # a pipe or a file has no width: nothing is cut
    plain = console.options.ascii_only
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "run", "model", "world", "algorithm", "step", "reward", "", "held-out", "age"):
        # On a narrow terminal the names of model and world are wrapped first: that of the run is needed to copy it.
        table.add_column(name, overflow="fold", no_wrap=name not in ("model", "world"), min_width=4 if name else None)
    for run in runs:
        if run.problem is not None:
            table.add_row(Text("?", style="red"), clean(run.name), Text(clean(run.problem), style="red"))
            continue
        finite = [value for value in run.spark if value is not None]
        curve = "" if plain or len(finite) < 2 else sparkline(finite[-20:])
        ends = [value for value in (run.first_validation, run.last_validation) if value is not None]
        held = " -> ".join(number(value, 3) for value in (ends if run.first_validation != run.last_validation else ends[:1]))
        if run.best_validation is not None and run.best_validation != run.last_validation:
            held += f" (best {number(run.best_validation, 3)})"
        if (run.unscored or 0.0) > NEGLIGIBLE:
            held += f" ({run.unscored:.0%} of chains without a score)"
        step = "-" if run.step is None else f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)
        table.add_row(
            Text(run.state or "?", style=STATES.get(run.state or "", "")),
            Text(clean(run.name)),
            Text(clean(short_name(str(run.model or "-")))),
            Text(clean(str(run.world or "-"))),
            Text(clean(str(run.algorithm or "-"))),
            step,
            "-" if run.reward is None else number(run.reward, 3),
            Text(curve, style="green"),
            held or "-",
            "-" if run.updated is None else duration(max(0.0, time.time() - run.updated)),
        )
    console.print(table)
