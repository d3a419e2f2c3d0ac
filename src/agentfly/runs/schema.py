"""The SQLite schema of a run store, format 3, and how a file of any format is opened for reading.

    trajectories   summaries, one row per chain: everything that lists, filters and histograms read
    bodies         the encoded trajectories (`codec`), by the key of their summary
    summary_texts, texts     full-text indexes of the summaries and of the whole chains (see `bodies.texts`)
    tokens         values per sampled token that the learner adds after the rollout, by key
    calls          which chain called which tool
    metrics, steps, step_stats, tools, checks      per step
    gauges, events, live, meta                     over time

Format 2 has the same tables without the full-text indexes, and fewer other indexes. Format 1 has `metrics` without times and
`trajectories` with the bodies inside. For reading, temporary views give such a file the tables of format 2, so every query runs
on all formats. `migrate` rewrites the file when a run is resumed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .codec import body_text, decode
from .rows import ToolCounts, columns_of, step_stats, sum_tools, tool_counts, tool_values

FORMAT = 3
READABLE = (1, 2, 3)
BUSY_S = 30.0

CHAIN_COLUMNS: dict[str, str] = {
    "id": "TEXT NOT NULL",
    "step": "INTEGER NOT NULL",
    "split": "TEXT NOT NULL",
    "task_id": "TEXT NOT NULL",
    "draw": "INTEGER NOT NULL",
    "chain": "INTEGER NOT NULL",
    "outcome": "TEXT NOT NULL",
    "reward": "REAL",
    "total_reward": "REAL",
    "score": "REAL",
    "components": "TEXT NOT NULL",
    "prediction": "TEXT NOT NULL",
    "num_turns": "INTEGER NOT NULL",
    "num_tokens": "INTEGER NOT NULL",
    "seconds": "REAL NOT NULL",
    "num_context": "INTEGER",
    "num_calls": "INTEGER",
    "num_invalid": "INTEGER",
    "version_first": "INTEGER",
    "version_last": "INTEGER",
    "generate_s": "REAL",
    "tool_s": "REAL",
    "wait_s": "REAL",
    "started": "REAL",
    "error": "TEXT",
    "advantage": "REAL",
    "num_trained": "INTEGER",
}
"""The columns of `trajectories` after `key`. The last two are NULL until the learner has used the chain."""
_IN_FORMAT_1 = frozenset(
    ("id", "step", "split", "task_id", "chain", "outcome", "reward", "total_reward", "components", "prediction", "num_turns",
     "num_tokens", "seconds")
)  # fmt: skip
_DERIVED = {"draw": "0", "score": "CASE WHEN reward IS NULL THEN NULL ELSE total_reward END"}

# The tables other than `trajectories` and `bodies`, with their columns. `views_of_format_1` makes them empty.
_TABLES: dict[str, str] = {
    "meta": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "metrics": "name TEXT NOT NULL, step INTEGER NOT NULL, value REAL, time REAL, PRIMARY KEY (name, step)",
    "tokens": "key INTEGER NOT NULL, name TEXT NOT NULL, dtype TEXT NOT NULL, blob BLOB NOT NULL, PRIMARY KEY (key, name)",
    "calls": (
        "name TEXT NOT NULL, key INTEGER NOT NULL, calls INTEGER NOT NULL, errors INTEGER NOT NULL, PRIMARY KEY (name, key)"
    ),
    "steps": "step INTEGER PRIMARY KEY, started REAL, ended REAL, phase TEXT, whole INTEGER NOT NULL DEFAULT 0",
    "step_stats": (
        "step INTEGER NOT NULL, split TEXT NOT NULL, chains INTEGER NOT NULL, scored INTEGER NOT NULL, mean REAL, "
        "quantiles TEXT NOT NULL, outcomes TEXT NOT NULL, PRIMARY KEY (step, split)"
    ),
    "tools": (
        "step INTEGER NOT NULL, split TEXT NOT NULL, name TEXT NOT NULL, calls INTEGER NOT NULL, errors INTEGER NOT NULL, "
        "p50_s REAL, p95_s REAL, max_s REAL, buckets TEXT NOT NULL, PRIMARY KEY (step, split, name)"
    ),
    "checks": (
        "step INTEGER NOT NULL, name TEXT NOT NULL, ok INTEGER NOT NULL, value REAL, bound REAL, PRIMARY KEY (step, name)"
    ),
    "gauges": "name TEXT NOT NULL, t REAL NOT NULL, value REAL, PRIMARY KEY (name, t)",
    "live": "name TEXT PRIMARY KEY, t REAL NOT NULL, data TEXT NOT NULL",
}
EVENT_COLUMNS = ("t", "step", "kind", "who", "data")
# A chain that is deleted takes its other records along. Its documents in the full-text indexes stay: to delete from an index
# that holds no documents, SQLite needs the text again. A search looks at every chain that an index names, so the document of a
# deleted chain finds nothing, also if its key is used again.
TRIGGER = (
    "CREATE TRIGGER chain_deleted AFTER DELETE ON trajectories BEGIN DELETE FROM bodies WHERE key = old.key; "
    "DELETE FROM tokens WHERE key = old.key; DELETE FROM calls WHERE key = old.key; END"
)
_TEXT_TABLES = (
    "CREATE VIRTUAL TABLE texts USING fts5(text, content='', tokenize='unicode61 remove_diacritics 0', columnsize=0)",
    "CREATE VIRTUAL TABLE summary_texts USING fts5(text, content='', tokenize='trigram', detail=none, columnsize=0)",
)
FILTERED = ("split", "outcome", "step", "score", "num_tokens", "num_turns")
"""Columns that every index of SORTED has: chains are filtered by them and sorted without reading the table."""
SORTED = {
    "key": "trajectories_by_key", "score": "trajectories_by_reward", "advantage": "trajectories_by_advantage",
    "num_tokens": "trajectories_by_tokens", "num_turns": "trajectories_by_turns", "seconds": "trajectories_by_seconds",
    "num_calls": "trajectories_by_calls",
}  # fmt: skip
"""The index of each column that chains are sorted by. Chains with equal values are in the order of their keys."""
BY_STEP, BY_REWARD = "trajectories_by_step", "trajectories_by_reward"
"""Indexes that have all columns of the usual filters: figures over many chains read them alone, in the order of their name."""
BY_TASK, BY_OUTCOME, FAILED = "trajectories_by_task", "trajectories_by_outcome", "trajectories_failed"


def _sort_index(column: str) -> str:
    more = ("num_trained",) if column == "advantage" else ()  # both are set by one UPDATE
    columns = dict.fromkeys((column, "key", *FILTERED, *more))
    return f"CREATE INDEX {SORTED[column]} ON trajectories ({', '.join(columns)});\n"


INDEXES = f"""
CREATE INDEX {BY_STEP} ON trajectories (step, split, outcome, score, num_tokens, num_turns);
CREATE INDEX trajectories_by_id ON trajectories (id);
CREATE INDEX {BY_TASK} ON trajectories (task_id, step, split, outcome, score, num_tokens, num_turns);
CREATE INDEX {BY_OUTCOME} ON trajectories (outcome);
CREATE INDEX {FAILED} ON trajectories (key) WHERE error IS NOT NULL;
{"".join(map(_sort_index, SORTED))}CREATE INDEX calls_by_key ON calls (key);
CREATE INDEX events_by_kind ON events (kind, step);
"""
WHOLE_RUN = -1
"""The step of the rows of `tools` that count all steps."""
INSERT_CHAIN = f"INSERT INTO trajectories (key, {', '.join(CHAIN_COLUMNS)}) VALUES (?{', ?' * len(CHAIN_COLUMNS)})"
INSERT_EVENT = "INSERT INTO events (t, step, kind, who, data) VALUES (?, ?, ?, ?, ?)"
INSERT_TOKENS = "INSERT OR REPLACE INTO tokens (key, name, dtype, blob) VALUES (?, ?, ?, ?)"
MAX_ROWS = 256
"""Rows of one statement."""
INSERT_BODY = "INSERT INTO bodies (key, body) VALUES (?, ?)"
INSERT_TEXT = "INSERT INTO texts (rowid, text) VALUES (?, ?)"
# The texts of a summary that a search looks through (`filters.SEARCHED`), as one document. Not by a trigger: SQLite would write
# a segment of the index for every row.
INDEX_SUMMARIES = (
    "INSERT INTO summary_texts (rowid, text) SELECT key, id || char(10) || task_id || char(10) || prediction || char(10) || "
    "coalesce(error, '') FROM trajectories WHERE key >= ? ORDER BY key"
)
INSERT_CALLS = "INSERT INTO calls (name, key, calls, errors) VALUES (?, ?, ?, ?)"
INSERT_TOOL = (
    "INSERT OR REPLACE INTO tools (step, split, name, calls, errors, p50_s, p95_s, max_s, buckets) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
INSERT_STATS = (
    "INSERT OR REPLACE INTO step_stats (step, split, chains, scored, mean, quantiles, outcomes) VALUES (?, ?, ?, ?, ?, ?, ?)"
)


def insert(db: sqlite3.Connection, statement: str, rows: Iterable[Sequence[Any]]) -> None:
    """As `executemany`, with many rows in one statement.

    sqlite3 gives the interpreter away for each row, and gets it back late while other threads compute in Python.
    """
    head, _, places = statement.rpartition(" VALUES ")
    num = min(MAX_ROWS, db.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER) // places.count("?"))
    left = list(rows)
    while left:
        part, left = left[:num], left[num:]
        db.execute(f"{head} VALUES {', '.join([places] * len(part))}", tuple(itertools.chain.from_iterable(part)))


def set_trained(db: sqlite3.Connection, rows: Sequence[tuple[int, float | None, int]]) -> None:
    """Set the advantage and the number of trained tokens of chains; a row is (key, advantage, number)."""
    if sqlite3.sqlite_version_info < (3, 33):  # no UPDATE FROM
        statement = "UPDATE trajectories SET advantage = ?2, num_trained = ?3 WHERE key = ?1"
        db.executemany(statement, rows)
        return
    for start in range(0, len(rows), MAX_ROWS):
        part = rows[start : start + MAX_ROWS]
        db.execute(
            "UPDATE trajectories SET advantage = new.column2, num_trained = new.column3 "
            f"FROM (VALUES {', '.join(['(?, ?, ?)'] * len(part))}) AS new WHERE key = new.column1",
            tuple(itertools.chain.from_iterable(part)),
        )


def create(db: sqlite3.Connection) -> None:
    """Create the tables of format 3. The caller has begun a transaction, which executescript would end."""
    for statement in (*_statements(_schema()), TRIGGER, *(_TEXT_TABLES if can_index_texts(db) else ())):
        db.execute(statement)


def _statements(script: str) -> list[str]:
    return [statement for part in script.split(";") if (statement := part.strip())]


def can_index_texts(db: sqlite3.Connection) -> bool:
    """Whether this SQLite has full-text indexes of trigrams. A store without them is searched by reading all chains."""
    known = sqlite3.sqlite_version_info >= (3, 34)  # the tokenizer "trigram"
    return known and db.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'").fetchone() is not None


def indexes_texts(db: sqlite3.Connection) -> bool:
    """Whether a store has full-text indexes that this SQLite can read."""
    held = db.execute("SELECT 1 FROM main.sqlite_master WHERE name = 'texts'").fetchone() is not None
    return held and can_index_texts(db)


def _schema() -> str:
    columns = ", ".join(f"{name} {kind}" for name, kind in CHAIN_COLUMNS.items())
    tables = "".join(f"CREATE TABLE {name} ({text}) WITHOUT ROWID;\n" for name, text in _TABLES.items())
    return (
        f"CREATE TABLE trajectories (key INTEGER PRIMARY KEY, {columns});\n"
        "CREATE TABLE bodies (key INTEGER PRIMARY KEY, body BLOB NOT NULL);\n"
        "CREATE TABLE events (key INTEGER PRIMARY KEY, t REAL NOT NULL, step INTEGER, kind TEXT NOT NULL, who TEXT, "
        "data TEXT);\n"
        f"{tables}{INDEXES}PRAGMA user_version = {FORMAT};\n"
    )


def views_of_format_1() -> str:
    """Statements that give a connection to a file of format 1 the tables of format 2, as temporary views that hide its own."""
    chosen = ", ".join(name if name in _IN_FORMAT_1 else f"{_DERIVED.get(name, 'NULL')} AS {name}" for name in CHAIN_COLUMNS)
    views = [
        f"CREATE TEMP VIEW trajectories AS SELECT key, {chosen} FROM main.trajectories;",
        "CREATE TEMP VIEW bodies AS SELECT key, body FROM main.trajectories;",
        "CREATE TEMP VIEW metrics AS SELECT name, step, value, NULL AS time FROM main.metrics;",
        _empty("events", ("key", *EVENT_COLUMNS)),
    ]
    views += [_empty(name, _names(text)) for name, text in _TABLES.items() if name != "metrics"]
    return "\n".join(views)


def _names(columns: str) -> tuple[str, ...]:
    return tuple(part.split()[0] for part in columns.partition(", PRIMARY KEY (")[0].split(", "))


def _empty(table: str, columns: tuple[str, ...]) -> str:
    return f"CREATE TEMP VIEW {table} AS SELECT {', '.join(f'NULL AS {name}' for name in columns)} WHERE 0;"


def chain_values(key: int, columns: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values of INSERT_CHAIN."""
    return (key, *(columns.get(name) for name in CHAIN_COLUMNS))


