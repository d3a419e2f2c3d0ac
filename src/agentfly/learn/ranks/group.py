"""The process group of the ranks: gloo on CPUs, NCCL on GPUs, gloo for both if ranks share one GPU.

Rank 0 sends commands through the store of the group, where the other ranks wait for as long as a rollout takes. Collectives run
only inside a command, so they may have a time limit. An error of one rank that is no bug (a failed check, a loss that is not
finite) is agreed on by `together`: every rank raises it at the same point and waits for the next command.
"""

from __future__ import annotations

import glob
import ipaddress
import logging
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import errors
from ...codec import decode, encode
from ...errors import AgentFlyError, ConfigError, InvariantError, RankError
from ...kernels import launching_on
from ...kernels.memory import ROOM
from ..group import LearnerGroup, T
from .environment import ThisRank

log = logging.getLogger(__name__)
LEAVE_S = 20.0
"""Seconds that rank 0 waits at the end for the other ranks."""
WAIT_S = 5.0
"""Seconds of one wait for a command; a wait is repeated until rank 0 sends one or is gone."""
IDLE_S = 5.0
"""Seconds that `close` waits for the threads of gloo."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""A variable that torchrun sets if it serves the store."""
PORT_KEY = "agentfly port"
"""Where torchrun's store holds the port of rank 0's store, if all ranks are on one machine."""
_dist: Any = dist  # names that its stubs do not export
KEPT = 64
"""Commands that the store keeps: each one ends with a collective, so no rank is further behind."""


