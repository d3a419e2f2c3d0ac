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
    (replicas,) = re.findall(r"^ +replicas: (\d+)", text, re.MULTILINE)
    assert int(nodes) == int(replicas) + 1  # the head has GPUs, too
    config = Config.load(None, ["backend=verl", f"verl.nodes={nodes}", 'verl.overrides=["+ray_kwargs.ray_init.address=auto"]'])
    assert config.verl.nodes == 8
