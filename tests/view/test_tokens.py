"""The token view: what was sampled, with which values, in pieces of the run's own tokenizer; and how siblings differ."""

from __future__ import annotations

import array
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed: pip install 'agentfly[serve]'")

from agentfly.errors import ConfigError
from agentfly.pocket import model_dir
from agentfly.render.token_text import TokenDecoder
from agentfly.types import Completion, TokenRecord, Turn
from agentfly.view.chains import find_tokenizer, first_difference

from .stored import add_token_record, data, make_chain, make_run


@pytest.fixture(scope="module")
def decoder() -> TokenDecoder:
    return TokenDecoder(model_dir() / "tokenizer.json")


def test_the_tokens_of_a_chain_as_a_reader_sees_them(tmp_path: Path) -> None:
    """Values stand exactly under what the policy sampled."""
    make_run(tmp_path / "runs" / "one")
    found = data(tmp_path / "runs", "/api/runs/one/chain/t1-0-1/tokens")
    (row,) = found["rows"]
    assert found["num_tokens"] == 6
    assert row["pieces"] == [
        "<|im_start|>", "user\n", "5", "<|im_end|>", "<|im_start|>", "assistant\n",
        "\nAction:", " add", "<|im_end|>", "\n", "<|im_start|>", "user\nObservation: ", "5", "<|im_end|>",
        "\nAnswer: ", "5", "<|im_end|>",
    ]  # fmt: skip
    assert row["mask"] == [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    none = None
    assert row["logprob"] == [*[none] * 6, -0.1, -0.2, -0.3, *[none] * 5, -0.5, -0.5, -0.5]
    assert row["version"] == [*[none] * 6, 0, 0, 0, *[none] * 5, 1, 1, 1]
    assert row["turns"] == [
        {"turn": 0, "start": 0, "sampled": 6, "end": 9},
        {"turn": 1, "start": 9, "sampled": 14, "end": 17},
    ]
    assert found["tokenizer"] == "pocket"
    assert found["note"] is None


def test_values_of_the_learner_are_placed_on_their_tokens(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    logprobs = array.array("f", [-0.125, -0.25, -0.5, -1.0, -2.0, -4.0]).tobytes()
    record = TokenRecord("t1-0-1", 0.5, 4, {"trainer_logprob": ("f", logprobs), "trained": ("B", bytes([1, 1, 0, 1, 1, 0]))})
    add_token_record(folder, 1, record)
    found = data(tmp_path / "runs", "/api/runs/one/chain/t1-0-1/tokens")
    (row,) = found["rows"]
    assert set(found["series"]) == {"logprob", "version", "advantage", "trainer_logprob", "trained"}
    assert [value for value in row["trainer_logprob"] if value is not None] == [-0.125, -0.25, -0.5, -1.0, -2.0, -4.0]
    assert [value for value in row["advantage"] if value is not None] == [0.5] * 6
    assert [value for value in row["trained"] if value is not None] == [True, True, False, True, True, False]
    for name in found["series"]:
        assert [value is not None for value in row[name]] == [bool(bit) for bit in row["mask"]]
    assert "2 of its 6 tokens" in data(tmp_path / "runs", "/api/runs/one/chain/t1-0-1")["untrained"]


def test_a_rewritten_history_begins_another_row(tmp_path: Path) -> None:
    chain = make_chain("t3-5-0", task="5")
    chain.turns[1] = replace(chain.turns[1], restarts=True)
    make_run(tmp_path / "runs" / "one", chains=[chain])
    rows = data(tmp_path / "runs", "/api/runs/one/chain/t3-5-0/tokens")["rows"]
    assert [len(row["ids"]) for row in rows] == [9, 8]
    assert [row["turns"][0]["turn"] for row in rows] == [0, 1]
    assert rows[1]["logprob"][-3:] == [-0.5, -0.5, -0.5]


def test_without_a_tokenizer_there_is_a_note_and_the_ids(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    (folder / "config.toml").write_text('[agent]\nmodel = "nobody/has-this-model"\n')
    found = data(tmp_path / "runs", "/api/runs/one/chain/t1-0-1/tokens")
    assert found["rows"][0]["pieces"] is None
    assert found["rows"][0]["ids"][:3] == [1, 297, 33]
    assert "nobody/has-this-model" in found["note"]


def test_a_broken_tokenizer_is_a_note_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    saved = folder / "checkpoints" / "step-000003"
    saved.mkdir(parents=True)
    (saved / "tokenizer.json").write_text("{}")
    assert "cannot be read" in data(tmp_path / "runs", "/api/runs/one/chain/t1-0-1/tokens")["note"]


def test_the_newest_checkpoint_has_the_tokenizer(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    for step in (1, 3):
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:06d}" / "tokenizer.json").write_bytes(
            (model_dir() / "tokenizer.json").read_bytes()
        )
    assert find_tokenizer(folder)[1] == "checkpoints/step-000003"


@pytest.mark.parametrize(
    "text", ["plain", "naïve 😀 漢字", "tab\tand\nline", "\x1b[31m\x00", "e\u0301 \u200d \u202e", "😀" * 3]
)
def test_the_pieces_of_a_text_are_the_text(decoder: TokenDecoder, text: str) -> None:
    ids = decoder._tokenizer.encode(text, add_special_tokens=False).ids
    pieces = decoder.pieces(ids)
    assert len(pieces) == len(ids)
    whole = "".join(piece for piece in pieces if not piece.startswith("<0x"))
    assert whole == text
    assert "\ufffd" not in "".join(pieces)


def test_bytes_that_are_no_character_are_shown_as_bytes(decoder: TokenDecoder) -> None:
    first, second, third, last = decoder._tokenizer.encode("😀").ids
    assert decoder.pieces([first, second, third, last]) == ["<0xF0>", "<0x9F>", "<0x98>", "😀"]
    plain = decoder._tokenizer.encode("a").ids
    assert decoder.pieces([first, second, *plain, last]) == ["<0xF0>", "<0x9F>", "a", "<0x80>"]
    assert decoder.pieces([first, 1, second]) == ["<0xF0>", "<|im_start|>", "<0x9F>"]
    assert decoder.pieces([10**9, -1]) == ["<id 1000000000>", "<id -1>"]


def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        TokenDecoder(tmp_path / "tokenizer.json")


def test_where_chains_of_a_group_begin_to_differ(decoder: TokenDecoder) -> None:
    first = make_chain()
    assert first_difference(first, make_chain()) is None
    other = first_difference(first, make_chain(answer="7", reply_ids=[403, 35, 2]), decoder)
    assert other == {"turn": 1, "part": "reply", "token": 1, "char": 8, "ids": [33, 35], "pieces": ["5", "7"]}

    told = make_chain(observation="6")
    told.turns[1] = replace(told.turns[1], context_ids=[211, 1, 368, 34, 2])
    found = first_difference(first, told, decoder)
    assert found is not None
    assert (found["turn"], found["part"], found["token"], found["pieces"]) == (1, "context", 3, ["5", "6"])

    shorter = make_chain()
    del shorter.turns[1]
    assert (first_difference(first, shorter) or {})["turn"] == 1

    longer = first_difference(make_chain(reply_ids=[403, 33]), first, decoder)
    assert longer is not None
    assert (longer["token"], longer["ids"], longer["pieces"]) == (2, [None, 2], [None, "<|im_end|>"])


def test_chains_of_a_chat_server_are_compared_by_their_texts() -> None:
    def spoken(text: str) -> Turn:
        return Turn([], True, Completion(text=text))

    one, two = make_chain(), make_chain()
    one.turns[:], two.turns[:] = [spoken("so it is 5")], [spoken("so it was 5")]
    found = first_difference(one, two)
    assert found is not None
    assert (found["token"], found["char"]) == (None, 6)
