"""The environment hosts of a run: places them on the nodes of a cluster, notices when one is lost, and places it again.

    placing --process started--> starting --"ready"--> live --------------+
       ^                            |  "failed": a kind cannot be used     | its node or process is lost, its connection
       |                            v                                      | closed, silent for `health_s`, event loop blocked
       +------------------------- lost <-----------------------------------+

`directory` names the live hosts. It is given to the pools of this process, and in messages to those of the sampler processes
(`on_change`). The environments on a lost host end, their chains are failures of the world, and the pools start others on the
hosts that are left. Calls of environments do not pass through this process, nor through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol
from urllib.parse import urlsplit

from ...config import Config
from ...errors import AgentFlyError, ConfigError, EngineError
from ...fleet.launcher import RANK_VARIABLES, Launched
from ...fleet.link import HELLO_LIMITS, Link, Message, beat_s
from ...net.guard import same_token
from ...resources import Spec
from ...resources.hosts import HostAddress, HostDirectory
from ...resources.rpc.frames import error_of
from ...resources.rpc.host_server import kind_value
from ...resources.spec import READY_S
from ...rollout import Plan, open_environments
from ...rollout.setup import RunnableAgent, environment_kinds

HELLO_S = 120.0
"""Seconds that the process of a host may take until it connects."""
REACH_S = 10.0
STOP_S = 10.0


class Host(Protocol):
    """A share of a node, and the processes in it: see `ext.ray_cluster.Host`."""

    node: Any
    about: dict[str, Any]

    def on_lost(self, call: Callable[[str], None]) -> None: ...
    def run(
        self, words: Sequence[str], *, environ: Mapping[str, str | None] | None = None, stdin: bytes = b"", log: str = ""
    ) -> Launched: ...
    def close(self) -> None: ...


class Places(Protocol):
    """The part of `ext.ray_cluster.Cluster` that is used here. `place` blocks."""

    @property
    def own(self) -> Any: ...
    def place(self, name: str, share: Any, *, avoid: Collection[str] = (), timeout_s: float = 60.0) -> Host: ...


@dataclass(slots=True, eq=False)
class Member:
    """One environment host, from its placing to its loss."""

    index: int
    attempt: int
    hello: asyncio.Future[None]
    ready: asyncio.Future[str]
    ended: asyncio.Future[str]
    host: Host | None = None
    process: Launched | None = None
    link: Link | None = None
    address: HostAddress | None = None
    """While it is live."""
    lag_s: float = 0.0
    instances: int = 0

    @property
    def name(self) -> str:
        where = "" if self.host is None else f" on node {self.host.node.name}"
        return f"environment host {self.index}{where}"

    @property
    def live(self) -> bool:
        return self.address is not None


@dataclass(slots=True)
class Settings:
    """How many hosts, what each reserves (a `Share`), and when a silent or blocked one counts as lost."""

    count: int
    share: Any
    health_s: float = 6.0
    stuck_s: float = 120.0
    environ: Mapping[str, str] = field(default_factory=dict)


class EnvHosts:
    """The environment hosts of a run. `async with EnvHosts(...) as hosts:` returns when all of them are live.

    `on_change(value)` is called with what `HostDirectory.take` reads, each time that a host has joined or was lost. Raises
    ConfigError if a kind cannot be used on a node, or no node has room.
    """

    def __init__(
        self,
        cluster: Places,
        kinds: Sequence[Spec],
        settings: Settings,
        *,
        note: Callable[[str], None] = lambda _: None,
        on_change: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self.cluster, self.settings = cluster, settings
        self.on_change = on_change
        self.members: list[Member] = []
        self.replaced = 0
        self._kinds = [kind_value(kind) for kind in kinds]
        self._names = ", ".join(kind.name for kind in kinds)
        self._note = note
        self._token = secrets.token_hex(32)  # of the processes that run chains
        self._own_token = secrets.token_hex(32)  # of the hosts
        self.directory = HostDirectory(self._token)
        self._keepers: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._address: tuple[str, int] = ("", 0)
        self._placing = asyncio.Lock()
        self._news = asyncio.Event()
        self._failure: AgentFlyError | None = None
        self._closing = self._started = False
        self._start_took_s = self._none_s = 0.0
        self._lost: dict[str, str] = {}

    @property
    def live(self) -> list[Member]:
        return [member for member in self.members if member.live]

    def value(self) -> dict[str, Any]:
        """The directory, for a process that runs chains."""
        return self.directory.to_value(self._lost)

    def figures(self) -> list[dict[str, Any]]:
        """The hosts, for `agentfly cluster status`."""
        return [
            {"name": member.name, "live": member.live, "attempt": member.attempt, "instances": member.instances}
            for member in self.members
        ]

    # ---- opening and closing

    async def __aenter__(self) -> EnvHosts:
        loop = asyncio.get_running_loop()
        began = loop.time()
        own = await asyncio.to_thread(lambda: self.cluster.own)
        self._server = await loop.create_server(self._make_link, own.address, 0)
        self._address = own.address, self._server.sockets[0].getsockname()[1]
        self.members = [self._member(index, 0) for index in range(self.settings.count)]
        self._keepers = [asyncio.create_task(self._watch())]
        self._keepers += [asyncio.create_task(self._keep(index)) for index in range(self.settings.count)]
        try:
            while len(self.live) < self.settings.count:
                await self._hear_news()
        except BaseException:
            await self.close()
            raise
        self._started, self._start_took_s = True, loop.time() - began
        nodes = {member.host.node.name for member in self.live if member.host is not None}
        self._note(f"environments ({self._names}): {self.settings.count} hosts on {len(nodes)} nodes")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the hosts, in order where they answer, and give back what they reserved."""
        self._closing = True
        living = [member for member in self.members if not member.ended.done()]
        for member in living:
            if member.link is not None:
                member.link.send("stop")
        linked = [member.ended for member in living if member.link is not None]
        if linked:
            await asyncio.wait(linked, timeout=STOP_S)
        for member in living:
            self._end(member, "was stopped")
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(member.host.close) for member in self.members if member.host is not None))
        if self._server is not None:
            self._server.close()
        self.directory.update([])

    def _member(self, index: int, attempt: int) -> Member:
        loop = asyncio.get_running_loop()
        return Member(index, attempt, loop.create_future(), loop.create_future(), loop.create_future())

    # ---- living and dying

    async def _keep(self, index: int) -> None:
        """Keep one host alive. Ends if the run cannot go on."""
        loop = asyncio.get_running_loop()
        lacking: set[str] = set()  # nodes on which a kind cannot be used
        avoid: set[str] = set()
        for attempt in itertools.count():
            member = self.members[index] = self._member(index, attempt) if attempt else self.members[index]
            began = loop.time()
            try:
                await self._start(member, avoid)
            except AgentFlyError as error:
                self._end(member, f"did not start: {error}")
                if not self._started:
                    self._fail(error)
                    return
                if isinstance(error, ConfigError) and member.host is not None:
                    lacking.add(member.host.node.id)
            except Exception as error:  # noqa: BLE001 - a bug must stop the run and not only this task
                self._end(member, f"did not start: {error!r}")
                self._fail(EngineError(f"{member.name} could not be started: {type(error).__name__}: {error}"))
                return
            why = await member.ended
            if self._closing:
                return
            self.replaced += 1
            self._note(f"{member.name} {why}; its environments are replaced on the other hosts, and it is placed again")
            host = member.host
            avoid = set(lacking)
            if host is not None:
                avoid.add(host.node.id)
                await asyncio.to_thread(host.close)
            quick = loop.time() - began < 30
            await asyncio.sleep(min(30.0, 0.2 * 2 ** min(attempt, 10)) if quick else 0.2)

    async def _start(self, member: Member, avoid: Collection[str]) -> None:
        """Place the host, start its process and wait until it lends. Raises what makes that impossible."""
        settings = self.settings
        name = f"env host {member.index}"  # `status` counts hosts by these names
        async with self._placing:  # one after the other, so that each counts for where the next one goes
            host = member.host = await asyncio.to_thread(self.cluster.place, name, settings.share, avoid=avoid)
        loop = asyncio.get_running_loop()

        def lost(why: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                loop.call_soon_threadsafe(self._end, member, f"is lost: {why}")

        host.on_lost(lost)
        about = host.about
        if about.get("agentfly") is None:
            raise ConfigError(f"node {host.node.name} has no AgentFly: pip install 'agentfly[ray]' there")
        theirs, ours = about.get("software", {}).get("agentfly"), _own_version()
        if theirs is not None and theirs != ours:
            raise ConfigError(
                f"node {host.node.name} has AgentFly {theirs}, and this machine has {ours}: install the same on all"
            )
        ticket = {
            "path": about["path"],
            "bind": about["address"],
            "token": self._token,
            "kinds": self._kinds,
            "driver": [*self._address, self._own_token],
            "index": member.index,
            "attempt": member.attempt,
            "health_s": settings.health_s,
        }
        script = os.path.join(about["agentfly"], "resources", "host_main.py")
        words = [about["python"], "-I", "-X", "utf8", script, "{life}", "{parent}"]
        environ: dict[str, str | None] = {**dict.fromkeys(RANK_VARIABLES), **settings.environ}
        member.process = await asyncio.to_thread(
            host.run, words, environ=environ, stdin=json.dumps(ticket).encode(), log=f"environments-{member.index}.log"
        )
        await self._within(member, member.hello, HELLO_S)
        url = await self._within(member, member.ready, READY_S)
        await self._check_reachable(member, url)
        if member.ended.done():
            raise EngineError(f"{member.name} {member.ended.result()}")
        member.address = HostAddress(member.name, url, member.attempt)
        self._none_s = 0.0
        self._tell()

    async def _within(self, member: Member, future: asyncio.Future[Any], timeout_s: float) -> Any:
        """The value of a future of a host that starts. Raises EngineError if the host ends before, or the time is over."""
        futures: list[asyncio.Future[Any]] = [future, member.ended]
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        if member.ended.done():
            raise EngineError(f"{member.name} {member.ended.result()}")
        raise EngineError(f"{member.name} was not ready after {timeout_s:g} s")

    async def _check_reachable(self, member: Member, url: str) -> None:
        """Raises ConfigError if this machine cannot connect to a host, which was able to connect to this machine."""
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(REACH_S):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.transport.abort()
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer in {REACH_S:g} s"
            raise ConfigError(
                f"{member.name} listens at {url}, and this machine cannot connect to it ({why}): open the firewall between the "
                f"machines of the cluster"
            ) from None

    def _end(self, member: Member, why: str) -> None:
        """The host is lost, or is ended now: its environments are dead for all processes."""
        if member.ended.done():
            return
        member.ended.set_result(why)
        if member.link is not None:
            member.link.close()
        if member.address is not None:
            member.address = None
            self._lost[member.name] = why
            self._tell()
        if member.process is not None and not self._closing:
            asyncio.get_running_loop().run_in_executor(None, member.process.kill)
        self._changed()

    def _tell(self) -> None:
        """Bring the directory of every process up to date."""
        self.directory.update([member.address for member in self.members if member.address is not None], self._lost)
        self.on_change(self.value())
        self._changed()

    def _fail(self, error: AgentFlyError) -> None:
        """The run cannot go on: opening the hosts raises this error and, later, every wait for a host."""
        self._failure = self._failure or error
        if self._started:
            self.directory.fail(ConfigError(str(error)))
            self.on_change(self.value())
        self._changed()

    def _changed(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _hear_news(self) -> None:
        if self._failure is None:
            await self._news.wait()
        if self._failure is not None:
            raise self._failure

    async def _watch(self) -> None:
        """Send beats, and end the hosts that are silent or blocked. A pause of this process is not counted as silence."""
        loop, health_s = asyncio.get_running_loop(), self.settings.health_s
        pause = min(0.25, health_s / 12)
        last = beat_at = loop.time()
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            passed, last = min(now - last, 2 * pause), now
            beats = now >= beat_at
            if beats:
                beat_at = now + beat_s(health_s)
            for member in self.members:
                self._look_at(member, passed, beats)
            if self._started and not self.live:
                self._none_s += passed
                if self._none_s > 10 * health_s + self._start_took_s:
                    told = "; ".join(sorted(set(self._lost.values())))
                    sentence = f"no environment host has lived for {self._none_s:.0f} s ({told}): the run cannot go on"
                    self.directory.fail(ConfigError(f"{sentence}. `agentfly cluster status` shows the nodes"))
                    self.on_change(self.value())
                    self._none_s = 0.0

    def _look_at(self, member: Member, passed: float, beats: bool) -> None:
        if member.ended.done():
            return
        link, settings = member.link, self.settings
        if member.process is not None and (how := member.process.ended()) is not None:
            self._end(member, f"ended {how}")
            return
        if link is None:
            return
        if beats:
            link.send("beat")
        link.silent_s += passed
        if link.silent_s > (settings.health_s if member.live else 10 * settings.health_s):
            self._end(member, f"was silent for {link.silent_s:.1f} s")
        elif member.live and member.lag_s > settings.stuck_s:
            self._end(member, f"was blocked for {member.lag_s:.0f} s by a call of an environment with placement 'loop'")

    # ---- connections of the hosts

    def _make_link(self) -> Link:
        link = Link(self._hear, self._lose, HELLO_LIMITS)
        asyncio.get_running_loop().call_later(30, self._check_hello, link)
        return link

    def _check_hello(self, link: Link) -> None:
        if all(member.link is not link for member in self.members):
            link.close()  # it said nothing, or nothing true

    def _hear(self, link: Link, message: Message) -> None:
        member = next((each for each in self.members if each.link is link), None)
        value = message.value
        if member is None:
            self._hello(link, message)
        elif message.kind == "status":
            member.lag_s, member.instances = float(value["lag_s"]), int(value["instances"])
        elif message.kind == "ready" and not member.ready.done():
            member.ready.set_result(value["url"])
        elif message.kind == "failed" and not member.ready.done():
            error = error_of(value)
            node = "" if member.host is None else f"node {member.host.node.name}: "
            kind = type(error) if isinstance(error, ConfigError) else EngineError
            member.ready.set_exception(kind(f"{node}{value[1]}"))
            member.ready.exception()  # marks it as retrieved: the host may have been given up

    def _hello(self, link: Link, message: Message) -> None:
        value = message.value if isinstance(message.value, dict) else {}
        token = value.get("token")
        if message.kind != "hello" or not isinstance(token, str) or not same_token(token, self._own_token):
            link.close()
            return
        for member in self.members:
            if (member.index, member.attempt) == (value.get("index"), value.get("attempt")) and not member.hello.done():
                link.accept()
                member.link = link
                member.hello.set_result(None)
                return
        link.close()  # a host that was given up before it connected

    def _lose(self, link: Link) -> None:
        for member in self.members:
            if member.link is link and not member.ended.done():
                self._keepers.append(asyncio.get_running_loop().create_task(self._find_end(member)))

    async def _find_end(self, member: Member) -> None:
        """The connection is closed, so the process is about to end: say how it did."""
        for _ in range(25):
            if member.process is not None and (how := member.process.ended()) is not None:
                self._end(member, f"ended {how}")
                return
            await asyncio.sleep(0.02)
        self._end(member, "closed its connection")


def _own_version() -> str:
    try:
        return version("agentfly")
    except PackageNotFoundError:
        return "none"


@asynccontextmanager
async def open_env_hosts(
    config: Config,
    agent: RunnableAgent,
    note: Callable[[str], None],
    on_change: Callable[[dict[str, Any]], None] = lambda _: None,
) -> AsyncIterator[EnvHosts | None]:
    """The environment hosts that a config asks for; None if it asks for none. Raises ConfigError if they had no effect."""
    cluster = config.cluster
    if not cluster.env_hosts:
        yield None
        return
    kinds = [kind for kind in environment_kinds(agent, 1) if kind.placement != "http"]
    if not kinds:
        raise ConfigError("cluster.env_hosts has no effect: the agent uses no environment that this run creates; remove it")
    from ...ext.ray_cluster import Share
    from . import on_cluster

    passed = {name: os.environ[name] for kind in kinds for name in kind.pass_env if name in os.environ}
    settings = Settings(
        cluster.env_hosts,
        Share(cluster.env_cpus, cluster.env_memory_gib),
        health_s=cluster.health_s,
        stuck_s=max(10 * cluster.health_s, *(kind.call_timeout_s for kind in kinds)),
        environ=passed,
    )
    used = on_cluster(config, note)
    connected = await asyncio.to_thread(used.__enter__)
    try:
        async with EnvHosts(connected, kinds, settings, note=note, on_change=on_change) as hosts:
            yield hosts
    finally:
        await asyncio.to_thread(used.__exit__, None, None, None)


@asynccontextmanager
async def open_hosted_environments(
    config: Config, agent: RunnableAgent, plan: Plan, note: Callable[[str], None]
) -> AsyncIterator[Plan]:
    """`open_environments` for the chains of this process, with the hosts that the config asks for."""
    async with open_env_hosts(config, agent, note) as hosts:
        directory = None if hosts is None else hosts.directory
        async with open_environments(agent, plan, config.rollout.max_concurrency, hosts=directory) as ready:
            yield ready
