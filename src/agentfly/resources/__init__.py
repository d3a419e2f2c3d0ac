"""The resource manager: environments are pooled, placed and lent to chains here.

`env` says what an environment is, `placements` where an instance lives, `pool` keeps the instances of one kind, `manager`
lends them as leases, `controller` decides when a chain may start. Names load late: a worker process imports this package
too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .controller import Admission as Admission
    from .env import Budget as Budget
    from .env import Cost as Cost
    from .env import Environment as Environment
    from .env import Spec as Spec
    from .env import spec_of as spec_of
    from .lease import Lease as Lease
    from .manager import ResourceManager as ResourceManager

_HOMES = {
    "Admission": "controller",
    "Budget": "env",
    "Cost": "env",
    "Environment": "env",
    "Lease": "lease",
    "ResourceManager": "manager",
    "Spec": "env",
    "spec_of": "env",
}
__all__ = ["Admission", "Budget", "Cost", "Environment", "Lease", "ResourceManager", "Spec", "spec_of"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
