"""The commands, and what each of them takes.

    agentfly train [CONFIG] [key=value ...] [--resume RUN] [--view] [--profile] [--dry-run]     CONFIG: a .toml file or a recipe
    agentfly eval [CONFIG] [key=value ...] [--model PATH] [--chains K] [--json PATH]
    agentfly sft [CONFIG] [key=value ...]
    agentfly runs | show | compare | plot | export | export-model | query | chat | doctor     (see cli/runs)
    agentfly view [RUNS_DIR]                                      (see cli/dashboard.py)
    agentfly verl print-config | plan | cluster status            (see cli/scale.py)
    agentfly recipes [NAME]
    agentfly init FOLDER
    agentfly fetch smollm2
    agentfly algorithms | agents | tools | rewards | tasks | demos [list]
    agentfly envs list | check | bench | play | open | serve      (see cli/envs.py)
    agentfly search-server [--corpus FILE]
    agentfly config

Each command imports what it needs when it runs. A mistake of the user is one sentence on stderr and exit code 2, another
error of the framework is exit code 1. A command that was stopped by Ctrl-C exits with 130, by SIGTERM with 143. If nothing
reads the output any more (`agentfly runs | head -3`), it is 141.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, plugins
from ..errors import AgentFlyError, ConfigError, RankError
from . import dashboard, envs, scale, search_server
from . import runs as run_commands

if TYPE_CHECKING:
    from ..config import Config
    from ..training import TrainResult
    from ..watch.stack_sampler import StackSampler

# The keys that a command reads (`train` reads all). An override of another key is refused, because it would change nothing. In
# a config file other keys are accepted, because one file serves several commands.
READS = {
    "eval": (
        "agent.", "data.", "sampling.", "resources.", "rollout.max_concurrency", "run.threads", "run.dir", "run.name", "seed",
    ),
    "sft": ("agent.", "data.", "train.", "lora.", "run.", "rollout.num_tasks", "seed"),
}  # fmt: skip
NOT_READ = {
    "sft": (
        "train.critic_lr", "train.critic_epochs", "train.critic_minibatches", "train.critic_warmup_steps",
        "train.validate_chains", "train.validate_temperature", "train.validate_at_start",
        "train.save_every", "train.save_every_s", "train.max_logprob_gap", "train.max_failed_share",
    )
}  # fmt: skip

KINDS = ("algorithms", "agents", "tools", "rewards", "tasks", "demos")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments, more = parser.parse_known_args(words)
    arguments.words = words
    stray = [word for word in more if word.startswith("-") or "=" not in word or not hasattr(arguments, "overrides")]
    if stray:
        parser.error(f"unrecognized argument: {stray[0]}{_key_hint(arguments, stray[0])}")
    if more:  # overrides after an option
        arguments.overrides = [*arguments.overrides, *more]
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return int(arguments.run(arguments) or 0)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        from ..training.ranks.process import RANK_LOST

        print(f"RankError: {error}", file=sys.stderr)
        return RANK_LOST
    except AgentFlyError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `agentfly runs | head -3`: nothing reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        return envs.ENDED_PIPE


def _key_hint(arguments: argparse.Namespace, word: str) -> str:
    """For an option that is a config key, as in `--steps 3`: how to write it."""
    from ..config import keys

    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    found = [key for key, *_ in keys() if name in (key, key.rpartition(".")[2]) and not key.startswith("warm_start.")]
    if not word.startswith("--") or not found or not hasattr(arguments, "overrides"):
        return ""
    return "; a config key is written without dashes: " + " or ".join(f"{key}=VALUE" for key in found[:3])


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line, from which the documentation lists the commands."""
    parser = argparse.ArgumentParser(
        prog="agentfly", description="Build LLM agents and train them by multi-turn reinforcement learning."
    )
    parser.add_argument("--version", action="version", version=f"agentfly {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    train = commands.add_parser("train", help="train an agent by reinforcement learning")
    _takes_config(train)
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
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("eval", help="measure success and pass@k on held-out tasks")
    _takes_config(evaluate)
    evaluate.add_argument("--model", help="evaluate this model or checkpoint instead of agent.model, or of a run's newest one")
    evaluate.add_argument("--data", metavar="FILE", help="play all rows of this file instead of the config's")
    evaluate.add_argument(
        "--chains", type=int, default=1, metavar="K", help="number of chains per task; pass@k is reported up to K"
    )
    evaluate.add_argument(
        "--split", default="validation", help="the split of the task set: train, validation (default) or test"
    )
    evaluate.add_argument("--json", metavar="PATH", help="also write the metrics to this file")
    evaluate.set_defaults(run=_eval)

    sft = commands.add_parser("sft", help="train on demonstrations (supervised fine-tuning)")
    _takes_config(sft)
    sft.set_defaults(run=_sft)

    run_commands.add_parsers(commands)
    dashboard.add_parser(commands)
    scale.add_parsers(commands)

    recipes = commands.add_parser("recipes", help="list the recipes, or print one")
    recipes.add_argument("name", nargs="?", default="list", help="print this recipe: agentfly recipes quickstart > mine.toml")
    recipes.add_argument("--json", action="store_true", help="print the list, or the recipe's keys, as JSON")
    recipes.set_defaults(run=_recipes)

    init = commands.add_parser("init", help="write a small project that trains: tool, reward, data, recipe")
    init.add_argument("folder", help="the folder to write, such as my-task")
    init.set_defaults(run=_init)

    fetch = commands.add_parser("fetch", help="download the weights of a model that is not bundled")
    fetch.add_argument("model", choices=("smollm2",))
    fetch.set_defaults(run=_fetch)

    for kind in KINDS:
        lister = commands.add_parser(kind, help=f"list the available {kind}")
        lister.add_argument("verb", nargs="?", choices=("list",), default="list")
        lister.add_argument("--json", action="store_true", help="print the list as JSON")
        lister.set_defaults(run=_list, kind=kind)
    envs.add_parser(commands)
    envs.add_check_tests(commands)

    search_server.add_command(commands)

    config = commands.add_parser("config", help="list every config key with its default")
    config.add_argument("--json", action="store_true", help="print the keys as JSON")
    config.set_defaults(run=_config)
    return parser


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="a .toml file, a run's folder or a recipe (agentfly recipes)"
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="set config keys: algorithm=ppo train.lr=1e-5")


