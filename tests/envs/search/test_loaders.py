"""Question files in the published shapes, what is refused, and the folder that `SEARCH_DATA` names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from agentfly.data import load_tasks
from agentfly.envs.search.loaders import load_questions
from agentfly.envs.search.tasks import search_questions
from agentfly.errors import ConfigError, DataError

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "search"
HOTPOT = {
    "_id": "5a",
    "question": "Which band is older?",
    "answer": "Slint",
    "type": "comparison",
    "supporting_facts": [["Slint", 0], ["Low", 1], ["Slint", 2]],
    "context": [["Slint", ["A band."]]],
}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (HOTPOT, {"id": "5a", "answer": "Slint", "kind": "comparison", "gold_titles": ["Slint", "Low"]}),
        (
            {"id": "h", "question": "q?", "answer": "a", "supporting_facts": {"title": ["X", "Y"], "sent_id": [0, 1]}},
            {"id": "h", "answer": "a", "kind": "question", "gold_titles": ["X", "Y"]},
        ),
        (
            {"id": "f", "question": "q?", "golden_answers": ["a"], "metadata": {"supporting_facts": {"title": ["X", "X"]}}},
            {"id": "f", "answer": "a", "kind": "question", "gold_titles": ["X"]},
        ),
        ({"question": "q?", "answer": ["a", "b"]}, {"id": "0", "answer": ["a", "b"], "kind": "question"}),
        ({"id": "n1", "question": "q?", "golden_answers": ["only"]}, {"id": "n1", "answer": "only", "kind": "question"}),
        (
            {"id": "k", "input": "q?", "output": [{"answer": "a", "provenance": [{"title": "P"}]}, {"provenance": []}]},
            {"id": "k", "answer": "a", "kind": "question", "gold_titles": ["P"]},
        ),
        (
            {"question": "q?", "answer": 7, "gold_titles": "One | Other", "kind": "bridge"},
            {"id": "0", "answer": "7", "kind": "bridge", "gold_titles": ["One", "Other"]},
        ),
    ],
)
def test_the_published_shapes_become_rows(write_jsonl, row, expected):
    (found,) = load_questions(write_jsonl([row], "q.jsonl"))
    assert found.pop("question") == row.get("question", row.get("input"))
    assert found == expected


def test_a_json_list_reads_like_lines_gzipped_or_not(tmp_path, write_jsonl):
    lines = load_questions(write_jsonl([HOTPOT], "q.jsonl.gz"))
    (tmp_path / "q.json").write_text(json.dumps([HOTPOT]))
    (tmp_path / "z.json.gz").write_bytes(gzip.compress(json.dumps([HOTPOT]).encode()))
    assert load_questions(tmp_path / "q.json") == load_questions(tmp_path / "z.json.gz") == lines
    assert load_tasks(lines)[0].fields["answer"] == "Slint"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{oops", "line 2 is not valid JSON"),
        (["x"], "line 2: a question is an object"),
        ({"answer": "a"}, "line 2: 'question' must be"),
        ({"question": " ", "answer": "a"}, "line 2: 'question' must be"),
        ({"question": "q"}, "line 2: has no field 'answer'"),
        ({"question": "q", "answer": []}, "line 2: 'answer' must be a non-empty text"),
        ({"question": "q", "answer": None}, "line 2: 'answer' must be a text"),
        ({"question": "q", "answer": ["a", None]}, "line 2: 'answer' must be a non-empty text"),
        ({"question": "q", "answer": "a", "gold_titles": [3]}, "line 2: the titles"),
        ({"_id": "5a", "question": "q", "answer": "a"}, "line 1 and line 2 have the same id '5a'"),
    ],
)
def test_a_malformed_question_is_named_by_its_line(write_jsonl, row, says):
    with pytest.raises(DataError, match=says):
        load_questions(write_jsonl([HOTPOT, row], "q.jsonl"))


def test_malformed_lists_and_missing_files_are_refused(tmp_path):
    (tmp_path / "q.json").write_text('[{"question": "q", "answer": "a"}, 3]')
    with pytest.raises(DataError, match="row 2: a question is an object"):
        load_questions(tmp_path / "q.json")
    (tmp_path / "o.json").write_text("{}")
    with pytest.raises(DataError, match="is a list with at least one row"):
        load_questions(tmp_path / "o.json")
    with pytest.raises(DataError, match="no such file"):
        load_questions(tmp_path / "missing.jsonl")


def test_search_data_names_a_folder_with_passages_and_questions(tmp_path, write_jsonl, monkeypatch):
    passages = write_jsonl([{"id": 1, "title": "Slint", "text": "A band."}], "passages.jsonl.gz")
    questions = [{"question": f"Question {number}?", "answer": "a"} for number in range(100)]
    write_jsonl(questions, "questions.jsonl")
    monkeypatch.setenv("SEARCH_DATA", str(tmp_path))
    splits = {split: search_questions(split) for split in ("train", "validation", "test")}
    assert sorted(row["question"] for rows in splits.values() for row in rows) == sorted(row["question"] for row in questions)
    assert splits["train"][0]["corpus"] == str(passages)
    assert len(load_tasks("search_questions", split="train", count=5)) == 5
    write_jsonl([{"question": "Held out?", "answer": "a"}], "dev.jsonl")
    assert [row["question"] for row in search_questions("validation")] == ["Held out?"]


@pytest.mark.parametrize(
    ("train", "held_out", "passages"),
    [
        ("hotpot_train_v1.1.json", "hotpot_dev_fullwiki_v1.json", "wiki-18.jsonl.gz"),
        ("NQ-open.train.jsonl", "NQ-open.dev.jsonl", "corpus.jsonl"),
        ("nq-train-kilt.jsonl", "nq-dev-kilt.jsonl", "kilt_knowledgesource.json"),
    ],
)
def test_files_are_found_under_the_names_that_they_are_published_with(tmp_path, write_jsonl, train, held_out, passages):
    def write(name: str, question: str) -> None:
        rows = [{"question": question, "answer": "a"}]
        (tmp_path / name).write_text(json.dumps(rows if name.endswith(".json") else rows[0]) + "\n")

    write(train, "To learn from?")
    write(held_out, "Held out?")
    corpus = write_jsonl([{"id": 1, "title": "Slint", "text": "A band."}], passages)
    (row,) = search_questions("train", path=tmp_path)
    assert (row["question"], row["corpus"]) == ("To learn from?", str(corpus))
    assert [row["question"] for row in search_questions("validation", path=tmp_path)] == ["Held out?"]
    with pytest.raises(DataError, match="nor a file whose name says test"):
        search_questions("test", path=tmp_path)
    write(f"other-{held_out}", "Which of the two?")
    with pytest.raises(DataError, match=r"several files look like the split 'validation' \(.*other-"):
        search_questions("validation", path=tmp_path)
    write_jsonl([{"question": "Mine?", "answer": "a"}], "validation.jsonl")
    assert [row["question"] for row in search_questions("validation", path=tmp_path)] == ["Mine?"]


def test_search_questions_says_what_it_needs(tmp_path, write_jsonl):
    with pytest.raises(ConfigError, match="set SEARCH_DATA"):
        search_questions("train")
    with pytest.raises(DataError, match="no such file or folder"):
        search_questions("train", path=tmp_path / "nothing")
    with pytest.raises(DataError, match="holds neither train.jsonl nor questions.jsonl"):
        search_questions("train", path=tmp_path)
    file = write_jsonl([{"question": "Only one?", "answer": "a"}], "q.jsonl")
    # One question belongs to one split; the two others are empty.
    empty = 0
    for split in ("train", "validation", "test"):
        try:
            assert len(search_questions(split, path=file)) == 1
        except DataError:
            empty += 1
    assert empty == 2


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no HotpotQA questions: no folder {SHARED}")
def test_the_real_hotpotqa_questions_are_read():
    rows = load_questions(SHARED / "hotpotqa_questions.jsonl.gz")
    assert len(rows) == 950
    assert all(1 <= len(row["gold_titles"]) <= 4 for row in rows)
    assert {row["kind"] for row in rows} == {"bridge", "comparison"}