class RankGroup(LearnerGroup):
    """This process as one of `size` ranks. Made by `join`; `close` leaves the group."""

    def __init__(self, this: ThisRank, device: torch.device, store: Any) -> None:
        super().__init__(this.rank, this.size)
        self.device = device
        self._store = store
        self._commands = 0
        self._lock = threading.Lock()
        self.broken: str | None = None
        """Why no command can be sent any more: a rank is lost, or the ranks are not at the same point."""

    @classmethod
    def join(cls, this: ThisRank, device: str | None = None, timeout_s: float = 600.0) -> RankGroup:
        """Wait for the other ranks. `device` is "cpu", "cuda" (one GPU per rank) or one GPU that all ranks share.

        Raises ConfigError if a rank is missing, has no separate device or runs other software.
        """
        problem: AgentFlyError | None = None
        chosen, backend = torch.device("cpu"), "gloo"
        try:
            chosen, backend = choose_device(this, device)
        except ConfigError as error:
            problem = error
        timeout = timedelta(seconds=timeout_s)
        if this.local_size == this.size and sys.platform == "linux":
            # gloo would take the interface of the host's name, which may not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            base = _open_store(this, timeout)
            if chosen.type == "cuda":
                torch.cuda.set_device(chosen)
            store = _dist.PrefixStore("group", base)
            dist.init_process_group(backend, store=store, rank=this.rank, world_size=this.size, timeout=timeout)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"rank {this.rank} could not meet the other {this.size - 1} ranks at {this.address} within {timeout_s:g} s "
                f"({reason[:200]}): check that every rank was started and that this address can be reached"
            ) from error
        group = cls(this, chosen, _dist.PrefixStore("commands", base))
        try:
            group.agree(problem)
            group._compare_software()
        except BaseException:
            group.close()
            raise
        return group

    def close(self) -> None:
        """Leave the group. The other ranks are not waited for."""
        if dist.is_initialized():
            dist.destroy_process_group()
            _wait_for_idle_threads()

    # -- commands ------------------------------------------------------------------------------------------------------------

    def send(self, name: str, **arguments: Any) -> None:
        """On rank 0: let the other ranks run a command. Raises RankError after a failure."""
        if self.broken is not None:
            raise RankError(self.broken)
        self._commands += 1
        self._store.set(f"{self._commands}", encode([name, arguments]))
        if self._commands > KEPT:
            self._store.delete_key(f"{self._commands - KEPT}")

    def receive(self) -> tuple[str, dict[str, Any]]:
        """On the other ranks: wait for the next command of rank 0. Raises RankError if rank 0 is gone."""
        self._commands += 1
        key = f"{self._commands}"
        while True:
            try:
                self._store.wait([key], timedelta(seconds=WAIT_S))
                name, arguments = decode(self._store.get(key))
            except RuntimeError as error:
                if self._answers(key):  # the wait was over, nothing else
                    continue
                raise RankError("rank 0 has ended") from error
            return name, arguments

    def end_ranks(self) -> None:
        """On rank 0: let the other ranks end, and wait for their word: the store may end with this process."""
        if self.broken is not None:
            return
        self.send("stop")
        self.broken = "the ranks have ended"
        words = [f"ended {rank} {self._commands}" for rank in range(1, self.size)]
        try:
            self._store.wait(words, timedelta(seconds=LEAVE_S))
        except RuntimeError as error:
            log.warning("a rank did not end: %s", error)

    def say_ended(self) -> None:
        """On the other ranks: answer `end_ranks`."""
        self._store.set(f"ended {self.rank} {self._commands}", b"")

    def _answers(self, key: str) -> bool:
        try:
            self._store.check([key])
        except RuntimeError:
            return False
        return True

    @contextmanager
    def leading(self, name: str, **arguments: Any) -> Iterator[None]:
        """On rank 0: send a command and run this rank's part of it in the body.

        An error that all ranks agreed on is raised as it is. Any other one leaves the ranks at different points: RankError.
        """
        with self._lock, launching_on(self.device):
            self.send(name, **arguments)
            try:
                yield
            except AgentFlyError:
                raise
            except torch.OutOfMemoryError as error:
                self.broken = f"rank {self.rank} ran out of memory during {name!r}"
                raise ConfigError(f"{self.broken}: use more ranks, or {ROOM}") from error
            except Exception as error:
                reason = str(error).splitlines()[0][:300] if str(error) else ""
                self.broken = f"a rank of the learner was lost during {name!r} ({type(error).__name__}: {reason})"
                raise RankError(self.broken) from error

    # -- collectives ---------------------------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def least(self, value: int) -> int:
        smallest = torch.tensor([value])
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Returns the bytes of rank `source`; the other ranks pass None."""
        size = torch.tensor([0 if data is None else len(data)])
        dist.broadcast(size, source)
        line = torch.empty(int(size), dtype=torch.uint8)
        if data is not None and self.rank == source:
            line = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else line
        if len(line):
            dist.broadcast(line, source)
        return line.numpy().tobytes()

    def from_leader(self, make: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
        data: bytes | None = None
        with self.together():
            if self.leads:
                data = pack(make())
        return unpack(self.broadcast(data))

    @torch.no_grad()
    def send_weights(self, *modules: nn.Module) -> None:
        """Give every rank the weights of rank 0."""
        for module in modules:
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor.data, 0)

    def agree(self, error: AgentFlyError | None) -> None:
        source = self.least(self.size if error is None else self.rank)
        if source == self.size:
            return
        data = encode([type(error).__name__, str(error)]) if self.rank == source else None
        kind, text = decode(self.broadcast(data, source))
        if error is not None:
            raise error
        raise getattr(errors, kind, InvariantError)(text if source == 0 else f"rank {source}: {text}")

    @contextmanager
    def together(self) -> Iterator[None]:
        error: AgentFlyError | None = None
        try:
            yield
        except AgentFlyError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001  raised below, on every rank
            error = InvariantError(f"{type(raised).__name__}: {raised}")
            error.__cause__ = raised
        self.agree(error)

    def _compare_software(self) -> None:
        python = ".".join(platform.python_version_tuple()[:2])
        package: Any = sys.modules[__name__.partition(".")[0]]  # the package imports this module, not the other way round
        libraries = f"torch {torch.__version__}, transformers {version('transformers')}"
        own = f"{package.__name__} {package.__version__}, {libraries}, Python {python}"
        wanted = self.broadcast(own.encode() if self.leads else None).decode()
        problem = None
        if own != wanted:
            problem = ConfigError(f"the ranks run different software: rank 0 has {wanted}, rank {self.rank} has {own}")
        self.agree(problem)


def _open_store(this: ThisRank, timeout: timedelta) -> Any:
    """Returns the store where the ranks meet: rank 0 serves it on the address of the group, or on loopback under torchrun.

    torch's own server listens on every interface, and commands to the ranks go through the store. Under torchrun on one machine
    it carries the port of rank 0's store alone. It is the store of ranks on several machines that torchrun has started, or that
    are given a host name, whose address on rank 0's machine may be that of loopback.
    """
    host, _, port = this.address.rpartition(":")
    one_machine = this.local_size == this.size
    if os.environ.get(AGENT_STORE) == "True" or not (one_machine or _is_address(host)):
        met = next(_dist.rendezvous("env://", this.rank, this.size, timeout=timeout))[0]
        if not one_machine:
            return met
        host = "127.0.0.1"
        if this.rank:
            port = met.get(PORT_KEY).decode()
        else:
            store = serve_store(host, timeout=timeout)
            met.set(PORT_KEY, f"{store.port}")
            return store
    if this.rank:
        return _dist.TCPStore(host, int(port), this.size, False, timeout)
    return serve_store(host, int(port), timeout)


def serve_store(host: str, port: int = 0, timeout: timedelta = timedelta(seconds=300)) -> Any:
    """Returns a store whose server listens on one address of this machine alone. Raises OSError if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    port = listener.getsockname()[1]
    own = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    return _dist.TCPStore(host, port, None, True, timeout, **own)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _wait_for_idle_threads() -> None:
    """Wait until gloo's threads have released the tensors of the last collectives; a frozen one is left after IDLE_S.

    A thread takes the GIL to release a tensor. If it asks for the GIL while the interpreter ends, Python ends the thread and
    the process aborts ("terminate called without an active exception"). The threads live on with the references to the
    destroyed group. One that waits for the GIL wakes every 5 ms, so its count of switches rises while this thread sleeps.
    """
    until = time.monotonic() + IDLE_S
    before: dict[str, str] | None = None
    while time.monotonic() < until:
        states = {path: _state(path) for path in glob.glob("/proc/self/task/*/status")}
        now = {path: state for path, state in states.items() if state is not None}
        if now == before and all(state.startswith("S") for state in now.values()):
            return
        before = now
        time.sleep(0.02)


