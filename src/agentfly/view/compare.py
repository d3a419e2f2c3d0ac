"""/api/compare: what the configs of runs differ in, their results, and paired tests on the held-out tasks that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..runs.catalog import read_config
from ..runs.compare import config_difference, mean
from ..runs.directory import RunDirectory
from ..runs.filters import ChainFilter
from ..runs.query import RunReader
from ..watch.comparison import compare_runs, last_values, shown_names
from .answers import MAX_LIMIT, summary_json
from .library import Library

HIDDEN = ("run.dir", "run.name")
"""Keys that differ between any two runs and say nothing about them."""


def compare_json(library: Library, names: Sequence[str]) -> dict[str, Any]:
    """All runs side by side; the tests compare each further run with the first."""
    folders = [library.find(name) for name in names]
    summaries = {each.name: each for each in library.summaries()}
    last = [last_values(RunDirectory(folder)) for folder in folders]
    differ = config_difference(*map(read_config, folders))
    return {
        "runs": [summary_json(summaries[name]) for name in names],
        "config": [{"key": key, "values": values} for key, values in differ.items() if key not in HIDDEN],
        "results": [{"metric": metric, "values": [values.get(metric) for values in last]} for metric in shown_names(last)],
        "pairs": [_pair(names[0], folders[0], name, folder) for name, folder in zip(names[1:], folders[1:], strict=True)],
        "tasks": _task_rows([_held_out(folder) for folder in folders]),
    }


def _pair(first: str, a: Path, name: str, b: Path) -> dict[str, Any]:
    """The paired test of one run against the first. Without a task that both hold out, its figures are null."""
    try:
        comparison = compare_runs(a, b)
    except ConfigError as error:
        return {"a": first, "b": name, "error": str(error), "tasks": 0}
    fields = ("measure", "steps", "bounds")
    head = {"a": first, "b": name, "error": None, **{field: getattr(comparison, field) for field in fields}}
    head |= {"held": comparison.tasks[:2], "scored": comparison.chains, "tasks": 0}
    test = comparison.test
    if test is None:
        return head
    figures = ("mean_a", "mean_b", "difference", "low", "high", "p_sign", "verdict")
    return {
        **head,
        **{figure: getattr(test, figure) for figure in figures},
        "tasks": test.num_tasks,
        "p": test.p_permutation,
        "wins": test.better,
        "losses": test.worse,
        "ties": test.equal,
    }


def _held_out(folder: Path) -> dict[str, list[tuple[str, float]]]:
    """Of the last validation: the chains of each task, as id and reward."""
    chains: dict[str, list[tuple[str, float]]] = {}
    with RunReader(folder) as reader:
        steps = [row.step for row in reader.outcomes_by_step() if row.split == "validation"]
        chosen, cursor = ChainFilter(step=max(steps, default=-1), split="validation"), None
        while True:
            rows, cursor = reader.page(chosen, "added", cursor, MAX_LIMIT)
            for row in rows:
                if row.score is not None:
                    chains.setdefault(row.task_id, []).append((row.id, row.score))
            if cursor is None:
                return chains


def _task_rows(sides: Sequence[Mapping[str, list[tuple[str, float]]]]) -> list[dict[str, Any]]:
    """The tasks that all runs hold out, those on which they differ most first: mean reward and first chain of each run."""
    shared = [task for task in sides[0] if all(task in side for side in sides)]
    rows: list[dict[str, Any]] = []
    for task in shared:
        values = [mean([score for _, score in side[task]]) for side in sides]
        rows.append({"task_id": task, "values": values, "chains": [side[task][0][0] for side in sides]})
    return sorted(rows, key=lambda row: min(row["values"]) - max(row["values"]))[:MAX_LIMIT]
