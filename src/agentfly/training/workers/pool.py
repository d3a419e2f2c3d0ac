"""The worker processes of a run: starts them, gives chains to them, notices when one dies, and starts it again.

    starting --hello, "open"--> opened --weights, proof--> joined --+
       ^                                                            | connection lost, silent for `health_s`, load failed
       +-------------------- started again <-------------------- dead

A new chain goes to the joined replica with the fewest live chains, and stays there. If its replica dies, the chain runs once
more, under the same name and seed; if that one dies, too, the chain is a failure of the world. A second or late result is
dropped and counted, so no chain comes back twice. If no replica is joined for ten times `health_s` and the time that a start
takes, the run stops.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from ... import codec
from ...errors import AgentFlyError, ConfigError, DataError, EngineError, InvariantError
from ...net.guard import same_token
from ...resources.rpc.frames import error_of
from ...rollout.activity import Activities, Activity
from ...rollout.chain import Opening, Plan
from ...runs.codec import decode
from ...types import Outcome, Sampling, Task, ToolCall, Trajectory
from .channel import HELLO_LIMITS, Link, Message, beat_s
from .launcher import Launched, Launcher
from .software import software

START_S = 1800.0
"""Seconds that a worker may take until it is open: a large model is loaded in this time."""
START_ATTEMPTS = 3
"""How often a worker is started before all have joined once. Later the others go on, and it is started again and again."""
FOLDER = "agentfly-samplers-"
"""How the name of the folder with the workers' socket begins, in the folder for temporary files."""
CLOSE_S = 15.0
MANY = 1 << 20


class WorkerDied(EngineError):
    """A worker ended before it replied."""


class RemoteActivity(Activity):
    """What a chain in a worker waits for, as its worker reported it."""

    __slots__ = ("remote_turn",)

    def __init__(self, trajectory: Trajectory, registry: Activities) -> None:
        super().__init__(trajectory, registry)
        self.remote_turn = 0
        registry[trajectory.id] = self
        self.enter("sampling", self.since)

    def update(self, phase: Any, age_s: float, turn: int, names: Sequence[str]) -> None:
        """Take over a report of the worker."""
        now = time.perf_counter()
        if phase != self.phase or tuple(names) != self.what:
            self.leave(now)
            self.enter(phase, now, tuple(ToolCall(name) for name in names))
        self.since, self.remote_turn = now - age_s, turn

    @property
    def turn(self) -> int:
        return self.remote_turn


class Replica:
    """One worker process, from its start to its end. Implements `weights.Peer`."""

    def __init__(self, index: int, attempt: int, loop: asyncio.AbstractEventLoop) -> None:
        self.index, self.attempt, self._loop = index, attempt, loop
        self.connected: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.proving: asyncio.Future[None] | None = None  # while new weights are loaded and not yet proven
        self.joined = False
        self.process: Launched | None = None
        self.link: Link | None = None
        self.about: dict[str, Any] = {}
        self.version = -1
        self.capacity: int | None = None
        self.stats: dict[str, float] = {}
        self.resources: dict[str, float] = {}
        self.chains: dict[str, RemoteActivity | None] = {}
        self.status_s = 0.0  # since the last report of its main thread
        self.calls: dict[int, asyncio.Future[Any]] = {}

    @property
    def name(self) -> str:
        return f"sampler {self.index}"

    @property
    def alive(self) -> bool:
        """Whether the worker has not been found dead."""
        return not self.ended.done()

    def send(self, kind: str, message_id: int = 0, value: Any = None) -> None:
        if self.link is not None:
            self.link.send(kind, message_id, value)

    async def call(self, kind: str, value: Any = None) -> Any:
        """Send a message and wait for the reply. Raises what the worker raised, or WorkerDied. If cancelled, so is the work."""
        if not self.alive:
            raise WorkerDied(f"{self.name} {self.ended.result()}")
        number = next(_numbers)
        reply = self.calls[number] = self._loop.create_future()
        try:
            self.send(kind, number, value)
            return await reply
        except asyncio.CancelledError:
            self.send("cancel", number)
            raise
        finally:
            self.calls.pop(number, None)

    def post(self, kind: str, value: Mapping[str, Any]) -> Future[Any]:
        """`call` from another thread."""
        return asyncio.run_coroutine_threadsafe(self.call(kind, value), self._loop)

    def fail(self, why: str) -> None:
        """The worker has ended: fail what waits for it."""
        self.joined = False
        self.ended.set_result(why)
        waiting = [*self.calls.values(), self.connected, *([self.proving] if self.proving is not None else [])]
        for future in waiting:
            if not future.done():
                future.set_exception(WorkerDied(f"{self.name} {why}"))
                future.exception()  # marks it as retrieved: the caller may have been cancelled


