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
from contextlib import contextmanager
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
from .algorithms.interface import Scope
from .algorithms.losses import kl_divergence, token_weights
from .batching import MicroBatch, Rows, passes
from .budget import TokenBudget
from .experience import Experience, gather
from .metrics import Totals
from .model.critic import Critic, ValueHead, hidden_width
from .model.evidence import pick, same, token_fit
from .model.logprobs import EntropyMode, Scorer, Scores
from .model.lora import copy_sharing_frozen
from .model.storage import load_learner_state, load_weights
from .optim import Optimizer
from .samples import row_of
from .settings import LossSettings, OptimSettings
from .update.objective import Minibatch, critic_loss, measure_gap, old_logprobs, regularizers, surrogate

Check = Callable[[Mapping[str, float]], None]
Changing = Callable[[], object]
Divide = Callable[[Sequence[int]], Iterator[MicroBatch]]

CRITIC_EPOCHS, CRITIC_MINIBATCHES, CRITIC_WARMUP = 2, 8, 7
"""Defaults of a critic: its learning rate over the policy's, passes, optimizer steps per pass, steps alone.

With them a critic explains a fifth of the variance after 6 steps of 128 chains; with one step at the policy's rate, nothing.
"""


def check_critic_keys(algorithm: Algorithm, loss: LossSettings, optim: OptimSettings) -> None:
    """Raises ConfigError for a setting of a critic that would be ignored."""
    keys = optim.critic_keys
    if keys and not algorithm.needs_critic:
        raise ConfigError(f"{algorithm.name} has no critic: remove train.{keys[0]}")
    separate = [key for key in keys if key != "critic_lr"]
    if separate and loss.critic == "shared":
        raise ConfigError(f'train.{separate[0]} is only used by loss.critic = "copy": a shared critic learns with the policy')


