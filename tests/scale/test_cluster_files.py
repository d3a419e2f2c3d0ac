"""The files of examples/cluster can be submitted: they parse, and the keys in their commands exist."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.config import Config, keys
from agentfly.verl.table import TABLE

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


SRUN = """#!/bin/bash
# Writes down what it is asked to run. Like Slurm's own, it passes no TERM on: it kills its task.
echo "$SRUN_CPUS_PER_TASK $*" >> "$OUT/srun"
case "$*" in
*hostname*) echo 10.0.0.1 ;;
*"ray start"*) ;;
*)
    while [[ $1 == -* ]]; do [[ $1 == -w ]] && shift; shift; done
    "$@" &
    trap "kill -KILL $!" TERM
    wait $!
    ;;
esac
"""
AGENTFLY = """#!/bin/bash
# Writes down how it is called, and ends at TERM, after it has saved.
echo "agentfly $*" >> "$OUT/runs-asked"
trap 'until [ -e "$OUT/go" ]; do sleep 0.05; done; echo saved > "$OUT/saved"; exit 7' TERM
touch "$OUT/running"
while :; do sleep 0.05; done
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Returns a function that starts a batch script with stand-ins for what Slurm has."""
    (tmp_path / "bin").mkdir()
    programs = {
        "srun": SRUN,
        "agentfly": AGENTFLY,
        "scontrol": "#!/bin/bash\necho a\necho b\n",
        "sleep": '#!/bin/bash\n[ "$1" = 20 ] || /bin/sleep "$1"\n',
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        own = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "OUT": str(tmp_path)}
        job = {"JOB_NAME": "j", "JOB_ID": "1", "JOB_NODELIST": "ab", "NNODES": "2", "CPUS_PER_TASK": "12"}
        environ = {**os.environ, **own, **{f"SLURM_{key}": value for key, value in job.items()}}
        words = ["bash", str(FOLDER / name), "my.toml"]
        started.append(subprocess.Popen(words, cwd=tmp_path, env=environ, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(there: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120
    while not there():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["slurm_one_node.sbatch", "slurm_ray.sbatch"])
def test_a_batch_script_waits_until_its_run_has_saved_and_the_next_job_resumes(name: str, slurm: Any, tmp_path: Path) -> None:
    job = slurm(name)
    until((tmp_path / "running").exists)
    job.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(1.0)
    (tmp_path / "go").touch()
    assert job.wait(120) == 7
    assert (tmp_path / "saved").exists()
    assert "agentfly train my.toml" in (tmp_path / "runs-asked").read_text()
    until(lambda: "ray" not in name or (tmp_path / "srun").read_text().count("ray start") == 2)
    asked = (tmp_path / "srun").read_text().splitlines()
    assert all(line.startswith("12 ") for line in asked), "srun gets the cores of the job"
    (tmp_path / "runs" / "slurm-j" / "checkpoints" / "step-000002").mkdir(parents=True)
    (tmp_path / "running").unlink()
    slurm(name)
    until((tmp_path / "running").exists)
    assert "agentfly train --resume runs/slurm-j" in (tmp_path / "runs-asked").read_text().splitlines()[-1]


def test_a_verl_job_resumes_and_ray_counts_the_cores_and_gpus_of_the_job(slurm: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "slurm-j" / "checkpoints" / "global_step_5").mkdir(parents=True)
    slurm("slurm_verl.sbatch")
    until((tmp_path / "running").exists)
    assert "agentfly train --resume runs/slurm-j cluster.address=10.0.0.1:6379" in (tmp_path / "runs-asked").read_text()
    until(lambda: (tmp_path / "srun").read_text().count("ray start") == 2)
    rays = [line for line in (tmp_path / "srun").read_text().splitlines() if "ray start" in line]
    assert all("--num-cpus=12 --num-gpus=8" in line for line in rays)


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".yaml"], ids=lambda path: path.name)
def test_a_manifest_is_valid_yaml(path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
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
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
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
