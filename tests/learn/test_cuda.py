"""On a CUDA device an update gives the gradient it gives on a CPU."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from agentfly.learn.batching import MicroBatch, Rows
from agentfly.learn.model.backbone import Backbone
from agentfly.learn.packed import run_packed
from agentfly.learn.samples import to_samples
from tests.learn.chains import chain_of_ids, tiny_llama
from tests.learn.test_learner import VOCABULARY, gradient, learner_of, make_groups
from tests.needs import needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]


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


def test_cuda_graphs_give_the_hidden_states_and_gradients_of_plain_runs():
    model = tiny_llama(VOCABULARY, width=64).cuda().to(torch.bfloat16)
    backbone = Backbone(model.model)
    assert backbone.pack() == "shared"
    assert backbone._graphs is not None
    parameters = list(model.model.parameters())
    rng = random.Random(0)

    def batch(groups: int) -> MicroBatch:
        samples = []
        for group in range(groups):
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(60, 90))]
            for number in range(4):
                reply = [rng.randrange(VOCABULARY) for _ in range(rng.randint(5, 40))]
                samples += to_samples(chain_of_ids(prompt, reply, 1.0, group=f"{group}", number=number))
        rows = Rows(samples)
        return rows.packed(range(len(rows)), torch.device("cuda"), share=True)

    for number, groups in enumerate((16, 16, 16, 12, 21, 2, 16)):
        line = batch(groups)
        assert line.layout is not None
        push = torch.randn(len(line.where), 64, device="cuda", dtype=torch.bfloat16)
        found = []
        for hidden in (backbone(line), run_packed(backbone._replica, line.input_ids, line.layout)[0][line.where]):
            found.append((hidden.detach().clone(), torch.autograd.grad(hidden, parameters, push)))
        assert bool(backbone._graphs._made) == (number >= 1)
        (got, got_gradients), (want, want_gradients) = found
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        for a, b in zip(got_gradients, want_gradients, strict=True):
            assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm()
    assert len(backbone._graphs._made) == 3  # also those for longer and shorter lines, captured with the first
    assert len(backbone._graphs._unserved) == 2
