"""The SQLite schema of a run store, and how a file is opened for reading.

    trajectories   summaries, one row per chain: everything that lists, filters and histograms read
    bodies         the encoded trajectories (`codec`), by the key of their summary
    summary_texts, texts     full-text indexes of the summaries and of the whole chains (see `bodies.texts`)
    tokens         values per sampled token that the learner adds after the rollout, by key
    calls          which chain called which tool
    metrics, steps, step_stats, tools, checks      per step
    gauges, events, live, meta                     over time

The file holds the number of its format (`PRAGMA user_version`), and a file of another format is refused.
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
from .rows import step_stats

FORMAT = 3
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
# The tables other than `trajectories` and `bodies`, with their columns.
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
        statement = "UPDATE trajectories SET advantage = ?, num_trained = ? WHERE key = ?"
        db.executemany(statement, [(advantage, number, key) for key, advantage, number in rows])
        return
    for start in range(0, len(rows), MAX_ROWS):
        part = rows[start : start + MAX_ROWS]
        db.execute(
            "UPDATE trajectories SET advantage = new.column2, num_trained = new.column3 "
            f"FROM (VALUES {', '.join(['(?, ?, ?)'] * len(part))}) AS new WHERE key = new.column1",
            tuple(itertools.chain.from_iterable(part)),
        )


def create(db: sqlite3.Connection) -> None:
    """Create the tables. The caller has begun a transaction, which executescript would end."""
    for statement in (*_statements(_schema()), TRIGGER, *(_TEXT_TABLES if can_index_texts(db) else ())):
        db.execute(statement)


def _statements(script: str) -> list[str]:
    return [statement for part in script.split(";") if (statement := part.strip())]


def can_index_texts(db: sqlite3.Connection) -> bool:
    """Whether this SQLite has full-text indexes of trigrams. A store without them is searched by reading all chains."""
    has_trigrams = sqlite3.sqlite_version_info >= (3, 34)  # the tokenizer "trigram"
    return has_trigrams and db.execute("SELECT 1 FROM pragma_module_list WHERE name = 'fts5'").fetchone() is not None


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


def chain_values(key: int, columns: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values of INSERT_CHAIN."""
    return (key, *(columns.get(name) for name in CHAIN_COLUMNS))


def stats_values(step: int, split: str, chains: list[tuple[str, float | None]]) -> tuple[Any, ...]:
    """The values of INSERT_STATS for the (outcome, score) pairs of a step."""
    num, scored, mean, quantiles, outcomes = step_stats(chains)
    return (step, split, num, scored, mean, json.dumps(quantiles), json.dumps(outcomes))


@dataclass(slots=True)
class Opened:
    """A read-only connection. `copied` is the temporary folder of the copy that it reads, if the file could not be opened.

    `texts` says whether it has full-text indexes.
    """

    db: sqlite3.Connection
    copied: Path | None = None
    texts: bool = False

    def close(self) -> None:
        """Close the connection and delete the copy."""
        self.db.close()
        if self.copied is not None:
            shutil.rmtree(self.copied, ignore_errors=True)


def open_readonly(path: Path, *, timeout_s: float = BUSY_S) -> Opened:
    """Open a store without changing it. Raises ConfigError.

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
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if version != FORMAT:
            db.close()
            raise ConfigError(f"{path} is a run store of format {version}, but this version reads format {FORMAT}")
        texts = indexes_texts(db)
        db.execute("PRAGMA query_only = ON")
    except (sqlite3.Error, OSError) as error:
        if copied is not None:
            shutil.rmtree(copied, ignore_errors=True)
        raise ConfigError(f"{path} cannot be opened as a run store: {error}") from error
    return Opened(db, copied, texts)


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
