"""Supervised training: likelihood of masked tokens, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch

from agentfly.errors import ConfigError, InvariantError
from agentfly.learn.samples import to_samples
from agentfly.learn.settings import OptimSettings
from agentfly.learn.supervised import SupervisedLearner
from tests.close import assert_close_to_norm
from tests.learn.chains import chain_of_ids, tiny_llama
from tests.learn.test_learner import gradient, plain_gradient, weights_of

ROWS = [
    *to_samples(chain_of_ids([2, 3], [4, 5, 1], 1.0)),
    *to_samples(chain_of_ids([2, 6, 7], [8, 1], 1.0)),
    *to_samples(chain_of_ids([2, 9], [10, 11, 12, 13, 1], 1.0)),
]


def learner_of(model, **optim):
    return SupervisedLearner(model, optim=OptimSettings(**{"lr": 1e-2, **optim}))


def plain_loss(model):
    """Cross-entropy with the prompt masked by -100, as usual, over all tokens of all rows."""
    total, count = 0.0, 0
    for row in ROWS:
        labels = torch.tensor([i if m else -100 for i, m in zip(row.token_ids, row.mask, strict=True)])
        logits = model(torch.tensor(row.token_ids)[None]).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        count += sum(row.mask)
    return total / count


def test_the_loss_is_the_mean_over_masked_tokens_however_it_is_cut():
    model = tiny_llama(16)
    with torch.no_grad():
        expected = plain_loss(model).item()
    for budget in (1000, 4):
        learner = learner_of(copy.deepcopy(model), max_tokens_per_batch=budget)
        assert_close_to_norm(learner.evaluate(ROWS)["eval/loss"], expected)
        assert_close_to_norm(learner.update(ROWS)["train/loss"], expected)


def test_the_step_is_that_of_plain_adamw():
    """On the same gradient: Adam divides it by its size, so rounding alone would decide where it is almost zero."""
    model = tiny_llama(16)
    other = copy.deepcopy(model)
    learner = learner_of(model, max_grad_norm=1e9)
    learner.update(ROWS)
    found = gradient(learner)
    assert_close_to_norm(found, plain_gradient(other, plain_loss(other)))
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.0)
    ordered = sorted(other.parameters(), key=lambda parameter: parameter.dim() < 2)
    for parameter, part in zip(ordered, found.split([parameter.numel() for parameter in ordered]), strict=True):
        parameter.grad = part.view_as(parameter).clone()
    adam.step()
    assert_close_to_norm(weights_of(model), weights_of(other), terms=10)


def test_demonstrations_are_learned_and_prompts_are_not():
    model = tiny_llama(16)
    learner = learner_of(model)
    prompt_row = to_samples(chain_of_ids([2], [3, 6], 1.0))  # the ids of prompts, as if they had been sampled
    before = learner.evaluate(prompt_row)["eval/loss"]
    for _ in range(25):
        metrics = learner.update(ROWS)
    assert metrics["train/loss"] < 0.1
    assert learner.evaluate(prompt_row)["eval/loss"] > before - 1.0
    assert learner.version == 25


def test_a_resumed_run_goes_on_exactly(tmp_path):
    model = tiny_llama(16)
    options = {"schedule": "linear", "total_steps": 10, "warmup_steps": 1, "num_minibatches": 2}
    learner = learner_of(model, **options)
    learner.update(ROWS)
    torch.save(learner.state_dict(), tmp_path / "s.pt")
    other = copy.deepcopy(model)
    resumed = learner_of(other, **options)
    resumed.load_state_dict(torch.load(tmp_path / "s.pt", weights_only=True))
    assert learner.update(ROWS) == resumed.update(ROWS)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_no_rows_and_a_broken_model_get_a_sentence():
    model = tiny_llama(16)
    with pytest.raises(ConfigError, match="no demonstration to train on"):
        learner_of(model).update([])
    learner = learner_of(model)
    before = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(InvariantError, match="the loss is nan; this step was not applied"):
        learner.update(ROWS)
    assert torch.equal(model.lm_head.weight, before)
