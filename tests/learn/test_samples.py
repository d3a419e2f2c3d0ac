"""Rows and masks, drawn: text on one line, carets under what is trained on the next."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import InvariantError
from agentfly.learn.samples import check_chains, check_tokens, rows_of_chains, to_samples
from agentfly.types import Completion, Outcome, Sample
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
    assert row.rewards.tolist() == [0, 0, 0, 0.25, 0, 0, 0, 1.5]


def test_log_probs_and_versions_mean_something_only_where_sampled():
    (row,) = to_samples(chain(("ab", "c"), ("d", "e"), version=7))
    assert row.logprobs.tolist() == [0, 0, -0.5, 0, -1.5]
    assert row.versions.tolist() == [-1, -1, 7, -1, 7]


def test_context_that_no_reply_follows_is_left_off():
    (row,) = to_samples(chain(("ab", "c"), ("de", ""), reward=1.0, turn_rewards=(0.0, 0.5)))
    text, mask = draw(row)
    assert text == "abc"
    assert mask == "  ^"
    assert row.rewards.tolist() == [0, 0, 1.5], "the empty turn's reward goes to the token before it"


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
        check_tokens(trajectory, rows, versions=range(1))


def test_a_row_holds_arrays_and_lists_become_arrays():
    (row,) = to_samples(chain(("ab", "c"), ("d", "e")))
    same = Sample(
        *[part.tolist() for part in (row.token_ids, row.mask, row.logprobs, row.versions, row.rewards, row.advantages)]
    )
    assert same != row, "it belongs to no chain"
    same = replace(same, group=row.group, trajectory=row.trajectory)
    assert same == row == copy.deepcopy(row)
    assert (same != replace(row, mask=[0, 0, 1, 0, 0])) and row not in ["a row", None]
    assert [part.dtype for part in (same.token_ids, same.mask, same.logprobs, same.versions)] == [
        np.int64, np.bool_, np.float64, np.int64,
    ]  # fmt: skip
    with pytest.raises(InvariantError, match="differ in length"):
        replace(row, mask=[0, 1])
    with pytest.raises(InvariantError, match="differ in length"):
        Sample(*[[[1]]] * 6)


def test_replies_may_hold_arrays():
    as_lists = chain(("ab", "cd"), ("e", "f"))
    as_arrays = copy.deepcopy(as_lists)
    for number, turn in enumerate(as_arrays.turns):
        reply = turn.completion
        parts = {name: np.array(getattr(reply, name)) for name in ("token_ids", "logprobs", "versions")}
        as_arrays.turns[number] = replace(
            turn, context_ids=np.array(turn.context_ids), completion=Completion(text=reply.text, **parts)
        )
    rows = to_samples(as_arrays)
    assert rows == to_samples(as_lists)
    check_tokens(as_arrays, rows, versions=range(1))


@given(st.lists(TURNS, max_size=5))
def test_the_rows_of_many_chains_are_those_of_each(many):
    chains = [chain(*[(c, r, "restarts") if f else (c, r) for c, r, f in turns], reward=1.0) for turns in many]
    chains += [chain(("ab", "cd"), outcome=Outcome.WORLD_FAILURE), chain(("ab", ""))]
    rows = rows_of_chains(chains)
    assert rows == [to_samples(each) for each in chains]
    check_chains(chains, rows)


def test_a_token_that_changed_the_chain_is_seen():
    """All sampled tokens are trained once and in order, but one with the chain after its own."""
    chains = [chain(("ab", "cde")), chain(("xe", "fg"))]
    first, second = rows_of_chains(chains)
    first, second = [replace(first[0], mask=[0, 0, 1, 1, 0])], [replace(second[0], mask=[0, 1, 1, 1])]
    with pytest.raises(InvariantError, match="the mask covers 2 tokens that are not the 3 sampled ones"):
        check_chains(chains, [first, second])


def spoil(rows, **changes):
    """Change one entry of an array of the last row."""
    for name, value in changes.items():
        array = getattr(rows[-1], name)
        array[np.flatnonzero(rows[-1].mask)[-1]] = value
    return rows


def shift(rows):
    return [replace(row, mask=np.roll(row.mask, -1)) for row in rows]


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (shift, "the mask covers 5 tokens that are not the 5 sampled ones"),
        (lambda rows: [replace(rows[0], mask=rows[0].mask & (rows[0].token_ids != ord("d")))], "the mask covers 4 tokens"),
        (lambda rows: [replace(rows[0], mask=rows[0].mask | (rows[0].token_ids == ord("b")))], "the mask covers 6 tokens"),
        (lambda rows: spoil(rows, token_ids=ord("x")), "the mask covers 5 tokens that are not"),
        (lambda rows: rows * 2, "the mask covers 10 tokens"),
        (lambda rows: spoil(rows, logprobs=-0.25), "are not those that the engine recorded"),
        (lambda rows: spoil(rows, logprobs=float("nan")), "not a finite number of at most 0"),
        (lambda rows: spoil(rows, logprobs=0.5), "not a finite number of at most 0"),
        (lambda rows: spoil(rows, versions=2), "versions of its training rows"),
        (lambda rows: [], "no training row"),
    ],
)
def test_rows_that_are_not_what_was_sampled_are_refused(plant, sentence):
    trajectory = chain(("ab", "cd"), ("e", "fgh"), version=3)
    check_tokens(trajectory, to_samples(trajectory), versions=range(2, 4))
    with pytest.raises(InvariantError, match=sentence):
        check_tokens(trajectory, plant(to_samples(trajectory)), versions=range(2, 4))
    before, after = chain(("ab", "c")), chain(("a", "bcd"), ("e", "f"))
    chains = [before, trajectory, after]
    check_chains(chains, rows_of_chains(chains))
    with pytest.raises(InvariantError, match=sentence):
        check_chains(chains, [to_samples(before), plant(to_samples(trajectory)), to_samples(after)])


@pytest.mark.parametrize("versions", [range(4, 9), range(3), range(3, 3)])
def test_tokens_of_other_versions_are_refused(versions):
    trajectory = chain(("ab", "cd"), version=3)
    with pytest.raises(InvariantError, match="holds tokens of version 3"):
        check_tokens(trajectory, to_samples(trajectory), versions=versions)
    lost = chain(("ab", "cd"), version=3, outcome=Outcome.WORLD_FAILURE, reward=None)
    check_tokens(lost, [], versions=range(4))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), 0.01])
def test_a_log_prob_that_no_model_gives_is_refused(value):
    trajectory = chain(("ab", "cd"))
    trajectory.turns[0].completion.logprobs[1] = value
    with pytest.raises(InvariantError, match="not a finite number of at most 0"):
        check_tokens(trajectory, to_samples(trajectory), versions=range(1))
    trajectory.turns[0].completion.logprobs[1] = 1e-7  # rounding
    check_tokens(trajectory, to_samples(trajectory), versions=range(1))
