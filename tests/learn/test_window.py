"""Tokens outside the window: what is still trained, by hand; and the call before the weights change."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from agentfly.errors import ConfigError, InvariantError
from agentfly.learn.algorithms import ALGORITHMS, GRPO, Algorithm
from agentfly.learn.experience import Experience, gather
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.metrics import METRICS
from agentfly.learn.samples import check_tokens, to_samples
from agentfly.learn.settings import OptimSettings
from agentfly.types import Outcome
from tests.close import ROUNDING, assert_close_to_norm
from tests.learn.chains import tiny_llama
from tests.learn.test_learner import (
    VOCABULARY,
    gradient,
    learner_of,
    make_groups,
    plain_gradient,
    score,
    spoil_log_probs,
    weights_of,
)

NOW = 20


def old_groups(model, *, masked=(), version=NOW, **options):
    """Three groups at version 20; the ages of the tokens of a chain go down from `masked[group, chain]` to 0, turn by turn."""
    groups = make_groups(model, **{"turns": 3, **options})
    for g, group in enumerate(groups):
        for c, trajectory in enumerate(group):
            oldest = dict(masked).get((g, c), 0)
            for number, turn in enumerate(trajectory.turns):
                reply = turn.completion
                reply.versions[:] = [version - max(0, oldest - number)] * len(reply.versions)
    return groups


AGES = {(0, 0): 2, (0, 2): 3, (2, 0): 9, (2, 1): 1}
"""With a window of 1: one chain loses its first turn, one its first two, one all three, one nothing."""


def at_version(learner, version=NOW):
    learner._version = version
    return learner


def tokens_by_hand(model, groups, window):
    """Per chain: log-probs with gradient, the engine's, and whether each token is inside the window."""
    found = []
    for group in groups:
        for trajectory in group:
            ids, here, sampled, inside = [], [], [], []
            for turn in trajectory.turns:
                ids = turn.context_ids if turn.restarts else ids + turn.context_ids
                ids = ids + turn.completion.token_ids
                here.append(score(model, ids)[len(ids) - len(turn.completion.token_ids) - 1 :])
                sampled += turn.completion.logprobs
                inside += [NOW - version <= window for version in turn.completion.versions]
            found.append((torch.cat(here), torch.tensor(sampled), torch.tensor(inside)))
    return found


def advantages_of(learner, groups):
    """Per chain, those that the learner stored in its rows."""
    found = {}
    for row in learner.last_samples:
        found.setdefault(row.trajectory, []).append(torch.tensor(row.advantages[row.mask]))
    return [torch.cat(found[trajectory.id]).float() for group in groups for trajectory in group]


def weights_by_hand(inside, aggregation, divisor):
    counts = [int(part.sum()) for part in inside]
    chains = sum(count > 0 for count in counts)
    of = {
        "token_mean": lambda n: 1 / sum(counts),
        "sequence_mean": lambda n: 1 / (chains * n),
        "sequence_sum": lambda n: 1 / (chains * divisor),
    }[aggregation]
    return [of(count) if count else 0.0 for count in counts]


@pytest.mark.parametrize(
    ("name", "budget"), [*((name, 10_000) for name in sorted(ALGORITHMS)), ("grpo", 12), ("gspo", 12), ("ppo", 12)]
)
def test_only_tokens_inside_the_window_are_trained_and_counted(name, budget):
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model, masked=AGES, splits=budget == 12)
    options = {"critic_warmup_steps": 0, "critic_minibatches": 1, "critic_epochs": 1} if name == "ppo" else {}
    if ALGORITHMS[name].needs_reference:
        options["reference"] = tiny_llama(VOCABULARY, seed=5)
    learner = at_version(learner_of(copy.deepcopy(model), name, max_tokens_per_batch=budget, **options))
    metrics = learner.update(groups, window=1)
    chains = tokens_by_hand(model, groups, 1)
    settings = learner.loss
    weights = weights_by_hand([inside for _, _, inside in chains], settings.aggregation, settings.sequence_divisor)
    advantages = advantages_of(learner, groups)
    loss = sum(
        -(weight * part * logprobs)[inside].sum()
        for weight, part, (logprobs, _, inside) in zip(weights, advantages, chains, strict=True)
    )
    assert_close_to_norm(gradient(learner), plain_gradient(model, loss))
    masked = sum(int((~inside).sum()) for _, _, inside in chains)
    assert masked > 6
    assert metrics["train/masked_tokens"] == masked
    assert metrics["train/untrainable_chains"] == 1, "one chain is wholly outside"
    assert metrics["train/lag_max"] == 1
    ages = [NOW - v for g in groups for t in g for turn in t.turns for v in turn.completion.versions]
    assert metrics["train/lag_mean"] == pytest.approx(np.mean([age for age in ages if age <= 1]))
    assert set(metrics) <= set(METRICS)
    everything = at_version(learner_of(copy.deepcopy(model), name, **options))
    everything.update(groups)  # without a window
    for ours, theirs in zip(advantages, advantages_of(everything, groups), strict=True):
        assert torch.equal(ours, theirs), "rewards and baselines are those of the whole group"


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_divisors_count_trained_tokens_and_chains_only(aggregation):
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model, masked=AGES)
    loss = {"aggregation": aggregation} | ({"sequence_divisor": 7.0} if aggregation == "sequence_sum" else {})
    learner = at_version(learner_of(copy.deepcopy(model), loss=loss))
    learner.update(groups, window=0)
    chains = tokens_by_hand(model, groups, 0)
    weights = weights_by_hand([inside for _, _, inside in chains], aggregation, 7.0)
    expected = sum(
        -(weight * part * logprobs)[inside].sum()
        for weight, part, (logprobs, _, inside) in zip(weights, advantages_of(learner, groups), chains, strict=True)
    )
    assert_close_to_norm(gradient(learner), plain_gradient(model, expected))


