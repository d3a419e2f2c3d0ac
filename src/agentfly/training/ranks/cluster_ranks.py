"""Learner ranks over the nodes of a Ray cluster: rank 0 beside the supervisor, the others where there is room.

    supervisor --- socket --- rank 0, on the driver's node
               --- fleet ---- parent --- rank n, on another node          (`ranks.rank_parent`)

Ray reserves a share of a node for each rank. Commands and gradients go over the ranks' own connections. The supervisor is not
asynchronous: the fleet of parents has a thread with an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...config import Config
from ...engines import engine_options
from ...errors import ConfigError, EngineError, RankError
from ...fleet.fleet import Fleet, Role
from ...fleet.link import LinkMessage
from ...fleet.member import Member
from ...fleet.node_launcher import check_node, check_reach, run_on
from ...fleet.ray_cluster import Cluster
from ...fleet.reservation import Node, NodeProcess, Reservation, Share
from ..cluster.checks import check_files, check_room, shares_of
from .process import FROZEN, QUIET, SILENT_UNSEEN_S, Rank, free_port, interface_variables, start_here, why_ended

T = TypeVar("T")
STOPPED = "was stopped"
RESERVE_S, RESERVE_AGAIN_S = 60.0, 180.0
"""Seconds in which all ranks must find room: at the start, and after a loss, when a node may be replaced."""
PASSED_ON = (
    "AGENTFLY_", "CUBLAS_", "GLOO_", "HF_", "HUGGINGFACE_", "NCCL_", "OMP_", "PYTHONPATH", "PYTORCH_", "TOKENIZERS_", "TORCH",
    "TRANSFORMERS_", "TRITON_",
)  # fmt: skip
"""Beginnings of the names of the driver's environment variables that hold on every node."""


class RankMember(Member):
    """The parent process of a rank on another node, and what it said of the rank."""

    def __init__(self, index: int, attempt: int) -> None:
        super().__init__("rank", index, attempt)
        self.status: int | None = None
        self.frozen = False
        self.unfinished_line = ""

    @property
    def name(self) -> str:
        return f"rank {self.index + 1}"


class RankRole(Role[RankMember]):
    """The parent processes of the ranks on other nodes. `orders` is what each is told to start, rank 1 first."""

    kind, noun = "rank", "parent of a rank"
    target = "agentfly.training.ranks.rank_parent:serve"
    consequence = "all ranks are started again"
    restarts = False
    stuck_s = SILENT_UNSEEN_S

    def __init__(self, orders: Sequence[Mapping[str, Any]]) -> None:
        self._orders = orders

    def member(self, index: int, attempt: int) -> RankMember:
        return RankMember(index, attempt)

    async def prepare(self, member: RankMember) -> None:
        await member.call("open", self._orders[member.index])

    def hear(self, member: RankMember, message: LinkMessage) -> None:
        if message.kind == "status":
            member.frozen = message.value["frozen"]
        elif message.kind == "said":
            *lines, member.unfinished_line = (member.unfinished_line + message.value).split("\n")
            show(member, lines)
        elif message.kind == "ended":
            member.status = message.value
            show(member, [member.unfinished_line] if member.unfinished_line else [])


def show(member: RankMember, lines: Sequence[str]) -> None:
    """Print what a rank has printed on its node."""
    for line in lines:
        print(f"[{member.name}, node {member.node}] {line}", file=sys.stderr, flush=True)


class RemoteRank:
    """A rank on another node, for the supervisor. `kill` ends its parent process, which ends the rank."""

    def __init__(self, member: RankMember, kill: Callable[[], Any]) -> None:
        self.number, self._member, self._kill = member.index + 1, member, kill

    @property
    def status(self) -> int | None:
        return self._member.status

    def read(self) -> Path | None:
        """Rank 0 alone names the run's folder: returns None."""
        return None

    def why_lost(self) -> str | None:
        member, where = self._member, f"on node {self._member.node}"
        if member.status is not None:
            how = why_ended(member.status, self.number)
            return None if how is None else f"{where} {how}"
        if not member.alive:
            why = member.ended.result()
            if why == "closed its connection":
                return f"was lost {where}: its connection was closed"
            return f"was lost {why.removeprefix('ended ')}" if why.startswith("ended ") else f"{where} {why}"
        return f"{where} {FROZEN}" if member.frozen else None

    def kill(self) -> None:
        self._kill()