def _separate_config(arguments: argparse.Namespace) -> None:
    """`agentfly train data.train=rows.jsonl`: without a config file, the first word is a key=value too."""
    first = arguments.config
    if first is not None and "=" in first and not Path(first).is_file():
        arguments.config, arguments.overrides = None, [first, *arguments.overrides]


def _load(arguments: argparse.Namespace) -> Config:
    from ..config import Config
    from ..learn.ranks.environment import read_place

    if read_place() is not None:
        raise ConfigError(f"agentfly {arguments.command} runs in one process: start it without torchrun")
    _separate_config(arguments)
    if arguments.config is None and not arguments.overrides:
        raise ConfigError(f"agentfly {arguments.command} needs a config file, the name of a recipe, or key=value words")
    for override in arguments.overrides:
        key = override.partition("=")[0]
        if not key.startswith(READS[arguments.command]) or key in NOT_READ.get(arguments.command, ()):
            raise ConfigError(f"agentfly {arguments.command} does not use the config key {key}; remove it")
    return Config.load(arguments.config, arguments.overrides)


# ---- commands ------------------------------------------------------------------------------------------------------------


def _train(arguments: argparse.Namespace) -> int:
    from ..config import Config
    from ..learn.ranks.environment import read_place
    from ..training.ranks.supervisor import report_to_supervisor, supervise_run

    report_to_supervisor()
    _separate_config(arguments)
    if arguments.config is None and arguments.resume is None and not arguments.overrides:
        raise ConfigError(
            "agentfly train needs a config file, the name of a recipe (`agentfly recipes` lists them), key=value words, or "
            "--resume and the folder of an earlier run"
        )
    path = arguments.config
    if path is None and arguments.resume is not None:
        path = Path(arguments.resume) / "config.toml"
    config = Config.load(path, arguments.overrides)
    if config.backend == "verl" and arguments.profile:
        raise ConfigError("--profile measures the local trainer; verl writes its times to metrics.jsonl (timing_s/...)")
    if arguments.dry_run:
        for option in ("profile", "view"):
            if getattr(arguments, option):
                raise ConfigError(f"--{option} looks at a training, and --dry-run does not train: remove one of them")
        return _dry_run(config) if config.backend == "local" else scale.print_verl(config)
    place = read_place()
    if place is None and config.learner.ranks > 1:
        return supervise_run(arguments.words, config)
    if place is not None and place.rank > 0:
        return _follow(config)
    from rich.console import Console

    from ..api import train
    from ..watch.progress import Progress
    from ..watch.stack_sampler import StackSampler

    console = Console()
    progress = Progress(config.train.steps, console=console)
    progress.note(f"agentfly {__version__}")
    sampler = StackSampler() if arguments.profile else None
    runs = Path(config.run.dir) if arguments.resume is None else Path(arguments.resume).resolve().parent
    try:
        with dashboard.Beside(runs, progress.note) if arguments.view else nullcontext(), sampler or nullcontext():
            result = train(config, resume=arguments.resume, progress=progress)
    except (KeyboardInterrupt, SystemExit) as stop:
        if progress.directory is None:
            raise
        if config.backend == "local":
            _profile(console, progress.directory, sampler)
        console.print(f"to continue: agentfly train --resume {progress.directory}", highlight=False, soft_wrap=True)
        return stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130
    if config.backend == "verl":
        scale.verl_closing(result)
        return 0
    _closing(console, config, result, sampler)
    return 0


