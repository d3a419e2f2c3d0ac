"""Builds the parts that a config describes: the agent, the tasks, the run folder. Finds the config of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import asdict, fields, replace
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from . import plugins
from .agents.base import BaseAgent
from .config import Config
from .data import DataSettings, DataSource, has_splits, is_file_name, load_tasks, row_key, row_of, split_rows
from .engines import beside_learner, engine_options, short_name
from .errors import ConfigError, DataError
from .learn.algorithms import find_algorithm
from .outside import with_servers
from .protocols import Engine, Renderer, TrainableEngine
from .rollout import Plan, make_plan
from .rollout.activity import Activities
from .runs import RunDirectory
from .runs.checkpoints import STATE, newest_of
from .types import Task, Trajectory

if TYPE_CHECKING:
    from .learn.hint import Prompts
    from .learn.ranks.group import RankGroup


def build_agent(config: Config, engine: Engine | None = None, renderer: Renderer | None = None) -> BaseAgent:
    """Returns the agent of a config. Names are resolved here; the model is opened on first use.

    An open engine and its renderer take the place of `agent.model` and `agent.engine`.
    """
    settings = config.agent
    kind = plugins.resolve("agents", settings.kind)
    own = {item.name: getattr(settings, item.name) for item in fields(settings)}
    arguments: dict[str, Any] = {
        **{name: value for name, value in own.items() if name not in ("kind", "model", "mcp", "success_at", "options")},
        "tools": with_servers(settings.tools, settings.mcp),
        "sampling": config.sampling,
        "resources": {key: value for key, value in asdict(config.resources).items() if value is not None},
    }
    if engine is not None:
        arguments |= {"engine": None, "renderer": renderer}
    clash = set(settings.options) & (set(arguments) | {"model"})
    if clash:
        raise ConfigError(f"agent.options.{sorted(clash)[0]} is a config key: write agent.{sorted(clash)[0]}")
    try:
        agent = kind(settings.model if engine is None else engine, **arguments, **settings.options)
    except TypeError as error:
        raise ConfigError(f"agent.options does not fit the agent {settings.kind!r}: {error}") from error
    if not isinstance(agent, BaseAgent):
        raise ConfigError(f"agent.kind {settings.kind!r} is not a BaseAgent")
    return agent


def checkpoint_config(checkpoint: str | Path, recipe: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Returns the config to run a checkpoint with: that of `recipe`, else that of the run which the checkpoint belongs to.

    `checkpoint` is a checkpoint, the folder of a run (its newest checkpoint is taken), or the name of a model.
    """
    run = run_of(checkpoint)
    model = newest_of(str(checkpoint))
    if recipe is None:
        if run is None or not (run / "config.toml").is_file():
            raise ConfigError(f"{checkpoint} is not a checkpoint of a run folder: give the recipe that describes its agent")
        recipe = run / "config.toml"
    config = Config.load(recipe, overrides)
    return replace(config, agent=replace(config.agent, model=model))


def run_of(checkpoint: str | Path) -> Path | None:
    """Returns the folder of the run that a checkpoint belongs to; of the folder of a run, itself. None if there is none."""
    path = Path(checkpoint)
    if (path / "checkpoints").is_dir():
        return path
    return path.parent.parent if path.parent.name == "checkpoints" and path.is_dir() else None


def build_reference(config: Config, model: Any, tokenizer: Any = None) -> Any:
    """Returns the model of `loss.reference` beside a policy; None if it is not set.

    Adapters of the policy share their frozen weights with it, if they were made for this model. Raises ConfigError if it cannot
    score the policy's tokens.
    """
    from .engines.local.load import context_of
    from .learn.model.lora import frozen_base
    from .learn.model.reference import open_reference

    name = config.loss.reference
    if name is None:
        return None
    if config.lora.rank and name == config.agent.model:
        return frozen_base(model)
    limits = (config.agent.max_context, engine_options(config.agent.engine).get("max_context"))
    longest = min([context_of(model.config), *(limit for limit in limits if limit)])
    return open_reference(newest_of(name), model, tokenizer, longest)


def build_hint(config: Config, agent: BaseAgent) -> Prompts | None:
    """Returns what renders the prompt of a chain without and with `loss.reference_hint`; None if it is not set."""
    hint, renderer = config.loss.reference_hint, agent.renderer
    if hint is None or renderer is None:
        return None

    def prompts(trajectory: Trajectory) -> tuple[list[int], list[int]]:
        replies = [at for at, message in enumerate(trajectory.messages) if message.role == "assistant"]
        first = replies[-len(trajectory.turns)] if len(replies) >= len(trajectory.turns) else len(trajectory.messages)
        *before, last = trajectory.messages[:first]
        hinted = replace(last, content=f"{last.content}\n{hint.format_map(trajectory.task.fields)}")
        return renderer.start([*before, last], agent.schemas), renderer.start([*before, hinted], agent.schemas)

    return prompts


