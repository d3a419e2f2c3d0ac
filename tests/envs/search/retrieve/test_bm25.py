"""BM25: scores against the formula, the stored index, and hostile queries."""

from __future__ import annotations

import gzip
import json
import math
import threading
from pathlib import Path

import pytest

from agentfly.envs.search.retrieve import bm25
from agentfly.envs.search.retrieve.analysis import words
from agentfly.envs.search.retrieve.bm25 import Bm25, Bm25Index, best
from agentfly.envs.search.retrieve.corpus import MemoryCorpus, open_corpus
from agentfly.envs.search.retrieve.types import Passage
from agentfly.errors import ConfigError, DataError

SHARED = Path(__file__).resolve().parents[5] / "shared" / "data" / "search"
ROWS = [
    {"id": "cat", "title": "Cat", "text": "A cat sleeps on the mat."},
    {"id": "dog", "title": "Dog", "text": "A dog chases the cat, and the dog barks."},
    {"id": "sea", "title": "Sea", "text": "Ships cross the sea."},
]


def corpus_of(*texts: str) -> MemoryCorpus:
    return MemoryCorpus([Passage(str(number), "", text) for number, text in enumerate(texts)])


def test_words_meet_in_their_stem_and_accents_do_not_matter():
    assert words("The Rivers flowed, flowing past Caf\u00e9s & the \u00c9glise") == [
        "river",
        "flow",
        "flow",
        "past",
        "caf",
        "eglis",
    ]
    assert words("cities and a city; boxes of a box") == ["city", "city", "box", "box"]
    assert words("\x00\x1b[31m \ud800 \u202e") == ["31m"]


def test_the_score_is_the_one_of_the_formula():
    retriever = Bm25(corpus_of("apple pear plum", "apple apple", "fig"))
    (hits,) = retriever.find(["apple"], 5)
    rarity = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))

    def score(times: int, length: int) -> float:
        return rarity * times / (1.2 * (1 - 0.75 + 0.75 * length / 2) + times)

    assert [hit.passage.id for hit in hits] == ["1", "0"]
    assert [hit.score for hit in hits] == pytest.approx([score(2, 2), score(1, 3)], rel=1e-5)


def test_equal_scores_keep_the_order_of_the_corpus():
    (hits,) = Bm25(corpus_of(*["the same words"] * 30)).find(["same words"], 5)
    assert [hit.passage.id for hit in hits] == ["0", "1", "2", "3", "4"]
    assert best(bm25.np.array([0.0, 0.0], dtype="float32"), 1) == []


@pytest.mark.parametrize(
    "query", ["", " ", "the of and", "zzz", "\x00\x01\x1b", "\ud800", "word " * 25_000, "x" * 100_000, "a\u0301" * 999]
)
def test_no_query_breaks_it(query):
    (hits,) = Bm25(corpus_of("one word", "another")).find([query], 3)
    assert [hit.passage.id for hit in hits] == (["0"] if "word" in query else [])


def test_the_index_of_a_file_is_made_once_and_mapped_afterwards(write_jsonl, monkeypatch):
    corpus = open_corpus(write_jsonl(ROWS))
    first = Bm25(corpus).rank(["cat dog"], 3)
    monkeypatch.setattr(Bm25Index, "build", lambda *args: pytest.fail("it was built again"))
    assert Bm25(corpus).rank(["cat dog"], 3) == first


@pytest.mark.parametrize("harm", ["altered", "shorter", "missing", "no manifest"])
def test_a_damaged_index_is_made_again(write_jsonl, cache, harm):
    corpus = open_corpus(write_jsonl(ROWS))
    wanted = Bm25(corpus).rank(["cat"], 3)
    (folder,) = (cache / "search").glob("bm25-*[!k]")
    data = folder / "data.npy"
    if harm == "altered":
        data.write_bytes(data.read_bytes()[:-1] + b"\x7f")
    elif harm == "shorter":
        data.write_bytes(data.read_bytes()[:50])
    elif harm == "missing":
        data.unlink()
    else:
        (folder / "manifest.json").write_text("{")
    assert Bm25(corpus).rank(["cat"], 3) == wanted


def test_of_two_builders_one_builds_and_one_waits(write_jsonl, monkeypatch):
    corpus = open_corpus(write_jsonl(ROWS))
    built, both_are_there, made = [], threading.Barrier(2), Bm25Index.build

    def slowly(passages, k1, b):
        built.append(threading.get_ident())
        return made(passages, k1, b)

    monkeypatch.setattr(Bm25Index, "build", slowly)
    found = {}

    def build(name: str) -> None:
        both_are_there.wait(60)
        found[name] = Bm25(corpus).rank(["cat"], 1)

    threads = [threading.Thread(target=build, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(built) == 1
    assert found["a"] == found["b"] == [[(0, pytest.approx(found["a"][0][0][1]))]]


def test_wrong_options_and_empty_corpora_are_refused():
    with pytest.raises(ConfigError, match="k1 must be above 0"):
        Bm25(corpus_of("x"), k1=-1)
    with pytest.raises(ConfigError, match="from 1 to 100"):
        Bm25(corpus_of("word")).find(["x"], 0)
    with pytest.raises(DataError, match="no passage of the corpus contains a searchable word"):
        Bm25(corpus_of("...", "!"))


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no Wikipedia passages: no folder {SHARED}")
def test_a_gold_page_is_in_the_top_ten_for_nearly_every_hotpotqa_question():
    from agentfly.envs.search.loaders import load_questions

    retriever = Bm25(open_corpus(SHARED / "wikipedia_passages.jsonl.gz"))
    questions = load_questions(SHARED / "hotpotqa_questions.jsonl.gz")
    found = retriever.find([row["question"] for row in questions], 10)
    shares = [{hit.passage.title for hit in hits} & set(row["gold_titles"]) for row, hits in zip(questions, found, strict=True)]
    some = sum(bool(share) for share in shares) / len(questions)
    every = sum(len(share) == len(set(row["gold_titles"])) for share, row in zip(shares, questions, strict=True)) / len(
        questions
    )
    assert len(questions) == 950 and len(retriever.corpus) == 32_940
    assert some >= 0.97, f"at least one gold page for {some:.1%}"
    assert every >= 0.58, f"all gold pages for {every:.1%}"
    with gzip.open(SHARED / "hotpotqa_questions.jsonl.gz", "rt") as stream:
        assert json.loads(stream.readline())["question"] == questions[0]["question"]
