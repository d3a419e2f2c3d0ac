"""Starts the processes of a fleet on the nodes of a Ray cluster.

    start process i --> its host still answers? --yes--> start the process there again
                              no, or it has none --> place a host, on another node if one fits --> check the node --> start

The process connects to the trainer over TCP, and everything else goes over that connection.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import AgentFlyError, ConfigError, EngineError
from .bare import PACKAGES
from .launcher import RANK_VARIABLES, process_name
from .member import check_software
from .ray_cluster import Cluster, Host, HostProcess, Node, Share

REUSES = 2
"""How often a process is started again on the same host before it is moved to another node."""


class NodeLauncher:
    """Implements `launcher.Launcher`. `start` blocks for seconds.

    Each process reserves `share` of its node. Its environment variables are those of the node, without those of ranks, with
    `environ` (None removes one). `log_dir` gets one file per process that says where its logs are: they stay on its node.
    """

    takes_long = True

    def __init__(
        self,
        cluster: Cluster,
        share: Share,
        *,
        environ: Mapping[str, str | None] | None = None,
        packages: Collection[str] = PACKAGES,
        log_dir: Path | None = None,
    ) -> None:
        self._cluster, self._share, self._log_dir, self._packages = cluster, share, log_dir, packages
        self._environ: dict[str, str | None] = {**dict.fromkeys(RANK_VARIABLES), **(environ or {})}
        self._hosts: dict[int, tuple[Host, int]] = {}  # with the number of processes that were started there
        self._reached = False  # a process has reached the trainer's address before
        self._closed = False
        self._lock = threading.Lock()  # guards `_hosts` and `_closed`: processes are started in threads

    def start(self, index: int, ticket: Mapping[str, Any]) -> HostProcess:
        """Raises ConfigError if no node can ever hold the process or a node has other software, EngineError if it fails now."""
        host = self._host(index, ticket)
        log = f"{process_name(ticket)}.log"
        self._note_place(log, f"node {host.node.name} ({host.node.address}): {host.about['folder']}/{log}")
        process = run_on(host, ticket, self._environ)
        if ticket["attempt"]:
            self._cluster.note(f"{host.name} starts again on node {host.node.name}")
        self._reached = True
        return process

    def nodes(self) -> dict[int, Node]:
        """The node of each process."""
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
            host = self._cluster.place(ticket["name"], self._share, avoid=avoid)
        except EngineError as error:
            raise EngineError(f"could not be placed: {error}") from None
        try:
            check_node(host, self._packages)
            check_reach(host, ticket["address"], EngineError if self._reached else ConfigError)
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

    def _note_place(self, file_name: str, text: str) -> None:
        if self._log_dir is None:
            return
        with contextlib.suppress(OSError):  # a full disk stops the run elsewhere, with a sentence
            self._log_dir.mkdir(parents=True, exist_ok=True)
            with (self._log_dir / file_name).open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")


def run_on(host: Host, ticket: Mapping[str, Any], environ: Mapping[str, str | None]) -> HostProcess:
    """Start the process of a ticket on the node of a host."""
    about, name = host.about, process_name(ticket)
    program = f"{about['agentfly']}/fleet/member_main.py"
    words = [about["python"], "-I", "-X", "utf8", program, "{life}", "{parent}", name]
    stdin = json.dumps({**ticket, "path": about["path"], "here": about["address"]}).encode()
    return host.run(words, environ=environ, stdin=stdin, log=f"{name}.log")


def check_reach(host: Host, address: Any, kind: type[AgentFlyError] = ConfigError) -> None:
    """Raises an error of this kind if the node of a host cannot reach the trainer."""
    where, port = address
    if why := host.ask("can_reach", where, port, 10.0, timeout_s=15.0):
        raise kind(
            f"node {host.node.name} cannot reach the trainer at {where}:{port} ({why}): open the firewall between the machines "
            "for this address"
        )


def check_node(host: Host, packages: Collection[str] = PACKAGES) -> None:
    """Raises ConfigError if the node of a host has other versions than this process, or lacks AgentFly."""
    name = host.node.name
    if host.about["agentfly"] is None:
        raise ConfigError(f"node {name} has no AgentFly: install the same versions on every machine")
    check_software(host.about["software"], f"node {name}", packages)


def _answers(host: Host) -> bool:
    """Whether a host's node is well: it may only have lost the process."""
    try:
        host.ask("free_port", timeout_s=2.0)
    except EngineError:
        return False
    return True
