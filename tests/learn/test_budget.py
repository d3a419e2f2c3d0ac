"""Tokens per micro batch: chosen from free memory, and halved when memory runs out, without losing the step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from agentfly.errors import ConfigError
from agentfly.learn.algorithms import find_algorithm
from agentfly.learn.batching import MicroBatch, Rows
from agentfly.learn.budget import CPU_TOKENS, FIRST_TOKENS, MAX_TOKENS, RAISE_AFTER, TokenBudget
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.samples import to_samples
from agentfly.learn.settings import OptimSettings
from agentfly.learn.supervised import SupervisedLearner
from tests.close import assert_close_to_norm
from tests.learn.chains import tiny_llama
from tests.learn.test_learner import gradient, learner_of
from tests.learn.test_shared_prompts import CASES, VOCABULARY, rows_of, siblings

CPU = torch.device("cpu")


class FakeMemory:
    """A device on which each token of the largest batch takes `per_token` bytes."""

    def __init__(self, per_token: int, total: int) -> None:
        self.per_token, self.total = per_token, total
        self.base, self.top, self.released = 1000, 0, 0

    def allocated(self) -> int:
        return self.base

    def peak(self) -> int:
        return self.top

    def reset_peak(self) -> None:
        self.top = self.base

    def free(self) -> int:
        return self.total - self.base

    def release(self) -> None:
        self.released += 1


def batches(*sizes: int) -> list[MicroBatch]:
    none = torch.zeros(0)
    return [MicroBatch(torch.zeros(1, size, dtype=torch.long), none, none, none, (0, 1)) for size in sizes]


def run(budget: TokenBudget, memory: FakeMemory, *sizes: int) -> None:
    with budget.measured(batches(*sizes)):
        memory.top = max(memory.top, memory.base + memory.per_token * max(sizes))


def test_a_number_stays_and_a_processor_has_a_constant() -> None:
    for setting, tokens in ((512, 512), ("auto", CPU_TOKENS)):
        budget = TokenBudget(setting, CPU)  # type: ignore[arg-type]
        budget.plan()
        with budget.measured(batches(100)):
            pass
        budget.plan()
        assert budget.tokens == tokens


def test_the_first_update_is_measured_and_the_next_fills_half_of_the_free_memory() -> None:
    memory = FakeMemory(per_token=1000, total=100_000_000)
    budget = TokenBudget("auto", CPU, memory)
    budget.plan()
    assert budget.tokens == FIRST_TOKENS
    run(budget, memory, 4000, 8000, 100)
    assert budget.tokens == FIRST_TOKENS, "not in the middle of an update"
    memory.base = 20_000_000  # the optimizer's state came with the first step
    budget.plan()
    assert budget.tokens == 80_000_000 // 2 // 1000 // 1024 * 1024
    memory.base = 90_000_000
    budget.plan()
    assert budget.tokens == 39936, "chosen once: batches of one run stay alike"


@pytest.mark.parametrize(("total", "tokens"), [(10**12, MAX_TOKENS), (2_000_000, FIRST_TOKENS)])
def test_the_choice_has_limits(total: int, tokens: int) -> None:
    memory = FakeMemory(per_token=1000, total=total)
    budget = TokenBudget("auto", CPU, memory)
    run(budget, memory, 500)
    budget.plan()
    assert budget.tokens == tokens


@pytest.mark.parametrize(("total", "tokens"), [(10**12, 24_576), (30_000_000, 14_336)])
def test_no_more_than_the_model_runs_best(total: int, tokens: int) -> None:
    memory = FakeMemory(per_token=1000, total=total)
    budget = TokenBudget("auto", CPU, memory)
    budget.plan(24_576)
    assert not budget.settled
    run(budget, memory, 500)
    budget.plan(24_576)
    assert (budget.tokens, budget.settled) == (tokens, True)
    fixed = TokenBudget(100_000, CPU, memory)
    fixed.plan(24_576)
    assert (fixed.tokens, fixed.settled) == (100_000, True), "a number is the user's choice"


def test_half_of_what_did_not_fit_is_used_next(caplog: pytest.LogCaptureFixture) -> None:
    memory = FakeMemory(per_token=1000, total=10**9)
    budget = TokenBudget("auto", CPU, memory)
    run(budget, memory, 500)
    with caplog.at_level(logging.WARNING):
        budget.halve(batches(6000, 3000))
    assert budget.tokens == 3000
    assert memory.released == 1
    assert caplog.messages == ["out of memory in a batch of 6000 tokens: continuing with at most 3000"]
    budget.plan()
    assert budget.tokens == 3000, "not chosen again"


def test_tokens_rise_again_after_updates_with_enough_memory_and_later_each_time() -> None:
    """What ran out may have been the memory of another program that has ended since."""
    budget = TokenBudget(8192, CPU, FakeMemory(per_token=1000, total=10**9))
    budget.halve(batches(8000, 3000))
    budget.halve(batches(4000, 3000))
    used = []
    for _ in range(5 * RAISE_AFTER):
        budget.plan()
        used.append(budget.tokens)
    assert used == [2000] * RAISE_AFTER + [4000] * (2 * RAISE_AFTER + 1) + [8000] * (2 * RAISE_AFTER - 1), (
        "at most what was tried"
    )
    budget.halve(batches(8000))
    later = []
    while budget.tokens < 8000:
        budget.plan()
        later.append(budget.tokens)
    assert len(later) == 4 * RAISE_AFTER + 1


def fail_above(limit: int) -> Any:
    """A hook of a model that has memory for so many tokens."""

    def check(module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if ids.numel() > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return check


def limited(learner: Any, limit: int) -> None:
    """Let every model of the learner fail above so many tokens."""
    scorers = [learner._modules.scorer.head.backbone]
    if learner._modules.critic is not None:
        scorers.append(learner._modules.critic._run)
    if learner._modules.reference is not None:
        scorers.append(learner._modules.reference.head.backbone)
    for backbone in scorers:
        for module in {backbone.module, backbone._replica} - {None}:
            module.register_forward_pre_hook(fail_above(limit), with_kwargs=True)


@pytest.mark.parametrize("case", ["grpo", "two epochs", "ppo copy", "ppo shared", "gspo divided", "kl in loss", "kl in reward"])
@pytest.mark.parametrize("packing", ["on", "off"])
def test_an_update_that_runs_out_of_memory_is_the_update_in_smaller_batches(case: str, packing: str) -> None:
    algorithm, loss, optim = CASES[case]
    found = []
    for limit in (None, 60):
        options = {"lr": 1e-4, **optim, "max_tokens_per_batch": 10_000, "packing": packing}
        learner = learner_of(tiny_llama(VOCABULARY), algorithm, loss=loss, **options)
        if limit is not None:
            limited(learner, limit)
        metrics = learner.update(siblings())
        assert (learner._budget.tokens <= 60) == (limit is not None)
        found.append((gradient(learner), metrics))
    (want, before), (got, after) = found
    assert_close_to_norm(got, want)
    for name in ("train/loss", "train/logprob_gap", "train/reference_kl", "train/clip_fraction", "train/optimizer_steps"):
        if name in before:
            assert_close_to_norm(after[name], before[name], scale=1.0, of=name)


def test_memory_that_runs_out_late_in_a_step_leaves_no_gradient_behind() -> None:
    want = learner_of(tiny_llama(VOCABULARY), packing="on", max_tokens_per_batch=60)
    want.update(siblings())
    got = learner_of(tiny_llama(VOCABULARY), packing="on", max_tokens_per_batch=60)
    calls = []

    def fail_once(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:  # the first batch of the step has left its gradients
            raise torch.OutOfMemoryError("CUDA out of memory")

    got._modules.scorer.head.backbone._replica.register_forward_pre_hook(fail_once)
    got.update(siblings())
    assert len(calls) > 3
    assert_close_to_norm(gradient(got), gradient(want))


def test_a_single_row_that_does_not_fit_ends_the_update_with_the_weights_untouched() -> None:
    model = tiny_llama(VOCABULARY)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    learner = learner_of(model, packing="on")
    limited(learner, 5)
    with pytest.raises(ConfigError, match=r"ran out of memory in update 1: set agent\.engine\.kv_gib .*out of memory$"):
        learner.update(siblings())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert learner.version == 0
    assert not learner.half_updated


def test_supervised_training_is_repeated_in_smaller_batches_too() -> None:
    demos = [row for group in siblings() for trajectory in group for row in to_samples(trajectory)]
    losses = []
    for limit in (None, 60):
        learner = SupervisedLearner(tiny_llama(VOCABULARY), optim=OptimSettings(lr=1e-3))
        if limit is not None:
            learner._scorer.head.backbone._replica.register_forward_pre_hook(fail_above(limit), with_kwargs=True)  # type: ignore[union-attr]
        losses.append((learner.update(demos)["train/grad_norm"], learner.evaluate(demos)["eval/loss"]))
    assert_close_to_norm(losses[1], losses[0])


def test_scores_of_rows_that_fit_are_kept_when_others_do_not() -> None:
    rows: Rows = rows_of(siblings())
    budget = TokenBudget(200, CPU)
    scored: list[int] = []

    def score(batch: MicroBatch) -> torch.Tensor:
        if batch.input_ids.numel() > 50:
            raise torch.OutOfMemoryError("CUDA out of memory")
        scored.extend(batch.rows)
        return batch.tokens

    def divide(members: Any) -> Any:
        return rows.batches(members, budget.tokens, CPU, "shared")

    seen = [int(number) for _, tokens in budget.each(divide, range(len(rows)), score) for number in tokens]
    assert sorted(seen) == list(range(rows.num_tokens))
    assert sorted(scored) == list(range(len(rows)))


@pytest.mark.parametrize("wrong", [0, "all", 1.5, True])
def test_the_setting_is_a_whole_number_or_auto(wrong: Any) -> None:
    assert OptimSettings(max_tokens_per_batch="auto").max_tokens_per_batch == "auto"
    with pytest.raises(ConfigError, match="max_tokens_per_batch must be"):
        OptimSettings(max_tokens_per_batch=wrong)


def test_a_device_without_room_for_the_optimizer_is_refused_with_the_keys_that_help() -> None:
    memory = FakeMemory(per_token=1000, total=3 * 2**30)
    budget = TokenBudget("auto", torch.device("cpu"), memory)
    budget.require(2 * 2**30)
    with pytest.raises(ConfigError, match=r"needs 4\.0 GiB .* and 3\.0 GiB of the GPU are free: set agent\.engine\.kv_gib"):
        budget.require(4 * 2**30)
    TokenBudget("auto", torch.device("cpu")).require(2**60)  # a CPU says nothing


def test_a_learner_knows_what_its_first_step_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(TokenBudget, "require", lambda self, needed: asked.append(needed))
    model = tiny_llama()
    for algorithm in ("grpo", "ppo"):
        PolicyLearner(model, find_algorithm(algorithm), exact=True)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert asked[0] == 3 * 4 * weights  # gradients and two moments in float32
    assert asked[1] > 1.5 * asked[0]  # the critic's, too
