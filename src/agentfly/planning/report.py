"""A recipe, a number of GPUs and a model -> layouts with memory per device, seconds of a step, the bottleneck, and the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..config import Config
from ..engines.options import default_cache, lends_by_default
from ..errors import ConfigError
from ..learn.algorithms import find_algorithm
from ..runs.checkpoints import newest_of
from .layout import Layout, layout_of, layouts
from .memory import GIB, DeviceMemory, memory_of, sampler_memory
from .shapes import ModelShape, find_shape, shape_of
from .throughput import CARDS, RANGE, TAIL, Card, StepSeconds, StepWork, held_back_errors, step_of

MARGIN = 0.92
"""Share of a device that a plan may fill: the memory model is off by up to a tenth, and fragments take some."""
PROMPT, OBSERVATION = 300, 50
"""Tokens of a prompt and of an observation if --row-tokens is not given: assumed."""
FEW = 8
"""A sampler that holds fewer chains at once than this is counted as not fitting."""
OTHER_TRAINER = 1.5
"""verl is proposed to a recipe of the own trainer if its step is so many times as fast, or if nothing else fits."""
USES = {
    "weights": "weights (bfloat16)", "masters": "master weights", "moments": "optimizer's moments", "gradients": "gradients",
    "activations": "activations", "critic": "critic", "reference": "reference model", "sampler": "sampler's copy",
    "cache": "cache", "runtime": "CUDA, exchange",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """The answer for one layout. `samples` is the memory of a GPU that samples alone, if there is one.

    `cache_gib` is what the chains of a step need at once, as far as the device has it: the key `agent.engine.kv_gib`.
    """

    shape: ModelShape
    card: Card
    layout: Layout
    per_node: int
    lora: int
    memory: DeviceMemory
    samples: DeviceMemory | None
    work: StepWork
    step: StepSeconds
    chains_at_once: int
    measured: bool
    named: bool
    again_asked: bool

    @property
    def gpus(self) -> int:
        return self.layout.gpus

    @property
    def usable(self) -> float:
        """GiB of the card that a plan may fill."""
        return MARGIN * self.card.gib

    @property
    def largest(self) -> float:
        """GiB of the fullest GPU. The own trainer's ranks hold the whole model before it is sharded."""
        whole = 0.0 if self.layout.verl else 2.0 * self.shape.weights / GIB
        return max(self.memory.total, self.samples.total if self.samples else 0.0, whole)

    @property
    def fits(self) -> bool:
        return self.largest <= self.usable and self.chains_at_once >= min(FEW, self.work.chains)

    @property
    def cache_gib(self) -> float:
        return (self.samples or self.memory).cache / self.layout.on_one_gpu

    @property
    def seconds(self) -> tuple[float, float]:
        """The step takes from ... to ... seconds."""
        if self.measured:
            error = max(held_back_errors().values())
            return self.step.total * (1 - error), self.step.total * (1 + error)
        return self.step.total, RANGE * self.step.total


def make_plan(config: Config, gpus: int | None = None, size: str | None = None, **options: Any) -> LayoutPlan:
    """The first of `find_plans`. Raises ConfigError."""
    return find_plans(config, gpus, size, **options)[0]


