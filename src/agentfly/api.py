"""`agentfly.train`: train an agent object, or the run that a config describes.

Errors that can be known in advance are raised before the first token: an engine without trainable weights, rows that lack a
field, prompts that do not fit, config keys without effect.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import plugins
from .agents.base import BaseAgent
from .aio.threads import run_to_end
from .build import build_agent, build_tasks, hinted_fields, open_directory, trainable_engine
from .config import SECTIONS, Config, apply_overrides, keys
from .config.sections import SELF
from .data import check_fields
from .engines import check_engine, check_trained_sampling
from .errors import ConfigError
from .runs.checkpoints import list_checkpoints
from .training import start
from .training.cluster.join import joined_cluster
from .training.draws import TaskDraws
from .training.loop import run
from .training.parts import open_parts
from .training.ranks.roles import find_rank, follow_ranks, join_ranks, rank_model
from .training.ranks.supervisor import report_directory
from .training.stopping import StopSignals
from .training.workers.engine import use_workers
from .types import Task
from .verl.launch import train_verl
from .watch.observers import Observers
from .watch.progress import Progress
from .watch.results import TrainResult

if TYPE_CHECKING:
    from .learn.ranks.environment import ThisRank
    from .learn.ranks.group import RankGroup


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
        job = TrainJob(agent, build_agent(agent))
    else:
        if not isinstance(agent, BaseAgent):
            raise ConfigError(f"train takes an agent or a Config, not {type(agent).__name__}")
        job = TrainJob(config_for(agent, data, settings), agent, data, validation, described=False)
        if job.config.backend == "verl":
            raise ConfigError('backend = "verl" builds the agent in each of its processes: pass a Config, not an agent')
        if data is None and not job.config.data.sources:
            raise ConfigError("train(agent, data=...) needs a data set: a file, a task set's name, or a list of rows")
    progress = progress or Progress(job.config.train.steps)
    this = find_rank(job.config)
    return train_here(job, resume, progress) if this is None else train_rank(job, this, resume, progress)


@dataclass(frozen=True, slots=True)
class TrainJob:
    """What is to be trained. `described`: the config describes the agent, so that another process can build it.

    `data` and `validation` replace those of the config.
    """

    config: Config
    agent: BaseAgent
    data: Any = None
    validation: Any = None
    described: bool = True

    def tasks(self, note: Callable[[str], None] | None = None) -> tuple[list[Task], list[Task]]:
        """Returns training and validation tasks. Raises ConfigError or DataError for what can be refused without the model."""
        config, agent = self.config, self.agent
        train, validation = build_tasks(config, self.data, self.validation, note)
        if agent.reward is None:
            raise ConfigError("training needs a reward: pass reward= to the agent")
        if isinstance(agent.model, (str, Path)):
            check_engine(agent.model, agent.engine_options, config.sampling, training=True)
        check_trained_sampling(config.sampling)
        if config.rollout.call_bonus and not agent.tools:
            raise ConfigError("rollout.call_bonus pays for a call, and the agent has no tools: remove it, or set agent.tools")
        if agent.examples_steps == 0 and config.warm_start.demos != SELF:
            raise ConfigError(
                f'agent.examples_steps = 0 shows the examples to warm_start.demos = "{SELF}" alone: set that, or more steps'
            )
        check_fields(train, hinted_fields(config), "loss.reference_hint")
        agent.check(train)
        agent.check(validation)
        for name in config.run.trackers:
            plugins.resolve("trackers", name)
        return train, validation


def train_rank(job: TrainJob, this: ThisRank, resume: str | Path | None, progress: Progress) -> TrainResult:
    """Train as one of several ranks: rank 0 as a run in one process does, the others by what it says."""
    with closing(join_ranks(job.config, this, job.agent.engine_options.get("device"))) as ranks:
        if ranks.leads:
            return train_here(job, resume, progress, ranks)
        follow_ranks(job.config, rank_model(job.agent, ranks) or trainable_engine(job.agent).model, ranks)
        return TrainResult(Path(), 0)


def train_here(job: TrainJob, resume: str | Path | None, progress: Progress, ranks: RankGroup | None = None) -> TrainResult:
    """Train in this process, which may start others that sample. `ranks` is the group that it leads."""
    config, agent, observe = job.config, job.agent, Observers(progress)
    train, validation = job.tasks(observe.note)
    draws = TaskDraws(train, config.data, config.seed)
    with StopSignals(lambda: kept(progress.directory)) as signals:
        try:
            with joined_cluster(config, observe.note) as cluster:
                use_workers(config, agent, described=job.described, cluster=cluster)
                directory = open_directory(config, resume)
                with directory.lock(), progress, ExitStack() as ended:
                    report_directory(directory.path)
                    checkpoint = start.find_start(directory, resumes=resume is not None, observe=observe)
                    if checkpoint is None:
                        directory.write_config(config.to_toml())
                    observe.opened(directory.path)
                    parts = open_parts(
                        config, agent, train, validation, draws, directory, observe, warm=checkpoint is None, ranks=ranks
                    )
                    if ranks is not None:
                        ended.callback(ranks.end_ranks)
                    begin = start.start_over(parts) if checkpoint is None else start.resume(parts, checkpoint)
                    return run_to_end(run(parts, begin, signals))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            if signals.received is None:
                raise
            observe.note(f"stopped by {signals.received.name}; {kept(progress.directory)}")
            raise signals.error() from None


def kept(directory: Path | None) -> str:
    """Returns what a run that ends now leaves behind, as a sentence."""
    checkpoints = list_checkpoints(directory / "checkpoints") if directory is not None else []
    if checkpoints:
        return f"the newest checkpoint is {checkpoints[-1]}"
    return "there is no checkpoint yet: the same command starts again"


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
    matches = [key for key in every if key.rpartition(".")[2] == name and not key.startswith("warm_start.")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{name!r} could mean {' or '.join(matches)}: write one of them")
    return name


def _describe(agent: BaseAgent) -> dict[str, Any]:
    kind = type(agent)
    return {
        "kind": agent.described_as or f"{kind.__module__}:{kind.__qualname__}",
        "model": str(agent.model) if isinstance(agent.model, (str, Path)) else type(agent.model).__name__,
        "tools": list(agent.tools),
        "reward": agent.reward.name if agent.reward else "",
        "max_turns": agent.limits.max_turns,
    }
