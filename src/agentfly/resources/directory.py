"""The environment hosts that a process may use: `ServerDirectory`, which pools consult for each new instance.

The driver of a run starts the hosts, notices when one is lost, and starts another (`training.cluster.env_hosts`). Each process
that runs chains has a directory, which the driver keeps up to date:

    driver --update(hosts, lost)--> ServerDirectory --choose--> placement `hosts`: a new instance on the host with the fewest
                                         `--end(why)--------> the connections to a host that is lost
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ConfigError

AGAIN_S = 1.0
"""A host that could not be reached is tried again after so long, if the directory names no other."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One environment host. `attempt` tells a host that was started again from the one before."""

    name: str
    url: str
    attempt: int = 0


class Ends(Protocol):
    """A connection to a host."""

    def end(self, why: str) -> None:
        """Close it, and fail what waits for it with this reason."""


class ServerDirectory:
    """The live hosts, and how many instances this process has on each. Belongs to the event loop that uses it."""

    def __init__(self, token: str = "", hosts: Iterable[ServerAddress] = ()) -> None:
        self.token = token
        self.counts: dict[ServerAddress, int] = {}
        self._surplus: dict[ServerAddress, int] = {}
        self._connections: dict[ServerAddress, set[Ends]] = {}
        self.serial = 0
        """Rises with each change at the driver."""
        self._failure: str | None = None
        self._news = asyncio.Event()
        self.update(hosts)

    # ---- for the driver

    def update(self, hosts: Iterable[ServerAddress], lost: Mapping[str, str] | None = None) -> None:
        """These hosts are alive. Connections to all others end; `lost` says why, by the name of a host."""
        before, self.counts = self.counts, {}
        known = set(before)
        for host in hosts:
            self.counts[host] = before.pop(host, 0)
        if self.counts:
            self._failure = None
            self._share_out(joined=any(host not in known for host in self.counts))
        for host in before:
            why = (lost or {}).get(host.name, "was stopped")
            for connection in list(self._connections.get(host, ())):
                connection.end(f"{host.name} {why}")
        self._tell()

    def _share_out(self, joined: bool) -> None:
        """If a host has joined, the others give up what they have beyond their share, unless it is little."""
        share = -(-sum(self.counts.values()) // len(self.counts))
        above = {host: count - share for host, count in self.counts.items() if joined}
        self._surplus = {host: more for host, more in above.items() if more > max(1, share // 10)}

    def fail(self, error: ConfigError) -> None:
        """Pools that wait for a host raise this error, which ends the run. A host that joins later clears it."""
        self._failure = str(error)
        self._tell()

    def _tell(self) -> None:
        self.serial += 1
        self._news.set()
        self._news = asyncio.Event()

    def to_value(self, lost: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What `take` reads in another process."""
        hosts = [[host.name, host.url, host.attempt] for host in self.counts]
        return {
            "serial": self.serial, "token": self.token, "hosts": hosts, "lost": dict(lost or {}), "failure": self._failure,
        }  # fmt: skip

    def take(self, value: Mapping[str, Any]) -> None:
        """Take over the directory of the driver, unless a newer one was taken before."""
        if value["serial"] < self.serial:
            return
        self.token = value["token"]
        self.update([ServerAddress(*host) for host in value["hosts"]], value["lost"])
        if value["failure"] is not None:
            self.fail(ConfigError(value["failure"]))
        self.serial = value["serial"]

    # ---- for the placement

    async def choose(self, avoid: Collection[ServerAddress] = ()) -> ServerAddress:
        """The live host with the fewest instances of this process, which has one more now. Waits until there is a host.

        Hosts in `avoid` are tried again after a pause. The caller puts a deadline around it, and calls `leave` in the end.
        Raises ConfigError if the driver has given up.
        """
        while True:
            usable = [host for host in self.counts if host not in avoid]
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

    def leave(self, host: ServerAddress) -> None:
        """An instance on this host is closed, or was not started."""
        if host in self.counts:
            self.counts[host] -= 1

    def gives_up(self, host: ServerAddress) -> bool:
        """Whether an instance on this host is to be closed when no chain uses it, so that its successor goes to a new host."""
        more = self._surplus.get(host, 0)
        if more > 0:
            self._surplus[host] = more - 1
        return more > 0

    def connected(self, host: ServerAddress, connection: Ends) -> None:
        """`connection` ends when the host is lost."""
        self._connections.setdefault(host, set()).add(connection)

    def disconnected(self, host: ServerAddress, connection: Ends) -> None:
        """The connection has ended."""
        known = self._connections.get(host, set())
        known.discard(connection)
        if not known:
            self._connections.pop(host, None)
