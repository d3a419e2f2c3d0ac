"""Sample chains for trackers: a few rows of a step, with the conversation as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..display import visible
from ..types import Trajectory

NUM_CHAINS = 8
EVERY = 10
"""Training chains are sampled at the first step and at every tenth; held-out chains at each validation."""
MAX_TEXT = 10_000


def wants_samples(split: str, step: int) -> bool:
    """Whether chains of this step are sampled."""
    return split != "train" or step == 1 or step % EVERY == 0


def sample_rows(chains: Sequence[Trajectory], step: int) -> list[dict[str, Any]]:
    """The best and the worst chain, and others spread over the rest, as rows of one shape."""
    ranked = sorted(chains, key=lambda chain: (chain.scored, chain.total_reward), reverse=True)
    count = min(NUM_CHAINS, len(ranked))
    chosen = [ranked[index * (len(ranked) - 1) // max(1, count - 1)] for index in range(count)]
    return [
        {
            "step": step,
            "id": chain.id,
            "task": chain.task.id,
            "outcome": chain.outcome.value,
            "reward": chain.total_reward if chain.scored else None,
            "turns": len(chain.turns),
            "tokens": chain.num_sampled,
            "prediction": _cut(chain.prediction),
            "conversation": _cut("\n".join(f"[{message.role}] {message.content}" for message in chain.messages)),
        }
        for chain in chosen
    ]


def _cut(text: str) -> str:
    return visible(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... {len(text) - MAX_TEXT} more characters")
