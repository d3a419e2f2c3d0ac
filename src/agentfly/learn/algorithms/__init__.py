"""The algorithms: a table with one row each, and the functions that a row refers to.

The learner reads the row and never asks which algorithm runs. A row refuses settings that its algorithm would ignore and
groups too small to compare. An algorithm of a user is the same class: "file.py:NAME", "module:NAME" or the object itself.
Importing this package loads no torch, so that a command line can list the table.

    interface   Algorithm, and what its functions receive and return
    advantages  rewards -> advantages, pure functions (NumPy)      losses  per-token losses (torch)
    objective   the terms of one micro batch (torch)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from ... import plugins
from ...errors import ConfigError
from ..settings import LossSettings
from . import advantages as adv
from .advantages import TokenValues
from .interface import ALWAYS, Algorithm, Chains, Credit, TokenLoss, Tokens

__all__ = [
    "ALGORITHMS", "ALIASES", "ALWAYS", "CISPO", "DISTILL", "DR_GRPO", "GIGPO", "GRPO", "GSPO", "OPO", "PPO",
    "REINFORCE_PLUS_PLUS", "REINFORCE_PLUS_PLUS_BASELINE", "RLOO", "Algorithm", "Chains", "Credit", "TokenLoss", "Tokens",
    "canonical", "find_algorithm", "reference_of",
]  # fmt: skip

OBJECT = "python:"
"""In a run's config: the algorithm was an object that cannot be found by name."""


def _per_group(chains: Chains, settings: LossSettings, score: Callable[[Sequence[float]], TokenValues]) -> Credit:
    """Give each token of a chain the chain's advantage, computed from the total rewards of its group.

    With `loss.turn_credit` each turn has its own, computed from the discounted rewards from that turn on.
    """
    if settings.turn_credit:
        return _per_turn(chains, settings.gamma, score)
    advantages = np.zeros(len(chains))
    totals = chains.totals
    for siblings in chains.members:
        advantages[siblings] = score(totals[siblings].tolist())
    return Credit(chains.spread(advantages))


def _per_turn(chains: Chains, gamma: float, score: Callable[[Sequence[float]], TokenValues]) -> Credit:
    # Rewards are on sampled tokens, so a turn after the last of them has none: it must not stand for the end of the chain.
    ends = [int(chains.turns_of(chain)[-1]) + 1 for chain in range(len(chains))]
    returns = [adv.reward_to_go(chains.turn_rewards(chain)[:end], gamma=gamma) for chain, end in enumerate(ends)]
    advantages: dict[int, TokenValues] = {}
    for siblings in chains.members:
        compared = adv.compare_turns([returns[chain] for chain in siblings], score)
        advantages |= {chain: chains.spread_turns(chain, values) for chain, values in zip(siblings, compared, strict=True)}
    return Credit([advantages[chain] for chain in range(len(chains))])


def _grpo(chains: Chains, settings: LossSettings) -> Credit:
    return _per_group(chains, settings, lambda rewards: adv.grpo(rewards, normalize_std=settings.normalize_std))


def _clocks(chains: Chains, settings: LossSettings) -> list[adv.TurnNumbers | None]:
    """What gamma and lam count, of each chain: None for its tokens, or the numbers of its turns."""
    return [chains.turns_of(chain) if settings.turn_credit else None for chain in range(len(chains))]


def _reinforce_plus_plus(chains: Chains, settings: LossSettings) -> Credit:
    return Credit(adv.reinforce_plus_plus(chains.rewards, gamma=settings.gamma, turns=_clocks(chains, settings)))


def _opo(chains: Chains, settings: LossSettings) -> Credit:
    lengths, totals = [len(rewards) for rewards in chains.rewards], chains.totals
    advantages = np.zeros(len(chains))
    for siblings in chains.members:
        advantages[siblings] = adv.opo(totals[siblings].tolist(), [lengths[chain] for chain in siblings])
    return Credit(chains.spread(advantages))