def hinted_fields(config: Config) -> set[str]:
    """The fields of a row that `loss.reference_hint` names. Raises ConfigError for a template that cannot be read."""
    try:
        names = [name for _, name, *_ in Formatter().parse(config.loss.reference_hint or "") if name is not None]
    except ValueError as error:
        raise ConfigError(f"loss.reference_hint: {error}; a brace that is text is doubled") from error
    if odd := [name for name in names if not name.isidentifier()]:
        raise ConfigError(f"loss.reference_hint: {odd[0]!r} is not the name of a field; a brace that is text is doubled")
    return set(names)


def build_learner(
    config: Config,
    model: Any,
    *,
    exact: bool,
    ranks: RankGroup | None = None,
    tokenizer: Any = None,
    hint: Prompts | None = None,
) -> Any:
    """Returns the learner of a config for a model: a `PolicyLearner`, or with a `RankGroup` this rank's `RankLearner`.

    `tokenizer` is the model's, with which that of `loss.reference` is compared; `hint` is what `build_hint` returns.
    """
    from .kernels.memory import naming_memory
    from .learn.learner import PolicyLearner

    options: dict[str, Any] = {
        "loss": config.loss,
        "optim": replace(config.train, total_steps=config.train.total_steps or config.train.steps),
        "temperature": config.sampling.temperature or 1.0,
        "reference": build_reference(config, model, tokenizer) if config.loss.kl_coef else None,
        "exact": exact,
        "recomputes": config.rollout.at_update != "keep",
        "seed": config.seed,
    }
    algorithm = find_algorithm(config.algorithm)
    if ranks is None:
        with naming_memory("the setup of the learner"):
            return PolicyLearner(model, algorithm, hint=hint, **options)
    from .learn.ranks.learner import RankLearner

    settings = config.learner
    return RankLearner(model, algorithm, ranks=ranks, reduce=settings.reduce, timeout_s=settings.timeout_s, **options)


def trainable_engine(agent: BaseAgent) -> TrainableEngine:
    """Returns the agent's engine. Raises ConfigError if a learner cannot train its weights."""
    engine = agent.engine
    if engine.reads != "ids" or not isinstance(engine, TrainableEngine):
        raise ConfigError(
            f"{type(engine).__name__} cannot be trained from: its weights are not here (it lacks members of "
            f"agentfly.protocols.TrainableEngine). Use a model directory or 'pocket'"
        )
    return engine


def adapt_model(config: Config, agent: BaseAgent, note: Callable[[str], object]) -> TrainableEngine:
    """Returns the agent's engine, its model with the adapters of `[lora]`; `note` is told what share of it is adapted."""
    from .learn.model.lora import adapt, coverage

    agent.engine_options = beside_learner(agent.model, agent.engine_options, learner_bytes(config))
    engine = trainable_engine(agent)
    if config.lora.rank:
        adapt(engine.model, config.lora, config.seed)
        note(f"lora: {coverage(engine.model)}")
    return engine


def learner_bytes(config: Config) -> float:
    """Returns the memory per weight that a learner keeps while chains are sampled: masters, moments, and other models."""
    trained = 0.0 if config.lora.rank else 4.0 + config.train.moment_bytes(True)
    critic = find_algorithm(config.algorithm).needs_critic and config.loss.critic == "copy"
    reference = config.loss.kl_coef > 0 and not config.lora.rank
    return trained * (1 + critic) + 2.0 * (critic + reference)


def build_plan(config: Config, agent: BaseAgent, activities: Activities | None = None) -> Plan:
    """Returns the plan of the chains of a config, without environments. Opens the model."""
    plan = make_plan(agent, sampling=config.sampling)
    limits = {name: getattr(config.rollout, name) for name in ("turn_timeout_s", "group_timeout_s")}
    return replace(plan, limits=replace(plan.limits, **limits), activities=activities)


def build_tasks(
    config: Config, data: object = None, validation: object = None, say: Callable[[str], None] | None = None
) -> tuple[list[Task], list[Task]]:
    """Returns training and validation tasks, source by source; `data` and `validation` replace those of the config.

    Without validation rows, a task set's own split is used, or a share of a file or list. `say` is told if rows are left out of
    the validation. Raises ConfigError if a row is in both.
    """
    if not config.data.sources:
        return _source_tasks(config.data, config.seed, data, validation, say)
    if data is not None or validation is not None:
        raise ConfigError("data.sources names the rows: give no other data and validation")
    sides: tuple[list[Task], list[Task]] = [], []
    plain: tuple[list[Task], list[Task]] = [], []
    for source in config.data.parts():
        for side, rows, tasks in zip(sides, plain, _source_tasks(source.data, config.seed, say=say), strict=True):
            rows += tasks
            side += _of_source(source, tasks)
    refuse_overlap(*plain)
    for side in sides:
        _refuse_shared_ids(side)
    return sides


def _of_source(source: DataSource, tasks: Sequence[Task]) -> list[Task]:
    """The tasks with the name of their source, which is a field of those that have no field `source`.

    A row without the field `id` has its number as id, as rows of other sources do: the name of the source precedes it.
    """
    name = source.name
    return [
        replace(
            task, source=name, id=f"{name}-{task.id}" if task.fields.get("id") is None else task.id,
            fields={"source": name, **task.fields},
        ) for task in tasks
    ]  # fmt: skip


