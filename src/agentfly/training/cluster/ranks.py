"""Learner ranks over the nodes of a Ray cluster: rank 0 beside the supervisor, the others where there is room.

    supervisor --- socket --- rank 0, on the driver's node
               --- TCP ------ keeper --- rank n, on the node of its host      (`ranks.process`)

Ray reserves a share of a node for each rank and starts the keepers. Commands and gradients go over the ranks' own connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...config import Config
from ...engines import engine_options
from ...errors import ConfigError, EngineError, RankError
from ...fleet.node_launcher import check_node
from ...fleet.ray_cluster import Cluster, Host, HostProcess, Node, Share
from ...net.guard import same_token
from ..ranks.process import FROZEN, QUIET, Rank, free_port, interface_variables, start_here, why_ended
from .checks import check_files, check_room, shares_of

PLACE_S, PLACE_AGAIN_S = 60.0, 180.0
"""Seconds in which all ranks must find room: at the start, and after a loss, when a node may be replaced."""
JOIN_S = 60.0
"""Seconds in which every keeper must connect."""
GREET_S = 5.0
"""Seconds in which a connection must say whose it is."""
MAX_GREETED = 256
"""Connections that are heard at once; a further one ends the oldest."""
KEEPER = "training/ranks/process.py"
"""The keeper's program, in the folder of the package."""
PASSED_ON = (
    "AGENTFLY_", "CUBLAS_", "GLOO_", "HF_", "HUGGINGFACE_", "NCCL_", "OMP_", "PYTHONPATH", "PYTORCH_", "TOKENIZERS_", "TORCH",
    "TRANSFORMERS_", "TRITON_",
)  # fmt: skip
"""Beginnings of the names of the driver's environment variables that hold on every node."""


