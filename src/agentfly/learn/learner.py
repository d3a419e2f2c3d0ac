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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..engines.copies import weight_buckets
from ..errors import ConfigError, InvariantError
from ..kernels import launching_on
from ..kernels.memory import naming_memory
from ..types import Sample, TokenFit, TokenRecord, Trajectory
from .algorithms import Algorithm, Chains, Credit, find_algorithm
from .algorithms.advantages import explained_variance
from .algorithms.losses import kl_divergence
from .batching import MicroBatch, passes
from .budget import TokenBudget
from .experience import Experience, gather
from .group import ALONE, LearnerGroup
from .hint import Prompts
from .metrics import Totals
from .model.logprobs import EntropyMode
from .model.storage import load_learner_state, load_weights
from .optim import Optimizer
from .samples import row_of
from .settings import LossSettings, OptimSettings
from .update.control import Control
from .update.gradients import Gradients
from .update.messages import pack_credit, unpack_credit
from .update.modules import LearnerModules, check_critic_keys
from .update.objective import Minibatch, Objective, old_logprobs
from .update.scoring import Scoring

Check = Callable[[Mapping[str, float]], None]
Changing = Callable[[], object]
Work = Callable[[list[MicroBatch]], tuple[Tensor, Totals]]

CRITIC_EPOCHS, CRITIC_MINIBATCHES, CRITIC_WARMUP = 2, 8, 7
"""Defaults of a critic: its learning rate over the policy's, passes, optimizer steps per pass, steps alone.

With them a critic explains a fifth of the variance after 6 steps of 128 chains; with one step at the policy's rate, nothing.
"""


