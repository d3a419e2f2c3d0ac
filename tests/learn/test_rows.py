"""Rows that are not consecutive: which turns they have, where the reward sits, and what the engine read before each reply."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentfly.errors import InvariantError
from agentfly.health.audit import _tokens
from agentfly.learn.algorithms.interface import Chains
from agentfly.learn.algorithms.replay import _arrays
from agentfly.learn.samples import check_chains, check_tokens, rows_of_chains, to_samples
from agentfly.rows import OpenRow, digest_of, is_one_conversation, row_numbers, rows_of
from agentfly.runs.codec import decode, encode, from_json, to_json
from agentfly.runs.rows import TokenSeries
from agentfly.runs.trained import training_of
from agentfly.types import Completion, Outcome, RowReason, Task, Trajectory, Turn
from agentfly.view.chains import tokens_json


def turn(row: int | None, context: str, reply: str, read: str | None = None, reward: float = 0.0) -> Turn:
    """A turn whose ids are the characters' codes. `read` is all that the engine read; a turn that begins a row says no more."""
    count = len(reply)
    completion = Completion(text=reply, token_ids=[*map(ord, reply)], logprobs=[-0.5] * count, versions=[0] * count)
    begins = read is None or read == context
    digest = digest_of([*map(ord, context if read is None else read)])
    return Turn([*map(ord, context)], begins, completion, row=row, prompt_digest=digest, reward=reward)


