"""The records of a run, read from its store: every chain is decoded and checked by itself once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import AgentFlyError, ConfigError, InvariantError
from ..learn.samples import to_samples
from ..rows import turns_by_row
from ..runs import RunDirectory, RunStore, TrajectoryRow, decode
from ..runs.checkpoints import list_checkpoints
from ..types import Task, Trajectory
from ..watch.metrics import is_success
from .audit import examine_chain, examine_learned

MAX_TOLD = 5
"""Problems of one check that are told; the rest are counted."""
_NAME = re.compile(r"t(\d+)-(\d+)-(\d+)")


@dataclass(slots=True)
class Check:
    """The result of one check. `skipped` says why nothing could be checked."""

    name: str
    promise: str
    evidence: str = ""
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0
    skipped: str | None = None

    @property
    def ok(self) -> bool:
        return not self.num_problems

    def add(self, problem: str) -> None:
        self.num_problems += 1
        if len(self.problems) < MAX_TOLD:
            self.problems.append(problem)


class Skip(Exception):
    """Raised by a check that cannot be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Chain:
    """What the checks of whole steps need of a stored chain of the training split.

    `drawn` are the step and the position that its task was drawn for; None if its id does not say.
    """

    id: str
    step: int
    task: str
    draw: int
    number: int
    outcome: str
    scored: bool
    trainable: bool
    total: float
    num_tokens: int
    versions: Counter[int]
    prompt: int | None
    drawn: tuple[int, int] | None
    success: bool = False


@dataclass(slots=True)
class Run:
    """The records of a run. `steps` are those that count, `chains` the trained chains by step.

    A trainer may be writing: the checkpoints were listed before the metrics were read, and these before the chains, so each is
    older than what must be stored before it. `rules` are the settings of the steps, by their first (see `training.loop`).
    """

    directory: RunDirectory
    config: Config | None
    checkpoints: list[Path]
    metrics: dict[int, dict[str, float]]
    steps: list[int]
    chains: dict[int, list[Chain]] = field(default_factory=lambda: defaultdict(list))
    tasks: dict[str, Task] = field(default_factory=dict)
    num_stored: Counter[str] = field(default_factory=Counter)
    scored: set[tuple[int, str]] = field(default_factory=set)
    num_learned: Counter[int] = field(default_factory=Counter)
    checked: list[tuple[int, str, bool]] = field(default_factory=list)
    rules: list[dict[str, Any]] = field(default_factory=list)

    def settings(self) -> Config:
        if self.config is None:
            raise Skip("config.toml is missing or cannot be read")
        return self.config

    def trained(self) -> list[Chain]:
        """The chains of the steps that count. Skips the check if there is none."""
        if not self.steps:
            raise Skip("no training step is stored")
        return [chain for step in self.steps for chain in self.chains[step]]

    def series(self, name: str) -> dict[int, float]:
        return {step: values[name] for step, values in self.metrics.items() if name in values}


def open_run(directory: RunDirectory, store: RunStore) -> Run:
    try:
        config = Config.load(directory.config) if directory.config.is_file() else None
    except ConfigError:
        config = None
    checkpoints = list_checkpoints(directory.checkpoints)
    metrics = store.metrics_by_step()
    rollouts = any("rollout/chains" in values for values in metrics.values())
    steps = [step for step in sorted(metrics) if step > 0 and any(name.startswith("train/") for name in metrics[step])]
    counted = steps if rollouts or store.count(split="train") else []
    return Run(directory, config, checkpoints, metrics, counted, rules=store.meta().get("rules", []))


