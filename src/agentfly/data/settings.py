"""The section `[data]` of a config, and the data sets that it names."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import schema
from ..errors import ConfigError
from ..schema import Bounds, read, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The tasks."""

    train: str = setting("", "training rows: a .json, .jsonl, .csv or .parquet file, hf://NAME, or a task set by name")
    validation: str | None = setting(None, "held-out rows; when not set, a share of the training rows or the task set's split")
    holdout: float = setting(
        0.1, "share of a training file that is held out when no validation rows are given", above=0, below=1
    )
    train_count: int | None = setting(None, "use only the first rows", low=1)
    columns: dict[str, str] = setting(
        {}, "fields of a row by the columns of the data: columns.question=problem, columns.answer=reward_model.ground_truth"
    )
    validation_count: int | None = setting(
        None, "use only the first held-out rows; when not set, 200 in a training and all in `agentfly eval`", low=0
    )
    shuffle: bool = setting(True, "draw the training rows in a new seeded order each time through them")
    sampler: str | dict[str, Any] | Callable[..., Any] = setting(
        "epochs",
        "what decides which row is drawn next: a name of `agentfly samplers list`, file.py:NAME or module:NAME, in Python also "
        "a class; or a table: `kind` and its options",
    )
    sources: dict[str, dict[str, Any]] = setting(
        {}, "several data sets by name, instead of train: a table for each, with `weight` (1 when not set) and keys of [data]"
    )

    def __post_init__(self) -> None:
        schema.check_fields(self, "data.")
        if not (isinstance(self.sampler, str | Mapping) or callable(self.sampler)):
            raise ConfigError(f"data.sampler must be a name, a table or a class, not {self.sampler!r}")
        if isinstance(self.sampler, Mapping) and "kind" not in self.sampler:
            raise ConfigError("data.sampler has no kind: write {kind = NAME, ...}, or the name alone")
        self.parts()

    @property
    def validated(self) -> int:
        """How many held-out rows a training validates on, at most."""
        return 200 if self.validation_count is None else self.validation_count

    @property
    def sampler_options(self) -> tuple[str | Callable[..., Any], dict[str, Any]]:
        """The sampler without its options, and these."""
        options = dict(self.sampler) if isinstance(self.sampler, Mapping) else {"kind": self.sampler}
        return options.pop("kind"), options

    @property
    def name(self) -> str | None:
        """What the rows are called: the file or task set, or the names of all sources."""
        return "+".join(self.sources) or self.train or None

    def parts(self) -> list[DataSource]:
        """Returns the sources, or the only one, which has no name. Raises ConfigError for a source that is wrong."""
        if not self.sources:
            return [DataSource(None, 1.0, self)]
        for key in ("train", "validation"):
            if getattr(self, key):
                raise ConfigError(f"data.{key} and data.sources cannot both be set: move the rows of data.{key} into a source")
        return [self._part(name, table) for name, table in self.sources.items()]

    def _part(self, name: str, table: Mapping[str, Any]) -> DataSource:
        prefix = f"data.sources.{name}"
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"{prefix}: the name of a source has letters, digits, _ and - only")
        keys = [*(item.name for item in dataclasses.fields(self) if item.name != "sources"), "weight"]
        for key in table:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"a source has {', '.join(keys)}"
                raise ConfigError(f"unknown config key '{prefix}.{key}'; {hint}")
        if not table.get("train"):
            raise ConfigError(f"{prefix}.train is not set: point it at a file, at hf://NAME, or at a task set")
        weight: float = read(f"{prefix}.weight", table.get("weight", 1.0), float, Bounds(above=0))
        own = {key: value for key, value in table.items() if key != "weight"}
        try:
            return DataSource(name, weight, dataclasses.replace(self, sources={}, **own))
        except ConfigError as error:
            raise ConfigError(str(error).replace("data.", f"{prefix}.", 1)) from error


class DataSource(NamedTuple):
    """A named part of the rows: its share of the draws is its weight among those of all sources."""

    name: str | None
    weight: float
    data: DataSettings
