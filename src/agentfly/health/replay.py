"""Whether the records of a run follow from each other: every step is computed again from its chains, and compared.

The other checks find records that disagree. These find a training that learned something else than its config says:
advantages of other groups, tokens without loss, a missing weight, shared seeds, exchanged rewards. The arithmetic is in
`learn.algorithms.replay`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import AgentFlyError, ConfigError, StorageError
from ..learn.algorithms import find_algorithm
from ..learn.settings import LossSettings, OptimSettings
from ..rewards import Reward, Score, as_reward
from ..rollout.shaping import CALL_BONUS, call_bonus, left_at
from ..runs import RunStore
from ..runs.rows import unpack_values
from ..runs.store import LearnedRow
from ..training.evidence import FULL, HALF
from ..types import Trajectory
from .records import Check, Run, Skip, draw_of

TOLERANCE = 1e-4
"""Relative difference of a figure that is computed again."""
HALF_TOLERANCE = 1e-2
"""The same for a loss in half precision."""
UNLIKELY = 16.0
"""Equal siblings with a probability below e to the minus this share a seed."""
MAX_CHANCE = -7.0
"""Log-probability of a reply above which equal replies of siblings say nothing."""
MAX_RESCORED, RESCORE_S = 4096, 10.0
"""Chains that are scored again, and the seconds that this may take."""
OF_LOSS = {"train/policy_loss", "train/loss", "train/reference_kl", "train/correction_mean", "train/explained_variance"}
"""Metrics of the loss beside its slopes. Their rounding follows from that of the sum of all slopes."""

PROMISES = {
    "credit": "advantages follow from the stored rewards, groups and values",
    "updates": "the trained rows and tokens, optimizer steps, learning rate and version follow from the config",
    "loss": "the loss and what entered the gradient follow from advantages and log-probs",
    "reference": "the reference model is the one that the run began with, and does not follow the policy",
    "siblings": "sibling chains are sampled with different seeds",
    "rescored": "chains that are scored again get the stored reward",
}


@dataclass(slots=True)
class Stored:
    """The chains of one step in the order of their draws, with the number of their group and the learner's records."""

    chains: list[tuple[int, Trajectory, LearnedRow | None]]
    num_groups: int


@dataclass(slots=True)
class Replayed:
    """What was seen over all steps."""

    steps: int = 0
    advantages: int = 0
    tokens: int = 0
    losses: int = 0
    references: int = 0
    adam_steps: float | None = None


def replay_run(run: Run, store: RunStore, checks: dict[str, Check]) -> None:
    """Compute every step again and add what differs to the checks that `PROMISES` names."""
    own = [checks[name] for name in PROMISES]
    rules = run.rules
    if not run.steps or not rules:
        for check in own:
            check.skipped = (
                "no training step is stored" if not run.steps else "the run did not record the settings of its steps"
            )
        return
    seen, pairs = Replayed(), {"first replies": Counter[str](), "chains": Counter[str]()}
    rescorer = _Rescorer(run, store.count(split="train"), checks["rescored"])
    try:
        for step in run.steps:
            stored = _read(store, step)
            _siblings(stored, pairs)
            if stored is None:
                continue
            rescorer.add([trajectory for _, trajectory, _ in stored.chains], _record_at(rules, step) or {})
            if (at_step := _rules_at(rules, step)) is not None:
                _replay(run, step, stored, at_step, checks, seen)
    except Skip as why:
        for check in own[:4]:
            check.skipped = str(why)
    checks["credit"].evidence = f"{seen.steps} steps, {seen.advantages:,} chains, to {TOLERANCE:g}"
    checks["updates"].evidence = f"{seen.tokens:,} tokens of {seen.steps} steps"
    checks["loss"].evidence = f"{seen.losses} steps, to {TOLERANCE:g}"
    checks["reference"].evidence = f"{seen.references} steps have one"
    _tell_siblings(pairs, rules, checks["siblings"])
    rescorer.close()


def _read(store: RunStore, step: int) -> Stored | None:
    """The chains of a step; None if one cannot be read or is there twice, which other checks tell."""
    learned = {row.id: row for row in store.learned(step)}
    try:
        chains = store.trajectories(step=step, split="train", limit=-1)
    except ConfigError:
        return None
    if len(learned) != len(chains):
        return None
    named = [(draw_of(chain.id), chain) for chain in chains]
    draws = {
        chain.id: (place or (step, 0), "" if place else chain.task.id, 0 if place else chain.draw) for place, chain in named
    }
    places = {draw: number for number, draw in enumerate(sorted(set(draws.values())))}
    chains.sort(key=lambda chain: (places[draws[chain.id]], chain.chain))
    return Stored([(places[draws[chain.id]], chain, learned.get(chain.id)) for chain in chains], len(places))


