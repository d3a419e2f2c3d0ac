"""The settings of a pool that belong to its placement: a table is read into a checked dataclass.

`sandbox`, `container`, `http` and `servers` have one dataclass each; `loop`, `thread` and `process` have no such settings. In a
config they stand beside the pool's other settings (`placement = "sandbox"`, `tier = "landlock"`). A setting of another
placement is a ConfigError that says which one has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, get_args

from ..errors import ConfigError
from ..net.address import is_url
from ..schema import Name, Rule, check_fields, setting
from .directory import ServerDirectory

LocalTier = Literal["namespace", "landlock", "process"]
"""Strongest first."""
SCHEMES = ("ws", "wss", "http", "https")
Word = Annotated[str, Rule(lambda text: text != "" and not text.startswith("-"), "a name")]
Paths = tuple[Name, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """Placement `sandbox`: behind the walls of `sandbox`.

    `tier`, `min_tier`   the tier to use; without a name the best that works and is not below `min_tier` (default `namespace`)
    `limit_s`            the time of one call; after it the sandbox is killed and replaced
    `memory_mb`, `disk_mb`, `processes`, `cpu_s`     limits of one instance; `cpu_s` is the CPU time of its whole life
    `visible`            further files and folders that it may read, beside the system, the packages and its own module
    """

    tier: LocalTier | None = None
    min_tier: LocalTier | None = None
    limit_s: float | None = setting(None, above=0)
    memory_mb: int = setting(512, low=1)
    disk_mb: int = setting(64, low=1)
    processes: int = setting(32, low=1)
    cpu_s: int = setting(86_400, low=1)
    visible: Paths = ()

    def __post_init__(self) -> None:
        check_fields(self)
        order = get_args(LocalTier)
        if self.tier and self.min_tier and order.index(self.tier) > order.index(self.min_tier):
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

    image: Word
    engine: Literal["docker", "enroot"] = "docker"
    network: Word = "none"
    memory_mb: int = setting(1024, low=1)
    cpus: float = setting(1.0, above=0)
    disk_mb: int = setting(64, low=1)
    processes: int = setting(128, low=1)
    read_only: bool = True
    limit_s: float | None = setting(None, above=0)
    visible: Paths = ()
    code: Literal["mount", "image"] = "mount"
    python: Word = "python3"
    user: Word | None = None
    socket: Word | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("user", "socket"):
            if getattr(self, name) is not None and self.engine == "enroot":
                raise ConfigError(f"the option {name!r} is for engine 'docker'; enroot has none: remove it")
        if self.engine == "enroot" and self.network not in ("none", "host"):
            raise ConfigError(f"with enroot, network is 'none' or 'host', not {self.network!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Placement `http`: behind `agentfly envs serve`.

    `url`          ws://host:port (or wss://, http://, https://); several: instances are spread over them
    `token_env`    the environment variable that holds the server's token
    `limit_s`      the time of one call; after it the instance is closed and replaced
    `ping_s`       how often a silent server is pinged; after three times that it counts as dead
    """

    url: str | tuple[str, ...]
    token_env: Word | None = None
    limit_s: float | None = setting(None, above=0)
    ping_s: float = setting(20.0, above=0)

    def __post_init__(self) -> None:
        check_fields(self)
        for url in self.urls or ("",):
            if not isinstance(url, str) or not is_url(url, SCHEMES):
                raise ConfigError(f"url must be ws://host:port (or wss, http, https) without a password, not {url!r}")

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Placement `servers`: on the environment servers of a run. A run sets it (`cluster.env_hosts`), a config cannot.

    `directory`    the `ServerDirectory` of this process
    """

    directory: Any = None
    limit_s: None = None

    def __post_init__(self) -> None:
        if not isinstance(self.directory, ServerDirectory):
            raise ConfigError("placement 'servers' is set by cluster.env_hosts, which starts them: remove it")


PlacementOptions = SandboxOptions | ContainerOptions | HttpOptions | FleetOptions
PLACEMENTS: dict[str, tuple[str, type[PlacementOptions] | None]] = {
    "loop": ("thread:LoopBackend", None),
    "thread": ("thread:ThreadBackend", None),
    "process": ("process:ProcessBackend", None),
    "sandbox": ("sandbox:SandboxBackend", SandboxOptions),
    "container": ("container:ContainerBackend", ContainerOptions),
    "http": ("http:HttpBackend", HttpOptions),
    "servers": ("http:HttpBackend", FleetOptions),
}
"""The backend of each placement, which is imported when a pool of that placement is made, and the class of its options."""
_NAMES = {placement: [each.name for each in fields(cls)] if cls else [] for placement, (_, cls) in PLACEMENTS.items()}
OPTIONS = frozenset().union(*_NAMES.values())
"""Every option that some placement has."""


def read_placement(placement: str, options: Mapping[str, Any], who: str) -> PlacementOptions | None:
    """The checked options; None if the placement has none. Raises ConfigError, whose sentence begins with `who`."""
    if placement not in PLACEMENTS:
        choices = [name for name in PLACEMENTS if name != "servers"]  # which no user sets
        raise ConfigError(f"{who}: unknown placement {placement!r}; known: {', '.join(choices)}")
    cls: Any = PLACEMENTS[placement][1]
    names = _NAMES[placement]
    for name in options:
        if name not in names:
            homes = [other for other, theirs in _NAMES.items() if name in theirs]
            whose = f"; {', '.join(homes)} {'has' if len(homes) == 1 else 'have'} it" if homes else ""
            has = f"has {', '.join(names)}" if names else "has no options"
            raise ConfigError(f"{who}: placement {placement!r} has no option {name!r} (it {has}){whose}")
    if cls is None:
        return None
    for each in fields(cls):
        if each.default is MISSING and each.name not in options:
            raise ConfigError(f"{who}: placement {placement!r} needs the option {each.name!r}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    try:
        made: PlacementOptions = cls(**values)
        return made
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None
