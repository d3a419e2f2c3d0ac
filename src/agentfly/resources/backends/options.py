"""What a pool may say about the place its instances live in: a table in, a checked value out.

`sandbox`, `container` and `http` have options of their own, one frozen dataclass each; `loop`, `thread` and `process` have
none. They stand beside the pool's other settings (`placement = "sandbox"`, `tier = "landlock"`). An option that the placement
does not have is a ConfigError that says whose it is; nothing is started and nothing heavy is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from ...errors import ConfigError

LOCAL_TIERS = ("process", "landlock", "namespace")
ENGINES = ("docker", "enroot")
SCHEMES = {"ws": 80, "http": 80, "wss": 443, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPlace:
    """Behind the walls of `resources.sandbox`.

    `tier`, `min_tier`   as for the sandbox: the best that works and is not below `min_tier` (`namespace` when not set)
    `limit_s`            one call may take so long; then the sandbox is killed and replaced
    `memory_mb`, `disk_mb`, `processes`, `cpu_s`     per instance; `cpu_s` is CPU time over its whole life
    `visible`            more files and folders that it may read, beside the system, the packages and its own module
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
        for name in ("memory_mb", "disk_mb", "processes", "cpu_s"):
            _require(_is_whole(getattr(self, name)), name, "a whole number from 1", self)
        _require(self.limit_s is None or _is_positive(self.limit_s), "limit_s", "a number above 0", self)
        _check_paths(self)
        if self.tier and self.min_tier and LOCAL_TIERS.index(self.tier) < LOCAL_TIERS.index(self.min_tier):
            raise ConfigError(
                f"the sandbox tier {self.tier!r} is below min_tier {self.min_tier!r}: raise the one or lower the other"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlace:
    """In a container of its own. The image needs Python 3.11 and what the environment imports; AgentFly itself is mounted.

    `engine`, `image`    docker and an image's name, or enroot and a container's name or .sqsh file
    `network`            none, or the name of a network of the engine's (enroot: host)
    `memory_mb`, `cpus`, `disk_mb`, `processes`     limits; `disk_mb` is that of /tmp, the only place that can be written
    `read_only`          whether the rest of its file system is read-only
    `limit_s`            one call may take so long; then the container is killed and replaced
    `visible`            more files and folders that it may read, beside AgentFly and the environment's own module
    `code`               mount (AgentFly and the module come from here) or image (they are installed in the image)
    `python`             the interpreter in the image
    `user`, `socket`     docker alone: the user inside, and where the engine listens ($DOCKER_HOST, /var/run/docker.sock)
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
        for name in ("memory_mb", "disk_mb", "processes"):
            _require(_is_whole(getattr(self, name)), name, "a whole number from 1", self)
        _require(_is_positive(self.cpus), "cpus", "a number above 0", self)
        _require(isinstance(self.read_only, bool), "read_only", "true or false", self)
        _require(self.limit_s is None or _is_positive(self.limit_s), "limit_s", "a number above 0", self)
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
class HttpPlace:
    """Behind `agentfly envs serve`.

    `url`          ws://host:port (or wss://, http://, https://); several: instances are spread over them
    `token_env`    the environment variable that holds the server's token
    `limit_s`      one call may take so long; then the connection is closed and replaced
    `ping_s`       how often a quiet server is asked for a sign of life; after three times that it counts as dead
    """

    url: str | tuple[str, ...]
    token_env: str | None = None
    limit_s: float | None = None
    ping_s: float = 20.0

    def __post_init__(self) -> None:
        _require(bool(self.urls) and all(isinstance(url, str) for url in self.urls), "url", "an address", self)
        for url in self.urls:
            try:
                parts = urlsplit(url)
                good = parts.scheme in SCHEMES and bool(parts.hostname) and (parts.port or 1) > 0
            except ValueError:
                good = False
            if not good or parts.username or parts.password:
                raise ConfigError(f"url must be ws://host:port (or wss, http, https) without a password, not {url!r}")
        _require(self.token_env is None or isinstance(self.token_env, str), "token_env", "a variable's name", self)
        _require(self.limit_s is None or _is_positive(self.limit_s), "limit_s", "a number above 0", self)
        _require(_is_positive(self.ping_s), "ping_s", "a number above 0", self)

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url


Place = SandboxPlace | ContainerPlace | HttpPlace
PLACES: dict[str, type[Place]] = {"sandbox": SandboxPlace, "container": ContainerPlace, "http": HttpPlace}
OPTIONS = frozenset(each.name for place in PLACES.values() for each in fields(place))
"""Every option that some placement has."""


def read_place(placement: str, options: Mapping[str, Any], who: str) -> Place | None:
    """The checked value; None where the placement has no options. `who` begins the error's sentence."""
    kind: Any = PLACES.get(placement)
    known = () if kind is None else tuple(each.name for each in fields(kind))
    for name in options:
        if name not in known:
            homes = [other for other, cls in PLACES.items() if name in {each.name for each in fields(cls)}]
            whose = f"; {', '.join(homes)} {'has' if len(homes) == 1 else 'have'} it" if homes else ""
            has = f"has {', '.join(known)}" if known else "has no options of its own"
            raise ConfigError(f"{who}: placement {placement!r} has no option {name!r} (it {has}){whose}")
    if kind is None:
        return None
    for each in fields(kind):
        if each.default is MISSING and each.name not in options:
            raise ConfigError(f"{who}: placement {placement!r} needs the option {each.name!r}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    try:
        made: Place = kind(**given)
        return made
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None


def _check_paths(place: SandboxPlace | ContainerPlace) -> None:
    good = isinstance(place.visible, tuple) and all(isinstance(path, str) and path for path in place.visible)
    _require(good, "visible", "a list of paths", place)


def _require(ok: bool, name: str, wanted: str, place: Any) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {wanted}, not {getattr(place, name)!r}")


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
