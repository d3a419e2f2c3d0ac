"""`agentfly doctor` finds every fault that is planted in a copy of a sound run, and finds none in the run itself."""

from __future__ import annotations

import json
import math
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agentfly
from agentfly import health as doctor
from agentfly.cli import main
from agentfly.errors import ConfigError
from agentfly.health import Check, diagnose, records, report
from agentfly.runs import RunDirectory, RunStore, decode, encode
from agentfly.types import Outcome, Task, Trajectory
from tests.tiny import ROWS, save_tiny_model, tiny_agent

STEPS = 3


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps of two tasks with three chains each, over rows that the doctor can load."""
    folder = tmp_path_factory.mktemp("doctor")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model = save_tiny_model(folder / "model")
    made = agentfly.train(
        tiny_agent(model), str(rows), steps=STEPS, num_tasks=2, num_chains=3, threads=1, lr=1e-2, save_every=1,
        keep_checkpoints=9, validation_count=2, sampling={"max_tokens": 6}, run={"dir": str(folder / "runs"), "name": "run"},
    )  # fmt: skip
    with RunStore(made.directory / "run.db") as store:
        for step in range(1, STEPS + 1):
            first = store.trajectories(step=step, split="train", limit=1)[0]
            books = {"drawn": 2 * step, "trained": 2 * step - 1, "filtered": 1, "failed": 0, "in_flight": 0}
            store.add_metrics(
                step,
                {"train/version": first.turns[0].completion.versions[0], "handover/gap": 1e-4, "handover/moved": 0.1}
                | {f"ledger/{name}": count for name, count in books.items()},
            )
    (made.directory / "metrics.jsonl").unlink()  # it does not hold these figures
    return Path(made.directory)


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def checks(run: Path) -> dict[str, Check]:
    return {check.name: check for check in diagnose(run).checks}


def sql(run: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        assert db.execute(statement, values).rowcount > 0


def alter(run: Path, name: str, change: Callable[[Trajectory], None]) -> None:
    """Change a stored chain, with the columns that follow from it."""
    with RunStore(run / "run.db") as store:
        trajectory = store.trajectory(name)
        (step,) = {row.step for row in store.rows(limit=1000) if row.id == name}
    change(trajectory)
    sql(run, "DELETE FROM trajectories WHERE id = ?", name)
    with RunStore(run / "run.db") as store:
        store.add_trajectories(step, "train", [trajectory])


def set_reply(**fields: Any) -> Callable[[Trajectory], None]:
    """Change fields of the completion of the first turn: each value is a function of the old one."""

    def change(trajectory: Trajectory) -> None:
        reply = trajectory.turns[0].completion
        for name, value in fields.items():
            object.__setattr__(reply, name, value(getattr(reply, name)))

    return change


def test_a_sound_run_passes_every_check(sound: Path) -> None:
    found = checks(sound)
    assert list(found) == list(doctor.CHECKS)
    assert {name: (check.problems, check.skipped) for name, check in found.items()} == dict.fromkeys(doctor.CHECKS, ([], None))
    assert "18 train chains" in found["tokens"].evidence
    assert "3 steps, 6 groups; no chain failed" in found["groups"].evidence
    assert found["texts"].evidence.startswith("4")  # 40 replies and more


def first_differing(ids: list[int]) -> list[int]:
    """The ids with two neighbours exchanged."""
    at = next(i for i in range(len(ids) - 1) if ids[i] != ids[i + 1])
    return [*ids[:at], ids[at + 1], ids[at], *ids[at + 2 :]]


def swap_prompt(trajectory: Trajectory) -> None:
    trajectory.turns[0].context_ids = first_differing(trajectory.turns[0].context_ids)


def fail_with_a_reward(trajectory: Trajectory) -> None:
    trajectory.outcome = Outcome.WORLD_FAILURE


def infinite_turn(trajectory: Trajectory) -> None:
    trajectory.turns[0].reward = math.inf


def no_prompt(trajectory: Trajectory) -> None:
    trajectory.turns[0].context_ids = []


CHAINS: dict[str, tuple[str, str, Callable[[Trajectory], None]]] = {
    "two ids of a reply exchanged": ("texts", "t2-0-1", set_reply(token_ids=first_differing)),
    "another id": ("texts", "t1-1-0", set_reply(token_ids=lambda ids: [*ids[:1], (ids[1] + 1) % 100, *ids[2:]])),
    "a log-prob lost": ("rows", "t2-0-1", set_reply(logprobs=lambda values: values[:-1])),
    "a version lost": ("rows", "t2-0-1", set_reply(versions=lambda values: values[:-1])),
    "a positive log-prob": ("tokens", "t2-0-1", set_reply(logprobs=lambda values: [0.7, *values[1:]])),
    "a log-prob that is NaN": ("tokens", "t2-0-1", set_reply(logprobs=lambda values: [*values[:-1], math.nan])),
    "an infinite log-prob": ("tokens", "t2-0-1", set_reply(logprobs=lambda values: [-math.inf, *values[1:]])),
    "a negative id": ("tokens", "t2-0-1", set_reply(token_ids=lambda ids: [-5, *ids[1:]])),
    "a prompt lost": ("tokens", "t2-0-1", no_prompt),
    "a prompt of its own": ("groups", "t2-0-1", swap_prompt),
    "a version of the future": ("versions", "t2-0-1", set_reply(versions=lambda values: [*values[:-1], 99])),
    "a version that decreases": ("versions", "t3-0-1", set_reply(versions=lambda values: [*values[:-1], 0])),
    "a version that is too old": ("lag", "t3-0-1", set_reply(versions=lambda values: [0] * len(values))),
    "a reward of a failed chain": ("rewards", "t2-0-1", fail_with_a_reward),
    "an infinite reward": ("rewards", "t2-0-1", infinite_turn),
}


@pytest.mark.parametrize("fault", CHAINS)
def test_a_fault_of_a_chain_is_found(run: Path, fault: str) -> None:
    name, chain, change = CHAINS[fault]
    alter(run, chain, change)
    found = checks(run)
    assert not found[name].ok
    assert any(chain in problem or "siblings" in problem or "sibling" in problem for problem in found[name].problems)


def metric(step: int, name: str, value: str) -> str:
    return f"UPDATE metrics SET value = {value} WHERE step = {step} AND name = '{name}'"


def first(change: str) -> str:
    return f"UPDATE trajectories SET {change} WHERE id = 't1-0-0'"


FIRST = "key = (SELECT key FROM trajectories WHERE id = 't1-0-0')"
RECORDS: dict[str, tuple[str, str, str]] = {
    "a chain dropped": ("groups", "5 of 6", "DELETE FROM trajectories WHERE id = 't2-1-2'"),
    "a chain of a later step dropped": ("metrics", "rollout/chains is 6", "DELETE FROM trajectories WHERE id = 't3-0-0'"),
    "a group dropped": ("draws", "position 1 of step 2", "DELETE FROM trajectories WHERE id LIKE 't2-1-%'"),
    "the chains of a step lost": ("steps", "no chains", "DELETE FROM trajectories WHERE step = 2 AND split = 'train'"),
    "the metrics of a step lost": ("steps", "step 2 is missing", "DELETE FROM metrics WHERE step = 2"),
    "the last step lost": ("checkpoints", "step-000003", "DELETE FROM metrics WHERE step = 3"),
    "a check that failed": ("ledger", "its check lag failed", "UPDATE checks SET ok = 0 WHERE step = 2 AND name = 'lag'"),
    "more tokens trained than sampled": ("trained", "999 of", first("num_trained = 999")),
    "a record of the learner lost": ("trained", "6 trainable chains, but", first("num_trained = NULL")),
    "a series of the learner cut": ("trained", "is cut", "UPDATE tokens SET blob = x'00' WHERE dtype = 'f'"),
    "values of the learner lost": (
        "trained",
        "1 values of trainer_logprob",
        "UPDATE tokens SET blob = x'00000000' WHERE dtype = 'f'",
    ),
    "a failed chain trained": ("trained", "ended in world_f", first("outcome = 'world_failure', num_trained = 1")),
    "another total reward": ("rewards", "add up", "UPDATE trajectories SET total_reward = 7.5 WHERE id = 't1-0-0'"),
    "a total reward lost": ("rewards", "nan", "UPDATE trajectories SET total_reward = NULL WHERE id = 't1-0-0'"),
    "a column of another chain": ("rows", "outcome", "UPDATE trajectories SET outcome = 'no_tool_call' WHERE id = 't1-0-0'"),
    "a broken body": (
        "rows",
        "cannot be read",
        "UPDATE bodies SET body = x'0300' WHERE key = (SELECT key FROM trajectories WHERE id = 't1-0-0')",
    ),
    "a body lost": (
        "rows",
        "cannot be read",
        "DELETE FROM bodies WHERE key = (SELECT key FROM trajectories WHERE id = 't1-0-0')",
    ),
    "a metric that is NaN": ("metrics", "train/loss is nan", metric(2, "train/loss", "NULL")),
    "a validation that is NaN": ("metrics", "validation/success is nan", metric(3, "validation/success", "NULL")),
    "an infinite metric": ("metrics", "is inf", metric(1, "reward/mean", "9e999")),
    "another mean reward": ("metrics", "reward/mean", metric(1, "reward/mean", "value + 0.01")),
    "a gap": ("gap", "limit 0.0001", metric(2, "train/logprob_gap", "0.0006")),
    "a gap that is NaN": ("gap", "nan", metric(2, "train/logprob_gap", "NULL")),
    "a task lost from the books": ("books", "step 2", metric(2, "ledger/trained", "2")),
    "a proof lost": ("handover", "step 3 has no proof", "DELETE FROM metrics WHERE step = 3 AND name LIKE 'handover/%'"),
    "a proof that fails": ("handover", "limit", metric(3, "handover/gap", "0.5")),
    "a version that jumps": ("versions", "step 3", metric(3, "train/version", "9")),
    "an update that was not published": ("lag", "1 versions old", metric(3, "train/version", "value + 1")),
}


@pytest.mark.parametrize("fault", RECORDS)
def test_a_fault_of_the_records_is_found(run: Path, fault: str) -> None:
    name, told, statement = RECORDS[fault]
    sql(run, statement)
    found = checks(run)
    assert not found[name].ok
    assert re.search(told, "\n".join(found[name].problems))


@pytest.mark.parametrize("step", [2, 3])
def test_a_chain_that_is_counted_twice_is_found(run: Path, step: int) -> None:
    with RunStore(run / "run.db") as store:
        store.add_trajectories(step, "train", [store.trajectory("t2-0-1")])
    found = checks(run)
    assert found["once"].problems == ["chain t2-0-1 is stored 2 times"]
    assert not found["groups"].ok


def test_a_chain_counted_twice_under_another_id_is_found(run: Path) -> None:
    with RunStore(run / "run.db") as store:
        twin = store.trajectory("t2-0-1")
        twin.id = "t2-0-7"
        store.add_trajectories(2, "train", [twin])
    assert any("chains [0, 1, 1, 2]" in problem for problem in checks(run)["groups"].problems)


def test_a_task_that_was_passed_over_or_drawn_again_is_found(run: Path) -> None:
    """The chains of one draw belong to another task, as if the cursor had skipped a row."""
    with RunStore(run / "run.db") as store:
        other = store.trajectory("t3-0-0").task
    for number in range(3):
        alter(run, f"t2-1-{number}", lambda trajectory: setattr(trajectory, "task", other))
    (problem,) = checks(run)["draws"].problems
    assert f"position 1 of step 2 holds task {other.id!r}, but the sampler draws" in problem


def test_a_group_may_be_trained_later_than_it_was_drawn(run: Path) -> None:
    """As with rollout.max_lag above 0: two groups change places between steps 2 and 3."""
    sql(run, "UPDATE trajectories SET step = 3 WHERE id LIKE 't2-1-%'")
    sql(run, "UPDATE trajectories SET step = 2 WHERE id LIKE 't3-0-%'")
    found = checks(run)
    assert [found[name].problems for name in ("draws", "groups", "once", "steps")] == [[], [], [], []]
    assert not found["lag"].ok  # this run has max_lag 0: tokens of step 2 are too old in step 3
    assert not found["versions"].ok  # and those of step 3 cannot be trained in step 2


@pytest.mark.parametrize(
    ("at_limit", "masked", "ok"), [("wait", 0.0, False), ("mask", 0.0, False), ("mask", 2.0, True)]
)  # fmt: skip
def test_tokens_beyond_the_lag_are_masked_or_a_fault(sound: Path, at_limit: str, masked: float, ok: bool) -> None:
    settings: Any = SimpleNamespace(rollout=SimpleNamespace(max_lag=1, at_limit=at_limit))
    run = records.Run(RunDirectory(sound), settings, [], {5: {"train/version": 4.0, "train/masked_tokens": masked}}, [5])
    made = records.Chain("t5-0-0", 5, "a", 0, 0, "finished", True, True, 1.0, 3, Counter({2: 2, 3: 1}), None, (5, 0))
    run.chains[5].append(made)
    check = Check("lag", "")
    assert "at most 2 versions in 1 chains; rollout.max_lag is 1" in doctor.CHECKS["lag"][1](run, check)
    assert check.ok is ok


def test_rows_that_were_changed_since_are_no_fault_of_the_run(run: Path, tmp_path: Path) -> None:
    rows = tmp_path / "other.jsonl"
    text = (run / "config.toml").read_text()
    rows.write_text("".join(json.dumps(row | {"question": f"Else {i}"}) + "\n" for i, row in enumerate(ROWS)))
    old = next(line for line in text.splitlines() if line.startswith("train = "))
    (run / "config.toml").write_text(text.replace(old, f"train = {json.dumps(str(rows))}"))
    assert "the rows have changed since the run" in str(checks(run)["draws"].skipped)
    rows.unlink()
    assert "the rows cannot be loaded" in str(checks(run)["draws"].skipped)
    (run / "config.toml").unlink()
    found = checks(run)
    assert found["groups"].skipped == "config.toml is missing or cannot be read"
    assert all(check.ok for check in found.values())


def test_an_altered_checkpoint_is_found(run: Path) -> None:
    file = run / "checkpoints" / "step-000002" / "trainer.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert checks(run)["checkpoints"].problems == ["step-000002: missing or altered: trainer.pt"]


def test_a_checkpoint_whose_optimizer_is_of_a_later_step_is_found(run: Path) -> None:
    from agentfly.learn.model.storage import load_state, save_state
    from agentfly.runs.checkpoints import MANIFEST, _seal

    folder = run / "checkpoints" / "step-000002"
    state = load_state(folder / "trainer.pt")
    for values in state["learner"]["optimizer"]["adam"]["state"].values():
        values["step"] += 1
    (folder / MANIFEST).unlink()
    save_state(folder / "trainer.pt", state)
    _seal(folder, 2)
    (problem,) = checks(run)["checkpoints"].problems
    assert re.match(r"step-000002: the averages of 'optimizer' hold \d steps instead of \d: resume another", problem)


def test_a_run_without_the_version_of_its_steps_says_that_the_lag_was_not_checked(run: Path) -> None:
    sql(run, "DELETE FROM metrics WHERE name = 'train/version'")
    found = checks(run)
    assert found["lag"].skipped == "the run did not record train/version"
    assert all(check.ok for check in found.values())
    alter(run, "t2-0-1", set_reply(versions=lambda values: [*values[:-1], 2]))
    assert any("cannot be beyond 1" in problem for problem in checks(run)["versions"].problems)


def test_a_run_in_progress_may_have_half_a_step(run: Path) -> None:
    sql(run, "DELETE FROM metrics WHERE step = 3")
    sql(run, "DELETE FROM trajectories WHERE id LIKE 't3-1-%'")
    shutil.rmtree(run / "checkpoints" / "step-000003")
    found = checks(run)
    assert {name: check.problems for name, check in found.items() if not check.ok} == {}
    assert found["steps"].evidence == "steps 1 to 2; 3 chains of an unfinished step"
    alter(run, "t3-0-0", set_reply(logprobs=lambda values: [1.0, *values[1:]]))
    assert not checks(run)["tokens"].ok  # its chains are checked all the same


def test_a_checkpoint_that_is_written_meanwhile_is_no_fault(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_on(*arguments: Any) -> None:
        shutil.copytree(run / "checkpoints" / "step-000003", run / "checkpoints" / "step-000004")
        shutil.rmtree(run / "checkpoints" / "step-000001")
        records.read_chains(*arguments)

    monkeypatch.setattr(report, "read_chains", train_on)
    assert diagnose(run).ok


def test_an_evaluation_has_no_steps_to_check(tmp_path: Path, sound: Path) -> None:
    with RunStore(sound / "run.db", readonly=True) as store, RunStore(tmp_path / "run.db") as copy:
        copy.add_trajectories(0, "validation", store.trajectories(split="validation", step=0))
        copy.add_metrics(0, {"validation/success": 0.5})
    found = checks(tmp_path)
    assert found["steps"].skipped == "no training step is stored"
    assert found["tokens"].skipped is None
    assert all(check.ok for check in found.values())
    with pytest.raises(ConfigError, match="there is no run folder"):
        diagnose(tmp_path / "none")


def test_many_problems_are_counted(run: Path) -> None:
    sql(run, "UPDATE trajectories SET total_reward = 9")
    check = checks(run)["rewards"]
    assert len(check.problems) == doctor.MAX_TOLD < check.num_problems


def test_the_command_prints_evidence_and_fails_if_something_is_wrong(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(run)]) == 0
    told = capsys.readouterr().out
    assert "ok      tokens      ids, mask, log-probs and versions of every chain agree: 18 train chains" in told.replace(
        "\n", " "
    )
    assert told.endswith(f"{len(doctor.CHECKS)} checks hold, 0 do not, 0 skipped\n")
    sql(run, "UPDATE trajectories SET total_reward = 9 WHERE split = 'train'")
    assert main(["doctor", str(run)]) == 1
    told = capsys.readouterr().out
    assert "WRONG   rewards" in told
    assert "and 13 more" in told
    assert main(["doctor", str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [check["name"] for check in found["checks"] if not check["ok"]] == ["rows", "rewards"]


def test_a_bad_mask_is_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is not stored. The doctor makes it as training does, so it sees what training has seen."""
    made = records.to_samples

    def shifted(trajectory: Trajectory) -> Any:
        return [replace(row, mask=[0, *row.mask[:-1]]) for row in made(trajectory)]

    monkeypatch.setattr(records, "to_samples", shifted)
    assert "the mask covers" in checks(run)["tokens"].problems[0]


def test_an_id_cannot_control_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunStore(run / "run.db") as store:
        twin = store.trajectory("t2-0-1")
        twin.id, twin.task = "\x1b[2J[red]", Task("\x1b]0;x\x07", ())
        store.add_trajectories(2, "train", [twin, twin])
    assert main(["doctor", str(run)]) == 1
    told = capsys.readouterr().out
    assert "\x1b[2J" not in told
    assert "[red]" in told
    assert decode(encode(twin)) == twin


def test_a_metric_that_differs_from_its_copy_is_found(run: Path) -> None:
    with RunStore(run / "run.db", readonly=True) as store:
        values = store.metrics_by_step()[2]
    copy = run / "metrics.jsonl"
    copy.write_text(json.dumps({"step": 2, "time": 1.0, **values}) + '\n{"step": 3, "tra')  # killed while it wrote
    assert diagnose(run).ok
    sql(run, "UPDATE metrics SET value = 1.01 * value WHERE step = 2 AND name = 'train/grad_norm'")
    assert [name for name, check in checks(run).items() if not check.ok] == ["metrics"]
