"""`agentfly query`: one SELECT over the store of a run, which it cannot change.

The connection is read-only, and an authorizer refuses every statement but reading: no ATTACH, no PRAGMA that writes, no
extension. A query is interrupted after --timeout seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

from ...errors import ConfigError, QueryTimeout

ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
PRAGMAS = {"table_info", "table_list", "index_list", "index_info", "user_version"}
REFUSED = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
MAX_SHOWN = 200


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `query` to the command line."""
    query = commands.add_parser("query", help="run one SELECT over the store of a run, read-only")
    query.add_argument("run_dir", metavar="RUN", help="the folder of the run")
    query.add_argument("sql", nargs="?", metavar="SQL", help="a SELECT; without one, the tables and their columns are listed")
    query.add_argument("--limit", type=int, default=1000, metavar="N", help="rows to print at most (default 1000)")
    query.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds that it may take (default 30)")
    query.add_argument("--json", action="store_true", help="print one JSON object per row")
    query.set_defaults(run=run_query)


def run_query(arguments: argparse.Namespace) -> int:
    """Print the rows."""
    from ...runs import RunDirectory

    if arguments.limit < 1 or arguments.timeout <= 0:
        raise ConfigError("--limit must be at least 1, and --timeout above 0")
    database = RunDirectory.existing(arguments.run_dir).database
    if arguments.sql is None:
        names, rows, more = ["table", "columns"], tables(database), False
    else:
        names, rows, more = select(database, arguments.sql, limit=arguments.limit, timeout_s=arguments.timeout)
    if arguments.json:
        for row in rows:
            print(json.dumps(dict(zip(names, map(_json, row), strict=True)), allow_nan=False))
    else:
        _print(names, rows)
    if more:
        print(f"only the first {arguments.limit} rows: raise --limit", file=sys.stderr)
    return 0


def tables(path: Path) -> list[tuple[Any, ...]]:
    """The tables of a store with their columns."""
    from ...runs.schema import open_readonly

    opened = open_readonly(path)
    try:
        names = opened.db.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT GLOB '*texts*' ORDER BY 1"  # full-text indexes
        ).fetchall()
        return [(name, ", ".join(row[1] for row in opened.db.execute(f"PRAGMA table_info({name})"))) for (name,) in names]
    finally:
        opened.close()


def select(path: Path, sql: str, *, limit: int, timeout_s: float) -> tuple[list[str], list[tuple[Any, ...]], bool]:
    """The columns and the first `limit` rows of a SELECT, and whether there are more. Raises ConfigError or QueryTimeout."""
    from ...runs.schema import open_readonly

    opened = open_readonly(path)
    ends = time.monotonic() + timeout_s
    try:
        opened.db.set_authorizer(_authorize)
        opened.db.set_progress_handler(lambda: time.monotonic() > ends, 10_000)
        cursor = opened.db.execute(sql)
        if cursor.description is None:
            raise ConfigError("the statement returns no rows: write a SELECT")
        names = [column[0] for column in cursor.description]
        rows = cursor.fetchmany(limit + 1)
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            raise QueryTimeout(f"the query took longer than {timeout_s:g} s") from error
        raise ConfigError(f"SQLite refuses the query: {error}") from error
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        reason = "it does more than read the tables of the run; write a SELECT" if "authoriz" in str(error) else str(error)
        raise ConfigError(f"SQLite refuses the query: {reason}") from error
    finally:
        opened.close()
    return _unique(names), rows[:limit], len(rows) > limit


def _unique(names: list[str]) -> list[str]:
    """Two columns may have one name; JSON objects need different ones."""
    return [name if name not in names[:at] else f"{name}:{at}" for at, name in enumerate(names)]


def _authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
    if action == sqlite3.SQLITE_PRAGMA:
        return sqlite3.SQLITE_OK if first in PRAGMAS and (second is None or first != "user_version") else sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in REFUSED:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def _json(value: object) -> Any:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ...watch.tables import clean

    table = Table()
    for name in names:
        table.add_column(Text(clean(name)))
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console()
    console.print(table)
    print(f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}")


def _cell(value: object) -> str:
    from ...watch.tables import clean

    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = clean(str(_json(value)))
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
