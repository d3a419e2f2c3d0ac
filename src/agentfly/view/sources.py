"""Validation by source: the held-out rewards of each step, separately for each value of a field of the tasks.

A data set that mixes sources names them in a field, such as `source` or `level`. Fields are stored in the chains, not in their
summaries; so the chains of one validation are decoded, and the other validations hold the same tasks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..runs.compare import mean
from ..runs.filters import ChainFilter
from ..runs.query import RunReader
from ..runs.rows import ChainRow
from .answers import MAX_LIMIT

PREFERRED = ("source", "data_source", "dataset", "category", "kind", "type", "domain", "level", "difficulty")
"""Names of fields that are taken first, if they divide the tasks."""
MAX_SOURCES = 12
MAX_STEPS = 60
DECODE_S = 1.5
"""Seconds for decoding chains. The tasks that were not reached are left out, and the answer says so."""


def sources_json(reader: RunReader, field: str | None) -> dict[str, Any]:
    """The curves of each value of `field`, or of the first field that divides the held-out tasks."""
    steps = [row.step for row in reader.outcomes_by_step() if row.split == "validation"][-MAX_STEPS:]
    tasks, whole = _fields(reader, steps[-1]) if steps else ({}, True)
    names = dividing_fields(tasks)
    chosen = field if field in names else next(iter(names), None)
    by_value: dict[str, dict[int, list[float | None]]] = {}
    for step in steps if chosen is not None else ():
        for row in _held_out(reader, step):
            if chosen in tasks.get(row.task_id, {}):
                value = str(tasks[row.task_id][chosen])
                by_value.setdefault(value, {}).setdefault(step, []).append(row.score)
    return {
        "fields": names,
        "field": chosen,
        "whole": whole,
        "sources": [
            {
                "value": value,
                "tasks": sum(str(fields.get(chosen or "")) == value for fields in tasks.values()),
                "points": [_point(step, scores) for step, scores in by_step.items()],
            }
            for value, by_step in sorted(by_value.items())
        ],
    }


def _point(step: int, scores: list[float | None]) -> list[float | None]:
    """Step, mean score, and the numbers of chains with a score and of all."""
    finite = [score for score in scores if score is not None]
    return [step, mean(finite) if finite else None, len(finite), len(scores)]


def dividing_fields(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The fields whose values divide the tasks into 2 to MAX_SOURCES parts of two tasks or more on average."""
    values: dict[str, list[Any]] = {}
    for fields in tasks.values():
        for name, value in fields.items():
            if isinstance(value, str | int) and len(str(value)) <= 60:
                values.setdefault(name, []).append(value)
    names = [
        name
        for name, own in values.items()
        if len(own) == len(tasks) and 2 <= len(set(own)) <= min(MAX_SOURCES, len(tasks) // 2)
    ]
    return sorted(names, key=lambda name: (PREFERRED.index(name) if name in PREFERRED else len(PREFERRED), name))


def _fields(reader: RunReader, step: int) -> tuple[dict[str, dict[str, Any]], bool]:
    """The fields of each held-out task of a step, and whether all were read in time."""
    fields: dict[str, dict[str, Any]] = {}
    ends = time.monotonic() + DECODE_S
    for row in _held_out(reader, step):
        if row.task_id not in fields:
            if time.monotonic() > ends:
                return fields, False
            fields[row.task_id] = dict(reader.trajectory(row.id).task.fields)
    return fields, True


def _held_out(reader: RunReader, step: int) -> Iterator[ChainRow]:
    chosen, cursor = ChainFilter(step=step, split="validation"), None
    while True:
        rows, cursor = reader.page(chosen, "added", cursor, MAX_LIMIT)
        yield from rows
        if cursor is None:
            return