def _follow(config: Config) -> int:
    """Take part in a training that rank 0 leads. Its errors are rank 0's, unless they happened here only."""
    from ..api import train

    try:
        train(config)
    except RankError:
        return 1  # rank 0 was lost or has failed, and says why
    return 0


def _dry_run(config: Config) -> int:
    from ..build import build_agent, build_tasks
    from ..engines import check_engine
    from ..rollout import make_plan, open_task
    from ..training.idle import without_effect
    from ..training.loop import adapt_model, trainable_engine

    agent = build_agent(config)
    train, validation = build_tasks(config)
    check_engine(config.agent.model, config.agent.engine, config.sampling, training=True)
    agent.check(train)
    agent.check(validation)
    plan = make_plan(agent, sampling=config.sampling)
    openings = [open_task(plan, task) for task in [*train, *validation]]
    trainable_engine(agent)
    adapt_model(config, agent, lambda said: print(f"# {said}"))
    longest = max(len(opening.prompt_ids) for opening in openings)
    print(config.to_toml())
    print(f"# {len(train)} training and {len(validation)} validation tasks; longest prompt {longest} tokens")
    for idle in without_effect(config):
        print(f"# warning: {idle}")
    print("# first prompt:")
    for message in openings[0].messages:
        print(f"[{message.role}] {message.content}")
    return 0


def _profile(console: Any, directory: Path, sampler: StackSampler | None) -> None:
    """Print where the time of the run went: one line, or with a sampler (--profile) the table, which is also written."""
    from ..runs import RunDirectory, RunStore
    from ..watch.profile import profile_of, show_profile

    with RunStore(RunDirectory.existing(directory).database, readonly=True) as store:
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
        told = f"written: {directory / 'profile.json'}, {directory / 'profile.txt'}"
    except OSError as error:
        told = f"the profile cannot be written to {directory}: {error.strerror}"
    console.print(told, highlight=False, soft_wrap=True)


def _closing(console: Any, config: Config, result: TrainResult, sampler: StackSampler | None) -> None:
    from ..watch.tables import before_after, show_trajectory

    if result.before and result.after:
        before_after(console, result.before, result.after)
    if result.sample is not None:
        show_trajectory(console, result.sample, "a held-out task")
    _profile(console, result.directory, sampler)
    other = "rloo" if config.algorithm != "rloo" else "grpo"
    name = f" run.name={config.run.name}-{other}" if config.run.name else ""
    console.print(f"run folder: {result.directory}", highlight=False, soft_wrap=True)
    console.print("try next:", style="bold")
    for line in (
        f"agentfly view {result.directory.parent}",
        f"agentfly show {result.directory} --limit 3",
        f"agentfly eval {result.directory} --chains 4",
        f"agentfly train {result.directory} algorithm={other}{name}",
    ):
        console.print(f"  {line}", highlight=False, soft_wrap=True)


