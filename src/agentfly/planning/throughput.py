"""How long the parts of a step take. The model is physical; its few parameters are fitted on measured points.

    decode step of B sequences    launch x layers + matrix x max(weights / bandwidth, 2 x weights x B / matmul)
                                  + cache x keys and values / bandwidth + logits x B x vocabulary x 4 / bandwidth
    reply, tool, next reply       k decode steps and the tool's latency; `agent` is the share of that rate which chains reach
    learning one token            compute x (6 x weights + attention) / matmul + layers x activations / bandwidth
    a pass over sharded weights   gathers them twice and reduces the gradients once, while it computes

    synchronous    max(tail x sample, environments, host) + learn + publish
    asynchronous   max(sample, environments, host, learn + publish)

What several devices add (links between them) is computed, not measured: `Card.link` and the tail are assumptions, and the
printed plan says so.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from .layout import Layout
from .shapes import ModelShape

TURN_S = 53e-6
"""CPU seconds of this package per turn and chain: benchmarks/results/overhead.json, 1,024 chains."""
PROOF_S = 0.3
TAIL = 2.0
"""Slowest over mean chain of a synchronous step: assumed."""
AGAIN, LORA = 1.2, 0.9
"""Time of an update with layers computed again, and with adapters, over a full update: measured at 3B's shape."""
REDUCE_S = 20e-6
"""An exchange between the GPUs of one sampler, of which a layer has two in each decode step: assumed."""
RANGE = 2.5
"""A step on devices or sizes that were not measured takes up to so many times what is computed: see PUBLISHED."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU: bytes/s of copies, operations/s of matrix products in bfloat16, memory, and bytes/s to its neighbours.

    The first two are as measured on one H200; for other cards they are the published figures, times the same shares.
    """

    name: str
    bandwidth: float
    matmul: float
    gib: float
    link: float = 300e9
    """Bytes/s between GPUs of one machine: assumed."""
    network: float = 40e9
    """Bytes/s between machines, per GPU: assumed."""


