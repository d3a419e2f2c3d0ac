"""The task set `gsm8k`: rows `{"id", "question", "answer", "kind", "worked"}` from the published files.

`$GSM8K_DATA` names the folder with train.jsonl and test.jsonl (also gzipped, also as gsm8k_train.jsonl, also a checkout of the
repository that publishes them), or one such file. The train file is for training. A quarter of the test file is "validation"
and the rest "test"; without a test file, a twentieth of the train file is held out for each. A question belongs to exactly one
split, whatever the seed: the split is a hash of its text. Nothing is downloaded.
"""

from __future__ import annotations

import os
import random
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...errors import ConfigError, DataError
from ..task_sets import SplitName, check_count
from .loaders import load_gsm8k

VARIABLE = "GSM8K_DATA"
FOLDERS = (".", "grade_school_math/data")
NAMES = ("{}.jsonl", "{}.jsonl.gz", "gsm8k_{}.jsonl", "gsm8k_{}.jsonl.gz")
BUCKETS = 20


def gsm8k_tasks(split: SplitName, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Word problems of GSM8K, from the files that $GSM8K_DATA names. Without a count, all of the split."""
    check_count(split, count)
    rows = _of_split(split)
    if split != "test":  # test problems keep the order of their file
        random.Random(f"gsm8k {split} {seed}").shuffle(rows)
    return rows[:count]


def data_files() -> tuple[Path | None, Path | None]:
    """Returns the train file and the test file; at most one is None. Raises ConfigError or DataError if there is neither."""
    given = os.environ.get(VARIABLE)
    if not given:
        raise ConfigError(
            f"{VARIABLE} is not set: it names the folder with GSM8K's files (train.jsonl and, if you have it, test.jsonl); "
            f"the task set 'code' needs no files"
        )
    root = Path(given).expanduser()
    if root.is_file():
        return root, None
    if not root.is_dir():
        raise DataError(f"{root}: no such file or folder; set {VARIABLE} to the folder that holds GSM8K's train.jsonl")
    train, test = (_find(root, name) for name in ("train", "test"))
    if train is None and test is None:
        raise DataError(f"{root}: there is no train.jsonl or gsm8k_train.jsonl (or either with .gz) in it")
    return train, test


def _find(root: Path, name: str) -> Path | None:
    places = (root / folder / pattern.format(name) for folder in FOLDERS for pattern in NAMES)
    return next((place for place in places if place.is_file()), None)


def _of_split(split: str) -> list[dict[str, Any]]:
    train, test = data_files()
    if train is None and split == "train":
        raise DataError(f"{test}: there is no train.jsonl beside it, and nothing is trained on the test problems; add it")
    given = _load(train, "train") if train is not None else []
    if test is None:
        parts = {0: "validation", 1: "test"}
        rows = [row for row in given if parts.get(_bucket(row), "train") == split]
    elif split == "train":
        rows = given
    else:
        questions = {row["question"] for row in given}
        rows = [row for row in _load(test, "test") if row["question"] not in questions]
        rows = [row for row in rows if ("validation" if _bucket(row) < BUCKETS // 4 else "test") == split]
    if not rows:
        raise DataError(f"{test or train}: it has so few problems that none is left for the split {split!r}; add more")
    return rows


def _load(path: Path, name: str) -> list[dict[str, Any]]:
    """Loads a file. Lines of both files are numbered from 1, so the file's name goes into the id."""
    return [{**row, "id": row["id"].replace("gsm8k/", f"gsm8k/{name}/")} for row in load_gsm8k(path)]


def _bucket(row: dict[str, Any]) -> int:
    return int.from_bytes(sha256(row["question"].encode()).digest()[:8], "big") % BUCKETS
