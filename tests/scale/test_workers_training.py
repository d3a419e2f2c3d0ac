"""Training with worker processes: the same run as in one process, whatever dies on the way, and every replica proven."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agentfly
from agentfly.errors import ConfigError, EngineError, InvariantError
from agentfly.health import diagnose
from agentfly.runs import RunStore
from agentfly.training.evaluation import evaluate_run
from agentfly.training.ledger import Ledger
from agentfly.training.loop import Trainer
from agentfly.training.workers import engine as engine_module
from agentfly.training.workers.engine import WorkerEngine
from agentfly.training.workers.pool import WorkerPool
from agentfly.training.workers.weights import MemorySender
from agentfly.types import Proof
from agentfly.watch.metrics import unknown
from tests.close import assert_close_to_norm
from tests.scale.forked import ForkLauncher, wait_until_gone
from tests.tiny import ROWS, sample_in_float64, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("workers")
    save_tiny_model(made / "model")
    (made / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return made


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine_module, "LocalLauncher", ForkLauncher)
    monkeypatch.setattr(ForkLauncher, "pids", [])
    yield
    assert all(wait_until_gone(pid) for pid in ForkLauncher.pids)  # a run leaves no process behind


def config_of(folder: Path, runs: Path, name: str, **more: dict[str, Any]) -> agentfly.Config:
    tree: dict[str, Any] = {
        "agent": {
            "kind": "tests.scale.slow_agent:Slow", "model": str(folder / "model"), "tools": ["tests.scale.slow_agent:look"],
            "reward": "tests.tiny:even", "max_turns": 2,
        },
        "sampling": {"max_tokens": 12},
        "data": {"train": str(folder / "rows.jsonl"), "validation_count": 4},
        "rollout": {"num_tasks": 3, "num_chains": 2},
        "train": {"steps": 4, "lr": 1e-2, "validate_every": 2, "validate_at_start": False},
        "run": {"dir": str(runs), "name": name, "threads": 1},
    }  # fmt: skip
    for section, keys in more.items():
        tree[section] = {**tree.get(section, {}), **keys}
    if tree.get("sampler"):  # a worker that is slow on a busy machine is not taken for a frozen one
        tree["cluster"] = {"health_s": 60.0} | tree.get("cluster", {})
    return agentfly.Config.from_dict(tree)


def stored(run: Path, split: str = "train") -> dict[str, Any]:
    with RunStore(run / "run.db", readonly=True) as store:
        found = store.trajectories(split=split, limit=9999)
    assert len({each.id for each in found}) == len(found)
    return {each.id: each for each in found}


def problems(run: Path) -> list[Any]:
    return [check.problems for check in diagnose(run).checks if not check.ok]


def weights(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


class Killer:
    """Sends a signal to the newest worker process when a method is entered for the n-th time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, how: signal.Signals) -> None:
        original, self.calls, self.victim = getattr(owner, name), 0, 0

        def entered(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                self.victim = ForkLauncher.pids[-1]
                os.kill(self.victim, how)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, entered)


def test_a_run_with_one_worker_that_is_killed_again_and_again_is_the_run_in_one_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaped: dict[str, Any] = {
        "agent": {
            "examples": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}],
            "examples_steps": 3,
        },
        "rollout": {"call_bonus": 0.3, "call_bonus_steps": 3},
    }
    alone = agentfly.train(config_of(folder, tmp_path, "alone", **shaped))
    in_publish = Killer(monkeypatch, MemorySender, "send", 2, signal.SIGSTOP)  # the first hands over the first weights
    in_rollout = Killer(monkeypatch, WorkerPool, "_run_on", 20, signal.SIGKILL)
    in_validation = Killer(monkeypatch, Trainer, "_validate", 2, signal.SIGKILL)
    apart = agentfly.train(
        config_of(folder, tmp_path, "apart", sampler={"place": "process"}, cluster={"health_s": 10.0}, **shaped)
    )
    assert len({in_publish.victim, in_rollout.victim, in_validation.victim} - {0}) == 3
    for split in ("train", "validation"):
        ours, theirs = stored(alone.directory, split), stored(apart.directory, split)
        assert ours.keys() == theirs.keys()
        for name, own in ours.items():
            told = theirs[name]
            assert (own.task.id, own.reward, own.outcome) == (told.task.id, told.reward, told.outcome)
            assert [turn.completion.token_ids for turn in own.turns] == [turn.completion.token_ids for turn in told.turns]
            assert [turn.completion.versions for turn in own.turns] == [turn.completion.versions for turn in told.turns]
    for name, tensor in weights(alone.checkpoint).items():
        assert_close_to_norm(weights(apart.checkpoint)[name], tensor, of=name)
    last = apart.history[-1]
    assert last["workers/restarts"] >= 2
    assert last["workers/lost_chains"] == 0
    assert last["handover/replica/0/version"] == last["train/version"] + 1
    assert last["handover/gap"] < 1e-4
    assert last["handover/moved"] > 0
    assert not unknown(name for metrics in apart.history for name in metrics)
    assert not problems(apart.directory)


