"""Placement `container`: an environment in a container, by Docker or enroot.

The container runs `container_main`. AgentFly, msgpack and the environment's module are mounted read-only under the paths that
they have here, and frames travel over the container's standard streams. By default a container has no network, a read-only file
system with a small /tmp, no capabilities, and limits of memory, CPU and processes. A missing engine is a ConfigError when the
pool is made.

A container ends with its standard input, which the kernel closes when the trainer ends; Docker then removes it. It carries its
trainer's label (`own_label`), so the first container of a later trainer removes what a killed one has left.
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
from pathlib import Path
from typing import Any

from ...errors import ConfigError, WorldError
from ..placements import ContainerOptions
from ..rpc.client import Worker
from ..rpc.frames import SANDBOXED, pack_hello
from ..spec import Spec
from .bundle import PACKAGE, Bundle, bundle_of, hello_of
from .docker import Docker, DockerError, Streams, socket_path
from .process import ProcessWorker
from .remote import RemoteBackend

log = logging.getLogger(__name__)
UNPRIVILEGED = "65534:65534"
ENGINE_VARIABLES = ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "USER", "LOGNAME")
LAST_LINE_CHECKS = 100
"""How many times 10 ms to wait until enroot's process has ended, after it has printed how the worker ended."""
LABEL, VARIABLE = "agentfly.owner", "AGENTFLY_OWNER"
"""Where a container carries the label of its trainer: boot id / PID namespace / pid / start time of the process."""
_numbers = itertools.count(1)


def _here() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> str:
    """In ticks since the boot. Together with the pid it names one process and no later one."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def own_label() -> str:
    """The label of this process, by which a later trainer can tell whether this one still runs."""
    return f"{_here()}/{os.getpid()}/{_start_time(os.getpid())}"


def is_dead(label: str) -> bool:
    """Whether the process that a label names has certainly ended.

    False for a process of another boot or PID namespace, which cannot be judged from here: its container stays.
    """
    rest, _, start_time = label.rpartition("/")
    where, _, pid = rest.rpartition("/")
    if where != _here() or not pid.isdigit():
        return False
    try:
        return _start_time(int(pid)) != start_time
    except (OSError, IndexError):
        return True


def mounted(options: ContainerOptions, bundle: Bundle) -> list[str]:
    """The paths of this machine that the container sees, read-only and under the same names."""
    if options.code == "mount":
        return [*bundle.paths, *bundle.packages]
    named = {os.path.abspath(os.path.expanduser(path)) for path in options.visible}
    return [path for path in bundle.paths if path in named]


def main_command(options: ContainerOptions, bundle: Bundle, limits: dict[str, Any] | None) -> list[str]:
    """The command that runs in the container. `limits` are those that the engine does not set."""
    config: dict[str, Any] = {"path": list(bundle.imports), "packages": []}
    if options.code == "mount":
        config["packages"] = [os.path.dirname(path) for path in bundle.packages]
    if limits is not None:
        config["limits"] = limits
    script = PACKAGE / "resources" / "rpc" / "container_main.py"
    program = ["-m", "agentfly.resources.rpc.container_main"] if options.code == "image" else [str(script)]
    return [options.python, "-I", "-X", "utf8", *program, json.dumps(config)]


def container_config(spec: Spec, options: ContainerOptions, bundle: Bundle) -> dict[str, Any]:
    """The configuration for Docker. Every restriction is explicit; none is left to the engine's defaults."""
    mounts = [{"Type": "bind", "Source": path, "Target": path, "ReadOnly": True} for path in mounted(options, bundle)]
    return {
        "Image": options.image,
        "Entrypoint": [],
        "Cmd": main_command(options, bundle, None),
        "Env": ["HOME=/tmp", "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"],
        "WorkingDir": "/tmp",
        "User": options.user or UNPRIVILEGED,
        "Tty": False,
        "OpenStdin": True,
        "StdinOnce": True,  # the engine closes the input when the trainer's connection ends, and the container ends with it
        **dict.fromkeys(("AttachStdin", "AttachStdout", "AttachStderr"), True),
        "NetworkDisabled": options.network == "none",
        "Labels": {LABEL: own_label(), "agentfly.environment": spec.name},
        "HostConfig": {
            "AutoRemove": True,
            "NetworkMode": options.network,
            "Memory": options.memory_mb << 20,
            "MemorySwap": options.memory_mb << 20,
            "NanoCpus": int(options.cpus * 1e9),
            "PidsLimit": options.processes,
            "ReadonlyRootfs": options.read_only,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Privileged": False,
            "IpcMode": "private",
            "Tmpfs": {"/tmp": f"rw,nosuid,nodev,size={options.disk_mb}m,mode=1777"},
            "Mounts": mounts,
            "LogConfig": {"Type": "none"},  # the output goes to the trainer; the engine would also keep it on disk
        },
    }


