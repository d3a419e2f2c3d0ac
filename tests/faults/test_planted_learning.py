"""Faults that leave tokens and masks as they should be, and train something else than the config says.

Each is planted in a short training. Either a step stops the run, or `agentfly doctor` names the run as wrong afterwards. The
table below says which check does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import agentfly
from agentfly.engines.local import LocalEngine, decode_batch
from agentfly.engines.local import sampler as local_sampler
from agentfly.engines.local.replica import make_replica
from agentfly.errors import InvariantError
from agentfly.health import diagnose, replay
from agentfly.learn import learner as learning
from agentfly.learn.experience import Experience
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.lora import LoraLinear
from agentfly.learn.optim import Optimizer
from agentfly.learn.update import gradients, objective
from agentfly.learn.update.gradients import Gradients
from agentfly.learn.update.modules import LearnerModules
from agentfly.learn.update.scoring import Scoring
from agentfly.rollout import chain as rollout_chain
from agentfly.training import evidence, ledger, parts
from tests.tiny import ROWS, save_tiny_model, tiny_agent

Patch = pytest.MonkeyPatch
SMALL: dict[str, Any] = {
    "num_tasks": 3, "num_chains": 4, "threads": 1, "lr": 1e-3, "steps": 4, "validation_count": 2, "validate_at_start": False,
    "validate_every": 0,
}  # fmt: skip
RAGGED = {"sampling": {"max_tokens": 12, "stop": ["e"]}}
"""Replies end at an "e", so that chains differ in length."""
LAGS = {"max_lag": 2, "depth": 2, "steps": 6, "lr": 2e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(model: Path, folder: Path, **options: Any) -> Any:
    agent = options.pop("agent", {})
    return agentfly.train(tiny_agent(model, **agent), ROWS, run={"dir": str(folder), "name": "run"}, **(SMALL | options))


def wrong(folder: Path) -> set[str]:
    """The checks of the doctor that find something."""
    return {check.name for check in diagnose(folder / "run").checks if not check.ok}


# ---- faults that the replay of the store finds ----


def other_credit(change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """The learner gives credit to other groups or rewards than those of its chains."""

    def plant(patch: Patch) -> None:
        real = PolicyLearner._credit
        patch.setattr(PolicyLearner, "_credit", lambda self, chains: real(self, change(chains)))

    return plant


def wrong_groups(patch: Patch) -> None:
    other_credit(lambda chains: replace(chains, groups=[*chains.groups[-1:], *chains.groups[:-1]]))(patch)


def scaled_rewards(patch: Patch) -> None:
    real = learning.gather

    def gather(*arguments: Any, **options: Any) -> Experience:
        experience = real(*arguments, **options)
        experience.rewards = 2.0 * experience.rewards
        return experience

    patch.setattr(learning, "gather", gather)


def next_chain(patch: Patch) -> None:
    real = Experience.set_credit
    patch.setattr(
        Experience,
        "set_credit",
        lambda self, credit: real(
            self,
            replace(credit, advantages=[
                values[:1].repeat(len(own))
                for own, values in zip(credit.advantages, [*credit.advantages[1:], credit.advantages[0]], strict=True)
            ]),
        ),
    )  # fmt: skip


def next_chain_in_the_loss(patch: Patch) -> None:
    """The advantages that are recorded are right, those of the loss are not."""
    real = objective.surrogate

    def surrogate(experience: Experience, *arguments: Any, **options: Any) -> Any:
        kept = experience.advantages
        experience.advantages = kept.roll(24)  # type: ignore[union-attr]
        try:
            return real(experience, *arguments, **options)
        finally:
            experience.advantages = kept

    patch.setattr(objective, "surrogate", surrogate)


def wrong_sign(patch: Patch) -> None:
    real = PolicyLearner._credit

    def credit(self: PolicyLearner, chains: Any) -> Any:
        found = real(self, chains)
        signs = [1.0 if group % 2 else -1.0 for group in chains.groups]
        return replace(found, advantages=[sign * each for sign, each in zip(signs, found.advantages, strict=True)])

    patch.setattr(PolicyLearner, "_credit", credit)


def other_weights(change: Callable[[Experience, torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        real = objective.surrogate

        def surrogate(experience: Experience, algorithm: Any, settings: Any, tokens: Any, logprobs: Any, minibatch: Any,
                      totals: Any, *, part: float) -> Any:  # fmt: skip
            weights = change(experience, minibatch.weights.clone())
            return real(
                experience, algorithm, settings, tokens, logprobs, replace(minibatch, weights=weights), totals, part=part
            )

        patch.setattr(objective, "surrogate", surrogate)

    return plant


def without_last_tokens(experience: Experience, weights: torch.Tensor) -> torch.Tensor:
    ends = torch.ones_like(experience.turn_of, dtype=torch.bool)
    ends[:-1] = experience.turn_of[1:] != experience.turn_of[:-1]
    weights[ends] = 0.0
    return weights


def no_correction(patch: Patch) -> None:
    def ones(experience: Any, settings: Any, own: torch.Tensor, tokens: Any, totals: Any) -> torch.Tensor:
        return torch.ones_like(own)

    patch.setattr(objective, "importance_weights", ones)


def long_chains_dropped(patch: Patch) -> None:
    real = PolicyLearner._passes

    def passes(self: PolicyLearner, experience: Experience, *counts: int) -> Iterator[list[int]]:
        most = experience.num_trained.max()
        for chains in real(self, experience, *counts):
            yield [chain for chain in chains if experience.num_trained[chain] < most]

    patch.setattr(PolicyLearner, "_passes", passes)


def first_micro_batch(patch: Patch) -> None:
    real = Scoring.trained_batches
    patch.setattr(Scoring, "trained_batches", lambda self, *arguments: real(self, *arguments)[:1])


def first_backward_pass(patch: Patch) -> None:
    """The loss of all micro batches is computed, and the gradient of the first one alone."""
    real, real_backward = Gradients.of_policy, Optimizer.backward

    def of_policy(self: Gradients, *arguments: Any) -> Any:
        passed = []

        def backward(self: Optimizer, loss: torch.Tensor) -> None:
            if not passed:
                real_backward(self, loss)
            passed.append(loss)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Optimizer, "backward", backward)
            return real(self, *arguments)

    patch.setattr(Gradients, "of_policy", of_policy)


def entropy_without_gradient(patch: Patch) -> None:
    """The entropy is in the loss that is logged, and not in its gradient."""
    real = objective.regularizers
    patch.setattr(objective, "regularizers", lambda *arguments: real(*arguments).detach())


def critic_of_other_returns(patch: Patch) -> None:
    real = objective.critic_loss

    def loss(experience: Experience, *arguments: Any) -> torch.Tensor:
        kept = experience.returns
        experience.returns = kept.roll(24)  # type: ignore[union-attr]
        try:
            return real(experience, *arguments)
        finally:
            experience.returns = kept

    for module in (objective, gradients):
        patch.setattr(module, "critic_loss", loss)


def ratios_of_1(patch: Patch) -> None:
    """The ratio's denominator follows the weights from one optimizer step to the next, so that nothing is clipped."""
    real = objective.surrogate

    def surrogate(experience: Experience, algorithm: Any, settings: Any, tokens: Any, logprobs: Any, *arguments: Any,
                  part: float) -> Any:  # fmt: skip
        kept = experience.recomputed
        experience.recomputed = kept.clone()  # type: ignore[union-attr]
        experience.recomputed[tokens] = logprobs.detach()
        try:
            return real(experience, algorithm, settings, tokens, logprobs, *arguments, part=part)
        finally:
            experience.recomputed = kept

    patch.setattr(objective, "surrogate", surrogate)


