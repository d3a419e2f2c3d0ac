"""`agentfly export`: chains, metrics and training data of a run as files for other programs.

    jsonl      one trajectory a line, complete (what `import_jsonl` reads)
    parquet    one row a chain: its summary, and its messages as JSON
    csv        the metrics, one row a step
    sft        {"messages": ...} of good chains, which `agentfly sft` and other trainers read
    dpo        {"prompt", "chosen", "rejected"}: the best and the worst chain of each group

A file is written in one operation: it is complete or absent. `-` writes to stdout.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...errors import ConfigError
from ...plugins import missing_extra
from ...rows import is_one_conversation
from ...runs.trained import best_and_worst, by_task, every_row, success_of, why_none_is_good
from .filters import add_filters, has_filters, make_filter

if TYPE_CHECKING:
    from ...runs import ChainFilter, RunReader
    from ...types import Message, Trajectory

SUFFIXES = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
FORMATS = {"jsonl": ".jsonl", "parquet": ".parquet", "csv": ".csv", "sft": ".jsonl", "dpo": ".jsonl"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `export` to the command line."""
    export = commands.add_parser("export", help="write chains, metrics or training data of a run to a file")
    export.add_argument("run_dir", metavar="RUN", help="the folder of the run")
    export.add_argument(
        "file",
        nargs="?",
        help="the file; without --format its suffix (.jsonl, .csv, .parquet) is the format; - is stdout",
    )
    export.add_argument("--format", choices=FORMATS, help="jsonl, parquet: chains; csv: metrics; sft, dpo: training data")
    add_filters(export)
    export.add_argument("--best", type=int, metavar="N", help="sft: only the N best chains of each task")
    export.add_argument("--min-gap", type=float, metavar="R", help="dpo: the least difference of the two rewards")
    export.add_argument("--json", action="store_true", help="say as JSON what was written")
    export.set_defaults(run=run_export)


def run_export(arguments: argparse.Namespace) -> int:
    """Write the file and say what is in it."""
    from ...runs import RunDirectory, RunReader

    directory = RunDirectory.existing(arguments.run_dir)
    kind, path = _target(arguments, directory.path)
    _check(arguments, kind, path)
    try:
        with RunReader(directory.database, timeout_s=600.0) as reader:
            count, what = WRITERS[kind](reader, path, arguments)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    if arguments.json:
        print(json.dumps({"file": str(path), "format": kind, "rows": count}), file=sys.stderr if str(path) == "-" else None)
    elif str(path) != "-":
        print(f"{count} {what} in {path}")
    return 0


def _target(arguments: argparse.Namespace, run: Path) -> tuple[str, Path]:
    if arguments.file is None:
        kind = arguments.format or "jsonl"
        tail = f"-{kind}" if kind in ("sft", "dpo") else ""
        return kind, Path(f"{run.resolve().name}{tail}{FORMATS[kind]}")
    path = Path(arguments.file)
    if arguments.format is not None:
        return arguments.format, path
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{path}: trajectories are exported to a .jsonl file or a .parquet file, metrics to a .csv file; "
            f"for training data give --format sft or dpo"
        )
    return SUFFIXES[path.suffix], path


def _check(arguments: argparse.Namespace, kind: str, path: Path) -> None:
    """An option that would have no effect is refused."""
    if kind == "csv":
        if arguments.split is not None:
            raise ConfigError("--split selects trajectories; metrics have none: remove it")
        if has_filters(arguments):
            raise ConfigError("metrics are exported whole: remove the options that select trajectories")
    if arguments.best is not None and (kind != "sft" or arguments.best < 1):
        raise ConfigError("--best is the number of chains per task, at least 1, for --format sft")
    if arguments.min_gap is not None and (kind != "dpo" or arguments.min_gap < 0):
        raise ConfigError("--min-gap is a difference of rewards, at least 0, for --format dpo")
    if str(path) == "-" and kind == "parquet":
        raise ConfigError("a parquet file cannot be written to stdout: give a file")


@contextmanager
def _open(path: Path, newline: str | None = None) -> Iterator[IO[str]]:
    """A text file that takes its name when the body has ended without an error."""
    if str(path) == "-":
        yield sys.stdout
        return
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8", newline=newline) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- formats -------------------------------------------------------------------------------------------------------------


def write_jsonl(reader: RunReader, path: Path, arguments: argparse.Namespace) -> tuple[int, str]:
    """The complete trajectories."""
    from ...runs.codec import to_json

    def lines() -> Iterator[dict[str, Any]]:
        for row in every_row(reader, make_filter(arguments)):
            yield {"step": row.step, "split": row.split, **to_json(reader.trajectory(row.id))}

    return _write_lines(path, lines()), "trajectories"


