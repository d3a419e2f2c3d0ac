"""Reads a run store for the views: `RunReader` answers every question of a page, a table or a plot in SQL.

It reads a run that is being written, and changes nothing. A list is read in pages by a cursor, so a
page costs its rows wherever it lies. An offset skips rows in the index of the order (`filters.find_source`), which has the
columns of the usual filters: 100,000 rows take 3 to 20 ms. A statement that takes longer than `timeout_s` is interrupted and
raises `QueryTimeout`. A count then returns what it has counted, and a search for a text the chains that it has found.
"""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from ..display import Displayed, data_frame
from ..display.overview import chain_rows, describe, metric_rows, reader_html
from ..errors import ConfigError, QueryTimeout, StorageError
from ..types import Trajectory
from .codec import body_contains, decode
from .filters import ChainFilter, ChainSource, Cursor, Needed, Order, clean_text, find_source
from .lock import RunState, state_of
from .rows import (
    ChainRow,
    CheckRow,
    Count,
    EventRow,
    GroupRow,
    Histogram,
    StepRow,
    TokenSeries,
    ToolCounts,
    ToolRow,
    chain_row,
    group_row,
    step_stats,
    tool_row,
    unpack_values,
)
from .schema import BY_REWARD, BY_STEP, WHOLE_RUN, Opened, open_readonly

__all__ = [
    "ChainFilter", "ChainRow", "CheckRow", "Count", "EventRow", "GroupRow", "Histogram", "Point", "RunReader", "StepRow",
    "TokenSeries", "ToolRow",
]  # fmt: skip
TIMEOUT_S = 2.0
COUNT_CAP = 10_000_000
NEWEST_STEPS = 20
"""Steps to which a query that takes too long is proposed to be narrowed."""
SAMPLE_ABOVE = 1_000_000
"""A histogram of more chains reads every second, third, ... of them."""
SAMPLE_PARTS = 200_000
HISTOGRAM_S = 0.3
_RANGE = 20_000  # keys of the first part of a search or a count; each further part is twice as large
_SCAN = 512  # chains whose bodies are searched in the first part
_MAX_SCAN = 8_192
_READ = 16  # chains whose bodies one statement reads
_STRATA = 64  # ranges of keys that a histogram of a part of the chains is read from
_LOOK = 10_000  # instructions of SQLite between two looks at the clock
Point = tuple[int, float | None, float | None]
"""Step, wall-clock time and value (None if it is not a finite number) of a metric."""


_COLUMNS = ", ".join(each.name for each in fields(ChainRow))