@pytest.mark.parametrize("at_update", ["recompute", "keep", "finish"])
def test_chains_are_sampled_while_the_learner_learns_and_no_token_is_too_old(
    folder: Path, tmp_path: Path, at_update: str
) -> None:
    options = {"max_lag": 2, "depth": 2, "at_update": at_update}
    result = agentfly.train(
        config_of(
            folder,
            tmp_path,
            "run",
            rollout=options,
            sampler={"replicas": 2},
            sampling={"max_tokens": 60},
            train={"steps": 8, "validate_every": 0},
        )
    )
    found = stored(result.directory)
    assert Counter(each.task.id for each in found.values()).total() == 8 * 6
    versions = {step: int(row["train/version"]) for step, row in enumerate(result.history, 1)}
    with RunStore(result.directory / "run.db", readonly=True) as store:
        for step in versions:
            chains = store.trajectories(step=step, split="train", limit=99)
            lags = [versions[step] - v for each in chains for turn in each.turns for v in turn.completion.versions]
            assert min(lags) >= 0
            assert max(lags) <= 2
    mixed = [turn for each in found.values() for turn in each.turns if len(set(turn.completion.versions)) > 1]
    assert not mixed or at_update != "finish"
    last = result.history[-1]
    assert last["handover/replicas"] == 2
    assert {last["handover/replica/0/version"], last["handover/replica/1/version"]} == {last["train/version"] + 1}
    assert last["ledger/drawn"] == 24
    assert last["ledger/in_flight"] == 0
    assert not problems(result.directory)


def test_a_run_whose_workers_die_and_freeze_while_it_samples_ahead_keeps_its_books(folder: Path, tmp_path: Path) -> None:
    """The newest worker is harmed at three steps while it samples ahead, and the run waits there until both live."""
    harms = {3: signal.SIGKILL, 8: signal.SIGSTOP, 13: signal.SIGKILL}
    config = config_of(
        folder, tmp_path, "run", rollout={"max_lag": 2, "depth": 1, "num_tasks": 4}, sampler={"replicas": 2},
        train={"steps": 18, "validate_every": 0, "max_failed_share": 1.0}, agent={"max_turns": 3}, cluster={"health_s": 10.0},
    )  # fmt: skip
    original_engine, original = engine_module.WorkerEngine, Trainer._collect
    engines: list[WorkerEngine] = []

    def made(config: agentfly.Config, **options: Any) -> WorkerEngine:
        engines.append(original_engine(config, **options))
        return engines[-1]

    async def collect(self: Trainer, step: int) -> Any:
        if how := harms.get(step):
            pool: Any = engines[0].pool
            async with asyncio.timeout(120):
                os.kill(ForkLauncher.pids[-1], how)
                while pool.fleet.restarts < list(harms).index(step) + 1 or not all(each.live for each in pool.replicas):
                    await asyncio.sleep(0.02)
        return await original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "WorkerEngine", made)
        patch.setattr(Trainer, "_collect", collect)
        result = agentfly.train(config)
    found = stored(result.directory)
    assert len(found) == 18 * 8
    assert result.history[-1]["workers/restarts"] == 3
    assert result.history[-1]["ledger/drawn"] == 72
    assert result.history[-1]["ledger/in_flight"] == 0
    assert not problems(result.directory)


