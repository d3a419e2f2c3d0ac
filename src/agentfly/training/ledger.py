"""Invariants of a run, checked at every step. Each check raises `InvariantError`:

- every admitted chain returned, with an outcome, in the group it was admitted with;
- every trained token was drawn by the weights that are being updated (equal version, agreeing log-probs);
- the mask of a training row covers exactly the sampled tokens of its chain;
- after an update the engine samples from the new version, with the learner's weights or a proven copy of them;
- not more than `max_failed_share` of a step's chains are untrainable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..errors import InvariantError
from ..learn.samples import to_samples
from ..types import Learner, Outcome, TrainableEngine, Trajectory


class Ledger:
    """Counts chains over the whole run and checks each step."""

    def __init__(self, *, max_logprob_gap: float, max_failed_share: float) -> None:
        self.max_logprob_gap = max_logprob_gap
        self.max_failed_share = max_failed_share
        self.admitted = 0
        self.returned: Counter[str] = Counter()

    def check_rollout(self, groups: Sequence[Sequence[Trajectory]], *, num_tasks: int, num_chains: int, version: int) -> None:
        """Check one step's chains, after sampling and before learning."""
        self.admitted += num_tasks * num_chains
        chains = [trajectory for group in groups for trajectory in group]
        self.returned.update(trajectory.outcome.value for trajectory in chains)
        if self.returned.total() != self.admitted:
            raise InvariantError(f"{self.admitted} chains were admitted so far but {self.returned.total()} came back")
        drawn = Counter((group[0].task.id, group[0].draw) for group in groups if group)
        if repeated := [task for (task, _), count in drawn.items() if count > 1]:
            raise InvariantError(f"two groups hold the same draw of task {repeated[0]!r}: their chains have the same seeds")
        for group in groups:
            if (
                len({(trajectory.task.id, trajectory.draw) for trajectory in group}) != 1
                or len({t.chain for t in group}) != num_chains
            ):
                raise InvariantError("a group holds chains of different tasks, or one chain twice: advantages would be wrong")
        for trajectory in chains:
            _check_tokens(trajectory, version)
        self._check_losses(chains)

    def check_update(self, metrics: Mapping[str, float]) -> None:
        """Check that learner and engine computed the same log-probs; the learner calls it before the weights change."""
        gap = metrics.get("train/logprob_gap", 0.0)
        if not gap <= self.max_logprob_gap:
            raise InvariantError(
                f"sampled and recomputed log-probs differ by {gap:.4f} nats on average (limit {self.max_logprob_gap}): the "
                f"engine sampled from other weights, another temperature or other tokens than those being trained. "
                f"The weights were not changed"
            )

    def check_published(self, engine: TrainableEngine, learner: Learner) -> None:
        """Check after publishing that the engine samples from the learner's weights."""
        if engine.version != learner.version:
            raise InvariantError(f"the engine samples from version {engine.version}, but the learner is at {learner.version}")
        if engine.model is not learner.model:
            raise InvariantError("the engine's model is not the learner's: updates would never reach it")
        if not engine.shares_weights and (engine.proof is None or engine.proof.version != learner.version):
            raise InvariantError(f"no proof says that the engine's copy of the weights is version {learner.version}")

    def _check_losses(self, chains: Sequence[Trajectory]) -> None:
        lost = [trajectory for trajectory in chains if not trajectory.trainable]
        if len(lost) <= self.max_failed_share * len(chains):
            return
        why, count = Counter(trajectory.error or trajectory.outcome.value for trajectory in lost).most_common(1)[0]
        raise InvariantError(f"{len(lost)} of {len(chains)} chains are untrainable; the most common cause ({count}): {why}")


def _check_tokens(trajectory: Trajectory, version: int) -> None:
    sampled = [token for turn in trajectory.turns for token in turn.completion.token_ids]
    stale = {v for turn in trajectory.turns for v in turn.completion.versions} - {version}
    if stale:
        raise InvariantError(f"chain {trajectory.id} holds tokens of version {min(stale)}, but the weights are at {version}")
    if not trajectory.trainable:
        if trajectory.outcome in (Outcome.WORLD_FAILURE, Outcome.CANCELLED) and trajectory.reward is not None:
            raise InvariantError(f"chain {trajectory.id} ended in a failure of the world but has a reward")
        return
    trained = [token for row in to_samples(trajectory) for token, mask in zip(row.token_ids, row.mask, strict=True) if mask]
    if trained != sampled:
        raise InvariantError(f"chain {trajectory.id}: the mask covers {len(trained)} tokens, but {len(sampled)} were sampled")
