"""The settings of learning: the tables [loss], [train] and [lora].

Each field carries its help text, which the documentation prints, and its limits, which `check_fields` enforces. Which fields
an algorithm reads is a column of the table in `algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from .. import plugins
from ..errors import AgentFlyError, ConfigError
from ..schema import check_fields, setting

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
KlKind = Literal["k1", "k2", "k3"]
Correction = Literal["truncate", "mask", "sequence", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What is minimised."""

    clip_low: float = setting(0.2, "The ratio of new to old probability is clipped below at 1 - clip_low.", low=0, high=1)
    clip_high: float = setting(
        0.28, "The ratio is clipped above at 1 + clip_high; a value slightly above clip_low keeps exploration alive.", low=0
    )
    dual_clip: float | None = setting(
        3.0,
        "For a negative advantage, the loss of a token is at most this many times its advantage; a large number turns it off.",
        above=1,
    )
    aggregation: Aggregation = setting(
        "token_mean",
        "How token losses become one number: token_mean (every token counts the same), sequence_mean (every chain "
        "counts the same), sequence_sum (sum per chain over the constant sequence_divisor, mean over chains).",
    )
    sequence_divisor: float = setting(
        512.0, "The constant that sequence_sum divides by: the most tokens a chain may sample is a good value.", above=0
    )
    normalize_std: bool = setting(True, "Divide a group's advantages by their standard deviation.")
    kl_coef: float = setting(0.0, "Weight of the KL divergence to the reference model; 0 keeps no reference in memory.", low=0)
    kl_in: Literal["loss", "reward"] = setting(
        "loss", "Where the KL goes: a term of the loss, or subtracted from each token's reward before advantages are computed."
    )
    kl_kind: KlKind | None = setting(
        None,
        "Estimator of the KL: k1 (unbiased, noisy), k2 (half the squared log-ratio), k3 (unbiased, never negative). Unset: "
        "k3 in the loss, k1 in the reward. In the loss the gradient of k1 averages to zero: prefer k2 or k3 there.",
    )
    kl_target: float | None = setting(
        None,
        "KL to the reference per token (as in train/reference_kl) that kl_coef is adapted to: after each step it is multiplied "
        "by 1 + 0.1 x the relative error, which counts as at most 0.2 (arXiv:1909.08593).",
        above=0,
    )
    reference: str | None = setting(
        None,
        "The reference model: a model directory or hub name, or a run's folder (its newest checkpoint). It must have the "
        "policy's tokens. Unset: the weights that the run begins with.",
    )
    reference_hint: str | None = setting(
        None,
        "Text that the reference reads at the end of the task's last message and the policy does not, with fields of the row "
        "in braces, as in `The answer is {answer}`.",
    )
    reference_every: int = setting(0, "Steps after which the policy becomes the reference, again and again; 0: never.", low=0)
    reference_mix: float = setting(
        1.0,
        "Share of the policy in a renewed reference, of each weight; with reference_every = 1 and a small share the reference "
        "is a moving average of the policy.",
        above=0,
        high=1,
    )
    entropy_coef: float = setting(
        0.0, "Weight of the entropy bonus; with entropy_target, the weight that it begins with.", low=0
    )
    entropy_target: float | None = setting(
        None,
        "Entropy in nats (as in train/entropy) below which the bonus keeps the policy from falling: after each step "
        "entropy_coef rises or falls by at most 0.02, to between 0 and 1, in proportion to the relative error up to 0.2, and "
        "it acts only after steps below the target (arXiv:2505.22312).",
        above=0,
    )
    old_logprobs: Literal["auto", "recompute", "sampled"] = setting(
        "auto",
        "The ratio's denominator. recompute: the learner's own forward pass before the first step (free when there is only "
        "one step: the ratio is then 1). sampled: the log-probs that the engine recorded; turns loss.correction off. auto: "
        'recompute; with loss.correction = "off", sampled for tokens drawn by older weights.',
    )
    correction: Correction = setting(
        "truncate",
        "Weight on the loss of tokens that the learner's weights did not draw exactly (older weights, or a copy in another "
        "engine), by w = learner's / sampler's probability. truncate: min(w, cap). mask: w, or 0 outside [1 / cap, cap]. "
        "sequence: min(product of w over the chain, cap). off: 1.",
    )
    correction_cap: float = setting(2.0, "The cap of loss.correction.", above=1)
    truncated: Literal["train", "mask"] = setting(
        "train",
        "Chains that a limit of tokens, turns or time ended: train (as all others) or mask (scored and compared with their "
        "siblings, but their tokens get no loss).",
    )
    turn_credit: bool = setting(
        False,
        "Each turn counts as one action: gamma and lam count turns instead of tokens, and algorithms that compare the chains "
        "of a group compare the discounted rewards from each turn on instead of the chains' totals.",
    )
    gamma: float = setting(
        1.0,
        "Discount per sampled token, or per turn with turn_credit (tool observations do not count as time). Algorithms that "
        "compare a group use it with turn_credit only.",
        low=0,
        high=1,
    )
    lam: float = setting(
        1.0,
        "Lambda of GAE, per sampled token, or per turn with turn_credit: 1 relies on observed rewards, smaller values rely on "
        "the critic.",
        low=0,
        high=1,
    )
    critic: Literal["copy", "shared"] = setting(
        "copy",
        "The value model: a copy of the policy's backbone with its own optimizer state, or a head on the policy's backbone.",
    )
    value_coef: float = setting(0.5, "Weight of the value loss in the policy's loss, for a shared critic.", above=0)
    value_clip: float = setting(
        0.0,
        "New values may differ from the old ones by this much, in units of the reward, before their loss is clipped; 0: off.",
        low=0,
    )
    options: dict[str, Any] = setting({}, "Settings that only the chosen algorithm has.")

    def __post_init__(self) -> None:
        check_fields(self, "loss.")
        if self.reference_mix < 1.0 and not self.reference_every:
            raise ConfigError("loss.reference_mix has no effect without loss.reference_every: set that, or remove it")
        if self.old_logprobs == "sampled" and self.correction != "off":
            raise ConfigError(
                'loss.old_logprobs = "sampled" already divides by the sampler\'s probability, so loss.correction = '
                f'"{self.correction}" would count it twice: set loss.correction = "off", or leave out loss.old_logprobs'
            )

    def check_chains(self, max_lag: int, max_turns: int) -> None:
        """Raises ConfigError if chains of one turn would get credit per turn, or tokens of older weights no correction."""
        if self.turn_credit and max_turns == 1:
            raise ConfigError("loss.turn_credit has no effect with agent.max_turns = 1: allow more turns, or remove it")
        if max_lag > 0 and self.correction == "off" and self.old_logprobs == "recompute":
            raise ConfigError(
                f'rollout.max_lag = {max_lag} with loss.old_logprobs = "recompute" and loss.correction = "off" trains tokens '
                'of older weights as if the current ones had drawn them: set loss.correction, or loss.old_logprobs = "auto"'
            )

    @property
    def weighs_entropy(self) -> bool:
        """Whether the entropy of all chains is measured: those without advantage get the bonus, too."""
        return self.entropy_coef > 0 or self.entropy_target is not None

    @property
    def kl_estimator(self) -> KlKind:
        return self.kl_kind or ("k3" if self.kl_in == "loss" else "k1")


