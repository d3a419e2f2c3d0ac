"""Keeps the processes of one kind alive: starts them, checks who connects, notices a loss, starts them again.

A process counts as lost if it ended, if its connection closed, if it is silent for `health_s` (ten times that until it is live:
imports and the loading of a model may hold the interpreter for seconds), or if its main thread does not report for `stuck_s`.
If no process has been live for ten times `health_s` and the time that the first start took, the fleet fails.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..errors import AgentFlyError, ConfigError, EngineError, InvariantError
from ..net.guard import same_token
from .bare import PACKAGES
from .launcher import Launched, Launcher
from .link import HELLO_LIMITS, Link, LinkMessage, beat_s
from .member import Member, check_software

HELLO_S = 300.0
"""Seconds that a process may take until it connects."""
START_ATTEMPTS = 3
"""How often a process is started before all have been live once. Later it is started again and again."""
FOLDER = "agentfly-fleet-"
"""How the name of the folder with the fleet's socket begins, in the folder for temporary files."""
CLOSE_S = 15.0
MAX_STRANGERS = 256
"""Connections that may be open without having said whose they are; a further one ends the oldest."""
QUICK_S, LONGEST_PAUSE_S = 30.0, 30.0
"""A process that ends sooner is started again after a pause that doubles each time, up to the second number."""

M = TypeVar("M", bound=Member)


class Role(Generic[M]):
    """What the processes of a fleet are for. The attributes have no defaults but the last three."""

    kind: str
    """In the names of its processes, such as "sampler"."""
    noun: str
    """One of its processes in a sentence, such as "sampler process"."""
    target: str
    """The function that runs in a process, "module:function". It is called with the ticket."""
    consequence: str
    """What happens to the work of a process that is lost, as the part of a sentence."""
    stuck_s: float
    """A process whose main thread sends no "status" for so long is lost, although it beats."""
    restarts = True
    """Whether a process that is lost is started again. If not, the first failure of a start is that of the fleet."""
    packages: tuple[str, ...] = PACKAGES
    """Whose versions must be those of this process."""
    blocked = "its main thread is blocked"

    def member(self, index: int, attempt: int) -> M:
        """A process that is about to be started."""
        raise NotImplementedError

    async def prepare(self, member: M) -> None:
        """The process has said hello: make it ready for work. Raises what makes that impossible."""
        raise NotImplementedError

    def hear(self, member: M, message: LinkMessage) -> None:
        """A message that is no reply."""

    def lost(self, member: M, why: str) -> None:
        """The process is lost, or was stopped. Its calls have failed."""

    def changed(self) -> None:
        """A process is live or lost, or the fleet has failed (`Fleet.failure`)."""


