"""Config -> Job -> hydra overrides of verl. Reads the data and the model's tokenizer, and needs no verl.

`make_job` renders every prompt, so that verl's length limits are those of the data. `translate` applies the table; what verl
cannot run raises one ConfigError that names each key.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..build import build_agent, build_tasks
from ..config import Config, keys
from ..engines import check_trained_sampling, engine_options
from ..errors import ConfigError, InvariantError
from ..learn.algorithms import find_algorithm
from ..rollout import Plan, make_plan, open_task
from ..types import Message, Task
from .table import AGGREGATIONS, ESTIMATORS, TABLE, Job, Refusal
from .verl_chains import LoopSettings, ServerEngine

if TYPE_CHECKING:
    from ..engines.copies import LearnerCopy

UNSET_CONTEXT = 16384
"""Tokens of a chain if neither agent.max_context nor the model says less: the longest row must fit into one micro batch."""
OWN = "verl.overrides"
RENDERING = ("chat_template", "template_args", "stop_ids")


@dataclass(frozen=True, slots=True)
class Override:
    """One hydra override and the config key that it comes from."""

    name: str
    value: object
    source: str

    def __str__(self) -> str:
        return f"{self.name}={self.value if self.source == OWN else hydra_value(self.value)}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job with its rows: the tasks and the opening messages of each."""

    job: Job
    loop: LoopSettings
    train: Sequence[tuple[Task, list[Message]]]
    validation: Sequence[tuple[Task, list[Message]]]


def open_copy(config: Config, model: str | None = None) -> LearnerCopy:
    """The tokenizer, renderer and limits of the config's model, or of a folder with the same tokenizer; weights on demand."""
    from ..engines.copies import LearnerCopy  # late: torch

    options = {name: value for name, value in engine_options(config.agent.engine).items() if name in RENDERING}
    return LearnerCopy(model or config.agent.model, **options)


def open_plan(config: Config, copy: LearnerCopy, settings: LoopSettings | None = None) -> Plan:
    """The plan of the chains, without environments. Each chain replaces its engine by one with verl's client."""
    limit = copy.context if settings is None else settings.max_context
    stub = ServerEngine(None, copy.tokenizer, copy.stop_ids, {}, settings or _no_settings(limit), 0)
    agent = build_agent(config, stub, copy.renderer)
    if agent.reward is None:
        raise ConfigError("training needs a reward: set agent.reward")
    if agent.reward.grouped:
        name = agent.reward.name
        raise ConfigError(f'reward {name!r} compares the chains of a group; verl scores each alone: set backend = "local"')
    return make_plan(agent, sampling=config.sampling)


def _no_settings(limit: int) -> LoopSettings:
    return LoopSettings(
        num_chains=1, validate_chains=1, max_prompt=limit, max_response=limit, max_context=limit, server="vllm", compares=False,
        seeded=False, seed=0, success_at=1.0, window=1, max_failed_share=1.0,
    )  # fmt: skip


def make_job(config: Config, folder: Path, *, model: str | None = None, resumes: bool = False) -> Prepared:
    """Read the data and the model's settings. `model` is the folder that verl loads; None: that of the config.

    Raises ConfigError or DataError.
    """
    if config.agent.model.startswith("openai:"):
        raise ConfigError('backend = "verl" trains the weights of agent.model: name a model directory or a hub name')
    check_trained_sampling(config.sampling)
    copy = open_copy(config)
    plan = open_plan(config, copy)
    train, validation = build_tasks(config)
    for tasks in (train, validation):
        plan.agent.check(tasks)  # type: ignore[attr-defined]
    context = _context(config, copy)
    plan.limits = dataclasses.replace(plan.limits, max_context=context)
    opened = [open_task(plan, task) for task in [*train, *validation]]
    lengths = [len(each.prompt_ids) for each in opened]
    rows = [(each.task, each.messages) for each in opened]
    job = Job(
        config=config,
        flat=flatten(config),
        algorithm=find_algorithm(config.algorithm),
        folder=folder.absolute(),
        model=model or copy.source() or str(folder.absolute() / "verl" / "model"),
        max_prompt=max(lengths),
        max_response=context - min(lengths),
        max_context=context,
        num_train=len(train),
        packs=importlib.util.find_spec("flash_attn") is not None,
        resumes=resumes,
    )
    reason = why_one_row(job)
    if not reason:  # a row that begins with rewritten history may have any length of prompt
        job = dataclasses.replace(job, max_prompt=context - 1)
    return Prepared(job, loop_settings(job, reason), rows[: len(train)], rows[len(train) :])


