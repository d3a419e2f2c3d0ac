"""A kind of environment as a server lends it, and how a fleet tells its servers which kinds they lend."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Mapping
from typing import Any

from ... import plugins
from ...aio.deadline import Expired, within
from ...errors import ConfigError, DeadlineError
from ..instance import Instance, backend_of
from ..spec import Spec, importable, ready_of, spec_of

log = logging.getLogger(__name__)
_FIELDS = ("name", "placement", "per_process", "start_timeout_s", "reset_timeout_s", "close_timeout_s")


def kind_value(spec: Spec) -> dict[str, Any]:
    """What a server needs to know of a kind, in a JSON form. Raises ConfigError if a server could not import it."""
    target, options = importable(spec)
    place = {name: list(value) if isinstance(value, tuple) else value for name, value in spec.place.items()}
    own = {name: getattr(spec, name) for name in _FIELDS}
    return {**own, "target": target, "options": options, "place": place, "pass_env": list(spec.pass_env)}


def kind_from(value: Mapping[str, Any]) -> Spec:
    """The spec of a kind on a server. Raises ConfigError if this machine cannot import it or lacks what its placement needs."""
    settings = {name: value[name] for name in (*_FIELDS, "options", "place")}
    try:
        made = plugins.resolve("envs", value["target"])
        return spec_of(made, **settings, pass_env=tuple(value["pass_env"]))
    except ImportError as error:
        raise ConfigError(f"environment {value['name']!r} cannot be imported: {error}") from None


def public_name(spec: Spec) -> str:
    """The name of a kind for trainers elsewhere, whose pools may have other names."""
    return str(getattr(spec.make, "__name__", spec.name))


def default_placement(spec: Spec) -> str:
    """The environment's own placement; but one whose sync methods would block the server's loop goes into worker processes."""
    if spec.placement == "loop" and not inspect.iscoroutinefunction(getattr(spec.make, "reset", None)):
        return "process"
    return spec.placement


class ServedKind:
    """One kind of environment of a server."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.backend = backend_of(spec)
        self.ready = ready_of(spec)
        self.numbers = itertools.count(1)

    def create(self) -> Instance:
        return self.backend.create(next(self.numbers))

    async def start(self, instance: Instance) -> None:
        """Raises DeadlineError if the instance does not start in time."""
        try:
            await within(instance.start(), self.spec.start_timeout_s)
        except Expired:
            raise DeadlineError(f"{self.spec.name} did not come up within {self.spec.start_timeout_s:g} s") from None

    async def try_out(self) -> None:
        """Start one instance and close it. Raises ConfigError if no instance can work here."""
        instance = self.create()
        try:
            await self.start(instance)
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"environment {self.spec.name!r} does not start: {error}") from None
        except Exception as error:  # noqa: BLE001 - it may start the next time; the pools count and report failed starts
            log.warning("a first %s did not start: %s: %s", self.spec.name, type(error).__name__, error)
        finally:
            await instance.close(self.spec.close_timeout_s)