class PolicyLearner:
    """Trains one policy with one algorithm. Implements `types.Learner`.

    `temperature` is the one that chains are sampled with (1 for greedy sampling), so that the trained policy is the one that
    acted. `reference` is the model of the KL term; by default a frozen copy of the current policy, made only if `kl_coef` > 0;
    `hint` gives the prompts that it reads.
    `exact` is false if the engine samples from a copy of the weights with other kernels; `loss.correction` then applies to
    every token, otherwise to tokens of older weights. `recomputes` is false if the rest of a reply goes on with keys and values
    of older weights (`rollout.at_update = "keep"`): such tokens are corrected, too.

    With a `group` of several ranks, parameters, gradients and optimizer state are sharded over them, and gradients are summed
    in the dtype `reduce`. Losses, gradients and metrics are those of one process on the whole batch.
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
        hint: Prompts | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        exact: bool = True,
        recomputes: bool = True,
        group: LearnerGroup = ALONE,
        reduce: torch.dtype = torch.float32,
    ) -> None:
        self.algorithm = find_algorithm(algorithm)
        self.loss = self.algorithm.complete(loss or self.algorithm.settings())
        self.optim = optim or OptimSettings()
        self.algorithm.check(self.loss)
        self.optim.lr_factor(self.optim.warmup_steps)  # raises now if the schedule has no end, not after the first rollout
        check_critic_keys(self.algorithm, self.loss, self.optim)
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
        self._experience: Experience | None = None
        self.last_chains: list[tuple[Trajectory, list[Sample]]] = []
        """The chains of the last `update` with the rows that it trains. They are known when `check` is called."""
        self._seed = seed
        self._exact, self._recomputes = exact, recomputes
        self._version = 0
        self._updates = 0
        self._half_updated = False
        self._check: Check | None = None
        self._changing: Changing | None = None
        self._group = group
        self._modules = LearnerModules(
            self.model, self.algorithm, self.loss, self.optim, temperature=temperature, reference=reference, group=group,
            reduce=reduce,
        )  # fmt: skip
        self._budget = TokenBudget(self.optim.max_tokens_per_batch, self.device)
        self._budget.alone = group.size == 1
        self._control = Control(self._modules, self.loss)
        self._objective = Objective(self.algorithm, self.loss)
        self._scoring = Scoring(self._modules, self._budget, hint)
        self._gradients = Gradients(self._modules, self._objective)
        self._make_optimizers()

    def _make_optimizers(self) -> None:
        modules, optim = self._modules, self.optim
        self._critic_optimizer: Optimizer | None = None
        sizes = [(weight.numel(), weight.requires_grad) for weight in self.model.parameters()]
        self._lr = optim.lr_of(sum(size for size, _ in sizes), not all(trained for _, trained in sizes))
        pairs: list[tuple[nn.Module, float]] = [(self.model, self._lr)]
        critic_lr = optim.critic_lr_of(self._lr)
        if modules.value_head is not None:
            pairs.append((modules.value_head, critic_lr))
        if modules.critic is not None:
            self._critic_optimizer = Optimizer([(modules.critic, critic_lr)], optim, modules.dtype)
        self._optimizer = Optimizer(pairs, optim, modules.dtype)
        if self._exact:  # another engine may hold memory now that it releases before the update
            critic = 0 if self._critic_optimizer is None else self._critic_optimizer.growth
            self._budget.require(self._optimizer.growth + critic)

    @property
    def path(self) -> str:
        """How batches are run: over how many ranks, packed or padded, which attention and fused layers, and why not faster."""
        return self._modules.path

    @property
    def critic_warmup_steps(self) -> int:
        """The updates at the start that change the critic alone."""
        if self._modules.critic is None:
            return 0
        if self.optim.critic_warmup_steps is not None:
            return self.optim.critic_warmup_steps
        return min(CRITIC_WARMUP, (self.optim.total_steps or 0) // 3)

    @property
    def version(self) -> int:
        """Number of changes of the weights; the engine tags its samples with it."""
        return self._version

    # -- one step ------------------------------------------------------------------------------------------------------------

    @property
    def half_updated(self) -> bool:
        """Whether the last `update` raised after it had changed weights: they are then those of no step."""
        return self._half_updated

    def token_records(self) -> list[TokenRecord]:
        """What the last `update` did with each chain and its tokens. A second call returns nothing: the tensors are freed."""
        experience, self._experience = self._experience, None
        return [] if experience is None else experience.records()

    def update(
        self,
        groups: Sequence[Sequence[Trajectory]],
        check: Check | None = None,
        changing: Changing | None = None,
        window: int | None = None,
    ) -> dict[str, float]:
        """Improve the policy on one step's chains, siblings together. Returns metrics named in `metrics.METRICS`.

        `check` receives what was measured before the first change of the weights. `changing` is called once after it, right
        before the first optimizer step on weights that the engine samples from; an update that takes no such step does not call
        it. If either raises, nothing has changed.

        Tokens drawn by weights older than `version - window` are not trained: they get no loss and count in no divisor, but
        their rewards stay in the baseline of their group. None trains tokens of every age.

        Raises InvariantError if a token cannot come from this learner's weights, or a loss or gradient is not finite, and
        ConfigError if a single row does not fit into the device's memory.
        """
        if window is not None and window < 0:
            raise ConfigError(f"the window counts versions and must be 0 or more, not {window}")
        self._check, self._changing = check, changing
        try:
            with launching_on(self.device), naming_memory(f"update {self._updates + 1}"):
                return self._improve(self._gather(groups, window))
        finally:
            self._check = self._changing = None

    def _gather(self, groups: Sequence[Sequence[Trajectory]], window: int | None) -> Experience:
        self._half_updated = False
        given: dict[str, Any] = {"exact": self._exact, "recomputes": self._recomputes, "truncated": self.loss.truncated}
        experience = gather(groups, version=self._version, device=self.device, window=window, **given)
        self.last_samples = experience.samples
        self._experience = experience
        rows = (experience.samples[part.start : part.stop] for part in experience.chain_rows)
        self.last_chains = list(zip(experience.trajectories, rows, strict=True))
        return experience

    def _improve(self, experience: Experience) -> dict[str, float]:
        """Run all passes over the chains. Returns metrics."""
        self._half_updated = False
        self.loss = self._objective.settings = self._control.settings
        self._modules.scorer.plan(self._budget, divides=self.algorithm.loss_scope != "minibatch")
        self._budget.tokens = self._group.least(self._budget.tokens)
        factor = self.optim.lr_factor(self._updates)
        totals = Totals()
        metrics, steps = {"train/lr": self._lr * factor, **experience.metrics()}, 0
        if experience.num_chains:
            metrics["train/zero_advantage_groups"] = float(self._give_credit(experience, totals))
            self._optimizer.set_lr(factor)
            metrics["train/lr"] = self._optimizer.lr
            if self._critic_optimizer is not None:  # the policy's warm-up does not apply to the critic
                self._critic_optimizer.set_lr(self.optim.lr_factor(max(self._updates, self.optim.warmup_steps)))
            warms_up = self._updates < self.critic_warmup_steps
            if warms_up:
                metrics["train/critic_warmup"] = 1.0
            steps = 0 if warms_up else self._learn(experience, totals)
            self._learn_values(experience, totals)
            if experience.returns is not None and experience.values is not None:
                values, returns = experience.values.double().cpu().numpy(), experience.returns.double().cpu().numpy()
                metrics["train/explained_variance"] = explained_variance(values, returns)
        self._updates += 1
        if self._optimizer.loss_scale is not None:
            metrics["train/loss_scale"] = self._optimizer.loss_scale
        metrics["train/skipped"] = float(steps == 0)
        metrics["train/optimizer_steps"] = float(steps)
        if (counted := self._optimizer.num_steps) is not None:
            metrics["train/adam_steps"] = float(counted)
        metrics |= totals.summed(self._group).means()
        self._control.follow(metrics, self._updates)
        self._modules.check_renewed(self.loss, self._updates)
        experience.share_notes(self._group)
        self._half_updated = False
        return metrics

    def _give_credit(self, experience: Experience, totals: Totals) -> int:
        """Compute the advantages. Returns the number of groups whose advantages are all 0."""
        loss, rewards, of_reference = self.loss, experience.rewards, None
        kl_in_reward = loss.kl_coef > 0 and loss.kl_in == "reward"
        every_row = range(len(experience.rows))
        if kl_in_reward:
            if loss.old_logprobs != "sampled":
                self._scoring.score_policy(experience, every_row, totals)
                experience.own = experience.recomputed  # replayed for the chains that are not trained, too
            reference = self._scoring.score_reference(experience, every_row)
            own = experience.sampled if experience.recomputed is None else experience.recomputed
            kl = kl_divergence(old_logprobs(experience, loss, own, slice(None)), reference, loss.kl_estimator)
            totals.add("train/reference_kl", kl.sum(), len(kl))
            of_reference = kl.double().cpu().numpy()
            rewards = rewards - loss.kl_coef * of_reference
        values = None
        if self.algorithm.needs_critic:
            values = experience.per_chain(self._scoring.score_values(experience, every_row).double().cpu().numpy())
        apart = None if of_reference is None else experience.per_chain(of_reference)
        chains = Chains(experience.groups, experience.per_chain(rewards), values, experience.trajectories, apart)
        return experience.set_credit(self._credit(chains))

    def _credit(self, chains: Chains) -> Credit:
        give = partial(self.algorithm.give_credit, chains, self.loss)
        return self._group.from_leader(give, pack_credit, unpack_credit)

    def _learn(self, experience: Experience, totals: Totals) -> int:
        """Run the policy's passes over the chains. Returns the number of optimizer steps."""
        with_advantage, value_head = self._objective.rows_to_train(experience), self._modules.value_head
        if not any(with_advantage) and value_head is None:
            return 0
        kl_in_loss = self.loss.kl_coef > 0 and self.loss.kl_in == "loss"
        # A row without advantage only counts in the loss's divisor: skip its forward pass unless another term needs it.
        every_row = kl_in_loss or self.loss.weighs_entropy or value_head is not None
        wanted = experience.rows_with_trained() if every_row else with_advantage
        steps_per_epoch = min(self.optim.num_minibatches, int((experience.num_trained > 0).sum()))
        rows = experience.rows_with(range(experience.num_chains), wanted)
        if self._objective.needs_recompute(experience, self.optim.epochs * steps_per_epoch):
            self._scoring.score_policy(experience, rows, totals)
        if kl_in_loss:
            self._scoring.score_reference(experience, rows)
        taken = 0
        for number, chains in enumerate(self._passes(experience, self.optim.epochs, self.optim.num_minibatches)):
            rows = experience.rows_with(chains, wanted)
            if not rows:
                continue
            # Entropy costs an extra pass over the logits: as a mere metric it is computed in the first epoch only.
            entropy: EntropyMode = "gradient" if self.loss.entropy_coef > 0 else "value" if number < steps_per_epoch else "none"
            self._step(experience, chains, rows, totals, is_first=not taken, entropy=entropy)
            if not taken:
                self._version += 1  # with the first step, so that the version is right even if a later step fails
            taken += 1
        return taken

    def _learn_values(self, experience: Experience, totals: Totals) -> None:
        """Run the passes of a separate critic model."""
        critic, optimizer = self._modules.critic, self._critic_optimizer
        if critic is None or optimizer is None:
            return
        if self._updates == 0 and experience.returns is not None and experience.num_trained.any():
            critic.head.start_at(experience.trained_values(experience.returns).mean())
        every_row, lengths = experience.rows_with_trained(), experience.num_trained
        epochs = self.optim.critic_epochs or CRITIC_EPOCHS
        shares = self._passes(experience, epochs, self.optim.critic_minibatches or CRITIC_MINIBATCHES)
        for number, chains in enumerate(shares):
            rows = experience.rows_with(chains, every_row)
            minibatch = Minibatch(experience.sampled, int(lengths[chains].sum()), is_first=not number)
            work = partial(self._gradients.of_critic, optimizer, experience, minibatch)
            self._optimize(optimizer, experience, rows, work, totals, "train/critic_grad_norm", False)

    def _passes(self, experience: Experience, epochs: int, num_minibatches: int) -> Iterator[list[int]]:
        """Yield the chains of each optimizer step. A chain without trained tokens is in none."""
        trained = np.flatnonzero(experience.num_trained).tolist()
        order = f"{self._seed}/{self._updates}"
        for share in passes(len(trained), epochs=epochs, num_minibatches=num_minibatches, seed=order):
            yield [trained[index] for index in share]

    def _step(
        self, experience: Experience, chains: list[int], rows: list[int], totals: Totals, is_first: bool, entropy: EntropyMode
    ) -> None:
        """One optimizer step on one minibatch, gradients accumulated over its micro batches."""
        if not is_first:
            totals.drop("train/last_slope", "train/last_slope_mark", "train/last_entropy_slope")
            experience.last = None
        minibatch = self._objective.minibatch(experience, chains, is_first)
        work = partial(self._gradients.of_policy, self._optimizer, experience, minibatch, entropy)
        self._optimize(self._optimizer, experience, rows, work, totals, "train/grad_norm", is_first)

    def _optimize(
        self, optimizer: Optimizer, experience: Experience, rows: list[int], work: Work, totals: Totals, name: str, checks: bool
    ) -> None:
        """Accumulate gradients with `work`, and step. `checks`: call `check` with what was measured in between."""
        divide = partial(self._scoring.trained_batches, experience, rows)
        while True:
            whole, measured = self._budget.run(divide, work, optimizer.zero_grad)
            if checks:
                self._check_measured(totals, measured)
            if self._apply(optimizer, whole, measured, name):
                totals.merge(measured)
                return

    def _check_measured(self, *measured: Totals) -> None:
        """Call `check` with all that was measured before the first change of the weights."""
        every, check = Totals(), self._check
        for totals in measured:
            every.merge(totals)
        metrics = every.summed(self._group).means()
        self._call(lambda: None if check is None else check(metrics))

    def _call(self, call: Callable[[], object]) -> None:
        """Call before weights change. If it raises on one rank, it does so on all, and the gradients are dropped."""
        try:
            with self._group.together():
                call()
        except BaseException:
            self._optimizer.zero_grad()
            raise

    def _apply(self, optimizer: Optimizer, whole: Tensor, totals: Totals, name: str) -> bool:
        """Step the optimizer unless a value is not finite. Returns False if the gradients must be computed again."""
        loss, norm = torch.stack([self._group.sum(whole).float(), optimizer.clip().float()]).tolist()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            if optimizer.retry() and math.isfinite(loss):
                return False
            raise InvariantError(
                f"step {self._updates}: the loss is {loss} ({name.removeprefix('train/')} {norm}); this optimizer step was not "
                f"applied and the weights are those of version {self._version}: lower train.lr, or look for extreme rewards"
                f"{optimizer.range_hint}"
            )
        if optimizer is self._optimizer:
            totals.add("train/loss", loss, 1)
            changing, self._changing = self._changing, None
            if changing is not None:  # also before the steps of a shared value head
                self._call(changing)
        totals.add(name, norm, 1)
        self._half_updated = True
        expected = optimizer.expected()
        optimizer.step()
        change, error, planned = optimizer.compare(expected)
        totals.add("train/step_error", error, planned)
        if optimizer is self._optimizer:
            totals.add("train/weight_change", change, 1.0 / self._group.size)
        return True

    # -- scores and weights --------------------------------------------------------------------------------------------------

    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Returns the log-probs of a reply under the current weights, at the learner's temperature."""
        return self.examine([row_of([(prompt_ids, token_ids, [0.0] * len(token_ids))])]).logprobs[0]

    def examine(self, samples: Sequence[Sample], drawn: int = 0, numbers: Sequence[float] = ()) -> TokenFit:
        """Returns those of the sampled tokens of several rows, and how the tokens of the last `drawn` rows fit."""
        with launching_on(self.device):
            return self._scoring.examine(samples, drawn, numbers)

    def weights(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the weights in buckets of at most 1 GiB, as full tensors under the names of the state dict, adapters merged.

        The tensors are the module's own unless adapters are merged into them: copy them before the next update.
        """
        yield from weight_buckets(self.model)

    # -- resume --------------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Load the weights of a checkpoint and the learner's `state` in it. The checkpoint may be one of several ranks.

        Raises ConfigError if the learners differ.
        """
        load_weights(self.model, checkpoint)
        critic, value_head = self._modules.critic, self._modules.value_head
        modules = {"policy": self.model, "modules/critic": critic, "modules/value_head": value_head}
        self.load_state_dict(load_learner_state(checkpoint, state, {name: m for name, m in modules.items() if m is not None}))

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
            "modules": self._modules.state_dict(),
            "kl": self._control.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the caller loads the policy's weights. Raises ConfigError if the learners differ."""
        self._modules.load_state_dict(state["modules"], state["algorithm"])
        self._control.load_state_dict(state.get("kl", {}))
        self._optimizer.load_state_dict(state["optimizer"])
        if self._critic_optimizer is not None:
            self._critic_optimizer.load_state_dict(state["critic_optimizer"])
        self._version, self._updates = int(state["version"]), int(state["updates"])