def _context(config: Config, copy: LearnerCopy) -> int:
    set_ = [value for value in (config.agent.max_context, engine_options(config.agent.engine).get("max_context")) if value]
    if not set_:
        return min(copy.context, UNSET_CONTEXT)
    return min(copy.context, *set_)


def flatten(config: Config) -> dict[str, Any]:
    """Every key of the config by its dotted name."""
    flat: dict[str, Any] = {}
    for key, *_ in keys():
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        flat[key] = value
    return flat


def why_one_row(job: Job) -> str:
    """Returns why a chain must not have several rows in verl; "" if it may."""
    loss, name = job.config.loss, job.algorithm.name
    estimator, policy = ESTIMATORS.get(name, ("", ""))
    if estimator != "grpo":
        return f"verl counts rows, not chains, for {name}"
    if policy == "gspo":
        return "verl computes GSPO's ratio per row, not per chain"
    if loss.aggregation != "token_mean":
        return f"verl counts rows, not chains, for loss.aggregation = {loss.aggregation!r} ({AGGREGATIONS[loss.aggregation]})"
    if loss.correction == "sequence":
        return 'verl computes the weight of loss.correction = "sequence" per row, not per chain'
    if loss.kl_coef and loss.kl_in == "reward":
        return "verl takes the KL in the reward from the last row alone"
    return ""


def loop_settings(job: Job, one_row: str) -> LoopSettings:
    """What the agent loop must know besides the config."""
    config = job.config
    rollout = config.rollout
    return LoopSettings(
        num_chains=rollout.num_chains,
        validate_chains=config.train.validate_chains,
        max_prompt=job.max_prompt,
        max_response=job.max_response,
        max_context=job.max_context,
        server=config.verl.engine,
        compares=job.algorithm.needs_group,
        # A reply that verl interrupts for new weights is continued by a second request: its seed would repeat random numbers.
        seeded=not rollout.max_lag,
        seed=config.seed if config.sampling.seed is None else config.sampling.seed,
        success_at=config.agent.success_at,
        window=max(rollout.num_chains, math.ceil(rollout.num_tasks * rollout.num_chains / config.verl.workers)),
        max_failed_share=config.train.max_failed_share,
        one_row=one_row,
        turn_timeout_s=rollout.turn_timeout_s,
        group_timeout_s=rollout.group_timeout_s,
    )


def translate(job: Job) -> list[Override]:
    """Returns verl's hydra overrides. Raises ConfigError that names every key that verl cannot run."""
    overrides: dict[str, Override] = {}
    why: list[str] = []
    defaults = {key: default for key, _, default, _ in keys()}
    defaults |= {f"loss.{name}": value for name, value in dataclasses.asdict(job.algorithm.settings()).items()}
    for key, value in job.flat.items():
        rule = TABLE[key]
        try:
            if rule.kind == "refused" and value != defaults[key]:
                raise Refusal(rule.text)
            made = {} if rule.make is None else rule.make(value, job)
        except Refusal as refusal:
            why.append(f"{key} = {hydra_value(value)}: {refusal}")
            continue
        for name, wanted in made.items():
            other = overrides.setdefault(name, Override(name, wanted, key))
            if other.value != wanted:
                raise InvariantError(f"{other.source} and {key} both set verl's {name}")
    if job.config.warm_start.demos is not None and job.config.lora.rank:
        why.append("warm_start.demos: with lora.rank, train the demonstrations first (agentfly sft) and set agent.model")
    if why:
        raise ConfigError('backend = "verl" cannot run ' + "; ".join(why))
    words = (word.partition("=") for word in job.config.verl.overrides)
    return [*overrides.values(), *(Override(name, value, OWN) for name, _, value in words)]


def hydra_value(value: object) -> str:
    """Returns a value in the grammar of hydra's overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{hydra_value(item)}" for name, item in value.items()) + "}"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_/][\w./-]*", text) and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
