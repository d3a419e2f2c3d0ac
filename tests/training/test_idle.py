"""Settings that cannot act in a run are said."""

from __future__ import annotations

import pytest

from agentfly.config import Config
from agentfly.recipes import recipes
from agentfly.training.idle import without_effect

CLIPS = ["loss.clip_high=0.3", "loss.dual_clip=4"]
ONE = "train.num_minibatches=1"


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        ([*CLIPS, ONE], "loss.clip_high and loss.dual_clip cannot act: with one optimizer step per update every ratio is 1"),
        ([*CLIPS, ONE, "rollout.max_lag=2"], "loss.clip_high and loss.dual_clip cannot act"),
        ([*CLIPS, "train.num_minibatches=2"], None),
        ([*CLIPS, ONE, "train.epochs=2"], None),
        ([*CLIPS, ONE, "loss.old_logprobs=sampled"], None),
        ([*CLIPS, ONE, "rollout.max_lag=2", "loss.correction=off"], None),
        (["loss.kl_kind=k2"], "loss.kl_kind cannot act: loss.kl_coef is 0"),
        (["loss.kl_kind=k2", "loss.kl_coef=0.1"], None),
        (["loss.correction_cap=3"], "loss.correction_cap cannot act: the weights that are trained draw every token"),
        (["loss.correction=mask", "rollout.max_lag=1"], None),
        (["loss.correction=mask", "sampler.place=process"], None),
        (["algorithm=ppo", "loss.value_clip=0.2", "train.critic_epochs=1", "train.critic_minibatches=1"], "loss.value_clip"),
        (["algorithm=ppo", "loss.value_clip=0.2"], None),
        (["algorithm=ppo", "loss.value_clip=0.2", "loss.critic=shared", ONE], "loss.value_clip cannot act"),
        (["algorithm=ppo", "train.critic_warmup_steps=20"], "train.critic_warmup_steps is the whole run"),
        (["train.total_steps=50"], "train.total_steps cannot act: the learning rate is constant"),
        (["train.total_steps=50", "train.schedule=cosine"], None),
        (["train.warmup_steps=30"], "train.warmup_steps cannot act: the run ends before"),
        (["rollout.turn_timeout_s=600"], "rollout.turn_timeout_s cannot act: agent.chain_timeout_s ends the chain first"),
        (["rollout.turn_timeout_s=60"], None),
        (["train.keep_best=true", "train.validate_every=0"], "train.keep_best cannot act: nothing is validated before the end"),
        (["train.keep_best=true", "train.validate_every=5"], None),
        (["train.stop_after=3"], "train.stop_after cannot act: nothing is validated before the end"),
        (["train.stop_after=4", "train.validate_every=5"], "train.stop_after cannot act: the run has no more validations"),
        (["train.stop_after=3", "train.validate_every=5"], None),
        (["data.holdout=0.2", "data.validation=rows.jsonl"], "data.holdout cannot act: data.validation names"),
        (["sampling.temperature=0"], "sampling.temperature = 0 draws the same chain for all siblings"),
        (["sampling.temperature=0", "algorithm=reinforce++"], None),
    ],
)
def test_a_setting_that_cannot_act_is_said(words: list[str], idle: str | None) -> None:
    told = without_effect(Config.load("quickstart", words))
    assert len(told) == (idle is not None), told
    assert idle is None or told[0].startswith(idle)


def test_the_limit_of_a_turn_is_compared_with_that_of_the_agent() -> None:
    config = Config.load("quickstart", ["rollout.turn_timeout_s=900"])
    assert without_effect(config) and not without_effect(config, 3600.0)


def test_without_held_out_rows_there_is_no_best_checkpoint() -> None:
    config = Config.load("quickstart", ["train.keep_best=true", "train.validate_every=5"])
    (told,) = without_effect(config, num_held_out=0)
    assert told.startswith("train.keep_best cannot act: there are no held-out rows")


def test_with_few_held_out_rows_no_run_is_stopped() -> None:
    config = Config.load("quickstart", ["train.stop_after=3", "train.validate_every=5"])
    (told,) = without_effect(config, num_held_out=5)
    assert told.startswith("train.stop_after cannot act: a paired test needs 6 held-out rows")
    assert without_effect(config, num_held_out=6) == []


def test_a_correction_acts_if_the_engine_samples_from_a_copy_of_the_weights() -> None:
    config = Config.load("quickstart", ["loss.correction=mask"])
    assert without_effect(config) and not without_effect(config, exact=False)


@pytest.mark.parametrize("recipe", recipes())
def test_no_recipe_has_a_setting_that_cannot_act(recipe: str) -> None:
    assert without_effect(Config.load(recipe)) == []