def test_the_ratio_of_a_chain_is_that_of_its_trained_tokens():
    """GSPO; the engine's log-probs are off by 0.1 where trained and by 3 where masked."""
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model, masked=AGES, rewards=((1, 0, 0.5),))
    for trajectory in groups[0]:
        for turn in trajectory.turns:
            off = 0.1 if NOW - turn.completion.versions[0] <= 1 else 3.0
            turn.completion.logprobs[:] = [p - off for p in turn.completion.logprobs]
    wide = {"clip_low": 0.9, "clip_high": 9.0, "old_logprobs": "sampled"}
    learner = at_version(learner_of(copy.deepcopy(model), "gspo", loss=wide))
    metrics = learner.update(groups, window=1)
    expected = 0.0
    for part, (logprobs, sampled, inside) in zip(advantages_of(learner, groups), tokens_by_hand(model, groups, 1), strict=True):
        ratio = (logprobs - sampled)[inside].mean().exp()
        assert_close_to_norm(ratio, np.exp(0.1))
        expected = expected - part[0] * ratio / 3
    assert_close_to_norm(gradient(learner), plain_gradient(model, expected))
    assert_close_to_norm(metrics["train/policy_loss"], expected, scale=1.0)


def test_a_loss_over_the_minibatch_and_every_other_term_see_trained_tokens_only():
    seen = []

    def loss(tokens, settings):
        seen.append(len(tokens.logprobs))
        assert (tokens.weights > 0).all()
        return -tokens.advantages * tokens.log_ratio.exp() + 0 * tokens.logprobs.mean()

    algorithm = Algorithm(name="own", credit=GRPO.credit, loss=loss, loss_scope="minibatch", reads=GRPO.reads)
    model, reference = tiny_llama(VOCABULARY), tiny_llama(VOCABULARY, seed=5)
    groups = old_groups(model, masked=AGES)
    settings = algorithm.settings({"kl_coef": 0.1, "entropy_coef": 0.01, "kl_kind": "k2"})
    optim = OptimSettings(lr=1e-2, max_grad_norm=1e9, max_tokens_per_batch=40)
    learner = PolicyLearner(copy.deepcopy(model), algorithm, loss=settings, optim=optim, reference=reference)
    at_version(learner).update(groups, window=1)
    chains = tokens_by_hand(model, groups, 1)
    theirs = tokens_by_hand(reference, groups, 1)
    count = sum(int(inside.sum()) for _, _, inside in chains)
    assert seen == [count], "one call with the trained tokens of the whole minibatch"
    expected = 0.0
    for part, (logprobs, _, inside), (other, _, _) in zip(advantages_of(learner, groups), chains, theirs, strict=True):
        gap = logprobs - other.detach()
        expected = expected + ((-part * logprobs + 0.1 * 0.5 * gap**2) / count)[inside].sum()
    expected = expected - 0.01 * entropy_by_hand(model, groups, 1) / count
    assert_close_to_norm(gradient(learner), plain_gradient(model, expected))


def entropy_by_hand(model, groups, window):
    total = 0.0
    for trajectory in (t for group in groups for t in group):
        ids = []
        for turn in trajectory.turns:
            ids = ids + turn.context_ids + turn.completion.token_ids
            p = torch.softmax(model(torch.tensor([ids])).logits[0, -len(turn.completion.token_ids) - 1 : -1], -1)
            if NOW - turn.completion.versions[0] <= window:
                total = total - (p * p.log()).sum()
    return total