def _refuse_shared_ids(tasks: Sequence[Task]) -> None:
    sources: dict[str, str | None] = {}
    for task in tasks:
        if sources.setdefault(task.id, task.source) != task.source:
            raise DataError(f"the sources {sources[task.id]!r} and {task.source!r} both have a row with the id {task.id!r}")


def _source_tasks(
    settings: DataSettings, seed: int, data: Any = None, validation: Any = None, say: Callable[[str], None] | None = None
) -> tuple[list[Task], list[Task]]:
    """The tasks of one source."""
    data = settings.train if data is None else data
    validation = settings.validation if validation is None else validation
    if isinstance(data, str | Path) and not str(data):
        raise ConfigError(
            "data.train is not set: point it at a .json, .jsonl, .csv or .parquet file, at hf://NAME, or at a task set"
        )
    train = load_tasks(data, split="train", count=settings.train_count, seed=seed, columns=settings.columns)
    if validation is None and _names_own_splits(data):
        validation = data
    if validation is None:
        train, held = split_rows(train, settings.holdout, seed, key=row_key)
    else:
        count = None if _is_finite(validation) else settings.validated
        held = load_tasks(validation, split="validation", count=count, seed=seed, columns=settings.columns)
        refuse_overlap(train, held[: settings.validated])
    if len(held) > settings.validated and say is not None:
        say(f"validation plays the first {settings.validated:,} of {len(held):,} held-out rows (data.validation_count)")
    return train, held[: settings.validated]


def _is_finite(rows: Any) -> bool:
    """Whether all rows can be read to count them: those of a file or a list, and not of a task set or a stream."""
    if isinstance(rows, str | Path):
        return is_file_name(str(rows))
    return isinstance(rows["validation"] if has_splits(rows) and "validation" in rows else rows, Sized)


def _names_own_splits(data: Any) -> bool:
    """Whether a data set has a separate validation split: a task set, or a mapping of splits with one."""
    if isinstance(data, str | Path):
        return not is_file_name(str(data))
    return has_splits(data) and "validation" in data


def held_out_tasks(config: Config, split: str, say: Callable[[str], None] | None = None) -> list[Task]:
    """Returns the rows to evaluate on: validation rows, another split of a task set, or a file of rows.

    If training rows are the only file, a checkpoint is evaluated on the share that its training held out, and a model that was
    not trained here on all rows. `say` is told how many rows of how many are played.
    """
    if config.data.sources:
        parts = [(each, replace(config, data=each.data)) for each in config.data.parts()]
        tasks = [task for each, of_source in parts for task in _of_source(each, held_out_tasks(of_source, split, say))]
        _refuse_shared_ids(tasks)
        return tasks
    data = config.data
    source = data.validation or data.train
    if not source:
        raise ConfigError("there are no rows to evaluate on: set data.validation, or give --data FILE")
    is_file = is_file_name(source)
    if is_file and split != "validation":
        raise ConfigError(f"only a task set has a split {split!r}; a data file has its rows: give it as --data FILE")
    count = None if is_file else data.validation_count
    rows = load_tasks(source, split=split, count=count, seed=config.seed, columns=data.columns)
    total, why = len(rows), ""
    if is_file and data.validation is None and is_checkpoint(config.agent.model):
        rows = split_rows(rows[: data.train_count], data.holdout, config.seed, key=row_key)[1]
        why = ", which its training held out (all rows: --data FILE)"
    rows = rows[: data.validation_count]
    if say is not None:
        of = f" of {total:,}" if is_file else ""
        say(f"{len(rows):,}{of} rows of {source}{why}" if is_file else f"{len(rows):,} rows of {source}, {split}")
    return rows


def is_checkpoint(model: str) -> bool:
    """Whether a model is a checkpoint that a training has saved."""
    return run_of(model) is not None or (Path(model) / STATE).is_file()


def refuse_overlap(train: list[Task], validation: list[Task]) -> None:
    """Raises ConfigError if a validation row is also a training row. Equal questions with other fields are two rows."""
    asked = {repr(task.messages) for task in validation}
    seen = {row_key(task): row_of(task, index) for index, task in enumerate(train) if repr(task.messages) in asked}
    for index, task in enumerate(validation):
        if seen and (key := row_key(task)) in seen:
            raise ConfigError(
                f"validation {row_of(task, index)} is the same as training {seen[key]}, so its success would measure memory. "
                f"Remove it from one of the two"
            )


def open_directory(config: Config, resume: str | Path | None) -> RunDirectory:
    """Open the folder of a run to resume, or create a new one. The caller locks it."""
    if resume is not None:
        return RunDirectory.existing(Path(resume))
    if config.run.name:
        return RunDirectory.create(Path(config.run.dir) / config.run.name)
    model = short_name(config.agent.model).replace(":", "-")
    algorithm = re.sub(r"[^\w.-]+", "-", find_algorithm(config.algorithm).name.replace("+", "p"))
    return RunDirectory.fresh(f"{algorithm}-{model}", root=config.run.dir)
