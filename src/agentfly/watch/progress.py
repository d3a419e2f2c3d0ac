"""The display of a running job: live (rich) in a terminal, plain lines elsewhere.

    steps      ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 12/20  1m05s left
    sampling   ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 96/128 chains          before the first step: opening the model, validation ...
    reward 0.412  success 0.38  turns 2.1
    Shop: 12 leased, 4 idle, ...
    warning: 64% of the groups of the last steps teach nothing ...

The plain lines have no control codes, so a log file stays readable. Metrics of any value are accepted, NaN included.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..display import visible
from .held_out import bounds, interval_text, is_told
from .observers import Observer
from .warnings import Warned

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# The metrics of a step that are shown, in order: name, text before, text after, decimals.
SHOWN = (
    ("reward/mean", "reward ", "", 3),
    ("rollout/success", "success ", "", 2),
    ("rollout/turns", "turns ", "", 1),
    ("rollout/tool_calls", "tool calls ", "", 1),
    ("rollout/tokens_per_s", "", " tokens/s", 0),
    ("validation/success", "held-out success ", "", 2),
    ("validation/nll", "held-out loss ", "", 4),
    ("validation/preference_accuracy", "held-out accuracy ", "", 2),
)
# The counts of environments that are shown: last part of the metric, word after the number.
ENVIRONMENTS = (
    ("allocated", "leased"),
    ("idle", "idle"),
    ("warming", "warming"),
    ("waiting", "waiting"),
    ("recycled", "recycled"),
    ("failed", "failed"),
)
_BARS = "▁▂▃▄▅▆▇█"
# What the display calls the parts of a step.
SPANS = {"rollout": "sampling", "learn": "learning", "publish": "publishing", "validate": "validation", "save": "saving"}
PLAIN_S = 10.0
"""Seconds between two lines about a long phase in a log."""


@dataclass(slots=True)
class Phase:
    """What the run does now. `total` is 0 if its size is not known."""

    text: str
    began: float
    done: int = 0
    total: int = 0
    unit: str = ""

    def seconds_left(self, now: float) -> float | None:
        """By the rate so far; None while nothing is done."""
        return (now - self.began) * (self.total - self.done) / self.done if self.done and self.done < self.total else None


class Progress(Observer):
    """A context manager. `directory` is the folder of the run, None until the run has one.

    `phase` says what the run does: before the first step (opening the model, warm start, validation) and within a step.
    """

    def __init__(
        self, total_steps: int, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total_steps = total_steps
        self.directory: Path | None = None
        self.warnings: Sequence[Warned] = ()
        self._console = console
        self._clock = clock
        self._live: Any = None
        self._step = 0
        self._stepped = False  # whether a step was finished since the start
        self._metrics: dict[str, float] = {}
        self._chains = (0, 0)
        self._phase: Phase | None = None
        self._told_at = -math.inf
        self._environments: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=40)
        self._durations: deque[float] = deque(maxlen=10)
        self._last = clock()

    def start(self) -> None:
        """Starts the display. May be called twice."""
        self._last = self._clock()
        if self._live is None and self._on_terminal():
            from rich.console import Console

            from .live_display import LiveDisplay

            self._console = self._console or Console()
            self._live = LiveDisplay(self._render, self._console)
            self._live.start()

    def opened(self, directory: Path) -> None:
        """The run has a folder."""
        self.directory = directory

    def phase(self, text: str, total: int = 0, unit: str = "chains") -> None:
        """Begins a phase. Before the first step a log gets a line about it."""
        self._phase = Phase(text, self._clock(), 0, total, unit)
        self._told_at = self._clock()
        if self._live is None and not self._stepped:
            self._print(f"{text}: {total:,} {unit}" if total else text)

    def advance(self, done: int) -> None:
        """Sets how much of the phase is done. Cheap, as `chains`; a log gets a line every PLAIN_S seconds at most."""
        phase = self._phase
        if phase is None:
            return
        phase.done = done
        if self._live is None and self._clock() - self._told_at >= PLAIN_S and done < phase.total:
            self._told_at = self._clock()
            left = phase.seconds_left(self._told_at)
            self._print(f"{phase.text}: {done:,}/{phase.total:,} {phase.unit}" + (f"  {duration(left)} left" if left else ""))

    def span(self, name: str) -> None:
        """A part of a step begins (a name of SPANS). May be called in any thread."""
        if name != "validate":  # the validation itself says how many chains it has
            self._phase = None if name == "rollout" else Phase(SPANS.get(name, name), self._clock())

    def chains(self, done: int, total: int) -> None:
        """Sets how many chains of the step are finished. Cheap: the display reads it at its own rate."""
        self._chains = (done, total)

    def look(self, metrics: Mapping[str, float], *_: object) -> None:
        """Sets the metrics of the environments (`resources/<kind>/...`). Cheap, as `chains`."""
        self._environments = dict(metrics)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a finished step."""
        now = self._clock()
        self._durations.append(metrics.get("time/step_s", now - self._last))
        self._last = now
        # Not every step validates, so the metrics of the last validation stay visible.
        self._metrics = {**{k: v for k, v in self._metrics.items() if k.startswith("validation/")}, **metrics}
        self._step, self._chains, self._phase, self._stepped = step, (0, 0), None, True
        if math.isfinite(metrics.get("reward/mean", math.nan)):
            self._rewards.append(metrics["reward/mean"])
        if self._live is None:
            self._print(summary_line(step, self.total_steps, metrics, self.seconds_left))
        else:
            self._live.refresh()

    def warned(self, warnings: Sequence[Warned]) -> None:
        """Sets the warnings that the display shows."""
        self.warnings = warnings

    def validated(self, metrics: Mapping[str, float]) -> None:
        """The validation before the first step has ended: a log gets its result. Later ones are in the lines of their steps."""
        self._metrics |= metrics
        if self._live is None:
            figures = [part for part in shown(metrics) if part]
            about = f"{interval_text(metrics, 'validation/success')}, {metrics.get('validation/chains', 0):,.0f} chains"
            self._print("before training: " + "  ".join(figures) + about)

    def note(self, text: str) -> None:
        """Prints a text above the display."""
        if self._live is None:
            self._print(text)
        else:
            from rich.text import Text

            self._live.print_above(Text(visible(text), style="yellow" if text.startswith("warning:") else ""))

    def stop(self) -> None:
        """Ends the display. May be called twice."""
        self._phase = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the mean of the last ten steps, less what has passed of this one.

        None before the first step and after the last.
        """
        left = self.total_steps - self._step
        if not self._durations or left <= 0:
            return None
        mean = sum(self._durations) / len(self._durations)
        return left * mean - min(mean, max(0.0, self._clock() - self._last))

    def _on_terminal(self) -> bool:
        if self._console is not None:
            return self._console.is_terminal and not self._console.is_dumb_terminal
        return sys.stdout.isatty()

    def _print(self, text: str) -> None:
        file = sys.stdout if self._console is None else self._console.file
        print(text, file=file, flush=True)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        rows: list[RenderableType] = [self._steps_row()]
        if self._step < self.total_steps or self._phase is not None:
            rows.append(self._phase_row())
        if parts := shown(self._metrics):
            rows.append(Text("  ".join(parts)))
        rows += map(Text, environment_lines(self._environments))
        if len(self._rewards) > 1 and self._console is not None and not self._console.options.ascii_only:
            rows.append(Text(f"reward {sparkline(list(self._rewards))}", style="green"))
        rows += [Text(f"warning: {warned.text}", style=LEVELS[warned.level]) for warned in self.warnings]
        return Group(*rows)

    def _steps_row(self) -> RenderableType:
        left = self.seconds_left
        text = f"{self._step}/{self.total_steps}" + (f"  {duration(left)} left" if left is not None else "")
        return bar_row("steps", self._step, self.total_steps, text)

    def _phase_row(self) -> RenderableType:
        done, total = self._chains
        phase = self._phase
        if phase is None:
            word = "sampling" if done < total or not total else "learning"
            return bar_row(word, done, total, f"{done}/{total} chains" if total else "")
        now = self._clock()
        if not phase.total:
            return bar_row(phase.text, 0, 0, duration(now - phase.began))
        left = phase.seconds_left(now)
        text = f"{phase.done:,}/{phase.total:,} {phase.unit}" + (f"  {duration(left)} left" if left is not None else "")
        return bar_row(phase.text, phase.done, phase.total, text)


LEVELS = {"red": "red", "yellow": "yellow"}


def bar_row(word: str, done: int, total: int, told: str) -> RenderableType:
    """A word, a bar and a text, as one row."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(min_width=10, no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row(Text(word, style="bold"), ProgressBar(total=max(1, total), completed=done, width=30), Text(told))
    return grid


