"""Dialogues of `ReactAgent` with `scienceworld_explorer`, for supervised training; all of the train split.

Every observation is the simulator's answer: a dialogue is played while it is written, several at once. `mistakes` is the share
of dialogues with one of `SLIPS`, which is played out. A dialogue takes a tenth of a second or more; results are kept on disk.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...types import Task
from ..stored import cache_root, stored
from .env import ScienceWorld
from .jvms import jvms
from .simulator import run_apart
from .solver import EasyWay
from .tasks import TABLES, VARIATIONS, easy_scienceworld_tasks, scienceworld_tasks

VERSION = 1
TOOL = "scienceworld_explorer"
DONE = "Thought: that is it\nAnswer: done"
SLIPS = ("stops", "unfocused", "wrong_thing", "wrong_place", "garbled")


def easy_scienceworld_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """The easy tasks, three to six actions each; beyond their number they repeat."""
    return _kept(
        "easy", count, seed, mistakes, lambda: _rows(_easy, partial(easy_scienceworld_tasks, "train"), count, seed, mistakes)
    )


def scienceworld_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Gold paths of the simulator's agent, for the tasks that take at most a hundred moves."""
    return _kept("gold", count, seed, mistakes, lambda: _rows(_gold, _short_tasks, count, seed, mistakes))


def _short_tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """Without the "long" tasks, whose gold path takes more than 100 moves, or half a minute to find."""
    rows = scienceworld_tasks("train", min(count + count // 8 + 4, sum(VARIATIONS.values())), seed)
    return [row for row in rows if row["task_name"] not in TABLES["long"]][:count]


def _kept(kind: str, count: int, seed: int, mistakes: float, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    if count < 1:
        raise ConfigError(f"demonstrations: count must be 1 or more, not {count}")
    if not 0.0 <= mistakes <= 1.0:
        raise ConfigError(f"demonstrations: mistakes must be from 0 to 1, not {mistakes}")

    def build(folder: Path) -> None:
        (folder / "rows.json").write_text(json.dumps(make()), encoding="utf-8")

    def load(folder: Path) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
        return rows

    key = f"{kind}_demos-v{VERSION}-{count}-{seed}-{mistakes:g}"
    return stored(cache_root() / "scienceworld" / key, build, load)


def _rows(
    play: Callable[[ScienceWorld, dict[str, Any], random.Random, float], Awaitable[dict[str, Any]]],
    draw: Callable[[int, int], list[dict[str, Any]]],
    count: int,
    seed: int,
    mistakes: float,
) -> list[dict[str, Any]]:
    tasks = draw(count, seed)

    async def play_all() -> list[dict[str, Any]]:
        waiting = list(range(count))[::-1]
        episodes: dict[int, dict[str, Any]] = {}

        async def worker() -> None:
            env = ScienceWorld()
            try:
                while waiting:
                    number = waiting.pop()
                    # One generator per dialogue: the draws do not depend on which worker plays it.
                    rng = random.Random(f"scienceworld demos {seed} {number}")
                    episodes[number] = await play(env, tasks[number % len(tasks)], rng, mistakes)
            finally:
                await env.close()

        await asyncio.gather(*(worker() for _ in range(min(count, jvms().num_jvms))))
        return [episodes[number] for number in range(count)]

    return run_apart(play_all)


class _Dialogue:
    """Actions and observations, written as the agent would write them."""

    def __init__(self, env: ScienceWorld, row: dict[str, Any]) -> None:
        self.env, self.row = env, row
        self.messages = [{"role": "user", "content": row["question"]}]

    async def act(self, action: str) -> str:
        """Play one turn. Returns the observation; nothing is written after the end."""
        if self.env.done:
            return ""
        thought = TABLES["thoughts"].get(action.partition(" ")[0], "go on")
        reply = f"Thought: {thought}\nAction: {TOOL}\nInput: {json.dumps({'action': action})}"
        self.messages.append({"role": "assistant", "content": reply})
        result = await self.env.step(action)
        if not self.env.done:
            self.messages.append({"role": "user", "content": f"Observation: {result.observation}"})
        return result.observation

    def end(self, most: int) -> dict[str, Any]:
        """The row. The chain ended with its last action, with an answer, or after `most` turns."""
        turns = sum(message["role"] == "assistant" for message in self.messages)
        if not self.env.done and turns < most:
            self.messages.append({"role": "assistant", "content": DONE})
        elif self.messages[-1]["role"] == "user" and turns:
            self.messages.pop()
        columns = ("id", "task_name", "variation", "simplifications", "max_steps", "clip")
        return {**{name: self.row[name] for name in columns if name in self.row}, "messages": self.messages}


async def _easy(env: ScienceWorld, row: dict[str, Any], rng: random.Random, mistakes: float) -> dict[str, Any]:
    slip = rng.choice(SLIPS) if rng.random() < mistakes else ""
    await env.reset(Task(row["id"], (), row))
    way, talk = EasyWay(row["task_name"], row["question"]), _Dialogue(env, row)
    where = rng.choice(("kitchen", "bedroom", "workshop")) if slip == "wrong_place" else way.where
    if slip == "garbled":
        await talk.act(rng.choice((f"teleport {way.where}", f"find {way.where}", "look")))
    await talk.act(f"teleport to {where}")
    seen = await talk.act("look around")
    things = way.things(seen)
    thing = (things[0] if way.ends_with_focus else rng.choice(things[:3])) if things else "table"
    if slip == "wrong_thing":
        others = [each for each in seen.partition(": ")[2].split(", ") if each and each != thing]
        thing = rng.choice(others) if others else thing
    rest = [f"focus on {thing}", *way.rest(thing)]
    if slip == "unfocused" and len(rest) > 1:
        rest = rest[1:]
    elif slip in ("stops", "unfocused"):
        rest = rest[: rng.randrange(len(rest))]
    for action in rest:
        await talk.act(action)
    return talk.end(row["max_steps"])


async def _gold(env: ScienceWorld, row: dict[str, Any], rng: random.Random, mistakes: float) -> dict[str, Any]:
    task = Task(row["id"], (), row)
    await env.reset(task)
    actions = await env.gold(task)
    await env.reset(task)
    talk = _Dialogue(env, row)
    if rng.random() < mistakes:
        at = rng.randrange(len(actions))
        actions = actions[:at] if rng.random() < 0.5 else [*actions[:at], *actions[at + 1 :]]
    for action in actions:
        await talk.act(action)
    return talk.end(1000)