def _gigpo(chains: Chains, settings: LossSettings) -> Credit:
    """The chain's advantage in its group, plus the advantage of each turn among the turns that began in the same state."""
    by_chain = _grpo(chains, settings).advantages
    by_turn = adv.gigpo_turns(
        [chains.turn_rewards(chain) for chain in range(len(chains))],
        [[(chains.groups[chain], state) for state in chains.states_of(chain)] for chain in range(len(chains))],
        gamma=settings.options["turn_gamma"],
        normalize_std=settings.normalize_std,
    )
    weight = settings.options["turn_weight"]
    return Credit([part + weight * chains.spread_turns(i, by_turn[i]) for i, part in enumerate(by_chain)])


def _ppo(chains: Chains, settings: LossSettings) -> Credit:
    assert chains.values is not None  # the row has needs_critic=True
    pairs = [
        adv.gae(rewards, values, gamma=settings.gamma, lam=settings.lam, turns=turns)
        for rewards, values, turns in zip(chains.rewards, chains.values, _clocks(chains, settings), strict=True)
    ]
    return Credit(adv.whiten([advantages for advantages, _ in pairs]), [returns for _, returns in pairs])


def _distill(chains: Chains, settings: LossSettings) -> Credit:
    assert chains.kl is not None  # the row has kl_in = "reward", and no config can change it
    return Credit([-settings.kl_coef * kl for kl in chains.kl])


