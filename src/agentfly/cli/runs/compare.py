"""`agentfly compare`: two runs side by side, and whether the difference on their held-out tasks can be chance."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING

from ...errors import ConfigError

if TYPE_CHECKING:
    from ...watch.comparison import Comparison, When


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `compare` to the command line."""
    compare = commands.add_parser("compare", help="compare two runs: config, results, a paired test over the same tasks")
    compare.add_argument("a", metavar="A", help="the folder of a run")
    compare.add_argument("b", metavar="B", help="the folder of the run that is compared with it")
    compare.add_argument("--measure", choices=("success", "reward"), default="success", help="what the test compares")
    compare.add_argument(
        "--step",
        default="last",
        metavar="WHEN",
        help="the validation: last (default), best, or the number of a step",
    )
    compare.add_argument("--metric", action="append", default=[], metavar="NAME", help="compare this metric's last value")
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON")
    compare.set_defaults(run=run_compare)


def run_compare(arguments: argparse.Namespace) -> int:
    """Print the comparison. The exit status is 0 whatever the result."""
    from ...watch.comparison import compare_runs

    comparison = compare_runs(
        arguments.a, arguments.b, measure=arguments.measure, when=_when(arguments.step), metrics=arguments.metric
    )
    if arguments.json:
        print(json.dumps(comparison.to_json(), indent=1, allow_nan=False, default=str))
    else:
        _print(comparison)
    return 0


def _when(text: str) -> When:
    if text == "last" or text == "best":
        return text  # type: ignore[return-value]
    if not text.isdecimal():
        raise ConfigError(f"--step is last, best or the number of a step, not {text!r}")
    return int(text)


def _print(comparison: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ...watch.progress import number
    from ...watch.tables import clean

    console = Console()
    console.print(Text.assemble(("A ", "bold"), clean(comparison.a)), soft_wrap=True)
    console.print(Text.assemble(("B ", "bold"), clean(comparison.b)), soft_wrap=True)
    if comparison.config:
        table = Table("config key", "A", "B", title_justify="left")
        for key, values in comparison.config.items():
            table.add_row(*(Text(clean("-" if value is None else str(value))) for value in (key, *values)))
        console.print(table)
    else:
        console.print("the configs are the same")
    table = Table("last value of", "A", "B", "change")
    for name, (left, right) in comparison.results.items():
        change = right - left
        sign = "+" if change > 0 else ""
        change_text = sign + number(change, 3) if math.isfinite(change) else "-"
        table.add_row(Text(clean(name)), number(left, 3), number(right, 3), change_text)
    if comparison.results:
        console.print(table)
    for line in held_out_lines(comparison):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def held_out_lines(comparison: Comparison) -> list[str]:
    """The paired test in sentences."""
    from ...runs.compare import percent
    from ...watch.progress import number

    num_a, num_b, both = comparison.tasks
    if comparison.test is None:
        if not (num_a and num_b):
            missing = " and ".join(name for name, count in (("A", num_a), ("B", num_b)) if not count)
            return [f"no test: {missing} has no scored held-out chains", *left_out_lines(comparison)]
        return [
            f"no test: the runs have no held-out task in common (A has {num_a}, B has {num_b})",
            *left_out_lines(comparison),
        ]
    test = comparison.test
    steps = "/".join("-" if step is None else str(step) for step in comparison.steps)
    return [
        f"held-out {comparison.measure}, {both} tasks in common (A has {num_a}, B has {num_b}; steps {steps}):",
        f"  A {number(test.mean_a, 3)}, B {number(test.mean_b, 3)}, B - A {number(test.difference, 3)} "
        f"(95 % interval {number(test.low, 3)} to {number(test.high, 3)})",
        f"  B better on {test.better} tasks, worse on {test.worse}, equal on {test.equal}; "
        f"p {percent(test.p_permutation)} (permutation), {percent(test.p_sign)} (sign test)",
        f"  {test.verdict}",
        *left_out_lines(comparison),
    ]


def left_out_lines(comparison: Comparison) -> list[str]:
    """How many chains are in no figure because they have no score, and what they could change."""
    from ...watch.held_out import is_told

    sides = zip("AB", comparison.chains, strict=True)
    lost = [f"{total - scored} of {total} chains of {name}" for name, (scored, total) in sides if is_told(scored, total)]
    if not lost:
        return []
    ends = comparison.bounds
    could = "" if ends is None else f": with them, B - A is between {ends[0]:.3f} and {ends[1]:.3f}"
    return [f"  {' and '.join(lost)} have no score and are left out{could}"]
