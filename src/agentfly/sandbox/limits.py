"""What a session may use, and what a cell returns. Values only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..errors import ConfigError
from ..types import SandboxLimit

TIERS = ("process", "landlock", "namespace")  # weakest first
NETWORKS = ("none", "loopback")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one session. `memory_mb` is on top of the preloaded interpreter, for all its processes together where a cgroup
    or the watchdog can add them up. `disk_mb` and `inodes` bound its private /tmp. `cpu_s` is CPU time per process over the
    session's life. `output_chars` limits stdout, stderr and the shown value each. An interrupted cell has `grace_s` to reply
    before its session is killed."""

    memory_mb: int = 512
    disk_mb: int = 64
    inodes: int = 4096
    processes: int = 32
    cpu_s: int = 600
    output_chars: int = 20_000
    files: int = 256
    grace_s: float = 0.08

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"sandbox limit {field.name} must be a positive number, not {value!r}")


@dataclass(frozen=True, slots=True)
class WorkspaceLayout:
    """What makes the sessions of a server workspaces. Each begins with a tree of the folder `trees`, which it may change
    without an effect on others: at /workspace, or below the tier namespace in the folder `work` of its home. `network` is
    "none", or "loopback": a private network in which only 127.0.0.1 exists."""

    trees: str
    network: str = "none"

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise ConfigError(f"the network of a workspace is {' or '.join(map(repr, NETWORKS))}, not {self.network!r}")


@dataclass(frozen=True, slots=True)
class CellResult:
    """The outcome of a cell. `value` is the repr of its last expression, `error` a short traceback or why the session ended,
    `images` PNG bytes. `timed_out` and `alive` are what the trainer observed, never what the session claims. `replaced` says
    that the cell ran in a new session because the one before it was lost. `limit` is the limit that the cell reached, for
    statistics alone: where the kernel refuses more instead of ending the session, it is read from the error of the cell."""

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    error: str | None = None
    images: tuple[bytes, ...] = ()
    timed_out: bool = False
    alive: bool = True
    replaced: bool = False
    limit: SandboxLimit | None = None
