"""The replica: merged linear layers and fused kernels compute what the model computes, and its weights stay the model's."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentfly.engines.local import replica
from agentfly.engines.local.load import merged_weights
from agentfly.engines.local.replica import accelerate, check_paged_replica, check_replica, make_replica, same_tensors
from agentfly.kernels.merged_linear import merge_linears
from agentfly.learn.model.lora import adapt
from agentfly.learn.settings import LoraSettings
from tests.close import assert_close_to_norm

from ..needs import has_interpreter, has_triton, needs_cuda
from ..plain_kernels import Plain
from .tiny import FAMILIES, make_model, prompt_of


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(torch.tensor([prompt_of(9)])).logits
    return out


def merged(model: Any) -> tuple[Any, int]:
    """A plain copy of the module tree over the same parameters, with merged products."""
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})
    return twin, merge_linears(model, twin)


def still_merged(twin: Any) -> bool:
    """Whether all merged weights lie side by side."""
    products = [vars(module)["agentfly_merged"] for module in twin.modules() if "agentfly_merged" in vars(module)]
    return all(product.is_intact() for product in products)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_products_say_the_same_and_leave_the_model_as_it_was(family: str) -> None:
    model = make_model(family)
    before, state = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin, count = merged(model)
    assert count == 6  # two in each of three layers
    assert same_tensors(model, twin)
    assert still_merged(twin)
    assert torch.equal(logits(model), before)
    assert_close_to_norm(logits(twin), before)
    assert all("forward" not in vars(module) for module in model.modules())
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name], state[name]) for name in state)


def test_one_product_is_computed_where_three_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2")  # with biases in q, k and v
    twin, _ = merged(model)
    widths: list[int] = []
    linear = torch.nn.functional.linear

    def counted(x: Any, weight: Any, bias: Any = None) -> Any:
        widths.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    logits(twin)
    one_layer = [96, 48, 128, 48]  # 48 + 24 + 24, out, 64 + 64, down
    assert widths == [*one_layer * 3, 260]


def test_an_optimizer_step_is_seen_by_the_twin() -> None:
    model = make_model("qwen2")
    twin, _ = merged(model)
    before = logits(twin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.tensor([prompt_of(9)])).logits.square().mean().backward()
    optimizer.step()
    assert still_merged(twin)
    assert (logits(model) - before).abs().max() > 0.01
    assert_close_to_norm(logits(twin), logits(model))


def test_gradients_through_a_merged_twin_are_those_of_the_model() -> None:
    model = make_model()
    twin, _ = merged(model)
    model(torch.tensor([prompt_of(9)])).logits.square().mean().backward()
    want = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    twin(torch.tensor([prompt_of(9)])).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert_close_to_norm(parameter.grad, want[name], of=name)


def test_a_merged_model_is_saved_loaded_and_copied_like_any_other(tmp_path: Path) -> None:
    model = make_model("qwen2")
    before = logits(model)
    twin, _ = merged(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again), before)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    assert all(
        torch.equal(tensor, model.state_dict()[name]) for name, tensor in load_file(tmp_path / "weights.safetensors").items()
    )
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    assert torch.equal(logits(model), before), "a copy shares its weights with the model"
    model.load_state_dict(copied.state_dict())
    assert still_merged(twin)
    assert torch.equal(logits(model), logits(copied))
    assert_close_to_norm(logits(twin), logits(copied))


def test_a_second_engine_finds_the_weights_side_by_side_and_moves_nothing() -> None:
    model = make_model()
    first, _ = merged(model)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    second, count = merged(model)
    assert count == 6
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert still_merged(first)
    assert still_merged(second)
    assert torch.equal(logits(first), logits(second))


def test_weights_that_were_moved_are_noticed_and_multiplied_one_by_one() -> None:
    model = make_model("qwen2")
    twin, _ = merged(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5  # elsewhere, and other values
    assert same_tensors(model, twin)
    assert not still_merged(twin)
    assert_close_to_norm(logits(twin), logits(model))
    later, count = merged(model)
    assert count == 6
    assert still_merged(later)
    assert_close_to_norm(logits(later), logits(model))


def test_a_copy_of_a_merged_twin_computes_with_its_own_weights() -> None:
    model = make_model()
    twin, _ = merged(model)
    before = logits(twin)
    copied = copy.deepcopy(twin)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    assert torch.equal(logits(twin), before)
    assert (logits(copied) - before).abs().max() > 0.01


def test_layers_with_adapters_are_not_merged_and_those_beside_them_are() -> None:
    model = make_model()
    adapt(model, LoraSettings(rank=2, alpha=4, targets=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.normal_()
    before = logits(model)
    twin, count = merged(model)
    assert count == 3  # gate and up of each layer
    assert_close_to_norm(logits(twin), before)
    plain = make_model()
    plain.load_state_dict(merged_weights(model))
    assert_close_to_norm(logits(plain), before)


def test_layers_that_share_memory_with_others_or_have_hooks_are_left_alone() -> None:
    model = make_model()
    first, second, third = (layer.self_attn for layer in model.model.layers)
    first.k_proj.weight.data = first.v_proj.weight.data
    second.k_proj.register_forward_hook(lambda module, args, out: out * 2)
    third.v_proj.weight = third.k_proj.weight
    before = logits(model)
    twin, count = merged(model)
    assert count == 3
    assert torch.equal(logits(model), before)
    assert_close_to_norm(logits(twin), before)


def test_other_inputs_and_another_order_are_multiplied_one_by_one() -> None:
    model = make_model("qwen2")
    twin, _ = merged(model)
    ours, theirs = twin.model.layers[0].self_attn, model.model.layers[0].self_attn
    x, y = torch.randn(1, 3, 48), torch.randn(1, 3, 48)
    with torch.no_grad():
        ours.q_proj(x)
        assert torch.equal(ours.k_proj(y), theirs.k_proj(y))
        x += 1.0  # the same tensor, no longer the same numbers
        assert torch.equal(ours.v_proj(x), theirs.v_proj(x))
        assert torch.equal(ours.v_proj(y), theirs.v_proj(y))


def test_a_replica_on_a_cpu_has_no_replaced_modules() -> None:
    model = make_model()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    twin = make_replica(model, on_pages=True)
    assert not any(hasattr(vars(module).get("forward"), "agentfly_fused") for module in twin.modules())
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_of_a_known_family_is_replaced_and_the_replica_still_passes(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kernels = make_model(family).to(dtype), Plain()
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    found = accelerate(model, make_replica(model), kernels)
    sums = 0 if family.startswith("gemma") else 3  # gemma has a norm between product and sum
    assert found == {"merged": 6, "norms": norms, "gates": 3, "rotary": 3, "residuals": sums}
    monkeypatch.setattr(replica, "layer_kernels", lambda device: kernels)
    twin = make_replica(model, on_pages=True)
    kernels.calls = dict.fromkeys(kernels.calls, 0)
    device = torch.device("cpu")
    check_paged_replica(model, twin, check_replica(model, make_replica(model), device), device)
    assert kernels.calls == {"rms_norm": 3 * norms, "rotary": 9, "gated": 9}  # two rows read, one token decoded
    assert all("forward" not in vars(module) for module in model.modules())


def test_modules_that_fail_their_probe_are_not_replaced() -> None:
    class Wrong(Plain):
        def rms_norm(self, x: Any, weight: Any, eps: float, kind: str) -> Any:
            return 1.05 * super().rms_norm(x, weight, eps, kind)

        def rotary(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
            return super().rotary(q, k, cos, -sin)

        def gated(self, gate: Any, up: Any, kind: str) -> Any:
            raise RuntimeError("does not compile here")

    model = make_model()
    twin = make_replica(model)
    assert accelerate(model, twin, Wrong()) == {"merged": 6, "norms": 0, "gates": 0, "rotary": 0, "residuals": 3}
    erf = make_model()
    for layer in erf.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    assert accelerate(erf, make_replica(erf), Plain())["gates"] == 0


def test_a_replica_that_fails_only_with_fused_kernels_loses_them_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    class Treacherous(Plain):
        """Right in every probe and wrong at work."""

        def rms_norm(self, x: Any, weight: Any, eps: float, kind: str) -> Any:
            out = super().rms_norm(x, weight, eps, kind)
            return out if x.dim() == 2 else -out

    model, kernels, device = make_model(), Treacherous(), torch.device("cpu")
    probe = check_replica(model, make_replica(model), device)
    monkeypatch.setattr(replica, "layer_kernels", lambda device: kernels)
    twin = make_replica(model, on_pages=True)
    assert still_merged(twin)
    check_paged_replica(model, twin, probe, device)
    for each in (twin, make_replica(model, on_pages=True)):
        assert not any("forward" in vars(module) for module in each.modules())


def test_an_accelerated_replica_of_a_model_with_adapters_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kernels, device = make_model(), Plain(), torch.device("cpu")
    adapt(model, LoraSettings(rank=2, alpha=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.normal_(std=0.1)
    monkeypatch.setattr(replica, "layer_kernels", lambda device: kernels)
    twin = make_replica(model, on_pages=True)
    check_paged_replica(model, twin, check_replica(model, make_replica(model), device), device)
    found = accelerate(model, make_replica(model), kernels)
    assert found == {"merged": 0, "norms": 7, "gates": 3, "rotary": 3, "residuals": 0}


KERNELS = """
import sys
import torch
from agentfly.engines.local import paged_attention as paged
from agentfly.engines.local.page_allocator import PAGE_SIZE as PAGE
from agentfly.engines.local.sampler import draw_batch
from agentfly.kernels import decode, layers, paged_attention as kernels
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from tests.close import assert_close_to_norm
device = sys.argv[1]
torch.manual_seed(0)
types = {torch.float32: 2e-6, torch.float16: 2**-10}
if device == "cuda":  # Triton's interpreter cuts bfloat16 off where a GPU rounds it
    types[torch.bfloat16] = 2**-7