def _gspo_loss(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    from .losses import gspo  # late: torch

    return gspo(tokens, clip_low=settings.clip_low, clip_high=settings.clip_high)


def _cispo_loss(tokens: Tokens, settings: LossSettings) -> TokenLoss:
    from .losses import cispo

    return cispo(tokens, clip_low=settings.clip_low, clip_high=settings.clip_high)


GRPO = Algorithm(
    name="grpo",
    description="Reward against the group's mean, over its standard deviation; no critic.",
    paper="arXiv:2402.03300",
    credit=_grpo,
    needs_group=True,
    reads=ALWAYS | {"normalize_std", "turn_credit", "gamma"},
)
DR_GRPO = Algorithm(
    name="dr_grpo",
    description="GRPO without the division by the standard deviation and by the length of a reply.",
    paper="arXiv:2503.20783",
    credit=_grpo,
    needs_group=True,
    defaults={"normalize_std": False, "aggregation": "sequence_sum"},
    reads=ALWAYS | {"turn_credit", "gamma"},
)
RLOO = Algorithm(
    name="rloo",
    description="Reward against the mean of the other chains of the group; no critic.",
    paper="arXiv:2402.14740",
    credit=lambda chains, settings: _per_group(chains, settings, adv.rloo),
    needs_group=True,
    defaults={"kl_in": "reward"},
    reads=ALWAYS | {"turn_credit", "gamma"},
)
REINFORCE_PLUS_PLUS = Algorithm(
    name="reinforce++",
    description="Discounted reward-to-go per token, whitened over the batch; no group, no critic.",
    paper="arXiv:2501.03262",
    credit=_reinforce_plus_plus,
    defaults={"kl_in": "reward"},
    reads=ALWAYS | {"turn_credit", "gamma"},
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
    reads=ALWAYS | {"turn_credit", "gamma", "lam", "critic", "value_coef", "value_clip"},
)

GSPO = Algorithm(
    name="gspo",
    description="GRPO's advantages; the ratio of a whole chain, the geometric mean over its tokens, is clipped.",
    paper="arXiv:2507.18071",
    credit=_grpo,
    loss=_gspo_loss,
    loss_scope="chain",
    skips_zero_advantages=True,
    needs_group=True,
    defaults={"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    reads=(ALWAYS - {"dual_clip"}) | {"normalize_std", "turn_credit", "gamma"},
)
CISPO = Algorithm(
    name="cispo",
    description="GRPO's advantages; the clipped ratio is a constant weight, so that every token keeps its gradient.",
    paper="arXiv:2506.13585",
    credit=_grpo,
    loss=_cispo_loss,
    skips_zero_advantages=True,
    needs_group=True,
    defaults={"clip_low": 1.0, "clip_high": 4.0},
    reads=(ALWAYS - {"dual_clip"}) | {"normalize_std", "turn_credit", "gamma"},
)
OPO = Algorithm(
    name="opo",
    description="Reward against the group's mean weighted by length, which gives the least variance; no critic.",
    paper="arXiv:2505.23585",
    credit=_opo,
    needs_group=True,
)
GIGPO = Algorithm(
    name="gigpo",
    description="GRPO, plus the advantage of each turn among turns of the group that began in the same state.",
    paper="arXiv:2505.10978",
    credit=_gigpo,
    needs_group=True,
    options={"turn_weight": 1.0, "turn_gamma": 0.95},
    reads=ALWAYS | {"normalize_std"},
)
DISTILL = Algorithm(
    name="distill",
    description="On-policy distillation: minus the reverse KL to the teacher (`loss.reference`) of each token; no reward.",
    paper="arXiv:2306.13649",
    credit=_distill,
    needs_reference=True,
    defaults={"kl_in": "reward", "kl_coef": 1.0},
    reads=ALWAYS - {"kl_in", "kl_kind", "kl_coef", "kl_target"},
)

ALGORITHMS: dict[str, Algorithm] = {
    name: globals()[target.rpartition(":")[2]] for name, target in plugins.BUILTIN["algorithms"].items()
}
"""The rows of this module by name, in the order of `builtin_names.toml`."""

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
    """Returns the algorithm of a name, an alias, a registered or installed plugin, "module:NAME" or "file.py:NAME".

    An `Algorithm` is returned as it is, whatever its name. Raises ConfigError if there is none.
    """
    if isinstance(name, Algorithm):
        return name
    if not isinstance(name, str):
        raise ConfigError(
            f"algorithm must be a name or an agentfly.learn.algorithms.Algorithm, not {getattr(name, '__name__', repr(name))}"
        )
    if name.startswith(OBJECT):
        raise ConfigError(
            f"the algorithm {name.removeprefix(OBJECT)!r} was a Python object that no module holds: give it again with "
            'agentfly.train(..., algorithm=...), or move it to a file and write algorithm = "file.py:NAME"'
        )
    if name not in plugins.names("algorithms"):
        name = ALIASES.get(name.lower(), name.lower() if name.lower() in ALGORITHMS else name)
    resolved = plugins.resolve("algorithms", name)
    if not isinstance(resolved, Algorithm):
        raise ConfigError(f"algorithm {name!r} is {type(resolved).__name__}, not an agentfly.learn.algorithms.Algorithm")
    return resolved


def canonical(given: str | Algorithm) -> str | Algorithm:
    """Returns how a config keeps an algorithm: a name that finds the same object in another process, else the object."""
    resolved = find_algorithm(given)
    if ALGORITHMS.get(resolved.name) is resolved:
        return resolved.name
    return resolved if isinstance(given, Algorithm) or plugins.is_registered("algorithms", given) else given


def reference_of(algorithm: str | Algorithm) -> str:
    """Returns the text that a run's config.toml holds. It never names another algorithm than the one in use.

    An object becomes "module:NAME" or "file.py:NAME" if the module of its `credit` holds it.
    """
    if isinstance(algorithm, str):
        return algorithm
    module = sys.modules.get(getattr(algorithm.credit, "__module__", ""))
    name = next((key for key, value in vars(module).items() if value is algorithm), None) if module is not None else None
    # A script that calls train must not run again to find its algorithm.
    if module is None or name is None or module.__name__ == "__main__":
        return f"{OBJECT}{algorithm.name}"
    if module.__name__.startswith(plugins.USER_FILE):
        return f"{module.__file__}:{name}"
    return f"{module.__name__}:{name}"
