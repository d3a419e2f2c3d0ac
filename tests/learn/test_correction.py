"""Importance weights between sampler and learner, against formulas in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from agentfly.errors import ConfigError, InvariantError
from agentfly.learn.algorithms import ALGORITHMS, GRPO, Algorithm
from agentfly.learn.algorithms.losses import correction_weights
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.logprobs import Scorer
from agentfly.learn.settings import LossSettings, OptimSettings
from tests.close import assert_close_to_norm
from tests.learn.chains import tiny_llama
from tests.learn.test_learner import VOCABULARY, gradient, learner_of, make_groups, plain_gradient, spoil_log_probs, weights_of
from tests.learn.test_window import AGES, NOW, advantages_of, at_version, old_groups, tokens_by_hand, weights_by_hand

KINDS = ["truncate", "mask", "sequence"]


def drifted(model, *, masked=AGES, seed=0, size=1.0, current=False, **options):
    """Groups whose older tokens (or all) were drawn with other log-probs than the model's."""
    rng = np.random.default_rng(seed)
    groups = old_groups(model, masked=masked, **options)
    for trajectory in (t for group in groups for t in group):
        for turn in trajectory.turns:
            reply = turn.completion
            if current or reply.versions[0] < NOW:
                reply.logprobs[:] = [
                    min(p + d, -1e-3) for p, d in zip(reply.logprobs, rng.normal(0, size, len(reply.logprobs)), strict=True)
                ]
    return groups


def ages_of(groups):
    return [np.array([NOW - v for turn in t.turns for v in turn.completion.versions]) for group in groups for t in group]


def reference(gaps, corrected, kind, cap):
    """Per chain the weight of each token; and the weights of what is corrected, tokens or chains."""
    weights, counted = [], []
    for gap, where in zip(gaps, corrected, strict=True):
        if kind == "sequence":
            total = np.float64(np.where(where, gap, 0.0).sum())
            weight = np.minimum(np.exp(np.minimum(total, 700)), cap)
            weights.append(np.full(len(gap), weight))
            counted += [(weight, total > np.log(cap))] if where.any() else []
            continue
        ratio = np.exp(np.minimum(gap, 700))
        if kind == "truncate":
            new = np.minimum(ratio, cap)
            clipped = ratio > cap
        else:
            clipped = (ratio > cap) | (ratio < 1 / cap)
            new = np.where(clipped, 0.0, ratio)
        weights.append(np.where(where, new, 1.0))
        counted += list(zip(new[where], clipped[where], strict=True))
    return weights, np.array([w for w, _ in counted]), np.array([c for _, c in counted])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "exact"),
    [("grpo", True), ("grpo", False), ("reinforce++", True), ("gspo", True), ("cispo", True), ("gigpo", True), ("ppo", False)],
)
def test_the_loss_of_each_token_is_weighted_as_the_formula_says(name, exact, kind):
    model = tiny_llama(VOCABULARY)
    groups = drifted(model, current=not exact)
    cap = 1.5
    settings = ALGORITHMS[name].settings({"correction": kind, "correction_cap": cap})
    critic = {"critic_warmup_steps": 0, "critic_epochs": 1, "critic_minibatches": 1} if name == "ppo" else {}
    optim = OptimSettings(lr=1e-2, max_grad_norm=1e9, **critic)
    learner = at_version(PolicyLearner(copy.deepcopy(model), name, loss=settings, optim=optim, exact=exact))
    metrics = learner.update(groups, window=2)
    chains = tokens_by_hand(model, groups, 2)
    inside = [part.numpy() for _, _, part in chains]
    gaps = [(own.detach() - sampled).numpy().astype(np.float64) for own, sampled, _ in chains]
    corrected = [part & ((age > 0) | (not exact)) for part, age in zip(inside, ages_of(groups), strict=True)]
    found, _, _ = reference(gaps, corrected, kind, cap)
    weights = weights_by_hand([part for _, _, part in chains], settings.aggregation, settings.sequence_divisor)
    # One optimizer step: the ratio to the learner's weights before the update is 1, so nothing is clipped.
    loss = sum(
        -(weight * torch.tensor(w, dtype=torch.float32) * part * own)[here].sum()
        for weight, w, part, (own, _, here) in zip(weights, found, advantages_of(learner, groups), chains, strict=True)
    )
    assert_close_to_norm(gradient(learner), plain_gradient(model, loss))
    if name != "reinforce++" and name != "ppo":  # the group without advantage is not run
        ran = [any(c.advantages.any() for c in rows) for _, rows in learner.last_chains]
    else:
        ran = [True] * len(gaps)
    _, counted, clipped = reference(
        *zip(*[(g, c) for g, c, r in zip(gaps, corrected, ran, strict=True) if r], strict=True), kind, cap
    )
    assert len(counted) > 1
    assert_close_to_norm(metrics["train/ess"], counted.sum() ** 2 / (len(counted) * (counted**2).sum()))
    assert_close_to_norm(metrics["train/correction_mean"], counted.mean())
    assert metrics["train/correction_clipped"] == pytest.approx(clipped.mean())
    assert 0 < clipped.mean() < 1
    assert metrics["train/clip_fraction"] == 0
    gap = np.concatenate([g[part] for g, part, r in zip(gaps, inside, ran, strict=True) if r])
    assert_close_to_norm(metrics["train/mismatch_kl"], (np.exp(gap) - 1 - gap).mean(), scale=1.0)


