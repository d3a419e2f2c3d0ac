"""The queries of the views agree with a plain loop over all chains, also while a run writes."""

from __future__ import annotations

import math
import sqlite3
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stores import Stored, random_chains
from test_run_store import chain

from agentfly.errors import ConfigError, QueryTimeout, StorageError
from agentfly.runs import ChainFilter, RunReader, RunStore
from agentfly.runs import schema as schema_module
from agentfly.runs.filters import SORTS
from agentfly.types import TokenRecord, Trajectory

CHAINS = random_chains(0)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    path = tmp_path_factory.mktemp("run") / "run.db"
    with RunStore(path) as store:
        for step, split, each in CHAINS:
            store.add_trajectories(step, split, [each])  # type: ignore[arg-type]
        for step in range(1, 6):
            store.add_metrics(step, {"reward/mean": step / 10, "odd": math.nan})
    return RunReader(path)


def score(each: Trajectory) -> float | None:
    return None if each.reward is None else each.total_reward


def points(each: Trajectory) -> float:
    """NaN, which compares with nothing, for a chain without a score."""
    return math.nan if each.reward is None else each.total_reward


def says(text: str) -> Callable[[Stored], bool]:
    """Whether a text is in the columns that are searched; upper and lower case are the same in ASCII."""
    return lambda stored: any(
        text.lower() in part.lower() for part in (stored[2].id, stored[2].task.id, stored[2].prediction, stored[2].error or "")
    )


FILTERS: list[tuple[ChainFilter, Callable[[Stored], bool]]] = [
    (ChainFilter(), lambda stored: True),
    (ChainFilter(step=2), lambda stored: stored[0] == 2),
    (ChainFilter(step_low=2, step_high=3, split="train"), lambda stored: stored[0] in (2, 3) and stored[1] == "train"),
    (ChainFilter(task_id="task 3"), lambda stored: stored[2].task.id == "task 3"),
    (ChainFilter(outcome="finished"), lambda stored: stored[2].outcome.value == "finished"),
    (ChainFilter(outcome="cancelled"), lambda stored: False),
    (ChainFilter(reward_low=0.0, reward_below=1.0), lambda stored: 0 <= points(stored[2]) < 1),
    (ChainFilter(reward_high=0.5), lambda stored: points(stored[2]) <= 0.5),
    (ChainFilter(min_tokens=2, max_tokens=4), lambda stored: 2 <= stored[2].num_sampled <= 4),
    (ChainFilter(min_turns=1, max_turns=1), lambda stored: len(stored[2].turns) == 1),
    (ChainFilter(text="forty_TWO"), says("forty_two")),
    (ChainFilter(text="50%"), says("50%")),
    (ChainFilter(text="ÄÖÜ"), says("ÄÖÜ")),
    (ChainFilter(text="worlderror", outcome="world_failure"), says("worlderror")),
    (ChainFilter(text="task 3", split="validation", reward_low=1.0),
     lambda stored: says("task 3")(stored) and stored[1] == "validation" and (score(stored[2]) or 0) >= 1),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FILTERS)))
def test_pages_counts_and_histograms_are_those_of_a_plain_loop(reader: RunReader, number: int) -> None:
    chosen, matches = FILTERS[number]
    wanted = [stored[2].id for stored in CHAINS if matches(stored)]
    for sort in [*SORTS, *(f"-{name}" for name in SORTS)]:
        assert sorted(ids(reader, chosen, sort, limit=7)) == sorted(wanted)
    assert reader.count(chosen).value == len(wanted)
    assert reader.count(chosen).exact
    scores = [score(stored[2]) for stored in CHAINS if matches(stored)]
    check_histogram(reader.histogram(chosen, bins=6), [each for each in scores if each is not None])


def ids(reader: RunReader, chosen: ChainFilter, sort: str, limit: int) -> list[str]:
    """All pages, which never overlap."""
    found: list[str] = []
    cursor: str | None = None
    while True:
        rows, cursor = reader.page(chosen, sort, cursor, limit)
        assert len(rows) <= limit
        found += [row.id for row in rows]
        if cursor is None:
            assert len(set(found)) == len(found)
            return found


