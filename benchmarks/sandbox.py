"""Density and latency of sandbox sessions, compared with lower bounds and with other ways to run Python.

    python benchmarks/sandbox.py [--sessions 1000] [--tier namespace] [--no-cgroup] [--json [PATH]]

The lower bound of a start is a plain fork of an equally large interpreter with a round trip over a pipe; that of a call is a
JSON round trip with an `eval` over a socket pair. Measurements alternate with those of their bound, so other load affects both
alike. Memory is the growth of the private and the proportional set size of the server's processes. The figures are printed
beside the bars, with the load of the machine; nothing is asserted. ipykernel is measured if `pip install agentfly[bench]`
installed it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentfly.sandbox import SandboxLimits, SandboxServer, SandboxSession

NUMPY_CELL = "import numpy as np\na = np.arange(10_000.0).reshape(100, 100)\nfloat((a @ a.T).sum())"


def middle(times: list[float], part: float = 0.5) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * part))] * 1000


class ForkFloor:
    """An interpreter as large as the fork server. Times a fork and one byte from the child."""

    CODE = """if 1:
        import gc, importlib.util, os, sys, time
        if importlib.util.find_spec("numpy"):
            import numpy, numpy.random, numpy.linalg
        gc.collect(); gc.freeze(); gc.disable()
        for line in sys.stdin:
            begin = time.perf_counter()
            r, w = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(w, b"x"); os._exit(0)
            os.read(r, 1)
            print(time.perf_counter() - begin, flush=True)
            os.close(r); os.close(w); os.waitpid(pid, 0)
    """

    def __init__(self) -> None:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", self.CODE]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.once()

    def once(self) -> float:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write("fork\n")
        self.child.stdin.flush()
        return float(self.child.stdout.readline())

    def close(self) -> None:
        self.child.communicate(timeout=30)


class JsonFloor:
    """A child process that reads JSON, evaluates it and answers; both sides block."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.ours.close()
            while data := theirs.recv(4096):
                theirs.sendall(json.dumps({"value": repr(eval(json.loads(data)["code"]))}).encode())
            os._exit(0)
        theirs.close()
        self.once()

    def once(self) -> float:
        begin = time.perf_counter()
        self.ours.sendall(json.dumps({"code": "1 + 1"}).encode())
        json.loads(self.ours.recv(4096))
        return time.perf_counter() - begin

    def close(self) -> None:
        self.ours.close()
        os.waitpid(self.pid, 0)


def memory_mib(root: int) -> tuple[float, float]:
    """Returns PSS and USS of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(name))
    pss = uss = 0
    stack = [root]
    while stack:
        pid = stack.pop()
        stack += children.get(pid, [])
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
        pss += sizes["Pss"]
        uss += sizes["Private_Clean"] + sizes["Private_Dirty"]
    return pss / 1024, uss / 1024


def used_memory_mib() -> float:
    """Returns the used memory of the whole machine, kernel included."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(fields["MemTotal"].split()[0]) - int(fields["MemAvailable"].split()[0])) / 1024


async def timed_cells(
    sessions: list[SandboxSession],
    code: str,
    rounds: int = 1,
    floor: JsonFloor | None = None,
    floors: list[float] | None = None,
) -> list[float]:
    times = []
    for _ in range(rounds):
        for session in sessions:
            begin = time.perf_counter()
            await session.run(code)
            times.append(time.perf_counter() - begin)
            if floor is not None and floors is not None:
                floors.append(floor.once())
    return times


async def throughput(sessions: list[SandboxSession], cells: int, at_once: int = 64) -> float:
    """Returns cells per second from one loop, `at_once` of them in flight."""
    per_worker = cells // at_once

    async def worker(session: SandboxSession) -> None:
        for _ in range(per_worker):
            await session.run("1 + 1")

    begin = time.perf_counter()
    await asyncio.gather(*(worker(session) for session in sessions[:at_once]))
    return per_worker * min(at_once, len(sessions)) / (time.perf_counter() - begin)


async def hung(sessions: list[SandboxSession], count: int) -> dict[str, float]:
    """Measures calls to other sessions while some spin or ignore signals until their time limit."""
    bad, good = sessions[:count], sessions[count : count + 200]
    quiet = middle(await timed_cells(good, "1 + 1", 3))
    limit, late = 1.0, []

    async def spin(session: SandboxSession, code: str) -> None:
        begin = time.perf_counter()
        await session.run(code, limit)
        late.append(time.perf_counter() - begin - limit)

    stubborn = "import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass"
    spinning = [asyncio.create_task(spin(s, stubborn if i % 2 else "while True: pass")) for i, s in enumerate(bad)]
    await asyncio.sleep(0.05)
    times = await timed_cells(good, "1 + 1", 1)
    await asyncio.gather(*spinning)
    return {
        "hung_sessions": count,
        "quiet_p50_ms": quiet,
        "beside_hung_p50_ms": middle(times),
        "late_by_max_ms": max(late) * 1000,
    }


