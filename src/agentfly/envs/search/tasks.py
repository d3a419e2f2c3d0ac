"""The task sets of the search world: a split, a count and a seed in, rows out.

    encyclopaedia      one- and two-hop questions about the invented encyclopaedia
    easy_search        the same about the small world, for small models
    search_questions   questions of a file: `$SEARCH_DATA` is the file, or a folder with passages and questions

Rows have `question`, `answer`, `gold_titles` (the pages that contain the answer), `hops`, `kind` and `corpus` (what is
searched). Generated rows also have `given`, for the solver. A question belongs to one split, whatever the seed.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError, DataError
from ..task_sets import CountError, SplitName, check_split, split_of
from .generated.easy import easy_questions
from .generated.questions import Question, all_questions
from .loaders import load_questions

CORPORA = ("passages", "corpus", "wiki-18", "kilt_knowledgesource")
OTHER_NAMES = {"train": ("train",), "validation": ("validation", "dev", "valid"), "test": ("test",)}
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
DEFAULT_COUNTS = {"train": 4000, "validation": 200, "test": 400}


def encyclopaedia(split: SplitName, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Questions about an invented world, such as "Which river flows through the town where Mael Dorn was born?"."""
    check_split(split)
    return _rows([each for each in all_questions() if each.split == split], "encyclopaedia", split, count, seed)


def easy_search(split: SplitName, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Short questions with short pages, such as "What is the city of the friend of Bolo?"."""
    check_split(split)
    return _rows(easy_questions(split), "easy_search", split, count, seed)


def search_questions(
    split: SplitName, count: int | None = None, seed: int = 0, path: str | Path | None = None
) -> list[dict[str, Any]]:
    """Questions of a HotpotQA-, NQ- or 2Wiki-shaped file: `$SEARCH_DATA`, or `path`.

    A folder contains `train.jsonl`, `validation.jsonl` and `test.jsonl`; or one `questions.jsonl`, which is split by a hash of
    the question; or files under their published names, such as `hotpot_train_v1.1.json` and `nq-dev-kilt.jsonl`. If it also
    contains `passages.jsonl`, `wiki-18.jsonl` or `kilt_knowledgesource.json`, its rows name that file as their `corpus`. Each
    file may be gzipped. Raises DataError if no file fits.
    """
    check_split(split)
    given = path or os.environ.get("SEARCH_DATA")
    if not given:
        raise ConfigError(
            "search_questions needs questions: set SEARCH_DATA to their file, or to a folder with train.jsonl (or "
            "questions.jsonl) and passages.jsonl; the task set 'encyclopaedia' needs no files"
        )
    place = Path(given).expanduser()
    if not place.exists():
        raise DataError(f"{place}: no such file or folder of questions")
    file, whole, corpus = (place, True, None) if place.is_file() else _in_folder(place, split)
    rows = load_questions(file)
    if whole:
        rows = [row for row in rows if split_of(row["question"]) == split]
    if corpus is not None:
        rows = [{"corpus": str(corpus), **row} for row in rows]
    random.Random(f"questions {split} {seed}").shuffle(rows)
    if not rows:
        raise DataError(f"{file}: no question of it belongs to the split {split!r}")
    return rows if count is None else rows[:count]


def _rows(pool: Sequence[Question], corpus: str, split: str, count: int | None, seed: int) -> list[dict[str, Any]]:
    wanted = min(DEFAULT_COUNTS[split], len(pool)) if count is None else count
    if not 1 <= wanted <= len(pool):
        has = f"{corpus} has {len(pool):,} questions of the split {split!r}"
        raise CountError(f"tasks: {has}, so count cannot be {count}.", len(pool))
    drawn = random.Random(f"{corpus} {split} {seed}").sample(pool, wanted)
    return [
        {
            "question": each.text,
            "answer": each.answer,
            "gold_titles": list(each.pages),
            "hops": each.hops,
            "kind": each.kind,
            "corpus": corpus,
            "given": {"path": list(each.path)},
        }
        for each in drawn
    ]


def _in_folder(folder: Path, split: str) -> tuple[Path, bool, Path | None]:
    """The file of a split, whether that file contains all splits, and the file of passages beside it."""

    def first(*stems: str) -> Path | None:
        return next((file for stem in stems for end in SUFFIXES if (file := folder / f"{stem}{end}").is_file()), None)

    corpus = first(*CORPORA)
    if (file := first(*OTHER_NAMES[split])) is not None:
        return file, False, corpus
    if (file := first("questions")) is not None:
        return file, True, corpus
    published = [file for file in sorted(folder.iterdir()) if file.is_file() and _is_published(file.name, split)]
    if len(published) > 1:
        names = ", ".join(file.name for file in published)
        raise DataError(f"{folder}: several files look like the split {split!r} ({names}): leave one of them there")
    if published:
        return published[0], False, corpus
    raise DataError(
        f"{folder}: holds neither {split}.jsonl nor questions.jsonl (or .json, or gzipped), nor a file whose name says "
        f"{split}, such as hotpot_train_v1.1.json"
    )


def _is_published(name: str, split: str) -> bool:
    """Whether a file name contains the split as a word, as in `hotpot_dev_fullwiki_v1.json` or `nq-dev-kilt.jsonl`."""
    words = set(re.split(r"[._-]", name.lower()))
    return name.endswith(SUFFIXES) and not words.isdisjoint(OTHER_NAMES[split])