def test_a_run_that_is_stopped_by_ctrl_c_resumes_with_new_workers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        folder, tmp_path, "run", rollout={"max_lag": 1}, sampler={"replicas": 2}, train={"steps": 12, "validate_every": 0}
    )
    original = Trainer._collect

    async def collect(self: Trainer, step: int) -> Any:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return await original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_collect", collect)
        with pytest.raises(KeyboardInterrupt):
            agentfly.train(config)
    assert all(wait_until_gone(pid) for pid in ForkLauncher.pids)
    again = agentfly.train(config, resume=tmp_path / "run")
    assert again.steps == 12
    found = stored(tmp_path / "run")
    assert Counter(each.task.id for each in found.values()).total() == 12 * 6
    assert set(Counter(each.task.id for each in found.values()).values()) == {2}  # 36 of 36 rows, each once
    assert again.history[-1]["ledger/drawn"] == 36
    assert not problems(tmp_path / "run")


def test_a_worker_that_samples_from_other_weights_stops_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = MemorySender.write

    def broken(self: MemorySender, buckets: Any) -> int:
        return honest(self, [[(name, tensor * 1.5 if "down_proj" in name else tensor) for name, tensor in b] for b in buckets])

    monkeypatch.setattr(MemorySender, "write", broken)
    with pytest.raises((InvariantError, EngineError), match="log-probs differ from the learner's"):
        agentfly.train(config_of(folder, tmp_path, "run", sampler={"place": "process"}))


def test_the_ledger_stops_a_run_in_which_a_replica_has_not_proven_the_version(folder: Path, tmp_path: Path) -> None:
    engine: Any = WorkerEngine(config_of(folder, tmp_path, "run", sampler={"replicas": 2}))
    proven, behind = (SimpleNamespace(index=i, name=f"sampler {i}", version=3 - i, stats={}) for i in range(2))
    engine.version, engine.proofs = 3, {0: Proof(3, 0.0, 0.0), 1: Proof(2, 0.0, 0.0)}
    engine.pool = SimpleNamespace(fleet=SimpleNamespace(live=[proven, behind]), stats=dict)
    learner: Any = SimpleNamespace(version=3, model=engine.model)
    ledger = Ledger(max_logprob_gap=0.1, max_failed_share=0.5)
    with pytest.raises(InvariantError, match="no proof says"):
        ledger.check_published(engine, learner)
    engine.proofs[1] = Proof(3, 0.0, 0.0)  # of the process before the present one
    with pytest.raises(InvariantError, match="sampler 1 did not prove version 3"):
        ledger.check_published(engine, learner)
    behind.version = 3
    ledger.check_published(engine, learner)


def test_evaluation_uses_the_workers_and_gives_the_same_figures(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_in_float64(monkeypatch)
    alone = evaluate_run(config_of(folder, tmp_path, "alone"), num_chains=2)
    apart = evaluate_run(config_of(folder, tmp_path, "apart", sampler={"replicas": 2}), num_chains=2)
    assert len(ForkLauncher.pids) == 2
    assert alone.metrics == apart.metrics
    ours, theirs = ({each.task.id: each.prediction for each in run.trajectories} for run in (alone, apart))
    assert ours == theirs


def test_an_agent_that_no_config_describes_is_refused(folder: Path, tmp_path: Path) -> None:
    from tests.tiny import tiny_agent

    with pytest.raises(ConfigError, match="need a run that a config describes"):
        agentfly.train(tiny_agent(folder / "model"), ROWS, sampler={"replicas": 2}, run={"dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="needs GPUs for the samplers"):
        agentfly.train(config_of(folder, tmp_path, "run", sampler={"place": "own"}))


@pytest.mark.parametrize("transport", ["memory", "broadcast"])
def test_weights_with_adapters_reach_every_worker_by_each_way(
    folder: Path, tmp_path: Path, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(config: agentfly.Config, **options: Any) -> WorkerEngine:
        return WorkerEngine(config, transport=transport, **options)

    if transport == "broadcast":  # one of three dies in the middle of the hand-over: the others get the weights again
        from agentfly.training.workers import weights as weights_module

        killer = Killer(monkeypatch, weights_module, "broadcast", 4, signal.SIGKILL)
    monkeypatch.setattr(engine_module, "WorkerEngine", made)
    replicas = 2 if transport == "memory" else 3
    config = config_of(
        folder, tmp_path, "run", lora={"rank": 4}, sampler={"replicas": replicas}, train={"steps": 3, "validate_every": 0}
    )
    result = agentfly.train(config)
    last = result.history[-1]
    assert last["train/version"] == 2
    assert last["handover/gap"] < 1e-4
    assert last["handover/replicas"] >= 2
    assert not problems(result.directory)
    if transport == "broadcast":
        assert killer.victim
        assert last["workers/restarts"] == 1
