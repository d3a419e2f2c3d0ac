"""How new weights reach the workers: in buckets, each packed into one flat buffer with a layout of names.

    memory      same machine: one anonymous file in memory (memfd) holds all weights; workers map it. A worker that is started
                again reads the present version from there.
    ipc         same GPU, other process: one staging buffer on the GPU, opened by its CUDA IPC handle once per worker
    broadcast   other GPU or other machine: torch.distributed broadcast in a separate group, gloo on CPUs, NCCL on GPUs

Nothing passes through the disk. A sender runs in a thread of the trainer; `Peer.call` sends a message and waits for the reply.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import queue
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed

from ...engines.copies import Bucket
from ...errors import EngineError
from ...learn.ranks.group import serve_store

dist: Any = torch.distributed
ALIGN = 64
LOOPBACK = "127.0.0.1"
TIMEOUT_S = 600.0
"""Seconds that one bucket may take."""
Layout = list[list[Any]]
"""Per tensor: name, dtype, shape, offset in bytes."""
Kind = Literal["memory", "ipc", "broadcast"]


class Peer(Protocol):
    """A worker, seen from the sender's thread."""

    @property
    def alive(self) -> bool: ...

    def post(self, kind: str, value: Mapping[str, Any]) -> Future[Any]:
        """Send a message. The future holds the reply; it fails if the worker dies."""


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

    def send(self, version: int, peers: Sequence[Peer]) -> Failed:
        """Let the workers copy the weights. Returns the live workers that did not, and why. A worker that dies is left out."""
        where = {"how": self.kind, "path": f"/proc/{os.getpid()}/fd/{self._fd}", "size": self._size}
        loads = Loads(version, peers, where)
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

    def send(self, version: int, peers: Sequence[Peer], buckets: Iterable[Bucket]) -> tuple[int, Failed]:
        """Hand the weights over. Returns their bytes, and the live workers that did not take them."""
        loads = Loads(version, peers, {"how": self.kind})
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

    def _handle(self, peer: Peer) -> dict[str, Any]:
        """The handle of the staging buffer for one worker. Each has its own: PyTorch counts the users of a handle."""
        handle = self._handles.get(id(peer))
        if handle is None:
            from torch.multiprocessing import reductions

            assert self._staging is not None
            share: Any = reductions.reduce_tensor
            _, arguments = share(self._staging)
            # (class, size, stride, offset, storage class, dtype, device, handle, bytes, ...): what comes after the device
            # travels as data; the rest is known for a flat buffer of bytes.
            handle = self._handles[id(peer)] = {
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
        self._members: list[Peer] = []
        self._group: Any = None
        self._name = ""

    def send(self, version: int, peers: Sequence[Peer], buckets: Callable[[], Iterable[Bucket]]) -> tuple[int, Failed]:
        """Hand the weights over. If a worker dies on the way, the others get them again from the start.

        Returns their bytes, and the live workers that did not take them.
        """
        loads = Loads(version, peers, {"how": self.kind})
        while members := loads.members:
            try:
                return self._send_to(members, buckets()), loads.end()
            except RuntimeError as error:  # torch here, or a worker, reports a lost rank
                self._group, self._members = None, []
                if not _some_died(members):
                    loads.failed |= dict.fromkeys(members, f"the broadcast failed: {error}")
        return 0, loads.failed

    def _send_to(self, members: list[Peer], buckets: Iterable[Bucket]) -> int:
        """Raises RuntimeError if a rank is lost."""
        joining: list[tuple[Peer, Future[Any]]] = []
        if members != self._members:
            joining = self._regroup(members)
        total = 0
        for bucket in buckets:
            layout, size = layout_of(bucket)
            flat = torch.empty(size, dtype=torch.uint8, device=self._device)
            fill(flat, bucket, layout)
            parts = [(peer, peer.post("bucket", {"layout": layout, "size": size})) for peer in members]
            _broadcast(self._group, flat)
            if failed := _wait([*joining, *parts]):
                raise RuntimeError(next(iter(failed.values())))
            joining = []
            total += size
        if not all(peer.alive for peer in members):
            raise RuntimeError("a worker was lost")
        return total

    def _regroup(self, members: list[Peer]) -> list[tuple[Peer, Future[Any]]]:
        """Make a group of the trainer and these workers. They join it in their own time."""
        if self._store is None:
            self._store = serve_store(self._host)
        self._name, size = f"weights-{next(self._groups)}", len(members) + 1
        where = {"host": self._host, "port": self._store.port, "group": self._name, "of": size, "timeout_s": self._timeout_s}
        joining = [
            (peer, peer.post("bucket", {"layout": [], "join": {**where, "rank": rank}})) for rank, peer in enumerate(members, 1)
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


def _broadcast(group: Any, flat: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([flat], options).wait()
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def _some_died(members: Sequence[Peer], patience_s: float = 10.0) -> bool:
    """Whether a worker is found dead soon: a lost rank shows in the group before its silence is noticed."""
    until = time.monotonic() + patience_s
    while all(peer.alive for peer in members):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


Failed = dict[Peer, str]
"""Live workers that did not take new weights, and why."""


class Loads:
    """One hand-over to several workers: "load" begins it, "bucket" goes on, and `end` waits for all of them."""

    def __init__(self, version: int, peers: Sequence[Peer], how: Mapping[str, Any]) -> None:
        self.failed: Failed = {}
        self._ends = [(peer, peer.post("load", {"version": version, **how})) for peer in peers if peer.alive]

    @property
    def members(self) -> list[Peer]:
        """The workers that live and have not failed."""
        return [peer for peer, _ in self._ends if peer.alive and peer not in self.failed]

    def hand_out(self, part: Mapping[str, Any], own: Callable[[Peer], Mapping[str, Any]] = lambda _: {}) -> None:
        """Send a message "bucket" to each worker, with what is its own, and wait until it is copied."""
        self.failed |= _wait([(peer, peer.post("bucket", {**part, **own(peer)})) for peer in self.members])

    def end(self) -> Failed:
        """Tell the workers that this is all, and wait until they sample from it."""
        self.hand_out({"layout": None})
        self.failed |= _wait([(peer, end) for peer, end in self._ends if peer not in self.failed])
        return self.failed


def _wait(replies: Sequence[tuple[Peer, Future[Any]]]) -> Failed:
    """Wait for the replies. Returns the live workers that reported an error or no reply."""
    failed: Failed = {}
    for peer, reply in replies:
        try:
            reply.result(TIMEOUT_S)
        except TimeoutError:
            failed[peer] = f"it did not take them within {TIMEOUT_S:g} s"
        except Exception as error:  # noqa: BLE001 - whatever its type, it stands for the worker's own
            if peer.alive:
                failed[peer] = str(error)
    return failed


# ---- the worker's side ---------------------------------------------------------------------------------------------------


_groups: dict[str, Any] = {}
"""The process group that this worker joined last, by name."""
_mapped: dict[tuple[str, int], torch.Tensor] = {}
"""The trainer's memory file, by its path and size."""
_opened: dict[int, torch.Tensor] = {}
"""The staging buffer on the GPU that was opened last, by its number."""


class Receiver:
    """The buckets of one version, for `take_weights`. `put` is called as messages arrive.

    Each future that `put` returns is done when the bucket has been copied, that is when the next one is requested.
    """

    def __init__(self, load: Mapping[str, Any]) -> None:
        self._how: Kind = load["how"]
        self._parts: queue.SimpleQueue[tuple[Mapping[str, Any], Future[None]]] = queue.SimpleQueue()
        self._closed = False
        self._current: Future[None] | None = None  # of the bucket that is being copied
        self._device = default_device()
        self._memory: torch.Tensor | None = None
        if self._how == "memory":
            self._memory = _map(load["path"], load["size"])

    def put(self, part: Mapping[str, Any]) -> Future[None]:
        """Add the message of a bucket."""
        done: Future[None] = Future()
        if self._closed:
            done.set_exception(EngineError("the weights are not being loaded"))
        else:
            self._parts.put((part, done))
        return done

    def close(self) -> None:
        """Fail what was not copied."""
        self._closed = True
        if self._current is not None and not self._current.done():
            self._current.set_exception(EngineError("the weights could not be copied"))
        with contextlib.suppress(queue.Empty):
            while True:
                _, done = self._parts.get_nowait()
                done.set_exception(EngineError("the weights are not being loaded"))

    def __iter__(self) -> Iterator[Bucket]:
        while True:
            try:
                part, done = self._parts.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise EngineError(f"no weights came for {TIMEOUT_S:g} s") from None
            self._current = done
            if part["layout"] is None:
                done.set_result(None)
                return
            try:
                if "join" in part:
                    self._join(part["join"])
                    done.set_result(None)
                    continue
                yield views(self._bytes(part), part["layout"])
            except RuntimeError as error:
                # A rank of the group is gone. The trainer makes another group and begins again.
                if self._how != "broadcast":
                    raise
                _groups.clear()
                done.set_exception(EngineError(f"the broadcast failed: {error}"))
                continue
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the copy has ended before the sender may overwrite the buffer
            done.set_result(None)

    def _bytes(self, part: Mapping[str, Any]) -> torch.Tensor:
        if self._memory is not None:
            return self._memory
        if self._how == "ipc":
            return _open_ipc(part)
        flat = torch.empty(part["size"], dtype=torch.uint8, device=self._device)
        if not _groups:
            raise RuntimeError("the group of the broadcast was lost")
        _broadcast(next(iter(_groups.values())), flat)
        return flat

    def _join(self, join: Mapping[str, Any]) -> None:
        _groups.clear()
        limit_s = join["timeout_s"]
        host = socket.gethostbyname(join["host"])
        store = dist.TCPStore(host, join["port"], is_master=False, timeout=timedelta(seconds=limit_s))
        group = make_group(store, join["group"], join["rank"], join["of"], self._device, limit_s)
        _groups[join["group"]] = group


def _map(path: str, size: int) -> torch.Tensor:
    """A view of the trainer's memory file. It stays mapped: each later version costs no page faults."""
    if (path, size) not in _mapped:
        _mapped.clear()
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _mapped[path, size] = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        finally:
            os.close(file)
    return _mapped[path, size]


def _open_ipc(part: Mapping[str, Any]) -> torch.Tensor:
    """The staging buffer of the trainer, by its CUDA IPC handle. The last one stays open; an older one is closed."""
    number = part["number"]
    if number not in _opened:
        from torch.multiprocessing import reductions

        _opened.clear()
        rebuild: Any = reductions.rebuild_cuda_tensor
        _opened[number] = rebuild(
            torch.Tensor,
            (part["size"],),
            (1,),
            part["offset"],
            torch.UntypedStorage,
            torch.uint8,
            torch.cuda.current_device(),
            *part["ipc"],
        )
    return _opened[number]
