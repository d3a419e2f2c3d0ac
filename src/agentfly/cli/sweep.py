"""`agentfly sweep`: one training for each combination of values, several at once, and a table of their results.

    agentfly sweep quickstart seed=0..4 algorithm=grpo,rloo --at-once 2

A key with several values varies, the others are the same in all runs. Each run is a process of `agentfly train`, with a log
beside its folder. The same command continues a sweep: finished runs stay, the others are resumed. A run that is killed or
freezes is resumed at most `fault.restarts` times; one that fails does not end the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from . import dashboard
from .arguments import separate_config, takes_config

if TYPE_CHECKING:
    from rich.console import Console

    from ..config import Config
    from ..runs.catalog import RunSummary
    from ..training.ranks.process import LocalRank

LOOK_S = 0.1
"""Seconds between two looks at the processes."""
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_UNFIT = re.compile(r"[^A-Za-z0-9.+-]+")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sweep` to the command line."""
    sweep = commands.add_parser("sweep", help="train once for each combination of values: seed=0..4 train.lr=1e-6,1e-5")
    takes_config(sweep)
    sweep.add_argument("--at-once", type=int, default=1, metavar="N", help="how many runs train at the same time (default 1)")
    sweep.add_argument("--view", action="store_true", help="show the runs in a dashboard while they train")
    sweep.add_argument("--dry-run", action="store_true", help="check and print the runs, and train none")
    sweep.add_argument("--json", metavar="PATH", help="also write the results of each run to this file")
    sweep.set_defaults(run=run_sweep)


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a sweep: its folder, the values of the keys that vary, the arguments of `agentfly train`, and their config."""

    folder: Path
    values: Mapping[str, str]
    arguments: Sequence[str]
    config: Config

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def command(self) -> list[str]:
        """The arguments that start the run, or resume it if it has a checkpoint."""
        from ..runs import RunDirectory

        resume = ["--resume", str(self.folder)] if any(RunDirectory(self.folder).saved_steps()) else []
        return [*self.arguments, *resume]

    @property
    def state(self) -> str:
        """`new`, `finished`, or the state in which the run was left. Raises ConfigError if other settings trained it."""
        from ..config import Config
        from ..runs import RunDirectory
        from ..runs.catalog import summarize

        directory = RunDirectory(self.folder)
        if not directory.config.is_file():
            return "new"
        trained = Config.load(directory.config)
        for key, value, ours in _differences(trained.to_dict(), self.config.to_dict()):
            if key != "train.steps":
                raise ConfigError(
                    f"{self.folder} was trained with {key} = {value!r}, not {ours!r}: choose another run.name, or remove it"
                )
        run = summarize(self.folder)
        if run.state == "finished" and trained.train.steps != self.config.train.steps:
            return "stopped" if (run.step or 0) < self.config.train.steps else "finished"
        return run.state or "new"


def _differences(left: Mapping[str, Any], right: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any, Any]]:
    """The keys with other values, except where a run is kept and what it uses of the machine (`run.*`)."""
    for name in left:
        key, one, other = f"{prefix}{name}", left[name], right.get(name)
        if one == other or key == "run":
            continue
        if not prefix and isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{key}.")
        else:
            yield key, one, other


def run_sweep(arguments: argparse.Namespace) -> int:
    """Train every variant that is not finished, and print the table."""
    from rich.console import Console

    console = Console()

    def say(sentence: str) -> None:
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)

    root, variants = read_variants(arguments)
    states = {variant.folder: variant.state for variant in variants}
    if arguments.dry_run:
        for variant in variants:
            say(f"{states[variant.folder]:8}  agentfly {subprocess.list2cmdline(variant.command)}")
        return 0
    waiting = [variant for variant in variants if states[variant.folder] != "finished"]
    if taken := [variant for variant in waiting if states[variant.folder] == "running"]:
        raise ConfigError(f"{taken[0].folder} is training already: wait for its end, or stop it")
    done = len(variants) - len(waiting)
    say(f"sweep {root}: {len(variants)} runs, {done} of them finished, {arguments.at_once} at once; logs: {root}/*.log")
    root.mkdir(parents=True, exist_ok=True)
    with dashboard.Beside(root, say) if arguments.view else nullcontext():
        outcome = Processes(waiting, arguments.at_once, say).run()
    results = [_result(variant) for variant in variants]
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _print_table(console, results, [key for key in variants[0].values if key != "seed"])
    say(f"try next:\n  agentfly view {root}\n  agentfly plot {root}/*/ --metric rollout/success")
    if outcome.stopped is not None:
        say("stopped: the same command continues the sweep")
        return 128 + outcome.stopped
    return 1 if outcome.failed else 0


# ---- what to run -------------------------------------------------------------------------------------------------------------


def read_variants(arguments: argparse.Namespace) -> tuple[Path, list[Variant]]:
    """Returns the folder of the sweep and its runs. Raises ConfigError for a combination that a training would refuse."""
    from ..config import Config

    separate_config(arguments)
    if arguments.at_once < 1:
        raise ConfigError(f"--at-once must be at least 1, not {arguments.at_once}")
    choices = {}
    for word in arguments.overrides:
        key, sign, text = word.partition("=")
        if not sign:
            raise ConfigError(f"a key of a sweep is key=value or key=value,value, not {word!r}")
        choices[key] = split_values(text)
    varied = [key for key, values in choices.items() if len(values) > 1]
    if not varied:
        raise ConfigError("agentfly sweep needs a key with several values, such as seed=0..4 or train.lr=1e-6,1e-5")
    if odd := [key for key in varied if key.startswith("run.")]:
        raise ConfigError(f"{odd[0]} cannot vary in a sweep, because each run has its own folder")
    fixed = [
        f"{key}={values[0]}" for key, values in choices.items() if key not in varied and key not in ("run.dir", "run.name")
    ]
    config = [] if arguments.config is None else [arguments.config]
    of = Config.load(arguments.config, [f"{key}={values[0]}" for key, values in choices.items()])
    root = Path(of.run.dir) / (of.run.name or f"sweep-{Path(arguments.config or 'run').name.removesuffix('.toml')}")
    if arguments.at_once > 1 and of.run.threads is None:
        fixed.append(f"run.threads={_threads(arguments.at_once)}")
    variants = []
    for combination in itertools.product(*(choices[key] for key in varied)):
        values = dict(zip(varied, combination, strict=True))
        name = name_of(values)
        place = [f"run.dir={json.dumps(str(root))}", f"run.name={json.dumps(name)}"]
        words = [*fixed, *(f"{key}={value}" for key, value in values.items()), *place]
        try:
            made = Config.load(arguments.config, words)
        except ConfigError as error:
            raise ConfigError(f"{', '.join(f'{key}={value}' for key, value in values.items())}: {error}") from error
        variants.append(Variant(root / name, values, ["train", *config, *words], made))
    if len({variant.folder for variant in variants}) < len(variants):
        raise ConfigError("two runs of the sweep have the same values: remove one of them")
    return root, variants


def split_values(text: str) -> list[str]:
    """The values of a word: those between commas outside of quotes and brackets, or all integers of a range `0..4`."""
    if match := _RANGE.fullmatch(text):
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise ConfigError(f"the range {text} is empty: write the smaller number first")
        return [str(number) for number in range(first, last + 1)]
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not quote and depth <= 0:
            values.append("")
        else:
            values[-1] += letter
    if len(values) > 1 and not all(value.strip() for value in values):
        raise ConfigError(f"{text!r} has an empty value between its commas")
    return [value.strip() if len(values) > 1 else value for value in values]


def name_of(values: Mapping[str, str]) -> str:
    """The folder of a run: the last part of each key, and its value."""
    lasts = [key.rpartition(".")[2] for key in values]
    keys = lasts if len(set(lasts)) == len(lasts) else list(values)
    return "_".join(f"{key}-{_UNFIT.sub('-', value).strip('-')}" for key, value in zip(keys, values.values(), strict=True))


def _threads(at_once: int) -> int:
    from ..training.stopping import available_processors

    return max(1, available_processors() // at_once)


# ---- running -----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Running:
    variant: Variant
    process: LocalRank
    began: float
    signals: int = 0  # signals that were passed on


class Processes:
    """Trains variants, `at_once` at a time. A signal is passed on to every run, which saves and ends; then none starts."""

    def __init__(self, waiting: Iterable[Variant], at_once: int, say: Callable[[str], None]) -> None:
        self.stopped: int | None = None
        self.failed: list[Variant] = []
        self._waiting = deque(waiting)
        self._at_once, self._say = at_once, say
        self._running: dict[int, _Running] = {}
        self._restarts: dict[Path, int] = {}
        self._signals = 0
        self._environments = _environments(self._waiting[0].config, at_once) if self._waiting else []

    def run(self) -> Processes:
        """Returns this object when every run has ended."""
        from ..training.stopping import handled_by

        with handled_by(self._stop):
            try:
                while self._running or (self._waiting and self.stopped is None):
                    self._fill()
                    time.sleep(LOOK_S)
                    self._look()
            finally:
                for each in self._running.values():
                    each.process.kill()
        return self

    def _stop(self, number: int, frame: object) -> None:
        self.stopped, self._signals = number, self._signals + 1

    def _fill(self) -> None:
        from ..training.ranks.process import start_rank

        for slot in range(self._at_once):
            if slot not in self._running and self._waiting and self.stopped is None:
                variant = self._waiting.popleft()
                with variant.log.open("ab") as log:
                    process = start_rank(
                        0, [sys.executable, "-m", "agentfly", *variant.command], {**os.environ, **self._environments[slot]},
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    )  # fmt: skip
                self._running[slot] = _Running(variant, process, time.monotonic())
                self._say(f"{variant.folder.name}: started")

    def _look(self) -> None:
        for slot, each in list(self._running.items()):
            while each.signals < self._signals:  # here and not in the handler: a run may start between a signal and this line
                each.signals += 1
                with suppress(ProcessLookupError):
                    os.kill(each.process.process.pid, self.stopped or signal.SIGINT)
            each.process.read()
            lost = each.process.why_lost()
            if each.process.status is None and lost is None:
                continue
            each.process.kill()
            del self._running[slot]
            self._ended(each, lost)

    def _ended(self, each: _Running, lost: str | None) -> None:
        from ..runs.catalog import summarize
        from ..watch.progress import duration

        variant, status = each.variant, each.process.status
        name, after = variant.folder.name, duration(time.monotonic() - each.began)
        if status == 0:
            self._say(f"{name}: finished after {after}, {_held_out(summarize(variant.folder))}")
        elif self.stopped is not None:
            self._say(f"{name}: stopped after {after}")
        elif lost is not None and self._restarts.get(variant.folder, 0) < variant.config.fault.restarts:
            self._restarts[variant.folder] = count = self._restarts.get(variant.folder, 0) + 1
            self._say(f"{name}: {lost}, and is started again (restart {count} of {variant.config.fault.restarts})")
            self._waiting.appendleft(variant)
        else:
            self.failed.append(variant)
            self._say(f"{name}: failed after {after}: {lost or _last_line(variant.log)}")


def _environments(config: Config, at_once: int) -> list[dict[str, str]]:
    """The variables of the runs at once: if there are several GPUs, each run sees as many of them as it needs."""
    if at_once == 1:
        return [{}]
    from ..engines.local.load import count_gpus
    from ..training.stopping import num_gpus

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in listed.split(",")] if listed else [str(number) for number in range(count_gpus())]
    return share_gpus(names, max(1, num_gpus(config)), at_once)


def share_gpus(names: Sequence[str], needed: int, at_once: int) -> list[dict[str, str]]:
    """Which GPUs each of the runs at once sees. With fewer parts than runs, runs share them in turn."""
    parts = len(names) // needed
    if parts < 2:
        return [{}] * at_once
    starts = [slot % parts * needed for slot in range(at_once)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[start : start + needed])} for start in starts]


def _last_line(log: Path) -> str:
    """The error that a run has printed: the last line of its log that is one, or its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w*[Ee]rror|supervisor): ", line)]
    return f"{(errors or lines or ['no word'])[-1]} (log: {log})"


