"""Metrics reach every tracker, and no tracker takes the run down with it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly import Task, plugins, tool
from agentfly.errors import ConfigError, MissingExtra, UnknownName
from agentfly.watch import Trackers, open_trackers
from agentfly.watch.samples import sample_rows, wants_samples
from agentfly.watch.trackers.jsonl_tracker import JsonlTracker
from tests.tiny import ROWS, save_tiny_model, tiny_agent

PACKAGED = [name for name in plugins.BUILTIN["trackers"] if name in plugins.EXTRAS]
"""The trackers of optional packages, each of which has the name of its package."""


class Cave:
    """An environment of the training whose metrics the trackers receive."""

    def reset(self, task: Task) -> None: ...

    def close(self) -> None: ...


@tool(name="look", register=False)
async def look(cave: Cave) -> str:
    """Look around."""
    return "dark"


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_json_lines_are_written_as_they_come_whether_named_or_not(tmp_path: Path) -> None:
    trackers = open_trackers([], tmp_path, {}, "run")
    trackers.log({"reward/mean": 0.5, "train/kl": math.nan}, 3)
    (line,) = lines(tmp_path)
    assert {name: line[name] for name in ("step", "reward/mean", "train/kl")} == {
        "step": 3,
        "reward/mean": 0.5,
        "train/kl": None,
    }
    trackers.close()
    again = open_trackers(["jsonl", "jsonl"], tmp_path, {}, "run")
    again.log({"reward/mean": 1.0}, 4)
    again.close()
    assert [line["step"] for line in lines(tmp_path)] == [3, 4]


def test_a_line_cut_by_a_kill_is_mended(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    tracker = JsonlTracker(tmp_path)
    tracker.log({"a": 1.0}, 2)
    tracker.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_resuming_forgets_the_lines_after_the_checkpoint(tmp_path: Path) -> None:
    trackers = open_trackers([], tmp_path, {}, "run")
    for step in (1, 2, 3):
        trackers.log({"a": step}, step)
    trackers.truncate_after(2)
    trackers.log({"a": 30}, 3)
    trackers.close()
    assert [line["a"] for line in lines(tmp_path)] == [1, 2, 30]


class Fragile:
    def __init__(self, directory: Path, config: Mapping[str, Any], name: str) -> None:
        if config.get("broken"):
            raise OSError("no server")
        self.calls = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls += 1
        raise ConnectionError("gone")

    def close(self) -> None:
        self.calls += 1


def test_a_tracker_that_fails_is_dropped_with_one_warning_and_the_rest_go_on(tmp_path: Path) -> None:
    plugins.register("trackers", "fragile", Fragile)
    said: list[str] = []
    trackers = Trackers.open(["fragile"], tmp_path, {}, "run", warn=said.append)
    for step in range(3):
        trackers.log({"a": 1.0}, step)
    trackers.close()
    assert said == ["the tracker 'fragile' failed in log and is dropped: ConnectionError: gone"]
    assert len(lines(tmp_path)) == 3


def test_without_a_handler_python_prints_the_warning_itself(tmp_path: Path) -> None:
    plugins.register("trackers", "fragile", Fragile)
    trackers = open_trackers(["fragile"], tmp_path, {}, "run")
    with pytest.warns(RuntimeWarning, match="is dropped"):
        trackers.log({"a": 1.0}, 1)
    trackers.close()


def test_a_tracker_that_cannot_be_opened_stops_before_the_run(tmp_path: Path) -> None:
    plugins.register("trackers", "fragile", Fragile)
    with pytest.raises(ConfigError, match="'fragile' could not be opened: OSError: no server"):
        open_trackers(["fragile"], tmp_path, {"broken": True}, "run")
    with pytest.raises(UnknownName, match="did you mean 'tensorboard'"):
        open_trackers(["tensorbord"], tmp_path, {}, "run")


@pytest.mark.parametrize("name", PACKAGED)
def test_a_missing_package_names_its_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == name or m == f"agentfly.watch.trackers.{name}_tracker"]:
        monkeypatch.delitem(sys.modules, module)

    class Absent:
        def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
            if fullname.partition(".")[0] == name:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(MissingExtra, match=rf"pip install 'agentfly\[{name}\]'"):
        open_trackers([name], tmp_path, {}, "run")


TENSORBOARD = """
import sys
from agentfly.watch import open_trackers
trackers = open_trackers(["tensorboard"], sys.argv[1], {"lr": 1e-5}, "run")
for step in range(3):
    trackers.log({"reward/mean": step / 2}, step)
