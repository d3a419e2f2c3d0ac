"""`diagnose` runs every check on a run and returns the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runs import RunDirectory, RunStore
from .checks import CHECKS
from .records import Check, Skip, open_run, read_chains
from .replay import PROMISES, replay_run


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks of one run."""

    run: Path
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether no check has found a problem."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain values: the run, whether it is sound, and every check."""
        names = ("name", "promise", "ok", "skipped", "evidence", "num_problems", "problems")
        return {
            "run": str(self.run),
            "ok": self.ok,
            "checks": [{name: getattr(check, name) for name in names} for check in self.checks],
        }


def diagnose(path: str | Path) -> Diagnosis:
    """Examine the run in a folder. Raises ConfigError if the folder holds no store of a run."""
    directory = RunDirectory.existing(path)
    checks = {name: Check(name, promise) for name, (promise, _) in CHECKS.items()}
    with RunStore(directory.database, readonly=True) as store:
        run = open_run(directory, store)
        read_chains(run, store, checks)
        replay_run(run, store, checks)
    for name, (_, look) in CHECKS.items():
        check = checks[name]
        try:
            evidence = look(run, check)
            check.evidence = check.evidence or evidence
        except Skip as why:
            check.skipped = str(why)
    return Diagnosis(directory.path, list(checks.values()))


def replay(path: str | Path) -> Diagnosis:
    """Compute every step of the run in a folder again, and compare. These are the last checks of `diagnose`."""
    directory = RunDirectory.existing(path)
    checks = {name: Check(name, promise) for name, promise in PROMISES.items()}
    with RunStore(directory.database, readonly=True) as store:
        replay_run(open_run(directory, store), store, checks)
    return Diagnosis(directory.path, list(checks.values()))
