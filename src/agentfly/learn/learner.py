"""One update: groups of trajectories in, metrics out; the policy's weights change in place.

    trajectories -> rows -> old and reference log-probs, values -> advantages -> epochs x minibatches -> version + 1

The model may be shared with the engine and is never copied. It runs in evaluation mode, because dropout would add noise to the
ratio of new to old probability.

`version` counts changes of the weights. If every advantage is 0, no optimizer step is taken (AdamW would move the weights by
momentum alone) and the version stays, so samples of that version stay on-policy. The learning rate's schedule counts calls of
`update`, so it ends with the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, InvariantError
from ..kernels import launching_on
from ..types import Sample, Trajectory
from .algorithms import Algorithm, Chains, find_algorithm
from .algorithms.advantages import explained_variance
from .algorithms.losses import kl_divergence, token_weights
from .algorithms.objective import Minibatch, critic_loss, measure_gap, old_logprobs, policy_loss
from .batching import MicroBatch, passes
from .experience import Experience, gather
from .metrics import Totals
from .model.critic import Critic, ValueHead, hidden_width
from .model.logprobs import EntropyMode, Scorer
from .model.lora import copy_sharing_frozen
from .optim import Optimizer
from .settings import LossSettings, OptimSettings


class PolicyLearner:
    """Trains one policy with one algorithm. Implements `types.Learner`.

    `temperature` is the one that chains are sampled with (1 for greedy sampling), so that the trained policy is the one that
    acted. `reference` is the model of the KL term; by default a frozen copy of the current policy, made only if `kl_coef` > 0.
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
        self.optim.lr_factor(self.optim.warmup_steps)  # raises now if the schedule has no end, not after the first rollout
        if self.optim.critic_lr is not None and not self.algorithm.needs_critic:
            raise ConfigError(f"{self.algorithm.name} has no critic: remove train.critic_lr")
        if reference is not None and self.loss.kl_coef == 0:
            raise ConfigError("a reference model was given but loss.kl_coef is 0: set kl_coef, or give no reference")
        if not temperature > 0:
            raise ConfigError(
                f"the learner's temperature must be greater than 0, not {temperature}; greedy chains are scored at 1"
            )
        self.model = model.to(device) if device is not None else model
        self.model.eval()
        self.device = next(self.model.parameters()).device
        self.last_samples: list[Sample] = []
        self._seed = seed
        self._version = 0
        self._updates = 0
        self._scorer = Scorer(self.model, temperature=temperature, chunk=self.optim.logprob_chunk)
        with launching_on(self.device):
            self._packed = self._scorer.prepare(self.optim)
            self._make_critic()
        self._own_reference = reference is None
        self._reference: Scorer | None = None
        if self.loss.kl_coef > 0:
            frozen = copy_sharing_frozen(self.model) if reference is None else reference.to(self.device)
            frozen.requires_grad_(False).eval()
            self._reference = Scorer(frozen, temperature=temperature, chunk=self.optim.logprob_chunk)
            with launching_on(self.device):
                self._reference.prepare(self.optim)

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
        """Number of changes of the weights; the engine tags its samples with it."""
        return self._version

    # -- one step ------------------------------------------------------------------------------------------------------------

    def update(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Improve the policy on one step's chains, siblings together. Returns metrics named in `metrics.METRICS`.

        Raises InvariantError if a token cannot come from this learner's weights, or a loss or gradient is not finite.
        """
        with launching_on(self.device):
            return self._update(groups)

    def _update(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
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
        if self._optimizer.loss_scale is not None:
            metrics["train/loss_scale"] = self._optimizer.loss_scale
        metrics["train/skipped"] = float(steps == 0)
        metrics["train/optimizer_steps"] = float(steps)
        return metrics | totals.means()

    def _give_credit(self, experience: Experience, totals: Totals) -> int:
        """Compute the advantages. Returns the number of groups whose advantages are all 0."""
        loss, rewards = self.loss, experience.rewards
        kl_in_reward = loss.kl_coef > 0 and loss.kl_in == "reward"
        every_row = range(len(experience.rows))
        if kl_in_reward:
            if loss.old_logprobs != "sampled":
                self._score_policy(experience, every_row, totals)
            reference = self._score_reference(experience, every_row)
            own = experience.sampled if experience.recomputed is None else experience.recomputed
            kl = kl_divergence(old_logprobs(experience, loss, own, slice(None)), reference, loss.kl_estimator)
            totals.add("train/reference_kl", kl.sum(), len(kl))
            rewards = rewards - loss.kl_coef * kl.double().cpu().numpy()
        values = None
        if self.algorithm.needs_critic:
            values = experience.per_chain(self._score_values(experience, every_row).double().cpu().numpy())
        return experience.set_credit(
            self.algorithm.credit(Chains(experience.groups, experience.per_chain(rewards), values), loss)
        )

    def _learn(self, experience: Experience, totals: Totals) -> int:
        """Run all passes over the chains. Returns the number of the policy's optimizer steps."""
        with_advantage = experience.rows_with_advantage()
        train_policy = any(with_advantage) or self._value_head is not None
        if not train_policy and self._critic is None:
            return 0
        kl_in_loss = self.loss.kl_coef > 0 and self.loss.kl_in == "loss"
        # A row without advantage only counts in the loss's divisor: skip its forward pass unless another term needs it.
        every_row = kl_in_loss or self.loss.entropy_coef > 0 or self.algorithm.needs_critic
        wanted = [every_row or has for has in with_advantage]
        steps_per_epoch = min(self.optim.num_minibatches, experience.num_chains)
        rows = experience.rows_with(range(experience.num_chains), wanted)
        if train_policy and self._needs_recompute(experience, self.optim.epochs * steps_per_epoch):
            self._score_policy(experience, rows, totals)
        if train_policy and kl_in_loss:
            self._score_reference(experience, rows)
        taken = 0
        order = f"{self._seed}/{self._updates}"
        plan = passes(experience.num_chains, epochs=self.optim.epochs, num_minibatches=self.optim.num_minibatches, seed=order)
        for number, chains in enumerate(plan):
            rows = experience.rows_with(chains, wanted)
            if not rows:
                continue
            # Entropy costs an extra pass over the logits: as a mere metric it is computed in the first epoch only.
            entropy: EntropyMode = "gradient" if self.loss.entropy_coef > 0 else "value" if number < steps_per_epoch else "none"
            self._step(experience, chains, rows, totals, train_policy=train_policy, is_first=not taken, entropy=entropy)
            if train_policy and not taken:
                self._version += 1  # with the first step, so that the version is right even if a later step fails
            taken += train_policy
        return taken

    def _needs_recompute(self, experience: Experience, num_steps: int) -> bool:
        """Whether log-probs are needed before the first optimizer step. A single step computes them in its own pass."""
        if experience.recomputed is not None or num_steps == 1:
            return False
        mode = self.loss.old_logprobs
        return mode == "recompute" or (mode == "auto" and bool(experience.current.any()))

    def _step(
        self,
        experience: Experience,
        chains: Sequence[int],
        rows: Sequence[int],
        totals: Totals,
        *,
        train_policy: bool,
        is_first: bool,
        entropy: EntropyMode,
    ) -> None:
        """One optimizer step on one minibatch, gradients accumulated over its micro batches."""
        lengths = [experience.num_tokens(chain) for chain in chains]
        weights = torch.zeros(experience.rows.num_tokens)
        per_chain = token_weights(lengths, self.loss.aggregation, divisor=self.loss.sequence_divisor)
        for chain, weight in zip(chains, per_chain, strict=True):
            weights[experience.tokens_of(chain)] = weight
        micro = list(self._batches(experience, rows))
        minibatch = Minibatch(weights.to(self.device), sum(lengths), 1.0 / len(micro), is_first)
        size = sum(batch.input_ids.numel() for batch in micro)
        totals.add("train/padding_waste", size - sum(experience.rows.lengths[row] for row in rows), size)
        while True:
            found = Totals()
            whole = self._gradients(experience, micro, minibatch, found, train_policy=train_policy, entropy=entropy)
            if self._apply(whole, found, train_policy):
                totals.merge(found)
                return

    def _gradients(
        self,
        experience: Experience,
        micro: Sequence[MicroBatch],
        minibatch: Minibatch,
        totals: Totals,
        *,
        train_policy: bool,
        entropy: EntropyMode,
    ) -> Tensor:
        """Accumulate the minibatch's gradients on the parameters. Returns its loss."""
        whole = torch.zeros((), device=self.device)
        for batch in micro:
            if train_policy:
                scores = self._scorer(batch, entropy=entropy, keep_hidden=self._value_head is not None)
                loss = policy_loss(experience, self.loss, batch, scores, minibatch, totals)
                if self._value_head is not None:
                    values = self._value_head(scores.hidden)
                    loss = loss + self.loss.value_coef * critic_loss(experience, self.loss, batch, values, minibatch, totals)
                self._optimizer.backward(loss)
                whole += loss.detach()
            if self._critic is not None:
                assert self._critic_optimizer is not None  # made together with the critic
                loss = critic_loss(experience, self.loss, batch, self._critic(batch), minibatch, totals)
                self._critic_optimizer.backward(loss)
                whole += loss.detach()
        return whole

    def _apply(self, whole: Tensor, totals: Totals, train_policy: bool) -> bool:
        """Step all optimizers, or none if a value is not finite. Returns False if the gradients must be computed again."""
        optimizers = {"train/grad_norm": self._optimizer} if train_policy else {}
        if self._critic_optimizer is not None:
            optimizers["train/critic_grad_norm"] = self._critic_optimizer
        lengths = [optimizer.clip() for optimizer in optimizers.values()]  # launched before the first synchronisation
        loss, *found = torch.stack([whole.float(), *(length.float() for length in lengths)]).tolist()
        norms = dict(zip(optimizers, found, strict=True))
        if not all(math.isfinite(number) for number in (loss, *norms.values())):
            retries = [optimizer.retry() for name, optimizer in optimizers.items() if not math.isfinite(norms[name])]
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            if math.isfinite(loss) and all(retries):
                return False
            told = ", ".join(f"{name.removeprefix('train/')} {norm}" for name, norm in norms.items())
            raise InvariantError(
                f"step {self._updates}: the loss is {loss} ({told}); this optimizer step was not applied and the weights are "
                f"those of version {self._version}: lower train.lr, or look for extreme rewards{self._optimizer.range_hint}"
            )
        totals.add("train/loss", loss, 1)
        for name, optimizer in optimizers.items():
            totals.add(name, norms[name], 1)
            optimizer.step()
        return True

    # -- scores of the weights before the update ----------------------------------------------------------------------------

    def _batches(self, experience: Experience, rows: Sequence[int]) -> Iterator[MicroBatch]:
        return experience.rows.batches(rows, self.optim.max_tokens_per_batch, self.device, packed=self._packed)

    @torch.no_grad()
    def _score_policy(self, experience: Experience, rows: Sequence[int], totals: Totals) -> None:
        experience.recomputed = torch.zeros_like(experience.sampled)
        for batch in self._batches(experience, rows):
            logprobs = self._scorer(batch).logprobs
            experience.recomputed[batch.tokens] = logprobs
            measure_gap(experience, logprobs, batch.tokens, totals)

    @torch.no_grad()
    def _score_reference(self, experience: Experience, rows: Sequence[int]) -> Tensor:
        assert self._reference is not None  # made if kl_coef > 0
        experience.reference = torch.zeros_like(experience.sampled)
        for batch in self._batches(experience, rows):
            experience.reference[batch.tokens] = self._reference(batch).logprobs
        return experience.reference

    @torch.no_grad()
    def _score_values(self, experience: Experience, rows: Sequence[int]) -> Tensor:
        experience.values = torch.zeros_like(experience.sampled)
        for batch in self._batches(experience, rows):
            if self._critic is not None:
                experience.values[batch.tokens] = self._critic(batch)
            else:
                assert self._value_head is not None
                experience.values[batch.tokens] = self._value_head(self._scorer.hidden(batch))
        return experience.values

    # -- resume --------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the learner without the policy's weights, for `torch.load(..., weights_only=True)`.

        It includes a reference that the learner copied itself, because the policy has changed since; not one passed in.
        """
        return {
            "algorithm": self.algorithm.name,
            "version": self._version,
            "updates": self._updates,
            "optimizer": self._optimizer.state_dict(),
            "critic_optimizer": None if self._critic_optimizer is None else self._critic_optimizer.state_dict(),
            "modules": {name: module.state_dict() for name, module in self._saved_modules().items() if module is not None},
        }

    def _saved_modules(self) -> dict[str, nn.Module | None]:
        modules: dict[str, nn.Module | None] = {"critic": self._critic, "value_head": self._value_head}
        if self._own_reference:
            modules["reference"] = None if self._reference is None else self._reference.model
        return modules

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the caller loads the policy's weights. Raises ConfigError if the learners differ."""
        modules = self._saved_modules()
        for name, module in modules.items():
            if (name in state["modules"]) != (module is not None):
                has = "has" if name in state["modules"] else "lacks"
                raise ConfigError(
                    f"the checkpoint ({state['algorithm']}) {has} a {name.replace('_', ' ')}, unlike this run "
                    f"({self.algorithm.name}): resume with the algorithm, loss.critic and loss.kl_coef it was saved with"
                )
        for name, module in modules.items():
            if module is not None:
                module.load_state_dict(state["modules"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._critic_optimizer is not None:
            self._critic_optimizer.load_state_dict(state["critic_optimizer"])
        self._version, self._updates = int(state["version"]), int(state["updates"])
