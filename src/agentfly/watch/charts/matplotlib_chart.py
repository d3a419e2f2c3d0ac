"""Panels of curves as a .png or .pdf file, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .svg import COLOURS, Panel, scale

DPI = 200


def save(panels: Sequence[Panel], path: Path, columns: int = 2) -> None:
    """Write the panels. The suffix of the path is the format."""
    columns = max(1, min(columns, len(panels)))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 2.7 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    colour = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for panel, axis in zip(panels, axes, strict=False):
        for line in scale(panel)[0]:
            if line.band:
                xs, low, high = zip(*line.band, strict=True)
                axis.fill_between(xs, low, high, color=colour[line.label], alpha=0.14, linewidth=0)
            if line.points:
                xs, ys = zip(*line.points, strict=True)
                axis.plot(xs, ys, color=colour[line.label], label=line.label, linewidth=1.6)
        axis.set_title(panel.title, fontsize=10, loc="left", parse_math=False)
        axis.set_xlabel(panel.x_label, parse_math=False)
        axis.set_ylabel(panel.y_label, parse_math=False)
        if panel.x_label == "step":
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if panel.log_y:
            axis.set_yscale("log")
        axis.grid(axis="y", color="#ebebeb")
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            for text in axis.legend(fontsize=8, frameon=False).get_texts():
                text.set_parse_math(False)
    for axis in list(axes):
        axis.set_visible(False)
    figure.savefig(path, dpi=DPI)