trackers.close()
assert "torch" not in sys.modules and "tensorflow" not in sys.modules
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1] + "/tensorboard")
events.Reload()
assert events.Tags()["scalars"] == ["reward/mean"] and not events.Tags()["tensors"]
print([(event.step, event.value) for event in events.Scalars("reward/mean")])
"""


def test_tensorboard_reads_scalars_and_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install 'agentfly[tensorboard]'")
    done = subprocess.run([sys.executable, "-c", TENSORBOARD, str(tmp_path)], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[(0, 0.0), (1, 0.5), (2, 1.0)]"
    assert json.loads((tmp_path / "tensorboard" / "config.json").read_text()) == {"name": "run", "lr": 1e-5}


CHAINS = """
from agentfly.types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn
def chains():
    reply = Completion(text="Answer", token_ids=[1, 2], logprobs=[-1.0, -1.0], versions=[0, 0])
    calls, results = (ToolCall("add"),), (ToolResult(observation="3"),)
    turn = Turn([0], True, reply, calls, results, sampled_s=0.5, tools_s=0.25, began_s=0.125)
    said = [Message("user", "1 + 2?"), Message("assistant", "Answer")]
    found = []
    for n in range(20):
        outcome, reward = (Outcome.FINISHED, n / 20) if n else (Outcome.WORLD_FAILURE, None)
        found.append(Trajectory(f"t1-{n}", Task("7", ()), n, said, [turn], outcome, reward=reward, started=1e9, seconds=1.0))
    return found
"""
WANDB = (
    CHAINS
    + """
import sys
from agentfly.watch import open_trackers
for first in (0, 2):
    said = []
    trackers = open_trackers(["wandb"], sys.argv[1], {"lr": 1e-5}, "run", warn=said.append)
    (notice,) = said
    assert "is offline (there is no API key" in notice, notice
    folder = notice.split("wandb sync ")[1]
    assert list(__import__("pathlib").Path(folder).glob("run-*.wandb")), folder
    for step in range(first, first + 2):
        trackers.log_chains(chains(), "train", step)
        trackers.log({"reward/mean": step / 2}, step)
    trackers.log_chains(chains(), "validation", first + 1)
    assert trackers.names == ["jsonl", "wandb"]
    trackers.close()
"""
)


@pytest.mark.slow
def test_wandb_writes_offline_without_a_key_or_a_question_and_resumes_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'agentfly[wandb]'")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment = {**kept, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    done = subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)],
        capture_output=True, text=True, timeout=800, stdin=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run_id = (tmp_path / "wandb-id.txt").read_text()
    written = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert written
    assert {path.name for path in written} == {f"run-{run_id}.wandb"}
    assert all(path.stat().st_size > 0 for path in written)
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/chains/*.table.json"))
    assert [path.name.partition("_")[0] for path in tables] == ["train", "train", "validation", "validation"]
    table = json.loads(tables[0].read_text())
    assert table["columns"][:5] == ["step", "id", "task", "outcome", "reward"] and len(table["data"]) == 8
    assert table["data"][0][4] == 0.95 and table["data"][-1][3] == "world_failure"  # the best and the worst


MLFLOW = (
    CHAINS
    + """
import sys, time
from pathlib import Path
from agentfly.watch import open_trackers
for first in (1, 3):
    trackers = open_trackers(["mlflow"], sys.argv[1], {"train": {"lr": 1e-5}}, "run", warn=print)
    for step in range(first, first + 2):
        trackers.log_chains(chains(), "train", step)
        trackers.log({"reward/mean": step / 4, "train/kl": float("nan"), "rollout/tool_calls/a@b": 1.0}, step)
    assert trackers.names == ["jsonl", "mlflow"]
    trackers.close()
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=(Path(sys.argv[1]) / "mlflow").absolute().as_uri())
(run,) = client.search_runs([client.get_experiment_by_name("agentfly").experiment_id])
history = client.get_metric_history(run.info.run_id, "reward/mean")
assert [(each.step, each.value) for each in history] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)], history
assert run.data.params == {"train.lr": "1e-05"}
assert set(run.data.metrics) == {"reward/mean", "rollout/tool_calls.a_b"}
assert run.info.status == "FINISHED" and run.info.run_name == "run"
assert [each.path for each in client.list_artifacts(run.info.run_id, "chains")] == ["chains/train-000001.json"]
said = []
trackers = open_trackers(["mlflow"], sys.argv[1], {}, "run", warn=said.append)
trackers._open["mlflow"]._client = MlflowClient(tracking_uri="http://127.0.0.1:9")  # its server dies
began = time.monotonic()
for step in range(3):
    trackers.log({"a": 1.0}, step)
