"""The store of one run: SQLite, one file, every metric and every trajectory.

Comes in: metrics and trajectories, step by step. Goes out: the same, by step, split or outcome, while the run goes on (WAL:
readers never wait for the writer). Each call is one transaction, so a kill at any moment leaves whole steps. Any thread of the
process may call; one process writes. It refuses a file of another format instead of guessing.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from ..types import Trajectory
from .codec import decode, encode, from_json, to_json

StoredSplit = Literal["train", "validation"]
FORMAT = 1
BUSY_S = 30.0

_SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
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
_COLUMNS = (
    "id, step, split, task_id, chain, outcome, reward, total_reward, components, prediction, num_turns, num_tokens, seconds"
)


@dataclass(frozen=True, slots=True)
class MetricRow:
    step: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """What a list shows of a trajectory, without decoding it."""

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


class RunStore:
    """Opens the file, or makes it. `readonly` is for those who watch a run that another process writes."""

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
        # Autocommit: transactions begin and end where this file says so.
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
        self._db.execute("PRAGMA synchronous = NORMAL")  # a kill loses nothing; a power cut at most the last steps
        if found == 0:
            self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")

    # ---- writing ---------------------------------------------------------------------------------------------------------

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """A name that the step already has gets the new value."""
        rows = [(step, name, float(value)) for name, value in metrics.items()]
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", rows)

    def add_trajectories(self, step: int, split: StoredSplit, trajectories: Sequence[Trajectory]) -> None:
        """All of them, or, where this fails, none."""
        rows = [_row(step, split, trajectory) for trajectory in trajectories]
        with self._transaction() as db:
            db.executemany(
                f"INSERT INTO trajectories ({_COLUMNS}, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
            )

    def set_meta(self, key: str, value: Any) -> None:
        """`value` is anything JSON can hold."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def truncate_after(self, step: int) -> None:
        """Forget what came after a step: a resumed run writes it again."""
        with self._transaction() as db:
            db.execute("DELETE FROM metrics WHERE step > ?", (step,))
            db.execute("DELETE FROM trajectories WHERE step > ?", (step,))

    # ---- reading ---------------------------------------------------------------------------------------------------------

    def get_meta(self, key: str, default: Any = None) -> Any:
        found = self._fetch("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(found[0][0]) if found else default

    def metrics(self, name: str | None = None) -> list[MetricRow]:
        """Every value in the order of steps; of one metric where a name is given."""
        where, values = _where(name=name)
        found = self._fetch(f"SELECT step, name, value FROM metrics{where} ORDER BY step, name", values)
        # SQLite has no NaN: it comes back as NULL.
        return [MetricRow(step, name, math.nan if value is None else value) for step, name, value in found]

    def rows(
        self,
        *,
        step: int | None = None,
        split: str | None = None,
        outcome: str | None = None,
        task_id: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> list[TrajectoryRow]:
        """Summaries of trajectories, newest step first, within a step in the order they were added."""
        where, values = _where(step=step, split=split, outcome=outcome, task_id=task_id)
        query = f"SELECT {_COLUMNS} FROM trajectories{where} ORDER BY step DESC, key LIMIT ? OFFSET ?"
        return [_read_row(row) for row in self._fetch(query, (*values, limit, offset))]

    def trajectories(
        self,
        *,
        step: int | None = None,
        split: str | None = None,
        outcome: str | None = None,
        task_id: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> list[Trajectory]:
        """Whole trajectories, in the order of `rows`."""
        where, values = _where(step=step, split=split, outcome=outcome, task_id=task_id)
        query = f"SELECT body FROM trajectories{where} ORDER BY step DESC, key LIMIT ? OFFSET ?"
        return [decode(body) for (body,) in self._fetch(query, (*values, limit, offset))]

    def trajectory(self, id: str) -> Trajectory:  # noqa: A002 - it is what a trajectory calls it
        """The newest trajectory of that id."""
        found = self._fetch("SELECT body FROM trajectories WHERE id = ? ORDER BY key DESC LIMIT 1", (_text(id),))
        if not found:
            raise ConfigError(f"{self.path} has no trajectory {id!r}")
        return decode(found[0][0])

    def count(self, *, step: int | None = None, split: str | None = None, outcome: str | None = None) -> int:
        where, values = _where(step=step, split=split, outcome=outcome)
        return int(self._fetch(f"SELECT count(*) FROM trajectories{where}", values)[0][0])

    def export_jsonl(self, path: str | Path, *, split: str | None = None) -> int:
        """Write every trajectory as one line of JSON, in the order of time; returns how many. The file appears whole or not
        at all."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.writing")
        where, values = _where(split=split)
        num_written = 0
        # A connection of its own: an export of gigabytes does not hold up the run.
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
        """Closing twice is fine."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _fetch(self, query: str, values: Sequence[Any]) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()


def import_jsonl(path: str | Path) -> Iterator[tuple[int, str, Trajectory]]:
    """Read back what `export_jsonl` wrote: step, split and trajectory, line by line."""
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            data = json.loads(line)
            yield data["step"], data["split"], from_json(data)


def _where(**conditions: Any) -> tuple[str, tuple[Any, ...]]:
    given = {name: _text(value) if isinstance(value, str) else value for name, value in conditions.items() if value is not None}
    clause = " AND ".join(f"{name} = ?" for name in given)
    return (f" WHERE {clause}" if clause else ""), tuple(given.values())


def _row(step: int, split: str, trajectory: Trajectory) -> tuple[Any, ...]:
    if split not in ("train", "validation"):
        raise ConfigError(f"a split is 'train' or 'validation', not {split!r}")
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
        encode(trajectory),
    )


def _read_row(row: tuple[Any, ...]) -> TrajectoryRow:
    values = list(row)
    values[7] = math.nan if values[7] is None else values[7]
    values[8] = json.loads(values[8])
    return TrajectoryRow(*values)


def _text(text: str) -> str:
    """SQLite takes no half surrogates; the body keeps them."""
    return text.encode("utf-8", "replace").decode("utf-8")
