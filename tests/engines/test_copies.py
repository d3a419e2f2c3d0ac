"""The proof that an engine with separate weights samples from the learner's."""

from __future__ import annotations

import pytest
import torch

from agentfly.engines.copies import PROBE, LearnerCopy, ProbeAnswer
from agentfly.errors import ConfigError, InvariantError
from agentfly.learn.model.lora import adapt
from agentfly.learn.settings import LoraSettings
from agentfly.types import Completion
from tests.close import assert_close_to_norm
from tests.tiny import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def learner(folder):
    return LearnerCopy(folder, device="cpu")


def change(learner, by, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in learner.model.parameters():
            weights.add_(by * torch.randn(weights.shape, generator=generator))


def honest(teller, noise=0.0, reply_noise=0.0):
    """An engine that says what `teller` says, give or take."""
    reply = [3, 5, 8]

    def ask(ids, sampling):
        assert sampling is PROBE
        scores = [score + noise for score in teller.score(ids)]
        again = teller.score([*ids, *reply], sampling.temperature)[len(ids) - 1 :]
        return ProbeAnswer(
            scores, Completion(text="", token_ids=reply, logprobs=[x + reply_noise for x in again], versions=[0] * 3)
        )

    return ask


def test_an_engine_with_the_same_weights_passes(learner):
    proof = learner.prove(3, honest(learner), 1e-3)
    assert (proof.version, proof.gap, proof.moved) == (3, 0.0, 0.0)
    assert learner.unchanged()


def test_how_far_an_update_moved_is_told(learner):
    learner.prove(0, honest(learner), 1e-3)
    change(learner, 0.01)
    assert not learner.unchanged()
    assert learner.prove(1, honest(learner), 1e-3).moved > 1e-3


def test_an_engine_that_is_far_off_is_refused(learner):
    with pytest.raises(InvariantError, match=r"differ from the learner's by 0\.2 nats on average \(limit 0\.05\)"):
        learner.prove(0, honest(learner, 0.2), 0.05)


def test_right_scores_with_wrong_samples_are_refused(learner):
    with pytest.raises(InvariantError, match=r"its sampled tokens differ by 0\.2 nats"):
        learner.prove(0, honest(learner, reply_noise=-0.2), 0.05)


def test_an_update_too_small_for_the_limit_is_still_told_from_none(learner, folder):
    before = LearnerCopy(folder, device="cpu")
    learner.prove(0, honest(before, 1e-5), 0.05)
    change(learner, 1e-4)
    with pytest.raises(InvariantError, match="still samples from the old weights"):
        learner.prove(1, honest(before, 1e-5), 0.05)


def test_an_update_within_the_noise_is_not_accused(learner, folder):
    before = LearnerCopy(folder, device="cpu")
    learner.prove(0, honest(before, 0.02), 0.05)
    change(learner, 1e-5)
    assert learner.prove(1, honest(before, 0.02), 0.05).version == 1


def test_numbers_that_are_missing_are_refused(learner):
    def ask(ids, sampling):
        return ProbeAnswer([], Completion(text="", token_ids=[1], logprobs=[-1.0], versions=[0]))

    with pytest.raises(InvariantError, match="gave 0 log-probs instead of"):
        learner.prove(0, ask, 0.05)


def test_numbers_that_are_none_are_refused(learner):
    with pytest.raises(InvariantError, match="nan nats"):
        learner.prove(0, honest(learner, float("nan")), 0.05)


def test_adapters_are_handed_over_merged(learner, tmp_path):
    adapt(learner.model, LoraSettings(rank=2), seed=1)
    with torch.no_grad():
        for name, weights in learner.model.named_parameters():
            if name.endswith("lora_b"):
                weights.normal_(0, 0.1)
    assert not [name for bucket in learner.weights() for name, _ in bucket if "lora" in name or ".base." in name]
    learner.save(tmp_path / "plain")
    plain = LearnerCopy(tmp_path / "plain", device="cpu")
    ids = learner.probe_ids()
    assert_close_to_norm(plain.score(ids), learner.score(ids), scale=1.0)


def test_reading_a_model_needs_none_of_its_weights(folder):
    copy = LearnerCopy(folder, device="cpu")
    assert copy._model is None
    assert copy.context == 512
    assert copy.stop_ids
    assert copy.source() == str(folder)


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such model directory"):
        LearnerCopy(tmp_path / "nothing")
