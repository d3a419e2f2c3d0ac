"""Beyond one device: `agentfly verl print-config` shows what verl would run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config
    from .training import TrainResult


def add_parsers(commands: Any) -> None:
    """Add the commands to the command line."""
    verl = commands.add_parser("verl", help='show what backend = "verl" would run')
    verl.add_argument("verb", choices=("print-config",))
    _takes_config(verl)
    verl.set_defaults(run=_verl)


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a .toml file or the name of a recipe (agentfly recipes)")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="set config keys: algorithm=ppo train.lr=1e-5")


def _verl(arguments: argparse.Namespace) -> int:
    from .config import Config

    return print_verl(Config.load(arguments.config, ['backend="verl"', *arguments.overrides]))


def print_verl(config: Config) -> int:
    """Print verl's command with its overrides, each with the config key that it comes from."""
    from .training.verl import show_verl

    print(show_verl(config), end="")
    return 0


def verl_closing(result: TrainResult) -> None:
    """Print where a run with verl left its results."""
    print(f"run folder: {result.directory}")
    if result.checkpoint is not None:
        model = Path(result.checkpoint) / "actor" / "huggingface"
        print(f"try next:\n  agentfly eval {result.directory / 'config.toml'} --model {model}")