def test_weights_stay_finite_for_every_difference_and_a_nan_stays_a_nan():
    gaps = torch.tensor([0.0, 0.5, -0.5, 0.7, -0.7, 1e4, -1e4, float("inf"), -float("inf"), float("nan")])
    for kind in ("truncate", "sequence"):
        weights, clipped = correction_weights(gaps, kind, 2.0)
        assert weights[:9].tolist() == pytest.approx([1, np.exp(0.5), np.exp(-0.5), 2, np.exp(-0.7), 2, 0, 2, 0])
        assert clipped.tolist() == [False, False, False, True, False, True, False, True, False, False]
        assert weights[9].isnan()
    weights, clipped = correction_weights(gaps, "mask", 2.0)
    assert weights[:9].tolist() == pytest.approx([1, np.exp(0.5), np.exp(-0.5), 0, 0, 0, 0, 0, 0])
    assert clipped.tolist() == [False] * 3 + [True] * 6 + [False]
    assert weights[9].isnan()


def counting(monkeypatch):
    calls, real = [], Scorer.__call__

    def counted(self, batch, **options):
        calls.append(len(batch.tokens))
        return real(self, batch, **options)

    monkeypatch.setattr(Scorer, "__call__", counted)
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [{}, {"epochs": 2, "num_minibatches": 2}])
def test_the_ratio_is_to_the_learners_weights_before_the_update_in_every_step(kind, steps, monkeypatch):
    seen = []

    def loss(tokens, settings):
        seen.append(tokens)
        return -tokens.advantages * tokens.log_ratio.exp()

    algorithm = Algorithm(name="own", credit=GRPO.credit, loss=loss, skips_zero_advantages=True, reads=frozenset())
    model = tiny_llama(VOCABULARY)
    groups = drifted(model, rewards=((1, 0, 0.2), (0, 0, 0), (2, -1, 0)))
    settings = algorithm.settings({"correction": kind})
    optim = OptimSettings(lr=1e-2, max_grad_norm=1e9, **steps)
    learner = at_version(PolicyLearner(copy.deepcopy(model), algorithm, loss=settings, optim=optim))
    calls = counting(monkeypatch)
    learner.update(groups)
    chains = tokens_by_hand(model, groups, 99)
    own = torch.cat([part.detach() for part, _, _ in chains])
    gaps = [(part.detach() - sampled).numpy().astype(np.float64) for part, sampled, _ in chains]
    expected, _, _ = reference(gaps, [age > 0 for age in ages_of(groups)], kind, 2.0)
    expected = torch.tensor(np.concatenate(expected), dtype=torch.float32)
    starts = np.cumsum([0, *map(len, gaps)])
    trained = sum(len(gap) for number, gap in enumerate(gaps) if number not in (3, 4, 5))  # that group has no advantage
    assert sum(len(tokens.logprobs) for tokens in seen) == trained * (1 if not steps else 2)
    assert sum(calls) == trained * (1 if not steps else 3), "no pass more than the recomputation before several steps"
    for tokens in seen:
        numbers = torch.cat([torch.arange(starts[c], starts[c + 1]) for c in tokens.chains.unique().tolist()])
        assert_close_to_norm(tokens.old_logprobs.sort().values, own[numbers].sort().values)
        plain = tokens.weights / tokens.weights.max()  # without the divisor of the mean
        wanted = expected[numbers] / expected[numbers].max()
        assert_close_to_norm(plain.sort().values, wanted.sort().values)


@pytest.mark.parametrize(
    ("name", "steps"), [("grpo", {}), ("grpo", {"epochs": 2}), ("gspo", {}), ("gspo", {"epochs": 2}), ("ppo", {})]
)
def test_the_weight_of_a_sequence_spans_rows_and_micro_batches(name, steps):
    model = tiny_llama(VOCABULARY)
    groups = drifted(model, splits=True)
    found = []
    for budget in (10_000, 12):
        options = {"critic_warmup_steps": 0, "critic_epochs": 1, "critic_minibatches": 1} if name == "ppo" else {}
        learner = learner_of(
            copy.deepcopy(model),
            name,
            loss={"correction": "sequence"},
            lr=1e-4,
            max_tokens_per_batch=budget,
            **options,
            **steps,
        )
        metrics = at_version(learner).update(groups, window=2)
        found.append((gradient(learner), {k: v for k, v in metrics.items() if "padding" not in k}))
    (want, before), (got, after) = found
    assert_close_to_norm(got, want)
    assert after.keys() == before.keys()
    for metric, value in before.items():
        assert_close_to_norm(after[metric], value, scale=1.0, of=metric)