@pytest.mark.parametrize("critic", ["copy", "shared"])
def test_a_critic_learns_from_trained_tokens_only(critic):
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model, masked=AGES)
    options = {} if critic == "shared" else {"critic_warmup_steps": 0, "critic_minibatches": 1, "critic_epochs": 1}
    learner = at_version(learner_of(copy.deepcopy(model), "ppo", loss={"critic": critic, "value_clip": 0}, **options))
    metrics = learner.update(groups, window=1)
    totals = [trajectory.total_reward for group in groups for trajectory in group]
    inside = [part for _, _, part in tokens_by_hand(model, groups, 1)]
    returns = torch.cat([torch.full((int(part.sum()),), total) for part, total in zip(inside, totals, strict=True)])
    start = returns.mean() if critic == "copy" else 0.0  # a separate critic starts at the mean return
    assert_close_to_norm(metrics["train/value_loss"], (0.5 * (returns - start) ** 2).mean())


def test_a_step_whose_tokens_are_all_outside_changes_nothing():
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model, masked={(g, c): 9 for g in range(3) for c in range(3)})
    for name, options in (("grpo", {}), ("ppo", {"critic_warmup_steps": 0}), ("ppo", {"loss": {"critic": "shared"}})):
        learner = at_version(learner_of(copy.deepcopy(model), name, **options))
        metrics = learner.update(groups, changing=pytest.fail, window=1)
        assert (metrics["train/skipped"], metrics["train/untrainable_chains"], learner.version) == (1, 9, NOW)
        assert metrics["train/zero_advantage_groups"] == 3
        assert "train/lag_mean" not in metrics
        assert torch.equal(weights_of(learner.model), weights_of(model))


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo"])
def test_a_token_outside_the_window_that_would_be_trained_stops_the_update(name, monkeypatch):
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model, masked=AGES)
    learner = at_version(learner_of(model, name, **({"critic_warmup_steps": 0} if name == "ppo" else {})))
    before = weights_of(model)
    monkeypatch.setattr(Experience, "only_trained", lambda self, batch: batch)
    with pytest.raises(InvariantError, match=r"\d versions old would be trained, but the window is 1"):
        learner.update(groups, changing=pytest.fail, window=1)
    assert torch.equal(weights_of(model), before)
    assert (learner.version, learner.half_updated) == (NOW, False)
    learner.update(groups)  # without a window every token is trained
    with pytest.raises(ConfigError, match="0 or more"):
        learner.update(groups, window=-1)


