"""Micro batches: every row once, within the budget, with little padding, always the same."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import InvariantError
from agentfly.learn.batching import Rows, micro_batches, passes
from agentfly.learn.samples import to_samples
from tests.learn.chains import chain


def padding_waste(lengths, batches):
    """The share of padding among all tokens of the batches."""
    size = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    return 1.0 - sum(lengths[i] for batch in batches for i in batch) / size if size else 0.0


@given(st.lists(st.integers(1, 400), max_size=60), st.integers(1, 2000))
def test_every_row_is_in_exactly_one_batch_and_within_the_budget(lengths, budget):
    batches = micro_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    assert padding_waste(lengths, batches) <= 0.08 + 1e-9
    assert batches == micro_batches(lengths, budget)


def test_waste_is_small_on_mixed_lengths_where_a_plain_cut_wastes_much():
    rng = random.Random(0)
    lengths = [rng.choice([40, 150, 300]) + rng.randrange(40) for _ in range(256)]
    plain = [list(range(i, i + 16)) for i in range(0, 256, 16)]
    assert padding_waste(lengths, plain) > 0.3
    batches = micro_batches(lengths, 8192)
    assert padding_waste(lengths, batches) < 0.06
    assert len(batches) < 20


def test_a_row_longer_than_the_budget_is_alone():
    assert micro_batches([500, 10, 10], 100) == [[0], [1, 2]]


def test_the_tensors_of_a_batch_point_at_what_predicts_each_sampled_token():
    rows = Rows(to_samples(chain(("ab", "cd"), ("e", "f"))) + to_samples(chain(("ab", "x"))))
    batch = rows.tensors([1, 0], torch.device("cpu"))
    flat = batch.input_ids.flatten()
    assert [chr(i) for i in batch.targets] == ["x", "c", "d", "f"]
    assert [chr(flat[i]) for i in batch.where] == ["b", "b", "c", "e"], "the id before the target"
    assert batch.tokens.tolist() == [3, 0, 1, 2]
    assert batch.input_ids.shape == (2, 5), "the last id of a row is only a target"
    assert batch.prefix == 1, "the id that predicts the first sampled one is not shared"


def test_the_common_prefix_ends_where_rows_differ():
    rows = Rows([*to_samples(chain(("abcdXY", "z"))), *to_samples(chain(("abcdQY", "z")))])
    assert rows.tensors([0, 1], torch.device("cpu")).prefix == 4
    assert rows.tensors([0], torch.device("cpu")).prefix == 5


def test_a_row_without_a_sampled_token_is_refused():
    (row,) = to_samples(chain(("ab", "c")))
    row.mask = [0, 0, 0]
    with pytest.raises(InvariantError, match="no sampled token"):
        Rows([row])


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 12))
def test_each_pass_sees_every_chain_once_in_shares_of_near_equal_size(count, epochs, minibatches):
    steps = list(passes(count, epochs=epochs, num_minibatches=minibatches, seed="s"))
    shares = min(count, minibatches)
    assert len(steps) == epochs * shares
    for epoch in range(epochs):
        part = steps[epoch * shares : (epoch + 1) * shares]
        assert sorted(i for step in part for i in step) == list(range(count))
        sizes = {len(step) for step in part}
        assert max(sizes) - min(sizes) <= 1
    assert steps == list(passes(count, epochs=epochs, num_minibatches=minibatches, seed="s"))
