"""The sampled tokens of one step as flat tensors.

`gather` turns groups of trajectories into training rows and flat tensors with an entry per sampled token of all rows, in order.
The rows of a chain are adjacent, so a chain is one slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvariantError
from ..rows import turns_by_row
from ..types import Sample, TokenRecord, Trajectory
from .algorithms import Credit
from .algorithms.advantages import TokenValues
from .batching import MicroBatch, Rows
from .group import LearnerGroup
from .samples import check_chains, rows_of_chains


@dataclass(slots=True)
class Experience:
    """The chains of one step. A tensor stays None until a setting needs it.

    `current` marks the tokens that the learner's version drew, over keys and values of its own; `fresh` the tokens of chains
    that it drew completely. `inexact` marks the trained tokens whose probabilities the sampler computed with other weights or
    other kernels (None: no token).

    `chain_of`, `turn_of` and `group_of` number the chain, the turn (over all chains) and the group of each token. `owners` is
    `chain_of` as an array. `lags` counts the versions from the weights that drew a token to the learner's.

    A token is trained if its lag is at most `window` and `loss.truncated` does not mask its chain. `trained` is None if every
    token is. The others keep their rewards, their values and their part in every baseline, but get no loss.

    `used`, `own`, `entropies` and `last` are for the records of a run: the tokens that were in the loss of a gradient step, the
    log-probs and entropies that its passes computed, and the log-probs of the last of several optimizer steps (NaN elsewhere).
    """

    samples: list[Sample]
    trajectories: list[Trajectory]
    rows: Rows
    chain_rows: list[range]
    groups: list[int]
    num_groups: int
    num_untrainable: int
    rewards: TokenValues
    owners: NDArray[np.int64]
    lags: NDArray[np.int64]
    window: int | None
    trained: NDArray[np.bool_] | None
    sampled: Tensor
    current: Tensor
    fresh: Tensor
    inexact: Tensor | None
    chain_of: Tensor
    turn_of: Tensor
    group_of: Tensor
    recomputed: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    with_advantage: NDArray[np.bool_] | None = None
    returns: Tensor | None = None
    used: Tensor | None = None
    own: Tensor | None = None
    entropies: Tensor | None = None
    last: Tensor | None = None

    @property
    def num_chains(self) -> int:
        return len(self.chain_rows)

    def tokens_of(self, chain: int) -> slice:
        rows = self.chain_rows[chain]
        return slice(int(self.rows.starts[rows.start]), int(self.rows.starts[rows.stop]))

    @property
    def num_trained(self) -> NDArray[np.int64]:
        """The number of trained tokens of each chain."""
        return np.bincount(self.owners if self.trained is None else self.owners[self.trained], minlength=self.num_chains)

    def metrics(self) -> dict[str, float]:
        """Returns what is known before an update, named in `metrics.METRICS`. As yet no group has an advantage."""
        counts = {
            "train/samples": float(len(self.rows)),
            "train/tokens": float(self.rows.num_tokens),
            "train/splits": float(len(self.rows) - self.num_chains),
            "train/untrainable_chains": float(self.num_untrainable + (self.num_trained == 0).sum()),
            "train/zero_advantage_groups": float(self.num_groups),
            "train/masked_tokens": float(0 if self.trained is None else (~self.trained).sum()),
        }
        lags = self.lags if self.trained is None else self.lags[self.trained]
        return counts | ({"train/lag_mean": float(lags.mean()), "train/lag_max": float(lags.max())} if len(lags) else {})

    def trained_values(self, values: Tensor, tokens: Tensor | slice = slice(None)) -> Tensor:
        """Returns the entries of the trained tokens. `tokens` are the numbers of the tokens in `values`."""
        return values if self.trained is None else values[torch.as_tensor(self.trained, device=values.device)[tokens]]

    def only_trained(self, batch: MicroBatch) -> MicroBatch:
        """Returns the micro batch without the predictions of tokens outside the window. They remain as context."""
        if self.trained is None:
            return batch
        keep = torch.as_tensor(self.trained, device=batch.tokens.device)[batch.tokens]
        return replace(batch, where=batch.where[keep], targets=batch.targets[keep], tokens=batch.tokens[keep])

    def check_window(self, batches: Sequence[MicroBatch]) -> None:
        """Raises InvariantError if one of these micro batches would train a token outside the window."""
        if self.window is None or self.lags.max(initial=0) <= self.window:
            return
        for batch in batches:
            worst = int(self.lags[batch.tokens.cpu().numpy()].max(initial=0))
            if worst > self.window:
                raise InvariantError(
                    f"a token that is {worst} versions old would be trained, but the window is {self.window}: this optimizer "
                    "step was not applied"
                )

    def per_chain(self, flat: TokenValues) -> list[TokenValues]:
        """Split a flat array into one array per chain."""
        return [flat[self.tokens_of(chain)] for chain in range(self.num_chains)]

    def rows_with(self, chains: Sequence[int], wanted: Sequence[bool]) -> list[int]:
        return [row for chain in chains for row in self.chain_rows[chain] if wanted[row]]

    def set_credit(self, credit: Credit) -> int:
        """Store advantages and returns. Returns the number of groups whose trained tokens all have the advantage 0."""
        advantages = self._flat(credit.advantages, "an advantage")
        self.with_advantage = advantages != 0 if self.trained is None else (advantages != 0) & self.trained
        rows = self.rows_with_advantage()
        taught = {group for group, own in zip(self.groups, self.chain_rows, strict=True) if any(rows[own.start : own.stop])}
        stored = advantages.astype(np.float32)
        for sample, positions, start in zip(self.samples, self.rows.positions, self.rows.starts[:-1], strict=True):
            sample.advantages[positions] = stored[start : start + len(positions)]
        self.advantages = torch.as_tensor(stored, device=self.sampled.device)
        if credit.returns is not None:
            returns = self._flat(credit.returns, "a return").astype(np.float32)
            self.returns = torch.as_tensor(returns, device=self.sampled.device)
        return self.num_groups - len(taught)

    def _flat(self, chains: Sequence[TokenValues], what: str) -> TokenValues:
        flat: TokenValues = np.concatenate(chains) if chains else np.zeros(0)
        if not np.isfinite(flat).all():
            raise InvariantError(f"{what} is not a finite number: the weights were not changed; check the rewards")
        return flat

    def rows_with_advantage(self) -> list[bool]:
        """Whether each row has a trained token with an advantage."""
        assert self.with_advantage is not None
        return self._any_per_row(self.with_advantage)

    def rows_with_trained(self) -> list[bool]:
        """Whether each row has a trained token."""
        return [True] * len(self.rows) if self.trained is None else self._any_per_row(self.trained)

    @torch.no_grad()
    def keep(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Note the log-probs of the weights before the update."""
        if self.own is None:
            self.own = torch.full_like(self.sampled, math.nan)
        self.own[tokens] = logprobs.detach().to(self.own.dtype)

    @torch.no_grad()
    def keep_last(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Note the log-probs of an optimizer step after the first one."""
        if self.last is None:
            self.last = torch.full_like(self.sampled, math.nan)
        self.last[tokens] = logprobs.detach().to(self.last.dtype)

    @torch.no_grad()
    def keep_entropies(self, tokens: Tensor, entropies: Tensor | None) -> None:
        if entropies is not None:
            if self.entropies is None:
                self.entropies = torch.full_like(self.sampled, math.nan)
            self.entropies[tokens] = entropies.detach().to(self.entropies.dtype)

    @torch.no_grad()
    def use(self, tokens: Tensor) -> None:
        """Note tokens whose log-probs received a gradient."""
        if self.used is None:
            self.used = torch.zeros_like(self.current)
        self.used[tokens] = True

    @torch.no_grad()
    def share_notes(self, group: LearnerGroup) -> None:
        """Give every rank the notes of all ranks, so that rank 0 can record them."""
        if group.size == 1:
            return

        def mean_over_ranks(values: Tensor | None) -> Tensor:
            """The mean over the ranks that noted a value; NaN if none did."""
            values = torch.full_like(self.sampled, math.nan) if values is None else values
            counts = group.sum((~values.isnan()).to(values.dtype))
            return group.sum(values.nan_to_num(0.0)) / counts

        used = torch.zeros_like(self.sampled) if self.used is None else self.used.to(self.sampled.dtype)
        self.used = group.sum(used) > 0
        self.own, self.last = mean_over_ranks(self.own), mean_over_ranks(self.last)
        self.entropies = mean_over_ranks(self.entropies)

    def records(self) -> list[TokenRecord]:
        """What the update did with each chain. A series whose values are all equal or all unknown is left out."""
        used = np.zeros(len(self.owners), dtype=np.uint8) if self.used is None else self.used.cpu().numpy().astype(np.uint8)
        advantages = None if self.advantages is None else self.advantages.cpu().numpy().astype("<f4")
        noted = [
            ("trainer_logprob", "f", self.own), ("reference_logprob", "f", self.reference), ("value", "f", self.values),
            ("entropy", "e", self.entropies), ("last_logprob", "f", self.last),
        ]  # fmt: skip
        series_of = [
            (name, kind, tensor.float().cpu().numpy().astype(f"<{kind}")) for name, kind, tensor in noted if tensor is not None
        ]
        records = []
        for chain, trajectory in enumerate(self.trajectories):
            part = self.tokens_of(chain)
            trained, series = used[part], {}
            count = int(trained.sum())
            if 0 < count < len(trained):
                series["trained"] = ("B", trained.tobytes())
            mean: float | None = None
            if advantages is not None:
                given = advantages[part]
                mean = float(given.mean(dtype=np.float64))
                if len(given) and (given != given[0]).any():
                    series["advantage"] = ("f", given.tobytes())
            for name, kind, values in series_of:
                if not np.isnan(values[part]).all():
                    series[name] = (kind, values[part].tobytes())
            records.append(TokenRecord(trajectory.id, mean, count, series))
        return records

    def _any_per_row(self, flags: NDArray[np.bool_]) -> list[bool]:
        any_per_row: list[bool] = np.logical_or.reduceat(flags, self.rows.starts[:-1]).tolist() if len(self.rows) else []
        return any_per_row


def gather(
    groups: Sequence[Sequence[Trajectory]],
    *,
    version: int,
    device: torch.device,
    window: int | None = None,
    exact: bool = True,
    recomputes: bool = False,
    truncated: Literal["train", "mask"] = "train",
) -> Experience:
    """Returns the trainable chains of all groups. `version` is that of the learner's weights.

    `exact` says that tokens of this version were drawn with the very probabilities that the learner computes. `recomputes` says
    so of the rest of a reply that older weights began, too: its keys and values were computed again. `truncated` is
    `loss.truncated`.

    Raises InvariantError for rows that are not what the engine sampled (`check_chains`), for a token of a newer version and for
    a reward that is not finite.
    """
    samples: list[Sample] = []
    trainable: list[Trajectory] = []
    chain_rows: list[range] = []
    chain_groups: list[int] = []
    chains = [(group, trajectory) for group, trajectories in enumerate(groups) for trajectory in trajectories]
    every = [trajectory for _, trajectory in chains]
    made = rows_of_chains(every)
    check_chains(every, made)  # the versions are checked below
    for (group, trajectory), own in zip(chains, made, strict=True):
        if not own:
            continue
        if not math.isfinite(trajectory.total_reward):
            raise InvariantError(
                f"chain {trajectory.id!r} has the reward {trajectory.total_reward}, which cannot be learned from"
            )
        chain_rows.append(range(len(samples), len(samples) + len(own)))
        chain_groups.append(group)
        trainable.append(trajectory)
        samples += own
    rows = Rows(samples)
    mask = np.concatenate([np.zeros(0, dtype=np.bool_), *(sample.mask for sample in samples)])
    versions = _pick([sample.versions for sample in samples], mask, np.int64)
    if len(versions) and versions.max() > version:
        raise InvariantError(
            f"a token was drawn by version {versions.max()} of the weights, but the learner is at version {version}: "
            "publish the learner's own version to the engine"
        )
    lags = version - versions
    owners, turn_of = _owners(trainable)
    inside = None if window is None else lags <= window
    if truncated == "mask":
        whole = ~np.array([trajectory.outcome.truncated for trajectory in trainable], dtype=np.bool_)[owners]
        inside = whole if inside is None else inside & whole
    old = lags > 0
    if not recomputes and old.any():  # the rest of such a reply attends to keys and values of older weights
        old = np.bincount(turn_of, weights=old)[turn_of] > 0
    inexact = (old if exact else np.ones(len(lags), dtype=np.bool_)) & (True if inside is None else inside)
    stale = np.bincount(owners, weights=lags > 0, minlength=len(trainable)) > 0
    return Experience(
        samples=samples,
        trajectories=trainable,
        rows=rows,
        chain_rows=chain_rows,
        groups=chain_groups,
        num_groups=len(groups),
        num_untrainable=len(chains) - len(trainable),
        rewards=_pick([sample.rewards for sample in samples], mask, np.float64),
        owners=owners,
        lags=lags,
        window=window,
        trained=None if inside is None or inside.all() else inside,
        sampled=torch.as_tensor(_pick([sample.logprobs for sample in samples], mask, np.float32), device=device),
        current=torch.as_tensor(~old, device=device),
        fresh=torch.as_tensor(~stale[owners], device=device),
        inexact=torch.as_tensor(inexact, device=device) if inexact.any() else None,
        chain_of=torch.as_tensor(owners, device=device),
        turn_of=torch.as_tensor(turn_of, device=device),
        group_of=torch.as_tensor(np.asarray(chain_groups, dtype=np.int64)[owners], device=device),
    )


def _owners(trajectories: Sequence[Trajectory]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the chain and the turn of each sampled token, row by row."""
    counts = [[len(turn.completion.token_ids) for turn in turns_by_row(trajectory)] for trajectory in trajectories]
    every = np.array([count for chain in counts for count in chain], dtype=np.int64)
    per_chain = np.array([sum(chain) for chain in counts], dtype=np.int64)
    return np.repeat(np.arange(len(counts)), per_chain), np.repeat(np.arange(len(every)), every)


def _pick(arrays: Sequence[NDArray[Any]], mask: NDArray[np.bool_], kind: type[np.generic]) -> NDArray[Any]:
    """Returns the values at the sampled positions of all rows, in one array."""
    return np.concatenate(arrays)[mask].astype(kind, copy=False) if arrays else np.zeros(0, dtype=kind)
