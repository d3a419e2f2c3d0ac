"""The actor of a `Reservation`, which Ray runs on its node: it starts child processes and says how they ended.

`NodeActor` is sent to the node by value, with this module and `bare`. It uses nothing else of AgentFly: the node may have
another version, or none. The actor is not the program itself: Ray tells neither the signal nor the last words of an actor that
ended, and what it had started would outlive it. A child holds the read end of a pipe of the actor, and the kernel kills its
process group when the actor ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from .bare import how_ended, machine, software, tail

# Ties a child to its actor and becomes the program: the kernel kills the child's group when the other end of LIFE is closed.
# The last line reads the pipe, in case that it was closed before the signal was set up.
TIE = """
import fcntl, os, sys
if sys.platform == "linux":
    life = os.open(f"/proc/self/fd/{sys.argv[1]}", os.O_RDONLY | os.O_NONBLOCK)
    os.set_inheritable(life, True)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, 10, 9)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        sys.exit(os.read(life, 1))
    except BlockingIOError:
        pass
os.execvp(sys.argv[2], sys.argv[2:])
"""


class NodeActor:
    """Holds one reservation, in a process that Ray started on its node.

    Calls run in up to 16 threads, so `beat` is answered while another call waits. The class uses nothing of AgentFly: the node
    may have another version of it, or none.
    """

    def __init__(self, path: list[str], folder: str) -> None:
        """`path` and `folder` are the trainer's import path and working directory; what exists here is used, too."""
        self.started: dict[int, subprocess.Popen[bytes]] = {}
        self.ended: dict[int, str] = {}
        self.changed = threading.Condition()
        self.life = os.pipe()
        import ray

        node = ray._private.worker.global_worker.node
        self.folder = os.path.join(node.get_session_dir_path() if node else tempfile.gettempdir(), "logs", "agentfly")
        os.makedirs(self.folder, exist_ok=True)
        self.folder = tempfile.mkdtemp(prefix=time.strftime("node-%H%M%S-"), dir=self.folder)
        self.cwd = folder if os.path.isdir(folder) else self.folder
        sys.path[:] = [each for each in path if os.path.exists(each)] + [each for each in sys.path if each not in path]

    def about(self) -> dict[str, Any]:
        """What the trainer must know of this node."""
        import ray

        package = importlib.util.find_spec("agentfly")
        util: Any = ray.util
        return {
            "pid": os.getpid(),
            "python": sys.executable,
            "path": list(sys.path),
            "agentfly": os.path.dirname(package.origin) if package is not None and package.origin else None,
            "software": software(),
            "machine": machine(),
            "address": util.get_node_ip_address(),
            "gpus": [str(each) for each in ray.get_gpu_ids()],
            "folder": self.folder,
        }

    def beat(self, count: int, wait_s: float) -> dict[int, str]:
        """How children ended, by their number. Returns at once if more than `count` have ended, else after `wait_s`."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.ended) > count, wait_s)
            return dict(self.ended)

    def start(self, number: int, words: list[str], environ: dict[str, str | None], stdin: bytes, log: str) -> int:
        """Start a child. "{life}" and "{parent}" in its words become the pipe's number and this process's. Returns its pid."""
        own = {"{life}": str(self.life[0]), "{parent}": str(os.getpid())}
        tie = [sys.executable, "-I", "-S", "-c", TIE, str(self.life[0])]
        own_environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        path = os.path.join(self.folder, log or f"{number}.log")
        with open(path, "ab") as output:
            began = output.tell()
            popen = subprocess.Popen(
                tie + [own.get(word, word) for word in words],
                env={name: value for name, value in {**own_environ, **environ}.items() if value is not None},
                cwd=self.cwd,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(self.life[0],),
            )
        self.started[number] = popen
        threading.Thread(target=self.watch, args=(number, popen, stdin, path, began), daemon=True).start()
        return popen.pid

    def watch(self, number: int, popen: subprocess.Popen[bytes], stdin: bytes, path: str, began: int) -> None:
        """Give a child its input, and keep how it ended."""
        assert popen.stdin is not None
        with contextlib.suppress(OSError), popen.stdin as pipe:  # it has ended already: the code below says how
            pipe.write(stdin)
        how = how_ended(popen.wait(), path, began)
        with self.changed:
            self.ended[number] = how
            self.changed.notify_all()

    def kill(self, numbers: list[int]) -> None:
        """End children and their groups. Returns when they are gone."""
        living = [popen for number in numbers if (popen := self.started.get(number)) is not None and popen.returncode is None]
        for popen in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, 9)
        with self.changed:
            self.changed.wait_for(lambda: all(number in self.ended or number not in self.started for number in numbers), 5.0)

    def end(self) -> None:
        """End all children."""
        self.kill(list(self.started))

    def ask(self, what: str, *values: object) -> Any:
        """Answer a question by its name."""
        return getattr(self, f"ask_{what}")(*values)

    def ask_can_import(self, modules: list[str]) -> list[str]:
        """The modules that cannot be found here."""
        missing = []
        for name in modules:
            try:
                exists = importlib.util.find_spec(name) is not None
            except (ImportError, ValueError, AttributeError):
                exists = False
            if not exists:
                missing.append(name)
        return missing

    def ask_can_reach(self, host: str, port: int, timeout_s: float = 5.0) -> str:
        """Why no connection to an address can be made from here; empty if one can."""
        try:
            with socket.create_connection((host, port), timeout_s):
                return ""
        except OSError as error:
            return str(error) or type(error).__name__

    def ask_sees_file(self, path: str, text: str | None = None) -> bool:
        """Whether a file or folder exists here and, if `text` is given, has this text."""
        if text is None or not os.path.isfile(path):
            return text is None and os.path.exists(path)
        with open(path, encoding="utf-8") as file:
            return file.read() == text

    def ask_free_port(self, host: str = "") -> int:
        """A TCP port on which nothing listens now."""
        with socket.socket() as listener:
            listener.bind((host, 0))
            return int(listener.getsockname()[1])

    def ask_tail(self, log: str) -> str:
        """The end of a child's log."""
        return tail(os.path.join(self.folder, log))