# ---- results -----------------------------------------------------------------------------------------------------------------


def _held_out(run: RunSummary) -> str:
    from ..watch.progress import number

    ends = [value for value in (run.first_validation, run.last_validation) if value is not None]
    return f"held-out success {' -> '.join(number(value, 3) for value in ends)}" if ends else "nothing was held out"


def _result(variant: Variant) -> dict[str, Any]:
    from ..runs.catalog import summarize

    run = summarize(variant.folder)
    return {
        "name": variant.folder.name,
        "folder": str(variant.folder),
        "values": dict(variant.values),
        "state": run.state or "new",
        "step": run.step,
        "before": run.first_validation,
        "after": run.last_validation,
        "best": run.best_validation,
        "reward": run.reward,
    }


def _print_table(console: Console, results: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """One row per combination of the keys but the seed, with means and standard deviations over its finished runs."""
    from rich.table import Table

    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault(tuple(result["values"][key] for key in keys), []).append(result)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (*keys, "finished", "held-out before", "after", "best", "reward"):
        table.add_column(name, no_wrap=True)
    for values, members in groups.items():
        ended = [member for member in members if member["state"] == "finished"]
        cells = [_spread([member[name] for member in ended]) for name in ("before", "after", "best", "reward")]
        table.add_row(*values, f"{len(ended)} of {len(members)}", *cells)
    console.print(table)


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.fmean(known):.3f}" + (f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else "")