def summary_line(step: int, total_steps: int, metrics: Mapping[str, float], seconds_left: float | None = None) -> str:
    """A step as one line of plain text."""
    parts = [f"step {step}/{total_steps}", *shown(metrics)]
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def shown(metrics: Mapping[str, float]) -> list[str]:
    parts = [
        f"{before}{number(metrics[name], decimals)}{after}{_over(metrics, name)}{_of_sources(metrics, name)}"
        for name, before, after, decimals in SHOWN
        if name in metrics
    ]
    if "reward/mean" not in metrics and "train/loss" in metrics:  # supervised training has no reward
        parts.insert(0, f"loss {number(metrics['train/loss'], 4)}")
    if metrics.get("rollout/envs") or metrics.get("resources/total/failed"):
        failed = metrics.get("resources/total/failed", 0)
        failures = f" ({failed:,.0f} failed so far)" if failed else ""
        parts.append(f"{number(metrics.get('rollout/envs', 0), 0)} envs{failures}")
    return parts


def _of_sources(metrics: Mapping[str, float], name: str) -> str:
    """The held-out success of each source: ` (gsm8k 0.31, search 0.52)`; empty without sources."""
    parts = [key.split("/") for key in metrics if name == "validation/success" and key.endswith("/success")]
    shares = [f"{part[1]} {number(metrics['/'.join(part)], 2)}" for part in parts if len(part) == 3 and part[0] == "validation"]
    return f" ({', '.join(shares)})" if shares else ""


