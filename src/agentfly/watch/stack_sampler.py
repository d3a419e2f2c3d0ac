"""A sampling profiler of one thread: a daemon thread reads its Python stack a hundred times a second.

The file has one line per different stack, `outermost;...;innermost count`, which flame graph programs read.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import FrameType

INTERVAL_S = 0.01
MAX_DEPTH = 60
PACKAGE = str(Path(__file__).parent.parent)
LOOP, WAITING = "base_events.py:_run_once", "selectors.py:select"
"""The event loop's functions: the one that runs callbacks, and the one that waits for events."""


class StackSampler:
    """A context manager that samples the thread that enters it."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.stacks: Counter[tuple[str, ...]] = Counter()
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StackSampler:
        sampled = threading.get_ident()
        self._thread = threading.Thread(target=self._sample, args=(sampled,), name="agentfly-profile", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _sample(self, ident: int) -> None:
        while not self._stopped.wait(self._interval_s):
            frame = sys._current_frames().get(ident)
            if frame is None:  # the thread has ended
                return
            self.stacks[_stack(frame)] += 1

    def busiest(self, limit: int = 5) -> list[tuple[str, float]]:
        """The functions of this package that took most of the event loop's busy time, with their share of it.

        A sample counts for the innermost function of the package on its stack. What runs before the event loop starts, such as
        loading the model, does not count.
        """
        busy = Counter[str]()
        for stack, count in self.stacks.items():
            if LOOP in stack and stack[-1] != WAITING:
                busy[next((name for name in reversed(stack) if name.startswith("agentfly/")), stack[-1])] += count
        total = busy.total()
        return [(name, count / total) for name, count in busy.most_common(limit)]

    def write(self, path: Path) -> None:
        """Writes the collapsed stacks, most frequent first."""
        lines = [f"{';'.join(stack)} {count}\n" for stack, count in self.stacks.most_common()]
        path.write_text("".join(lines), encoding="utf-8")


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    names: list[str] = []
    while frame is not None and len(names) < MAX_DEPTH:
        code = frame.f_code
        names.append(_name(code.co_filename, code.co_name))
        frame = frame.f_back
    return tuple(reversed(names))


@lru_cache(maxsize=10_000)
def _name(path: str, function: str) -> str:
    """`file:function`, the file from the package's folder on if it is in it. Without characters that the format uses."""
    file = f"agentfly{path[len(PACKAGE) :]}" if path.startswith(PACKAGE) else os.path.basename(path)
    return f"{file}:{function}".replace("\\", "/").replace(";", "_").replace(" ", "_")
