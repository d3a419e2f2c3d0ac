"""On-policy distillation: the gradient of the sampled tokens, and that it is on average that of the reverse KL."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.close import assert_close_to_norm
from tests.learn.chains import chain_of_ids, tiny_llama
from tests.learn.test_learner import VOCABULARY, gradient, learner_of, make_groups, plain_gradient, score


def sampled_logprobs(model: Any, trajectory: Any) -> torch.Tensor:
    """The log-prob of each sampled token of a chain of one row, in float64."""
    ids: list[int] = []
    places: list[int] = []
    for turn in trajectory.turns:
        ids += turn.context_ids
        places += range(len(ids), len(ids) + len(turn.completion.token_ids))
        ids += turn.completion.token_ids
    return score(model, ids)[torch.tensor(places) - 1]


@pytest.mark.parametrize("budget", [1000, 16])
def test_each_token_has_the_log_ratio_to_the_teacher_as_its_advantage(budget: int) -> None:
    """verl's distillation with its estimator k1 as a reward: the mean over tokens of (log p - log q) times grad log p."""
    model, teacher = tiny_llama(VOCABULARY), tiny_llama(VOCABULARY, seed=5)
    groups = make_groups(model)
    plain, exact = copy.deepcopy(model).double(), copy.deepcopy(teacher).double()
    learner = learner_of(model, "distill", reference=teacher, max_tokens_per_batch=budget)
    metrics = learner.update(groups)
    own = torch.cat([sampled_logprobs(plain, chain) for group in groups for chain in group])
    with torch.no_grad():
        apart = own - torch.cat([sampled_logprobs(exact, chain) for group in groups for chain in group])
    assert_close_to_norm(gradient(learner), plain_gradient(plain, (apart * own).mean()).float())
    assert_close_to_norm(metrics["train/reference_kl"], float(apart.mean()), scale=1.0)
    assert metrics["train/optimizer_steps"] == 1, "rewards do not matter, nor that those of a group are equal"


def test_the_gradient_is_on_average_that_of_the_reverse_kl() -> None:
    """Over every next token, weighted by its probability: the divergence of TRL's GKD with beta = 1."""
    model, teacher, context = tiny_llama(VOCABULARY), tiny_llama(VOCABULARY, seed=5), [3, 5, 7]
    plain, exact = (copy.deepcopy(each).double() for each in (model, teacher))
    policy, target = (torch.log_softmax(each(torch.tensor([context])).logits[0, -1], -1) for each in (plain, exact))
    chances = policy.detach()
    mean: Any = 0.0
    for token in range(VOCABULARY):
        learner = learner_of(copy.deepcopy(model), "distill", reference=copy.deepcopy(teacher))
        learner.update([[chain_of_ids(context, [token], 0.0, logprobs=[float(chances[token])])]])
        mean = mean + float(chances[token].exp()) * gradient(learner)
    divergence = (policy.exp() * (policy - target.detach())).sum()
    assert_close_to_norm(mean, plain_gradient(plain, divergence).float())
