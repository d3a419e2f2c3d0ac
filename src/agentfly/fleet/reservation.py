"""A reservation: CPU, memory and GPU of a node of a Ray cluster, and the child processes that run there.

choose(nodes) -> Node --Cluster.reserve--> Reservation  -- Ray -->    NodeActor: holds the share, starts children
                                           Reservation.run -> NodeProcess    one child process
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import EngineError

log = logging.getLogger(__name__)
ANSWER_S = 20.0
"""Seconds that a node may take to start an actor or a child."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one process has of its node."""

    cpus: float = 1.0
    memory_gib: float = 0.0
    gpus: float = 0.0

    def __str__(self) -> str:
        parts = [_count(self.cpus, "CPU"), f"{self.memory_gib:g} GiB" if self.memory_gib else "", _count(self.gpus, "GPU")]
        return " and ".join(part for part in parts if part) or "nothing"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster: what it has, and what Ray says is free."""

    id: str
    name: str
    address: str
    alive: bool
    cpus: float
    memory_gib: float
    gpus: float
    free_cpus: float
    free_memory_gib: float
    free_gpus: float

    def fits(self, share: Share) -> bool:
        """Whether the node has room for the share when it is empty."""
        return self.cpus >= share.cpus and self.memory_gib >= share.memory_gib and self.gpus >= share.gpus


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reservation of some run, as every process that is connected to the cluster sees it."""

    run: str
    name: str
    node: str
    share: Share


def _count(value: float, unit: str) -> str:
    return f"{value:g} {unit}{'' if value == 1 else 's'}" if value else ""


def rooms_of(nodes: Iterable[Node]) -> str:
    """What each node has and what is free of it, in words."""
    alive = sorted((node for node in nodes if node.alive), key=lambda node: node.name)
    return "; ".join(
        f"node {node.name} has {Share(node.free_cpus, round(node.free_memory_gib, 1), node.free_gpus)} free of "
        f"{Share(node.cpus, round(node.memory_gib, 1), node.gpus)}"
        for node in alive
    )


def choose(
    share: Share,
    nodes: Collection[Node],
    reservations: Collection[Reservation],
    *,
    avoid: Collection[str],
    never: Collection[str],
) -> Node | None:
    """The node with room for a share and the fewest reservations. `avoid` and `never` are ids of nodes.

    A node of `avoid` is chosen only if no other has room.
    """

    def has_room(node: Node) -> bool:
        own = [each.share for each in reservations if each.node.id == node.id]
        return all(
            min(free, total - sum(getattr(each, kind) for each in own)) >= getattr(share, kind) - 1e-6
            for kind, free, total in (
                ("cpus", node.free_cpus, node.cpus),
                ("memory_gib", node.free_memory_gib, node.memory_gib),
                ("gpus", node.free_gpus, node.gpus),
            )
        )

    def load(node: Node) -> tuple[Any, ...]:
        count = sum(each.node.id == node.id for each in reservations)
        return node.id in avoid, count, -node.free_cpus, node.name

    return min((node for node in nodes if node.id not in never and has_room(node)), key=load, default=None)


