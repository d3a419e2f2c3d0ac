"""The result of an examination: one `Check` per question, in a `Report` that prints itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["passed", "failed", "not checked"]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    detail: str = ""


@dataclass(slots=True)
class Report:
    """`ok`: no check failed. `complete`: every check passed. `figures`: start_s, and if ok steps_per_s and memory_kb."""

    name: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and not self.failed

    @property
    def complete(self) -> bool:
        return self.ok and all(check.status == "passed" for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == "failed"]

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        marks = {"passed": "ok", "failed": "FAILED", "not checked": "not checked"}
        lines = [
            f"{marks[check.status]:>12}  {check.name}{': ' if check.detail else ''}{check.detail}" for check in self.checks
        ]
        figures = ", ".join(f"{name} {value:,.6g}" for name, value in self.figures.items())
        return "\n".join([self.name, *lines, *([f"{'':>12}  {figures}"] if figures else [])])


class Failed(Exception):
    """A check found a defect."""


class Skipped(Exception):
    """A check cannot run with what it was given."""
