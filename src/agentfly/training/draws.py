"""The order of draws: a source by its weight, and a row by the sampler of the source. Both are exactly restorable.

data.sources -> TaskDraws -> TaskSampler of the source -> row -> rollout.stream -> learn -> the same sampler
"""

from __future__ import annotations

import hashlib
import inspect
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import codec, plugins
from ..data import DataSettings
from ..errors import AgentFlyError, ConfigError
from ..protocols import GroupResult, LearningSampler, TaskSampler
from ..types import Task
from .samplers import EpochSampler


@dataclass(slots=True)
class _SourceDraws:
    """A source of a run. `rows` are the places of its tasks among all; `credit` grows by the weight with every draw."""

    name: str | None
    weight: float
    rows: list[int]
    kind: str
    sampler: TaskSampler
    credit: float = 0.0

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call the sampler, which a user may have written. Raises ConfigError if it fails."""
        try:
            return method(*arguments)
        except AgentFlyError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the sampler {self.kind!r} failed in {method.__name__}: {type(error).__name__}: {error}"
            ) from error

    def state(self) -> Any:
        """A copy of the sampler's state. Raises ConfigError if it holds something that cannot be saved."""
        state = self.call(self.sampler.state)
        return codec.decode(self.call(codec.encode, state), any_keys=True)


class TaskDraws:
    """Draws the tasks of a run. A row is an index into all training tasks.

    Over any number of draws each source gets its share by weight, to within one draw if there are two sources.
    """

    def __init__(self, tasks: Sequence[Task], data: DataSettings, seed: int) -> None:
        self._tasks = tasks
        self._sources: list[_SourceDraws] = []
        self._places: dict[int, tuple[_SourceDraws, int]] = {}  # by row: its source and its index there
        for name, weight, part in data.parts():
            rows = [row for row, task in enumerate(tasks) if name is None or task.source == name]
            kind, sampler = _open_sampler(part, [tasks[row] for row in rows], seed)
            source = _SourceDraws(name, weight, rows, kind, sampler)
            source.state()
            self._sources.append(source)
            self._places |= {row: (source, index) for index, row in enumerate(rows)}
        kinds = [type(source.sampler).__qualname__ for source in self._sources]
        kinds = [] if kinds == [EpochSampler.__qualname__] else kinds
        self._rows = " ".join([fingerprint(tasks), str(data.shuffle), str(seed), *kinds])

    @property
    def learns(self) -> bool:
        """Whether a draw depends on what came of earlier ones."""
        return any(isinstance(source.sampler, LearningSampler) for source in self._sources)

    def describe(self) -> list[str]:
        """Returns a sentence for each source: how many rows it has, its share of the draws, and its sampler."""
        total = sum(source.weight for source in self._sources)
        return [
            (f"source {source.name}: {source.weight / total:.0%} of the draws, " if source.name else "")
            + f"{len(source.rows):,} training rows, sampler {source.kind}"
            for source in self._sources
        ]

    def draw(self) -> tuple[int, Task]:
        """Returns the row of the next task, and the task."""
        total = sum(source.weight for source in self._sources)
        for source in self._sources:
            source.credit += source.weight / total
        chosen = max(self._sources, key=lambda source: source.credit)
        chosen.credit -= 1.0
        index = chosen.call(operator.index, chosen.call(chosen.sampler.draw))
        if not 0 <= index < len(chosen.rows):
            raise ConfigError(f"the sampler {chosen.kind!r} drew {index}, but its rows are 0 to {len(chosen.rows) - 1}")
        row = chosen.rows[index]
        return row, self._tasks[row]

    def task_at(self, *place: int) -> tuple[int, Task]:
        """Returns the row and the task of a stored draw: its row, or epoch and position as older checkpoints have it."""
        sampler = self._sources[0].sampler
        row = sampler.row_at(*place) if len(place) == 2 and isinstance(sampler, EpochSampler) else place[0]
        return row, self._tasks[row]

    def learn(self, result: GroupResult) -> None:
        """Tell the sampler of the row what came of a draw."""
        source, index = self._places[result.row]
        if isinstance(source.sampler, LearningSampler):
            source.call(source.sampler.learn, replace(result, row=index))

    def state(self) -> dict[str, Any]:
        return {
            "rows": self._rows, "samplers": {str(source.name): source.state() for source in self._sources},
            "credits": [source.credit for source in self._sources],
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on where `state` was taken. Returns False, and draws from the start, if it is of other rows or samplers."""
        if state.get("rows") != self._rows:
            return False
        # A checkpoint from before there were samplers is the state of the only one.
        samplers = state.get("samplers", {"None": state})
        for source, credit in zip(self._sources, state.get("credits", [0.0]), strict=True):
            source.sampler.restore(samplers[str(source.name)])
            source.credit = credit
        return True


def _open_sampler(data: DataSettings, tasks: Sequence[Task], seed: int) -> tuple[str, TaskSampler]:
    """Returns the name of the sampler that a source asks for, and the sampler."""
    chosen, options = data.sampler_options
    make = plugins.resolve("samplers", chosen) if isinstance(chosen, str) else chosen
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", repr(chosen))
    if make is EpochSampler:
        options = {"shuffle": data.shuffle, **options}
    if not callable(make):
        raise ConfigError(f"data.sampler {name!r} is {type(make).__name__}, not a class that is called with tasks and seed")
    try:
        inspect.signature(make).bind(tasks, seed, **options)
    except TypeError as error:
        raise ConfigError(f"data.sampler does not fit the sampler {name!r}: {error}") from error
    try:
        sampler = make(tasks, seed, **options)
    except ConfigError as error:
        raise ConfigError(f"data.sampler {name!r}: {error}") from error
    if not isinstance(sampler, TaskSampler):
        raise ConfigError(f"data.sampler {name!r} makes no sampler: it needs draw, state and restore (protocols.TaskSampler)")
    return name, sampler


def fingerprint(tasks: Sequence[Task]) -> str:
    """Returns a short text that differs if the rows or their order do."""
    digest = hashlib.blake2b(digest_size=8)
    for task in tasks:
        row = [task.id, [(message.role, message.content) for message in task.messages], dict(task.fields)]
        # An object has no stable text; its type is compared.
        digest.update(json.dumps(row, default=lambda value: type(value).__name__, skipkeys=True).encode())
    return f"{len(tasks)}-{digest.hexdigest()}"
