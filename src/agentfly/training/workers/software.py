"""The software of this process, which the trainer and its workers must have in common."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version


def software() -> dict[str, str]:
    """The versions that the trainer and its workers must have in common."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in ("agentfly", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
