"""What an algorithm is: `Algorithm`, the values that its functions receive and the values that they return.

    credit(Chains, LossSettings) -> Credit           advantages, and returns for a critic      NumPy, once per step
    loss(Tokens, LossSettings) -> Tensor             a loss per token; without one, PPO's      torch, once per micro batch

The rows of the table in `agentfly.learn.algorithms` and the algorithms of users are the same class. This module imports no
torch, so that a command line can list the table.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...foreign_names import config_hint
from ...rows import turns_by_row
from ...types import Trajectory
from ..settings import LossSettings
from .advantages import TokenValues

if TYPE_CHECKING:
    from torch import Tensor

ALWAYS = frozenset({
    "clip_low", "clip_high", "dual_clip", "aggregation", "sequence_divisor", "kl_coef", "kl_in", "kl_kind", "kl_target",
    "reference", "reference_hint", "reference_every", "reference_mix", "entropy_coef", "entropy_target", "old_logprobs",
    "correction", "correction_cap",
})  # fmt: skip
"""The keys of LossSettings that every algorithm with PPO's loss uses."""

_OF_LEARNER = frozenset({"options", "correction", "correction_cap", "truncated"})
"""Keys that apply to every algorithm, whatever it reads: the learner weights or masks the loss of each token."""

Scope = Literal["token", "chain", "minibatch"]


@dataclass(frozen=True, slots=True)
class Chains:
    """The trainable chains of one step: the group of each, its token rewards (KL already subtracted) and its values.

    `kl` is the KL to the reference that was subtracted, per token and without its coefficient (`loss.kl_in = "reward"`).

    The arrays of a chain have an entry per sampled token, over all of its turns. `trajectories` are the records of the chains:
    messages, calls, results, outcome, task; without them each chain counts as one turn. Two draws of one task in a step are two
    groups.
    """

    groups: list[int]
    rewards: list[TokenValues]
    values: list[TokenValues] | None = None
    trajectories: Sequence[Trajectory] = ()
    kl: list[TokenValues] | None = None

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def members(self) -> list[list[int]]:
        """The chains of each group."""
        by_group: dict[int, list[int]] = {}
        for chain, group in enumerate(self.groups):
            by_group.setdefault(group, []).append(chain)
        return list(by_group.values())

    @property
    def totals(self) -> TokenValues:
        """The sum of each chain's rewards."""
        return np.array([float(rewards.sum()) for rewards in self.rewards])

    def turns_of(self, chain: int) -> NDArray[np.int64]:
        """The turn of each sampled token of a chain. Turns are counted row by row, as in `rows.turns_by_row`."""
        if not self.trajectories:
            return np.zeros(len(self.rewards[chain]), dtype=np.int64)
        turns = turns_by_row(self.trajectories[chain])
        return np.repeat(np.arange(len(turns)), [len(turn.completion.token_ids) for turn in turns])

    def turn_rewards(self, chain: int) -> TokenValues:
        """The sum of the rewards in each turn of a chain. The last one includes the final reward."""
        count = len(self.trajectories[chain].turns) if self.trajectories else 1
        sums: TokenValues = np.zeros(count)
        np.add.at(sums, self.turns_of(chain), self.rewards[chain])
        return sums

    def states_of(self, chain: int) -> list[Hashable]:
        """The state in which each turn of a chain began.

        It is what the environment calls it (`Turn.state`), else what the chain saw last: the observations of the turn before.
        The first state is the task. A turn without tool results leaves the state as it was. An observation with an image equals
        no other.
        """
        state: Hashable = ()
        states = []
        if not self.trajectories:
            return [state]
        turns = turns_by_row(self.trajectories[chain])
        for number, turn in enumerate(turns):
            if turn.state:
                state = () if turn.state == turns[0].state else turn.state
            states.append(state)
            if any(result.image is not None for result in turn.results):
                state = ("image", chain, number)
            elif turn.results:
                state = tuple(result.observation for result in turn.results)
        return states

    def spread(self, advantages: Iterable[float]) -> list[TokenValues]:
        """Returns one number per chain as one number per token."""
        return [np.full(len(rewards), each) for rewards, each in zip(self.rewards, advantages, strict=True)]

    def spread_turns(self, chain: int, advantages: Sequence[float] | TokenValues) -> TokenValues:
        """Returns one number per turn of a chain as one number per token."""
        spread: TokenValues = np.asarray(advantages, dtype=np.float64)[self.turns_of(chain)]
        return spread


