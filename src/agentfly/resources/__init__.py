"""The resource manager: pools of environments, and leases of them for chains.

    spec        what an environment is and how its pool is set up
    manager     ResourceManager: chains ask it for leases; `kinds`: the environments that it knows
    admission   when a chain may start; `claims`: slots of several kinds at once
    placements  the options of each placement; `directory`: the environment servers of a fleet
    backends/   where an instance lives; rpc/ the calls to it

From a chain to the process of its environment:

    Lease             what one chain holds: a handle per kind                         lease.py
      Handle          one chain's use of one instance, until it is released
        (EnvProxy)    what tools and rewards see: calls pass through the handle
      Slot            one place of the pool: who uses the instance, how often, age
        Instance      the environment where it lives: loop, thread or worker          instance.py, backends/
          Worker      the connection to one worker with one or more instances         rpc/client.py
                      a subclass per backend owns the process, sandbox, container or socket

An environment in the event loop or in a thread ends at `Instance`. Names load late: a worker process imports this package too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .admission import Admission as Admission
    from .lease import Lease as Lease
    from .manager import ResourceManager as ResourceManager
    from .spec import Budget as Budget
    from .spec import Cost as Cost
    from .spec import Environment as Environment
    from .spec import Spec as Spec
    from .spec import spec_of as spec_of

_MODULES = {"Admission": "admission", "Lease": "lease", "ResourceManager": "manager"}
"""Where a name is; the others are in `spec`."""
__all__ = ["Admission", "Budget", "Cost", "Environment", "Lease", "ResourceManager", "Spec", "spec_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES.get(name, 'spec')}", __name__), name)
