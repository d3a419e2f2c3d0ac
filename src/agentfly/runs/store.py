"""The store of one run: all metrics and trajectories in one SQLite file.

Each call that writes is one transaction, so a process killed at any moment leaves complete steps. One process writes, from any
of its threads; others may read at the same time (in WAL mode readers do not wait for the writer). A file of another format is
refused.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from ..errors import ConfigError, StorageError
from ..types import Trajectory
from .codec import decode, encode, from_json, to_json

StoredSplit = Literal["train", "validation"]
SPLITS: tuple[StoredSplit, ...] = ("train", "validation")
FORMAT = 1
BUSY_S = 30.0

_SCHEMA = f"""
CREATE TABLE metrics (step INTEGER NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (step, name)) WITHOUT ROWID;
CREATE TABLE trajectories (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL, step INTEGER NOT NULL, split TEXT NOT NULL, task_id TEXT NOT NULL,
    chain INTEGER NOT NULL, outcome TEXT NOT NULL, reward REAL, total_reward REAL, components TEXT NOT NULL,
    prediction TEXT NOT NULL, num_turns INTEGER NOT NULL, num_tokens INTEGER NOT NULL, seconds REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX trajectories_by_step ON trajectories (step, split);
CREATE INDEX trajectories_by_id ON trajectories (id);
PRAGMA user_version = {FORMAT};
"""


@dataclass(frozen=True, slots=True)
class MetricRow:
    step: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """A summary of a trajectory. Reading it does not decode the trajectory."""

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
        if readonly and not self.path.is_file():
            raise ConfigError(f"there is no run store at {self.path}")
        try:
            self._db = self._connect(readonly)
            self._prepare(readonly)
        except sqlite3.Error as error:
            raise ConfigError(f"{self.path} cannot be opened as a run store: {error}") from error

    def _connect(self, readonly: bool) -> sqlite3.Connection:
        # Autocommit mode: `_transaction` begins and ends transactions itself.
        uri = f"{self.path.absolute().as_uri()}?mode={'ro' if readonly else 'rwc'}"
        return sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False, isolation_level=None)

    def _prepare(self, readonly: bool) -> None:
        found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if found not in (0, FORMAT) or (readonly and found == 0):
            self._db.close()
            raise ConfigError(f"{self.path} is a run store of format {found}, but this version reads format {FORMAT}")
        if readonly:
            return
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing, a power cut at most the last steps
        if found == 0:
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")

    # ---- writing ---------------------------------------------------------------------------------------------------------

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a step; a new value replaces an earlier one of the same name."""
        rows = [(step, name, float(value)) for name, value in metrics.items()]
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", rows)

    def add_trajectories(
        self, step: int, split: StoredSplit, trajectories: Sequence[Trajectory], *, replace: bool = False
    ) -> None:
        """Adds all trajectories, or none if one of them cannot be stored. `replace` deletes those of this step and split."""
        rows = [_row(step, split, trajectory) for trajectory in trajectories]
        with self._transaction() as db:
            if replace:
                db.execute("DELETE FROM trajectories WHERE step = ? AND split = ?", (step, split))
            places = ", ".join("?" * (len(_COLUMNS) + 1))
            db.executemany(f"INSERT INTO trajectories ({', '.join(_COLUMNS)}, body) VALUES ({places})", rows)

    def truncate_after(self, step: int) -> None:
        """Deletes everything after a step; a resumed run writes those steps again."""
        with self._transaction() as db:
            db.execute("DELETE FROM metrics WHERE step > ?", (step,))
            db.execute("DELETE FROM trajectories WHERE step > ?", (step,))

    def flush(self) -> None:
        """Bring everything that was written to the disk: a power cut does not lose it. Raises StorageError."""
        with self._storage(), self._lock:
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    # ---- reading ---------------------------------------------------------------------------------------------------------

    def metrics(self, name: str | None = None) -> list[MetricRow]:
        """All values, or those of one metric, in the order of the steps."""
        where, values = _where(name=name)
        found = self._fetch(f"SELECT step, name, value FROM metrics{where} ORDER BY step, name", values)
        # SQLite stores NaN as NULL.
        return [MetricRow(step, name, math.nan if value is None else value) for step, name, value in found]

    def metrics_by_step(self) -> dict[int, dict[str, float]]:
        """All metrics of each step, in the order of the steps."""
        found: dict[int, dict[str, float]] = {}
        for row in self.metrics():
            found.setdefault(row.step, {})[row.name] = row.value
        return found

    def rows(self, **query: Unpack[TrajectoryQuery]) -> list[TrajectoryRow]:
        """Summaries of trajectories, newest step first, within a step in the order they were added."""
        return [_read_row(row) for row in self._select(", ".join(_COLUMNS), query)]

    def trajectories(self, **query: Unpack[TrajectoryQuery]) -> list[Trajectory]:
        """Trajectories in the order of `rows`."""
        return [decode(body) for (body,) in self._select("body", query)]

    def scan(self, *, split: str | None = None) -> Iterator[tuple[TrajectoryRow, bytes]]:
        """Every summary with the encoded trajectory, in the order they were added, also those that are added meanwhile.

        Reads in batches: a long read would keep the writer's log from being shortened.
        """
        condition, values = ("AND split = ?", (split,)) if split else ("", ())
        statement = (
            f"SELECT key, body, {', '.join(_COLUMNS)} FROM trajectories WHERE key > ? {condition} ORDER BY key LIMIT 256"
        )
        last = -1
        while found := self._fetch(statement, (last, *values)):
            yield from ((_read_row(row[2:]), row[1]) for row in found)
            last = found[-1][0]

    def _select(self, columns: str, query: TrajectoryQuery) -> list[Any]:
        limit, offset = query.pop("limit", 100), query.pop("offset", 0)
        where, values = _where(**query)
        statement = f"SELECT {columns} FROM trajectories{where} ORDER BY step DESC, key LIMIT ? OFFSET ?"
        return self._fetch(statement, (*values, limit, offset))

    def trajectory(self, id: str) -> Trajectory:  # noqa: A002 - the name of the field
        """The newest trajectory with this id. Raises ConfigError if there is none."""
        found = self._fetch("SELECT body FROM trajectories WHERE id = ? ORDER BY key DESC LIMIT 1", (_text(id),))
        if not found:
            raise ConfigError(f"{self.path} has no trajectory {id!r}")
        return decode(found[0][0])

    def count(self, *, step: int | None = None, split: str | None = None, outcome: str | None = None) -> int:
        where, values = _where(step=step, split=split, outcome=outcome)
        return int(self._fetch(f"SELECT count(*) FROM trajectories{where}", values)[0][0])

    def export_jsonl(self, path: str | Path, *, split: str | None = None) -> int:
        """Writes one line of JSON per trajectory, oldest first, and returns their number.

        The file is complete or absent: it is written under another name and then moved.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.writing")
        where, values = _where(split=split)
        num_written = 0
        # A separate connection: a long export must not hold the lock that the run writes under.
        with closing(self._connect(readonly=True)) as db, temporary.open("w", encoding="utf-8") as file:
            for step, its_split, body in db.execute(f"SELECT step, split, body FROM trajectories{where} ORDER BY key", values):
                trajectory = decode(body)
                line = {"step": step, "split": its_split, "total_reward": trajectory.total_reward, **to_json(trajectory)}
                file.write(json.dumps(line) + "\n")
                num_written += 1
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return num_written

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._storage(), self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
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


def _where(**conditions: Any) -> tuple[str, tuple[Any, ...]]:
    given = {name: _text(value) if isinstance(value, str) else value for name, value in conditions.items() if value is not None}
    clause = " AND ".join(f"{name} = ?" for name in given)
    return (f" WHERE {clause}" if clause else ""), tuple(given.values())


def summary_of(step: int, split: str, trajectory: Trajectory) -> TrajectoryRow:
    """The summary that is stored with a trajectory."""
    return _read_row(_columns(step, split, trajectory))


def _row(step: int, split: str, trajectory: Trajectory) -> tuple[Any, ...]:
    if split not in SPLITS:
        raise ConfigError(f"a split is 'train' or 'validation', not {split!r}")
    return (*_columns(step, split, trajectory), encode(trajectory))


def _columns(step: int, split: str, trajectory: Trajectory) -> tuple[Any, ...]:
    return (
        _text(trajectory.id),
        step,
        split,
        _text(trajectory.task.id),
        trajectory.chain,
        trajectory.outcome.value,
        trajectory.reward,
        trajectory.total_reward,
        json.dumps(trajectory.components),
        _text(trajectory.prediction),
        len(trajectory.turns),
        trajectory.num_sampled,
        trajectory.seconds,
    )


def _read_row(row: tuple[Any, ...]) -> TrajectoryRow:
    values = list(row)
    values[7] = math.nan if values[7] is None else values[7]
    values[8] = json.loads(values[8])
    return TrajectoryRow(*values)


def _text(text: str) -> str:
    """SQLite refuses half of a surrogate pair; the body keeps it."""
    return text.encode("utf-8", "replace").decode("utf-8")