def rewards_twice(patch: Patch) -> None:
    real = rollout_chain.score

    async def score(reward: Any, trajectory: Any, context: Any, bonus: float) -> None:
        await real(reward, trajectory, context, bonus)
        trajectory.reward = 2.0 * trajectory.reward

    patch.setattr(rollout_chain, "score", score)


def another_reference(patch: Patch) -> None:
    real = LearnerModules.mark_reference

    def mark(self: LearnerModules) -> None:
        with torch.no_grad():
            for weight in self.reference.model.parameters():  # type: ignore[union-attr]
                weight.mul_(1.1)
        real(self)

    patch.setattr(LearnerModules, "mark_reference", mark)


def shared_seeds(patch: Patch) -> None:
    real = rollout_chain._sampling

    def sampling(base: Any, room: int, trajectory: Any, turn: int) -> Any:
        return real(base, room, replace(trajectory, chain=trajectory.chain // 2), turn)

    patch.setattr(rollout_chain, "_sampling", sampling)


def rewards_exchanged(patch: Patch) -> None:
    real, last = rollout_chain.score, []

    async def score(reward: Any, trajectory: Any, context: Any, bonus: float) -> None:
        await real(reward, trajectory, context, bonus)
        own = (trajectory.reward, trajectory.components)
        if trajectory.id == "t2-0-1":
            trajectory.reward, trajectory.components = last[0]
        last[:] = [own]

    patch.setattr(rollout_chain, "score", score)


def reference_scores_of_the_policy(patch: Patch) -> None:
    patch.setattr(LearnerModules, "checked_reference", lambda self: self.scorer)


REPLAYED: dict[str, tuple[Callable[[Patch], None], set[str], dict[str, Any]]] = {
    "advantages over wrong groups": (wrong_groups, {"credit"}, {}),
    "advantages of the next chain": (next_chain, {"credit"}, {"agent": RAGGED}),
    "advantages of the next chain in the loss alone": (next_chain_in_the_loss, {"loss"}, {}),
    "a wrong sign in every second group": (wrong_sign, {"credit"}, {}),
    "rewards scaled twice": (scaled_rewards, {"credit"}, {"loss": {"normalize_std": False}}),
    "the last token of every reply without loss": (other_weights(without_last_tokens), {"loss"}, {}),
    "a loss divided by twice the tokens": (other_weights(lambda _, weights: 0.5 * weights), {"loss"}, {}),
    "correction weights left out": (no_correction, {"loss"}, LAGS),
    "long chains dropped from the update": (long_chains_dropped, {"updates"}, {"agent": RAGGED}),
    "the first micro batch alone": (first_micro_batch, {"updates"}, {"max_tokens_per_batch": 200}),
    "the gradient of the first micro batch alone": (first_backward_pass, {"updates"}, {"max_tokens_per_batch": 200}),
    "an entropy bonus without a gradient": (entropy_without_gradient, {"loss"}, {"loss": {"entropy_coef": 0.1}}),
    "a critic that learns other returns": (critic_of_other_returns, {"loss"}, {"algorithm": "ppo", "agent": RAGGED}),
    "a shared critic that learns other returns": (
        critic_of_other_returns,
        {"loss"},
        {"algorithm": "ppo", "agent": RAGGED, "loss": {"critic": "shared"}},
    ),
    "ratios of 1 in all optimizer steps": (ratios_of_1, {"loss"}, {"num_minibatches": 3, "epochs": 2, "lr": 1e-2}),
    "rewards counted twice": (rewards_twice, {"rescored"}, {}),
    "another model as the reference": (another_reference, {"reference"}, {"loss": {"kl_coef": 0.1}}),
    "siblings that share seeds in pairs": (shared_seeds, {"siblings"}, {}),
    "rewards of other chains": (rewards_exchanged, {"rescored"}, {}),
    "log-probs of the policy as the reference's": (reference_scores_of_the_policy, {"reference"}, {"loss": {"kl_coef": 0.1}}),
}


@pytest.mark.parametrize("fault", REPLAYED)
def test_a_fault_in_what_is_learned_is_found_in_the_store(model: Path, tmp_path: Path, fault: str) -> None:
    plant, names, options = REPLAYED[fault]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        train(model, tmp_path, **options)
    assert names <= wrong(tmp_path)
    assert names <= {check.name for check in replay(tmp_path / "run").checks if not check.ok}


def test_a_learning_rate_of_another_step_after_a_resume_is_found(model: Path, tmp_path: Path) -> None:
    options = {"train": {"schedule": "linear", "total_steps": 10}, "save_every": 1}
    train(model, tmp_path, steps=2, **options)
    real = PolicyLearner.load_state_dict

    def load(self: PolicyLearner, state: Any) -> None:
        real(self, state)
        self._updates += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyLearner, "load_state_dict", load)
        train(model, tmp_path, steps=4, resume=tmp_path / "run", **options)
    assert wrong(tmp_path) == {"updates"}


# ---- faults that stop the run ----


def behind(versions: int | None) -> Callable[[Patch], None]:
    """The engine samples from weights that are so many versions old, or from the first ones (None), and claims the newest."""

    def plant(patch: Patch) -> None:
        real = LocalEngine.publish

        def publish(self: Any, version: int) -> None:
            real(self, version)
            vars(self).setdefault("past", []).append(copy.deepcopy(self.model))
            old = self.past[0 if versions is None else max(0, len(self.past) - 1 - versions)]
            with self.hold():
                self._scheduler.use_model(make_replica(old, on_pages=self._on_pages))

        patch.setattr(LocalEngine, "publish", publish)

    return plant


def adapters_twice(patch: Patch) -> None:
    """The engine samples with adapters of twice their strength."""
    real = LocalEngine.publish

    def publish(self: Any, version: int) -> None:
        real(self, version)
        copied = copy.deepcopy(self.model)
        for module in copied.modules():
            if isinstance(module, LoraLinear):
                module.scale *= 2.0
        with self.hold():
            self._scheduler.use_model(make_replica(copied, on_pages=self._on_pages))

    patch.setattr(LocalEngine, "publish", publish)


def learner_at_temperature_1(patch: Patch) -> None:
    real = parts.build_learner

    def build(config: Any, model: Any, **options: Any) -> Any:
        return real(replace(config, sampling=replace(config.sampling, temperature=1.0)), model, **options)

    patch.setattr(parts, "build_learner", build)


def dropout(share: float) -> Callable[[Patch], None]:
    """The learner's pass drops some of its hidden states, the engine's does not."""

    def plant(patch: Patch) -> None:
        from agentfly.learn.model.backbone import Backbone

        real = Backbone.__call__
        patch.setattr(
            Backbone, "__call__", lambda self, batch: torch.nn.functional.dropout(real(self, batch), share, training=True)
        )

    return plant


def sampler(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    """The engine draws from other logits than those whose log-probs it records."""

    def plant(patch: Patch) -> None:
        real = local_sampler.draw_batch

        def draw_batch(logits: torch.Tensor, uniforms: torch.Tensor, temperatures: torch.Tensor, *options: Any) -> Any:
            ids, _ = real(change(logits.float()), uniforms, temperatures, *options)
            return ids, torch.log_softmax(logits.float() / temperatures[:, None], -1).gather(1, ids[:, None])[:, 0]

        for module in (local_sampler, decode_batch):
            patch.setattr(module, "draw_batch", draw_batch)

    return plant


def truncated(option: str, value: float) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        real = LocalEngine.generate

        async def generate(self: LocalEngine, request: Any) -> Any:
            return await real(self, replace(request, sampling=replace(request.sampling, **{option: value})))

        patch.setattr(LocalEngine, "generate", generate)

    return plant


def another_weight(factor: float) -> Callable[[Patch], None]:
    """The engine draws one frequent id more or less often than it says."""

    def plant(patch: Patch) -> None:
        chosen: list[torch.Tensor] = []

        def change(logits: torch.Tensor) -> torch.Tensor:
            chosen.extend(() if chosen else [logits.mean(0).argmax()])
            return logits.index_add(1, chosen[0][None], torch.full((len(logits), 1), math.log(factor)))

        sampler(change)(patch)

    return plant


def scaled_log_probs(patch: Patch) -> None:
    real = LocalEngine.generate

    async def generate(self: LocalEngine, request: Any) -> Any:
        completion = await real(self, request)
        return replace(completion, logprobs=[0.9999 * logprob for logprob in completion.logprobs])

    patch.setattr(LocalEngine, "generate", generate)


def no_step(patch: Patch) -> None:
    patch.setattr(Optimizer, "step", lambda self: self.zero_grad())


def no_adam_step(patch: Patch) -> None:
    patch.setattr(torch.optim.AdamW, "step", lambda self: None)


def groups_of_adam(change: Callable[[dict[str, Any]], None]) -> Callable[[Patch], None]:
    """Adam takes its steps with other settings than those of the run."""

    def plant(patch: Patch) -> None:
        real = torch.optim.AdamW.step

        def step(self: torch.optim.AdamW) -> None:
            kept = [dict(group) for group in self.param_groups]
            for group in self.param_groups:
                change(group)
            real(self)
            for group, options in zip(self.param_groups, kept, strict=True):
                group.update(options)

        patch.setattr(torch.optim.AdamW, "step", step)

    return plant


def another_clip(patch: Patch) -> None:
    real = torch.nn.utils.clip_grad_norm_
    patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda weights, _: real(weights, 0.02))


def critic_stands_still(patch: Patch) -> None:
    real = PolicyLearner._learn_values

    def learn(self: PolicyLearner, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Optimizer, "step", lambda optimizer: optimizer.zero_grad())
            real(self, *arguments)

    patch.setattr(PolicyLearner, "_learn_values", learn)


def reference_follows(patch: Patch) -> None:
    real = PolicyLearner._improve

    def improve(self: PolicyLearner, experience: Experience) -> Any:
        metrics = real(self, experience)
        self._modules.reference.model.load_state_dict(self.model.state_dict())  # type: ignore[union-attr]
        return metrics

    patch.setattr(PolicyLearner, "_improve", improve)


def reference_stays(patch: Patch) -> None:
    patch.setattr(LearnerModules, "renew_reference", lambda self, mix: None)


def reference_moves_too_far(patch: Patch) -> None:
    real = LearnerModules.renew_reference
    patch.setattr(LearnerModules, "renew_reference", lambda self, mix: real(self, 1.0))


STOPPED: dict[str, tuple[Callable[[Patch], None], str, dict[str, Any]]] = {
    "a learner at temperature 1 for chains at 0.9": (learner_at_temperature_1, "differ by", {
        "agent": {"sampling": {"max_tokens": 12, "temperature": 0.9}}
    }),
    "adapters that never reach the engine": (behind(None), "differ by|before the last update", {
        "lora": {"rank": 4}, "lr": 2e-4, "steps": 5
    }),
    "an engine with the first weights": (behind(None), "differ by|before the last update", {"lr": 1e-5, "steps": 5}),
    "an engine one version behind": (behind(1), "differ by|before the last update", {"lr": 2e-4}),
    "an engine one version behind at a small rate": (behind(1), "before the last update", {"lr": 1e-6, "steps": 6}),
    "dropout in the learner": (dropout(0.1), "differ by", {}),
    "a little dropout in the learner": (dropout(0.01), "differ by", {}),
    "log-probs that are scaled": (scaled_log_probs, "above the recomputed ones", {}),
    "an optimizer that does nothing": (no_step, "no weight has changed", {}),
    "Adam that does nothing": (no_adam_step, "no weight has changed", {}),
    "a learning rate that is 10 % off": (groups_of_adam(lambda group: group.update(lr=1.1 * group["lr"])), "of the settings", {
        "lr": 1e-6
    }),
    "a weight decay that was not set": (groups_of_adam(lambda group: group.update(weight_decay=0.1)), "of the settings", {}),
    "other averages": (groups_of_adam(lambda group: group.update(betas=(0.9, 0.99))), "of the settings", {}),
    "another limit of the gradient": (another_clip, "of the settings", {}),
    "a critic that stands still": (critic_stands_still, "of the settings", {"algorithm": "ppo"}),
    "adapters that act twice in the engine": (adapters_twice, "a part of them", {"lora": {"rank": 4}, "lr": 2e-6, "steps": 9}),
    "a reference that follows the policy": (reference_follows, "reference model has changed", {"loss": {"kl_coef": 0.1}}),
    "a reference that is never renewed": (reference_stays, "reference model was not renewed", {
        "loss": {"kl_coef": 0.1, "reference_every": 2}
    }),
    "a reference that is never renewed, at a small rate": (reference_stays, "reference model was not renewed", {
        "loss": {"kl_coef": 0.1, "reference_every": 2, "reference_mix": 0.5}, "lr": 1e-6
    }),
    "a reference that is the policy instead of a mixture": (reference_moves_too_far, "reference model was not renewed", {
        "loss": {"kl_coef": 0.1, "reference_every": 1, "reference_mix": 0.25}
    }),
}  # fmt: skip


@pytest.mark.parametrize("fault", STOPPED)
def test_a_fault_of_weights_or_sampling_stops_the_run(model: Path, tmp_path: Path, fault: str) -> None:
    plant, told, options = STOPPED[fault]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(InvariantError, match=told):
            train(model, tmp_path, **options)


@pytest.fixture(scope="module")
def sure_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is as sure of its next token as a trained one: 2.8 nats of entropy instead of 7."""
    from transformers import AutoModelForCausalLM

    folder = save_tiny_model(tmp_path_factory.mktemp("sure"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(5.0)
    model.save_pretrained(folder)
    return folder


SAMPLERS: dict[str, tuple[Callable[[Patch], None], str, dict[str, Any]]] = {
    "a sampler at 0.6 times the temperature": (sampler(lambda logits: logits / 0.6), "0.[68] times the temperature", {}),
    "a sampler at 0.8 times the temperature": (sampler(lambda logits: logits / 0.8), "0.[89] times the temperature", {}),
    "a sampler at 1.2 times the temperature": (sampler(lambda logits: logits / 1.2), "1.[13] times the temperature", {}),
    "a sampler at 1.5 times the temperature": (sampler(lambda logits: logits / 1.5), "1.[36] times the temperature", {}),
    "min_p of 0.05": (truncated("min_p", 0.05), "min_p = 0.05", {}),
    "top_p of 0.95": (truncated("top_p", 0.95), "top_p = 0.9", {}),
    "top_k of 20": (truncated("top_k", 20), "_p = ", {}),
    "a sampler that never draws one id": (another_weight(1e-9), "0.1 times as many tokens of id", {}),
    "a sampler that draws one id too often": (another_weight(5.0), "4 times as many tokens of id", {}),
    "a sampler at 0.6 times the temperature, ahead of the learner": (sampler(lambda logits: logits / 0.6), "0.[68] times", {
        "max_lag": 1, "depth": 1, "steps": 60, "num_tasks": 1
    }),
}  # fmt: skip


@pytest.mark.parametrize("fault", SAMPLERS)
def test_a_sampler_of_another_distribution_stops_the_run(sure_model: Path, tmp_path: Path, fault: str) -> None:
    plant, told, options = SAMPLERS[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(LocalEngine, "uniforms")  # so that the likelihood tells, as in half precision
        patch.setattr(ledger, "EARLY_TOKENS", 4096)  # a short run has the tokens of a long one
        plant(patch)
        with pytest.raises(InvariantError, match=told):
            train(sure_model, tmp_path, **({"steps": 12, "lr": 1e-5} | options))


def test_a_sampler_that_is_wrong_from_the_start_is_found_in_the_first_updates(sure_model: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(LocalEngine, "uniforms")
        truncated("top_p", 0.8)(patch)
        with pytest.raises(InvariantError, match="the engine draws from another distribution"):
            train(sure_model, tmp_path, steps=evidence.EARLY, num_tasks=8)


@pytest.mark.parametrize("factor", [0.8, 0.9, 1.1])
def test_a_sampler_at_another_temperature_is_found_at_its_numbers_on_the_quick_start(tmp_path: Path, factor: float) -> None:
    """Its replies have so little entropy that the likelihood of 25,000 tokens is no proof of 0.9 times the temperature."""
    words = ["rollout.num_tasks=2", "rollout.num_chains=4", "train.steps=4", "train.validate_at_start=false", "run.name=run"]
    config = agentfly.Config.load("quickstart", [*words, "data.validation_count=2", f"run.dir={tmp_path}"])
    with pytest.MonkeyPatch.context() as patch:
        sampler(lambda logits: logits / factor)(patch)
        with pytest.raises(InvariantError, match="tokens are not those at which the learner's distribution arrives"):
            agentfly.train(config)


def test_averages_that_a_resume_loses_stop_the_run(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, steps=2, save_every=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "load_state_dict", lambda self, state: None)
        with pytest.raises(InvariantError, match="averages hold 1: they were lost"):
            train(model, tmp_path, steps=4, resume=tmp_path / "run")
