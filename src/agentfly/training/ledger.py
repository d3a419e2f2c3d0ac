"""The books of a run: promises that are checked at every step, so that a silent bug becomes a sentence.

Each check raises `InvariantError`. What is promised:
- every chain that was admitted came back, with an outcome, as one of the siblings it was admitted with;
- every token that is trained on was drawn by the weights that are being updated (version, and log-probs that agree);
- a training row's mask covers the sampled tokens of its chain, all of them and nothing else;
- after an update the engine samples from the new version, and its weights are the learner's own, or proven to be equal;
- a step has something to learn from: a run that loses its chains to the world stops and says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvariantError
from ..learn.samples import to_samples
from ..types import Engine, Outcome, Trajectory

NOT_NEEDED = object()  # an engine without `proof` shares its weights with the learner


class Ledger:
    def __init__(self, *, max_logprob_gap: float, max_failed_share: float) -> None:
        self.max_logprob_gap = max_logprob_gap
        self.max_failed_share = max_failed_share
        self.admitted = 0
        self.returned: Counter[str] = Counter()

    def check_rollout(self, groups: Sequence[Sequence[Trajectory]], *, num_tasks: int, num_chains: int, version: int) -> None:
        """After sampling, before learning."""
        self.admitted += num_tasks * num_chains
        chains = [trajectory for group in groups for trajectory in group]
        self.returned.update(trajectory.outcome.value for trajectory in chains)
        if self.returned.total() != self.admitted:
            raise InvariantError(f"{self.admitted} chains were admitted so far but {self.returned.total()} came back")
        for group in groups:
            if len({trajectory.task.id for trajectory in group}) != 1 or len({t.chain for t in group}) != num_chains:
                raise InvariantError("a group holds chains of different tasks, or one chain twice: advantages would be wrong")
        for trajectory in chains:
            _check_tokens(trajectory, version)
        self._check_losses(chains)

    def check_update(self, metrics: Mapping[str, float]) -> None:
        """After learning: the learner saw the same probabilities as the engine."""
        gap = metrics.get("train/logprob_gap", 0.0)
        if not gap <= self.max_logprob_gap:
            raise InvariantError(
                f"sampled and recomputed log-probs differ by {gap:.4f} nats on average (limit {self.max_logprob_gap}): the "
                f"engine sampled from other weights, another temperature or other tokens than those being trained"
            )

    def check_published(self, engine: Engine, learner: Any) -> None:
        """After publishing: the next token comes from the new weights."""
        if engine.version != learner.version:
            raise InvariantError(f"the engine samples from version {engine.version}, but the learner is at {learner.version}")
        if getattr(engine, "model", learner.model) is not learner.model:
            raise InvariantError("the engine's weights are not the learner's: updates would never reach it")
        proof: Any = getattr(engine, "proof", NOT_NEEDED)
        if proof is not NOT_NEEDED and (proof is None or proof.version != learner.version):
            raise InvariantError(f"nothing proves that the engine samples from version {learner.version}, and it holds its own")

    def _check_losses(self, chains: Sequence[Trajectory]) -> None:
        lost = [trajectory for trajectory in chains if not trajectory.trainable]
        if len(lost) <= self.max_failed_share * len(chains):
            return
        why, count = Counter(trajectory.error or trajectory.outcome.value for trajectory in lost).most_common(1)[0]
        raise InvariantError(f"{len(lost)} of {len(chains)} chains cannot be trained on; the commonest cause ({count}): {why}")


def _check_tokens(trajectory: Trajectory, version: int) -> None:
    sampled = [token for turn in trajectory.turns for token in turn.completion.token_ids]
    stale = {v for turn in trajectory.turns for v in turn.completion.versions} - {version}
    if stale:
        raise InvariantError(f"chain {trajectory.id} holds tokens of version {min(stale)}, but the weights are at {version}")
    if not trajectory.trainable:
        if trajectory.outcome in (Outcome.WORLD_FAILURE, Outcome.CANCELLED) and trajectory.reward is not None:
            raise InvariantError(f"chain {trajectory.id} was lost to the world but has a reward")
        return
    trained = [token for row in to_samples(trajectory) for token, mask in zip(row.token_ids, row.mask, strict=True) if mask]
    if trained != sampled:
        raise InvariantError(f"chain {trajectory.id}: the mask covers {len(trained)} tokens, but {len(sampled)} were sampled")
