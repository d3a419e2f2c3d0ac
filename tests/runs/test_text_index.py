"""A search finds by the full-text index what a plain loop over all texts finds, also after a kill and a resume."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from stores import random_chains
from test_run_store import chain

from agentfly.runs import ChainFilter, RunReader, RunStore, encode
from agentfly.runs import query as query_module
from agentfly.runs import schema as schema_module
from agentfly.runs.bodies.texts import MAX_TRIGRAMS, match_trigrams, match_words, texts_of
from agentfly.runs.codec import body_contains
from agentfly.types import Message, Task, ToolCall, ToolResult, Trajectory

WORDS = ("river", "city", "Zürich", "ZÜRICH", 'a"quote"', "100%", "x_y", "naïve", "北京大学", "if (a < b)", "\tt", "'single'")
NEEDLES = (
    "river", "RIVER", "iver", "er ci", "river city", "river ci", "city riv", "Zürich", "ürich", "zürich", '"quote', 'a"q',
    "00%", "x_y", "北京大", "北京", "京大", "x", "(a < b", "\tt", "'sin", "no such text", "rivercity", "\n", "finished",
    "assistant", "AND", "river AND city", "river city*", "task-1", "deep", "é", "a", "naïve", "NAÏVE", "c1", "c17",
    "%", "river  city",
)  # fmt: skip


def made_up(count: int) -> list[Trajectory]:
    """Chains with texts in every place that a chain has one."""
    rng = random.Random(5)

    def text(words: int = 3) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    found = []
    for number in range(count):
        each = chain(f"c{number}", task=f"task-{number % 7}")
        task = Task(each.task.id, (Message("user", text()),), {"answer": text(1), "more": [{"deep": text(1)}, (text(1),)]})
        turn = each.turns[0]
        call = ToolCall("search", {"query": text(2)}, error=text(1))
        turn = replace(
            turn, completion=replace(turn.completion, text=text()), calls=(call,), results=(ToolResult(observation=text(2)),)
        )
        messages = [Message("user", text()), Message("assistant", text(), (call,)), Message("tool", text(), name=text(1))]
        found.append(
            replace(each, task=task, turns=[turn], messages=messages, prediction=text(2), components={text(1): 1.0},
                    error=text(1) if number % 5 == 0 else None)
        )  # fmt: skip
    return found


CHAINS = made_up(60)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with RunStore(tmp_path / "run.db") as store:
        for step in range(6):
            store.add_trajectories(step + 1, "train", CHAINS[10 * step : 10 * step + 10])
    return tmp_path / "run.db"


def held(each: Trajectory, text: str) -> bool:
    """Whether the bytes that are stored of a chain hold the text, upper and lower case alike in ASCII.

    If the index of words can find it, it has to begin where a word begins.
    """
    if match_words(text) is None:
        return body_contains(encode(each), text.encode().lower())
    whole, text = ("".join(sign.lower() if sign.isascii() else sign for sign in part) for part in (texts_of(each), text))
    places = [found.start() for found in re.finditer(f"(?={re.escape(text)})", whole)]
    return any(at == 0 or not (whole[at - 1].isalnum() and whole[at].isalnum()) for at in places)


def in_summary(each: Trajectory, text: str) -> bool:
    parts = (each.id, each.task.id, each.prediction, each.error or "")
    return any(text.encode().lower() in part.encode().lower() for part in parts)


def every(reader: RunReader, chosen: ChainFilter, sort: str = "added") -> Iterator[str]:
    cursor: str | None = None
    while True:
        rows, cursor = reader.page(chosen, sort, cursor, 7)
        yield from (row.id for row in rows)
        if cursor is None:
            return


@pytest.mark.parametrize("text", NEEDLES)
def test_it_finds_what_a_plain_loop_finds(path: Path, text: str) -> None:
    wanted = [each.id for each in CHAINS if held(each, text)]
    listed = [each.id for each in CHAINS if in_summary(each, text)]
    with RunReader(path) as reader:
        assert reader._opened.texts
        assert list(every(reader, ChainFilter(text=text, in_body=True))) == wanted
        assert list(every(reader, ChainFilter(text=text, in_body=True), "-added")) == wanted[::-1]
        assert reader.count(ChainFilter(text=text, in_body=True)).value == len(wanted)
        assert list(every(reader, ChainFilter(text=text))) == listed
        for sort in ("-reward", "tokens", "advantage"):
            assert sorted(every(reader, ChainFilter(text=text), sort)) == sorted(listed)
        assert reader.count(ChainFilter(text=text)).value == sum(reader.histogram(ChainFilter(text=text)).counts) == len(listed)
        narrow = ChainFilter(text=text, in_body=True, step=2, tool="search", outcome="finished")
        assert list(every(reader, narrow)) == [each.id for each in CHAINS[10:20] if held(each, text)]


def test_a_text_that_no_chain_holds_reads_no_chain(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(query_module, "body_contains", lambda body, needle: read.append(needle) or False)
    with RunReader(path) as reader:
        assert reader.page(ChainFilter(text="zebra", in_body=True)) == ([], None)
        assert reader.count(ChainFilter(text="zebra", in_body=True)).value == 0
        assert read == []
        reader.page(ChainFilter(text="ze", in_body=True))
        assert len(read) == len(CHAINS), "a text that is too short for the index is looked for in every chain"


def test_the_texts_of_a_chain_hold_every_text_that_is_stored() -> None:
    for _, _, each in random_chains(7):
        text = texts_of(each)
        parts = (each.id, each.prediction, each.outcome.value, each.task.messages[0].content)
        assert all(part in text for part in parts)
        for turn in each.turns:
            assert all(call.arguments["q"] in text for call in turn.calls)
    deep: dict[str, object] = {}
    deep["self"] = deep
    cyclic = replace(chain("a"), task=Task("t", (), {"cycle": deep, "odd": {1: b"bytes"}, "half": "\ud800"}))
    assert "bytes" in texts_of(cyclic)


def test_a_long_text_asks_for_a_few_of_its_trigrams() -> None:
    assert match_trigrams("ab") is None
    assert match_trigrams("\0\0\0") is None
    assert match_trigrams('a"b') == '"a""b"'
    assert (match_trigrams("".join(map(chr, range(50, 120)))) or "").count(" AND ") < MAX_TRIGRAMS


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("river", '"river" *'), ("river ", '"river"'), ("the Rive", '"the Rive" *'), ("the ri", '"the"'), ("ri", None),
        ("self._lock(", '"self lock"'), ("...", None), ("", None), ("北京大学", None), ("i\u0308n it", None),
        ('say "no" to', '"say no"'),
    ],
)  # fmt: skip
def test_an_unfinished_word_is_looked_for_by_its_beginning(text: str, asked: str | None) -> None:
    assert match_words(text) == asked


def test_a_key_that_is_used_again_finds_only_its_new_chain(path: Path) -> None:
    with RunStore(path) as store:
        store.truncate_after(3)
        store.add_trajectories(4, "train", [chain(f"new {number}") for number in range(10)])
    left = CHAINS[:30]
    with RunReader(path) as reader:
        assert reader.num_chains() == 40
        for text in NEEDLES:
            wanted = [each.id for each in left if held(each, text)]
            found = [name for name in every(reader, ChainFilter(text=text, in_body=True)) if not name.startswith("new")]
            assert found == wanted
        assert len(list(every(reader, ChainFilter(text="new ")))) == 10
        assert list(every(reader, ChainFilter(text="c45"))) == []


def test_a_step_that_is_written_again_replaces_its_texts(path: Path) -> None:
    with RunStore(path) as store:
        store.add_trajectories(6, "train", [chain("zebra")], replace=True)
    with RunReader(path) as reader:
        assert list(every(reader, ChainFilter(text="zebra"))) == ["zebra"]
        assert list(every(reader, ChainFilter(text="zebra", in_body=True))) == ["zebra"]
        assert list(every(reader, ChainFilter(text="c55", in_body=True))) == []
    with closing(sqlite3.connect(path)) as db:
        db.execute("INSERT INTO summary_texts (summary_texts) VALUES ('integrity-check')")
        db.execute("INSERT INTO texts (texts) VALUES ('integrity-check')")


def test_a_store_without_the_module_is_searched_chain_by_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_module, "can_index_texts", lambda db: False)
    with RunStore(tmp_path / "run.db") as store:
        store.add_trajectories(1, "train", CHAINS)
        store.truncate_after(1)
        with RunReader(tmp_path) as reader:
            assert not reader._opened.texts
            for text in NEEDLES[:12]:
                assert list(every(reader, ChainFilter(text=text))) == [each.id for each in CHAINS if in_summary(each, text)]
                wanted = [each.id for each in CHAINS if body_contains(encode(each), text.encode().lower())]
                assert list(every(reader, ChainFilter(text=text, in_body=True))) == wanted


WRITER = """
import sys
sys.path[:0] = {paths!r}
from test_text_index import made_up
from agentfly.runs import RunStore
store = RunStore({path!r})
for step in range(1, 10_000):
    store.add_trajectories(step, "train", made_up(8), replace=True)
    store.add_metrics(step, {{"a": 1.0}})
    print(step, flush=True)
