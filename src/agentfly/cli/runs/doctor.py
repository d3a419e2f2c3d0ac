"""`agentfly doctor`: checks a run from its folder alone, or what a model can do from its config alone.

`agentfly replay` is the part of it that computes the steps of a run again.
"""

from __future__ import annotations

import argparse
import json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` and `replay` to the command line."""
    for name, what, help_text in (
        ("doctor", "RUN|MODEL", "check a training run from its folder, or what a model can do from its config"),
        ("replay", "RUN", "compute every step of a run again from its stored chains, without a model, and compare"),
    ):
        parser = commands.add_parser(name, help=help_text)
        parser.add_argument("run_dir", metavar=what, help="the folder of the run" + ", or of a model" * ("MODEL" in what))
        parser.add_argument("--json", action="store_true", help="print the checks as JSON")
        parser.set_defaults(run=run_doctor, examine=name)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print a line per check, with its problems. Returns 1 if there is a problem."""
    from rich.console import Console
    from rich.text import Text

    from ...health import diagnose, replay
    from ...health.models import is_model
    from ...watch.tables import clean

    if arguments.examine == "doctor" and is_model(arguments.run_dir):
        return _doctor_model(arguments)

    report = (replay if arguments.examine == "replay" else diagnose)(arguments.run_dir)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=1))
        return 0 if report.ok else 1
    console = Console(soft_wrap=True)
    for check in report.checks:
        word, style = ("WRONG", "bold red") if not check.ok else ("skipped", "dim") if check.skipped else ("ok", "green")
        evidence = check.skipped if check.skipped and check.ok else check.evidence
        console.print(Text.assemble((f"{word:8}", style), f"{check.name:12}{check.promise}", (clean(f": {evidence}"), "dim")))
        more = check.num_problems - len(check.problems)
        for problem in [*check.problems, *([f"and {more:,} more"] if more else [])]:
            console.print(Text(clean(f"{'':8}{'':12}{problem}"), style="red"))
    wrong, skipped = (
        sum(not check.ok for check in report.checks),
        sum(check.ok and bool(check.skipped) for check in report.checks),
    )
    held = len(report.checks) - wrong - skipped
    print(f"{report.run}: {held} checks hold, {wrong} {'does' if wrong == 1 else 'do'} not, {skipped} skipped")
    return 0 if report.ok else 1


def _doctor_model(arguments: argparse.Namespace) -> int:
    """Print a line per ability of the model. Returns 1 if it cannot be sampled here or not be trained."""
    from ...health.models import diagnose_model

    abilities = diagnose_model(arguments.run_dir)
    if arguments.json:
        rows = [{"name": each.name, "ok": each.ok, "told": each.told} for each in abilities]
        print(json.dumps({"model": arguments.run_dir, "checks": rows}, indent=1))
    else:
        for each in abilities:
            print(f"{'yes' if each.ok else 'NO':5}{each.name:14}{each.told}")
    return 0 if all(each.ok for each in abilities if each.name in ("loaded", "sampled", "trained")) else 1
