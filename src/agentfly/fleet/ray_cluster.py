"""A Ray cluster as a place for processes: reserves CPU, memory and GPU on a node, and runs ordinary child processes there.

    trainer (driver)                     node
    Cluster.place -> Host  -- Ray -->    HostActor: reserves the share, starts children, says how they ended
    Host.run -> HostProcess              child process; what it does with the trainer goes over its own connection

Nothing is detached. When the trainer dies, Ray ends its actors; a child holds the read end of a pipe of its actor and gets
SIGKILL from the kernel, with its process group, when the actor ends. A thread of the trainer asks every host for a beat; one
that does not answer for `health_s` is lost, whatever Ray says (Ray itself needs a minute to notice a frozen node).

`HostActor` (`ray_actor`) is sent to the node by value: a node needs Ray, and AgentFly only for what is run there.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, EngineError
from ..plugins import missing_extra
from . import bare
from .ray_actor import HostActor

log = logging.getLogger(__name__)
NAMESPACE = "agentfly"
GIB = float(1 << 30)
SUSPECT_S, DOUBT_S = 60.0, 15.0
"""Seconds for which no host is placed on a node that did not answer, and on one whose host ended, if another fits."""
ANSWER_S = 20.0
"""Seconds that a node may take to start a host."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one host reserves on its node."""

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
class Placed:
    """A host that some run holds, as every process that is connected to the cluster sees it."""

    run: str
    name: str
    node: str
    share: Share


def _count(value: float, unit: str) -> str:
    return f"{value:g} {unit}{'' if value == 1 else 's'}" if value else ""


_users = 0
_using = threading.Lock()
"""Guards `_users`: several clusters of one process share its one connection to Ray."""


