"""Starts and ends worker processes: each is a session leader with a socket to the trainer and a directory for its files.

    spawn: directory, socket pair, Popen --> WorkerProcess --> terminate: SIGKILL to the group, reap, remove the directory

One thread does all of this, for two reasons: starting a process blocks, and the kernel sends the parent-death signal when the
*thread* that started a process ends. The thread, the common directory and the life pipe exist while there are workers. The
common directory is locked while its trainer lives; the next trainer removes those of trainers that were killed. A worker gets
a few harmless environment variables and those that its spec names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...aio.threads import WorkerThread
from ...errors import ConfigError, WorldError
from ...sandbox.interpreter.removal import remove_tree

SCRIPT = Path(__file__).parents[1] / "rpc" / "worker_main.py"
_SYSTEM = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
HARMLESS = (*_SYSTEM, "AGENTFLY_CACHE", "XDG_CACHE_HOME")
"""The last two name the caches in which a worker finds what the trainer has prepared."""
PREFIX = "agentfly-workers-"
MAX_LOG = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A started worker: its process, the trainer's end of its socket, and its directory."""

    popen: subprocess.Popen[bytes]
    channel: socket.socket
    directory: Path

    def kill(self) -> None:
        """Send SIGKILL to the process group, unless the process was reaped: its number may then belong to another."""
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    def tail(self) -> str:
        """The end of what the worker printed."""
        try:
            data = (self.directory / "log").read_bytes()[-2000:]
        except OSError:
            return ""
        return data.decode("utf-8", "replace").strip()[-500:]

    def tidy(self) -> None:
        """Empty a log that has grown beyond MAX_LOG."""
        with contextlib.suppress(OSError):
            if (self.directory / "log").stat().st_size > MAX_LOG:
                os.truncate(self.directory / "log", 0)


class Spawner:
    """The worker processes of this trainer; there is one, `SPAWNER`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._thread: WorkerThread | None = None
        self._home: Path | None = None
        self._lock_fd = -1
        self._life: tuple[int, int] = (-1, -1)

    async def spawn(
        self,
        number: int,
        pass_env: Sequence[str],
        command: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> WorkerProcess:
        """Start a worker: `worker_main.py`, or `command`, which gets the socket as its standard input and output.

        A command with `variables` is a program that knows nothing of AgentFly: it is tied to the trainer as a worker is, and
        gets these variables beside the harmless ones. If the call is cancelled, the process that it has started is terminated.
        Raises WorldError if the start fails.
        """
        if os.name != "posix":
            raise ConfigError("placement 'process' needs Linux or macOS; use placement 'thread'")
        thread = self._enter()
        started: list[WorkerProcess] = []
        try:
            await thread.run(lambda: started.append(self._start(number, pass_env, command, variables, cwd)))
        except BaseException as error:
            # The thread works in order: when it gets to this, the start has ended, also if the caller was cancelled.
            thread.submit(lambda: self._terminate_all(started), lambda *_: None)
            if isinstance(error, OSError):
                raise WorldError(f"a worker process could not be started: {error}") from error
            raise
        return started[0]

    async def terminate(self, process: WorkerProcess) -> None:
        """Kill and reap the process, and remove its directory. This goes on if the caller is cancelled."""
        process.kill()
        process.channel.close()
        thread = self._thread
        if thread is not None:
            await thread.run(lambda: self._terminate_all([process]))

    def _enter(self) -> WorkerThread:
        with self._lock:
            if self._count == 0:
                self._open()
            self._count += 1
            assert self._thread is not None
            return self._thread

    def _leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count:
                return
            thread, self._thread = self._thread, None
            os.close(self._life[0])
            os.close(self._life[1])
            if self._home is not None:
                remove_tree(str(self._home))
            os.close(self._lock_fd)
            if thread is not None:
                thread.stop()

    def _open(self) -> None:
        self._home, self._lock_fd = make_locked_folder(PREFIX)
        self._life = os.pipe()
        self._thread = WorkerThread("spawner")

    def _start(
        self,
        number: int,
        pass_env: Sequence[str],
        command: Sequence[str] | None,
        variables: Mapping[str, str] | None,
        cwd: str | None,
    ) -> WorkerProcess:
        assert self._home is not None
        directory = Path(tempfile.mkdtemp(prefix=f"{number}-", dir=self._home))
        ours, theirs = socket.socketpair()
        try:
            with theirs, (directory / "log").open("ab") as log:
                words = [
                    *(sys.executable, "-I", "-X", "utf8", str(SCRIPT)),
                    *(str(theirs.fileno()), str(self._life[0]), str(os.getpid())),
                ]
                if variables is not None:
                    words += command or ()
                    environment = {**_passed(pass_env), "TMPDIR": str(directory), **variables}
                else:
                    words = words if command is None else list(command)
                    environment = _environment(directory, number, theirs.fileno(), pass_env)
                channels = (theirs.fileno(),) if command is None else ()
                popen = subprocess.Popen(
                    words,
                    env=environment,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL if command is None else theirs.fileno(),
                    stdout=log if command is None else theirs.fileno(),
                    stderr=log,
                    start_new_session=True,
                    pass_fds=() if command is not None and variables is None else (*channels, self._life[0]),
                )
        except BaseException:
            ours.close()
            remove_tree(str(directory))
            raise
        ours.setblocking(False)
        return WorkerProcess(popen, ours, directory)

    def _terminate_all(self, processes: list[WorkerProcess]) -> None:
        """End what one `_enter` has led to: one process, or none if the start failed."""
        for process in processes:
            process.kill()
            process.channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(timeout=5)
            remove_tree(str(process.directory))
        self._leave()

    def forget(self) -> None:
        """In a fork of this process: it has none of the threads, and the workers belong to its parent."""
        if self._count:
            for fd in (*self._life, self._lock_fd):
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.__init__()  # type: ignore[misc]


def _environment(directory: Path, number: int, channel: int, pass_env: Sequence[str]) -> dict[str, str]:
    """A worker's variables. One thread per numeric library keeps many workers cheap."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    ours = {"TMPDIR": str(directory), "AGENTFLY_WORKER": str(number), "AGENTFLY_CHANNEL": str(channel)}
    return {**threads, **_passed(pass_env), **ours}


def _passed(pass_env: Sequence[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in (*HARMLESS, *pass_env) if name in os.environ}


def make_locked_folder(prefix: str) -> tuple[Path, int]:
    """Returns a new folder for temporary files, and the descriptor that holds its lock: close it after the folder is removed.

    Folders of this prefix whose lock is not held any more are removed: their owners were killed.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/lock"):
        with contextlib.suppress(OSError), lock.open("r+b") as file:  # another user's, just removed, or its owner lives
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(str(lock.parent))
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # Lock the file before it is named "lock": another trainer must never find a lock that is not held yet.
    held = os.open(folder / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(folder / "new", folder / "lock")
    return folder, held


SPAWNER = Spawner()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SPAWNER.forget)
