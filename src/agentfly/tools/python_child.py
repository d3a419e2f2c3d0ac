"""The program that runs inside the subprocess of the `python` tool. It is started as a script and imports nothing of AgentFly.

    python -I -X utf8 python_child.py session FD LIMITS     cells in, replies out, over the socket FD, until it is closed
    python -I -X utf8 python_child.py once PATH LIMITS      run the file PATH as a program

A frame is four bytes of length and then JSON. Cell: {"id", "code", "limit_s"}; reply: {"id", "value", "error",
"interrupted"}; the first reply, with id 0, says "ready". What the cell prints goes to the file descriptors 1 and 2, which the
host reads, so no print can break a frame. LIMITS is a JSON object of rlimits.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import linecache
import math
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import traceback
import types
import warnings
from typing import Any

MAX_VALUE = 100_000


def set_limits(limits: dict[str, int]) -> None:
    """Soft and hard, so that a cell cannot raise them; never above what this process itself was given."""
    for name, wanted in limits.items():
        which = getattr(resource, "RLIMIT_" + name, None)
        if which is None:
            continue  # this platform does not have it
        hard = resource.getrlimit(which)[1]
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(which, (wanted, wanted))
        except (ValueError, OSError):
            continue  # macOS refuses some


def main_module() -> dict[str, Any]:
    """A fresh `__main__`, as a program expects to find it."""
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.path.insert(0, os.getcwd())
    return module.__dict__


def run_once(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        source = file.read()
    names = main_module()
    sys.argv = [path]
    linecache.cache["main.py"] = (len(source), None, source.splitlines(True), "main.py")
    try:
        exec(compile(source, "main.py", "exec", dont_inherit=True), names)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        shown = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, shown)
        sys.exit(1)


class Session:
    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.names = main_module()
        self.pid = os.getpid()
        self.running = False
        self.count = 0
        signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, number: int, frame: types.FrameType | None) -> None:
        if self.running and os.getpid() == self.pid:
            raise KeyboardInterrupt

    def serve(self) -> None:
        self.send({"id": 0})
        while True:
            cell = self.read()
            if cell is None:
                return
            reply = self.run(cell["code"], cell["limit_s"])
            if os.getpid() != self.pid:
                os._exit(0)  # the cell forked and its child came back here
            self.send({"id": cell["id"], **reply})

    def send(self, reply: dict[str, Any]) -> None:
        data = json.dumps(reply).encode()
        self.channel.sendall(struct.pack(">I", len(data)) + data)

    def read(self) -> Any:
        header = self.receive(4)
        body = self.receive(struct.unpack(">I", header)[0]) if header else None
        return json.loads(body) if body else None

    def receive(self, count: int) -> bytes | None:
        parts = []
        while count:
            part = self.channel.recv(min(count, 1 << 20))
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def run(self, code: str, limit_s: float) -> dict[str, Any]:
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        value: str | None = None
        error: str | None = None
        result: Any = None
        interrupted = False
        self.allow_cpu(limit_s)
        try:
            try:
                tree = ast.parse(code, name)
                last = tree.body[-1] if tree.body else None
                steps = []
                if isinstance(last, ast.Expr):
                    tree.body.pop()
                    steps.append(compile(ast.Expression(last.value), name, "eval", dont_inherit=True))
                steps.insert(0, compile(tree, name, "exec", dont_inherit=True))
                self.running = True
                for step in steps:
                    result = eval(step, self.names)
                if result is not None:
                    self.names["_"] = result
                    value = repr(result)
            finally:
                self.running = False
        except KeyboardInterrupt:
            interrupted = True
        except SystemExit as stop:
            error = f"SystemExit: {stop.code} (the session goes on)"
        except BaseException as raised:  # noqa: BLE001 - a session outlives whatever a cell raises
            error = self.explain(raised)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError) as failure:
                error = error or f"{type(failure).__name__}: {failure}"
        if value is not None and len(value) > MAX_VALUE:
            value = f"{value[:MAX_VALUE]} [... {len(value) - MAX_VALUE:,} more characters]"
        return {"value": value, "error": error, "interrupted": interrupted}

    def allow_cpu(self, limit_s: float) -> None:
        """A cell that cannot be interrupted, and whose host is gone, still ends."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds = math.ceil(usage.ru_utime + usage.ru_stime + limit_s + 10)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))

    def explain(self, error: BaseException) -> str:
        """A short traceback: only the cell's own frames, the last few of them."""
        if isinstance(error, SyntaxError) and (error.filename or "").startswith("<cell"):
            return "".join(traceback.format_exception_only(type(error), error)).strip()
        try:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<cell")]
            where = "".join(f"  line {frame.lineno}, in {frame.name}: {frame.line}\n" for frame in frames[-5:])
            what = "".join(traceback.format_exception_only(type(error), error)).strip()
        except BaseException:  # noqa: BLE001
            return type(error).__name__  # its __str__ raised
        return f"Traceback:\n{where}{what[:4000]}" if where else what[:4000]


def end(directory: str) -> None:
    """The host is done, or dead: end everything this session has started, and remove what was made for it."""
    if os.path.basename(directory).startswith("agentfly-python-"):
        shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def watch(channel: socket.socket, directory: str) -> None:
    """The host closes its end when it is done and when it dies; a cell that is running does not notice, so a thread does."""
    poller = select.poll()
    poller.register(channel.fileno(), getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    while True:
        if any(events & ~select.POLLIN for _, events in poller.poll()):
            end(directory)


def main() -> None:
    mode, what, limits = sys.argv[1:]
    set_limits(json.loads(limits))
    if mode == "once":
        run_once(what)
        return
    sys.argv = [""]
    directory = os.getcwd()
    channel = socket.socket(fileno=int(what))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    # Python 3.12 warns when a process with threads forks; ours has one, which touches nothing that a fork could find locked.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    threading.Thread(target=watch, args=(channel, directory), daemon=True).start()
    Session(channel).serve()
    end(directory)


if __name__ == "__main__":
    main()
