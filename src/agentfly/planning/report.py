"""A recipe, a number of GPUs and a model -> memory per device, seconds of a step, the bottleneck, and the keys to set."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..config import Config
from ..errors import ConfigError
from ..learn.algorithms import find_algorithm
from .memory import Memory, memory_of
from .shapes import ModelShape, find_shape, shape_of
from .throughput import CARDS, TAIL, Card, Step, Work, held_back_errors, step_of

SAMPLER_SHARE = 0.35
"""A sampler is spread over so many GPUs that its weights take at most this share of each."""
PROMPT, OBSERVATION = 300, 50
"""Tokens of a prompt and of an observation if --row-tokens is not given: assumed."""
FEW = 8
"""A sampler that holds fewer chains at once than this is counted as not fitting."""
USES = {
    "weights": "weights (bfloat16)", "masters": "master weights", "moments": "AdamW's moments", "gradients": "gradients",
    "activations": "activations", "critic": "critic", "reference": "reference model", "sampler": "sampler's copy",
    "cache": "cache", "runtime": "CUDA",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. `memory.cache` is what the chains of a step need at once, as far as the device has it."""

    shape: ModelShape
    card: Card
    gpus: int
    per_node: int
    sampler_gpus: int
    lora: int
    memory: Memory
    work: Work
    step: Step
    chains_at_once: int
    verl: bool
    measured: bool

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.card.gib and self.chains_at_once >= min(FEW, self.work.chains)


