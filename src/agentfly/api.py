"""`agentfly.train`: train an agent object, or the run that a config describes.

Errors that can be known in advance are raised before the first token: an engine without trainable weights, rows that lack a
field, prompts that do not fit, config keys without effect.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from .agents.base import BaseAgent
from .aio.threads import run_to_end
from .build import build_agent, build_tasks, open_directory
from .config import SECTIONS, Config, apply_overrides, keys
from .engines import check_engine, check_trained_sampling
from .errors import ConfigError
from .runs import RunDirectory
from .runs.checkpoints import discard, find_checkpoint, list_checkpoints, set_aside, sweep, why_broken
from .training.cluster.join import joined_cluster
from .training.loop import Trainer, TrainResult, adapt_model, trainable_engine
from .training.ranks.roles import find_place, follow_ranks, join_ranks, rank_model
from .training.ranks.supervisor import report_directory
from .training.stopping import StopSignals
from .training.supervised import warm_start
from .training.workers.engine import use_workers
from .types import Task
from .verl import train_verl
from .watch.progress import Progress


def train(
    agent: BaseAgent | Config,
    data: str | Path | Iterable[Any] | None = None,
    *,
    validation: str | Path | Iterable[Any] | None = None,
    resume: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> TrainResult:
    """Train an agent on a data set, or run what a `Config` describes.

    `settings` are config keys: by section (`train={"lr": 1e-5}`), dotted (`**{"train.lr": 1e-5}`), or by their last part
    where that is unique (`lr=1e-5, steps=50, num_chains=8, algorithm="ppo"`). `resume` is the folder of an earlier run.
    Raises ConfigError, DataError, InvariantError or StorageError.

    Ctrl-C, SIGTERM and SIGHUP save a checkpoint and raise KeyboardInterrupt or SystemExit (see `training.stopping`).

    Under torchrun all ranks call it with the same arguments. Rank 0 trains; on the others it returns an empty result when the
    run has ended.
    """
    if isinstance(agent, Config):
        if data is not None or validation is not None or settings:
            raise ConfigError("train(config) takes everything from the config: set data and the rest there")
        if agent.backend == "verl":
            return train_verl(agent, resume, progress)
        config, agent = agent, build_agent(agent)
        described = True
    else:
        if not isinstance(agent, BaseAgent):
            raise ConfigError(f"train takes an agent or a Config, not {type(agent).__name__}")
        config = config_for(agent, data, settings)
        if config.backend == "verl":
            raise ConfigError('backend = "verl" builds the agent in each of its processes: pass a Config, not an agent')
        if data is None:
            raise ConfigError("train(agent, data=...) needs a data set: a file, a task set's name, or a list of rows")
        described = False
    if (place := find_place(config)) is None:
        return _train(config, agent, data, validation, resume, progress, described)
    with closing(join_ranks(config, place, agent.engine_options.get("device"))) as ranks:
        if not ranks.leads:
            follow_ranks(config, rank_model(agent, ranks) or trainable_engine(agent).model, ranks)
            return TrainResult(Path(), 0)
        return _train(config, agent, data, validation, resume, progress, described, ranks)


def _train(
    config: Config,
    agent: BaseAgent,
    data: Any,
    validation: Any,
    resume: str | Path | None,
    progress: Progress | None,
    described: bool,
    ranks: Any = None,
) -> TrainResult:
    progress = progress or Progress(config.train.steps)
    train_tasks, validation_tasks = build_tasks(config, data, validation, progress.note)
    if agent.reward is None:
        raise ConfigError("training needs a reward: pass reward= to the agent")
    if isinstance(agent.model, (str, Path)):
        check_engine(agent.model, agent.engine_options, config.sampling, training=True)
    check_trained_sampling(config.sampling)
    agent.check(train_tasks)
    agent.check(validation_tasks)
    with StopSignals(lambda: kept(progress.directory)) as signals:
        try:
            with joined_cluster(config, progress.note) as cluster:
                use_workers(config, agent, described=described, cluster=cluster)
                return _run(config, agent, train_tasks, validation_tasks, resume, progress, signals, ranks)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            if signals.received is None:
                raise
            progress.note(f"stopped by {signals.received.name}; {kept(progress.directory)}")
            raise signals.error() from None


def _run(
    config: Config,
    agent: BaseAgent,
    train_tasks: Sequence[Task],
    validation_tasks: Sequence[Task],
    resume: str | Path | None,
    progress: Progress,
    signals: StopSignals,
    ranks: Any = None,
) -> TrainResult:
    directory = open_directory(config, resume)
    with directory.lock(), progress, ExitStack() as ended:
        report_directory(directory.path)
        checkpoint = _prepare(directory, resume, progress)
        progress.directory = directory.path
        if checkpoint is None:
            directory.write_config(config.to_toml())
        progress.phase(f"opening the model {config.agent.model}")
        adapt_model(config, agent, progress.note)
        trainable_engine(agent)
        opening = warm_start(config, agent, progress) if checkpoint is None else {}
        trainer = Trainer(config, agent, train_tasks, validation_tasks, directory, progress, opening, ranks)
        if ranks is not None:
            learner: Any = trainer.learner  # of all ranks
            ended.callback(learner.stop)
        if checkpoint is None:
            trainer.start_over()
        else:
            trainer.resume(checkpoint)
        result: TrainResult = run_to_end(trainer.run(signals))
        return result


def _prepare(directory: RunDirectory, resume: str | Path | None, progress: Progress) -> Path | None:
    """Remove what a killed trainer left behind. Returns the checkpoint to resume from, or None for a run from the start."""
    sweep(directory.checkpoints)
    if resume is None:
        directory.check_new()  # again: before this process had the lock, another one may have trained here
        for path in list_checkpoints(directory.checkpoints):  # of step 0
            discard(path)
        return None
    newest, broken = find_checkpoint(directory.checkpoints)
    if newest is None and broken:
        raise ConfigError(
            f"cannot resume: {directory.path} holds no intact checkpoint: {why_broken(broken)}. "
            f"Start again under another run.name"
        )
    for path in broken:
        progress.note(f"{why_broken({path: broken[path]})}: it is now {set_aside(path)}, and the run goes back to an older one")
    if newest is None:
        progress.note(f"{directory.path} holds no checkpoint: the run starts from the beginning")
    return newest


def kept(directory: Path | None) -> str:
    """Returns what a run that ends now leaves behind, as a sentence."""
    found = list_checkpoints(directory / "checkpoints") if directory is not None else []
    return f"the newest checkpoint is {found[-1]}" if found else "there is no checkpoint yet: the same command starts again"


def config_for(agent: BaseAgent, data: Any, settings: Mapping[str, Any]) -> Config:
    """Returns the config of a run whose agent was made in Python: a description of the agent, and the given settings."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        key = full_key(name)
        parts = (
            {f"{key}.{part}": item for part, item in value.items()}
            if key in SECTIONS and isinstance(value, dict)
            else {key: value}
        )
        apply_overrides(tree, parts)
    if "agent" in tree and set(tree["agent"]) - {"success_at"}:
        key = sorted(set(tree["agent"]) - {"success_at"})[0]
        raise ConfigError(f"agent.{key} is set by the agent that was passed in: set it there")
    sampling = {**dataclasses.asdict(agent.sampling), **tree.get("sampling", {})}
    tree["sampling"] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in sampling.items() if value is not None
    }
    tree["agent"] = {**tree.get("agent", {}), **_describe(agent)}
    if isinstance(data, (str, Path)):
        tree.setdefault("data", {})["train"] = str(data)
    return Config.from_dict(tree)


def full_key(name: str) -> str:
    """`lr` to `train.lr`. Dotted, top-level and section names stay as they are; keys of warm_start need their full name."""
    every = [key for key, *_ in keys()]
    if "." in name or name in every or any(key.startswith(f"{name}.") for key in every):
        return name
    found = [key for key in every if key.rpartition(".")[2] == name and not key.startswith("warm_start.")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{name!r} could mean {' or '.join(found)}: write one of them")
    return name


def _describe(agent: BaseAgent) -> dict[str, Any]:
    kind = type(agent)
    return {
        "kind": f"{kind.__module__}:{kind.__qualname__}",
        "model": str(agent.model) if isinstance(agent.model, (str, Path)) else type(agent.model).__name__,
        "tools": list(agent.tools),
        "reward": agent.reward.name if agent.reward else "",
        "max_turns": agent.limits.max_turns,
    }