def _over(metrics: Mapping[str, float], name: str) -> str:
    """How many chains a success is over, and its bounds, if more than 1 % of them have no score."""
    what = name.removesuffix("/success")
    scored, total = metrics.get(f"{what}/scored"), metrics.get(f"{what}/chains")
    if what == name or scored is None or total is None or not is_told(scored, total):
        return ""
    low, high = bounds(metrics[name], scored, total)
    return f" of {scored:.0f}/{total:.0f} chains ({low:.2f}-{high:.2f} of all)"


def environment_lines(metrics: Mapping[str, float]) -> list[str]:
    """One line per kind of environment: counts by state, mean waiting time and mean lease."""
    kinds = [name.split("/")[1] for name in metrics if name.startswith("resources/") and name.endswith("/allocated")]
    lines = []
    for kind in (kind for kind in kinds if kind != "total"):
        wanted = (*dict(ENVIRONMENTS), "acquire_s", "lease_s")
        have = {name: metrics.get(f"resources/{kind}/{name}", math.nan) for name in wanted}
        counts = ", ".join(f"{number(have[name], 0)} {word}" for name, word in ENVIRONMENTS)
        lines.append(f"{kind}: {counts}; acquire {short(have['acquire_s'])}, held {short(have['lease_s'])}")
    return lines


def number(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}" if math.isfinite(value) else "-"


def short(seconds: float) -> str:
    """12 us, 3.4 ms, 1.2 s."""
    if not math.isfinite(seconds):
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds / 1e-6:.0f} us"


def duration(seconds: float) -> str:
    """42s, 2m10s, 3h05m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int(8 * (value - low) / span))] for value in values)