class RunReader(Displayed):
    """The queries of one run. `path` is the folder of a run or its database. Raises ConfigError if there is none.

    It may be used from several threads; one statement runs at a time. In a notebook it shows itself.
    """

    def __init__(self, path: str | Path, *, timeout_s: float = TIMEOUT_S) -> None:
        path = Path(path)
        self.path = path / "run.db" if path.is_dir() else path
        self.timeout_s = timeout_s
        self._lock = threading.RLock()
        self._deadline = math.inf
        self._opened = self._open()

    def _open(self) -> Opened:
        opened = open_readonly(self.path)
        opened.db.create_function("body_contains", 2, body_contains, deterministic=True)
        opened.db.set_progress_handler(lambda: time.monotonic() > self._deadline, _LOOK)
        return opened

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            self._opened.close()

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the run ---------------------------------------------------------------------------------------------------------

    def data_version(self) -> int:
        """A number that changes when another connection has written."""
        return int(self._fetch("PRAGMA data_version")[0][0])

    def meta(self) -> dict[str, Any]:
        """What the run says about itself: status, pid, host, heartbeat, model, world, algorithm, version, seed and others."""
        return {key: _json(value) for key, value in self._fetch("SELECT key, value FROM meta")}

    def state(self) -> RunState:
        """ "running", "finished", "stopped" (by a signal or an error) or "dead" (killed)."""
        return state_of(self.path.parent, self.meta(), self.last_step())

    def last_step(self) -> int | None:
        """The newest step that has metrics or chains."""
        # A step that has metrics is whole. The metrics themselves are in the order of their names.
        whole, played = "SELECT max(step) FROM steps WHERE whole = 1", "SELECT max(step) FROM trajectories"
        steps = [self._fetch(each)[0][0] for each in (whole, played)]
        return max((step for step in steps if step is not None), default=None)

    def num_chains(self) -> int:
        """All stored chains."""
        return int(self._fetch("SELECT count(*) FROM trajectories")[0][0])

    def values(self, column: Literal["split", "outcome", "step"]) -> list[Any]:
        """The different values of a column of the chains, sorted."""
        if column not in ("split", "outcome", "step"):
            raise ConfigError(f"the values of {column!r} cannot be listed")
        if column == "split":
            return sorted({split for _, split in self._places(-1)})
        return self._distinct("trajectories", column)

    def tool_names(self) -> list[str]:
        """The tools that a chain called, sorted."""
        return self._distinct("calls", "name")

    # ---- metrics ---------------------------------------------------------------------------------------------------------

    def metric_names(self) -> list[str]:
        """Sorted."""
        return self._distinct("metrics", "name")

    def series(self, names: Sequence[str], after_step: int | None = None) -> dict[str, list[Point]]:
        """The values of each metric in the order of the steps. A name without values has an empty list."""
        series: dict[str, list[Point]] = {}
        for name in dict.fromkeys(names):
            statement = "SELECT step, time, value FROM metrics WHERE name = ? AND step > ? ORDER BY step"
            rows = self._fetch(statement, (clean_text(name), -1 if after_step is None else after_step))
            series[name] = [(step, at, _finite(value)) for step, at, value in rows]
        return series

    def outcomes_by_step(self, after_step: int | None = None) -> list[StepRow]:
        """Every step with its outcomes and rewards, in the order of the steps, train before validation."""
        after = -1 if after_step is None else after_step
        times = {row[0]: row[1:] for row in self._fetch("SELECT step, started, ended, phase, whole FROM steps")}
        stats = {
            (step, split): (chains, scored, mean, json.loads(quantiles), json.loads(outcomes))
            for step, split, chains, scored, mean, quantiles, outcomes in self._fetch(
                "SELECT step, split, chains, scored, mean, quantiles, outcomes FROM step_stats WHERE step > ?", (after,)
            )
        }
        places = [place for place in self._places(after) if place not in stats]
        stats |= {place: self._stats(*place) for place in places}
        return [
            StepRow(
                step, split, chains, scored, outcomes, mean, quantiles,
                *((None, None, None, False) if step not in times else (*times[step][:3], bool(times[step][3]))),
            )
            for (step, split), (chains, scored, mean, quantiles, outcomes) in sorted(stats.items())
        ]  # fmt: skip

    def _places(self, after: int) -> list[tuple[int, str]]:
        """Every step and split that has chains. Jumps from step to step in the index."""
        statement = (
            "WITH RECURSIVE every(step) AS (SELECT min(step) FROM trajectories WHERE step > ? UNION ALL "
            "SELECT (SELECT min(step) FROM trajectories WHERE step > every.step) FROM every WHERE every.step IS NOT NULL) "
            "SELECT step, split FROM every CROSS JOIN (SELECT 'train' AS split UNION ALL SELECT 'validation') AS splits WHERE "
            "EXISTS (SELECT 1 FROM trajectories WHERE trajectories.step = every.step AND trajectories.split = splits.split)"
        )
        return [(step, split) for step, split in self._fetch(statement, (after,))]

    def _stats(self, step: int, split: str) -> tuple[Any, ...]:
        return step_stats(self._fetch("SELECT outcome, score FROM trajectories WHERE step = ? AND split = ?", (step, split)))

    # ---- chains ----------------------------------------------------------------------------------------------------------

    def page(
        self,
        filter: ChainFilter | None = None,  # noqa: A002
        sort: str = "-added",
        cursor: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> tuple[list[ChainRow], str | None]:
        """The next chains that match, and the cursor of the page after them, None at the end. `offset` of them are skipped.

        A search that takes too long returns fewer chains than `limit`, perhaps none, with the cursor to go on from. Raises
        ConfigError for an offset into a search in whole chains, which reads every chain that it skips.
        """
        chosen = filter or ChainFilter()
        order, start = Order.parse(sort), None if cursor is None else Cursor.parse(cursor)
        limit, offset = max(1, min(limit, 1000)), max(0, offset)
        if chosen.text and chosen.in_body:
            if offset:
                raise ConfigError("a search in whole chains is read page by page: give a cursor, not an offset")
            return self._search(chosen, order, start, limit)
        if chosen.text and order.column == "key" and not offset:
            return self._search_summaries(chosen, order, start, limit)
        source = self._source(chosen, order)
        rows: list[ChainRow] = []
        for condition, more in order.ranges(start, source.key):
            conditions, values = _all([condition, *source.where]), (*more, *source.values)
            # Without its index a text may match few chains: to look for it in another order would read the table at random.
            terms = order.sql(source.key, by_index=True)
            # The inner statement sorts keys, not whole rows.
            inner = f"SELECT {source.key} FROM {source.tables} WHERE {conditions} ORDER BY {terms} LIMIT ? OFFSET ?"
            outer = f"key IN ({inner}) ORDER BY {order.sql(by_index=False)}"
            page = self._rows(outer, (*values, limit + 1 - len(rows), offset))
            if page or not offset:
                rows, offset = rows + page, 0
            else:  # all of this part is skipped
                offset -= self._fetch(f"SELECT count(*) FROM {source.tables} WHERE {conditions}", values)[0][0]
            if len(rows) > limit:
                return rows[:limit], self._cursor(order, rows[limit - 1])
        return rows, None

    def place_of(self, id: str, filter: ChainFilter | None = None, sort: str = "-added") -> int | None:  # noqa: A002
        """How many chains of the list come before the newest one with this id; None if the list does not have it.

        Raises ConfigError if there is no such chain, and for a search in whole chains, which does not count them.
        """
        chosen, order, row = filter or ChainFilter(), Order.parse(sort), self.row(id)
        if chosen.text and chosen.in_body:
            raise ConfigError("the rows of a search in whole chains are not counted: search without in=body to go to a row")
        source = self._source(chosen, order)
        where = [f"{source.key} = ?", *source.where]
        if not self._fetch(f"SELECT 1 FROM {source.tables} WHERE {_all(where)}", (row.key, *source.values)):
            return None
        place = Cursor(None if order.column == "key" else getattr(row, order.column), row.key)
        count = 0
        for condition, more in order.ranges_before(place, source.key):
            statement = f"SELECT count(*) FROM {source.tables} WHERE {_all([condition, *source.where])}"
            count += self._fetch(statement, (*more, *source.values))[0][0]
        return count

    def _search_summaries(
        self, chosen: ChainFilter, order: Order, start: Cursor | None, limit: int
    ) -> tuple[list[ChainRow], str | None]:
        """A page of the chains whose summaries hold a text: reads one range of keys after the other until the time is up."""
        source = self._source(chosen, order)
        # Two subqueries: SQLite finds one extreme in an index at once, but reads all rows for both.
        first, last = self._fetch("SELECT (SELECT min(key) FROM trajectories), (SELECT max(key) FROM trajectories)")[0]
        if first is None:
            return [], None
        sign = -1 if order.descending else 1
        at = (last if order.descending else first) if start is None else start.key + sign
        ends, rows, size = time.monotonic() + self.timeout_s, list[ChainRow](), _RANGE
        while first <= at <= last:
            beyond = at + sign * size  # the first key of the next range
            bounds = (beyond + 1, at) if order.descending else (at, beyond - 1)
            conditions = _all([*source.where, f"{source.key} BETWEEN ? AND ?"])
            inner = f"SELECT {source.key} FROM {source.tables} WHERE {conditions} ORDER BY {order.sql(source.key)} LIMIT ?"
            values = (*source.values, *bounds, limit - len(rows))
            try:
                rows += self._rows(f"key IN ({inner}) ORDER BY {order.sql()}", values, ends if size > _RANGE else None)
            except QueryTimeout:
                if size == _RANGE:
                    raise
                return rows, Cursor(None, at - sign).text
            if len(rows) == limit:
                return rows, Cursor(None, rows[-1].key).text
            at, size = beyond, 2 * size
            if time.monotonic() > ends and first <= at <= last:
                return rows, Cursor(None, at - sign).text
        return rows, None

    def _search(self, chosen: ChainFilter, order: Order, start: Cursor | None, limit: int) -> tuple[list[ChainRow], str | None]:
        """A page of the chains whose bodies hold a text: reads the bodies in small batches until the time is up."""
        if order.column != "key":
            raise ConfigError("a search in whole chains lists them by the time they were added: sort by added or -added")
        source = self._source(chosen, order)
        needle = _needle(chosen)
        rows: list[ChainRow] = []
        ends, size = time.monotonic() + self.timeout_s, _SCAN
        while True:
            condition, more = order.ranges(start, source.key)[0]
            conditions = _all([*source.where, condition])
            inner = f"SELECT {source.key} FROM {source.tables} WHERE {conditions} ORDER BY {order.sql(source.key)} LIMIT {size}"
            keys = [key for (key,) in self._fetch(inner, (*source.values, *more))]
            for place in range(0, len(keys), _READ):
                some = keys[place : place + _READ]
                matching = f"SELECT key FROM bodies WHERE key IN ({', '.join('?' * len(some))}) AND body_contains(body, ?)"
                rows += self._rows(f"key IN ({matching}) ORDER BY {order.sql()} LIMIT ?", (*some, needle, limit - len(rows)))
                full = len(rows) == limit
                start = Cursor(None, rows[-1].key if full else some[-1])
                if full or time.monotonic() > ends:
                    return rows, start.text
            if len(keys) < size:
                return rows, None
            size = min(2 * size, max(size, _MAX_SCAN))

    def count(self, filter: ChainFilter | None = None, cap: int = COUNT_CAP) -> Count:  # noqa: A002
        """The number of chains that match, at most `cap`. Not exact if counting them takes longer than `timeout_s`."""
        total, ends = 0, time.monotonic() + self.timeout_s
        try:
            for part in self._count_parts(filter or ChainFilter(), cap, ends):
                total += part
                if total > cap:
                    return Count(cap, False)
        except QueryTimeout:
            return Count(total, False)
        return Count(total, True)

    def _count_parts(self, chosen: ChainFilter, cap: int, ends: float) -> Iterator[int]:
        """Counts one range of keys after the other, each twice as large. Raises QueryTimeout if the time is up."""
        source = self._source(chosen, Order.parse("added"), BY_STEP)
        where, values = source.where, source.values
        if chosen.text and chosen.in_body:
            where = [*where, "(SELECT body_contains(body, ?) FROM bodies WHERE bodies.key = trajectories.key)"]
            values = [*values, _needle(chosen)]
        inner = f"SELECT 1 FROM {source.tables} WHERE {_all([*where, f'{source.key} BETWEEN ? AND ?'])} LIMIT ?"
        newest = self._fetch("SELECT max(key) FROM trajectories")[0][0] or 0
        size = (_SCAN if chosen.in_body else _RANGE) if source.parts else newest + 1
        while newest > 0:
            if time.monotonic() > ends:
                raise QueryTimeout(self._too_slow())
            yield self._fetch(f"SELECT count(*) FROM ({inner})", (*values, newest - size + 1, newest, cap + 1), ends)[0][0]
            newest, size = newest - size, 2 * size

    def histogram(self, filter: ChainFilter | None = None, bins: int = 20) -> Histogram:  # noqa: A002
        """The rewards of the scored chains that match. Empty if there are none; one bin if all are equal.

        In a run of more than SAMPLE_PARTS chains, those with a tool or a text are read for HISTOGRAM_S, from all over the run.
        """
        bins = max(1, min(bins, 200))
        chosen = filter or ChainFilter()
        if chosen.text and chosen.in_body:
            raise ConfigError("a search in whole chains has no histogram: search without in_body")
        # The chains that called a tool are in the order of their keys.
        source = self._source(chosen, Order.parse("reward" if chosen.tool is None else "added"), BY_REWARD)
        newest = self._fetch("SELECT max(key) FROM trajectories")[0][0] or 0
        where = ["score IS NOT NULL", *source.where]
        if source.index == BY_REWARD:  # in the order of the rewards
            every = 1 + newest // SAMPLE_ABOVE
            condition = _all([*where, f"trajectories.key % {every} = 0"] if every > 1 else where)
            statement = f"SELECT score, count(*) FROM {source.tables} WHERE {condition} GROUP BY score"
            scores, share = Counter(dict(self._fetch(statement, source.values))), 1 / every
        else:
            scores, share = self._scores(source, where, newest)
        if not scores:
            return Histogram([], [])
        low, high = min(scores), max(scores)
        if not math.isfinite(high - low):
            raise ConfigError(f"rewards from {low} to {high} have no histogram")
        if low == high:
            return Histogram([low, high], [round(scores[low] / share)], share)
        counts, scale = [0] * bins, bins / (high - low)
        for score, count in scores.items():
            counts[min(bins - 1, int((score - low) * scale))] += round(count / share)
        width = (high - low) / bins
        return Histogram([*(low + width * index for index in range(bins)), high], counts, share)

    def _scores(self, source: ChainSource, where: Sequence[str], newest: int) -> tuple[Counter[float], float]:
        """The scores of a source that is not in their order, and the share of the chains that was read."""
        statement = f"SELECT score FROM {source.tables} WHERE {_all(where)}"
        if not source.parts or newest <= SAMPLE_PARTS:
            return Counter(chain.from_iterable(self._iterate(statement, source.values))), 1.0
        scores, size = Counter[float](), -(-newest // _STRATA)
        ends = time.monotonic() + min(HISTOGRAM_S, self.timeout_s)
        # The halves of the run, then its quarters, and so on: a part of them is a fair sample of all steps.
        for number, place in enumerate(sorted(range(_STRATA), key=lambda place: f"{place:06b}"[::-1]), 1):
            bounds = (place * size + 1, (place + 1) * size)
            rows = self._iterate(f"{statement} AND {source.key} BETWEEN ? AND ?", (*source.values, *bounds))
            scores.update(chain.from_iterable(rows))
            if time.monotonic() > ends:
                return scores, number / _STRATA
        return scores, 1.0

    def groups(self, step: int, split: str = "train") -> list[GroupRow]:
        """The groups of a step, in the order of their first chain."""
        groups: dict[tuple[str, int], list[Any]] = {}
        statement = "SELECT task_id, draw, score, num_trained FROM trajectories WHERE step = ? AND split = ? ORDER BY key"
        for task, draw, score, trained in self._fetch(statement, (step, split)):
            groups.setdefault((task, draw), []).append((score, trained))
        return [group_row(step, task, draw, chains) for (task, draw), chains in groups.items()]

    def group(self, step: int, task_id: str, draw: int | None = None, split: str = "train") -> list[ChainRow]:
        """The sibling chains of a task in a step, by their number. Without `draw`, those of all its draws."""
        condition = "task_id = ? AND step = ? AND split = ?" + ("" if draw is None else " AND draw = ?")
        values = (clean_text(task_id), step, split, *(() if draw is None else (draw,)))
        return self._rows(f"{condition} ORDER BY draw, chain, key", values)

    def row(self, id: str) -> ChainRow:  # noqa: A002 - the name of the field
        """The summary of the newest chain with this id. Raises ConfigError if there is none."""
        rows = self._rows("id = ? ORDER BY key DESC LIMIT 1", (clean_text(id),))
        if not rows:
            raise ConfigError(f"{self.path} has no trajectory {id!r}")
        return rows[0]

    def trajectory(self, id: str) -> Trajectory:  # noqa: A002
        """The newest chain with this id, complete. Raises ConfigError if there is none, or it cannot be read."""
        bodies = self._fetch("SELECT body FROM bodies WHERE key = ?", (self.row(id).key,))
        if not bodies:
            raise ConfigError(f"{self.path} has no trajectory {id!r}")
        return decode(bodies[0][0])

    def token_series(self, id: str) -> TokenSeries:  # noqa: A002
        """What the learner recorded for each sampled token of the newest chain with this id."""
        row = self.row(id)
        stored = {
            name: unpack_values(dtype, blob)
            for name, dtype, blob in self._fetch("SELECT name, dtype, blob FROM tokens WHERE key = ?", (row.key,))
        }
        # A series whose values are all equal is not stored: the summary has the value.
        if "advantage" not in stored and row.advantage is not None:
            stored["advantage"] = [row.advantage] * row.num_tokens
        trained: list[bool] | None = None
        if "trained" in stored:
            trained = [bool(value) for value in stored.pop("trained")]
        elif row.num_trained is not None:
            trained = [row.num_trained > 0] * row.num_tokens
        elif row.split != "train":
            trained = [False] * row.num_tokens  # a held-out chain is never trained on
        named = {name: stored.pop(name, None) for name in ("advantage", "trainer_logprob", "entropy")}
        return TokenSeries(row.num_tokens, trained, **named, others=stored)

    # ---- for people ------------------------------------------------------------------------------------------------------

    def to_pandas(self, what: Literal["metrics", "chains"] = "metrics") -> Any:
        """A pandas.DataFrame: the metrics with a row per step, or the summaries of all chains. Raises MissingExtra."""
        return data_frame(metric_rows(self) if what == "metrics" else chain_rows(self))

    def __repr__(self) -> str:
        return f"<RunReader {describe(self)}>"

    def _repr_html_(self) -> str:
        return reader_html(self)

    # ---- over time -------------------------------------------------------------------------------------------------------

    def gauge_names(self) -> list[str]:
        """The names of the pool figures and others that are recorded over time, sorted."""
        return self._distinct("gauges", "name")

    def gauges(
        self, names: Sequence[str] | None = None, since: float | None = None, max_points: int = 1000
    ) -> dict[str, list[tuple[float, float | None]]]:
        """Time and value of each gauge. A value holds until the next one: only changes are stored.

        The first point may lie before `since`: it is the value at that time. A long series is thinned to the last value in
        each of `max_points` equal intervals.
        """
        start = -math.inf if since is None else since
        gauges: dict[str, list[tuple[float, float | None]]] = {}
        for name in self.gauge_names() if names is None else dict.fromkeys(names):
            before = self._fetch("SELECT t, value FROM gauges WHERE name = ? AND t < ? ORDER BY t DESC LIMIT 1", (name, start))
            low, high = (
                self._fetch(f"SELECT {extreme}(t) FROM gauges WHERE name = ? AND t >= ?", (name, start))[0][0]
                for extreme in ("min", "max")
            )
            points = []
            if low is not None:
                width = max((high - low) / max(1, max_points), 1e-9)
                points = self._fetch(
                    "SELECT max(t), value FROM gauges WHERE name = ? AND t >= ? "
                    "GROUP BY CAST((t - ?) / ? AS INTEGER) ORDER BY 1",
                    (name, start, low, width),
                )
            gauges[name] = [(at, _finite(value)) for at, value in [*before, *points]]
        return gauges

    def live(self) -> dict[str, tuple[float, Any]]:
        """What the run last said about now, with the time: "chains" (those that run) and "leases" (held by which chain)."""
        return {name: (at, _json(data)) for name, at, data in self._fetch("SELECT name, t, data FROM live")}

    def tools(self, step: int | None = None, split: str | None = None) -> list[ToolRow]:
        """The tools of a step, or of the whole run, the slowest first (by `p95_s`). Quantiles are accurate to a tenth."""
        where = ["step = ?"]
        values: list[Any] = [WHOLE_RUN if step is None else step]
        if split is not None:
            where, values = [*where, "split = ?"], [*values, split]
        merged: dict[str, ToolCounts] = {}
        for row in self._fetch(f"SELECT name, calls, errors, max_s, buckets FROM tools WHERE {_all(where)}", values):
            name, counts = tool_row(row)
            merged.setdefault(name, ToolCounts()).merge(counts)
        rows = [
            ToolRow(name, each.calls, each.errors, each.quantile(0.5), each.quantile(0.95), each.max_s, step, split)
            for name, each in merged.items()
        ]
        return sorted(rows, key=lambda tool: (-(tool.p95_s or 0.0), tool.name))

    def checks(self, step: int | None = None, after_step: int | None = None) -> list[CheckRow]:
        """The invariants that were checked, by step."""
        where, values = ("step = ?", [step]) if step is not None else ("step > ?", [-1 if after_step is None else after_step])
        rows = self._fetch(f"SELECT step, name, ok, value, bound FROM checks WHERE {where} ORDER BY step, name", values)
        return [CheckRow(at, name, bool(ok), _finite(value), _finite(bound)) for at, name, ok, value, bound in rows]

    def events(self, after_key: int = 0, kind: str | None = None, limit: int = 1000) -> list[EventRow]:
        """The events after one of them, oldest first."""
        where, values = ("key > ?", [after_key]) if kind is None else ("key > ? AND kind = ?", [after_key, kind])
        rows = self._fetch(
            f"SELECT key, t, step, kind, who, data FROM events WHERE {where} ORDER BY key LIMIT ?", (*values, limit)
        )
        return [EventRow(key, at, step, kind, who, _json(data) or {}) for key, at, step, kind, who, data in rows]

    def newest_events(self, limit: int = 100) -> list[EventRow]:
        """The last events, oldest first."""
        newest = self._fetch("SELECT max(key) FROM events")[0][0] or 0
        return self.events(max(0, newest - limit), limit=limit)

    # ---- SQL -------------------------------------------------------------------------------------------------------------

    def _source(self, chosen: ChainFilter, order: Order, figures: str | None = None) -> ChainSource:
        """Where the chains that match are read from, in this order.

        For a figure over all of them, `figures` is the index that has its columns.
        """
        needed: Needed = "page" if figures is None else "scores" if figures == BY_REWARD else "count"
        return find_source(chosen, order, self._is_rare, texts=self._opened.texts, needed=needed)

    def _is_rare(self, table: str, condition: str, values: Sequence[Any], limit: int) -> bool:
        statement = f"SELECT count(*) FROM (SELECT 1 FROM {table} WHERE {condition} LIMIT {limit})"
        return bool(self._fetch(statement, values)[0][0] < limit)

    def _rows(self, condition: str, values: Sequence[Any], ends: float | None = None) -> list[ChainRow]:
        return [chain_row(row) for row in self._fetch(f"SELECT {_COLUMNS} FROM trajectories WHERE {condition}", values, ends)]

    def _cursor(self, order: Order, row: ChainRow) -> str:
        return Cursor(None if order.column == "key" else getattr(row, order.column), row.key).text

    def _distinct(self, table: str, column: str) -> list[Any]:
        """The values of the first column of an index: jumps from one to the next instead of reading every row."""
        statement = (
            f"WITH RECURSIVE found(value) AS (SELECT min({column}) FROM {table} UNION ALL "
            f"SELECT (SELECT min({column}) FROM {table} WHERE {column} > found.value) FROM found "
            "WHERE found.value IS NOT NULL) SELECT value FROM found WHERE value IS NOT NULL"
        )
        return [value for (value,) in self._fetch(statement)]

    def _fetch(self, statement: str, values: Sequence[Any] = (), ends: float | None = None) -> list[Any]:
        return list(self._iterate(statement, values, ends))

    def _iterate(self, statement: str, values: Sequence[Any] = (), ends: float | None = None) -> Iterator[Any]:
        """The rows of a statement, which may run until `ends`, or for `timeout_s`.

        Raises QueryTimeout, StorageError, and ConfigError for a value that SQLite cannot hold.
        """
        with self._lock, self._storage():
            self._deadline = time.monotonic() + self.timeout_s if ends is None else ends
            try:
                yield from self._execute(statement, values)
            finally:
                self._deadline = math.inf

    def _execute(self, statement: str, values: Sequence[Any]) -> sqlite3.Cursor:
        return self._opened.db.execute(statement, values)

    @contextmanager
    def _storage(self) -> Iterator[None]:
        try:
            yield
        except OverflowError as error:
            raise ConfigError(f"a number of the query is too large: {error}") from error
        except sqlite3.OperationalError as error:
            if "interrupted" in str(error):
                raise QueryTimeout(self._too_slow()) from error
            raise StorageError(f"the run store {self.path} cannot be read: {error}") from error
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.ProgrammingError):
                raise
            raise StorageError(f"the run store {self.path} cannot be read: {error}") from error

    def _too_slow(self) -> str:
        """What to tell about a query that was interrupted, with a filter that is narrower."""
        newest = self._opened.db.execute("SELECT max(step) FROM trajectories").fetchone()[0] or 0
        steps = f", for example to the steps from {newest - NEWEST_STEPS} on (step_low={newest - NEWEST_STEPS})"
        sentence = f"the query took longer than {self.timeout_s:g} s: narrow the filter"
        return sentence + (steps if newest > NEWEST_STEPS else ", for example to one step or one task")


def _needle(chosen: ChainFilter) -> bytes:
    return clean_text(chosen.text or "").encode().lower()


def _all(conditions: Sequence[str]) -> str:
    return " AND ".join(conditions) or "1"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _json(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
