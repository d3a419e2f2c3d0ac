"""Places in a list of chains: the cursor before a row number, and the row number of a chain.

A row number is counted in the index that the list is read from, so it costs the rows before it, but reads none of them.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..runs.filters import ChainFilter, Cursor, Order
from ..runs.query import RunReader


def cursor_before(reader: RunReader, chosen: ChainFilter, sort: str, offset: int) -> str | None:
    """The cursor after `offset` rows of the list; None at its beginning. Beyond the end, a cursor that no row follows.

    Raises ConfigError for a search in whole chains, whose rows are not counted.
    """
    if offset <= 0:
        return None
    order = _order(chosen, sort)
    source = reader.source(chosen, order)
    left, last = offset, Cursor(None, 0 if order.descending else 1 << 62)
    column = "NULL" if order.column == "key" else order.column
    for condition, more in order.ranges(None, source.key):
        rows = f"FROM {source.tables} WHERE {' AND '.join([condition, *source.where])}"
        statement = f"SELECT {column}, {source.key} {rows} ORDER BY {order.sql(source.key)} LIMIT 1 OFFSET ?"
        if found := reader._fetch(statement, (*more, *source.values, left - 1)):
            return Cursor(*found[0]).text
        left -= reader._fetch(f"SELECT count(*) {rows}", (*more, *source.values))[0][0]
    return last.text


def place_of(reader: RunReader, chosen: ChainFilter, sort: str, id: str) -> int | None:  # noqa: A002 - the name of the field
    """How many rows of the list come before the newest chain with this id; None if the list does not have it.

    Raises ConfigError if there is no such chain, and for a search in whole chains.
    """
    order, row = _order(chosen, sort), reader.row(id)
    source = reader.source(chosen, order)
    own = " AND ".join([f"{source.key} = ?", *source.where])
    if not reader._fetch(f"SELECT 1 FROM {source.tables} WHERE {own}", (row.key, *source.values)):
        return None
    value = None if order.column == "key" else getattr(row, order.column)
    count = 0
    for condition, more in _ranges_before(order, value, row.key, source.key):
        both = " AND ".join([condition, *source.where])
        count += reader._fetch(f"SELECT count(*) FROM {source.tables} WHERE {both}", (*more, *source.values))[0][0]
    return count


def _order(chosen: ChainFilter, sort: str) -> Order:
    if chosen.text and chosen.in_body:
        raise ConfigError("the rows of a search in whole chains are not counted: search without in=body to go to a row")
    return Order.parse(sort)


def _ranges_before(order: Order, value: float | None, key: int, name: str) -> list[tuple[str, list[Any]]]:
    """The conditions of the parts of a list before a row. Chains without a value come last."""
    column, before = order.column, ">" if order.descending else "<"
    if column == "key":
        return [(f"{name} {before} ?", [key])]
    if value is None:
        return [(f"{column} IS NOT NULL", []), (f"{column} IS NULL AND {name} {before} ?", [key])]
    return [(f"{column} {before} ?", [value]), (f"{column} = ? AND {name} {before} ?", [value, key])]