def make_plan(
    config: Config,
    gpus: int,
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
) -> Plan:
    """Plan a run. Without a size, the recipe's own model is read. Raises ConfigError.

    `turns`, `reply_tokens` and `row_tokens` are means of a chain; the recipe's limits are used for those that are not given.
    """
    if gpus < 1 or per_node < 1 or (gpus > per_node and gpus % per_node):
        raise ConfigError(f"--gpus must be 1 or more, and above {per_node} a multiple of --gpus-per-node, not {gpus}")
    if card not in CARDS:
        raise ConfigError(f"no GPU is called {card!r}; known: {', '.join(CARDS)}")
    if min(tool_s, turn_cpu_s) < 0 or (cores is not None and cores < 1):
        raise ConfigError("--tool-s and --turn-cpu-s must be 0 or more, and --cores 1 or more")
    for name, value in (("turns", turns), ("reply-tokens", reply_tokens), ("row-tokens", row_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value:g}")
    shape = find_shape(size) if size is not None else _own_shape(config)
    device = CARDS[card]
    turns = turns or config.agent.max_turns
    reply = reply_tokens or config.sampling.max_tokens
    row = row_tokens or min(config.agent.max_context or 1 << 30, PROMPT + turns * reply + (turns - 1) * OBSERVATION)
    work = Work(
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
    sampler_gpus = _sampler_gpus(shape, device, gpus)
    bare = _memory(config, shape, gpus, sampler_gpus, 0.0)
    room = max(0.0, device.gib - bare.total)
    per_chain = row * shape.kv_bytes / sampler_gpus / 2**30
    wanted = work.chains / max(1, gpus // sampler_gpus)
    at_once = int(min(wanted, room / per_chain))
    memory = _memory(config, shape, gpus, sampler_gpus, at_once * row)
    held = at_once * max(1, gpus // sampler_gpus)
    work = replace(work, at_once=held or None)
    step = step_of(
        shape, device, gpus, work, per_node=per_node, sampler_gpus=sampler_gpus, lora=config.lora.rank > 0,
        again=config.train.gradient_checkpointing,
    )  # fmt: skip
    return Plan(
        shape=shape,
        card=device,
        gpus=gpus,
        per_node=per_node,
        sampler_gpus=sampler_gpus,
        lora=config.lora.rank,
        memory=memory,
        work=work,
        step=step,
        chains_at_once=held,
        verl=config.backend == "verl" or sampler_gpus > 1,
        measured=gpus == 1 and card == "H200" and shape.weights < 4e9,
    )


def _own_shape(config: Config) -> ModelShape:
    from ..engines.local.load import read_settings  # late: torch

    if config.agent.model.startswith("openai:") or config.agent.model == "smollm2":
        if config.agent.model == "smollm2":
            return find_shape("135M")
        raise ConfigError("a chat server's model has no known size: give --model-size")
    return shape_of(read_settings(config.agent.model)[1], config.agent.model)


def _sampler_gpus(shape: ModelShape, card: Card, gpus: int) -> int:
    count = 1
    while 2.0 * shape.weights / count / 2**30 > SAMPLER_SHARE * card.gib and count * 2 <= gpus:
        count *= 2
    return count


def _memory(config: Config, shape: ModelShape, gpus: int, sampler_gpus: int, cache_tokens: float) -> Memory:
    train = config.train
    return memory_of(
        shape,
        ranks=gpus,
        lora_rank=config.lora.rank,
        batch_tokens=_batch_tokens(config),
        again=train.gradient_checkpointing,
        critic=find_algorithm(config.algorithm).needs_critic and config.loss.critic == "copy",
        reference=config.loss.kl_coef > 0,
        cache_tokens=cache_tokens,
        sampler_gpus=sampler_gpus,
    )


def _batch_tokens(config: Config) -> int:
    found = config.train.max_tokens_per_batch
    return 8192 if found == "auto" else int(found)


def show_plan(plan: Plan) -> str:
    """Returns the plan as text."""
    shape, card, work, step = plan.shape, plan.card, plan.work, plan.step
    how = f"LoRA of rank {plan.lora}" if plan.lora else "all weights trained"
    lines = [f"{shape.name} ({shape.of}: {shape.weights / 1e9:.2f} billion weights), {plan.gpus} x {card.name}, {how}"]
    lines += ["", f"memory of one GPU, GiB of {card.gib:g}"]
    for each in fields(Memory):
        value = getattr(plan.memory, each.name)
        if value >= 0.005:
            lines.append(f"  {USES[each.name]:<22}{value:>9.2f}")
    lines.append(f"  {'together':<22}{plan.memory.total:>9.2f}  {_verdict(plan)}")
    mode = "sampling while learning" if work.asynchronous else "sampling and learning in turn"
    lines += [
        "",
        f"one step of {work.chains} chains, {work.turns:g} turns of {work.reply:g} tokens, rows of {work.row:g}; {mode}",
    ]
    for name, value in (
        ("sampling", step.sample), ("environments", step.environments), ("host", step.host), ("learning", step.learn),
        ("publishing weights", step.publish),
    ):  # fmt: skip
        lines.append(f"  {name:<22}{value:>9.2f} s")
    rate = step.tokens / step.total / plan.gpus
    tail = "" if work.asynchronous else f", with a tail of {TAIL:g} x sampling"
    lines.append(f"  {'step':<22}{step.total:>9.2f} s   {rate:,.0f} sampled tokens/s per GPU{tail}")
    lines.append(f"  bottleneck: {step.bottleneck}. {_advice(plan)}")
    lines += ["", "keys", *(f"  {line}" for line in _keys(plan)), "", *_trust(plan)]
    return "\n".join(lines) + "\n"


def _verdict(plan: Plan) -> str:
    if plan.memory.total > plan.card.gib:
        return "does not fit: " + _cure(plan)
    if not plan.fits:
        return f"leaves room for {plan.chains_at_once} chains at once: " + _cure(plan)
    if plan.chains_at_once < plan.work.chains:
        return f"fits; {plan.chains_at_once} of {plan.work.chains} chains decode at once"
    return "fits"


def _cure(plan: Plan) -> str:
    if not plan.lora:
        return "train.gradient_checkpointing = true, a smaller train.max_tokens_per_batch, lora.rank = 32, or more GPUs"
    return "train.gradient_checkpointing = true, a smaller train.max_tokens_per_batch, or more GPUs"


def _advice(plan: Plan) -> str:
    return {
        "sampling": "More chains per GPU fill the sampler better; rollout.max_lag hides the slowest chains.",
        "environments": "More cores, or placement of environments on other machines.",
        "host": "More sampler replicas: each has its own event loop.",
        "learning": "Fewer tokens per row, more GPUs, or LoRA; rollout.max_lag samples meanwhile.",
        "publishing": "More chains per step.",
    }[plan.step.bottleneck]


def _keys(plan: Plan) -> list[str]:
    nodes = max(1, plan.gpus // plan.per_node)
    if plan.verl:
        return [
            'backend = "verl"',
            f"verl.nodes = {nodes}",
            f"verl.gpus_per_node = {plan.gpus // nodes}",
            f"verl.tensor_parallel = {plan.sampler_gpus}",
        ]
    if plan.gpus == 1:
        return ["none: one GPU is the default"]
    return [f"learner.ranks = {plan.gpus}", f"sampler.replicas = {plan.gpus}"]


def _trust(plan: Plan) -> list[str]:
    worst = held_back_errors()
    errors = ", ".join(f"{part} {error:.0%}" for part, error in worst.items())
    lines = [f"fitted on one H200 (135M, 0.5B, 3B); largest error on points that were held back: {errors}"]
    if not plan.measured:
        lines.append("several GPUs, other cards and larger models are computed from these points, not measured")
    return lines
