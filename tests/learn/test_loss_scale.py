"""float16: small gradients are not lost, large ones are computed again, and neither is seen in the result."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from agentfly.errors import InvariantError
from agentfly.learn import optim as loss_scale
from agentfly.learn.model.lora import adapt
from agentfly.learn.samples import to_samples
from agentfly.learn.settings import LoraSettings, OptimSettings
from agentfly.learn.supervised import SupervisedLearner
from tests.learn.chains import tiny_llama
from tests.learn.test_learner import VOCABULARY, gradient, learner_of, make_groups

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def half_of(model: Any) -> tuple[Any, Any]:
    """The model with weights that float16 can hold, and its float16 twin."""
    half = copy.deepcopy(model).to(torch.float16)
    return copy.deepcopy(half).float(), half


def scale_of(learner: Any) -> loss_scale.LossScale:
    found: loss_scale.LossScale = learner._optimizer._scale
    return found


def step_of(model: Any, algorithm: str = "grpo", *, factor: float | None = None, **optim: Any) -> tuple[Any, dict[str, float]]:
    """One update on rewards so small that float16 cannot hold their gradients."""
    learner = learner_of(model, algorithm, loss={"normalize_std": False} if algorithm == "grpo" else None, **optim)
    if factor is not None:
        scale_of(learner).factor = factor
    tiny = make_groups(copy.deepcopy(model).float(), rewards=((3e-6, 0, 1e-6), (0, 2e-6, -1e-6)))
    return learner, learner.update(tiny)


def test_gradients_too_small_for_float16_are_those_of_float32():
    full, half = half_of(tiny_llama(VOCABULARY))
    want, got = gradient(step_of(full)[0]), gradient(step_of(half)[0])
    lost = gradient(step_of(copy.deepcopy(half), factor=1.0)[0])
    assert (got - want).norm() < 0.02 * want.norm()
    assert (lost - want).norm() > 0.2 * want.norm(), "without a factor this test would prove nothing"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_gradient_that_overflows_is_computed_again_and_counted_once(algorithm):
    _, half = half_of(tiny_llama(VOCABULARY))
    options = {"epochs": 2, "num_minibatches": 2, "lr": 1e-4}  # where a gradient is rounding alone, weights differ by this
    one, calm = step_of(copy.deepcopy(half), algorithm, factor=2.0**16, **options)
    two, after = step_of(half, algorithm, factor=2.0**60, **options)
    assert scale_of(one).factor == 2.0**16
    assert 1.0 < scale_of(two).factor < 2.0**60
    assert after["train/loss_scale"] == scale_of(two).factor
    assert {name for name in after if name != "train/loss_scale"} == {name for name in calm if name != "train/loss_scale"}
    for name in after:
        if name != "train/loss_scale":
            assert after[name] == pytest.approx(calm[name], rel=0.02, abs=1e-6), name
    for a, b in zip(half.parameters(), one.model.parameters(), strict=True):
        assert torch.isfinite(a).all()
        assert (a - b).float().norm() <= 0.02 * b.float().norm()


def test_a_gradient_that_is_not_finite_at_any_factor_is_refused_and_changes_nothing():
    _, half = half_of(tiny_llama(VOCABULARY))
    learner = learner_of(half)
    groups = make_groups(copy.deepcopy(half).float())
    half.model.norm.weight.data.fill_(6e4)  # the hidden states overflow, and so does the loss
    before = [p.detach().clone() for p in half.parameters()]
    with pytest.raises(InvariantError, match="not applied.*use bfloat16"):
        learner.update(groups)
    for a, b in zip(half.parameters(), before, strict=True):
        assert torch.equal(a, b)
    assert learner.version == 0


def test_adapters_on_a_float16_model_are_scaled_too():
    full, half = half_of(tiny_llama(VOCABULARY))
    learners = []
    for model in (full, half):
        adapt(model, LoraSettings(rank=4))
        learners.append(step_of(model)[0])
    want, got = (gradient(learner) for learner in learners)
    assert scale_of(learners[0]).factor == 1.0
    assert (got - want).norm() < 0.05 * want.norm()


def test_a_value_head_in_float32_beside_float16_weights_has_its_gradient_unscaled():
    norms = []
    for model in half_of(tiny_llama(VOCABULARY)):
        learner = learner_of(model, "ppo", loss={"critic": "shared"})
        learner.update(make_groups(copy.deepcopy(model).float()))
        assert learner._modules.value_head is not None
        state = learner._optimizer._adam.state[learner._modules.value_head.linear.weight]
        norms.append(float(state["exp_avg"].norm()))
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert norms[0] > 0


def test_supervised_training_scales_and_computes_again():
    full, half = half_of(tiny_llama(VOCABULARY))
    results = []
    for model, factor in ((full, 1.0), (half, 2.0**60)):
        learner = SupervisedLearner(model, optim=OptimSettings(lr=1e-2, max_grad_norm=1e9))
        learner._optimizer._scale.factor = factor
        groups = make_groups(copy.deepcopy(full))
        samples = [sample for group in groups for chain in group for sample in to_samples(chain)]
        results.append([learner.update(samples)["train/loss"] for _ in range(4)])
    assert results[1] == pytest.approx(results[0], rel=0.02)
    assert results[1][-1] < results[1][0]
    assert 1.0 < learner._optimizer._scale.factor < 2.0**60


def test_the_factor_grows_after_many_steps_and_is_saved(monkeypatch):
    monkeypatch.setattr(loss_scale, "STEPS_TO_DOUBLE", 3)
    scale = loss_scale.LossScale([torch.zeros(1, dtype=torch.float16)])
    for _ in range(5):
        scale.stepped()
    assert scale.factor == 2.0**17
    other = loss_scale.LossScale([torch.zeros(1, dtype=torch.float16)])
    other.load_state_dict(scale.state_dict())
    other.stepped()
    assert other.factor == 2.0**18
    assert other.lower()
    assert other.factor == 2.0**16
    for _ in range(100):
        other.stepped()
    assert other.factor == loss_scale.LARGEST_SCALE
    _, half = half_of(tiny_llama(VOCABULARY))
    learner, _ = step_of(half, factor=2.0**30)
    again = learner_of(copy.deepcopy(half))
    again.load_state_dict(learner.state_dict())
    assert scale_of(again).factor == scale_of(learner).factor != loss_scale.FIRST_SCALE


def test_a_run_resumed_in_float16_starts_with_the_first_factor():
    _, half = half_of(tiny_llama(VOCABULARY))
    other, _ = step_of(copy.deepcopy(half).to(torch.bfloat16))
    learner = learner_of(half)
    learner.load_state_dict(other.state_dict())
    assert scale_of(learner).factor == loss_scale.FIRST_SCALE


def test_other_formats_have_no_factor():
    for dtype in (torch.float32, torch.bfloat16):
        scale = loss_scale.LossScale([torch.zeros(1, dtype=dtype)])
        for _ in range(1000):
            scale.stepped()
        assert (scale.factor, scale.active, scale.lower()) == (1.0, False, False)
    _, metrics = step_of(tiny_llama(VOCABULARY))
    assert "train/loss_scale" not in metrics
    assert math.isfinite(metrics["train/loss"])
