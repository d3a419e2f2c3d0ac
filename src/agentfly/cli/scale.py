"""Beyond one device: what a run would take (`plan`), what verl would run (`verl`), and who uses a Ray cluster (`cluster`)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import Config
    from ..training import TrainResult


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the command line."""
    verl = commands.add_parser("verl", help='show what backend = "verl" would run')
    verl.add_argument("verb", choices=("print-config",))
    _takes_config(verl)
    verl.set_defaults(run=_verl)

    plan = commands.add_parser("plan", help="memory, seconds of a step and bottleneck on a number of GPUs")
    _takes_config(plan)
    plan.add_argument("--gpus", type=int, metavar="N", help="GPUs altogether; without, those of the recipe's layout")
    plan.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of one machine")
    plan.add_argument("--gpu", default="H200", help="the card: H200, H100, A100, B200, L40S, A6000, A10, L4, 5090 or 4090")
    plan.add_argument(
        "--model-size", metavar="SIZE", help="135M, 0.5B, 1.5B, 3B, 7B, 8B, 14B, 32B or 70B; without, the recipe's model"
    )
    plan.add_argument("--turns", type=float, help="turns of a chain, on average; without, agent.max_turns")
    plan.add_argument(
        "--reply-tokens", type=float, metavar="N", help="tokens of a reply, on average; without, sampling.max_tokens"
    )
    plan.add_argument("--row-tokens", type=float, metavar="N", help="tokens of a whole chain, on average")
    plan.add_argument("--tool-s", type=float, default=0.1, metavar="S", help="seconds between two replies of a chain")
    plan.add_argument("--turn-cpu-s", type=float, default=0.001, metavar="S", help="CPU seconds of the environment per turn")
    plan.add_argument("--cores", type=int, metavar="N", help="CPU cores for environments; without, two per GPU")
    plan.set_defaults(run=_plan)

    cluster = commands.add_parser("cluster", help="nodes of a Ray cluster, and what runs have placed there")
    cluster.add_argument("verb", choices=("status",))
    cluster.add_argument("--address", default="auto", help='host:port of its head, or "auto" on one of its nodes')
    cluster.add_argument("--json", action="store_true", help="print JSON")
    cluster.set_defaults(run=_cluster)


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a .toml file or the name of a recipe (agentfly recipes)")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="set config keys: algorithm=ppo train.lr=1e-5")


def _verl(arguments: argparse.Namespace) -> int:
    from ..config import Config

    return print_verl(Config.load(arguments.config, ['backend="verl"', *arguments.overrides]))


def print_verl(config: Config) -> int:
    """Print verl's command with its overrides, each with the config key that it comes from."""
    from ..verl import show_verl

    print(show_verl(config), end="")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from ..config import Config
    from ..planning import best_of_each_kind, find_plans, show_plan

    made, *others = find_plans(
        Config.load(arguments.config, arguments.overrides),
        arguments.gpus,
        arguments.model_size,
        card=arguments.gpu,
        per_node=arguments.gpus_per_node,
        turns=arguments.turns,
        reply_tokens=arguments.reply_tokens,
        row_tokens=arguments.row_tokens,
        tool_s=arguments.tool_s,
        turn_cpu_s=arguments.turn_cpu_s,
        cores=arguments.cores,
    )
    print(show_plan(made, best_of_each_kind(others)), end="")
    return 0


def _cluster(arguments: argparse.Namespace) -> int:
    import json

    from ..fleet.ray_cluster import Cluster
    from ..training.cluster.status import read_status, show_status

    with Cluster.connect(arguments.address, timeout_s=10.0) as cluster:
        status = read_status(cluster)
    print(json.dumps(status, indent=2) if arguments.json else show_status(status), end="\n" if arguments.json else "")
    return 0


def verl_closing(result: TrainResult) -> None:
    """Print where a run with verl left its results."""
    print(f"run folder: {result.directory}")
    if result.checkpoint is not None:
        model = Path(result.checkpoint) / "actor" / "huggingface"
        print(f"try next:\n  agentfly eval {result.directory / 'config.toml'} --model {model}")
