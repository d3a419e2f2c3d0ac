"""`agentfly train`: one function per way to run, each of which ends in `api.train` or in the processes that call it.

--dry-run          `dry_run`        checks, prints the config and the first prompt
backend = "verl"   `train_on_verl`  writes verl's files and starts verl
learner.ranks > 1  `supervise_run`  starts as many processes of this command: rank 0 `train_locally`, the others `follow`
otherwise          `train_locally`
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import AgentFlyError, ConfigError, RankError
from . import dashboard, scale
from .arguments import separate_config, takes_config

if TYPE_CHECKING:
    from rich.console import Console

    from ..config import Config
    from ..training import TrainResult
    from ..watch.progress import Progress
    from ..watch.stack_sampler import StackSampler

RANK_0_S = 5.0
"""Seconds in which rank 0 reports an error that all ranks have. The other ranks are ended then, before they print it again."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the command line."""
    train = commands.add_parser("train", help="train an agent by reinforcement learning")
    takes_config(train)
    train.add_argument("--resume", metavar="RUN", help="continue the run in this folder from its newest checkpoint")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the config and the first prompt, and do not train (imports the Python files it names)",
    )
    train.add_argument(
        "--profile", action="store_true", help="print where the time went, and write profile.json and profile.txt to the run"
    )
    train.add_argument("--view", action="store_true", help="show the run in a dashboard while it trains, and print its address")
    train.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace) -> int:
    """Train in the way that the config and the options describe."""
    from ..learn.ranks.environment import read_rank
    from ..training.ranks.supervisor import report_to_supervisor, supervise_run

    report_to_supervisor()
    try:
        config = load_config(arguments)
        if arguments.dry_run:
            return dry_run(arguments, config)
        if config.backend == "verl":
            return train_on_verl(arguments, config)
        this = read_rank()
        if this is None and config.learner.ranks > 1:
            return supervise_run(arguments.words, config)
        return train_locally(arguments, config) if this is None or this.rank == 0 else follow(config)
    except AgentFlyError:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(RANK_0_S)  # rank 0 has the same config: it prints what is wrong with it, and ends this process
        raise


def load_config(arguments: argparse.Namespace) -> Config:
    from ..config import Config

    separate_config(arguments)
    if arguments.config is None and arguments.resume is None and not arguments.overrides:
        raise ConfigError(
            "agentfly train needs a config file, the name of a recipe (`agentfly recipes` lists them), key=value words, or "
            "--resume and the folder of an earlier run"
        )
    path = arguments.config
    if path is None and arguments.resume is not None:
        path = os.path.join(arguments.resume, "config.toml")
    config = Config.load(path, arguments.overrides)
    if config.backend == "verl" and arguments.profile:
        raise ConfigError("--profile measures the local trainer; verl writes its times to metrics.jsonl (timing_s/...)")
    return config


def dry_run(arguments: argparse.Namespace, config: Config) -> int:
    """Check all that a training checks before its first chain, and print the config and the first prompt."""
    for option in ("profile", "view"):
        if getattr(arguments, option):
            raise ConfigError(f"--{option} looks at a training, and --dry-run does not train: remove one of them")
    if config.backend == "verl":
        return scale.print_verl(config)
    from ..api import TrainJob
    from ..build import adapt_model, build_agent, build_plan, build_reference
    from ..rollout import open_task
    from ..training.draws import TaskDraws
    from ..training.idle import without_effect

    job = TrainJob(config, build_agent(config))
    train, validation = job.tasks()
    draws = TaskDraws(train, config.data, config.seed)
    plan = build_plan(config, job.agent)
    openings = [open_task(plan, task) for task in [*train, *validation]]
    engine = adapt_model(config, job.agent, lambda said: print(f"# {said}"))
    if config.loss.kl_coef:
        build_reference(config, engine.model, engine.tokenizer)
        print(f"# reference model: {config.loss.reference or 'the weights that the run begins with'}")
    longest = max(len(opening.prompt_ids) for opening in openings)
    print(config.to_toml())
    print(f"# {len(train)} training and {len(validation)} validation tasks; longest prompt {longest} tokens")
    for sentence in [*draws.describe(), *(f"warning: {idle}" for idle in without_effect(config))]:
        print(f"# {sentence}")
    print("# first prompt:")
    for message in openings[0].messages:
        print(f"[{message.role}] {message.content}")
    return 0


