"""A rollout worker: one replica of the sampler, with the environments and the chains that use it.

connection thread    beats, reads messages         a busy or blocked main thread does not make the worker look dead
main thread          the event loop of the chains
engine's thread(s)   sampling; new weights are copied in a separate thread

hello --> "open": config -> agent, engine, environments --> "chain", "generate", "load", "bucket", "probe", ... --> "stop"
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import tomllib
import traceback
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from ... import codec
from ...agents.base import BaseAgent
from ...build import build_agent, build_plan
from ...config import Config
from ...engines import engine_options
from ...engines.options import CACHE_SIZES
from ...engines.prompt import ProbeAnswer
from ...errors import ConfigError, EngineError
from ...fleet.link import Connection, LinkMessage
from ...protocols import PreparedEngine
from ...resources.directory import ServerDirectory
from ...resources.rpc.frames import MAX_ERROR_TEXT
from ...resources.rpc.worker_main import die
from ...rollout import Activities, Plan, open_environments, open_task, run_chain
from ...rollout.chain import Opening
from ...rollout.scheduler import admission_timeout_s, fewer_collections, make_ready
from ...runs.codec import encode
from ...types import Request, Sampling, Task, Trajectory

STATUS_S = 0.5
"""Seconds between two reports of what the chains wait for."""
OPENINGS = 256
"""Rendered prompts that are kept for sibling chains."""
NO_TASK = Task("", ())


class RolloutWorker:
    """Answers the trainer's messages. Everything but `receive` runs in the main thread's event loop."""

    def __init__(self, ticket: Mapping[str, Any]) -> None:
        self.loop = asyncio.get_running_loop()
        self.stopped = asyncio.Event()
        self.connection = Connection(ticket, self.receive)
        self.activities = Activities()
        self.directory = ServerDirectory()
        self.resources = AsyncExitStack()
        self.agent: BaseAgent | None = None
        self.plan: Plan | None = None
        self.receiver: Any = None  # of the weights that are being loaded
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._openings: OrderedDict[str, Opening] = OrderedDict()

    def receive(self, message: LinkMessage) -> None:
        """In the thread of the connection."""
        self.loop.call_soon_threadsafe(self.handle, message)

    def handle(self, message: LinkMessage) -> None:
        if message.kind == "cancel":
            if (task := self._tasks.get(message.id)) is not None:
                task.cancel()
        elif message.kind == "mark":
            if self.plan is not None and self.plan.manager is not None:
                self.plan.manager.mark()
        elif message.kind == "directory":
            self.directory.take(message.value)
        elif message.kind == "stop":
            self.stopped.set()
        else:
            task = self.loop.create_task(self.answer(message))
            self._tasks[message.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(message.id, None))

    async def answer(self, message: LinkMessage) -> None:
        """Do what a message asks for, and reply with the value or the exception."""
        try:
            work: Coroutine[Any, Any, Any] = getattr(self, f"do_{message.kind}")(message.value)
            self.connection.send("reply", message.id, await work)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - every exception is a reply
            traceback.print_exc()
            where = traceback.format_exc()[-MAX_ERROR_TEXT:]
            self.connection.send("error", message.id, [type(error).__name__, str(error)[:MAX_ERROR_TEXT], where])

    # ---- what the trainer asks for

    async def do_open(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Build the agent of the config, open its engine and its environments."""
        config = Config.from_dict(tomllib.loads(value["config"]))
        share = (int(value["index"]), int(value["count"]))
        self.agent = agent = build_agent(config)
        agent.engine_options |= gpu_options(config, agent.engine_options)
        engine = agent.engine
        if "torch" in sys.modules:
            from ...learn.model.storage import seed_torch

            seed_torch(config.seed, value["threads"])
        if config.rollout.steps_ahead:
            engine.at_update = config.rollout.at_update  # type: ignore[attr-defined]
        plan = build_plan(config, agent)
        chains = value["chains"]
        if isinstance(engine, PreparedEngine):
            await asyncio.to_thread(engine.prepare, chains)
        self.resources.enter_context(fewer_collections())
        most = config.rollout.max_concurrency
        each = None if most is None else -(-most // share[1])
        if addresses := value.get("directory"):
            self.directory.take(addresses)
        directory = self.directory if addresses else None
        opening = open_environments(agent, plan, each, share=share, directory=directory)
        self.plan = replace(await self.resources.enter_async_context(opening), activities=self.activities)
        return {"capacity": self._limit(), "device": device_of(engine), "stats": self._stats()}

    async def do_chain(self, value: Mapping[str, Any]) -> list[Any]:
        """Run one chain. Returns the stored form of its trajectory, without the task, and the engine's counters."""
        shaped = {name: value[name] for name in ("shown", "call_bonus")}
        plan = replace(self._ready(), sampling=_sampling(value["sampling"]), **shaped)
        assert plan.admission is not None
        until = None if value["left_s"] is None else self.loop.time() + value["left_s"]
        task = codec.decode(value["task"], any_keys=True)
        if plan.manager is not None:
            await make_ready(plan, plan.manager, [task])
        async with plan.admission.slot(plan.admission.done, admission_timeout_s(plan.limits)):
            opening = self._opening(plan, value["id"].rpartition("-")[0], task, value["draw"])
            trajectory = await run_chain(plan, opening, value["chain"], value["id"], until=until)
        return [encode(without_task(trajectory)), self._stats()]

    async def do_generate(self, value: Mapping[str, Any]) -> Any:
        """Sample one reply outside of a chain."""
        plan = self._ready()
        request = Request(value["prompt_ids"], _sampling(value["sampling"]), session=value["session"])
        try:
            return await plan.engine.generate(request)
        finally:
            plan.engine.release(request.session)

    async def do_load(self, value: Mapping[str, Any]) -> dict[str, float]:
        """Sample from new weights, which come in messages "bucket". Returns the engine's counters."""
        engine: Any = self._ready().engine
        if value["how"] == "none":
            engine.publish(value["version"])
            return self._stats()
        from .weight_receiver import Receiver

        self.receiver = receiver = Receiver(value)
        try:
            await asyncio.to_thread(engine.take_weights, value["version"], receiver)
        except Exception as error:  # noqa: BLE001 - the weights may be those of no version
            traceback.print_exc()
            self.connection.send("error", 0, ["EngineError", f"version {value['version']} could not be loaded: {error}"])
            await asyncio.sleep(0.2)
            die(f"version {value['version']} could not be loaded: {error}")
        finally:
            receiver.close()
        return self._stats()

    async def do_bucket(self, value: Mapping[str, Any]) -> None:
        """Hand a part of the weights to `do_load`. Returns when it has been copied."""
        if self.receiver is None:
            raise EngineError("a part of the weights came before their announcement")
        await asyncio.wrap_future(self.receiver.put(value))

    async def do_probe(self, value: Mapping[str, Any]) -> list[Any]:
        """Answer the probe: log-probs of its ids, and a continuation."""
        engine: Any = self._ready().engine
        ids, sampling = value["ids"], _sampling(value["sampling"])
        if hasattr(engine, "ask"):
            probe: ProbeAnswer = await asyncio.to_thread(engine.ask, ids, sampling)
            return [probe.scores, probe.reply]
        from ...engines.copies import score_ids

        scores = await asyncio.to_thread(score_ids, engine.model, ids)
        return [scores, await engine.generate(Request(list(ids), sampling, session="probe"))]

    async def do_rest(self, _: object) -> None:
        """Free device memory for the learner until the next weights."""
        engine: Any = self._ready().engine
        await asyncio.to_thread(engine.rest)

    async def do_figures(self, _: object) -> dict[str, float]:
        """The figures of the environments since the last "mark"."""
        manager = self._ready().manager
        return {} if manager is None else manager.step_metrics()

    # ---- inside

    def _ready(self) -> Plan:
        if self.plan is None:
            raise EngineError("the worker is not open yet")
        return self.plan

    def _opening(self, plan: Plan, key: str, task: Task, draw: int) -> Opening:
        entry = self._openings.get(key)
        if entry is None or entry.task != task or entry.draw != draw:
            entry = self._openings[key] = open_task(plan, task, draw)
            if len(self._openings) > OPENINGS:
                self._openings.popitem(last=False)
        return entry

    def _limit(self) -> int | None:
        """How many chains may run at once: what the engine and the environments allow together."""
        plan = self._ready()
        return None if plan.admission is None else plan.admission.limit

    def _stats(self) -> dict[str, float]:
        engine = self._ready().engine
        return {name: float(value) for name, value in engine.stats().items()} if hasattr(engine, "stats") else {}

    async def report(self) -> None:
        """Tell the trainer what the chains wait for, again and again."""
        while True:
            if self.plan is not None:
                now = time.perf_counter()
                chains = {
                    name: [each.phase, now - each.since, each.turn, list(each.what)] for name, each in self.activities.items()
                }
                manager = self.plan.manager
                figures = {} if manager is None else manager.metrics()
                self.connection.send(
                    "status",
                    0,
                    {"capacity": self._limit(), "chains": chains, "stats": self._stats(), "resources": figures},
                )
            await asyncio.sleep(STATUS_S)

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.resources.aclose()
        if self.agent is not None:
            await self.agent.close()


def without_task(trajectory: Trajectory) -> Trajectory:
    """The trajectory as it travels: the trainer has its task."""
    return replace(trajectory, task=NO_TASK)


def gpu_options(config: Config, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an engine that follow from who shares its GPU, where the config leaves them open.

    Replicas that share a GPU of the learner divide what one engine would take of its memory. One on another GPU takes most of
    it, and does not free it while the learner updates.
    """
    sampler, kind = config.sampler, options.get("kind") or "local"
    if sampler.place == "own" or config.cluster.address is not None:
        defaults = {"vllm": {"sleep": False, "memory_fraction": 0.85}, "local": {"kv_fraction": 0.7}}.get(kind, {})
    else:
        sleeps = options.get("sleep", True)
        sharing = -(
            -sampler.replicas // (1 if names_gpu(config) else config.learner.ranks)
        )  # as `gpu_environments` places them
        vllm = {"memory_fraction": (0.85 if sleeps else 0.5) / sharing}
        defaults = {"vllm": vllm, "local": {"kv_fraction": 0.4 / sharing}}.get(kind, {})
    if kind == "local" and any(name in options for name in CACHE_SIZES):
        return {}
    return {name: value for name, value in defaults.items() if name not in options} if _sees_gpu(options) else {}


def names_gpu(config: Config) -> bool:
    """Whether agent.engine.device names one GPU, such as "cuda:1", which all ranks and samplers then share."""
    return str(engine_options(config.agent.engine).get("device")).startswith("cuda:")


def _sees_gpu(options: Mapping[str, Any]) -> bool:
    if str(options.get("device", "cuda")).startswith("cpu") or not any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))):
        return False
    import torch

    return torch.cuda.is_available()


def device_of(engine: object) -> str | None:
    """The identity of the GPU that an engine samples on, or None."""
    if "torch" not in sys.modules:
        return None
    from .weights import default_device, gpu_identity

    return gpu_identity(getattr(engine, "device", None) or (default_device() if hasattr(engine, "take_weights") else None))


def _sampling(value: Mapping[str, Any]) -> Sampling:
    return Sampling(**{**value, "stop": tuple(value["stop"]), "stop_ids": tuple(value["stop_ids"])})


def serve(ticket: Mapping[str, Any]) -> None:
    """Connect to the trainer and work until it says "stop". Does not return."""
    try:
        asyncio.run(_serve(ticket))
    except ConfigError as error:
        die(str(error))
    os._exit(0)  # threads of engines and tools must not hold the process up


async def _serve(ticket: Mapping[str, Any]) -> None:
    worker = RolloutWorker(ticket)
    worker.connection.start()
    reporting = asyncio.create_task(worker.report())
    reporting.add_done_callback(lambda task: None if task.cancelled() else die(f"the report failed: {task.exception()!r}"))
    await worker.stopped.wait()
    reporting.cancel()
    await worker.close()
