"""`data.train = "reasoning_gym:NAME"`: generated tasks of reasoning-gym, and `reasoning_score`, which asks their verifier.

A row holds how its entry is generated, not the entry: the verifiers of some data sets accept more than one answer.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any, Literal

from ..errors import ConfigError
from ..rewards.function import FunctionReward
from .episodes import MAX_ROWS, SEEDS

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tasks_of(name: str) -> Any:
    """The task set of a data set: rows with question, answer (if there is one) and how the entry is generated."""

    def rows(split: Literal["train", "validation", "test"] = "train", count: int | None = None, seed: int = 0) -> list[Any]:
        if split not in SEEDS:
            raise ConfigError(f"reasoning_gym:{name} has no split {split!r}; it has {', '.join(SEEDS)}")
        if count is None or not 1 <= count <= MAX_ROWS:
            raise ConfigError(f"reasoning_gym:{name} is generated: say how many rows (1 to {MAX_ROWS}) as data.train_count")
        first = SEEDS[split] + seed * MAX_ROWS
        made = []
        for index, entry in enumerate(_dataset(name, first, count)):
            row = {"id": f"{name}-{first}-{index}", "question": entry["question"], "dataset": name}
            answer = {} if entry["answer"] is None else {"answer": str(entry["answer"])}
            made.append({**row, **answer, "seed": first, "size": count, "index": index})
        return made

    return rows


def _score(prediction: str, dataset: str, seed: int, size: int, index: int) -> float:
    """What the verifier of the data set gives for the answer, from 0 to 1. Text in <answer> tags is the answer."""
    found = _TAGGED.findall(prediction)
    made = _dataset(dataset, seed, size)
    return float(made.score_answer(answer=(found[-1] if found else prediction).strip(), entry=made[index]))


reasoning_score = FunctionReward(_score, name="reasoning_score")


@functools.lru_cache(maxsize=64)
def _dataset(name: str, seed: int, size: int) -> Any:
    try:
        package = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ConfigError(f"reasoning_gym:{name} needs the package reasoning-gym: pip install reasoning-gym") from error
    try:
        return package.create_dataset(name, seed=seed, size=size)
    except ValueError as error:
        raise ConfigError(f"reasoning_gym:{name} cannot be made: {error}") from error
