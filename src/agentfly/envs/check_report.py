"""The result of an examination: one `CheckResult` per question, in a `Report` that prints itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["passed", "failed", "not checked"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    status: Status
    detail: str = ""


@dataclass(slots=True)
class Report:
    """`ok`: no check failed. `complete`: every check passed.

    `figures`: start_s, and if ok reset_s (the median), steps_per_s and memory_kb.
    """

    name: str
    checks: list[CheckResult] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and not self.failed

    @property
    def complete(self) -> bool:
        return self.ok and all(check.status == "passed" for check in self.checks)

    @property
    def failed(self) -> list[CheckResult]:
        return [check for check in self.checks if check.status == "failed"]

    def __getitem__(self, name: str) -> CheckResult:
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        marks = {"passed": "ok", "failed": "FAILED", "not checked": "not checked"}
        lines = [
            f"{marks[check.status]:>12}  {check.name}{': ' if check.detail else ''}{check.detail}" for check in self.checks
        ]
        figures = ", ".join(_figure(name, value) for name, value in self.figures.items())
        return "\n".join([self.name, *lines, *([f"{'':>12}  {figures}"] if figures else [])])


_UNITS = {"_per_s": ((1.0, "/s"),), "_s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")), "_kb": ((1024.0, "MB"), (1.0, "KB"))}


def _figure(name: str, value: float) -> str:
    """A figure in a unit of its size: start_s 8.3659e-05 is "start 84 µs"."""
    for ending, units in _UNITS.items():
        if name.endswith(ending):
            size, unit = next((row for row in units if abs(value) >= row[0]), units[-1])
            number = f"{value / size:,.0f}" if abs(value / size) >= 100 else f"{value / size:.2g}"
            return f"{name.removesuffix(ending).replace('_', ' ')} {number}{'' if unit == '/s' else ' '}{unit}"
    return f"{name} {value:,.6g}"


class Failed(Exception):
    """A check found a defect."""


class Skipped(Exception):
    """A check cannot run with what it was given."""
