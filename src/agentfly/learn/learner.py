"""One update: groups of trajectories come in, the policy's weights are changed in place, metrics go out.

    trajectories -> rows -> (old and reference log-probs, values) -> advantages -> epochs x minibatches x micro batches -> version + 1

The model is shared with the engine that samples from it and is never copied. It runs in evaluation mode: dropout would make the
ratio of new to old probability a matter of luck. What runs is a row of the table in `algorithms`; this file knows none by name.
Refuses tokens that its weights cannot have drawn, settings that would be ignored, and a step on anything that is not finite.

`version` counts changes of the weights. A step in which every advantage is 0 teaches the policy nothing: no optimizer step is taken
(AdamW would move the weights on old momentum alone), so the version stays, and samples of that version stay on-policy. The
learning rate's schedule counts calls of `update`, so it ends where the run ends.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, InvariantError
from ..types import Sample, Trajectory
from .advantages import explained_variance
from .algorithms import Algorithm, Chains, find_algorithm
from .batching import MicroBatch, passes
from .critic import Critic, ValueHead, hidden_width
from .experience import Experience, gather
from .logprobs import EntropyMode, Scorer
from .losses import clipped_surrogate, kl_divergence, token_weights, value_loss
from .optim import Optimizer
from .settings import LossSettings, OptimSettings
from .totals import Totals


class Learner:
    """Trains one policy with one algorithm.

    `temperature` is the one that chains are sampled with (1 where they are sampled greedily): the policy that is improved is the
    policy that acted. `reference` is the model that the KL holds on to: by default a frozen copy of the policy as it is now, made
    only where `kl_coef` > 0.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: str | Algorithm = "grpo",
        *,
        loss: LossSettings | None = None,
        optim: OptimSettings | None = None,
        temperature: float = 1.0,
        reference: nn.Module | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        self.algorithm = find_algorithm(algorithm)
        self.loss = loss or self.algorithm.settings()
        self.optim = optim or OptimSettings()
        self.algorithm.check(self.loss)
        self.optim.lr_factor(self.optim.warmup_steps)  # a schedule without an end is refused now, not after the first rollout
        if self.optim.critic_lr is not None and not self.algorithm.needs_critic:
            raise ConfigError(f"{self.algorithm.name} has no critic: remove optim.critic_lr")
        if reference is not None and self.loss.kl_coef == 0:
            raise ConfigError("a reference model was given but loss.kl_coef is 0: set kl_coef, or give no reference")
        if not temperature > 0:
            raise ConfigError(f"the learner's temperature must be greater than 0, not {temperature}; greedy chains are scored at 1")
        self.model = model.to(device) if device is not None else model
        self.model.eval()
        self.device = next(self.model.parameters()).device
        self.last_samples: list[Sample] = []
        self._seed = seed
        self._version = 0
        self._updates = 0
        self._scorer = Scorer(self.model, temperature=temperature, chunk=self.optim.logprob_chunk)
        self._make_critic()
        self._own_reference = reference is None
        self._reference: Scorer | None = None
        if self.loss.kl_coef > 0:
            frozen = copy.deepcopy(self.model) if reference is None else reference.to(self.device)
            frozen.requires_grad_(False).eval()
            self._reference = Scorer(frozen, temperature=temperature, chunk=self.optim.logprob_chunk)

    def _make_critic(self) -> None:
        self._critic: Critic | None = None
        self._value_head: ValueHead | None = None
        self._critic_optimizer: Optimizer | None = None
        modules: list[tuple[nn.Module, float]] = [(self.model, self.optim.lr)]
        critic_lr = self.optim.critic_lr or self.optim.lr
        if self.algorithm.needs_critic and self.loss.critic == "shared":
            self._value_head = ValueHead(hidden_width(self.model), self.device)
            modules.append((self._value_head, critic_lr))
        elif self.algorithm.needs_critic:
            self._critic = Critic(self._scorer.head, hidden_width(self.model)).eval()
            self._critic_optimizer = Optimizer([(self._critic, critic_lr)], self.optim)
        self._optimizer = Optimizer(modules, self.optim)

    @property
    def version(self) -> int:
        """How often the weights have changed; the engine marks its samples with it."""
        return self._version

    # -- one step ------------------------------------------------------------------------------------------------------------

    def update(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Improve the policy on the chains of this step, siblings together. The metrics are those of `metrics.METRICS`."""
        experience = gather(groups, version=self._version, device=self.device)
        self.last_samples = experience.samples
        factor = self.optim.lr_factor(self._updates)
        totals = Totals()
        metrics = {
            "train/lr": self.optim.lr * factor,
            "train/samples": float(len(experience.rows)),
            "train/tokens": float(experience.rows.num_tokens),
            "train/splits": float(len(experience.rows) - experience.num_chains),
            "train/untrainable_chains": float(experience.num_untrainable),
            "train/zero_advantage_groups": float(len(groups)),
        }
        steps = 0
        if experience.num_chains:
            metrics["train/zero_advantage_groups"] = float(self._give_credit(experience, totals))
            for optimizer in filter(None, (self._optimizer, self._critic_optimizer)):
                optimizer.set_lr(factor)
            steps = self._learn(experience, totals)
            if experience.returns is not None and experience.values is not None:
                values, returns = experience.values.double().cpu().numpy(), experience.returns.double().cpu().numpy()
                metrics["train/explained_variance"] = explained_variance(values, returns)
        self._updates += 1
        metrics["train/skipped"] = float(steps == 0)
        metrics["train/optimizer_steps"] = float(steps)
        return metrics | totals.means()

    def _give_credit(self, experience: Experience, totals: Totals) -> int:
        """Advantages for every token; the number of groups that teach nothing."""
        loss = self.loss
        rewards = experience.rewards
        kl_in_reward = loss.kl_coef > 0 and loss.kl_in == "reward"
        if kl_in_reward or self.algorithm.needs_critic:
            self._look(
                experience,
                range(len(experience.rows)),
                totals,
                policy=kl_in_reward and loss.old_logprobs != "sampled",
                reference=kl_in_reward,
                values=self.algorithm.needs_critic,
            )
        if kl_in_reward:
            assert experience.reference is not None
            drawn = experience.sampled if experience.recomputed is None else self._old(experience, experience.recomputed)
            kl = kl_divergence(drawn, experience.reference, loss.kl_estimator)
            totals.add("train/reference_kl", kl.sum(), len(kl))
            rewards = rewards - loss.kl_coef * kl.double().cpu().numpy()
        values = None if experience.values is None else experience.streams(experience.values.double().cpu().numpy())
        return experience.set_credit(self.algorithm.credit(Chains(experience.groups, experience.streams(rewards), values), loss))

    def _learn(self, experience: Experience, totals: Totals) -> int:
        """All passes over the chains; how many optimizer steps the policy took."""
        with_advantage = experience.rows_with_advantage()
        train_policy = any(with_advantage) or self._value_head is not None
        kl_in_loss = self.loss.kl_coef > 0 and self.loss.kl_in == "loss"
        # A row without advantage adds nothing to the loss but to its divisor: it is not run where nothing else is learned from it.
        every_row = kl_in_loss or self.loss.entropy_coef > 0 or self.algorithm.needs_critic
        wanted = [True] * len(with_advantage) if every_row else with_advantage
        if not train_policy and self._critic is None:
            return 0
        num_steps = self.optim.epochs * min(self.optim.minibatches, experience.num_chains)
        mode = self.loss.old_logprobs
        stale_ratio = mode == "recompute" or (mode == "auto" and bool(experience.current.any()))
        self._look(
            experience,
            experience.rows_with(range(experience.num_chains), wanted),
            totals,
            policy=num_steps > 1 and stale_ratio and experience.recomputed is None and train_policy,
            reference=kl_in_loss and train_policy,
        )
        taken = 0
        plan = passes(
            experience.num_chains, epochs=self.optim.epochs, minibatches=self.optim.minibatches, seed=f"{self._seed}/{self._updates}"
        )
        for number, chains in enumerate(plan):
            rows = experience.rows_with(chains, wanted)
            if rows:
                in_first_epoch = number < num_steps // self.optim.epochs
                self._step(experience, chains, rows, totals, train_policy=train_policy, untouched=not taken, entropy=in_first_epoch)
                if train_policy and not taken:
                    self._version += 1  # now, so that the number is right even if a later pass fails
                taken += train_policy
        return taken

    def _look(
        self,
        experience: Experience,
        rows: Sequence[int],
        totals: Totals,
        *,
        policy: bool = False,
        reference: bool = False,
        values: bool = False,
    ) -> None:
        """What the weights say before they are changed."""
        if not (policy or reference or values):
            return
        shared = values and self._value_head is not None
        if policy:
            experience.recomputed = torch.zeros_like(experience.sampled)
        if reference:
            experience.reference = torch.zeros_like(experience.sampled)
        if values:
            experience.values = torch.zeros_like(experience.sampled)
        with torch.no_grad():
            for members in experience.rows.micro_batches(rows, self.optim.max_tokens_per_batch):
                batch = experience.rows.tensors(members, self.device)
                if policy or shared:
                    scores = self._scorer(batch, keep_hidden=shared)
                    if policy and experience.recomputed is not None:
                        experience.recomputed[batch.tokens] = scores.logprobs
                        self._measure_gap(experience, batch, scores.logprobs, totals)
                    if shared and self._value_head is not None and experience.values is not None:
                        experience.values[batch.tokens] = self._value_head(scores.hidden)
                if reference and self._reference is not None and experience.reference is not None:
                    experience.reference[batch.tokens] = self._reference(batch).logprobs
                if values and self._critic is not None and experience.values is not None:
                    experience.values[batch.tokens] = self._critic(batch)

    def _step(
        self,
        experience: Experience,
        chains: Sequence[int],
        rows: Sequence[int],
        totals: Totals,
        *,
        train_policy: bool,
        untouched: bool,
        entropy: bool,
    ) -> None:
        """One optimizer step on one minibatch, gradients accumulated over its micro batches."""
        lengths = [experience.num_tokens(chain) for chain in chains]
        weights = torch.zeros(experience.rows.num_tokens)
        per_chain = token_weights(lengths, self.loss.aggregation, divisor=self.loss.sequence_divisor)
        for chain, weight in zip(chains, per_chain, strict=True):
            weights[experience.tokens_of(chain)] = weight
        weights = weights.to(self.device)
        minibatch = Totals()
        for members in experience.rows.micro_batches(rows, self.optim.max_tokens_per_batch):
            batch = experience.rows.tensors(members, self.device)
            totals.add("train/padding_waste", batch.input_ids.numel() - sum(experience.rows.lengths[m] for m in members), batch.input_ids.numel())
            if train_policy:
                self._policy_backward(experience, batch, weights[batch.tokens], sum(lengths), totals, minibatch, untouched, entropy)
            if self._critic is not None:
                self._value_backward(experience, batch, self._critic(batch), sum(lengths), minibatch).backward()
        self._apply(minibatch, totals, train_policy)

    def _policy_backward(
        self,
        experience: Experience,
        batch: MicroBatch,
        weights: Tensor,
        num_tokens: int,
        totals: Totals,
        minibatch: Totals,
        untouched: bool,
        first_epoch: bool,
    ) -> None:
        loss, tokens, count = self.loss, batch.tokens, len(batch.tokens)
        mode: EntropyMode = "gradient" if loss.entropy_coef > 0 else "value" if first_epoch else "none"
        scores = self._scorer(batch, entropy=mode, keep_hidden=self._value_head is not None)
        logprobs = scores.logprobs
        if untouched and experience.recomputed is None:
            self._measure_gap(experience, batch, logprobs.detach(), totals)
        mine = logprobs.detach() if experience.recomputed is None else experience.recomputed[tokens]
        old = self._old(experience, mine, tokens)
        assert experience.advantages is not None
        policy_loss, was_cut = clipped_surrogate(
            logprobs,
            old,
            experience.advantages[tokens],
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            dual_clip=loss.dual_clip,
        )
        total = (policy_loss * weights).sum()
        minibatch.add("train/policy_loss", total.detach(), 0)
        totals.add("train/clip_fraction", was_cut.sum(), count)
        totals.add("train/kl", kl_divergence(old, logprobs.detach(), "k3").sum(), count)
        if experience.reference is not None and loss.kl_in == "loss":
            kl = kl_divergence(logprobs, experience.reference[tokens], loss.kl_estimator)
            totals.add("train/reference_kl", kl.detach().sum(), count)
            total = total + loss.kl_coef * (kl * weights).sum()
        if scores.entropies is not None:
            totals.add("train/entropy", scores.entropies.detach().sum(), count)
            if loss.entropy_coef > 0:
                total = total - loss.entropy_coef * (scores.entropies * weights).sum()
        if self._value_head is not None:
            values = self._value_head(scores.hidden)
            total = total + loss.value_coef * self._value_backward(experience, batch, values, num_tokens, minibatch)
        minibatch.add("train/loss", total.detach(), 0)
        total.backward()  # type: ignore[no-untyped-call]

    def _value_backward(self, experience: Experience, batch: MicroBatch, values: Tensor, num_tokens: int, minibatch: Totals) -> Tensor:
        """The value loss of a micro batch: its share of the mean over the minibatch's tokens."""
        assert experience.values is not None and experience.returns is not None
        tokens = batch.tokens
        each = value_loss(values, experience.values[tokens], experience.returns[tokens], clip=self.loss.value_clip)
        total = each.sum() / num_tokens
        minibatch.add("train/value_loss", total.detach(), 0)
        if self._critic is not None:
            minibatch.add("train/loss", total.detach(), 0)
        return total