def read_chains(run: Run, store: RunStore, checks: dict[str, Check]) -> None:
    """Decode every chain once: check it by itself, and keep what the checks of steps need."""
    texts = _TextComparison(run.checkpoints, checks["texts"])
    success_at = 1.0 if run.config is None else run.config.agent.success_at
    for row, body in store.scan():
        run.num_stored[row.split] += 1
        try:
            trajectory = decode(body)
        except ConfigError as error:
            checks["rows"].add(f"chain {row.id} of step {row.step}: {error}")
            continue
        for name, problem in examine_chain(row, trajectory):
            checks[name].add(problem)
        if (mask := _mask_problem(trajectory)) is not None:
            checks["tokens"].add(f"chain {row.id} of step {row.step}: {mask}")
        texts.look_at(row, trajectory)
        if trajectory.scored:
            run.scored.add((row.step, row.split))
        if row.split == "train":
            run.chains[row.step].append(_facts(row, trajectory, success_at))
            run.tasks.setdefault(row.task_id, trajectory.task)
    texts.close()
    run.checked = store.checks()
    for learned in store.learned():
        run.num_learned[learned.step] += learned.num_trained is not None
        for problem in examine_learned(learned):
            checks["trained"].add(problem)


def _facts(row: TrajectoryRow, trajectory: Trajectory, success_at: float) -> Chain:
    return Chain(
        id=row.id,
        step=row.step,
        task=row.task_id,
        draw=trajectory.draw,
        number=trajectory.chain,
        outcome=row.outcome,
        scored=trajectory.scored,
        success=is_success(trajectory, success_at),
        trainable=trajectory.trainable,
        total=trajectory.total_reward,
        num_tokens=trajectory.num_sampled,
        versions=Counter(version for turn in trajectory.turns for version in turn.completion.versions),
        # Code of its own, whose chains have a final row, may write another prompt for each sibling.
        prompt=hash(tuple(trajectory.turns[0].context_ids)) if trajectory.turns and trajectory.final_row is None else None,
        drawn=draw_of(row.id),
    )


def _mask_problem(trajectory: Trajectory) -> str | None:
    """The mask is not stored: it is made again as for training, and must cover exactly the sampled tokens."""
    try:
        rows = to_samples(trajectory)
    except (InvariantError, AssertionError) as error:
        return f"no training rows can be made of it: {error}"
    sampled = [token for turn in turns_by_row(trajectory) for token in turn.completion.token_ids] if rows else []
    trained = [token for row in rows for token, mask in zip(row.token_ids, row.mask, strict=True) if mask]
    return None if trained == sampled else f"the mask covers {len(trained)} tokens, but {len(sampled)} were sampled"


def draw_of(chain: str) -> tuple[int, int] | None:
    """The step and the position that a chain's task was drawn for, from its id; None if the id does not say."""
    named = _NAME.fullmatch(chain)
    return (int(named[1]), int(named[2])) if named else None


class _TextComparison:
    """Compares the text of each reply with what the tokenizer of the newest checkpoint makes of its ids."""

    def __init__(self, checkpoints: list[Path], check: Check) -> None:
        self._check, self._compared, self._wrong = check, 0, 0
        self._tokenizer: object = None
        folders = [path for path in checkpoints if (path / "tokenizer_config.json").is_file()]
        if not folders:
            check.skipped = "no checkpoint has a tokenizer"
            return
        from ..engines.local.load import read_settings

        try:
            self._tokenizer = read_settings(folders[-1])[0]
        except AgentFlyError as error:
            check.skipped = f"the tokenizer cannot be loaded: {error}"

    def look_at(self, row: TrajectoryRow, trajectory: Trajectory) -> None:
        if self._tokenizer is None:
            return
        from ..engines.prompt import decode as text_of

        for number, turn in enumerate(trajectory.turns, 1):
            ids, text = turn.completion.token_ids, turn.completion.text
            if not ids:
                continue
            self._compared += 1
            try:  # the id that ends a turn is left out of the text
                same = text == text_of(self._tokenizer, ids[:-1]) or text == text_of(self._tokenizer, ids)
            except (OverflowError, TypeError, ValueError, IndexError):
                same = False
            if not same:
                self._wrong += 1
                self._check.add(f"chain {row.id} of step {row.step}: the text of turn {number} is not that of its token ids")

    def close(self) -> None:
        if self._wrong and self._wrong == self._compared and self._wrong > 1:  # an engine of the user's may write other texts
            self._check.problems, self._check.num_problems = [], 0
            self._check.skipped = "the tokenizer of the checkpoint did not write these texts"
        self._check.evidence = f"{self._compared:,} replies compared"