worst = {}

def same(name, got, want, eps, exact=0.98, scale=None):
    assert got.shape == want.shape and got.dtype == want.dtype, name
    scale = want.float().abs() if scale is None else scale
    gap = (got.float() - want.float()).abs() / scale.clamp(min=0.05)
    assert gap.max() <= eps, (name, eps, float(gap.max()))
    if eps > 2e-4 and device == "cpu":  # in the short formats nearly every number is the same; a GPU may round once less
        assert (gap == 0).float().mean() >= exact, (name, float((gap == 0).float().mean()))
    key = name + (" float32" if eps < 2e-4 else " short")
    worst[key] = max(worst.get(key, 0.0), float(gap.max()))

def noise(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=device).to(dtype)

with torch.no_grad():
    for dtype, eps in types.items():
        for size in (48, 576, 1100):
            for module, kind in ((LlamaRMSNorm(size), "llama"), (Gemma3RMSNorm(size), "gemma")):
                module = module.to(device, dtype)
                module.weight.normal_()
                whole = 3 * noise(7, 2 * size, dtype=dtype)
                x = whole[:, size:]
                same("norm", layers.rms_norm(x, module.weight, 1e-6, kind), module(x), 2 * eps)
        norm = LlamaRMSNorm(16).to(device, dtype)
        x = noise(1, 5, 200, dtype=dtype)[..., 8:104].view(1, 5, 6, 16)  # heads of a merged product
        same("norm", layers.rms_norm(x, norm.weight, 1e-6, "llama"), norm(x), 2 * eps)
        x = noise(2, 3, 5, 16, dtype=dtype).permute(2, 0, 1, 3)
        same("norm", layers.rms_norm(x, norm.weight, 1e-6), norm(x), 2 * eps)
        for heads, kv_heads, dim in ((9, 3, 64), (20, 20, 24), (1, 1, 12)):
            whole = noise(1, 5, (heads + 2 * kv_heads) * dim, dtype=dtype)
            parts = whole.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
            q, k, v = (part.view(1, 5, -1, dim).transpose(1, 2) for part in parts)
            cos, sin = noise(1, 5, dim, dtype=dtype), noise(1, 5, dim, dtype=dtype)
            got, want = layers.rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin)
            assert got[0][0].transpose(0, 1).is_contiguous() and got[1][0].transpose(0, 1).is_contiguous()
            for x, a, b in zip((q, k), got, want):  # two products that may nearly cancel: by their sizes, not by their sum's
                turned = x.roll(dim // 2, -1).float().abs() * sin[:, None].float().abs()
                same("rotary", a, b, eps * 2, 0.98, x.float().abs() * cos[:, None].float().abs() + turned)
            pools = [torch.zeros(4, PAGE, kv_heads, dim, dtype=dtype, device=device) for _ in range(4)]
            places = torch.tensor([17, 3, 40, 63, 16], device=device)
            key, value = got[1][0].transpose(0, 1), v[0].transpose(0, 1)
            decode.store(key, value, pools[0], pools[1], places)
            for pool, new in ((pools[2], key), (pools[3], value)):
                pool.view(-1, kv_heads, dim).index_copy_(0, places, new.contiguous())
            assert torch.equal(pools[0], pools[2]) and torch.equal(pools[1], pools[3])
        for size in (96, 1536):
            gate, up = (4 * noise(1, 6, 2 * size, dtype=dtype)).split(size, -1)
            same("silu", layers.gated(gate, up, "silu"), torch.nn.functional.silu(gate) * up, 2 * eps, 0.97)
            want = torch.nn.functional.gelu(gate, approximate="tanh") * up  # 1 + tanh: few digits are left far below 0
            same("gelu", layers.gated(gate, up, "gelu"), want, max(2 * eps, 1e-4), 0.9)

    for dtype in types:
        for size in (50, 260, 9000):
            logits = (4 * noise(24, size)).to(dtype)
            logits[:, ::3] = float("-inf")
            uniforms = torch.rand(24, device=device)
            uniforms[:3] = torch.tensor([0.0, 1.0 - 2**-24, 1.0], device=device)
            temperatures = torch.tensor([1.0, 0.7, 1.5, 0.0], device=device).repeat(6)
            ids, logprobs = decode.draw(logits, uniforms, temperatures)
            want, want_logprobs = draw_batch(logits, uniforms, temperatures, None, temperatures, temperatures)
            other = (ids != want).nonzero().flatten().tolist()
            assert len(other) <= 1, (size, other)  # a sum in another order may decide otherwise where u falls on a border
            assert_close_to_norm(logprobs[ids == want], want_logprobs[ids == want], scale=1.0)
            assert (ids[3::4] == logits[3::4].argmax(-1)).all() and (ids % 3 != 0).all()
    # Shares, counted: many uniforms over one row, blocks of the vocabulary with nothing in them between.
    row = torch.full((9000,), float("-inf"), device=device)
    places = torch.tensor([1, 4095, 4096, 8999], device=device)
    row[places] = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device).log()
    uniforms = (torch.arange(200, device=device) + 0.5) / 200
    ids, logprobs = decode.draw(row.expand(200, -1), uniforms, torch.ones(200, device=device))
    assert [int((ids == place).sum()) for place in places] == [20, 40, 60, 80]
    assert_close_to_norm(logprobs.exp(), row[ids].exp())
    bad = noise(4, 300)
    bad[0, 7] = bad[1] = float("nan")
    bad[2] = float("-inf")
    bad[3, 5] = float("inf")
    for temperature in (0.0, 1.0):
        ids, logprobs = decode.draw(bad, torch.rand(4, device=device), torch.full((4,), temperature, device=device))
        assert logprobs.isnan().all() and ((ids >= 0) & (ids < 300)).all()

    for block in (32, 64, 128):
        kernels.tuning = lambda dim, folds, dtype: kernels.DecodeTuning(block, 4, 2)
        for dim, window in ((16, None), (64, None), (64, 37), (24, 20)):
            keys, values = (noise(40, PAGE, 2, dim) for _ in range(2))
            table = torch.randint(1, 40, (4, 12), dtype=torch.int32, device=device)
            lengths = torch.tensor([150, 0, 37, 128], dtype=torch.int32, device=device)
            options = dict(scale=dim**-0.5, window=window, softcap=None)
            for splits in (1, 4):
                kernels.num_splits = lambda _: splits
                query = noise(4, 6, dim)
                got = kernels.decode(query, keys, values, table, lengths, **options)
                want = paged.decode_reference(query, keys, values, table, lengths, **options)
                assert_close_to_norm(got, want, of=(block, dim, window, splits))