class DockerWorker(Worker):
    kind = "container"
    limits = SANDBOXED

    _container = ""
    _creating: asyncio.Task[str] | None = None
    _streams: Streams | None = None

    async def connect(self, number: int) -> None:
        bundle = bundle_of(self.spec, self.options.visible)
        self._docker = Docker(socket_path(self.options.socket))
        self._container = f"agentfly-{os.getpid()}-{next(_numbers)}"
        config = container_config(self.spec, self.options, bundle)
        # Shielded: if the request were cancelled, the engine would go on and create the container after `terminate` had
        # tried to remove it.
        self._creating = asyncio.create_task(self._docker.create(self._container, config))
        await asyncio.shield(self._creating)
        self._streams = await self._docker.attach(self._container)
        await self._docker.start(self._container)
        self.read_from(self._streams.parts())
        self.write(pack_hello(hello_of(self.spec, bundle, number)))

    def write(self, data: bytes) -> None:
        assert self._streams is not None
        self._streams.write(data)

    async def terminate(self, wanted: bool) -> str:
        printed = ""
        if self._creating is not None:
            if not self._creating.done():
                await asyncio.wait([self._creating])  # the call has a deadline
            if not self._creating.cancelled():
                self._creating.exception()  # marks it as retrieved if the start was cancelled
        if self._streams is not None:
            printed = self._streams.tail
            self._streams.close()
        if self._container:
            try:
                await self._docker.remove(self._container)
            except DockerError as error:
                log.warning("the container %s of %s may still exist: %s", self._container, self.name, error)
        return f"by itself; it said: {printed}" if printed else "by itself"


async def reap(docker: Docker) -> int:
    """Remove the containers of trainers that are dead, and return their number. A failure is logged."""
    count = 0
    try:
        for container, owner, state in await docker.labelled(LABEL):
            if is_dead(owner) or state in ("exited", "dead"):
                await docker.remove(container)
                count += 1
    except WorldError as error:
        log.warning("looking for containers of killed trainers failed: %s", error)
    if count:
        log.info("removed %d containers that a killed trainer had left", count)
    return count


def enroot_command(enroot: str, options: ContainerOptions, bundle: Bundle) -> list[str]:
    """The command that starts a container. Enroot isolates neither network nor limits: `container_main` does."""
    words = [enroot, "start"]
    if not options.read_only:
        words.append("--rw")
    for path in mounted(options, bundle):
        kind = "dir" if os.path.isdir(path) else "file"
        if ":" in path:
            raise ConfigError(f"enroot cannot mount {path!r}: it has a colon")
        words += ["--mount", f"{path}:{path}:none:x-create={kind},bind,ro,nosuid,nodev"]
    words += ["--mount", f"tmpfs:/tmp:tmpfs:x-create=dir,rw,nosuid,nodev,mode=1777,size={options.disk_mb}m"]
    for variable in ("HOME=/tmp", "TMPDIR=/tmp", "PYTHONDONTWRITEBYTECODE=1", f"{VARIABLE}={own_label()}"):
        words += ["--env", variable]
    limits = {name: getattr(options, name) for name in ("network", "memory_mb", "cpus", "processes")}
    return [*words, "--", options.image, *main_command(options, bundle, limits)]


class EnrootWorker(ProcessWorker):
    kind = "container"
    limits = SANDBOXED

    async def connect(self, number: int) -> None:
        bundle = bundle_of(self.spec, self.options.visible)
        command = enroot_command(find_enroot(), self.options, bundle)
        variables = [*ENGINE_VARIABLES, *(name for name in os.environ if name.startswith("ENROOT_"))]
        await self.spawn(number, variables, command, hello_of(self.spec, bundle, number))

    async def terminate(self, wanted: bool) -> str:
        for _ in range(0 if wanted else LAST_LINE_CHECKS):
            if self.process is None or self.process.popen.poll() is not None:
                break
            await asyncio.sleep(0.01)
        return await super().terminate(wanted)

    def describe_end(self, code: int | None) -> str:
        return "by itself"


def reap_processes() -> int:
    """Kill the enroot containers of trainers that are dead, found by the label in their environment; return their number."""
    count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            owners = [word.partition(b"=")[2].decode() for word in variables if word.startswith(f"{VARIABLE}=".encode())]
            if owners and is_dead(owners[0]):
                os.kill(int(name), signal.SIGKILL)
                count += 1
    return count


def find_enroot() -> str:
    """The path of the command. Raises ConfigError if it is not installed."""
    path = shutil.which("enroot")
    if path is None:
        raise ConfigError(
            "enroot is not installed here (no such command): install it, use engine = 'docker', or placement = 'sandbox', "
            "which needs neither"
        )
    return path


class ContainerBackend(RemoteBackend):
    _reaping: asyncio.Task[int] | None = None

    def check_usable(self) -> None:
        bundle_of(self.spec, self.options.visible)
        if self.options.engine == "docker":
            self.worker_class = DockerWorker
            socket_path(self.options.socket)
        else:
            self.worker_class = EnrootWorker
            find_enroot()

    async def prepare(self) -> None:
        """Before the first start, remove the containers of trainers that were killed."""
        if self._reaping is None:
            docker = self.options.engine == "docker"
            work = reap(Docker(socket_path(self.options.socket))) if docker else asyncio.to_thread(reap_processes)
            self._reaping = asyncio.create_task(work)
        await asyncio.shield(self._reaping)