class ReservedLauncher:
    """Starts each process in a share that was reserved before, the first in the first."""

    takes_long = True

    def __init__(self, reservations: Sequence[Reservation]) -> None:
        self._reservations = reservations

    def start(self, index: int, ticket: Mapping[str, Any]) -> NodeProcess:
        check_reach(self._reservations[index], ticket["address"])
        return run_on(self._reservations[index], ticket, {})

    def close(self) -> None:
        """The reservations are closed by `ClusterRanks.release`."""


class ClusterRanks:
    """Starts the ranks of a run over the nodes. `ranks.supervisor.Starter` describes its methods."""

    def __init__(self, config: Config, cluster: Cluster, note: Callable[[str], None]) -> None:
        self._config, self._cluster, self._note = config, cluster, note
        own = cluster.own
        device = engine_options(config.agent.engine).get("device")
        gpus = own.gpus >= 1 if device is None else str(device).startswith("cuda")
        self._share = Share(config.learner.cpus, config.learner.memory_gib, float(gpus))
        self._own: Reservation | None = None
        self._reservations: list[Reservation] = []
        self._avoid: set[str] = set()
        self._attempts = 0
        self._fleet: Fleet[RankMember] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentfly-ranks", daemon=True)
        self._thread.start()

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
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._cluster.close()

    # -- an attempt ----------------------------------------------------------------------------------------------------------

    def start(self, arguments: Sequence[str]) -> list[Rank]:
        self._attempts += 1
        if self._attempts == 1:
            alive = [node for node in self._cluster.nodes() if node.alive]
            check_ranks(alive, self._cluster.own, self._share, self._config)
        self._reserve()
        try:
            self._check_nodes(arguments)
            return self._start(arguments)
        except EngineError as error:  # a node was lost
            raise RankError(str(error)) from error

    def release(self) -> None:
        """Release the shares of the other ranks, all at once. The share of rank 0 stays reserved."""
        if self._fleet is not None:
            lost = [member.index for member in self._fleet.members if not member.alive and member.ended.result() != STOPPED]
            self._avoid |= {self._reservations[index].node.id for index in lost}
            self._do(self._fleet.close())
            self._fleet = None
        self._avoid |= {reservation.node.id for reservation in self._reservations if reservation.lost is not None}
        closing = [threading.Thread(target=reservation.close, daemon=True) for reservation in self._reservations]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(3.0)
        self._reservations = []

    def _reserve(self) -> None:
        """Reserve a share for every rank, in the order of nodes. Raises EngineError if one finds no room in time."""
        until = time.monotonic() + (RESERVE_S if self._attempts == 1 else RESERVE_AGAIN_S)
        if self._own is None or self._own.lost is not None:
            self._own = self._cluster.reserve(
                "rank 0", self._share, only=self._cluster.own.id, timeout_s=until - time.monotonic()
            )
        own = self._own.node.id
        for number in range(1, self._config.learner.ranks):
            left_s = max(1.0, until - time.monotonic())
            self._reservations.append(self._cluster.reserve(f"rank {number}", self._share, avoid=self._avoid, timeout_s=left_s))
        self._reservations.sort(key=lambda reservation: (reservation.node.id != own, reservation.node.name))

    def _start(self, arguments: Sequence[str]) -> list[Rank]:
        own = self._cluster.own
        assert self._own is not None
        variables = variables_of([self._own, *self._reservations])
        common = {
            "WORLD_SIZE": f"{len(variables)}",
            "MASTER_ADDR": own.address,
            "MASTER_PORT": f"{free_port(own.address)}",
        }
        if self._config.run.threads is None:
            common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", f"{max(1, int(self._share.cpus))}")
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        orders = [
            {
                "rank": number,
                "arguments": list(arguments),
                "folder": os.getcwd(),
                "environ": {**passed_on, **common, **of_rank, "RANK": f"{number}"},
            }
            for number, of_rank in enumerate(variables[1:], start=1)
        ]
        fleet = self._do(self._open(RankRole(orders), own.address))
        ranks: list[Rank] = [RemoteRank(member, partial(self._end, fleet, member)) for member in fleet.members]
        environ = {**QUIET, **interface_variables(own.address), **os.environ, **common, **variables[0]}
        ranks.insert(0, start_here(0, arguments, environ))
        self._note(f"{len(ranks)} ranks of the learner on {self._describe()}")
        return ranks

    async def _open(self, role: RankRole, address: str) -> Fleet[RankMember]:
        health_s, note = self._config.cluster.health_s, self._note
        fleet: Fleet[RankMember] = Fleet(
            ReservedLauncher(self._reservations), role, len(self._reservations), health_s=health_s, address=address, note=note
        )
        self._fleet = fleet
        return await fleet.__aenter__()

    def _end(self, fleet: Fleet[RankMember], member: RankMember) -> None:
        self._loop.call_soon_threadsafe(fleet.end, member, STOPPED)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop of the fleet, which a signal may interrupt."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _describe(self) -> str:
        names = [self._cluster.own.name, *(reservation.node.name for reservation in self._reservations)]
        return ", ".join(f"node {name} ({names.count(name)})" for name in dict.fromkeys(names))

    # -- before the ranks start ----------------------------------------------------------------------------------------------

    def _check_nodes(self, arguments: Sequence[str]) -> None:
        """Raises ConfigError if a node cannot take part, EngineError if it does not answer."""
        reservations = list({reservation.node.id: reservation for reservation in self._reservations}.values())
        for reservation in reservations:
            check_node(reservation)
            check_files(reservation, self._config)
        check_folders(reservations, arguments, self._config)