def write_parquet(reader: RunReader, path: Path, arguments: argparse.Namespace) -> tuple[int, str]:
    """One row a chain."""
    try:
        from .pyarrow_table import write_chains
    except ModuleNotFoundError as error:
        raise missing_extra("a parquet file", "pyarrow") from error

    def rows() -> Iterator[dict[str, Any]]:
        for row in every_row(reader, make_filter(arguments)):
            trajectory = reader.trajectory(row.id)
            flat = {name: value for name, value in asdict(row).items() if name not in ("key", "components")}
            messages = [as_dict(message, message.tool_calls) for message in trajectory.messages]
            yield {
                **flat,
                "prediction": trajectory.prediction,
                "components": json.dumps(row.components),
                "messages": json.dumps(messages, ensure_ascii=False),
            }

    temporary = path.with_name(f".{path.name}.writing")
    try:
        count = write_chains(rows(), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return count, "trajectories"


def write_csv(reader: RunReader, path: Path, arguments: argparse.Namespace) -> tuple[int, str]:
    """One row per step and one column per metric; an absent or infinite value is an empty cell."""
    names = reader.metric_names()
    steps: dict[int, dict[str, Any]] = {}
    for name, points in reader.series(names).items():
        for step, _, value in points:
            steps.setdefault(step, {"step": step})[name] = value
    with _open(path, newline="") as file:
        writer = csv.DictWriter(file, ["step", *names])
        writer.writeheader()
        writer.writerows(steps[step] for step in sorted(steps))
    return len(steps), "steps"


def write_sft(reader: RunReader, path: Path, arguments: argparse.Namespace) -> tuple[int, str]:
    """The conversations of chains with a high reward."""
    # The run's success, if no option says otherwise.
    chosen = make_filter(arguments, split="train", reward_low=success_of(reader) - 1e-9)
    rows = sft_rows(reader, chosen, arguments.best)
    if (first := next(rows, None)) is None:
        raise ConfigError(why_none_is_good(reader, chosen))
    return _write_lines(path, chain([first], rows)), "conversations"


def write_dpo(reader: RunReader, path: Path, arguments: argparse.Namespace) -> tuple[int, str]:
    """Pairs of chains with the same prompt."""
    chosen = make_filter(arguments, split="train")
    return _write_lines(path, dpo_rows(reader, chosen, arguments.min_gap or 0.0)), "pairs"


WRITERS: dict[str, Callable[[RunReader, Path, argparse.Namespace], tuple[int, str]]] = {
    "jsonl": write_jsonl, "parquet": write_parquet, "csv": write_csv, "sft": write_sft, "dpo": write_dpo,
}  # fmt: skip


def _write_lines(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    count = 0
    with _open(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=True, allow_nan=False) + "\n")
            count += 1
    return count


def sft_rows(reader: RunReader, chosen: ChainFilter, best: int | None = None) -> Iterator[dict[str, Any]]:
    """One conversation per chain. With `best`, the best chains of each task: the highest reward, then the fewest tokens."""
    rows = every_row(reader, chosen)
    if best is not None:
        rows = (row for each in by_task(reader, chosen) for row in each[:best])
    for row in rows:
        trajectory = reader.trajectory(row.id)
        if row.score is None or not trajectory.turns or _cannot_be_shown(trajectory):
            continue
        prompt, rest = conversation(trajectory)
        yield {"messages": [*prompt, *rest], "id": row.id, "task_id": row.task_id, "step": row.step, "reward": row.score}


def dpo_rows(reader: RunReader, chosen: ChainFilter, min_gap: float = 0.0) -> Iterator[dict[str, Any]]:
    """One pair per group whose best and worst chain have different rewards, and the same prompt."""
    for high, low in best_and_worst(reader, chosen, min_gap):
        good, bad = reader.trajectory(high.id), reader.trajectory(low.id)
        (prompt, better), (other, worse) = conversation(good), conversation(bad)
        if prompt != other or _cannot_be_shown(good) or _cannot_be_shown(bad):
            continue
        yield {
            "prompt": prompt,
            "chosen": better,
            "rejected": worse,
            "reward_chosen": high.score,
            "reward_rejected": low.score,
            "task_id": high.task_id,
            "step": high.step,
        }


def conversation(trajectory: Trajectory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages before the first reply, and the rest.

    A reply is its text as sampled, tool calls included; calls that a chat server returned beside the text are listed.
    """
    from ...watch.tables import sampled_turns

    sampled = sampled_turns(trajectory)
    messages = [
        as_dict(message, sampled[index][1].completion.tool_calls if index in sampled else message.tool_calls)
        for index, message in enumerate(trajectory.messages)
    ]
    first = min(sampled, default=len(messages))
    return messages[:first], messages[first:]


def as_dict(message: Message, calls: Any) -> dict[str, Any]:
    """A message in the form of a chat server."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _cannot_be_shown(trajectory: Trajectory) -> bool:
    """Whether its messages are not what its replies followed: its history was rewritten, or images are not stored."""
    return not is_one_conversation(trajectory) or any(message.images for message in trajectory.messages)
