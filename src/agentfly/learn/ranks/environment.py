"""Which rank this process is: the environment variables that torchrun and the supervisor set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import ConfigError

EXAMPLE = "torchrun --nproc-per-node 2 -m agentfly train recipe.toml"


@dataclass(frozen=True, slots=True)
class ThisRank:
    """One rank of `size`; `local_rank` of `local_size` on its machine. `address` is that of rank 0."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str


def read_rank(environ: Mapping[str, str] = os.environ) -> ThisRank | None:
    """Returns which of several ranks this process is; None if it is the only one. Raises ConfigError."""
    if "RANK" not in environ and environ.get("WORLD_SIZE", "1") == "1":
        return None
    size, rank = _number(environ, "WORLD_SIZE"), _number(environ, "RANK")
    if size < 1 or not 0 <= rank < size:
        raise ConfigError(f"the environment says RANK={rank} of WORLD_SIZE={size}: start the ranks with `{EXAMPLE}`")
    if size == 1:
        return None
    address, port = environ.get("MASTER_ADDR", ""), _number(environ, "MASTER_PORT")
    if not address or not 0 < port < 65536:
        raise ConfigError(
            f"the environment has no usable MASTER_ADDR and MASTER_PORT ({address!r}, {port}): start the ranks with `{EXAMPLE}`"
        )
    local_size = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else size
    local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
    if not 0 <= local_rank < local_size <= size:
        raise ConfigError(
            f"the environment says LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size} and WORLD_SIZE={size}: start the "
            f"ranks with `{EXAMPLE}`"
        )
    return ThisRank(rank, size, local_rank, local_size, f"{address}:{port}")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    try:
        return int(text or "")
    except ValueError:
        problem = "is not set" if text is None else f"is {text!r}"
        raise ConfigError(
            f"the environment variable {name} {problem}, but others say that several ranks train: start them with `{EXAMPLE}`, "
            "or unset RANK and WORLD_SIZE"
        ) from None