CARDS = {
    card.name: card
    for card in (
        Card("H200", 4.21e12, 795e12, 139.0),
        Card("H100", 2.94e12, 795e12, 79.0),
        Card("A100", 1.78e12, 251e12, 79.0, link=200e9, network=20e9),
        Card("B200", 7.0e12, 1810e12, 167.0, link=600e9),
        Card("L40S", 0.757e12, 291e12, 44.0, link=20e9, network=10e9),
        Card("A6000", 0.673e12, 124e12, 47.0, link=20e9, network=10e9),
        Card("A10", 0.526e12, 100e12, 22.0, link=20e9, network=10e9),
        Card("L4", 0.263e12, 97e12, 22.0, link=20e9, network=10e9),
        Card("5090", 1.57e12, 168e12, 31.0, link=20e9, network=10e9),
        Card("4090", 0.884e12, 133e12, 23.5, link=20e9, network=10e9),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A step of somebody else's trainer, beside which a plan can be held. `row` is the mean length of a sample."""

    run: str
    size: str
    card: str
    gpus: int
    samples: int
    row: int
    step_s: float


PUBLISHED = (
    Published(run="NeMo RL 0.4, Llama 3.1 8B", size="8B", card="H100", gpus=16, samples=2048, row=1060, step_s=97.7),
    Published(run="NeMo RL 0.4, Qwen3 32B", size="32B", card="H100", gpus=32, samples=2048, row=3206, step_s=393.0),
)
"""On policy. They compute log-probs in a pass of their own and take four optimizer steps, which the plan does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fitted parameters, dimensionless but for `launch_s` (per layer)."""

    launch_s: float
    matrix: float
    cache: float
    logits: float
    agent: float
    compute: float
    layers: float
    hidden_acts: float
    inner_acts: float

    def activation_bytes(self, shape: ModelShape) -> float:
        """Activations that one layer keeps per token, in two bytes each."""
        return 2 * (self.hidden_acts * shape.hidden + self.inner_acts * shape.intermediate)

    def decode_s(self, shape: ModelShape, card: Card, batch: float, context: float) -> float:
        """Seconds of one decode step of `batch` sequences with `context` tokens each."""
        weights = max(2 * shape.computed / card.bandwidth, 2 * shape.computed * batch / card.matmul)
        keys = batch * context * shape.kv_bytes / card.bandwidth
        logits = batch * shape.vocabulary * 4 / card.bandwidth
        return self.launch_s * shape.layers + self.matrix * weights + self.cache * keys + self.logits * logits

    def agent_tokens_per_s(
        self, shape: ModelShape, card: Card, chains: float, context: float, reply: float, latency_s: float
    ) -> float:
        """Sampled tokens per second of chains whose replies of `reply` tokens are followed by tools of `latency_s`."""
        batch = chains
        for _ in range(50):  # chains that wait for their tools are not in the batch
            sampling = reply * self.decode_s(shape, card, max(1.0, batch), context)
            batch = 0.5 * batch + 0.5 * chains * sampling / (sampling + latency_s)
        return self.agent * chains * reply / (sampling + latency_s)

    def learn_s(self, shape: ModelShape, card: Card, row: float = 0.0) -> float:
        """Seconds of one token in an update of all weights, packed, in rows of `row` tokens."""
        moved = shape.layers * self.activation_bytes(shape)
        attention = 6 * row * shape.layers * shape.heads * shape.head_dim  # half of the row, twice, forward and backward
        return self.compute * (6 * shape.computed + attention) / card.matmul + self.layers * moved / card.bandwidth


@cache
def read_fit() -> dict[str, Any]:
    """fitted.json: the parameters, and every point with what was measured and predicted."""
    content: dict[str, Any] = json.loads((files(__package__) / "fitted.json").read_text(encoding="utf-8"))
    return content


def fitted() -> Fit:
    return Fit(**read_fit()["parameters"])


def held_back_errors() -> dict[str, float]:
    """Per part of the model: the largest relative error on points that the fit did not see."""
    worst: dict[str, float] = {}
    for point in read_fit()["points"]:
        if point["held_back"]:
            error = abs(point["predicted"] / point["measured"] - 1)
            worst[point["part"]] = max(worst.get(point["part"], 0.0), error)
    return worst


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step: chains, turns of each, sampled tokens of a reply, tokens of a row, and what tools and environments take."""

    chains: int
    turns: float
    reply: float
    row: float
    latency_s: float
    turn_cpu_s: float
    cores: int
    batch_tokens: int = 8192
    epochs: int = 1
    asynchronous: bool = False
    at_once: int | None = None
    """Chains that the samplers hold at once; None: all."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of the parts of one step, and of the whole."""

    sample: float
    environments: float
    host: float
    learn: float
    publish: float
    total: float
    tokens: float
    bottleneck: str


def step_of(
    shape: ModelShape, card: Card, layout: Layout, work: StepWork, *, per_node: int = 8, lora: bool = False,
    reduce_bytes: int = 4, fit: Fit | None = None,
) -> StepSeconds:  # fmt: skip
    """Returns the expected step. A sampler over several GPUs has their bandwidth and speed, and waits for exchanges."""
    fit = fit or fitted()
    wide = Card(card.name, card.bandwidth * layout.sampler_gpus, card.matmul * layout.sampler_gpus, card.gib)
    sampling = fit if layout.sampler_gpus == 1 else replace(fit, launch_s=fit.launch_s + 2 * REDUCE_S)
    busy = min(layout.samplers, work.chains)
    chains = (work.at_once or work.chains) / busy
    rate = busy * sampling.agent_tokens_per_s(shape, wide, chains, work.row / 2, work.reply, work.latency_s) / layout.on_one_gpu
    tokens = work.chains * work.turns * work.reply
    sample = tokens / rate
    environments = work.chains * work.turns * work.turn_cpu_s / work.cores
    host = work.chains * work.turns * TURN_S / layout.samplers
    per_token = fit.learn_s(shape, card, work.row) * (LORA if lora else 1.0) * (AGAIN if layout.again else 1.0)
    link = card.link if layout.gpus <= per_node else card.network
    among = card.link if layout.learners <= per_node else card.network
    rows = work.chains * work.row * work.epochs
    learn = rows * per_token / layout.learners
    if layout.learners > 1:
        passes = max(1, math.ceil(rows / layout.learners / work.batch_tokens))
        moved = shape.weights * (4 + (0 if lora else reduce_bytes))  # gathered twice in bfloat16, and reduced
        learn = max(learn, passes * moved / among)
    publish = 2 * shape.weights / (card.bandwidth / 8 if layout.gpus == 1 else link) + PROOF_S
    together = max(sample, environments, host)
    if work.asynchronous:
        total = max(together, learn + publish)
        parts = {"sampling": sample, "environments": environments, "host": host, "learning": learn + publish}
    else:
        total = max(TAIL * sample, environments, host) + learn + publish
        parts = {
            "sampling": TAIL * sample,
            "environments": environments,
            "host": host,
            "learning": learn,
            "publishing": publish,
        }
    return StepSeconds(sample, environments, host, learn, publish, total, tokens, max(parts, key=lambda name: parts[name]))
