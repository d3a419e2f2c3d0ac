"""The worker's side of new weights (`weights` is the trainer's): buckets are copied as their messages arrive."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch

from ...engines.copies import Bucket
from ...errors import EngineError
from .weights import TIMEOUT_S, Kind, broadcast, default_device, dist, make_group, views

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
        broadcast(next(iter(_groups.values())), flat)
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
