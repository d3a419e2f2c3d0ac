"""Ranks: what is refused with a sentence, how rows are divided, and where a rank computes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentfly.cli import main
from agentfly.config import Config
from agentfly.errors import ConfigError
from agentfly.learn.batching import Rows
from agentfly.learn.group import LearnerGroup
from agentfly.learn.model import shard_files
from agentfly.learn.model.shard_files import Shard, ShardFiles, collect_shards, file_name, write_for_rank_0, write_shards
from agentfly.learn.ranks.environment import ThisRank, read_rank
from agentfly.learn.ranks.group import choose_device
from agentfly.learn.update.division import balance, cut, rank_batches, share_rows
from agentfly.runs import checkpoints as checkpoint
from agentfly.training.ranks.roles import find_rank
from agentfly.types import Sample

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_the_number_of_a_rank_is_read_from_the_environment() -> None:
    assert read_rank({}) is None
    assert read_rank({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert read_rank(GOOD) == ThisRank(1, 2, 1, 2, "127.0.0.1:29500")
    both = {**GOOD, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert read_rank(both) == ThisRank(1, 2, 0, 1, "127.0.0.1:29500")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RANK": "2"}, "RANK=2 of WORLD_SIZE=2"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": None}, "RANK is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "99999"}, "no usable MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": None}, "no usable MASTER_ADDR and MASTER_PORT"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK=3 of LOCAL_WORLD_SIZE=2"),
    ],
)
def test_a_bad_environment_is_refused(changed: dict[str, Any], told: str) -> None:
    environ = {name: value for name, value in {**GOOD, **changed}.items() if value is not None}
    with pytest.raises(ConfigError, match=told):
        read_rank(environ)


def test_the_command_refuses_a_bad_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["train", "quickstart"]) == 2
    assert "RANK is not set" in capsys.readouterr().err


def test_a_run_on_several_ranks_is_refused_once() -> None:
    words = ["-m", "agentfly", "train", "quickstart", "learner.ranks=2", "agent.tools=['ad']"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: no tool is called 'ad'; did you mean 'add' or 'read'?"]


def test_settings_that_do_not_fit_the_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    learner = config.learner
    with pytest.raises(ConfigError, match="learner.ranks = 2 needs as many processes"):
        find_rank(replace(config, learner=replace(learner, ranks=2)))
    with pytest.raises(ConfigError, match="learner.reduce has no effect on one rank"):
        find_rank(replace(config, learner=replace(learner, reduce="bfloat16")))
    with pytest.raises(ConfigError, match="fault.restarts has no effect on one rank"):
        find_rank(replace(config, fault=replace(config.fault, restarts=1)))
    with pytest.raises(ConfigError, match="samples with the local engine.*agent.engine.kind = 'vllm'"):
        Config.from_dict({"learner": {"ranks": 2}, "agent": {"engine": "vllm"}})
    with pytest.raises(ConfigError, match="learner.ranks"):
        Config.from_dict({"learner": {"ranks": 0}})
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="learner.ranks = 3, but 2 ranks were started"):
        find_rank(replace(config, learner=replace(learner, ranks=3)))
    with pytest.raises(ConfigError, match="samples with the local engine"):
        find_rank(replace(config, agent=replace(config.agent, engine="vllm")))
    this = find_rank(config)
    assert this is not None
    assert this.rank == 1


def test_each_rank_has_a_gpu_or_all_share_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    this = ThisRank(3, 4, 3, 4, "")
    assert choose_device(this, "cpu") == (torch.device("cpu"), "gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device(this, None) == (torch.device("cuda:3"), "cpu:gloo,cuda:nccl")
    assert choose_device(this, "cuda:0") == (torch.device("cuda:0"), "cpu:gloo,cuda:gloo")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="4 ranks of the learner need as many GPUs, but PyTorch sees 2"):
        choose_device(this, None)
    with pytest.raises(ConfigError, match="'cuda:5', but PyTorch sees 2 GPUs"):
        choose_device(this, "cuda:5")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="PyTorch sees no GPU"):
        choose_device(this, "cuda")


def rows_of(lengths: list[int], prefix: int = 0) -> Rows:
    samples = []
    for number, length in enumerate(lengths):
        ids = np.concatenate([np.arange(prefix), 100 * (number + 1) + np.arange(length)])
        mask = np.arange(len(ids)) >= len(ids) - 1
        nothing = np.zeros(len(ids))
        samples.append(Sample(ids, mask, nothing, nothing, nothing, nothing))
    return Rows(samples)


def test_rows_are_balanced_by_their_cost() -> None:
    costs = [9.0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert [sum(costs[i] for i in part) for part in balance(costs, 2)] == [9.0, 9.0]
    assert [len(part) for part in cut([1.0] * 10, 4)] == [2, 3, 2, 3]
    lengths = [64, 9, 9, 9, 9, 9, 9, 9]
    shares = share_rows(rows_of(lengths), range(8), "packed", 2, width=1)  # attention alone: the long row outweighs the rest
    assert sorted(map(len, shares)) == [1, 7]
    assert sorted(row for share in shares for row in share) == list(range(8))


def test_rows_that_begin_alike_stay_together() -> None:
    table = rows_of([4] * 8, prefix=40)
    shares = share_rows(table, range(8), "shared", 4, width=1000)
    assert sorted(row for share in shares for row in share) == list(range(8))
    order = table.in_order(range(8))[0]
    assert [row for share in shares for row in share] == order


@pytest.mark.parametrize("shape", ["padded", "packed", "shared"])
def test_every_rank_runs_the_same_number_of_micro_batches_and_each_row_once(shape: Any) -> None:
    table = rows_of([40, 3, 3])
    ranks = [
        list(rank_batches(table, range(3), 42, torch.device("cpu"), shape, LearnerGroup(rank, 4), 16)) for rank in range(4)
    ]
    assert len(set(map(len, ranks))) == 1
    assert sorted(row for batches in ranks for batch in batches for row in batch.rows) == [0, 1, 2]
    empty = [batch for batches in ranks for batch in batches if not batch.rows]
    assert empty
    assert all(len(batch.tokens) == len(batch.where) == 0 and batch.input_ids.numel() == 2 for batch in empty)


def test_shards_of_any_number_of_ranks_are_read_by_rows(tmp_path: Any) -> None:
    whole = torch.arange(20.0).reshape(5, 4)
    staging, folder = tmp_path / "staging", tmp_path / "shards"
    folder.mkdir()
    write_shards(folder / file_name(0, 3), {"a/b": Shard(whole[:2], 0, (5, 4))})
    write_for_rank_0(staging, 1, 3, {"a/b": Shard(whole[2:4], 2, (5, 4))})
    write_for_rank_0(staging, 2, 3, {"a/b": Shard(whole[4:], 4, (5, 4))})
    with pytest.raises(ConfigError, match="does not hold one file for each rank"):
        ShardFiles(folder)
    collect_shards(staging, folder, 3, 1.0)
    found = ShardFiles(folder)
    for first in range(6):
        for last in range(first, 6):
            assert torch.equal(found.rows("a/b", first, last), whole[first:last])
    with pytest.raises(ConfigError, match="lacks a/c"):
        found.rows("a/c")
    with pytest.raises(OSError, match="shard of rank 1 did not appear"):
        collect_shards(staging, folder, 2, 0.0)


def test_what_a_killed_save_of_several_ranks_leaves_is_removed(tmp_path: Path) -> None:
    whole = checkpoint.write_checkpoint(tmp_path, 1, lambda folder: (folder / "trainer.pt").touch(), 2)
    staging = checkpoint.staging_folder(tmp_path, 2)
    write_shards(staging / file_name(1, 2), {"a": Shard(torch.zeros(1), 0, (1,))})
    (tmp_path / ".step-000002.writing").mkdir()
    checkpoint.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [whole]
    assert checkpoint.find_checkpoint(tmp_path) == (whole, {})


def test_a_command_that_runs_in_one_process_refuses_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    assert main(["eval", "quickstart"]) == 2
    assert "agentfly eval runs in one process" in capsys.readouterr().err


def test_learner_and_trainer_agree_on_the_names_in_a_checkpoint() -> None:
    assert (shard_files.FOLDER, shard_files.STATE) == (checkpoint.SHARDS, checkpoint.STATE)


def test_a_rank_that_cannot_write_says_why(tmp_path: Any) -> None:
    blocked = tmp_path / "staging"
    blocked.mkdir()
    (blocked / "rank-1-of-2.writing").mkdir()  # in the way of the file
    write_for_rank_0(blocked, 1, 2, {"a": Shard(torch.zeros(1), 0, (1,))})
    with pytest.raises(OSError, match="rank 1"):
        collect_shards(blocked, tmp_path, 2, 5.0)
