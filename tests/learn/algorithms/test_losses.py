"""Losses, KL estimators, entropy and aggregation against hand-worked values and naive loops."""

from __future__ import annotations

import math

import pytest
import torch

from agentfly.learn.algorithms.losses import clipped_surrogate, entropy, kl_divergence, token_weights, value_loss


def surrogate(ratios, advantages, **options):
    new = torch.tensor(ratios).log()
    loss, cut = clipped_surrogate(new, torch.zeros(len(ratios)), torch.tensor(advantages), **options)
    return loss.tolist(), cut.tolist()


def test_the_clipped_surrogate_by_hand():
    loss, cut = surrogate([1.0, 1.5, 0.5, 1.5, 0.5], [2.0, 1.0, 1.0, -1.0, -1.0], clip_low=0.2, clip_high=0.3)
    #  1 -> -2;  1.5 cut to 1.3 -> -1.3;  0.5 is not cut where that would help -> -0.5;  1.5 -> +1.5;  0.5 cut to 0.8 -> +0.8
    assert loss == pytest.approx([-2.0, -1.3, -0.5, 1.5, 0.8])
    assert cut == [0, 1, 0, 0, 1]


def test_the_dual_clip_limits_the_loss_of_bad_tokens_only():
    loss, cut = surrogate([10.0, 10.0, 2.0], [-1.0, 1.0, -1.0], clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert loss == pytest.approx([3.0, -1.2, 2.0])
    assert cut == [1, 1, 0]


def test_a_cut_token_has_no_gradient_and_a_free_one_has_the_policy_gradient():
    new = torch.tensor([1.5, 1.0]).log().requires_grad_()
    loss, _ = clipped_surrogate(new, torch.zeros(2), torch.tensor([1.0, 2.0]), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([0.0, -2.0])


def test_a_runaway_ratio_stays_finite():
    loss, _ = clipped_surrogate(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2)
    assert torch.isfinite(loss).all()


def test_value_loss_by_hand():
    values, old, returns = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.9]), torch.tensor([2.0, 2.0])
    assert value_loss(values, old, returns, clip=None).tolist() == pytest.approx([0.5, 0.5])
    # the first may only move to 0.2, which is 1.8 away: 0.5 * 3.24
    assert value_loss(values, old, returns, clip=0.2).tolist() == pytest.approx([1.62, 0.5])


def test_kl_estimators_by_hand():
    p, q = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_divergence(p, q, "k1").item() == pytest.approx(math.log(2))
    assert kl_divergence(p, q, "k2").item() == pytest.approx(0.5 * math.log(2) ** 2)
    assert kl_divergence(p, q, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))


def test_k1_and_k3_average_to_the_true_divergence_and_k3_is_never_negative():
    torch.manual_seed(0)
    p, q = torch.log_softmax(torch.randn(6), 0), torch.log_softmax(torch.randn(6), 0)
    true = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        assert (p.exp() * kl_divergence(p, q, kind)).sum() == pytest.approx(true.item(), abs=1e-6)
    assert (kl_divergence(p, q, "k3") >= 0).all()


def test_entropy_by_hand_and_by_definition():
    assert entropy(torch.zeros(1, 8)).item() == pytest.approx(math.log(8))
    logits = torch.tensor([[1.0, -2.0, 0.5, 30.0], [3.0, 3.0, -1.0, 0.0]])
    expected = [-sum(p * math.log(p) for p in row if p > 0) for row in torch.softmax(logits.double(), -1).tolist()]
    assert entropy(logits).tolist() == pytest.approx(expected, abs=1e-5)


def test_aggregation_by_hand():
    losses = [[1.0, 3.0], [5.0, 5.0, 5.0, 1.0]]  # means 2 and 4, sums 4 and 16

    def total(mode, **options):
        weights = token_weights([2, 4], mode, **options)
        return sum(w * sum(chain) for w, chain in zip(weights, losses, strict=True))

    assert total("token_mean") == pytest.approx(20 / 6)
    assert total("sequence_mean") == pytest.approx(3.0)
    assert total("sequence_sum", divisor=8.0) == pytest.approx((4 / 8 + 16 / 8) / 2)
