"""A display that is redrawn in place: rich's `Live`, without flicker and clean after the terminal was resized.

A frame that equals the last one is not drawn again. If the terminal became narrower, it has wrapped the lines that were drawn,
so they take more rows than when they were drawn; the next frame first removes all of these rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment

PER_SECOND = 4


class LiveDisplay(Live):
    """Draws what `render` returns, a few times a second and on `refresh`. Text that is printed meanwhile stays above it."""

    def __init__(self, render: Callable[[], RenderableType], console: Console) -> None:
        super().__init__(get_renderable=lambda: _Lines(render()), console=console, refresh_per_second=PER_SECOND)
        self._drawn: list[list[Segment]] | None = None
        self._drawn_width = 0

    def refresh(self) -> None:
        """Draw the frame if it or the size of the terminal has changed."""
        with self._lock:
            if not self._started:  # the last frame, which `stop` draws
                self._follow_resize()
                super().refresh()
                return
            frame = self.console.render_lines(self.get_renderable(), pad=False)
            if frame == self._drawn and self.console.width == self._drawn_width:
                return
            self._follow_resize()
            self._drawn, self._drawn_width = frame, self.console.width
            super().refresh()

    def print_above(self, text: Any) -> None:
        """Print something that stays, above the display."""
        with self._lock:
            self._follow_resize()
            self._drawn_width = self.console.width
            self.console.print(text, soft_wrap=True)

    def _follow_resize(self) -> None:
        width = self.console.width
        if self._drawn is None or width == self._drawn_width or width < 1:
            return
        self._live_render._shape = (width, rows_taken(self._drawn, width))


def rows_taken(lines: list[list[Segment]], width: int) -> int:
    """The rows of a terminal of this width that lines take after it has wrapped them."""
    return sum(max(1, -(-Segment.get_line_length(line) // width)) for line in lines)


class _Lines:
    """The rows of a group, each cut at the width of the terminal: a row that wraps would be counted as one and take two."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: Any) -> Any:
        rows = self._content.renderables if isinstance(self._content, Group) else [self._content]
        for row in rows:
            yield from console.render(row, options.update(no_wrap=True, overflow="ellipsis"))
