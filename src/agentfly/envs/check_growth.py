"""Leaks: whether memory, open or left files, threads or child processes of this process grow in every round of episodes.

One round is played before the first measurement, for what is loaded once. Slow worlds play fewer episodes. Without /proc only
Python's memory and threads are counted.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise

from .check_report import Failed

ROUNDS = 4
MAX_EPISODES, MIN_EPISODES = 10, 3
"""Per round."""
PATIENCE_S = 10.0
"""Approximate limit for all rounds of one kind."""
LEAK_BYTES = 1024
"""Growth per episode in every round that counts as a leak. A process grows in large pieces, so its limit is higher."""
PROCESS_LEAK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Mark:
    python: int
    process: int
    files: int
    threads: int
    children: int
    tasks: int
    left: int


async def grows(what: str, play: Callable[[int], Awaitable[None]], left: Callable[[], list[str]]) -> None:
    """Play rounds of episodes. Raises Failed if something grows in every round. `left` returns the files that remain."""
    marks: list[Mark] = []
    episodes = MAX_EPISODES
    for number in range(ROUNDS):
        started = time.perf_counter()
        for episode in range(episodes):
            await play(episode)
            if not number and episode + 1 >= MIN_EPISODES and time.perf_counter() - started > PATIENCE_S / ROUNDS:
                episodes = episode + 1
                break
        gc.collect()
        if number:
            marks.append(_mark(len(left())))
    for name, called in (
        ("files", "open files"), ("threads", "threads"), ("children", "child processes"), ("tasks", "tasks of asyncio")
    ):  # fmt: skip
        counts = [getattr(mark, name) for mark in marks]
        if all(sooner < later for sooner, later in pairwise(counts)):
            raise Failed(f"{what}: {called} grow from {counts[0]} to {counts[-1]}")
    for name, leak in (("python", LEAK_BYTES), ("process", PROCESS_LEAK_BYTES)):
        steps = [(getattr(later, name) - getattr(sooner, name)) / episodes for sooner, later in pairwise(marks)]
        if min(steps) > leak:
            owner = "" if name == "python" else " (of the whole process)"
            raise Failed(f"{what} grow by {min(steps) / 1024:.1f} KiB per episode{owner}")
    if all(sooner.left < later.left for sooner, later in pairwise(marks)):
        raise Failed(f"{what} leave files or folders behind, {marks[-1].left} so far, such as {left()[-1]}")


def _mark(left: int) -> Mark:
    python = tracemalloc.get_traced_memory()[0]
    return Mark(
        python, _process_bytes(), _num_files(), threading.active_count(), _num_children(), len(asyncio.all_tasks()), left
    )


def _process_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _num_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def _num_children() -> int:
    count = 0
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                count += len(file.read().split())
    except OSError:
        return count  # the thread ended meanwhile, or the kernel has no such file
    return count
