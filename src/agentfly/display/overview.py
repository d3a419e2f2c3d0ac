"""A run in one look: as a line, as HTML for a notebook, and as rows for a data frame. Reads it through a `runs.RunReader`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..errors import AgentFlyError
from . import run_html

SHOWN = (
    "reward/mean",
    "rollout/success",
    "rollout/scored",
    "rollout/chains",
    "rollout/turns",
    "rollout/tokens_per_s",
    "validation/success",
    "validation/scored",
    "validation/chains",
    "validation/reward",
    "train/loss",
    "train/entropy",
    "train/kl",
    "train/logprob_gap",
    "time/step_s",
)
"""Metrics of the table, those that the run has."""


def describe(reader: Any) -> str:
    """The run's folder, state, step and number of chains. The path alone if the store cannot be read any more."""
    path = reader.path.parent
    try:
        meta, step = reader.meta(), reader.last_step()
        total = f"/{meta['total_steps']}" if meta.get("total_steps") else ""
        return f"{path}: {reader.state()}, step {'-' if step is None else step}{total}, {reader.num_chains():,} chains"
    except (sqlite3.Error, AgentFlyError):
        return f"{path} (closed)"


def reader_html(reader: Any) -> str:
    """State and description, the curves of reward and held-out success, the last metrics, the outcomes, the newest chain."""
    meta, names = reader.meta(), set(reader.metric_names())
    series = reader.series([name for name in SHOWN if name in names])
    last = [
        (name, points[-1][0], next((value for _, _, value in reversed(points) if value is not None), None))
        for name, points in series.items()
        if points
    ]
    steps = reader.outcomes_by_step(after_step=(reader.last_step() or 0) - 5)
    outcomes = [
        (row.step, row.split, row.chains, row.mean, ", ".join(f"{n} {k}" for k, n in row.outcomes.items())) for row in steps
    ]
    newest, _ = reader.page(None, "-added", None, 1)
    curves = {
        name: [float("nan") if value is None else value for _, _, value in series[name]]
        for name in ("reward/mean", "validation/success")
        if name in series
    }
    facts = {name: meta.get(name) for name in ("model", "world", "algorithm", "seed", "error")}
    return run_html(
        describe(reader),
        facts,
        curves,
        {
            "last values": (("metric", "step", "value"), last),
            "last steps": (("step", "split", "chains", "mean reward", "outcomes"), outcomes),
        },
        reader.trajectory(newest[0].id) if newest else None,
    )


def metric_rows(reader: Any) -> Iterator[dict[str, Any]]:
    """One row per step: the metrics that it has."""
    steps: dict[int, dict[str, Any]] = {}
    for name, points in reader.series(reader.metric_names()).items():
        for step, at, value in points:
            row = steps.setdefault(step, {"step": step})
            row[name] = value
            if at is not None:
                row["time"] = at
    return (steps[step] for step in sorted(steps))


def chain_rows(reader: Any) -> Iterator[dict[str, Any]]:
    """One row per chain, in the order in which they were added; reward components are columns."""
    cursor: str | None = None
    while True:
        rows, cursor = reader.page(None, "added", cursor, 1000)
        for row in rows:
            flat = {name: value for name, value in asdict(row).items() if name not in ("key", "components")}
            yield flat | {f"reward/{name}": value for name, value in row.components.items()}
        if cursor is None:
            return
