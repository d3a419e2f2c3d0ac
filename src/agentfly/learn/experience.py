"""The sampled tokens of one step as flat tensors.

`gather` turns groups of trajectories into training rows and flat tensors with an entry per sampled token of all rows, in order.
The rows of a chain are adjacent, so a chain is one slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvariantError
from ..types import Sample, Trajectory
from .algorithms import Credit
from .algorithms.advantages import TokenValues
from .batching import Rows
from .samples import to_samples


@dataclass(slots=True)
class Experience:
    """The chains of one step. A tensor stays None until a setting needs it.

    `chain_of`, `turn_of` and `group_of` number the chain, the turn (over all chains) and the group of each token.
    """

    samples: list[Sample]
    trajectories: list[Trajectory]
    rows: Rows
    chain_rows: list[range]
    groups: list[int]
    num_groups: int
    num_untrainable: int
    rewards: TokenValues
    sampled: Tensor
    current: Tensor
    chain_of: Tensor
    turn_of: Tensor
    group_of: Tensor
    recomputed: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    @property
    def num_chains(self) -> int:
        return len(self.chain_rows)

    def tokens_of(self, chain: int) -> slice:
        rows = self.chain_rows[chain]
        return slice(int(self.rows.starts[rows.start]), int(self.rows.starts[rows.stop]))

    def num_tokens(self, chain: int) -> int:
        part = self.tokens_of(chain)
        return int(part.stop - part.start)

    def per_chain(self, flat: TokenValues) -> list[TokenValues]:
        """Split a flat array into one array per chain."""
        return [flat[self.tokens_of(chain)] for chain in range(self.num_chains)]

    def rows_with(self, chains: Sequence[int], wanted: Sequence[bool]) -> list[int]:
        return [row for chain in chains for row in self.chain_rows[chain] if wanted[row]]

    def set_credit(self, credit: Credit) -> int:
        """Store advantages and returns. Returns the number of groups whose advantages are all 0."""
        taught = {group for group, part in zip(self.groups, credit.advantages, strict=True) if part.any()}
        self.advantages = self._flat(credit.advantages, "an advantage")
        self.returns = None if credit.returns is None else self._flat(credit.returns, "a return")
        numbers = iter(self.advantages.tolist())
        for sample, positions in zip(self.samples, self.rows.positions, strict=True):
            for position in positions.tolist():
                sample.advantages[position] = next(numbers)
        return self.num_groups - len(taught)

    def _flat(self, chains: Sequence[TokenValues], what: str) -> Tensor:
        flat = np.concatenate(chains) if chains else np.zeros(0)
        if not np.isfinite(flat).all():
            raise InvariantError(f"{what} is not a finite number: the weights were not changed; check the rewards")
        return torch.as_tensor(flat, dtype=torch.float32, device=self.sampled.device)

    def rows_with_advantage(self) -> list[bool]:
        assert self.advantages is not None
        nonzero = (self.advantages != 0).cpu().numpy()
        starts = self.rows.starts
        return [bool(nonzero[starts[row] : starts[row + 1]].any()) for row in range(len(self.rows))]


def gather(groups: Sequence[Sequence[Trajectory]], *, version: int, device: torch.device) -> Experience:
    """Returns the trainable chains of all groups. `version` is that of the learner's weights.

    Raises InvariantError for a token of a newer version and for a reward that is not finite.
    """
    samples: list[Sample] = []
    kept: list[Trajectory] = []
    chain_rows: list[range] = []
    chain_groups: list[int] = []
    num_untrainable = 0
    for group, trajectories in enumerate(groups):
        for trajectory in trajectories:
            made = to_samples(trajectory)
            if not made:
                num_untrainable += 1
                continue
            if not math.isfinite(trajectory.total_reward):
                raise InvariantError(
                    f"chain {trajectory.id!r} has the reward {trajectory.total_reward}, which cannot be learned from"
                )
            chain_rows.append(range(len(samples), len(samples) + len(made)))
            chain_groups.append(group)
            kept.append(trajectory)
            samples += made
    rows = Rows(samples)
    versions = _pick([sample.versions for sample in samples], rows, np.int64)
    if len(versions) and versions.max() > version:
        raise InvariantError(
            f"a token was drawn by version {versions.max()} of the weights, but the learner is at version {version}: "
            "publish the learner's own version to the engine"
        )
    chain_of, turn_of = _owners(kept)
    return Experience(
        samples=samples,
        trajectories=kept,
        rows=rows,
        chain_rows=chain_rows,
        groups=chain_groups,
        num_groups=len(groups),
        num_untrainable=num_untrainable,
        rewards=_pick([sample.rewards for sample in samples], rows, np.float64),
        sampled=torch.as_tensor(_pick([sample.logprobs for sample in samples], rows, np.float32), device=device),
        current=torch.as_tensor(versions == version, device=device),
        chain_of=torch.as_tensor(chain_of, device=device),
        turn_of=torch.as_tensor(turn_of, device=device),
        group_of=torch.as_tensor(np.asarray(chain_groups, dtype=np.int64)[chain_of], device=device),
    )


def _owners(trajectories: Sequence[Trajectory]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the chain and the turn of each sampled token: rows hold the sampled tokens of the turns in order."""
    counts = [[len(turn.completion.token_ids) for turn in trajectory.turns] for trajectory in trajectories]
    every = np.array([count for chain in counts for count in chain], dtype=np.int64)
    per_chain = np.array([sum(chain) for chain in counts], dtype=np.int64)
    return np.repeat(np.arange(len(counts)), per_chain), np.repeat(np.arange(len(every)), every)


def _pick(lists: Sequence[Sequence[float]], rows: Rows, kind: type[np.generic]) -> NDArray[Any]:
    """Returns the values at the sampled positions of all rows, in one array."""
    parts = [np.asarray(values, dtype=kind)[where] for values, where in zip(lists, rows.positions, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=kind)
