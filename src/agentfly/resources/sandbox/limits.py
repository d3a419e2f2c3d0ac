"""What a session may use, and what a cell gives back. Values only: this file knows no kernel and no socket."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

TIERS = ("process", "landlock", "namespace")  # weakest first


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Per session. `memory_mb` is what a session may take on top of the preloaded interpreter, all its processes together
    where a cgroup or the watchdog can add them up; `disk_mb` and `inodes` bound its private /tmp; `cpu_s` is its lifetime's
    CPU time per process; `output_chars` cuts stdout, stderr and the shown value each; `grace_s` is how long an interrupted
    cell has to come back before it is killed."""

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
class CellResult:
    """What a cell printed and came to. `value` is the repr of its last expression, `error` a short traceback or the sentence
    why the session ended, `images` PNG bytes. `timed_out` and `alive` are the host's own observations, never the session's
    words; `replaced` says that the cell ran in a new session because the one before it was lost."""

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    error: str | None = None
    images: tuple[bytes, ...] = ()
    timed_out: bool = False
    alive: bool = True
    replaced: bool = False