def train_locally(arguments: argparse.Namespace, config: Config) -> int:
    """Train in this process, and print what came of it."""
    from ..api import train
    from ..watch.stack_sampler import StackSampler

    progress, console = open_progress(arguments, config)
    sampler = StackSampler() if arguments.profile else None
    try:
        with beside(arguments, config, progress), sampler or nullcontext():
            result = train(config, resume=arguments.resume, progress=progress)
    except (KeyboardInterrupt, SystemExit) as stop:
        if progress.directory is not None:
            print_profile(console, progress.directory, sampler)
        return stopped(console, progress, stop)
    print_result(console, config, result, sampler)
    return 0


def train_on_verl(arguments: argparse.Namespace, config: Config) -> int:
    """Train with verl, and print where its model is."""
    from ..api import train

    progress, console = open_progress(arguments, config)
    try:
        with beside(arguments, config, progress):
            result = train(config, resume=arguments.resume, progress=progress)
    except (KeyboardInterrupt, SystemExit) as stop:
        return stopped(console, progress, stop)
    scale.verl_closing(result)
    return 0


def follow(config: Config) -> int:
    """Take part in a training that rank 0 leads. Its errors are rank 0's, unless they happened here only."""
    from ..api import train

    try:
        train(config)
    except RankError:
        return 1  # rank 0 was lost or has failed, and says why
    return 0


def open_progress(arguments: argparse.Namespace, config: Config) -> tuple[Progress, Console]:
    from rich.console import Console

    from ..watch.progress import Progress

    console = Console()
    progress = Progress(config.train.steps, console=console)
    progress.note(f"agentfly {arguments.version}")
    return progress, console


def beside(arguments: argparse.Namespace, config: Config, progress: Progress) -> AbstractContextManager[object]:
    """The dashboard, with --view."""
    runs = Path(config.run.dir) if arguments.resume is None else Path(arguments.resume).resolve().parent
    return dashboard.Beside(runs, progress.note) if arguments.view else nullcontext()


def stopped(console: Console, progress: Progress, stop: KeyboardInterrupt | SystemExit) -> int:
    """Say how to continue a run that a signal has stopped. Returns the exit status. Raises `stop` if there is no run yet."""
    if progress.directory is None:
        raise stop
    console.print(f"to continue: agentfly train --resume {progress.directory}", highlight=False, soft_wrap=True)
    return stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130


def print_profile(console: Console, directory: Path, sampler: StackSampler | None) -> None:
    """Print where the time of the run went: one line, or with a sampler (--profile) the table, which is also written."""
    from ..runs import RunDirectory, RunStore
    from ..watch.profile import profile_of, show_profile

    database = RunDirectory(directory).database
    if not database.is_file():  # stopped while the model was opened
        return
    with RunStore(database, readonly=True) as store:
        profile = profile_of(store.metrics_by_step())
    if profile is None:
        return
    if sampler is None:
        console.print(profile.line, highlight=False, soft_wrap=True)
        return
    show_profile(console, profile, sampler.busiest())
    try:
        (directory / "profile.json").write_text(
            json.dumps(profile.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
        sampler.write(directory / "profile.txt")
        sentence = f"written: {directory / 'profile.json'}, {directory / 'profile.txt'}"
    except OSError as error:
        sentence = f"the profile cannot be written to {directory}: {error.strerror}"
    console.print(sentence, highlight=False, soft_wrap=True)


def print_result(console: Console, config: Config, result: TrainResult, sampler: StackSampler | None) -> None:
    """Print the validations, a chain, where the time went, and what to try next."""
    from ..watch.tables import before_after, cost_line, show_trajectory

    if result.before and result.after:
        before_after(console, result.before, result.after)
    if result.sample is not None:
        show_trajectory(console, result.sample, "a held-out task")
    print_profile(console, result.directory, sampler)
    other = "rloo" if config.algorithm != "rloo" else "grpo"
    name = f" run.name={config.run.name}-{other}" if config.run.name else ""
    if result.cost:
        console.print(cost_line(result.cost), highlight=False, soft_wrap=True)
    if result.stopped is not None:
        console.print(result.stopped, highlight=False, soft_wrap=True)
    console.print(f"run folder: {result.directory}", highlight=False, soft_wrap=True)
    evaluated = str(result.directory)
    if result.best is not None:
        console.print(f"best checkpoint: {result.best}", highlight=False, soft_wrap=True)
        evaluated += f" --model {result.directory / 'checkpoints' / 'best'}"
    console.print("try next:", style="bold")
    for line in (
        f"agentfly view {result.directory.parent}",
        f"agentfly show {result.directory} --limit 3",
        f"agentfly eval {evaluated} --chains 4",
        f"agentfly train {result.directory} algorithm={other}{name}",
    ):
        console.print(f"  {line}", highlight=False, soft_wrap=True)