def chain(*turns: Turn, **changes: object) -> Trajectory:
    made = Trajectory("c", Task("t", ()), turns=list(turns), outcome=Outcome.FINISHED, reward=1.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def interleaved() -> Trajectory:
    """A parent and its sub-agent: each goes on with its own row."""
    return chain(turn(0, "P", "a"), turn(1, "S", "bb"), turn(0, "R", "c", "PaR", 0.25), turn(1, "T", "d", "SbbT"))


def drawn(trajectory: Trajectory) -> list[tuple[str, str]]:
    rows = to_samples(trajectory)
    texts = ["".join(map(chr, row.token_ids)) for row in rows]
    return [(text, "".join("^" if flag else " " for flag in row.mask)) for text, row in zip(texts, rows, strict=True)]


def test_each_reply_follows_what_its_own_conversation_read() -> None:
    trajectory = interleaved()
    assert drawn(trajectory) == [("PaRc", " ^ ^"), ("SbbTd", " ^^ ^")]
    check_tokens(trajectory, to_samples(trajectory), versions=range(1))
    check_chains([trajectory] * 2, rows_of_chains([trajectory] * 2))


def test_the_row_that_ended_the_chain_is_last_and_has_the_final_reward() -> None:
    trajectory = interleaved()
    assert rows_of(trajectory) == [[0, 2], [1, 3]]
    assert [row.rewards.tolist() for row in to_samples(trajectory)] == [[0, 0, 0, 0.25], [0, 0, 0, 0, 1.0]]
    ended = replace(trajectory, final_row=0)
    assert rows_of(ended) == [[1, 3], [0, 2]]
    assert [row.rewards.tolist() for row in to_samples(ended)] == [[0, 0, 0, 0, 0], [0, 0, 0, 1.25]]
    assert rows_of(replace(trajectory, final_row=7)) == rows_of(trajectory), "no turn of that row was played"


def test_rewards_per_turn_are_counted_in_the_order_of_the_rows() -> None:
    trajectory = replace(interleaved(), final_row=0)
    rewards = [row.rewards[row.mask] for row in to_samples(trajectory)]
    flat = [*rewards[0], *rewards[1]]
    chains = Chains([0], [np.array(flat)], None, [trajectory], None)
    assert chains.turns_of(0).tolist() == [0, 0, 1, 2, 3]
    assert chains.turn_rewards(0).tolist() == [0.0, 0.0, 0.0, 1.25]
    again = _arrays(trajectory, 0, True)
    assert again.rewards.tolist() == flat and again.rows.tolist() == [0, 0, 0, 1, 1]


def test_a_reply_under_the_context_of_another_row_is_refused() -> None:
    """Two interleaved conversations, recorded as if each restart began the only row that goes on."""
    trajectory = interleaved()
    trajectory.turns = [replace(each, row=None) for each in trajectory.turns]
    assert row_numbers(trajectory.turns) == [0, 1, 1, 1]
    rows = to_samples(trajectory)
    with pytest.raises(InvariantError, match="the reply of turn 2 would be trained after other tokens than those that the eng"):
        check_tokens(trajectory, rows, versions=range(1))
    with pytest.raises(InvariantError, match="the reply of turn 2 would be trained"):
        check_chains([interleaved(), trajectory], [to_samples(interleaved()), rows])
    assert next(_tokens(trajectory)) == "turn 3 follows other token ids than those that the engine read before it"
    assert [*_tokens(interleaved())] == []


def test_a_context_that_changed_after_the_request_is_refused() -> None:
    trajectory = interleaved()
    rows = to_samples(trajectory)
    rows[0].token_ids[0] += 1
    with pytest.raises(InvariantError, match="the reply of turn 0 would be trained"):
        check_tokens(trajectory, rows, versions=range(1))


def test_turns_of_older_records_are_in_consecutive_rows_and_have_no_digest() -> None:
    first, second, third = turn(None, "P", "a"), turn(None, "R", "b", "PaR"), turn(None, "Q", "c")
    trajectory = chain(*(replace(each, prompt_digest=None) for each in (first, second, third)))
    assert rows_of(trajectory) == [[0, 1], [2]]
    check_tokens(trajectory, to_samples(trajectory), versions=range(1))


def test_values_per_token_belong_to_the_turns_of_their_row() -> None:
    trajectory = replace(interleaved(), final_row=0)
    sampled = [token for row in to_samples(trajectory) for token in row.token_ids[row.mask].tolist()]
    shown = tokens_json(trajectory, TokenSeries(5, others={"token": [float(token) for token in sampled]}), None)
    assert [[span["turn"] for span in row["turns"]] for row in shown["rows"]] == [[1, 3], [0, 2]]
    for row in shown["rows"]:
        assert [token for token in row["token"] if token is not None] == [
            token for token, flag in zip(row["ids"], row["mask"], strict=True) if flag
        ]
    reader: Any = None
    chain_row: Any = SimpleNamespace(split="train", outcome="finished", step=1)
    series = TokenSeries(5, trained=[True] * 3 + [False, True])
    assert training_of(reader, chain_row, trajectory, series).turns == [[False], [True, True], [True], [True]]


def test_what_is_one_conversation() -> None:
    def begun(*whys: RowReason) -> Trajectory:
        return chain(*(replace(turn(None, "P", "a"), why=why) for why in whys))

    assert all(map(is_one_conversation, (begun("first", ""), begun("first", "template restarts"), begun("", ""))))
    assert not any(
        map(is_one_conversation, (begun("first", "first"), begun("first", "rewritten"), begun("first", "history cut")))
    )


def test_rows_are_stored() -> None:
    trajectory = replace(interleaved(), final_row=0)
    trajectory.turns[1].why = "first"
    assert decode(encode(trajectory)) == trajectory
    assert from_json(to_json(trajectory)) == trajectory


def test_the_digest_of_a_request_is_that_of_its_ids_however_the_row_grew() -> None:
    row = OpenRow.begin("c", 0, [1, 2], "first")
    made = [row.turn(Completion(text="", token_ids=[3], logprobs=[0.0], versions=[0]))]
    row.reply([3])
    for ids in ([4, 5], []):
        row.prompt += ids
        row.new_ids = ids
        made.append(row.turn(Completion(text="")))
    assert [each.prompt_digest for each in made] == [digest_of([1, 2]), *[digest_of([1, 2, 3, 4, 5])] * 2]
    assert [(each.restarts, each.why) for each in made] == [(True, "first"), (False, ""), (False, "")]
    assert digest_of([1 << 70]) == -1
    assert all(digest_of([0] * one) != digest_of([0] * two) for one, two in pairwise(range(5)))
