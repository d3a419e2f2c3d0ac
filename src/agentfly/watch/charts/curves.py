"""Curves of runs: the values of a metric by step or time, smoothed, and runs that differ only in their seed as one band."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from ...errors import ConfigError
from ...runs.compare import flatten
from .svg import Line, Panel

Band = Literal["range", "std", "none"]
SAME = ("seed", "run.", "sampling.seed")
"""Keys that two runs of one band may differ in."""
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: its name, its config as a tree, and for each metric the points (x, value)."""

    name: str
    config: Mapping[str, Any]
    points: Mapping[str, Points] = field(default_factory=dict)


def panels_of(
    curves: Sequence[Curve],
    metrics: Sequence[str],
    *,
    x_label: str = "step",
    band: Band = "range",
    smooth: float = 0.0,
    log: bool = False,
    units: Mapping[str, str] | None = None,
) -> list[Panel]:
    """One panel per metric, with a line per group of runs. Raises ConfigError for a metric that no run has."""
    if not 0 <= smooth < 1:
        raise ConfigError(f"the smoothing must be at least 0 and less than 1, not {smooth}")
    groups = grouped(curves) if x_label == "step" else {curve.name: [curve] for curve in curves}
    panels = []
    for metric in metrics:
        lines = []
        for label, members in groups.items():
            runs = [smoothed(curve.points[metric], smooth) for curve in members if curve.points.get(metric)]
            if runs:
                lines.append(line_of(label, runs, band))
        if not lines:
            names = sorted({name for curve in curves for name in curve.points})
            raise ConfigError(f"no run has the metric {metric!r}; they have {', '.join(names) or 'none'}")
        panels.append(Panel(metric, x_label, (units or {}).get(metric) or metric, lines, log_y=log))
    return panels


def grouped(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Runs with the same config but for their seed and folder, under a label: the keys in which the groups differ.

    A group whose label is not unique, or a run without a config, is named after its first run.
    """
    configs_of = {
        id(curve): {key: value for key, value in flatten(curve.config).items() if not key.startswith(SAME)} for curve in curves
    }
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        key = repr(sorted(configs_of[id(curve)].items())) if curve.config else f"run {curve.name} {id(curve)}"
        groups.setdefault(key, []).append(curve)
    configs = [configs_of[id(members[0])] for members in groups.values()]
    differ = [key for key in dict.fromkeys(name for config in configs for name in config) if _differs(key, configs)]
    labels = [_label(members[0], config, differ) for members, config in zip(groups.values(), configs, strict=True)]
    labelled: dict[str, list[Curve]] = {}
    for label, members in zip(labels, groups.values(), strict=True):
        label = members[0].name if labels.count(label) > 1 else label
        while label in labelled:
            label += "'"
        labelled[label] = members
    return labelled


def _differs(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    return any(config.get(key) != configs[0].get(key) for config in configs)


def _label(curve: Curve, config: Mapping[str, Any], differ: Sequence[str]) -> str:
    if not differ or not curve.config or len(differ) > 3:
        return curve.name
    words = [str(config.get(key)) if key == "algorithm" else f"{key.rpartition('.')[2]} {config.get(key)}" for key in differ]
    return ", ".join(words)


def line_of(label: str, runs: Sequence[Points], band: Band) -> Line:
    """The mean of several runs at the steps that all of them have, with a band; a single run as it is.

    The band is the range from the lowest to the highest run, or one standard deviation to both sides.
    """
    if len(runs) == 1:
        return Line(label, list(runs[0]))
    values = [dict(run) for run in runs]
    shared = sorted(set.intersection(*(set(each) for each in values)))
    at = {x: [each[x] for each in values] for x in shared}
    points = [(x, fmean(at[x])) for x in shared]
    edges = []
    for x, middle in points:
        if band == "range":
            edges.append((x, min(at[x]), max(at[x])))
        elif band == "std":
            spread = stdev(at[x])
            edges.append((x, middle - spread, middle + spread))
    return Line(f"{label} ({len(runs)} runs)", points, edges)


def smoothed(points: Points, weight: float) -> list[tuple[float, float]]:
    """The exponential moving average, corrected for its start. Points that are not finite are left out."""
    average = total = 0.0
    out = []
    for x, y in points:
        if not math.isfinite(y):
            continue
        average, total = weight * average + (1 - weight) * y, weight * total + (1 - weight)
        out.append((x, average / total))
    return out


def names_of(paths: Sequence[Path]) -> list[str]:
    """A short name for each run folder: its own, with the parent's where two have the same."""
    whole = [path.resolve() for path in paths]
    own = [path.name for path in whole]
    return [path.name if own.count(path.name) == 1 else f"{path.parent.name}/{path.name}" for path in whole]
