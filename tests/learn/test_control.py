"""A coefficient that follows a target, and a reference that follows the policy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import agentfly
from agentfly.config import Config
from agentfly.errors import ConfigError
from agentfly.health import replay
from agentfly.types import Completion, Turn
from tests.learn.chains import chain_of_ids, tiny_llama
from tests.learn.test_learner import VOCABULARY, learner_of, make_groups, weights_of
from tests.tiny import ROWS, save_tiny_model, tiny_agent


def updated(learner: Any, model: Any, steps: int, first: int = 0) -> list[dict[str, float]]:
    return [learner.update(make_groups(model, seed)) for seed in range(first, first + steps)]


def reference_of(learner: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in learner._modules.reference.model.parameters()])


def test_the_coefficient_is_that_of_the_proportional_controller() -> None:
    """Of Ziegler et al., arXiv:1909.08593: e = clip(KL / target - 1, -0.2, 0.2), coefficient x (1 + 0.1 e)."""
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, loss={"kl_coef": 0.5, "kl_target": 0.02}, lr=3e-3)
    history = updated(learner, model, 12)
    expected = 0.5
    for metrics in history:
        assert metrics["train/kl_coef"] == pytest.approx(expected, rel=1e-12)
        error = metrics["train/reference_kl"] / 0.02 - 1.0
        expected *= 1.0 + 0.1 * min(0.2, max(-0.2, error))
    assert history[1]["train/kl_coef"] == pytest.approx(0.5 * 0.98), "at first the policy is its reference"
    assert {row["train/kl_coef"] > 0.5 for row in history[1:]} == {False, True}, "it goes down, and up again"


def test_a_renewed_reference_is_the_policy_and_a_mixed_one_lies_between() -> None:
    model = tiny_llama(VOCABULARY)
    first = weights_of(copy.deepcopy(model))
    learner = learner_of(model, loss={"kl_coef": 0.1, "reference_every": 2}, lr=3e-3)
    history = updated(learner, model, 1)
    assert torch.equal(reference_of(learner), first)
    history += updated(learner, model, 2, first=1)
    history += updated(learner, model, 1, first=3)
    assert torch.equal(reference_of(learner), weights_of(model)), "renewed after the fourth update"
    assert history[2]["train/reference_kl"] == pytest.approx(0.0, abs=1e-9), "and after the second"
    assert history[1]["train/reference_kl"] > 1e-7 < history[3]["train/reference_kl"]

    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, loss={"kl_coef": 0.1, "reference_every": 1, "reference_mix": 0.25}, lr=3e-3)
    expected = weights_of(copy.deepcopy(model))
    for seed in range(3):
        updated(learner, model, 1, first=seed)
        expected = expected + 0.25 * (weights_of(model) - expected)
    torch.testing.assert_close(reference_of(learner), expected)


def test_a_resumed_learner_has_the_coefficient_and_the_reference_that_it_had(tmp_path: Path) -> None:
    loss = {"kl_coef": 0.5, "kl_target": 0.02, "reference_every": 2, "reference_mix": 0.5}
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, loss=loss, reference=tiny_llama(VOCABULARY, seed=4))
    updated(learner, model, 3)
    torch.save(learner.state_dict(), tmp_path / "state.pt")
    other = copy.deepcopy(model)
    resumed = learner_of(other, loss=loss, reference=tiny_llama(VOCABULARY, seed=4))
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(reference_of(resumed), reference_of(learner))
    one, two = updated(learner, model, 1, first=3)[0], updated(resumed, other, 1, first=3)[0]
    assert one["train/kl_coef"] == two["train/kl_coef"] != 0.5
    assert one["train/reference_kl"] == two["train/reference_kl"]
    assert torch.equal(reference_of(resumed), reference_of(learner))


@pytest.mark.parametrize(
    "loss",
    [
        {"kl_coef": 0.2, "kl_target": 0.01},
        {"entropy_target": 9.0},
        {"kl_coef": 0.2, "kl_target": 0.01, "kl_in": "reward", "reference_every": 2},
    ],
)
def test_a_run_is_computed_again(tmp_path: Path, loss: dict[str, Any]) -> None:
    model = save_tiny_model(tmp_path / "model")
    small = {"num_tasks": 3, "num_chains": 4, "threads": 1, "lr": 1e-2, "validation_count": 2, "validate_at_start": False}
    result = agentfly.train(tiny_agent(model), ROWS, steps=4, loss=loss, run={"dir": str(tmp_path), "name": "run"}, **small)
    assert len({row["train/entropy_coef" if "entropy_target" in loss else "train/kl_coef"] for row in result.history}) > 2
    assert {check.name: (check.problems, check.skipped) for check in replay(tmp_path / "run").checks if check.problems} == {}


def played(model: Any, seed: int, version: int) -> list[list[Any]]:
    """Four groups of eight chains of one token, sampled by the model, of which one token in six is rewarded."""
    torch.manual_seed(seed)
    groups = []
    for number in range(4):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([[number, 5, 6]])).logits[0, -1], -1)
        drawn = torch.multinomial(logprobs.exp(), 8, replacement=True).tolist()
        chains = [
            chain_of_ids([0], [0], float(token % 6 == number), group=str(number), number=at) for at, token in enumerate(drawn)
        ]
        for chain, token in zip(chains, drawn, strict=True):
            reply = Completion(text="", token_ids=[token], logprobs=[float(logprobs[token])], versions=[version])
            chain.turns = [Turn([number, 5, 6], True, reply)]
        groups.append(chains)
    return groups


def entropies(steps: int = 60, lr: float = 5e-3, **loss: Any) -> tuple[list[float], list[float]]:
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, loss=loss, lr=lr, max_grad_norm=1.0)
    rows = [learner.update(played(model, seed, learner.version)) for seed in range(steps)]
    return [row["train/entropy"] for row in rows if "train/entropy" in row], [
        row.get("train/entropy_coef", 0.0) for row in rows
    ]


def test_entropy_that_falls_without_it_stays_near_its_target() -> None:
    fallen, _ = entropies()
    held, coefficients = entropies(entropy_target=1.0)
    assert min(fallen[0], held[0]) > 2.0
    late_fallen, late_held = (sum(each[-10:]) / 10 for each in (fallen, held))
    assert late_fallen < 0.3, "each group of chains has the same rewards in more and more steps"
    assert 2 * late_fallen < late_held < 1.7
    assert late_held > 0.4
    assert len(held) > len(fallen), "and more steps teach something"
    assert min(coefficients) == 0.0 < max(coefficients) <= 1.0


def test_the_weight_of_the_entropy_is_that_of_the_controller() -> None:
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, loss={"entropy_coef": 0.004, "entropy_target": 2.9}, lr=2e-2)
    coef, below = 0.004, True
    for row in updated(learner, model, 6):
        assert row["train/entropy_coef"] == pytest.approx(coef if below else 0.0, rel=1e-12)
        missing = (1.0 - row["train/entropy"] / 2.9) / 0.2
        coef = min(1.0, max(0.0, coef + 0.02 * min(1.0, max(-1.0, missing))))
        below = row["train/entropy"] < 2.9


def test_the_weight_of_the_entropy_goes_on_after_a_resume_and_in_micro_batches(tmp_path: Path) -> None:
    loss = {"entropy_coef": 0.01, "entropy_target": 4.0}
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, loss=loss, lr=3e-3)
    updated(learner, model, 3)
    torch.save(learner.state_dict(), tmp_path / "state.pt")
    other, divided = copy.deepcopy(model), copy.deepcopy(model)
    resumed, small = learner_of(other, loss=loss, lr=3e-3), learner_of(divided, loss=loss, lr=3e-3, max_tokens_per_batch=16)
    for each in (resumed, small):
        each.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    groups = make_groups(model, 3)
    one, two, three = (each.update(groups) for each in (learner, resumed, small))
    assert one["train/entropy_coef"] == two["train/entropy_coef"] == three["train/entropy_coef"] > 0.01
    assert one["train/entropy"] == two["train/entropy"] == pytest.approx(three["train/entropy"], rel=1e-5)
    assert torch.equal(weights_of(other), weights_of(model))
    assert three["train/entropy_slope"] == pytest.approx(one["train/entropy_slope"], rel=1e-5)


def test_what_cannot_act_or_be_mixed_gets_a_sentence() -> None:
    for loss, sentence in (
        ({"reference_mix": 0.5}, "loss.reference_mix has no effect without loss.reference_every"),
        ({"kl_coef": 0.1, "reference_every": 1, "reference_mix": 0.0}, "reference_mix"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Config.from_dict({"loss": loss})
    with pytest.raises(ConfigError, match="loss.reference_every works on one learner rank"):
        Config.from_dict({"loss": {"kl_coef": 0.1, "reference_every": 1}, "learner": {"ranks": 2}})
    model = tiny_llama(VOCABULARY)
    with pytest.raises(ConfigError, match="must be a model of the same size"):
        learner_of(model, loss={"kl_coef": 0.1, "reference_every": 1}, reference=tiny_llama(VOCABULARY, width=64))
    half = tiny_llama(VOCABULARY).to(torch.bfloat16)
    with pytest.raises(ConfigError, match="half precision rounds them away"):
        learner_of(half, loss={"kl_coef": 0.1, "reference_every": 1, "reference_mix": 0.5})