def stats_values(step: int, split: str, chains: list[tuple[str, float | None]]) -> tuple[Any, ...]:
    """The values of INSERT_STATS for the (outcome, score) pairs of a step."""
    num, scored, mean, quantiles, outcomes = step_stats(chains)
    return (step, split, num, scored, mean, json.dumps(quantiles), json.dumps(outcomes))


def migrate(db: sqlite3.Connection, found: int) -> None:
    """Rewrite a store of an earlier format. The caller has begun a transaction, and has made a copy of the file.

    The bodies stay as they are.
    """
    if found == 1:
        _migrate_1(db)
    else:
        indexes = db.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL").fetchall()
        for (name,) in indexes:
            db.execute(f"DROP INDEX {name}")
        for statement in (*_statements(INDEXES), *(_TEXT_TABLES if can_index_texts(db) else ())):
            db.execute(statement)
    if indexes_texts(db):
        db.execute(INDEX_SUMMARIES, (0,))
        last = -1
        while rows := db.execute("SELECT key, body FROM bodies WHERE key > ? ORDER BY key LIMIT 256", (last,)).fetchall():
            db.executemany(INSERT_TEXT, [(key, body_text(body)) for key, body in rows])
            last = rows[-1][0]
    db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('migrated_from', ?)", (str(found),))
    db.execute(f"PRAGMA user_version = {FORMAT}")


