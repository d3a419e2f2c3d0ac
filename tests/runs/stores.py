"""Chains and stores for the tests of queries: random chains, and files of formats 1 and 2 as earlier versions wrote them."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from agentfly.runs import RunStore, encode
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
FORMAT_2 = """
CREATE TABLE trajectories (key INTEGER PRIMARY KEY, id TEXT NOT NULL, step INTEGER NOT NULL, split TEXT NOT NULL, task_id
    TEXT NOT NULL, draw INTEGER NOT NULL, chain INTEGER NOT NULL, outcome TEXT NOT NULL, reward REAL, total_reward REAL,
    score REAL, components TEXT NOT NULL, prediction TEXT NOT NULL, num_turns INTEGER NOT NULL, num_tokens INTEGER NOT
    NULL, seconds REAL NOT NULL, num_context INTEGER, num_calls INTEGER, num_invalid INTEGER, version_first INTEGER,
    version_last INTEGER, generate_s REAL, tool_s REAL, wait_s REAL, started REAL, error TEXT, advantage REAL, num_trained
    INTEGER);
CREATE TABLE bodies (key INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE events (key INTEGER PRIMARY KEY, t REAL NOT NULL, step INTEGER, kind TEXT NOT NULL, who TEXT, data TEXT);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE metrics (name TEXT NOT NULL, step INTEGER NOT NULL, value REAL, time REAL, PRIMARY KEY (name, step)) WITHOUT
    ROWID;
CREATE TABLE tokens (key INTEGER NOT NULL, name TEXT NOT NULL, dtype TEXT NOT NULL, blob BLOB NOT NULL, PRIMARY KEY (key,
    name)) WITHOUT ROWID;
CREATE TABLE calls (name TEXT NOT NULL, key INTEGER NOT NULL, calls INTEGER NOT NULL, errors INTEGER NOT NULL, PRIMARY KEY
    (name, key)) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, started REAL, ended REAL, phase TEXT, whole INTEGER NOT NULL DEFAULT 0)
    WITHOUT ROWID;
CREATE TABLE step_stats (step INTEGER NOT NULL, split TEXT NOT NULL, chains INTEGER NOT NULL, scored INTEGER NOT NULL,
    mean REAL, quantiles TEXT NOT NULL, outcomes TEXT NOT NULL, PRIMARY KEY (step, split)) WITHOUT ROWID;
CREATE TABLE tools (step INTEGER NOT NULL, split TEXT NOT NULL, name TEXT NOT NULL, calls INTEGER NOT NULL, errors INTEGER
    NOT NULL, p50_s REAL, p95_s REAL, max_s REAL, buckets TEXT NOT NULL, PRIMARY KEY (step, split, name)) WITHOUT ROWID;
CREATE TABLE checks (step INTEGER NOT NULL, name TEXT NOT NULL, ok INTEGER NOT NULL, value REAL, bound REAL, PRIMARY KEY
    (step, name)) WITHOUT ROWID;
CREATE TABLE gauges (name TEXT NOT NULL, t REAL NOT NULL, value REAL, PRIMARY KEY (name, t)) WITHOUT ROWID;
CREATE TABLE live (name TEXT PRIMARY KEY, t REAL NOT NULL, data TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX trajectories_by_step ON trajectories (step, split, outcome, score, num_tokens, num_turns);
CREATE INDEX trajectories_by_id ON trajectories (id);
CREATE INDEX trajectories_by_task ON trajectories (task_id, step);
CREATE INDEX trajectories_by_outcome ON trajectories (outcome);
CREATE INDEX trajectories_by_score ON trajectories (score);
CREATE INDEX trajectories_by_reward ON trajectories (score, split, outcome, step, num_tokens, num_turns);
CREATE INDEX trajectories_by_tokens ON trajectories (num_tokens);
CREATE INDEX trajectories_by_seconds ON trajectories (seconds);
CREATE INDEX trajectories_by_advantage ON trajectories (advantage);
CREATE INDEX calls_by_key ON calls (key);
CREATE INDEX events_by_kind ON events (kind, step);
CREATE TRIGGER chain_deleted AFTER DELETE ON trajectories BEGIN DELETE FROM bodies WHERE key = old.key; DELETE FROM tokens
    WHERE key = old.key; DELETE FROM calls WHERE key = old.key; END;
PRAGMA journal_mode = WAL;
PRAGMA user_version = 2;
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


def write_format_2(path: Path, chains: Iterable[Stored], metrics: dict[int, dict[str, float]] | None = None) -> None:
    """A store of format 2: the tables of today's format in the schema of that time."""
    with TemporaryDirectory() as folder:
        newer = Path(folder) / "run.db"
        with RunStore(newer) as store:
            for step, split, each in chains:
                store.add_trajectories(step, split, [each])  # type: ignore[arg-type]
            for step, named in (metrics or {}).items():
                store.add_metrics(step, named)
        with closing(sqlite3.connect(path)) as db:
            db.executescript(FORMAT_2)
            tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            db.execute("ATTACH ? AS newer", (str(newer),))
            with db:
                for name in tables:
                    db.execute(f"INSERT INTO main.{name} SELECT * FROM newer.{name}")


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
