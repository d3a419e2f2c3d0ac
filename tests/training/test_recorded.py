"""What a training leaves in its store for the views: times, checks, trained tokens, events, its state."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly import reward
from agentfly.errors import InvariantError
from agentfly.health import diagnose
from agentfly.runs import ChainFilter, RunReader, find_runs
from agentfly.runs.trained import training_of
from tests.close import assert_close_to_norm
from tests.tiny import ROWS, save_tiny_model, tiny_agent

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    made = agentfly.train(
        tiny_agent(save_tiny_model(folder / "model")), ROWS, steps=STEPS, num_tasks=2, num_chains=3, threads=1, lr=1e-2,
        validation_count=2, sampling={"max_tokens": 6}, run={"dir": str(folder / "runs"), "name": "run"},
    )  # fmt: skip
    return Path(made.directory)


def test_the_run_says_who_it_is_and_how_it_ended(folder: Path) -> None:
    with RunReader(folder) as reader:
        meta = reader.meta()
        assert (reader.state(), meta["kind"], meta["algorithm"], meta["total_steps"]) == ("finished", "train", "grpo", STEPS)
        assert meta["started"] <= meta["ended"]
        (run,) = find_runs(folder.parent)
        assert (run.name, run.step, run.chains, run.best_validation) == ("run", STEPS, reader.num_chains(), run.last_validation)


def test_steps_have_times_phases_and_checks_that_hold(folder: Path) -> None:
    with RunReader(folder) as reader:
        trained = [row for row in reader.outcomes_by_step() if row.split == "train"]
        assert [row.step for row in trained] == [1, 2, 3]
        for row in trained:
            assert row.whole
            assert row.started is not None
            assert row.ended is not None
            assert row.started < row.ended
        assert {event.who for event in reader.events(kind="phase") if event.step == 2} >= {"rollout", "learn", "publish"}
        checks = reader.checks(2)
        assert {check.name for check in checks} >= {
            "chains_returned", "groups_whole", "chains_new", "lag", "failed_share", "logprob_gap", "version_published",
            "stale_cache", "tasks_accounted", "mask_is_sampled",
        }  # fmt: skip
        assert all(check.ok for check in checks)
        gap = next(check for check in checks if check.name == "logprob_gap")
        assert gap.value is not None
        assert gap.bound is not None
        assert 0 <= gap.value <= gap.bound
        assert all(at is not None for _, at, _ in reader.series(["reward/mean"])["reward/mean"])


def test_every_chain_has_times_and_the_tokens_that_were_trained(folder: Path) -> None:
    with RunReader(folder) as reader:
        trained_by_step = dict.fromkeys(range(1, STEPS + 1), 0)
        for row in reader.page(ChainFilter(split="train"), limit=1000)[0]:
            trajectory, series = reader.trajectory(row.id), reader.token_series(row.id)
            assert row.started is not None
            assert row.started > 1.6e9
            assert all(turn.began_s >= 0 and turn.sampled_s > 0 for turn in trajectory.turns)
            assert [len(turn.calls_s) for turn in trajectory.turns] == [len(turn.calls) for turn in trajectory.turns]
            assert (trajectory.turns[1].began_s, trajectory.seconds) >= (trajectory.turns[0].sampled_s, row.generate_s)
            assert row.advantage is not None
            assert series.trained is not None
            assert sum(series.trained) == row.num_trained
            assert training_of(reader, row).num_trained == row.num_trained
            trained_by_step[row.step] += row.num_trained or 0
            if row.num_trained:
                sampled = [value for turn in trajectory.turns for value in turn.completion.logprobs]
                assert_close_to_norm(series.trainer_logprob, sampled, scale=1.0, terms=8000)
                assert series.entropy is not None
                assert training_of(reader, row).reason is None
            else:
                assert training_of(reader, row).reason is not None
        assert all(trained_by_step.values())
        for group in reader.groups(1):
            rows = reader.group(1, group.task_id, group.draw)
            assert sum(row.advantage or 0.0 for row in rows) == pytest.approx(0.0, abs=1e-4)
        held = reader.page(ChainFilter(split="validation"), limit=1)[0][0]
        assert training_of(reader, held).reason == "a held-out task"
        assert training_of(reader, held).num_trained == 0
        (look,) = reader.tools()
        assert (look.name, look.errors) == ("look", 0)
        assert look.p95_s is not None
    assert diagnose(folder).ok


def test_a_chain_can_be_seen_before_its_step_is_complete(folder: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    @reward(name="patient")
    async def patient(trajectory: Any) -> float:
        if trajectory.chain == 2 and trajectory.id.startswith("t1-0"):
            async with asyncio.timeout(60):
                while not seen:
                    await asyncio.sleep(0.01)
                    with RunReader(tmp_path / "run") as reader:
                        rows, _ = reader.page(ChainFilter(step=1, split="train"))
                        seen.extend([len(rows)] if rows else [])
        return float(trajectory.chain)

    agentfly.train(
        tiny_agent(folder.parent.parent / "model", reward=patient), ROWS, steps=1, num_tasks=2, num_chains=3, threads=1,
        validation_count=2, sampling={"max_tokens": 6}, run={"dir": str(tmp_path), "name": "run"},
    )  # fmt: skip
    assert 1 <= seen[0] <= 5
    with RunReader(tmp_path / "run") as reader:
        rows = reader.page(ChainFilter(step=1, split="train"))[0]
        assert sorted(row.id for row in rows) == [f"t1-{task}-{chain}" for task in (0, 1) for chain in (0, 1, 2)]


def test_a_check_that_fails_is_in_the_store_with_its_value(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match="differ by"):
        agentfly.train(
            tiny_agent(folder.parent.parent / "model"), ROWS, steps=2, num_tasks=2, num_chains=3, threads=1,
            validation_count=2, sampling={"max_tokens": 6}, run={"dir": str(tmp_path), "name": "run"},
            train={"max_logprob_gap": 1e-12},
        )  # fmt: skip
    with RunReader(tmp_path / "run") as reader:
        failed = [check for check in reader.checks() if not check.ok]
        assert [(check.step, check.name, check.bound) for check in failed] == [(1, "logprob_gap", 1e-12)]
        assert (failed[0].value or 0.0) > 1e-12
        assert reader.state() == "stopped"
        assert "differ by" in reader.meta()["error"]
        assert [event.who for event in reader.events(kind="check_failed")] == ["logprob_gap"]
        row = reader.page(limit=1)[0][0]
        assert training_of(reader, row).reason == "step 1 is not finished"
        assert training_of(reader, row).turns is None
