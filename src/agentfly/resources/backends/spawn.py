"""Where worker processes are born and buried: a command in, a process in its own session with its own directory out.

All of it happens in one thread, for two reasons: starting a process blocks, and the kernel's parent-death signal is sent
when the *thread* that made a process ends. The thread, the directory and the pipe that ties the workers' lives to this
process exist while there are workers. The directory is locked while its owner lives; what a killed trainer left is removed
by the next one. A worker gets a scrubbed environment: a few harmless variables, and those that its spec names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError, WorldError
from ..threads import OwnThread

SCRIPT = Path(__file__).parents[1] / "rpc" / "worker_main.py"
_SYSTEM = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")
HARMLESS = (*_SYSTEM, "AGENTFLY_CACHE", "XDG_CACHE_HOME")
"""The last two, so that a worker finds what the trainer has made for it."""
PREFIX = "agentfly-workers-"
LOG_LIMIT = 1 << 20


class WorkerProcess:
    """A started worker: its process, our end of its socket, and its directory."""

    __slots__ = ("channel", "directory", "popen")

    def __init__(self, popen: subprocess.Popen[bytes], channel: socket.socket, directory: Path) -> None:
        self.popen = popen
        self.channel = channel
        self.directory = directory

    def kill(self) -> None:
        """SIGKILL to the whole group; only before it is reaped, after that the number may be someone else's."""
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    def tail(self) -> str:
        """The end of what it printed."""
        try:
            data = (self.directory / "log").read_bytes()[-2000:]
        except OSError:
            return ""
        return data.decode("utf-8", "replace").strip()[-500:]

    def tidy(self) -> None:
        """Keep what it prints from filling the disk."""
        with contextlib.suppress(OSError):
            if (self.directory / "log").stat().st_size > LOG_LIMIT:
                os.truncate(self.directory / "log", 0)


class Spawner:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._thread: OwnThread | None = None
        self._home: Path | None = None
        self._lock_fd = -1
        self._life: tuple[int, int] = (-1, -1)

    async def spawn(self, number: int, pass_env: Sequence[str], command: Sequence[str] | None = None) -> WorkerProcess:
        """Start one: `worker.py`, or a command of the caller's, which has the socket as its standard input and output. A
        cancelled call leaves nothing: what was started is buried."""
        if os.name != "posix":
            raise ConfigError("placement 'process' needs Linux or macOS; use placement 'thread'")
        thread = self._enter()
        born: list[WorkerProcess] = []
        try:
            await thread.run(lambda: born.append(self._start(number, pass_env, command)))
        except BaseException as error:
            # The thread works in order: by the time it comes to this, a start that nobody waits for has ended.
            thread.submit(lambda: self._bury_all(born), _ignore)
            if isinstance(error, OSError):
                raise WorldError(f"a worker process could not be started: {error}") from error
            raise
        return born[0]

    async def terminate(self, born: WorkerProcess) -> None:
        """Kill, reap, remove its directory. It goes on when the caller is cancelled."""
        born.kill()
        born.channel.close()
        thread = self._thread
        if thread is not None:
            await thread.run(lambda: self._bury_all([born]))

    def _enter(self) -> OwnThread:
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
                shutil.rmtree(self._home, ignore_errors=True)
            os.close(self._lock_fd)
            if thread is not None:
                thread.stop()

    def _open(self) -> None:
        _sweep()
        self._home = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked first and then named "lock": another trainer's sweep never finds one that is not held yet.
        self._lock_fd = os.open(self._home / "new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(self._home / "new", self._home / "lock")
        self._life = os.pipe()
        self._thread = OwnThread("nursery")

    def _start(self, number: int, pass_env: Sequence[str], command: Sequence[str] | None) -> WorkerProcess:
        assert self._home is not None
        directory = Path(tempfile.mkdtemp(prefix=f"{number}-", dir=self._home))
        ours, theirs = socket.socketpair()
        try:
            with theirs, (directory / "log").open("ab") as log:
                words = [
                    *(sys.executable, "-I", "-X", "utf8", str(SCRIPT)),
                    *(str(theirs.fileno()), str(self._life[0]), str(os.getpid())),
                ]
                popen = subprocess.Popen(
                    words if command is None else list(command),
                    env=_environment(directory, number, theirs.fileno(), pass_env),
                    stdin=subprocess.DEVNULL if command is None else theirs.fileno(),
                    stdout=log if command is None else theirs.fileno(),
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(), self._life[0]) if command is None else (),
                )
        except BaseException:
            ours.close()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        ours.setblocking(False)
        return WorkerProcess(popen, ours, directory)

    def _bury_all(self, all_born: list[WorkerProcess]) -> None:
        for born in all_born:
            born.kill()
            born.channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                born.popen.wait(timeout=5)
            shutil.rmtree(born.directory, ignore_errors=True)
        self._leave()

    def forget(self) -> None:
        """A fork of this process has none of the threads, and the workers are not its own."""
        if self._count:
            for fd in (*self._life, self._lock_fd):
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.__init__()  # type: ignore[misc]


def _environment(directory: Path, number: int, channel: int, pass_env: Sequence[str]) -> dict[str, str]:
    """Nothing of the trainer's secrets. One thread per numeric library keeps many workers cheap."""
    kept = {name: os.environ[name] for name in (*HARMLESS, *pass_env) if name in os.environ}
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL") if f"{library}_NUM_THREADS" not in kept}
    ours = {"TMPDIR": str(directory), "AGENTFLY_WORKER": str(number), "AGENTFLY_CHANNEL": str(channel)}
    return {**threads, **kept, **ours}


def _sweep() -> None:
    """Remove what trainers that were killed have left: directories whose lock nobody holds."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/lock"):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(fd)


def _ignore(value: object, error: BaseException | None) -> None:
    """Nobody waits for this."""


SPAWNER = Spawner()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SPAWNER.forget)
