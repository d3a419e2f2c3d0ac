"""Warnings about a run, in words: pure functions from the series of its metrics to a sentence, its evidence and what to try.

A rule looks at the newest steps (`RECENT`) and, where it speaks of a change, at the first ones. It says nothing while there are
too few steps, or while a metric that it needs is absent. `warnings_of` asks all rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Literal

RECENT = 5
"""Steps that count as now."""
MIN_STEPS = 8
"""Steps before a rule speaks of a change."""
WATCHED = (
    "ledger/trained", "ledger/filtered", "ledger/failed", "ledger/probe_gap", "handover/gap", "rollout/success",
    "rollout/invalid_call_rate", "rollout/outcome/max_tokens", "rollout/outcome/max_turns", "rollout/outcome/max_time",
    "rollout/outcome/world_failure", "rollout/outcome/tool_error", "rollout/outcome/cancelled", "train/entropy",
    "train/logprob_gap", "train/idle_steps",
    "train/grad_norm", "reward/mean", "rollout/reply_tokens", "time/stalls_s", "time/step_s", "time/environments_s",
)  # fmt: skip
"""The metrics that warnings are made from."""
OFTEN = 200
"""Until this many steps warnings are looked for at each step, then at every tenth."""
DEFAULT_GAP = 0.05
"""The limit of the log-prob gap if the run does not say its own: that of float32."""

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Values by metric, as (step, value) in the order of the steps."""


@dataclass(frozen=True, slots=True)
class Warned:
    """One warning. `evidence` holds the values behind it as (metric, value); `tips` says what to try, best first."""

    name: str
    level: Literal["red", "yellow"]
    text: str
    tips: tuple[str, ...]
    evidence: tuple[tuple[str, float], ...]
    step: int


def warnings_of(series: Series, *, max_logprob_gap: float | None = None) -> list[Warned]:
    """Every warning that holds at the newest step, red ones first."""
    finite = {name: clean for name, values in series.items() if (clean := [(s, v) for s, v in values if math.isfinite(v)])}
    facts = _Facts(finite, max_logprob_gap or DEFAULT_GAP)
    warnings = [warned for rule in RULES if (warned := rule(facts)) is not None]
    return sorted(warnings, key=lambda each: each.level != "red")


@dataclass(frozen=True, slots=True)
class _Facts:
    series: Series
    max_gap: float

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.series.get(name, ())]

    def step(self, name: str) -> int:
        return self.series[name][-1][0]

    def now(self, name: str) -> float | None:
        """The mean of the newest steps; None if the metric is absent."""
        values = self.values(name)[-RECENT:]
        return fmean(values) if values else None

    def change(self, name: str) -> tuple[float, float] | None:
        """The mean of the first and of the newest steps; None if there are too few."""
        values = self.values(name)
        return (fmean(values[:RECENT]), fmean(values[-RECENT:])) if len(values) >= MIN_STEPS else None

    def noise(self, name: str) -> float:
        """The standard error of a difference of two means of RECENT steps, from the differences of neighbouring steps."""
        squares = [(later - earlier) ** 2 for earlier, later in pairwise(self.values(name))]
        return math.sqrt(fmean(squares) / RECENT) if squares else 0.0

    def learns(self) -> bool:
        """Whether success has risen since the first steps by more than noise, or is nearly full."""
        means, success = self.change("rollout/success"), self.now("rollout/success")
        risen = means is not None and means[1] - means[0] > max(2 * self.noise("rollout/success"), 0.02)
        return risen or (success is not None and success >= 0.95)

    def per_step(self, name: str) -> list[float]:
        """The growth of a count in the newest steps."""
        return [later - earlier for earlier, later in pairwise([0.0, *self.values(name)])][-RECENT:]


Rule = Callable[[_Facts], Warned | None]


def groups_equal(facts: _Facts) -> Warned | None:
    """The siblings of most tasks have equal rewards, so their advantages are 0."""
    counts = [facts.per_step(f"ledger/{name}") for name in ("trained", "filtered", "failed")]
    total = sum(map(sum, counts))
    if len(counts[0]) < 3 or not total or (share := sum(counts[1]) / total) < 0.6:
        return None
    success = facts.now("rollout/success")
    tips: tuple[str, ...]
    if success is not None and success >= 0.9:
        why, tips = "nearly all chains succeed", ("take harder tasks, or stop: the run has learned these",)
    elif success is not None and success <= 0.1:
        why = "nearly no chain succeeds"
        tips = (
            "begin with easier tasks, or with a warm start on demonstrations ([warm_start])",
            "give a partial reward for partial progress",
            "raise rollout.num_chains: a rare success then appears in more groups",
        )
    else:
        why = "siblings do the same"
        tips = ("raise sampling.temperature", "raise rollout.num_chains", "give a reward with more than two values")
    return Warned(
        "groups_equal",
        "red" if share >= 0.9 else "yellow",
        f"{share:.0%} of the groups of the last steps teach nothing: all chains of a group have the same reward ({why})",
        tips,
        (("ledger/filtered", sum(counts[1])), *((("rollout/success", success),) if success is not None else ())),
        facts.step("ledger/filtered"),
    )


