"""Training on the chains of a run: the best ones as demonstrations, the best and the worst of a group as pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentfly.agents import ReactAgent
from agentfly.api import train
from agentfly.cli import main
from agentfly.config import Config
from agentfly.errors import ConfigError, DataError
from agentfly.learn.samples import to_samples
from agentfly.runs import RunDirectory, RunReader
from agentfly.training import dpo, sft
from agentfly.training.demonstrations import best_chains, demo_rows, demo_samples, pairs_of

TOOLS = ["add", "subtract", "multiply"]


def config_of(folder: Path, name: str, **tables: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "agent": {"tools": TOOLS, "max_turns": 4}, "data": {"train": "arithmetic", "train_count": 12, "validation_count": 4},
        "sampling": {"max_tokens": 48}, "rollout": {"num_tasks": 12, "num_chains": 6},
        "train": {"steps": 2, "lr": 1e-5, "validate_at_start": False}, "run": {"dir": str(folder), "name": name, "threads": 1},
    }  # fmt: skip
    return Config.from_dict({key: table | tables.get(key, {}) for key, table in tree.items()})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the bundled model on twelve tasks, of which it solves a third."""
    return train(config_of(tmp_path_factory.mktemp("runs"), "sampled")).directory


@pytest.fixture(scope="module")
def agent() -> ReactAgent:
    return ReactAgent("pocket", tools=TOOLS, max_turns=4)


def ids_of(chain: Any) -> tuple[int, ...]:
    return tuple(token for turn in chain.turns for token in turn.completion.token_ids)


def test_the_best_chains_of_a_run_are_those_that_succeed_and_none_is_there_twice(run: Path) -> None:
    every = best_chains(str(run))
    assert {chain.total_reward for chain in every} == {1.0}
    keys = [(chain.task.id, ids_of(chain)) for chain in every]
    assert len(keys) == len(set(keys))
    with RunReader(run) as reader:
        held_out = {row.task_id for row in reader.page(sort="added", limit=1000)[0] if row.split != "train"}
        stored = {row.id: row for row in reader.page(sort="added", limit=1000)[0]}
    assert held_out and all(stored[chain.id].split == "train" for chain in every)
    one = best_chains(str(run), best=1)
    assert len({chain.task.id for chain in one}) == len(one) < len(every)
    for chain in one:
        assert chain.num_sampled == min(other.num_sampled for other in every if other.task.id == chain.task.id)
    assert len(best_chains(str(run), min_reward=0.0)) > len(every)
    with pytest.raises(DataError, match=r"no training chain of .* has a reward of at least 2; .* has 1: set --min-reward"):
        best_chains(str(run), min_reward=2.0)


def test_the_rows_are_the_ids_and_masks_that_were_sampled(run: Path, agent: ReactAgent) -> None:
    chains = demo_rows(str(run), None, 0)
    rows = [row for chain in chains for row in to_samples(chain)]
    for ours, sampled in zip(demo_samples(chains, agent), rows, strict=True):
        assert np.array_equal(ours.token_ids, sampled.token_ids)
        assert np.array_equal(ours.mask, sampled.mask)
    trained = [token for row in rows for token in row.token_ids[row.mask]]
    assert trained == [token for chain in chains for token in ids_of(chain)]


def test_chains_of_another_tokenizer_are_refused_with_the_way_round(run: Path) -> None:
    worlds = ReactAgent("pocket-worlds", tools=TOOLS, max_turns=4)
    with pytest.raises(DataError, match="another tokenizer has sampled them: `agentfly export RUN chains.jsonl --format sft`"):
        demo_samples(best_chains(str(run)), worlds)


def test_sft_of_a_run_learns_from_its_best_chains(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.steps=8", "train.lr=1e-4", "run.name=imitated", "rollout.num_tasks=6", "data.holdout=0.3"]
    assert main(["sft", str(run), "--best", "2", *words]) == 0
    output = capsys.readouterr().out
    before, after = (float(part.split()[0]) for part in output.split("demonstrations:")[1].split(", "))
    assert after < before
    made = RunDirectory.existing(run.parent / "imitated")
    assert Config.load(made.path).data.train == str(run)
    with RunReader(made.path) as reader:
        assert reader.meta()["options"] == {"best": 2, "min_reward": None}
    assert main(["sft", str(run), "data.train=arithmetic", "--best", "2"]) == 2
    assert "--best and --min-reward choose chains of a run, and arithmetic is none" in capsys.readouterr().err


def test_the_pairs_of_a_run_are_of_one_group_and_keep_their_ids(run: Path) -> None:
    pairs = pairs_of(str(run))
    assert pairs
    for chosen, rejected in pairs:
        assert (chosen.task.id, chosen.draw) == (rejected.task.id, rejected.draw)
        assert chosen.total_reward > rejected.total_reward
    assert len({(a.task.id, ids_of(a), ids_of(b)) for a, b in pairs}) == len(pairs)
    with pytest.raises(DataError, match="two chains with different rewards that are at least 3 apart: lower --min-gap"):
        pairs_of(str(run), min_gap=3.0)


def test_dpo_of_a_run_ranks_held_out_pairs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.steps=12", "train.lr=2e-4", "run.name=preferred", "rollout.num_tasks=8", "data.holdout=0.3"]
    assert main(["dpo", str(run), *words, "train.validate_every=4"]) == 0
    output = capsys.readouterr().out
    before, after = (float(part.split()[0]) for part in output.split("held-out pairs: ")[1].split(", "))
    assert before == pytest.approx(0.6931, abs=1e-4), "the reference is the model as it was"
    assert after < before
    with RunReader(run.parent / "preferred") as reader:
        series = reader.series(["train/preference_accuracy", "train/preference_margin", "validation/preference_accuracy"])
    assert series["train/preference_margin"][-1][2] > series["train/preference_margin"][0][2] == pytest.approx(0.0, abs=1e-6)
    assert series["train/preference_accuracy"][-1][2] > 0.6
    assert len(series["validation/preference_accuracy"]) == 3


def test_dpo_with_another_reference_begins_with_its_margins(run: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "data": {"train": str(run), "train_count": None, "validation_count": None},
        "train": {"steps": 1},
    }
    same = dpo(config_of(tmp_path, "same", **options))
    taught = sft(config_of(tmp_path, "taught", data={"train_count": 60}, train={"steps": 3, "lr": 1e-3}))
    tree = config_of(tmp_path, "other", **options).to_dict()
    other = dpo(Config.from_dict({**{key: tree[key] for key in ("agent", "data", "train", "rollout", "run")},
                                  "loss": {"reference": str(taught.directory)}}))  # fmt: skip
    assert same.before == pytest.approx(0.6931, abs=1e-4)
    assert abs(other.before - same.before) > 1e-3
    with pytest.raises(ConfigError, match="pairs come from the folder of a run, and data.train is 'arithmetic'"):
        dpo(config_of(tmp_path, "none"))


def test_an_export_without_a_good_chain_says_so_and_writes_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    assert main(["export", str(run), str(file), "--format", "sft", "--min-reward", "2"]) == 2
    assert "no training chain of" in (said := capsys.readouterr().err) and said.rstrip().endswith("set --min-reward")
    assert main(["export", str(run), str(file), "--format", "sft", "--step", "99"]) == 2
    assert "has no training chain with a reward that the options choose" in capsys.readouterr().err
    assert not file.exists()
    assert main(["export", str(run), str(file), "--format", "sft"]) == 0
    assert {json.loads(line)["reward"] for line in file.read_text().splitlines()} == {1.0}
