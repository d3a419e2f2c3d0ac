"""Dense and hybrid retrieval: vectors by hand, blocks, the cache, FAISS beside NumPy, and a real model directory."""

from __future__ import annotations

import numpy as np
import pytest

import agentfly.pocket
from agentfly.envs.search.retrieve import dense
from agentfly.envs.search.retrieve.bm25 import Bm25
from agentfly.envs.search.retrieve.corpus import MemoryCorpus, open_corpus
from agentfly.envs.search.retrieve.dense import Dense, HashingEncoder, nearest, open_encoder
from agentfly.envs.search.retrieve.hybrid import Hybrid, fuse
from agentfly.envs.search.retrieve.types import Passage
from agentfly.envs.search.sources import Source, open_local
from agentfly.errors import ConfigError
from tests.close import assert_close_to_norm, error_of_norm

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
    assert_close_to_norm(scores, np.take_along_axis(queries @ vectors.T, whole, axis=1))


def test_faiss_finds_what_numpy_finds():
    pytest.importorskip("faiss", reason="faiss is not installed: pip install 'agentfly[faiss]'")
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

    folder = str(agentfly.pocket.__path__[0] + "/model")
    made = open_encoder(folder, pooling="mean", query_prefix="query: ")
    vectors = made.encode(["What is 12 times 7?", "red"], query=False)
    assert vectors.shape == (2, made.size) and vectors.dtype == np.float32
    assert_close_to_norm(np.linalg.norm(vectors, axis=1), np.ones(2))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.no_grad():
        alone = model(**tokenizer(["red"], return_tensors="pt")).last_hidden_state[0].mean(0)
    assert_close_to_norm(vectors[1], alone / alone.norm(), of="padding beside a longer text changes nothing")
    assert not np.allclose(made.encode(["red"], query=True), vectors[1:]), "a query has its prefix"
    other = open_encoder(folder, pooling="cls")
    assert other.key != made.key
    assert Dense(corpus(), other, library="numpy").find(["Kestrels hover above fields."], 1)[0][0].passage.id == "0"


@pytest.mark.parametrize("kind", ["raises", "too wide", "no numbers", "no such option"])
def test_a_model_that_cannot_encode_is_refused_in_one_sentence_before_it_is_used(kind, monkeypatch):
    class Odd(HashingEncoder):
        def __init__(self, model, pooling="mean"):
            super().__init__()

        def encode(self, texts, *, query):
            if kind == "raises":
                raise RuntimeError("The size of tensor a (600)\nmust match 512")
            vectors = super().encode(texts, query=query)
            return vectors[:, :3] if kind == "too wide" else vectors * np.nan if kind == "no numbers" else vectors

    monkeypatch.setattr(dense.plugins, "resolve", lambda *names: Odd)
    with pytest.raises(ConfigError, match="^here cannot be used as an embedding model: ") as found:
        open_encoder("here", **({"poling": "cls"} if kind == "no such option" else {}))
    assert "\n" not in str(found.value)


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


def small_model(folder, kind, *, pad=True, eos=True, stated=None):
    """A model of 16 numbers with random weights and a tokenizer of letters, as its makers would save them."""
    import json
    import string

    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    letters = {token: place for place, token in enumerate(["[PAD]", "[UNK]", "[END]", *string.ascii_letters, "."])}
    plain = Tokenizer(models.WordLevel(letters, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"unk_token": "[UNK]", **({"pad_token": "[PAD]"} if pad else {}), **({"eos_token": "[END]"} if eos else {})}
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **names).save_pretrained(folder)
    common = {"vocab_size": len(letters), "pad_token_id": 0}
    heads = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config, cls = {
        "bert": lambda: (transformers.BertConfig(**common, **heads, max_position_embeddings=40), transformers.BertModel),
        "roberta": lambda: (
            transformers.RobertaConfig(**common, **heads, max_position_embeddings=40),
            transformers.RobertaModel,
        ),
        "llama": lambda: (transformers.LlamaConfig(**common, **heads), transformers.LlamaModel),
        "t5": lambda: (
            transformers.T5Config(**common, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0),
            transformers.T5Model,
        ),
    }[kind]()
    model = cls(config).eval()
    model.save_pretrained(folder)
    if stated is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    return model, transformers.AutoTokenizer.from_pretrained(str(folder))


LAST = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}


@pytest.mark.parametrize(("options", "stated"), [({}, LAST), ({"pooling": "lasttoken"}, None)])
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_last_token_is_that_of_the_text_and_not_of_the_padding(tmp_path, options, stated, side):
    import torch

    model, tokenizer = small_model(tmp_path, "llama", pad=False, stated=stated)
    made = open_encoder(str(tmp_path), **options)
    made._tokenizer.padding_side = side
    vectors = made.encode(["red", "a much longer text"], query=True)
    with torch.no_grad():
        alone = model(tokenizer(["red"], return_tensors="pt")["input_ids"]).last_hidden_state[0, -1]
    assert_close_to_norm(vectors[0], alone / alone.norm())


def test_of_a_model_with_a_decoder_the_encoder_is_used(tmp_path):
    import torch

    model, tokenizer = small_model(tmp_path, "t5")
    vectors = open_encoder(str(tmp_path)).encode(["red", "longer"], query=True)
    with torch.no_grad():
        alone = model.get_encoder()(tokenizer(["red"], return_tensors="pt")["input_ids"]).last_hidden_state[0].mean(0)
    assert_close_to_norm(vectors[0], alone / alone.norm())


@pytest.mark.parametrize(("kind", "positions"), [("bert", 40), ("roberta", 39)])
def test_a_text_is_cut_where_the_model_has_no_more_positions(tmp_path, kind, positions):
    small_model(tmp_path, kind)
    made = open_encoder(str(tmp_path), max_length=5_000)
    whole, cut, other = made.encode(["a" * 200, "a" * positions, "a" * (positions - 1) + "b"], query=True)
    assert_close_to_norm(whole, cut)
    assert error_of_norm(other, cut) > 0.01, "up to there it is read"


def test_model_directories_that_are_of_no_use_are_refused_in_one_sentence(tmp_path):
    for name, options, says in (
        ("padless", {"pad": False, "eos": False}, "neither a padding nor an end token"),
        (
            "several",
            {"stated": {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False, "pooling_mode_cls_token": True}},
            "several",
        ),
        ("strange", {"stated": {"pooling_mode_max_tokens": True}}, "none of mean, cls and lasttoken"),
    ):
        (tmp_path / name).mkdir()
        small_model(tmp_path / name, "bert", **options)
        with pytest.raises(ConfigError, match=says):
            open_encoder(str(tmp_path / name))
    (tmp_path / "torn").mkdir()
    small_model(tmp_path / "torn", "bert")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="cannot be opened as an embedding model") as found:
        open_encoder(str(tmp_path / "torn"))
    assert "\n" not in str(found.value)
