"""The placements by name. Each backend is imported when a pool of its placement is made."""

from __future__ import annotations

from ...errors import ConfigError
from ..spec import Spec
from .base import Backend

PLACEMENTS = {
    "loop": "thread:LoopBackend",
    "thread": "thread:ThreadBackend",
    "process": "process:ProcessBackend",
    "sandbox": "sandbox:SandboxBackend",
    "container": "container:ContainerBackend",
    "http": "http:HttpBackend",
}


def backend_of(spec: Spec) -> Backend:
    """The backend of a pool. Raises ConfigError if no worker can import the environment, or the placement is not usable."""
    from importlib import import_module

    if spec.placement not in PLACEMENTS:
        known = ", ".join(PLACEMENTS)
        raise ConfigError(f"environment {spec.name!r}: unknown placement {spec.placement!r}; known: {known}")
    module, _, name = PLACEMENTS[spec.placement].partition(":")
    backend: Backend = getattr(import_module(f".{module}", __package__), name)(spec)
    return backend