def find_plans(
    config: Config,
    gpus: int | None = None,
    size: str | None = None,
    *,
    card: str = "H200",
    per_node: int = 8,
    turns: float | None = None,
    reply_tokens: float | None = None,
    row_tokens: float | None = None,
    tool_s: float = 0.1,
    turn_cpu_s: float = 0.001,
    cores: int | None = None,
) -> list[LayoutPlan]:
    """Plan a run: first for the layout that the config names, then the others, the fastest that fit first. Raises ConfigError.

    A config that names no layout gets the fastest. Without a size, the recipe's own model is read. `turns`, `reply_tokens` and
    `row_tokens` are means of a chain; the recipe's limits are used for those that are not given.
    """
    named = layout_of(config)
    gpus = gpus if gpus is not None else named.gpus if named else 1
    if gpus < 1 or per_node < 1:
        raise ConfigError(f"--gpus and --gpus-per-node must be 1 or more, not {gpus} and {per_node}")
    if named is not None and named.gpus != gpus:
        raise ConfigError(f"the recipe's layout ({named}) takes {named.gpus} GPUs, not {gpus}: leave --gpus out, or its keys")
    if card not in CARDS:
        raise ConfigError(f"no GPU is called {card!r}; known: {', '.join(CARDS)}")
    if min(tool_s, turn_cpu_s) < 0 or (cores is not None and cores < 1):
        raise ConfigError("--tool-s and --turn-cpu-s must be 0 or more, and --cores 1 or more")
    for name, value in (("turns", turns), ("reply-tokens", reply_tokens), ("row-tokens", row_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value:g}")
    shape = find_shape(size) if size is not None else _shape_of_model(config.agent.model)
    turns = turns or config.agent.max_turns
    reply = reply_tokens or config.sampling.max_tokens
    row = row_tokens or min(config.agent.max_context or 1 << 30, PROMPT + turns * reply + (turns - 1) * OBSERVATION)
    work = StepWork(
        chains=config.rollout.num_tasks * config.rollout.num_chains,
        turns=turns,
        reply=reply,
        row=row,
        latency_s=tool_s,
        turn_cpu_s=turn_cpu_s,
        cores=cores or 2 * gpus,
        batch_tokens=_batch_tokens(config),
        epochs=config.train.epochs,
        asynchronous=config.rollout.max_lag > 0,
    )
    made = [_plan(config, shape, CARDS[card], each, work, per_node, each == named) for each in layouts(config, gpus, per_node)]
    made.sort(key=lambda plan: _order(plan, config))
    if named is not None:
        made = [_plan(config, shape, CARDS[card], named, work, per_node, True)] + [
            plan for plan in made if plan.layout != named
        ]
    return made


def _order(plan: LayoutPlan, config: Config) -> tuple[bool, float]:
    """Layouts that fit come first, the fastest of them before the others; of those that do not, the one that lacks least."""
    if not plan.fits:
        return True, plan.largest
    return False, plan.step.total * (OTHER_TRAINER if plan.layout.verl and config.backend != "verl" else 1.0)


def _plan(
    config: Config, shape: ModelShape, card: Card, layout: Layout, work: StepWork, per_node: int, named: bool
) -> LayoutPlan:
    lends = layout.in_one_process and not work.asynchronous and lends_by_default(shape.weights, card.gib * GIB)
    bare = _memory(config, shape, layout, 0.0, lends)
    alone = sampler_memory(shape, 0.0, layout.sampler_gpus)
    if layout.own:
        room = MARGIN * card.gib - alone.total
    elif layout.verl:
        room = min(
            MARGIN * card.gib - bare.runtime - bare.sampler - bare.beside_sampler,
            config.verl.memory_fraction * card.gib - bare.sampler,
        )
    elif lends:
        room = MARGIN * card.gib - bare.runtime - bare.beside_sampler
    else:
        room = MARGIN * card.gib - bare.total
    few = FEW * work.row * shape.kv_bytes / GIB
    if room < few:  # a tight plan uses the margin, and its verdict says so
        room += (1 - MARGIN) * card.gib
    asked = config.agent.engine.get("kv_gib") if isinstance(config.agent.engine, dict) else None
    if asked is not None:
        room = min(room, float(asked) * layout.on_one_gpu)
    per_chain = work.row * shape.kv_bytes / layout.sampler_gpus / GIB * layout.on_one_gpu
    at_once = int(min(work.chains / layout.samplers, max(0.0, room) / per_chain))
    held = at_once * layout.samplers
    work = replace(work, at_once=held or None)
    cache_tokens = at_once * work.row
    step = step_of(
        shape, card, layout, work, per_node=per_node, lora=config.lora.rank > 0,
        reduce_bytes=2 if config.learner.reduce == "bfloat16" else 4,
    )  # fmt: skip
    return LayoutPlan(
        shape=shape,
        card=card,
        layout=layout,
        per_node=per_node,
        lora=config.lora.rank,
        memory=_memory(config, shape, layout, 0.0 if layout.own else cache_tokens, lends),
        samples=sampler_memory(shape, cache_tokens, layout.sampler_gpus) if layout.own else None,
        work=work,
        step=step,
        chains_at_once=held,
        measured=layout.in_one_process and card.name == "H200" and shape.weights < 4e9,
        named=named,
        again_asked=config.train.gradient_checkpointing is True,
    )


@cache
def _shape_of_model(name: str) -> ModelShape:
    from ..engines.local.load import read_config  # late: torch

    if name.startswith("openai:") or name == "smollm2":
        if name == "smollm2":
            return find_shape("135M")
        raise ConfigError("a chat server's model has no known size: give --model-size")
    return shape_of(read_config(name), name)


def _memory(config: Config, shape: ModelShape, layout: Layout, cache_tokens: float, lends: bool) -> DeviceMemory:
    made = memory_of(
        shape,
        ranks=layout.learners,
        lora_rank=config.lora.rank,
        optim=config.train,
        batch_tokens=_batch_tokens(config),
        again=layout.again,
        critic=find_algorithm(config.algorithm).needs_critic and config.loss.critic == "copy",
        reference=_reference(config),
        cache_tokens=cache_tokens * layout.on_one_gpu,
        sampler_gpus=layout.sampler_gpus,
        shares=layout.in_one_process or layout.own,
    )
    return replace(made, sampler=made.sampler * layout.on_one_gpu, asleep=layout.verl or lends, offload=layout.offload)


def _reference(config: Config) -> bool | ModelShape:
    """The shape of the model that `loss.reference` loads; otherwise, whether a copy of the first weights is kept."""
    name = config.loss.reference
    if not config.loss.kl_coef or name is None or name == config.agent.model:
        return config.loss.kl_coef > 0
    return _shape_of_model(newest_of(name))


def _batch_tokens(config: Config) -> int:
    num_tokens = config.train.max_tokens_per_batch
    return 8192 if num_tokens == "auto" else int(num_tokens)


def best_of_each_kind(plans: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Of plans in their order: the first that fits of those shared by learner and sampler, apart, and with verl."""
    kinds: dict[tuple[bool, bool, bool], LayoutPlan] = {}
    for plan in plans:
        if plan.fits:
            kinds.setdefault((plan.layout.verl, plan.layout.own, plan.layout.again), plan)
    return list(kinds.values())


def show_plan(plan: LayoutPlan, others: Sequence[LayoutPlan] = ()) -> str:
    """Returns the plan as text; `others` are listed in a line each."""
    shape, card, work, step = plan.shape, plan.card, plan.work, plan.step
    how = f"LoRA of rank {plan.lora}" if plan.lora else "all weights trained"
    lines = [f"{shape.name} ({shape.of}: {shape.weights / 1e9:.2f} billion weights), {plan.gpus} x {card.name}, {how}"]
    why = "as the recipe says" if plan.named else "the fastest that fits" if plan.fits else "none fits; this lacks least"
    lines.append(f"layout: {plan.layout} ({why})")
    parts = {"one GPU": plan.memory}
    if plan.samples is not None:
        parts = {"a GPU that learns": plan.memory, "a GPU that samples": plan.samples}
    for name, memory in parts.items():
        lines += ["", f"memory of {name}, GiB of {card.gib:g}"]
        for use, words in USES.items():
            value = float(getattr(memory, use))
            if value >= 0.005:
                lines.append(f"  {words:<22}{value:>9.2f}")
        largest = "largest at once" if memory.asleep else "together"
        lines.append(f"  {largest:<22}{memory.total:>9.2f}")
    lines.append(f"  {_verdict(plan)}")
    mode = "sampling while learning" if work.asynchronous else "sampling and learning in turn"
    lines += [
        "",
        f"one step of {work.chains} chains, {work.turns:g} turns of {work.reply:g} tokens, rows of {work.row:g}; {mode}",
    ]
    for name, value in (
        ("sampling", step.sample), ("environments", step.environments), ("host", step.host), ("learning", step.learn),
        ("publishing weights", step.publish),
    ):  # fmt: skip
        lines.append(f"  {name:<22}{_two(value):>9} s")
    rate = step.tokens / step.total / plan.gpus
    tail = "" if work.asynchronous else f", with a tail of {TAIL:g} x sampling"
    low, high = plan.seconds
    lines.append(f"  {'step':<22}{_two(low):>9} to {_two(high)} s   at best {rate:,.0f} sampled tokens/s per GPU{tail}")
    lines.append(f"  bottleneck: {step.bottleneck}. {_advice(plan)}")
    lines += ["", "keys", *(f"  {line}" for line in _keys(plan))]
    if others:
        lines += ["", "other layouts"]
        lines += [f"  {each.layout!s:<52}{_two(each.seconds[0]):>9} to {_two(each.seconds[1])} s" for each in others]
    return "\n".join([*lines, "", *_trust(plan)]) + "\n"


def _two(seconds: float) -> str:
    """Two digits: more would promise what the model of speeds cannot keep."""
    return f"{float(f'{seconds:.2g}'):g}"


def _verdict(plan: LayoutPlan) -> str:
    if plan.largest > plan.card.gib:
        return f"does not fit: {_cure(plan)}"
    if plan.largest > plan.usable:
        return (
            f"tight: {plan.largest / plan.card.gib:.0%} of the card, and this estimate is up to 10 % off. Safer: {_cure(plan)}"
        )
    if not plan.fits:
        return f"leaves room for {plan.chains_at_once} chains at once: {_cure(plan)}"
    if plan.chains_at_once < plan.work.chains:
        return f"fits; {plan.chains_at_once} of {plan.work.chains} chains decode at once"
    return "fits"


def _cure(plan: LayoutPlan) -> str:
    whole = 0.0 if plan.layout.verl else 2.0 * plan.shape.weights / GIB
    if whole > plan.usable:
        return f'each GPU holds the model at the start, {whole:.0f} GiB: take larger GPUs, or backend = "verl" on more of them'
    cures = [] if plan.layout.again else ["train.gradient_checkpointing = true"]
    cures.append("a smaller train.max_tokens_per_batch")
    return ", ".join([*cures, *([] if plan.lora else ["lora.rank = 32"])]) + ", or more GPUs"


def _advice(plan: LayoutPlan) -> str:
    return {
        "sampling": "More chains per GPU fill the sampler better; rollout.max_lag hides the slowest chains.",
        "environments": "More cores, or placement of environments on other machines.",
        "host": "More sampler replicas: each has its own event loop.",
        "learning": "Fewer tokens per row, more GPUs, or LoRA; rollout.max_lag samples meanwhile.",
        "publishing": "More chains per step.",
    }[plan.step.bottleneck]


def _keys(plan: LayoutPlan) -> list[str]:
    layout = plan.layout
    if plan.largest > plan.card.gib:
        return ["none: it does not fit"]
    keys = ["train.gradient_checkpointing = true"] if layout.again and not plan.again_asked else []
    if layout.verl:
        nodes = -(-layout.gpus // plan.per_node)
        keys += ['backend = "verl"', f"verl.nodes = {nodes}", f"verl.gpus_per_node = {layout.gpus // nodes}"]
        return [*keys, f"verl.tensor_parallel = {layout.sampler_gpus}", *(["verl.offload = true"] if layout.offload else [])]
    if layout.gpus > 1:
        keys += [f"learner.ranks = {layout.learners}", f"sampler.replicas = {layout.samplers}"]
        keys += ['sampler.place = "own"'] if layout.own else []
        keys += ['cluster.address = "auto"'] if layout.gpus > plan.per_node else []
    memory = plan.memory
    kept = memory.masters + memory.moments + memory.critic + memory.reference
    here = (memory.weights, kept) if layout.in_one_process else (memory.sampler, 0.0)
    by_default = default_cache(plan.card.gib - here[0], here[1])
    if (
        not layout.own
        and by_default > memory.cache
        and replace(memory, cache=by_default).total > max(plan.usable, memory.total)
    ):
        keys.append(f"agent.engine.kv_gib = {max(0.1, plan.cache_gib):.1f}")
    return keys or ["none: the defaults are right"]


def _trust(plan: LayoutPlan) -> list[str]:
    worst = held_back_errors()
    errors = ", ".join(f"{part} {error:.0%}" for part, error in worst.items())
    lines = [f"fitted on one H200 (135M, 0.5B, 3B); largest error on points that were held back: {errors}"]
    if not plan.measured:
        lines.append(
            "several GPUs, other cards and larger models are computed from these points, not measured; their ranges reach to "
            f"{RANGE:g} times what is computed, because published runs of others took longer (docs/scale.md)"
        )
    return lines
