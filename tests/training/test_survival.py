"""What a run leaves behind when it is killed, stopped, disturbed or out of disk, and how it goes on."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly.config import TrainSettings
from agentfly.errors import ConfigError, InvariantError, StorageError
from agentfly.learn.model import storage
from agentfly.runs import RunStore, StoreWriter
from agentfly.runs import checkpoints as checkpoints
from agentfly.runs.checkpoints import MANIFEST, broken_files, find_checkpoint, latest_checkpoint, list_checkpoints, sweep
from agentfly.training import saving
from agentfly.training.ledger import Ledger
from tests.tiny import ROWS, save_tiny_model, tiny_agent

SMALL: dict[str, Any] = {
    "num_tasks": 2,
    "num_chains": 2,
    "threads": 1,
    "lr": 1e-2,
    "validation_count": 2,
    "sampling": {"max_tokens": 6},
    "validate_at_start": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with checkpoints of the last two."""
    return Path(train(model, tmp_path_factory.mktemp("runs"), steps=3, save_every=1).directory)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def train(model: Path, folder: Path, name: str = "run", rows: Any = ROWS, **options: Any) -> Any:
    return agentfly.train(tiny_agent(model), rows, run={"dir": str(folder), "name": name}, **(SMALL | options))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def full_disk(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make_checkpoint(folder: Path, step: int, text: str = "state", keep: int = 10) -> Path:
    return checkpoints.write_checkpoint(folder, step, lambda path: (path / "trainer.pt").write_text(text) and None, keep)


# ---- when and what is saved ----------------------------------------------------------------------------------------------


def test_by_default_a_run_saves_every_ten_minutes_and_every_few_steps(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TrainSettings().save_every_s == 600
    assert 0 < TrainSettings().save_every <= 50
    now = [1000.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    local = tiny_agent(model).engine
    saver = saving.Saver(tmp_path, TrainSettings(save_every=4), local.model, local.tokenizer, print, lambda: None)
    assert [step for step in range(1, 9) if saver.due(step)] == [4, 8]
    now[0] += 600.0
    assert saver.due(5)
    assert not saving.Saver(
        tmp_path, TrainSettings(save_every=0, save_every_s=0), local.model, local.tokenizer, print, lambda: None
    ).due(4)


def test_a_checkpoint_holds_the_weights_of_its_step_while_training_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load_file

    local = tiny_agent(model).engine
    weight = local.model.model.embed_tokens.weight
    original = weight.detach().clone()
    saver = saving.Saver(tmp_path, TrainSettings(), local.model, local.tokenizer, print, lambda: None)

    async def save_and_learn() -> None:
        await saver.save(1, {"step": 1, "moment": weight})
        with torch.no_grad():
            weight.add_(1.0)
        await saver.wait()
        saver.close()

    asyncio.run(save_and_learn())
    saved = load_file(tmp_path / "step-000001" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(saved, original)
    assert torch.equal(storage.load_state(tmp_path / "step-000001" / "trainer.pt")["moment"], original)
    # Without memory for a copy, the write is over before training goes on.
    monkeypatch.setattr(saving, "available_memory", lambda: 0)
    saver = saving.Saver(tmp_path, TrainSettings(), local.model, local.tokenizer, print, lambda: None)

    async def save_now() -> bool:
        await saver.save(2, {"step": 2})
        saver.close()
        return (tmp_path / "step-000002").is_dir()

    assert asyncio.run(save_now())


def test_the_state_of_a_sharded_learner_is_that_of_its_step_while_training_goes_on(model: Path, tmp_path: Path) -> None:
    import torch

    local = tiny_agent(model).engine
    adam = {"step": torch.tensor(3.0), "exp_avg": {"shard": "optimizer/0/exp_avg"}}
    entered, go_on = threading.Event(), threading.Event()

    def snapshot(staging: Path) -> Any:
        def write(folder: Path) -> None:
            entered.set()
            assert go_on.wait(60)

        return write

    options = (TrainSettings(), local.model, local.tokenizer, print, lambda: None, snapshot)
    saver = saving.Saver(tmp_path, *options)

    async def save_and_learn() -> None:
        await saver.save(3, {"step": 3, "optimizer": adam})
        assert await asyncio.to_thread(entered.wait, 60)
        adam["step"] += 1  # the next update, while the shards are written
        go_on.set()
        await saver.wait()
        saver.close()

    asyncio.run(save_and_learn())
    assert storage.load_state(tmp_path / "step-000003" / "trainer.pt")["optimizer"]["step"] == 3


def test_a_second_save_waits_for_the_first(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tiny_agent(model).engine
    saver = saving.Saver(tmp_path, TrainSettings(), local.model, local.tokenizer, print, lambda: None)
    running: list[int] = []
    most: list[int] = []
    write = checkpoints.write_checkpoint

    def slowly(folder: Path, step: int, *rest: Any) -> Path:
        running.append(step)
        most.append(len(running))
        time.sleep(0.1)
        running.remove(step)
        return write(folder, step, *rest)

    monkeypatch.setattr(saving, "write_checkpoint", slowly)

    async def three() -> None:
        for step in (1, 2, 3):
            await saver.save(step, {"step": step})
        await saver.save_last(3, {"step": 3})
        saver.close()

    asyncio.run(three())
    assert most == [1, 1, 1]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000002", "step-000003"]


def test_a_step_that_fails_a_check_is_not_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = Ledger.check_published

    def fails_at_two(self: Ledger, engine: Any, learner: Any) -> None:
        checked(self, engine, learner)
        if learner.version == 2:
            raise InvariantError("the weights are bad")

    monkeypatch.setattr(Ledger, "check_published", fails_at_two)
    with pytest.raises(InvariantError, match="the weights are bad"):
        train(model, tmp_path, steps=3, save_every=1)
    assert names(tmp_path / "run") == ["step-000001"]
    assert "step 2 failed after its update had begun, so it is not saved; the newest checkpoint is" in capsys.readouterr().out


# ---- replacing and removing ----------------------------------------------------------------------------------------------


def test_a_stop_while_the_last_checkpoint_is_written_ends_the_run_after_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler's signal at the end of its time must not cost the whole run."""
    write, save_last = saving.write_checkpoint, saving.Saver.save_last
    loops: list[asyncio.AbstractEventLoop] = []

    async def noting_the_loop(self: Any, *args: Any) -> None:
        loops.append(asyncio.get_running_loop())
        await save_last(self, *args)

    def stopped_before_writing(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        cancelled = threading.Event()  # set behind what the signal's handler has put into the loop
        loops[0].call_soon_threadsafe(lambda: loops[0].call_soon(cancelled.set))
        assert cancelled.wait(60)
        return write(*args, **options)

    monkeypatch.setattr(saving.Saver, "save_last", noting_the_loop)
    monkeypatch.setattr(saving, "write_checkpoint", stopped_before_writing)
    with pytest.raises(SystemExit):
        train(model, tmp_path, steps=1, save_every=0)
    assert names(tmp_path / "run") == ["step-000001"]


@pytest.mark.parametrize("moment", ["rename", "replace", "rmtree"])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one(tmp_path: Path, moment: str) -> None:
    make_checkpoint(tmp_path, 2, "old")
    child = os.fork()
    if child == 0:
        owner = shutil if moment == "rmtree" else os
        setattr(owner, moment, lambda *_, **__: os._exit(9))
        try:
            make_checkpoint(tmp_path, 2, "new")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    newest, broken = find_checkpoint(tmp_path)
    assert newest is not None
    assert not broken
    assert (newest / "trainer.pt").read_text() == ("new" if moment == "rmtree" else "old")
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert broken_files(tmp_path / "step-000002") == []


def test_an_error_while_a_checkpoint_is_replaced_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, 2, "old")
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(StorageError, match="step 2 cannot be written"):
        make_checkpoint(tmp_path, 2, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert (tmp_path / "step-000002" / "trainer.pt").read_text() == "old"


def test_rotation_counts_in_steps_and_not_what_comes_later_or_is_no_checkpoint(tmp_path: Path) -> None:
    for step in (5, 999_999, 1_000_000, 1_000_001):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step-000004.broken").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)][-1] == "step-1000001"
    make_checkpoint(tmp_path, 6, keep=1)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-000004.broken", "step-000006", "step-1000000", "step-1000001", "step-999999", "step-notes"]


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half_of_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    child = os.fork()
    if child == 0:
        setattr(shutil, "rmtree", lambda *_, **__: os._exit(9))  # noqa: B010 - mypy
        try:
            make_checkpoint(tmp_path, 2, keep=1)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000002"]
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_checkpoint_may_be_a_link(tmp_path: Path) -> None:
    far = tmp_path / "far"
    far.mkdir()
    (tmp_path / "checkpoints").symlink_to(far)
    folder = tmp_path / "checkpoints"
    make_checkpoint(folder, 1)
    shutil.move(far / "step-000001", tmp_path / "elsewhere")
    (far / "step-000001").symlink_to(tmp_path / "elsewhere")
    make_checkpoint(folder, 2, keep=1)
    assert [path.name for path in far.iterdir()] == ["step-000002"]
    assert (tmp_path / "elsewhere").is_dir()


# ---- broken checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "nonsense",
        "[]",
        "{}",
        "3",
        '{"sha256": []}',
        '{"sha256": {}}',
        '{"sha256": "trainer.pt"}',
        '{"sha256": {"trainer.pt": 3}}',
        '{"sha256": {"trainer.pt": "0"}, "bytes": 3}',
        '{"sha256": {"trainer.pt": "0"}, "bytes": {"trainer.pt": "many"}}',
        '{"step": 3, "files": ["a"]}',
        '{"step": 3, "sha256": {"trainer.pt": "f77f9bb0b9ba8b6fde15e9b6b1b4e4b4"}}',
        "[" * 100_000,
        b"\xff\xfe\x00",
    ],
)
def test_a_foreign_manifest_is_a_broken_checkpoint_and_the_run_goes_on_from_an_older_one(tmp_path: Path, manifest: Any) -> None:
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2):
        make_checkpoint(tmp_path / "checkpoints", step)
    path = tmp_path / "checkpoints" / "step-000002" / MANIFEST
    path.write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    assert broken_files(path.parent) == [MANIFEST]
    assert latest_checkpoint(tmp_path).name == "step-000001"


def test_a_checkpoint_that_was_given_the_name_of_a_later_step_does_not_count(run: Path) -> None:
    (run / "checkpoints" / "step-000002").rename(run / "checkpoints" / "step-000009")
    assert latest_checkpoint(run).name == "step-000003"


def test_a_manifest_of_the_first_version_is_read(run: Path) -> None:
    path = run / "checkpoints" / "step-000003" / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["bytes"]
    path.write_text(json.dumps(manifest))
    assert latest_checkpoint(run).name == "step-000003"


def test_a_fallback_says_which_checkpoint_is_broken_and_why(model: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run / "checkpoints" / "step-000003"
    (newest / "model.safetensors").write_bytes(b"half a file")
    result = train(model, run.parent, steps=4, save_every=1, keep_checkpoints=1, resume=run)
    told = capsys.readouterr().out
    assert "step-000003 is broken (model.safetensors missing or altered)" in told
    assert f"it is now {newest}.broken" in told
    assert "resumed at step 2" in told
    assert result.steps == 4
    assert names(run) == ["step-000003.broken", "step-000004"]
    with RunStore(run / "run.db", readonly=True) as store:
        assert [len(store.rows(step=step, split="train")) for step in range(1, 5)] == [4, 4, 4, 4]


def test_a_run_of_broken_checkpoints_is_neither_resumed_nor_overwritten(model: Path, run: Path) -> None:
    for path in list_checkpoints(run / "checkpoints"):
        (path / "trainer.pt").unlink()
    with pytest.raises(ConfigError, match="step-000003 is broken .trainer.pt missing or altered., step-000002 is broken"):
        train(model, run.parent, steps=4, resume=run)
    with pytest.raises(ConfigError, match="is not empty"):
        train(model, run.parent, steps=4)
    assert names(run) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("change", ["shape", "lora", "algorithm", "state"])
def test_a_checkpoint_of_another_model_or_config_is_refused_in_a_sentence(
    model: Path, run: Path, tmp_path: Path, change: str
) -> None:
    options: dict[str, Any] = {}
    if change == "shape":
        model = save_tiny_model(tmp_path / "other", head_dim=8)
    elif change == "lora":
        options = {"lora": {"rank": 2}}
    elif change == "algorithm":
        options = {"algorithm": "ppo"}
    else:
        newest = run / "checkpoints" / "step-000003"
        storage.save_state(newest / "trainer.pt", {"step": 3})
        shutil.rmtree(run / "checkpoints" / "step-000002")
        checkpoints._seal(newest, 3)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="step-000003|the checkpoint"):
        train(model, tmp_path, steps=4, resume=run, **options)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_goes_on_with_other_rows_and_says_so(model: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(model, run.parent, rows=ROWS[:10], steps=4, resume=run)
    told = capsys.readouterr().out
    assert "the training rows, data.sampler, data.shuffle or the seed are not those of the saved run" in told
    assert "the validation rows are not those of the saved run" in told


def test_a_run_that_goes_on_with_the_same_rows_says_nothing_and_a_finished_one_validates_no_more(
    model: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (run / "metrics.jsonl").read_text()
    result = train(model, run.parent, steps=3, resume=run)
    assert "not those" not in capsys.readouterr().out
    assert result.after["validation/reward"] > 0
    assert result.checkpoint == run / "checkpoints" / "step-000003"
    assert (run / "metrics.jsonl").read_text() == lines


# ---- a run without a checkpoint, and a second trainer ----------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_without_a_checkpoint_starts_again(model: Path, run: Path, resume: bool) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / ".step-000001.writing").mkdir(parents=True)
    (run / "run.lock").write_text('{"pid": 999999999, "host": "gone"}')
    result = train(model, run.parent, steps=1, resume=run if resume else None)
    assert names(run) == ["step-000001"]
    assert result.steps == 1
    with RunStore(run / "run.db", readonly=True) as store:
        assert {row.step for row in store.rows(limit=100)} == {1}
    assert {json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()} == {1}


def test_a_run_that_never_made_a_step_starts_again_with_another_config(model: Path, run: Path) -> None:
    for path in list_checkpoints(run / "checkpoints"):
        shutil.rmtree(path)
    make_checkpoint(run / "checkpoints", 0)
    assert train(model, run.parent, steps=1, lr=1e-3).steps == 1
    assert agentfly.Config.load(run / "config.toml").train.lr == 1e-3
    assert names(run) == ["step-000001"]


def test_a_second_trainer_is_refused_with_the_process_of_the_first(model: Path, run: Path) -> None:
    import socket

    from agentfly.runs import RunDirectory

    link = run.with_name("link")
    link.symlink_to(run)
    with RunDirectory(run).lock():
        for path in (run, link):
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on {socket.gethostname()}"):
                train(model, run.parent, steps=4, resume=path)
        moved = run.rename(run.with_name("moved"))
        with pytest.raises(ConfigError, match="in use by process"):
            train(model, run.parent, steps=4, resume=moved)
    assert train(model, run.parent, steps=4, resume=moved).steps == 4


def test_the_lock_of_a_killed_trainer_is_free_though_a_process_that_it_forked_lives_on(tmp_path: Path) -> None:
    from agentfly.runs import RunDirectory

    reader, writer = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        try:
            with RunDirectory(tmp_path).lock():
                if (grandchild := os.fork()) != 0:
                    os.write(writer, b"%d" % grandchild)
                time.sleep(60)
        finally:
            os._exit(0)
    grandchild = int(os.read(reader, 20))
    try:
        with pytest.raises(ConfigError, match=f"process {trainer} on"), RunDirectory(tmp_path).lock():
            pass
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        with RunDirectory(tmp_path).lock():
            assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(reader)
        os.close(writer)
    assert not (tmp_path / "run.lock").exists()


# ---- disks ----------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_said_while_training_goes_on_and_raised_at_the_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = storage.save_state

    def full_after_one(path: Path, state: dict[str, Any]) -> None:
        if state["step"] > 1:
            full_disk()
        saved(path, state)

    monkeypatch.setattr(storage, "save_state", full_after_one)
    with pytest.raises(StorageError, match=r"step 3 cannot be written .*No space left on device.*newest checkpoint is .*001"):
        train(model, tmp_path, steps=3, save_every=1)
    told = capsys.readouterr().out
    assert "the checkpoint of step 2 cannot be written" in told
    assert "Training goes on" in told
    assert names(tmp_path / "run") == ["step-000001"]
    monkeypatch.undo()
    assert train(model, tmp_path, steps=3, resume=tmp_path / "run").steps == 3


def test_torch_and_safetensors_name_the_disk(tmp_path: Path) -> None:
    import torch

    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / "trainer.pt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        storage.save_state(tmp_path / "trainer.pt", {"x": torch.zeros(100_000)})
    with pytest.raises(OSError, match="No space left"), storage._os_errors():
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_store_that_cannot_be_written_ends_the_run_in_a_sentence_and_the_weights_are_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    add = RunStore.add_metrics

    def full_at_two(self: RunStore, step: int, metrics: Any) -> None:
        with self.transaction():
            if step == 2:
                raise sqlite3.OperationalError("database or disk is full")
        add(self, step, metrics)

    monkeypatch.setattr(RunStore, "add_metrics", full_at_two)
    with pytest.raises(StorageError, match=r"the run store .*run.db cannot be used: database or disk is full"):
        train(model, tmp_path, steps=3)
    assert broken_files(latest_checkpoint(tmp_path / "run")) == []


def test_a_store_that_fails_while_the_learner_updates_costs_no_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = StoreWriter.add_tokens

    def full_at_two(self: StoreWriter, step: int, records: Any) -> None:
        if step == 2:
            raise StorageError("the run store is full")
        add(self, step, records)

    monkeypatch.setattr(StoreWriter, "add_tokens", full_at_two)
    with pytest.raises(StorageError, match="the run store is full"):
        train(model, tmp_path, steps=3)
    assert names(tmp_path / "run") == ["step-000002"]
    assert broken_files(latest_checkpoint(tmp_path / "run")) == []


def test_a_folder_that_was_moved_is_not_made_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Path] = []
    write = saving.write_checkpoint

    def move_first(folder: Path, *rest: Any) -> Path:
        if not moved:
            moved.append((tmp_path / "run").rename(tmp_path / "moved"))
        return write(folder, *rest)

    monkeypatch.setattr(saving, "write_checkpoint", move_first)
    with pytest.raises(StorageError, match="No such file or directory"):
        train(model, tmp_path, steps=2, save_every=1)
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    assert train(model, tmp_path, steps=2, resume=moved[0]).steps == 2


# ---- signals --------------------------------------------------------------------------------------------------------------

SCRIPT = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import agentfly
from agentfly.learn.learner import PolicyLearner
from agentfly.training.stopping import StopSignals
from tests.tiny import ROWS, tiny_agent
update, handle = PolicyLearner.update, StopSignals._handle
def told(self, number, frame):
    handle(self, number, frame)
    print("stopping", flush=True)
StopSignals._handle = told
def slow(self, groups, *rest):
    if self.version == 2:
        while not pathlib.Path(sys.argv[2], "run/checkpoints/step-000002").is_dir():  # it is written beside the next rollout
            time.sleep(0.01)
        print("updating", flush=True)
        time.sleep(300)
    return update(self, groups, *rest)
PolicyLearner.update = slow
agentfly.train(tiny_agent(sys.argv[1]), ROWS, run={"dir": sys.argv[2], "name": "run"}, steps=1000, save_every=1,
    num_tasks=2, num_chains=2, threads=1, validate_at_start=False, validate_every=0, max_tokens=6)
"""


def test_ctrl_c_twice_ends_at_once_and_says_what_is_kept(model: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("updating"):
            break
    process.send_signal(signal.SIGINT)
    while process.stdout.readline() != "stopping\n":  # two signals that are pending at once would be one
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 130, output
    assert f"stopped at once; the newest checkpoint is {tmp_path}/run/checkpoints/step-000002" in output
    assert "Traceback" not in output
    sweep(tmp_path / "run" / "checkpoints")
    assert latest_checkpoint(tmp_path / "run").name == "step-000002"


def test_a_handler_of_the_program_is_kept_and_handlers_are_restored(model: Path, tmp_path: Path) -> None:
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        before = signal.getsignal(signal.SIGINT)
        train(model, tmp_path, steps=1)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGTERM, former)
