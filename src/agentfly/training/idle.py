"""Steps in which nothing is learned, validations that do not improve, and settings that cannot act: how many, and why.

Such a run looks like any other in its log: chains are sampled, scored and stored. `IdleSteps` finds the cause in the chains and
returns a sentence for the screen; `without_effect` finds it in the config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .. import plugins
from ..config import Config
from ..engines import engine_options
from ..learn.algorithms import ALGORITHMS, find_algorithm
from ..runs.compare import paired_test
from ..types import Outcome, Trajectory
from ..watch.metrics import is_success

FIRST = 3
"""Consecutive idle steps before the first sentence; the next ones follow after 10, 30, 100, ..."""
_TOLD = frozenset((FIRST, *(10**power * first for power in range(1, 7) for first in (1, 3))))

MIN_TASKS = 6
"""With fewer tasks a paired test over them cannot find a difference: of five that all differ, p is 0.06."""


class IdleSteps:
    """Counts the steps of a run that learned nothing."""

    def __init__(self) -> None:
        self.steps = 0
        self.in_a_row = 0
        self._causes: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float], groups: Sequence[Sequence[Trajectory]]) -> str | None:
        """Count a step. Returns a sentence to show now, or None."""
        self.steps += 1
        cause = why_idle(metrics, groups)
        if cause is None:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        self._causes[cause] += 1
        return f"nothing was learned in the last {self.in_a_row} steps: {cause}" if self.in_a_row in _TOLD else None

    def closing(self) -> str | None:
        """Returns a sentence for the end of the run if half of its steps, or the last ones, learned nothing."""
        total = self._causes.total()
        if not total or (2 * total < self.steps and self.in_a_row < FIRST):
            return None
        cause = self._causes.most_common(1)[0][0]
        if total == self.steps:
            return f"nothing was learned in this run: {cause}"
        return f"nothing was learned in {total} of {self.steps} steps; most often: {cause}"


def why_idle(metrics: Mapping[str, float], groups: Sequence[Sequence[Trajectory]]) -> str | None:
    """Returns why a step learned nothing; None if it learned, or if its critic warms up."""
    if metrics.get("train/critic_warmup"):
        return None
    chains = [trajectory for group in groups for trajectory in group if trajectory.trainable]
    if not chains:
        every = [trajectory for group in groups for trajectory in group]
        why = Counter(trajectory.error or trajectory.outcome.value for trajectory in every).most_common(1)
        if every and all(trajectory.scored for trajectory in every):
            return f"no chain has a whole reply, so no token can be trained ({why[0][0]})"
        return f"no chain could be trained on ({why[0][0] if why else 'there was none'})"
    rewards = [trajectory.total_reward for trajectory in chains]
    alike = max(rewards) - min(rewards) <= 1e-9
    # A critic's values differ by chance, so its policy moves although no chain was better than another.
    if metrics.get("train/skipped") or (alike and "train/explained_variance" in metrics):
        return _why_alike(chains, groups, alike)
    if metrics.get("train/lr") == 0:
        return "the learning rate is 0: the schedule has ended (train.total_steps)"
    if metrics.get("train/grad_norm") == 0:
        return "the gradient is 0 although the advantages are not: every ratio is clipped, or no weight takes part"
    return None


def _why_alike(chains: Sequence[Trajectory], groups: Sequence[Sequence[Trajectory]], alike: bool) -> str:
    got = f"every chain got the reward {chains[0].total_reward:g}" if alike else "the chains of each task got equal rewards"
    if all(trajectory.outcome is Outcome.MAX_TOKENS for trajectory in chains):
        return f"{got}, and every chain was truncated: raise sampling.max_tokens or agent.max_context"
    siblings = [[trajectory for trajectory in group if trajectory.trainable] for group in groups]
    compared = [group for group in siblings if len(group) > 1]
    if not compared:
        return "no task has two chains that can be compared: raise rollout.num_chains, or look at why chains fail"
    if all(len({_tokens(trajectory) for trajectory in group}) == 1 for group in compared):
        return f"{got}, and the chains of each task are the same tokens: raise sampling.temperature"
    if not alike:
        return f"{got}: raise rollout.num_chains, or choose tasks that succeed sometimes"
    if all(trajectory.outcome is Outcome.MAX_TIME for trajectory in chains):
        return f"{got}, and every chain ran out of time: {chains[0].error}"
    if all(trajectory.outcome is Outcome.MAX_TURNS for trajectory in chains):
        return f"{got}, and every chain ended at agent.max_turns: raise it, or look at the replies (`agentfly show`)"
    return (
        f"{got}: if the model never succeeds, begin with demonstrations ([warm_start]) or easier tasks; if it always does, "
        "choose harder ones; else look at the reward"
    )


def _tokens(trajectory: Trajectory) -> tuple[int, ...]:
    return tuple(token for turn in trajectory.turns for token in turn.completion.token_ids)


class Plateau:
    """Counts the validations that are not better than the last one that was (`train.stop_after`).

    Better: success or reward is higher, and the paired permutation test over tasks finds such a difference by chance in fewer
    than 5 % of cases. `state` is that of a checkpoint. At most `restarts` times it asks to go back to the best checkpoint
    instead of the end, and as soon as a validation is worse by the same test.
    """

    def __init__(self, limit: int, state: Mapping[str, Any] | None = None, restarts: int = 0) -> None:
        self.limit, self._restarts = limit, restarts
        self.state: dict[str, Any] = dict(state or {"step": 0, "count": 0, "values": {}})
        self._worse = False

    def add(self, step: int, values: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Add a validation: the values of each task by figure, as `task_values` returns them."""
        best = self.state["values"]
        self._worse = False
        tests = [test for name in best if (test := paired_test(best[name], values[name])) is not None]
        if not best or any(test.difference > 0 and test.p_permutation < 0.05 for test in tests):
            self.state = {**self.state, "step": step, "count": 0, "values": values}
        elif any(test.num_tasks >= MIN_TASKS for test in tests):
            self.state = {**self.state, "count": self.state["count"] + 1}
            self._worse = any(test.difference < 0 and test.p_permutation < 0.05 for test in tests)

    @property
    def restart(self) -> str | None:
        """Why to go back to the best checkpoint; None if the run goes on, or has gone back often enough."""
        if self.state.get("restarts", 0) >= self._restarts:
            return None
        worse = f"the validation is worse than that of step {self.state['step']}, by a paired test"
        return worse if self._worse else self.reason

    def restarted(self) -> int:
        """Count a restart, and begin to count validations anew. Returns how many restarts are left."""
        self.state = {**self.state, "count": 0, "restarts": self.state.get("restarts", 0) + 1}
        self._worse = False
        return self._restarts - int(self.state["restarts"])

    @property
    def reason(self) -> str | None:
        """Why the run ends; None if it goes on."""
        count, step = self.state["count"], self.state["step"]
        if not self.limit or count < self.limit:
            return None
        return f"none of the last {count} validations was better than that of step {step}, by a paired test (train.stop_after)"


