"""The progress of an evaluation: a bar in a terminal, a line for every tenth of the chains elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..types import Trajectory
from .metrics import is_success

if TYPE_CHECKING:
    from rich.console import Console


class ChainProgress:
    """A context manager. `begin` sets the number of chains, `add` counts one that has ended."""

    def __init__(self, console: Console, success_at: float = 1.0) -> None:
        self.console, self.success_at = console, success_at
        self.total = self.done = self.scored = self.succeeded = 0
        self._bar: Any = None
        self._row: Any = None

    def begin(self, total: int) -> None:
        """Shows how many chains there will be."""
        self.total = total
        if not self.console.is_terminal:
            self._print()
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("chains"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self.console)
        self._row = self._bar.add_task("", total=total)
        self._bar.start()

    def add(self, trajectory: Trajectory) -> None:
        """Counts a chain."""
        self.done += 1
        self.scored += trajectory.scored
        self.succeeded += trajectory.scored and is_success(trajectory, self.success_at)
        if self._bar is not None:
            self._bar.update(self._row, advance=1, description=self._words())
        elif self.done * 10 // self.total > (self.done - 1) * 10 // self.total:
            self._print()

    def _words(self) -> str:
        failed = self.done - self.scored
        share = f"success {self.succeeded / self.scored:.2f}" if self.scored else "no score yet"
        return share + (f", {failed} failed" if failed else "")

    def _print(self) -> None:
        more = f"  {self._words()}" if self.done else ""
        print(f"{self.done}/{self.total} chains{more}", file=self.console.file, flush=True)

    def __enter__(self) -> ChainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