def _migrate_1(db: sqlite3.Connection) -> None:
    """A body that cannot be read keeps its columns of format 1."""
    old = (
        "DROP INDEX IF EXISTS trajectories_by_step",
        "DROP INDEX IF EXISTS trajectories_by_id",
        "ALTER TABLE trajectories RENAME TO old_trajectories",
        "ALTER TABLE metrics RENAME TO old_metrics",
        "DROP TABLE IF EXISTS meta",
    )
    for statement in old:
        db.execute(statement)
    create(db)
    db.execute("INSERT INTO metrics (name, step, value) SELECT name, step, value FROM old_metrics")
    db.execute("INSERT INTO steps (step, phase, whole) SELECT DISTINCT step, 'done', 1 FROM old_metrics")
    kept = sorted(_IN_FORMAT_1)
    tools: dict[tuple[int, str], dict[str, ToolCounts]] = {}
    last = -1
    while found := db.execute(
        f"SELECT key, body, {', '.join(kept)} FROM old_trajectories WHERE key > ? ORDER BY key LIMIT 256", (last,)
    ).fetchall():
        for key, body, *values in found:
            before = dict(zip(kept, values, strict=True))
            columns, counts = _of_body(before, body)
            db.execute(INSERT_CHAIN, chain_values(key, columns))
            db.execute(INSERT_BODY, (key, body))
            db.executemany(INSERT_CALLS, [(name, key, each.calls, each.errors) for name, each in counts.items()])
            place = (before["step"], before["split"])
            tools[place] = sum_tools((tools.get(place, {}), counts))
        last = found[-1][0]
    tools |= {(WHOLE_RUN, split): sum_tools(named for (_, own), named in tools.items() if own == split) for _, split in tools}
    for (step, split), named in tools.items():
        db.executemany(INSERT_TOOL, [(step, split, name, *tool_values(each)) for name, each in named.items()])
        chains = db.execute("SELECT outcome, score FROM trajectories WHERE step = ? AND split = ?", (step, split)).fetchall()
        if chains:
            db.execute(INSERT_STATS, stats_values(step, split, chains))
    db.execute("DROP TABLE old_trajectories")
    db.execute("DROP TABLE old_metrics")


