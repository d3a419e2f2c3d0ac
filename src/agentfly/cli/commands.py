"""The commands, and what each of them takes.

    agentfly train [CONFIG] [key=value ...] [--resume RUN] [--view] [--profile] [--dry-run]     CONFIG: a .toml file or a recipe
    agentfly sweep [CONFIG] [key=value,value ...] [--at-once N] [--view] [--dry-run] [--json PATH]
    agentfly eval [CONFIG] [key=value ...] [--model PATH] [--chains K] [--json PATH]
    agentfly sft [CONFIG] [key=value ...] [--best K] [--min-reward R]         CONFIG may be a run with the chains to learn from
    agentfly dpo RUN [key=value ...] [--beta B] [--min-gap R]
    agentfly runs | show | compare | plot | export | export-model | query | chat | doctor     (see cli/runs)
    agentfly view [RUNS_DIR]                                      (see cli/dashboard.py)
    agentfly serve CHECKPOINT [key=value ...] [--agent]           (see cli/serve.py)
    agentfly verl print-config | plan | cluster status            (see cli/scale.py)
    agentfly recipes [NAME]
    agentfly init FOLDER
    agentfly fetch smollm2
    agentfly algorithms | agents | tools | rewards | tasks | demos [list]
    agentfly envs list | check | bench | play | open | serve      (see cli/envs.py)
    agentfly search-server [--corpus FILE]
    agentfly mcp TOOL ... [--env NAME] [--tasks SET] [--port P]
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
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__, plugins
from ..errors import AgentFlyError, ConfigError, RankError
from . import dashboard, envs, mcp, scale, search_server, serve, sweep, train
from . import runs as run_commands
from .arguments import separate_config, takes_config

if TYPE_CHECKING:
    from ..config import Config

# The keys that a command reads (`train` reads all). An override of another key is refused, because it would change nothing. In
# a config file other keys are accepted, because one file serves several commands.
READS = {
    "eval": (
        "agent.", "data.", "sampling.", "resources.", "rollout.max_concurrency", "run.threads", "run.dir", "run.name", "seed",
    ),
    "sft": ("agent.", "data.", "train.", "lora.", "run.", "rollout.num_tasks", "seed"),
    "dpo": ("agent.", "data.", "train.", "lora.", "run.", "rollout.num_tasks", "loss.reference", "seed"),
}  # fmt: skip
_OF_ROLLOUTS = (
    "train.critic_lr", "train.critic_epochs", "train.critic_minibatches", "train.critic_warmup_steps",
    "train.validate_chains", "train.validate_temperature", "train.validate_at_start",
    "train.save_every", "train.save_every_s", "train.keep_best", "train.stop_after", "train.restart_from_best",
    "train.max_logprob_gap", "train.max_failed_share", "train.budget", "run.price",
)  # fmt: skip
NOT_READ = {"sft": _OF_ROLLOUTS, "dpo": (*_OF_ROLLOUTS, "data.validation", "data.validation_count", "data.train_count")}

KINDS = ("algorithms", "agents", "tools", "rewards", "tasks", "demos", "samplers")


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments, more = parser.parse_known_args(words)
    arguments.words, arguments.version = words, __version__
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
    matches = [key for key, *_ in keys() if name in (key, key.rpartition(".")[2]) and not key.startswith("warm_start.")]
    if not word.startswith("--") or not matches or not hasattr(arguments, "overrides"):
        return ""
    return "; a config key is written without dashes: " + " or ".join(f"{key}=VALUE" for key in matches[:3])


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line, from which the documentation lists the commands."""
    parser = argparse.ArgumentParser(
        prog="agentfly", description="Build LLM agents and train them by multi-turn reinforcement learning."
    )
    parser.add_argument("--version", action="version", version=f"agentfly {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    train.add_parser(commands)
    sweep.add_parser(commands)
    evaluate = commands.add_parser("eval", help="measure success and pass@k on held-out tasks")
    takes_config(evaluate)
    evaluate.add_argument("--model", help="evaluate this model or checkpoint instead of agent.model, or of a run's newest one")
    evaluate.add_argument("--data", metavar="FILE", help="play all rows of this file instead of the config's")
    evaluate.add_argument(
        "--chains", type=int, default=1, metavar="K", help="number of chains per task; pass@k and pass^k are reported up to K"
    )
    evaluate.add_argument(
        "--split", default="validation", help="the split of the task set: train, validation (default) or test"
    )
    evaluate.add_argument("--json", metavar="PATH", help="also write the metrics to this file")
    evaluate.set_defaults(run=_eval)

    sft = commands.add_parser("sft", help="train on demonstrations, or on the best chains of a run (supervised fine-tuning)")
    takes_config(sft)
    sft.add_argument("--best", type=int, metavar="K", help="of a run: at most K chains of each task; without, all that succeed")
    sft.add_argument("--min-reward", type=float, metavar="R", help="of a run: the least reward; without, its agent.success_at")
    sft.set_defaults(run=_sft)

    dpo = commands.add_parser("dpo", help="train on the best and the worst chain of each group of a run (arXiv:2305.18290)")
    takes_config(dpo)
    dpo.add_argument("--beta", type=float, default=0.1, metavar="B", help="how strongly the reference holds the policy (0.1)")
    dpo.add_argument("--min-gap", type=float, default=0.0, metavar="R", help="the least difference of the rewards of a pair")
    dpo.set_defaults(run=_dpo)

    run_commands.add_parsers(commands)
    dashboard.add_parser(commands)
    serve.add_parser(commands)
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
    mcp.add_command(commands)

    config = commands.add_parser("config", help="list every config key with its default")
    config.add_argument("--json", action="store_true", help="print the keys as JSON")
    config.set_defaults(run=_config)
    return parser


def _load(arguments: argparse.Namespace) -> Config:
    from ..config import Config
    from ..learn.ranks.environment import read_rank

    if read_rank() is not None:
        raise ConfigError(f"agentfly {arguments.command} runs in one process: start it without torchrun")
    separate_config(arguments)
    if arguments.config is None and not arguments.overrides:
        raise ConfigError(f"agentfly {arguments.command} needs a config file, the name of a recipe, or key=value words")
    for override in arguments.overrides:
        key = override.partition("=")[0]
        if not key.startswith(READS[arguments.command]) or key in NOT_READ.get(arguments.command, ()):
            raise ConfigError(f"agentfly {arguments.command} does not use the config key {key}; remove it")
    return Config.load(arguments.config, arguments.overrides)


# ---- commands ------------------------------------------------------------------------------------------------------------


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
    if arguments.data or arguments.split != "validation":
        rows = dataclasses.replace(config.data, validation_count=_given_count(arguments))
        if arguments.data:
            rows = dataclasses.replace(rows, train="", sources={}, validation=arguments.data)
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
    """The `data.validation_count` of the command line: that of a config is about the config's own validation rows."""
    from ..config import Config

    words = [word for word in arguments.overrides if word.startswith("data.validation_count=")]
    return Config.load(None, words).data.validation_count if words else None


def _on_chains(arguments: argparse.Namespace) -> Config:
    """The config of `sft` and `dpo`. If it is that of a run with chains, and no other data are given, these are the data."""
    from dataclasses import replace

    from ..data import DataSettings
    from ..runs import RunReader

    config = _load(arguments)
    run, changed = Path(arguments.config or ""), {word.partition("=")[0] for word in arguments.overrides}
    if "data.train" in changed or not (run / "run.db").is_file():
        return config
    with RunReader(run) as reader:
        if not reader.num_chains():
            return config
    settings = {key[5:]: getattr(config.data, key[5:]) for key in changed if key[:5] == "data."}
    name = config.run.name if "run.name" in changed else None
    return replace(config, data=replace(DataSettings(), train=str(run), **settings), run=replace(config.run, name=name))


def _sft(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ..training import sft
    from ..watch.progress import Progress

    config = _on_chains(arguments)
    console = Console()
    progress = Progress(config.train.steps, console=console)
    if arguments.best is not None and arguments.best < 1:
        raise ConfigError("--best is the number of chains per task, at least 1")
    result = sft(config, progress=progress, best=arguments.best, min_reward=arguments.min_reward)
    console.print(f"loss on held-out demonstrations: {result.before:.4f} before, {result.after:.4f} after", highlight=False)
    console.print(f"model: {result.checkpoint}", highlight=False, soft_wrap=True)
    return 0


def _dpo(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ..training import dpo
    from ..watch.progress import Progress

    config = _on_chains(arguments)
    console = Console()
    progress = Progress(config.train.steps, console=console)
    result = dpo(config, progress=progress, beta=arguments.beta, min_gap=arguments.min_gap)
    console.print(f"loss on held-out pairs: {result.before:.4f} before, {result.after:.4f} after", highlight=False)
    console.print(f"held-out pairs in the right order: {result.accuracy:.0%}", highlight=False)
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
        return f"{thing.description} {thing.paper} ({thing.parts})"
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
