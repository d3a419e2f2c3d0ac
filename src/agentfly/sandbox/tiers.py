"""What each tier stops and does not stop, in sentences; what to do if a tier does not work; and the order of tiers.

`namespace`, `landlock` and `process` are this machine's sandbox (`limits.TIERS`). `docker` and `enroot` are one container per
session. `remote` is a server on another machine, which reports one of the other tiers.
"""

from __future__ import annotations

from typing import Any

FAR = ("docker", "enroot", "remote")
"""Tiers outside this machine's own sandbox."""
ORDER = ("process", "enroot", "landlock", "docker", "namespace")
"""Weakest first. A container stands below the tier that the attack suite was run against."""

WORDS = {
    "namespace": "namespace: each session has its own user, PID, mount and IPC namespaces, no network, a read-only system, "
    "a private /tmp, no capabilities and a system call filter.",
    "landlock": "landlock: each session sees only the system's libraries and its own folder, behind a system call filter, "
    "with limits of memory, processes and disk.",
    "process": "process: sessions are plain processes with resource limits; code in them can do what this user can do.",
    "docker": "docker: each session has a separate container, without a network, with a read-only file system, a small /tmp, "
    "no capabilities, the engine's system call filter, and limits of memory, CPU and processes.",
    "enroot": "enroot: each session has a separate container, in user, PID, IPC and network namespaces without a network, "
    "with a read-only file system, a small /tmp, no capabilities, and limits of memory, CPU and processes.",
    "remote": "remote: sessions run on another machine, behind that server's tier; nothing of them runs here.",
}
CURES = {
    "namespace": "allow unprivileged user namespaces (sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in Docker "
    "--security-opt seccomp=unconfined), or accept min_tier='landlock'",
    "landlock": "use Linux 5.13 or newer with landlock in the kernel's list of security modules",
    "process": "use Linux on x86_64 or aarch64",
}
_KERNEL = "It does not stop an attack on a bug of the kernel: for hostile tenants use a virtual machine."
_LOAD = "It does not stop a session from using its CPU time up to the limits, or from measuring the machine's load."
_IMAGE = "It does not hide what is in the image, and the attack suite has not been run against it."
NOT_STOPPED = {
    "namespace": (_KERNEL, _LOAD),
    "landlock": (
        *(_KERNEL, _LOAD),
        "It does not hide the names of files and processes.",
        "A session cannot change mode, owner or times even of its own files: Landlock cannot tell them apart.",
    ),
    "process": (
        "It does not stop reading and writing this user's files, network traffic, or signals to this user's processes.",
        "It does not add up the memory of several processes of a session between two checks of the watchdog.",
    ),
    "docker": (
        *(_KERNEL, _IMAGE),
        "It does not stop what the engine's configuration allows: access to it is root access to the machine.",
    ),
    "enroot": (
        *(_KERNEL, _IMAGE),
        "It has no system call filter, and it does not hide the names of this machine's processes in /proc.",
        "Memory is limited per process and CPU by the number of cores: enroot makes no cgroup.",
    ),
    "remote": ("It does not stop what the server's tier does not stop on that machine.",),
}
_NO_CGROUP = (
    "Without a cgroup, processes of one session can exceed the memory limit together until the watchdog checks, and a session "
    "cannot make anonymous shared memory."
)
_WITHOUT = {
    ("namespace", "cgroup"): _NO_CGROUP,
    ("namespace", "own_uid"): "Without root, sessions share this user's id in the kernel: they share per-user kernel limits "
    "(pipes, watches).",
    ("landlock", "cgroup"): _NO_CGROUP,
    ("landlock", "own_uid"): "Sessions run as this user: their processes are counted together with the user's other processes.",
    ("landlock", "mounts"): "Without the right to mount, disk use can exceed the limit until the watchdog checks.",
    ("landlock", "scoped"): "This kernel's Landlock does not restrict signals, so a session may signal only itself, not its "
    "children.",
}


def not_stopped(tier: str, facts: dict[str, Any]) -> list[str]:
    """Returns one sentence per thing that this tier does not stop. `facts` is what the fork server found on this machine."""
    weaker = [sentence for (name, fact), sentence in _WITHOUT.items() if name == tier and not facts[fact]]
    return [*NOT_STOPPED[tier], *weaker]


def no_loopback(tier: str, facts: dict[str, Any]) -> str:
    """Returns why a private network cannot be had in this tier on this machine, or an empty string."""
    if tier != "namespace":
        return "network 'loopback' needs network namespaces"
    return facts["no_loopback"] or (
        "" if facts["cgroup"] else "network 'loopback' needs a cgroup: only it counts socket memory"
    )


def workspace_notes(tier: str, facts: dict[str, Any]) -> list[str]:
    """Returns one sentence for each thing that a workspace lacks in this tier on this machine."""
    if tier != "namespace":
        lacks = "a plain copy of its tree in a folder of its home, no terminals and no network"
        return [f"In the tier {tier!r} a workspace has {lacks}."]
    copied = f"The tree of a workspace is copied at its start, because an overlay is not possible ({facts['no_overlay']})."
    no_terminals = "Workspaces have no terminals: devpts cannot be mounted."
    return [copied] * bool(facts["no_overlay"]) + [no_terminals] * (not facts["terminals"])


def is_below(tier: str, least: str) -> bool:
    """Whether `tier` is weaker than `least`."""
    return ORDER.index(tier) < ORDER.index(least)


def least_local(least: str, local: tuple[str, ...]) -> str:
    """Returns the weakest of this machine's tiers that is not below `least`."""
    return next(name for name in local if not is_below(name, least))
