"""What can be set about learning: the loss and the optimizer.

In: values from a config file or a call. Out: frozen settings that have checked themselves, or a ConfigError that says what to
write instead. Each field carries its help text, from which the tables of the documentation are made. No torch here, and nothing
that depends on an algorithm: which of these keys an algorithm reads is a column of the table in `algorithms`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
KlKind = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What is minimised."""

    clip_low: float = field(
        default=0.2,
        metadata={"help": "The ratio of new to old probability is cut below at 1 - clip_low."},
    )
    clip_high: float = field(
        default=0.2,
        metadata={"help": "The ratio is cut above at 1 + clip_high; a little more than clip_low keeps exploration alive."},
    )
    dual_clip: float | None = field(
        default=None,
        metadata={
            "help": "Where the advantage is negative, the loss of a token is at most this many times its advantage "
            "(3 is usual); off if unset."
        },
    )
    aggregation: Aggregation = field(
        default="token_mean",
        metadata={
            "help": "How token losses become one number: token_mean (every token counts the same), sequence_mean (every chain "
            "counts the same), sequence_sum (sum per chain over the constant sequence_divisor, mean over chains)."
        },
    )
    sequence_divisor: float = field(
        default=512.0,
        metadata={"help": "The constant that sequence_sum divides by: the most tokens a chain may sample is a good value."},
    )
    normalize_std: bool = field(
        default=True,
        metadata={"help": "Divide a group's advantages by their standard deviation."},
    )
    kl_coef: float = field(
        default=0.0,
        metadata={"help": "Weight of the KL divergence to the reference model; 0 keeps no reference in memory."},
    )
    kl_in: Literal["loss", "reward"] = field(
        default="loss",
        metadata={
            "help": "Where the KL goes: a term of the loss, or taken off the reward of each token before advantages are made."
        },
    )
    kl_kind: KlKind | None = field(
        default=None,
        metadata={
            "help": "Estimator of the KL: k1 (unbiased, noisy), k2 (half the squared log-ratio), k3 (unbiased, never "
            "negative). Unset: k3 in the loss, k1 in the reward. In the loss the gradient of k1 averages to zero: "
            "prefer k2 or k3 there."
        },
    )
    entropy_coef: float = field(
        default=0.0,
        metadata={"help": "Weight of the entropy bonus."},
    )
    old_logprobs: Literal["auto", "recompute", "sampled"] = field(
        default="auto",
        metadata={
            "help": "The ratio's denominator. recompute: the learner's own forward pass before the first step (free when "
            "there is only one step: the ratio is then 1). sampled: what the engine recorded. auto: recompute for tokens "
            "drawn by the present weights, sampled for tokens drawn by older ones."
        },
    )
    gamma: float = field(
        default=1.0,
        metadata={"help": "Discount per sampled token (tool observations do not count as time)."},
    )
    lam: float = field(
        default=1.0,
        metadata={"help": "Lambda of GAE: 1 trusts what was observed, smaller values trust the critic."},
    )
    critic: Literal["copy", "shared"] = field(
        default="copy",
        metadata={
            "help": "The value model: a copy of the policy's backbone with its own optimizer state, or a head on the policy's "
            "backbone."
        },
    )
    value_coef: float = field(
        default=0.5,
        metadata={"help": "Weight of the value loss in the policy's loss, for a shared critic."},
    )
    value_clip: float = field(
        default=0.2,
        metadata={"help": "New values may leave the old ones by this much before their loss is cut; 0 turns it off."},
    )

    def __post_init__(self) -> None:
        _number(self, "loss", "clip_low", low=0.0, high=1.0)
        _number(self, "loss", "clip_high", low=0.0)
        _number(self, "loss", "dual_clip", above=1.0, optional=True)
        _choice(self, "loss", "aggregation", ("token_mean", "sequence_mean", "sequence_sum"))
        _number(self, "loss", "sequence_divisor", above=0.0)
        _flag(self, "loss", "normalize_std")
        _number(self, "loss", "kl_coef", low=0.0)
        _choice(self, "loss", "kl_in", ("loss", "reward"))
        _choice(self, "loss", "kl_kind", ("k1", "k2", "k3"), optional=True)
        _number(self, "loss", "entropy_coef", low=0.0)
        _choice(self, "loss", "old_logprobs", ("auto", "recompute", "sampled"))
        _number(self, "loss", "gamma", low=0.0, high=1.0)
        _number(self, "loss", "lam", low=0.0, high=1.0)
        _choice(self, "loss", "critic", ("copy", "shared"))
        _number(self, "loss", "value_coef", above=0.0)
        _number(self, "loss", "value_clip", low=0.0)

    @property
    def kl_estimator(self) -> KlKind:
        return self.kl_kind or ("k3" if self.kl_in == "loss" else "k1")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """How it is minimised. A step is one call of `update`; all passes of one step use one learning rate."""

    lr: float = field(
        default=1e-5,
        metadata={"help": "Learning rate of AdamW, after warm-up."},
    )
    critic_lr: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the critic; unset: the same as lr."},
    )
    betas: tuple[float, float] = field(
        default=(0.9, 0.999),
        metadata={"help": "AdamW's averaging of the gradient and of its square."},
    )
    weight_decay: float = field(
        default=0.0,
        metadata={"help": "AdamW's weight decay, on matrices only (not on norms and biases)."},
    )
    max_grad_norm: float = field(
        default=1.0,
        metadata={"help": "Gradients longer than this are shortened to it."},
    )
    warmup_steps: int = field(
        default=0,
        metadata={"help": "Steps over which the learning rate rises from 0."},
    )
    schedule: Literal["constant", "linear", "cosine"] = field(
        default="constant",
        metadata={"help": "What the learning rate does after warm-up: stays, or falls to 0."},
    )
    total_steps: int | None = field(
        default=None,
        metadata={"help": "The step at which a linear or cosine schedule ends; unset: the length of the run."},
    )
    epochs: int = field(
        default=1,
        metadata={"help": "Passes over the chains of a step."},
    )
    minibatches: int = field(
        default=1,
        metadata={"help": "Optimizer steps per pass; each sees an equal share of the chains."},
    )
    max_tokens_per_batch: int = field(
        default=8192,
        metadata={
            "help": "Tokens, padding included, in one forward and backward pass; gradients are accumulated over as many as it "
            "takes."
        },
    )
    packing: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "Rows of a batch one behind the other, without padding. auto: on a GPU, where the model can be read so; "
            "elsewhere rows of like length are padded, and what they begin with alike is run once."
        },
    )
    gradient_checkpointing: bool = field(
        default=False,
        metadata={
            "help": "Keep no activations inside layers and compute them again in the backward pass: less memory, slower."
        },
    )
    logprob_chunk: int | None = field(
        default=None,
        metadata={"help": "Tokens whose logits exist at the same time; unset: as many as make 64 million logits (256 MB)."},
    )

    def __post_init__(self) -> None:
        betas: Any = self.betas
        if isinstance(betas, list):  # TOML has no tuples
            object.__setattr__(self, "betas", tuple(betas))
        _number(self, "train", "lr", above=0.0)
        _number(self, "train", "critic_lr", above=0.0, optional=True)
        good = isinstance(self.betas, tuple) and len(self.betas) == 2
        if not good or not all(isinstance(beta, int | float) and 0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"train.betas must be two numbers in [0, 1), not {self.betas!r}")
        _number(self, "train", "weight_decay", low=0.0)
        _number(self, "train", "max_grad_norm", above=0.0)
        _choice(self, "train", "schedule", ("constant", "linear", "cosine"))
        _choice(self, "train", "packing", ("auto", "on", "off"))
        _flag(self, "train", "gradient_checkpointing")
        for name, low, optional in (
            ("warmup_steps", 0, False),
            ("total_steps", 1, True),
            ("epochs", 1, False),
            ("minibatches", 1, False),
            ("max_tokens_per_batch", 1, False),
            ("logprob_chunk", 1, True),
        ):
            _number(self, "train", name, low=low, optional=optional, whole=True)
        if self.schedule != "constant" and self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"train.total_steps ({self.total_steps}) must be greater than train.warmup_steps ({self.warmup_steps}) "
                f"for a {self.schedule} schedule"
            )

    def lr_factor(self, step: int) -> float:
        """What the learning rate is multiplied by in step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        if self.total_steps is None:
            raise ConfigError(f"a {self.schedule} schedule needs its end: set train.total_steps")
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Train small matrices beside frozen weights, in place of all weights."""

    rank: int = field(default=0, metadata={"help": "Rank of the adapters; 0 trains every weight."})
    alpha: float = field(default=32.0, metadata={"help": "What an adapter adds is multiplied by alpha / rank."})
    targets: list[str] = field(
        default_factory=lambda: ["all"],
        metadata={
            "help": 'Linear layers by the last part of their name, such as q_proj; "all": every one but the output head.'
        },
    )

    def __post_init__(self) -> None:
        _number(self, "lora", "rank", low=0, whole=True)
        _number(self, "lora", "alpha", above=0.0)
        if not self.targets:
            raise ConfigError("lora.targets is empty: name layers, or leave it out")
        if self.rank == 0 and (self.alpha != 32.0 or self.targets != ["all"]):
            raise ConfigError("lora.alpha and lora.targets have no effect without lora.rank: set that, or remove them")

    def wants(self, name: str) -> bool:
        return "all" in self.targets or name in self.targets


def _number(
    settings: object,
    table: str,
    name: str,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
    optional: bool = False,
    whole: bool = False,
) -> None:
    value = getattr(settings, name)
    if value is None and optional:
        return
    kind: Any = int if whole else int | float
    if (
        isinstance(value, bool)
        or not isinstance(value, kind)
        or not low <= value <= high
        or value <= above
        or math.isinf(value)
    ):
        noun = "a whole number" if whole else "a number"
        limits = [f"at least {low:g}"] * (low > -math.inf) + [f"greater than {above:g}"] * (above > -math.inf)
        limits += [f"at most {high:g}"] * (high < math.inf)
        raise ConfigError(f"{table}.{name} must be {noun}, {' and '.join(limits)}, not {value!r}")


def _choice(settings: object, table: str, name: str, choices: tuple[str, ...], optional: bool = False) -> None:
    value = getattr(settings, name)
    if value not in choices and not (value is None and optional):
        raise ConfigError(f"{table}.{name} must be one of {', '.join(choices)}, not {value!r}")


def _flag(settings: object, table: str, name: str) -> None:
    value = getattr(settings, name)
    if not isinstance(value, bool):
        raise ConfigError(f"{table}.{name} must be true or false, not {value!r}")