def entropy_collapsed(facts: _Facts) -> Warned | None:
    """The policy has become nearly deterministic without having learned the task."""
    means = facts.change("train/entropy")
    if means is None or facts.learns():
        return None
    first, last = means
    if not last < max(0.1 * first, min(0.01, 0.5 * first)):
        return None
    return Warned(
        "entropy_collapsed",
        "red",
        f"the policy's entropy has fallen from {first:.3g} to {last:.3g} nats, and success has not risen: all chains of a task "
        "become the same",
        ("lower train.lr", "raise loss.clip_high or set loss.entropy_coef", "raise sampling.temperature", "set loss.kl_coef"),
        (("train/entropy", last),),
        facts.step("train/entropy"),
    )


def success_falls(facts: _Facts) -> Warned | None:
    """The policy has lost what it had learned."""
    values, name = facts.values("rollout/success"), "rollout/success"
    if len(values) < 2 * RECENT:
        return None
    means = [fmean(values[at : at + RECENT]) for at in range(len(values) - RECENT + 1)]
    best, now = max(means), means[-1]
    if now > best * 2 / 3 or best - now < max(5 * facts.noise(name), 0.05):
        return None
    steps = [step for step, _ in facts.series[name]][means.index(best) :][:RECENT]
    return Warned(
        "success_falls",
        "red",
        f"success has fallen to {now:.0%}, from {best:.0%} in steps {steps[0]}-{steps[-1]}, which is more than noise",
        (
            "go back to a checkpoint of before (train.keep_best, train.restart_from_best) and lower train.lr",
            "set loss.kl_coef, or train.max_grad_norm lower",
            "look at chains of now and of then (`agentfly show`); a data.sampler that draws harder tasks lowers success, too",
        ),
        ((name, now),),
        facts.step(name),
    )


def length_runs_away(facts: _Facts) -> Warned | None:
    """Replies have become far longer or far shorter, and this has not helped."""
    means = facts.change("rollout/reply_tokens")
    if means is None or facts.learns() or not any(facts.values("reward/mean")):  # a teacher may reply at another length
        return None
    first, last = means
    if first / 4 <= last <= 4 * first:
        return None
    longer = ("lower sampling.max_tokens, or reward short replies", 'set loss.truncated = "mask"', "lower train.lr")
    shorter = ("look at the replies: does the reward pay for an early end?", "lower train.lr", "set loss.kl_coef")
    return Warned(
        "length_runs_away",
        "red",
        f"replies have become {'longer' if last > first else 'shorter'}: {first:.0f} to {last:.0f} tokens, "
        "and success has not risen",
        longer if last > first else shorter,
        (("rollout/reply_tokens", last),),
        facts.step("rollout/reply_tokens"),
    )


def truncated_rising(facts: _Facts) -> Warned | None:
    """More and more chains end at a limit of tokens, turns or time."""
    rising = []
    for outcome, tip in (
        ("max_tokens", "raise sampling.max_tokens or agent.max_context, or reward short replies"),
        ("max_turns", "raise agent.max_turns, or reward chains that finish"),
        ("max_time", "raise agent.chain_timeout_s or the limit that the chains name, or reward quick chains"),
    ):
        name = f"rollout/outcome/{outcome}"
        means = facts.change(name)
        if means is not None and means[1] >= 0.2 and means[1] - means[0] >= 0.1:
            rising.append((name, outcome, means, tip))
    if not rising:
        return None
    name, outcome, (first, last), tip = max(rising, key=lambda each: each[2][1])
    return Warned(
        "truncated_rising",
        "red" if last >= 0.5 else "yellow",
        f"the share of chains that end at {outcome} has risen from {first:.0%} to {last:.0%}",
        (tip, "look at such chains: a model that repeats itself needs a lower learning rate"),
        ((name, last),),
        facts.step(name),
    )


def invalid_rising(facts: _Facts) -> Warned | None:
    """More and more tool calls are invalid."""
    means = facts.change("rollout/invalid_call_rate")
    if means is None or means[1] < 0.2 or means[1] - means[0] < 0.1:
        return None
    return Warned(
        "invalid_rising",
        "red" if means[1] >= 0.5 else "yellow",
        f"the share of invalid tool calls has risen from {means[0]:.0%} to {means[1]:.0%}",
        (
            "look at chains with invalid calls: is the format that the prompt describes the one that the parser reads?",
            "add a penalty for invalid calls to the reward",
            "lower train.lr",
        ),
        (("rollout/invalid_call_rate", means[1]),),
        facts.step("rollout/invalid_call_rate"),
    )


def logprob_gap(facts: _Facts) -> Warned | None:
    """Engine and learner disagree about the sampled tokens."""
    worst: tuple[float, str] | None = None
    for name in ("train/logprob_gap", "handover/gap", "ledger/probe_gap"):
        if values := facts.values(name)[-RECENT:]:
            worst = max(worst or (0.0, name), (max(values), name))
    if worst is None or worst[0] < 0.5 * facts.max_gap:
        return None
    gap, name = worst
    return Warned(
        "logprob_gap",
        "red" if gap > facts.max_gap else "yellow",
        f"the log-probs of the engine and of the learner differ by up to {gap:.3g} nats (limit {facts.max_gap:g})",
        (
            "sample in the precision that is trained: set agent.engine.dtype",
            "set loss.correction, which weights tokens by the ratio of the two",
        ),
        ((name, gap),),
        facts.step(name),
    )