assert time.monotonic() - began < 100 and trackers.names == ["jsonl"]
assert len(said) == 2 and said[1].startswith("the tracker 'mlflow' failed in log and is dropped:"), said
print("all read")
"""
)


def run_script(script: str, folder: Path, *arguments: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "TRACKIO", "OTEL", "WANDB"))}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), *arguments],
        capture_output=True, text=True, timeout=800, stdin=subprocess.DEVNULL, env={**kept, "HOME": str(folder), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_no_name_in_mlflow_is_the_folder_of_another() -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'agentfly[mlflow]'")
    from mlflow.utils.validation import _validate_metric_name

    from agentfly.watch.trackers.mlflow_tracker import metric_name

    given = ["a", "a/b", "a/b/c", "a/b/c/d", "a//b", "a/b/", "/a", "a/..", "../a", "..", "a/.", "", "a/", "a@b/c", "a/é" * 200]
    names = [metric_name(name) for name in given]
    for name in names:
        _validate_metric_name(name)
        assert name.count("/") == 1
    assert metric_name("rollout/tool_calls/add") == "rollout/tool_calls.add"
    assert len(set(names)) >= len(names) - 2


@pytest.fixture(scope="module")
def real_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metrics of a training with a tool, an environment and a validation, as `metrics.jsonl`."""
    folder = tmp_path_factory.mktemp("steps")
    agent = tiny_agent(save_tiny_model(folder / "model"), tools=[look])
    settings = {"train": {"steps": 2}, "num_tasks": 2, "num_chains": 2, "threads": 1, "validation_count": 2}
    agentfly.train(agent, ROWS, run={"dir": str(folder), "name": "run"}, **settings)
    return folder / "run" / "metrics.jsonl"


