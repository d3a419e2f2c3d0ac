"""The cache folder: what was built or downloaded once and is used by later runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """The folder of stored items: `$AGENTFLY_CACHE`, or `agentfly` in the user's cache folder."""
    if given := os.environ.get("AGENTFLY_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "agentfly"
