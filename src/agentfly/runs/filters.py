"""Which chains a view shows, and in what order: `ChainFilter` and `SORTS` as SQL, and the index that they are read by."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import ConfigError
from .bodies.texts import clean_text as clean_text
from .bodies.texts import match_trigrams, match_words
from .schema import BY_OUTCOME, BY_STEP, BY_TASK, FAILED, SORTED

SORTS: dict[str, str] = {
    "added": "key",
    "step": "key",
    "reward": "score",
    "advantage": "advantage",
    "tokens": "num_tokens",
    "turns": "num_turns",
    "seconds": "seconds",
    "calls": "num_calls",
}
"""Names to sort by. A leading "-" sorts from the largest; chains without the value come last in both directions."""
SEARCHED = ("id", "task_id", "prediction", "error")
"""The columns that `ChainFilter.text` is looked for in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFilter:
    """Conditions on chains. None is no condition.

    Rewards are total rewards of scored chains, so a chain whose world failed has none. `reward_low` and `reward_high` are
    inclusive, `reward_below` is exclusive: a bar of a histogram is `reward_low` to `reward_below`, the last one `reward_low`
    to `reward_high`. `text` is looked for in the id, the task, the prediction (300 characters) and the error, without regard
    to case; with `in_body`, in everything that is stored of the chain: all messages, calls and results. There it has to begin
    where a word begins, because words are indexed: "err" finds "error", "rror" does not.
    """

    step: int | None = None
    step_low: int | None = None
    step_high: int | None = None
    split: str | None = None
    task_id: str | None = None
    draw: int | None = None
    outcome: str | None = None
    tool: str | None = None
    reward_low: float | None = None
    reward_high: float | None = None
    reward_below: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    min_turns: int | None = None
    max_turns: int | None = None
    trained: bool | None = None
    failed: bool | None = None
    text: str | None = None
    in_body: bool = False

    @property
    def covered(self) -> bool:
        """Whether the indexes `schema.BY_STEP` and those of `schema.SORTED` have all columns of the conditions."""
        others = (self.task_id, self.draw, self.tool, self.trained, self.failed, self.text)
        return all(value is None for value in others)

    def conditions(self) -> tuple[list[str], list[Any]]:
        """SQL conditions without `tool`, which the reader adds, and their values."""
        pairs: list[tuple[str, Any]] = []
        for column in ("step", "split", "task_id", "draw", "outcome"):
            value = getattr(self, column)
            if value is not None:
                pairs.append((f"{column} = ?", clean_text(value) if isinstance(value, str) else value))
        for condition, value in (
            ("step >= ?", self.step_low),
            ("step <= ?", self.step_high),
            ("score >= ?", self.reward_low),
            ("score <= ?", self.reward_high),
            ("score < ?", self.reward_below),
            ("num_tokens >= ?", self.min_tokens),
            ("num_tokens <= ?", self.max_tokens),
            ("num_turns >= ?", self.min_turns),
            ("num_turns <= ?", self.max_turns),
        ):
            if value is not None:
                pairs.append((condition, value))
        where, values = [condition for condition, _ in pairs], [value for _, value in pairs]
        if self.trained is not None:
            where.append("num_trained > 0" if self.trained else "(num_trained IS NULL OR num_trained = 0)")
        if self.failed is not None:
            where.append(f"error IS {'NOT ' if self.failed else ''}NULL")
        if self.text and not self.in_body:
            like = "%" + clean_text(self.text).replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
            where.append("(" + " OR ".join(f"{column} LIKE ? ESCAPE '\\'" for column in SEARCHED) + ")")
            values += [like] * len(SEARCHED)
        return where, values


