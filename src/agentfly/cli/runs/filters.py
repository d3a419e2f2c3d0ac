"""The options that choose chains of a run, shared by `show` and `export`."""

from __future__ import annotations

import argparse
from typing import Any

from ...errors import ConfigError
from ...runs.filters import ChainFilter

SPLITS = ("train", "validation")


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add --step, --split, --outcome and the other conditions."""
    parser.add_argument("--step", type=int, help="only of this step")
    parser.add_argument("--from-step", type=int, metavar="N", help="only of this step and later ones")
    parser.add_argument("--split", choices=SPLITS, help="only of this split")
    parser.add_argument("--outcome", help="only with this outcome, for example finished or world_failure")
    parser.add_argument("--task", metavar="ID", help="only of the task with this id")
    parser.add_argument("--tool", metavar="NAME", help="only chains that called this tool")
    parser.add_argument("--min-reward", type=float, metavar="R", help="only with at least this total reward")
    parser.add_argument("--max-reward", type=float, metavar="R", help="only with at most this total reward")
    parser.add_argument("--text", metavar="WORDS", help="only with this text in any message, from the beginning of a word")


def has_filters(arguments: argparse.Namespace) -> bool:
    """Whether an option chooses chains."""
    return make_filter(arguments) != ChainFilter()


def make_filter(arguments: argparse.Namespace, **defaults: Any) -> ChainFilter:
    """The conditions that were given. `defaults` hold where an option was not given. Raises ConfigError."""
    given = {
        "step": arguments.step,
        "step_low": arguments.from_step,
        "split": arguments.split,
        "outcome": arguments.outcome,
        "task_id": arguments.task,
        "tool": arguments.tool,
        "reward_low": arguments.min_reward,
        "reward_high": arguments.max_reward,
        "text": arguments.text,
    }
    if arguments.outcome is not None:
        from ...types import Outcome

        if arguments.outcome not in list(Outcome):
            raise ConfigError(f"no outcome is called {arguments.outcome!r}; they are {', '.join(Outcome)}")
    chosen = defaults | {name: value for name, value in given.items() if value is not None}
    return ChainFilter(**chosen, in_body=arguments.text is not None)
