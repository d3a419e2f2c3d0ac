"""What the ledger's checks of log-probs are made of: limits, statistics, and probes that the engine continues.

Each limit follows from the number format and the spread of the figures themselves, so that rounding raises no alarm in half
precision and a fault of a thousandth of a nat is found in float32.

    update -> version v, publish, ask ... replies of v -> the learner (still v) scores them -> update -> version v + 1 ...
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import RolloutError
from ..protocols import TrainableEngine
from ..types import Completion, Request, Sampling

SIGMAS = 6.0
"""Standard errors that a mean may be off."""
UNLIKELY = 16.0
"""An observation with a probability below e to the minus this is a fault."""
TAILS = {"train/tail_10": 0.1, "train/tail_1": 0.01}
"""The metrics of the sampled tail, and what each is if the sampler draws from the whole distribution."""
PROMPT_TOKENS, REPLY_TOKENS = 24, 5
"""Tokens of a probe. Each token of the replies is a pass of the engine: several short replies cost less than a long one."""
CHAINS_PER_PROBE, MIN_PROBES, MAX_PROBES = 32, 4, 8
"""One probe for so many chains of a step, so that all of them cost about a hundredth of it."""
PROBE_S = 60.0
"""Seconds that a step waits for the replies."""


class Format(NamedTuple):
    """Bounds of the mean |sampled - recomputed log-prob|: `times` the run's first gap, but at least `low` and at most `high`.

    A mean signed difference below `bias` is rounding.
    """

    low: float
    high: float
    times: float
    bias: float


FULL = Format(low=1e-4, high=2e-3, times=100.0, bias=1e-4)
"""float32, and the engine computes with the learner's own weights. A sound run has 1e-7 to 1e-5."""
COPY = Format(low=0.02, high=0.05, times=10.0, bias=5e-3)
"""float32, and the engine has a copy of the weights, perhaps in another precision."""
HALF = Format(low=0.05, high=0.15, times=10.0, bias=5e-3)
"""Half precision, in which rounding alone gives 0.04 on an uncertain model."""


def format_of(*, in_full: bool, exact: bool) -> Format:
    """Returns the bounds for a number format. `exact` says that the engine computes with the learner's weights."""
    return HALF if not in_full else FULL if exact else COPY


def gap_limit(bounds: Format, first: float | None) -> float:
    """Returns the largest sound gap. `first` is the first one of the run, which may itself be faulty; None: not yet known."""
    return bounds.high if first is None or not math.isfinite(first) else min(bounds.high, max(bounds.low, bounds.times * first))


def is_biased(bounds: Format, gap: float, bias: float, error: float) -> bool:
    """Whether the log-probs differ in one direction: rounding differs in both."""
    return abs(bias) > max(bounds.bias, 0.5 * gap, SIGMAS * error)


def is_truncated(seen: float, num_tokens: float, expected: float) -> bool:
    """Whether too few of the tokens lie in a tail of the distribution that has the probability `expected`.

    Half of it is accepted: the tokens are those of groups whose rewards differ, and these are not a fair sample.
    """
    share, limit = seen / num_tokens if num_tokens else 1.0, 0.5 * expected
    if share >= limit:
        return False
    left = 0.0 if share == 0.0 else share * math.log(share / limit)
    divergence = left + (1.0 - share) * math.log((1.0 - share) / (1.0 - limit))
    return num_tokens * divergence > UNLIKELY


class Moved(NamedTuple):
    """Log-probs of one token: the engine's, and the learner's under its newest weights and the weights before."""

    engine: float
    new: float
    old: float


def is_partly_stale(tokens: Sequence[Moved], first: float) -> bool:
    """Whether a part of the last update did not reach the engine, in float32: rounding is far below what an update moves.

    `first` is the mean difference of engine and learner at the run's first probe.
    """
    apart = sum(abs(token.engine - token.new) for token in tokens)
    return apart > max(0.1 * sum(abs(token.new - token.old) for token in tokens), max(1e-5, 30.0 * first) * len(tokens))