"""


@pytest.mark.parametrize("after", [2, 11])
def test_the_index_is_whole_after_a_kill_and_a_resume(tmp_path: Path, after: int) -> None:
    path = tmp_path / "run.db"
    code = WRITER.format(paths=[str(Path(__file__).parent)], path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= after:
            break
    process.send_signal(signal.SIGKILL)
    process.stdout.read()
    process.wait(timeout=300)
    process.stdout.close()
    check_every_text(path)
    with RunStore(path) as store:  # as a resumed run does
        store.truncate_after(after - 1)
        for step in (after, after + 1):
            store.add_trajectories(step, "train", made_up(30)[15:], replace=True)
    check_every_text(path)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.execute("INSERT INTO summary_texts (summary_texts) VALUES ('integrity-check')")


def check_every_text(path: Path) -> None:
    """Compares searches with the chains that are stored."""
    with RunStore(path, readonly=True) as store, RunReader(path) as reader:
        stored = [each for _, body in store.scan() for each in (query_module.decode(body),)]
        assert stored
        for text in ("river city", "ürich", "c1", "c17", "task-1", "100%"):
            wanted = sorted(each.id for each in stored if held(each, text))
            assert sorted(every(reader, ChainFilter(text=text, in_body=True))) == wanted
            wanted = sorted(each.id for each in stored if in_summary(each, text))
            assert sorted(every(reader, ChainFilter(text=text))) == wanted
