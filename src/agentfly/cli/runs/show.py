"""`agentfly show`: prints chains of a run, and marks the tokens that were trained, as the learner recorded it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from .filters import add_filters, make_filter

if TYPE_CHECKING:
    from ...runs import ChainRow, RunReader
    from ...types import Trajectory

COMPARES_SIBLINGS = ("grpo", "dr_grpo", "rloo")
"""The algorithms whose advantage is 0 if all chains of a task have the same reward."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `show` to the command line."""
    show = commands.add_parser("show", help="print trajectories of a run and mark the trained tokens")
    show.add_argument("run_dir", metavar="RUN", help="the folder of the run")
    show.add_argument("--id", help="only the chain with this id")
    add_filters(show)
    show.add_argument("--sort", default="-step", metavar="KEY", help="reward, advantage, tokens, turns, seconds or calls")
    show.add_argument("--limit", type=int, default=1, help="how many to print (default 1)")
    show.add_argument("--json", action="store_true", help="print one JSON object per chain")
    show.set_defaults(run=run_show)


def run_show(arguments: argparse.Namespace) -> int:
    """Print the trajectories that match. Returns 1 if none does and one was asked for by its id."""
    from rich.console import Console

    from ...runs import RunDirectory, RunReader
    from ...watch.tables import show_trajectory

    if arguments.limit < 1:
        raise ConfigError(f"--limit must be at least 1, not {arguments.limit}")
    with RunReader(RunDirectory.existing(arguments.run_dir).database, timeout_s=60.0) as reader:
        rows = [reader.row(arguments.id)] if arguments.id is not None else find_chains(reader, arguments)
        for row in rows:
            trajectory, trained, reason = explain(reader, row)
            if arguments.json:
                print(json.dumps(to_json(row, trajectory, trained, reason), allow_nan=False, default=str))
            else:
                show_trajectory(Console(), trajectory, reason, trained=trained, advantage=row.advantage)
    if not rows and not arguments.json:
        print("no trajectory matches")
    return 0


def find_chains(reader: RunReader, arguments: argparse.Namespace) -> list[ChainRow]:
    """The chains that the options choose; the newest step first, within it in the order in which they were added."""
    chosen, limit = make_filter(arguments), arguments.limit
    if arguments.sort != "-step":
        return _pages(reader, chosen, arguments.sort, limit)
    chains: list[ChainRow] = []
    for step in reversed(reader.values("step")) if chosen.step is None else [chosen.step]:
        if chosen.step_low is not None and step < chosen.step_low:
            break
        chains += _pages(reader, replace(chosen, step=step), "added", limit - len(chains))
        if len(chains) >= limit:
            break
    return chains


def _pages(reader: RunReader, chosen: Any, sort: str, limit: int) -> list[ChainRow]:
    chains: list[ChainRow] = []
    cursor: str | None = None
    while len(chains) < limit:
        rows, cursor = reader.page(chosen, sort, cursor, min(1000, limit - len(chains)))
        chains += rows
        if cursor is None:
            break
    return chains


def explain(reader: RunReader, row: ChainRow) -> tuple[Trajectory, list[bool] | None, str | None]:
    """A stored chain, which of its sampled tokens were trained (None: not recorded), and why if none was.

    The learner's record decides. A run that has none, because an older version stored it, is judged by its outcomes, rewards
    and metrics.
    """
    from ...runs.trained import training_of
    from ...watch.tables import why_untrained

    trajectory = reader.trajectory(row.id)
    training = training_of(reader, row, trajectory)
    if training.turns is not None:
        flags = [flag for turn in training.turns for flag in turn]
        return trajectory, flags, None if any(flags) else training.reason
    skipped = {step: value or 0.0 for step, _, value in reader.series(["train/skipped"])["train/skipped"]}
    reason = training.reason or why_untrained(trajectory, row.split, row.step, skipped) or _why_no_advantage(reader, row)
    return trajectory, None, reason


def _why_no_advantage(reader: RunReader, row: ChainRow) -> str | None:
    """Says if the chain's advantage is 0: its algorithm compares siblings, and all of them have the same reward."""
    from ...config import Config
    from ...types import Outcome

    try:
        config = Config.load(reader.path.with_name("config.toml"))
    except ConfigError:
        return None
    if config.algorithm not in COMPARES_SIBLINGS or config.loss.kl_coef or config.loss.entropy_coef:
        return None
    group = row.id.rpartition("-")[0]  # ids are t<step>-<task>-<chain>
    siblings = [each for each in reader.group(row.step, row.task_id) if each.id.rpartition("-")[0] == group]
    rewards = {each.total_reward for each in siblings if each.reward is not None and Outcome(each.outcome).trainable}
    return "its siblings have the same reward, so its advantage is 0" if len(rewards) == 1 else None


def to_json(row: ChainRow, trajectory: Trajectory, trained: list[bool] | None, reason: str | None) -> dict[str, Any]:
    """A chain with its messages and, per turn, what was trained of it."""
    from ...watch.honesty import Honesty

    turns, start = [], 0
    for turn in trajectory.turns:
        size = len(turn.completion.token_ids)
        part = None if trained is None else trained[start : start + size]
        turns.append(
            {
                "text": turn.text,
                "tokens": size,
                "trained": None if part is None else sum(part),
                "reward": turn.reward,
                "calls": [{"name": call.name, "arguments": call.arguments, "error": call.error} for call in turn.calls],
                "results": [{"observation": each.observation, "error": each.error} for each in turn.results],
            }
        )
        start += size
    messages = [{"role": each.role, "content": each.content} for each in trajectory.messages]
    honesty = Honesty.of(trajectory).to_json()
    return {**_plain(asdict(row)), "untrained": reason, "honesty": honesty, "messages": messages, "turns": _plain(turns)}


def _plain(value: object) -> Any:
    """JSON has no NaN and no infinity: None instead."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
