"""Starts the processes of a fleet on the nodes of a Ray cluster.

    start process i --> its reservation still answers? --yes--> start the process there again
                               no, or it has none --> reserve, on another node if one fits --> check the node --> start

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
from .ray_cluster import Cluster
from .reservation import Node, NodeProcess, Reservation, Share, close_all

REUSES = 2
"""How often a process is started again in the same reservation before it is moved to another node."""


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
        self._reservations: dict[int, tuple[Reservation, int]] = {}  # with the number of processes that were started there
        self._reached = False  # a process has reached the trainer's address before
        self._closed = False
        self._lock = threading.Lock()  # guards `_reservations` and `_closed`: processes are started in threads

    def start(self, index: int, ticket: Mapping[str, Any]) -> NodeProcess:
        """Raises ConfigError if no node can ever hold the process or a node has other software, EngineError if it fails now."""
        reservation = self._reserve(index, ticket)
        log = f"{process_name(ticket)}.log"
        self._note_node(log, f"node {reservation.node.name} ({reservation.node.address}): {reservation.about['folder']}/{log}")
        process = run_on(reservation, ticket, self._environ)
        if ticket["attempt"]:
            self._cluster.note(f"{reservation.name} starts again on node {reservation.node.name}")
        self._reached = True
        return process

    def nodes(self) -> dict[int, Node]:
        """The node of each process."""
        with self._lock:
            return {index: reservation.node for index, (reservation, _) in self._reservations.items()}

    def close(self) -> None:
        """End all reservations."""
        with self._lock:
            self._closed = True
            reservations = [reservation for reservation, _ in self._reservations.values()]
            self._reservations = {}
        close_all(reservations)

    def _reserve(self, index: int, ticket: Mapping[str, Any]) -> Reservation:
        avoid = []
        with self._lock:
            last, uses = self._reservations.get(index, (None, 0))
        if last is not None:
            if uses <= REUSES and _answers(last):
                with self._lock:
                    self._reservations[index] = (last, uses + 1)
                return last
            avoid = [last.node.id]
            if last.lost is None:
                self._cluster.doubt(last.node)
            last.close()
        try:
            reservation = self._cluster.reserve(ticket["name"], self._share, avoid=avoid)
        except EngineError as error:
            raise EngineError(f"could not be placed: {error}") from None
        try:
            check_node(reservation, self._packages)
            check_reach(reservation, ticket["address"], EngineError if self._reached else ConfigError)
        except (ConfigError, EngineError):
            self._cluster.suspect(reservation.node)
            reservation.close()
            raise
        with self._lock:
            if not self._closed:
                self._reservations[index] = (reservation, 1)
                return reservation
        reservation.close()
        raise EngineError("the run has ended")

    def _note_node(self, file_name: str, text: str) -> None:
        if self._log_dir is None:
            return
        with contextlib.suppress(OSError):  # a full disk stops the run elsewhere, with a sentence
            self._log_dir.mkdir(parents=True, exist_ok=True)
            with (self._log_dir / file_name).open("a", encoding="utf-8") as file:
                file.write(f"{text}\n")


def run_on(reservation: Reservation, ticket: Mapping[str, Any], environ: Mapping[str, str | None]) -> NodeProcess:
    """Start the process of a ticket on the node of a reservation."""
    about, name = reservation.about, process_name(ticket)
    program = f"{about['agentfly']}/fleet/member_main.py"
    words = [about["python"], "-I", "-X", "utf8", program, "{life}", "{parent}", name]
    stdin = json.dumps({**ticket, "path": about["path"], "here": about["address"]}).encode()
    return reservation.run(words, environ=environ, stdin=stdin, log=f"{name}.log")


def check_reach(reservation: Reservation, address: Any, kind: type[AgentFlyError] = ConfigError) -> None:
    """Raises an error of this kind if the node of a reservation cannot reach the trainer."""
    where, port = address
    if why := reservation.ask("can_reach", where, port, 10.0, timeout_s=15.0):
        raise kind(
            f"node {reservation.node.name} cannot reach the trainer at {where}:{port} ({why}): open the firewall between the "
            "machines for this address"
        )


def check_node(reservation: Reservation, packages: Collection[str] = PACKAGES) -> None:
    """Raises ConfigError if the node of a reservation has other versions than this process, or lacks AgentFly."""
    name = reservation.node.name
    if reservation.about["agentfly"] is None:
        raise ConfigError(f"node {name} has no AgentFly: install the same versions on every machine")
    check_software(reservation.about["software"], f"node {name}", packages)


def _answers(reservation: Reservation) -> bool:
    """Whether a reservation's node is well: it may only have lost the process."""
    try:
        reservation.ask("free_port", timeout_s=2.0)
    except EngineError:
        return False
    return True
