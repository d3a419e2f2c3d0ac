"""What an update must have done, computed again from the stored chains of a step, without a model.

The chains give groups, rows, rewards and ages of tokens; these give advantages, trained tokens, importance weights and the
loss. Nothing of `experience`, `samples`, `objective` or the learner is used, because a fault there would be repeated here: only
the formulas of the algorithm (`credit`, `loss`) are shared.

    chains, settings -> Step -> advantages, trained tokens, metrics        compared with the store by `training.replay`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import plugins
from ...rows import rows_of
from ...types import Trajectory
from ..batching import passes
from ..settings import LossSettings, OptimSettings
from .advantages import explained_variance
from .interface import Algorithm, Chains, Credit, Tokens
from .losses import clipped_surrogate

Numbers = NDArray[np.float64]
SLOPES = ("train/slope", "train/slope_mark", "train/entropy_slope")


class NotRecorded(Exception):
    """Something that the step cannot be computed without is not in the store; the text names it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a step, `optim.lr` among them. `window` is the largest trained age; `exact` and `recomputes` are those of
    `PolicyLearner`.

    `full` says that the learner computes in float32: passes over the same tokens then agree closely.
    """

    algorithm: Algorithm
    loss: LossSettings
    optim: OptimSettings
    seed: int
    window: int | None
    exact: bool
    full: bool
    recomputes: bool = True


@dataclass(frozen=True, slots=True)
class StoredChain:
    """A trainable chain with the series that the learner recorded, per sampled token."""

    trajectory: Trajectory
    group: int
    series: Mapping[str, Sequence[float]]


@dataclass(slots=True)
class Step:
    """One update, computed again. `metrics` are those of the learner; `used` marks the tokens of each chain in the loss.

    `residuals` are the differences of values and returns. `missing` names what the loss cannot be computed without.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    residuals: list[Numbers] = field(default_factory=list)
    advantages: list[Numbers] = field(default_factory=list)
    used: list[NDArray[np.bool_]] = field(default_factory=list)
    missing: str | None = None


@dataclass(slots=True)
class _Chain:
    """The arrays of one chain, an entry per sampled token. `rows` numbers the row of each token within the chain, `old` marks
    the tokens that other weights than the learner's computed.
    """

    rewards: Numbers
    logprobs: Numbers
    lags: NDArray[np.int64]
    old: NDArray[np.bool_]
    rows: NDArray[np.int64]
    turns: NDArray[np.int64]


def replay(rules: Rules, stored: Sequence[StoredChain], *, groups: int, chains: int, step: int, version: int) -> Step:
    """Compute one step again. `groups` and `chains` count those of the step, `version` is that of the weights before it."""
    result, made = Step(), [_arrays(each.trajectory, version, rules.recomputes) for each in stored]
    inside = [_inside(rules, each.trajectory, chain) for each, chain in zip(stored, made, strict=True)]
    lags = np.concatenate([np.zeros(0), *(chain.lags[keep] for chain, keep in zip(made, inside, strict=True))])
    num_rows = sum(int(chain.rows.max()) + 1 for chain in made)
    result.metrics = {
        "train/samples": float(num_rows),
        "train/tokens": float(sum(len(chain.lags) for chain in made)),
        "train/splits": float(num_rows - len(made)),
        "train/masked_tokens": float(sum((~keep).sum() for keep in inside)),
        "train/untrainable_chains": float(chains - len(made) + sum(not keep.any() for keep in inside)),
        "train/zero_advantage_groups": float(groups),
        "train/optimizer_steps": 0.0,
        "train/skipped": 1.0,
    }
    if not rules.optim.schedule_name.startswith(plugins.OBJECT):  # a function of a notebook cannot be found again
        result.metrics["train/lr"] = rules.optim.lr_of(0, False) * rules.optim.lr_factor(step - 1)
    if len(lags):
        result.metrics |= {"train/lag_mean": float(lags.mean()), "train/lag_max": float(lags.max())}
    if not made:
        return result
    credit = _credit(rules, stored, made, result)
    result.advantages = credit.advantages
    taught = [(values != 0) & keep for values, keep in zip(credit.advantages, inside, strict=True)]
    with_signal = {each.group for each, flags in zip(stored, taught, strict=True) if flags.any()}
    result.metrics["train/zero_advantage_groups"] = float(groups - len(with_signal))
    result.used = [np.zeros(len(chain.lags), dtype=bool) for chain in made]
    if not _warms_up(rules, step):
        _optimize(rules, stored, made, inside, taught, result, step)
    if result.residuals and rules.full and (step > 1 or rules.loss.critic == "shared"):  # a new critic is shifted in step 1
        _value_slope(rules, inside, result, step)
    return result