print({name: f"{gap:.2g}" for name, gap in worst.items()})
print("equal")
"""

REPLICAS = """
import sys
import torch
sys.path.insert(0, "tests")
from agentfly.engines.local import paged_attention as paged, replica
from agentfly.kernels import layers, paged_attention
from engines.tiny import FAMILIES, make_model
device = torch.device(sys.argv[1])
replica.layer_kernels = lambda device: layers
turns = []
fused_decode = paged_attention.decode
def noted(*args, new, **options):
    turns.append(new.turn is not None)
    return fused_decode(*args, new=new, **options)
paged_attention.decode = noted
paged.has_kernels = lambda device: True
short = torch.float16 if device.type == "cpu" else torch.bfloat16
for family in FAMILIES:
    both = family in ("llama", "qwen3", "gemma3") or device.type == "cuda"
    for dtype in (torch.float32, short) if both else (torch.float32,):
        model = make_model(family).to(device, dtype)
        probe = replica.check_replica(model, replica.make_replica(model), device)
        made = replica.make_replica(model, on_pages=True)
        replica.check_paged_replica(model, made, probe, device)
        assert model not in replica._not_accelerated, (family, dtype)
        assert turns == [True] * 3, (family, dtype)  # one decode step of three layers, which rotates and stores
        turns.clear()
        again = replica.make_replica(model)
        done = replica.accelerate(model, again, layers)
        norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
        sums = 0 if family.startswith("gemma") else 3
        assert done == {"merged": 6, "norms": norms, "gates": 3, "rotary": 3, "residuals": sums}, (family, dtype, done)
        assert not any("forward" in vars(module) for module in model.modules())
        ids = torch.tensor([[3, 1, 4, 1, 5]], device=device)
        assert torch.isfinite(model(ids).logits).all()
print("equal")
"""


def run_script(script: str, device: str, interpreted: bool) -> None:
    """In a separate process, because Triton's interpreter, which needs no GPU, is chosen before the first import."""
    done = subprocess.run(
        [sys.executable, "-c", script, device],
        env={**os.environ, "TRITON_INTERPRET": "1"} if interpreted else os.environ,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.stdout.strip().endswith("equal"), done.stdout + done.stderr
    print(done.stdout)


@has_interpreter
@pytest.mark.parametrize("script", [KERNELS, REPLICAS], ids=["kernels", "replicas"])
def test_fused_parts_compute_what_torch_computes(script: str) -> None:
    run_script(script, "cpu", interpreted=True)


@has_triton
@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("script", [KERNELS, REPLICAS], ids=["kernels", "replicas"])
def test_fused_parts_compute_on_the_device_what_torch_computes(script: str) -> None:
    run_script(script, "cuda", interpreted=False)
