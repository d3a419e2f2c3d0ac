"""The algorithms: a table with one row each, and the functions that a row refers to.

The learner reads the row and never asks which algorithm runs. A row refuses settings that its algorithm would ignore and
groups too small to compare. Importing this package loads no torch, so that a command line can list the table.

    advantages  rewards -> advantages, pure functions (NumPy)      losses  per-token losses (torch)
    objective   the terms of one micro batch (torch)
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ... import plugins
from ...errors import ConfigError
from ...foreign_names import config_hint
from ..settings import LossSettings
from . import advantages as adv
from .advantages import TokenValues

ALWAYS = frozenset({
    "clip_low", "clip_high", "dual_clip", "aggregation", "sequence_divisor", "kl_coef", "kl_in", "kl_kind", "entropy_coef",
    "old_logprobs",
})  # fmt: skip
"""The keys of LossSettings that every algorithm uses."""


@dataclass(frozen=True, slots=True)
class Chains:
    """The trainable chains of one step: the group of each, its token rewards (KL already subtracted) and its values."""

    groups: list[int]
    rewards: list[TokenValues]
    values: list[TokenValues] | None = None


@dataclass(frozen=True, slots=True)
class Credit:
    """Per chain: the advantage of each sampled token and, for a critic, the return of each."""

    advantages: list[TokenValues]
    returns: list[TokenValues] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row. `reads` are the keys of LossSettings that the algorithm uses; `defaults` replaces the defaults of some."""

    name: str
    description: str
    paper: str
    credit: Callable[[Chains, LossSettings], Credit]
    needs_critic: bool = False
    needs_group: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = ALWAYS

    def settings(self, given: Mapping[str, Any] | None = None) -> LossSettings:
        """Returns the settings from the user's keys. Raises ConfigError for a key that is unknown or has no effect."""
        given = dict(given or {})
        known = [f.name for f in fields(LossSettings)]
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}."
                raise ConfigError(f"loss has no setting {key!r}; {config_hint(f'loss.{key}') or hint}")
            if key not in self.reads:
                raise ConfigError(f"{self.name} does not use loss.{key}: remove it (it reads {', '.join(sorted(self.reads))})")
        made = LossSettings(**{**self.defaults, **given})
        if "sequence_divisor" in given and made.aggregation != "sequence_sum":
            raise ConfigError('loss.sequence_divisor is only used by loss.aggregation = "sequence_sum"')
        if "value_coef" in given and made.critic != "shared":
            raise ConfigError('loss.value_coef is only used by loss.critic = "shared"; a separate critic has train.critic_lr')
        return made

    def check(self, settings: LossSettings) -> None:
        """Raises ConfigError if a key that the algorithm does not read differs from its default."""
        expected = LossSettings(**self.defaults)
        for f in fields(LossSettings):
            if f.name not in self.reads and getattr(settings, f.name) != getattr(expected, f.name):
                raise ConfigError(f"{self.name} does not use loss.{f.name}: leave it at {getattr(expected, f.name)!r}")

    def check_num_chains(self, num_chains: int) -> None:
        """Raises ConfigError if the algorithm compares siblings and a task has only one chain."""
        if self.needs_group and num_chains < 2:
            alone = " or ".join(row.name for row in ALGORITHMS.values() if not row.needs_group)
            raise ConfigError(
                f"{self.name} compares the chains of one task: set num_chains to 2 or more (it is {num_chains}), or use {alone}"
            )


def _per_group(chains: Chains, score: Callable[[list[float]], TokenValues]) -> Credit:
    """Give each token of a chain the chain's advantage, computed from the total rewards of its group."""
    members: dict[int, list[int]] = {}
    for chain, group in enumerate(chains.groups):
        members.setdefault(group, []).append(chain)
    result: list[TokenValues] = [np.zeros(0)] * len(chains.groups)
    for siblings in members.values():
        for chain, advantage in zip(siblings, score([float(chains.rewards[c].sum()) for c in siblings]), strict=True):
            result[chain] = np.full(len(chains.rewards[chain]), advantage)
    return Credit(result)


def _grpo(chains: Chains, settings: LossSettings) -> Credit:
    return _per_group(chains, lambda rewards: adv.grpo(rewards, normalize_std=settings.normalize_std))


def _ppo(chains: Chains, settings: LossSettings) -> Credit:
    assert chains.values is not None  # the row has needs_critic=True
    pairs = [
        adv.gae(rewards, values, gamma=settings.gamma, lam=settings.lam)
        for rewards, values in zip(chains.rewards, chains.values, strict=True)
    ]
    return Credit(adv.whiten([advantages for advantages, _ in pairs]), [returns for _, returns in pairs])


GRPO = Algorithm(
    name="grpo",
    description="Reward against the group's mean, over its standard deviation; no critic.",
    paper="arXiv:2402.03300",
    credit=_grpo,
    needs_group=True,
    reads=ALWAYS | {"normalize_std"},
)
DR_GRPO = Algorithm(
    name="dr_grpo",
    description="GRPO without the division by the standard deviation and by the length of a reply.",
    paper="arXiv:2503.20783",
    credit=_grpo,
    needs_group=True,
    defaults={"normalize_std": False, "aggregation": "sequence_sum"},
)
RLOO = Algorithm(
    name="rloo",
    description="Reward against the mean of the other chains of the group; no critic.",
    paper="arXiv:2402.14740",
    credit=lambda chains, _: _per_group(chains, adv.rloo),
    needs_group=True,
    defaults={"kl_in": "reward"},
)
REINFORCE_PLUS_PLUS = Algorithm(
    name="reinforce++",
    description="Discounted reward-to-go per token, whitened over the batch; no group, no critic.",
    paper="arXiv:2501.03262",
    credit=lambda chains, settings: Credit(adv.reinforce_plus_plus(chains.rewards, gamma=settings.gamma)),
    defaults={"kl_in": "reward"},
    reads=ALWAYS | {"gamma"},
)
REINFORCE_PLUS_PLUS_BASELINE = Algorithm(
    name="reinforce++_baseline",
    description="Reward against the group's mean, whitened over the batch; no critic.",
    paper="arXiv:2501.03262",
    credit=lambda chains, _: Credit(adv.reinforce_plus_plus_baseline(chains.rewards, chains.groups)),
    needs_group=True,
)
PPO = Algorithm(
    name="ppo",
    description="Generalised advantage estimation with a learned critic.",
    paper="arXiv:1707.06347",
    credit=_ppo,
    needs_critic=True,
    defaults={"kl_in": "reward"},
    reads=ALWAYS | {"gamma", "lam", "critic", "value_coef", "value_clip"},
)

ALGORITHMS: dict[str, Algorithm] = {
    row.name: row for row in (GRPO, DR_GRPO, RLOO, REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE, PPO)
}

# Names of the same algorithms in other frameworks and papers.
ALIASES = {
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "reinforce++-baseline": "reinforce++_baseline",
    "drgrpo": "dr_grpo",
    "dr.grpo": "dr_grpo",
    "gae": "ppo",
}


def find_algorithm(name: str | Algorithm) -> Algorithm:
    """Find a row by name, alias, registered or installed plugin, or "module:attribute". Raises ConfigError if there is none."""
    if isinstance(name, Algorithm):
        return name
    found = plugins.resolve("algorithms", ALIASES.get(name.lower(), name.lower() if name.lower() in ALGORITHMS else name))
    if not isinstance(found, Algorithm):
        raise ConfigError(f"algorithm {name!r} is {type(found).__name__}, not an agentfly.learn.algorithms.Algorithm")
    return found
