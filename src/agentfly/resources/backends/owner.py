"""The label that a container carries: which trainer started it, so that a later trainer can tell whether that one still runs.

    label    boot id / PID namespace / pid / start time of the process

Only a process of this boot and this namespace can be judged from here. For any other, `is_dead` is False and its container
stays.
"""

from __future__ import annotations

import os
from pathlib import Path

LABEL = "agentfly.owner"
VARIABLE = "AGENTFLY_OWNER"


def _here() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _start_time(pid: int) -> str:
    """In ticks since the boot. Together with the pid it names one process and no later one."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def own_label() -> str:
    return f"{_here()}/{os.getpid()}/{_start_time(os.getpid())}"


def is_dead(label: str) -> bool:
    """Whether the process that a label names has certainly ended."""
    rest, _, start_time = label.rpartition("/")
    where, _, pid = rest.rpartition("/")
    if where != _here() or not pid.isdigit():
        return False
    try:
        return _start_time(int(pid)) != start_time
    except (OSError, IndexError):
        return True