class RemoteRank:
    """A rank on another node. Its keeper tells once a second that both live."""

    def __init__(self, number: int, process: HostProcess, channel: socket.socket, health_s: float) -> None:
        self.number, self.process, self.channel = number, process, channel
        self.host = process.host
        self._health_s = health_s
        self._heard = time.monotonic()
        self._status: int | None = None
        self._problem: str | None = None
        self._frozen = self._closed = False
        self._data, self._said = b"", ""
        channel.setblocking(False)

    @property
    def status(self) -> int | None:
        return self._status

    def read(self) -> Path | None:
        """Take what the keeper has sent. Rank 0 alone names the run's folder: returns None."""
        while not self._closed:
            try:
                data = self.channel.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._closed = not data
            self._heard = time.monotonic()
            *lines, self._data = (self._data + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        return None

    def _take(self, message: Mapping[str, Any]) -> None:
        self._frozen = "frozen" in message
        self._status = message.get("ended", self._status)
        self._problem = message.get("problem", self._problem)
        *lines, self._said = (self._said + message.get("said", "")).split("\n")
        if self._status is not None and self._said:
            lines.append(self._said)
        for line in lines:
            print(f"[rank {self.number}, node {self.host.node.name}] {line}", file=sys.stderr, flush=True)

    def why_lost(self) -> str | None:
        where = f"on node {self.host.node.name}"
        if self._status is not None:
            how = why_ended(self._status, self.number)
            return None if how is None else f"{where} {how}"
        if self._problem is not None:
            return f"{where}: {self._problem}"
        if self._frozen:
            return f"{where} {FROZEN}"
        if self._closed or self.host.lost is not None:
            return f"was lost {self.process.ended() or f'{where}: its connection was closed'}"
        silent_s = time.monotonic() - self._heard
        return f"{where} was silent for {silent_s:.1f} s" if silent_s > self._health_s else None

    def kill(self) -> None:
        """Close the connection: the keeper kills the rank. The host is closed by `ClusterRanks.release`."""
        self.channel.close()


class ClusterRanks:
    """Starts the ranks of a run over the nodes. `ranks.supervisor.Starter` describes its methods."""

    def __init__(self, config: Config, cluster: Cluster, note: Callable[[str], None]) -> None:
        self._config, self._cluster, self._note = config, cluster, note
        own = cluster.own
        device = engine_options(config.agent.engine).get("device")
        gpus = own.gpus >= 1 if device is None else str(device).startswith("cuda")
        self._share = Share(config.learner.cpus, config.learner.memory_gib, float(gpus))
        self._own: Host | None = None
        self._hosts: list[Host] = []
        self._avoid: set[str] = set()
        self._attempts = 0
        try:
            self._listener = socket.create_server((own.address, 0), backlog=config.learner.ranks)
        except OSError as error:
            raise ConfigError(
                f"nothing can listen on {own.address}, the address of this node in the cluster: {error}"
            ) from None

    @classmethod
    def connect(cls, config: Config, note: Callable[[str], None]) -> ClusterRanks:
        """Connect to the cluster of a config. Raises MissingExtra or ConfigError."""
        assert config.cluster.address is not None
        cluster = Cluster.connect(config.cluster.address, health_s=config.cluster.health_s, note=note)
        try:
            return cls(config, cluster, note)
        except BaseException:
            cluster.close()
            raise

    def __enter__(self) -> ClusterRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._cluster.close()

    # -- an attempt ----------------------------------------------------------------------------------------------------------

    def start(self, arguments: Sequence[str]) -> list[Rank]:
        self._attempts += 1
        if self._attempts == 1:
            alive = [node for node in self._cluster.nodes() if node.alive]
            check_ranks(alive, self._cluster.own, self._share, self._config)
        self._place()
        try:
            self._check_nodes(arguments)
            return self._start(arguments)
        except EngineError as error:  # a host was lost
            raise RankError(str(error)) from error

    def release(self) -> None:
        """End the hosts of the other ranks, all at once. The share of rank 0 stays reserved."""
        self._avoid |= {host.node.id for host in self._hosts if host.lost is not None}
        closing = [threading.Thread(target=host.close, daemon=True) for host in self._hosts]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(3.0)
        self._hosts = []

    def _place(self) -> None:
        """Reserve a share for every rank, in the order of nodes. Raises EngineError if one finds no room in time."""
        until = time.monotonic() + (PLACE_S if self._attempts == 1 else PLACE_AGAIN_S)
        if self._own is None or self._own.lost is not None:
            self._own = self._cluster.place(
                "rank 0", self._share, only=self._cluster.own.id, timeout_s=until - time.monotonic()
            )
        own = self._own.node.id
        for number in range(1, self._config.learner.ranks):
            left_s = max(1.0, until - time.monotonic())
            self._hosts.append(self._cluster.place(f"rank {number}", self._share, avoid=self._avoid, timeout_s=left_s))
        self._hosts.sort(key=lambda host: (host.node.id != own, host.node.name))

    def _start(self, arguments: Sequence[str]) -> list[Rank]:
        own, token = self._cluster.own, secrets.token_hex(16)
        assert self._own is not None
        places = places_of([self._own, *self._hosts])
        common = {
            "WORLD_SIZE": f"{len(places)}",
            "MASTER_ADDR": own.address,
            "MASTER_PORT": f"{free_port(own.address)}",
        }
        if self._config.run.threads is None:
            common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", f"{max(1, int(self._share.cpus))}")
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        ranks: list[Rank] = []
        try:
            processes: dict[int, HostProcess] = {}
            for number, host in enumerate(self._hosts, start=1):
                ticket = {
                    "supervisor": list(self._listener.getsockname()[:2]),
                    "token": token,
                    "rank": number,
                    "arguments": list(arguments),
                    "folder": os.getcwd(),
                    "node": host.node.address,
                    "environ": {**passed_on, **common, **places[number], "RANK": f"{number}"},
                }
                words = [host.about["python"], "-I", "-X", "utf8", f"{host.about['agentfly']}/{KEEPER}"]
                processes[number] = host.run(words, stdin=json.dumps(ticket).encode(), log=f"rank-{number}.log")
            joined = self._accept(processes, token)
            ranks += [joined[number] for number in sorted(joined)]
            environ = {**QUIET, **interface_variables(own.address), **os.environ, **common, **places[0]}
            ranks.insert(0, start_here(0, arguments, environ))
        except BaseException:
            for rank in ranks:
                rank.kill()
            raise
        self._note(f"{len(ranks)} ranks of the learner on {self._describe()}")
        return ranks

    def _accept(self, processes: Mapping[int, HostProcess], token: str) -> dict[int, RemoteRank]:
        """Wait until every keeper has connected. Raises EngineError if one does not."""
        found: dict[int, RemoteRank] = {}
        try:
            self._fill(found, processes, token)
        except BaseException:
            for rank in found.values():
                rank.kill()
            raise
        return found

    def _fill(self, found: dict[int, RemoteRank], processes: Mapping[int, HostProcess], token: str) -> None:
        until = time.monotonic() + JOIN_S
        greeted: queue.SimpleQueue[tuple[int | None, socket.socket]] = queue.SimpleQueue()
        waiting: list[socket.socket] = []
        self._listener.settimeout(0.2)
        while len(found) < len(processes):
            for number, process in processes.items():
                if number not in found and (how := process.ended()) is not None:
                    raise EngineError(f"rank {number} was lost {how}")
            if time.monotonic() > until:
                number = min(processes.keys() - found.keys())
                host, port = self._listener.getsockname()[:2]
                raise EngineError(
                    f"rank {number} on node {processes[number].host.node.name} did not connect to {host}:{port} within "
                    f"{JOIN_S:g} s"
                )
            with contextlib.suppress(TimeoutError, ConnectionError):
                channel, _ = self._listener.accept()
                if len(waiting) == MAX_GREETED:  # a flood: the oldest connection has had its time
                    with contextlib.suppress(OSError):
                        waiting.pop(0).shutdown(socket.SHUT_RDWR)
                waiting.append(channel)
                threading.Thread(target=lambda own: greeted.put((greet(own, token), own)), args=(channel,), daemon=True).start()
            while not greeted.empty():
                known, channel = greeted.get()
                if channel in waiting:
                    waiting.remove(channel)
                if known is None or known not in processes or known in found:
                    channel.close()
                else:
                    found[known] = RemoteRank(known, processes[known], channel, self._config.cluster.health_s)

    def _describe(self) -> str:
        names = [self._cluster.own.name, *(host.node.name for host in self._hosts)]
        return ", ".join(f"node {name} ({names.count(name)})" for name in dict.fromkeys(names))

    # -- before the ranks start ----------------------------------------------------------------------------------------------

    def _check_nodes(self, arguments: Sequence[str]) -> None:
        """Raises ConfigError if a node cannot take part, EngineError if it does not answer."""
        hosts = list({host.node.id: host for host in self._hosts}.values())
        for host in hosts:
            address, port = self._listener.getsockname()[:2]
            if why := host.ask("can_reach", address, port, timeout_s=15.0):
                raise ConfigError(
                    f"node {host.node.name} cannot reach the driver at {address}:{port} ({why}): let the nodes of the cluster "
                    "reach each other's ports"
                )
            check_node(host)
            check_files(host, self._config)
        check_folders(hosts, arguments, self._config)


def greet(channel: socket.socket, token: str) -> int | None:
    """Returns the rank whose keeper has connected, if it knows the token and says so within GREET_S."""
    until = time.monotonic() + GREET_S
    line = b""
    try:
        while not line.endswith(b"\n"):
            channel.settimeout(max(0.01, until - time.monotonic()))
            if not (data := channel.recv(1)) or len(line) > 1000:  # what follows the line belongs to the rank
                return None
            line += data
        hello = json.loads(line)
        known = same_token(str(hello["token"]), token)
        return hello["rank"] if known and isinstance(hello["rank"], int) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # the last: brackets in brackets
        return None


def check_ranks(nodes: Sequence[Node], own: Node, share: Share, config: Config) -> None:
    """Raises ConfigError if the nodes could not hold the ranks and the run's other hosts even if they were empty."""
    if not own.fits(share):
        raise ConfigError(
            f"rank 0 runs on the node of this process, {own.name}, which has no {share}: start `agentfly train` on a node that "
            "has, or lower learner.cpus and learner.memory_gib"
        )
    ranks = [("learner ranks", "learner.ranks", share)] * config.learner.ranks
    check_room(nodes, ranks + shares_of(config, nodes))


def places_of(hosts: Sequence[Host]) -> list[dict[str, str]]:
    """The environment variables of each rank on its node; `hosts` holds rank 0's share first.

    All ranks of a node see the GPUs of all of them, as NCCL wants it, and use that of their local rank.
    """
    found: list[dict[str, str]] = []
    for place, host in enumerate(hosts):
        beside = [each for each in hosts if each.node.id == host.node.id]
        local = sum(each.node.id == host.node.id for each in hosts[:place])
        gpus = ",".join(gpu for each in beside for gpu in each.about.get("gpus", []))
        found.append({"LOCAL_RANK": f"{local}", "LOCAL_WORLD_SIZE": f"{len(beside)}", "CUDA_VISIBLE_DEVICES": gpus})
    return found


def check_folders(hosts: Sequence[Host], arguments: Sequence[str], config: Config) -> None:
    """Raises ConfigError if what the ranks share is not the same on every node, EngineError if a node does not answer."""
    resumed = resumed_folder(arguments)
    runs = Path(config.run.dir) if resumed is None else resumed
    folder = Path.cwd()
    runs.mkdir(parents=True, exist_ok=True)
    marker, word = runs.absolute() / f".shared-{secrets.token_hex(6)}", secrets.token_hex(8)
    try:
        marker.write_text(word, encoding="utf-8")
        for host in hosts:
            name = host.node.name
            if not host.ask("sees_file", str(folder)):
                raise ConfigError(
                    f"folder {folder} does not exist on node {name}: start the run in a folder that every node has"
                )
            if not host.ask("sees_file", str(marker), word):
                raise ConfigError(f"folder {runs} is not the same folder on node {name}: put run.dir on a shared file system")
            for path in (Path(each) for each in arguments if "=" not in each):
                if path.is_file() and not host.ask("sees_file", str(path.absolute()), path.read_text(encoding="utf-8")):
                    raise ConfigError(f"{path} is not the same file on node {name}: put it on a shared file system")
    except OSError as error:
        raise ConfigError(f"folder {runs} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            marker.unlink()


def resumed_folder(arguments: Sequence[str]) -> Path | None:
    """The folder after --resume in the arguments of `agentfly train`; None if there is none."""
    for place, word in enumerate(arguments):
        if word == "--resume" and place + 1 < len(arguments):
            return Path(arguments[place + 1])
        if word.startswith("--resume="):
            return Path(word.partition("=")[2])
    return None
