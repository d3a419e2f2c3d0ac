"""The files of examples/cluster can be submitted: they parse, and the keys in their commands exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentfly.config import Config, keys
from agentfly.training.verl.table import TABLE

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
FILES = sorted(FOLDER.iterdir())
KEY = re.compile(r"(?<![\w./+-])([a-z_]+(?:\.[a-z_]+)+|backend)=")


def test_there_are_files_for_slurm_and_kubernetes() -> None:
    assert {path.suffix for path in FILES} == {".sbatch", ".yaml"}
    page = (FOLDER.parents[1] / "docs" / "scale.md").read_text()
    assert all(f"`{path.name}`" in page for path in FILES)


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".sbatch"], ids=lambda path: path.name)
def test_a_batch_script_is_valid_bash_with_directives_before_its_commands(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(directives) < min(commands)  # Slurm reads none after the first command


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".yaml"], ids=lambda path: path.name)
def test_a_manifest_is_valid_yaml(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(path.read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= set(each) for each in documents)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_keys_of_its_commands_exist(path: Path) -> None:
    found = set(KEY.findall(path.read_text()))
    assert found
    known = {key for key, *_ in keys()} | set(TABLE)
    assert found <= known, f"{path.name} sets {sorted(found - known)}"


def test_the_number_of_machines_is_that_of_the_keys() -> None:
    text = (FOLDER / "kubernetes_verl.yaml").read_text()
    (nodes,) = re.findall(r"verl\.nodes=(\d+)", text)
    (gpus,) = re.findall(r"verl\.gpus_per_node=(\d+)", text)
    assert f"completions: {nodes}\n" in text
    assert f"nvidia.com/gpu: {gpus}," in text
    config = Config.load(None, ["backend=verl", "cluster.address=auto", f"verl.nodes={nodes}", f"verl.gpus_per_node={gpus}"])
    assert config.verl.nodes == 8


def test_a_ray_cluster_has_room_for_its_ranks_and_replicas() -> None:
    text = (FOLDER / "slurm_ray.sbatch").read_text()
    (nodes,), (gpus,) = re.findall(r"--nodes=(\d+)\n", text), re.findall(r"--gpus-per-node=(\d+)", text)
    (cpus,) = re.findall(r"--cpus-per-task=(\d+)", text)
    config = _config_of(text)
    assert config.cluster.address is not None
    assert config.learner.ranks + config.sampler.replicas == int(nodes) * int(gpus)
    needed = config.learner.ranks * config.learner.cpus + config.sampler.replicas * config.sampler.cpus
    assert needed <= int(nodes) * int(cpus)


@pytest.mark.parametrize("name", ["kubernetes_ray.yaml", "kubernetes_verl.yaml"])
def test_the_pods_of_a_ray_cluster_wait_for_each_other_and_close_their_ports(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    text = (FOLDER / name).read_text()
    job, service, policy = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    script = container["args"][0]
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)
    program = script.partition("<<'END'")[2].partition("\n")[2].partition("\nEND")[0]
    compile(program, "wait", "exec")
    count = job["spec"]["completions"]
    assert f"< {count} and" in program
    assert job["spec"]["parallelism"] == count
    own = job["metadata"]["name"]
    assert f"head={own}-0.{service['metadata']['name']}:6379" in script
    assert pod["subdomain"] == service["metadata"]["name"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= {each["name"] for each in container["env"]}
    if "backend=verl" in script:
        return
    config = _config_of(script)
    assert config.learner.ranks + config.sampler.replicas == count * container["resources"]["limits"]["nvidia.com/gpu"]


def _config_of(text: str) -> Config:
    """The config of the command that starts a run over a Ray cluster, which must be free of keys without effect."""
    found = re.findall(r"\b((?:cluster|learner|sampler)\.\w+)=([\w.]+|\"\$\w+:\$\w+\")", text)
    return Config.load(None, [f"{key}={value.strip(chr(34))}" for key, value in dict(found).items()])
