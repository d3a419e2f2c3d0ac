"""Low-rank adapters: a frozen model learns through small matrices beside its linear layers; arXiv:2106.09685.

    y = W x + (alpha / rank) B A x        W frozen, A [rank, in] random, B [out, rank] zero: the first outputs do not change

`adapt` changes the model in place, so an engine that shares it samples from the adapted weights. Experts have one adapter each
(see `expert_lora`). Layers with a forward of their own and weights with two owners get none; `coverage` says what is adapted.
`engines.local.load.merged_weights` gives the weights of the equivalent plain model; `save_adapter` writes PEFT's format.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...kernels.replica import evaluating
from ..settings import LoraSettings
from .expert_lora import ExpertAdapter, LoraExperts, expert_weights

FOLDER = "adapter"
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


class LoraLinear(nn.Module):
    """A frozen linear layer and its low-rank adapter."""

    adapts = True

    def __init__(self, base: nn.Linear, settings: LoraSettings, generator: torch.Generator) -> None:
        super().__init__()
        weight = base.weight
        self.base = base.requires_grad_(False)
        self.rank, self.scale = settings.rank, settings.alpha / settings.rank
        self.merges = False  # computes with the merged weight, to compare
        self.uses = {"weight": 0, "forward": 0}
        bound = 1.0 / math.sqrt(base.in_features)
        drawn = torch.empty(settings.rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(drawn.to(weight.device, weight.dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, settings.rank, device=weight.device, dtype=weight.dtype))

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for code that reads a linear layer's dtype or device."""
        self.uses["weight"] += 1
        return self.merged() if self.merges else self.base.weight

    @property
    def frozen(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        self.uses["forward"] += 1
        if self.merges:
            return nn.functional.linear(x, self.merged(), self.base.bias)
        down = nn.functional.linear(x, self.lora_a)
        out: Tensor = self.base(x) + nn.functional.linear(down, self.lora_b) * self.scale
        return out

    def merged(self) -> Tensor:
        """Returns the weight of the equivalent linear layer."""
        return (self.base.weight.float() + self.scale * (self.lora_b.float() @ self.lora_a.float())).to(self.base.weight.dtype)


def adapt(model: nn.Module, settings: LoraSettings, seed: int = 0) -> int:
    """Freeze the model and add adapters to its linear layers and experts, in place. Returns their number; existing ones stay.

    Raises ConfigError if a target layer does not exist, if the model has adapters with other settings, or if the model with
    adapters and the one with merged weights differ.
    """
    there = list(adapters(model))
    if there:
        rank = there[0][1].rank
        if rank != settings.rank or there[0][1].scale != settings.alpha / settings.rank:
            raise ConfigError(f"the model has adapters of rank {rank} already: train on with the [lora] they were made with")
        return len(there)
    if any(not weight.is_floating_point() for weight in model.parameters()):
        raise ConfigError("lora: the weights of the model are quantised, and adapters are trained beside whole ones only")
    owners = Counter(
        id(weight) for part in model.modules() for child in part.children() for weight in child.parameters(recurse=False)
    )
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not _head(model) and settings.wants(name) and owners[id(child.weight)] == 1
    ]
    stacks = {
        (parent, name): wanted
        for parent in model.modules()
        for name, child in parent.named_children()
        if (wanted := [weight for weight in expert_weights(child) if settings.wants(weight)])
    }
    if not (layers or stacks):
        names = {name.rpartition(".")[2] for name, child in model.named_modules() if type(child) is nn.Linear}
        names.update(weight for child in model.modules() for weight in expert_weights(child))
        raise ConfigError(f"lora.targets name none of the model's linear layers; it has {', '.join(sorted(names))}")
    named = {name for _, name, _ in layers} | {name for names in stacks.values() for name in names}
    missing = set(settings.targets) - {"all"} - named
    if missing:
        raise ConfigError(f"lora.targets: the model has no linear layer called {sorted(missing)[0]!r}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parent, name, child in layers:
        setattr(parent, name, LoraLinear(child, settings, generator))
    for (parent, name), weights in stacks.items():
        setattr(parent, name, LoraExperts(getattr(parent, name), weights, settings, generator))
    _compare_merged(model, layers)
    return sum(1 for _ in adapters(model))


@torch.no_grad()
def _compare_merged(model: nn.Module, found: list[tuple[nn.Module, str, nn.Linear]]) -> None:
    """Remove adapters that the model passes by, reading the weight itself; compare the others with merged weights."""
    own = [module for _, module in adapters(model)]
    device = own[0].lora_a.device
    ids = torch.tensor([[1, 2, 3, 5, 8, 13]], device=device)
    generator = torch.Generator().manual_seed(0)

    def logits(merges: bool) -> Tensor:
        for module in own:
            module.merges = merges
        out: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
        return out

    with evaluating(model):
        plain = logits(False)
        for parent, name, child in found:
            if (module := getattr(parent, name)).uses["weight"] and not module.uses["forward"]:
                setattr(parent, name, child)
        for module in own:
            noise = torch.randn(module.lora_b.shape, generator=generator) * module.frozen.float().std().cpu()
            module.lora_b.copy_(noise)
        beside, merged = logits(False), logits(True)
    for module in own:
        module.merges = False
        module.lora_b.zero_()
    gap, effect = float((beside - merged).abs().max()), float((beside - plain).abs().max())
    # In half precision the merged weights round differently, and an expert that is chosen by a hair may change.
    limit = 1e-3 * max(1.0, float(beside.abs().max())) if plain.dtype == own[0].lora_a.dtype else max(0.1, effect)
    if not gap <= limit:
        raise ConfigError(
            f"lora: {type(model).__name__} with adapters and with merged weights differ by {gap:.3g} in a logit: train it "
            "without lora.rank, or name other layers in lora.targets"
        )


def coverage(model: nn.Module) -> str:
    """What share of the matrices of an adapted model has adapters, and which kinds have none, as a sentence."""
    tables = [getattr(model, get)() for get in ("get_input_embeddings", "get_output_embeddings")]
    ends = {id(weight) for table in tables if table is not None for weight in table.parameters()}
    adapted = {id(module.frozen) for _, module in adapters(model)}
    sizes: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and id(weight) not in ends and "lora_" not in name:
            parts = (part for part in name.split(".") if not part.isdigit() and part not in ("weight", "base"))
            kind = "" if id(weight) in adapted else ".".join(parts)
            sizes[kind] += weight.numel()
    total, left = sum(sizes.values()), Counter({kind: size for kind, size in sizes.items() if kind})
    names = ", ".join(f"{kind.partition('layers.')[2] or kind} ({size / total:.0%})" for kind, size in left.most_common(4))
    share = f"adapters beside {sizes[''] / total:.0%} of the matrix weights"
    return f"{share}; without: {names}" if names else share


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add the adapters to the weights beside them and remove them, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLinear):
                child.base.weight.data = child.merged()
                setattr(parent, name, child.base)
            elif isinstance(child, LoraExperts):
                for _, adapter in adapters(child):
                    adapter.frozen.data = adapter.merged()
                setattr(parent, name, child.base)