def _state(path: str) -> str | None:
    """The state of a thread of gloo, and how often it has waited. None for other threads, and for one that has ended."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            fields = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return None
    return f"{fields['State']} {fields['voluntary_ctxt_switches']}" if fields["Name"].startswith("pt_gloo") else None


def choose_device(this: ThisRank, device: str | None) -> tuple[torch.device, str]:
    """Returns the device of a rank and the backend of its group. Raises ConfigError if there are more ranks than devices."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = torch.device(device)
    if wanted.type != "cuda":
        return wanted, "gloo"
    if not torch.cuda.is_available():
        raise ConfigError(f"agent.engine.device is {device!r}, but PyTorch sees no GPU; use 'cpu'")
    count = torch.cuda.device_count()
    index: Any = wanted.index  # None for "cuda"
    if index is not None:
        if index >= count:
            raise ConfigError(f"agent.engine.device is {device!r}, but PyTorch sees {count} GPUs")
        return wanted, "cpu:gloo,cuda:gloo"  # NCCL refuses two ranks on one GPU
    if this.local_size > count:
        raise ConfigError(
            f"{this.local_size} ranks of the learner need as many GPUs, but PyTorch sees {count}: lower learner.ranks, or let "
            'all ranks share one GPU with agent.engine.device = "cuda:0" (slow: for tests)'
        )
    return torch.device("cuda", this.local_rank), "cpu:gloo,cuda:nccl"