SCHEDULES = ("constant", "linear", "cosine", "wsd")
ADAMW = "adamw"
MOMENT_BYTES = {ADAMW: 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2.0 + 8.0 / 256, "muon": 8.0}
"""Bytes of the moments of a weight, by the name of the optimizer; of Muon's matrices half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """How it is minimised. A step is one call of `update`; all passes of one step use one learning rate."""

    optimizer: str | Callable[..., Any] = setting(
        ADAMW,
        "adamw; adamw_bf16 and adamw_8bit (AdamW with moments in 16 or 8 bits, rounded at random); muon (Newton-Schulz steps "
        "for the matrices of the layers, of AdamW's size, AdamW for the rest); or your own: file.py:NAME or module:NAME of a "
        "function from parameter groups to a torch.optim.Optimizer, in Python also the function.",
    )
    lr: float | None = setting(
        None,
        "Learning rate, after warm-up; unset: 1e-4 for adapters (lora.rank), 1e-6 for all weights of a model of a "
        "billion or more, else (and in `agentfly sft`) 1e-5.",
        above=0,
    )
    critic_lr: float | None = setting(None, "Learning rate of the critic; unset: 2.5 times lr, at least 1e-5.", above=0)
    critic_epochs: int | None = setting(None, "Passes of a separate critic over the chains of a step; unset: 2.", low=1)
    critic_minibatches: int | None = setting(None, "Optimizer steps of a separate critic per pass; unset: 8.", low=1)
    critic_warmup_steps: int | None = setting(
        None,
        "Steps at the start in which a separate critic learns and the policy waits; unset: 7, or a third of a shorter run.",
        low=0,
    )
    betas: tuple[float, float] = setting((0.9, 0.999), "AdamW's averaging of the gradient and of its square.")
    weight_decay: float = setting(0.0, "AdamW's weight decay, on matrices only (not on norms and biases).", low=0)
    max_grad_norm: float = setting(1.0, "Gradients with a larger norm are scaled down to it.", above=0)
    warmup_steps: int = setting(0, "Steps over which the learning rate rises from 0.", low=0)
    schedule: str | Callable[[int, int | None], float] = setting(
        "constant",
        "The learning rate after warm-up: constant, falling to lr_floor over the run (linear, cosine), constant until it "
        "falls in the last decay_steps along a line (wsd, arXiv:2404.06395), or your own: file.py:NAME or module:NAME of a "
        "function from the step, counted from 0, and total_steps to the factor on lr, in Python also the function.",
    )
    lr_floor: float = setting(0.0, "Share of the learning rate that linear, cosine and wsd fall to.", low=0, below=1)
    decay_steps: int | None = setting(None, "Steps of the fall of wsd; unset: a tenth of total_steps.", low=1)
    total_steps: int | None = setting(
        None, "The step at which a linear, cosine or wsd schedule ends; unset: the length of the run.", low=1
    )
    epochs: int = setting(1, "Passes over the chains of a step.", low=1)
    num_minibatches: int = setting(
        1,
        "Optimizer steps per pass, each on an equal share of the chains: a count, not a size.",
        low=1,
    )
    max_tokens_per_batch: int | Literal["auto"] = setting(
        "auto",
        "Tokens, padding included, in one forward and backward pass; gradients accumulate over these passes. Tokens that rows "
        "share count once. auto: 4096 on a CPU; on a GPU 8192 in the first step, then from the free memory; for small models "
        "at most what runs as a CUDA graph. Out of memory, half as many are tried.",
        low=1,
    )
    packing: Literal["auto", "on", "off"] = setting(
        "auto",
        "Concatenate the rows of a batch without padding, and compute what they have in common at their beginning once. auto: "
        "if the model's attention supports it; otherwise rows of similar length are padded, and their common prefix runs once.",
    )
    gradient_checkpointing: bool | Literal["auto"] = setting(
        "auto",
        "Keep no activations inside layers and recompute them in the backward pass: less memory, slower. auto: on a GPU "
        "that weights, gradients, moments and the activations of 8192 tokens would fill to more than 85 %.",
    )
    logprob_chunk: int | None = setting(
        None, "Tokens whose logits exist at the same time; unset: enough for 64 million logits (256 MB).", low=1
    )

    def __post_init__(self) -> None:
        betas: Any = self.betas
        if isinstance(betas, list):  # TOML has no tuples
            object.__setattr__(self, "betas", tuple(betas))
        good = isinstance(self.betas, tuple) and len(self.betas) == 2
        if not good or not all(isinstance(beta, int | float) and 0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"train.betas must be two numbers in [0, 1), not {self.betas!r}")
        check_fields(self, "train.")
        if not (isinstance(self.optimizer, str) or callable(self.optimizer)):
            raise ConfigError(f"train.optimizer must be a name or a function, not {self.optimizer!r}")
        if isinstance(self.optimizer, str) and ":" not in self.optimizer and self.optimizer not in plugins.names("optimizers"):
            plugins.resolve("optimizers", self.optimizer)  # raises, with the nearest names
        if not callable(self.schedule) and self.schedule not in SCHEDULES and ":" not in str(self.schedule):
            raise ConfigError(
                f"train.schedule must be {', '.join(map(repr, SCHEDULES))} or file.py:NAME of a function, not {self.schedule!r}"
            )
        if self.schedule in SCHEDULES[1:] and self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"train.total_steps ({self.total_steps}) must be greater than train.warmup_steps ({self.warmup_steps}) "
                f"for a {self.schedule} schedule"
            )
        if self.lr_floor and self.schedule not in SCHEDULES[1:]:
            what = "a constant learning rate" if self.schedule == "constant" else "a schedule of your own"
            raise ConfigError(f"train.lr_floor has no effect on {what}: set train.schedule to a falling one, or remove it")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ConfigError('train.decay_steps has no effect without train.schedule = "wsd": set that, or remove it')

    @property
    def optimizer_name(self) -> str:
        """The optimizer as a checkpoint names it."""
        return self.optimizer if isinstance(self.optimizer, str) else plugins.reference_of(self.optimizer)

    @property
    def schedule_name(self) -> str:
        """The schedule as a run's record names it."""
        return self.schedule if isinstance(self.schedule, str) else plugins.reference_of(self.schedule)

    def named(self) -> OptimSettings:
        """Returns the settings with the names of what is a user's own, as a run's record holds them."""
        return replace(self, optimizer=self.optimizer_name, schedule=self.schedule_name)

    def moment_bytes(self, matrix: bool) -> float:
        """Returns the bytes of the moments of a weight; those of a user's own optimizer count as AdamW's."""
        each = MOMENT_BYTES.get(self.optimizer_name, MOMENT_BYTES[ADAMW])
        return each / 2 if matrix and self.optimizer == "muon" else each

    def lr_of(self, num_weights: int, adapters: bool) -> float:
        """Returns the learning rate for a model of so many weights, of which all or only `adapters` are trained."""
        if self.lr is not None:
            return self.lr
        return 1e-4 if adapters else 1e-6 if num_weights >= 1e9 else 1e-5

    def critic_lr_of(self, lr: float) -> float:
        """Returns the critic's learning rate beside that of the policy."""
        return self.critic_lr or max(2.5 * lr, 1e-5)

    @property
    def critic_keys(self) -> list[str]:
        """The settings of a critic that are set."""
        return [f.name for f in fields(self) if f.name.startswith("critic_") and getattr(self, f.name) is not None]

    def lr_factor(self, step: int) -> float:
        """Returns the factor on the learning rate in step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        if self.schedule not in SCHEDULES:
            return self._own_factor(step)
        if self.total_steps is None:
            raise ConfigError(f"a {self.schedule} schedule needs its end: set train.total_steps")
        length = max(1, self.total_steps - self.warmup_steps)
        if self.schedule == "wsd":
            length = min(length, self.decay_steps or max(1, self.total_steps // 10))
        done = min(1.0, max(0.0, (step - (self.total_steps - length)) / length))
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0 - done
        return self.lr_floor + (1.0 - self.lr_floor) * left

    def _own_factor(self, step: int) -> float:
        name = self.schedule_name
        try:
            function = plugins.resolve("schedules", self.schedule) if isinstance(self.schedule, str) else self.schedule
            factor = function(step, self.total_steps)
        except AgentFlyError:
            raise
        except Exception as error:
            raise ConfigError(f"train.schedule = {name!r} raised {type(error).__name__}: {error}") from error
        if not isinstance(factor, int | float) or not 0.0 <= factor < math.inf:
            raise ConfigError(f"train.schedule = {name!r} must give a number of at least 0 for step {step}, not {factor!r}")
        return float(factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters: train small matrices beside the frozen weights."""

    rank: int = setting(0, "Rank of the adapters; 0 trains every weight.", low=0)
    alpha: float = setting(32.0, "The output of an adapter is multiplied by alpha / rank.", above=0)
    targets: list[str] = setting(
        ["all"], 'Linear layers and experts by the last part of their name, such as q_proj; "all": all but the output head.'
    )

    def __post_init__(self) -> None:
        check_fields(self, "lora.")
        if not self.targets:
            raise ConfigError("lora.targets is empty: name layers, or leave it out")
        if self.rank == 0 and (self.alpha != 32.0 or self.targets != ["all"]):
            raise ConfigError("lora.alpha and lora.targets have no effect without lora.rank: set that, or remove them")

    def wants(self, name: str) -> bool:
        return "all" in self.targets or name in self.targets