def _record_at(rules: Sequence[dict[str, Any]], step: int) -> dict[str, Any] | None:
    return max((each for each in rules if each["from"] <= step), key=lambda each: each["from"], default=None)


def _rules_at(rules: Sequence[dict[str, Any]], step: int) -> Any:
    from ..learn.algorithms.replay import Rules

    record = _record_at(rules, step)
    if record is None:
        return None  # a version that did not record them
    try:
        algorithm = find_algorithm(record["algorithm"])
    except AgentFlyError as error:
        raise Skip(f"the algorithm cannot be loaded: {error}") from error
    optim = {field.name: record["optim"][field.name] for field in fields(OptimSettings) if field.name in record["optim"]}
    switches = {name: record[name] for name in ("seed", "window", "exact", "full", "recomputes")}
    return Rules(algorithm=algorithm, loss=LossSettings(**record["loss"]), optim=OptimSettings(**optim), **switches)


def _replay(run: Run, step: int, stored: Stored, rules: Any, checks: dict[str, Check], seen: Replayed) -> None:
    from ..learn.algorithms.replay import NotRecorded, StoredChain, replay

    metrics = run.metrics[step]
    for name in ("kl_coef", "entropy_coef"):
        if (coef := metrics.get(f"train/{name}")) is not None:  # loss.kl_target or loss.entropy_target has adapted it
            rules = replace(rules, loss=replace(rules.loss, **{name: coef}))
    trainable = [each for each in stored.chains if each[1].trainable]
    series = [_series(row) for _, _, row in trainable]
    given = [StoredChain(chain, group, values) for (group, chain, _), values in zip(trainable, series, strict=True)]
    counts = {"groups": stored.num_groups, "chains": len(stored.chains)}
    version = round(metrics.get("train/version", step - 1))
    try:
        result = replay(rules, given, step=step, version=version, **counts)
    except NotRecorded as error:
        checks["credit"].add(f"step {step}: the learner did not record {error}")
        return
    except (AgentFlyError, ArithmeticError, ValueError, LookupError, TypeError) as error:
        checks["credit"].add(f"step {step} cannot be computed again: {type(error).__name__}: {error}")
        return
    seen.steps += 1
    if result.missing is not None:
        checks["loss"].add(f"step {step}: the learner did not record {result.missing}")
    for place, (_, chain, row) in enumerate(trainable):
        if row is None or row.num_trained is None or not result.advantages:
            continue
        seen.advantages += 1
        _compare_advantages(checks["credit"], step, chain, row, series[place], result.advantages[place])
        seen.tokens += _compare_used(checks["updates"], step, chain, row, series[place], result.used[place])
    _compare_metrics(checks, step, metrics, result.metrics, rules, seen)
    _follow_version(checks["updates"], run, step, version, seen)
    _look_at_reference(checks["reference"], step, version, series, rules, seen)


def _series(row: LearnedRow | None) -> dict[str, list[float]]:
    try:
        return {} if row is None else {name: unpack_values(*packed) for name, packed in row.series.items()}
    except StorageError:  # told by another check
        return {}


