"""The MLflow tracker: a run of the experiment `agentfly`, or of the one that MLFLOW_EXPERIMENT_NAME names.

It writes to the server of MLFLOW_TRACKING_URI; without one to `<directory>/mlflow`, and `notice` says how to look at it. A
resumed run keeps its id. Sample chains are artifacts, `chains/<split>-<step>.json`. `metric_name` says how metrics are called.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Before MLflow is imported: it reports its use to its makers, refuses local folders, and waits for minutes for a dead server.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from ...types import Trajectory
from ..samples import sample_rows, wants_samples

BATCH = 500
"""Metrics of one request; MLflow takes at most 1000."""
MAX_NAME = 120
"""Characters of each half of a metric's name; MLflow takes at most 250 in all."""
_BAD = re.compile(r"[^\w\-. :/]")


class MlflowTracker:
    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None, name: str = "") -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        local = (directory / "mlflow").absolute()
        self.notice = None if uri else f"MLflow writes to {local}:\n  mlflow ui --backend-store-uri {local}"
        self._client = MlflowClient(tracking_uri=uri or local.as_uri())
        id_file = directory / "mlflow-id.txt"
        if id_file.exists():
            self._id = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "agentfly")
        existing = self._client.get_experiment_by_name(experiment)
        experiment_id = existing.experiment_id if existing is not None else self._client.create_experiment(experiment)
        self._id = self._client.create_run(experiment_id, run_name=name or None).info.run_id
        id_file.write_text(self._id, encoding="utf-8")
        flat = {_clean(key.replace("/", ".")): str(value)[:500] for key, value in _flat(config or {}).items()}
        params = [Param(key, value) for key, value in flat.items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        rows = [Metric(metric_name(name), float(value), now, step) for name, value in metrics.items() if math.isfinite(value)]
        for start in range(0, len(rows), BATCH):
            self._client.log_batch(self._id, metrics=rows[start : start + BATCH])

    def log_chains(self, chains: Sequence[Trajectory], split: str, step: int) -> None:
        if wants_samples(split, step):
            self._client.log_dict(self._id, {"chains": sample_rows(chains, step)}, f"chains/{split}-{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def metric_name(name: str) -> str:
    """The name in MLflow: `rollout/tool_calls/add` is `rollout/tool_calls.add`.

    MLflow's own folder keeps a metric in a file of its name, so `rollout/tool_calls` would be a file and a folder. With one
    slash in every name no metric is in the folder of another. A name without one gets the section `run`.
    """
    section, slash, rest = name.partition("/")
    return f"{_clean(section)}/{_clean(rest.replace('/', '.'))}" if slash else f"run/{_clean(name)}"


def _clean(name: str) -> str:
    """A part of a name that MLflow accepts: of its characters, not empty, and no `.` or `..`."""
    cleaned = _BAD.sub("_", name)[:MAX_NAME]
    return cleaned if cleaned.strip(".") else "_" * max(1, len(cleaned))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
