"""Rows to a Parquet file, in groups, so that a run of any size fits into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GROUP = 1000
SCHEMA = pa.schema(
    [
        *(
            (name, pa.string())
            for name in ("id", "split", "task_id", "outcome", "prediction", "error", "components", "messages")
        ),
        *((name, pa.int64()) for name in ("step", "draw", "chain", "num_turns", "num_tokens", "num_context", "num_calls")),
        *((name, pa.int64()) for name in ("num_invalid", "version_first", "version_last", "num_trained")),
        *((name, pa.float64()) for name in ("reward", "total_reward", "score", "advantage", "seconds", "generate_s", "tool_s")),
        *((name, pa.float64()) for name in ("wait_s", "started")),
    ]
)


def write_chains(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write chains. Returns their number. The columns are the same for every run, also if it recorded none of a kind."""
    count = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for group in _groups(iter(rows)):
            writer.write_table(pa.Table.from_pylist([_clean(row) for row in group], schema=SCHEMA))
            count += len(group)
    return count


def _groups(rows: Iterator[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    while group := list(islice(rows, GROUP)):
        yield group


def _clean(row: Mapping[str, Any]) -> dict[str, Any]:
    """Parquet holds UTF-8: half of a surrogate pair becomes a question mark."""
    return {
        name: value.encode("utf-8", "replace").decode() if isinstance(value := row.get(name), str) else value
        for name in SCHEMA.names
    }
