"""Placement `container`: an environment in a container of its own, by Docker or enroot.

The worker's program is `keeper`, which this machine mounts into the container read-only with AgentFly and the environment's
module, under the paths that they have here; the frames travel over the container's standard streams. By default a container has
no network, a read-only file system with a small /tmp, no capabilities, and limits of memory, CPU and processes. The engine must
be there: a missing one is a ConfigError with the cure when the pool is made, and images are never pulled in silence.

Nothing stays. A container ends when its standard input does, which the kernel closes with the trainer; Docker removes it then.
Each carries its owner's label, and what a killed trainer could still have left is removed before the first container of the
next.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
from typing import Any

from ...errors import ConfigError, WorldError
from ..rpc.client import RemoteBackend, Worker, WorkerTransport
from ..rpc.frames import pack
from ..spec import Spec
from .bundle import PACKAGE, Bundle, bundle_of, hello_of
from .docker import Docker, DockerError, Streams, socket_path
from .options import ContainerPlace
from .owner import LABEL, VARIABLE, is_dead, own_label
from .spawn import SPAWNER, WorkerProcess

log = logging.getLogger(__name__)
NOBODY = "65534:65534"
_ENGINE_VARIABLES = ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "USER", "LOGNAME")
_numbers = itertools.count(1)


def mounted(place: ContainerPlace, bundle: Bundle) -> list[str]:
    """What the container sees of this machine, read-only, under the paths that it has here."""
    named = {os.path.abspath(os.path.expanduser(path)) for path in place.visible}
    return [path for path in bundle.paths if place.code == "mount" or path in named]


def keeper_words(place: ContainerPlace, bundle: Bundle, walls: dict[str, Any] | None) -> list[str]:
    """The command inside."""
    config: dict[str, Any] = {"path": list(bundle.imports)}
    if walls is not None:
        config["walls"] = walls
    script = PACKAGE / "resources" / "rpc" / "container_main.py"
    program = ["-m", "agentfly.resources.rpc.container_main"] if place.code == "image" else [str(script)]
    return [place.python, "-I", "-X", "utf8", *program, json.dumps(config)]


def container_config(spec: Spec, place: ContainerPlace, bundle: Bundle) -> dict[str, Any]:
    """What Docker is asked for; every wall is written out, none is left to the engine's defaults."""
    mounts = [{"Type": "bind", "Source": path, "Target": path, "ReadOnly": True} for path in mounted(place, bundle)]
    return {
        "Image": place.image,
        "Entrypoint": [],
        "Cmd": keeper_words(place, bundle, None),
        "Env": ["HOME=/tmp", "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"],
        "WorkingDir": "/tmp",
        "User": place.user or NOBODY,
        "Tty": False,
        "OpenStdin": True,
        "StdinOnce": True,  # the engine closes its input with our connection, and it ends with its input
        **dict.fromkeys(("AttachStdin", "AttachStdout", "AttachStderr"), True),
        "NetworkDisabled": place.network == "none",
        "Labels": {LABEL: own_label(), "agentfly.environment": spec.name},
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": place.network,
            "Memory": place.memory_mb << 20,
            "MemorySwap": place.memory_mb << 20,
            "NanoCpus": int(place.cpus * 1e9),
            "PidsLimit": place.processes,
            "ReadonlyRootfs": place.read_only,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Privileged": False,
            "IpcMode": "private",
            "Tmpfs": {"/tmp": f"rw,nosuid,nodev,size={place.disk_mb}m,mode=1777"},
            "Mounts": mounts,
            "LogConfig": {"Type": "none"},  # what it prints comes to us, and fills no disk
        },
    }


class DockerTransport(WorkerTransport):
    thing = "container"

    def __init__(self, spec: Spec, place: ContainerPlace, docker: Docker, reaping: asyncio.Future[int]) -> None:
        super().__init__(spec)
        self._place, self._docker, self._reaping = place, docker, reaping
        self._name = ""
        self._creating: asyncio.Task[str] | None = None
        self._streams: Streams | None = None
        self._pump: asyncio.Task[None] | None = None

    async def open(self, worker: Worker, number: int) -> None:
        await asyncio.shield(self._reaping)
        bundle = bundle_of(self.spec, self._place.visible)
        self._name = f"agentfly-{os.getpid()}-{next(_numbers)}"  # ours to remove from now on, whether the engine made it or not
        config = container_config(self.spec, self._place, bundle)
        # Not to be cancelled: the engine would go on, and what it made could not be removed before it is there.
        self._creating = asyncio.get_running_loop().create_task(self._docker.create(self._name, config))
        await asyncio.shield(self._creating)
        self._streams = await self._docker.attach(self._name)
        await self._docker.start(self._name)
        self._pump = asyncio.get_running_loop().create_task(self._carry(self._streams, worker))
        self._streams.write(pack(hello_of(self.spec, bundle, number)))

    async def _carry(self, streams: Streams, worker: Worker) -> None:
        while data := await streams.read():
            worker.data_received(data)
        worker.connection_lost(None)

    def write(self, data: bytes) -> None:
        assert self._streams is not None
        self._streams.write(data)

    async def terminate(self, asked: bool) -> str:
        tail = ""
        if self._creating is not None and not self._creating.done():
            await asyncio.wait([self._creating])  # it has a deadline of its own
        if self._creating is not None and not self._creating.cancelled():
            self._creating.exception()  # whoever waited has it, or has been cancelled
        if self._pump is not None and self._pump is not asyncio.current_task():
            self._pump.cancel()
            await asyncio.wait([self._pump], timeout=5)
        if self._streams is not None:
            tail = self._streams.tail
            self._streams.close()
        if self._name:
            try:
                await self._docker.remove(self._name)
            except DockerError as error:
                log.warning("the container %s of %s may still be there: %s", self._name, self.spec.name, error)
        return f"by itself; it said: {tail}" if tail else "by itself"