class Reservation:
    """A share of a node, which an actor there holds. Its blocking methods may be called in any thread."""

    def __init__(self, ray: Any, number: int, name: str, share: Share, node: Node, on_closed: Callable[[int], None]) -> None:
        self.name, self.share, self.node = name, share, node
        self.about: dict[str, Any] = {}
        """The node's software, machine, address, Python, import path, folder of logs, and the GPUs of this reservation."""
        self.lost: str | None = None
        """Why the reservation counts as lost; None while it lives."""
        self.ready = False
        self.ends: dict[int, str] = {}
        self.silent_s = 0.0
        self.actor: Any = None
        self._ray, self.number, self._on_closed = ray, number, on_closed
        self._numbers = itertools.count(1)
        self._calls: list[Callable[[str], None]] = []
        self._lock = threading.Lock()  # guards `lost` and `_calls`
        self._is_closed = False

    def on_lost(self, call: Callable[[str], None]) -> None:
        """Call `call(why)` once the reservation is lost, in the monitor's thread; at once if it is lost already."""
        with self._lock:
            if self.lost is None:
                self._calls.append(call)
                return
        call(self.lost)

    def lose(self, why: str) -> None:
        """The reservation counts as lost from now."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = why
            calls, self._calls = self._calls, []
        for call in calls:
            call(why)

    def run(
        self, words: Sequence[str], *, environ: Mapping[str, str | None] | None = None, stdin: bytes = b"", log: str = ""
    ) -> NodeProcess:
        """Start a child process on the node, in its own session, tied to the reservation. Raises EngineError.

        Its environment is the node's, with `environ` (None removes a variable). What it prints goes to the file `log` in the
        reservation's folder. The words "{life}" and "{parent}" are replaced; see `resources.rpc.worker_main.tie_to`.
        """
        number = next(self._numbers)
        pid = self._call("start", number, list(words), dict(environ or {}), stdin, log, timeout_s=ANSWER_S)
        return NodeProcess(self, number, pid)

    def ask(self, what: str, *values: Any, timeout_s: float = 10.0) -> Any:
        """The node's answer to a question of `NodeActor.ask_...`. Raises EngineError."""
        return self._call("ask", what, *values, timeout_s=timeout_s)

    def _call(self, method: str, *values: Any, timeout_s: float) -> Any:
        ray = self._ray
        if self.lost is not None:
            raise EngineError(f"{self.name} on node {self.node.name} is lost: {self.lost}")
        try:
            return ray.get(getattr(self.actor, method).remote(*values), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise EngineError(f"node {self.node.name} did not answer within {timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            raise EngineError(f"{self.name} on node {self.node.name}: {meaning_of(error)}") from None

    def close(self) -> None:
        """Kill the children and the reservation. Takes a second at most, also if the node is frozen."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        ray = self._ray
        with contextlib.suppress(EngineError):
            if self.ready and self.lost is None:
                self._call("end", timeout_s=1.0)
        self.lose("was closed")
        if self.actor is not None:
            try:
                ray.kill(self.actor)
            except Exception as error:  # noqa: BLE001 - the connection may be gone; Ray then ends the actor with this process
                log.debug("%s could not be ended: %s", self.name, error)
        self._on_closed(self.number)


def close_all(reservations: Collection[Reservation]) -> None:
    """Close them at the same time, within 3 s."""
    closing = [threading.Thread(target=each.close, daemon=True) for each in reservations]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(3.0)


class NodeProcess:
    """A child process on a node. Implements `fleet.launcher.Launched`."""

    def __init__(self, reservation: Reservation, number: int, pid: int) -> None:
        self.reservation, self.pid, self.node, self._number = reservation, pid, reservation.node.name, number

    def ended(self) -> str | None:
        """How the process ended, with the end of what it printed; None while it runs. Never blocks."""
        if (how := self.reservation.ends.get(self._number)) is not None:
            return f"on node {self.node} {how}"
        lost = self.reservation.lost
        return None if lost is None else f"with its node {self.node} ({lost})"

    def kill(self) -> None:
        """End the process and its group. Returns when it is gone, or after 6 s. May be called more than once."""
        if self.ended() is None:
            with contextlib.suppress(EngineError):
                self.reservation._call("kill", [self._number], timeout_s=6.0)


def meaning_of(error: BaseException) -> str:
    """What an error of a call to a reservation means."""
    if "Unavailable" in type(error).__name__:
        return "the connection to it broke"
    if "ActorDied" in type(error).__name__ or "WorkerCrashed" in type(error).__name__:
        return "the node died" if "node" in str(error).partition("died")[2][:200].split(".")[0] else "its process was ended"
    return first_sentence(error)


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error of Ray, which may be a page long."""
    text = str(error).strip()
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith(("class_name", "actor_id", "namespace", "pid", "ray::", "File ")):
            return line.strip()[:300]
    return type(error).__name__
