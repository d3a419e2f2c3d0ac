"""The store of one run: metrics, trajectories and all other records of it in one SQLite file (see `schema`).

Each call that writes is one transaction, so a process killed at any moment leaves complete records. One process writes, from
any of its threads; others may read at the same time (in WAL mode readers do not wait for the writer). A file of another format
is refused.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from ..errors import ConfigError, StorageError
from ..types import TokenRecord, Trajectory
from .bodies.texts import texts_of
from .codec import decode, encode, from_json, to_json
from .filters import clean_text
from .rows import MAX_PREDICTION, ToolCounts, columns_of, sum_tools, tool_counts, tool_row, tool_values
from .schema import (
    BUSY_S,
    FORMAT,
    INDEX_SUMMARIES,
    INSERT_BODY,
    INSERT_CALLS,
    INSERT_CHAIN,
    INSERT_EVENT,
    INSERT_STATS,
    INSERT_TEXT,
    INSERT_TOKENS,
    INSERT_TOOL,
    WHOLE_RUN,
    Opened,
    chain_values,
    create,
    indexes_texts,
    insert,
    open_readonly,
    set_trained,
    stats_values,
)

StoredSplit = Literal["train", "validation"]
SPLITS: tuple[StoredSplit, ...] = ("train", "validation")
MAX_ADDED = 1024
"""Calls of `add_trajectories` whose keys are remembered."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    step: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """A summary of a trajectory. Reading it does not decode the trajectory. `prediction` is cut to 300 characters."""

    id: str
    step: int
    split: str
    task_id: str
    chain: int
    outcome: str
    reward: float | None
    total_reward: float
    components: dict[str, float]
    prediction: str
    num_turns: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LearnedRow:
    """What the learner recorded of a chain: the number of trained tokens (None: nothing), and series of values per token.

    `advantage` is the mean over its tokens.
    """

    id: str
    step: int
    outcome: str
    scored: bool
    num_tokens: int
    num_trained: int | None
    advantage: float | None
    series: dict[str, tuple[str, bytes]]


_COLUMNS = [field.name for field in fields(TrajectoryRow)]


class TrajectoryQuery(TypedDict, total=False):
    """Which trajectories to read. A condition of None selects all; `limit` is 100 and `offset` 0 unless given."""

    step: int | None
    split: str | None
    outcome: str | None
    task_id: str | None
    limit: int
    offset: int


class RunStore:
    """Opens or creates the file. `readonly` opens a run that another process is writing. Raises ConfigError."""

    def __init__(self, path: str | Path, *, readonly: bool = False) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        self._opened: Opened | None = None
        self._added: deque[tuple[int, dict[str, int]]] = deque(maxlen=MAX_ADDED)  # step, and keys of its chains by id
        if readonly:
            self._opened = open_readonly(self.path)
            self._db = self._opened.db
            return
        try:
            # Autocommit mode: `transaction` begins and ends transactions itself.
            uri = f"{self.path.absolute().as_uri()}?mode=rwc"
            self._db = sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            self._prepare()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"{self.path} cannot be opened as a run store: {error}") from error

    def _prepare(self) -> None:
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, FORMAT):
            self._db.close()
            raise ConfigError(f"{self.path} is a run store of format {version}, but this version reads format {FORMAT}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing, a power cut at most the last steps
        if version == 0:
            with self.transaction() as db:
                create(db)
        self._texts = indexes_texts(self._db)

    # ---- writing ---------------------------------------------------------------------------------------------------------

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step, which is then whole; a new value replaces an earlier one of the same name."""
        now = time.time()
        rows = [(name, step, float(value), now) for name, value in metrics.items()]
        with self.transaction() as db:
            insert(db, "INSERT OR REPLACE INTO metrics (name, step, value, time) VALUES (?, ?, ?, ?)", rows)
            db.execute(
                "INSERT INTO steps (step, ended, phase, whole) VALUES (?, ?, 'done', 1) "
                "ON CONFLICT (step) DO UPDATE SET ended = COALESCE(ended, excluded.ended), phase = 'done', whole = 1",
                (step, now),
            )
            self._keep_stats(db, step)

    def add_trajectories(
        self, step: int, split: StoredSplit, trajectories: Sequence[Trajectory], *, replace: bool = False
    ) -> None:
        """Adds all trajectories, or none if one of them cannot be stored. `replace` deletes those of this step and split."""
        if split not in SPLITS:
            raise ConfigError(f"a split is 'train' or 'validation', not {split!r}")
        rows = [columns_of(step, split, trajectory) for trajectory in trajectories]
        bodies = [encode(trajectory) for trajectory in trajectories]
        counts = [tool_counts(trajectory) for trajectory in trajectories]
        texts = [texts_of(trajectory) for trajectory in trajectories] if self._texts else []
        with self.transaction() as db:
            if replace:
                self._added.clear()
                _add_tools(db, WHOLE_RUN, split, _tools(db, step, split), sign=-1)
                db.execute("DELETE FROM trajectories WHERE step = ? AND split = ?", (step, split))
                db.execute("DELETE FROM tools WHERE step = ? AND split = ?", (step, split))
            db.execute("DELETE FROM step_stats WHERE step = ? AND split = ?", (step, split))
            first = (db.execute("SELECT max(key) FROM trajectories").fetchone()[0] or 0) + 1
            keys = range(first, first + len(rows))
            insert(db, INSERT_CHAIN, map(chain_values, keys, rows))
            insert(db, INSERT_BODY, zip(keys, bodies, strict=True))
            if self._texts:
                db.execute(INDEX_SUMMARIES, (first,))
                insert(db, INSERT_TEXT, zip(keys, texts, strict=True))
            named = [(name, key, each) for key, tools in zip(keys, counts, strict=True) for name, each in tools.items()]
            insert(db, INSERT_CALLS, [(name, key, each.calls, each.errors) for name, key, each in named])
            called = sum_tools(counts)
            _add_tools(db, step, split, called)
            _add_tools(db, WHOLE_RUN, split, called)
        self._added.append((step, {row["id"]: key for row, key in zip(rows, keys, strict=True)}))

    def add_tokens(self, step: int, records: Iterable[TokenRecord]) -> None:
        """Adds what the learner did with the chains of a step. A record of a chain that is not stored is left out."""
        with self.transaction() as db:
            named = {clean_text(record.trajectory): record for record in records}
            keys = self._keys_of(db, step, named)
            stored = [(keys[name], record) for name, record in named.items() if name in keys]
            set_trained(db, [(key, record.advantage, record.num_trained) for key, record in stored])
            series = [(key, name, *values) for key, record in stored for name, values in record.series.items()]
            insert(db, INSERT_TOKENS, series)

    def _keys_of(self, db: sqlite3.Connection, step: int, ids: Iterable[str]) -> dict[str, int]:
        """Returns the newest keys of the chains of a step, by their ids."""
        newest: dict[str, int] = {}
        for at, keys in self._added:
            if at == step:
                newest |= keys
        if any(name not in newest for name in ids):  # added long ago, or before the store was opened
            newest = dict(db.execute("SELECT id, key FROM trajectories WHERE step = ? ORDER BY key", (step,)))
        return newest

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Replaces what the run says about itself; the values are JSON."""
        rows = [(key, json.dumps(value)) for key, value in values.items()]
        with self.transaction() as db:
            db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", rows)

    def set_phase(self, step: int, phase: str, at: float) -> None:
        """Notes what a step does now. The first phase begins the step."""
        with self.transaction() as db:
            db.execute(
                "INSERT INTO steps (step, started, phase) VALUES (?, ?, ?) "
                "ON CONFLICT (step) DO UPDATE SET phase = excluded.phase, started = COALESCE(started, excluded.started)",
                (step, at, phase),
            )

    def set_live(self, name: str, at: float, data: object) -> None:
        """Replaces what is said about now under this name."""
        with self.transaction() as db:
            db.execute("INSERT OR REPLACE INTO live (name, t, data) VALUES (?, ?, ?)", (name, at, json.dumps(data)))

    def add_gauges(self, at: float, values: Mapping[str, float]) -> None:
        """Adds values at one time."""
        with self.transaction() as db:
            rows = [(name, at, float(value)) for name, value in values.items()]
            db.executemany("INSERT OR REPLACE INTO gauges (name, t, value) VALUES (?, ?, ?)", rows)

    def add_event(self, at: float, step: int | None, kind: str, who: str | None = None, data: object = None) -> None:
        """Adds something that happened; `data` is JSON."""
        self.add_events([(at, step, kind, who, data)])

    def add_events(self, events: Iterable[tuple[float, int | None, str, str | None, Any]]) -> None:
        """Adds several things that happened, each with the values of `add_event`."""
        rows = [
            (at, step, kind, None if who is None else clean_text(who), None if data is None else json.dumps(data))
            for at, step, kind, who, data in events
        ]
        with self.transaction() as db:
            insert(db, INSERT_EVENT, rows)

    def drop_events(self, kinds: Sequence[str], before_step: int) -> None:
        """Deletes the events of these kinds that belong to earlier steps."""
        with self.transaction() as db:
            places = ", ".join("?" * len(kinds))
            db.execute(f"DELETE FROM events WHERE step < ? AND kind IN ({places})", (before_step, *kinds))

    def add_checks(self, step: int, checks: Mapping[str, tuple[bool, float | None, float | None]]) -> None:
        """Adds the invariants that were checked at a step: whether each holds, its value and its bound."""
        rows = [(step, name, int(ok), value, bound) for name, (ok, value, bound) in checks.items()]
        with self.transaction() as db:
            db.executemany("INSERT OR REPLACE INTO checks (step, name, ok, value, bound) VALUES (?, ?, ?, ?, ?)", rows)

    def truncate_after(self, step: int) -> None:
        """Deletes the records of all later steps; a resumed run writes those steps again."""
        self._added.clear()
        with self.transaction() as db:
            for table in ("trajectories", "metrics", "steps", "step_stats", "tools", "checks", "events"):
                db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
            db.execute("DELETE FROM tools WHERE step = ?", (WHOLE_RUN,))
            for left, split in db.execute("SELECT DISTINCT step, split FROM tools").fetchall():
                _add_tools(db, WHOLE_RUN, split, _tools(db, left, split))

    def _keep_stats(self, db: sqlite3.Connection, step: int) -> None:
        """Stores the figures of a step, so that a view of all steps need not read all chains."""
        for split in SPLITS:
            if db.execute("SELECT 1 FROM step_stats WHERE step = ? AND split = ?", (step, split)).fetchone():
                continue
            chains = db.execute("SELECT outcome, score FROM trajectories WHERE step = ? AND split = ?", (step, split))
            if rows := chains.fetchall():
                db.execute(INSERT_STATS, stats_values(step, split, rows))

    def flush(self) -> None:
        """Bring everything that was written to the disk: a power cut does not lose it. Raises StorageError."""
        with self._storage(), self._lock:
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            # Figures of the indexes for the query planner. The limit makes it take milliseconds also for a million chains.
            self._db.execute("PRAGMA analysis_limit = 400")
            self._db.execute("PRAGMA optimize")

    def backup(self, path: str | Path) -> None:
        """Copies the store to another file, also while it is written: the copy is complete or absent. Raises StorageError."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.writing")
        with self._storage():
            temporary.unlink(missing_ok=True)
            with closing(sqlite3.connect(temporary)) as copy:
                self._db.backup(copy, pages=4096)
                copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)

    # ---- reading ---------------------------------------------------------------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """What the run says about itself."""
        return {key: json.loads(value) for key, value in self._fetch("SELECT key, value FROM meta", ())}

    def metrics(self, name: str | None = None) -> list[MetricRow]:
        """All values, or those of one metric, in the order of the steps."""
        where, values = _where(name=name)
        rows = self._fetch(f"SELECT step, name, value FROM metrics{where} ORDER BY step, name", values)
        # SQLite stores NaN as NULL.
        return [MetricRow(step, name, math.nan if value is None else value) for step, name, value in rows]

    def metrics_by_step(self) -> dict[int, dict[str, float]]:
        """All metrics of each step, in the order of the steps."""
        steps: dict[int, dict[str, float]] = {}
        for row in self.metrics():
            steps.setdefault(row.step, {})[row.name] = row.value
        return steps

    def rows(self, **query: Unpack[TrajectoryQuery]) -> list[TrajectoryRow]:
        """Summaries of trajectories, newest step first, within a step in the order they were added."""
        return [_read_row(row) for row in self._select(", ".join(_COLUMNS), query)]

    def trajectories(self, **query: Unpack[TrajectoryQuery]) -> list[Trajectory]:
        """Trajectories in the order of `rows`."""
        joined = "(SELECT body FROM bodies WHERE bodies.key = trajectories.key)"
        return [decode(body) for (body,) in self._select(joined, query)]

    def scan(self, *, split: str | None = None) -> Iterator[tuple[TrajectoryRow, bytes]]:
        """Every summary with the encoded trajectory, in the order they were added, also those that are added meanwhile.

        Reads in batches: a long read would keep the writer's log from being shortened.
        """
        condition, values = ("AND split = ?", (split,)) if split else ("", ())
        body = "(SELECT body FROM bodies WHERE bodies.key = trajectories.key)"
        statement = (
            f"SELECT key, {body}, {', '.join(_COLUMNS)} FROM trajectories WHERE key > ? {condition} ORDER BY key LIMIT 256"
        )
        last = -1
        while rows := self._fetch(statement, (last, *values)):
            yield from ((_read_row(row[2:]), row[1]) for row in rows)
            last = rows[-1][0]

    def learned(self, step: int | None = None) -> Iterator[LearnedRow]:
        """What the learner recorded of each chain of the training split, in the order they were added. Reads in batches."""
        columns = "key, id, step, outcome, reward IS NOT NULL, num_tokens, num_trained, advantage"
        last = -1
        at, values = ("", ()) if step is None else (" AND step = ?", (step,))
        statement = f"SELECT {columns} FROM trajectories WHERE key > ? AND split = 'train'{at} ORDER BY key LIMIT 256"
        while rows := self._fetch(statement, (last, *values)):
            last = rows[-1][0]
            series: dict[int, dict[str, tuple[str, bytes]]] = {}
            held = self._fetch("SELECT key, name, dtype, blob FROM tokens WHERE key BETWEEN ? AND ?", (rows[0][0], last))
            for key, name, dtype, blob in held:
                series.setdefault(key, {})[name] = (dtype, blob)
            for key, name, own_step, outcome, scored, num_tokens, num_trained, advantage in rows:
                counts = (num_tokens, num_trained, advantage)
                yield LearnedRow(name, own_step, outcome, bool(scored), *counts, series.get(key, {}))

    def checks(self) -> list[tuple[int, str, bool]]:
        """Step, name and result of every invariant that was checked."""
        return [(step, name, bool(ok)) for step, name, ok in self._fetch("SELECT step, name, ok FROM checks", ())]

    def _select(self, columns: str, query: TrajectoryQuery) -> list[Any]:
        limit, offset = query.pop("limit", 100), query.pop("offset", 0)
        where, values = _where(**query)
        statement = f"SELECT {columns} FROM trajectories{where} ORDER BY step DESC, key LIMIT ? OFFSET ?"
        return self._fetch(statement, (*values, limit, offset))

    def trajectory(self, id: str) -> Trajectory:  # noqa: A002 - the name of the field
        """The newest trajectory with this id. Raises ConfigError if there is none."""
        newest = "SELECT key FROM trajectories WHERE id = ? ORDER BY key DESC LIMIT 1"
        bodies = self._fetch(f"SELECT body FROM bodies WHERE key = ({newest})", (clean_text(id),))
        if not bodies:
            raise ConfigError(f"{self.path} has no trajectory {id!r}")
        return decode(bodies[0][0])

    def count(self, *, step: int | None = None, split: str | None = None, outcome: str | None = None) -> int:
        where, values = _where(step=step, split=split, outcome=outcome)
        return int(self._fetch(f"SELECT count(*) FROM trajectories{where}", values)[0][0])

    def export_jsonl(self, path: str | Path, *, split: str | None = None) -> int:
        """Writes one line of JSON per trajectory, oldest first, and returns their number.

        The file is complete or absent: it is written under another name and then moved.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.writing")
        num_written = 0
        # A separate connection: a long export must not hold the lock that the run writes under.
        with RunStore(self.path, readonly=True) as reader, temporary.open("w", encoding="utf-8") as file:
            for row, body in reader.scan(split=split):
                trajectory = decode(body)
                line = {
                    "step": row.step, "split": row.split, "total_reward": trajectory.total_reward, **to_json(trajectory),
                }  # fmt: skip
                file.write(json.dumps(line) + "\n")
                num_written += 1
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return num_written

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
            self._db.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All writes of the body are one transaction, also those of inner calls. Raises StorageError."""
        with self._storage(), self._lock:
            begun: bool = self._db.in_transaction
            if begun:
                yield self._db
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                self._added.clear()
                if self._db.in_transaction:  # SQLite itself rolls back after some errors, such as a full disk
                    self._db.execute("ROLLBACK")
                raise

    def _fetch(self, query: str, values: Sequence[Any]) -> list[Any]:
        with self._storage(), self._lock:
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _storage(self) -> Iterator[None]:
        """Raises StorageError if the file cannot be written or read; a misuse stays sqlite3's error."""
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.IntegrityError, sqlite3.InterfaceError):
            raise
        except sqlite3.DatabaseError as error:
            raise StorageError(f"the run store {self.path} cannot be used: {error}") from error


