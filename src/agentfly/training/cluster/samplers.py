"""Samplers on the nodes of a Ray cluster: `RayLauncher` starts the worker program on a node that has room for it.

    start replica i --> its host still answers? --yes--> start the worker there again
                              no, or it has none --> place a host, on another node if one fits --> check the node --> start

The worker connects to the trainer over TCP, and everything else goes over that connection (`training.workers`).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import Config
from ...errors import ConfigError, EngineError
from ...ext.ray_cluster import Cluster, Host, HostProcess, Node
from ...fleet.launcher import RANK_VARIABLES, process_name
from .checks import check_software, sampler_share

REUSES = 2
"""How often a worker is started again on the same host before it is moved to another node."""


class RayLauncher:
    """Starts workers on the nodes of a cluster. Implements `fleet.launcher.Launcher`. `start` blocks for seconds."""

    takes_long = True

    def __init__(self, cluster: Cluster, config: Config, log_dir: Path) -> None:
        """`log_dir` gets one file per replica that says where its logs are: what a worker prints stays on its node."""
        self._cluster, self._log_dir = cluster, log_dir
        self._share = sampler_share(config, cluster.nodes())
        self._hosts: dict[int, tuple[Host, int]] = {}  # with the number of workers that were started there
        self._started = False  # a worker has reached the trainer's address before
        self._closed = False
        self._lock = threading.Lock()  # guards `_hosts` and `_closed`: replicas are started in threads

    def start(self, index: int, ticket: Mapping[str, Any]) -> HostProcess:
        """Raises ConfigError if no node can ever hold a replica or a node has other software, EngineError if it fails now."""
        host = self._host(index, ticket)
        about = host.about
        told = json.dumps({**ticket, "path": about["path"]}).encode()
        program = f"{about['agentfly']}/fleet/member_main.py"
        environ = dict.fromkeys((*RANK_VARIABLES, "OMP_NUM_THREADS"))
        log = f"sampler-{index}.log"
        self._note_place(index, f"node {host.node.name} ({host.node.address}): {about['folder']}/{log}")
        words = [about["python"], "-I", "-X", "utf8", program, "{life}", "{parent}", process_name(ticket)]
        process = host.run(words, environ=environ, stdin=told, log=log)
        if ticket["attempt"]:
            self._cluster.note(f"sampler {index} starts again on node {host.node.name}")
        self._started = True
        return process

    def nodes(self) -> dict[int, Node]:
        """The node of each replica."""
        with self._lock:
            return {index: host.node for index, (host, _) in self._hosts.items()}

    def close(self) -> None:
        """End all hosts."""
        with self._lock:
            self._closed = True
            hosts = [host for host, _ in self._hosts.values()]
            self._hosts = {}
        closing = [threading.Thread(target=host.close, daemon=True) for host in hosts]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(3.0)

    def _host(self, index: int, ticket: Mapping[str, Any]) -> Host:
        avoid = []
        with self._lock:
            last, uses = self._hosts.get(index, (None, 0))
        if last is not None:
            if uses <= REUSES and _answers(last):
                with self._lock:
                    self._hosts[index] = (last, uses + 1)
                return last
            avoid = [last.node.id]
            if last.lost is None:
                self._cluster.doubt(last.node)
            last.close()
        try:
            host = self._cluster.place(f"sampler {index}", self._share, avoid=avoid)
        except EngineError as error:
            raise EngineError(f"could not be placed: {error}") from None
        try:
            check_software(host)
            self._check_reach(host, ticket["address"])
        except (ConfigError, EngineError):
            self._cluster.suspect(host.node)
            host.close()
            raise
        with self._lock:
            if not self._closed:
                self._hosts[index] = (host, 1)
                return host
        host.close()
        raise EngineError("the run has ended")

    def _check_reach(self, host: Host, address: Any) -> None:
        """Raises ConfigError, or EngineError if other workers have reached the trainer before."""
        where, port = address
        if why := host.ask("can_reach", where, port, 10.0, timeout_s=15.0):
            raise (EngineError if self._started else ConfigError)(
                f"node {host.node.name} cannot reach the trainer at {where}:{port} ({why}): open the firewall between the "
                "machines for this address"
            )

    def _note_place(self, index: int, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk stops the run elsewhere, with a sentence
            self._log_dir.mkdir(parents=True, exist_ok=True)
            with (self._log_dir / f"sampler-{index}.log").open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")


def _answers(host: Host) -> bool:
    """Whether a host's node is well: it may only have lost the worker."""
    try:
        host.ask("free_port", timeout_s=2.0)
    except EngineError:
        return False
    return True