@dataclass(frozen=True, slots=True)
class Credit:
    """Per chain: the advantage of each sampled token and, for a critic, the return of each."""

    advantages: list[TokenValues]
    returns: list[TokenValues] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Sampled tokens, as one-dimensional tensors of equal length; only `logprobs` carries a gradient.

    `chains`, `turns` and `groups` are numbers that tell which tokens belong together; turns are numbered over all chains.
    `weights` is the factor of each token's loss in the minibatch's loss (`loss.aggregation`, `loss.correction`).
    `reference_logprobs` is None unless the KL is a term of the loss.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    chains: Tensor
    turns: Tensor
    groups: Tensor
    weights: Tensor
    reference_logprobs: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """log(new / old probability) of each token, within [-20, 20]: a diverging ratio must not produce a NaN."""
        return (self.logprobs - self.old_logprobs).clamp(-20.0, 20.0)

    def mean_over(self, numbers: Tensor, values: Tensor) -> Tensor:
        """Returns, at each token, the mean of `values` over the tokens with the same number: `mean_over(tokens.chains, x)`."""
        every: Any = numbers
        _, places = every.unique(return_inverse=True)
        sums = values.new_zeros(len(numbers)).index_add(0, places, values)
        counts = values.new_zeros(len(numbers)).index_add(0, places, values.new_ones(len(values)))
        return (sums / counts.clamp(min=1.0))[places]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per token, before `weights`. `clipped` is 1 for tokens whose ratio was clipped, for the metric."""

    loss: Tensor
    clipped: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One algorithm. The learner reads these fields and never asks for the name.

    credit                  rewards to advantages
    loss                    a loss per token; None: PPO's clipped surrogate
    loss_scope              what one call of `loss` holds completely: each "token" (micro batches may divide anything), each
                            "chain", or the "minibatch"
    skips_zero_advantages   the loss of a token with advantage 0 is 0, so such rows need no forward pass; true without `loss`
    needs_critic            `credit` reads values and returns returns
    needs_group             chains of one task are compared, so there must be two or more
    needs_reference         nothing is learned from the reference that other algorithms begin with, the first weights
    defaults                other defaults for keys of LossSettings
    options                 settings that it adds, with defaults: `loss.options` in a config, `settings.options` in functions
    reads                   the keys of LossSettings that it uses; the others are refused
    """

    name: str
    credit: Callable[[Chains, LossSettings], Credit]
    description: str = ""
    paper: str = ""
    loss: Callable[[Tokens, LossSettings], Tensor | TokenLoss] | None = None
    loss_scope: Scope = "token"
    skips_zero_advantages: bool = False
    needs_critic: bool = False
    needs_group: bool = False
    needs_reference: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = ALWAYS

    def __post_init__(self) -> None:
        names_of_settings = {f.name for f in fields(LossSettings)} - {"options"}
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigError(f"an algorithm needs a name, not {self.name!r}")
        for what, function in (("credit", self.credit), ("loss", self.loss or len)):
            if not callable(function):
                raise ConfigError(f"the algorithm {self.name!r}: {what} must be a function, not {function!r}")
        for what, names in (("reads", self.reads), ("defaults", self.defaults)):
            if unknown := sorted(set(names) - names_of_settings):
                raise ConfigError(f"the algorithm {self.name!r}: {what} names {unknown[0]!r}, which is no key of [loss]")
        if self.loss_scope not in ("token", "chain", "minibatch"):
            raise ConfigError(f"the algorithm {self.name!r}: loss_scope is token, chain or minibatch, not {self.loss_scope!r}")
        if self.loss is None and self.loss_scope != "token":
            raise ConfigError(f"the algorithm {self.name!r}: loss_scope has no effect without a loss")

    @property
    def parts(self) -> str:
        """What it is made of: what its credit reads, its loss, and the keys and options that not every algorithm has."""
        needs = {"groups": self.needs_group, "a critic": self.needs_critic, "a reference": self.needs_reference}
        own = [f"loss.{name}" for name in [*sorted(self.reads - ALWAYS), *(f"options.{name}" for name in self.options)]]
        read = next((name for name, needed in needs.items() if needed), "the batch")
        loss = f"its own, of each {self.loss_scope}" if self.loss else "clipped ratio, arXiv:1707.06347"
        return f"credit: {read}; loss: {loss}{'; keys: ' if own else ''}{', '.join(own)}"

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a token with advantage 0 may have a loss."""
        return self.loss is not None and not self.skips_zero_advantages

    def settings(self, given: Mapping[str, Any] | None = None) -> LossSettings:
        """Returns the settings from the user's keys. Raises ConfigError for a key that is unknown or has no effect."""
        given = dict(given or {})
        names = [f.name for f in fields(LossSettings)]
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}."
                raise ConfigError(f"loss has no setting {key!r}; {config_hint(f'loss.{key}') or hint}")
            if key not in self.reads | _OF_LEARNER:
                raise ConfigError(f"{self.name} does not use loss.{key}: remove it (it reads {', '.join(sorted(self.reads))})")
        made = self.complete(self._with_defaults(given))
        if "correction_cap" in given and made.correction == "off":
            raise ConfigError(
                'loss.correction_cap is not used with loss.correction = "off" (old_logprobs = "sampled" turns it off)'
            )
        if "sequence_divisor" in given and made.aggregation != "sequence_sum":
            raise ConfigError('loss.sequence_divisor is only used by loss.aggregation = "sequence_sum"')
        self._check_discount(made)
        if "value_coef" in given and made.critic != "shared":
            raise ConfigError('loss.value_coef is only used by loss.critic = "shared"; a separate critic has train.critic_lr')
        return made

    def _with_defaults(self, given: Mapping[str, Any]) -> LossSettings:
        keys = {**self.defaults, **given}
        if keys.get("old_logprobs") == "sampled":  # the ratio itself is then the importance weight
            keys.setdefault("correction", "off")
        return LossSettings(**keys)

    def complete(self, settings: LossSettings) -> LossSettings:
        """Returns the settings with every option of the algorithm. Raises ConfigError for an unknown one, or another type."""
        for name, value in settings.options.items():
            if name not in self.options:
                has = f"it has {', '.join(self.options)}" if self.options else "it has none"
                raise ConfigError(f"{self.name} has no option {name!r} (loss.options); {has}")
            default = self.options[name]
            kind = (int, float) if type(default) is float else type(default)
            if default is not None and (not isinstance(value, kind) or isinstance(value, bool) != isinstance(default, bool)):
                raise ConfigError(f"loss.options.{name} must be like its default {default!r}, not {value!r}")
        return replace(settings, options={**self.options, **settings.options})

    def _check_discount(self, settings: LossSettings) -> None:
        if settings.gamma != 1.0 and self.needs_group and "turn_credit" in self.reads and not settings.turn_credit:
            raise ConfigError(
                f"{self.name} compares whole chains, which are not discounted: set loss.turn_credit, or remove loss.gamma"
            )

    def check(self, settings: LossSettings) -> None:
        """Raises ConfigError if a key that the algorithm does not read differs from its default."""
        self._check_discount(settings)
        expected = self._with_defaults({})
        for f in fields(LossSettings):
            unread = f.name not in self.reads | _OF_LEARNER
            if unread and getattr(settings, f.name) != getattr(expected, f.name):
                raise ConfigError(f"{self.name} does not use loss.{f.name}: leave it at {getattr(expected, f.name)!r}")

    def check_num_chains(self, num_chains: int) -> None:
        """Raises ConfigError if the algorithm compares siblings and a task has only one chain."""
        if self.needs_group and num_chains < 2:
            raise ConfigError(f"{self.name} compares chains of a task: set num_chains above 1 (it is {num_chains}) or use ppo")

    def check_reference(self, settings: LossSettings) -> None:
        """Raises ConfigError if the algorithm learns from a reference that is not given."""
        if self.needs_reference and settings.reference is None and settings.reference_hint is None:
            raise ConfigError(f"{self.name} learns from the reference model: set loss.reference, or loss.reference_hint")

    def give_credit(self, chains: Chains, settings: LossSettings) -> Credit:
        """Calls `credit` and checks what it returns. Raises ConfigError if the function fails or the arrays do not fit."""
        try:
            credit = self.credit(chains, settings)
        except Exception as error:
            raise ConfigError(f"the credit of algorithm {self.name!r} raised {type(error).__name__}: {error}") from error
        if not isinstance(credit, Credit):
            raise ConfigError(f"the credit of algorithm {self.name!r} returned {type(credit).__name__}, not a Credit")
        if self.needs_critic and credit.returns is None:
            raise ConfigError(f"algorithm {self.name!r} has a critic, but its credit has no returns for it to learn")
        expected = [len(rewards) for rewards in chains.rewards]
        for what, arrays in (("advantages", credit.advantages), ("returns", credit.returns)):
            if arrays is not None and [np.shape(array) for array in arrays] != [(length,) for length in expected]:
                raise ConfigError(
                    f"the {what} of algorithm {self.name!r} do not fit: one array per chain is needed, with a number for each "
                    f"sampled token (here {len(expected)} chains of {', '.join(map(str, expected[:4]))}... tokens)"
                )
        return credit