def _eval(arguments: argparse.Namespace) -> int:
    import dataclasses

    from rich.console import Console

    from ..build import run_of
    from ..runs.checkpoints import latest_checkpoint
    from ..training import evaluate_run
    from ..watch.chain_progress import ChainProgress
    from ..watch.tables import metrics_table

    config = _load(arguments)
    if config.run.threads is not None:
        from ..learn.model.storage import set_threads

        set_threads(config.run.threads)
    if arguments.model or (arguments.config is not None and run_of(arguments.config)):
        model = arguments.model or str(latest_checkpoint(Path(arguments.config)))
        config = dataclasses.replace(config, agent=dataclasses.replace(config.agent, model=model))
    if arguments.data:
        rows = dataclasses.replace(config.data, train="", validation=arguments.data, validation_count=_given_count(arguments))
        config = dataclasses.replace(config, data=rows)
    console = Console()
    with ChainProgress(console, config.agent.success_at) as progress:
        done = evaluate_run(
            config,
            split=arguments.split,
            num_chains=arguments.chains,
            on_start=progress.begin,
            on_trajectory=progress.add,
            say=lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False),
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(done.to_json(), indent=1, allow_nan=False))
    console.print(f"trajectories: agentfly show {done.directory} --limit 3", highlight=False, soft_wrap=True)
    done.check()
    metrics_table(console, done.metrics)
    return 0


def _given_count(arguments: argparse.Namespace) -> int | None:
    """The `data.validation_count` of the command line: that of a config is about the config's own rows."""
    from ..config import Config

    words = [word for word in arguments.overrides if word.startswith("data.validation_count=")]
    return Config.load(None, words).data.validation_count if words else None


def _sft(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ..training import sft
    from ..watch.progress import Progress

    config = _load(arguments)
    console = Console()
    result = sft(config, progress=Progress(config.train.steps, console=console))
    console.print(f"loss on held-out demonstrations: {result.before:.4f} before, {result.after:.4f} after", highlight=False)
    console.print(f"model: {result.checkpoint}", highlight=False, soft_wrap=True)
    return 0


def _recipes(arguments: argparse.Namespace) -> int:
    from ..recipes import describe_recipe, find_config, recipes

    if arguments.name != "list":
        text = find_config(arguments.name).read_text(encoding="utf-8")
        print(json.dumps(tomllib.loads(text), indent=1, default=str) + "\n" if arguments.json else text, end="")
        return 0
    _print_rows([(name, describe_recipe(path)) for name, path in recipes().items()], arguments.json)
    return 0


def _init(arguments: argparse.Namespace) -> int:
    from ..recipes import start_project

    for path in start_project(arguments.folder):
        print(path)
    print(f"try next:\n  cd {arguments.folder}\n  agentfly train train.toml")
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    from ..engines.smollm2 import fetch_smollm2

    print(f"{arguments.model} is ready: {fetch_smollm2()}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    rows = [(name, _describe(arguments.kind, name)) for name in plugins.names(arguments.kind)]
    if not rows and not arguments.json:
        print(f"no {arguments.kind} are registered")
        return 0
    _print_rows(rows, arguments.json)
    return 0


def _print_rows(rows: Sequence[tuple[str, str]], as_json: bool) -> None:
    if as_json:
        print(json.dumps([{"name": name, "description": text} for name, text in rows], indent=1))
        return
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}".rstrip())


def _describe(kind: str, name: str) -> str:
    try:
        thing = plugins.resolve(kind, name)
    except AgentFlyError as error:
        return f"({error})"
    if kind == "algorithms":
        return f"{thing.description} {thing.paper}"
    text = getattr(thing, "description", None) or getattr(thing, "__doc__", None) or ""
    return str(text).strip().partition("\n")[0]


def _config(arguments: argparse.Namespace) -> int:
    from ..config import keys

    if arguments.json:
        names = ("key", "type", "default", "description")
        print(json.dumps([dict(zip(names, row, strict=True)) for row in keys()], indent=1, default=str))
        return 0
    for key, kind, default, text in keys():
        print(f"{key} = {'(not set)' if default is None else json.dumps(default)}    {kind}: {text}")
    return 0