def import_jsonl(path: str | Path) -> Iterator[tuple[int, str, Trajectory]]:
    """Reads a file of `export_jsonl`: step, split and trajectory of each line."""
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            data = json.loads(line)
            yield data["step"], data["split"], from_json(data)


def _where(**conditions: object) -> tuple[str, tuple[Any, ...]]:
    given = {
        name: clean_text(value) if isinstance(value, str) else value for name, value in conditions.items() if value is not None
    }
    clause = " AND ".join(f"{name} = ?" for name in given)
    return (f" WHERE {clause}" if clause else ""), tuple(given.values())


def summary_of(step: int, split: str, trajectory: Trajectory) -> TrajectoryRow:
    """The summary that is stored with a trajectory."""
    columns = columns_of(step, split, trajectory)
    return _read_row(tuple(columns[name] for name in _COLUMNS))


def _tools(db: sqlite3.Connection, step: int, split: str) -> dict[str, ToolCounts]:
    statement = "SELECT name, calls, errors, max_s, buckets FROM tools WHERE step = ? AND split = ?"
    return dict(map(tool_row, db.execute(statement, (step, split))))


def _add_tools(db: sqlite3.Connection, step: int, split: str, added: Mapping[str, ToolCounts], sign: int = 1) -> None:
    """Adds calls to those of a step, or of the whole run; with `sign` -1, takes them away."""
    stored = _tools(db, step, split)
    for name, counts in added.items():
        merged = stored.get(name, ToolCounts())
        merged.merge(counts, sign)
        db.execute(INSERT_TOOL, (step, split, name, *tool_values(merged)))


def _read_row(row: tuple[Any, ...]) -> TrajectoryRow:
    values = dict(zip(_COLUMNS, row, strict=True))
    total = values["total_reward"]
    values |= {
        "total_reward": math.nan if total is None else total,
        "components": json.loads(values["components"]),
        "prediction": values["prediction"][:MAX_PREDICTION],
    }
    return TrajectoryRow(**values)
