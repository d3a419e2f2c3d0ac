"""Line charts as SVG text, in plain Python: light, self-contained, readable in a browser and on a page of documentation.

In: panels, each with lines of (x, y) points and, where a line is a mean, the band around it. Out: the text of one SVG. A point
that is not a finite number is left out, and a panel without any point says so instead of drawing an empty frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")  # told apart without red and green
WIDTH, HEIGHT = 440, 250  # of one panel, its labels included
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 42
LEGEND = 30
MOST_MARKS = 12
"""Lines with fewer points than this show each of them."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """`band` is (x, lowest, highest) where the line is the mean of several."""

    label: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """`y_range` is kept where it is given (a share lies between 0 and 1), and found from the points where it is not.

    `log_y` draws the logarithm of y; values of 0 and less have no place then and are left out.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    y_range: tuple[float, float] | None = None
    log_y: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` steps."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def scale(panel: Panel) -> tuple[list[Line], list[float], Callable[[float], float]]:
    """The lines with the points that can be drawn, the ticks of y, and a function of y that is linear on the paper."""
    lines = [Line(line.label, _finite(line.points, panel.log_y), _positive(line.band, panel.log_y)) for line in panel.lines]
    ys = [y for line in lines for _, y in line.points] + [end for line in lines for _, *ends in line.band for end in ends]
    if not ys:
        return lines, [], float
    low, high = panel.y_range or (min(ys), max(ys))
    if not panel.log_y:
        return lines, ticks(low, high), float
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    return lines, [10.0**power for power in range(first, max(last, first + 1) + 1)], math.log10


def draw(panels: Sequence[Panel], *, columns: int = 2) -> str:
    """One SVG with a legend above and the panels in rows."""
    columns = max(1, min(columns, len(panels)))
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    colour = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}
    width, height = columns * WIDTH, LEGEND + -(-len(panels) // columns) * HEIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    at = float(LEFT)
    for label in labels:
        out.append(f'<line x1="{at:.0f}" y1="17" x2="{at + 18:.0f}" y2="17" stroke="{colour[label]}" stroke-width="2.5"/>')
        out.append(f'<text x="{at + 24:.0f}" y="21" class="legend">{escape(label)}</text>')
        at += 24 + 7 * len(label) + 22
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        out.append(f'<g transform="translate({column * WIDTH},{LEGEND + row * HEIGHT})">')
        out += _panel(panel, colour)
        out.append("</g>")
    return "\n".join([*out, "</svg>"]) + "\n"


def _panel(panel: Panel, colour: dict[str, str]) -> list[str]:
    lines, y_ticks, flat = scale(panel)
    every = [point for line in lines for point in line.points]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    middle_x, middle_y = (LEFT + right) / 2, (TOP + bottom) / 2
    out = [
        f'<text x="{LEFT}" y="18" font-size="12.5" font-weight="600">{escape(panel.title)}</text>',
        f'<text x="{middle_x:.0f}" y="{HEIGHT - 8}" text-anchor="middle" fill="#666">{escape(panel.x_label)}</text>',
        f'<text x="13" y="{middle_y:.0f}" text-anchor="middle" fill="#666" '
        f'transform="rotate(-90 13 {middle_y:.0f})">{escape(panel.y_label)}</text>',
    ]
    if not every:
        return [*out, f'<text x="{middle_x:.0f}" y="{middle_y:.0f}" text-anchor="middle" fill="#999">no figures</text>']
    x_low, x_high = min(x for x, _ in every), max(x for x, _ in every)
    x_high = x_high if x_high > x_low else x_low + 1
    y_low, y_high = flat(y_ticks[0]), flat(y_ticks[-1])

    def place(x: float, y: float) -> str:
        return (
            f"{LEFT + (x - x_low) / (x_high - x_low) * (right - LEFT):.1f},"
            f"{bottom - (flat(y) - y_low) / (y_high - y_low) * (bottom - TOP):.1f}"
        )

    for tick in y_ticks:
        y = place(x_low, tick).partition(",")[2]
        out.append(f'<line x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#ebebeb"/>')
        out.append(f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end" fill="#666">{tick:.6g}</text>')
    for tick in ticks(x_low, x_high):
        if x_low <= tick <= x_high:
            x = place(tick, y_ticks[0]).partition(",")[0]
            out.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle" fill="#666">{tick:.6g}</text>')
    out.append(f'<line x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="#bbbbbb"/>')
    for line in lines:
        out += _line(line, colour[line.label], place)
    return out


def _line(line: Line, colour: str, place: Callable[[float, float], str]) -> list[str]:
    out = []
    if line.band:
        edge = [place(x, high) for x, _, high in line.band] + [place(x, low) for x, low, _ in reversed(line.band)]
        out.append(f'<polygon points="{" ".join(edge)}" fill="{colour}" fill-opacity="0.14"/>')
    points = [place(x, y) for x, y in line.points]
    out.append(
        f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
    )
    if len(points) < MOST_MARKS:
        for point in points:
            x, _, y = point.partition(",")
            out.append(f'<circle cx="{x}" cy="{y}" r="2.6" fill="{colour}"/>')
    return out


def _finite(points: Sequence[Point], positive: bool) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (y > 0 or not positive)]


def _positive(band: Sequence[tuple[float, float, float]], positive: bool) -> list[tuple[float, float, float]]:
    return [edge for edge in band if edge[1] > 0 or not positive]
