"""Which chains a view shows, and in what order: `ChainFilter` and `SORTS`, as SQL."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

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
    to case; with `in_body`, in everything that is stored of the chain: all messages, calls and results.
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
        """Whether the indexes `schema.BY_STEP` and `BY_REWARD` have all columns of the conditions."""
        others = (self.task_id, self.draw, self.tool, self.trained, self.failed, self.text)
        return all(value is None for value in others)

    def conditions(self) -> tuple[list[str], list[Any]]:
        """SQL conditions without `tool`, which the reader adds, and their values."""
        found: list[tuple[str, Any]] = []
        for column in ("step", "split", "task_id", "draw", "outcome"):
            value = getattr(self, column)
            if value is not None:
                found.append((f"{column} = ?", clean_text(value) if isinstance(value, str) else value))
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
                found.append((condition, value))
        where, values = [condition for condition, _ in found], [value for _, value in found]
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

    def sql(self, *, by_index: bool = True) -> str:
        """The terms of ORDER BY. Without `by_index` the chains are sorted after they were read in the order of the table."""
        word, mark = "DESC" if self.descending else "ASC", "" if by_index else "+"
        return f"{mark}key {word}" if self.column == "key" else f"{mark}{self.column} {word}, key {word}"

    @property
    def beyond(self) -> str:
        return "<" if self.descending else ">"

    def ranges(self, cursor: Cursor | None) -> list[tuple[str, list[Any]]]:
        """The conditions of the parts of the list after the cursor, in order. Each part is sorted by `sql`.

        One range per statement keeps every page at the cost of its rows: chains with equal values are passed over by an index.
        """
        column, beyond = self.column, self.beyond
        if column == "key":
            return [("1", [])] if cursor is None else [(f"key {beyond} ?", [cursor.key])]
        missing = f"{column} IS NULL"
        if cursor is None:
            return [(f"{column} IS NOT NULL", []), (missing, [])]
        if cursor.value is None:
            return [(f"{missing} AND key {beyond} ?", [cursor.key])]
        return [
            (f"{column} = ? AND key {beyond} ?", [cursor.value, cursor.key]),
            (f"{column} {beyond} ?", [cursor.value]),
            (missing, []),
        ]


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


def clean_text(text: str) -> str:
    """The text as SQLite can hold it: half of a surrogate pair becomes a question mark. The body keeps it."""
    return text.encode("utf-8", "replace").decode("utf-8")
