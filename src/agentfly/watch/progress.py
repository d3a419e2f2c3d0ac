"""The display of a running job: live (rich) in a terminal, one plain line per step elsewhere.

The plain lines have no control codes, so a log file stays readable. Metrics of any value are accepted, NaN included.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


class Progress:
    """A context manager. `directory` is the folder of the run, set when the run has one."""

    def __init__(
        self, total_steps: int, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total_steps = total_steps
        self.directory: Path | None = None
        self.on_note: Callable[[str], None] | None = None  # told of each note
        self._console = console
        self._clock = clock
        self._live: Any = None
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._chains = (0, 0)
        self._environments: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=40)
        self._durations: deque[float] = deque(maxlen=10)
        self._last = clock()

    def start(self) -> None:
        """Starts the display. May be called twice."""
        self._last = self._clock()
        if self._live is None and self._on_terminal():
            from rich.console import Console
            from rich.live import Live

            self._console = self._console or Console()
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()

    def chains(self, done: int, total: int) -> None:
        """Sets how many chains of the step are finished. Cheap: the display reads it at its own rate."""
        self._chains = (done, total)

    def environments(self, metrics: Mapping[str, float]) -> None:
        """Sets the metrics of the environments (`resources/<kind>/...`). Cheap, as `chains`."""
        self._environments = dict(metrics)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a finished step."""
        now = self._clock()
        self._durations.append(metrics.get("time/step_s", now - self._last))
        self._last = now
        # Not every step validates, so the metrics of the last validation stay visible.
        self._metrics = {**{k: v for k, v in self._metrics.items() if k.startswith("validation/")}, **metrics}
        self._step, self._chains = step, (0, 0)
        if math.isfinite(metrics.get("reward/mean", math.nan)):
            self._rewards.append(metrics["reward/mean"])
        if self._live is None:
            self._print(summary_line(step, self.total_steps, metrics, self.seconds_left))
        else:
            self._live.refresh()

    def note(self, text: str) -> None:
        """Prints a text above the display."""
        if self.on_note is not None:
            self.on_note(text)
        if self._live is None:
            self._print(text)
        else:
            from rich.text import Text

            self._live.console.print(Text(text))

    def stop(self) -> None:
        """Ends the display. May be called twice."""
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
        """Estimated from the mean of the last ten steps; None before the first step and after the last."""
        left = self.total_steps - self._step
        return left * sum(self._durations) / len(self._durations) if self._durations and left > 0 else None

    def _on_terminal(self) -> bool:
        if self._console is not None:
            return self._console.is_terminal and not self._console.is_dumb_terminal
        return sys.stdout.isatty()

    def _print(self, text: str) -> None:
        file = sys.stdout if self._console is None else self._console.file
        print(text, file=file, flush=True)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done, total = self._chains
        grid = Table.grid(padding=(0, 1))
        left = self.seconds_left
        waiting = "sampling" if done < total or not total else "learning"
        grid.add_row(
            Text("steps", style="bold"),
            ProgressBar(total=max(1, self.total_steps), completed=self._step, width=40),
            Text(f"{self._step}/{self.total_steps}" + (f"  {duration(left)} left" if left is not None else "")),
        )
        if self._step < self.total_steps:
            chains = f"{done}/{total} chains" if total else ""
            grid.add_row(Text(waiting, style="bold"), ProgressBar(total=max(1, total), completed=done, width=40), Text(chains))
        line = Text("  ".join(shown(self._metrics)))
        rows: list[RenderableType] = [grid, line, *map(Text, environment_lines(self._environments))]
        if len(self._rewards) > 1 and self._console is not None and not self._console.options.ascii_only:
            rows.append(Text(f"reward {sparkline(list(self._rewards))}", style="green"))
        return Group(*rows)


def summary_line(step: int, total_steps: int, metrics: Mapping[str, float], seconds_left: float | None = None) -> str:
    """A step as one line of plain text."""
    parts = [f"step {step}/{total_steps}", *shown(metrics)]
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def shown(metrics: Mapping[str, float]) -> list[str]:
    parts = [f"{before}{number(metrics[name], decimals)}{after}" for name, before, after, decimals in SHOWN if name in metrics]
    if "reward/mean" not in metrics and "train/loss" in metrics:  # supervised training has no reward
        parts.insert(0, f"loss {number(metrics['train/loss'], 4)}")
    if metrics.get("rollout/envs") or metrics.get("resources/total/failed"):
        failed = metrics.get("resources/total/failed", 0)
        told = f" ({failed:,.0f} failed so far)" if failed else ""
        parts.append(f"{number(metrics.get('rollout/envs', 0), 0)} envs{told}")
    return parts


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
