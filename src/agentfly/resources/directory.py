"""The environment servers that a process may use: `ServerDirectory`, which pools consult for each new instance.

The driver of a run starts the servers, notices when one is lost, and starts another (`training.cluster.env_servers`). Each
process that runs chains has a directory, which the driver keeps up to date. The directory of placement `http` never changes.

    driver --update(servers, lost)--> ServerDirectory --choose--> a new instance on the server with the fewest
                                           `--end(why)----------> the connections to a server that is lost
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ConfigError

AGAIN_S = 1.0
"""A server that could not be reached is tried again after so long, if the directory names no other."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One environment server. `attempt` tells a server that was started again from the one before."""

    name: str
    url: str
    attempt: int = 0


class Ends(Protocol):
    """A connection to a server."""

    def end(self, why: str) -> None:
        """Close it, and fail what waits for it with this reason."""


class ServerDirectory:
    """The live servers, and how many instances this process has on each. Belongs to the event loop that uses it."""

    def __init__(self, token: str = "", servers: Iterable[ServerAddress] = ()) -> None:
        self.token = token
        self.counts: dict[ServerAddress, int] = {}
        self._surplus: dict[ServerAddress, int] = {}
        self._connections: dict[ServerAddress, set[Ends]] = {}
        self.serial = 0
        """Rises with each change at the driver."""
        self._failure: str | None = None
        self._news = asyncio.Event()
        self.update(servers)

    # ---- for the driver

    def update(self, servers: Iterable[ServerAddress], lost: Mapping[str, str] | None = None) -> None:
        """These servers are alive. Connections to all others end; `lost` says why, by the name of a server."""
        before, self.counts = self.counts, {}
        earlier = set(before)
        for server in servers:
            self.counts[server] = before.pop(server, 0)
        if self.counts:
            self._failure = None
            self._share_out(joined=any(server not in earlier for server in self.counts))
        for server in before:
            why = (lost or {}).get(server.name, "was stopped")
            for connection in list(self._connections.get(server, ())):
                connection.end(f"{server.name} {why}")
        self._tell()

    def _share_out(self, joined: bool) -> None:
        """If a server has joined, the others give up what they have beyond their share, unless it is little."""
        share = -(-sum(self.counts.values()) // len(self.counts))
        above = {server: count - share for server, count in self.counts.items() if joined}
        self._surplus = {server: more for server, more in above.items() if more > max(1, share // 10)}

    def fail(self, error: ConfigError) -> None:
        """Pools that wait for a server raise this error, which ends the run. A server that joins later clears it."""
        self._failure = str(error)
        self._tell()

    def _tell(self) -> None:
        self.serial += 1
        self._news.set()
        self._news = asyncio.Event()

    def to_value(self, lost: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What `take` reads in another process."""
        servers = [[server.name, server.url, server.attempt] for server in self.counts]
        return {
            "serial": self.serial, "token": self.token, "servers": servers, "lost": dict(lost or {}), "failure": self._failure,
        }  # fmt: skip

    def take(self, value: Mapping[str, Any]) -> None:
        """Take over the directory of the driver, unless a newer one was taken before."""
        if value["serial"] < self.serial:
            return
        self.token = value["token"]
        self.update([ServerAddress(*server) for server in value["servers"]], value["lost"])
        if value["failure"] is not None:
            self.fail(ConfigError(value["failure"]))
        self.serial = value["serial"]

    # ---- for the placement

    async def choose(self, avoid: Collection[ServerAddress] = ()) -> ServerAddress:
        """The live server with the fewest instances of this process, which has one more now. Waits until there is a server.

        Servers in `avoid` are tried again after a pause. The caller puts a deadline around it, and calls `leave` in the end.
        Raises ConfigError if the driver has given up.
        """
        while True:
            usable = [server for server in self.counts if server not in avoid]
            if usable:
                chosen = min(usable, key=self.counts.__getitem__)
                self.counts[chosen] += 1
                return chosen
            if self._failure is not None:
                raise ConfigError(self._failure)
            avoid = ()
            try:
                async with asyncio.timeout(AGAIN_S):
                    await self._news.wait()
            except TimeoutError:
                continue

    def leave(self, server: ServerAddress) -> None:
        """An instance on this server is closed, or was not started."""
        if server in self.counts:
            self.counts[server] -= 1

    def gives_up(self, server: ServerAddress) -> bool:
        """Whether an instance on this server is to be closed when no chain uses it, so that its successor goes to a new one."""
        more = self._surplus.get(server, 0)
        if more > 0:
            self._surplus[server] = more - 1
        return more > 0

    def connected(self, server: ServerAddress, connection: Ends) -> None:
        """`connection` ends when the server is lost."""
        self._connections.setdefault(server, set()).add(connection)

    def disconnected(self, server: ServerAddress, connection: Ends) -> None:
        """The connection has ended."""
        connections = self._connections.get(server, set())
        connections.discard(connection)
        if not connections:
            self._connections.pop(server, None)
