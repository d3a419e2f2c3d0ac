"""The profile of a run: where the time of its steps went, from the metrics of the steps.

    time: 41 % decode, 30 % learn, 12 % tools, 17 % other; device busy 74 %        the line at the end of every run

`agentfly train --profile` prints the whole table and the slowest steps, and writes profile.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from .progress import short

if TYPE_CHECKING:
    from rich.console import Console

PARTS = {
    "tools": "time/tools_s",
    "environments": "time/environments_s",
    "scoring": "time/scoring_s",
    "prefill": "time/prefill_s",
    "decode": "time/decode_s",
    "sampling": "time/sampling_s",
    "host": "time/host_s",
    "learn": "time/learn_s",
    "store": "time/store_s",
    "publish": "time/handover_s",
    "validate": "time/validate_s",
    "save": "time/save_s",
    "idle": "time/idle_s",
}
"""The parts that the time of a step is divided into, and their metrics. They add up to time/step_s."""
BESIDE = {"sampled while learning": "time/overlap_s", "writing the store": "time/store_thread_s", "stalls": "time/stalls_s"}
"""Times that are no part: they pass beside the parts, or inside of them."""
SLOWEST = 3


@dataclass(frozen=True, slots=True)
class SlowStep:
    """A step that took much longer than the median, and the part that grew most."""

    step: int
    seconds: float
    times: float
    reason: str


@dataclass(frozen=True, slots=True)
class TimeProfile:
    """Seconds per part over all steps, largest first. `beside` are no parts; `tools` are mean seconds of a call by tool."""

    steps: int
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    busy_share: float | None = None
    slowest: list[SlowStep] = field(default_factory=list)
    tools: dict[str, float] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The profile as one line, with the parts of 5 % or more."""
        shares = {name: self._share(seconds) for name, seconds in self.parts.items()}
        shown = [f"{share:.0f} % {name}" for name, share in shares.items() if share >= 5]
        rest = sum(share for share in shares.values() if share < 5)
        shown += [f"{rest:.0f} % other"] if rest >= 0.5 else []
        busy = "" if self.busy_share is None else f"; device busy {100 * self.busy_share:.0f} %"
        return f"time: {', '.join(shown)}{busy}"

    def to_json(self) -> dict[str, Any]:
        """For profile.json."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "parts": {name: {"seconds": s, "share": self._share(s) / 100} for name, s in self.parts.items()},
            "beside": self.beside,
            "device_busy_share": self.busy_share,
            "slowest_steps": [
                {"step": each.step, "seconds": each.seconds, "times_median": each.times, "reason": each.reason}
                for each in self.slowest
            ],
            "tool_s": self.tools,
        }

    def _share(self, seconds: float) -> float:
        return 100 * seconds / self.seconds if self.seconds > 0 else 0.0


def profile_of(history: Mapping[int, Mapping[str, float]]) -> TimeProfile | None:
    """The profile of the steps of a run, whose metrics are given by the number of the step. None if no step has a time."""
    rows = {step: row for step, row in history.items() if math.isfinite(row.get("time/step_s", math.nan))}
    if not rows:
        return None
    seconds = sum(row["time/step_s"] for row in rows.values())
    parts = {name: total for name, metric in PARTS.items() if (total := _sum(rows, metric)) > 0}
    other = seconds - sum(parts.values())
    if other > 0.005 * seconds:  # a run whose metrics are not those of a breakdown
        parts["other"] = other
    measured = {step: row for step, row in rows.items() if "device/busy_share" in row}
    busy = math.fsum(_value(row, "device/busy_share") * row["time/step_s"] for row in measured.values())
    return TimeProfile(
        steps=len(rows),
        seconds=seconds,
        parts=dict(sorted(parts.items(), key=lambda item: -item[1])),
        beside={name: total for name, metric in BESIDE.items() if (total := _sum(rows, metric)) > 0},
        busy_share=busy / total if (total := _sum(measured, "time/step_s")) > 0 else None,
        slowest=_slowest(rows),
        tools=_tools(rows),
    )


def _sum(rows: Mapping[int, Mapping[str, float]], metric: str) -> float:
    return math.fsum(_value(row, metric) for row in rows.values())


def _value(row: Mapping[str, float], metric: str) -> float:
    value = row.get(metric, 0.0)
    return value if math.isfinite(value) else 0.0


def _slowest(rows: Mapping[int, Mapping[str, float]]) -> list[SlowStep]:
    """The slowest steps that took more than 1.5 times the median, slowest first."""
    middle = median(row["time/step_s"] for row in rows.values())
    if len(rows) < 3 or middle <= 0:
        return []
    usual = {name: median(_value(row, metric) for row in rows.values()) for name, metric in PARTS.items()}
    slow = []
    for step, row in sorted(rows.items(), key=lambda item: -item[1]["time/step_s"])[:SLOWEST]:
        took = row["time/step_s"]
        if took <= 1.5 * middle:
            break
        more = {name: _value(row, metric) - usual[name] for name, metric in PARTS.items()}
        name = max(more, key=lambda part: more[part])
        reason = f"{name} took {short(more[name])} more than usual"
        if (stalls := _value(row, "time/stalls_s")) > 0:
            reason += f", {short(stalls)} lost in stalls"
        slow.append(SlowStep(step, took, took / middle, reason))
    return slow


def _tools(rows: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}
    for row in rows.values():
        for metric, value in row.items():
            if metric.startswith("time/tool_s/") and math.isfinite(value):
                seconds.setdefault(metric.removeprefix("time/tool_s/"), []).append(value)
    means = {name: math.fsum(values) / len(values) for name, values in seconds.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def show_profile(console: Console, profile: TimeProfile, functions: Sequence[tuple[str, float]] = ()) -> None:
    """Prints seconds and share of each part, the slowest steps, and the functions that took most of the event loop's time."""
    from rich.table import Table

    title = f"where the time of {profile.steps} steps went"
    table = Table("", "seconds", "share", "a step", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, seconds in profile.parts.items():
        table.add_row(name, f"{seconds:,.2f}", f"{profile._share(seconds):.1f} %", short(seconds / profile.steps))
    table.add_section()
    table.add_row("all", f"{profile.seconds:,.2f}", "100.0 %", short(profile.seconds / profile.steps))
    table.add_section()
    for name, seconds in profile.beside.items():
        table.add_row(name, f"{seconds:,.2f}", f"{profile._share(seconds):.1f} %", short(seconds / profile.steps))
    console.print(table)
    lines = [] if profile.busy_share is None else [f"device busy: {100 * profile.busy_share:.0f} % of the time"]
    lines += [
        f"step {each.step}: {short(each.seconds)}, {each.times:.1f}x the median: {each.reason}" for each in profile.slowest
    ]
    lines += [f"tool {name}: {short(seconds)} a call" for name, seconds in list(profile.tools.items())[:5]]
    lines += [f"{100 * share:.0f} % of the event loop's busy time: {name}" for name, share in functions]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
