"""Rows and masks, drawn: text on one line, carets under what is trained on the next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import InvariantError
from agentfly.learn.samples import to_samples
from agentfly.types import Outcome
from tests.learn.chains import chain


def draw(sample):
    text = "".join(chr(i) for i in sample.token_ids)
    return text, "".join("^" if m else " " for m in sample.mask)


def test_a_conversation_is_one_row_and_only_replies_are_trained():
    (row,) = to_samples(chain(("<u>2*3?<a>", "mul 2 3;"), ("<t>6<a>", "It is 6;")))
    text, mask = draw(row)
    assert text == "<u>2*3?<a>mul 2 3;<t>6<a>It is 6;"
    assert mask == "          ^^^^^^^^       ^^^^^^^^"


def test_a_rewritten_history_begins_a_new_row():
    first, second = to_samples(
        chain(("<u>hi<a>", "(hm)ok;"), ("<u>go<a>", "(eh)do;"), ("<u>hi<a>ok;<u>go<a>do;<u>so<a>", "bye;", "restarts"))
    )
    text, mask = draw(first)
    assert text == "<u>hi<a>(hm)ok;<u>go<a>(eh)do;"
    assert mask == "        ^^^^^^^        ^^^^^^^"
    text, mask = draw(second)
    assert text == "<u>hi<a>ok;<u>go<a>do;<u>so<a>bye;"
    assert mask == "                              ^^^^"
    assert first.trajectory == second.trajectory


def test_each_reward_stands_on_the_last_sampled_token_of_its_turn():
    (row,) = to_samples(chain(("ab", "cd"), ("e", "fgh"), reward=1.0, turn_rewards=(0.25, 0.5)))
    text, mask = draw(row)
    assert text == "abcdefgh"
    assert mask == "  ^^ ^^^"
    assert row.rewards == [0, 0, 0, 0.25, 0, 0, 0, 1.5]


def test_log_probs_and_versions_mean_something_only_where_sampled():
    (row,) = to_samples(chain(("ab", "c"), ("d", "e"), version=7))
    assert row.logprobs == [0, 0, -0.5, 0, -1.5]
    assert row.versions == [-1, -1, 7, -1, 7]


def test_context_that_no_reply_follows_is_left_off():
    (row,) = to_samples(chain(("ab", "c"), ("de", ""), reward=1.0, turn_rewards=(0.0, 0.5)))
    text, mask = draw(row)
    assert text == "abc"
    assert mask == "  ^"
    assert row.rewards == [0, 0, 1.5], "the empty turn's reward goes to the token before it"


@pytest.mark.parametrize("outcome", [Outcome.WORLD_FAILURE, Outcome.CANCELLED, Outcome.TOOL_ERROR])
def test_a_chain_that_the_world_broke_gives_no_row(outcome):
    assert to_samples(chain(("ab", "cd"), outcome=outcome)) == []


def test_a_chain_without_a_reward_or_without_a_reply_gives_no_row():
    assert to_samples(chain(("ab", "cd"), reward=None)) == []
    assert to_samples(chain(("ab", ""))) == []


def test_a_row_that_begins_with_a_sampled_token_is_refused():
    with pytest.raises(InvariantError, match="which nothing predicts"):
        to_samples(chain(("", "cd")))


TURNS = st.lists(st.tuples(st.text("abc", min_size=1, max_size=4), st.text("XYZ", max_size=4), st.booleans()), max_size=6)


@given(TURNS, st.lists(st.integers(-3, 3), min_size=6, max_size=6))
def test_every_sampled_token_is_trained_once_and_no_reward_is_lost(turns, turn_rewards):
    trajectory = chain(*[(c, r, "restarts") if f else (c, r) for c, r, f in turns], reward=2.0, turn_rewards=turn_rewards)
    rows = to_samples(trajectory)
    trained = "".join(chr(i) for row in rows for i, m in zip(row.token_ids, row.mask, strict=True) if m)
    assert trained == "".join(reply for _, reply, _ in turns)
    assert all(m == (chr(i) in "XYZ") for row in rows for i, m in zip(row.token_ids, row.mask, strict=True))
    if rows:
        assert sum(sum(row.rewards) for row in rows) == trajectory.total_reward
