"""Drawing tokens: the right distribution, the right cuts, and a row's draw depends on nothing but itself."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.engines.local.sampler import draw
from agentfly.engines.local.scheduler import SequenceState, uniform_numbers
from agentfly.types import Request, Sampling
from tests.close import assert_close_to_norm

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def counts_of(sampling: Sampling, num: int = 20000) -> list[int]:
    rng = random.Random(0)
    ids, _ = draw(LOGITS.expand(num, -1), [sampling] * num, [rng.random() for _ in range(num)])
    return [ids.count(i) for i in range(len(LOGITS))]


def chi_square(counts: list[int], probs: list[float]) -> float:
    total = sum(counts)
    return sum((count - total * p) ** 2 / (total * p) for count, p in zip(counts, probs, strict=True) if p > 0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability_says(temperature):
    probs = torch.softmax(LOGITS / temperature, -1).tolist()
    counts = counts_of(Sampling(temperature=temperature))
    assert chi_square(counts, probs) < 20.5  # 5 degrees of freedom: exceeded once in a thousand
    assert chi_square(counts, torch.softmax(LOGITS / (temperature * 1.2), -1).tolist()) > 20.5


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_k=100), {0, 1, 2, 3, 4, 5}),
        (Sampling(top_p=0.5), {0}),  # p = 0.56, 0.21, 0.13, 0.08, 0.03, 0.00
        (Sampling(top_p=0.8), {0, 1, 2}),
        (Sampling(top_p=1e-9), {0}),
        (Sampling(min_p=0.2), {0, 1, 2}),  # of the best: 1, 0.37, 0.22, 0.14, ...
        (Sampling(top_k=4, top_p=0.9), {0, 1, 2}),  # of what top-k leaves: 0.58, 0.79, 0.92
        (Sampling(top_k=3, min_p=0.3), {0, 1}),
    ],
)
def test_only_what_the_cuts_leave_is_drawn_in_its_old_proportions(sampling, kept):
    counts = counts_of(sampling)
    assert {i for i, count in enumerate(counts) if count} == kept
    probs = [p if i in kept else 0.0 for i, p in enumerate(torch.softmax(LOGITS, -1).tolist())]
    assert chi_square(counts, [p / sum(probs) for p in probs]) < 20.5


def test_logprobs_are_those_before_the_cuts():
    ids, logprobs = draw(LOGITS[None], [Sampling(top_k=1, temperature=0.5)], [0.3])
    assert ids == [0]
    assert_close_to_norm(logprobs[0], torch.log_softmax(LOGITS / 0.5, -1)[0], scale=1.0)


def test_greedy_takes_the_best_and_reports_it_under_temperature_one():
    ids, logprobs = draw(LOGITS[None], [Sampling(temperature=0)], [0.999])
    assert ids == [0]
    assert_close_to_norm(logprobs[0], torch.log_softmax(LOGITS, -1)[0], scale=1.0)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_row_draws_the_same_alone_and_among_others(data):
    row = st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
        top_k=st.sampled_from([0, 1, 3]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        min_p=st.sampled_from([0.0, 0.1]),
    )
    samplings = data.draw(st.lists(row, min_size=1, max_size=6))
    seed = data.draw(st.integers(0, 1000))
    logits = torch.randn(len(samplings), 11, generator=torch.Generator().manual_seed(seed)) * 2
    uniforms = [random.Random(seed + i).random() for i in range(len(samplings))]
    together = draw(logits, samplings, uniforms)
    for i, sampling in enumerate(samplings):
        alone = draw(logits[i : i + 1], [sampling], uniforms[i : i + 1])
        assert alone[0][0] == together[0][i]
        assert_close_to_norm(alone[1][0], together[1][i], scale=1.0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    ids, logprobs = draw(logits, [Sampling()], [uniform])
    assert ids[0] in (1, 3)
    assert math.isfinite(logprobs[0])


@pytest.mark.parametrize("count", [1, 64, 100])
def test_numbers_drawn_together_are_those_drawn_one_by_one(count: int) -> None:
    seeds = [0, 7, 2**32 - 1]
    rows = uniform_numbers([random.Random(seed) for seed in seeds], count)
    for seed, row in zip(seeds, rows, strict=True):
        one_by_one = random.Random(seed)
        assert row.tolist() == [one_by_one.random() for _ in range(count)]


def test_a_sequence_consumes_its_numbers_in_order_however_many_are_asked_for() -> None:
    seq = SequenceState(Request([1, 2], Sampling(seed=5, max_tokens=200)), frozenset(), lambda _: "")
    rng = random.Random(5)
    expected = [rng.random() for _ in range(150)]
    at = 0
    for asked, taken in [(1, 1), (70, 0), (70, 60), (64, 9), (80, 80)]:
        assert seq.uniforms(asked).tolist() == expected[at : at + asked]
        seq.extend([3] * taken, [-1.0] * taken, 0, 1000)
        at += taken
