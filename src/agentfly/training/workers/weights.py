"""How new weights reach the workers: in buckets, each packed into one flat buffer with a layout of names.

    memory      same machine: one anonymous file in memory (memfd) holds all weights; workers map it. A worker that is started
                again reads the present version from there.
    ipc         same GPU, other process: one staging buffer on the GPU, opened by its CUDA IPC handle once per worker
    broadcast   other GPU or other machine: torch.distributed broadcast in a separate group, gloo on CPUs, NCCL on GPUs

Nothing passes through the disk. A sender runs in a thread of the trainer; `Recipient.post` sends a message, and its future
holds the reply.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed

from ...engines.copies import Bucket
from ...fleet.bare import machine
from ...learn.ranks.group import serve_store

dist: Any = torch.distributed
ALIGN = 64
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 600.0
"""Seconds that one bucket may take."""
Layout = list[list[Any]]
"""Per tensor: name, dtype, shape, offset in bytes."""
Kind = Literal["memory", "ipc", "broadcast"]


class Recipient(Protocol):
    """A worker, seen from the sender's thread."""

    @property
    def alive(self) -> bool: ...

    @property
    def about(self) -> Mapping[str, Any]:
        """What the worker said of its machine."""

    def post(self, kind: str, value: Mapping[str, Any]) -> Future[Any]:
        """Send a message. The future holds the reply; it fails if the worker dies."""


W = TypeVar("W", bound=Recipient)


def layout_of(bucket: Bucket, start: int = 0) -> tuple[Layout, int]:
    """Returns where each tensor of a bucket lies in a flat buffer, and where the next bucket begins."""
    layout: Layout = []
    for name, tensor in bucket:
        layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start])
        start += -(-tensor.nbytes // ALIGN) * ALIGN
    return layout, start


def views(buffer: torch.Tensor, layout: Layout) -> Bucket:
    """The tensors of a layout, as views of a flat buffer of bytes."""
    bucket: Bucket = []
    for name, dtype, shape, offset in layout:
        kind = getattr(torch, dtype)
        count = 1
        for size in shape:
            count *= size
        part = buffer[offset : offset + count * kind.itemsize]
        bucket.append((name, part.view(kind).view(shape)))
    return bucket


def fill(buffer: torch.Tensor, bucket: Bucket, layout: Layout) -> None:
    """Copy a bucket into a flat buffer."""
    with torch.no_grad():
        for (_, source), (_, target) in zip(bucket, views(buffer, layout), strict=True):
            target.copy_(source.detach(), non_blocking=False)


def gpu_identity(device: Any) -> str | None:
    """Names a GPU across processes, or None for another device."""
    if device is None or torch.device(device).type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(torch.device(device)).uuid)


def default_device() -> torch.device:
    """The device on which this process samples or receives weights."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def has_expandable_segments() -> bool:
    """Whether PyTorch allocates GPU memory in a way that CUDA IPC cannot share."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", "") for name in names)


# ---- the trainer's side --------------------------------------------------------------------------------------------------