REAL = (
    CHAINS
    + """
import json, os, sys
os.environ["WANDB_MODE"] = "offline"
from pathlib import Path
from agentfly.watch import open_trackers
kind = sys.argv[2]
said = []
steps = [json.loads(line) for line in open(sys.argv[3])]
trackers = open_trackers([kind], sys.argv[1], {"train": {"lr": 1e-5}}, "run", warn=said.append)
for step in steps:
    metrics = {name: float("nan") if value is None else value for name, value in step.items() if name != "step"}
    trackers.log_chains(chains(), "train", step["step"])
    trackers.log(metrics, step["step"])
assert trackers.names == ["jsonl", kind], said
if kind == "mlflow":
    stored = trackers._open[kind]._client.get_run(trackers._open[kind]._id).data.metrics
    given = {name for step in steps for name, value in step.items() if value is not None and name != "step"}
    assert len(stored) == len(given), (sorted(given), sorted(stored))
trackers.close()
assert not any("dropped" in line for line in said), said
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name in plugins.BUILTIN["trackers"] if name != "jsonl"])
def test_every_tracker_takes_the_metrics_of_a_real_step(kind: str, real_steps: Path, tmp_path: Path) -> None:
    if kind in PACKAGED:
        needed = {"opentelemetry": "opentelemetry.sdk"}.get(kind, kind)
        pytest.importorskip(needed, reason=f"{kind} is not installed: pip install 'agentfly[{kind}]'")
    lines = [json.loads(line) for line in real_steps.read_text().splitlines()]
    assert any("rollout/tool_calls" in line and "rollout/tool_calls/look" in line for line in lines)
    assert any("validation/success" in line for line in lines)
    run_script(REAL, tmp_path, kind, str(real_steps), TRACKIO_DIR=str(tmp_path / "trackio"))


@pytest.mark.slow
def test_mlflow_holds_the_metrics_under_their_names_and_a_dead_server_costs_one_warning(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'agentfly[mlflow]'")
    said = run_script(MLFLOW, tmp_path)
    assert f"mlflow ui --backend-store-uri {tmp_path}/mlflow" in said
    assert said.rstrip().endswith("all read")


TRACKIO = (
    CHAINS
    + """
import sys
from agentfly.watch import open_trackers
for first in (1, 3):
    trackers = open_trackers(["trackio"], sys.argv[1], {"lr": 1e-5}, "run", warn=print)
    for step in range(first, first + 2):
        trackers.log_chains(chains(), "train", step)
        trackers.log({"reward/mean": step / 4}, step)
    assert trackers.names == ["jsonl", "trackio"]
    trackers.close()
import trackio
run = trackio.Api().runs("agentfly")
assert [each.name for each in run] == ["run"], run
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("agentfly", "run")
print([(row["step"], row["reward/mean"]) for row in logs if "reward/mean" in row])
assert any("chains/train" in row for row in logs)
"""
)


@pytest.mark.slow
def test_trackio_holds_the_metrics_under_their_names_and_a_resumed_run_is_one_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="Trackio is not installed: pip install 'agentfly[trackio]'")
    said = run_script(TRACKIO, tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert "trackio show --project agentfly" in said
    assert "[(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]" in said


OPENTELEMETRY = (
    CHAINS
    + """
import sys
from agentfly.watch import open_trackers
trackers = open_trackers(["opentelemetry"], sys.argv[1], {}, "run", warn=print)
trackers.log_chains(chains(), "validation", 0)
trackers.log_chains(chains() * 10, "train", 1)
trackers.log({"reward/mean": 0.5, "train/kl": float("nan"), "time/step_s": 2.0}, 1)
assert trackers.names == ["jsonl", "opentelemetry"]
trackers.close()
"""
)


def test_opentelemetry_has_a_trace_per_step_with_chains_replies_and_tools(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed: pip install 'agentfly[opentelemetry]'")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in run_script(OPENTELEMETRY, tmp_path)
    spans = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    by_id = {span["context"]["span_id"]: span for span in spans}
    (step,) = [span for span in spans if span["name"] == "step 1"]
    assert step["parent_id"] is None
    assert (step["attributes"]["reward/mean"], step["attributes"]["rl.step"]) == (0.5, 1)
    assert "train/kl" not in step["attributes"]
    same = [span for span in spans if span["context"]["trace_id"] == step["context"]["trace_id"]]
    chains = [span for span in same if span["name"].startswith("chain ")]
    assert len(chains) == 64  # of 200
    assert all(by_id[span["parent_id"]] is step for span in chains)
    failed = next(span for span in chains if span["attributes"]["rl.outcome"] == "world_failure")
    assert "rl.reward" not in failed["attributes"]
    reply = next(span for span in same if span["name"] == "chat")
    assert reply["attributes"]["gen_ai.usage.output_tokens"] == 2
    assert (reply["start_time"][-9:], reply["end_time"][-9:]) == ("0.125000Z"[-9:], "0.625000Z"[-9:])
    call = next(span for span in same if span["name"] == "execute_tool add")
    assert by_id[call["parent_id"]] in chains
    assert "1 + 2?" not in (tmp_path / "spans.jsonl").read_text()  # no text of messages


class Sampler(Fragile):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls += 1

    def log_chains(self, chains: Any, split: str, step: int) -> None:
        raise SystemExit(1)


def test_a_tracker_that_ends_the_program_is_dropped_too(tmp_path: Path) -> None:
    plugins.register("trackers", "sampler", Sampler)
    said: list[str] = []
    trackers = Trackers.open(["sampler"], tmp_path, {}, "run", warn=said.append)
    for step in range(3):
        trackers.log_chains([], "train", step)
        trackers.log({"a": 1.0}, step)
    trackers.close()
    assert said == ["the tracker 'sampler' failed in log_chains and is dropped: SystemExit: 1"]
    assert len(lines(tmp_path)) == 3


def test_samples_are_the_best_the_worst_and_some_between() -> None:
    found: dict[str, Any] = {}
    exec(CHAINS, found)
    rows = sample_rows(found["chains"](), 4)
    assert len(rows) == 8
    assert (rows[0]["reward"], rows[-1]["outcome"]) == (0.95, "world_failure")
    assert "[user] 1 + 2?\n[assistant] Answer" in rows[0]["conversation"]
    assert sample_rows([], 1) == []
    assert len(sample_rows(found["chains"]()[:1], 1)) == 1
    assert [wants_samples("train", step) for step in (1, 2, 10, 11)] == [True, False, True, False]
    assert wants_samples("validation", 3)


def test_wandb_is_online_only_where_it_need_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'agentfly[wandb]'")
    from agentfly.watch.trackers.wandb_tracker import choose_mode, has_key

    assert [choose_mode(None, False), choose_mode(None, True)] == ["offline", "online"]
    assert [choose_mode("offline", True), choose_mode("disabled", True), choose_mode("bogus", False)] == [
        "offline",
        "disabled",
        "offline",
    ]
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    assert not has_key()
    netrc.write_text("machine example.org login user password none\n")
    assert not has_key()
    netrc.write_text("machine api.wandb.ai login user password none\n")
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://example.org")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "none")
    assert has_key()


class Talkative(Fragile):
    notice = "written to a drawer"


def test_a_notice_of_a_tracker_reaches_the_user(tmp_path: Path) -> None:
    plugins.register("trackers", "talkative", Talkative)
    said: list[str] = []
    Trackers.open(["talkative"], tmp_path, {}, "run", warn=said.append).close()
    assert said == ["written to a drawer"]


def test_wandb_says_in_which_mode_it_is(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'agentfly[wandb]'")
    from agentfly.watch.trackers.wandb_tracker import explain_mode

    assert explain_mode("online", True, tmp_path) is None
    assert "WANDB_MODE=offline" in str(explain_mode("offline", True, tmp_path))
    assert f"wandb sync {tmp_path}" in str(explain_mode("offline", False, tmp_path))
    assert "records nothing" in str(explain_mode("disabled", True, tmp_path))