@dataclass(frozen=True, slots=True)
class Order:
    """A column to sort by. The key of the chain breaks ties, in the same direction."""

    column: str
    descending: bool

    @classmethod
    def parse(cls, sort: str) -> Order:
        """Raises ConfigError for a name that is not in SORTS."""
        name = sort.removeprefix("-")
        if name not in SORTS:
            raise ConfigError(f"chains cannot be sorted by {name!r}; choose one of {', '.join(SORTS)}")
        return cls(SORTS[name], sort.startswith("-"))

    def sql(self, key: str = "key", *, by_index: bool = True) -> str:
        """The terms of ORDER BY. `key` is the expression of the key. Without `by_index` the chains are sorted after reading."""
        word, mark = "DESC" if self.descending else "ASC", "" if by_index else "+"
        return f"{mark}{key} {word}" if self.column == "key" else f"{mark}{self.column} {word}, {mark}{key} {word}"

    @property
    def beyond(self) -> str:
        return "<" if self.descending else ">"

    def ranges(self, cursor: Cursor | None, key: str = "key") -> list[tuple[str, list[Any]]]:
        """The conditions of the parts of the list after the cursor, in order. Each part is sorted by `sql`.

        One range per statement keeps every page at the cost of its rows: chains with equal values are passed over by an index.
        """
        column, beyond = self.column, self.beyond
        if column == "key":
            return [("1", [])] if cursor is None else [(f"{key} {beyond} ?", [cursor.key])]
        missing = f"{column} IS NULL"
        if cursor is None:
            return [(f"{column} IS NOT NULL", []), (missing, [])]
        if cursor.value is None:
            return [(f"{missing} AND {key} {beyond} ?", [cursor.key])]
        return [
            (f"{column} = ? AND {key} {beyond} ?", [cursor.value, cursor.key]),
            (f"{column} {beyond} ?", [cursor.value]),
            (missing, []),
        ]

    def ranges_before(self, cursor: Cursor, key: str = "key") -> list[tuple[str, list[Any]]]:
        """The conditions of the parts of the list before the cursor. Chains without a value come last."""
        column, before = self.column, ">" if self.descending else "<"
        if column == "key":
            return [(f"{key} {before} ?", [cursor.key])]
        if cursor.value is None:
            return [(f"{column} IS NOT NULL", []), (f"{column} IS NULL AND {key} {before} ?", [cursor.key])]
        return [(f"{column} {before} ?", [cursor.value]), (f"{column} = ? AND {key} {before} ?", [cursor.value, cursor.key])]


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last chain of a page: the value it is sorted by, and its key. `text` is safe in a URL after quoting."""

    value: float | None
    key: int

    @property
    def text(self) -> str:
        return json.dumps([self.value, self.key], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Raises ConfigError."""
        try:
            value, key = json.loads(text)
            if type(key) is not int or type(value) not in (int, float, type(None)) or abs(key) >= 1 << 63:
                raise TypeError("its parts are not numbers")
            value = None if value is None else float(value)
            if value is not None and math.isnan(value):
                raise ValueError("its value is not a number")
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{text[:80]!r} is not a cursor: {error}") from None
        return cls(value, key)


RARE = 2_000
"""What fewer chains than this have is found by its own index, and the chains are then read and sorted."""
RARE_COVERED = 20_000
"""The same for a condition whose index has all columns of the usual filters: no chain need be read to filter it."""
Needed = Literal["page", "count", "scores"]
IsRare = Callable[[str, str, Sequence[Any], int], bool]
"""Whether fewer rows than a limit match: table, condition, its values, limit."""


@dataclass(frozen=True, slots=True)
class ChainSource:
    """Where the chains that match are read from: FROM and WHERE of a statement, and the expression of their key in it.

    `parts` says that many rows may be read: what is only counted can be read one range of keys after the other.
    """

    tables: str
    where: list[str]
    values: list[Any]
    key: str = "trajectories.key"
    parts: bool = False
    index: str | None = None