def _value_slope(rules: Rules, inside: Sequence[NDArray[np.bool_]], found: Step, step: int) -> None:
    """The derivative of the critic's loss by its values in its first optimizer step."""
    loss, optim, trained = rules.loss, rules.optim, [index for index, keep in enumerate(inside) if keep.any()]
    shared = loss.critic == "shared"
    counts = (optim.epochs, optim.num_minibatches) if shared else (optim.critic_epochs or 2, optim.critic_minibatches or 8)
    seed = f"{rules.seed}/{step - 1}"
    share = next(passes(len(trained), epochs=counts[0], num_minibatches=counts[1], seed=seed), [])
    apart = [found.residuals[index][inside[index]] for index in (trained[place] for place in share)]
    if apart:
        each = np.abs(np.concatenate(apart))
        found.metrics["train/value_slope"] = float(each.mean()) * (loss.value_coef if shared else 1.0)


def identical(chains: Iterable[tuple[int, Sequence[int], float]]) -> tuple[int, float]:
    """Of (group, sampled ids, sum of their log-probs): the pairs of siblings with equal ids, and how many are expected."""
    seen: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    pairs, expected = 0, 0.0
    for group, ids, total in chains:
        own = (tuple(ids), math.exp(min(0.0, total)))
        for other, chance in seen.setdefault(group, []):
            pairs += other == own[0]
            expected += 0.5 * (chance + own[1])
        seen[group].append(own)
    return pairs, expected


def _arrays(trajectory: Trajectory, version: int, recomputes: bool) -> _Chain:
    """The arrays of a chain. A turn's reward is on its last sampled token, or on the one before, at the start the one after."""
    order = rows_of(trajectory)
    turns = [trajectory.turns[index] for row in order for index in row]
    counts = [len(turn.completion.token_ids) for turn in turns]
    rewards, start, carried, rows = np.zeros(sum(counts)), 0, 0.0, []
    sampled = [row for row in order if any(len(trajectory.turns[index].completion.token_ids) for index in row)]
    for number, row in enumerate(sampled):
        rows += [number] * sum(len(trajectory.turns[index].completion.token_ids) for index in row)
    for turn, count in zip(turns, counts, strict=True):
        start, carried = start + count, carried + turn.reward
        if start:
            rewards[start - 1] += carried
            carried = 0.0
    rewards[-1] += trajectory.reward or 0.0
    every = [turn.completion for turn in turns]
    lags = version - np.array([value for reply in every for value in reply.versions], dtype=np.int64)
    numbers = np.repeat(np.arange(len(turns)), counts)
    old = lags > 0
    if not recomputes:  # the rest of a reply that older weights began goes on over their keys and values
        old = np.bincount(numbers, weights=old, minlength=len(turns))[numbers] > 0
    return _Chain(
        rewards,
        np.array([value for reply in every for value in reply.logprobs]),
        lags,
        old,
        np.array(rows, dtype=np.int64),
        numbers,
    )


def _inside(rules: Rules, trajectory: Trajectory, chain: _Chain) -> NDArray[np.bool_]:
    """The tokens that may be trained."""
    if rules.loss.truncated == "mask" and trajectory.outcome.truncated:
        return np.zeros(len(chain.lags), dtype=bool)
    return np.ones(len(chain.lags), dtype=bool) if rules.window is None else chain.lags <= rules.window


def _series(chain: StoredChain, name: str, count: int) -> Numbers:
    if (values := chain.series.get(name)) is None or len(values) != count:
        raise NotRecorded(f"{name} of chain {chain.trajectory.id}")
    return np.asarray(values, dtype=np.float64)


def _credit(rules: Rules, stored: Sequence[StoredChain], made: Sequence[_Chain], found: Step) -> Credit:
    loss, rewards, values, apart = rules.loss, [chain.rewards for chain in made], None, list[Numbers]()
    if loss.kl_coef > 0 and loss.kl_in == "reward":
        for index, (each, chain) in enumerate(zip(stored, made, strict=True)):
            own = chain.logprobs if loss.old_logprobs == "sampled" else _series(each, "trainer_logprob", len(chain.lags))
            if rules.loss.old_logprobs == "auto" and loss.correction == "off":
                own = np.where(chain.old, chain.logprobs, own)
            kl = _kl(own - _series(each, "reference_logprob", len(chain.lags)), loss.kl_estimator)
            rewards[index] = chain.rewards - loss.kl_coef * kl
            apart.append(kl)
    if rules.algorithm.needs_critic:
        values = [_series(each, "value", len(chain.lags)) for each, chain in zip(stored, made, strict=True)]
    trajectories = [each.trajectory for each in stored]
    chains = Chains([each.group for each in stored], rewards, values, trajectories, apart or None)
    credit = rules.algorithm.credit(chains, rules.loss)
    if values is not None and credit.returns is not None:
        every = np.concatenate(values), np.concatenate(credit.returns)
        found.metrics["train/explained_variance"] = explained_variance(*every)
        found.residuals = [value - own for value, own in zip(values, credit.returns, strict=True)]
    return credit


