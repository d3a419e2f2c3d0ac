"""What `test_ray_cluster.py` does inside its namespace: reservations on three nodes, of which one is killed and one frozen."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from agentfly.errors import ConfigError, EngineError
from agentfly.fleet.ray_cluster import Cluster
from agentfly.fleet.reservation import Share
from tests.scale.ray_local import LocalCluster, run_all, running, wait_for

connected: list[Cluster] = []


def scenarios(local: LocalCluster) -> dict[str, str]:
    local.add("head", cpus=1)
    local.add("b", "c", cpus=2)
    connected.append(Cluster.connect(local.address, health_s=3.0, note=print))
    return run_all(
        local,
        [
            reservations_spread,
            a_child_ends,
            a_child_is_killed,
            questions,
            too_much,
            closed_reservation,
            node_killed,
            node_frozen,
            all_closed,
        ],
    )


def reservations_spread(local: LocalCluster) -> None:
    (cluster,) = connected
    assert cluster.own.name == "head"
    assert {node.name for node in cluster.nodes()} == {"head", "b", "c"}
    made = [cluster.reserve(f"sampler {i}", Share(1.0, 0.5)) for i in range(3)]
    assert len({reservation.node.name for reservation in made}) == 3
    assert {(each.name, each.node) for each in cluster.reserved()} == {
        (reservation.name, reservation.node.name) for reservation in made
    }
    for reservation in made:
        assert reservation.about["software"]["torch"] != "none" and reservation.about["agentfly"]
    with pytest.raises(EngineError, match="no node had 2 CPUs free for sampler 3 within 2 s"):
        cluster.reserve("sampler 3", Share(2.0), timeout_s=2.0)
    for reservation in made:
        reservation.close()
    wait_for(lambda: not cluster.reserved(), what="that Ray forgets the reservations")


def a_child_ends(local: LocalCluster) -> None:
    reservation = connected[0].reserve("sampler 0", Share(0.5))
    child = reservation.run(
        [reservation.about["python"], "-c", "import sys; print(sys.stdin.read(), 'world'); sys.exit(3)"], stdin=b"hello"
    )
    told = wait_for(child.ended, what="that the child has ended")
    assert told == f"on node {reservation.node.name} (exit code 3); it said: hello world", told
    told = wait_for(reservation.run(["no-such-program"]).ended)
    assert "FileNotFoundError" in told, told
    reservation.close()


def a_child_is_killed(local: LocalCluster) -> None:
    reservation = connected[0].reserve("sampler 0", Share(0.5))
    code = "import subprocess,time; subprocess.Popen(['sleep','7171']); time.sleep(7172)"
    child = reservation.run([reservation.about["python"], "-c", code])
    wait_for(lambda: running("sleep 7171"))
    assert child.ended() is None
    child.kill()
    wait_for(lambda: not running("7171"), what="that the group is gone")
    assert "killed by SIGKILL" in wait_for(child.ended)
    # The same, if the reservation's process is killed: the kernel ends the children.
    child = reservation.run([reservation.about["python"], "-c", code])
    wait_for(lambda: running("sleep 7171"))
    os.kill(reservation.about["pid"], 9)
    assert "with its node" in wait_for(child.ended)
    wait_for(lambda: not running("7171"), what="that the group is gone")
    reservation.close()


def questions(local: LocalCluster) -> None:
    reservation = connected[0].reserve("sampler 0", Share(0.5))
    assert reservation.ask("can_import", ["json", "no_such_module", "no_such.inner", "torch"]) == [
        "no_such_module",
        "no_such.inner",
    ]
    assert "refused" in reservation.ask("can_reach", "127.0.0.1", 9).lower()
    port = int(connected[0]._ray.get_runtime_context().gcs_address.rpartition(":")[2])
    assert reservation.ask("can_reach", "127.0.0.1", port) == ""
    assert reservation.ask("sees_file", os.getcwd()) and not reservation.ask("sees_file", "/no/such/file")
    assert 1024 < reservation.ask("free_port") < 65536
    reservation.close()


def too_much(local: LocalCluster) -> None:
    for share, word in (
        (Share(1.0, gpus=1), "1 CPU and 1 GPU"),
        (Share(64.0), "64 CPUs"),
        (Share(1.0, 500.0), "1 CPU and 500 GiB"),
    ):
        with pytest.raises(ConfigError, match=f"no node has {word}.* for sampler 3: .*node b has"):
            connected[0].reserve("sampler 3", share)


def closed_reservation(local: LocalCluster) -> None:
    reservation = connected[0].reserve("sampler 0", Share(0.5))
    child = reservation.run(["sleep", "7173"])
    told: list[str] = []
    reservation.on_lost(told.append)
    reservation.close()
    wait_for(lambda: not running("sleep 7173"))
    assert child.ended() and told == ["was closed"]
    with pytest.raises(EngineError, match="is lost: was closed"):
        reservation.run(["true"])


def node_killed(local: LocalCluster) -> None:
    cluster = connected[0]
    reservations = _one_on_each("head", "b", "c")
    child = reservations["b"].run(["sleep", "7174"])
    told: list[str] = []
    reservations["b"].on_lost(told.append)
    local.kill("b")
    began = time.monotonic()
    print(wait_for(child.ended, what="that the loss is noticed"), time.monotonic() - began, flush=True)
    assert told
    moved = cluster.reserve("sampler 9", Share(0.5), avoid=[reservations["b"].node.id])
    assert moved.node.name in ("c", "head")
    for reservation in [*reservations.values(), moved]:
        reservation.close()


def node_frozen(local: LocalCluster) -> None:
    cluster = connected[0]
    local.add("d", cpus=2)
    reservations = _one_on_each("head", "c", "d")
    child = reservations["c"].run(["sleep", "7175"])
    local.freeze("c")
    began = time.monotonic()
    print(wait_for(child.ended, what="that the loss is noticed"), time.monotonic() - began, flush=True)
    began = time.monotonic()
    moved = cluster.reserve("sampler 9", Share(1.5))
    print("moved to", moved.node.name, time.monotonic() - began, flush=True)
    assert moved.node.name == "d"
    reservations["c"].close()


def all_closed(local: LocalCluster) -> None:
    (cluster,) = connected
    reservation = cluster.reserve("sampler 0", Share(0.25))
    reservation.run(["sleep", "7176"])
    began = time.monotonic()
    cluster.close()
    cluster.close()
    print("closed in", time.monotonic() - began, flush=True)
    wait_for(lambda: not running("sleep 7176"))
    local.thaw("c")
    wait_for(lambda: not running("sleep 7175"), what="that a node that thaws ends what ran there")


def _one_on_each(*names: str) -> dict[str, Any]:
    cluster = connected[0]
    nodes = {node.name: node for node in cluster.nodes() if node.alive}
    return {name: cluster.reserve(f"sampler {i}", Share(0.5), only=nodes[name].id) for i, name in enumerate(names)}
