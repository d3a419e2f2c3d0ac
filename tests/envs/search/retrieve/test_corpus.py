"""Files of passages: the published shapes, what is refused and by which line, and the memory-mapped form."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from agentfly.envs.search.retrieve.corpus import FileCorpus, MemoryCorpus, open_corpus
from agentfly.envs.search.retrieve.passages import read_passages, to_passage
from agentfly.envs.search.retrieve.types import Passage
from agentfly.errors import DataError


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "0", "contents": '"Aaron"\nAaron is a prophet.'}, Passage("0", "Aaron", "Aaron is a prophet.")),
        (
            {"_id": "290", "wikipedia_title": "A", "text": ["A\n", "A is a letter.\n", "BULLET::::It is the first.\n"]},
            Passage("290", "A", "A is a letter.\n- It is the first."),
        ),
        (
            {"id": 12, "title": "Cat", "text": [["A cat ", "purrs."], ["It sleeps."]]},
            Passage("12", "Cat", "A cat purrs.\nIt sleeps."),
        ),
        ({"id": 5, "title": "Dog", "text": ["A dog barks.", " It runs."]}, Passage("5", "Dog", "A dog barks. It runs.")),
        ({"_id": "d1", "title": "", "text": "No title."}, Passage("d1", "", "No title.")),
        ({"text": "No id."}, Passage("7", "", "No id.")),
        ({"id": "u", "text": "half \ud800 pair"}, Passage("u", "", "half ? pair")),
    ],
)
def test_the_published_shapes_become_the_same_passages(row, expected):
    assert to_passage(row, 7, "here") == expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[1]", "line 2: a passage is an object"),
        ('{"id": 3, "title": "x"}', "line 2: has no field 'text'"),
        ('{"id": 3, "text": "  "}', "line 2: 'text' must be a non-empty string"),
        ('{"id": 3, "text": [1]}', "line 2: 'text' must be a non-empty string"),
        ('{"id": true, "text": "x"}', "line 2: the id must be"),
        ('{"id": 3, "text": "x", "title": 4}', "line 2: the title must be a string"),
        ('{"id": %s, "text": "x"}' % ("9" * 5_000), "line 2 is not valid JSON: Exceeds the limit"),
        ('{"id": "[ ]", "text": "x"}', "line 2: the id must be"),
        ('{"id": "%s", "text": "x"}' % ("9" * 3_000), "line 2: the id must be .* at most 2000 characters, not '9{99}$"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(write_jsonl, line, says):
    path = write_jsonl([{"id": 1, "text": "fine"}, line])
    with pytest.raises(DataError, match=says):
        open_corpus(path)
    assert not [each for each in path.parent.rglob("corpus-*") if each.is_dir()], "a refused file leaves nothing in the cache"


def test_one_id_on_two_lines_is_refused_with_both(write_jsonl):
    path = write_jsonl([{"id": "a", "text": "x"}, "", {"id": "b", "text": "y"}, {"id": "a", "text": "z"}])
    with pytest.raises(DataError, match="lines 1 and 4 have the same id 'a'"):
        open_corpus(path)


def test_ids_are_kept_as_they_are_shown_and_two_that_look_alike_are_refused(write_jsonl):
    rows = [
        {"id": "a\x1b[31mb", "text": "x"},
        {"id": "[x]", "text": "y"},
        {"id": " c \t d\n", "text": "z"},
        {"id": 7, "text": "w"},
    ]
    corpus = open_corpus(write_jsonl(rows))
    assert [corpus[place].id for place in range(4)] == ["a [31mb", "x", "c d", "7"]
    assert [corpus.place_of(each) for each in ("a [31mb", "x", "c d", "7")] == [0, 1, 2, 3]
    with pytest.raises(DataError, match="lines 1 and 3 have the same id 'a b'"):
        open_corpus(write_jsonl([{"id": "a b", "text": "x"}, {"id": "c", "text": "y"}, {"id": "[a\x00b]", "text": "z"}]))


def test_missing_empty_broken_and_foreign_files_are_refused(tmp_path, write_jsonl):
    with pytest.raises(DataError, match="no such file"):
        open_corpus(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="has no rows"):
        open_corpus(write_jsonl(["", ""], "empty.jsonl"))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"id": 1, "text": "x"}\n' * 5000)[:-40])
    with pytest.raises(DataError, match=r"line \d+ cannot be read: "):
        open_corpus(cut)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"id": 1, "text": "caf\xe9"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"line 1 is not (UTF-8|valid JSON)"):
        open_corpus(latin)


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_a_corpus_on_disk_gives_what_was_written_by_place_and_by_id(write_jsonl, name):
    rows = [{"id": f"x{number}", "title": f"T{number}", "text": f"Text \u00e9 {number}"} for number in range(500)]
    corpus = open_corpus(write_jsonl(rows, name))
    assert len(corpus) == 500
    assert corpus[123] == Passage("x123", "T123", "Text \u00e9 123")
    assert [corpus.place_of(f"x{number}") for number in (0, 77, 499)] == [0, 77, 499]
    assert corpus.place_of("x500") is None
    assert isinstance(corpus.starts, np.memmap), "tables are mapped, not read"
    with pytest.raises(IndexError):
        corpus[500]


def test_a_corpus_is_read_from_its_file_once_and_again_when_the_file_changes(write_jsonl, monkeypatch):
    path = write_jsonl([{"id": 1, "text": "one"}])
    open_corpus(path)
    read = []
    target = "agentfly.envs.search.retrieve.corpus.read_passages"
    monkeypatch.setattr(target, lambda given: read.append(given) or read_passages(given))
    assert len(open_corpus(path)) == 1
    assert read == []
    write_jsonl([{"id": 1, "text": "one"}, {"id": 2, "text": "two"}])
    assert len(open_corpus(path)) == 2
    assert read == [path]


def test_a_damaged_corpus_in_the_cache_is_made_again(write_jsonl, cache):
    path = write_jsonl([{"id": number, "text": f"text {number}"} for number in range(50)])
    open_corpus(path)
    (lines,) = cache.rglob("passages.jsonl")
    data = bytearray(lines.read_bytes())
    data[20] ^= 1
    lines.write_bytes(data)
    corpus = open_corpus(path)
    assert isinstance(corpus, FileCorpus)
    assert [corpus[place].text for place in range(3)] == ["text 0", "text 1", "text 2"]


def test_passages_in_memory_need_different_ids():
    with pytest.raises(DataError, match="two passages have the id 'a'"):
        MemoryCorpus([Passage("a", "", "x"), Passage("a", "", "y")])
    with pytest.raises(DataError, match="at least one passage"):
        MemoryCorpus([])
