"""Who started a container: a label that tells, later and to another trainer, whether the one that did still lives.

A label names the boot, the PID namespace, the process and when it began. Only a process of this boot and this namespace can be
judged from here; of any other `is_dead` says False, and its container is left alone.
"""

from __future__ import annotations

import os
from pathlib import Path

LABEL = "agentfly.owner"
VARIABLE = "AGENTFLY_OWNER"


def _here() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _began(pid: int) -> str:
    """In ticks since the boot; with the number it is one process for good."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def own_label() -> str:
    return f"{_here()}/{os.getpid()}/{_began(os.getpid())}"


def is_dead(label: str) -> bool:
    """Whether the process that a label names has ended, for certain."""
    place, _, began = label.rpartition("/")
    place, _, pid = place.rpartition("/")
    if place != _here() or not pid.isdigit():
        return False
    try:
        return _began(int(pid)) != began
    except (OSError, IndexError):
        return True
