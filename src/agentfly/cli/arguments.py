"""The arguments that several commands take: a config file, and key=value words behind it."""

from __future__ import annotations

import argparse
from pathlib import Path


def takes_config(parser: argparse.ArgumentParser) -> None:
    """Add the config file, which may be left out, and key=value words to a command."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="a .toml file, a run's folder or a recipe (agentfly recipes)"
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="set config keys: algorithm=ppo train.lr=1e-5")


def separate_config(arguments: argparse.Namespace) -> None:
    """`agentfly train data.train=rows.jsonl`: without a config file, the first word is a key=value too."""
    first = arguments.config
    if first is not None and "=" in first and not Path(first).is_file():
        arguments.config, arguments.overrides = None, [first, *arguments.overrides]
