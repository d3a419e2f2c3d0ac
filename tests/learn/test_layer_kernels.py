"""Faster norms, gates and rotary positions: the same values and gradients, and nothing is replaced unproven."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly.kernels import layer_kernels, torch_layers
from agentfly.kernels.replace import replace_modules
from agentfly.learn.model import backbone
from agentfly.learn.model.logprobs import Scorer
from agentfly.learn.model.lora import adapt
from agentfly.learn.packed import PackedLayout, packed_replica, run_packed
from agentfly.learn.settings import LoraSettings, OptimSettings
from tests.close import assert_close_to_norm, error_of_norm
from tests.engines.tiny import make_model
from tests.learn.chains import tiny_llama
from tests.learn.test_learner import VOCABULARY, gradient, learner_of, make_groups
from tests.needs import has_interpreter, has_triton, needs_cuda
from tests.plain_kernels import Plain

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def fuse(replica: Any, kernels: Any) -> dict[str, int]:
    return replace_modules(replica, kernels, gradients=True)


def replaced(module: Any) -> int:
    return sum("forward" in vars(each) for each in module.modules())


def norms_of(module: Any) -> int:
    return sum(type(each).__name__.endswith("RMSNorm") for each in module.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_of_a_known_family_is_replaced_in_the_replica_alone(family: str, dtype: torch.dtype) -> None:
    model = make_model(family).to(dtype).model
    replica = packed_replica(model)
    assert fuse(replica, Plain()) == {"norms": norms_of(model), "gates": 3, "rotary": 3}
    assert replaced(replica) == norms_of(model) + 6
    assert replaced(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert fuse(replica, Plain()) == {"norms": 0, "gates": 0, "rotary": 0}  # once is enough


def test_right_values_with_wrong_gradients_are_not_taken() -> None:
    class Wrong(Plain):
        """Each forgets a part of its gradient: the norm what lies along its input, the others something small."""

        def rms_norm(self, x: Any, weight: Any, eps: float, kind: str) -> Any:
            scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt().detach()
            return (x.float() * scale).to(x.dtype) * weight

        def gated(self, gate: Any, up: Any, kind: str) -> Any:
            out = super().gated(gate, up, kind)
            return 0.95 * out + 0.05 * out.detach()

        def rotary(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
            return super().rotary(q, k, cos, sin)[0], super().rotary(q, k.detach(), cos, sin)[1]

    for dtype in (torch.float32, torch.bfloat16):
        assert fuse(packed_replica(make_model().to(dtype).model), Wrong()) == {"norms": 0, "gates": 0, "rotary": 0}


def test_an_activation_of_another_kind_is_left_as_it_is() -> None:
    model = make_model().model
    for layer in model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    assert fuse(packed_replica(model), Plain())["gates"] == 0


def test_a_replica_that_fails_with_fused_kernels_loses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Treacherous(Plain):
        """Right in every probe and wrong at work."""

        def rms_norm(self, x: Any, weight: Any, eps: float, kind: str) -> Any:
            out = super().rms_norm(x, weight, eps, kind)
            return out if x.dim() == 2 else -out

    monkeypatch.setattr(backbone, "layer_kernels", lambda device: Treacherous())
    scorer = Scorer(make_model())
    assert scorer.prepare(OptimSettings(packing="on"))
    assert replaced(scorer.head.backbone._replica) == 0
    assert "fused layers: off (together they differ by" in scorer.path


@pytest.mark.parametrize(("dtype", "text"), [(torch.float32, "RMSNorm, rotary"), (torch.bfloat16, "off (on cpu)")], ids=str)
def test_on_a_processor_norms_and_rotary_have_written_backward_passes(dtype: torch.dtype, text: str) -> None:
    assert layer_kernels(torch.device("cpu")) is None
    model = make_model().to(dtype)
    scorer = Scorer(model)
    assert scorer.prepare(OptimSettings(packing="on"))
    assert replaced(scorer.head.backbone._replica) == (norms_of(model.model) + 3 if dtype == torch.float32 else 0)
    assert scorer.path.endswith(f"fused layers: {text}")


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_on_a_processor_compute_what_torch_computes(family: str) -> None:
    found = []
    for kernels in (torch_layers, None):
        replica = packed_replica(make_model(family).model)
        if kernels is not None:
            assert fuse(replica, kernels) == {"norms": norms_of(replica), "gates": 0, "rotary": 3}
        ids = torch.arange(2, 12)[None]
        out = run_packed(replica, ids, PackedLayout((6, 4), torch.device("cpu")))
        out.backward(torch.sin(torch.arange(out.numel())).view_as(out))
        found.append([out.detach(), *(parameter.grad for parameter in replica.parameters())])
    for got, want in zip(*found, strict=True):
        # Sums are rounded in another order, how far depends on the processor; a wrong term would be off by a hundredth.
        assert_close_to_norm(got, want)


def test_a_probe_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Plain):
        """As a kernel that does not compile, one of another activation, one with a wrong gradient."""

        GATES = ()

        def rms_norm(self, x: Any, weight: Any, eps: float, kind: str) -> Any:
            raise RuntimeError("PTX was rejected\nand more")

        def rotary(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
            return super().rotary(q, k.detach() + 0.0 * k, cos, sin)

    failed: dict[str, str] = {}
    done = replace_modules(packed_replica(make_model().model), Broken(), gradients=True, failed=failed)
    assert not any(done.values())
    assert failed == {
        "norms": "the probe failed: RuntimeError: PTX was rejected",
        "gates": "an activation of another kind",
        "rotary": "gradients differ",
    }
    monkeypatch.setattr(backbone, "layer_kernels", lambda device: Broken())
    scorer = Scorer(make_model())
    scorer.prepare(OptimSettings(packing="on"))
    for text in (
        "fused layers: off (",
        "RMSNorm off (the probe failed: RuntimeError: PTX was rejected)",
        "rotary off (gradients",
    ):
        assert text in scorer.path


def test_the_limit_of_a_probe_follows_how_far_rounding_grows() -> None:
    limits = []
    for loud in (0.05, 4.0):
        model = make_model().to(torch.bfloat16).model
        for parameter in model.layers.parameters():
            if parameter.dim() == 2:
                parameter.data *= loud
        limits.append(backbone._Probe(model).tolerance)
    assert limits[0] == 5e-2
    assert 5e-2 < limits[1] <= 0.3
    assert backbone._Probe(make_model().model).tolerance == 1e-4


def test_layers_that_agree_one_by_one_are_fused_although_rounding_grows_from_layer_to_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a deep model in half precision, whose hidden states differ by more than any fixed tolerance."""
    whole = backbone._Probe.gap

    def grown(self: Any, replica: Any, *, share: bool = False) -> float:
        return 0.3 if replaced(replica) else whole(self, replica, share=share)

    monkeypatch.setattr(backbone._Probe, "gap", grown)
    monkeypatch.setattr(backbone, "layer_kernels", lambda device: Plain())
    scorer = Scorer(make_model().to(torch.bfloat16))
    scorer.prepare(OptimSettings(packing="on"))
    assert scorer.path.endswith("fused layers: RMSNorm, gated MLP, rotary")


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["kept", "again"])
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_an_update_with_faster_parts_is_the_update_without(
    options: dict[str, Any], adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Plain()
    results = []
    for found in (None, kernels):
        monkeypatch.setattr(backbone, "layer_kernels", lambda device, found=found: found)
        model = tiny_llama(VOCABULARY)
        if adapted:
            adapt(model, LoraSettings(rank=2, alpha=4))
        learner = learner_of(model, packing="on", **options)
        kernels.calls = dict.fromkeys(kernels.calls, 0)
        learner.update(make_groups(tiny_llama(VOCABULARY)))
        results.append(gradient(learner))
        runs = 2 if options else 1
        used = {"rms_norm": 4 * runs + 1, "gated": 2 * runs, "rotary": 2 * runs}  # for one micro batch
        assert kernels.calls == (used if found else dict.fromkeys(used, 0))
    assert_close_to_norm(results[1], results[0])


KERNELS = """
import sys
import torch
from torch.nn import functional
from agentfly.kernels import layers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

device = sys.argv[1]
torch.manual_seed(0)
types = {torch.float32: 3e-6, torch.float16: 2**-9}
if device == "cuda":  # Triton's interpreter cuts bfloat16 off where a GPU rounds it
    types[torch.bfloat16] = 2**-6

def noise(*shape, dtype, loud=1.0):
    return (loud * torch.randn(*shape, device=device)).to(dtype)

def same(name, ours, theirs, by, eps):
    mine, other = ours(), theirs()
    push = [torch.randn_like(each) + each.detach() for each in other]
    got, want = torch.autograd.grad(mine, by, push), torch.autograd.grad(other, by, push)
    for a, b in zip((*mine, *got), (*other, *want)):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        gap = float((a - b).detach().float().abs().max() / b.detach().float().abs().max())
        assert gap <= eps, (name, gap, eps)

for dtype, eps in types.items():
    for shape in ((3, 11, 48), (1, 37, 5, 16), (2, 1100)):
        for module, kind in ((LlamaRMSNorm(shape[-1]), "llama"), (Gemma3RMSNorm(shape[-1]), "gemma")):
            module = module.to(device, dtype)
            module.weight.data.normal_()
            x = noise(*shape, dtype=dtype, loud=3.0).requires_grad_()
            own = lambda: [layers.rms_norm(x, module.weight, 1e-6, kind)]
            same((kind, dtype, shape), own, lambda: [module(x)], [x, module.weight], eps)
            module.weight.requires_grad_(False)
            same((kind, dtype, shape, "frozen"), own, lambda: [module(x)], [x], eps)
    strided = noise(1, 5, 200, dtype=dtype).requires_grad_()
    norm = LlamaRMSNorm(16).to(device, dtype)
    part = lambda: strided[..., 8:104].view(1, 5, 6, 16)
    same(
        ("strided", dtype), lambda: [layers.rms_norm(part(), norm.weight, 1e-6, "llama")], lambda: [norm(part())],
        [strided, norm.weight], eps,
    )
    acts = {"silu": functional.silu, "gelu": lambda t: functional.gelu(t, approximate="tanh")}
    for kind, act in acts.items():
        gate, up = (noise(1, 6, 1536, dtype=dtype, loud=4.0).requires_grad_() for _ in range(2))
        gate.data[0, 0, :2] = torch.tensor([-200.0, 30.0])  # exp overflows
        same((kind, dtype), lambda: [layers.gated(gate, up, kind)], lambda: [act(gate) * up], [gate, up], eps)
        halves = noise(1, 6, 192, dtype=dtype).requires_grad_()
        own = lambda: [layers.gated(*halves.split(96, -1), kind)]
        same((kind, dtype, "halves"), own, lambda: [act(halves[..., :96]) * halves[..., 96:]], [halves], eps)
    for heads, kv_heads, dim in ((9, 3, 64), (20, 20, 24), (1, 1, 12)):
        q, k = (noise(1, 5, each, dim, dtype=dtype).transpose(1, 2).requires_grad_() for each in (heads, kv_heads))
        line = (q, k, *noise(2, 1, 5, dim, dtype=dtype))
        same(("rotary", dtype), lambda: layers.rotary(*line), lambda: apply_rotary_pos_emb(*line), [q, k], eps)
print("equal")
"""

REPLICAS = """
import sys
import torch
from agentfly.kernels import layers
from agentfly.learn.model import backbone
from agentfly.learn.batching import Rows
from agentfly.learn.model.logprobs import Scorer
from agentfly.learn.model.lora import adapt
from agentfly.learn.settings import LoraSettings, OptimSettings
from tests.close import assert_close_to_norm
from tests.engines.tiny import make_model
from tests.learn.model.test_logprobs import rows_of

device = torch.device(sys.argv[1])
rows = Rows(rows_of())

def gradients(family, dtype, kernels, again=False, adapted=False, computed=None):
    backbone.layer_kernels = lambda device: kernels
    model = make_model(family).to(device, dtype).to(computed or dtype)
    if adapted:
        adapt(model, LoraSettings(rank=2, alpha=4))
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.data.copy_(torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape) / 10)
    scorer = Scorer(model)
    assert scorer.prepare(OptimSettings(packing="on", gradient_checkpointing=again))
    count = sum("forward" in vars(module) for module in scorer.head.backbone._replica.modules())
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    plain = norms + 3 if device.type == "cpu" else 0  # a CPU has backward passes in torch for norms and rotary embedding
    assert count == (norms + 6 if kernels else plain), (family, dtype, count, norms)
    logprobs = scorer(rows.packed(range(4), device)).logprobs
    logprobs.sum().backward()
    learned = [parameter.grad.flatten().float() for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([logprobs.detach().float(), *learned])

cases = [("llama", {"again": True}), ("qwen3", {"adapted": True})]
types = [torch.float32]
if device.type == "cuda":  # what an interpreter has no time for
    cases += [("llama", {}), ("qwen2", {}), ("gemma3", {}), ("qwen3", {}), ("qwen3", {"adapted": True, "again": True})]
    types += [torch.bfloat16]
for family, options in cases:
    for dtype in types:
        want, got = (gradients(family, dtype, kernels, **options) for kernels in (None, layers))
        far = lambda a, b: float((a - b).norm() / b.norm())
        if dtype == torch.float32:
            assert_close_to_norm(got, want, of=(family, options))
        else:  # as near to the truth of these weights as torch is: its own roundings are not better than others
            truth = gradients(family, dtype, None, computed=torch.float32, **options)
            assert far(got, truth) < 1.5 * far(want, truth), (family, options, far(got, truth), far(want, truth))
print("equal")
"""


def run_script(script: str, device: str, interpreted: bool) -> None:
    """In a separate process, because Triton's interpreter, which needs no GPU, is chosen before the first import."""
    root = Path(__file__).parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", script, device],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **({"TRITON_INTERPRET": "1"} if interpreted else {})},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.stdout.strip().endswith("equal"), done.stdout + done.stderr


@has_interpreter
@pytest.mark.parametrize("script", [KERNELS, REPLICAS], ids=["kernels", "replicas"])
def test_the_layers_kernels_compute_what_torch_computes(script: str) -> None:
    run_script(script, "cpu", interpreted=True)


@has_triton
@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("script", [KERNELS, REPLICAS], ids=["kernels", "replicas"])
def test_the_layers_kernels_compute_on_the_device_what_torch_computes(script: str) -> None:
    run_script(script, "cuda", interpreted=False)


@has_triton
@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_packed_update_on_the_device_is_the_same_with_and_without_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = make_groups(tiny_llama(VOCABULARY))
    results = []
    for kernels in (None, layer_kernels(torch.device("cuda"))):
        monkeypatch.setattr(backbone, "layer_kernels", lambda device, kernels=kernels: kernels)
        learner = learner_of(tiny_llama(VOCABULARY).cuda().to(dtype), packing="on")
        assert replaced(learner._modules.scorer.head.backbone._replica) == (9 if kernels else 0)
        metrics = learner.update(groups)
        results.append((gradient(learner), metrics))
    (want, before), (got, after) = results
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert after["train/loss"] == pytest.approx(before["train/loss"], rel=tolerance, abs=tolerance)
    assert error_of_norm(got, want) < tolerance
