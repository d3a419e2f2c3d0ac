"""What an update says about each token: whether it was in the loss, its advantage, log-prob and entropy. Checked by hand."""

from __future__ import annotations

import copy
import struct

import numpy as np
import pytest

from tests.close import assert_close_to_norm
from tests.learn.chains import tiny_llama
from tests.learn.test_learner import VOCABULARY, learner_of, make_groups
from tests.learn.test_window import AGES, at_version, old_groups, tokens_by_hand


def values(record, name, count):
    """A series of a record, one value per sampled token; None if it is left out."""
    if name not in record.series:
        return None
    kind, data = record.series[name]
    found = struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data)
    assert len(found) == count
    return np.array(found)


def trained_tokens(record, count):
    """A chain whose tokens were all trained, or none, has no series."""
    assert record.num_trained in (0, count) or "trained" in record.series
    series = values(record, "trained", count)
    flags = [bool(record.num_trained)] * count if series is None else [bool(value) for value in series]
    assert sum(flags) == record.num_trained
    return flags


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_batch": 12}, {"num_minibatches": 3, "epochs": 2}])
def test_the_records_are_the_tokens_of_the_loss_with_what_the_learner_computed(options):
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model, masked=AGES)
    learner = at_version(learner_of(copy.deepcopy(model), "grpo", **options))
    learner.update(groups, window=1)
    records = {record.trajectory: record for record in learner.token_records()}
    chains = [trajectory for group in groups for trajectory in group]
    assert list(records) == [trajectory.id for trajectory in chains]
    some = 0
    for trajectory, (logprobs, _, inside) in zip(chains, tokens_by_hand(model, groups, 1), strict=True):
        record, count = records[trajectory.id], trajectory.num_sampled
        siblings = [each.total_reward for group in groups for each in group if group[0].task.id == trajectory.task.id]
        differs = trajectory.total_reward != pytest.approx(np.mean(siblings))
        wanted = [bool(flag) and differs for flag in inside]
        assert trained_tokens(record, count) == wanted
        some += 0 < record.num_trained < count
        assert (record.advantage > 0) == (trajectory.total_reward > np.mean(siblings) + 1e-9)
        assert "advantage" not in record.series, "one number for the chain"
        if not record.num_trained:
            assert not record.series
            continue
        own, entropy = values(record, "trainer_logprob", count), values(record, "entropy", count)
        for place, flag in enumerate(wanted):
            assert np.isnan(own[place]) != flag
            assert np.isnan(entropy[place]) != flag
            if flag:
                assert_close_to_norm(own[place], logprobs[place], scale=1.0, of="of the weights before the update")
                assert 0 < entropy[place] < np.log(VOCABULARY) + 1e-2
    assert some == 1, "one chain is trained in part"
    assert learner.token_records() == [], "the tensors are freed"


def test_advantages_that_differ_by_token_are_kept():
    learner = learner_of(tiny_llama(VOCABULARY), "ppo", critic_warmup_steps=0)
    groups = make_groups(learner.model)
    learner.update(groups)
    rows = {row.trajectory: row for row in learner.last_samples}
    for record in learner.token_records():
        row = rows[record.trajectory]
        own = row.advantages[row.mask]
        series = values(record, "advantage", len(own))
        assert (own == own[0]).all() if series is None else series.tolist() == own.tolist()
        assert record.advantage == pytest.approx(own.mean())
    assert len(rows) > 3


@pytest.mark.parametrize(
    ("algorithm", "rewards", "options"),
    [("grpo", ((1, 1), (0, 0)), {}), ("ppo", ((1, 0), (0, 1)), {"critic_warmup_steps": 5})],
)
def test_nothing_was_trained_in_a_step_without_an_optimizer_step_of_the_policy(algorithm, rewards, options):
    learner = learner_of(tiny_llama(VOCABULARY), algorithm, **options)
    metrics = learner.update(make_groups(learner.model, rewards=rewards))
    assert metrics["train/skipped"] == 1.0
    records = learner.token_records()
    assert [record.num_trained for record in records] == [0] * 4
    assert all("trained" not in record.series and "trainer_logprob" not in record.series for record in records)


def test_a_chain_that_cannot_be_trained_has_no_record():
    learner = learner_of(tiny_llama(VOCABULARY))
    groups = make_groups(learner.model)
    groups[0][1].reward = None
    learner.update(groups)
    assert groups[0][1].id not in {record.trajectory for record in learner.token_records()}
