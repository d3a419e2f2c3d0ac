"""Line charts as text: eight braille dots a character, or one mark a character where the terminal has only ASCII.

1.0 |                     ⢀⡠⠤⠒⠊⠉
    |           ⢀⣀⠤⠔⠒⠉⠁
0.0 |⣀⡠⠤⠔⠒⠉
    +------------------------------
     0                          20  step
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .svg import Line, Panel, scale

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
MARKS = "*o+x#%@"
"""The marks of the lines in an ASCII chart."""


Row = list[tuple[str, int | None]]


def draw_text(panel: Panel, width: int = 72, height: int = 14, *, ascii_only: bool = False) -> list[Row]:
    """The rows of a chart. A row is a list of pieces: a text, and the number of the line that it belongs to (None: the frame).

    Bands are not drawn. The last row of a chart without a point says so.
    """
    lines, y_ticks, flat = scale(panel)
    every = [x for line in lines for x, _ in line.points]
    title: list[Row] = [[(panel.title, None)]]
    if not every:
        return [*title, [("  no figures", None)]]
    low, high = flat(y_ticks[0]), flat(y_ticks[-1])
    labels = {0: f"{y_ticks[-1]:.4g}", height - 1: f"{y_ticks[0]:.4g}"}
    margin = max(map(len, labels.values()))
    columns = max(10, width - margin - 3)
    x_low, x_high = min(every), max(every)
    x_high = x_high if x_high > x_low else x_low + 1
    cells: dict[tuple[int, int], tuple[int, int]] = {}  # (row, column) -> dots, number of the line
    across, down = (1, 1) if ascii_only else (2, 4)
    for number, line in enumerate(lines):
        places = [
            (
                round((x - x_low) / (x_high - x_low) * (columns * across - 1)),
                round((high - flat(y)) / (high - low) * (height * down - 1)),
            )
            for x, y in sorted(line.points)
        ]
        for x, y in _between(places):
            dots = 0 if ascii_only else _DOTS[y % down][x % across]
            place = (y // down, x // across)
            cells[place] = (cells.get(place, (0, 0))[0] | dots, number)
    rows = list(title)
    for row in range(height):
        pieces: Row = [(f"{labels.get(row, ''):>{margin}} |", None)]
        for column in range(columns):
            cell = cells.get((row, column))
            owner = None if cell is None else cell[1]
            mark = " " if cell is None else MARKS[cell[1] % len(MARKS)] if ascii_only else chr(0x2800 + cell[0])
            if len(pieces) > 1 and pieces[-1][1] == owner:
                pieces[-1] = (pieces[-1][0] + mark, owner)
            else:
                pieces.append((mark, owner))
        rows.append(pieces)
    rows.append([(" " * margin + " +" + "-" * columns, None)])
    ends = f"{x_low:.4g}", f"{x_high:.4g}"
    gap = " " * max(1, columns - len(ends[0]) - len(ends[1]))
    rows.append([(" " * (margin + 2) + ends[0] + gap + ends[1] + f"  {panel.x_label}", None)])
    return [*rows, *legend(lines, ascii_only)]


def legend(lines: Sequence[Line], ascii_only: bool) -> list[Row]:
    """A row for each line, with its last value."""
    return [
        [(f"  {MARKS[number % len(MARKS)] if ascii_only else '━'} {line.label}", number), (_last(line), None)]
        for number, line in enumerate(lines)
    ]


def _last(line: Line) -> str:
    return f": {max(line.points)[1]:.4g}" if line.points else ": no figures"


def _between(places: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """All dots on the straight lines between neighbouring places."""
    dots = set(places[:1])
    for (x, y), (to_x, to_y) in pairwise(places):
        steps = max(abs(to_x - x), abs(to_y - y), 1)
        dots |= {(round(x + (to_x - x) * i / steps), round(y + (to_y - y) * i / steps)) for i in range(1, steps + 1)}
    return dots
