"""Invariants of a run, checked at every step. Each check raises `InvariantError`:

- every task that was drawn is trained, filtered (its chains teach nothing), failed or in flight, and the sum is right;
- every admitted chain returned once, with an outcome, in the group it was admitted with;
- no trained token is older than `max_lag` versions when training starts, and the learner's own log-probs agree with those of
  the tokens that the current weights drew;
- the mask of a training row covers exactly the sampled tokens of its chain, with the engine's log-probs and versions (the
  learner checks this on the rows that it trains: `learn.samples.check_tokens`);
- after an update the engine samples from the new version, with the learner's weights or a proven copy of them, and has never
  reused a key or value of older weights for a new request;
- what the engine samples after an update fits the new weights and not those before (`EngineProbe`), at any learning rate;
- the sampler draws from the learner's distribution (`Drawn`), unless the config truncates it;
- an update with a gradient changes the weights, and the optimizer has counted every step of the run;
- not more than `max_failed_share` of a step's chains are untrainable.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from ..errors import InvariantError
from ..learn.samples import row_of
from ..protocols import Learner, ReplicatedEngine, TrainableEngine
from ..types import Completion, Outcome, Sample, TokenFit, Trajectory
from .evidence import (
    COPY,
    DRAW_PROMPT,
    EARLY,
    EARLY_TOKENS,
    FULL,
    MOST_ASTRAY,
    PROOF,
    Drawn,
    EngineProbe,
    Format,
    Freshness,
    gap_limit,
    is_biased,
    is_partly_stale,
    sampler_rows,
)

REMEMBERED = 100_000
"""Chains whose names are kept, to notice one that is trained twice."""
MAX_STEP_ERROR = 1e-4
"""Largest distance of an optimizer step from the one of the settings, as a share of it. float32 gives 1e-6."""


class Ledger:
    """Counts tasks and chains over the whole run and checks each step.

    `max_lag` None accepts tokens of any older version: the learner masks those that are too old. `checked` holds the checks of
    the current step by name: whether each holds, its value and the bound of the value (None: it has no number).
    """

    def __init__(
        self,
        *,
        max_logprob_gap: float | None = None,
        max_failed_share: float,
        max_lag: int | None = 0,
        copied: bool = False,
        bounds: Format = COPY,
        truncates: bool = False,
    ) -> None:
        """`max_logprob_gap` None: the limit follows from the run's first gap and `bounds`, those of its number format.

        `copied` says that the engine loads what `Learner.weights` yields into its own module, `truncates` that the config asks
        for a truncated or greedy sampler.
        """
        self.copied = copied
        self.fixed_gap, self.bounds, self.truncates = max_logprob_gap, bounds, truncates
        self.first_gap: float | None = None
        self.first_probe: float | None = None
        self.adam_steps: float | None = 0.0
        self.fresh = Freshness()
        self.drawn = Drawn()
        self.max_failed_share = max_failed_share
        self.max_lag = max_lag
        self.admitted = 0
        self.returned: Counter[str] = Counter()
        self.groups: Counter[str] = Counter(dict.fromkeys(("trained", "filtered", "failed"), 0))
        self.checked: dict[str, tuple[bool, float | None, float | None]] = {}
        self._seen: set[str] = set()
        self._order: deque[str] = deque()

    @property
    def max_logprob_gap(self) -> float:
        """The largest mean |sampled - recomputed log-prob| that is accepted."""
        return gap_limit(self.bounds, self.first_gap) if self.fixed_gap is None else self.fixed_gap

    def take_checked(self) -> dict[str, tuple[bool, float | None, float | None]]:
        """Returns `checked`, and begins a new step."""
        checked, self.checked = self.checked, {}
        return checked

    def _note(self, name: str, ok: bool, value: float | None = None, bound: float | None = None) -> bool:
        """Note a check. Returns whether it holds; a check that failed once in a step stays failed."""
        before = self.checked.get(name, (True, None, None))
        if before[0]:
            self.checked[name] = (ok, value, bound)
        return ok

    def check_rollout(self, groups: Sequence[Sequence[Trajectory]], *, num_tasks: int, num_chains: int, version: int) -> None:
        """Check one step's chains, after sampling and before learning."""
        self.admitted += num_tasks * num_chains
        chains = [trajectory for group in groups for trajectory in group]
        self.returned.update(trajectory.outcome.value for trajectory in chains)
        missing = self.admitted - self.returned.total()
        if not self._note("chains_returned", missing == 0, missing, 0):
            raise InvariantError(f"{self.admitted} chains were admitted so far but {self.returned.total()} came back")
        drawn = Counter((_step_of(group[0]), group[0].task.id, group[0].draw) for group in groups if group)
        repeated = [task for (_, task, _), count in drawn.items() if count > 1]
        if not self._note("draws_once", not repeated, len(repeated), 0):
            raise InvariantError(f"two groups hold the same draw of task {repeated[0]!r}: their chains have the same seeds")
        mixed = sum(
            len({(trajectory.task.id, trajectory.draw) for trajectory in group}) != 1
            or len({trajectory.chain for trajectory in group}) != num_chains
            for group in groups
        )
        if not self._note("groups_whole", not mixed, mixed, 0):
            raise InvariantError("a group holds chains of different tasks, or one chain twice: advantages would be wrong")
        self._check_new(chains)
        self._check_versions(chains, version)
        self._check_losses(chains)

    def check_books(
        self, groups: Sequence[Sequence[Trajectory]], metrics: Mapping[str, float], *, drawn: int, in_flight: int
    ) -> dict[str, float]:
        """Check, after a step, that every task that was drawn is accounted for. Returns the sums as metrics."""
        failed = sum(not any(trajectory.trainable for trajectory in group) for group in groups)
        filtered = max(0, int(metrics["train/zero_advantage_groups"]) - failed)
        self.groups.update({"failed": failed, "filtered": filtered, "trained": len(groups) - failed - filtered})
        lost = drawn - self.groups.total() - in_flight
        self._note("mask_is_sampled", True)  # the learner raises if it is not, before it returns metrics
        if not self._note("tasks_accounted", lost == 0, lost, 0):
            raise InvariantError(
                f"{drawn} tasks were drawn, but {dict(self.groups)} and {in_flight} in flight are "
                f"{self.groups.total() + in_flight}"
            )
        counts = {**self.groups, "in_flight": in_flight, "drawn": drawn}
        return {f"ledger/{name}": float(count) for name, count in counts.items()}

    def check_update(self, metrics: Mapping[str, float]) -> None:
        """Check that learner and engine computed the same log-probs; the learner calls it before the weights change."""
        gap = metrics.get("train/logprob_gap", 0.0)
        self._check_gap("logprob_gap", gap, "sampled and recomputed log-probs differ", "The weights were not changed")
        if self.first_gap is None and "train/logprob_gap" in metrics:
            self.first_gap = gap
        bias, error = metrics.get("train/logprob_gap_bias", 0.0), metrics.get("train/logprob_gap_error", 0.0)
        biased = self.fixed_gap is None and is_biased(self.bounds, gap, bias, error)
        if not self._note("logprob_bias", not biased, bias):
            raise InvariantError(
                f"sampled log-probs are {'above' if bias > 0 else 'below'} the recomputed ones by {abs(bias):.4g} nats on "
                f"average (standard error {error:.2g}): rounding has no direction, so the engine records other log-probs than "
                f"those that it samples with. The weights were not changed"
            )

    def _check_gap(self, name: str, gap: float, told: str, end: str) -> None:
        limit = self.max_logprob_gap
        if not self._note(name, gap <= limit, gap, limit):
            raise InvariantError(
                f"{told} by {gap:.4g} nats on average (limit {limit:.4g}): the engine sampled from other weights, another "
                f"temperature or other tokens than those being trained. {end}"
            )

    def check_learned(self, metrics: Mapping[str, float]) -> None:
        """Check after an update that the optimizer did its work, and that it has done so in every step of the run."""
        error = metrics.get("train/step_error", 0.0)
        if not self._note("weights_moved", error <= MAX_STEP_ERROR, error, MAX_STEP_ERROR):
            raise InvariantError(
                f"the optimizer's steps differ from those of the settings of the run by {error:.2g} of their length (limit "
                f"{MAX_STEP_ERROR:g}; 1: no weight has changed): another learning rate, decay or limit of the gradient acts"
            )
        steps, counted = metrics.get("train/optimizer_steps", 0.0), metrics.get("train/adam_steps")
        lost = None if counted is None or self.adam_steps is None else self.adam_steps + steps - counted
        if not self._note("optimizer_counts", not lost, lost, 0):
            raise InvariantError(
                f"the run has taken {(self.adam_steps or 0) + steps:g} optimizer steps, but its averages hold {counted:g}: "
                f"they were lost or belong to another run"
            )
        self.adam_steps = counted

    def check_probe(
        self, probe: EngineProbe, replies: Sequence[Completion], learner: Learner, groups: Sequence[Sequence[Trajectory]] = ()
    ) -> dict[str, float]:
        """Compare a probe's replies, and tokens of some chains, with the learner's distributions. Returns what was measured.

        The learner's weights must be those that were published when the probe was asked. Where chains are older than the
        weights, only the probe tests the sampler.
        """
        drawn = [(reply, numbers) for reply, numbers in probe.draws(replies) if _is_new(reply, learner.version)]
        replies = [reply for reply in replies[: probe.num_replies] if _is_new(reply, learner.version)]
        chains = [] if self.max_lag != 0 or self.truncates else [chain for group in groups for chain in group]
        rows = [row_of([(probe.prompt_ids, reply.token_ids, reply.logprobs)]) for reply in replies]
        rows += sampler_rows(chains, EARLY_TOKENS if learner.version < EARLY and probe.uniforms is None else 0)
        rows += [row_of([(probe.prompt_ids[:DRAW_PROMPT], reply.token_ids, reply.logprobs)]) for reply, _ in drawn]
        if not rows:
            return {}
        num_drawn = 0 if self.truncates else len(rows) - (0 if probe.independent else len(replies))
        fit = learner.examine(rows, num_drawn, [number for _, numbers in drawn for number in numbers])
        metrics = self._check_drawn(fit, rows[len(rows) - num_drawn :]) if num_drawn else {}
        if not replies:
            return metrics
        own = fit.logprobs[: len(replies)]
        gaps = [
            abs(a - b) for reply, scores in zip(replies, own, strict=True) for a, b in zip(scores, reply.logprobs, strict=True)
        ]
        gap = sum(gaps) / len(gaps)
        self.first_probe = gap if self.first_probe is None else self.first_probe
        moved = probe.compare(replies, own)
        fits = self.fresh.add(moved, self.first_probe) and not (
            self.bounds is FULL and is_partly_stale(moved, self.first_probe)
        )
        if not self._note("engine_fresh", fits, self.fresh.share if self.fresh.variance else None):
            raise InvariantError(
                f"the engine's log-probs of a probe do not fit version {learner.version} of the weights, but lie at "
                f"{self.fresh.share:.2f} of the way to it from those before the last update: updates, or a part of them, do "
                f"not reach what it samples from"
            )
        if self.max_lag == 0:  # the gap of the chains themselves tells more
            return metrics
        sentence = "the engine's and the learner's log-probs of a probe differ"
        self._check_gap("probe_gap", gap, sentence, "The weights were not changed")
        return metrics | {"ledger/probe_gap": gap}

    def _check_drawn(self, fit: TokenFit, rows: Sequence[Sample]) -> dict[str, float]:
        sampled = [value for row in rows for value in row.logprobs[row.mask].tolist()]
        own = [value for scores in fit.logprobs[len(fit.logprobs) - len(rows) :] for value in scores]
        fits = self.drawn.add(fit, sum((a - b) ** 2 for a, b in zip(sampled, own, strict=True)))
        if not self._note("whole_distribution", fits, self.drawn.value, PROOF):
            if self.drawn.astray > MOST_ASTRAY:
                raise InvariantError(
                    f"{self.drawn.astray} tokens are not those at which the learner's distribution arrives with the random "
                    f"numbers of their seeds: the engine draws from another distribution than the one whose log-probs it "
                    f"records. The weights were not changed"
                )
            raise InvariantError(
                f"the tokens of the run fit a sampler with {self.drawn.sampler} better than the learner's distribution (by "
                f"{self.drawn.value:.0f} nats, limit {PROOF:g}): the engine draws from another distribution than the one whose "
                f"log-probs it records. The weights were not changed"
            )
        return {"ledger/sampler_evidence": max(0.0, self.drawn.value), "ledger/sampler_tokens": float(len(own))}

    def check_published(self, engine: TrainableEngine, learner: Learner) -> None:
        """Check after publishing that the engine samples from the learner's weights."""
        behind = learner.version - engine.version
        if not self._note("version_published", behind == 0, behind, 0):
            raise InvariantError(f"the engine samples from version {engine.version}, but the learner is at {learner.version}")
        if not self._note("same_model", engine.model is learner.model or self.copied):
            raise InvariantError("the engine's model is not the learner's: updates would never reach it")
        if not engine.shares_weights:
            proof = engine.proof
            late = None if proof is None else learner.version - proof.version
            if not self._note("handover_proven", late == 0, late, 0):
                raise InvariantError(f"no proof says that the engine's copy of the weights is version {learner.version}")
        if isinstance(engine, ReplicatedEngine):
            unproven = engine.unproven()
            if not self._note("replicas_proven", not unproven, len(unproven), 0):
                raise InvariantError(f"{', '.join(unproven)} did not prove version {learner.version} of the weights")
        stale = engine.stats().get("stale_hits", 0.0)
        if not self._note("stale_cache", not stale, stale, 0):
            raise InvariantError(f"the engine reused {stale:g} cached tokens of older weights for new requests")

    def _check_new(self, chains: Sequence[Trajectory]) -> None:
        names = [trajectory.id for trajectory in chains]
        twice = self._seen.intersection(names)
        if not self._note("chains_new", not twice, len(twice), 0):
            raise InvariantError(f"chain {min(twice)} was trained in an earlier step")
        self._seen.update(names)
        self._order.extend(names)
        while len(self._order) > REMEMBERED:
            self._seen.discard(self._order.popleft())

    def _check_versions(self, chains: Sequence[Trajectory], version: int) -> None:
        lags, problem = [0], None
        for trajectory in chains:
            lag, wrong = _examine_versions(trajectory, version, self.max_lag)
            lags.append(lag)
            problem = problem or wrong
        if not self._note("lag", problem is None, max(lags), self.max_lag):
            raise InvariantError(problem)
        scored = [chain.id for chain in chains if _failed(chain) and chain.reward is not None]
        if not self._note("failures_unscored", not scored, len(scored), 0):
            raise InvariantError(f"chain {scored[0]} ended in a failure of the world but has a reward")

    def _check_losses(self, chains: Sequence[Trajectory]) -> None:
        lost = [trajectory for trajectory in chains if not trajectory.trainable]
        share = len(lost) / max(1, len(chains))
        if self._note("failed_share", len(lost) <= self.max_failed_share * len(chains), share, self.max_failed_share):
            return
        why, count = Counter(trajectory.error or trajectory.outcome.value for trajectory in lost).most_common(1)[0]
        raise InvariantError(f"{len(lost)} of {len(chains)} chains are untrainable; the most common cause ({count}): {why}")


def _step_of(trajectory: Trajectory) -> str:
    """The step that a chain was drawn for: its name is t<step>-<position>-<chain>."""
    return trajectory.id.partition("-")[0]


def _examine_versions(trajectory: Trajectory, version: int, max_lag: int | None) -> tuple[int, str | None]:
    """The age of the chain's oldest token in versions, and what is wrong with its versions."""
    versions = [(min(drawn), max(drawn)) for turn in trajectory.turns if (drawn := turn.completion.versions)]
    if not versions:
        return 0, None
    oldest, newest = min(low for low, _ in versions), max(high for _, high in versions)
    if newest <= version and (max_lag is None or oldest >= version - max_lag):
        return version - oldest, None
    wrong = newest if newest > version else oldest
    allowed = f" and rollout.max_lag is {max_lag}" if max_lag else ""
    sentence = f"chain {trajectory.id} holds tokens of version {wrong}, but the weights are at {version}{allowed}"
    return version - oldest, sentence


def _is_new(reply: Completion, version: int) -> bool:
    return bool(reply.token_ids) and set(reply.versions) == {version}


def _failed(trajectory: Trajectory) -> bool:
    return trajectory.outcome in (Outcome.WORLD_FAILURE, Outcome.CANCELLED)
