"""Worker processes with a scripted engine: chains run in them as they do here, and a worker that dies costs no chain."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentfly.build import build_agent, build_plan
from agentfly.config import Config
from agentfly.data import load_tasks
from agentfly.errors import ConfigError, EngineError
from agentfly.resources import Admission, Environment
from agentfly.resources.backends.spawn import make_locked_folder
from agentfly.rollout import Plan, describe, open_environments, run_chains
from agentfly.rollout.activity import Activities
from agentfly.rollout.setup import environment_kinds
from agentfly.training.workers.channel import pack
from agentfly.training.workers.launcher import LocalLauncher
from agentfly.training.workers.pool import FOLDER, WorkerPool, merge_figures
from agentfly.types import Outcome, Task, Trajectory
from tests.scale.forked import wait_until_gone

HEALTH_S = 3.0
CONFIG = {"agent": {"kind": "tests.scale.scripted:Waits"}, "sampler": {"replicas": 2}, "sampling": {"seed": 7}}


class Workers:
    """A pool of two scripted workers in an event loop of another thread."""

    def __init__(self, folder: Path) -> None:
        self.config = Config.from_dict(CONFIG)
        self.notes: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        agent = build_agent(self.config)
        self.agent, self.bare = agent, build_plan(self.config, agent)
        self.plan: Plan
        self.pool: WorkerPool
        self.do(self._open(folder))

    async def _open(self, folder: Path) -> None:
        opening = {"config": self.config.to_toml(), "count": 2, "threads": 1, "chains": 4}
        self.pool = WorkerPool(LocalLauncher(folder), 2, opening, health_s=HEALTH_S, note=self.notes.append)
        await self.pool.__aenter__()
        admission = Admission(self.pool.room)
        self.pool.on_room(admission.wake)
        self.plan = replace(self.bare, runner=self.pool, admission=admission, activities=Activities())

    def do(self, work: Coroutine[Any, Any, Any], timeout_s: float = 120.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def run(self, rows: list[dict[str, Any]], num_chains: int = 2, **options: Any) -> list[Trajectory]:
        found: list[Trajectory] = self.do(self.start(rows, num_chains, **options))
        return found

    async def start(self, rows: list[dict[str, Any]], num_chains: int = 2, **options: Any) -> list[Trajectory]:
        return await run_chains(self.plan, load_tasks(rows), num_chains=num_chains, max_concurrency=None, **options)

    def pids(self) -> list[int]:
        return [replica.about["pid"] for replica in self.pool.replicas]

    def until(self, done: Callable[[], Any], timeout_s: float = 60.0) -> None:
        limit = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < limit, "it did not happen in time"
            time.sleep(0.02)

    def all_joined(self) -> bool:
        return all(replica.joined for replica in self.pool.replicas)

    def close(self) -> None:
        self.do(self.pool.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    made = Workers(tmp_path_factory.mktemp("logs"))
    pids = made.pids()
    yield made
    pids = sorted({*pids, *made.pids()})
    made.close()
    assert all(wait_until_gone(pid) for pid in pids)


@pytest.fixture(autouse=True)
def whole(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "workers" in request.fixturenames:
        made: Workers = request.getfixturevalue("workers")
        made.until(made.all_joined)
        assert not any(replica.chains or replica.calls for replica in made.pool.replicas)


def rows(until: float | Path, count: int) -> list[dict[str, Any]]:
    """Tasks whose chains take so many seconds, or wait for a file."""
    return [{"question": f"{i}: wait for {until} s", "seconds": 1.0} for i in range(count)]


def where(trajectory: Trajectory) -> str:
    return trajectory.turns[0].results[0].observation


def test_a_chain_in_a_worker_is_the_chain_that_runs_here(workers: Workers) -> None:
    async def here() -> list[Trajectory]:
        async with open_environments(workers.agent, workers.bare, None) as plan:
            return await run_chains(plan, load_tasks(rows(0.0, 5)), num_chains=3, max_concurrency=None)

    ours, theirs = asyncio.run(here()), workers.run(rows(0.0, 5), num_chains=3)
    assert len(theirs) == 15
    for own, told in zip(ours, theirs, strict=True):
        assert (own.id, own.task, own.outcome, own.reward) == (told.id, told.task, told.outcome, told.reward)
        assert own.prediction == told.prediction  # the seed of this chain and turn
        assert [turn.completion for turn in own.turns] == [turn.completion for turn in told.turns]
        assert [turn.context_ids for turn in own.turns][:1] == [turn.context_ids for turn in told.turns][:1]


def test_chains_are_spread_evenly_and_the_siblings_of_a_group_may_be_apart(workers: Workers, tmp_path: Path) -> None:
    running = asyncio.run_coroutine_threadsafe(workers.start(rows(tmp_path / "go", 6)), workers.loop)
    workers.until(lambda: all(len(replica.chains) == 6 for replica in workers.pool.replicas))
    (tmp_path / "go").touch()
    found = running.result(60)
    counts = Counter(where(trajectory) for trajectory in found)
    assert sorted(counts.values()) == [6, 6]
    assert {f"process {pid}" for pid in workers.pids()} == set(counts)
    assert f"process {os.getpid()}" not in counts


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_chains_of_a_worker_that_dies_or_freezes_run_once_more_elsewhere(
    workers: Workers, how: signal.Signals, tmp_path: Path
) -> None:
    restarts, rerun = workers.pool.restarts, workers.pool.counts["rerun_chains"]
    victim = workers.pids()[0]
    handed: list[str] = []
    running = asyncio.run_coroutine_threadsafe(
        workers.start(rows(tmp_path / "go", 6), on_trajectory=lambda each: handed.append(each.id)), workers.loop
    )
    workers.until(lambda: all(len(replica.chains) == 6 for replica in workers.pool.replicas))
    os.kill(victim, how)
    workers.until(lambda: not workers.pool.replicas[0].joined)
    (tmp_path / "go").touch()
    found = running.result(60)
    assert [each.outcome for each in found] == [Outcome.FINISHED] * 12
    assert sorted(handed) == sorted(each.id for each in found)  # each once
    assert f"process {victim}" not in {where(each) for each in found}
    assert workers.pool.counts["rerun_chains"] == rerun + 6
    assert wait_until_gone(victim)
    workers.until(lambda: workers.pool.restarts == restarts + 1 and workers.all_joined())
    assert workers.pids()[0] != victim
    assert ("silent" if how == signal.SIGSTOP else "SIGKILL") in workers.notes[-1]
    (tmp_path / "go").unlink()
    running = asyncio.run_coroutine_threadsafe(workers.start(rows(tmp_path / "go", 4)), workers.loop)
    workers.until(lambda: all(replica.chains for replica in workers.pool.replicas))  # the new one takes part
    (tmp_path / "go").touch()
    assert len({where(each) for each in running.result(60)}) == 2


def test_a_chain_under_which_two_workers_die_is_lost_and_the_run_goes_on(workers: Workers) -> None:
    lost = workers.pool.counts["lost_chains"]
    found = workers.run([{"question": "wait for death s", "seconds": 0}], num_chains=1)
    assert [each.outcome for each in workers.run(rows(0.0, 3))] == [Outcome.FINISHED] * 6
    assert found[0].outcome == Outcome.WORLD_FAILURE
    assert found[0].reward is None
    assert "two workers ended" in (found[0].error or "")
    assert workers.pool.counts["lost_chains"] == lost + 1


def test_an_error_that_stops_the_run_is_raised_here_with_its_type(workers: Workers) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug of the tool's author") as raised:
        workers.run([{"question": "a bug: wait for 0.05 s", "seconds": 0}], num_chains=1)
    assert "scripted.py" in "".join(raised.value.__notes__)  # where it happened in the worker


def test_a_cancelled_chain_ends_in_its_worker_too(workers: Workers) -> None:
    running = asyncio.run_coroutine_threadsafe(workers.start(rows(30.0, 2), 1), workers.loop)
    workers.until(lambda: sum(len(replica.chains) for replica in workers.pool.replicas) == 2)
    activities = workers.plan.activities
    assert activities is not None
    workers.until(lambda: "tools: wait" in describe(activities))
    assert "turn 1" in describe(activities)
    running.cancel()
    workers.until(lambda: not any(replica.chains for replica in workers.pool.replicas))
    assert not activities
    assert len(workers.run(rows(0.0, 2), 1)) == 2


def test_the_deadline_of_a_group_holds_in_the_worker(workers: Workers) -> None:
    async def late() -> Trajectory:
        task = load_tasks(rows(30.0, 1))[0]
        until = asyncio.get_running_loop().time() + 0.3
        return await workers.pool.run(workers.plan, workers.pool.open(workers.plan, task), 0, "late-0-0", until=until)

    found: Trajectory = workers.do(late())
    assert found.outcome == Outcome.MAX_TIME  # its tool used up the time
    assert "the group of the chain exceeded its time limit" in (found.error or "")


def test_the_environments_of_the_workers_are_counted_together(tmp_path: Path) -> None:
    async def work() -> tuple[list[Trajectory], dict[str, float], dict[str, float]]:
        config = Config.from_dict(
            {**CONFIG, "agent": {"kind": "tests.scale.scripted:Guesses"}, "resources": {"pools": {"GuessEnv": {"max": 3}}}}
        )
        opening = {"config": config.to_toml(), "count": 2, "threads": 1, "chains": 4}
        async with WorkerPool(LocalLauncher(tmp_path), 2, opening) as pool:
            admission = Admission(pool.room)
            pool.on_room(admission.wake)
            assert pool.room() == 3  # two environments in one worker, one in the other
            plan = replace(build_plan(config, build_agent(config)), runner=pool, admission=admission)
            pool.mark()
            found = await run_chains(plan, load_tasks([{"question": "?", "secret": 4}] * 8), num_chains=2, max_concurrency=99)
            measured = await pool.step_metrics()
            async with asyncio.timeout(60):  # the figures of now come with the next heartbeats
                while pool.metrics().get("resources/GuessEnv/started", 0) < measured["resources/GuessEnv/started"]:
                    await asyncio.sleep(0.05)
            return found, measured, pool.metrics()

    found, measured, now = asyncio.run(work())
    assert [each.reward for each in found] == [1.0] * 16
    started = measured["resources/GuessEnv/started"]
    assert 2 <= started <= 3  # an environment that no chain had to wait for is not started
    assert 2 <= measured["resources/total/most_allocated"] <= 3
    assert measured["workers/live"] == 2
    assert started <= now["resources/GuessEnv/started"] <= 3


@pytest.mark.parametrize(
    "said",
    [
        pack("hello", 0, {"token": "x" * 64, "index": 0, "attempt": 0}),
        pack("hello", 0, {"token": "\u00e9" * 64, "index": 0, "attempt": 0}),
        b"\xff" * 100,
    ],
    ids=["another token", "a token that is not ASCII", "no message"],
)
def test_a_stranger_without_the_token_is_not_heard(workers: Workers, said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(60)
        stranger.connect(workers.pool._address)
        stranger.sendall(said)
        assert stranger.recv(1) == b""
    assert workers.all_joined()
    assert "Traceback" not in caplog.text


def test_another_version_of_the_software_is_refused_by_name(workers: Workers) -> None:
    replica = workers.pool.replicas[0]
    software = dict(replica.about["software"])
    try:
        replica.about["software"] = {**software, "agentfly": "0.0.1"}
        with pytest.raises(ConfigError, match=r"sampler 0 on .* has agentfly 0\.0\.1, but the trainer has"):
            workers.pool._check_software(replica)
    finally:
        replica.about["software"] = software


def test_if_no_worker_lives_the_run_stops_with_a_sentence(workers: Workers, tmp_path: Path) -> None:
    class Once(LocalLauncher):
        """A launcher whose machine is gone after the first process."""

        started = 0

        def start(self, index: int, ticket: Any) -> Any:
            Once.started += 1
            if Once.started > 1:
                raise EngineError("no machine is left")
            return super().start(index, ticket)

    async def work() -> None:
        opening = {"config": workers.config.to_toml(), "count": 1, "threads": 1, "chains": 4}
        async with WorkerPool(Once(tmp_path), 1, opening, health_s=3.0) as pool:
            pool._start_took_s, pool.health_s = 0.0, 0.15
            admission = Admission(pool.room)
            pool.on_room(admission.wake)
            plan = replace(workers.bare, runner=pool, admission=admission)
            os.kill(pool.replicas[0].about["pid"], signal.SIGKILL)
            await run_chains(plan, load_tasks(rows(0.0, 3)), num_chains=2, max_concurrency=2)

    with pytest.raises(EngineError, match="no sampler process has lived for .*no machine is left.*: the run stops"):
        asyncio.run(work())


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def work(tree: dict[str, Any]) -> None:
        opening = {"config": Config.from_dict(tree).to_toml(), "count": 1, "threads": 1, "chains": 4}
        async with WorkerPool(LocalLauncher(tmp_path), 1, opening):
            raise AssertionError("it did start")

    with pytest.raises(ConfigError, match="'no_such_tool'"):
        asyncio.run(work({**CONFIG, "agent": {"kind": "react", "tools": ["no_such_tool"]}}))
    (tmp_path / "ends.py").write_text("import os, sys\nprint('no licence', file=sys.stderr, flush=True)\nos._exit(3)")
    with pytest.raises(EngineError, match=r"sampler 0 did not start: it ended \(exit code 3\); it said: no licence"):
        asyncio.run(work({**CONFIG, "agent": {"kind": f"{tmp_path}/ends.py:Agent"}}))


def test_a_worker_that_dies_before_all_have_joined_is_started_again(workers: Workers, tmp_path: Path) -> None:
    class Killed(LocalLauncher):
        def start(self, index: int, ticket: Any) -> Any:
            process = super().start(index, ticket)
            if ticket["attempt"] == 0:
                os.kill(process.pid, signal.SIGKILL)
            return process

    async def work() -> list[str]:
        notes: list[str] = []
        opening = {"config": workers.config.to_toml(), "count": 1, "threads": 1, "chains": 4}
        async with WorkerPool(Killed(tmp_path), 1, opening, note=notes.append) as pool:
            assert pool.replicas[0].joined
        return notes

    (note,) = asyncio.run(work())
    assert note == "sampler 0 ended (killed by SIGKILL); it is started again"


def test_workers_outlive_a_pause_of_the_trainer_and_end_with_it(tmp_path: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from agentfly.config import Config
from agentfly.training.workers.launcher import LocalLauncher
from agentfly.training.workers.pool import WorkerPool

async def work():
    opening = {{"config": Config.from_dict({CONFIG!r}).to_toml(), "count": 2, "threads": 1, "chains": 4}}
    async with WorkerPool(LocalLauncher(Path({str(tmp_path)!r})), 2, opening, health_s=2.0) as pool:
        print(*[replica.about["pid"] for replica in pool.replicas], flush=True)
        await asyncio.to_thread(input)
        await asyncio.sleep(1)
        print(pool.restarts, sum(replica.joined for replica in pool.replicas), flush=True)
        await asyncio.sleep(600)

asyncio.run(work())
"""
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    trainer = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=environ)
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    pids = [int(word) for word in trainer.stdout.readline().split()]
    assert len(pids) == 2
    trainer.send_signal(signal.SIGSTOP)
    time.sleep(5)  # longer than its workers may be silent
    trainer.send_signal(signal.SIGCONT)
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    assert trainer.stdout.readline().split() == ["0", "2"]
    os.kill(pids[1], signal.SIGSTOP)
    trainer.kill()
    trainer.wait()
    trainer.stdin.close()
    trainer.stdout.close()
    assert all(wait_until_gone(pid, 60) for pid in pids)  # also the one that is frozen
    (left,) = tmp_path.glob("agentfly-samplers-*")
    assert (left / "socket").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        folder, lock = make_locked_folder(FOLDER)  # as the next run does
        assert list(tmp_path.glob("agentfly-samplers-*")) == [folder]
        _, second = make_locked_folder(FOLDER)
        assert folder.exists(), "its owner lives"
        for each in (lock, second):
            os.close(each)