class Cluster:
    """The connection of this process to a Ray cluster. Its blocking methods may be called in any thread."""

    def __init__(self, ray: Any, *, health_s: float, note: Callable[[str], None]) -> None:
        self.run = f"{os.getpid()}-{secrets.token_hex(4)}"
        """Names this connection in `placed`."""
        self.health_s = health_s
        self._ray, self.note = ray, note
        self._numbers = itertools.count(1)
        self._hosts: dict[int, Host] = {}
        self._suspects: dict[str, float] = {}
        self._doubts: dict[str, float] = {}
        self._fitted: set[Share] = set()
        self._lock = threading.Lock()  # guards the four above
        self._choosing = threading.Lock()  # one host after the other, so that each counts for where the next one goes
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
        for module in (bare, sys.modules[HostActor.__module__]):
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

    def placed(self) -> list[Placed]:
        """The hosts of all runs on the cluster."""
        found = []
        names = {node.id: node.name for node in self.nodes()}
        for row in self._ray.util.list_named_actors(all_namespaces=True):
            if row["namespace"] == NAMESPACE:
                run, _, name, node, *share = row["name"].split("|")
                found.append(Placed(run, name, names.get(node, node), Share(*map(float, share))))
        return sorted(found, key=lambda each: (each.run, each.name))

    def tell(self, value: Mapping[str, Any]) -> None:
        """Publish what this run does, for `told` in any process."""
        self._kv().put(f"agentfly|{self.run}".encode(), json.dumps(value).encode())

    def told(self) -> dict[str, Any]:
        """What each run published last, by the name of its connection. A run that has ended may be among them."""
        kv = self._kv()
        return {key.decode().partition("|")[2]: json.loads(kv.get(key)) for key in kv.list(b"agentfly|")}

    def _kv(self) -> Any:
        return _Store(self._ray)

    def hosts(self) -> list[Host]:
        """The hosts that this process has placed and not lost."""
        with self._lock:
            return [host for host in self._hosts.values() if host.ready and host.lost is None]

    # ---- placing

    def place(
        self, name: str, share: Share, *, avoid: Collection[str] = (), only: str | None = None, timeout_s: float = 60.0
    ) -> Host:
        """Start a host on the node that has room for its share and the fewest hosts. `avoid` and `only` are ids of nodes.

        A node of `avoid` is used only if no other fits. Raises ConfigError if no node could hold the share even if it were
        empty, EngineError if none has room within `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        last = ""
        while True:
            with self._choosing:
                node = self._choose(name, share, avoid, only)
                host = None if node is None else self._book(name, share, node)
            if host is not None and not (last := self._start(host, min(ANSWER_S, max(1.0, until - time.monotonic())))):
                return host
            if self._closed.is_set():
                raise EngineError("the connection to the Ray cluster is closed")
            if time.monotonic() > until:
                told = f"; {last}" if last else ""
                raise EngineError(f"no node had {share} free for {name} within {timeout_s:g} s: {self._rooms()}{told}")
            if host is None:
                self._closed.wait(0.25)

    def _choose(self, name: str, share: Share, avoid: Collection[str], only: str | None) -> Node | None:
        nodes = [node for node in self.nodes() if node.alive and only in (None, node.id)]
        with self._lock:
            known = share in self._fitted
            hosts = [host for host in self._hosts.values() if host.lost is None]
            now = time.monotonic()
            suspects, doubts = ({key for key, until in some.items() if until > now} for some in (self._suspects, self._doubts))
        # A share that was placed before may have room again when a lost node is replaced.
        if not known and not any(node.fits(share) for node in nodes):
            raise ConfigError(f"no node has {share} for {name}: {self._rooms()}")

        def room(node: Node) -> bool:
            own = [host.share for host in hosts if host.node.id == node.id]
            return all(
                min(free, total - sum(getattr(each, kind) for each in own)) >= getattr(share, kind) - 1e-6
                for kind, free, total in (
                    ("cpus", node.free_cpus, node.cpus),
                    ("memory_gib", node.free_memory_gib, node.memory_gib),
                    ("gpus", node.free_gpus, node.gpus),
                )
            )

        def load(node: Node) -> tuple[Any, ...]:
            return (
                node.id in avoid or node.id in doubts,
                sum(host.node.id == node.id for host in hosts),
                -node.free_cpus,
                node.name,
            )

        return min((node for node in nodes if node.id not in suspects and room(node)), key=load, default=None)

    def _book(self, name: str, share: Share, node: Node) -> Host:
        """A host that counts from now, although it is not started yet."""
        host = Host(self, next(self._numbers), name, share, node)
        with self._lock:
            self._hosts[host.number] = host
        return host

    def _start(self, host: Host, timeout_s: float) -> str:
        """Start a host. Returns why its node could not, and closes it then."""
        ray, node, share = self._ray, host.node, host.share
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        reserved = (share.cpus, share.memory_gib, share.gpus)
        try:
            host.actor = ray.remote(HostActor).options(
                name="|".join(map(str, (self.run, host.number, host.name, node.id, *reserved))),
                namespace=NAMESPACE,
                num_cpus=share.cpus,
                num_gpus=share.gpus,
                **({"memory": int(share.memory_gib * GIB)} if share.memory_gib else {}),
                scheduling_strategy=strategy,
                max_concurrency=16,
                max_restarts=0,
            ).remote(list(sys.path), os.getcwd())  # fmt: skip
            host.about = ray.get(host.actor.about.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            why = f"node {node.name} did not answer within {timeout_s:.0f} s"
            self.suspect(node)
        except (ray.exceptions.RayError, ValueError) as error:
            why = f"node {node.name} could not start it: {_why(error)}"
            self.doubt(node)
            self._closed.wait(1.0)
        else:
            with self._lock:
                self._fitted.add(share)
                host.ready = True
            return ""
        host.close()
        self.note(f"{host.name}: {why}")
        return why

    def suspect(self, node: Node) -> None:
        """Place nothing on a node for a while: it does not answer."""
        with self._lock:
            self._suspects[node.id] = time.monotonic() + SUSPECT_S

    def doubt(self, node: Node) -> None:
        """Prefer other nodes for a while: a host ended there, and Ray shows a dead node as alive for some seconds."""
        with self._lock:
            self._doubts[node.id] = time.monotonic() + DOUBT_S

    def _rooms(self) -> str:
        alive = sorted((node for node in self.nodes() if node.alive), key=lambda node: node.name)
        return "; ".join(
            f"node {node.name} has {Share(node.free_cpus, round(node.free_memory_gib, 1), node.free_gpus)} free of "
            f"{Share(node.cpus, round(node.memory_gib, 1), node.gpus)}"
            for node in alive
        )

    # ---- watching

    def _monitor(self) -> None:
        pause = min(0.25, self.health_s / 12)
        beats: dict[int, Any] = {}
        last = time.monotonic()
        while not self._closed.wait(pause):
            now = time.monotonic()
            passed, last = min(now - last, 2 * pause), now  # a pause of this process itself is not counted as silence
            with self._lock:
                hosts = {number: host for number, host in self._hosts.items() if host.ready and host.lost is None}
            beats = {number: beat for number, beat in beats.items() if number in hosts}
            try:
                for number, host in hosts.items():
                    if number not in beats:
                        beats[number] = host.actor.beat.remote(len(host.ends), min(1.0, self.health_s / 5))
                ready = self._ray.wait(list(beats.values()), num_returns=len(beats), timeout=0)[0] if beats else []
            except Exception as error:  # noqa: BLE001 - the thread must not end silently: without it nothing is noticed
                if not self._closed.is_set():
                    for host in hosts.values():
                        host.lose(f"the connection to Ray failed: {_short(error)}")
                return
            for number, host in hosts.items():
                host.silent_s += passed
                if beats[number] in ready:
                    self._hear(host, beats.pop(number))
                elif host.silent_s > self.health_s:
                    self.suspect(host.node)
                    host.lose(f"was silent for {host.silent_s:.1f} s")

    def _hear(self, host: Host, beat: Any) -> None:
        try:
            host.ends = self._ray.get(beat)
            host.silent_s = 0.0
        except self._ray.exceptions.RayError as error:
            self.doubt(host.node)
            host.lose(_why(error))

    def forget(self, number: int) -> None:
        """The host is closed: what it reserved is free in the books."""
        with self._lock:
            self._hosts.pop(number, None)

    def close(self) -> None:
        """End all hosts and disconnect. May be called more than once."""
        global _users
        if self._closed.is_set():
            return
        with self._lock:
            hosts = list(self._hosts.values())
        closing = [threading.Thread(target=host.close, daemon=True) for host in hosts]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(3.0)
        try:
            self._kv().delete(f"agentfly|{self.run}".encode())
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


class Host:
    """One host on a node. Its blocking methods may be called in any thread."""

    def __init__(self, cluster: Cluster, number: int, name: str, share: Share, node: Node) -> None:
        self.name, self.share, self.node = name, share, node
        self.about: dict[str, Any] = {}
        """The node's software, machine, address, Python, import path, folder of logs, and the GPUs of this host."""
        self.lost: str | None = None
        """Why the host counts as lost; None while it lives."""
        self.ready = False
        self.ends: dict[int, str] = {}
        self.silent_s = 0.0
        self.actor: Any = None
        self._cluster, self.number = cluster, number
        self._numbers = itertools.count(1)
        self._calls: list[Callable[[str], None]] = []
        self._lock = threading.Lock()  # guards `lost` and `_calls`
        self._is_closed = False

    def on_lost(self, call: Callable[[str], None]) -> None:
        """Call `call(why)` once the host is lost, in the monitor's thread; at once if it is lost already."""
        with self._lock:
            if self.lost is None:
                self._calls.append(call)
                return
        call(self.lost)

    def lose(self, why: str) -> None:
        """The host counts as lost from now."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = why
            calls, self._calls = self._calls, []
        for call in calls:
            call(why)

    def run(
        self, words: Sequence[str], *, environ: Mapping[str, str | None] | None = None, stdin: bytes = b"", log: str = ""
    ) -> HostProcess:
        """Start a child process on the node, in its own session, tied to the host. Raises EngineError.

        Its environment is the node's, with `environ` (None removes a variable). What it prints goes to the file `log` in the
        host's folder. The words "{life}" and "{parent}" are replaced; see `resources.rpc.worker_main.tie_to`.
        """
        number = next(self._numbers)
        pid = self._call("start", number, list(words), dict(environ or {}), stdin, log, timeout_s=ANSWER_S)
        return HostProcess(self, number, pid)

    def ask(self, what: str, *values: Any, timeout_s: float = 10.0) -> Any:
        """The node's answer to a question of `HostActor.ask_...`. Raises EngineError."""
        return self._call("ask", what, *values, timeout_s=timeout_s)

    def _call(self, method: str, *values: Any, timeout_s: float) -> Any:
        ray = self._cluster._ray
        if self.lost is not None:
            raise EngineError(f"{self.name} on node {self.node.name} is lost: {self.lost}")
        try:
            return ray.get(getattr(self.actor, method).remote(*values), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise EngineError(f"node {self.node.name} did not answer within {timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            raise EngineError(f"{self.name} on node {self.node.name}: {_why(error)}") from None

    def close(self) -> None:
        """Kill the children and the host. Takes a second at most, also if the node is frozen."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        ray = self._cluster._ray
        with contextlib.suppress(EngineError):
            if self.ready and self.lost is None:
                self._call("end", timeout_s=1.0)
        self.lose("was closed")
        if self.actor is not None:
            try:
                ray.kill(self.actor)
            except Exception as error:  # noqa: BLE001 - the connection may be gone; Ray then ends the actor with this process
                log.debug("%s could not be ended: %s", self.name, error)
        self._cluster.forget(self.number)


class HostProcess:
    """A child process on a node. Implements `fleet.launcher.Launched`."""

    def __init__(self, host: Host, number: int, pid: int) -> None:
        self.host, self.pid, self.node, self._number = host, pid, host.node.name, number

    def ended(self) -> str | None:
        """How the process ended, with the end of what it printed; None while it runs. Never blocks."""
        if (how := self.host.ends.get(self._number)) is not None:
            return f"on node {self.host.node.name} {how}"
        return None if self.host.lost is None else f"with its node {self.host.node.name} ({self.host.lost})"

    def kill(self) -> None:
        """End the process and its group. Returns when it is gone, or after 6 s. May be called more than once."""
        if self.ended() is None:
            with contextlib.suppress(EngineError):
                self.host._call("kill", [self._number], timeout_s=6.0)


class _Store:
    """The cluster's small table of keys, which Ray's head holds."""

    def __init__(self, ray: Any) -> None:
        from ray.experimental import internal_kv

        self._kv, self._space = internal_kv, b"agentfly"

    def put(self, key: bytes, value: bytes) -> None:
        self._kv._internal_kv_put(key, value, namespace=self._space)

    def get(self, key: bytes) -> bytes:
        found: bytes | None = self._kv._internal_kv_get(key, namespace=self._space)
        return found or b"null"

    def list(self, prefix: bytes) -> list[bytes]:
        return list(self._kv._internal_kv_list(prefix, namespace=self._space))

    def delete(self, key: bytes) -> None:
        self._kv._internal_kv_del(key, namespace=self._space)


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
        text = " ".join(str(error).split()) if "ersion mismatch" in str(error) else _short(error)
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


def _why(error: BaseException) -> str:
    """What an error of a call to a host means."""
    if "Unavailable" in type(error).__name__:
        return "the connection to it broke"
    if "ActorDied" in type(error).__name__ or "WorkerCrashed" in type(error).__name__:
        return "the node died" if "node" in str(error).partition("died")[2][:200].split(".")[0] else "its process was ended"
    return _short(error)


def _short(error: BaseException) -> str:
    """The first sentence of an error of Ray, which may be a page long."""
    text = str(error).strip()
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith(("class_name", "actor_id", "namespace", "pid", "ray::", "File ")):
            return line.strip()[:300]
    return type(error).__name__