def _kl(gap: Numbers, kind: str) -> Numbers:
    if kind == "k1":
        return gap
    return 0.5 * gap**2 if kind == "k2" else np.exp(np.clip(-gap, -20.0, 20.0)) - 1.0 + gap


def _warms_up(rules: Rules, step: int) -> bool:
    """Whether a separate critic learns alone in this step: 7 steps, or a third of a shorter run, unless set."""
    if not rules.algorithm.needs_critic or rules.loss.critic == "shared":
        return False
    given = rules.optim.critic_warmup_steps
    return step <= (min(7, (rules.optim.total_steps or 0) // 3) if given is None else given)


def _optimize(
    rules: Rules,
    stored: Sequence[StoredChain],
    made: Sequence[_Chain],
    inside: Sequence[NDArray[np.bool_]],
    taught: Sequence[NDArray[np.bool_]],
    found: Step,
    step: int,
) -> None:
    """Which tokens are trained in how many optimizer steps, and the loss of the first one."""
    loss, optim, algorithm = rules.loss, rules.optim, rules.algorithm
    inexact = any((chain.old | (not rules.exact))[keep].any() for chain, keep in zip(made, inside, strict=True))
    whole = algorithm.loss_scope != "token" or (loss.correction == "sequence" and inexact)
    shared = algorithm.needs_critic and loss.critic == "shared"
    always = algorithm.loss is not None and not algorithm.skips_zero_advantages
    signal = any(flags.any() for flags in taught)
    if not (signal or shared or (always and any(keep.any() for keep in inside))):
        return
    every = shared or always or loss.weighs_entropy or (loss.kl_coef > 0 and loss.kl_in == "loss")
    for used, chain, keep, flags in zip(found.used, made, inside, taught, strict=True):
        rows = chain.rows[keep if every or (whole and flags.any()) else flags]
        used[:] = np.isin(chain.rows, rows) & keep
    trained = [index for index, keep in enumerate(inside) if keep.any()]
    order = passes(len(trained), epochs=optim.epochs, num_minibatches=optim.num_minibatches, seed=f"{rules.seed}/{step - 1}")
    shares = [[trained[place] for place in share] for share in order]
    shares = [share for share in shares if any(found.used[index].any() for index in share)]
    found.metrics |= {"train/optimizer_steps": float(len(shares)), "train/skipped": float(not shares)}
    if not shares:
        return
    planned = optim.epochs * min(optim.num_minibatches, len(trained))
    recomputed = planned > 1 or (loss.kl_coef > 0 and loss.kl_in == "reward" and loss.old_logprobs != "sampled")
    try:
        if rules.full or not recomputed:  # in half precision two passes over the same tokens differ
            metrics = _loss(rules, stored, made, found, shares[0], inside)
            if len(shares) > 1:
                metrics = {name: metrics[name] for name in SLOPES if name in metrics}
            elif not recomputed:
                metrics |= _gap(stored, made, found, shares[0])
            found.metrics |= metrics
        if len(shares) > 1:
            metrics = _loss(rules, stored, made, found, shares[-1], inside, "last_logprob")
            found.metrics |= {name.replace("/", "/last_"): metrics[name] for name in SLOPES if name in metrics}
    except NotRecorded as error:
        found.missing = str(error)


def _gap(stored: Sequence[StoredChain], made: Sequence[_Chain], found: Step, share: Sequence[int]) -> dict[str, float]:
    """How far sampled and recomputed log-probs are apart in chains that the weights before the update drew completely."""
    parts = []
    for index in share:
        if found.used[index].any() and not made[index].lags.any():
            own = _series(stored[index], "trainer_logprob", len(made[index].lags))
            parts.append((made[index].logprobs - own)[found.used[index]])
    every = np.concatenate([np.zeros(0), *parts])
    return {"train/logprob_gap": float(np.abs(every).mean())} if len(every) else {}


def _loss(
    rules: Rules,
    stored: Sequence[StoredChain],
    made: Sequence[_Chain],
    found: Step,
    share: Sequence[int],
    inside: Sequence[NDArray[np.bool_]],
    present: str = "trainer_logprob",
) -> dict[str, float]:
    """Of the optimizer step on a share of the chains: its loss, and the derivative of the loss by each log-prob.

    `present` names the series of the log-probs at that optimizer step.
    """
    loss, members = rules.loss, [index for index in share if found.used[index].any()]
    lengths = {index: int(inside[index].sum()) for index in share}
    total, count, metrics = sum(lengths.values()), len(lengths), dict[str, float]()
    per_token: Callable[[int], float] = {
        "token_mean": lambda length: 1.0 / total,
        "sequence_mean": lambda length: 1.0 / (count * length),
        "sequence_sum": lambda length: 1.0 / (count * loss.sequence_divisor),
    }[loss.aggregation]

    def flat(values: Iterable[Numbers | NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate([part[found.used[i]] for i, part in zip(members, values, strict=True)]))

    def series(name: str) -> Tensor:
        return flat(_series(stored[i], name, len(made[i].lags)) for i in members)

    now, sampled, older = series(present), flat(made[i].logprobs for i in members), flat(made[i].old for i in members)
    of_sampler = loss.old_logprobs == "sampled" or (loss.old_logprobs == "auto" and loss.correction == "off" and older.all())
    own = now if of_sampler else series("trainer_logprob")
    of_chain = np.repeat(np.arange(len(members)), [int(found.used[i].sum()) for i in members])
    chains = torch.from_numpy(of_chain)
    weights = torch.from_numpy(np.array([per_token(lengths[i]) for i in members])[of_chain])
    inexact = older | (not rules.exact)
    plain = weights
    if loss.correction != "off" and inexact.any():
        weights = weights * _importance(loss, own - sampled, inexact, chains, metrics)
    if loss.old_logprobs == "sampled":
        old = sampled
    elif loss.old_logprobs == "auto" and loss.correction == "off":
        old = torch.where(older, sampled, own)
    else:
        old = own
    if (now + old + weights).isnan().any():
        raise NotRecorded(f"{present} of a trained token")
    logprobs = now.clone().requires_grad_()
    tokens = Tokens(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=flat(found.advantages[i] for i in members),
        chains=chains,
        turns=flat(made[i].turns + 10_000 * place for place, i in enumerate(members)),
        groups=flat(np.full(len(made[i].lags), stored[i].group) for i in members),
        weights=weights,
        reference_logprobs=series("reference_logprob") if loss.kl_coef > 0 and loss.kl_in == "loss" else None,
    )
    if rules.algorithm.loss is None:
        limits: dict[str, Any] = {"clip_low": loss.clip_low, "clip_high": loss.clip_high, "dual_clip": loss.dual_clip}
        each = clipped_surrogate(tokens.logprobs, tokens.old_logprobs, tokens.advantages, **limits)[0]
    else:
        result = rules.algorithm.loss(tokens, loss)
        each = result if isinstance(result, Tensor) else result.loss
    policy = (each * weights).sum()
    whole = policy
    if tokens.reference_logprobs is not None:
        gap = logprobs - tokens.reference_logprobs
        kinds = {"k1": gap, "k2": 0.5 * gap**2, "k3": torch.exp((-gap).clamp(-20.0, 20.0)) - 1.0 + gap}
        whole = policy + loss.kl_coef * (kinds[loss.kl_estimator] * plain).sum()
        metrics["train/reference_kl"] = float(kinds[loss.kl_estimator].detach().mean())
    slopes = torch.autograd.grad(whole, logprobs)[0]
    if loss.entropy_coef > 0:
        metrics["train/entropy_slope"] = -loss.entropy_coef * float(plain.sum())
    elif rules.algorithm.needs_critic is False or loss.critic != "shared":
        metrics["train/loss"] = float(whole.detach())
    return metrics | {
        "train/policy_loss": float(policy.detach()),
        "train/slope": float(slopes.abs().sum()),
        "train/slope_mark": float((slopes * now).sum()),
    }


def _importance(loss: LossSettings, gaps: Tensor, inexact: Tensor, chains: Tensor, metrics: dict[str, float]) -> Tensor:
    """The weight of `loss.correction` of each token: learner's over sampler's probability, capped."""
    gaps, cap = torch.where(inexact, gaps, 0.0), math.log(loss.correction_cap)
    if loss.correction == "sequence":
        sums = gaps.new_zeros(int(chains.max()) + 1).index_add(0, chains, gaps)
        weights, corrected = sums.clamp(max=cap).exp(), torch.zeros_like(sums).index_add(0, chains, inexact.to(gaps.dtype)) > 0
        metrics["train/correction_mean"] = float(weights[corrected].mean())
        return weights[chains]
    weights = gaps.clamp(max=cap).exp()
    if loss.correction == "mask":
        weights = torch.where(gaps.abs() > cap, 0.0, gaps.exp())
    metrics["train/correction_mean"] = float(weights[inexact].mean())
    return weights
