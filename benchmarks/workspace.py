"""Workspaces: time to start, memory, and many at once, beside podman if it is installed.

    python benchmarks/workspace.py [--count 500] [--tree FOLDER] [--image NAME] [--json [PATH]]

A start is `reset`, a first command is `true` in the shell. Without --tree a folder of 2,000 small files is made. Memory is the
fall of MemAvailable over so many idle workspaces, so other programs affect it. podman runs `true` in the image given by
--image, one container at a time. Nothing is asserted; the load of the machine is printed beside the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from agentfly.envs.workspace.env import Workspace
from agentfly.types import Task


def available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    return 0.0


def middle(times: list[float], part: float = 0.5) -> float:
    return round(sorted(times)[min(len(times) - 1, int(len(times) * part))] * 1000, 2)


async def measure(tree: str, count: int, network: str) -> dict[str, Any]:
    task = Task("t", (), {"tree": tree})
    first = Workspace(network=network)
    begin = time.perf_counter()
    await first.reset(task)  # starts the server and unpacks the tree
    report: dict[str, Any] = {"server_and_tree_s": round(time.perf_counter() - begin, 2), "network": network}
    starts, commands, closes = [], [], []
    for _ in range(50):
        work = Workspace(network=network)
        times = [time.perf_counter()]
        for step in (work.reset(task), work.bash("true"), work.close()):
            await step
            times.append(time.perf_counter())
        starts.append(times[1] - times[0])
        commands.append(times[2] - times[1])
        closes.append(times[3] - times[2])
    for name, values in (("start", starts), ("first_command", commands), ("close", closes)):
        report |= {f"{name}_p50_ms": middle(values), f"{name}_p99_ms": middle(values, 0.99)}
    before = available_mb()
    many = [Workspace(network=network) for _ in range(count)]
    begin = time.perf_counter()
    await asyncio.gather(*(work.reset(task) for work in many))
    report |= {"at_once": count, "at_once_s": round(time.perf_counter() - begin, 2)}
    report["memory_each_mb"] = round((before - available_mb()) / count, 2)
    begin = time.perf_counter()
    await asyncio.gather(*(work.close() for work in many))
    report["close_all_s"] = round(time.perf_counter() - begin, 2)
    await first.close()
    return report


def measure_podman(image: str) -> dict[str, Any]:
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        done = subprocess.run(["podman", "run", "--rm", "--network", "none", image, "true"], capture_output=True, text=True)
        if done.returncode:
            return {"why": done.stderr.strip().splitlines()[-1:]}
        times.append(time.perf_counter() - begin)
    return {"run_true_p50_ms": middle(times), "run_true_p99_ms": middle(times, 0.99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--tree")
    parser.add_argument("--image", default="")
    parser.add_argument("--network", choices=("none", "loopback"), default="none")
    parser.add_argument("--json", nargs="?", const="-")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not given.tree:
            for number in range(2_000):
                place = Path(folder, f"part{number % 40}")
                place.mkdir(exist_ok=True)
                (place / f"file{number}.py").write_text("x = 1\n" * 50)
        report = {
            "load": [round(one, 1) for one in os.getloadavg()],
            "workspace": asyncio.run(measure(given.tree or folder, given.count, given.network)),
        }
    if shutil.which("podman") and given.image:
        report["podman"] = measure_podman(given.image)
    else:
        report["podman"] = {"why": ["podman is not installed" if not shutil.which("podman") else "name an image with --image"]}
    text = json.dumps(report, indent=2)
    print(text)
    if given.json and given.json != "-":
        Path(given.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
