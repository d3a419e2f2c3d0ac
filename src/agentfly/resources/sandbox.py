"""The sandbox under its name of version 0.1. It is a room now: see `agentfly.sandbox`."""

from ..sandbox import TIERS, CellResult, SandboxLimits, SandboxServer, SandboxSession

__all__ = ["TIERS", "CellResult", "SandboxLimits", "SandboxServer", "SandboxSession"]
