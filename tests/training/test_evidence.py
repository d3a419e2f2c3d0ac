"""The limits and statistics of the ledger: what is a fault, and what is rounding."""

from __future__ import annotations

import asyncio
import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentfly.engines.local import LocalEngine
from agentfly.engines.local.sampler import draw
from agentfly.learn.model.evidence import OFTEN, RATIOS, UNKNOWN, fit, token_fit
from agentfly.training.evidence import (
    ALL_UNTIL,
    COPY,
    DRAWS,
    EARLY_TOKENS,
    FULL,
    HALF,
    PROOF,
    Drawn,
    EngineProbe,
    Freshness,
    Moved,
    format_of,
    gap_limit,
    is_biased,
    sampler_rows,
)
from agentfly.types import Completion, Request, Sampling, TokenFit
from tests.learn.chains import chain_of_ids


def test_the_limit_of_the_gap_follows_from_the_format_and_the_first_gap() -> None:
    assert format_of(in_full=True, exact=True) is FULL
    assert format_of(in_full=True, exact=False) is COPY
    assert format_of(in_full=False, exact=True) is HALF
    assert gap_limit(FULL, None) == FULL.high == 2e-3
    assert gap_limit(FULL, 1.5e-7) == FULL.low
    assert gap_limit(FULL, 5e-6) == pytest.approx(5e-4)
    assert gap_limit(FULL, 9e-3) == FULL.high, "a first gap that is itself a fault"
    assert gap_limit(FULL, math.nan) == FULL.high
    assert gap_limit(HALF, 1e-3) == 0.05
    assert gap_limit(HALF, 0.01) == pytest.approx(0.1)
    assert gap_limit(HALF, 0.04) == 0.15


@pytest.mark.parametrize("seed", range(5))
def test_rounding_in_half_precision_has_no_direction(seed: int) -> None:
    chance = random.Random(seed)
    noise = [chance.gauss(0.0, 0.05) if chance.random() < 0.99 else chance.gauss(0.0, 1.0) for _ in range(2000)]
    count, bias = len(noise), sum(noise) / len(noise)
    gap, error = sum(map(abs, noise)) / count, math.sqrt(sum(each**2 for each in noise)) / count
    assert not is_biased(HALF, gap, bias, error)
    assert is_biased(HALF, gap, bias + 0.06, math.hypot(error, 0.06 / math.sqrt(count)))
    assert not is_biased(FULL, 1e-5, 1e-5, 1e-7), "below the rounding of float32"


VOCABULARY = 500


def drawn(seed: int, steps: int, change: Any = None, *, tokens: int = 100, noise: float = 0.0) -> tuple[Drawn, int | None]:
    """The evidence of a run over distributions of all shapes, and the step that finds another sampler.

    `change` makes the sampler's logits of the learner's. `noise` is the rounding of the sampler's.
    """
    chance, evidence = torch.Generator().manual_seed(seed), Drawn()
    common = torch.randn(VOCABULARY, generator=chance)
    common[7] = 3.0
    for step in range(steps):
        logits = torch.randn(tokens, VOCABULARY, generator=chance) + common
        logits *= 4.0 * torch.rand(tokens, 1, generator=chance)
        sampled = logits + noise * torch.randn(tokens, VOCABULARY, generator=chance)
        sampled = sampled if change is None else change(sampled)
        targets = torch.multinomial(torch.softmax(sampled, -1), 1, generator=chance)[:, 0]
        if not evidence.add(token_fit([], [fit(logits, targets, unknown(tokens))]), tokens * noise**2):
            return evidence, step
    return evidence, None


def unknown(count: int) -> torch.Tensor:
    return torch.full((count,), UNKNOWN)


def kept(share: float) -> Any:
    return lambda logits: logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(share), -torch.inf)


def weighted(factor: float) -> Any:
    """Another weight of an id that the learner draws often."""
    return lambda logits: logits.index_add(1, torch.tensor([7]), torch.full((len(logits), 1), math.log(factor)))