# ---- without processes


class Room(Environment):
    """An environment with a fixed pool."""

    def reset(self, task: Task) -> None: ...


def test_workers_share_the_budget_and_the_sizes_of_pools() -> None:
    agent = build_agent(Config.from_dict({**CONFIG, "resources": {"cpu": 6}}))
    agent.env = replace(spec_of_room(), max=5, min_warm=3)
    sizes = [environment_kinds(agent, 8, (index, 2))[0] for index in range(2)]
    assert [(spec.max, spec.min_warm) for spec in sizes] == [(3, 2), (2, 2)]
    agent.env = replace(spec_of_room(), max=None)
    assert [environment_kinds(agent, 8, (index, 2))[0].max for index in range(2)] == [3, 3]
    agent.env = replace(spec_of_room(), max=1)
    with pytest.raises(ConfigError, match="at most 1 environments, and 2 samplers share it"):
        environment_kinds(agent, 8, (1, 2))


def spec_of_room() -> Any:
    from agentfly.resources import Cost, spec_of

    return spec_of(Room, cost=Cost(cpu=1))


def test_figures_of_several_workers_become_those_of_one() -> None:
    a = {"resources/x/idle": 2.0, "resources/x/acquire_s": 1.0, "resources/x/acquire_p95_s": 3.0}
    b = {"resources/x/idle": 3.0, "resources/x/acquire_s": 2.0, "resources/x/acquire_p95_s": 9.0, "resources/y/idle": 1.0}
    merged = {"resources/x/idle": 5.0, "resources/x/acquire_s": 1.5, "resources/x/acquire_p95_s": 9.0, "resources/y/idle": 1.0}
    assert merge_figures([a, b]) == merged
    assert merge_figures([]) == {}


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"cluster": {"health_s": 3}}, "cluster.health_s has no effect without worker processes"),
        ({"sampler": {"replicas": 0}}, "sampler.replicas"),
        ({"sampler": {"gpus": 2}}, "sampler.gpus"),
        ({"sampler": {"replicas": 2}, "agent": {"model": "openai:x@http://h:1/v1"}}, "is a server"),
        ({"sampler": {"place": "elsewhere"}}, "sampler.place"),
    ],
)
def test_keys_that_cannot_be_served_are_refused(tree: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Config.from_dict(tree)
