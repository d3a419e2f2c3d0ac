"""Rows for a reference that reads more than the policy: a hint in its prompt, and then the very ids that were sampled.

policy's row     P P q q e  A A  o o  B B      P prompt, q question, e its end, A B sampled, o observation
reference's row  P P q q h h h e  A A  o o  B B      h hint
scored                            A A       B B      the same tokens, in the same order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ConfigError
from ..types import Sample, Trajectory
from .batching import Rows
from .experience import Experience

Prompts = Callable[[Trajectory], tuple[Sequence[int], Sequence[int]]]
"""Of a chain: the ids of its prompt, and those with the hint."""


def hinted_rows(experience: Experience, prompts: Prompts, max_tokens: int) -> Rows:
    """Returns the rows of the reference. Raises ConfigError if a prompt is not at the beginning of a row, or for a long row."""
    samples: list[Sample] = []
    made: dict[tuple[int, tuple[int, ...]], tuple[Sequence[int], Sequence[int]]] = {}
    for chain, trajectory in enumerate(experience.trajectories):
        rows = experience.chain_rows[chain]
        key = experience.groups[chain], tuple(trajectory.turns[0].context_ids)  # siblings have one prompt
        if key not in made:
            made[key] = prompts(trajectory)
        plain, hinted = made[key]
        if tuple(plain) != key[1]:
            raise ConfigError(f"loss.reference_hint: the prompt of chain {trajectory.id} is not rendered alike a second time")
        samples += [with_prompt(sample, plain, hinted) for sample in experience.samples[rows.start : rows.stop]]
        if (longest := max(len(sample.token_ids) for sample in samples[rows.start :])) > max_tokens:
            raise ConfigError(
                f"loss.reference_hint makes chain {trajectory.id} {longest} tokens long, and the model reads {max_tokens}: "
                "shorten the hint, or lower agent.max_context"
            )
    return Rows(samples)


def with_prompt(sample: Sample, plain: Sequence[int], other: Sequence[int], key: str = "loss.reference_hint") -> Sample:
    """Returns a row whose ids of the prompt are exchanged where the two prompts differ. Sampled ids stay as they are.

    A row that begins after a template rewrote the history has the prompt up to there, too. `key` asks for the exchange.
    """
    shorter = min(len(plain), len(other))
    start = next((at for at in range(shorter) if plain[at] != other[at]), shorter)
    same = next((at for at in range(shorter - start) if plain[-1 - at] != other[-1 - at]), shorter - start)
    stop = len(plain) - same
    if sample.token_ids[:stop].tolist() != list(plain[:stop]) or sample.mask[:stop].any():
        raise ConfigError(
            f"the chat template rewrites the prompt of chain {sample.trajectory} in a later turn, so that {key} "
            "has no place in it: choose another chat template, or remove it"
        )
    added = np.asarray(other[start : len(other) - same], dtype=np.int64)
    ids = np.concatenate([sample.token_ids[:start], added, sample.token_ids[stop:]])
    mask = np.concatenate([sample.mask[:start], np.zeros(len(added), dtype=np.bool_), sample.mask[stop:]])
    nothing = np.zeros(len(ids))
    return Sample(ids, mask, nothing, nothing, nothing, nothing, group=sample.group, trajectory=sample.trajectory)
