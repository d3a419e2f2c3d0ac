"""The program inside the subprocess of the `python_process` tool. `process.bootstrap` starts it; it loads nothing of AgentFly.

    session FD LIMITS SECONDS     answers cells over the socket FD until the socket is closed (see `cells`)
    once PATH LIMITS              runs the file PATH as a program

Cells print to the descriptors 1 and 2, which the parent process reads, so a print cannot corrupt a reply. LIMITS is a JSON
object of rlimits; SECONDS is the time limit of a cell.
"""

from __future__ import annotations

import json
import linecache
import math
import os
import resource
import select
import signal
import sys
import threading
import traceback
import warnings

from .cells import MAX_CHARS, CellLoop, Reply, new_main
from .removal import remove_tree


def set_limits(limits: dict[str, int]) -> None:
    """Sets soft and hard limits, so that a cell cannot raise them, and never above those of this process."""
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


def run_once(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        source = file.read()
    names = new_main()
    sys.path.insert(0, os.getcwd())
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


class ToolCellLoop(CellLoop):
    """A session whose cells have a limit of CPU time: a cell that ignores signals ends even if the parent process is gone."""

    def __init__(self, channel: int, limit_s: float) -> None:
        super().__init__(channel, MAX_CHARS)
        self.limit_s = limit_s

    def run(self, number: int, code: str) -> Reply:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds = math.ceil(usage.ru_utime + usage.ru_stime + self.limit_s + 10)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))
        return super().run(number, code)


def end(directory: str) -> None:
    """Removes the session's directory and kills the process group: this process and everything that cells started."""
    if os.path.basename(directory).startswith("agentfly-python-"):
        remove_tree(directory)
    os.killpg(0, signal.SIGKILL)


def watch(channel: int, directory: str) -> None:
    """Ends the session when the parent process closes its end or dies. A thread, because a running cell does not read."""
    poller = select.poll()
    poller.register(channel, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    while True:
        if any(events & ~select.POLLIN for _, events in poller.poll()):
            end(directory)


def main() -> None:
    mode, what, limits, *rest = sys.argv[1:]
    set_limits(json.loads(limits))
    if mode == "once":
        run_once(what)
        return
    sys.argv = [""]
    channel, directory = int(what), os.getcwd()
    sys.path.insert(0, directory)
    # Python 3.12 warns when a process with threads forks. The only other thread, `watch`, holds no lock that a fork could copy.
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    threading.Thread(target=watch, args=(channel, directory), daemon=True).start()
    ToolCellLoop(channel, float(rest[0])).serve()
    end(directory)
