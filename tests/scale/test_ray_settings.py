"""Keys of the Ray cluster, and what is checked on its nodes, without Ray: a node is an object that answers questions."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.config import Config
from agentfly.errors import ConfigError, MissingExtra
from agentfly.fleet.bare import software
from agentfly.fleet.node_launcher import check_node
from agentfly.fleet.ray_actor import NodeActor
from agentfly.fleet.ray_cluster import Cluster
from agentfly.fleet.reservation import Node, Share
from agentfly.training.cluster import checks
from agentfly.training.cluster.checks import check_files, check_room, needs, sampler_share, shares_of
from agentfly.training.cluster.status import show_status


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"cluster": {"address": "auto"}}, "cluster.address has no effect: set sampler.place"),
        ({"cluster": {"env_hosts": 2}}, "cluster.env_hosts needs a Ray cluster: set cluster.address"),
        ({"cluster": {"env_cpus": 2}}, "cluster.env_cpus has no effect without cluster.env_hosts"),
        (
            {"cluster": {"address": "auto", "env_memory_gib": 2}, "sampler": {"replicas": 2}},
            "cluster.env_memory_gib has no effect without cluster.env_hosts",
        ),
        ({"sampler": {"replicas": 2, "cpus": 2}}, "sampler.cpus has no effect without cluster.address"),
        ({"sampler": {"memory_gib": 2}, "cluster": {"address": "auto", "env_hosts": 1}}, "has no effect without sampler.place"),
        ({"learner": {"cpus": 2, "ranks": 2}}, "learner.cpus has no effect without cluster.address"),
        (
            {"learner": {"memory_gib": 2}, "cluster": {"address": "auto"}, "sampler": {"replicas": 2}},
            "learner.memory_gib has no effect without learner.ranks",
        ),
        ({"cluster": {"health_s": 3}}, "cluster.health_s has no effect without worker processes"),
        ({"cluster": {"address": "auto", "env_hosts": -1}}, "cluster.env_hosts"),
    ],
)
def test_a_key_without_effect_is_refused(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.from_dict(tree)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"cluster": {"address": "auto", "env_hosts": 2, "env_cpus": 0.5, "health_s": 3}},
        {"cluster": {"address": "a:6379"}, "sampler": {"place": "process", "cpus": 4, "memory_gib": 8}},
        {"cluster": {"address": "a:6379"}, "learner": {"ranks": 2, "cpus": 4}},
        {"cluster": {"address": "a:6379"}, "backend": "verl"},
    ],
)
def test_keys_of_a_cluster_are_read_and_written(tree: dict[str, Any], tmp_path: Path) -> None:
    config = Config.from_dict(tree)
    (tmp_path / "c.toml").write_text(config.to_toml())
    assert Config.load(tmp_path / "c.toml") == config


def node(name: str, cpus: float = 4, memory_gib: float = 8, gpus: float = 0) -> Node:
    return Node(name, name, "10.0.0.1", True, cpus, memory_gib, gpus, cpus, memory_gib, gpus)


def test_processes_that_do_not_fit_the_nodes_are_refused_with_what_the_nodes_have() -> None:
    config = Config.from_dict(
        {"cluster": {"address": "auto", "env_hosts": 3, "env_cpus": 2}, "sampler": {"replicas": 2, "cpus": 2}}
    )
    nodes = [node("a"), node("b", cpus=6)]
    check_room(nodes, shares_of(config, nodes))
    with pytest.raises(ConfigError) as raised:
        check_room(nodes[:1], shares_of(config, nodes[:1]))
    assert str(raised.value) == (
        "3 environment servers with 2 CPUs each do not fit the cluster, which has room for 0 (node a has 4 CPUs and 8 GiB): "
        "lower cluster.env_hosts or what each reserves, or add nodes"
    )


def test_a_sampler_has_a_gpu_where_the_nodes_have_some() -> None:
    config = Config.from_dict({"cluster": {"address": "auto"}, "sampler": {"replicas": 2}})
    assert sampler_share(config, [node("a")]) == Share(1.0, 0.0, 0.0)
    assert sampler_share(config, [node("a"), node("b", gpus=2)]) == Share(1.0, 0.0, 1.0)
    on_cpu = Config.from_dict(
        {"cluster": {"address": "auto"}, "sampler": {"replicas": 2}, "agent": {"engine": {"device": "cpu"}}}
    )
    assert sampler_share(on_cpu, [node("b", gpus=2)]) == Share(1.0, 0.0, 0.0)


class OtherNode:
    """A reservation whose node has other software, or another disk. Answers as `NodeActor` does."""

    def __init__(self, lacks: tuple[str, ...] = (), sees: bool = True, **versions: str) -> None:
        self.node = SimpleNamespace(name="b")
        self.about = {"software": software() | versions, "agentfly": "/there"}
        self.lacks, self.sees = lacks, sees

    def ask(self, what: str, *values: Any) -> Any:
        if what == "can_import":
            return [name for name in values[0] if name in self.lacks]
        assert what == "sees_file"
        return self.sees and NodeActor.ask_sees_file(None, *values)  # type: ignore[arg-type]


def test_other_software_on_a_node_is_refused() -> None:
    check_node(OtherNode())  # type: ignore[arg-type]
    for name, version in (("python", "3.9"), ("torch", "1.0"), ("transformers", "none")):
        with pytest.raises(
            ConfigError, match=re.escape(f"node b has {name} {version}, but the trainer has {software()[name]}:")
        ):
            check_node(OtherNode(**{name: version}))  # type: ignore[arg-type]
    bare = OtherNode()
    bare.about["agentfly"] = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="node b has no AgentFly"):
        check_node(bare)  # type: ignore[arg-type]


def test_what_a_recipe_needs_on_every_node() -> None:
    agent = {"kind": "my.agents:Mine", "tools": ["calculator", "tools.py:look"], "reward": {"math_verify": 1.0, "format": 0.1}}
    config = Config.from_dict({"agent": {**agent, "env": "scienceworld"}})
    modules, files = needs(config)
    assert modules == ["my", "agentfly", "math_verify", "scienceworld", "py4j"]
    assert files == [Path("tools.py").absolute()]


def test_a_node_without_the_worlds_extra_is_refused() -> None:
    config = Config.from_dict({"agent": {"env": "scienceworld"}})
    with pytest.raises(ConfigError, match=r"node b has no module 'scienceworld', .*pip install 'agentfly\[scienceworld\]'"):
        check_files(OtherNode(lacks=("scienceworld",)), config)  # type: ignore[arg-type]
    check_files(OtherNode(), config)  # type: ignore[arg-type]


def test_a_model_folder_that_is_not_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = Config.from_dict({"agent": {"model": str(tmp_path / "model"), "tools": [f"{tmp_path}/tools.py:look"]}})
    with pytest.raises(ConfigError, match="node b does not see .*tools.py, which this recipe needs on every node"):
        check_files(OtherNode(), config)  # type: ignore[arg-type]
    (tmp_path / "tools.py").write_text("")
    check_files(OtherNode(), config)  # type: ignore[arg-type]
    monkeypatch.setattr(checks, "needs", lambda config: ([], []))
    with pytest.raises(ConfigError, match="does not see the folder .*model of agent.model as the trainer does: .* share"):
        check_files(OtherNode(sees=False), config)  # type: ignore[arg-type]


def test_without_ray_the_extra_is_named_and_an_address_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else found(name, *more))
    with pytest.raises(MissingExtra, match=r"cluster.address needs the package 'ray': pip install 'agentfly\[ray\]'"):
        Cluster.connect("auto")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: True)
    for address in ("ray://a:1", "a", "a:b", ":1"):
        with pytest.raises(ConfigError, match="cluster.address is host:port of the head of a Ray cluster"):
            Cluster.connect(address)
    with pytest.raises(ConfigError, match="the host 'no-such-host.invalid' is not known here"):
        Cluster.connect("no-such-host.invalid:1")


def test_the_status_is_shown_by_node_and_by_run() -> None:
    alive = {"alive": True, "cpus": [1, 4], "memory_gib": [2, 8], "gpus": [0, 1], "samplers": 2, "env_hosts": 1, "ranks": 0}
    dead = {"alive": False, "cpus": [0, 4], "memory_gib": [0, 8], "gpus": [0, 0], "samplers": 0, "env_hosts": 0, "ranks": 0}
    nodes = [{"name": "a", "address": "10.0.0.1", **alive}, {"name": "b", "address": "10.0.0.2", **dead}]
    processes = [{"name": f"sampler {i}", "node": "a"} for i in range(2)] + [{"name": "environment server 0", "node": "a"}]
    run = {
        "directory": "runs/x",
        "step": 3,
        "chains": {"a": 5},
        "pools": {"guess": {"allocated": 4, "idle": 1}},
        "processes": processes,
    }
    text = show_status({"nodes": nodes, "runs": [run]})
    assert [line.split() for line in text.splitlines()[1:3]] == [
        ["a", "10.0.0.1", "1", "of", "4", "2", "of", "8", "0", "of", "1", "2", "samplers,", "1", "environment", "server"],
        ["b", "10.0.0.2", "0", "of", "4", "0", "of", "8", "0", "of", "0", "dead"],
    ]
    assert text.split("\n\n")[1] == (
        "run runs/x, step 3\n  samplers: 2 on a\n  environment servers: 1 on a\n  chains: 5 on a\n"
        "  pool guess: 4 allocated, 1 idle\n"
    )
    assert "no run of AgentFly has a process on this cluster" in show_status({"nodes": nodes, "runs": []})
