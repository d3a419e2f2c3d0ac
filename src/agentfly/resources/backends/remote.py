"""Instances in a worker: what the placements `process`, `sandbox`, `container` and `http` share.

A call that is abandoned ends the worker if the instance is alone in it. If several instances share the worker, the instance is
dropped, the worker takes no new ones, and it ends with its last instance.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError, WorldError
from ..instance import Backend, Instance
from ..rpc.client import Worker
from ..rpc.frames import DROP, GET, NEW
from ..spec import Spec

PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20) if hasattr(os, "sysconf") else 0.0


class WorkerInstance(Instance):
    """An instance whose calls go over the connection of a worker, under its number."""

    _worker: Worker | None = None

    async def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name[:1] == "@":
            raise AttributeError(f"{self.spec.name} has no method {name!r}")
        return await self._send(name, args, kwargs)

    async def get(self, name: str) -> Any:
        return await self._send(GET, (name,))

    async def _send(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if self._worker is None:
            raise WorldError(f"{self.spec.name} has not been started")
        return await self._worker.call(self.number, method, args, kwargs)

    def died(self, why: str) -> None:
        """The instance or its worker ended."""
        if self.alive:
            self.alive, self.why = False, why
            if self.on_death is not None:
                self.on_death()


class RemoteInstance(WorkerInstance):
    def __init__(self, backend: RemoteBackend, number: int) -> None:
        super().__init__(backend.spec, number)
        self._backend = backend

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker is not None and self._worker.alive else None

    async def start(self) -> None:
        await self._backend.prepare()
        worker = self._worker = self._backend.assign(self)
        if len(worker.instances) == 1:
            await worker.start(self.number)
            self._backend.check(worker.about)
        else:
            await asyncio.shield(worker.ready)
        await worker.call(self.number, NEW)
        self.alive = True

    def abandon(self) -> None:
        worker = self._worker
        if not self.alive or worker is None:
            return
        self.alive = False
        if self.spec.per_process == 1:
            worker.end(f"{self.spec.name}: a call was given up and its {worker.kind} was killed")
        else:
            worker.tainted = True

    async def close(self, timeout_s: float) -> None:
        worker = self._worker
        if worker is None:
            return
        if self.alive:
            await super().close(timeout_s)
        elif worker.alive and worker.ready.done() and self.spec.per_process > 1 and self.number in worker.instances:
            worker.post(self.number, DROP, (), {})
        worker.leave(self.number)
        if not worker.alive:
            await asyncio.shield(worker.gone)  # `terminate` has deadlines for each of its waits

    async def _close(self) -> None:
        await self._send("close")
        if self.spec.per_process > 1:
            await self._send(DROP)  # ends the instance's thread in the worker

    def memory_mb(self) -> float | None:
        pid = self.pid
        if pid is None:
            return None
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * PAGE_MB
        except (OSError, IndexError, ValueError):
            return None

    def tidy(self) -> None:
        if self._worker is not None and self._worker.alive:
            self._worker.tidy()


class RemoteBackend(Backend):
    """The workers of one pool. A placement sets `worker_class`. `options` are those of the placement, None if it has none."""

    worker_class: type[Worker]

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.options: Any = spec.placement_options
        self._workers: list[Worker] = []
        try:
            self.check_usable()
        except ConfigError as error:
            raise type(error)(f"environment {spec.name!r}: {error}") from None

    def check_usable(self) -> None:
        """Raises ConfigError if no worker could be started here, or none could import the environment."""

    async def prepare(self) -> None:
        """Called before each start of an instance."""

    def check(self, about: Any) -> None:
        """Raises WorldError if what a new worker says of itself is not what the pool needs."""

    def create(self, number: int) -> Instance:
        return RemoteInstance(self, number)

    def assign(self, instance: RemoteInstance) -> Worker:
        """A worker with room for one more instance; a new one if there is none."""
        self._workers = [worker for worker in self._workers if worker.alive]
        for worker in self._workers:
            if not worker.tainted and len(worker.instances) < self.spec.per_process:
                break
        else:
            worker = self.worker_class(self.spec, self.options)
            self._workers.append(worker)
        worker.instances[instance.number] = instance.died
        return worker
