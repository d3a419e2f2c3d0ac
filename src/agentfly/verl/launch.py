"""Writes a run for verl and starts verl's trainer.

    runs/<name>/
        config.toml              the recipe; verl's workers read it
        metrics.jsonl            verl's metrics (run.trackers = ["jsonl"])
        checkpoints/             verl's: global_step_N/actor/huggingface is a model folder
        verl/train.parquet, verl/validation.parquet
        verl/loop.yaml           names the agent loop; verl/loop.json holds its settings
        verl/overrides.txt       what verl was started with
        verl/rollouts/           prompts and replies of each step, as verl writes them
        verl/stopped.txt         why the agent loop stopped the run

verl turns an error of a session into a failed group and goes on. The agent loop therefore writes stopped.txt for an error that
must stop the run, and the launcher ends verl then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..build import build_agent, open_directory, trainable_engine
from ..codec import NotEncodable, encode
from ..config import Config
from ..data import row_of
from ..engines import engine_options
from ..errors import ConfigError, DataError, InvariantError, StorageError
from ..fleet.ray_cluster import Cluster
from ..plugins import missing_extra
from ..runs import RunDirectory
from ..training.stopping import StopSignals
from ..training.supervised import warm_start
from ..types import Message, Task
from ..watch.progress import Progress
from ..watch.results import TrainResult
from .table import STORAGE_UNITS, TABLE
from .translate import RENDERING, Override, Prepared, make_job, open_copy, translate
from .verl_chains import SPLIT, TASK
from .worker import STOPPED, write_settings

VERSIONS = ("0.9.",)
"""The releases of verl whose keys and agent loops are known here."""
TRL_NAME = "AutoModelForCausalLMWithValueHead"
CPUS_PER_GPU = 3
"""CPUs that verl reserves with each GPU."""
END_S = 60.0
"""Seconds that verl gets to end after a signal, before it is killed."""
LOOP_YAML = """\
- name: agentfly
  _target_: agentfly.verl.verl_loop.AgentFlyLoop
  folder: {folder}
  build: agentfly.verl.worker:open_session_runner
"""


def show_verl(config: Config) -> str:
    """Returns what `backend = "verl"` would run, as text. Reads data and tokenizer; writes nothing and needs no verl."""
    folder = Path(config.run.dir) / (config.run.name or "RUN")
    prepared = make_job(config, folder)
    overrides = translate(prepared.job)
    width = max(len(str(each)) for each in overrides if len(str(each)) < 90)
    lines = [
        f"# {len(prepared.train)} training and {len(prepared.validation)} validation rows; a chain has at most "
        f"{prepared.job.max_context} tokens",
        "python -m verl.trainer.main_ppo",
        *(f"{each!s:<{width}}  # {each.source}" for each in overrides),
    ]
    for kind, text in (("loop", "read by the agent loop in verl's workers"), ("before", "used before verl starts")):
        names = [key for key in prepared.job.flat if TABLE[key].kind == kind]
        lines.append(f"# {text}: {', '.join(names)}")
    if reason := prepared.loop.one_row:
        lines.append(f"# a chain whose template rewrites history stops the run: {reason}")
    return "\n".join(lines) + "\n"


def train_verl(config: Config, resume: str | Path | None = None, progress: Progress | None = None) -> TrainResult:
    """Write the run's folder and train with verl. Returns when verl has ended.

    Raises MissingExtra without verl, ConfigError for a recipe that verl cannot run, and InvariantError if verl fails.
    """
    check_verl(config)
    progress = progress or Progress(config.train.steps)
    directory = open_directory(config, resume)
    if resume is None and any(directory.checkpoints.glob("global_step_*")):
        raise ConfigError(
            f"{directory.path} is not empty: resume it with --resume {directory.path}, or choose another run.name"
        )
    with directory.lock():
        progress.opened(directory.path)
        overrides = write_run(config, directory, progress, resumes=resume is not None)
        with StopSignals(lambda: _kept(directory)) as signals:
            run_verl([str(each) for each in overrides], directory.path, signals)
    history = read_metrics(directory.path / "metrics.jsonl")
    return TrainResult(directory.path, config.train.steps, history=history, checkpoint=_newest(directory))


def check_verl(config: Config) -> None:
    """Raises MissingExtra if verl is not installed, ConfigError for another release or too few GPUs."""
    if importlib.util.find_spec("verl") is None:
        raise missing_extra('backend = "verl"', "verl")
    version = importlib.metadata.version("verl")
    if not version.startswith(VERSIONS):
        raise ConfigError(f'backend = "verl" knows verl {VERSIONS[0]}*, and {version} is installed: pip install "verl==0.9.1"')
    _check_trl()
    _check_devices(config)


def _check_trl() -> None:
    """Raises ConfigError for a release of TRL that verl's learner does not survive: it imports a name that is gone."""
    spec = importlib.util.find_spec("trl")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        places = (Path(folder) / "__init__.py", Path(folder) / "experimental" / "ppo" / "__init__.py")
        if not any(TRL_NAME in path.read_text(encoding="utf-8") for path in places if path.is_file()):
            raise ConfigError(f"verl imports trl if it is installed, and this release has no {TRL_NAME}: pip uninstall trl")