_numbers = itertools.count(1)


class WorkerPool:
    """The replicas of a run. Implements `rollout.ChainRunner`. `async with pool:` around its use.

    `opening` is the message "open" without the index. `bring_up(replicas)` gives the present weights to replicas that are open
    and proves them; None if the workers load all that they need. `note` receives sentences for the screen. `host` None: workers
    connect through a Unix socket; otherwise the address on which workers of other machines reach this one.
    """

    def __init__(
        self,
        launcher: Launcher,
        count: int,
        opening: Mapping[str, Any],
        *,
        health_s: float = 6.0,
        stuck_s: float = 720.0,
        bring_up: Callable[[Sequence[Replica]], Awaitable[None]] | None = None,
        note: Callable[[str], None] = lambda _: None,
        host: str | None = None,
    ) -> None:
        """`stuck_s`: a worker whose main thread does not report for so long counts as dead, even if it still beats."""
        self.launcher, self.count, self.health_s = launcher, count, health_s
        self.replicas: list[Replica] = []
        self.restarts = 0
        self.counts: Counter[str] = Counter()
        """Chains that were run again, and lost, because their worker died; results that came a second time or too late."""
        self.hosts: dict[str, Any] | None = None
        """Where the environments live, if not beside the chains: what `HostDirectory.take` reads."""
        self._opening, self._stuck_s, self._bring_up, self._note, self._host = opening, stuck_s, bring_up, note, host
        self._token = secrets.token_hex(32)
        self._failure: AgentFlyError | None = None
        self._news = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._starting: set[asyncio.Future[Launched]] = set()
        self._server: asyncio.Server | None = None
        self._folder: Path | None = None
        self._lock = -1  # of the folder
        self._address: Any = None
        self._closing = False
        self._started = False  # all replicas have joined once
        self._start_took_s = 0.0
        self._none_s = 0.0  # since the last replica died
        self._retired: Counter[str] = Counter()
        self._by_node: Counter[str] = Counter()  # chains that ended since `step_metrics`, if workers are on nodes of a cluster
        self._on_room: Callable[[], None] | None = None

    # ---- opening and closing

    async def __aenter__(self) -> WorkerPool:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._listen(loop)
        try:
            self._keepers = [asyncio.create_task(self._watch())]
            self._keepers += [asyncio.create_task(self._keep(index)) for index in range(self.count)]
            self.replicas = [Replica(index, 0, loop) for index in range(self.count)]
            while not all(replica.joined for replica in self.replicas):
                await self.news()
        except BaseException:
            await self.close()
            raise
        self._started, self._start_took_s = True, loop.time() - began
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the workers, in order where they answer, and free what the pool holds."""
        self._closing = True
        living = [replica for replica in self.replicas if replica.alive and replica.link is not None]
        for replica in living:
            replica.send("stop")
        if living:
            await asyncio.wait([replica.ended for replica in living], timeout=CLOSE_S)
        for replica in self.replicas:
            self.end(replica, "was stopped")
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        started = (await asyncio.wait(self._starting, timeout=CLOSE_S))[0] if self._starting else set()
        late = [each.result() for each in started if each.exception() is None]
        for process in [*(replica.process for replica in self.replicas), *late]:
            if process is not None:
                await asyncio.to_thread(process.kill)
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

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        def link() -> Link:
            made = Link(self._hear, self._lost, HELLO_LIMITS)
            loop.call_later(30, self._check_hello, made)
            return made

        if self._host is None:
            from ...resources.backends.spawn import make_locked_folder  # needs fcntl, and workers need it, too

            self._folder, self._lock = make_locked_folder(FOLDER)  # only this user can enter it
            self._address = str(self._folder / "socket")
            self._server = await loop.create_unix_server(link, self._address)
        else:
            self._server = await loop.create_server(link, self._host, 0)
            self._address = [self._host, self._server.sockets[0].getsockname()[1]]

    # ---- connections

    def _check_hello(self, link: Link) -> None:
        if all(replica.link is not link for replica in self.replicas):
            link.close()  # it said nothing, or nothing true

    def _hear(self, link: Link, message: Message) -> None:
        replica = next((each for each in self.replicas if each.link is link), None)
        if replica is None:
            self._hello(link, message)
        elif message.kind in ("reply", "error"):
            self._reply(replica, message)
        elif message.kind == "status":
            self._report(replica, message.value)

    def _hello(self, link: Link, message: Message) -> None:
        value = message.value if isinstance(message.value, dict) else {}
        token = value.get("token")
        known = message.kind == "hello" and isinstance(token, str) and same_token(token, self._token)
        if not known:
            link.close()
            return
        for replica in self.replicas:
            if (replica.index, replica.attempt) == (value.get("index"), value.get("attempt")) and not replica.connected.done():
                link.accept()
                replica.link, replica.about = link, value
                replica.connected.set_result(None)
                return
        link.close()  # a worker that was given up before it connected

    def _lost(self, link: Link) -> None:
        for replica in self.replicas:
            if replica.link is link and replica.alive:
                replica.joined = False
                self._keepers.append(asyncio.get_running_loop().create_task(self._find_end(replica)))

    async def _find_end(self, replica: Replica) -> None:
        """The connection is closed, so the process is about to end: say how it did."""
        how, until = None, time.monotonic() + 1.0
        while replica.process is not None and (how := replica.process.ended()) is None:
            if time.monotonic() > until:
                break
            await asyncio.sleep(0.01)
        self.end(replica, f"ended {how}" if how else "closed its connection")

    def _reply(self, replica: Replica, message: Message) -> None:
        if message.kind == "error" and message.id == 0:
            self._note(f"{replica.name}: {message.value[1]}")
            return
        future = replica.calls.get(message.id)
        if future is None or future.done():
            self.counts["dropped_replies"] += 1
        elif message.kind == "reply":
            future.set_result(message.value)
        else:
            error = error_of(message.value[:2])
            error.add_note(f"In {replica.name}: {message.value[2]}")
            future.set_exception(error)

    def _report(self, replica: Replica, value: Mapping[str, Any]) -> None:
        replica.status_s = 0.0
        replica.stats, replica.resources = value["stats"], value["resources"]
        if value["capacity"] != replica.capacity:
            replica.capacity = value["capacity"]
            self._changed()
        for name, told in value["chains"].items():
            if (activity := replica.chains.get(name)) is not None:
                activity.update(*told)

    # ---- living and dying

    async def _keep(self, index: int) -> None:
        """Keep one replica alive. Ends if the run cannot go on."""
        loop = asyncio.get_running_loop()
        for attempt in itertools.count():
            replica = self.replicas[index] = Replica(index, attempt, loop) if attempt else self.replicas[index]
            began = loop.time()
            try:
                await self._start(replica)
            except AgentFlyError as error:
                told = str(error).removeprefix(f"{replica.name} ")
                self.end(replica, told)
                if isinstance(error, (ConfigError, InvariantError)):
                    self._fail(error)
                    return
                if not self._started and attempt + 1 >= START_ATTEMPTS:
                    self._fail(EngineError(f"{replica.name} did not start: it {told}"))
                    return
            except Exception as error:  # noqa: BLE001 - a bug must stop the run and not only this task
                self._fail(EngineError(f"{replica.name} could not be started: {type(error).__name__}: {error}"))
                return
            why = await replica.ended
            if self._closing:
                return
            self.restarts += 1
            chains = "its chains run again in another process, and " if self._started else ""
            self._note(f"{replica.name} {why}; {chains}it is started again")
            quick = loop.time() - began < 30
            await asyncio.sleep(min(30.0, 0.2 * 2 ** min(attempt, 10)) if quick else 0.2)

    async def _start(self, replica: Replica) -> None:
        """Start the process, open it and bring it to the present weights. Raises what makes that impossible."""
        ticket = {
            "address": self._address, "token": self._token, "index": replica.index, "attempt": replica.attempt,
            "health_s": self.health_s, "path": sys.path,
        }  # fmt: skip
        if self.launcher.takes_long:
            starting = asyncio.ensure_future(asyncio.to_thread(self.launcher.start, replica.index, ticket))
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)
            replica.process = await asyncio.shield(starting)  # if this task is cancelled, `close` waits for the thread
            if not replica.alive:
                replica.process.kill()
        else:
            replica.process = self.launcher.start(replica.index, ticket)
        try:
            async with asyncio.timeout(START_S):
                await replica.connected
                self._check_software(replica)
                opened = await replica.call("open", {**self._opening, "index": replica.index, "hosts": self.hosts})
        except TimeoutError:
            raise EngineError(f"was not ready after {START_S:g} s") from None
        replica.about |= opened
        replica.capacity, replica.stats = opened["capacity"], opened["stats"]
        if self._bring_up is not None:
            await self._bring_up([replica])
        replica.joined = True
        self._none_s = 0.0
        self._changed()

    def _check_software(self, replica: Replica) -> None:
        """Raises ConfigError if the worker runs other versions than the trainer: tokens and weights would not agree."""
        theirs = replica.about.get("software") or {}
        for name, own in software().items():
            if theirs.get(name) != own:
                raise ConfigError(
                    f"{replica.name} on {str(replica.about.get('machine')).split()[0]} has {name} {theirs.get(name)}, but the "
                    f"trainer has {own}: install the same versions on every machine"
                )

    def end(self, replica: Replica, why: str) -> None:
        """The worker is dead, or is ended now. Fails its calls, so that its chains run elsewhere."""
        if not replica.alive:
            return
        if replica.link is not None:
            replica.link.close()
        self._retired.update({name: value for name, value in replica.stats.items() if _adds_up(name)})
        replica.stats = {}
        replica.fail(why)
        if replica.process is not None:
            asyncio.get_running_loop().run_in_executor(None, replica.process.kill)
        self._changed()

    async def _watch(self) -> None:
        """Send beats, and end the replicas that are silent. A pause of this process itself is not counted as silence."""
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
            for replica in self.replicas:
                self._look_at(replica, passed, beats)
            if self._started and not any(replica.joined for replica in self.replicas):
                self._none_s += passed
                if self._none_s > 10 * self.health_s + self._start_took_s:
                    ends = {replica.ended.result() for replica in self.replicas if not replica.alive}
                    told = f" ({'; '.join(sorted(ends))})" if ends else ""
                    self._fail(EngineError(f"no sampler process has lived for {self._none_s:.0f} s{told}: the run stops"))

    def _look_at(self, replica: Replica, passed: float, beats: bool) -> None:
        if not replica.alive:
            return
        link = replica.link
        if link is None:
            if replica.process is not None and (how := replica.process.ended()) is not None:
                self.end(replica, f"ended {how}")
            return
        if beats:
            link.send("beat")
        link.silent_s += passed
        replica.status_s += passed
        # Importing and loading a model may hold the interpreter for seconds, so a worker that starts has more time.
        limit = self.health_s if replica.joined else 10 * self.health_s
        if link.silent_s > limit:
            self.end(replica, f"was silent for {link.silent_s:.1f} s")
        elif replica.joined and replica.status_s > self._stuck_s:
            self.end(replica, f"did not report for {replica.status_s:.0f} s: its main thread is blocked")

    def _fail(self, error: AgentFlyError) -> None:
        """Stop the run: every running chain and every wait for a replica raises this error."""
        self._failure = self._failure or error
        self._changed()

    def _changed(self) -> None:
        self._news.set()
        if self._on_room is not None:
            self._on_room()

    async def news(self) -> None:
        """Wait until a replica has joined or died. Raises the error that stops the run."""
        if self._failure is None:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure

    def tell_hosts(self, hosts: dict[str, Any]) -> None:
        """The environment hosts have changed: tell every worker. A worker that is opened later gets the newest."""
        self.hosts = hosts
        for replica in self.replicas:
            if replica.alive:
                replica.send("hosts", 0, hosts)

    # ---- admission

    def room(self) -> int | None:
        """How many chains the joined replicas run at once; None: no limit."""
        if self._failure is not None:
            return MANY  # those who wait for admission get the error from `run`
        limits = [replica.capacity for replica in self.replicas if replica.joined]
        return None if limits and None in limits else sum(limit for limit in limits if limit is not None)

    def on_room(self, wake: Callable[[], None]) -> None:
        """`wake` is called when `room` may have risen."""
        self._on_room = wake

    # ---- chains

    def open(self, plan: Plan, task: Task, draw: int = 0) -> Opening:
        """The worker writes and renders the prompt."""
        return Opening(task, [], [], draw)

    async def run(
        self, plan: Plan, opening: Opening, chain: int, trajectory_id: str, *, until: float | None = None
    ) -> Trajectory:
        """Run one chain in a worker."""
        trajectory = Trajectory(trajectory_id, opening.task, chain, draw=opening.draw)
        activity = None if plan.activities is None else RemoteActivity(trajectory, plan.activities)
        value = {
            "task": _encoded(opening.task), "draw": opening.draw, "chain": chain, "id": trajectory_id,
            "sampling": sampling_fields(plan.sampling),
        }  # fmt: skip
        try:
            died = None
            for again in (False, True):
                replica = await self._choose()
                self.counts["rerun_chains"] += again
                try:
                    found = await self._run_on(replica, value, until, activity)
                    found.task = opening.task
                    return found
                except WorkerDied as error:
                    died = error
            self.counts["lost_chains"] += 1
            trajectory.outcome = Outcome.WORLD_FAILURE
            trajectory.error = f"WorkerDied: two workers ended while they ran this chain; the last: {died}"
            return trajectory
        finally:
            if activity is not None:
                activity.end()

    async def _choose(self) -> Replica:
        """Returns the joined replica with the fewest live chains, once there is one."""
        while True:
            if self._failure is not None:
                raise self._failure
            joined = [replica for replica in self.replicas if replica.joined]
            if joined:
                return min(joined, key=lambda each: (len(each.chains) >= (each.capacity or MANY), len(each.chains), each.index))
            await self.news()

    async def _run_on(
        self, replica: Replica, value: dict[str, Any], until: float | None, activity: RemoteActivity | None
    ) -> Trajectory:
        name = value["id"]
        replica.chains[name] = activity
        left_s = None if until is None else max(0.0, until - asyncio.get_running_loop().time())
        try:
            data, stats = await replica.call("chain", {**value, "left_s": left_s})
        finally:
            replica.chains.pop(name, None)
        replica.stats = stats
        # Weights that were loaded meanwhile may have drawn its last tokens: they count once they are proven.
        while (proving := replica.proving) is not None:
            await asyncio.shield(proving)
        if replica.process is not None and replica.process.node:  # counted last: a failed proof runs the chain again
            self._by_node[replica.process.node] += 1
        return decode(data)

    # ---- figures

    def stats(self) -> dict[str, float]:
        """The engines' counters: seconds as a mean over the replicas, all others as a sum."""
        found: Counter[str] = Counter(self._retired)
        known = [replica.stats for replica in self.replicas if replica.stats]
        for stats in known:
            found.update({name: value / (len(known) if name.endswith("_s") else 1) for name, value in stats.items()})
        return dict(found)

    def mark(self) -> None:
        """Begin a new step: means and maxima of the environments' figures start again."""
        for replica in self.replicas:
            if replica.joined:
                replica.send("mark")

    def chains_by_node(self) -> dict[str, int]:
        """The chains that run now, by the node of the cluster where they do."""
        found: Counter[str] = Counter()
        for replica in self.replicas:
            if replica.joined and replica.process is not None and replica.process.node:
                found[replica.process.node] += len(replica.chains)
        return dict(found)

    def metrics(self) -> dict[str, float]:
        """The figures of the environments of all workers, as they were reported last."""
        return merge_figures([replica.resources for replica in self.replicas if replica.joined])

    async def step_metrics(self) -> dict[str, float]:
        """The figures of the environments since `mark`, and those of the workers since the run began."""
        joined = [replica for replica in self.replicas if replica.joined]
        asked = [asyncio.ensure_future(replica.call("figures")) for replica in joined]
        if asked:
            await asyncio.wait(asked, timeout=5)
        for task in asked:
            task.cancel()
        told = [task.result() for task in asked if task.done() and not task.cancelled() and task.exception() is None]
        counts = {name: float(self.counts[name]) for name in ("rerun_chains", "lost_chains", "dropped_replies")}
        figures = {"live": float(len(joined)), "restarts": float(self.restarts), **counts}
        by_node = {f"cluster/{node}/chains": float(count) for node, count in self._by_node.items()}
        self._by_node.clear()
        return merge_figures(told) | {f"workers/{name}": value for name, value in figures.items()} | by_node


def merge_figures(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of several resource managers as those of one: times as their mean (p95: the largest), the rest as a sum."""
    found: dict[str, float] = {}
    for name in {name: None for each in figures for name in each}:
        values = [each[name] for each in figures if name in each]
        known = [value for value in values if value == value] or values  # NaN: nothing was measured
        if name.endswith("_p95_s"):
            found[name] = max(known)
        else:
            found[name] = sum(known) / (len(known) if name.endswith("_s") else 1)
    return found


def _adds_up(name: str) -> bool:
    """Whether a counter of a worker that died still counts."""
    return name in ("prefilled_tokens", "sampled_tokens", "stale_hits", "requests", "evicted", "steps")


@lru_cache(256)
def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Sampling as it travels. The dict must not be changed."""
    return asdict(sampling) | {"stop": list(sampling.stop), "stop_ids": list(sampling.stop_ids)}


def _encoded(task: Task) -> bytes:
    try:
        return codec.encode(task)
    except codec.NotEncodable as error:
        raise DataError(
            f"task {task.id!r} cannot travel to a sampler process: {error}. Use text, numbers, lists and dicts in its row, or "
            f'sampler.replicas = 1 with sampler.place = "shared"'
        ) from None
