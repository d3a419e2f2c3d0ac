"""Rotary embeddings whose frequencies depend on the length of a call (longrope, dynamic NTK), fixed for a whole run.

transformers takes the length from the largest position in a call. A call of the engine holds many chains and one of the learner
many rows, and cached keys keep the frequencies that they were computed with, so the choice is made once, by the longest
sequence of the run. vLLM chooses the same way, by its `max_model_len`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError

FIXED = "fixed"
"""The `rope_type` of a rotary embedding whose frequencies do not change any more; `agentfly_rope` keeps the one from before."""


def fix_rope(model: Any, max_context: int | None) -> None:
    """Choose the frequencies of the model for sequences of up to `max_context` tokens, in place (None: what it was made for).

    A model that was fixed before keeps its choice if the other length leads to the same one; otherwise ConfigError is raised.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if not hasattr(getattr(module, "config", None), "rope_parameters"):
            continue
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                _fix(module, layer, kind, max_context)
            elif kind == FIXED and max_context is not None:
                _check_choice(module, layer, module.agentfly_rope[layer], max_context)


def _fix(module: Any, layer: str | None, kind: str, max_context: int | None) -> None:
    prefix = "" if layer is None else f"{layer}_"
    device = getattr(module, f"{prefix}inv_freq").device
    frequencies, scaling = _frequencies(module, layer, kind, max_context or int(module.config.max_position_embeddings), device)
    setattr(module, f"{prefix}inv_freq", frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
    module.agentfly_rope = {**getattr(module, "agentfly_rope", {}), layer: kind}
    module.rope_type = FIXED if layer is None else {**module.rope_type, layer: FIXED}
    _check_length(module, layer, device)


def _check_choice(module: torch.nn.Module, layer: str | None, kind: str, max_context: int) -> None:
    now = getattr(module, "inv_freq" if layer is None else f"{layer}_inv_freq")
    wanted, _ = _frequencies(module, layer, kind, max_context, now.device)
    if not torch.allclose(wanted.float(), now.float(), rtol=1e-3):
        raise ConfigError(
            f"the RoPE frequencies of the model depend on the longest sequence ({kind}) and were fixed for another length than "
            f"max_context = {max_context:,}: load the model again for that length"
        )


def _frequencies(
    module: torch.nn.Module, layer: str | None, kind: str, length: int, device: torch.device
) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[kind](
        module.config, device, seq_len=length, **({} if layer is None else {"layer_type": layer})
    )
    return frequencies


def _check_length(module: Any, layer: str | None, device: torch.device) -> None:
    """Raise a ConfigError if a class has more that depends on the length, which this module does not know."""
    with torch.no_grad():
        near = torch.arange(4, device=device)[None]
        far = torch.cat([near, near + 2**24], dim=1)
        x = torch.zeros(1, device=device)
        (cos, _), (cos_far, _) = (module(x, at, **({} if layer is None else {"layer_type": layer})) for at in (near, far))
    if not torch.equal(cos, cos_far[..., :4, :]):
        raise ConfigError(
            f"{type(module).__name__} scales a sequence by the length of its neighbours in a batch: chains that run together "
            "cannot use this model"
        )