async def sandbox(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the figures of the sandbox and of its lower bounds."""
    json_floor, fork_floor = JsonFloor(), ForkFloor()
    limits = SandboxLimits(memory_mb=256)
    server = await SandboxServer.start(tier=arguments.tier, limits=limits, cgroup=not arguments.no_cgroup)
    supervisor = server._process.pid
    before_pss, before_uss = memory_mib(supervisor)
    machine = used_memory_mib()
    starts: list[float] = []
    forks: list[float] = []
    trips: list[float] = []
    sessions: list[SandboxSession] = []
    for _ in range(arguments.sessions):
        begin = time.perf_counter()
        sessions.append(await server.session())
        starts.append(time.perf_counter() - begin)
        forks.append(fork_floor.once())
    count = len(sessions)
    idle_pss, idle_uss = memory_mib(supervisor)
    idle_machine = used_memory_mib()
    await timed_cells(sessions, "1 + 1")
    calls = await timed_cells(sessions, "1 + 1", max(1, 2000 // count), json_floor, trips)
    rate = max([await throughput(sessions, 8000) for _ in range(3)])
    numpy = (await sessions[0].run(NUMPY_CELL, 60)).error is None
    if numpy:
        await timed_cells(sessions, NUMPY_CELL)
    used_pss, used_uss = memory_mib(supervisor)
    found: dict[str, Any] = {
        "tier": server.tier, "cgroup": server.facts["cgroup"], "live": server.stats()["live"], "numpy": numpy,
        "start_p50_ms": middle(starts), "start_p99_ms": middle(starts, 0.99),
        "exec_p50_ms": middle(calls), "exec_p99_ms": middle(calls, 0.99), "cells_per_s": rate,
        "idle_pss_mib": (idle_pss - before_pss) / count, "idle_uss_mib": (idle_uss - before_uss) / count,
        "idle_with_kernel_mib": (idle_machine - machine) / count,
        "used_pss_mib": (used_pss - before_pss) / count, "used_uss_mib": (used_uss - before_uss) / count,
        **await hung(sessions, min(10, count // 4)),
    }  # fmt: skip
    begin = time.perf_counter()
    await server.close()
    found["close_all_s"] = time.perf_counter() - begin
    fork_floor.close()
    json_floor.close()
    return found, {"fork_ms": middle(forks), "json_round_trip_ms": middle(trips)}


def subprocess_per_call(count: int = 20) -> dict[str, Any]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-I", "-c", "print(1 + 1)"], capture_output=True, check=True, timeout=60)
        times.append(time.perf_counter() - begin)
    return {"exec_p50_ms": middle(times), "cells_per_s": 1000 / middle(times)}


def ipykernel(count: int = 3) -> dict[str, Any] | None:
    if not importlib.util.find_spec("ipykernel") or not importlib.util.find_spec("jupyter_client"):
        return None
    from jupyter_client.manager import start_new_kernel

    kernels, starts, calls = [], [], []
    for _ in range(count):
        begin = time.perf_counter()
        kernels.append(start_new_kernel(stderr=subprocess.DEVNULL))
        starts.append(time.perf_counter() - begin)
    memory = sum(memory_mib(manager.provisioner.process.pid)[1] for manager, _ in kernels) / count
    for _, client in kernels:
        for _ in range(50):
            begin = time.perf_counter()
            client.execute_interactive("1 + 1", output_hook=lambda message: None, timeout=30)
            calls.append(time.perf_counter() - begin)
    for manager, client in kernels:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return {
        "start_p50_ms": middle(starts),
        "exec_p50_ms": middle(calls),
        "exec_p99_ms": middle(calls, 0.99),
        "idle_uss_mib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="density and latency of sandbox sessions")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--tier", default="namespace")
    parser.add_argument("--no-cgroup", action="store_true")
    parser.add_argument("--json", nargs="?", const="-", metavar="PATH", help="the figures by name, printed or into a file")
    arguments = parser.parse_args()
    gc.disable()
    load = os.getloadavg()[0]  # before the benchmark adds to it
    box, floors = asyncio.run(sandbox(arguments))
    found: dict[str, Any] = {
        "machine": {
            "cores": os.cpu_count(),
            "load": load,
            "arch": os.uname().machine,
            "python": sys.version.split()[0],
        },
        "floors": floors,
        "sandbox": box,
        "subprocess_per_call": subprocess_per_call(),
        "ipykernel": ipykernel(),
    }
    found["ratios"] = {
        "start_to_fork": box["start_p50_ms"] / floors["fork_ms"],
        "exec_to_json_round_trip": box["exec_p50_ms"] / floors["json_round_trip_ms"],
        "beside_hung_to_quiet": box["beside_hung_p50_ms"] / box["quiet_p50_ms"],
        "subprocess_to_exec": found["subprocess_per_call"]["exec_p50_ms"] / box["exec_p50_ms"],
    }
    if found["ipykernel"]:
        found["ratios"]["ipykernel_to_exec"] = found["ipykernel"]["exec_p50_ms"] / box["exec_p50_ms"]
        found["ratios"]["sessions_per_gib_to_ipykernel"] = found["ipykernel"]["idle_uss_mib"] / box["idle_uss_mib"]
    found["bars"] = {
        f"{name} {'at most' if most else 'at least'} {bar:g}": "met" if (value <= bar if most else value >= bar) else "MISSED"
        for name, value, most, bar in (
            ("start to fork", found["ratios"]["start_to_fork"], True, 4),
            ("call to JSON round trip", found["ratios"]["exec_to_json_round_trip"], True, 6),
            ("cells per second", box["cells_per_s"], False, 4000),
            ("MiB idle", box["idle_uss_mib"], True, 2.5),
            ("MiB after a numpy cell", box["used_uss_mib"], True, 3.5),
            ("late by ms", box["late_by_max_ms"], True, 100),
            ("beside hung to quiet", found["ratios"]["beside_hung_to_quiet"], True, 2),
            ("ipykernel's call to ours", found["ratios"].get("ipykernel_to_exec"), False, 20),
            ("sessions per GiB to ipykernel's", found["ratios"].get("sessions_per_gib_to_ipykernel"), False, 15),
        )
        if value is not None
    }
    if arguments.json == "-":
        print(json.dumps(found, indent=2))
        return
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for title, rows in found.items():
        print(title if rows is not None else f"{title}: not installed")
        for name, value in (rows or {}).items():
            print(f"  {name:45}{value:>14.3f}" if isinstance(value, float) else f"  {name:45}{value!s:>14}")


if __name__ == "__main__":
    main()
