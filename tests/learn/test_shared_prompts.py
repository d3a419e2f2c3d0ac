"""Rows that begin alike are computed once where they are alike: the same losses and gradients as every row alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentfly.learn import packed
from agentfly.learn.batching import Rows, _fill, shared_packs
from agentfly.learn.bucketed import Buckets, Take, divide
from agentfly.learn.model import backbone
from agentfly.learn.model.logprobs import Scorer
from agentfly.learn.model.lora import adapt
from agentfly.learn.packed import PackedLayout
from agentfly.learn.samples import to_samples
from agentfly.learn.settings import LoraSettings, OptimSettings
from agentfly.learn.supervised import SupervisedLearner
from agentfly.types import Completion, Turn
from tests.close import assert_close_to_norm
from tests.learn.chains import chain, chain_of_ids, tiny_llama
from tests.learn.model.test_logprobs import family
from tests.learn.test_learner import gradient, learner_of
from tests.learn.test_packed import windowed

CPU = torch.device("cpu")
VOCABULARY = 50


def completion(ids: list[int]) -> Completion:
    return Completion(text="", token_ids=list(ids), logprobs=[-3.0] * len(ids), versions=[0] * len(ids))


def siblings(seed: int = 0, num_groups: int = 3, num_chains: int = 4) -> list[list[Any]]:
    """Groups with one system prompt; in each, siblings with one prompt, two of which begin their reply alike.

    The last two siblings are the same chain, and the first has its history rewritten in the second turn.
    """
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    system, groups = ids(7), []
    for group in range(num_groups):
        prompt, chains = system + ids(5), []
        first = ids(6)
        for number in range(num_chains):
            reply = first if number in (2, 3) else first[:3] + ids(3) if number == 1 else ids(rng.randint(1, 5))
            turns = [(prompt, reply, True), (ids(3) if number < 2 else [4, 5], [6, 7] if number > 1 else ids(4), number == 0)]
            made = [Turn(context, restarts, completion(own)) for context, own, restarts in turns]
            trajectory = chain_of_ids([0], [0], float(rng.random()), group=str(group), number=number)
            trajectory.turns = made
            chains.append(trajectory)
        groups.append(chains)
    return groups


def rows_of(groups: list[list[Any]]) -> Rows:
    return Rows([row for group in groups for trajectory in group for row in to_samples(trajectory)])


# ---- the line ------------------------------------------------------------------------------------------------------------


def test_a_line_holds_what_rows_have_in_common_once() -> None:
    rows = Rows(
        [row for each in (("abcX", "yz"), ("abcX", "yq"), ("abQ", "w"), ("abcX", "yz")) for row in to_samples(chain(each))]
    )
    line = rows.packed(range(4), CPU, share=True)
    assert "".join(map(chr, line.input_ids[0].tolist())) == "abQcXy"
    assert line.rows == (2, 0, 1, 3)
    assert line.layout is not None
    assert line.layout.lengths == (3, 3)  # rows 1 and 3 have no token of their own
    assert line.layout.positions.tolist() == [[0, 1, 2, 2, 3, 4]]
    pairs = [(chr(line.input_ids[0, at]), chr(to)) for at, to in zip(line.where, line.targets, strict=True)]
    assert pairs == [("Q", "w"), ("X", "y"), ("y", "z"), ("X", "y"), ("y", "q"), ("X", "y"), ("y", "z")]
    assert sorted(line.tokens.tolist()) == list(range(rows.num_tokens))


def test_rows_that_have_nothing_in_common_are_packed_without_copies() -> None:
    rows = Rows([*to_samples(chain(("abcdefg", "yz"))), *to_samples(chain(("hijklmn", "yz")))])
    line = rows.packed(range(2), CPU, share=True)
    assert line.layout is not None
    assert line.layout.take is None
    assert line.layout.lengths == (8, 8)


# ---- micro batches -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_every_row_is_in_one_batch_within_the_budget_of_computed_tokens(seed: int, budget: int) -> None:
    rows = rows_of(siblings(seed))
    batches = rows.micro_batches(range(len(rows)), budget, "shared")
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    assert batches == rows.micro_batches(range(len(rows)), budget, "shared")
    for batch in batches:
        assert len(batch) == 1 or rows.packed(batch, CPU, share=True).input_ids.numel() <= budget


def test_siblings_stay_together_and_their_prompt_counts_once() -> None:
    rows = rows_of(siblings(num_groups=6, num_chains=8))
    groups = {row: row // 9 for row in range(len(rows))}  # the first chain of each group has two rows
    batches = [b for b in rows.micro_batches(range(len(rows)), 220, "shared") if any(groups[row] != groups[b[0]] for row in b)]
    assert batches
    found = [{groups[row] for row in batch if rows.positions[row][0] == 12} for batch in batches]
    assert sum(map(len, found)) == len(set().union(*found)), "a group is in one batch"


def test_a_group_that_is_larger_than_the_budget_is_divided_and_its_prompt_is_repeated() -> None:
    parts = shared_packs([100] * 10, [0] + [80] * 9, 200)
    assert [part.stop - part.start for part in parts] == [5, 5]
    assert shared_packs([300, 300], [0, 299], 100) == [slice(0, 1), slice(1, 2)]
    assert shared_packs([], [], 100) == []


def test_a_batch_ends_where_rows_have_least_in_common() -> None:
    """Groups of 4 rows: the fourth of five groups would be divided after its second row."""
    common = [0] + [90, 90, 90, 10] * 4 + [90, 90, 90]
    assert [part.stop for part in shared_packs([100] * 20, common, 520)] == [12, 20]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30)), min_size=1, max_size=60), st.integers(40, 600))
def test_batches_are_as_few_as_if_each_were_filled_and_repeat_no_more(rows: list[tuple[int, int]], budget: int) -> None:
    lengths = [own + shared for own, shared in rows]
    common = [0, *(min(shared, lengths[row]) for row, (_, shared) in enumerate(rows[1:]))]
    batches = shared_packs(lengths, common, budget)
    assert [part.start for part in batches] == [0, *(part.stop for part in batches[:-1])]
    assert batches[-1].stop == len(rows)
    filled = _fill(lengths, common, budget)
    assert len(batches) <= len(filled)
    again, least = (sum(common[part.start] for part in parts) for parts in (batches, filled))
    assert again <= least + 0.01 * sum(lengths)


def test_large_batches_are_of_similar_size() -> None:
    """64 groups of 8 rows, as of 512 chains: lines that fit the same CUDA graph."""
    lengths, common = [430] * 512, [0, *[330] * 7, *[300, *[330] * 7] * 63]
    parts = shared_packs(lengths, common, 24_576)
    rows = [part.stop - part.start for part in parts]
    assert sum(rows) == 512
    assert all(count % 8 == 0 for count in rows)
    assert max(rows) <= 1.2 * min(rows)


# ---- attention -----------------------------------------------------------------------------------------------------------


def test_a_copied_token_gets_the_sum_of_its_gradients() -> None:
    index, real = np.array([0, 2, 2, 1, 0]), np.array([True, True, True, True, False])
    tensor = torch.randn(4, 3, requires_grad=True)
    push = torch.randn(5, 3)
    Take(index, 4, CPU, real)(tensor).backward(push)
    assert tensor.grad is not None
    torch.testing.assert_close(tensor.grad, torch.stack([push[0], push[3], push[1] + push[2], torch.zeros(3)]))


def test_sums_of_half_precision_gradients_are_not_rounded_on_the_way() -> None:
    tensor = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    Take(np.zeros(512, dtype=np.int64), 1, CPU)(tensor).backward(torch.ones(512, 1, dtype=torch.bfloat16))
    assert tensor.grad is not None
    assert float(tensor.grad) == 512.0  # a sum in bfloat16 stops at 256


@pytest.mark.parametrize("window", [None, 3, 50])
def test_rows_in_few_calls_attend_as_rows_alone(window: int | None) -> None:
    rows = rows_of(siblings(num_groups=4, num_chains=6))
    layout = rows.packed(range(len(rows)), CPU, share=True).layout
    assert layout is not None
    count = sum(layout.lengths)
    tensors = [torch.randn(count, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    got = layout.buckets(window).attend(*tensors, 0.4)
    assert 1 < len(layout.buckets(window).calls) < len(layout.lengths)
    outs, start = [], 0
    for own, places in zip(layout.lengths, layout.keys, strict=True):
        q, (k, v) = tensors[0][start : start + own], (tensor[places].repeat_interleave(2, 1) for tensor in tensors[1:])
        distance = torch.arange(len(places) - own, len(places))[:, None] - torch.arange(len(places))
        seen = (distance >= 0) & (distance < (window or 10_000))
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.4
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
        start += own
    want = torch.cat(outs)
    assert_close_to_norm(got, want)
    push = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, tensors, push), torch.autograd.grad(want, tensors, push), strict=True):
        assert_close_to_norm(a, b)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=40))
def test_calls_hold_every_row_once_with_little_padding(sizes: list[tuple[int, int]]) -> None:
    own, whole = [a for a, _ in sizes], [a + b for a, b in sizes]
    calls = divide(own, whole)
    assert sorted(row for call in calls for row in call) == list(range(len(sizes)))
    for call in calls:
        computed = len(call) * max(own[row] for row in call) * max(whole[row] for row in call)
        assert len(call) == 1 or computed <= 1.5 * sum(own[row] * whole[row] for row in call) + 3000
        assert len({own[row] == whole[row] for row in call}) == 1


def test_rows_of_a_thousand_tokens_are_not_mixed_with_short_ones() -> None:
    assert divide([1000, 3, 4], [1000, 500, 500]) == [[0], [2, 1]]


def test_a_kernel_that_aligns_its_mask_with_the_first_key_is_not_taken() -> None:
    def top_left(query: Any, key: Any, value: Any, layout: PackedLayout, scale: Any, window: Any) -> Any:
        rows = zip(query.split(layout.lengths), layout.keys, strict=True)
        outs = []
        for q, places in rows:
            parts = [q.transpose(0, 1), *(t[places].transpose(0, 1) for t in (key, value))]
            out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)

    def detached(query: Any, key: Any, value: Any, layout: PackedLayout, scale: Any, window: Any) -> Any:
        return packed._bucketed(query, key.detach() + 0.0 * key, value, layout, scale, window)

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    sizes = (CPU, torch.float32, 4, 2, 8)
    assert packed.agrees(packed._bucketed, *sizes)
    for wrong in (top_left, detached, broken):
        assert not packed.agrees(wrong, *sizes)
    assert packed.find_kernel(*sizes).name == "rows in buckets (on cpu)"


def test_torchs_flash_attention_takes_the_arguments_of_a_shared_line() -> None:
    """On the meta device: shapes and signature of forward and backward, without a GPU."""
    layout = PackedLayout((6, 3), torch.device("meta"), [np.arange(6), np.array([0, 1, 2, 6, 7, 8])])
    tensors = [torch.empty(9, heads, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2, 2)]
    for window in (None, 4):
        out = packed._flash(*tensors, layout, 0.125, window)
        assert out.shape == (9, 4, 64)
        assert [g.shape for g in torch.autograd.grad(out, tensors, torch.empty_like(out))] == [t.shape for t in tensors]


# ---- models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "granite", "cohere", "phi", "mistral"])
def test_log_probs_and_gradients_are_those_of_rows_alone(name: str) -> None:
    model = windowed() if name == "mistral" else family(name)
    scorer = Scorer(model)
    assert scorer.prepare(OptimSettings(packing="on")) == "shared"
    rows = rows_of(siblings())
    found = []
    for shared in (True, False):
        if shared:
            batches = [rows.packed(range(len(rows)), CPU, share=True)]
        else:
            batches = [rows.tensors([row], CPU) for row in range(len(rows))]
        logprobs = torch.zeros(rows.num_tokens)
        for batch in batches:
            logprobs = logprobs.index_put((batch.tokens,), scorer(batch).logprobs)
        weights = torch.sin(torch.arange(rows.num_tokens))
        grads = torch.autograd.grad((weights * logprobs).sum(), [p for p in model.parameters() if p.requires_grad])
        found.append((logprobs.detach(), *grads))
    for got, want in zip(*found, strict=True):
        assert_close_to_norm(got, want, scale=1e-3)


def test_a_prompt_is_run_once() -> None:
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, packing="on")
    seen = []
    embeddings = learner._modules.scorer.head.backbone._replica.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    metrics = learner.update(siblings())
    rows = rows_of(siblings())
    assert sum(seen) == len(
        {rows.ids[row][: end + 1].tobytes() for row in range(len(rows)) for end in range(rows.lengths[row])}
    )
    assert metrics["train/padding_waste"] == 0.0


CASES = {
    "grpo": ("grpo", {}, {}),
    "small batches": ("grpo", {}, {"max_tokens_per_batch": 40}),
    "two epochs": ("grpo", {}, {"epochs": 2, "num_minibatches": 2}),
    "ppo copy": ("ppo", {}, {"critic_warmup_steps": 0}),
    "ppo shared": ("ppo", {"critic": "shared"}, {}),
    "gspo": ("gspo", {}, {}),
    "gspo divided": ("gspo", {}, {"max_tokens_per_batch": 25}),
    "kl in loss": ("grpo", {"kl_coef": 0.1, "kl_in": "loss"}, {}),
    "kl in reward": ("ppo", {"kl_coef": 0.1, "kl_in": "reward"}, {"critic_warmup_steps": 0}),
    "entropy": ("grpo", {"entropy_coef": 0.01}, {}),
    "lora": ("grpo", {}, {}),
    "layers run again": ("grpo", {}, {"gradient_checkpointing": True}),
    "lora, layers run again": ("grpo", {}, {"gradient_checkpointing": True}),
    "chunks of logits": ("grpo", {}, {"logprob_chunk": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_the_update_of_rows_alone(case: str) -> None:
    algorithm, loss, optim = CASES[case]
    found = []
    for packing in ("on", "off"):
        model = tiny_llama(VOCABULARY)
        if "lora" in case:
            adapt(model, LoraSettings(rank=2, alpha=4))
        more = optim if packing == "on" else {**optim, "gradient_checkpointing": False, "max_tokens_per_batch": 1}
        learner = learner_of(model, algorithm, loss=loss, packing=packing, **{"lr": 1e-4, **more})
        metrics = learner.update(siblings())
        parts = [gradient(learner)]
        if learner._modules.critic is not None:
            parts.append(gradient(learner, "critic_optimizer"))
        found.append((torch.cat(parts), metrics))
    (got, ours), (want, theirs) = found
    assert_close_to_norm(got, want)
    for name in ("train/loss", "train/grad_norm", "train/reference_kl", "train/entropy", "train/value_loss"):
        if name in theirs:
            assert_close_to_norm(ours[name], theirs[name], scale=1.0, of=name)


def test_supervised_steps_share_too() -> None:
    samples = [row for group in siblings() for trajectory in group for row in to_samples(trajectory)]
    models = tiny_llama(VOCABULARY), tiny_llama(VOCABULARY)
    metrics = [
        SupervisedLearner(model, optim=OptimSettings(lr=1e-3, packing=packing)).update(samples)  # type: ignore[arg-type]
        for model, packing in zip(models, ("on", "off"), strict=True)
    ]
    for name in ("train/loss", "train/grad_norm"):
        assert_close_to_norm(metrics[0][name], metrics[1][name], of=name)


# ---- the probe -----------------------------------------------------------------------------------------------------------


def test_a_model_that_fails_only_with_shared_rows_is_packed_without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Buckets.attend
    monkeypatch.setattr(Buckets, "attend", lambda self, q, k, v, s: right(self, q, k, v, s) * (1.5 if len(q) == 9 else 1.0))
    scorer = Scorer(tiny_llama(VOCABULARY))
    assert scorer.prepare(OptimSettings(packing="on")) == "packed"
    assert "prompts not shared: the probe differs by" in scorer.path


def test_a_reference_of_another_kind_decides_with_the_policy() -> None:
    reference = copy.deepcopy(family("gemma2"))
    learner = learner_of(tiny_llama(VOCABULARY), loss={"kl_coef": 0.1}, reference=reference)
    assert learner._modules.shape == "padded"
    assert learner.path == "padded rows: the reference model cannot be packed"
    assert learner.update(siblings())["train/reference_kl"] > 0


def test_the_path_says_what_runs_and_why() -> None:
    shared = Scorer(tiny_llama(VOCABULARY))
    shared.prepare(OptimSettings())
    text = "packed rows; prompts shared; attention: rows in buckets (on cpu); fused layers: RMSNorm, rotary"
    assert shared.path == text
    capped = Scorer(family("gemma2"))
    capped.prepare(OptimSettings())
    assert capped.path.startswith("padded rows; ")
    assert "rows cannot be packed: ConfigError: Gemma2Attention has soft caps" in capped.path
    off = Scorer(tiny_llama(VOCABULARY))
    off.prepare(OptimSettings(packing="off"))
    assert off.path == "padded rows; common prefix computed once"
    assert backbone.Backbone(tiny_llama(VOCABULARY).model, shares=False).path == "padded rows; every row computed alone"
