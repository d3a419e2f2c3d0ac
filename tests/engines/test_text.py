"""Text appears piece by piece, and never half a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentfly.engines.text import MAX_HELD, TextStream


def decode(ids):
    return bytes(ids).decode("utf-8", "replace")


def play(data: bytes, stops=()):
    stream = TextStream(decode, stops)
    pieces = [stream.push(byte) for byte in data]
    return stream, pieces


@given(st.text())
def test_pieces_of_a_valid_text_are_whole_and_add_up(text):
    stream, pieces = play(text.encode("utf-8", "ignore"))
    assert "".join(pieces) + stream.flush() == text.encode("utf-8", "ignore").decode()
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_a_character_of_four_bytes_comes_at_its_last():
    assert play("🙂".encode())[1] == ["", "", "", "🙂"]


@given(st.binary(max_size=60))
def test_broken_bytes_are_shown_in_the_end_and_do_not_pile_up(data):
    stream, pieces = play(data)
    assert len(stream._ids) <= 2 * MAX_HELD
    assert bool("".join(pieces) + stream.flush()) == bool(data)


def test_a_stop_string_is_seen_across_pieces():
    stream, _ = play(b"ab STO", ("STOP", "END"))
    assert not stream.stopped
    stream.push(ord("P"))
    assert stream.stopped


def test_a_stop_string_of_one_character_is_seen():
    assert play(b"a\n", ("\n",))[0].stopped


def test_a_leading_space_is_shown_though_the_tokenizer_swallows_it_at_the_start():
    words = {1: " one", 2: " two", 3: " three"}
    stream = TextStream(lambda ids: "".join(words[i] for i in ids).lstrip())
    assert [stream.push(i) for i in (1, 2, 3)] == ["one", " two", " three"]