def nothing_learned(facts: _Facts) -> Warned | None:
    """No step changed the weights for some time, or many did and the reward stayed."""
    idle = facts.values("train/idle_steps")
    if idle and idle[-1] >= 3:
        return Warned(
            "nothing_learned",
            "red",
            f"nothing was learned in the last {idle[-1]:.0f} steps",
            ("open a group of the last step: equal rewards teach nothing", "look at the outcomes: failed chains are left out"),
            (("train/idle_steps", idle[-1]),),
            facts.step("train/idle_steps"),
        )
    rewards = facts.values("reward/mean")
    part = len(rewards) // 4
    if part < 5 or not any(rewards):  # a teacher needs no reward; steps that learn nothing are told above
        return None
    first, last = rewards[:part], rewards[-part:]
    error = math.hypot(stdev(first), stdev(last)) / math.sqrt(part)
    gain, success = fmean(last) - fmean(first), facts.now("rollout/success")
    if gain > 2 * error or gain > 0.02 * max(abs(fmean(first)), 1e-9) or (success is not None and success >= 0.95):
        return None
    return Warned(
        "nothing_learned",
        "yellow",
        f"the mean reward has not risen: {fmean(first):.3g} in the first quarter of the steps, {fmean(last):.3g} in the last",
        (
            "raise train.lr",
            "raise rollout.num_tasks or num_chains: less noise",
            "check the reward by hand on some chains",
        ),
        (("reward/mean", fmean(last)),),
        facts.step("reward/mean"),
    )


def lost_chains(facts: _Facts) -> Warned | None:
    """Chains end by failures of the world and are not trained on."""
    shares = {o: facts.now(f"rollout/outcome/{o}") or 0.0 for o in ("world_failure", "tool_error", "cancelled")}
    total = sum(shares.values())
    if total < 0.05:
        return None
    worst = max(shares, key=lambda outcome: shares[outcome])
    return Warned(
        "lost_chains",
        "red" if total >= 0.2 else "yellow",
        f"{total:.0%} of the chains of the last steps failed and were not trained on, most of them with {worst}",
        (
            f"open the chains with the outcome {worst}: each names its error",
            "give the environments more memory or fewer places (resources.pools)",
        ),
        tuple((f"rollout/outcome/{outcome}", share) for outcome, share in shares.items()),
        facts.step(f"rollout/outcome/{worst}"),
    )


def stalled(facts: _Facts) -> Warned | None:
    """Steps lose time to compiling, capture and unexplained pauses."""
    lost, total = sum(facts.values("time/stalls_s")[-RECENT:]), sum(facts.values("time/step_s")[-RECENT:])
    if len(facts.values("time/step_s")) < RECENT or not total or lost / total < 0.1:
        return None
    return Warned(
        "stalled",
        "yellow",
        f"the last steps lost {lost:.1f} of {total:.1f} s to stalls: compiling, or a machine that does something else",
        ("is another program using the machine or its GPU?", "agentfly train --profile says what Python did meanwhile"),
        (("time/stalls_s", lost),),
        facts.step("time/step_s"),
    )


def waits_for_environments(facts: _Facts) -> Warned | None:
    """Chains wait for environments while nothing is computed."""
    waited, total = sum(facts.values("time/environments_s")[-RECENT:]), sum(facts.values("time/step_s")[-RECENT:])
    if len(facts.values("time/step_s")) < 3 or not total or waited / total < 0.25:
        return None
    return Warned(
        "waits_for_environments",
        "yellow",
        f"{waited / total:.0%} of the time chains wait for environments and nothing is computed",
        ("raise `max` or `min_warm` of the pool (resources.pools)", "lower rollout.max_concurrency"),
        (("time/environments_s", waited),),
        facts.step("time/step_s"),
    )


def gradient_spikes(facts: _Facts) -> Warned | None:
    """The gradient is far larger than before."""
    norms = facts.values("train/grad_norm")
    if len(norms) < MIN_STEPS:
        return None
    usual, newest = median(norms[:-1]), max(norms[-3:])
    if not usual or newest < 10 * usual:
        return None
    return Warned(
        "gradient_spikes",
        "yellow",
        f"the gradient's norm jumped to {newest:.3g}; usual in this run is {usual:.3g}",
        ("set train.max_grad_norm, or lower it", "lower train.lr", "look at the chains of that step"),
        (("train/grad_norm", newest),),
        facts.step("train/grad_norm"),
    )


RULES: tuple[Rule, ...] = (
    groups_equal, entropy_collapsed, success_falls, length_runs_away, truncated_rising, invalid_rising, logprob_gap,
    nothing_learned, lost_chains, stalled, waits_for_environments, gradient_spikes,
)  # fmt: skip
