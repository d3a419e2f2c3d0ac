"""The program inside the subprocess of `run_code`. `process.bootstrap` starts it; it loads nothing of AgentFly.

Its arguments are the path of the file that runs as a program, and a JSON object of rlimits.
"""

from __future__ import annotations

import json
import linecache
import os
import resource
import sys
import traceback

from .cells import new_main


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


def main() -> None:
    path, limits = sys.argv[1:]
    set_limits(json.loads(limits))
    run_once(path)