def adapters(model: nn.Module) -> Iterator[tuple[str, LoraLinear | ExpertAdapter]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear | ExpertAdapter):
            yield name, module


def is_adapted(model: nn.Module) -> bool:
    return next(adapters(model), None) is not None


def copy_sharing_frozen(model: nn.Module) -> nn.Module:
    """Returns a copy that shares the frozen tensors and copies the trainable ones."""
    frozen = {id(tensor): tensor for tensor in model.parameters() if not tensor.requires_grad}
    return copy.deepcopy(model, frozen)


@torch.no_grad()
def frozen_base(model: nn.Module) -> nn.Module:
    """Returns the model as it was before its adapters learned. It shares the frozen weights."""
    base = copy_sharing_frozen(model)
    for _, module in adapters(base):
        module.lora_b.zero_()
    return base


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the matrices of the adapters under PEFT's names; those of experts have three dimensions."""
    return {
        f"base_model.model.{name}.lora_{part}.weight": matrix.detach()
        for name, module in adapters(model)
        for part, matrix in (("A", module.lora_a), ("B", module.lora_b))
    }


def save_adapter(model: nn.Module, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write the adapters alone, in PEFT's format: `weights`, by default those of the model."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = adapter_weights(model) if weights is None else weights
    tensors = {name: matrix.contiguous().cpu() for name, matrix in weights.items()}
    last = next(module for _, module in adapters(model))
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None),
        "r": last.rank,
        "lora_alpha": last.scale * last.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name, part in adapters(model) if isinstance(part, LoraLinear)}),
    }
    if experts := sorted(name for name, part in adapters(model) if isinstance(part, ExpertAdapter)):
        config["target_parameters"] = experts
    save_file(tensors, folder / _WEIGHTS)
    (folder / _CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    """Load the adapters of a checkpoint into a model with equal adapters, in place. Raises ConfigError if they differ."""
    from safetensors.torch import load_file

    file = folder / _WEIGHTS
    if not file.is_file():
        raise ConfigError(f"{folder.parent} holds no adapters: it was saved without [lora]; resume it without [lora]")
    saved = load_file(file)
    wanted = {
        f"base_model.model.{name}.lora_{part}.weight": (module, part) for name, module in adapters(model) for part in "AB"
    }
    if set(saved) != set(wanted):
        raise ConfigError(f"{folder} holds other adapters than [lora] describes: resume with the settings it was saved with")
    for key, (module, part) in wanted.items():
        (module.lora_a if part == "A" else module.lora_b).copy_(saved[key])


def _head(model: nn.Module) -> Any:
    get: Any = getattr(model, "get_output_embeddings", None)
    return get() if get is not None else None
