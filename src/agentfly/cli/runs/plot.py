"""`agentfly plot`: curves of runs in the terminal, or as a figure for a paper, with bands over seeds.

An .svg file needs nothing but the package; .png and .pdf need matplotlib. Runs whose configs differ only in the seed (and in
`run.*`) are one line with a band.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...plugins import missing_extra

if TYPE_CHECKING:
    from ...watch.charts.curves import Curve
    from ...watch.charts.svg import Panel

SUFFIXES = (".svg", ".png", ".pdf")
STYLES = ("green", "cyan", "yellow", "magenta", "blue", "red", "white")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plot` to the command line."""
    plot = commands.add_parser("plot", help="plot curves of runs in the terminal or to a file, with bands over seeds")
    plot.add_argument("runs", metavar="RUN", nargs="+", help="folders of runs")
    plot.add_argument("--metric", action="append", metavar="NAME", help="default: reward/mean; may be given several times")
    plot.add_argument("-o", "--output", metavar="FILE", help="write an .svg, .png or .pdf file (the last two by matplotlib)")
    plot.add_argument("--x", choices=("step", "time"), default="step", help="against steps (default) or hours")
    plot.add_argument("--smooth", type=float, default=0.0, metavar="W", help="weight of the moving average, 0 to below 1")
    plot.add_argument(
        "--band", choices=("range", "std", "none"), default="range", help="over seeds: lowest to highest run, or one deviation"
    )
    plot.add_argument("--log", action="store_true", help="logarithmic y axis")
    plot.add_argument("--columns", type=int, default=2, metavar="N", help="panels beside each other in a file (default 2)")
    plot.add_argument("--json", action="store_true", help="print the points of the lines and bands as JSON")
    plot.set_defaults(run=run_plot)


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw the curves."""
    from ...watch.charts.curves import panels_of
    from ...watch.metrics import METRICS

    path = None if arguments.output is None else Path(arguments.output)
    if path is not None and path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: curves are written to {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if arguments.columns < 1:
        raise ConfigError(f"--columns must be at least 1, not {arguments.columns}")
    paths = [Path(run) for run in arguments.runs]
    metrics = list(dict.fromkeys(arguments.metric or ["reward/mean"]))
    curves = read_curves(paths, metrics, arguments.x)
    if not arguments.metric and not any(curve.points.get("reward/mean") for curve in curves):  # evaluations alone
        metrics = ["validation/success"]
        curves = read_curves(paths, metrics, arguments.x)
    panels = panels_of(
        curves,
        metrics,
        x_label="step" if arguments.x == "step" else "hours",
        band=arguments.band,
        smooth=arguments.smooth,
        log=arguments.log,
        units={name: metric.unit for name, metric in METRICS.items()},
    )
    if arguments.json:
        print(json.dumps([_to_json(panel) for panel in panels], allow_nan=False))
    if path is not None:
        write_chart(path, panels, arguments.columns)
        if not arguments.json:
            print(path)
    elif not arguments.json:
        _print(panels)
    return 0


def read_curves(paths: Sequence[Path], metrics: Sequence[str], x: str) -> list[Curve]:
    """The points of the metrics of each run. Raises ConfigError."""
    from ...runs import RunDirectory, RunReader
    from ...runs.catalog import read_config
    from ...watch.charts.curves import Curve, names_of

    curves = []
    for path, name in zip(paths, names_of(paths), strict=True):
        with RunReader(RunDirectory.existing(path).database, timeout_s=60.0) as reader:
            series = reader.series(metrics)
            names = reader.metric_names()
        if not any(series.values()) and not names:
            raise ConfigError(f"{path} has no metrics yet")
        times = _times(path, series) if x == "time" else {}
        points = {
            metric: [(times[step] if x == "time" else float(step), value) for step, _, value in rows if value is not None]
            for metric, rows in series.items()
            if rows
            if x == "step" or all(step in times for step, _, _ in rows)
        }
        # Names without points: a wrong name is answered with those that there are.
        curves.append(Curve(name, read_config(path), {**dict.fromkeys(names, ()), **points}))
    return curves


def _times(path: Path, series: Any) -> dict[int, float]:
    """Hours from the first recorded step, by step: from the store, or from metrics.jsonl of an older run."""
    times = {step: at for rows in series.values() for step, at, _ in rows if at is not None}
    if not times and (path / "metrics.jsonl").is_file():
        for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                times[int(row["step"])] = float(row["time"])
            except (ValueError, KeyError, TypeError):
                continue  # an incomplete last line
    if not times:
        raise ConfigError(f"{path} did not record times: plot it against steps")
    first = min(times.values())
    return {step: (at - first) / 3600 for step, at in times.items()}


def write_chart(path: Path, panels: Sequence[Panel], columns: int) -> None:
    """Write the panels to a file in one operation. Raises ConfigError or MissingExtra."""
    from ...watch.charts.svg import draw

    temporary = path.with_name(f".{path.stem}.writing{path.suffix}")
    try:
        if path.suffix == ".svg":
            temporary.write_text(draw(panels, columns=columns), encoding="utf-8")
        else:
            try:
                from ...watch.charts.matplotlib_chart import save
            except ModuleNotFoundError as error:
                raise missing_extra(f"a {path.suffix} file", "matplotlib") from error
            save(panels, temporary, columns)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _to_json(panel: Panel) -> dict[str, Any]:
    lines = [{"label": line.label, "points": list(line.points), "band": list(line.band)} for line in panel.lines]
    return {"metric": panel.title, "x": panel.x_label, "lines": lines}


def _print(panels: Sequence[Panel]) -> None:
    from rich.console import Console
    from rich.text import Text

    from ...watch.charts.terminal import draw_text
    from ...watch.tables import clean

    console = Console(highlight=False)
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    for panel in panels:
        for row in draw_text(panel, width, ascii_only=console.options.ascii_only):
            pieces = [(clean(text), "" if owner is None else STYLES[owner % len(STYLES)]) for text, owner in row]
            console.print(Text.assemble(*pieces), soft_wrap=True)