class PolicyLearner:
    """Trains one policy with one algorithm. Implements `types.Learner`.

    `temperature` is the one that chains are sampled with (1 for greedy sampling), so that the trained policy is the one that
    acted. `reference` is the model of the KL term; by default a frozen copy of the current policy, made only if `kl_coef` > 0.
    `exact` is false if the engine samples from a copy of the weights with other kernels; `loss.correction` then applies to
    every token, otherwise to tokens of older weights. `recomputes` is false if the rest of a reply goes on with keys and values
    of older weights (`rollout.at_update = "keep"`): such tokens are corrected, too.
    """

    _size = 1
    """The ranks that divide a minibatch among them (see `ranks.learner`)."""

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
        exact: bool = True,
        recomputes: bool = True,
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
        self._scorer = Scorer(self.model, temperature=temperature, chunk=self.optim.logprob_chunk)
        self._budget = TokenBudget(self.optim.max_tokens_per_batch, self.device)
        with launching_on(self.device):
            self._shape = self._scorer.prepare(self.optim)
            self._make_critic()
        self._own_reference = reference is None
        self._reference: Scorer | None = None
        if self.loss.kl_coef > 0:
            frozen = copy_sharing_frozen(self.model) if reference is None else reference.to(self.device)
            frozen.requires_grad_(False).eval()
            self._reference = Scorer(frozen, temperature=temperature, chunk=self.optim.logprob_chunk)
            with launching_on(self.device):
                if self._reference.prepare(self.optim) != self._shape:
                    self._shape = "padded"
        dtype = next(self.model.parameters()).dtype
        self._distribute()
        self._make_optimizers(dtype)
        self._mark_reference()

    def _mark_reference(self) -> None:
        self._reference_mark = [] if self._reference is None else pick(self._reference.model.parameters())

    def _make_critic(self) -> None:
        self._critic: Critic | None = None
        self._value_head: ValueHead | None = None
        if self.algorithm.needs_critic and self.loss.critic == "shared":
            self._value_head = ValueHead(hidden_width(self.model), self.device)
        elif self.algorithm.needs_critic:
            self._critic = Critic(self._scorer.head, hidden_width(self.model)).eval()

    def _distribute(self) -> None:
        """Called when all modules are made and no optimizer is."""

    def _make_optimizers(self, dtype: torch.dtype) -> None:
        self._critic_optimizer: Optimizer | None = None
        sizes = [(weight.numel(), weight.requires_grad) for weight in self.model.parameters()]
        self._lr = self.optim.lr_of(sum(size for size, _ in sizes), not all(trained for _, trained in sizes))
        modules: list[tuple[nn.Module, float]] = [(self.model, self._lr)]
        critic_lr = self.optim.critic_lr_of(self._lr)
        if self._value_head is not None:
            modules.append((self._value_head, critic_lr))
        if self._critic is not None:
            self._critic_optimizer = Optimizer([(self._critic, critic_lr)], self.optim, dtype)
        self._optimizer = Optimizer(modules, self.optim, dtype)
        if self._exact:  # another engine may hold memory now that it releases before the update
            critic = 0 if self._critic_optimizer is None else self._critic_optimizer.growth
            self._budget.require(self._optimizer.growth + critic)

    @property
    def path(self) -> str:
        """How batches are run: packed or padded, which attention and fused layers, and why not faster."""
        fits = self._reference is None or self._shape != "padded" or not self._scorer.packs
        return self._scorer.path if fits else "padded rows: the reference model cannot be packed"

    @property
    def critic_warmup_steps(self) -> int:
        """The updates at the start that change the critic alone."""
        if self._critic is None:
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
                return self._update(groups, window)
        finally:
            self._check = self._changing = None

    def _update(self, groups: Sequence[Sequence[Trajectory]], window: int | None) -> dict[str, float]:
        return self._improve(self._gather(groups, window))

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
        self._scorer.plan(self._budget, divides=self.algorithm.loss_scope != "minibatch")
        factor = self.optim.lr_factor(self._updates)
        totals = Totals()
        metrics = {
            "train/lr": self._lr * factor,
            "train/samples": float(len(experience.rows)),
            "train/tokens": float(experience.rows.num_tokens),
            "train/splits": float(len(experience.rows) - experience.num_chains),
            "train/untrainable_chains": float(experience.num_untrainable + (experience.num_trained == 0).sum()),
            "train/zero_advantage_groups": float(experience.num_groups),
            "train/masked_tokens": float(experience.num_masked),
        }
        if len(lags := experience.trained_lags):
            metrics |= {"train/lag_mean": float(lags.mean()), "train/lag_max": float(lags.max())}
        steps = 0
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
        metrics["train/adam_steps"] = float(self._optimizer.num_steps)
        metrics |= self._over_ranks(totals).means()
        self._half_updated = False
        return metrics

    def _give_credit(self, experience: Experience, totals: Totals) -> int:
        """Compute the advantages. Returns the number of groups whose advantages are all 0."""
        loss, rewards = self.loss, experience.rewards
        kl_in_reward = loss.kl_coef > 0 and loss.kl_in == "reward"
        every_row = range(len(experience.rows))
        if kl_in_reward:
            if loss.old_logprobs != "sampled":
                self._score_policy(experience, every_row, totals)
                experience.own = experience.recomputed  # replayed for the chains that are not trained, too
            reference = self._score_reference(experience, every_row)
            own = experience.sampled if experience.recomputed is None else experience.recomputed
            kl = kl_divergence(old_logprobs(experience, loss, own, slice(None)), reference, loss.kl_estimator)
            totals.add("train/reference_kl", kl.sum(), len(kl))
            rewards = rewards - loss.kl_coef * kl.double().cpu().numpy()
        values = None
        if self.algorithm.needs_critic:
            values = experience.per_chain(self._score_values(experience, every_row).double().cpu().numpy())
        chains = Chains(experience.groups, experience.per_chain(rewards), values, experience.trajectories)
        return experience.set_credit(self._credit(chains))

    def _credit(self, chains: Chains) -> Credit:
        return self.algorithm.give_credit(chains, self.loss)

    def _learn(self, experience: Experience, totals: Totals) -> int:
        """Run the policy's passes over the chains. Returns the number of optimizer steps."""
        with_advantage = self._rows_to_train(experience)
        if not any(with_advantage) and self._value_head is None:
            return 0
        kl_in_loss = self.loss.kl_coef > 0 and self.loss.kl_in == "loss"
        # A row without advantage only counts in the loss's divisor: skip its forward pass unless another term needs it.
        every_row = kl_in_loss or self.loss.entropy_coef > 0 or self._value_head is not None
        wanted = experience.rows_with_trained() if every_row else with_advantage
        steps_per_epoch = min(self.optim.num_minibatches, int((experience.num_trained > 0).sum()))
        rows = experience.rows_with(range(experience.num_chains), wanted)
        if self._needs_recompute(experience, self.optim.epochs * steps_per_epoch):
            self._score_policy(experience, rows, totals)
        if kl_in_loss:
            self._score_reference(experience, rows)
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
        if self._critic is None or self._critic_optimizer is None:
            return
        if self._updates == 0 and experience.returns is not None and experience.num_trained.any():
            self._critic.head.start_at(experience.trained_values(experience.returns).mean())
        every_row, lengths = experience.rows_with_trained(), experience.num_trained
        epochs = self.optim.critic_epochs or CRITIC_EPOCHS
        shares = self._passes(experience, epochs, self.optim.critic_minibatches or CRITIC_MINIBATCHES)
        for number, chains in enumerate(shares):
            rows = experience.rows_with(chains, every_row)
            divide = partial(self._trained_batches, experience, rows)
            work = partial(self._value_gradients, experience, int(lengths[chains].sum()), not number)
            while True:
                whole, found = self._budget.run(divide, work, self._critic_optimizer.zero_grad)
                if self._apply(self._critic_optimizer, whole, found, "train/critic_grad_norm"):
                    totals.merge(found)
                    break

    def _value_gradients(
        self, experience: Experience, num_tokens: int, is_first: bool, micro: Sequence[MicroBatch]
    ) -> tuple[Tensor, Totals]:
        """Accumulate the gradients of a separate critic. Returns its loss and what was measured."""
        assert self._critic is not None
        assert self._critic_optimizer is not None
        found, whole = Totals(), torch.zeros((), device=self.device)
        minibatch = Minibatch(experience.sampled, num_tokens, self._part(micro), False)
        for batch in micro:
            values = self._critic(batch)
            loss = critic_loss(experience, self.loss, batch, values, minibatch, found)
            with self._slope_of(values, self._critic_optimizer) as slope:
                self._backward(self._critic_optimizer, loss)
            if is_first:
                found.add("train/value_slope", slope[0].abs().sum() if slope else 0.0, minibatch.part)
            whole += loss.detach()
        return whole, found

    def _passes(self, experience: Experience, epochs: int, num_minibatches: int) -> Iterator[list[int]]:
        """Yield the chains of each optimizer step. A chain without trained tokens is in none."""
        trained = np.flatnonzero(experience.num_trained).tolist()
        order = f"{self._seed}/{self._updates}"
        for share in passes(len(trained), epochs=epochs, num_minibatches=num_minibatches, seed=order):
            yield [trained[index] for index in share]

    def _rows_to_train(self, experience: Experience) -> list[bool]:
        """Returns the rows whose loss may differ from 0. A loss over whole chains needs all rows of a chain."""
        trained = experience.rows_with_trained()
        if self.algorithm.trains_zero_advantages:
            return trained
        wanted = experience.rows_with_advantage()
        if self._scope(experience) != "token":
            for rows in experience.chain_rows:
                if any(wanted[rows.start : rows.stop]):
                    wanted[rows.start : rows.stop] = trained[rows.start : rows.stop]
        return wanted

    def _needs_recompute(self, experience: Experience, num_steps: int) -> bool:
        """Whether log-probs are needed before the first optimizer step. A single step computes them in its own pass."""
        if experience.recomputed is not None or num_steps == 1:
            return False
        mode = self.loss.old_logprobs
        corrects = self.loss.correction != "off" and experience.inexact is not None
        return mode == "recompute" or (mode == "auto" and (corrects or bool(experience.current.any())))

    def _scope(self, experience: Experience) -> Scope:
        """Returns what one call of the loss must hold completely. The weight of a sequence needs the whole chain."""
        if self.algorithm.loss_scope == "token" and self.loss.correction == "sequence" and experience.inexact is not None:
            return "chain"
        return self.algorithm.loss_scope

    def _step(
        self,
        experience: Experience,
        chains: Sequence[int],
        rows: Sequence[int],
        totals: Totals,
        *,
        is_first: bool,
        entropy: EntropyMode,
    ) -> None:
        """One optimizer step on one minibatch, gradients accumulated over its micro batches."""
        if not is_first:
            totals.drop("train/last_slope", "train/last_slope_mark", "train/last_entropy_slope")
            experience.last = None
        lengths = experience.num_trained[chains].tolist()
        of_chain = np.zeros(experience.num_chains, dtype=np.float32)
        of_chain[chains] = token_weights(lengths, self.loss.aggregation, divisor=self.loss.sequence_divisor)
        weights = (
            of_chain[experience.owners] if experience.trained is None else of_chain[experience.owners] * experience.trained
        )
        per_token = torch.from_numpy(weights).to(self.device)

        def work(micro: Sequence[MicroBatch]) -> tuple[Tensor, Totals]:
            minibatch, found = Minibatch(per_token, sum(lengths), self._part(micro), is_first), Totals()
            size = sum(batch.input_ids.numel() for batch in micro)
            found.add("train/padding_waste", sum(batch.num_padding for batch in micro), size)
            return self._gradients(experience, micro, minibatch, found, entropy), found

        while True:
            divide = partial(self._trained_batches, experience, rows)
            whole, found = self._budget.run(divide, work, self._optimizer.zero_grad)
            if is_first:
                self._check_measured(totals, found)
            if self._apply(self._optimizer, whole, found, "train/grad_norm"):
                totals.merge(found)
                return

    def _gradients(
        self,
        experience: Experience,
        micro: Sequence[MicroBatch],
        minibatch: Minibatch,
        totals: Totals,
        entropy: EntropyMode,
    ) -> Tensor:
        """Accumulate the minibatch's gradients on the parameters. Returns its loss."""
        whole = torch.zeros((), device=self.device)
        known = self._slopes(experience, micro, minibatch, totals) if self._is_divided(experience, micro) else None
        for batch in micro:
            scores = self._scorer(batch, entropy=entropy, keep_hidden=self._value_head is not None)
            values = None if self._value_head is None else self._value_head(scores.hidden)
            loss = self._loss(experience, batch, scores, values, minibatch, totals, known)
            with self._noting(experience, batch, scores, values, minibatch, totals):
                self._backward(self._optimizer, loss)
            whole += loss.detach()
        return whole

    @contextmanager
    def _noting(
        self,
        experience: Experience,
        batch: MicroBatch,
        scores: Scores,
        values: Tensor | None,
        minibatch: Minibatch,
        totals: Totals,
    ) -> Iterator[None]:
        """Note which log-probs receive a gradient while the body runs; in the first and the last optimizer step, how much."""
        with (
            self._slope_of(scores.logprobs, self._optimizer) as slope,
            self._slope_of(scores.entropies, self._optimizer) as of_entropy,
            self._slope_of(values, self._optimizer) as of_value,
        ):
            yield
        if slope:
            experience.use(batch.tokens)
        name = "train/slope" if minibatch.is_first else "train/last_slope"
        slopes = slope[0] if slope else torch.zeros_like(scores.logprobs)
        totals.add(name, slopes.abs().sum(), minibatch.part)
        totals.add(f"{name}_mark", (slopes * scores.logprobs.detach()).sum(), minibatch.part)
        if self.loss.entropy_coef > 0:
            totals.add(name.replace("slope", "entropy_slope"), of_entropy[0].sum() if of_entropy else 0.0, minibatch.part)
        if not minibatch.is_first:
            experience.keep_last(batch.tokens, scores.logprobs)
        elif values is not None:
            totals.add("train/value_slope", of_value[0].abs().sum() if of_value else 0.0, minibatch.part)

    @contextmanager
    def _slope_of(self, tensor: Any, optimizer: Optimizer) -> Iterator[list[Tensor]]:
        """Yields a list that holds the derivative of the loss by the tensor after a backward pass, if there is one."""
        found: list[Tensor] = []
        if tensor is None or not tensor.requires_grad:
            yield found
            return
        hook = tensor.register_hook(lambda slope: found.append(slope.detach() / (optimizer.loss_factor * self._size)))
        try:
            yield found
        finally:
            hook.remove()

    def _loss(
        self,
        experience: Experience,
        batch: MicroBatch,
        scores: Scores,
        values: Tensor | None,
        minibatch: Minibatch,
        totals: Totals,
        known: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Returns the loss of one micro batch. `known` are the slopes and the loss of the whole minibatch (see `_slopes`)."""
        tokens = batch.tokens
        if known is None:
            loss = surrogate(
                experience, self.algorithm, self.loss, tokens, scores.logprobs, minibatch, totals, part=minibatch.part
            )
        else:
            linear = (known[0][tokens] * scores.logprobs).sum()
            loss = linear - linear.detach() + known[1] * minibatch.part
        loss = loss + regularizers(experience, self.loss, tokens, scores, minibatch, totals)
        if values is not None:
            loss = loss + self.loss.value_coef * critic_loss(experience, self.loss, batch, values, minibatch, totals)
        return loss

    def _part(self, micro: Sequence[MicroBatch]) -> float:
        """Returns the share of one micro batch among those of all ranks."""
        return 1.0 / (len(micro) * self._size)

    def _backward(self, optimizer: Optimizer, loss: Tensor) -> None:
        optimizer.backward(loss)

    def _over_ranks(self, totals: Totals) -> Totals:
        """Returns the sums over all ranks."""
        return totals

    def _is_divided(self, experience: Experience, micro: Sequence[MicroBatch]) -> bool:
        """Whether micro batches divide what the algorithm's loss needs in one call."""
        # Recomputed log-probs give the weights of sequences without a call for the whole chain.
        scope = self._scope(experience) if experience.recomputed is None else self.algorithm.loss_scope
        if scope == "token" or len(micro) == 1:
            return False
        if scope == "minibatch":
            return True
        parts = [set(experience.chain_of[batch.tokens].tolist()) for batch in micro]
        return len(set().union(*parts)) < sum(map(len, parts))

    def _slopes(
        self, experience: Experience, micro: Sequence[MicroBatch], minibatch: Minibatch, totals: Totals
    ) -> tuple[Tensor, Tensor]:
        """Returns the derivative of the algorithm's loss by each log-prob, and the loss, over the whole minibatch.

        One forward pass without gradients finds the log-probs. By the chain rule, slopes x log-probs then has the gradient of
        the loss, and the micro batches can be run one by one.
        """
        tokens, found = self._present_logprobs(experience, micro, minibatch)
        logprobs = found.detach().clone().requires_grad_()
        loss = surrogate(experience, self.algorithm, self.loss, tokens, logprobs, minibatch, totals, part=1.0)
        slopes = torch.zeros_like(experience.sampled, dtype=logprobs.dtype)
        slopes[tokens] = torch.autograd.grad(loss, logprobs)[0]
        return slopes, loss.detach()

    def _present_logprobs(
        self, experience: Experience, micro: Sequence[MicroBatch], minibatch: Minibatch
    ) -> tuple[Tensor, Tensor]:
        """Returns the numbers of the minibatch's tokens, and their log-probs under the present weights."""
        tokens = torch.cat([batch.tokens for batch in micro])
        if minibatch.is_first and experience.recomputed is not None:
            return tokens, experience.recomputed[tokens]  # the weights have not changed since
        with torch.no_grad():
            return tokens, torch.cat([self._scorer(batch).logprobs for batch in micro])

    def _check_measured(self, *found: Totals) -> None:
        """Call `check` with all that was measured before the first change of the weights."""
        if self._check is None:
            return
        known = Totals()
        for totals in found:
            known.merge(totals)
        try:
            self._check(self._over_ranks(known).means())
        except BaseException:
            self._optimizer.zero_grad()
            raise

    def _apply(self, optimizer: Optimizer, whole: Tensor, totals: Totals, name: str) -> bool:
        """Step the optimizer unless a value is not finite. Returns False if the gradients must be computed again."""
        loss, norm = torch.stack([self._add_up(whole).float(), optimizer.clip().float()]).tolist()
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
            self._announce_change()
        totals.add(name, norm, 1)
        self._half_updated = True
        expected = optimizer.expected()
        optimizer.step()
        change, error, planned = optimizer.compare(expected)
        totals.add("train/step_error", error, planned)
        if optimizer is self._optimizer:
            totals.add("train/weight_change", change, 1.0 / self._size)
        return True

    def _announce_change(self) -> None:
        """Call `changing` before the first step on the policy's optimizer. A shared value head's steps are such steps."""
        changing, self._changing = self._changing, None
        try:
            if changing is not None:
                changing()
        except BaseException:
            self._optimizer.zero_grad()
            raise

    # -- scores of the weights before the update ----------------------------------------------------------------------------

    def _batches(self, experience: Experience, rows: Sequence[int]) -> Iterator[MicroBatch]:
        return experience.rows.batches(rows, self._budget.tokens, self.device, self._shape)

    def _scored(
        self, divide: Divide, rows: Sequence[int], score: Callable[[MicroBatch], Tensor]
    ) -> Iterator[tuple[MicroBatch, Tensor]]:
        """Yield the micro batches of the rows with their scores, in smaller batches if memory runs out."""
        return self._budget.each(divide, rows, score)

    def _trained_batches(self, experience: Experience, rows: Sequence[int]) -> list[MicroBatch]:
        """Returns micro batches whose predictions are trained tokens only. Every loss is computed on these."""
        batches = [experience.only_trained(batch) for batch in self._batches(experience, rows)]
        experience.check_window(batches)
        return batches

    @torch.no_grad()
    def _score_policy(self, experience: Experience, rows: Sequence[int], totals: Totals) -> None:
        experience.recomputed = torch.zeros_like(experience.sampled)
        for batch, logprobs in self._scored(
            partial(self._batches, experience), rows, lambda batch: self._scorer(batch).logprobs
        ):
            experience.recomputed[batch.tokens] = logprobs
            measure_gap(experience, logprobs, batch.tokens, totals)
        self._add_up(experience.recomputed)

    @torch.no_grad()
    def _score_reference(self, experience: Experience, rows: Sequence[int]) -> Tensor:
        reference = self._reference
        assert reference is not None  # made if kl_coef > 0
        changed = not same(self._reference_mark, pick(reference.model.parameters()))
        if float(self._add_up(torch.tensor(float(changed), device=self.device))):
            raise InvariantError("the reference model has changed since the run began: the KL would follow the policy")
        experience.reference = torch.zeros_like(experience.sampled)
        for batch, logprobs in self._scored(partial(self._batches, experience), rows, lambda batch: reference(batch).logprobs):
            experience.reference[batch.tokens] = logprobs
        return self._add_up(experience.reference)

    @torch.no_grad()
    def _score_values(self, experience: Experience, rows: Sequence[int]) -> Tensor:
        experience.values = torch.zeros_like(experience.sampled)
        for batch, values in self._scored(partial(self._batches, experience), rows, self._values_of):
            experience.values[batch.tokens] = values
        return self._add_up(experience.values)

    def _add_up(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place. Returns it."""
        return tensor

    def _values_of(self, batch: MicroBatch) -> Tensor:
        if self._critic is not None:
            return self._critic(batch)  # type: ignore[no-any-return]
        assert self._value_head is not None
        return self._value_head(self._scorer.hidden(batch))  # type: ignore[no-any-return]

    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Returns the log-probs of a reply under the current weights, at the learner's temperature."""
        return self.examine([row_of([(prompt_ids, token_ids, [0.0] * len(token_ids))])]).logprobs[0]

    @torch.no_grad()
    def examine(self, samples: Sequence[Sample], drawn: int = 0) -> TokenFit:
        """Returns those of the sampled tokens of several rows, and how the tokens of the last `drawn` rows fit."""
        rows = Rows(samples)
        first, logprobs = int(rows.starts[len(rows) - drawn]), np.zeros(rows.num_tokens)
        fits: list[Tensor] = []

        def score(batch: MicroBatch) -> Tensor:
            scores = self._scorer(batch, drawn=torch.nonzero(batch.tokens >= first)[:, 0] if drawn else None)
            fits.extend([] if scores.fit is None else [scores.fit])
            return scores.logprobs

        with launching_on(self.device):
            divide = partial(rows.batches, max_tokens=self._budget.tokens, device=self.device, shape=self._shape)
            for batch, found in self._scored(divide, range(len(rows)), score):
                logprobs[batch.tokens.cpu().numpy()] = found.double().cpu().numpy()
        return token_fit([part.tolist() for part in np.split(logprobs, rows.starts[1:-1])], fits)

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
        modules = {"policy": self.model, "modules/critic": self._critic, "modules/value_head": self._value_head}
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
                self._load_module(module, state["modules"][name])
        self._mark_reference()
        self._load_optimizer(self._optimizer, state["optimizer"])
        if self._critic_optimizer is not None:
            self._load_optimizer(self._critic_optimizer, state["critic_optimizer"])
        self._version, self._updates = int(state["version"]), int(state["updates"])

    def _load_module(self, module: nn.Module, saved: Mapping[str, Any]) -> None:
        module.load_state_dict(saved)

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        optimizer.load_state_dict(saved)