def task_values(trajectories: Sequence[Trajectory], num_chains: int, success_at: float) -> dict[str, dict[str, list[float]]]:
    """The success and the reward of the scored chains of each held-out task, by its position."""
    scored = [(str(at // num_chains), each) for at, each in enumerate(trajectories) if each.scored]
    values: dict[str, dict[str, list[float]]] = {"success": {}, "reward": {}}
    for task, trajectory in scored:
        values["success"].setdefault(task, []).append(float(is_success(trajectory, success_at)))
        values["reward"].setdefault(task, []).append(trajectory.total_reward)
    return values


def without_effect(
    config: Config, chain_timeout_s: float | None = None, exact: bool | None = None, num_held_out: int | None = None
) -> list[str]:
    """Returns a sentence about each group of settings that differ from their defaults and cannot act in this run.

    `chain_timeout_s` is the agent's, and `exact` says whether its engine samples with the learner's own weights and kernels;
    None: as the config describes it. `num_held_out` is the number of held-out rows, if it is known.
    """
    algorithm, loss, train, rollout = find_algorithm(config.algorithm), config.loss, config.train, config.rollout
    chain_s = config.agent.chain_timeout_s if chain_timeout_s is None else chain_timeout_s
    # A ratio differs from 1 only after an optimizer step on the same chains, or if its denominator is the sampler's.
    of_sampler = loss.old_logprobs == "sampled" or (loss.correction == "off" and rollout.max_lag > 0)
    one_step = train.epochs * train.num_minibatches == 1 and not of_sampler and algorithm in ALGORITHMS.values()
    if exact is None:
        exact = engine_options(config.agent.engine).get("kind", "local") == "local" and not config.sampler.in_processes
    once = train.critic_epochs == train.critic_minibatches == 1 if loss.critic == "copy" else one_step
    parts, sources = [part.data for part in config.data.parts()], config.data.sources.values()
    ordered = all(part.sampler_options[0] != "epochs" for part in parts)
    rules: tuple[tuple[str, bool, str], ...] = (
        ("loss.clip_low loss.clip_high loss.dual_clip", one_step,
         "with one optimizer step per update every ratio is 1: set train.num_minibatches or train.epochs"),
        ("loss.kl_in loss.kl_kind loss.kl_target loss.reference loss.reference_hint loss.reference_every", loss.kl_coef == 0,
         "loss.kl_coef is 0"),
        ("loss.correction loss.correction_cap", exact and not rollout.max_lag and loss.correction != "off",
         "the weights that are trained draw every token: set rollout.max_lag"),
        ("loss.value_clip", once, "values change only in the one optimizer step of the critic: set train.critic_minibatches"),
        ("train.betas", train.optimizer not in plugins.BUILTIN["optimizers"], "train.optimizer is your own"),
        ("train.total_steps", train.schedule == "constant", "the learning rate is constant: set train.schedule"),
        ("train.warmup_steps", train.warmup_steps > train.steps, "the run ends before the learning rate has reached train.lr"),
        ("train.keep_best train.stop_after", num_held_out != 0 and not train.validate_every,
         "nothing is validated before the end: set train.validate_every"),
        ("train.keep_best", num_held_out == 0, "there are no held-out rows: set data.validation"),
        ("train.stop_after", num_held_out is not None and num_held_out < MIN_TASKS,
         f"a paired test needs {MIN_TASKS} held-out rows or more: set data.validation"),
        ("train.stop_after", train.validate_every > 0 and train.steps <= train.stop_after * train.validate_every,
         "the run has no more validations than that: lower train.validate_every"),
        ("rollout.turn_timeout_s", (rollout.turn_timeout_s or 0.0) >= chain_s, "agent.chain_timeout_s ends the chain first"),
        ("data.holdout", all(part.validation is not None for part in parts), "data.validation names the held-out rows"),
        ("data.shuffle", ordered, "data.sampler chooses the order of the rows"),
        ("data.sampler", bool(sources) and all("sampler" in table for table in sources), "every source has its own sampler"),
    )  # fmt: skip
    sentences = []
    for names, idle, why in rules:
        given = [name for name in names.split() if _is_given(config, name)]
        if idle and given:
            sentences.append(f"{' and '.join(given)} cannot act: {why}, or remove it")
    if len(sources) == 1 and any("weight" in table for table in sources):
        sentences.append("the weight of the only source cannot act: add another one to data.sources, or remove it")
    if algorithm.needs_group and not config.sampling.temperature:
        sentences.append("sampling.temperature = 0 draws the same chain for all siblings of a task: nothing can be compared")
    if algorithm.needs_critic and (train.critic_warmup_steps or 0) >= train.steps:
        sentences.append("train.critic_warmup_steps is the whole run: the policy is never trained")
    return sentences


def _is_given(config: Config, name: str) -> bool:
    """Whether a key differs from its default, for [loss] that of the algorithm."""
    section, _, key = name.partition(".")
    held: Any = getattr(config, section)
    default = find_algorithm(config.algorithm).settings() if section == "loss" else type(held)()
    return bool(getattr(held, key) != getattr(default, key))
