"""What a process says of itself and of a child with the standard library alone: `ray_actor` is sent to nodes with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("python", "agentfly", "torch", "transformers")


def software() -> dict[str, str]:
    """The versions that decide whether two processes compute the same."""
    versions = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in PACKAGES[1:]:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions


def machine() -> str:
    """Names this boot of this machine, so that the trainer knows whether it shares memory with a process."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = f" {file.read().strip()}"
    return socket.gethostname() + boot


def how_ended(code: int, log: str, began: int = 0) -> str:
    """How a child ended by its exit code, with the end of what it printed: its output begins at `began` of its log."""
    try:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:
        how = f"killed by signal {-code}"
    printed = tail(log, began)
    return f"({how})" + (f"; it said: {printed}" if printed else "")


def tail(log: str, began: int = 0) -> str:
    """The end of a log."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(began, os.path.getsize(log) - 2000))
        return file.read().decode("utf-8", "replace").strip()[-500:]
    return ""