class Fleet(Generic[M]):
    """`async with Fleet(...)` returns once all processes have been live. Raises what makes that impossible."""

    def __init__(
        self,
        launcher: Launcher,
        role: Role[M],
        count: int,
        *,
        health_s: float = 6.0,
        start_s: float = 1800.0,
        address: str | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`address`: where other machines reach this one; None if all processes run here. `start_s`: limit of `prepare`."""
        self.launcher, self.role, self.count = launcher, role, count
        self.health_s, self.start_s, self.note = health_s, start_s, note
        self.members: list[M] = []
        self.started = False
        """Whether all processes have been live once."""
        self.start_took_s = 0.0
        self.restarts = 0
        self.dropped_replies = 0
        """Replies that came a second time or too late."""
        self.failure: AgentFlyError | None = None
        self.address: Any = None
        """The path of a socket, or [host, port]."""
        self._reachable_at = address
        self._token = secrets.token_hex(32)
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._starting: set[asyncio.Future[Launched]] = set()
        self._server: asyncio.Server | None = None
        self._folder: Path | None = None
        self._lock = -1  # of the folder
        self._strangers: list[Link] = []  # connections that have not said whose they are
        self._closing = False
        self._ends: dict[int, str] = {}  # how the last process of each index ended
        self._none_live_s = 0.0

    @property
    def live(self) -> list[M]:
        return [member for member in self.members if member.live]

    async def __aenter__(self) -> Fleet[M]:
        began = time.monotonic()
        await self._listen()
        try:
            self.members = [self.role.member(index, 0) for index in range(self.count)]
            watch = asyncio.create_task(self._watch())
            watch.add_done_callback(self._watch_ended)
            self._tasks = [watch]
            self._tasks += [asyncio.create_task(self._keep(index)) for index in range(self.count)]
            while len(self.live) < self.count:
                await self.news()
        except BaseException:
            await self.close()
            raise
        self.started, self.start_took_s = True, time.monotonic() - began
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the processes, in order where they answer, and free what the fleet holds."""
        self._closing = True
        linked = [member for member in self.members if member.alive and member.link is not None]
        for member in linked:
            member.send("stop")
        if linked:
            await asyncio.wait([member.ended for member in linked], timeout=CLOSE_S)
        for member in self.members:
            self.end(member, "was stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        started = (await asyncio.wait(self._starting, timeout=CLOSE_S))[0] if self._starting else set()
        late = [each.result() for each in started if each.exception() is None]
        processes = [process for process in (*(member.process for member in self.members), *late) if process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.kill) for process in processes))
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None
        if self.launcher.takes_long:
            await asyncio.to_thread(self.launcher.close)
        else:
            self.launcher.close()

    async def news(self) -> None:
        """Wait until a process is live or lost. Raises the error that the fleet has failed with."""
        if self.failure is None:
            await self._news.wait()
        if self.failure is not None:
            raise self.failure

    def changed(self) -> None:
        """Something has changed that others wait for."""
        self._news.set()
        self._news = asyncio.Event()
        self.role.changed()

    def fail(self, error: AgentFlyError) -> None:
        """The run cannot go on: every wait for a process raises this error."""
        self.failure = self.failure or error
        self.changed()

    # ---- one process after the other

    async def _keep(self, index: int) -> None:
        """Keep one process alive. Ends if the run cannot go on."""
        loop = asyncio.get_running_loop()
        for attempt in itertools.count():
            member = self.members[index] = self.role.member(index, attempt) if attempt else self.members[index]
            began = loop.time()
            try:
                await self._start(member)
            except AgentFlyError as error:
                why = str(error).removeprefix(f"{member.name} ")
                self.end(member, why)
                if isinstance(error, InvariantError) or (isinstance(error, ConfigError) and not self.started):
                    self.fail(error)
                    return
                if not self.started and attempt + 1 >= (START_ATTEMPTS if self.role.restarts else 1):
                    self.fail(EngineError(f"{member.name} did not start: it {why}"))
                    return
            except Exception as error:  # noqa: BLE001 - a bug must stop the run and not only this task
                self.fail(EngineError(f"{member.name} could not be started: {type(error).__name__}: {error}"))
                return
            why = await member.ended
            if self._closing or not self.role.restarts:
                return
            self.restarts += 1
            consequence = f"{self.role.consequence}, and " if self.started else ""
            self.note(f"{member.name} {why}; {consequence}it is started again")
            quick = loop.time() - began < QUICK_S
            await asyncio.sleep(min(LONGEST_PAUSE_S, 0.2 * 2 ** min(attempt, 10)) if quick else 0.2)

    async def _start(self, member: M) -> None:
        """Start the process and make it ready for work. Raises what makes that impossible."""
        ticket = {
            "name": member.name, "index": member.index, "attempt": member.attempt, "address": self.address,
            "token": self._token, "health_s": self.health_s, "program": self.role.target, "path": sys.path,
            "here": "127.0.0.1",
        }  # fmt: skip
        if self.launcher.takes_long:
            starting = asyncio.ensure_future(asyncio.to_thread(self.launcher.start, member.index, ticket))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)
            member.process = await asyncio.shield(starting)  # if this task is cancelled, `close` waits for the thread
            if not member.alive:
                member.process.kill()
        else:
            member.process = self.launcher.start(member.index, ticket)
        await self._within(HELLO_S, member.connected, "did not connect within")
        where = f"{member.name} on {str(member.about.get('machine')).split()[0]}"
        check_software(member.about.get("software") or {}, where, self.role.packages)
        await self._within(self.start_s, self.role.prepare(member), "was not ready after")
        if not member.alive:
            raise EngineError(member.ended.result())
        member.live = True
        member.unreported_s = self._none_live_s = 0.0
        self.changed()

    async def _within(self, limit_s: float, work: Any, why: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await work
        except TimeoutError:
            raise EngineError(f"{why} {limit_s:g} s") from None

    def end(self, member: M, why: str) -> None:
        """The process is lost, or is ended now. Its calls fail."""
        if not member.alive:
            return
        member.lose(why)
        self._ends[member.index] = why
        self.role.lost(member, why)
        if member.process is not None:
            asyncio.get_running_loop().run_in_executor(None, member.process.kill)
        self.changed()

    async def _watch(self) -> None:
        """Send beats, and end the processes that are silent. A pause of this process itself is not counted as silence."""
        loop = asyncio.get_running_loop()
        pause = min(0.25, self.health_s / 12)
        last = beat_at = loop.time()
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            passed, last = min(now - last, 2 * pause), now
            beats = now >= beat_at
            if beats:
                beat_at = now + beat_s(self.health_s)
            for member in self.members:
                if member.alive:
                    self._look_at(member, passed, beats)
            if self.started and not self.live:
                self._none_live_s += passed
                if self._none_live_s > 10 * self.health_s + self.start_took_s:
                    self._fail_without_any()

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:  # nothing would be noticed any more
            self.fail(EngineError(f"the watch over the {self.role.kind} processes failed: {error!r}"))

    def _look_at(self, member: M, passed: float, beats: bool) -> None:
        link = member.link
        if member.process is not None and (how := member.process.ended()) is not None:
            if link is None or member.seen_ended:
                self.end(member, f"ended {how}")
                return
            member.seen_ended = True  # what it sent last is read before the next look
        if link is None:
            return
        if beats:
            link.send("beat")
        link.silent_s += passed
        member.unreported_s += passed
        if link.silent_s > (self.health_s if member.live else 10 * self.health_s):
            self.end(member, f"was silent for {link.silent_s:.1f} s")
        elif member.live and member.unreported_s > self.role.stuck_s:
            self.end(member, f"did not report for {member.unreported_s:.0f} s: {self.role.blocked}")

    def _fail_without_any(self) -> None:
        why = "; ".join(sorted(set(self._ends.values())))
        self.fail(EngineError(f"no {self.role.noun} has lived for {self._none_live_s:.0f} s ({why}): the run stops"))
        self._none_live_s = 0.0

    # ---- connections

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()

        def link() -> Link:
            made = Link(self._hear, self._disconnected, HELLO_LIMITS)
            self._strangers.append(made)
            if len(self._strangers) > MAX_STRANGERS:  # a flood: the oldest connection has had its time
                self._strangers.pop(0).close()
            loop.call_later(30, self._check_hello, made)
            return made

        if self._reachable_at is None:
            from ..resources.backends.spawn import make_locked_folder  # needs fcntl, and the processes need it, too

            self._folder, self._lock = make_locked_folder(FOLDER)  # only this user can enter it
            self.address = str(self._folder / "socket")
            self._server = await loop.create_unix_server(link, self.address)
        else:
            try:
                self._server = await loop.create_server(link, self._reachable_at, 0)
            except OSError as error:
                raise ConfigError(
                    f"nothing can listen on {self._reachable_at}, the address of this node in the cluster: {error}"
                ) from None
            self.address = [self._reachable_at, self._server.sockets[0].getsockname()[1]]

    def _check_hello(self, link: Link) -> None:
        if link in self._strangers:
            self._strangers.remove(link)
            link.close()  # it said nothing, or nothing true

    def _hear(self, link: Link, message: LinkMessage) -> None:
        member = next((each for each in self.members if each.link is link), None)
        if member is None:
            self._hear_hello(link, message)
        elif message.kind == "error" and message.id == 0:
            self.note(f"{member.name}: {message.value[1]}")
        elif message.kind in ("reply", "error"):
            self.dropped_replies += not member.answer(message)
        else:
            if message.kind == "status":
                member.unreported_s = 0.0
            self.role.hear(member, message)

    def _hear_hello(self, link: Link, message: LinkMessage) -> None:
        value = message.value if isinstance(message.value, dict) else {}
        token = value.get("token")
        if message.kind != "hello" or not isinstance(token, str) or not same_token(token, self._token):
            link.close()
            return
        for member in self.members if link in self._strangers else ():
            if (member.index, member.attempt) == (value.get("index"), value.get("attempt")) and not member.connected.done():
                self._strangers.remove(link)
                link.accept()
                member.link, member.about = link, value
                member.connected.set_result(None)
                return
        link.close()  # a process that was given up before it connected

    def _disconnected(self, link: Link) -> None:
        if link in self._strangers:
            self._strangers.remove(link)
        for member in self.members:
            if member.link is link and member.alive:
                member.live = False
                self._tasks.append(asyncio.get_running_loop().create_task(self._find_end(member)))

    async def _find_end(self, member: M) -> None:
        """The connection is closed, so the process is about to end: say how it did."""
        how, until = None, time.monotonic() + 1.0
        while member.process is not None and (how := member.process.ended()) is None:
            if time.monotonic() > until:
                break
            await asyncio.sleep(0.01)
        self.end(member, f"ended {how}" if how else "closed its connection")