def _check_devices(config: Config) -> None:
    """Raises ConfigError if there are too few GPUs: verl would wait for ever for a placement group that never fits."""
    nodes = int(_overridden(config, "trainer.nnodes") or config.verl.nodes)
    per_node = int(
        _overridden(config, "trainer.n_gpus_per_node") or config.verl.gpus_per_node or max(1, config.learner.ranks // nodes)
    )
    asked = f"verl needs {_gpus(nodes * per_node)} (trainer.n_gpus_per_node = {per_node} x trainer.nnodes = {nodes})"
    address = ray_address(config) or ("auto" if nodes > 1 else None)
    if address is None or address == "local":
        from ..engines.local.load import count_gpus  # late: torch

        if nodes * per_node > (num_gpus := count_gpus()):
            raise ConfigError(
                f"{asked}, and PyTorch sees {num_gpus} on this machine: lower verl.gpus_per_node, or set cluster.address"
            )
        _check_cpus(config, nodes, per_node)
        return
    if "://" in address:  # Ray's client, which needs another connection than a node has: verl's own error must do
        return
    with Cluster.connect(address) as cluster:
        alive = [node for node in cluster.nodes() if node.alive]
    total = int(sum(node.gpus for node in alive))
    if nodes * per_node > total:
        raise ConfigError(f"{asked}, and the cluster at {address} has {total}: add nodes, or lower verl.gpus_per_node")
    if (fit := int(sum(node.gpus // per_node for node in alive))) < nodes:
        raise ConfigError(
            f"{asked}, {per_node} of them on one node each time, and the nodes of the cluster at {address} have room for {fit} "
            f"of {nodes}: lower verl.gpus_per_node"
        )


def _check_cpus(config: Config, nodes: int, per_node: int) -> None:
    """Raises ConfigError if a Ray of this machine alone has too few CPUs for what verl reserves: it would wait for ever."""
    # Two more: TransferQueue's controller, and an actor at its start.
    needed = CPUS_PER_GPU * nodes * per_node + STORAGE_UNITS * nodes + 2
    given = _overridden(config, "ray_kwargs.ray_init.num_cpus")
    num_cpus = int(given) if given and given.isdigit() else os.cpu_count() or 1
    if needed > num_cpus:
        raise ConfigError(
            f"verl reserves {needed} CPUs in Ray, and this machine has {num_cpus}: use a larger machine or a cluster "
            f'(cluster.address), or tell Ray that it has more: verl.overrides = ["ray_kwargs.ray_init.num_cpus={needed}"]'
        )


def ray_address(config: Config) -> str | None:
    """The address of the Ray cluster that verl joins; None if it starts Ray on this machine."""
    given = _overridden(config, "ray_kwargs.ray_init.address")
    return given or config.cluster.address or os.environ.get("RAY_ADDRESS") or None


def _overridden(config: Config, name: str) -> str | None:
    """The value that the last of verl.overrides gives to a key of verl."""
    words = [word.lstrip("+").partition("=") for word in config.verl.overrides]
    return next((value.strip("'\"") for key, _, value in reversed(words) if key == name), None)


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def write_run(config: Config, directory: RunDirectory, progress: Progress, *, resumes: bool) -> list[Override]:
    """Write everything that verl reads. Returns verl's overrides."""
    folder = directory.path.absolute() / "verl"
    model = str(folder / "model") if resumes and (folder / "model").is_dir() else None
    prepared = make_job(config, directory.path, model=model, resumes=resumes)
    overrides = translate(prepared.job)
    try:
        folder.mkdir(exist_ok=True)
        (folder / STOPPED).unlink(missing_ok=True)
        if not resumes:
            directory.write_config(config.to_toml())
        if model is None:
            overrides = _write_model(config, prepared, folder, progress) or overrides
        write_parquet(prepared, folder)
        (folder / "loop.yaml").write_text(LOOP_YAML.format(folder=json.dumps(str(directory.path.absolute()))), encoding="utf-8")
        job_model = next(str(each.value) for each in overrides if each.source == "agent.model")
        write_settings(folder, prepared.loop, job_model)
        (folder / "overrides.txt").write_text("".join(f"{each}\n" for each in overrides), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"the run folder {directory.path} cannot be written: {error}") from error
    return overrides


def _write_model(config: Config, prepared: Prepared, folder: Path, progress: Progress) -> list[Override] | None:
    """Save the model that verl loads if it is not a model folder or has a warm start. Returns the overrides with its path."""
    target = folder / "model"
    if config.warm_start.demos is not None:
        from ..engines.local.load import free_gpu, save_model

        agent = build_agent(_learns_here(config))
        warm_start(config, agent, progress)
        engine = trainable_engine(agent)
        save_model(engine.model, engine.tokenizer, target)
        del agent, engine
        free_gpu()
        return translate(make_job(config, folder.parent, model=str(target)).job)
    if prepared.job.model == str(target):
        open_copy(config).save(target)
    return None


def _learns_here(config: Config) -> Config:
    """The config with the local engine: the other options of agent.engine are those of verl's servers."""
    options = {name: value for name, value in engine_options(config.agent.engine).items() if name in RENDERING}
    return dataclasses.replace(config, agent=dataclasses.replace(config.agent, engine={"kind": "local", **options}))


def write_parquet(prepared: Prepared, folder: Path) -> None:
    """Write the rows in verl's form, with the encoded task in a separate column. Raises DataError."""
    if importlib.util.find_spec("pyarrow") is None:
        raise missing_extra('backend = "verl"', "pyarrow")
    import pyarrow
    import pyarrow.parquet

    for split, rows in (("train", prepared.train), ("validation", prepared.validation)):
        table = pyarrow.Table.from_pylist([_row(split, index, *row) for index, row in enumerate(rows)])
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")


def _row(split: str, index: int, task: Task, messages: Sequence[Message]) -> dict[str, Any]:
    try:
        encoded = encode(task)
    except NotEncodable as error:
        raise DataError(f"{row_of(task, index)} cannot be handed to verl: {error}") from error
    return {
        "prompt": [{"role": message.role, "content": message.content} for message in messages],
        "data_source": "agentfly",
        "agent_name": "agentfly",
        "reward_model": {"style": "rule", "ground_truth": str(task.fields.get("answer", ""))},
        "extra_info": {"index": index, "id": task.id, "split": split},
        TASK: encoded,
        SPLIT: split,
    }


def environment(folder: Path) -> dict[str, str]:
    """The environment of verl's process: metrics go to the run's folder, files beside the recipe can be imported."""
    paths = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "VERL_FILE_LOGGER_PATH": str(folder.absolute() / "metrics.jsonl"),
        "TENSORBOARD_DIR": str(folder.absolute() / "tensorboard"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return {**os.environ, **own}


def run_verl(
    overrides: Sequence[str], folder: Path, signals: StopSignals, command: Sequence[str] = ("-m", "verl.trainer.main_ppo")
) -> None:
    """Run verl's trainer in a separate process group until it ends. Raises InvariantError if it fails.

    A signal to this process, and stopped.txt, end the group.
    """
    hydra = [f"hydra.run.dir={folder.absolute() / 'verl' / 'hydra'}", "hydra.output_subdir=null"]
    words = [sys.executable, *command, *overrides, *(hydra if command[0] == "-m" else [])]
    process = subprocess.Popen(words, env=environment(folder), start_new_session=True)
    try:
        with signals.calling(lambda: _signal(process, signal.SIGINT)):
            why = _watch(process, folder / "verl" / STOPPED)
    finally:
        _end(process)
    if signals.received is not None:
        raise signals.error()
    if why is not None:
        raise ConfigError(f"the agent loop stopped the run: {why}")
    if process.returncode:
        raise InvariantError(f"verl ended with exit status {process.returncode}; its output says why, {folder} keeps the run")


def _watch(process: subprocess.Popen[bytes], stopped: Path) -> str | None:
    """Wait until the process ends or the file appears. Returns the file's sentence, or None."""
    while process.poll() is None:
        if stopped.is_file():
            return stopped.read_text(encoding="utf-8").strip()
        time.sleep(0.2)
    return stopped.read_text(encoding="utf-8").strip() if stopped.is_file() else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group: ask first, then kill what is left."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    _signal(process, signal.SIGKILL)  # children that verl left behind are in its group
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metrics that verl's file logger wrote, one dict per step."""
    if not path.is_file():
        return []
    by_step: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row: Mapping[str, Any] = json.loads(line)
        numbers = {name: float(value) for name, value in row["data"].items() if isinstance(value, (int, float))}
        by_step.setdefault(int(row["step"]), {}).update(numbers)
    return [by_step[step] for step in sorted(by_step)]


def _newest(directory: RunDirectory) -> Path | None:
    saved = sorted(directory.checkpoints.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return saved[-1] if saved else None


def _kept(directory: RunDirectory) -> str:
    newest = _newest(directory)
    return f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet: the same command starts again"