async def reap(docker: Docker) -> int:
    """Remove the containers of trainers that are dead; how many."""
    count = 0
    for container, owner, state in await docker.labelled(LABEL):
        if is_dead(owner) or state in ("exited", "dead"):
            await docker.remove(container)
            count += 1
    if count:
        log.info("removed %d containers that a killed trainer had left", count)
    return count


def enroot_words(enroot: str, spec: Spec, place: ContainerPlace, bundle: Bundle) -> list[str]:
    """The command that starts a container. Enroot has no limits and no network of its own: the keeper puts those walls up."""
    words = [enroot, "start"]
    if not place.read_only:
        words.append("--rw")
    for path in mounted(place, bundle):
        kind = "dir" if os.path.isdir(path) else "file"
        if ":" in path:
            raise ConfigError(f"environment {spec.name!r}: enroot cannot mount {path!r}: it has a colon")
        words += ["--mount", f"{path}:{path}:none:x-create={kind},bind,ro,nosuid,nodev"]
    words += ["--mount", f"tmpfs:/tmp:tmpfs:x-create=dir,rw,nosuid,nodev,mode=1777,size={place.disk_mb}m"]
    for variable in ("HOME=/tmp", "TMPDIR=/tmp", "PYTHONDONTWRITEBYTECODE=1", f"{VARIABLE}={own_label()}"):
        words += ["--env", variable]
    walls = {
        "network": place.network,
        "memory_mb": place.memory_mb,
        "cpus": place.cpus,
        "processes": place.processes,
    }
    return [*words, "--", place.image, *keeper_words(place, bundle, walls)]


class EnrootTransport(WorkerTransport):
    thing = "container"

    def __init__(self, spec: Spec, place: ContainerPlace, enroot: str, reaping: asyncio.Future[int]) -> None:
        super().__init__(spec)
        self._place, self._enroot, self._reaping = place, enroot, reaping
        self._born: WorkerProcess | None = None
        self._transport: asyncio.Transport | None = None

    async def open(self, worker: Worker, number: int) -> None:
        await asyncio.shield(self._reaping)
        bundle = bundle_of(self.spec, self._place.visible)
        command = enroot_words(self._enroot, self.spec, self._place, bundle)
        variables = [*_ENGINE_VARIABLES, *(name for name in os.environ if name.startswith("ENROOT_"))]
        self._born = await SPAWNER.spawn(number, variables, command)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: worker, sock=self._born.channel)
        self._transport.write(pack(hello_of(self.spec, bundle, number)))

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def terminate(self, asked: bool) -> str:
        if self._born is None:
            return "before it began"
        if not asked:  # the keeper has its last line to write
            for _ in range(100):
                if self._born.popen.poll() is not None:
                    break
                await asyncio.sleep(0.01)
        tail = self._born.tail()
        if self._transport is not None:
            self._transport.abort()
        await SPAWNER.terminate(self._born)
        return f"by itself; it said: {tail}" if tail else "by itself"

    def tidy(self) -> None:
        if self._born is not None:
            self._born.tidy()


def reap_processes() -> int:
    """End the container processes of trainers that are dead, found by the variable that each carries; how many."""
    count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:
                found = file.read().split(b"\0")
            owners = [word.partition(b"=")[2].decode() for word in found if word.startswith(f"{VARIABLE}=".encode())]
            if owners and is_dead(owners[0]):
                os.kill(int(name), signal.SIGKILL)
                count += 1
    return count


class ContainerBackend(RemoteBackend):
    def __init__(self, spec: Spec) -> None:
        place = spec.in_place
        if not isinstance(place, ContainerPlace):
            raise ConfigError(f"environment {spec.name!r}: placement 'container' has no options to read")
        bundle_of(spec, place.visible)  # what could not be imported inside is refused before anything starts
        super().__init__(spec)
        self._place = place
        self._enroot = self._socket = ""
        self._reaping: asyncio.Task[int] | None = None
        try:
            if place.engine == "docker":
                self._socket = socket_path(place.socket)
            else:
                self._enroot = _find_enroot()
        except ConfigError as error:
            raise ConfigError(f"environment {spec.name!r}: {error}") from None

    def transport(self) -> WorkerTransport:
        loop = asyncio.get_running_loop()
        if self._enroot:
            self._reaping = self._reaping or loop.create_task(asyncio.to_thread(reap_processes))
            return EnrootTransport(self.spec, self._place, self._enroot, self._reaping)
        docker = Docker(self._socket)
        self._reaping = self._reaping or loop.create_task(_reap_first(docker))
        return DockerTransport(self.spec, self._place, docker, self._reaping)


def _find_enroot() -> str:
    found = shutil.which("enroot")
    if found is None:
        raise ConfigError(
            "enroot is not installed here (no such command): install it, use engine = 'docker', or placement = 'sandbox', "
            "which needs neither"
        )
    return found


async def _reap_first(docker: Docker) -> int:
    """What cannot be cleaned away is said, and does not keep a new container from starting."""
    try:
        return await reap(docker)
    except WorldError as error:
        log.warning("looking for what killed trainers have left failed: %s", error)
        return 0
