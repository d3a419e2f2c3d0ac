"""The sampler processes of a run: gives chains to them, and runs the chains of a process that dies once more.

    connected --"open"--> opened --weights, proof--> live      `fleet` starts, watches and restarts the processes

A new chain goes to the live replica with the fewest live chains, and stays there. If its replica dies, the chain runs once
more, under the same name and seed; if that one dies, too, the chain is a failure of the world. A second or late result is
dropped and counted, so no chain comes back twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from ... import codec
from ...errors import DataError
from ...fleet.fleet import Fleet, Role
from ...fleet.launcher import Launcher
from ...fleet.link import LinkMessage
from ...fleet.member import Member, MemberLost
from ...rollout.activity import Activities, Activity
from ...rollout.chain import Opening, Plan
from ...runs.codec import decode
from ...types import Outcome, Sampling, Task, ToolCall, Trajectory

MANY = 1 << 20


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


class Replica(Member):
    """One sampler process. Implements `weights.Recipient`."""

    def __init__(self, index: int, attempt: int) -> None:
        super().__init__("sampler", index, attempt)
        self.proving: asyncio.Future[None] | None = None  # while new weights are loaded and not yet proven
        self.version = -1
        self.capacity: int | None = None
        self.stats: dict[str, float] = {}
        self.resources: dict[str, float] = {}
        self.chains: dict[str, RemoteActivity | None] = {}


class WorkerPool(Role[Replica]):
    """The replicas of a run. Implements `rollout.ChainRunner`. `async with pool:` around its use.

    `opening` is the message "open" without the index. `bring_up(replicas)` gives the present weights to replicas that are open
    and proves them; None if the workers load all that they need. `address` is that of `Fleet`.
    """

    kind, noun = "sampler", "sampler process"
    target = "agentfly.training.workers.worker:serve"
    consequence = "its chains run again in another process"

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
        address: str | None = None,
    ) -> None:
        self.fleet: Fleet[Replica] = Fleet(launcher, self, count, health_s=health_s, address=address, note=note)
        self.stuck_s = stuck_s
        self.counts: Counter[str] = Counter()
        """Chains that were run again, and lost, because their worker died."""
        self.directory: dict[str, Any] | None = None
        """Where the environments live, if not beside the chains: what `ServerDirectory.take` reads."""
        self._opening, self._bring_up = opening, bring_up
        self._retired: Counter[str] = Counter()
        self._by_node: Counter[str] = Counter()  # chains that ended since `step_metrics`, if workers are on nodes of a cluster
        self._on_room: Callable[[], None] | None = None

    @property
    def replicas(self) -> list[Replica]:
        return self.fleet.members

    async def __aenter__(self) -> WorkerPool:
        await self.fleet.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.close()

    # ---- fleet.Role

    def member(self, index: int, attempt: int) -> Replica:
        return Replica(index, attempt)

    async def prepare(self, member: Replica) -> None:
        """Open the worker and bring it to the present weights."""
        opened = await member.call("open", {**self._opening, "index": member.index, "directory": self.directory})
        member.about |= opened
        member.capacity, member.stats = opened["capacity"], opened["stats"]
        if self._bring_up is not None:
            await self._bring_up([member])

    def hear(self, member: Replica, message: LinkMessage) -> None:
        """Take over a report of the worker."""
        value = message.value
        member.stats, member.resources = value["stats"], value["resources"]
        if value["capacity"] != member.capacity:
            member.capacity = value["capacity"]
            self.fleet.changed()
        for name, activity in value["chains"].items():
            if (remote := member.chains.get(name)) is not None:
                remote.update(*activity)

    def lost(self, member: Replica, why: str) -> None:
        self._retired.update({name: value for name, value in member.stats.items() if _adds_up(name)})
        member.stats = {}
        if member.proving is not None and not member.proving.done():
            member.proving.set_exception(MemberLost(f"{member.name} {why}"))
            member.proving.exception()  # marks it as retrieved: no chain may wait for it

    def changed(self) -> None:
        if self._on_room is not None:
            self._on_room()

    def tell_directory(self, directory: dict[str, Any]) -> None:
        """The environment servers of the run have changed: tell every worker. A worker that is opened later gets the newest."""
        self.directory = directory
        for replica in self.replicas:
            if replica.alive:
                replica.send("directory", 0, directory)

    # ---- admission

    def room(self) -> int | None:
        """How many chains the live replicas run at once; None: no limit."""
        if self.fleet.failure is not None:
            return MANY  # those who wait for admission get the error from `run`
        limits = [replica.capacity for replica in self.fleet.live]
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
            "sampling": sampling_fields(plan.sampling), "shown": plan.shown, "call_bonus": plan.call_bonus,
        }  # fmt: skip
        try:
            died = None
            for again in (False, True):
                replica = await self._choose()
                self.counts["rerun_chains"] += again
                try:
                    played = await self._run_on(replica, value, until, activity)
                    played.task = opening.task
                    return played
                except MemberLost as error:
                    died = error
            self.counts["lost_chains"] += 1
            trajectory.outcome = Outcome.WORLD_FAILURE
            trajectory.error = f"MemberLost: two workers ended while they ran this chain; the last: {died}"
            return trajectory
        finally:
            if activity is not None:
                activity.end()

    async def _choose(self) -> Replica:
        """Returns the live replica with the fewest live chains, once there is one."""
        while True:
            if self.fleet.failure is not None:
                raise self.fleet.failure
            if live := self.fleet.live:
                return min(live, key=lambda each: (len(each.chains) >= (each.capacity or MANY), len(each.chains), each.index))
            await self.fleet.news()

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
        if replica.node:  # counted last: a failed proof runs the chain again
            self._by_node[replica.node] += 1
        return decode(data)

    # ---- figures

    def stats(self) -> dict[str, float]:
        """The engines' counters: seconds as a mean over the replicas, all others as a sum."""
        counters: Counter[str] = Counter(self._retired)
        reported = [replica.stats for replica in self.replicas if replica.stats]
        for stats in reported:
            counters.update({name: value / (len(reported) if name.endswith("_s") else 1) for name, value in stats.items()})
        return dict(counters)

    def mark(self) -> None:
        """Begin a new step: means and maxima of the environments' figures start again."""
        for replica in self.fleet.live:
            replica.send("mark")

    def chains_by_node(self) -> dict[str, int]:
        """The chains that run now, by the node of the cluster where they do."""
        counts: Counter[str] = Counter()
        for replica in self.fleet.live:
            if replica.node:
                counts[replica.node] += len(replica.chains)
        return dict(counts)

    def metrics(self) -> dict[str, float]:
        """The figures of the environments of all workers, as they were reported last."""
        return merge_figures([replica.resources for replica in self.fleet.live])

    async def step_metrics(self) -> dict[str, float]:
        """The figures of the environments since `mark`, and those of the workers since the run began."""
        live = self.fleet.live
        asked = [asyncio.ensure_future(replica.call("figures")) for replica in live]
        if asked:
            await asyncio.wait(asked, timeout=5)
        for task in asked:
            task.cancel()
        answers = [task.result() for task in asked if task.done() and not task.cancelled() and task.exception() is None]
        counts = {name: float(self.counts[name]) for name in ("rerun_chains", "lost_chains")}
        counts |= {"dropped_replies": float(self.fleet.dropped_replies), "restarts": float(self.fleet.restarts)}
        figures = {"live": float(len(live)), **counts}
        by_node = {f"cluster/{node}/chains": float(count) for node, count in self._by_node.items()}
        self._by_node.clear()
        return merge_figures(answers) | {f"workers/{name}": value for name, value in figures.items()} | by_node


def merge_figures(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of several resource managers as those of one: times as their mean (p95: the largest), the rest as a sum."""
    merged: dict[str, float] = {}
    for name in {name: None for each in figures for name in each}:
        values = [each[name] for each in figures if name in each]
        measured = [value for value in values if value == value] or values  # NaN: nothing was measured
        if name.endswith("_p95_s"):
            merged[name] = max(measured)
        else:
            merged[name] = sum(measured) / (len(measured) if name.endswith("_s") else 1)
    return merged


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