@pytest.mark.parametrize(("name", "steps"), [("grpo", {}), ("gspo", {"epochs": 2, "num_minibatches": 2}), ("ppo", {})])
def test_tokens_that_are_exactly_on_policy_give_the_same_bits_at_the_same_cost(name, steps, monkeypatch):
    model = tiny_llama(VOCABULARY)
    groups = old_groups(model)
    calls = counting(monkeypatch)
    options = {"critic_warmup_steps": 0, "critic_epochs": 1, "critic_minibatches": 1} if name == "ppo" else {}
    found = []
    for kind in ("off", *KINDS):
        calls.clear()
        learner = at_version(learner_of(copy.deepcopy(model), name, loss={"correction": kind}, **options, **steps))
        found.append((learner.update(groups, window=3), weights_of(learner.model), list(calls)))
    for metrics, weights, passes in found[1:]:
        assert metrics == found[0][0]
        assert torch.equal(weights, found[0][1])
        assert passes == found[0][2]
    assert not {"train/ess", "train/mismatch_kl", "train/correction_mean", "train/correction_clipped"} & set(found[0][0])


def test_off_keeps_the_samplers_denominator_for_older_tokens_and_still_measures_the_mismatch():
    model = tiny_llama(VOCABULARY)
    groups = drifted(model)
    learner = at_version(learner_of(copy.deepcopy(model), loss={"correction": "off"}))
    metrics = learner.update(groups)
    assert metrics["train/clip_fraction"] > 0, "the ratio to the sampler leaves the clip range"
    assert metrics["train/mismatch_kl"] > 0.01
    assert "train/ess" not in metrics


def test_the_kl_in_the_reward_is_that_of_the_learners_weights():
    model, other = tiny_llama(VOCABULARY), tiny_llama(VOCABULARY, seed=5)
    groups = drifted(model)
    learner = at_version(learner_of(copy.deepcopy(model), "rloo", loss={"kl_coef": 0.1}, reference=other))
    metrics = learner.update(groups, window=1)
    own = torch.cat([part for part, _, _ in tokens_by_hand(model, groups, 9)])
    theirs = torch.cat([part for part, _, _ in tokens_by_hand(other, groups, 9)])
    assert_close_to_norm(metrics["train/reference_kl"], (own - theirs).mean(), scale=1.0, of="masked tokens included")
    inside = torch.cat([part for _, _, part in tokens_by_hand(model, groups, 1)])
    sampled = torch.cat([part for _, part, _ in tokens_by_hand(model, groups, 1)])
    gap = (own.detach() - sampled)[inside]
    assert_close_to_norm(metrics["train/mismatch_kl"], (gap.exp() - 1 - gap).mean(), scale=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_no_number_stops_the_step(kind, monkeypatch):
    model = tiny_llama(VOCABULARY)
    groups = drifted(model)
    spoil_log_probs(monkeypatch)
    learner = at_version(learner_of(model, loss={"correction": kind}))
    before = weights_of(model)
    with pytest.raises(InvariantError, match="the loss is nan"):
        learner.update(groups, changing=pytest.fail)
    assert torch.equal(weights_of(model), before)


def test_stale_data_with_truncated_weights_still_learns():
    """Chains of the first weights, trained four times: the weights hold the policy near what was sampled."""
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, lr=2e-3)
    groups = make_groups(model)
    sizes = [learner.update(groups).get("train/ess", 1.0) for _ in range(4)]
    assert sizes[0] == 1.0
    assert all(0 < size < 1 for size in sizes[1:])
    assert sizes[3] < sizes[1], "the further the weights move, the fewer tokens count"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"old_logprobs": "sampled", "correction": "truncate"}, "would count it twice"),
        ({"correction": "off", "correction_cap": 3.0}, "loss.correction_cap is not used"),
        ({"old_logprobs": "sampled", "correction_cap": 3.0}, "loss.correction_cap is not used"),
        ({"correction_cap": 1.0}, "loss.correction_cap"),
        ({"correction": "clip"}, "loss.correction"),
    ],
)
def test_contradictions_are_refused(keys, sentence):
    with pytest.raises(ConfigError) as caught:
        GRPO.settings(keys)
    assert sentence in str(caught.value)


def test_the_sampled_denominator_turns_the_correction_off():
    assert GRPO.settings().correction == "truncate"
    assert GRPO.settings({"old_logprobs": "recompute"}).correction == "truncate"
    assert GRPO.settings({"old_logprobs": "sampled"}).correction == "off"
    own = Algorithm(name="own", credit=GRPO.credit, defaults={"old_logprobs": "sampled"})
    own.check(own.settings())
    assert own.settings().correction == "off"
    with pytest.raises(ConfigError, match="would count it twice"):
        LossSettings(old_logprobs="sampled")
    LossSettings(old_logprobs="recompute", correction="off").check_chains(0, 8)
    LossSettings(old_logprobs="auto", correction="off").check_chains(2, 8)
    with pytest.raises(ConfigError, match="as if the current ones had drawn them"):
        LossSettings(old_logprobs="recompute", correction="off").check_chains(1, 8)