@dataclass(slots=True)
class Freshness:
    """Whether an engine's log-probs fit the new weights or those before, collected over updates.

    Each token says -1 (the previous weights) to 1 (the new ones). Tokens that the update moved less than the median count less;
    none counts more, so that no few decide. The noise of half precision favours neither side and averages out. Earlier updates
    count less with every further one: an engine that becomes stale late is found as well.
    """

    score: float = 0.0
    variance: float = 0.0
    share: float = math.nan

    FADES = 0.95
    ROUNDING = 1e-6
    SIGMAS = 5.0

    def add(self, tokens: Sequence[Moved]) -> bool:
        """Add the tokens of one update. Returns False if they, or all that were added, are of the weights before."""
        kept = [token for token in tokens if abs(token.new - token.old) > self.ROUNDING]
        if not kept:
            return True
        enough = sorted(abs(token.new - token.old) for token in kept)[len(kept) // 2]
        score = variance = total = 0.0
        for engine, new, old in kept:
            weight = min(abs(new - old), enough) / enough
            says = max(-1.0, min(1.0, (2.0 * engine - new - old) / (new - old)))
            score, variance, total = score + weight * says, variance + (weight * says) ** 2, total + weight
        self.share = 0.5 + 0.5 * score / total
        self.score = self.FADES * self.score + score
        self.variance = self.FADES**2 * self.variance + variance
        return score > -self.SIGMAS * math.sqrt(variance) and self.score > -self.SIGMAS * math.sqrt(self.variance)


class Probe:
    """Asks the engine to continue the beginning of a task's prompt after each update.

    The seeds are the same each time, so the replies of two versions begin alike. For the tokens that they have in common the
    log-probs under both versions are known: `Freshness` tells which of them the engine sampled with. The requests take the path
    of all chains.
    """

    def __init__(self, prompt_ids: Sequence[int], sampling: Sampling, num_chains: int = 1) -> None:
        self.prompt_ids = list(prompt_ids[1 : 1 + PROMPT_TOKENS]) or [0]  # shares no cached beginning with a chain
        self.sampling = replace(sampling, max_tokens=REPLY_TOKENS, stop=(), stop_ids=())
        self.num_replies = max(MIN_PROBES, min(MAX_PROBES, num_chains // CHAINS_PER_PROBE))
        self.version: int | None = None
        self._asked: asyncio.Task[list[Completion]] | None = None
        self._before: list[tuple[list[int], list[float]]] = []  # replies of the version before, with the learner's log-probs

    def ask(self, engine: TrainableEngine, version: int) -> None:
        """Request the replies without waiting for them, unless this version was asked for."""
        if version != self.version and self._asked is None:
            self.version = version
            self._asked = asyncio.create_task(self._ask(engine, version))

    async def _ask(self, engine: TrainableEngine, version: int) -> list[Completion]:
        names = [f"probe-{version}-{number}" for number in range(self.num_replies)]
        try:
            return await asyncio.gather(*(
                engine.generate(Request(list(self.prompt_ids), replace(self.sampling, seed=20_011 + number), session=name))
                for number, name in enumerate(names)
            ))  # fmt: skip
        finally:
            for name in names:
                engine.release(name)

    async def settle(self) -> None:
        """Wait until the requests have ended: beside chains they would change the rounding of the chains' log-probs."""
        if self._asked is not None:
            await asyncio.wait([self._asked], timeout=PROBE_S)

    async def replies(self) -> list[Completion]:
        """Wait for what was requested. Returns nothing if nothing was, or if the engine failed."""
        asked, self._asked = self._asked, None
        try:
            async with asyncio.timeout(PROBE_S):
                return [] if asked is None else await asked
        except (RolloutError, TimeoutError):  # a failed engine ends the chains that it serves; a failed probe proves nothing
            self.version = None
            return []

    def compare(self, replies: Sequence[Completion], own: Sequence[list[float]]) -> list[Moved]:
        """Returns the tokens that these replies share with those of the version before. `own` are the learner's log-probs."""
        found = []
        for reply, new, (ids, old) in zip(replies, own, self._before, strict=False):
            for token, sampled, after, former, before in zip(reply.token_ids, reply.logprobs, new, ids, old, strict=False):
                if token != former:
                    break
                found.append(Moved(sampled, after, before))
        self._before = [(list(reply.token_ids), list(scores)) for reply, scores in zip(replies, own, strict=True)]
        return found

    async def close(self) -> None:
        """Cancel requests that are under way."""
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.wait([self._asked])