def _compare_advantages(
    check: Check, step: int, chain: Trajectory, row: LearnedRow, series: dict[str, list[float]], own: Any
) -> None:
    logged = series.get("advantage") or [row.advantage or 0.0] * len(own)
    for place, (value, computed) in enumerate(zip(logged, own.tolist(), strict=False)):
        if not math.isclose(value, computed, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            check.add(
                f"chain {chain.id} of step {step}: its advantage is {value:.6g} (token {place}), but its group's rewards give "
                f"{computed:.6g}"
            )
            return


def _compare_used(check: Check, step: int, chain: Trajectory, row: LearnedRow, series: dict[str, list[float]], own: Any) -> int:
    count = int(own.sum())
    logged = series.get("trained")
    same = row.num_trained == count and (logged is None or [bool(flag) for flag in logged] == own.tolist())
    if not same:
        check.add(
            f"chain {chain.id} of step {step}: {row.num_trained} of its tokens received a gradient, but {count} should have"
        )
    return count


def _compare_metrics(
    checks: dict[str, Check], step: int, told: dict[str, float], own: dict[str, float], rules: Any, seen: Replayed
) -> None:
    seen.losses += "train/slope" in own
    for name, value in own.items():
        if name not in told:
            continue
        of_gap, of_loss = name == "train/logprob_gap", name in OF_LOSS or "slope" in name
        tolerance = TOLERANCE if rules.full or not of_loss else HALF_TOLERANCE
        width = own.get("train/last_slope" if "/last_" in name else "train/slope", 0.0) if of_loss else 0.0
        scale = max(abs(value), 10.0 * width if name.endswith("slope_mark") else width)
        if not abs(told[name] - value) <= tolerance * scale + (1e-6 if of_gap else 1e-9):
            checks["loss" if of_loss or of_gap else "updates"].add(
                f"step {step}: {name} is {told[name]:.6g}, but the chains give {value:.6g}"
            )


def _follow_version(check: Check, run: Run, step: int, version: int, seen: Replayed) -> None:
    metrics = run.metrics[step]
    steps = metrics.get("train/optimizer_steps", 0.0)
    later = run.metrics.get(step + 1, {}).get("train/version")
    went_back = metrics.get("train/restarted_from")  # after the step, with a version of its own
    if later is not None and "train/version" in metrics and later != version + (steps > 0) + (went_back is not None):
        check.add(f"step {step} took {steps:g} optimizer steps at version {version}, and step {step + 1} has version {later:g}")
    if "train/adam_steps" in metrics:
        # Steps of a version that did not record it have taken some.
        seen.adam_steps = (
            metrics["train/adam_steps"] if seen.adam_steps is None and step > 1 else (seen.adam_steps or 0.0) + steps
        )
        if metrics["train/adam_steps"] != seen.adam_steps:
            check.add(
                f"step {step}: {seen.adam_steps:g} optimizer steps were taken, but Adam counts {metrics['train/adam_steps']:g}"
            )
            seen.adam_steps = metrics["train/adam_steps"]
        if went_back is not None:
            seen.adam_steps = run.metrics.get(int(went_back), {}).get("train/adam_steps")
    # A smaller rate moves float32 weights by less than their rounding.
    pushed = steps and metrics.get("train/lr", 0.0) > 1e-8 and metrics.get("train/grad_norm", 0.0) > 1e-4
    if pushed and metrics.get("train/weight_change") == 0.0:
        check.add(f"step {step} took {steps:g} optimizer steps, but no weight has changed")


def _look_at_reference(
    check: Check, step: int, version: int, series: Sequence[dict[str, list[float]]], rules: Any, seen: Replayed
) -> None:
    pairs = [
        (a, b)
        for each in series
        if "reference_logprob" in each and "trainer_logprob" in each
        for a, b in zip(each["reference_logprob"], each["trainer_logprob"], strict=False)
        if not math.isnan(b)
    ]
    seen.references += bool(pairs)
    if rules.loss.reference_every:  # it follows the policy
        return
    if version and pairs and all(a == b for a, b in pairs):
        check.add(f"step {step}: the reference gives all {len(pairs)} tokens the log-probs of version {version} of the policy")
    apart = sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))
    is_set = rules.loss.reference is not None or rules.loss.reference_hint is not None
    if not version and not is_set and not apart <= (FULL if rules.full else HALF).high:
        check.add(f"step {step}: the reference and the weights that the run began with differ by {apart:.4g} nats per token")


def _siblings(stored: Stored | None, pairs: dict[str, Counter[str]]) -> None:
    from ..learn.algorithms.replay import identical

    if stored is None:
        return
    for name, most in (("first replies", 1), ("chains", None)):
        siblings = []
        for group, chain, _ in stored.chains:
            replies = [turn.completion for turn in chain.turns[:most]]
            total = math.fsum(value for reply in replies for value in reply.logprobs)
            if total < MAX_CHANCE:
                siblings.append((group, [token for reply in replies for token in reply.token_ids], total))
        count, expected = identical(siblings)
        pairs[name].update({"equal": count, "chains": len(siblings)})
        pairs[name]["expected"] += expected  # type: ignore[assignment]


def _tell_siblings(pairs: dict[str, Counter[str]], rules: Sequence[dict[str, Any]], check: Check) -> None:
    if any(each["truncates"] for each in rules):
        check.skipped = "the sampler is greedy or truncated, so siblings may be equal"
        return
    for name, figures in pairs.items():
        equal, expected = figures["equal"], max(1e-12, float(figures["expected"]))
        if equal > expected and equal * math.log(equal / expected) - (equal - expected) > UNLIKELY:
            check.add(
                f"{equal} pairs of sibling {name} are equal token by token, where chance gives {expected:.2g}: they share seeds"
            )
    check.evidence = f"{pairs['chains']['chains']:,} chains compared with their siblings"


