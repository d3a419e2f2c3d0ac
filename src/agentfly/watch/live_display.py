"""A display that is redrawn in place, without flicker and clean after the terminal was resized.

It is a render hook of a rich console: what is printed on the console, or to stdout and stderr, appears above the frame, which
is removed before and drawn again after it. A frame that equals the last one is not drawn again. If the terminal became
narrower, it has wrapped the lines that were drawn, so they take more rows than when they were drawn: all of them are removed.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

from rich.console import Console, ConsoleRenderable, Group, RenderableType, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment

PER_SECOND = 4
JOIN_S = 5.0


class LiveDisplay(RenderHook):
    """Draws what `render` returns, a few times a second and on `refresh`. Text that is printed meanwhile stays above it.

    Its methods may be called in any thread. `start` may be called once.
    """

    def __init__(self, render: Callable[[], RenderableType], console: Console) -> None:
        self.console = console
        self._render = render
        # Held while something is printed: two threads that print must not both remove the same frame.
        self._lock = threading.RLock()
        self._frame: list[list[Segment]] = []  # the lines to draw
        self._drawn: list[list[Segment]] = []  # the lines on the screen, the cursor after the last one
        self._drawn_width = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="live display", daemon=True)
        self._files: tuple[Any, Any] | None = None

    def start(self) -> None:
        """Begin to draw. stdout and stderr are redirected to the console until `stop`."""
        self.console.show_cursor(False)
        self.console.push_render_hook(self)
        self._files = sys.stdout, sys.stderr
        sys.stdout = _LockedProxy(self.console, sys.stdout, self._lock)
        sys.stderr = _LockedProxy(self.console, sys.stderr, self._lock)
        # Python flushes stdout when it ends, after it has frozen this thread: that would wait for its lock forever.
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Draw the last frame, which stays, and give the terminal back. May be called twice."""
        if self._files is None:
            return
        atexit.unregister(self.stop)
        self.pause()
        try:
            self.refresh()
        finally:
            for proxy in (sys.stdout, sys.stderr):
                if isinstance(proxy, _LockedProxy):
                    proxy.flush()  # the beginning of a line
            (sys.stdout, sys.stderr), self._files = self._files, None
            self.console.pop_render_hook()
            if self._drawn:
                self.console.line()
            self.console.show_cursor(True)

    def pause(self) -> None:
        """Draw on `refresh` alone from now on."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def refresh(self) -> None:
        """Draw the frame if it or the width of the terminal has changed."""
        with self._lock:
            # A frame that is taller than the terminal could not be removed: its first rows would have scrolled away.
            frame = self.console.render_lines(_Lines(self._render()), pad=False)[: self.console.height]
            if frame != self._drawn or self.console.width != self._drawn_width:
                self._frame = frame
                self.console.print(Control())

    def print_above(self, text: object) -> None:
        """Print something that stays, above the display."""
        with self._lock:
            self.console.print(text, soft_wrap=True)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Called by the console for everything that it prints: the frame is removed before it and drawn after it."""
        with self._lock:
            width = self.console.width
            if self._frame and width < self._drawn_width:  # rendered for a wider terminal: it would wrap
                self._frame = self.console.render_lines(_Lines(self._render()), pad=False)[: self.console.height]
            removal = erase(rows_taken(self._drawn, width))
            self._drawn, self._drawn_width = self._frame, width
            return [removal, *renderables, _Drawn(self._frame)]

    def _redraw(self) -> None:
        while not self._stopped.wait(1 / PER_SECOND):
            self.refresh()


def erase(rows: int) -> Control:
    """Codes that remove the row of the cursor and those above it, `rows` in all, and move the cursor to the first of them."""
    if not rows:
        return Control()
    up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * (rows - 1)
    return Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up)


def rows_taken(lines: list[list[Segment]], width: int) -> int:
    """The rows of a terminal of this width that lines take after it has wrapped them."""
    return sum(max(1, -(-Segment.get_line_length(line) // max(1, width))) for line in lines)


class _LockedProxy(FileProxy):
    """stdout or stderr while the display is shown: whole lines are printed above it."""

    def __init__(self, console: Console, file: IO[str], lock: Any) -> None:
        super().__init__(console, file)
        self._display_lock = lock

    def write(self, text: str) -> int:
        with self._display_lock:
            super().write(text)
            return len(text)

    def flush(self) -> None:
        with self._display_lock:
            super().flush()


class _Drawn:
    """Lines that were rendered before, with the cursor left at the end of the last one."""

    def __init__(self, lines: list[list[Segment]]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: object) -> Any:
        for number, line in enumerate(self._lines):
            if number:
                yield Segment.line()
            yield from line


class _Lines:
    """The rows of a group, each cut at the width of the terminal: a row that wraps would be counted as one and take two."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: Any) -> Any:
        rows = self._content.renderables if isinstance(self._content, Group) else [self._content]
        for row in rows:
            yield from console.render(row, options.update(no_wrap=True, overflow="ellipsis"))