class MemorySender:
    """All weights in one memory file. `write` once per version; `send` may be called for each worker, also a later one."""

    kind: Kind = "memory"

    def __init__(self) -> None:
        self._fd = -1
        self._size = 0
        self._map: mmap.mmap | None = None
        self._layouts: list[Layout] = []

    @staticmethod
    def works() -> bool:
        """Whether this system has anonymous files in memory that another process can open."""
        return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")

    def write(self, buckets: Iterable[Bucket]) -> int:
        """Copy the weights into the file. Returns their bytes."""
        self._layouts, end = [], 0
        for bucket in buckets:
            layout, after = layout_of(bucket, end)
            self._grow(after)
            fill(self._buffer(), bucket, layout)
            self._layouts.append(layout)
            end = after
        return end

    def send(self, version: int, workers: Sequence[Recipient]) -> Failed:
        """Let the workers copy the weights. Returns the live workers that did not, and why. A worker that dies is left out."""
        where = {"how": self.kind, "path": f"/proc/{os.getpid()}/fd/{self._fd}", "size": self._size}
        loads = Loads(version, workers, where)
        for layout in self._layouts:
            loads.hand_out({"layout": layout})
        return loads.end()

    def close(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is still in use: the memory is freed with it
                self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _grow(self, size: int) -> None:
        if size <= self._size:
            return
        if self._fd < 0:
            self._fd = os.memfd_create("agentfly-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)  # the pages that are there stay
        self._size, self._map = size, mmap.mmap(self._fd, size)

    def _buffer(self) -> torch.Tensor:
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=torch.uint8)


class IpcSender:
    """Workers on the learner's GPU. Each bucket goes through one staging buffer, whose handle each worker opens once.

    The buffer is not filled again before every worker has copied it. It is allocated once and only replaced by a larger one.
    """

    kind: Kind = "ipc"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging: torch.Tensor | None = None
        self._numbers = itertools.count(1)
        self._handles: dict[int, dict[str, Any]] = {}

    def send(self, version: int, workers: Sequence[Recipient], buckets: Iterable[Bucket]) -> tuple[int, Failed]:
        """Hand the weights over. Returns their bytes, and the live workers that did not take them."""
        loads = Loads(version, workers, {"how": self.kind})
        total = 0
        for bucket in buckets:
            layout, size = layout_of(bucket)
            self._reserve(size)
            assert self._staging is not None
            fill(self._staging, bucket, layout)
            torch.cuda.synchronize(self._device)
            loads.hand_out({"layout": layout}, self._handle)
            total += size
        return total, loads.end()

    def _reserve(self, size: int) -> None:
        if self._staging is not None and self._staging.numel() >= size:
            return
        self._handles.clear()
        self._staging = torch.empty(size, dtype=torch.uint8, device=self._device)

    def _handle(self, worker: Recipient) -> dict[str, Any]:
        """The handle of the staging buffer for one worker. Each has its own: PyTorch counts the users of a handle."""
        handle = self._handles.get(id(worker))
        if handle is None:
            from torch.multiprocessing import reductions

            assert self._staging is not None
            share: Any = reductions.reduce_tensor
            _, arguments = share(self._staging)
            # (class, size, stride, offset, storage class, dtype, device, handle, bytes, ...): what comes after the device
            # travels as data; the rest is known for a flat buffer of bytes.
            handle = self._handles[id(worker)] = {
                "number": next(self._numbers),
                "ipc": list(arguments[7:]),
                "size": self._staging.numel(),
                "offset": int(arguments[3]),
            }
        return handle

    def close(self) -> None:
        self._staging = None
        self._handles.clear()


class BroadcastSender:
    """Workers on other GPUs or machines. The trainer is rank 0 of a group that is made anew when the workers change."""

    kind: Kind = "broadcast"

    def __init__(self, device: torch.device, host: str = LOOPBACK, timeout_s: float = 30.0) -> None:
        self._device, self._host, self._timeout_s = device, host, timeout_s
        self._store: Any = None
        self._groups = itertools.count(1)
        self._members: list[Recipient] = []
        self._group: Any = None
        self._name = ""

    def send(self, version: int, workers: Sequence[Recipient], buckets: Callable[[], Iterable[Bucket]]) -> tuple[int, Failed]:
        """Hand the weights over. If a worker dies on the way, the others get them again from the start.

        Returns their bytes, and the live workers that did not take them.
        """
        loads = Loads(version, workers, {"how": self.kind})
        while members := loads.members:
            try:
                return self._send_to(members, buckets()), loads.end()
            except RuntimeError as error:  # torch here, or a worker, reports a lost rank
                self._group, self._members = None, []
                if not _some_died(members):
                    loads.failed |= dict.fromkeys(members, f"the broadcast failed: {error}")
        return 0, loads.failed

    def _send_to(self, members: list[Recipient], buckets: Iterable[Bucket]) -> int:
        """Raises RuntimeError if a rank is lost."""
        joining: list[tuple[Recipient, Future[Any]]] = []
        if members != self._members:
            joining = self._regroup(members)
        total = 0
        for bucket in buckets:
            layout, size = layout_of(bucket)
            flat = torch.empty(size, dtype=torch.uint8, device=self._device)
            fill(flat, bucket, layout)
            parts = [(worker, worker.post("bucket", {"layout": layout, "size": size})) for worker in members]
            broadcast(self._group, flat)
            if failed := _wait([*joining, *parts]):
                raise RuntimeError(next(iter(failed.values())))
            joining = []
            total += size
        if not all(worker.alive for worker in members):
            raise RuntimeError("a worker was lost")
        return total

    def _regroup(self, members: list[Recipient]) -> list[tuple[Recipient, Future[Any]]]:
        """Make a group of the trainer and these workers. They join it in their own time."""
        if self._store is None:
            self._store = serve_store(self._host)
        self._name, size = f"weights-{next(self._groups)}", len(members) + 1
        where = {"host": self._host, "port": self._store.port, "group": self._name, "of": size, "timeout_s": self._timeout_s}
        joining = [
            (worker, worker.post("bucket", {"layout": [], "join": {**where, "rank": rank}}))
            for rank, worker in enumerate(members, 1)
        ]
        self._group = make_group(self._store, self._name, 0, size, self._device, self._timeout_s)
        self._members = members
        return joining

    def close(self) -> None:
        self._group = self._store = None
        self._members = []


def make_group(store: Any, name: str, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """A process group apart from torch's default one, which may belong to the ranks of the learner."""
    own = dist.PrefixStore(name, store)
    limit = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(own, rank, size, options)
    if store.host != LOOPBACK:
        return dist.ProcessGroupGloo(own, rank, size, limit)
    options = dist.ProcessGroupGloo._Options()  # gloo would listen on the address of this machine's name
    options._timeout, options._devices = limit, [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return dist.ProcessGroupGloo(own, rank, size, options)


def broadcast(group: Any, flat: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([flat], options).wait()
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def _some_died(members: Sequence[Recipient], patience_s: float = 10.0) -> bool:
    """Whether a worker is found dead soon: a lost rank shows in the group before its silence is noticed."""
    until = time.monotonic() + patience_s
    while all(worker.alive for worker in members):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


Failed = dict[Recipient, str]
"""Live workers that did not take new weights, and why."""


class Loads:
    """One hand-over to several workers: "load" begins it, "bucket" goes on, and `end` waits for all of them."""

    def __init__(self, version: int, workers: Sequence[Recipient], how: Mapping[str, Any]) -> None:
        self.failed: Failed = {}
        self._ends = [(worker, worker.post("load", {"version": version, **how})) for worker in workers if worker.alive]

    @property
    def members(self) -> list[Recipient]:
        """The workers that live and have not failed."""
        return [worker for worker, _ in self._ends if worker.alive and worker not in self.failed]

    def hand_out(self, part: Mapping[str, Any], own: Callable[[Recipient], Mapping[str, Any]] = lambda _: {}) -> None:
        """Send a message "bucket" to each worker, with what is its own, and wait until it is copied."""
        self.failed |= _wait([(worker, worker.post("bucket", {**part, **own(worker)})) for worker in self.members])

    def end(self) -> Failed:
        """Tell the workers that this is all, and wait until they sample from it."""
        self.hand_out({"layout": None})
        self.failed |= _wait([(worker, end) for worker, end in self._ends if worker not in self.failed])
        return self.failed


def _wait(replies: Sequence[tuple[Recipient, Future[Any]]]) -> Failed:
    """Wait for the replies. Returns the live workers that reported an error or no reply."""
    failed: Failed = {}
    for worker, reply in replies:
        try:
            reply.result(TIMEOUT_S)
        except TimeoutError:
            failed[worker] = f"it did not take them within {TIMEOUT_S:g} s"
        except Exception as error:  # noqa: BLE001 - whatever its type, it stands for the worker's own
            if worker.alive:
                failed[worker] = str(error)
    return failed


class Senders:
    """The sender to each worker, made at its first use. `transport` None: it follows from where learner and worker are."""

    def __init__(self, transport: Kind | None, address: str | None) -> None:
        self._transport, self._address = transport, address or LOOPBACK
        self._made: dict[Kind, Any] = {}

    def of(self, workers: Sequence[W], device: torch.device) -> list[tuple[Any, list[W]]]:
        """The workers by their sender. `device` is that of the learner's weights."""
        groups: dict[Kind, list[W]] = {}
        for worker in workers:
            groups.setdefault(self._transport or _way_to(worker.about, device), []).append(worker)
        self._made |= {kind: self._make(kind, device) for kind in groups.keys() - self._made.keys()}
        return [(self._made[kind], some) for kind, some in groups.items()]

    def _make(self, kind: Kind, device: torch.device) -> Any:
        if kind == "memory":
            return MemorySender()
        return IpcSender(device) if kind == "ipc" else BroadcastSender(device, self._address)

    def close(self) -> None:
        for sender in self._made.values():
            sender.close()
        self._made.clear()


def _way_to(worker: Mapping[str, Any], device: torch.device) -> Kind:
    here, there = gpu_identity(device), worker.get("device")
    if worker.get("machine") != machine() or not MemorySender.works():
        return "broadcast"
    if here is not None and here == there and not has_expandable_segments():
        return "ipc"
    return "broadcast" if here is not None and there is not None and here != there else "memory"
