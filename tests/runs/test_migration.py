"""A run of an earlier format is read as it is, and rewritten with a backup when it is opened for writing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from stores import random_chains, write_format_1, write_format_2
from test_run_store import chain

from agentfly.errors import StorageError
from agentfly.runs import ChainFilter, RunReader, RunStore
from agentfly.runs import store as store_module
from agentfly.runs.rows import columns_of
from agentfly.runs.schema import CHAIN_COLUMNS

CHAINS = random_chains(3)
METRICS = {step: {"reward/mean": 0.1 * step, "train/loss": 1.0} for step in range(1, 6)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_format_1(tmp_path / "run.db", CHAINS, METRICS)
    return tmp_path / "run.db"


def content(path: Path) -> tuple[list[object], ...]:
    with RunStore(path, readonly=True) as store:
        return store.metrics(), store.rows(limit=1000), store.trajectories(limit=1000), [body for _, body in store.scan()]  # type: ignore[return-value]


def test_reading_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    with RunReader(path) as reader:
        assert reader.num_chains() == len(CHAINS)
    content(path)
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*format-1*"))


def test_opening_for_writing_keeps_every_record_and_a_copy_of_the_old_file(path: Path) -> None:
    before = content(path)
    RunStore(path).close()
    assert content(path) == before
    with RunReader(path) as reader, RunStore(path, readonly=True) as store:
        assert reader.format == 3
        assert store.meta() == {"migrated_from": 1}
        for (step, split, each), (row, _) in zip(CHAINS, store.scan(), strict=True):
            stored, made = reader.row(row.id), columns_of(step, split, each)
            assert {name: getattr(stored, name) for name in CHAIN_COLUMNS} == {
                **{name: made.get(name) for name in CHAIN_COLUMNS},
                "components": each.components,
                "wait_s": None,  # was not recorded
                **({} if each.turns else {"generate_s": None, "tool_s": None}),
            }
        assert all(row.whole for row in reader.outcomes_by_step())
        called = sum(len(turn.calls) for _, _, each in CHAINS for turn in each.turns)
        assert sum(tool.calls for tool in reader.tools()) == called
        assert sum(tool.calls for step in range(1, 6) for tool in reader.tools(step)) == called
        assert reader.count(ChainFilter(tool="add")).value > 0
    backup = path.with_name("run.format-1.db")
    assert content(backup) == before
    with closing(sqlite3.connect(backup)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)


def test_a_run_of_format_2_gets_its_indexes_and_keeps_every_record(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    write_format_2(path, CHAINS, METRICS)
    before, tables = content(path), table_contents(path)
    with RunReader(path) as reader:
        found = {text: searched(reader, text) for text in ("needle", "task 3", "ÄÖÜ", "_tw")}
        assert (reader.format, all(found.values())) == (2, True)
    RunStore(path).close()
    assert content(path) == before
    with RunReader(path) as reader:
        assert reader.format == 3
        assert reader.meta() == {"migrated_from": 2}
        assert {text: searched(reader, text) for text in found} == found
        made, created = schema_of(path), schema_of(empty_store(tmp_path))
        assert made == created
    assert table_contents(path) | {"meta": []} == tables
    backup = path.with_name("run.format-2.db")
    assert table_contents(backup) == tables
    with closing(sqlite3.connect(backup)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (2,)


def searched(reader: RunReader, text: str) -> list[list[str]]:
    """What a text finds in the summaries and in whole chains."""
    return [[row.id for row in reader.page(ChainFilter(text=text, in_body=whole), limit=1000)[0]] for whole in (False, True)]


def empty_store(folder: Path) -> Path:
    RunStore(folder / "empty.db").close()
    return folder / "empty.db"


def schema_of(path: Path) -> set[tuple[str, str]]:
    with closing(sqlite3.connect(path)) as db:
        found = db.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_stat%'")
        return {(name, " ".join((sql or "").split())) for name, sql in found}


def table_contents(path: Path) -> dict[str, list[object]]:
    """The rows of every table that is not a full-text index."""
    with closing(sqlite3.connect(path)) as db:
        tables = [name for name, _ in schema_of(path) if db.execute(f"PRAGMA table_info({name})").fetchall()]
        kept = [name for name in tables if "texts" not in name and "_by_" not in name]
        return {name: db.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in kept}


def test_a_migrated_run_goes_on(path: Path) -> None:
    with RunStore(path) as store:
        store.truncate_after(3)
        store.add_trajectories(4, "train", [chain("new")])
        store.add_metrics(4, {"reward/mean": 1.0})
    with RunReader(path) as reader:
        assert reader.last_step() == 4
        assert reader.row("new").num_context == 2
        assert sum(tool.calls for tool in reader.tools()) == sum(tool.calls for s in range(1, 4) for tool in reader.tools(s))


def test_a_migration_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(path)

    def break_off(db: sqlite3.Connection, found: int) -> None:
        db.execute("ALTER TABLE metrics RENAME TO old_metrics")
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "migrate", break_off)
        with pytest.raises(StorageError, match="disk is full"):
            RunStore(path)
    with RunReader(path) as reader:
        assert reader.format == 1
    assert content(path) == before
    RunStore(path).close()
    assert content(path) == before


def test_a_body_that_cannot_be_read_keeps_its_columns(path: Path) -> None:
    name = CHAINS[7][2].id
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE trajectories SET body = x'0300' WHERE id = ?", (name,))
    with RunReader(path) as reader:
        before = reader.row(name)
    RunStore(path).close()
    with RunReader(path) as reader:
        assert reader.row(name) == before


def test_a_copy_of_a_run_that_is_being_written_is_complete(tmp_path: Path) -> None:
    """Nearly everything is in the log (run.db-wal): a copy of run.db alone would be empty."""
    with RunStore(tmp_path / "run.db") as store:
        store.add_trajectories(1, "train", [chain("a"), chain("b")])
        with RunStore(tmp_path / "run.db", readonly=True) as watcher:
            watcher.backup(tmp_path / "copy.db")
        assert (tmp_path / "run.db-wal").stat().st_size > 0
    assert content(tmp_path / "copy.db") == content(tmp_path / "run.db")
    assert not list(tmp_path.glob(".copy*"))
