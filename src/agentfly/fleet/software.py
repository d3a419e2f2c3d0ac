"""The software and the machine of a process, which a fleet compares with its own."""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version

from ..errors import ConfigError

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


def check_software(theirs: Mapping[str, str], where: str, names: Collection[str] = PACKAGES) -> None:
    """Raises ConfigError if a process or a node has other versions than this process. `where` names it."""
    for name, ours in software().items():
        if name in names and theirs.get(name) != ours:
            raise ConfigError(
                f"{where} has {name} {theirs.get(name)}, but the trainer has {ours}: install the same versions on every machine"
            )


def machine() -> str:
    """Names this boot of this machine, so that the trainer knows whether it shares memory with a process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()
