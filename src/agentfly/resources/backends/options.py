"""The settings of a pool that belong to its placement: a table is read into a checked dataclass.

`sandbox`, `container` and `http` have one dataclass each; `loop`, `thread` and `process` have no such settings. In a config
they stand beside the pool's other settings (`placement = "sandbox"`, `tier = "landlock"`). A setting of another placement is a
ConfigError that says which one has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ...errors import ConfigError
from ...net.address import is_url

LOCAL_TIERS = ("process", "landlock", "namespace")
ENGINES = ("docker", "enroot")
SCHEMES = ("ws", "wss", "http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """Placement `sandbox`: behind the walls of `resources.sandbox`.

    `tier`, `min_tier`   the tier to use; without a name the best that works and is not below `min_tier` (default `namespace`)
    `limit_s`            the time of one call; after it the sandbox is killed and replaced
    `memory_mb`, `disk_mb`, `processes`, `cpu_s`     limits of one instance; `cpu_s` is the CPU time of its whole life
    `visible`            further files and folders that it may read, beside the system, the packages and its own module
    """

    tier: str | None = None
    min_tier: str | None = None
    limit_s: float | None = None
    memory_mb: int = 512
    disk_mb: int = 64
    processes: int = 32
    cpu_s: int = 86_400
    visible: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tier", "min_tier"):
            _require(getattr(self, name) in (None, *LOCAL_TIERS), name, f"one of {', '.join(reversed(LOCAL_TIERS))}", self)
        _check_common(self, whole=("memory_mb", "disk_mb", "processes", "cpu_s"))
        _check_paths(self)
        if self.tier and self.min_tier and LOCAL_TIERS.index(self.tier) < LOCAL_TIERS.index(self.min_tier):
            raise ConfigError(
                f"the sandbox tier {self.tier!r} is below min_tier {self.min_tier!r}: raise the one or lower the other"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """Placement `container`. The image needs Python 3.11 and what the environment imports; AgentFly is mounted.

    `engine`, `image`    docker and the name of an image, or enroot and the name of a container or a .sqsh file
    `network`            none, or the name of one of the engine's networks (enroot: host)
    `memory_mb`, `cpus`, `disk_mb`, `processes`     limits; `disk_mb` is the size of /tmp, the only writable folder
    `read_only`          whether the rest of the file system is read-only
    `limit_s`            the time of one call; after it the container is killed and replaced
    `visible`            further files and folders that it may read, beside AgentFly and the environment's module
    `code`               mount (AgentFly and the module are mounted) or image (they are installed in the image)
    `python`             the interpreter in the image
    `user`, `socket`     docker only: the user inside, and the engine's socket ($DOCKER_HOST, /var/run/docker.sock)
    """

    image: str
    engine: str = "docker"
    network: str = "none"
    memory_mb: int = 1024
    cpus: float = 1.0
    disk_mb: int = 64
    processes: int = 128
    read_only: bool = True
    limit_s: float | None = None
    visible: tuple[str, ...] = ()
    code: str = "mount"
    python: str = "python3"
    user: str | None = None
    socket: str | None = None

    def __post_init__(self) -> None:
        _require(self.engine in ENGINES, "engine", " or ".join(ENGINES), self)
        for name in ("image", "network", "python"):
            value = getattr(self, name)
            _require(isinstance(value, str) and bool(value) and not value.startswith("-"), name, "a name", self)
        _check_common(self, whole=("memory_mb", "disk_mb", "processes"))
        _require(_is_positive(self.cpus), "cpus", "a number above 0", self)
        _require(isinstance(self.read_only, bool), "read_only", "true or false", self)
        _require(self.code in ("mount", "image"), "code", "mount or image", self)
        for name in ("user", "socket"):
            value = getattr(self, name)
            _require(value is None or (isinstance(value, str) and bool(value)), name, "a text", self)
            if value is not None and self.engine == "enroot":
                raise ConfigError(f"the option {name!r} is for engine 'docker'; enroot has none: remove it")
        if self.engine == "enroot" and self.network not in ("none", "host"):
            raise ConfigError(f"with enroot, network is 'none' or 'host', not {self.network!r}")
        _check_paths(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Placement `http`: behind `agentfly envs serve`.

    `url`          ws://host:port (or wss://, http://, https://); several: instances are spread over them
    `token_env`    the environment variable that holds the server's token
    `limit_s`      the time of one call; after it the connection is closed and replaced
    `ping_s`       how often a silent server is pinged; after three times that it counts as dead
    """

    url: str | tuple[str, ...]
    token_env: str | None = None
    limit_s: float | None = None
    ping_s: float = 20.0

    def __post_init__(self) -> None:
        _require(bool(self.urls) and all(isinstance(url, str) for url in self.urls), "url", "an address", self)
        for url in self.urls:
            if not is_url(url, SCHEMES):
                raise ConfigError(f"url must be ws://host:port (or wss, http, https) without a password, not {url!r}")
        _require(self.token_env is None or isinstance(self.token_env, str), "token_env", "a variable's name", self)
        _check_common(self)
        _require(_is_positive(self.ping_s), "ping_s", "a number above 0", self)

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url


PlacementOptions = SandboxOptions | ContainerOptions | HttpOptions
OPTION_CLASSES: dict[str, type[PlacementOptions]] = {
    "sandbox": SandboxOptions,
    "container": ContainerOptions,
    "http": HttpOptions,
}
OPTIONS = frozenset(each.name for cls in OPTION_CLASSES.values() for each in fields(cls))
"""Every option that some placement has."""


def read_placement(placement: str, options: Mapping[str, Any], who: str) -> PlacementOptions | None:
    """The checked options; None if the placement has none. Raises ConfigError, whose sentence begins with `who`."""
    cls: Any = OPTION_CLASSES.get(placement)
    known = () if cls is None else tuple(each.name for each in fields(cls))
    for name in options:
        if name not in known:
            homes = [other for other, its in OPTION_CLASSES.items() if name in {each.name for each in fields(its)}]
            whose = f"; {', '.join(homes)} {'has' if len(homes) == 1 else 'have'} it" if homes else ""
            has = f"has {', '.join(known)}" if known else "has no options"
            raise ConfigError(f"{who}: placement {placement!r} has no option {name!r} (it {has}){whose}")
    if cls is None:
        return None
    for each in fields(cls):
        if each.default is MISSING and each.name not in options:
            raise ConfigError(f"{who}: placement {placement!r} needs the option {each.name!r}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    try:
        made: PlacementOptions = cls(**given)
        return made
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None


def _check_common(options: PlacementOptions, whole: tuple[str, ...] = ()) -> None:
    for name in whole:
        value = getattr(options, name)
        _require(type(value) is int and value >= 1, name, "a whole number from 1", options)
    _require(options.limit_s is None or _is_positive(options.limit_s), "limit_s", "a number above 0", options)


def _check_paths(options: SandboxOptions | ContainerOptions) -> None:
    good = isinstance(options.visible, tuple) and all(isinstance(path, str) and path for path in options.visible)
    _require(good, "visible", "a list of paths", options)


def _require(ok: bool, name: str, wanted: str, options: PlacementOptions) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {wanted}, not {getattr(options, name)!r}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
