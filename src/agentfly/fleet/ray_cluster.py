"""A Ray cluster: its nodes, and what this process has reserved there (`reservation`).

Nothing is detached. When the trainer dies, Ray ends its actors; a child holds the read end of a pipe of its actor and gets
SIGKILL from the kernel, with its process group, when the actor ends. A thread of the trainer asks every actor for a beat; one
that does not answer for `health_s` is lost, whatever Ray says (Ray itself needs a minute to notice a frozen node).

`NodeActor` (`ray_actor`) is sent to the node by value: a node needs Ray, and AgentFly only for what is run there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..errors import ConfigError, EngineError
from ..plugins import missing_extra
from . import bare
from .ray_actor import NodeActor
from .reservation import ANSWER_S, Node, Reservation, Reserved, Share, choose, close_all, first_sentence, meaning_of, rooms_of

log = logging.getLogger(__name__)
NAMESPACE = "agentfly"
SPACE, PREFIX = b"agentfly", b"agentfly|"
"""Of the keys under which runs publish what they do."""
GIB = float(1 << 30)
SUSPECT_S, DOUBT_S = 60.0, 15.0
"""Seconds for which nothing is reserved on a node that did not answer, and on one where a process ended, if another fits."""
_users = 0
_using = threading.Lock()
"""Guards `_users`: several clusters of one process share its one connection to Ray."""


class Cluster:
    """The connection of this process to a Ray cluster. Its blocking methods may be called in any thread."""

    def __init__(self, ray: Any, *, health_s: float, note: Callable[[str], None]) -> None:
        self.run = f"{os.getpid()}-{secrets.token_hex(4)}"
        """Names this connection in `reserved`."""
        self.health_s = health_s
        self._ray, self.note = ray, note
        self._numbers = itertools.count(1)
        self._reservations: dict[int, Reservation] = {}
        self._suspects: dict[str, float] = {}
        self._doubts: dict[str, float] = {}
        self._fitted: set[Share] = set()
        self._lock = threading.Lock()  # guards the four above
        self._choosing = threading.Lock()  # one reservation after the other, so that each counts for where the next one goes
        self._closed = threading.Event()
        self._own_id = ray.get_runtime_context().get_node_id()
        self._thread = threading.Thread(target=self._monitor, name="agentfly-cluster", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        health_s: float = 6.0,
        timeout_s: float = 30.0,
        note: Callable[[str], None] = lambda _: None,
    ) -> Cluster:
        """Connect to the cluster at "host:port" or "auto". Raises MissingExtra without Ray, ConfigError if none answers."""
        global _users
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        if importlib.util.find_spec("ray") is None:
            raise missing_extra("cluster.address", "ray")
        _check_address(address, timeout_s)
        with _using, _kept_signals():
            import ray

            if not ray.is_initialized():
                _initialize(ray, address)
            _users += 1
        pickles: Any = ray.cloudpickle
        for module in (bare, sys.modules[NodeActor.__module__]):
            pickles.register_pickle_by_value(module)
        return cls(ray, health_s=health_s, note=note)

    # ---- nodes

    @property
    def own(self) -> Node:
        """The node of this process."""
        return next(node for node in self.nodes() if node.id == self._own_id)

    def nodes(self) -> list[Node]:
        """Every node that Ray knows, those that died included."""
        free = self._ray._private.state.available_resources_per_node()
        rows = self._ray.nodes()
        names = [_name_of(row) for row in rows]
        return [
            _node(row, name, names.count(name) > 1, free.get(row["NodeID"], {})) for row, name in zip(rows, names, strict=True)
        ]

    def reserved(self) -> list[Reserved]:
        """The reservations of all runs on the cluster."""
        rows = []
        names = {node.id: node.name for node in self.nodes()}
        for row in self._ray.util.list_named_actors(all_namespaces=True):
            if row["namespace"] == NAMESPACE:
                run, _, name, node, *share = row["name"].split("|")
                rows.append(Reserved(run, name, names.get(node, node), Share(*map(float, share))))
        return sorted(rows, key=lambda each: (each.run, each.name))

    def tell(self, value: Mapping[str, Any]) -> None:
        """Publish what this run does, for `told` in any process."""
        self._table()._internal_kv_put(PREFIX + self.run.encode(), json.dumps(value).encode(), namespace=SPACE)

    def records(self) -> dict[str, Any]:
        """What each run published last, by the name of its connection. A run that has ended may be among them."""
        table = self._table()
        values = {key: table._internal_kv_get(key, namespace=SPACE) for key in table._internal_kv_list(PREFIX, namespace=SPACE)}
        return {key.decode().partition("|")[2]: json.loads(value or b"null") for key, value in values.items()}

    def _table(self) -> Any:
        """The cluster's small table of keys, which Ray's head holds."""
        from ray.experimental import internal_kv

        return internal_kv

    def reservations(self) -> list[Reservation]:
        """Those of this process that are not lost."""
        with self._lock:
            return [each for each in self._reservations.values() if each.ready and each.lost is None]

    # ---- reserving

    def reserve(
        self, name: str, share: Share, *, avoid: Collection[str] = (), only: str | None = None, timeout_s: float = 60.0
    ) -> Reservation:
        """Reserve a share of the node that has room for it and the fewest reservations. `avoid` and `only` are ids of nodes.

        A node of `avoid` is used only if no other fits. Raises ConfigError if no node could hold the share even if it were
        empty, EngineError if none has room within `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        last = ""
        while True:
            with self._choosing:
                reservation = self._book(name, share, avoid, only)
            if reservation is not None:
                last = self._start(reservation, min(ANSWER_S, max(1.0, until - time.monotonic())))
                if not last:
                    return reservation
            if self._closed.is_set():
                raise EngineError("the connection to the Ray cluster is closed")
            if time.monotonic() > until:
                why = f"; {last}" if last else ""
                raise EngineError(f"no node had {share} free for {name} within {timeout_s:g} s: {rooms_of(self.nodes())}{why}")
            if reservation is None:
                self._closed.wait(0.25)

    def _book(self, name: str, share: Share, avoid: Collection[str], only: str | None) -> Reservation | None:
        """A reservation that counts from now, although it is not started yet; None if no node has room."""
        everything = self.nodes()
        nodes = [node for node in everything if node.alive and only in (None, node.id)]
        with self._lock:
            now = time.monotonic()
            suspects, doubts = ({key for key, until in some.items() if until > now} for some in (self._suspects, self._doubts))
            # A share that was reserved before may have room again when a lost node is replaced.
            if share not in self._fitted and not any(node.fits(share) for node in nodes):
                raise ConfigError(f"no node has {share} for {name}: {rooms_of(everything)}")
            live = [each for each in self._reservations.values() if each.lost is None]
            node = choose(share, nodes, live, avoid={*avoid, *doubts}, never=suspects)
            if node is None:
                return None
            reservation = Reservation(self._ray, next(self._numbers), name, share, node, self._forget)
            self._reservations[reservation.number] = reservation
            return reservation

    def _start(self, reservation: Reservation, timeout_s: float) -> str:
        """Start the actor of a reservation. Returns why its node could not, and closes the reservation then."""
        ray, node, share = self._ray, reservation.node, reservation.share
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        reserved = (share.cpus, share.memory_gib, share.gpus)
        try:
            reservation.actor = ray.remote(NodeActor).options(
                name="|".join(map(str, (self.run, reservation.number, reservation.name, node.id, *reserved))),
                namespace=NAMESPACE,
                num_cpus=share.cpus,
                num_gpus=share.gpus,
                **({"memory": int(share.memory_gib * GIB)} if share.memory_gib else {}),
                scheduling_strategy=strategy,
                max_concurrency=16,
                max_restarts=0,
            ).remote(list(sys.path), os.getcwd())  # fmt: skip
            reservation.about = ray.get(reservation.actor.about.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            why = f"node {node.name} did not answer within {timeout_s:.0f} s"
            self.suspect(node)
        except (ray.exceptions.RayError, ValueError) as error:
            why = f"node {node.name} could not start it: {meaning_of(error)}"
            self.doubt(node)
            self._closed.wait(1.0)
        else:
            with self._lock:
                self._fitted.add(share)
                reservation.ready = True
            return ""
        reservation.close()
        self.note(f"{reservation.name}: {why}")
        return why

    def suspect(self, node: Node) -> None:
        """Reserve nothing on a node for a while: it does not answer."""
        with self._lock:
            self._suspects[node.id] = time.monotonic() + SUSPECT_S

    def doubt(self, node: Node) -> None:
        """Prefer other nodes for a while: a process ended there, and Ray shows a dead node as alive for some seconds."""
        with self._lock:
            self._doubts[node.id] = time.monotonic() + DOUBT_S

    # ---- watching

    def _monitor(self) -> None:
        pause = min(0.25, self.health_s / 12)
        beats: dict[int, Any] = {}
        last = time.monotonic()
        while not self._closed.wait(pause):
            now = time.monotonic()
            passed, last = min(now - last, 2 * pause), now  # a pause of this process itself is not counted as silence
            reservations = {each.number: each for each in self.reservations()}
            beats = {number: beat for number, beat in beats.items() if number in reservations}
            try:
                for number, reservation in reservations.items():
                    if number not in beats:
                        beats[number] = reservation.actor.beat.remote(len(reservation.ends), min(1.0, self.health_s / 5))
                ready = self._ray.wait(list(beats.values()), num_returns=len(beats), timeout=0)[0] if beats else []
            except Exception as error:  # noqa: BLE001 - the thread must not end silently: without it nothing is noticed
                if not self._closed.is_set():
                    for reservation in reservations.values():
                        reservation.lose(f"the connection to Ray failed: {first_sentence(error)}")
                return
            for number, reservation in reservations.items():
                reservation.silent_s += passed
                if beats[number] in ready:
                    self._hear(reservation, beats.pop(number))
                elif reservation.silent_s > self.health_s:
                    self.suspect(reservation.node)
                    reservation.lose(f"was silent for {reservation.silent_s:.1f} s")

    def _hear(self, reservation: Reservation, beat: Any) -> None:
        try:
            reservation.ends = self._ray.get(beat)
            reservation.silent_s = 0.0
        except self._ray.exceptions.RayError as error:
            self.doubt(reservation.node)
            reservation.lose(meaning_of(error))

    def _forget(self, number: int) -> None:
        """The reservation is closed: what it reserved is free in the books."""
        with self._lock:
            self._reservations.pop(number, None)

    def close(self) -> None:
        """End all reservations and disconnect. May be called more than once."""
        global _users
        if self._closed.is_set():
            return
        with self._lock:
            reservations = list(self._reservations.values())
        close_all(reservations)
        try:
            self._table()._internal_kv_del(PREFIX + self.run.encode(), namespace=SPACE)
        except Exception as error:  # noqa: BLE001 - the head may be gone; `told` then says it too long
            log.debug("the status of this run could not be removed: %s", error)
        self._closed.set()
        self._thread.join(5.0)
        with _using, _kept_signals():
            _users -= 1
            if not _users:
                self._ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_address(address: str, timeout_s: float) -> None:
    """Raises ConfigError if the address is malformed, or nothing accepts a connection there in time."""
    if address == "auto":
        return
    host, sign, port = address.rpartition(":")
    if not sign or not host or not port.isdigit() or "/" in host:
        raise ConfigError(f'cluster.address is host:port of the head of a Ray cluster, or "auto", not {address!r}')
    until, last = time.monotonic() + timeout_s, "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), min(left, timeout_s)):
                return
        except socket.gaierror as error:
            raise ConfigError(f"cluster.address: the host {host!r} is not known here ({error.strerror})") from None
        except OSError as error:
            last = error.strerror or str(error) or type(error).__name__
            time.sleep(min(0.5, max(0.0, until - time.monotonic())))
    raise ConfigError(
        f"no Ray cluster answers at {address} after {timeout_s:g} s ({last}): start one with `ray start --head`, or open the "
        "firewall between the machines"
    )


def _initialize(ray: Any, address: str) -> None:
    """Connect this process to Ray. Raises ConfigError."""
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        why = "something else listens there, or its head is being started"
        if address == "auto":
            raise ConfigError(
                'cluster.address = "auto": no Ray cluster runs on this machine; start one with `ray start --head`, or give '
                "host:port of its head"
            ) from None
        raise ConfigError(f"no Ray cluster answers at {address}: {why}") from None
    except Exception as error:
        text = " ".join(str(error).split()) if "ersion mismatch" in str(error) else first_sentence(error)
        raise ConfigError(
            f"cannot join the Ray cluster at {address}: {text}. This machine must be one of its nodes "
            "(`ray start --address=...`), with the same versions of Ray and Python"
        ) from error
    # Ray prints pages about every node and process that dies into this program's output; `note` says it in a sentence.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None


@contextlib.contextmanager
def _kept_signals() -> Any:
    """Ray replaces the handler of SIGTERM, which stops a training in order: put it back."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        yield
    finally:
        if in_main and before is not None:
            signal.signal(signal.SIGTERM, before)


def _name_of(row: Mapping[str, Any]) -> str:
    name = row.get("NodeName") or ""
    return name if name and name != row["NodeManagerAddress"] else row.get("NodeManagerHostname") or row["NodeManagerAddress"]


def _node(row: Mapping[str, Any], name: str, shared: bool, free: Mapping[str, float]) -> Node:
    """`shared`: other nodes have this name, too."""
    has, alive = row.get("Resources") or {}, bool(row["Alive"])
    free = free if alive else {}
    return Node(
        row["NodeID"],
        f"{name}-{row['NodeID'][:6]}" if shared else name,
        row["NodeManagerAddress"],
        alive,
        has.get("CPU", 0.0),
        has.get("memory", 0.0) / GIB,
        has.get("GPU", 0.0),
        free.get("CPU", 0.0),
        free.get("memory", 0.0) / GIB,
        free.get("GPU", 0.0),
    )
