"""The environment servers of a run: processes on the nodes of a cluster that lend environments (`env_server_process`).

    fleet: connected --"open": kinds--> every kind tried out, listening --> reachable from here --> live

`directory` names the live hosts. It is given to the pools of this process, and in messages to those of the sampler processes
(`on_change`). The environments of a lost server end, their chains are failures of the world, and the pools start others on the
servers that are left. Calls of environments do not pass through this process, nor through Ray.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from ...config import Config
from ...errors import ConfigError, EngineError
from ...fleet.fleet import Fleet, Role
from ...fleet.launcher import Launcher
from ...fleet.link import LinkMessage
from ...fleet.member import Member, MemberLost
from ...fleet.node_launcher import NodeLauncher
from ...fleet.reservation import Share
from ...resources import Spec
from ...resources.directory import ServerAddress, ServerDirectory
from ...resources.rpc.served_kind import kind_value
from ...resources.spec import READY_S
from ...rollout import Plan, open_environments
from ...rollout.setup import RunnableAgent, environment_kinds
from . import on_cluster

REACH_S = 10.0


class ServerMember(Member):
    """One environment server."""

    def __init__(self, index: int, attempt: int) -> None:
        super().__init__("environment server", index, attempt)
        self.url = ""
        self.instances = 0

    @property
    def name(self) -> str:
        return super().name + (f" on node {self.node}" if self.node else "")


class EnvServers(Role[ServerMember]):
    """The environment servers of a run. `async with EnvServers(...) as servers:` returns when all of them are live.

    `address` is where the nodes reach this process. `on_change(value)` is called with what `ServerDirectory.take` reads, each
    time that a server is live or was lost. Raises ConfigError if a kind cannot be used on a node, or no node has room.
    """

    kind, noun = "environment server", "environment server"
    target = "agentfly.training.cluster.env_server_process:serve"
    consequence = "its environments are replaced on the other servers"
    packages = ("agentfly",)
    blocked = "a call of an environment with placement 'loop' blocks it"

    def __init__(
        self,
        launcher: Launcher,
        kinds: Sequence[Spec],
        count: int,
        address: str,
        *,
        health_s: float = 6.0,
        stuck_s: float = 120.0,
        note: Callable[[str], None] = lambda _: None,
        on_change: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.fleet: Fleet[ServerMember] = Fleet(
            launcher, self, count, health_s=health_s, start_s=READY_S, address=address, note=note
        )
        self.stuck_s, self._on_change = stuck_s, on_change
        self.directory = ServerDirectory(secrets.token_hex(32))
        self._kinds = [kind_value(kind) for kind in kinds]
        self._names = ", ".join(kind.name for kind in kinds)
        self._losses: dict[str, str] = {}

    def value(self) -> dict[str, Any]:
        """The directory, for a process that runs chains."""
        return self.directory.to_value(self._losses)

    async def __aenter__(self) -> EnvServers:
        await self.fleet.__aenter__()
        nodes = {member.node for member in self.fleet.live}
        self.fleet.note(f"environments ({self._names}): {self.fleet.count} servers on {len(nodes)} nodes")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.close()

    # ---- fleet.Role

    def member(self, index: int, attempt: int) -> ServerMember:
        return ServerMember(index, attempt)

    async def prepare(self, member: ServerMember) -> None:
        """Have every kind tried out there, and connect once to the address where it lends."""
        try:
            member.url = await member.call("open", {"kinds": self._kinds, "token": self.directory.token})
        except MemberLost:
            raise
        except ConfigError as error:
            raise ConfigError(f"node {member.node}: {error}") from None
        except Exception as error:  # noqa: BLE001 - whatever an environment raises
            raise EngineError(f"node {member.node}: {type(error).__name__}: {error}") from None
        parts = urlsplit(member.url)
        try:
            async with asyncio.timeout(REACH_S):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.transport.abort()
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer in {REACH_S:g} s"
            raise ConfigError(
                f"{member.name} listens at {member.url}, and this machine cannot connect to it ({why}): open the firewall "
                "between the machines of the cluster"
            ) from None

    def hear(self, member: ServerMember, message: LinkMessage) -> None:
        member.instances = int(message.value["instances"])

    def lost(self, member: ServerMember, why: str) -> None:
        self._losses[member.name] = why

    def changed(self) -> None:
        """Bring the directory of every process up to date."""
        live = [ServerAddress(member.name, member.url, member.attempt) for member in self.fleet.live]
        failure = self.fleet.failure
        if live == list(self.directory.counts) and failure is None:
            return
        self.directory.update(live, self._losses)
        if failure is not None and not live:
            self.directory.fail(ConfigError(f"{failure}. `agentfly cluster status` shows the nodes"))
        self._on_change(self.value())


@asynccontextmanager
async def open_env_servers(
    config: Config,
    agent: RunnableAgent,
    note: Callable[[str], None],
    on_change: Callable[[dict[str, Any]], None] = lambda _: None,
) -> AsyncIterator[EnvServers | None]:
    """The environment servers that a config asks for; None if it asks for none. Raises ConfigError if they had no effect."""
    cluster = config.cluster
    if not cluster.env_hosts:
        yield None
        return
    kinds = [kind for kind in environment_kinds(agent, 1) if kind.placement != "http"]
    if not kinds:
        raise ConfigError("cluster.env_hosts has no effect: the agent uses no environment that this run creates; remove it")
    passed = {name: os.environ[name] for kind in kinds for name in kind.pass_env if name in os.environ}
    stuck_s = max(10 * cluster.health_s, *(kind.call_timeout_s for kind in kinds))
    used = on_cluster(config, note)
    connected = await asyncio.to_thread(used.__enter__)
    try:
        share = Share(cluster.env_cpus, cluster.env_memory_gib)
        launcher = NodeLauncher(connected, share, environ=passed, packages=EnvServers.packages)
        own = await asyncio.to_thread(lambda: connected.own)
        async with EnvServers(
            launcher, kinds, cluster.env_hosts, own.address,
            health_s=cluster.health_s, stuck_s=stuck_s, note=note, on_change=on_change,
        ) as servers:  # fmt: skip
            yield servers
    finally:
        await asyncio.to_thread(used.__exit__, None, None, None)


@asynccontextmanager
async def open_served_environments(
    config: Config, agent: RunnableAgent, plan: Plan, note: Callable[[str], None]
) -> AsyncIterator[Plan]:
    """`open_environments` for the chains of this process, with the servers that the config asks for."""
    async with open_env_servers(config, agent, note) as servers:
        directory = None if servers is None else servers.directory
        async with open_environments(agent, plan, config.rollout.max_concurrency, directory=directory) as ready:
            yield ready
