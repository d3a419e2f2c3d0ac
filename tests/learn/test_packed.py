"""Packed batches and layers run again: the same losses, gradients and updates as padded rows that are kept."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from agentfly.errors import ConfigError
from agentfly.learn.algorithms import ALGORITHMS
from agentfly.learn.batching import Rows, packs
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.logprobs import Scorer
from agentfly.learn.settings import OptimSettings
from agentfly.learn.supervised import SupervisedLearner
from tests.close import assert_close_to_norm
from tests.learn.chains import chain_of_ids, tiny_llama
from tests.learn.model.test_logprobs import family, rows_of
from tests.learn.test_learner import gradient


def groups(seed: int = 0) -> list[list[Any]]:
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(64) for _ in range(rng.randint(low, high))]

    made = []
    for group in range(3):
        chains = []
        for number in range(4):
            reply = ids(1, 9)
            reward = float(rng.random())
            chains.append(
                chain_of_ids(ids(2, 12), reply, reward, logprobs=[-4.0] * len(reply), group=str(group), number=number)
            )
        made.append(chains)
    return made


def test_every_row_is_packed_once_and_no_line_is_longer_than_the_budget() -> None:
    rng = random.Random(3)
    lengths = [rng.randint(1, 90) for _ in range(200)] + [400]
    batches = packs(lengths, 128)
    assert sorted(i for batch in batches for i in batch) == list(range(201))
    assert [200] in batches  # longer than the budget: alone
    assert all(sum(lengths[i] for i in batch) <= 128 for batch in batches if batch != [200])
    assert len(batches) <= 1.15 * sum(lengths[:-1]) / 128 + 2
    assert batches == packs(lengths, 128)


def test_a_packed_line_shows_where_its_rows_and_targets_lie() -> None:
    rows = Rows(rows_of())
    line = rows.packed([2, 0], torch.device("cpu"))
    padded = rows.tensors([2, 0], torch.device("cpu"))
    assert line.input_ids.shape == (1, rows.lengths[2] + rows.lengths[0])
    assert line.layout.lengths == (rows.lengths[2], rows.lengths[0])
    assert torch.equal(line.targets, padded.targets)
    assert torch.equal(line.tokens, padded.tokens)
    assert torch.equal(line.input_ids[0, line.where], padded.input_ids.flatten()[padded.where])


def windowed() -> Any:
    """A Mistral whose tokens see three tokens back."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MistralForCausalLM(MistralConfig(vocab_size=50, num_key_value_heads=2, sliding_window=3, **sizes)).eval()


@pytest.mark.parametrize("name", ["llama", "qwen2", "granite", "cohere", "phi", "mistral"])
def test_packed_log_probs_are_those_of_rows_alone(name: str) -> None:
    scorer = Scorer(windowed() if name == "mistral" else family(name))
    assert scorer.prepare(OptimSettings(packing="on")) == "shared"
    rows = Rows(rows_of())
    with torch.no_grad():
        packed = scorer(rows.packed(range(4), torch.device("cpu"))).logprobs
        alone = torch.cat([scorer(rows.tensors([row], torch.device("cpu"))).logprobs for row in range(4)])
    assert_close_to_norm(packed, alone)


def test_a_row_that_changes_leaves_the_log_probs_of_its_neighbours() -> None:
    scorer = Scorer(tiny_llama())
    scorer.prepare(OptimSettings(packing="on"))
    rows = Rows(rows_of())
    line = rows.packed([0, 1], torch.device("cpu"))
    changed = line.input_ids.clone()
    changed[0, : rows.lengths[0]] = (changed[0, : rows.lengths[0]] + 5) % 64
    count = len(rows.positions[0])
    with torch.no_grad():
        before = scorer(line).logprobs
        after = scorer(type(line)(changed, line.where, line.targets, line.tokens, line.rows, layout=line.layout)).logprobs
    assert torch.equal(before[count:], after[count:])
    assert not torch.allclose(before[:count], after[:count])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(
    "options", [{"packing": "on"}, {"gradient_checkpointing": True}, {"packing": "on", "gradient_checkpointing": True}]
)
def test_an_update_is_the_same_packed_padded_kept_or_run_again(algorithm: str, options: dict[str, Any]) -> None:
    plain, other = tiny_llama(), tiny_llama()
    results = []
    for model, more in ((plain, {"packing": "off"}), (other, options)):
        settings = ALGORITHMS[algorithm].settings({"kl_coef": 0.05})
        learner = PolicyLearner(model, algorithm, loss=settings, optim=OptimSettings(lr=1e-2, max_tokens_per_batch=40, **more))
        results.append((learner.update(groups()), gradient(learner)))
    (want, wanted), (got, gradients) = results
    for name in ("train/loss", "train/grad_norm", "train/logprob_gap", "train/reference_kl"):
        assert_close_to_norm(got[name], want[name], scale=1.0, of=name)
    assert_close_to_norm(gradients, wanted)
    if options.get("packing") == "on":
        assert got["train/padding_waste"] == 0.0


def test_layers_are_really_run_again_and_dropout_stays_off() -> None:
    model = tiny_llama()
    runs = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(model.model.layers[0].self_attn.training))
    learner = SupervisedLearner(model, optim=OptimSettings(lr=1e-3, gradient_checkpointing=True, packing="off"))
    runs.clear()
    learner.update(rows_of())
    micro = Rows(rows_of()).micro_batches(range(4), 8192)
    assert runs == [False, False] * len(micro)  # forward, and once more in the backward pass
    assert not any(module.training for module in model.modules())


def test_supervised_steps_are_the_same_packed() -> None:
    padded, packed = (SupervisedLearner(tiny_llama(), optim=OptimSettings(lr=1e-2, packing=kind)) for kind in ("off", "on"))
    assert_close_to_norm(packed.update(rows_of())["train/loss"], padded.update(rows_of())["train/loss"])
    assert_close_to_norm(gradient(packed), gradient(padded))


def test_a_model_with_capped_scores_is_not_packed_unless_it_must_be_and_then_it_is_refused() -> None:
    model = family("gemma2")
    assert Scorer(model).prepare(OptimSettings(packing="auto")) == "padded"
    with pytest.raises(ConfigError, match="cannot be packed"):
        Scorer(model).prepare(OptimSettings(packing="on"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_model_with_convolutions_are_not_packed_in_any_format(dtype: torch.dtype) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["conv", "conv", "full_attention", "conv"] * 2
    model = Lfm2ForCausalLM(Lfm2Config(vocab_size=1280, layer_types=kinds, num_hidden_layers=8, pad_token_id=0, **sizes))
    scorer = Scorer(model.to(dtype).eval())
    assert scorer.prepare(OptimSettings(packing="auto")) == "padded"
    assert "carries state from one row into the next" in scorer.path
