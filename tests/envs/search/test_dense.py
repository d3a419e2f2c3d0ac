"""Dense and hybrid retrieval: vectors by hand, blocks, the cache, FAISS beside NumPy, and a real model directory."""

from __future__ import annotations

import numpy as np
import pytest

import agentfly.pocket
from agentfly.envs.search import dense
from agentfly.envs.search.bm25 import Bm25
from agentfly.envs.search.corpus import MemoryCorpus, open_corpus
from agentfly.envs.search.dense import Dense, HashingEncoder, nearest, open_encoder
from agentfly.envs.search.hybrid import Hybrid, fuse
from agentfly.envs.search.retrieval import Passage
from agentfly.envs.search.sources import Source, open_local
from agentfly.errors import ConfigError

TEXTS = ["Kestrels hover above fields.", "The harbour of Brundholt.", "Glassblowing is a craft.", "A painter of winter."]
ROWS = [{"id": number, "title": "", "text": text} for number, text in enumerate(TEXTS)]


def corpus() -> MemoryCorpus:
    return MemoryCorpus([Passage(str(row["id"]), "", row["text"]) for row in ROWS])


def test_spelling_is_near_enough_for_the_hashing_encoder():
    found = Dense(corpus(), HashingEncoder(), library="numpy").find(["brundholdt harbor", "glass blowing"], 1)
    assert [hits[0].passage.id for hits in found] == ["1", "2"]


def test_the_nearest_are_the_same_in_one_block_and_in_many(monkeypatch):
    rng = np.random.default_rng(0)
    vectors, queries = rng.normal(size=(257, 8)).astype("float32"), rng.normal(size=(5, 8)).astype("float32")
    whole = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :7]
    monkeypatch.setattr(dense, "BLOCK", 10)
    scores, places = nearest(vectors, queries, 7)
    assert (places == whole).all()
    assert np.allclose(scores, np.take_along_axis(queries @ vectors.T, whole, axis=1))


def test_faiss_finds_what_numpy_finds():
    pytest.importorskip("faiss")
    here = open_local(Source("encyclopaedia")).corpus
    queries = [here[place].text for place in range(0, 200, 10)]
    one, other = (Dense(here, HashingEncoder(), library=name).rank(queries, 3) for name in ("faiss", "numpy"))
    assert [[place for place, _ in ranking] for ranking in one] == [[place for place, _ in ranking] for ranking in other]


def test_vectors_of_a_file_are_made_once_and_again_when_they_are_damaged(write_jsonl, cache):
    class Counting(HashingEncoder):
        made = 0

        def encode(self, texts, *, query):
            self.made += 0 if query else len(texts)
            return super().encode(texts, query=query)

    file, encoder = open_corpus(write_jsonl(ROWS)), Counting()
    wanted = Dense(file, encoder, library="numpy").rank(["harbour"], 2)
    assert Dense(file, encoder, library="numpy").rank(["harbour"], 2) == wanted
    assert encoder.made == len(ROWS)
    (vectors,) = cache.rglob("vectors.npy")
    vectors.write_bytes(vectors.read_bytes()[:-4])
    assert Dense(file, encoder, library="numpy").rank(["harbour"], 2) == wanted
    assert encoder.made == 2 * len(ROWS)


def test_fusion_adds_reciprocal_ranks():
    fused = fuse([[(7, 9.0), (3, 8.0)], [(3, 0.9), (5, 0.1)]], 3)
    assert [place for place, _ in fused] == [3, 7, 5]
    assert [score for _, score in fused] == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62])


def test_a_hybrid_fuses_retrievers_over_one_corpus_only():
    here = corpus()
    both = Hybrid(Bm25(here), Dense(here, HashingEncoder(), library="numpy"))
    assert both.find(["harbour of Brundholt"], 1)[0][0].passage.id == "1"
    with pytest.raises(ConfigError, match="the same corpus"):
        Hybrid(Bm25(here), Bm25(MemoryCorpus([Passage("0", "", "other")])))
    with pytest.raises(ConfigError, match="at least two"):
        Hybrid(Bm25(here))


def test_a_source_opens_each_kind_of_retriever(write_jsonl):
    path = str(write_jsonl(ROWS))
    for retriever, model in (("bm25", None), ("dense", "hashing"), ("hybrid", "hashing")):
        found = open_local(Source(path, retriever, model))
        assert found.name == retriever
        assert found.find(["harbour"], 1)[0][0].passage.id == "1"


def test_a_model_directory_becomes_an_encoder():
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    folder = str(agentfly.pocket.__path__[0] + "/model")
    made = open_encoder(folder, pooling="mean", query_prefix="query: ")
    vectors = made.encode(["What is 12 times 7?", "red"], query=False)
    assert vectors.shape == (2, made.size) and vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.no_grad():
        alone = model(**tokenizer(["red"], return_tensors="pt")).last_hidden_state[0].mean(0)
    assert np.allclose(vectors[1], (alone / alone.norm()).numpy(), atol=1e-4), "padding beside a longer text changes nothing"
    assert not np.allclose(made.encode(["red"], query=True), vectors[1:]), "a query has its prefix"
    other = open_encoder(folder, pooling="cls")
    assert other.key != made.key
    assert Dense(corpus(), other, library="numpy").find(["Kestrels hover above fields."], 1)[0][0].passage.id == "0"


def test_what_cannot_be_an_encoder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="needs `model`"):
        open_encoder(None)
    with pytest.raises(ConfigError, match="it has no config.json"):
        open_encoder(str(tmp_path))
    with pytest.raises(ConfigError, match="bm25 has no model"):
        Source("encyclopaedia", "bm25", "hashing")
    with pytest.raises(ConfigError, match="no retriever is called 'dens'"):
        Source("encyclopaedia", "dens")
    with pytest.raises(ConfigError, match="does its own ranking"):
        Source("http://127.0.0.1:1", "dense", "hashing")
    with pytest.raises(ConfigError, match="no corpus 'nowhere.jsonl'"):
        open_local(Source("nowhere.jsonl"))
