"""Adapters: nothing changes at first, only they learn, the engine samples from them, and they are saved merged and alone."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly.config import Config
from agentfly.engines.local.engine import LocalEngine
from agentfly.engines.local.load import merged_weights
from agentfly.errors import ConfigError
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.expert_lora import ExpertAdapter
from agentfly.learn.model.lora import adapt, adapters, coverage, is_adapted, load_adapter, merge_adapters, save_adapter
from agentfly.learn.settings import LoraSettings, OptimSettings
from agentfly.types import Request, Sampling
from tests.close import assert_close_to_norm
from tests.learn.chains import chain_of_ids, tiny_llama

IDS = torch.tensor([[3, 9, 4, 11, 7, 2, 30, 5]])
LORA = LoraSettings(rank=4, alpha=16.0)


def moved(model: Any, by: float = 0.3) -> Any:
    """An adapted model whose adapters do something."""
    torch.manual_seed(1)
    with torch.no_grad():
        for _, module in adapters(model):
            module.lora_b.normal_(std=by)
    return model


def groups() -> list[list[Any]]:
    return [[chain_of_ids([3, 9, 4], [11 + n, 7, 2], float(n), logprobs=[-4.0] * 3, number=n) for n in range(3)]]


def test_a_new_adapter_changes_nothing_and_only_adapters_can_learn() -> None:
    model = tiny_llama()
    before = model(IDS).logits
    assert adapt(model, LORA) == 2 * 7
    assert torch.equal(model(IDS).logits, before)
    trainable = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {"lora_a", "lora_b"}


def test_a_step_changes_the_adapters_and_leaves_every_frozen_weight() -> None:
    model = tiny_llama()
    adapt(model, LORA)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = model(IDS).logits
    learner = PolicyLearner(model, "grpo", optim=OptimSettings(lr=1e-2))
    metrics = learner.update(groups())
    assert metrics["train/optimizer_steps"] == 1
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    assert not torch.allclose(model(IDS).logits, before)


def test_the_merged_weights_are_those_of_a_plain_model_that_computes_the_same() -> None:
    model = tiny_llama()
    plain = copy.deepcopy(model)
    adapt(model, LORA)
    moved(model)
    plain.load_state_dict(merged_weights(model))
    assert not torch.allclose(tiny_llama()(IDS).logits, plain(IDS).logits, atol=1e-3)
    assert_close_to_norm(model(IDS).logits, plain(IDS).logits)


def test_the_engine_samples_from_the_adapters_with_nothing_copied() -> None:
    model = tiny_llama()
    engine = LocalEngine(model, Tokens(), stop_ids=[])
    adapt(model, LORA)
    moved(model)
    engine.publish(1)
    request = Request(prompt_ids=IDS[0].tolist(), sampling=Sampling(temperature=1.0, max_tokens=6, seed=3))
    try:
        completion = asyncio.run(engine.generate(request))
    finally:
        engine.shut()
    ids = [*IDS[0].tolist(), *completion.token_ids]
    logits = model(torch.tensor([ids])).logits[0, len(IDS[0]) - 1 : -1]
    want = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert_close_to_norm(completion.logprobs, want, scale=1.0)
    assert {id(p) for p in engine._replica.parameters()} == {id(p) for p in model.parameters()}


def test_critic_and_reference_share_frozen_tensors_with_the_policy() -> None:
    model = tiny_llama()
    adapt(model, LORA)
    from agentfly.learn.algorithms import ALGORITHMS

    learner = PolicyLearner(model, "ppo", loss=ALGORITHMS["ppo"].settings({"kl_coef": 0.1}), optim=OptimSettings(lr=1e-3))
    assert learner._modules.critic is not None
    assert learner._modules.reference is not None
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    for copied in (learner._modules.critic.backbone, learner._modules.reference.model):
        shared = [p for p in copied.parameters() if id(p) in frozen]
        own = [p for p in copied.parameters() if id(p) not in frozen]
        assert len(own) == 2 * 2 * 7
        assert len(shared) == len(list(copied.parameters())) - len(own)
    learner.update(groups())
    assert learner.version == 1


def test_adapters_are_written_as_peft_reads_them_and_come_back(tmp_path: Path) -> None:
    model = tiny_llama()
    adapt(model, LORA)
    moved(model)
    save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 16.0)
    other = tiny_llama()
    adapt(other, LORA, seed=5)
    load_adapter(other, tmp_path)
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    theirs = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert_close_to_norm(theirs(IDS).logits, model(IDS).logits)


def test_a_run_with_adapters_saves_a_plain_model_and_resumes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from agentfly.api import train
    from tests.tiny import ROWS, TwoTurns, even, look, save_tiny_model

    folder = save_tiny_model(tmp_path / "model")

    def agent() -> Any:
        return TwoTurns(str(folder), tools=[look], reward=even, max_turns=2, sampling={"max_tokens": 8})

    def run(steps: int, **more: Any) -> Any:
        return train(
            agent(), ROWS, steps=steps, num_tasks=2, num_chains=4, lora={"rank": 2}, **{"train.lr": 1e-2, **settings}, **more
        )

    settings: dict[str, Any] = {"run.dir": str(tmp_path / "runs"), "run.threads": 1, "train.validate_at_start": False}
    whole = run(3, **{"run.name": "whole"})
    half = run(2, **{"run.name": "half"})
    assert (half.checkpoint / "adapter" / "adapter_model.safetensors").is_file()
    resumed = run(3, **{"run.name": "half"}, resume=half.directory)
    first, second = (AutoModelForCausalLM.from_pretrained(result.checkpoint) for result in (whole, resumed))
    assert not is_adapted(first)
    assert_close_to_norm(first(IDS).logits, second(IDS).logits)
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.allclose(first(IDS).logits, base(IDS).logits, atol=1e-4)


def test_settings_that_would_do_nothing_and_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="no effect without lora.rank"):
        Config.from_dict({"lora": {"alpha": 8.0}})
    with pytest.raises(ConfigError, match="no linear layer called 'w_proj'"):
        adapt(tiny_llama(), LoraSettings(rank=2, targets=["q_proj", "w_proj"]))
    with pytest.raises(ConfigError, match="it has down_proj"):
        adapt(tiny_llama(), LoraSettings(rank=2, targets=["query"]))
    model = tiny_llama()
    assert adapt(model, LoraSettings(rank=2, targets=["q_proj"])) == 2
    assert adapt(model, LoraSettings(rank=2, targets=["q_proj"])) == 2
    with pytest.raises(ConfigError, match="rank 2 already"):
        adapt(model, LoraSettings(rank=3))


class Tokens:
    eos_token_id = None

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))


def hybrid(kind: str, **own: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes, pad_token_id=0, bos_token_id=None, eos_token_id=1, **own)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},  # transposed, with biases
    "nemotron_h": {"layer_types": ["moe", "full_attention"], "n_routed_experts": 4, "moe_intermediate_size": 16},  # no gate
}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(IDS, use_cache=False).logits
    return out


def noised(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for _, module in adapters(model):
            module.lora_b.normal_(std=0.2)


@pytest.mark.parametrize("kind", EXPERTS)
def test_each_expert_has_an_adapter_that_merges_into_its_weight(kind: str) -> None:
    model = hybrid(kind, **({} if kind == "nemotron_h" else {"num_hidden_layers": 2}), **EXPERTS[kind])
    names, plain = set(model.state_dict()), logits(model)
    adapt(model, LORA)
    torch.testing.assert_close(logits(model), plain)
    assert {"gate_up_proj", "up_proj"} & {name.rpartition(".")[2] for name, _ in adapters(model) if "experts" in name}
    noised(model)
    beside = logits(model)
    assert float((beside - plain).abs().max()) > 1e-2
    copied = copy.deepcopy(model)
    merged = merged_weights(model)
    assert set(merged) == names
    merge_adapters(model)
    torch.testing.assert_close(logits(model), beside, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(merged[name], tensor) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(logits(copied), beside)  # the copy reads its own weights, not those that were merged


def test_the_gradient_of_an_expert_adapter_is_that_of_the_merged_weight() -> None:
    model = hybrid("qwen3_moe", num_hidden_layers=1, **EXPERTS["qwen3_moe"])
    adapt(model, LORA)
    noised(model)
    name, module = next((name, module) for name, module in adapters(model) if name.endswith("down_proj"))
    model(IDS).logits.sin().sum().backward()
    whole = copy.deepcopy(model)
    merge_adapters(whole)
    weight = dict(whole.named_parameters())[name].requires_grad_()
    whole(IDS).logits.sin().sum().backward()
    # dL/dB = scale dL/dW A^T and dL/dA = scale B^T dL/dW
    assert weight.grad is not None
    slope, a, b = module.scale * weight.grad, module.lora_a.transpose(1, 2), module.lora_b.transpose(1, 2)
    wanted = slope @ a, b @ slope
    for got, want in zip((module.lora_b.grad, module.lora_a.grad), wanted, strict=True):
        assert want.detach().any()
        torch.testing.assert_close(got, want.detach(), rtol=1e-3, atol=1e-4)


def test_adapters_of_experts_are_saved_and_loaded(tmp_path: Path) -> None:
    model, other = (hybrid("qwen3_moe", num_hidden_layers=1, **EXPERTS["qwen3_moe"]) for _ in range(2))
    adapt(model, LORA)
    noised(model)
    save_adapter(model, tmp_path / "adapter")
    adapt(other, LORA)
    load_adapter(other, tmp_path / "adapter")
    assert torch.equal(logits(other), logits(model))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_parameters"] == [f"model.layers.0.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj")]


def test_experts_can_be_named_as_targets_or_left_out() -> None:
    model = hybrid("qwen3_moe", num_hidden_layers=2, **EXPERTS["qwen3_moe"])
    adapt(model, LoraSettings(rank=2, targets=["q_proj", "gate_up_proj"]))
    assert {name.rpartition(".")[2] for name, _ in adapters(model)} == {"q_proj", "gate_up_proj"}
    assert "mlp.experts.down_proj" in coverage(model)
    with pytest.raises(ConfigError, match="it has .*down_proj, gate_up_proj"):
        adapt(hybrid("qwen3_moe", num_hidden_layers=1, **EXPERTS["qwen3_moe"]), LoraSettings(rank=2, targets=["nothing"]))


def test_experts_of_an_unknown_layout_are_named_as_left_out_with_their_share() -> None:
    model = hybrid("llama4_text", num_hidden_layers=1, num_local_experts=4, head_dim=8)
    adapt(model, LORA)
    said = coverage(model)
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    linear = sum(module.frozen.numel() for _, module in adapters(model))
    routers = sum(p.numel() for name, p in model.named_parameters() if name.endswith("router.weight"))
    assert f"beside {linear / (experts + linear + routers):.0%} of" in said
    assert "feed_forward.experts.gate_up_proj" in said
    assert "feed_forward.experts.down_proj" in said


def test_a_layer_with_a_forward_of_its_own_gets_no_adapter() -> None:
    model = hybrid("phimoe", num_hidden_layers=2, num_local_experts=4)
    adapt(model, LORA)
    assert "adapters beside" in coverage(model)
    assert all(isinstance(module, ExpertAdapter) or type(module.base) is torch.nn.Linear for _, module in adapters(model))
    model(IDS)


def test_a_weight_with_two_owners_gets_no_adapter() -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    assert adapt(model, LORA) == 2 * 7 - 4


def test_an_adapter_that_the_model_would_pass_by_is_removed() -> None:
    model = tiny_llama()
    gate = model.model.layers[0].mlp.gate_proj
    plain = type(model.model.layers[0].mlp).forward
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(x @ mlp.gate_proj.weight.T) * mlp.up_proj(x))
    assert plain is not mlp.forward
    assert adapt(model, LORA) == 2 * 7 - 1
    assert model.model.layers[0].mlp.gate_proj is gate


def test_merged_weights_that_compute_something_else_are_refused() -> None:
    model = tiny_llama()
    mlp = model.model.layers[0].mlp
    # The adapter has an effect here, but the weight that is read beside it has another one when it is merged.
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)) + x @ mlp.up_proj.weight.T[:, :32]
    with pytest.raises(ConfigError, match="with adapters and with merged weights differ"):
        adapt(model, LORA)


def test_quantised_weights_get_no_adapters() -> None:
    model = tiny_llama()
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConfigError, match="the weights of the model are quantised"):
        adapt(model, LORA)
