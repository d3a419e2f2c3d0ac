"""The learner's copy of a model that is sampled elsewhere, and the proof that the other side samples from this copy.

For the proof the engine scores a fixed prompt and continues it, at a temperature other than 1 and through its cache. Weights,
log-probs and the emptied cache are thereby proven at once. An answer that is not this copy's, or that is closer to the weights
before the update, raises an InvariantError. Several engines that hold the same weights are proven one by one: `expect` scores
the probe once, and `check` compares each answer with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import InvariantError
from ..kernels.replica import evaluating
from ..protocols import Renderer
from ..types import Proof, Sampling
from .local.load import context_of, end_ids, find_source, load_model, merged_tensors, read_settings, save_model, tune
from .prompt import ProbeAnswer

PROBE_TOKENS = 160  # longer than a block of any prefix cache: 16 on most devices, 128 in vLLM on a CPU
PROBE = Sampling(temperature=0.7, max_tokens=16, seed=20_011)
DISTINCT = 4.0  # old and new weights are distinguishable if they differ by this many times the noise between both sides


Bucket = list[tuple[str, torch.Tensor]]
"""Some of the weights, by their names in the model's state dict."""
BUCKET_BYTES = 1 << 30


def weight_buckets(model: torch.nn.Module, max_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Yields the state dict of the equivalent model without adapters, in buckets of at most `max_bytes` or one tensor."""
    bucket: Bucket = []
    size = 0
    for name, tensor in merged_tensors(model):
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def score_ids(model: torch.nn.Module, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of every id from the second on under a model."""
    inputs = torch.tensor([list(ids)], device=next(model.parameters()).device)
    with evaluating(model):
        logits = model(input_ids=inputs, use_cache=False).logits[0, :-1].float() / temperature
    chosen: list[float] = torch.log_softmax(logits, -1).gather(1, inputs[0, 1:, None])[:, 0].tolist()
    return chosen


class LearnerCopy:
    """The learner's model, loaded at the first use, and the tokenizer, renderer and stop ids that the engine shares."""

    def __init__(
        self,
        name: str | Path,
        *,
        device: str | None = None,
        dtype: str | None = None,
        max_context: int | None = None,
        stop_ids: Iterable[int] | None = None,
        chat_template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        from ..render import HFRenderer

        self.name = name
        self._device, self._dtype, self._max_context = device, dtype, max_context
        self._model: Any = None
        if name == "smollm2":  # a single GGUF file: its config cannot be read without the weights
            self.tokenizer = self._load()
            config, generation = self.model.config, self.model.generation_config
        else:
            self.tokenizer, config, generation = read_settings(name)
        ends = end_ids(config, generation, self.tokenizer) if stop_ids is None else set(stop_ids)
        self.renderer: Renderer = HFRenderer(self.tokenizer, chat_template, stop_ids=sorted(ends), template_args=template_args)
        self.stop_ids = frozenset(ends).union(self.renderer.stop_ids)
        self.context = max_context or context_of(config)
        self.num_ids = int(config.get_text_config().vocab_size)
        self.scorer: Callable[[Sequence[int], float], list[float]] | None = (
            None  # in place of the copy, if a learner is sharded
        )
        self._last: list[float] | None = None  # the probe's scores under the weights that were proven last
        self._before: list[float] | None = None  # those under the weights before the last `expect`
        self._own: list[float] = []
        self._noise = float("inf")

    @property
    def model(self) -> Any:
        if self._model is None:
            self._load()
        return self._model

    def _load(self) -> Any:
        """Load the model. Returns its tokenizer."""
        self._model, tokenizer = load_model(self.name, device=self._device, dtype=self._dtype, max_context=self._max_context)
        tune(next(self._model.parameters()))
        return tokenizer

    def source(self) -> str | None:
        """The folder or hub name that other programs can load, or None if the model must be saved first."""
        return None if self.name == "smollm2" else find_source(self.name)

    def weights(self) -> Iterator[Bucket]:
        """Yields the state dict of an equivalent model without adapters."""
        return weight_buckets(self.model)

    def save(self, folder: Path) -> None:
        """Save a folder that `from_pretrained` and the servers can load."""
        save_model(self.model, self.tokenizer, folder)

    def score(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probs of every id from the second on, under this copy."""
        return score_ids(self.model, ids, temperature) if self.scorer is None else self.scorer(ids, temperature)

    def unchanged(self) -> bool:
        """Whether the scores of the probe are bit-identical to those at the last proof."""
        return self._last is not None and self.score(self.probe_ids()) == self._last

    def still(self, scores: Sequence[float], limit: float) -> bool:
        """Whether these scores of the probe belong to the weights that were proven last."""
        return self._last is not None and _distance(scores, self._last) <= min(limit, DISTINCT * self._noise + 1e-4)

    def prove(self, version: int, ask: Callable[[list[int], Sampling], ProbeAnswer], limit: float) -> Proof:
        """Compare an engine's answer to the probe with this copy. Raises InvariantError if they differ."""
        self.expect()
        return self.check(version, ask(self.probe_ids(), PROBE), limit)

    def expect(self) -> None:
        """Score the probe under the present weights: `check` compares answers with them until the next call."""
        self._before, self._own = self._last, self.score(self.probe_ids())

    def check(self, version: int, told: ProbeAnswer, limit: float) -> Proof:
        """Compare one engine's answer to the probe with this copy. Raises InvariantError if they differ."""
        ids, own = self.probe_ids(), self._own
        again = self.score([*ids, *told.reply.token_ids], PROBE.temperature)[len(ids) - 1 :]
        gap, drawn = _distance(told.scores, own), _distance(told.reply.logprobs, again)
        if not gap <= limit:
            raise InvariantError(
                f"after the hand-over of version {version} the engine's log-probs differ from the learner's by {gap:.4g} nats "
                f"on average (limit {limit:g}): it does not sample from the learner's weights, or computes far less exactly"
            )
        if not drawn <= limit:
            raise InvariantError(
                f"after the hand-over of version {version} the engine scores a prompt as the learner does, but its sampled "
                f"tokens differ by {drawn:.4g} nats on average (limit {limit:g}): its cache is old, or its log-probs "
                "are not those of the temperature it sampled at (vLLM: --logprobs-mode processed_logprobs)"
            )
        moved = 0.0
        if self._before is not None:
            moved, behind = _distance(own, self._before), _distance(told.scores, self._before)
            if moved > DISTINCT * self._noise and gap >= behind:
                raise InvariantError(
                    f"after the hand-over of version {version} the engine still samples from the old weights: its "
                    f"log-probs differ from theirs by {behind:.4g} nats on average, from the new ones by {gap:.4g}"
                )
        self._last, self._noise = own, min(self._noise, max(gap, 1e-6))
        return Proof(version, max(gap, drawn), moved)

    def probe_ids(self) -> list[int]:
        count = max(2, min(PROBE_TOKENS, self.context // 2))
        return [(7919 * i + 3) % self.num_ids for i in range(count)]


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b) or not a:
        raise InvariantError(f"the engine gave {len(a)} log-probs instead of {len(b)}")
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