def test_every_likelihood_ratio_has_the_mean_1_under_the_learners_distribution() -> None:
    chance = torch.Generator().manual_seed(0)
    for scale in (0.0, 0.3, 1.0, 5.0, 40.0):
        logits = scale * torch.randn(1, 40, generator=chance).round(decimals=1)  # some are equal
        every = torch.stack([fit(logits, torch.tensor([each]), unknown(1)) for each in range(40)])
        every = torch.cat([every[:, : len(RATIOS)], every[:, len(RATIOS) + 1 :]], 1)  # without the count of strays
        means = (torch.softmax(logits, -1)[0, :, None] * every.exp()).sum(0)
        torch.testing.assert_close(means, torch.ones(len(RATIOS) + 40 * len(OFTEN)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_a_sound_sampler_leaves_no_evidence(seed: int, noise: float) -> None:
    evidence, found = drawn(seed, 150, noise=noise)
    assert found is None
    assert evidence.value < 0.5 * PROOF


@pytest.mark.parametrize(("change", "told", "steps"), [
    (lambda logits: logits / 0.6, "0.6 times the temperature", 12),
    (lambda logits: logits / 0.9, "0.9 times the temperature", 120),
    (lambda logits: logits / 1.1, "1.1 times the temperature", 120),
    (lambda logits: logits / 1.5, "1.[36] times the temperature", 12),
    (kept(0.05), "min_p = 0.05", 12),
    (kept(0.02), "min_p = 0.02", 25),
    (weighted(0.01), "0.1 times as many tokens of id 7", 60),
    (weighted(4.0), "4 times as many tokens of id 7", 60),
])  # fmt: skip
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_another_sampler_is_found_and_named(change: Any, told: str, steps: int, noise: float) -> None:
    evidence, found = drawn(5, steps, change, noise=noise)
    assert found is not None
    assert re.match(told, evidence.sampler)


@pytest.mark.parametrize("temperature", [1.0, 0.98, 0.9, 1.1])
def test_a_token_that_is_not_the_one_at_its_number_is_counted(temperature: float) -> None:
    chance = torch.Generator().manual_seed(1)
    logits = 2.0 * torch.randn(400, VOCABULARY, generator=chance)
    numbers = LocalEngine.uniforms(5, 400)
    generator = random.Random(5)
    assert numbers == [generator.random() for _ in range(400)]
    rounded = logits + 1e-4 * torch.randn(400, VOCABULARY, generator=chance)
    ids, _ = draw(rounded, [Sampling(temperature=temperature)] * 400, numbers)
    counted = token_fit([], [fit(logits, torch.tensor(ids), torch.tensor(numbers))]).astray
    assert counted == 0 if temperature == 1.0 else counted > 400 * abs(1.0 - temperature)
    assert token_fit([], [fit(logits, torch.tensor(ids), unknown(400))]).astray == 0


def test_a_sampler_that_changes_late_is_found_as_soon() -> None:
    evidence, found = drawn(3, 60)
    assert found is None
    ratios = dict.fromkeys(RATIOS, -1000.0)
    assert evidence.add(TokenFit([], ratios, {}), 0.0)
    assert not evidence.add(TokenFit([], ratios | {RATIOS[0]: PROOF + 3.0}, {}), 0.0)
    assert evidence.sampler == RATIOS[0]


def answers(weights: str, noise: float, seed: int, count: int = 60, moved: float = 1e-3) -> list[Moved]:
    """Log-probs of some tokens: those of both versions, and the engine's, each with its rounding."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        old = -chance.expovariate(1.0)
        new = old + chance.gauss(0.0, moved)
        drawn = {"new": new, "old": old}[weights]
        found.append(Moved(*(value + chance.gauss(0.0, noise) for value in (drawn, new, old))))
    return found


def gap_of(noise: float) -> float:
    """The mean difference of two log-probs with the same rounding."""
    return 2.0 * noise / math.sqrt(math.pi)


@pytest.mark.parametrize("noise", [1e-7, 1e-3])
def test_an_engine_with_old_weights_is_found(noise: float) -> None:
    fresh = Freshness()
    assert not all(fresh.add(answers("old", noise, seed), gap_of(noise)) for seed in range(120))
    assert fresh.share < 0.5


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3, 0.05, 1.0])
def test_an_engine_with_new_weights_is_never_called_old(noise: float) -> None:
    fresh = Freshness()
    assert all(fresh.add(answers("new", noise, seed), gap_of(noise)) for seed in range(2000))


@pytest.mark.parametrize("seed", range(4))
def test_rounding_that_the_tokens_of_an_update_share_is_one_observation(seed: int) -> None:
    """The prompt's rounding decides for all tokens whether the engine's log-probs are those of one version or of the other."""
    chance, fresh = random.Random(seed), Freshness()
    for step in range(1000):
        moved = [Moved(engine=0.0, new=each.new - each.old, old=0.0) for each in answers("new", 0.0, step)]
        agrees = chance.random() < 0.5
        assert fresh.add([each._replace(engine=each.new if agrees else each.old) for each in moved], noise=1e-3)


def test_an_engine_that_becomes_stale_late_is_found() -> None:
    fresh = Freshness()
    assert all(fresh.add(answers("new", 1e-4, seed), gap_of(1e-4)) for seed in range(100))
    assert not all(fresh.add(answers("old", 1e-4, seed), gap_of(1e-4)) for seed in range(100, 102))


def test_the_first_updates_test_chains_up_to_a_budget_and_later_ones_few() -> None:
    chains = [chain_of_ids([1] * 100, [5] * 28, 0.0, number=number) for number in range(620)]
    early = sampler_rows(chains, EARLY_TOKENS)
    assert len(early) * 128 >= EARLY_TOKENS
    late = sampler_rows(chains, 0)
    assert 8 < len(late) < 40
    assert {row.trajectory for row in early} & {row.trajectory for row in late}
    dearer = [replace(each, reward=float(number)) for number, each in enumerate(chains[::-1])]
    for room in (EARLY_TOKENS, 0):
        names = [row.trajectory for row in sampler_rows(chains, room)]
        assert [row.trajectory for row in sampler_rows(dearer, room)] == names, "neither rewards nor the order decide"


def reply_of(token_ids: list[int], version: int) -> Completion:
    return Completion(token_ids=token_ids, logprobs=[-0.1, -0.2, -0.3], versions=[version] * 3, text="")


def test_replies_that_begin_alike_count_once() -> None:
    probe = EngineProbe([1, 2, 3], Sampling(max_tokens=8), num_chains=256)
    replies = [reply_of([5, 6, last], version=0) for last in (7, 7, 8, 9)]
    assert probe.compare(replies, [[-0.1, -0.2, -0.3]] * 4) == []
    replies = [*replies[:3], reply_of([5, 9, 9], version=1)]
    moved = probe.compare(replies, [[-0.5, -0.6, -0.7]] * 4)
    assert [each.new for each in moved] == [-0.5, -0.6, -0.7, -0.7], "5, 6, and 7 and 8 after them; not the 9 after 5"


class CountingEngine:
    """An engine that answers every request with three tokens of the version that the test has set."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[int] = []
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        self.asked.append(self.version)
        return reply_of([5, 6, 7], self.version)

    def release(self, session: str) -> None:
        pass


async def ask_many(count: int) -> tuple[list[int], set[tuple[int, int]]]:
    """Returns the versions of 1 to `count` that a probe asked for, and the pairs of versions that it compared."""
    probe, engine = EngineProbe([1, 2, 3], Sampling(max_tokens=8)), CountingEngine()
    compared: set[tuple[int, int]] = set()
    for engine.version in range(1, count + 1):
        for _ in range(2):  # the same version again: nothing is asked
            probe.ask(engine, engine.version)  # type: ignore[arg-type]
        replies = await probe.replies()
        if replies:
            moved = probe.compare(replies, [[-float(engine.version)] * 3] * len(replies))
            compared |= {(int(-each.new), int(-each.old)) for each in moved}
    assert len(engine.asked) == len(set(engine.asked)) * probe.num_replies
    return sorted(set(engine.asked)), compared


def test_later_versions_are_asked_for_in_pairs_and_compared_with_the_version_directly_before() -> None:
    asked, compared = asyncio.run(ask_many(ALL_UNTIL + 8))
    late = [version for version in asked if version > ALL_UNTIL]
    assert asked == [*range(1, ALL_UNTIL + 1), *late]
    assert len(late) == 4
    assert {new for new, _ in compared} == {version for version in asked if version - 1 in asked}
    assert all(new == old + 1 for new, old in compared)
    assert sum(new > ALL_UNTIL for new, _ in compared) >= 2


async def draws_of(count: int) -> list[tuple[list[int], int | None]]:
    """Prompt and seed of the draws of a probe, and whether their numbers are those of the seeds."""
    probe, engine, found = (
        EngineProbe([1, 2, 3, 4, 5, 6, 7], Sampling(max_tokens=8), uniforms=LocalEngine.uniforms),
        CountingEngine(),
        [],
    )
    for engine.version in range(1, count + 1):
        probe.ask(engine, engine.version)  # type: ignore[arg-type]
        replies = await probe.replies()
        draws = engine.requests[-DRAWS:]
        assert [numbers for _, numbers in probe.draws(replies)] == [
            LocalEngine.uniforms(each.sampling.seed or 0, 3) for each in draws
        ]
        found += [(each.prompt_ids, each.sampling.seed) for each in draws]
    return found


def test_every_draw_of_a_probe_has_a_seed_of_its_own_and_a_short_prompt() -> None:
    found = asyncio.run(draws_of(6))
    assert len({seed for _, seed in found}) == 6 * DRAWS
    assert {tuple(prompt) for prompt, _ in found} == {(2, 3, 4, 5)}


def test_tokens_that_did_not_move_say_nothing() -> None:
    fresh = Freshness()
    assert fresh.add([Moved(-1.0, -1.0, -1.0)] * 100, 0.0)
    assert math.isnan(fresh.share)
