"""What the ledger's checks of log-probs are made of: limits, statistics, and probes that the engine continues.

Each limit follows from the number format and the spread of the figures themselves, so that rounding raises no alarm in half
precision and a fault of a thousandth of a nat is found in float32.

    update -> version v, publish, ask ... replies of v -> the learner (still v) scores them -> update -> version v + 1 ...
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

from ..errors import RolloutError
from ..learn.samples import opening_row
from ..protocols import TrainableEngine
from ..types import Completion, Request, Sample, Sampling, TokenFit, Trajectory

SIGMAS = 6.0
"""Standard errors that a mean may be off."""
PROOF = 23.0
"""Evidence that proves another sampler: a sound run shows so much with a probability of e^-23, 1e-10, per step."""
EVERY, MOST_TOKENS = 31, 512
"""Of one chain in `EVERY`, the first tokens test the sampler: a forward pass of so few takes a hundredth of an update."""
EARLY, EARLY_TOKENS = 12, 1024
"""Before so many updates, chains with so many tokens in all test it: a sampler that is wrong is mostly wrong from the start.
Where draws with known numbers test it, such chains are not needed.
"""
PROMPT_TOKENS, REPLY_TOKENS = 24, 5
"""Tokens of a probe. Each token of the replies is a pass of the engine: several short replies cost less than a long one."""
CHAINS_PER_PROBE, MIN_PROBES, MAX_PROBES = 32, 4, 8
"""One probe for so many chains of a step, so that all of them cost about a hundredth of it."""
SAME_SEEDS = 8
"""Versions that are asked for with the same seeds."""
ALL_UNTIL = 8
"""So many versions are all asked for. Of the later ones two of four are, which halves the cost of the probes."""
DRAWS, DRAW_PROMPT, DRAW_SEED = 4, 4, 40_031
"""Replies with known uniform numbers, the tokens of their prompt, and their first seed; later ones follow. After so short a
prompt a model is unsure of the next token, so that a quarter of the tokens are others at 0.9 times the temperature.
"""
MOST_ASTRAY = 2
"""Tokens of a run that may not be those at their numbers. A sound run in float32 has none."""
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
    none counts more, so that no few decide. The noise of half precision favours neither side and averages out over updates, but
    not over the tokens of one update: they share a prompt, and so its rounding. If an update moved them by little more than the
    noise, all of them are one observation. Earlier updates count less with every further one: an engine that becomes stale late
    is found as well.
    """

    score: float = 0.0
    variance: float = 0.0
    share: float = math.nan

    FADES = 0.95
    ROUNDING = 1e-6
    SIGMAS = 5.0
    CLEAR = 4.0
    """How far beyond the noise an update must move the tokens so that each is an observation."""

    def add(self, tokens: Sequence[Moved], noise: float) -> bool:
        """Add the tokens of one update. Returns False if they, or all that were added, are of the weights before.

        `noise` is the mean difference of two log-probs of one token under the same weights, the engine's and the learner's.
        """
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
        if enough < self.CLEAR * noise:
            variance = score**2
        self.score = self.FADES * self.score + score
        self.variance = self.FADES**2 * self.variance + variance
        return score > -self.SIGMAS * math.sqrt(variance) and self.score > -self.SIGMAS * math.sqrt(self.variance)


def sampler_rows(chains: Iterable[Trajectory], room: int) -> list[Sample]:
    """Openings of the chains that test the sampler: of few, and of more until they have `room` tokens.

    Names choose them: chosen by reward, their tokens are no fair sample.
    """
    rows: list[Sample] = []
    for number, chain in sorted(((zlib.crc32(chain.id.encode()), chain) for chain in chains), key=itemgetter(0)):
        if (room > 0 or number % EVERY == 0) and (row := opening_row(chain, MOST_TOKENS)) is not None:
            rows.append(row)
            room -= len(row.token_ids)
    return rows


@dataclass(slots=True)
class Drawn:
    """Evidence that tokens were drawn from another distribution than the learner's: `value`, for the sampler in `sampler`.

    It is the logarithm of a likelihood ratio, added up over steps and never below 0: a fault that begins late is found as soon
    as one from the start. Under the learner's distribution each ratio has the mean 1, so evidence above x has a probability
    below e^-x for each step at which it may have begun, whatever the number of tokens and the shape of the distribution.
    `astray` counts the tokens that are not those at their numbers.
    """

    value: float = 0.0
    sampler: str = ""
    astray: int = 0
    ratios: dict[str, float] = field(default_factory=dict)
    ids: dict[float, Any] = field(default_factory=dict)

    def add(self, fit: TokenFit, rounding: float) -> bool:
        """Add the tokens of a step. Returns whether they may be the learner's.

        `rounding` is the sum of the squared differences of sampled and recomputed log-probs: so much may be due to it.
        """
        self.astray += fit.astray
        for name, ratio in fit.ratios.items():
            self.ratios[name] = max(0.0, self.ratios.get(name, 0.0) + ratio - rounding)
        name = max(self.ratios, key=self.ratios.__getitem__)
        self.value, self.sampler = self.ratios[name] - math.log(len(self.ratios)), name
        for often, change in fit.ids.items():
            grown = self.ids[often] = (change - rounding + self.ids.get(often, 0.0)).clip(min=0.0)
            value = float(grown.max()) - math.log(len(fit.ids) * len(grown))
            if value > self.value:
                self.value, self.sampler = value, f"{often:g} times as many tokens of id {int(grown.argmax())}"
        return self.value <= PROOF and self.astray <= MOST_ASTRAY