def find_source(chosen: ChainFilter, order: Order, is_rare: IsRare, *, texts: bool, needed: Needed = "page") -> ChainSource:
    """The source of a store. `texts` says whether the store has full-text indexes.

    `needed` is a page, which reads the first chains that match, or all that match: their keys (a count) or their scores.
    What few chains have is looked up in its own index, then a text in its index, then a tool. What is left is the index of the
    order, which is read from its beginning: it has the columns of the usual filters, so 100,000 chains that do not match cost
    about 15 ms.
    """
    where, values = chosen.conditions()
    match = _match(chosen) if texts else None
    by_key, called = order.column == "key", list[Any]()
    if chosen.tool is not None:
        called = [clean_text(chosen.tool)]
        chains = f"trajectories INDEXED BY {SORTED['key']}" if replace(chosen, tool=None).covered else "trajectories"
        both = ["calls.name = ?", "trajectories.key = calls.key", *where]
        joined = ChainSource(f"calls CROSS JOIN {chains}", both, [*called, *values], "calls.key", parts=True)
        if match is None and is_rare("calls", "name = ?", called, RARE):
            return joined
        where = [*where, "EXISTS (SELECT 1 FROM calls WHERE calls.name = ? AND calls.key = trajectories.key)"]
        values = [*values, *called]
    if match is not None and chosen.in_body:
        return _in_bodies(chosen, match, where, values)
    reads = bool(chosen.text)  # whether each chain is read: its index does not have its texts
    for index, names, limit in (
        (BY_STEP, ("step", "step_low", "step_high"), RARE if reads else RARE_COVERED),
        (BY_TASK, ("task_id",), RARE if reads else RARE_COVERED),
        (SORTED["score"], ("reward_low", "reward_high", "reward_below"), RARE if reads else RARE_COVERED),
        (SORTED["num_tokens"], ("min_tokens", "max_tokens"), RARE if reads else RARE_COVERED),
        (BY_OUTCOME, ("outcome",), RARE),
        (FAILED, ("failed",), RARE),
    ):
        own = {name: getattr(chosen, name) for name in names}
        if any(value is not None and value is not False for value in own.values()):
            conditions, bounds = ChainFilter(**own).conditions()
            source = ChainSource(f"trajectories INDEXED BY {index}", where, values, index=index)
            # The indexes of the orders do not have these columns: to read all that match there, every chain is read.
            alone = needed != "page" and not reads and index in (BY_TASK, FAILED)
            if alone or is_rare(source.tables, " AND ".join(conditions), bounds, limit):
                return source
    if match is not None:
        where = ["summary_texts MATCH ?", "trajectories.key = summary_texts.rowid", *where]
        return ChainSource("summary_texts CROSS JOIN trajectories", where, [match, *values], "summary_texts.rowid", parts=True)
    if called and by_key:
        alone = needed != "scores" and chosen == ChainFilter(tool=chosen.tool)
        return ChainSource("calls", ["calls.name = ?"], called, "calls.key", parts=True) if alone else joined
    # The chains that were not trained are few, and the index of the advantages has that column.
    learned = chosen.trained is False or (chosen.trained is not None and needed != "page")
    column = "advantage" if learned else order.column
    return ChainSource(f"trajectories INDEXED BY {SORTED[column]}", where, values, parts=column == "key", index=SORTED[column])


def _in_bodies(chosen: ChainFilter, match: str, where: list[str], values: list[Any]) -> ChainSource:
    """The index of the words, in the range of keys that the chosen steps have."""
    steps, bounds = ChainFilter(step=chosen.step, step_low=chosen.step_low, step_high=chosen.step_high).conditions()
    if steps:
        own = f"FROM trajectories INDEXED BY {BY_STEP} WHERE {' AND '.join(steps)}"
        where = [f"texts.rowid BETWEEN (SELECT min(key) {own}) AND (SELECT max(key) {own})", *where]
        values = [*bounds, *bounds, *values]
    where = ["texts MATCH ?", "trajectories.key = texts.rowid", *where]
    return ChainSource("texts CROSS JOIN trajectories", where, [match, *values], "texts.rowid", parts=True)


def _match(chosen: ChainFilter) -> str | None:
    """The query of the full-text index, None if it has to be looked for otherwise."""
    if not chosen.text:
        return None
    text = clean_text(chosen.text)
    return match_words(text) if chosen.in_body else match_trigrams(text)
