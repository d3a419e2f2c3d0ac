"""A run over the nodes of a Ray cluster: samplers, environment servers and learner ranks are placed there as processes.

Ray only places (`fleet.ray_cluster`): chains, weights, calls of environments and gradients go over the connections that the
same parts have on one machine. All parts of a run share one `Cluster`, because it keeps the books of what is reserved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...config import Config
from ...fleet.ray_cluster import Cluster

_lock = threading.Lock()
_open: list[Cluster] = []
_users = 0


@contextmanager
def on_cluster(config: Config, note: Callable[[str], None] = lambda _: None) -> Iterator[Cluster]:
    """The cluster of `cluster.address`. Blocks for seconds at the first use; the last user that leaves closes it.

    Raises MissingExtra without Ray, ConfigError if no cluster answers.
    """
    global _users
    assert config.cluster.address is not None
    with _lock:
        if not _open:
            _open.append(Cluster.connect(config.cluster.address, health_s=config.cluster.health_s, note=note))
        cluster = _open[0]
        _users += 1
    try:
        yield cluster
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _open.clear()
                cluster.close()


def current_cluster() -> Cluster | None:
    """The cluster that this process is connected to by `on_cluster`, if any."""
    with _lock:
        return _open[0] if _open else None