def check_ranks(nodes: Sequence[Node], own: Node, share: Share, config: Config) -> None:
    """Raises ConfigError if the nodes could not hold the ranks and the run's other processes even if they were empty."""
    if not own.fits(share):
        raise ConfigError(
            f"rank 0 runs on the node of this process, {own.name}, which has no {share}: start `agentfly train` on a node that "
            "has, or lower learner.cpus and learner.memory_gib"
        )
    ranks = [("learner ranks", "learner.ranks", share)] * config.learner.ranks
    check_room(nodes, ranks + shares_of(config, nodes))


def variables_of(reservations: Sequence[Reservation]) -> list[dict[str, str]]:
    """The environment variables of each rank on its node; `reservations` holds rank 0's share first.

    All ranks of a node see the GPUs of all of them, as NCCL wants it, and use that of their local rank.
    """
    environments: list[dict[str, str]] = []
    for number, reservation in enumerate(reservations):
        beside = [each for each in reservations if each.node.id == reservation.node.id]
        local = sum(each.node.id == reservation.node.id for each in reservations[:number])
        gpus = ",".join(gpu for each in beside for gpu in each.about.get("gpus", []))
        environments.append({"LOCAL_RANK": f"{local}", "LOCAL_WORLD_SIZE": f"{len(beside)}", "CUDA_VISIBLE_DEVICES": gpus})
    return environments


def check_folders(reservations: Sequence[Reservation], arguments: Sequence[str], config: Config) -> None:
    """Raises ConfigError if what the ranks share is not the same on every node, EngineError if a node does not answer."""
    resumed = resumed_folder(arguments)
    runs = Path(config.run.dir) if resumed is None else resumed
    folder = Path.cwd()
    runs.mkdir(parents=True, exist_ok=True)
    marker, word = runs.absolute() / f".shared-{secrets.token_hex(6)}", secrets.token_hex(8)
    try:
        marker.write_text(word, encoding="utf-8")
        for reservation in reservations:
            name = reservation.node.name
            if not reservation.ask("sees_file", str(folder)):
                raise ConfigError(
                    f"folder {folder} does not exist on node {name}: start the run in a folder that every node has"
                )
            if not reservation.ask("sees_file", str(marker), word):
                raise ConfigError(f"folder {runs} is not the same folder on node {name}: put run.dir on a shared file system")
            for path in (Path(each) for each in arguments if "=" not in each):
                if path.is_file() and not reservation.ask("sees_file", str(path.absolute()), path.read_text(encoding="utf-8")):
                    raise ConfigError(f"{path} is not the same file on node {name}: put it on a shared file system")
    except OSError as error:
        raise ConfigError(f"folder {runs} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            marker.unlink()


def resumed_folder(arguments: Sequence[str]) -> Path | None:
    """The folder after --resume in the arguments of `agentfly train`; None if there is none."""
    for number, word in enumerate(arguments):
        if word == "--resume" and number + 1 < len(arguments):
            return Path(arguments[number + 1])
        if word.startswith("--resume="):
            return Path(word.partition("=")[2])
    return None
