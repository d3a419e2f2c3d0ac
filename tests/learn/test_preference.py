"""Direct preference optimisation against the formula of the paper, on whole chains of several turns and rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from agentfly.errors import ConfigError
from agentfly.learn.preference import Pair, PreferenceLearner
from agentfly.learn.samples import to_samples
from agentfly.learn.settings import OptimSettings
from tests.close import assert_close_to_norm
from tests.learn.chains import chain, chain_of_ids, tiny_llama
from tests.learn.test_learner import gradient, plain_gradient

VOCABULARY = 128
BETA = 0.3


def pair_of(chosen: Any, rejected: Any) -> Pair:
    return Pair(to_samples(chosen), to_samples(rejected))


PAIRS = [
    # Two turns against one; the history of the second chain's last turn was rewritten, so it has two rows.
    pair_of(chain(("PQ", "ab"), ("T", "cd")), chain(("PQ", "x"), ("T", "y"), ("RS", "zw", "restarts"))),
    pair_of(chain_of_ids([2, 3], [4, 5, 1], 1.0), chain_of_ids([2, 3], [6, 1], 0.0)),
    pair_of(chain_of_ids([7], [8, 9, 10, 1], 1.0), chain_of_ids([7], [8, 1], 0.0)),
]


def learner_of(model: Any, **options: Any) -> PreferenceLearner:
    return PreferenceLearner(model, beta=BETA, optim=OptimSettings(**{"lr": 1e-2, "max_grad_norm": 1e9} | options))


def chain_logprob(model: Any, rows: Any) -> Any:
    """The sum of the log-probs of the sampled tokens, by a plain forward pass over each row."""
    total = 0.0
    for row in rows:
        logs = torch.log_softmax(model(torch.tensor(row.token_ids)[None]).logits[0].float(), -1)
        for place in range(1, len(row.token_ids)):
            if row.mask[place]:
                total = total + logs[place - 1, row.token_ids[place]]
    return total


def plain_terms(model: Any, reference: Any, pairs: Any = PAIRS) -> tuple[Any, Any]:
    """The loss and the margins as TRL defines them (`sigmoid`): -log sigmoid(beta x (log ratios of policy - of reference))."""
    margins = []
    for pair in pairs:
        with torch.no_grad():
            ref = chain_logprob(reference, pair.chosen) - chain_logprob(reference, pair.rejected)
        margins.append(BETA * (chain_logprob(model, pair.chosen) - chain_logprob(model, pair.rejected) - ref))
    stacked = torch.stack(margins)
    return -torch.nn.functional.logsigmoid(stacked).mean(), stacked


@pytest.mark.parametrize("budget", [1000, 4])
def test_the_loss_and_its_gradient_are_those_of_the_formula_however_rows_are_cut(budget: int) -> None:
    model, reference = tiny_llama(VOCABULARY), tiny_llama(VOCABULARY, seed=3)
    other = copy.deepcopy(model)
    learner = learner_of(model, max_tokens_per_batch=budget)
    pairs = learner.with_reference(PAIRS, reference)
    expected, margins = plain_terms(other, reference)
    held = learner.evaluate(pairs)
    assert_close_to_norm(held["eval/loss"], expected.item(), scale=1.0)
    metrics = learner.update(pairs)
    assert_close_to_norm(metrics["train/loss"], expected.item(), scale=1.0)
    assert_close_to_norm(metrics["train/preference_margin"], margins.mean().item(), scale=10.0)
    assert metrics["train/preference_accuracy"] == held["eval/accuracy"] == (margins > 0).double().mean().item()
    assert_close_to_norm(gradient(learner), plain_gradient(other, expected))


def test_the_reference_is_the_model_as_it_was_unless_another_is_given() -> None:
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model)
    pairs = learner.with_reference(PAIRS)
    assert learner.evaluate(pairs)["eval/loss"] == pytest.approx(0.693147, abs=1e-5)
    for _ in range(10):
        metrics = learner.update(pairs)
    assert metrics["train/preference_accuracy"] == 1.0
    assert metrics["train/preference_margin"] > 1.0
    assert learner.evaluate(pairs)["eval/loss"] < 0.2


def test_several_optimizer_steps_divide_pairs_and_never_a_pair() -> None:
    model = tiny_llama(VOCABULARY)
    other = copy.deepcopy(model)
    learner = learner_of(model, num_minibatches=3, lr=1e-9)
    metrics = learner.update(learner.with_reference(PAIRS, tiny_llama(VOCABULARY, seed=3)))
    expected, _ = plain_terms(other, tiny_llama(VOCABULARY, seed=3))
    assert_close_to_norm(metrics["train/loss"], expected.item(), scale=1.0, of="the mean over three steps of a pair each")


def test_what_cannot_be_learned_gets_a_sentence() -> None:
    with pytest.raises(ConfigError, match="beta must be greater than 0"):
        PreferenceLearner(tiny_llama(VOCABULARY), beta=0.0)
    with pytest.raises(ConfigError, match="complete the pairs with `with_reference`"):
        learner_of(tiny_llama(VOCABULARY)).update(PAIRS)