def check_histogram(found: Any, scores: list[float]) -> None:
    assert sum(found.counts) == len(scores)
    if not scores:
        assert (found.edges, found.counts) == ([], [])
        return
    assert (found.edges[0], found.edges[-1], found.sampled) == (min(scores), max(scores), 1.0)
    if min(scores) < max(scores):
        width = (max(scores) - min(scores)) / 6
        places = Counter(min(5, int((each - min(scores)) * (1 / width))) for each in scores)
        assert found.counts == [places[index] for index in range(6)]


@pytest.mark.parametrize("chosen", [ChainFilter(), ChainFilter(split="train", outcome="finished"), ChainFilter(text="forty"),
                                    ChainFilter(tool="search"), ChainFilter(step=2), ChainFilter(reward_low=1.0)])  # fmt: skip
def test_an_offset_begins_the_page_at_that_place_of_the_list(reader: RunReader, chosen: ChainFilter) -> None:
    for sort in [*SORTS, *(f"-{name}" for name in SORTS)]:
        every = ids(reader, chosen, sort, 1000)
        for offset in (0, 1, len(every) // 2, len(every) - 3, len(every), len(every) + 50):
            rows, cursor = reader.page(chosen, sort, None, 5, max(0, offset))
            assert [row.id for row in rows] == every[max(0, offset) :][:5], (sort, offset)
            if cursor is not None:
                rest, _ = reader.page(chosen, sort, cursor, 1000)
                assert [row.id for row in rest] == every[max(0, offset) + 5 :]


def test_a_search_in_whole_chains_has_no_offset(reader: RunReader) -> None:
    with pytest.raises(ConfigError, match="give a cursor, not an offset"):
        reader.page(ChainFilter(text="needle", in_body=True), offset=5)


KEYS: dict[str, Callable[[Trajectory], float | None]] = {
    "reward": score, "tokens": lambda each: each.num_sampled, "turns": lambda each: len(each.turns),
    "seconds": lambda each: each.seconds,
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("descending", [False, True])
def test_a_sorted_list_is_sorted_with_ties_by_age_and_missing_values_last(
    reader: RunReader, name: str, descending: bool
) -> None:
    key, sign = KEYS[name], -1 if descending else 1
    numbered = [(number, key(stored[2]), stored[2].id) for number, stored in enumerate(CHAINS)]
    wanted = sorted(numbered, key=lambda each: (each[1] is None, sign * (each[1] or 0), sign * each[0]))
    assert ids(reader, ChainFilter(), f"{'-' * descending}{name}", 11) == [each[2] for each in wanted]


def called_by(each: Trajectory) -> set[str]:
    return {call.name for turn in each.turns for call in turn.calls}


def test_a_chain_is_found_by_the_tools_that_it_called(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run.db") as store:
        for step, split, each in CHAINS:
            store.add_trajectories(step, split, [each])  # type: ignore[arg-type]
        with RunReader(tmp_path) as found:
            assert found.tool_names() == ["add", "search"]
            for limit in (3, 2000):  # a rare tool, and one that many chains called
                monkey = pytest.MonkeyPatch()
                with monkey.context() as patch:
                    patch.setattr("agentfly.runs.filters.RARE", limit)
                    for tool in ("add", "search", "none"):
                        wanted = [each.id for _, _, each in CHAINS if tool in called_by(each)]
                        chosen = ChainFilter(tool=tool)
                        for sort in ("added", "-reward"):
                            assert sorted(ids(found, chosen, sort, 9)) == sorted(wanted)
                        assert found.count(chosen).value == len(wanted)
                        scores = [score(each) for _, _, each in CHAINS if each.id in set(wanted)]
                        check_histogram(found.histogram(chosen, bins=6), [each for each in scores if each is not None])


def test_a_histogram_that_takes_too_long_is_a_sample_of_all_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunStore(tmp_path / "run.db") as store:
        for step in range(1, 65):
            chains = [replace(each, id=f"{step}-{place}", reward=step / 64) for place, (_, _, each) in enumerate(CHAINS[:20])]
            store.add_trajectories(step, "train", chains)
    chosen = ChainFilter(text="task")
    with RunReader(tmp_path) as found:
        whole = found.histogram(chosen, bins=4)
        monkeypatch.setattr("agentfly.runs.query.SAMPLE_PARTS", 10)
        assert found.histogram(chosen, bins=4) == whole
        # Every look at the clock costs a fifteenth of the time.
        clock = (0.02 * tick for tick in range(10**6))
        monkeypatch.setattr("agentfly.runs.query.time.monotonic", clock.__next__)
        part = found.histogram(chosen, bins=4)
    assert 0.05 < part.sampled < 0.3
    assert sum(part.counts) == pytest.approx(sum(whole.counts), rel=0.01)
    assert min(part.counts) > 0, "the sample has chains of every quarter of the run"


def test_a_search_in_whole_chains_goes_on_where_its_time_was_up(reader: RunReader, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ChainFilter(text="NEEDLE", in_body=True)
    wanted = [each.id for _, _, each in CHAINS if any(call.arguments["q"] == "needle" for t in each.turns for call in t.calls)]
    assert ids(reader, chosen, "added", 5) == wanted
    assert ids(reader, chosen, "-added", 5) == wanted[::-1]
    assert reader.count(chosen).value == len(wanted) > 3
    monkeypatch.setattr("agentfly.runs.query._SCAN", 4)
    assert ids(reader, chosen, "added", 5) == wanted
    # Every look at the clock costs a second.
    monkeypatch.setattr("agentfly.runs.query.time.monotonic", iter(range(10**6)).__next__)
    assert ids(reader, chosen, "added", 1000) == wanted
    assert not reader.count(chosen).exact
    with pytest.raises(ConfigError, match="sort by added"):
        reader.page(chosen, "-reward")


def test_a_search_in_summaries_goes_on_where_its_time_was_up(reader: RunReader, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [stored[2].id for stored in CHAINS if says("forty")(stored)]
    monkeypatch.setattr("agentfly.runs.query._RANGE", 7)
    monkeypatch.setattr("agentfly.runs.query.time.monotonic", iter(range(10**6)).__next__)
    chosen = ChainFilter(text="forty")
    assert reader.page(chosen, "added")[1] is not None, "the time was up"
    assert ids(reader, chosen, "added", 1000) == wanted
    assert ids(reader, chosen, "-added", 3) == wanted[::-1]


def test_a_query_that_takes_too_long_is_interrupted(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run.db") as store:
        store.add_trajectories(1, "train", [chain(f"c{number}") for number in range(3000)])
    with RunReader(tmp_path, timeout_s=-1.0) as late:
        with pytest.raises(QueryTimeout, match="narrow the filter"):
            late.page(ChainFilter(text="ze"))  # too short for the full-text index
        assert late.count(ChainFilter(min_tokens=0)).exact is False
        with pytest.raises(QueryTimeout, match="for example to one step"):
            late.histogram(ChainFilter(text="ze"))
        late.timeout_s = 30.0
        assert late.count(ChainFilter(text="zebra")).value == 0


@pytest.mark.parametrize(
    "cursor", ["", "x", "[1]", "[1,2,3]", '["a",1]', "[null,1.5]", "[NaN,1]", "[true,1]", f"[0,{10**30}]", "[" * 9000]
)
def test_a_cursor_that_is_none_is_one_sentence(reader: RunReader, cursor: str) -> None:
    with pytest.raises(ConfigError, match="is not a cursor"):
        reader.page(cursor=cursor)


def test_what_cannot_be_asked_is_one_sentence(reader: RunReader) -> None:
    with pytest.raises(ConfigError, match="cannot be sorted by 'body'"):
        reader.page(sort="body")
    with pytest.raises(ConfigError, match="too large"):
        reader.page(ChainFilter(step=10**30))
    with pytest.raises(ConfigError, match="no trajectory 'none'"):
        reader.trajectory("none")
    with pytest.raises(ConfigError, match="no run store"):
        RunReader(reader.path.parent / "other.db")


def test_series_are_in_the_order_of_the_steps(reader: RunReader) -> None:
    assert reader.metric_names() == ["odd", "reward/mean"]
    found = reader.series(["reward/mean", "odd", "none"], after_step=2)
    assert [(step, value) for step, _, value in found["reward/mean"]] == [(3, 0.3), (4, 0.4), (5, 0.5)]
    assert [value for _, _, value in found["odd"]] == [None] * 3
    assert found["none"] == []
    assert all(at is not None for _, at, _ in found["reward/mean"])


def test_steps_and_groups_have_the_figures_of_their_chains(reader: RunReader) -> None:
    for row in reader.outcomes_by_step():
        chains = [each for step, split, each in CHAINS if (step, split) == (row.step, row.split)]
        scores = sorted(each for each in map(score, chains) if each is not None)
        assert row.outcomes == Counter(each.outcome.value for each in chains)
        assert (row.chains, row.scored, row.quantiles[0], row.quantiles[-1]) == (
            len(chains),
            len(scores),
            scores[0],
            scores[-1],
        )
        assert row.mean == pytest.approx(statistics.fmean(scores))
    assert {(row.step, row.split) for row in reader.outcomes_by_step()} == {(step, split) for step, split, _ in CHAINS}
    assert [row.step for row in reader.outcomes_by_step(after_step=4)] == [5, 5]
    for group in reader.groups(2):
        rows = reader.group(2, group.task_id, group.draw)
        wanted = [
            each
            for step, split, each in CHAINS
            if (step, split, each.task.id, each.draw) == (2, "train", group.task_id, group.draw)
        ]
        assert sorted(row.id for row in rows) == sorted(each.id for each in wanted)
        scores = [each for each in map(score, wanted) if each is not None]
        assert (group.chains, group.scored, group.low) == (len(wanted), len(scores), min(scores, default=None))
        assert group.teaches == (len(set(scores)) > 1)
    assert (reader.values("split"), reader.values("step")) == (["train", "validation"], [1, 2, 3, 4, 5])
    assert reader.values("outcome") == sorted({each.outcome.value for _, _, each in CHAINS})


def test_a_chain_comes_back_whole_with_its_summary(reader: RunReader) -> None:
    for _, split, each in CHAINS[:20]:
        assert reader.trajectory(each.id) == each
        row = reader.row(each.id)
        assert (row.id, row.split, row.score, row.num_tokens) == (each.id, split, score(each), each.num_sampled)
        assert row.num_calls == sum(len(turn.calls) for turn in each.turns)
        assert (row.generate_s, row.tool_s) == (0.25 * len(each.turns), 0.5 * len(each.turns))
        assert reader.token_series(each.id).trained == (None if split == "train" else [False] * each.num_sampled)


def test_a_reader_sees_what_is_written_and_that_it_was(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run.db") as store, RunReader(tmp_path) as found:
        before = found.data_version()
        assert found.data_version() == before
        assert (found.page(), found.last_step(), found.histogram().counts) == (([], None), None, [])
        store.add_trajectories(1, "train", [chain("a")])
        assert found.data_version() != before
        (row,), _ = found.page()
        assert (row.advantage, row.num_trained, found.outcomes_by_step()[0].whole) == (None, None, False)
        records = [TokenRecord("a", 0.5, 1, {"trained": ("B", b"\x01\x00")}), TokenRecord("gone", 0.5, 1)]
        store.add_tokens(1, records)
        store.add_metrics(1, {"m": 1.0})
        assert found.token_series("a").trained == [True, False]
        assert found.token_series("a").advantage == [0.5, 0.5]
        assert found.outcomes_by_step()[0].whole
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            found._opened.db.execute("DELETE FROM metrics")


def test_a_file_whose_folder_cannot_be_written_is_read_also_with_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite refuses mode=ro there. Without a log the file is complete; with one, both are copied."""
    store = RunStore(tmp_path / "run.db")
    store.add_trajectories(1, "train", [chain("a")])
    opened: list[str] = []
    real = schema_module._open

    def refuse(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
        opened.append(mode)
        if mode == "mode=ro":
            raise sqlite3.OperationalError("unable to open database file")
        return real(path, mode, timeout_s)

    monkeypatch.setattr(schema_module, "_open", refuse)
    with RunReader(tmp_path) as found:
        assert found._opened.copied is not None
        assert found.num_chains() == 1
        copied = found._opened.copied
    assert not copied.exists()
    store.close()
    (tmp_path / "run.db-wal").unlink(missing_ok=True)
    with RunReader(tmp_path) as found:
        assert (found._opened.copied, found.num_chains()) == (None, 1)
    assert opened == ["mode=ro", "mode=rw", "mode=ro", "mode=ro&immutable=1"]


def test_a_series_of_an_unknown_type_is_one_sentence(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run.db") as store:
        store.add_trajectories(1, "train", [chain("a")])
        store.add_tokens(1, [TokenRecord("a", 0.5, 2, {"own": ("x", b"\x01\x00")})])
        with RunReader(tmp_path) as found, pytest.raises(StorageError, match="unknown type 'x'"):
            found.token_series("a")
