"""Joining a run to the cluster of its config, with everything checked that can be known before the model is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...config import Config
from ...fleet.ray_cluster import Cluster
from ...fleet.reservation import Share
from . import on_cluster
from .checks import check_cluster, learner_gpus


@contextmanager
def joined_cluster(config: Config, note: Callable[[str], None]) -> Iterator[Cluster | None]:
    """The cluster of `cluster.address`, connected and checked; None if it is not set. Raises ConfigError, MissingExtra."""
    if config.cluster.address is None:
        yield None
        return
    with on_cluster(config, note) as cluster:
        check_cluster(cluster, config, note)
        if learner_gpus(config, cluster.nodes()):
            held = cluster.reserve("learner 0", Share(0.0, 0.0, 1.0), only=cluster.own.id)
            note(f"the learner's GPU on node {held.node.name} is reserved: {', '.join(held.about['gpus'])}")
        yield cluster
