"""What the task sets of the worlds share: splits, counts, and the word lists in JSON files beside the code."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from ..errors import ConfigError

SplitName = Literal["train", "validation", "test"]
SPLITS = ("train", "validation", "test")
DEFAULT_COUNTS = {"train": 4096, "validation": 200, "test": 400}
MAX_COUNT = 10_000


class CountError(ConfigError):
    """More tasks are asked for than a task set has, or fewer than one. `most` is how many it has, or None."""

    def __init__(self, text: str, most: int | None = None) -> None:
        super().__init__(text)
        self.most = most


def check_split(split: str, known: Iterable[str] = SPLITS) -> str:
    """Return `split`. Raises ConfigError unless it is known."""
    if split not in known:
        raise ConfigError(f"tasks: no split is called {split!r}; there are {', '.join(known)}.")
    return split


def check_count(split: str, count: int | None, *, most: int | None = None, default: Mapping[str, int] = DEFAULT_COUNTS) -> int:
    """The number of tasks to make: `count`, or the default of the split. Raises ConfigError for an invalid split or count."""
    default_count = default[check_split(split)]
    wanted = default_count if count is None else count
    if type(wanted) is not int or wanted < 1 or (most is not None and wanted > most):
        allowed = "at least 1" if most is None else f"from 1 to {most}"
        raise CountError(f"tasks: count must be {allowed}, not {count}.", most)
    return wanted


def split_of(text: str) -> str:
    """The split of a text by its hash: 80 % train, 10 % validation, 10 % test."""
    bucket = zlib.crc32(text.encode()) % 10
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


@cache
def read_table(package: str, name: str) -> Any:
    """The content of a JSON file in a package. All callers share one copy and must not change it."""
    return json.loads((files(package) / name).read_text(encoding="utf-8"))
