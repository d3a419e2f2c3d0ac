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

from agentfly import plugins
from agentfly.errors import ConfigError, MissingExtra, UnknownName
from agentfly.watch import Trackers, open_trackers
from agentfly.watch.jsonl import JsonlTracker


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


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_names_its_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == name or m == f"agentfly.ext.{name}_tracker"]:
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
from tensorboard.util import tensor_util
events = EventAccumulator(sys.argv[1] + "/tensorboard")
events.Reload()
print([(event.step, float(tensor_util.make_ndarray(event.tensor_proto))) for event in events.Tensors("reward/mean")])
"""


def test_tensorboard_reads_what_was_written_and_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    done = subprocess.run([sys.executable, "-c", TENSORBOARD, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[(0, 0.0), (1, 0.5), (2, 1.0)]"
    assert json.loads((tmp_path / "tensorboard" / "config.json").read_text()) == {"name": "run", "lr": 1e-5}


WANDB = """
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
        trackers.log({"reward/mean": step / 2}, step)
    assert trackers.names == ["jsonl", "wandb"]
    trackers.close()
"""


@pytest.mark.slow
def test_wandb_writes_offline_without_a_key_or_a_question_and_resumes_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment = {**kept, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    done = subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)],
        capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run_id = (tmp_path / "wandb-id.txt").read_text()
    written = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert written
    assert {path.name for path in written} == {f"run-{run_id}.wandb"}
    assert all(path.stat().st_size > 0 for path in written)


def test_wandb_is_online_only_where_it_need_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from agentfly.ext.wandb_tracker import choose_mode, has_key

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
    Trackers.open(["talkative"], tmp_path, {}, "run", warn=said.append)
    assert said == ["written to a drawer"]


def test_wandb_says_in_which_mode_it_is(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from agentfly.ext.wandb_tracker import explain_mode

    assert explain_mode("online", True, tmp_path) is None
    assert "WANDB_MODE=offline" in str(explain_mode("offline", True, tmp_path))
    assert f"wandb sync {tmp_path}" in str(explain_mode("offline", False, tmp_path))
    assert "records nothing" in str(explain_mode("disabled", True, tmp_path))