def _of_body(old: dict[str, Any], body: bytes) -> tuple[dict[str, Any], dict[str, ToolCounts]]:
    """The columns and the calls of a chain of format 1."""
    score = None if old["reward"] is None else old["total_reward"]
    try:
        trajectory = decode(body)
    except ConfigError:
        return {**old, "draw": 0, "score": score}, {}
    timed = any(turn.sampled_s for turn in trajectory.turns)
    times = {} if timed else dict.fromkeys(("generate_s", "tool_s"))
    found = columns_of(old["step"], old["split"], trajectory) | {"wait_s": None, **times}
    prediction = found["prediction"]
    return found | old | {"prediction": prediction, "score": score}, tool_counts(trajectory)


@dataclass(slots=True)
class Opened:
    """A read-only connection. `copied` is the temporary folder of the copy that it reads, if the file could not be opened.

    `texts` says whether it has full-text indexes.
    """

    db: sqlite3.Connection
    format: int
    copied: Path | None = None
    texts: bool = False

    def close(self) -> None:
        """Close the connection and delete the copy."""
        self.db.close()
        if self.copied is not None:
            shutil.rmtree(self.copied, ignore_errors=True)


def open_readonly(path: Path, *, timeout_s: float = BUSY_S) -> Opened:
    """Open a store of any format without changing it. Raises ConfigError.

    A file in WAL mode cannot be opened read-only in a folder that this process may not write to, because SQLite needs its
    index file there. If there is no log (`-wal`), the file is complete and is opened as immutable. Otherwise the file and its
    log are copied to a temporary folder.
    """
    if not path.is_file():
        raise ConfigError(f"there is no run store at {path}")
    copied: Path | None = None
    try:
        try:
            db = _open(path, "mode=ro", timeout_s)
        except sqlite3.OperationalError:
            log = path.with_name(f"{path.name}-wal")
            if not log.exists() or not log.stat().st_size:
                db = _open(path, "mode=ro&immutable=1", timeout_s)
            else:
                copied = Path(tempfile.mkdtemp(prefix="agentfly-run-"))
                for file in (path, log):
                    shutil.copy(file, copied / file.name)
                db = _open(copied / path.name, "mode=rw", timeout_s)
        found = int(db.execute("PRAGMA user_version").fetchone()[0])
        if found not in READABLE:
            db.close()
            raise ConfigError(f"{path} is a run store of format {found}, but this version reads formats 1 to {FORMAT}")
        if found == 1:
            db.executescript(views_of_format_1())
        texts = indexes_texts(db)
        db.execute("PRAGMA query_only = ON")
    except (sqlite3.Error, OSError) as error:
        if copied is not None:
            shutil.rmtree(copied, ignore_errors=True)
        raise ConfigError(f"{path} cannot be opened as a run store: {error}") from error
    return Opened(db, found, copied, texts)


def _open(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{mode}"
    db = sqlite3.connect(uri, uri=True, timeout=timeout_s, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA schema_version").fetchone()  # sqlite3.connect does not read the file
    except sqlite3.Error:
        with contextlib.suppress(sqlite3.Error):
            db.close()
        raise
    return db
