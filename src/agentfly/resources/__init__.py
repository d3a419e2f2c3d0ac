"""The resource manager: environments are pooled, placed and lent to chains here.

`env` says what an environment is, `placements` where an instance lives, `pool` keeps the instances of one kind, `manager`
lends them as leases, `controller` decides when a chain may start. Names load late: a worker process imports this package
too.
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

_HOMES = {
    "Admission": "admission",
    "Budget": "spec",
    "Cost": "spec",
    "Environment": "spec",
    "Lease": "lease",
    "ResourceManager": "manager",
    "Spec": "spec",
    "spec_of": "spec",
}
__all__ = ["Admission", "Budget", "Cost", "Environment", "Lease", "ResourceManager", "Spec", "spec_of"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
