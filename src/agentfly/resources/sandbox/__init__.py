"""A sandbox for Python sessions: a fork server, sessions behind walls, one event loop that drives thousands of them.

`SandboxServer.start()` gives a server that says which tier it got; `server.session()` a session; `session.run(code,
timeout_s)` a `CellResult`. The names load late: the server process imports this package too, and must stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .host import SandboxServer
    from .limits import TIERS, CellResult, SandboxLimits
    from .session import SandboxSession

__all__ = ["TIERS", "CellResult", "SandboxLimits", "SandboxServer", "SandboxSession"]
_WHERE = {
    "SandboxServer": "host",
    "SandboxSession": "session",
    "SandboxLimits": "limits",
    "CellResult": "limits",
    "TIERS": "limits",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_WHERE[name]}", __name__), name)
