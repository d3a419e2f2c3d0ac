"""What each tier stops and does not stop, in sentences, and what to do where it cannot be had."""

from __future__ import annotations

from typing import Any

WORDS = {
    "namespace": "namespace: each session has its own user, PID, mount and IPC namespaces, no network, a read-only system, "
    "a private /tmp, no capabilities and a system call filter.",
    "landlock": "landlock: each session sees only the system's libraries and its own folder, behind a system call filter, "
    "with a watchdog for memory, processes and disk.",
    "process": "process: sessions are plain processes with resource limits; code in them can do what this user can do.",
}
CURES = {
    "namespace": "allow unprivileged user namespaces (sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in Docker "
    "--security-opt seccomp=unconfined), or accept min_tier='landlock'",
    "landlock": "use Linux 5.13 or newer with landlock in the kernel's list of security modules",
    "process": "use Linux on x86_64 or aarch64",
}


def not_stopped(tier: str, facts: dict[str, Any]) -> list[str]:
    """One sentence per thing that this tier, with what the machine gave it, does not stop."""
    if tier == "process":
        return [
            "It does not stop reading and writing this user's files, network traffic, or signals to this user's processes.",
            "It does not add up the memory of several processes of a session between two looks of the watchdog.",
        ]
    found = ["It does not stop an attack on a bug of the kernel: for hostile tenants use a virtual machine."]
    found.append("It does not stop a session from using its CPU time up to the limits, or from measuring the machine's load.")
    if not facts["cgroup"]:
        found.append("Without a cgroup, processes of one session can pass the memory limit together until the watchdog looks.")
    if tier == "landlock":
        found.append(
            "It does not hide the names of files and processes, and disk use passes the limit until the watchdog looks."
        )
        found.append("Even of its own files a session cannot change mode, owner or times: Landlock tells them from no others.")
        if not facts["own_uid"]:
            found.append("Sessions run as this user: the number of processes is counted together with the user's own.")
        if not facts["scoped"]:
            found.append(
                "This kernel's Landlock does not fence signals, so a session may signal only itself, not its own children."
            )
    elif not facts["own_uid"]:
        found.append(
            "Without root, sessions share this user's id in the kernel: per-user kernel limits (pipes, watches) are common."
        )
    return found
