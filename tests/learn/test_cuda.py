"""On a CUDA device an update gives the gradient it gives on a CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.learn.chains import tiny_llama
from tests.learn.test_learner import VOCABULARY, gradient, learner_of, make_groups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_gradient_on_cuda_is_that_on_cpu(algorithm):
    model = tiny_llama(VOCABULARY)
    groups = make_groups(model)
    other = copy.deepcopy(model).cuda()
    loss = {"kl_coef": 0.1, "kl_in": "loss", "entropy_coef": 0.01}
    here, there = learner_of(model, algorithm, loss=loss), learner_of(other, algorithm, loss=loss)
    first, second = here.update(groups), there.update(groups)
    assert second["train/logprob_gap"] < 1e-3
    assert first["train/loss"] == pytest.approx(second["train/loss"], rel=1e-3, abs=1e-5)
    torch.testing.assert_close(gradient(here), gradient(there).cpu(), rtol=1e-2, atol=1e-4)
    assert next(other.parameters()).is_cuda


def test_bfloat16_on_cuda_trains_through_float32_masters():
    model = tiny_llama(VOCABULARY).cuda().to(torch.bfloat16)
    groups = make_groups(tiny_llama(VOCABULARY))
    learner = learner_of(model, lr=1e-4, epochs=2, num_minibatches=2)
    assert learner.update(groups)["train/optimizer_steps"] > 1
    assert learner.state_dict()["optimizer"]["masters"][0].dtype == torch.float32
