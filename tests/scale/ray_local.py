"""A Ray cluster of several nodes in this machine, for tests. It can reach nothing, and nothing outlives it.

Ray listens on every interface and unpickles what it receives, so a test's program runs in its own network namespace, where only
loopback is up, and in its own process namespace: when the program ends, the kernel ends every process that it has started.

    test (pytest)  -- unshare -->  python -m tests.scale.ray_local MODULE:FUNCTION [JSON]  -->  function(cluster, *values)
                   <-- JSON ----   what the function returns

The nodes share one machine: an address, a clock, a disk. `kill` and `freeze` act on all processes of one node.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UNSHARE = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
OBJECT_STORE = 80 << 20
PATIENCE_S = 600.0
"""Seconds of a wait that only a hang exceeds, also on a busy machine."""


@functools.cache
def why_not() -> str:
    """Why no cluster can be started here; empty if one can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: pip install 'agentfly[ray]'"
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "Ray is only started in a network namespace, which needs Linux and unshare: apt-get install util-linux"
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    return (
        ""
        if tried.returncode == 0
        else f"no network namespace ({tried.stderr.strip()}): run as root, or in a container with --privileged"
    )


def inside(program: str, *values: Any, timeout_s: float = 1800.0) -> Any:
    """Run `function(cluster, *values)` of "module:function" in a new network namespace. Returns what it returns.

    The calling test is skipped if that is not possible here, and fails with what the program printed if it raises.
    """
    if why := why_not():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="agentfly-ray-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        words = [*UNSHARE, sys.executable, "-m", "tests.scale.ray_local", program, json.dumps(values), str(result)]
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environ = {
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": f"{folder}/r",
            "PYTHONUNBUFFERED": "1", "RAY_DISABLE_IMPORT_WARNING": "1",
        }  # fmt: skip
        with log.open("wb") as output:
            popen = subprocess.Popen(words, cwd=ROOT, env=environ, stdout=output, stderr=output, start_new_session=True)
            try:
                popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pytest.fail(f"{program} did not end within {timeout_s:g} s:\n{log.read_text()[-6000:]}")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(popen.pid, signal.SIGKILL)
                popen.wait()
        if not result.exists():
            pytest.fail(f"{program} ended ({popen.returncode}):\n{log.read_text()[-6000:]}")
        if os.environ.get("AGENTFLY_RAY_LOG"):
            print(log.read_text())
        return json.loads(result.read_text())


class LocalCluster:
    """Nodes by name. The first is the head, on which the test's program is the driver; it must live on."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.nodes: dict[str, Any] = {}
        self._cluster = Cluster(initialize_head=False)

    @property
    def address(self) -> str:
        """host:port of the head."""
        return str(self._cluster.address)

    def add(self, *names: str, cpus: float = 2, gpus: int = 0, memory_gib: float = 2.0) -> None:
        """Start nodes."""
        for name in names:
            head = {} if self.nodes else {"include_dashboard": False}
            self.nodes[name] = self._cluster.add_node(
                node_name=name, num_cpus=cpus, num_gpus=gpus, memory=int(memory_gib * (1 << 30)),
                object_store_memory=OBJECT_STORE, **head,
            )  # fmt: skip

    def processes(self, name: str) -> list[int]:
        """The processes of a node: its raylet first, then all that descend from it."""
        found = [info.process.pid for kind, some in self.nodes[name].all_processes.items() for info in some if kind == "raylet"]
        return found + descendants(found)

    def kill(self, name: str) -> None:
        """End a node without notice, as by a loss of power."""
        send(self.processes(name), signal.SIGKILL)
        for some in self.nodes[name].all_processes.values():
            for info in some:
                info.process.wait()

    def freeze(self, name: str) -> None:
        """Stop a node's processes, as by a lost network. They notice nothing."""
        send(self.processes(name), signal.SIGSTOP)
        send(self.processes(name), signal.SIGSTOP)  # what was started meanwhile

    def thaw(self, name: str) -> None:
        send(self.processes(name), signal.SIGCONT)


def descendants(roots: Iterable[int]) -> list[int]:
    """All processes below some processes."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, waiting = [], list(roots)
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def running(word: str) -> list[int]:
    """The processes of this namespace whose command line has a word, without this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in path.read_bytes().replace(b"\0", b" ").decode(errors="replace") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_for(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, what: str = "the condition") -> Any:
    """Returns the first true value of a condition. Raises AssertionError after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(0.05)
    return found


def run_all(cluster: Any, scenarios: Iterable[Callable[[Any], Any]]) -> dict[str, str]:
    """Run scenarios one after the other. Returns, by their names, what they raised; "" if nothing."""
    told = {}
    for scenario in scenarios:
        began = time.monotonic()
        try:
            scenario(cluster)
            told[scenario.__name__] = ""
        except Exception:  # an assertion of one scenario must not hide the others
            told[scenario.__name__] = traceback.format_exc()
        print(f"== {scenario.__name__}: {time.monotonic() - began:.1f} s {told[scenario.__name__]}", flush=True)
    return told


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(control, 0x8913, request)[:18])[1]
        fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", flags | 1))


def _main() -> None:
    program, values, result = sys.argv[1:]
    interfaces = [name for _, name in socket.if_nameindex()]
    assert interfaces == ["lo"], f"the network namespace has more than loopback: {interfaces}"
    _loopback_up()
    os.makedirs(os.environ["RAY_TMPDIR"], exist_ok=True)
    module, _, name = program.partition(":")
    found = getattr(importlib.import_module(module), name)(LocalCluster(), *json.loads(values))
    Path(result).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # the kernel ends the cluster with this namespace


if __name__ == "__main__":
    _main()
