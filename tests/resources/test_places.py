"""The options of placements: which are refused and with what cure, and what the container engines are asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest

from agentfly.agents import ReactAgent
from agentfly.config import Config
from agentfly.errors import ConfigError
from agentfly.resources import ResourceManager, spec_of
from agentfly.resources.backends.bundle import PACKAGE, bundle_of
from agentfly.resources.backends.container import LABEL, container_config, enroot_command, is_dead, own_label
from agentfly.resources.placements import ContainerOptions
from agentfly.testing import ByteRenderer, ScriptedEngine

from .worlds import Board, Worker

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"colour": "red"}, "no setting 'colour'"),
    ({"placement": "moon"}, "unknown placement 'moon'; known: loop, thread, process, sandbox, container, http"),
    ({"placement": "thread", "tier": "landlock"}, "placement 'thread' has no option 'tier'.*sandbox has it"),
    ({"placement": "sandbox", "image": "x"}, "placement 'sandbox' has no option 'image'.*container has it"),
    ({"placement": "sandbox", "tier": "paper"}, "tier must be 'namespace', 'landlock' or 'process', not 'paper'"),
    ({"placement": "sandbox", "tier": "process", "min_tier": "namespace"}, "'process' is below min_tier 'namespace'"),
    ({"placement": "sandbox", "memory_mb": 0}, "memory_mb must be an integer of at least 1, not 0"),
    ({"placement": "sandbox", "limit_s": -1}, "limit_s must be a number above 0"),
    ({"placement": "sandbox", "visible": "/etc"}, "visible must be a list of strings"),
    ({"placement": "container"}, "placement 'container' needs the option 'image'"),
    ({"placement": "container", "image": "x", "engine": "podman"}, "engine must be 'docker' or 'enroot'"),
    ({"placement": "container", "image": "--rm"}, "image must be a name"),
    ({"placement": "container", "image": "x", "engine": "enroot", "user": "me"}, "'user' is for engine 'docker'"),
    ({"placement": "container", "image": "x", "engine": "enroot", "network": "lan"}, "network is 'none' or 'host'"),
    ({"placement": "http"}, "needs the option 'url'"),
    ({"placement": "http", "url": "ftp://x"}, "url must be ws://host:port"),
    ({"placement": "http", "url": "ws://me:pass@x:1"}, "without a password"),
]


@pytest.mark.parametrize(("settings", "word"), REFUSED, ids=[word[:40] for _, word in REFUSED])
def test_settings_that_no_pool_can_have_are_refused_when_the_config_is_read(
    settings: dict[str, Any], word: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    path.write_text("\n".join(["[resources.pools.Board]", *lines]))
    with pytest.raises(ConfigError, match=word) as caught:
        Config.load(path, [])
    assert "resources.pools.Board" in str(caught.value)
    with pytest.raises(ConfigError, match=word):
        ReactAgent(ScriptedEngine([]), env=Board, renderer=ByteRenderer(), resources={"pools": {"Board": settings}})


def test_options_that_the_environment_does_not_take_are_refused_when_the_agent_is_built() -> None:
    def build(pools: dict[str, Any]) -> None:
        ReactAgent(ScriptedEngine([]), env=Board, renderer=ByteRenderer(), resources={"pools": pools})

    with pytest.raises(ConfigError, match="'Board': options do not fit: got an unexpected keyword argument 'size'"):
        build({"Board": {"options": {"size": 3}}})
    with pytest.raises(ConfigError, match="resources.pools names 'Bord'"):
        build({"Bord": {"placement": "sandbox"}})


def test_settings_that_a_placement_cannot_honour_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not measure growth: remove max_growth_mb"):
        spec_of(Board, placement="sandbox", max_growth_mb=10)
    for name, value in (("pass_env", ("A",)), ("per_process", 2)):
        with pytest.raises(ConfigError, match=f"leaves '{name}' to the server"):
            spec_of(Board, placement="http", url="ws://x:1", **{name: value})


def test_another_placement_drops_the_options_of_the_old_one() -> None:
    walled = spec_of(Board, placement="sandbox", memory_mb=64)
    assert spec_of(walled, placement="thread").place == {}
    assert spec_of(walled, disk_mb=8).place == {"memory_mb": 64, "disk_mb": 8}
    assert spec_of(walled, limit_s=2).call_timeout_s == 2


def test_a_missing_engine_is_one_sentence_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    missing = str(tmp_path / "no.sock")
    with pytest.raises(
        ConfigError, match=r"'Board': no Docker engine is here \(there is no .*no\.sock\): install and start Docker"
    ):
        ResourceManager(None, spec_of(Board, placement="container", image="x", socket=missing))
    monkeypatch.setenv("DOCKER_HOST", "tcp://there:2375")
    with pytest.raises(ConfigError, match="only a unix socket is used"):
        ResourceManager(None, spec_of(Board, placement="container", image="x"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="'Board': enroot is not installed here"):
        ResourceManager(None, spec_of(Board, placement="container", image="x", engine="enroot"))


def test_the_configuration_of_a_container_names_every_restriction() -> None:
    spec = spec_of(Worker, placement="container", image="img", memory_mb=256, cpus=0.5, processes=20, disk_mb=8)
    place = spec.placement_options
    assert isinstance(place, ContainerOptions)
    config = container_config(spec, place, bundle_of(spec))
    host = config["HostConfig"]
    assert (config["NetworkDisabled"], host["NetworkMode"]) == (True, "none")
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"], host["PidsLimit"]) == (256 << 20, 256 << 20, 500_000_000, 20)
    assert (host["ReadonlyRootfs"], host["CapDrop"], host["SecurityOpt"]) == (True, ["ALL"], ["no-new-privileges"])
    assert host["Tmpfs"] == {"/tmp": "rw,nosuid,nodev,size=8m,mode=1777"}
    assert (config["OpenStdin"], config["StdinOnce"], host["AutoRemove"]) == (True, True, True)
    assert config["User"] == "65534:65534"
    assert all(mount["ReadOnly"] for mount in host["Mounts"])
    tests, packed = str(Path(__file__).parents[1]), str(Path(msgpack.__file__).parent)
    assert {mount["Source"] for mount in host["Mounts"]} == {str(PACKAGE), tests, packed}
    assert config["Labels"][LABEL] == own_label()


def test_enroot_mounts_read_only_and_the_entry_point_gets_the_other_limits() -> None:
    spec = spec_of(Worker, placement="container", engine="enroot", image="img", memory_mb=256, cpus=2, processes=20)
    place = spec.placement_options
    assert isinstance(place, ContainerOptions)
    words = enroot_command("/bin/enroot", place, bundle_of(spec))
    assert "--rw" not in words
    mounts = [words[at + 1] for at, word in enumerate(words) if word == "--mount"]
    assert all(re.search(r"[:,]ro,", mount) for mount in mounts[:-1])
    assert mounts[-1].startswith("tmpfs:/tmp:tmpfs:")
    assert json.loads(words[-1])["limits"] == {"network": "none", "memory_mb": 256, "cpus": 2, "processes": 20}


def test_a_bundle_has_the_module_of_the_environment_and_the_paths_of_visible(tmp_path: Path) -> None:
    world = tmp_path / "world.py"
    world.write_text("class World:\n    def reset(self, task): ...\n    def close(self): ...\n")
    (tmp_path / "secret.txt").write_text("canary")
    bundle = bundle_of(spec_of(f"{world}:World"), (str(tmp_path / "secret.txt"),))
    assert bundle.paths == (str(PACKAGE), str(world), str(tmp_path / "secret.txt"))
    assert bundle_of(spec_of(f"{world}:World")).paths == (str(PACKAGE), str(world))
    with pytest.raises(ConfigError, match="visible names .*nowhere, which does not exist"):
        bundle_of(spec_of(f"{world}:World"), (str(tmp_path / "nowhere"),))


def test_an_owner_is_dead_only_when_that_is_certain() -> None:
    mine = own_label()
    place, _, began = mine.rpartition("/")
    assert not is_dead(mine)
    assert is_dead(f"{place}/{int(began) + 1}")  # the number was given to another process
    assert is_dead(f"{place.rpartition('/')[0]}/4194303/{began}")
    assert not is_dead(f"another-boot/{mine.partition('/')[2]}")
    assert not is_dead("nonsense")
