"""Chains and stores for the tests of queries: random chains, and a file of format 1 as earlier versions wrote it."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from agentfly.runs import encode
from agentfly.runs.filters import clean_text
from agentfly.types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn

FORMAT_1 = """
CREATE TABLE metrics (step INTEGER NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (step, name)) WITHOUT ROWID;
CREATE TABLE trajectories (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL, step INTEGER NOT NULL, split TEXT NOT NULL, task_id TEXT NOT NULL,
    chain INTEGER NOT NULL, outcome TEXT NOT NULL, reward REAL, total_reward REAL, components TEXT NOT NULL,
    prediction TEXT NOT NULL, num_turns INTEGER NOT NULL, num_tokens INTEGER NOT NULL, seconds REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX trajectories_by_step ON trajectories (step, split);
CREATE INDEX trajectories_by_id ON trajectories (id);
PRAGMA journal_mode = WAL;
PRAGMA user_version = 1;
"""
Stored = tuple[int, str, Trajectory]


def write_format_1(path: Path, chains: Iterable[Stored], metrics: dict[int, dict[str, float]] | None = None) -> None:
    """A store of format 1."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(FORMAT_1)
        with db:
            for step, named in (metrics or {}).items():
                db.executemany("INSERT INTO metrics VALUES (?, ?, ?)", [(step, name, value) for name, value in named.items()])
            for step, split, each in chains:
                db.execute(
                    "INSERT INTO trajectories VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (clean_text(each.id), step, split, clean_text(each.task.id), each.chain, each.outcome.value, each.reward,
                     each.total_reward, json.dumps(each.components), clean_text(each.prediction), len(each.turns),
                     each.num_sampled, each.seconds, encode(each)),
                )  # fmt: skip


def random_chains(seed: int, count: int = 120, steps: int = 5) -> list[Stored]:
    """Chains of several steps with equal and different rewards, all outcomes, some without calls, texts or tokens."""
    rng = random.Random(seed)
    found: list[Stored] = []
    for number in range(count):
        step = 1 + number * steps // count
        outcome = rng.choice([Outcome.FINISHED, Outcome.FINISHED, Outcome.MAX_TURNS, Outcome.WORLD_FAILURE])
        task = Task(f"task {rng.randrange(6)}", (Message("user", "100% of_it?"),), {"answer": "x"})
        turns = [_turn(rng, step, place) for place in range(rng.randrange(3))]
        prediction = rng.choice(["", "Forty_two", "a 50% guess", "ÄÖÜ"]) * rng.randrange(3)
        reward = None if outcome is Outcome.WORLD_FAILURE else rng.choice([0.0, 1.0, 1.0, round(rng.random(), 3)])
        each = Trajectory(
            f"t{step}-{number}-0", task, number % 4, [Message("user", "100% of_it?")], turns, outcome,
            "WorldError: gone" if reward is None else None, prediction, reward,
            {} if reward is None else {"exact": reward}, rng.choice([0.5, 1.0, 2.5]), draw=rng.randrange(2),
        )  # fmt: skip
        found.append((step, "train" if rng.random() < 0.8 else "validation", each))
    return found


def _turn(rng: random.Random, step: int, place: int) -> Turn:
    count = rng.randrange(4)
    reply = Completion(
        text="hm", token_ids=list(range(count)), logprobs=[-0.5] * count, versions=[step - 1] * count
    )  # fmt: skip
    call = ToolCall(rng.choice(["add", "search", "search"]), {"q": "needle" if rng.random() < 0.2 else "hay"})
    calls = (call,) if rng.random() < 0.7 else ()
    results = tuple(ToolResult(observation="ok", error="raised" if rng.random() < 0.2 else None) for _ in calls)
    return Turn([7] * (3 - place), place == 0, reply, calls, results, sampled_s=0.25, tools_s=0.5, calls_s=[0.5 for _ in calls])
