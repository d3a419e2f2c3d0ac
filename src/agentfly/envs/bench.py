"""Speed and memory of a world, for several numbers of instances at once.

Each number is measured in a fresh process, so that one measurement does not reuse memory that another has freed. Instances come
from a pool as in training, are all alive at once, and act at random as `conformance()` of the class says. Memory is the
proportional set size (PSS) of the process and its descendants, less what it was before the world was loaded. A world without
`conformance()` is refused; if a number of instances fails, its `Figures` carry the error.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import AgentFlyError, ConfigError
from ..resources import ResourceManager
from ..resources.lease import Lease
from ..resources.spec import spec_of
from .check_subject import told
from .worlds import World, as_tasks, check_usable, find_world

INSTANCES = (1, 64, 1024)
SECONDS = 3.0
TIMEOUT_S = 900.0
MARK = "figures: "


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds to load code and tasks (`load_s`), to start all instances (`start_s`) and to reset each (`reset_s`).
    `memory_mb` is the total of all instances.
    """

    world: str
    instances: int
    load_s: float = 0.0
    start_s: float = 0.0
    reset_s: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    memory_mb: float = 0.0
    error: str = ""

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def memory_kb_each(self) -> float:
        return 1024 * self.memory_mb / self.instances

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "steps_per_s": round(self.steps_per_s, 2), "memory_kb_each": round(self.memory_kb_each, 1)}

    def __str__(self) -> str:
        if self.error:
            return f"{self.world:<14} {self.instances:>6}  {self.error}"
        return (
            f"{self.world:<14} {self.instances:>6} {self.steps_per_s:>10,.0f} {self.load_s:>9.3f} {self.start_s:>9.3f} "
            f"{self.reset_s:>9.3f} {self.memory_mb:>10,.1f} {self.memory_kb_each:>11,.0f}"
        )


HEADER = (
    f"{'world':<14} {'number':>6} {'steps/s':>10} {'load s':>9} {'start s':>9} {'reset s':>9} {'memory MB':>10} {'KB each':>11}"
)


def bench_world(
    name: str, instances: Sequence[int] = INSTANCES, *, seconds: float = SECONDS, seed: int = 0
) -> Iterable[Figures]:
    """Measure a world for each number of instances. Raises ConfigError if it cannot be played at random."""
    if not instances or any(type(number) is not int or number < 1 for number in instances):
        raise ConfigError(f"instances are whole numbers from 1, such as 1,64,1024, not {instances!r}")
    if not seconds > 0:
        raise ConfigError(f"seconds must be above 0, not {seconds}")
    world = find_world(name)
    check_usable(world)
    given = world.conformance()
    if not given.get("tasks") or given.get("actions") is None:
        raise ConfigError(f"{world.name} does not say how to act in it: its class needs conformance() with tasks and actions")
    for number in instances:
        yield _in_a_process(name, number, seconds, seed)


def _in_a_process(name: str, number: int, seconds: float, seed: int) -> Figures:
    command = [sys.executable, "-m", "agentfly.envs.bench", name, str(number), str(seconds), str(seed)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Figures(name, number, error=f"took longer than {TIMEOUT_S:g} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Figures(name, number, error=f"ended with exit code {done.returncode}: {last}")
    return Figures(**json.loads(lines[-1].removeprefix(MARK)))


async def measure(name: str, number: int, seconds: float, seed: int = 0) -> Figures:
    """Measure in this process."""
    gc.collect()
    before, began = memory_of_tree(os.getpid()), time.perf_counter()
    world = find_world(name)
    given = world.conformance()
    tasks, actions = as_tasks(given["tasks"]), given["actions"]
    spec = spec_of(world.cls, name=world.name, max=number, start_timeout_s=TIMEOUT_S, reset_timeout_s=TIMEOUT_S)
    manager = ResourceManager(None, spec, timeout_s=TIMEOUT_S)
    load_s = time.perf_counter() - began
    try:
        began = time.perf_counter()
        await manager.warm(world.name, number)
        start_s = time.perf_counter() - began
        began = time.perf_counter()
        leases = await asyncio.gather(
            *(manager.acquire([world.name], tasks[n % len(tasks)], holder=f"bench {n}") for n in range(number))
        )
        reset_s = time.perf_counter() - began
        began = time.perf_counter()
        counts = await asyncio.gather(
            *(_act(lease, world, actions, random.Random(f"{seed} {n}"), began + seconds) for n, lease in enumerate(leases))
        )
        took = time.perf_counter() - began
        gc.collect()
        memory = memory_of_tree(os.getpid()) - before
        for lease in leases:
            lease.release_now()
    finally:
        await manager.close()
    return Figures(name, number, load_s, start_s, reset_s, sum(counts), took, max(0.0, memory))


async def _act(lease: Lease, world: World, actions: Any, rng: random.Random, until: float) -> int:
    """Act until the deadline, at least once. Returns the number of steps; an episode that ends is reset."""
    env, seen, steps = lease[world.name], lease.observation(world.name), 0
    while True:
        chosen = actions(rng, seen) if callable(actions) else rng.choice(list(actions))
        method, arguments = chosen if isinstance(chosen, tuple) else ("step", {"action": chosen})
        seen = await _wait(getattr(env, method)(**arguments))
        steps += 1
        if time.perf_counter() >= until:
            return steps
        if told(seen)[1]:
            seen = await _wait(env.reset(lease.task))
        await asyncio.sleep(0)  # let the other instances act


async def _wait(value: object) -> Any:
    return await value if inspect.isawaitable(value) else value


def memory_of_tree(pid: int) -> float:
    """MB of a process and its descendants, with shared pages counted once where the kernel reports PSS."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # the process ended meanwhile
        children.setdefault(parent, []).append(int(entry.parent.name))
    total, waiting = 0.0, [pid]
    while waiting:
        each = waiting.pop()
        waiting += children.get(each, ())
        total += _memory_of(each)
    return total


def _memory_of(pid: int) -> float:
    for file, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
        except (OSError, ValueError, StopIteration):
            continue
    return 0.0


def main(name: str, number: str, seconds: str, seed: str) -> int:
    try:
        figures = asyncio.run(measure(name, int(number), float(seconds), int(seed)))
    except (AgentFlyError, OSError, MemoryError) as error:
        figures = Figures(name, int(number), error=f"{type(error).__name__}: {error}")
    print(MARK + json.dumps(asdict(figures)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