class _Rescorer:
    """Scores chains again, if their reward can be loaded, is quick and needs no environment."""

    def __init__(self, run: Run, num_chains: int, check: Check) -> None:
        self._check, self._until = check, time.monotonic() + RESCORE_S
        self._seen = self._tried = self._foreign = 0
        self._wrong: list[str] = []
        self._every = max(1, num_chains // MAX_RESCORED)
        self._reward: Reward | None = None
        self._same = False  # whether the run's reward was made of the same functions and weights
        try:
            name = run.settings().agent.reward
            if not name:
                raise Skip("the run has no reward that a config names")
            made = as_reward(name)
            if made.waits or made.envs or made.grouped:
                raise Skip("the reward waits for something, needs an environment or compares the chains of a group")
            self._reward = made
            self._same = any(rules.get("reward") == repr(made) for rules in run.rules)
        except Skip as why:
            check.skipped = str(why)
        except AgentFlyError as error:
            check.skipped = f"the reward cannot be loaded: {error}"

    def add(self, chains: Sequence[Trajectory], rules: Mapping[str, Any]) -> None:
        """Score chains of a step, whose settings are `rules`."""
        scored = [chain for chain in chains if chain.scored]
        asyncio.run(self._score([chain for place, chain in enumerate(scored, self._seen) if place % self._every == 0], rules))
        self._seen += len(scored)

    async def _score(self, chains: Sequence[Trajectory], rules: Mapping[str, Any]) -> None:
        for chain in chains:
            if self._reward is None or time.monotonic() > self._until:
                return
            steps = [math.fsum(result.reward or 0.0 for result in turn.results) for turn in chain.turns]
            turns = [replace(turn, reward=reward) for turn, reward in zip(chain.turns, steps, strict=True)]
            try:
                first, again = [await self._reward.score(replace(chain, turns=turns)) for _ in range(2)]
            except AgentFlyError as error:
                self._reward, self._check.skipped = None, f"the reward cannot be computed from the store: {error}"
                return
            if (first.reward, first.turn_rewards) != (again.reward, again.turn_rewards):
                self._reward, self._check.skipped = None, "the reward is random"
                return
            self._tried += 1
            bonus = _bonus_of(chain, rules)
            parts_of_reward = {name: value for name, value in chain.components.items() if name not in bonus.components}
            steady = _close(first.components, again.components)
            equal = not steady or _close(first.components, parts_of_reward)
            self._same, self._foreign = self._same and steady, self._foreign + (not equal)
            none = [0.0] * len(steps)
            expected = [sum(parts) for parts in zip(steps, first.turn_rewards or none, bonus.turn_rewards or none, strict=True)]
            stored = [turn.reward for turn in chain.turns]
            number = next((i for i, pair in enumerate(zip(stored, expected, strict=True)) if not _near(*pair)), None)
            if number is not None:
                what = f"turn {number + 1} of chain {chain.id} has the reward {stored[number]:g}"
                self._wrong.append(f"{what}, but is worth {expected[number]:g}")
            elif not _near(first.reward, chain.reward or 0.0):
                self._wrong.append(f"chain {chain.id} has the reward {chain.reward:g}, but is worth {first.reward:g}")
            elif not equal:
                self._wrong.append(f"chain {chain.id} has the parts {parts_of_reward}, but its reward gives {first.components}")

    def close(self) -> None:
        self._check.evidence = f"{self._tried:,} of {self._seen:,} chains"
        # A reward that was given in Python, or edited since, may share its name with another one.
        if 2 * (self._foreign if self._same else len(self._wrong)) > self._tried:
            self._check.skipped = "the reward of this name gives most chains another score: it is not that of the run"
            return
        for problem in self._wrong:
            self._check.add(problem)


def _bonus_of(chain: Trajectory, rules: Mapping[str, Any]) -> Score:
    """What `rollout.call_bonus` pays a chain in the step of its draw."""
    (paid, num_steps), place = rules.get("call_bonus", (0.0, 0)), draw_of(chain.id)
    plain = replace(chain, components={name: value for name, value in chain.components.items() if name != CALL_BONUS})
    return call_bonus(plain, paid * left_at(place[0], num_steps) if place else 0.0)


def _close(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(_near(one[name], other[name]) for name in one)


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
