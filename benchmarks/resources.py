"""The cost of a lease and of a call: acquire and release with many chains waiting, and a call in every placement.

Leases: N chains take turns at one instance, so N - 1 always wait. The baseline is a pool of two deques (free instances, futures
of waiting chains) without deadlines, resets or statistics. Calls: one trivial method through a lease in loop, thread, process
and sandbox, and a cell of a code interpreter through its tool. Their baselines: a plain call, a queue to a thread and back, and
for the others a JSON line over a socket pair to a process and back (for the cell, one that evaluates it). Figures are medians
of several runs, the two sides alternating. `--json PATH` writes them by name.

    python benchmarks/resources.py                  # table
    python benchmarks/resources.py --json out.json  # figures: acquire_us_10000, bare_us_10000, ...
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agentfly.envs.code.env import CodeInterpreter
from agentfly.envs.code.tools import code_interpreter
from agentfly.resources import ResourceManager, spec_of
from agentfly.testing import GuessEnv
from agentfly.tools import Context, call_tools
from agentfly.types import Task, ToolCall, Trajectory

TASK = Task("t", (), {"secret": 5})
BAR_US = 15.0  # the most that a lease may cost beyond the bare pool, at 10,000 waiting chains
CHILD = """
import json, socket, sys
channel = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
for line in channel:
    message = json.loads(line)
    value = repr(eval(message["code"])) if "code" in message else "lower"
    channel.write(json.dumps({"id": message["id"], "v": value}).encode() + b"\\n")
    channel.flush()
