"""In verl's worker processes: opens the agent of a run's folder with its environments.

`verl_loop` calls `open_session_runner` once per process. Limits of the host ([resources], rollout.max_concurrency) are
divided by the number of workers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.sections import ResourceSettings
from ..errors import AgentFlyError, ConfigError
from ..rollout import open_environments
from .translate import open_copy, open_plan
from .verl_chains import LoopSettings, SessionRunner

SETTINGS = "loop.json"
STOPPED = "stopped.txt"
"""A worker writes why the run must stop; the launcher watches for the file."""


def write_settings(folder: Path, settings: LoopSettings, model: str) -> None:
    """Write what `open_session_runner` reads. `folder` is the folder `verl` of the run."""
    content = {"model": model, "directory": str(Path.cwd()), "loop": dataclasses.asdict(settings)}
    (folder / SETTINGS).write_text(json.dumps(content, indent=1), encoding="utf-8")


async def open_session_runner(run: str) -> SessionRunner:
    """Open the agent and the environments of a run. Raises ConfigError, also if its folder is not on this machine."""
    folder = Path(run) / "verl"
    try:
        return await _open(Path(run), folder)
    except AgentFlyError as error:
        if folder.is_dir():
            (folder / STOPPED).write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
        raise


async def _open(run: Path, folder: Path) -> SessionRunner:
    content = _read_settings(folder / SETTINGS)
    config = Config.load(run / "config.toml")
    settings = LoopSettings(**content["loop"])
    copy = open_copy(config, content["model"])
    plan = open_plan(share(config), copy, settings)
    stack = AsyncExitStack()
    wanted = config.rollout.max_concurrency or config.rollout.num_tasks * config.rollout.num_chains
    agent: Any = plan.agent
    plan = await stack.enter_async_context(open_environments(agent, plan, math.ceil(wanted / config.verl.workers)))
    return SessionRunner(plan, settings, copy.tokenizer, copy.stop_ids, stop_file=folder / STOPPED, stack=stack)


def _read_settings(path: Path) -> dict[str, Any]:
    """Read the settings and change to the folder in which the run was started: files of a recipe are relative to it."""
    if not path.is_file():
        raise ConfigError(f"{path} is not on {socket.gethostname()}: with several machines, run.dir must be a shared folder")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    directory = Path(content["directory"])
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not on {socket.gethostname()}: start the run in a folder that all machines share")
    os.chdir(directory)
    return content


def share(config: Config) -> Config:
    """Returns the config with one worker's share of the host's limits."""
    workers, resources = config.verl.workers, config.resources
    if workers == 1:
        return config
    pools = {
        name: {**pool, **{key: max(1, pool[key] // workers) for key in ("max", "min_warm") if pool.get(key)}}
        for name, pool in resources.pools.items()
    }
    part = ResourceSettings(
        cpu=None if resources.cpu is None else resources.cpu / workers,
        memory_mb=None if resources.memory_mb is None else resources.memory_mb / workers,
        pools=pools,
    )
    return dataclasses.replace(config, resources=part)