def test_a_window_that_holds_every_token_changes_no_number():
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model, masked=AGES)
    found = []
    for window in (None, 9):
        learner = at_version(learner_of(copy.deepcopy(model), epochs=2, num_minibatches=2))
        found.append((learner.update(groups, window=window), weights_of(learner.model)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_the_gap_is_measured_on_chains_that_the_current_weights_drew_completely():
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model, masked={(0, 0): 1})
    for turn in groups[0][0].turns[1:]:  # current tokens of a chain that began under older weights
        assert turn.completion.versions[0] == NOW
        turn.completion.logprobs[:] = [p - 2.0 for p in turn.completion.logprobs]
    for steps in ({}, {"epochs": 2}):
        assert at_version(learner_of(copy.deepcopy(model), **steps)).update(groups)["train/logprob_gap"] < ROUNDING
    groups[0][1].turns[0].completion.logprobs[0] -= 2.0
    assert at_version(learner_of(copy.deepcopy(model))).update(groups)["train/logprob_gap"] > 0.01


@pytest.mark.parametrize("name", ["grpo", "ppo", "shared"])
@pytest.mark.parametrize("steps", [{}, {"epochs": 2, "num_minibatches": 2}])
def test_the_change_is_announced_once_after_the_check_and_before_the_first_step(name, steps):
    model = tiny_llama(VOCABULARY)
    learner = learner_of(
        model,
        "grpo" if name == "grpo" else "ppo",
        loss={"critic": "shared"} if name == "shared" else {},
        **({"critic_warmup_steps": 0, "critic_epochs": 1, "critic_minibatches": 1} if name == "ppo" else {}),
        **steps,
    )
    before, heard = weights_of(model), []

    def changing():
        heard.append("changing")
        assert torch.equal(weights_of(model), before)
        assert (learner.version, learner.half_updated) == (0, False)

    groups = make_groups(model, splits=True)

    def check(metrics):
        heard.append("check")
        assert [trajectory for trajectory, _ in learner.last_chains] == [t for group in groups for t in group]
        for trajectory, rows in learner.last_chains:  # the rows of this update, before it changes the weights
            assert rows == to_samples(trajectory) or any(row.advantages.any() for row in rows)
            check_tokens(trajectory, rows, versions=range(1))

    learner.update(groups, check, changing)
    assert heard == ["check", "changing"]
    assert not torch.equal(weights_of(model), before)
    learner.update(make_groups(model))
    assert heard == ["check", "changing"], "not kept for the next update"


@pytest.mark.parametrize("name", ["grpo", "ppo", "shared"])
def test_if_the_announcement_raises_nothing_has_changed(name):
    model = tiny_llama(VOCABULARY)
    loss = {"critic": "shared"} if name == "shared" else {}
    options = {"critic_warmup_steps": 0, "critic_epochs": 1, "critic_minibatches": 1} if name == "ppo" else {}
    learner = learner_of(model, "grpo" if name == "grpo" else "ppo", loss=loss, epochs=2, **options)
    twin = learner_of(copy.deepcopy(model), "grpo" if name == "grpo" else "ppo", loss=loss, epochs=2, **options)

    def refuse():
        raise TimeoutError("the engine did not stop")

    before = weights_of(model)
    with pytest.raises(TimeoutError):
        learner.update(make_groups(model), changing=refuse)
    assert torch.equal(weights_of(model), before)
    assert (learner.version, learner.half_updated) == (0, False)
    assert all(p.grad is None for p in model.parameters())
    assert learner.update(make_groups(model)) == twin.update(make_groups(twin.model)), "as if the first call had not been"
    assert torch.equal(weights_of(model), weights_of(twin.model))


def test_an_update_that_leaves_the_engines_weights_alone_announces_nothing(monkeypatch):
    model = tiny_llama(VOCABULARY)
    nothing = make_groups(model, rewards=((1, 1), (0.5, 0.5)))
    learner_of(model).update(nothing, changing=pytest.fail)
    warming = learner_of(model, "ppo", critic_warmup_steps=1)
    assert warming.update(make_groups(model), changing=pytest.fail)["train/critic_warmup"] == 1
    heard = []
    learner_of(model, "ppo", loss={"critic": "shared"}).update(nothing, changing=lambda: heard.append(1))
    assert heard == [1], "a shared value head trains the backbone"
    spoil_log_probs(monkeypatch)
    with pytest.raises(InvariantError, match="the loss is nan"):
        learner_of(model, loss={"old_logprobs": "sampled"}).update(make_groups(model), changing=pytest.fail)


def mixed_groups(model):
    """The first token of the second turn of one chain is a version older than the rest of its reply."""
    groups = old_groups(model)
    reply = groups[2][0].turns[1].completion
    assert len(reply.versions) > 1
    reply.versions[0] = NOW - 1
    return groups


@pytest.mark.parametrize("recomputes", [True, False])
def test_the_rest_of_a_reply_over_older_keys_is_corrected_and_the_other_replies_of_its_chain_are_exact(recomputes):
    groups = mixed_groups(tiny_llama(VOCABULARY))
    found = gather(groups, version=NOW, device=torch.device("cpu"), recomputes=recomputes)
    chain = found.tokens_of(6)
    lengths = [len(turn.completion.token_ids) for turn in groups[2][0].turns]
    rest = [not recomputes] * (lengths[1] - 1)
    assert found.inexact[chain].tolist() == [False] * lengths[0] + [True, *rest] + [False] * sum(lengths[2:])
    assert int(found.inexact.sum()) == 1 + sum(rest)
    assert torch.equal(found.current, ~found.inexact)


@pytest.mark.parametrize("recomputes", [True, False])
def test_the_learner_weights_tokens_over_older_keys_if_its_engine_keeps_them(recomputes):
    model = tiny_llama(VOCABULARY)
    groups = mixed_groups(model)
    wrong = groups[2][0].turns[1].completion.logprobs
    wrong[1:] = [value - 3.0 for value in wrong[1:]]  # far below the learner's: the weight reaches its cap
    learner = at_version(PolicyLearner(copy.deepcopy(model), "grpo", recomputes=recomputes))
    metrics = learner.update(groups)
    assert metrics["train/correction_clipped"] == (0.0 if recomputes else pytest.approx((len(wrong) - 1) / len(wrong)))


@pytest.mark.parametrize("outcome", [Outcome.MAX_TOKENS, Outcome.MAX_TURNS, Outcome.MAX_TIME])
def test_truncated_chains_are_masked_on_request_and_still_compared_with_their_siblings(outcome):
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model)
    cut = groups[0][1]
    cut.outcome = outcome
    learners = {kind: at_version(learner_of(copy.deepcopy(model), loss={"truncated": kind})) for kind in ("train", "mask")}
    metrics = {kind: learner.update(groups) for kind, learner in learners.items()}
    assert metrics["train"]["train/masked_tokens"] == 0
    assert metrics["mask"]["train/masked_tokens"] == cut.num_sampled
    for ours, theirs in zip(advantages_of(learners["mask"], groups), advantages_of(learners["train"], groups), strict=True):
        assert torch.equal(ours, theirs), "the baseline holds the truncated chain"
    records = {
        kind: {record.trajectory: record.num_trained for record in learner.token_records()}
        for kind, learner in learners.items()
    }
    assert records["train"][cut.id] == cut.num_sampled
    assert records["mask"] == records["train"] | {cut.id: 0}