class EngineProbe:
    """Asks the engine to continue the beginning of a task's prompt after each update.

    The seeds are the same for `SAME_SEEDS` updates, so the replies of two versions begin alike. For the tokens that they have
    in common the log-probs under both versions are known: `Freshness` tells which of them the engine sampled with. The requests
    take the path of all chains. With new seeds, the replies are `independent` of all that were asked for before.

    With `uniforms` (see `SeededEngine`) it asks also for draws: short replies, each with another seed, that tell the sampler.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        num_chains: int = 1,
        uniforms: Callable[[int, int], Sequence[float]] | None = None,
    ) -> None:
        self.prompt_ids = list(prompt_ids[1 : 1 + PROMPT_TOKENS]) or [0]  # shares no cached beginning with a chain
        self.sampling = replace(sampling, max_tokens=REPLY_TOKENS, stop=(), stop_ids=())
        self.num_replies = max(MIN_PROBES, min(MAX_PROBES, num_chains // CHAINS_PER_PROBE))
        self.uniforms = uniforms
        self.version: int | None = None
        self._versions = self._asks = 0
        self._asked: asyncio.Task[list[Completion]] | None = None
        self._before: list[tuple[list[int], list[float]]] = []  # replies of the version before, with the learner's log-probs

    def ask(self, engine: TrainableEngine, version: int) -> None:
        """Request the replies without waiting for them, unless this version was asked for or is to be left out."""
        if version == self.version or self._asked is not None:
            return
        self.version = version
        self._versions += 1
        if self._versions > ALL_UNTIL and self._versions % 4 > 1:
            self._before = []  # replies are compared with those of the version directly before
            return
        self._asks += 1
        self._asked = asyncio.create_task(self._ask(engine, version))

    async def _ask(self, engine: TrainableEngine, version: int) -> list[Completion]:
        first = 20_011 + (self._asks - 1) // SAME_SEEDS * MAX_PROBES
        asked = [(self.prompt_ids, first + number) for number in range(self.num_replies)]
        asked += [(self.prompt_ids[:DRAW_PROMPT], seed) for seed in self._draw_seeds]
        names = [f"probe-{version}-{number}" for number in range(len(asked))]
        try:
            return await asyncio.gather(*(
                engine.generate(Request(list(ids), replace(self.sampling, seed=seed), session=name))
                for name, (ids, seed) in zip(names, asked, strict=True)
            ))  # fmt: skip
        finally:
            for name in names:
                engine.release(name)

    @property
    def _draw_seeds(self) -> list[int]:
        first = DRAW_SEED + DRAWS * self._asks
        return [] if self.uniforms is None else list(range(first, first + DRAWS))

    def draws(self, replies: Sequence[Completion]) -> list[tuple[Completion, Sequence[float]]]:
        """Returns the draws among the replies, each with the uniform numbers of its tokens."""
        drawn = zip(replies[self.num_replies :], self._draw_seeds, strict=True) if replies else ()
        return [(reply, self.uniforms(seed, len(reply.token_ids))) for reply, seed in drawn if self.uniforms is not None]

    @property
    def independent(self) -> bool:
        """Whether the replies were drawn with new seeds."""
        return self._asks % SAME_SEEDS == 1

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
        """Returns the tokens that these replies share with those of the version before. `own` are the learner's log-probs.

        Where replies begin alike, each token counts once.
        """
        moved: dict[tuple[int, ...], Moved] = {}
        for reply, new, (ids, old) in zip(replies, own, self._before, strict=False):
            for at, (sampled, after, before) in enumerate(zip(reply.logprobs, new, old, strict=False)):
                beginning = tuple(reply.token_ids[: at + 1])
                if beginning != tuple(ids[: at + 1]):
                    break
                moved.setdefault(beginning, Moved(sampled, after, before))
        self._before = [(list(reply.token_ids), list(scores)) for reply, scores in zip(replies, own, strict=True)]
        return list(moved.values())

    async def close(self) -> None:
        """Cancel requests that are under way."""
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.wait([self._asked])
