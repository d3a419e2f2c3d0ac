"""Whether a family of models can be sampled, trained, adapted and exported: each is tried on a miniature with random weights.

The reference is the miniature's own forward, one row at a time, on rows longer than every window. Nothing is downloaded but the
config.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...engines.local.families.miniature import make_miniature, one_thread
from ...engines.local.families.support import why_not_causal, why_not_loaded, why_not_sampled, why_not_trained, why_too_long
from ...engines.local.load import quiet, save_model
from ...errors import ConfigError
from ...kernels.rope import fix_rope
from ...types import Sample
from ..batching import Rows
from ..settings import LoraSettings, OptimSettings
from .logprobs import Scorer
from .lora import adapt, adapters, coverage, merge_adapters

LENGTHS = (9, 30, 14, 30)
PREFIX = 6
LIMIT = 2e-3


@dataclass(frozen=True, slots=True)
class Finding:
    """One ability of a model: whether it has it, and how or why not."""

    name: str
    ok: bool
    told: str


@one_thread()
def examine(config: Any, max_context: int | None = None) -> list[Finding]:
    """What a model of this config can do, in seconds. Raises ConfigError if the family has no miniature."""
    text = config.get_text_config()
    if why := why_not_loaded(config) or why_too_long(text, max_context):
        return [Finding("loaded", False, why)]
    model = make_miniature(config, max_context)
    fix_rope(model, max_context or 64)
    sampled, trained = why_not_sampled(model), why_not_trained(text, max_context) or why_not_causal(model)
    reference = cache(lambda: _alone(model, _samples()))  # one row at a time: slow for recurrent layers
    tries: list[tuple[str, Callable[[Any], str]]] = [
        ("trained", lambda own: _compare(own, OptimSettings(), *reference())),
        ("checkpointed", lambda own: _compare(own, OptimSettings(gradient_checkpointing=True), *reference())),
        ("adapted", _adapt), ("exported", _export),
    ]  # fmt: skip
    findings = [Finding("sampled", sampled is None, sampled or "by the local engine, over slots and over pages")]
    if trained is not None:
        return [*findings, Finding("trained", False, trained)]
    for name, attempt in tries:
        try:
            findings.append(Finding(name, True, attempt(copy.deepcopy(model))))
        except (ConfigError, RuntimeError, TypeError, AttributeError, ValueError) as error:
            findings.append(Finding(name, False, str(error).partition("\n")[0]))
    return findings


def _samples() -> list[Sample]:
    samples = []
    for number, length in enumerate(LENGTHS):
        ids = [5 + i for i in range(PREFIX)] + [(11 * i + 7 * number + 3) % 150 for i in range(length)]
        mask, zeros = np.array([0] * PREFIX + [1] * length), np.zeros(len(ids))
        samples.append(Sample(np.array(ids), mask, zeros, mask - 1, zeros, zeros, group="g", trajectory=str(number)))
    return samples


def _scores(scorer: Scorer, rows: Rows, shape: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The log-probs of all rows in batches of this shape, and the gradient of their sum."""
    scorer.model.zero_grad()
    got = torch.zeros(rows.num_tokens)
    for batch in rows.batches(range(len(rows)), 200, torch.device("cpu"), shape):
        scores = scorer(batch).logprobs.float()
        torch.autograd.backward([scores.sum()])
        got[batch.tokens] = scores.detach()
    return got, [weight.grad.clone() for weight in scorer.model.parameters() if weight.grad is not None]


def _alone(model: Any, samples: list[Sample]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same by the model's own forward, one row at a time."""
    model.zero_grad()
    logprobs = []
    for sample in samples:
        ids = torch.tensor([list(sample.token_ids)])
        scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        own = scores[PREFIX - 1 : -1].gather(1, ids[0, PREFIX:, None])[:, 0]
        torch.autograd.backward([own.sum()])
        logprobs.append(own.detach())
    return torch.cat(logprobs), [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def _compare(model: Any, optim: OptimSettings, want: torch.Tensor, slopes: list[torch.Tensor]) -> str:
    """How the learner runs rows. Raises ConfigError if log-probs or gradients are not those of the rows alone."""
    samples = _samples()
    scorer = Scorer(model)
    shape = scorer.prepare(optim)
    got, pushed = _scores(scorer, Rows(samples), shape)
    gap = float((got - want).abs().max())
    if not gap <= LIMIT * max(1.0, float(want.abs().max())):
        raise ConfigError(f"{shape} rows have other log-probs than rows alone: they differ by {gap:.2g} nats")
    far = max(float((a - b).norm()) for a, b in zip(pushed, slopes, strict=True))
    if not far <= 1e-2 * max(float(slope.norm()) for slope in slopes):
        raise ConfigError(f"{shape} rows have other gradients than rows alone")
    return {"shared": "rows packed, prompts shared", "packed": "rows packed", "padded": "rows padded"}[shape]


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits[0].float()
    return out


def _adapt(model: Any) -> str:
    adapt(model, LoraSettings(rank=2))
    with torch.no_grad():
        for _, module in adapters(model):
            module.lora_b.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    sentence, beside = coverage(model), _logits(model)
    merge_adapters(model)
    if not (gap := float((_logits(model) - beside).abs().max())) <= LIMIT * max(1.0, float(beside.abs().max())):
        raise ConfigError(f"merged adapters compute something else: a logit differs by {gap:.2g}")
    return sentence


def _export(model: Any) -> str:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder, quiet():
        save_model(model, None, Path(folder))
        again = auto.from_pretrained(folder, attn_implementation=model.config._attn_implementation).eval()
    fix_rope(again, 64)
    if not (gap := float((_logits(again) - _logits(model)).abs().max())) <= LIMIT:
        raise ConfigError(f"the saved model is another one: a logit differs by {gap:.2g}")
    return "saved and loaded again"
