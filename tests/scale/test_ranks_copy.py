"""The local engine on its own copy of the weights: what it loads, and the proof that it samples from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentfly.engines.copies import score_ids, weight_buckets
from agentfly.engines.local import LocalEngine
from agentfly.errors import InvariantError
from agentfly.learn.model.lora import adapt, is_adapted, merge_adapters
from agentfly.learn.settings import LoraSettings
from agentfly.training.ranks.roles import CopyProof
from tests.engines.tiny import byte_tokenizer, make_model


class Trained:
    """The side of the learner: its module, and the scores under it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def score(self, ids: Any, temperature: float = 1.0) -> list[float]:
        return score_ids(self.model, ids, temperature)


def copying(learner: Trained, weights: Any) -> LocalEngine:
    engine = LocalEngine(make_model(seed=1), byte_tokenizer(), kv_tokens=4096)
    engine.copy_from(weights, CopyProof(learner, engine))  # type: ignore[arg-type]
    return engine


def test_publishing_copies_the_weights_and_proves_it() -> None:
    learner = Trained(make_model(seed=0))
    engine = copying(learner, lambda: weight_buckets(learner.model))
    engine.publish(1)
    assert not engine.shares_weights
    assert engine.proof is not None
    assert engine.proof.version == engine.version == 1
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(engine.model.state_dict()[name], tensor)
    with torch.no_grad():
        learner.model.lm_head.weight.mul_(1.5)
    engine.publish(2)
    assert engine.proof is not None
    assert engine.proof.moved > 0.01
    engine.shut()


def test_other_weights_than_the_learners_are_noticed() -> None:
    learner, other = Trained(make_model(seed=0)), make_model(seed=2)
    engine = copying(learner, lambda: weight_buckets(other))
    with pytest.raises(InvariantError, match="does not sample from the learner's weights"):
        engine.publish(1)
    engine.shut()


def test_missing_and_unknown_weights_are_refused() -> None:
    learner = Trained(make_model(seed=0))
    every = [pair for bucket in weight_buckets(learner.model) for pair in bucket]
    for given, told in ((every[1:], "are missing, among them"), ([("else", torch.zeros(1))], "else has the shape")):
        engine = copying(learner, lambda given=given: [given])  # type: ignore[misc]
        with pytest.raises(InvariantError, match=told):
            engine.publish(1)
        engine.shut()


def test_merged_adapters_leave_a_plain_model_with_the_same_scores() -> None:
    model = make_model(seed=0)
    adapt(model, LoraSettings(rank=2), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.add_(0.1)
    before = score_ids(model, range(12))
    merge_adapters(model)
    assert not is_adapted(model)
    assert score_ids(model, range(12)) == pytest.approx(before, abs=1e-4)