"""


class BarePool:
    """Two deques."""

    def __init__(self) -> None:
        self.free: deque[object] = deque([object()])
        self.line: deque[asyncio.Future[object]] = deque()

    async def acquire(self) -> object:
        if self.free:
            return self.free.pop()
        future = asyncio.get_running_loop().create_future()
        self.line.append(future)
        return await future

    def release(self, thing: object) -> None:
        if self.line:
            self.line.popleft().set_result(thing)
        else:
            self.free.append(thing)


async def crowd(chains: int, rounds: int, turn: Callable[[str], Awaitable[None]]) -> float:
    """Returns microseconds per acquire and release."""

    begin = asyncio.Event()

    async def chain(name: str) -> None:
        await begin.wait()
        for _ in range(rounds):
            await turn(name)

    tasks = [asyncio.create_task(chain(f"chain {number}")) for number in range(chains)]
    await asyncio.sleep(0)
    begin.set()
    started = time.process_time()  # CPU time: nothing here sleeps, and other programs on the machine do not count
    await asyncio.gather(*tasks)
    return (time.process_time() - started) / (chains * rounds) * 1e6


async def bare_pool(chains: int, rounds: int) -> float:
    pool = BarePool()

    async def turn(name: str) -> None:
        thing = await pool.acquire()
        if chains > 1:
            await asyncio.sleep(0)
        pool.release(thing)

    return await crowd(chains, rounds, turn)


async def managed(chains: int, rounds: int) -> float:
    async with ResourceManager(None, spec_of(GuessEnv, max=1)) as manager:
        await manager.warm(GuessEnv, 1)
        kinds = [GuessEnv]

        async def turn(name: str) -> None:
            lease = await manager.acquire(kinds, TASK, name, 600.0)
            if chains > 1:
                await asyncio.sleep(0)
            await lease.release()

        figure = await crowd(chains, rounds, turn)
        assert manager.metrics()["resources/total/allocated"] == 0
        return figure


async def call_through(placement: str, calls: int) -> float:
    async with (
        ResourceManager(None, spec_of(GuessEnv, placement=placement)) as manager,
        manager.lease([GuessEnv], TASK) as lease,
    ):
        env = lease[GuessEnv]
        started = time.perf_counter()
        if placement == "loop":
            for _ in range(calls):
                env.guess(7)
        else:
            await env.guess(7)
            started = time.perf_counter()
            for _ in range(calls):
                await env.guess(7)
        return (time.perf_counter() - started) / calls * 1e6


async def cell_through_the_tool(calls: int) -> float:
    async with ResourceManager(None, spec_of(CodeInterpreter)) as manager, manager.lease([CodeInterpreter], TASK) as lease:

        async def lend(kind: type) -> Any:
            return lease[kind]

        context, tools = Context(TASK, Trajectory("c", TASK), lend=lend), {"code_interpreter": code_interpreter}
        call = [ToolCall("code_interpreter", {"code": "1 + 1"})]
        await call_tools(tools, call, context)
        started = time.perf_counter()
        for _ in range(calls):
            await call_tools(tools, call, context)
        return (time.perf_counter() - started) / calls * 1e6


async def bare_loop(calls: int) -> float:
    env = GuessEnv()
    env.reset(TASK)
    started = time.perf_counter()
    for _ in range(calls):
        env.guess(7)
    return (time.perf_counter() - started) / calls * 1e6


async def bare_thread(calls: int) -> float:
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    loop = asyncio.get_running_loop()
    env = GuessEnv()
    env.reset(TASK)

    def work() -> None:
        while (future := jobs.get()) is not None:
            loop.call_soon_threadsafe(future.set_result, env.guess(7))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    started = time.perf_counter()
    for _ in range(calls):
        future = loop.create_future()
        jobs.put(future)
        await future
    seconds = time.perf_counter() - started
    jobs.put(None)
    thread.join(5)
    return seconds / calls * 1e6


async def bare_process(calls: int, **message: Any) -> float:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", CHILD, str(theirs.fileno())]
    child = await asyncio.to_thread(subprocess.Popen, command, pass_fds=(theirs.fileno(),))
    theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours)

    async def call(number: int) -> Any:
        writer.write(json.dumps({"id": number, **(message or {"m": "guess", "a": [7]})}).encode() + b"\n")
        return json.loads(await reader.readline())["v"]

    await call(0)
    started = time.perf_counter()
    for number in range(calls):
        await call(number)
    seconds = time.perf_counter() - started
    writer.close()
    await writer.wait_closed()
    child.wait(5)
    return seconds / calls * 1e6


def median_of(repeats: int, *runs: Callable[[], Any]) -> list[float]:
    """Returns the median of each run, taken alternately `repeats` times."""
    figures: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for figure, run in zip(figures, runs, strict=True):
            gc.collect()
            figure.append(asyncio.run(run()))
    return [statistics.median(figure) for figure in figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH", help="write the figures to a file")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'chains':>8} {'bare us':>9} {'agentfly us':>12} {'more us':>9}")
    for chains in (1, 64, 1024, 10_000):
        rounds = max(3, 20_000 // chains)
        bare, ours = median_of(
            arguments.repeats,
            lambda chains=chains, rounds=rounds: bare_pool(chains, rounds),
            lambda chains=chains, rounds=rounds: managed(chains, rounds),
        )
        figures[f"bare_us_{chains}"], figures[f"acquire_us_{chains}"], figures[f"more_us_{chains}"] = bare, ours, ours - bare
        print(f"{chains:>8} {bare:>9.2f} {ours:>12.2f} {ours - bare:>9.2f}")
    figures["growth_10000_over_64"] = figures["more_us_10000"] / figures["more_us_64"]
    print(f"bar: at most {BAR_US:g} us more at 10,000: {'met' if figures['more_us_10000'] <= BAR_US else 'MISSED'}")
    print(f"growth of what lending adds, 10,000 over 64 waiting: {figures['growth_10000_over_64']:.2f}")
    print(f"\n{'placement':>10} {'floor us':>9} {'call us':>9} {'more us':>9}")
    cell = functools.partial(bare_process, code="1 + 1")
    rows: dict[str, tuple[Any, Any, int]] = {
        "loop": (bare_loop, functools.partial(call_through, "loop"), 20_000),
        "thread": (bare_thread, functools.partial(call_through, "thread"), 2_000),
        "process": (bare_process, functools.partial(call_through, "process"), 2_000),
        "sandbox": (bare_process, functools.partial(call_through, "sandbox"), 2_000),
        "code cell": (cell, cell_through_the_tool, 2_000),
    }
    for placement, (floor, through, calls) in rows.items():
        bare, ours = median_of(arguments.repeats, functools.partial(floor, calls), functools.partial(through, calls))
        placement = placement.replace(" ", "_")
        figures[f"floor_us_{placement}"], figures[f"call_us_{placement}"] = bare, ours
        print(f"{placement:>10} {bare:>9.2f} {ours:>9.2f} {ours - bare:>9.2f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
