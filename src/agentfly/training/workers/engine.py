"""The engine of a run whose chains are sampled in worker processes: the learner's model here, its copies there.

`publish` hands the learner's weights to every live worker and proves each copy (`engines.copies`). The version counts once all
live workers have proven it. A worker that was started again gets the present weights, when the learner does not change them,
and proves them before it runs a chain.

    hold or rest -- the learner changes the weights -- publish: every worker loads and proves them
                    no worker is brought up in this time
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ...agents.base import BaseAgent
from ...config import Config
from ...engines import engine_options
from ...engines.options import AtUpdate
from ...engines.prompt import ProbeAnswer
from ...errors import ConfigError, DeadlineError, EngineError, InvariantError
from ...fleet.launcher import Launcher, LocalLauncher
from ...resources import Admission
from ...rollout import Plan
from ...types import Completion, Proof, Request
from ..cluster.checks import sampler_launcher
from ..cluster.env_servers import open_env_servers
from .pool import Replica, WorkerPool, sampling_fields
from .worker import names_gpu

if TYPE_CHECKING:
    from ...engines.copies import Bucket
    from ...fleet.ray_cluster import Cluster

EXACT_GAP, HALF_GAP = 0.01, 0.15
"""Largest mean difference of log-probs between learner and worker, in nats: float32, and half precision."""


class WorkerEngine:
    """Samples in worker processes. Implements `types.TrainableEngine`; `open` starts the workers.

    `weights()` yields the learner's weights in buckets; a learner of several ranks replaces it (`use_learner`). `transport` is
    for tests: by default it follows from where the learner and a worker are. `launcher(log_dir)` replaces processes of this
    machine, and `address` is then where their machines reach this one.
    """

    reads: Literal["ids", "messages"] = "ids"
    at_update = AtUpdate("recompute", "keep", "finish")

    def __init__(
        self,
        config: Config,
        *,
        launcher: Callable[[Path], Launcher] | None = None,
        transport: Literal["memory", "ipc", "broadcast"] | None = None,
        address: str | None = None,
    ) -> None:
        from ...engines.copies import LearnerCopy
        from .weights import Senders

        options = engine_options(config.agent.engine)
        self.config = config
        self._kind = options.get("kind") or "local"
        own = "learner_" if self._kind == "vllm" else ""
        self.copy = LearnerCopy(
            config.agent.model,
            device=options.get(f"{own}device"),
            dtype=options.get(f"{own}dtype") or options.get("dtype"),
            **{
                name: options[name] for name in ("max_context", "stop_ids", "chat_template", "template_args") if name in options
            },
        )
        self.tokenizer, self.renderer, self.stop_ids = self.copy.tokenizer, self.copy.renderer, self.copy.stop_ids
        self.max_context = self.copy.context
        self.shares_weights = False
        self.exact = self._kind == "local"
        """Whether workers compute with the learner's own kernels, so that log-probs need no correction."""
        self.version = 0
        self.proofs: dict[int, Proof] = {}
        """The newest proof of each replica that is alive."""
        self.handover_s, self.handover_bytes = 0.0, 0
        self.weights: Callable[[], Iterator[Bucket]] = self.copy.weights
        self.pool: WorkerPool | None = None
        self._launcher, self._address = launcher or LocalLauncher, address
        self._max_gap = options.get("max_gap")
        self._senders = Senders(transport, address)
        self._written = -1  # the version that the memory file holds
        self._expected = -1  # the version that the probe was scored at
        self._alone = False  # the learner does one thing at a time
        self._present = 0  # the version of the learner's weights, unless `_changing`
        self._changing = False  # the learner changes its weights
        self._joining = 0  # workers that are brought up outside of `publish`
        self._state = threading.Condition()  # guards these three
        self._proof: Proof | None = None
        self._failed_proofs: dict[int, int] = {}
        self._handing_over = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = itertools.count()

    @property
    def model(self) -> Any:
        """The learner's model, loaded at the first use."""
        return self.copy.model

    @property
    def capacity(self) -> int | None:
        """How many chains the live workers run at once."""
        return None if self.pool is None else self.pool.room() or None

    @property
    def proof(self) -> Proof | None:
        """The weakest proof of the replicas that are alive; None if one of them has not proven the version."""
        live = [self.proofs.get(replica.index) for replica in self._live()]
        proofs = [proof for proof in live if proof is not None and proof.version == self.version]
        if len(proofs) < len(live):
            return None
        return max(proofs, key=lambda proof: proof.gap) if proofs else self._proof

    def use_learner(
        self, weights: Callable[[], Iterator[Bucket]], score: Callable[[Sequence[int], float], list[float]]
    ) -> None:
        """Take weights and scores from a learner of several ranks, which does one thing at a time.

        `weights()` yields full tensors in buckets, `score(ids, temperature)` returns the log-prob of every id from the second
        on. Neither is called inside `updating`.
        """
        self.weights, self.copy.scorer, self._alone = weights, score, True

    def updating(self) -> AbstractContextManager[None]:
        """Around an update and its `publish`. If the learner does one thing at a time, no worker is brought up meanwhile."""
        return self.hold() if self._alone else nullcontext()

    def unproven(self) -> list[str]:
        """The live replicas that have not proven the version."""
        return [replica.name for replica in self._live() if replica.version != self.version]

    def handover_metrics(self) -> dict[str, float]:
        """How the last publication went, for every replica."""
        live = self._live()
        proofs = {replica.index: self.proofs[replica.index] for replica in live if replica.index in self.proofs}
        rate = self.handover_bytes * len(live) / self.handover_s / 1e9 if self.handover_s else 0.0
        return {
            "handover/replicas": float(len(live)),
            "handover/seconds": self.handover_s,
            "handover/gb_per_s": rate,
            **{f"handover/replica/{index}/gap": proof.gap for index, proof in proofs.items()},
            **{f"handover/replica/{index}/version": float(proof.version) for index, proof in proofs.items()},
        }

    def _live(self) -> list[Replica]:
        return [] if self.pool is None else self.pool.fleet.live

    # ---- opening

    @asynccontextmanager
    async def open(
        self, plan: Plan, log_dir: Path, note: Callable[[str], None], *, trained: bool = True
    ) -> AsyncIterator[Plan]:
        """Start the workers. Yields the plan with them as its runner. `trained`: a learner changes the weights."""
        config = self.config
        limits = plan.limits
        pool = WorkerPool(
            self._launcher(log_dir),
            config.sampler.replicas,
            self._opening(),
            health_s=config.cluster.health_s,
            stuck_s=max(10 * config.cluster.health_s, limits.chain_timeout_s + limits.score_timeout_s),
            bring_up=self._join if trained else None,
            note=note,
            address=self._address,
        )
        self.pool, self._loop = pool, asyncio.get_running_loop()
        try:
            async with open_env_servers(config, cast(BaseAgent, plan.agent), note, pool.tell_directory), pool:
                admission = Admission(pool.room, config.rollout.max_concurrency)
                pool.on_room(admission.wake)
                yield replace(plan, runner=pool, admission=admission)
        finally:
            self.pool = self._loop = None
            self._senders.close()
            self._written = -1

    def _opening(self) -> dict[str, Any]:
        config, count = self.config, self.config.sampler.replicas
        chains = config.rollout.num_tasks * config.rollout.num_chains * (config.rollout.steps_ahead + 1)
        threads = config.run.threads
        if threads is None and config.cluster.address is not None:
            threads = max(1, int(config.sampler.cpus))
        elif threads is None and count > 1:
            threads = max(1, (os.cpu_count() or 1) // count)
        return {"config": config.to_toml(), "count": count, "threads": threads, "chains": -(-chains // count)}

    # ---- types.TrainableEngine

    async def generate(self, request: Request) -> Completion:
        """Sample one reply outside of a chain. The workers take turns."""
        live = self._live()
        if not live:
            raise EngineError("no sampler process is alive")
        replica = live[next(self._turn) % len(live)]
        value = {"prompt_ids": request.prompt_ids, "sampling": sampling_fields(request.sampling), "session": request.session}
        completion: Completion = await replica.call("generate", value)
        return completion

    def release(self, session: str) -> None:
        """Nothing to release: a worker releases the chains that it runs."""

    async def close(self) -> None:
        """Nothing to close: the workers end with `open`."""

    def stats(self) -> dict[str, float]:
        """The workers' counters: seconds as their mean, others as their sum."""
        return {} if self.pool is None else self.pool.stats()

    @contextmanager
    def hold(self, timeout_s: float = 600.0) -> Iterator[None]:
        """The learner may change its weights inside the context: workers sample from copies. None is brought up meanwhile."""
        self._begin_change(timeout_s)
        try:
            yield
        finally:
            self._end_change()

    def rest(self) -> None:
        """Free the workers' device memory, where the engine can, until the next `publish`. The weights may change from now."""
        if self.pool is not None:
            self._begin_change(600.0)
            asyncio.run_coroutine_threadsafe(self._rest(), self._running_loop()).result()

    async def _rest(self) -> None:
        await asyncio.gather(*(replica.call("rest") for replica in self._live()), return_exceptions=True)

    def _begin_change(self, timeout_s: float) -> None:
        with self._state:
            if not self._state.wait_for(lambda: not self._joining, timeout_s):
                raise DeadlineError(f"a worker that was started again did not load its weights within {timeout_s:g} s")
            self._changing = True

    def _end_change(self) -> None:
        with self._state:
            self._changing = False

    def publish(self, version: int) -> None:
        """Hand the learner's weights to every worker and prove each copy. Before `open`, workers get them when they start."""
        with self._state:
            self._present, self._changing = version, False
        if self.pool is None:
            self.version = version
            return
        asyncio.run_coroutine_threadsafe(self._publish(version), self._running_loop()).result()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    # ---- the hand-over

    async def _publish(self, version: int) -> None:
        pool = self.pool
        assert pool is not None
        began = time.perf_counter()
        self._written = self._expected = -1  # the learner's weights have changed
        await self._bring_up(pool.fleet.live)
        while not any(replica.version == version for replica in pool.fleet.live):
            await pool.fleet.news()  # all workers died: one that is started again is brought up with these weights
        self.version = version
        proofs = [proof for proof in self.proofs.values() if proof.version == version]
        self._proof = max(proofs, key=lambda proof: proof.gap)
        self.handover_s = time.perf_counter() - began

    async def _join(self, replicas: Sequence[Replica]) -> None:
        """Bring up replicas that were just opened, once the learner does not change the weights."""
        while not self._enter():  # noqa: ASYNC110 - the learner changes the weights in another thread
            await asyncio.sleep(0.05)
        try:
            await self._bring_up(replicas)
        finally:
            with self._state:
                self._joining -= 1
                self._state.notify_all()
        for replica in replicas:
            if not replica.alive:
                raise EngineError(replica.ended.result())

    def _enter(self) -> bool:
        with self._state:
            if self._changing:
                return False
            self._joining += 1
            return True

    async def _bring_up(self, replicas: Sequence[Replica]) -> None:
        """Load the present weights into replicas and prove them. One that fails is ended; the fleet starts it again."""
        async with self._handing_over:
            version = self._present
            assert self.pool is not None
            proving = {replica: asyncio.get_running_loop().create_future() for replica in replicas if replica.alive}
            for replica, future in proving.items():
                replica.proving = future
            try:
                for sender, some in self._senders.of(list(proving), next(self.model.parameters()).device):
                    for replica, why in (await asyncio.to_thread(self._send, sender, some, version)).items():
                        self.pool.fleet.end(replica, f"could not load the weights: {why}")
                await asyncio.gather(*(self._prove(replica, version) for replica in proving if replica.alive))
            finally:
                for replica, future in proving.items():
                    replica.proving = None
                    if not future.done():
                        future.set_result(None)

    def _send(self, sender: Any, replicas: Sequence[Replica], version: int) -> dict[Replica, str]:
        """In a thread: score the probe once per version, and hand the weights over. Returns the replicas that failed."""
        if self._expected != version:
            self.copy.expect()
            self._expected = version
        failed: dict[Replica, str]
        if sender.kind == "memory":
            if self._written != version:
                self.handover_bytes = sender.write(self.weights())
                self._written = version
            failed = sender.send(version, replicas)
        elif sender.kind == "ipc":
            self.handover_bytes, failed = sender.send(version, replicas, self.weights())
        else:
            self.handover_bytes, failed = sender.send(version, replicas, self.weights)
        return failed

    async def _prove(self, replica: Replica, version: int) -> None:
        """Compare a replica's answer to the probe with the learner's. A replica that fails twice in a row stops the run."""
        from ...engines.copies import PROBE

        assert self.pool is not None
        try:
            asked = {"ids": self.copy.probe_ids(), "sampling": sampling_fields(PROBE)}
            scores, reply = await replica.call("probe", asked)
            proof = await asyncio.to_thread(self.copy.check, version, ProbeAnswer(scores, reply), self._limit())
        except InvariantError as error:
            failed = self._failed_proofs[replica.index] = self._failed_proofs.get(replica.index, 0) + 1
            self.proofs.pop(replica.index, None)
            if failed > 1:
                raise InvariantError(f"{replica.name}: {error}") from None
            self.pool.fleet.end(replica, f"failed its proof: {error}")
        except EngineError as error:
            self.proofs.pop(replica.index, None)
            self.pool.fleet.end(replica, f"did not answer the probe: {error}")
        else:
            self._failed_proofs.pop(replica.index, None)
            self.proofs[replica.index], replica.version = proof, version

    def _limit(self) -> float:
        if self._max_gap is not None:
            return float(self._max_gap)
        return EXACT_GAP if next(self.model.parameters()).dtype.itemsize >= 4 else HALF_GAP


def use_workers(config: Config, agent: BaseAgent, *, described: bool = True, cluster: Cluster | None = None) -> None:
    """Let the agent sample in worker processes if `[sampler]` asks for them. Raises ConfigError if there are too few GPUs.

    `described`: the config describes the agent. If it does not, raises ConfigError: each worker builds the agent from it.
    `cluster`: the processes run on its nodes.
    """
    if not config.sampler.in_processes:
        return
    if not described:
        raise ConfigError(
            "sampler.replicas and sampler.place need a run that a config describes, because each worker process builds the "
            "agent from it: write the agent into a file and call train(Config...), or remove them"
        )
    if cluster is None:
        environments = gpu_environments(config, uses_gpus(config))
        engine = WorkerEngine(config, launcher=partial(LocalLauncher, environments=environments))
    else:
        own = cluster.own.address
        engine = WorkerEngine(config, launcher=lambda log_dir: sampler_launcher(cluster, config, log_dir), address=own)
    agent.use_engine(engine, engine.renderer)


def uses_gpus(config: Config) -> bool:
    """Whether the samplers of this machine use its GPUs."""
    import torch

    device = engine_options(config.agent.engine).get("device")
    return torch.cuda.is_available() and (device is None or str(device).startswith("cuda"))


def gpu_environments(config: Config, uses_gpus: bool) -> list[dict[str, str]]:
    """Returns the environment variables of each replica: which GPU it sees. Raises ConfigError if there are too few."""
    import torch

    sampler = config.sampler
    if not uses_gpus:
        if sampler.place == "own":
            raise ConfigError('sampler.place = "own" needs GPUs for the samplers, and PyTorch uses none: set it to "process"')
        return [{} for _ in range(sampler.replicas)]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in listed.split(",")] if listed else [str(i) for i in range(torch.cuda.device_count())]
    if sampler.place == "own":
        if names_gpu(config) and (device := engine_options(config.agent.engine)["device"]) != "cuda:0":
            raise ConfigError(
                f'agent.engine.device = {device!r} and sampler.place = "own" exclude each other, because each sampler sees one '
                "GPU: remove one of them"
            )
        needed = config.learner.ranks + sampler.replicas * sampler.gpus
        if len(names) < needed:
            raise ConfigError(
                f"the learner and {sampler.replicas} samplers on separate GPUs need {needed} GPUs, and {len(names)} are "
                f'visible: lower sampler.replicas, or set sampler.place = "process"'
            )
        return [{"CUDA_VISIBLE_DEVICES": names[config.learner.ranks + index]} for index in range(sampler.replicas)]
    if names_gpu(config):  # a sampler sees the GPUs that the learner sees, and takes the same one
        return [{} for _ in range(sampler.replicas)]
    return [{"CUDA_VISIBLE_DEVICES": names[index % min(config.learner.ranks, len(names))]} for index in range(sampler.replicas)]
