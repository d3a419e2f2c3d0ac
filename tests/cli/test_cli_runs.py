"""The commands that look at runs, over a store written by hand: what they print, write and refuse."""

from __future__ import annotations

import csv
import json
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from agentfly import ReactAgent
from agentfly.cli import main
from agentfly.runs import RunStore, import_jsonl
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.training.demonstrations import demo_rows, to_trajectory
from agentfly.types import Completion, Message, Outcome, Task, TokenRecord, ToolCall, ToolResult, Trajectory, Turn

EVIL = "<b>\x1b[2J[red]\u202e"


def reply(text: str, calls: tuple[ToolCall, ...] = ()) -> Completion:
    ids = [*text.encode("utf-8", "replace"), 257]
    size = len(ids)
    return Completion(text=text, token_ids=ids, logprobs=[-0.5] * size, versions=[0] * size, tool_calls=calls)


def chain(name: str, task: str, number: int, reward: float | None, *, text: str = "", question: str = "") -> Trajectory:
    """A chain of two turns with one tool call."""
    asked = Message("user", question or f"What is {task}?")
    call = ToolCall("add", {"a": 1, "b": 2})
    first, second = f"Action: add {number}", text or f"Answer: {number}"
    messages = [
        Message("system", "Use tools."),
        asked,
        Message("assistant", first, (call,)),
        Message("user", "Observation: 3"),
        Message("assistant", second),
    ]
    turns = [
        Turn([1, 2, 3], True, reply(first), (call,), (ToolResult(observation="3"),)),
        Turn([4], False, reply(second)),
    ]
    outcome = Outcome.WORLD_FAILURE if reward is None else Outcome.FINISHED
    parts = {} if reward is None else {"exact": reward}
    row = Task(task, (asked,), {"answer": "3"})
    return Trajectory(
        name, row, number, messages, turns, outcome, "it broke" if reward is None else None, second, reward, parts
    )


def make_run(folder: Path, *, seed: int = 0, lr: float = 1e-4, steps: int = 4, gain: float = 0.1, won: int = 2) -> Path:
    """A finished run: `steps` steps of two tasks with three chains each, and a validation of eight tasks at the end."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'algorithm = "grpo"\nseed = {seed}\n[agent]\nmodel = "models/pocket"\n[data]\ntrain = "arithmetic"\n'
        f'[train]\nsteps = {steps}\nlr = {lr}\n[run]\nname = "{folder.name}"\n'
    )
    with RunStore(folder / "run.db") as store:
        for step in range(1, steps + 1):
            chains = [
                chain(f"t{step}-{task}-{number}", str(task), number, None if (task, number) == (1, 2) else float(number % 2))
                for task in range(2)
                for number in range(3)
            ]
            store.add_trajectories(step, "train", chains)
            store.add_metrics(step, {"reward/mean": gain * step + 0.01 * seed, "train/skipped": 0.0, "time/step_s": 2.0})
        held = [chain(f"v{steps}-{i}-0", f"h{i}", 0, float(i < won)) for i in range(8)]
        store.add_trajectories(steps, "validation", held)
        store.add_metrics(steps, {"validation/success": won / 8})
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of one config, a run of another learning rate, and a file that is no run."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        make_run(folder / f"seed{seed}", seed=seed)
    make_run(folder / "fast", lr=1e-3, gain=0.2, won=8)
    (folder / "broken").mkdir()
    (folder / "broken" / "run.db").write_text("this is no database, only text")
    return folder


def out(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> str:
    assert main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


# ---- runs ----------------------------------------------------------------------------------------------------------------


def test_runs_are_listed_with_state_model_step_and_results(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {line.split()[1]: line for line in out(capsys, "runs", runs).splitlines()[1:]}
    assert set(lines) == {"seed0", "seed1", "seed2", "fast", "broken"}
    for word in ("finished", "pocket", "arithmetic", "grpo", "4/4", "0.800", "1.000"):
        assert word in lines["fast"]
    assert "▁" in lines["fast"] and "█" in lines["fast"]
    assert "run store" in lines["broken"]


def test_runs_can_be_chosen_and_sorted_by_columns_and_metrics(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def names(*words: str) -> list[str]:
        return [run["name"] for run in json.loads(out(capsys, "runs", runs, "--json", *words))]

    assert names("--where", "reward/mean>0.5") == ["fast"]
    assert sorted(names("--where", "reward/mean <= 0.415", "--where", "seed!=2")) == ["seed0", "seed1"]
    assert names("--where", "state=finished", "--where", "name~SEED1") == ["seed1"]
    assert names("--where", "validation>=1") == ["fast"]
    assert names("--sort", "reward/mean") == ["fast", "seed2", "seed1", "seed0", "broken"]
    assert names("--sort", "reward/mean", "--reverse") == ["broken", "seed0", "seed1", "seed2", "fast"]
    assert names("--sort", "name")[:2] == ["broken", "fast"]
    assert names("--where", "no/such>0") == []
    assert out(capsys, "runs", runs, "--where", "no/such>0").endswith("fit\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--where", "reward/mean"], "is not a condition"),
        (["--where", "reward/mean>high"], "'high' is not a number"),
        (["--where", "colour=red"], "no column 'colour'"),
        (["--sort", "colour"], "cannot be sorted by 'colour'"),
    ],
)
def test_a_condition_that_means_nothing_is_refused(
    words: list[str], sentence: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in out(capsys, "runs", runs, *words, code=2)


def test_a_folder_without_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, "runs", tmp_path) == f"no runs in {tmp_path}\n"
    assert json.loads(out(capsys, "runs", tmp_path, "--json")) == []
    assert "there is no folder" in out(capsys, "runs", tmp_path / "none", code=2)


# ---- compare -------------------------------------------------------------------------------------------------------------


def test_two_runs_are_compared_over_the_same_held_out_tasks(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(out(capsys, "compare", runs / "seed0", runs / "fast", "--json"))
    assert found["config"]["train.lr"] == [1e-4, 1e-3]
    assert found["results"]["reward/mean"] == [pytest.approx(0.4), pytest.approx(0.8)]
    held = found["held_out"]
    assert held["tasks"] == {"a": 8, "b": 8, "both": 8}
    test = held["test"]
    assert (test["better"], test["worse"], test["equal"]) == (6, 0, 2)
    assert (test["mean_a"], test["mean_b"], test["difference"]) == (0.25, 1.0, 0.75)
    assert test["p_sign"] == test["p_permutation"] == 2 / 64
    told = out(capsys, "compare", runs / "seed0", runs / "fast")
    assert "train.lr" in told and "8 tasks in common" in told and "B is better" in told


def test_chains_without_a_score_are_counted_and_bound_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(tmp_path / "a", won=4), make_run(tmp_path / "b", won=4)
    with RunStore(b / "run.db") as store:  # of the 8 tasks, the last two failed ones have no score
        held = [chain(f"v9-{i}-0", f"h{i}", 0, None if i > 5 else float(i < 4)) for i in range(8)]
        store.add_trajectories(9, "validation", held)
        store.add_metrics(9, {"validation/success": 4 / 6})
    held_out = json.loads(out(capsys, "compare", a, b, "--json"))["held_out"]
    assert held_out["chains"] == {"a": {"scored": 8, "all": 8}, "b": {"scored": 6, "all": 8}}
    assert held_out["bounds"] == [0.0, 0.25]
    told = out(capsys, "compare", a, b)
    assert "2 of 8 chains of B have no score and are left out: with them, B - A is between 0.000 and 0.250" in told
    assert "left out" not in out(capsys, "compare", a, a)


def test_figures_that_an_older_run_did_not_record_are_those_of_its_stored_chains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    with RunStore(b / "run.db") as store:
        held = [chain(f"v9-{i}-{n}", f"h{i}", n, float(n > i)) for i in range(4) for n in range(2)]
        for each in held:
            each.foreign_marks = ["Observation:"]
            each.turns[0].results = (ToolResult(observation="none", error="unknown_tool" if each.chain else None),)
        held[0].turns[0] = Turn([1], True, reply("Action: add\nObservation: 4"), held[0].turns[0].calls)
        store.add_trajectories(9, "validation", held)
        store.add_metrics(9, {"validation/success": 1 / 8})
    found = json.loads(out(capsys, "compare", a, b, "--json"))["results"]
    assert found["validation/written_observations"] == [None, 1 / 8]  # the chains of A do not say how observations begin
    assert found["validation/unknown_tool_rate"] == [0.0, 4 / 7]
    assert found["validation/pass_all_2"] == [None, 0.0] and found["validation/pass_at_2"] == [None, 0.25]
    assert "judged" not in str(found) and "cost/dollars" not in found
    row = next(line for line in out(capsys, "compare", a, b).splitlines() if "written_observations" in line)
    assert row.split()[3:8:2] == ["-", "0.125", "-"]
    assert "wrote itself" in out(capsys, "show", b, "--id", "v9-0-0")
    shown = json.loads(out(capsys, "show", a, "--id", "v4-0-0", "--json"))
    assert shown["honesty"] == {"unknown_tools": 0, "bad_arguments": 0, "written": None, "unsupported": True}


def test_equal_ids_of_different_rows_are_not_the_same_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, question in (("a", "one?"), ("b", "two?")):
        with RunStore(tmp_path / f"{name}.db") as store:
            store.add_trajectories(0, "validation", [chain("v0-0-0", "7", 0, 1.0, question=question)])
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.db").rename(tmp_path / name / "run.db")
    assert "no held-out task in common (A has 1, B has 1)" in out(capsys, "compare", tmp_path / "a", tmp_path / "b")
    assert json.loads(out(capsys, "compare", tmp_path / "a", tmp_path / "b", "--json"))["held_out"]["test"] is None


def test_the_validation_to_compare_can_be_chosen(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "own", won=2)
    with RunStore(run / "run.db") as store:
        store.add_trajectories(2, "validation", [chain(f"v2-{i}-0", f"h{i}", 0, 1.0) for i in range(8)])
        store.add_metrics(2, {"validation/success": 1.0})
    for when, steps, mean in (("last", [4, 4], 0.25), ("best", [2, 4], 1.0)):
        held = json.loads(out(capsys, "compare", run, runs / "seed0", "--step", when, "--json"))["held_out"]
        assert (held["steps"], held["test"]["mean_a"]) == (steps, mean)
    assert "no validation of step 3; it has those of 2, 4" in out(capsys, "compare", run, run, "--step", "3", code=2)
    assert "last, best or the number" in out(capsys, "compare", run, run, "--step", "x", code=2)
    assert "neither run has the metric" in out(capsys, "compare", run, run, "--metric", "no/such", code=2)


# ---- plot ----------------------------------------------------------------------------------------------------------------


def test_seeds_are_one_line_with_a_band(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [runs / name for name in ("seed0", "seed1", "seed2", "fast")]
    (panel,) = json.loads(out(capsys, "plot", *folders, "--json"))
    lines = {line["label"]: line for line in panel["lines"]}
    assert set(lines) == {"lr 0.0001 (3 runs)", "lr 0.001"}
    three = lines["lr 0.0001 (3 runs)"]
    assert three["points"][0] == [1.0, pytest.approx(0.11)]
    assert three["band"][0] == [1.0, pytest.approx(0.10), pytest.approx(0.12)]
    (panel,) = json.loads(out(capsys, "plot", *folders, "--json", "--band", "std", "--smooth", "0.5"))
    three = next(line for line in panel["lines"] if "3 runs" in line["label"])
    assert three["band"][0] == [1.0, pytest.approx(0.10), pytest.approx(0.12)]  # the deviation of 0.10, 0.11, 0.12 is 0.01
    assert three["points"][1][1] == pytest.approx((0.5 * 0.11 + 0.21) / 1.5)


def test_a_plot_is_drawn_in_the_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = out(capsys, "plot", runs / "fast", "--metric", "reward/mean", "--metric", "time/step_s")
    assert "reward/mean" in told and "time/step_s" in told
    assert any(0x2800 < ord(character) <= 0x28FF for character in told)


def test_a_plot_is_written_as_svg(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "curves.svg"
    out(capsys, "plot", runs / "seed0", runs / "seed1", runs / "fast", "-o", path, "--log")
    root = ET.parse(path).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert len(list(root.iter(f"{svg}polyline"))) == 2
    assert len(list(root.iter(f"{svg}polygon"))) == 1
    assert [item.name for item in tmp_path.iterdir()] == ["curves.svg"]


def test_a_plot_is_written_as_png(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'agentfly[plot]'")
    for name, start in (("c.png", b"\x89PNG"), ("c.pdf", b"%PDF")):
        out(capsys, "plot", runs / "seed0", runs / "seed1", "-o", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_without_matplotlib_a_png_names_the_extra(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "agentfly.watch.charts.matplotlib_chart", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = out(capsys, "plot", runs / "seed0", "-o", tmp_path / "c.png", code=2)
    assert "pip install 'agentfly[plot]'" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--metric", "reward/men"], "they have reward/mean"),
        (["-o", "curves.gif"], "curves are written to .svg, .png or .pdf"),
        (["--smooth", "1"], "less than 1"),
        (["--x", "time"], "did not record times"),
        (["--columns", "0"], "at least 1"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused(
    words: list[str], sentence: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "own")
    with sqlite3.connect(run / "run.db") as db:
        if any(column[1] == "time" for column in db.execute("PRAGMA table_info(metrics)")):
            db.execute("UPDATE metrics SET time = NULL")
    db.close()
    assert sentence in out(capsys, "plot", run, *words, code=2)


def test_hours_come_from_the_recorded_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "own", steps=2)
    with sqlite3.connect(run / "run.db") as db:
        if any(column[1] == "time" for column in db.execute("PRAGMA table_info(metrics)")):
            db.execute("UPDATE metrics SET time = NULL")
    db.close()
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1000.0}\n{"step": 2, "time": 4600.0}\n{"st')
    (panel,) = json.loads(out(capsys, "plot", run, "--x", "time", "--json"))
    assert [x for x, _ in panel["lines"][0]["points"]] == [0.0, 1.0]


# ---- export --------------------------------------------------------------------------------------------------------------


def test_trajectories_come_back_as_they_were(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chains.jsonl"
    assert out(capsys, "export", runs / "seed0", path, "--split", "train", "--step", "2") == f"6 trajectories in {path}\n"
    read = list(import_jsonl(path))
    assert {(step, split) for step, split, _ in read} == {(2, "train")}
    with RunStore(runs / "seed0" / "run.db", readonly=True) as store:
        assert [each for _, _, each in read] == store.trajectories(step=2, split="train")


def test_without_a_file_the_name_is_that_of_the_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, name in (("sft", "seed0-sft.jsonl"), ("csv", "seed0.csv"), ("jsonl", "seed0.jsonl")):
        told = json.loads(out(capsys, "export", runs / "seed0", "--format", kind, "--json"))
        assert (told["file"], told["format"]) == (name, kind)
        assert (tmp_path / name).is_file()


def test_metrics_are_a_row_a_step(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(out(capsys, "export", runs / "seed0", "-", "--format", "csv").splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["validation/success"] for row in rows] == ["", "", "", "0.25"]


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_sft_rows_are_the_conversations_of_good_chains(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = lines_of(out(capsys, "export", runs / "seed0", "-", "--format", "sft"))
    assert {row["reward"] for row in rows} == {1.0}
    assert len(rows) == 8  # one of three chains of two tasks at four steps; held-out tasks are not trained on
    assert [message["role"] for message in rows[0]["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert rows[0]["messages"][2] == {"role": "assistant", "content": "Action: add 1"}  # the call is in the text, once
    assert len(lines_of(out(capsys, "export", runs / "seed0", "-", "--format", "sft", "--best", "1"))) == 2
    assert len(lines_of(out(capsys, "export", runs / "seed0", "-", "--format", "sft", "--min-reward", "0"))) == 20


class Writer(ByteRenderer):
    """A renderer that can write demonstrations."""

    def write_reply(self, before: Any, message: Message, tools: Any) -> tuple[str, list[int]]:
        return message.content, [*self.encode(message.content), 257]


def test_exported_conversations_are_demonstrations_with_the_prompts_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ['Thought: add\nAction: add\nInput: {"a": 1, "b": 2}', "Answer: 3"]
    agent = ReactAgent(ScriptedEngine(script), renderer=Writer(), tools=["add"], reward="exact_match", system="Be brief.")
    (tmp_path / "run").mkdir()
    with RunStore(tmp_path / "run" / "run.db") as store:
        store.add_trajectories(1, "train", agent.run_sync([{"question": "1 + 2?", "answer": "3"}]).trajectories)
        (stored,) = store.trajectories()
    out(capsys, "export", tmp_path / "run", tmp_path / "demos.jsonl", "--format", "sft")
    (row,) = demo_rows(str(tmp_path / "demos.jsonl"), None, 0)
    again = to_trajectory(row, 0, agent, agent.renderer, agent.schemas)
    # The agent's own system text is there once, and the ids are those that the policy read and sampled.
    assert again.messages[0].content.count("Be brief.") == 1
    assert [turn.context_ids for turn in again.turns] == [turn.context_ids for turn in stored.turns]
    assert [turn.completion.token_ids for turn in again.turns] == [turn.completion.token_ids for turn in stored.turns]


def test_dpo_rows_are_the_best_and_the_worst_of_a_group_with_one_prompt(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = lines_of(out(capsys, "export", runs / "seed0", "-", "--format", "dpo", "--step", "3"))
    assert len(rows) == 2
    for row in rows:
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["chosen"][0]["content"] == "Action: add 1"
        assert row["rejected"][0]["content"] in ("Action: add 0", "Action: add 2")
        assert (row["reward_chosen"], row["reward_rejected"]) == (1.0, 0.0)
    assert out(capsys, "export", runs / "seed0", "-", "--format", "dpo", "--min-gap", "2") == ""


def test_parquet_has_a_row_a_chain(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'agentfly[parquet]'")
    out(capsys, "export", runs / "seed0", tmp_path / "c.parquet")
    rows = pq.read_table(tmp_path / "c.parquet").to_pylist()
    assert len(rows) == 32
    failed = [row for row in rows if row["outcome"] == "world_failure"]
    assert len(failed) == 4 and failed[0]["reward"] is None
    assert json.loads(rows[0]["messages"])[2]["tool_calls"][0]["function"]["name"] == "add"
    assert [path.name for path in tmp_path.iterdir()] == ["c.parquet"]


def test_texts_that_utf8_cannot_hold_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunStore(tmp_path / "run.db") as store:
        store.add_trajectories(1, "train", [chain("t1-0-0", "0", 0, 1.0, text="half \ud800 a pair")])
    for words in (["--format", "sft"], ["--format", "jsonl"]):
        assert "\\ud800" in out(capsys, "export", tmp_path, "-", *words)
    if "pyarrow" in sys.modules or pytest.importorskip("pyarrow", reason="no pyarrow: pip install 'agentfly[parquet]'"):
        out(capsys, "export", tmp_path, tmp_path / "c.parquet")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["x.csv", "--split", "train"], "metrics have none"),
        (["x.csv", "--step", "1"], "exported whole"),
        (["x.txt"], "to a .jsonl file"),
        (["x.jsonl", "--best", "1"], "--best is"),
        (["x.jsonl", "--format", "sft", "--best", "0"], "at least 1"),
        (["x.jsonl", "--min-gap", "1"], "--min-gap is"),
        (["-", "--format", "parquet"], "stdout"),
        (["no/such/folder/x.jsonl"], "cannot be written"),
        (["x.jsonl", "--outcome", "fnished"], "no outcome is called"),
    ],
)
def test_an_export_that_means_nothing_is_refused(
    words: list[str], sentence: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in out(capsys, "export", runs / "seed0", *words, code=2)


# ---- show ----------------------------------------------------------------------------------------------------------------


def test_chains_are_chosen_by_any_condition(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*words: Any) -> list[str]:
        return [row["id"] for row in lines_of(out(capsys, "show", runs / "seed0", "--json", "--limit", 99, *words))]

    assert ids("--split", "train")[0] == "t4-0-0"
    assert ids("--step", 2, "--task", 1, "--min-reward", 1) == ["t2-1-1"]
    assert ids("--outcome", "world_failure", "--from-step", 3) == ["t4-1-2", "t3-1-2"]
    assert ids("--id", "t3-0-1") == ["t3-0-1"]
    assert ids("--text", "Answer: 2", "--step", 1) == ["t1-0-2", "t1-1-2"]
    assert len(ids("--split", "validation")) == 8
    assert ids("--sort", "reward", "--step", 1, "--limit", 2) == ["t1-0-0", "t1-0-2"]
    assert ids("--step", 77) == []
    assert out(capsys, "show", runs / "seed0", "--step", 77) == "no trajectory matches\n"
    assert "no trajectory" in out(capsys, "show", runs / "seed0", "--id", "none", code=2)
    assert "at least 1" in out(capsys, "show", runs / "seed0", "--limit", 0, code=2)


def test_show_says_what_the_learner_recorded_and_not_what_it_might_have_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "own", steps=1)
    with RunStore(run / "run.db") as store:
        sizes = [len(turn.completion.token_ids) for turn in store.trajectory("t1-0-1").turns]
        partly = bytes([1] * 3 + [0] * (sizes[0] - 3) + [0] * sizes[1])
        store.add_tokens(
            1,
            [
                TokenRecord("t1-0-0", -0.5, sum(sizes)),  # all tokens
                TokenRecord("t1-0-1", 1.0, 3, {"trained": ("B", partly)}),  # a lag limit left the others out
                TokenRecord("t1-0-2", 0.0, 0),  # none: its advantage is 0
                TokenRecord("t1-1-0", 0.5, 0),  # none: all are too old
            ],
        )
    assert "and trained on" in out(capsys, "show", run, "--id", "t1-0-0")
    partial = out(capsys, "show", run, "--id", "t1-0-1")
    assert f"turn 1 · 3 of {sizes[0]} tokens trained" in partial
    assert f"turn 2 · 0 of {sizes[1]} tokens trained" in partial
    assert "┆ Answer: 1" in partial and "┆ sampled by the policy, left out of the loss" in partial
    assert "advantage 1.000" in partial
    assert "not trained on: its advantage is 0" in out(capsys, "show", run, "--id", "t1-0-2")
    assert "not trained on: its tokens were older than rollout.max_lag versions" in out(capsys, "show", run, "--id", "t1-1-0")
    assert "not trained on: the chain ended in world_failure" in out(capsys, "show", run, "--id", "t1-1-2")
    (row,) = lines_of(out(capsys, "show", run, "--id", "t1-0-1", "--json"))
    assert [turn["trained"] for turn in row["turns"]] == [3, 0]


def test_show_changes_nothing_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "own")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    out(capsys, "show", run, "--limit", 3)
    out(capsys, "query", run, "select count(*) from trajectories")
    out(capsys, "runs", tmp_path)
    after = {path.name: path.read_bytes() for path in run.iterdir() if path.name in before}
    assert after == before


# ---- query ---------------------------------------------------------------------------------------------------------------


def test_a_select_is_a_table_or_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "select step, count(*) as chains, null as none, 0.5 as half from trajectories where split = 'train' group by step"
    rows = lines_of(out(capsys, "query", runs / "seed0", sql, "--json"))
    assert rows == [{"step": step, "chains": 6, "none": None, "half": 0.5} for step in (1, 2, 3, 4)]
    assert "4 rows" in out(capsys, "query", runs / "seed0", sql)
    assert main(["query", str(runs / "seed0"), sql, "--limit", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2 and "only the first 2 rows" in captured.err
    assert "trajectories" in out(capsys, "query", runs / "seed0")
    assert lines_of(out(capsys, "query", runs / "seed0", "select 1 as a, 2 as a", "--json")) == [{"a": 1, "a:1": 2}]


@pytest.mark.parametrize(
    "sql",
    [
        "delete from metrics",
        "insert into metrics select * from metrics",
        "create table x (y)",
        "attach database '{folder}/new.db' as other",
        "vacuum into '{folder}/new.db'",
        "pragma journal_mode = delete",
        "pragma writable_schema = on",
        "select load_extension('x')",
        "select 1; delete from metrics",
        "begin",
        "selec 1",
        "",
        "-- nothing",
        "select * from nothing",
    ],
)
def test_a_query_only_reads(sql: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (runs / "seed0" / "run.db").read_bytes()
    assert out(capsys, "query", runs / "seed0", sql.format(folder=tmp_path), code=2).count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert (runs / "seed0" / "run.db").read_bytes() == before


def test_a_query_that_takes_too_long_is_interrupted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endless = "with recursive n(x) as (select 1 union all select x + 1 from n) select max(x) from n"
    assert "took longer than 0.2 s" in out(capsys, "query", runs / "seed0", endless, "--timeout", "0.2", code=1)


def test_control_codes_of_a_model_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunStore(tmp_path / "run.db") as store:
        store.add_trajectories(1, "train", [chain("t1-0-0", "0", 0, 1.0, text=EVIL)])
    for words in (["show", tmp_path], ["query", tmp_path, "select prediction from trajectories"]):
        told = out(capsys, *words)
        assert "\x1b" not in told
        assert "[red]" in told


@pytest.mark.parametrize("command", ["compare", "plot", "export", "show", "query"])
def test_a_run_that_is_not_there_is_one_sentence(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"compare": [tmp_path / "b"], "query": ["select 1"], "export": ["x.jsonl"]}.get(command, [])
    assert "there is no run folder" in out(capsys, command, tmp_path / "none", *more, code=2)


# ---- lists ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["recipes"], ["algorithms"], ["tools"], ["rewards"], ["envs", "list"], ["config"]])
def test_every_list_is_also_json(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(out(capsys, *command, "--json"))
    assert len(rows) > 2
    assert all(row.get("name") or row.get("key") for row in rows)


def test_a_recipe_is_also_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(out(capsys, "recipes", "quickstart", "--json"))["agent"]["model"] == "pocket"


def test_a_closed_pipe_ends_a_command_without_a_traceback(runs: Path) -> None:
    words = [sys.executable, "-m", "agentfly", "query", str(runs / "seed0")]
    sql = "with recursive n(x) as (select 1 union all select x + 1 from n limit 300000) select x from n"
    with subprocess.Popen(
        [*words, sql, "--json", "--limit", "300000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(timeout=800) == 141
    assert "Traceback" not in error and "BrokenPipe" not in error


@pytest.mark.parametrize("command", ["show", "query", "export", "export-model", "compare", "plot", "runs"])
def test_an_address_in_place_of_a_folder_is_named_as_it_was_given(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    address = "http://127.0.0.1:9/runs/a"
    more = {"export-model": ["out"], "compare": ["b"]}
    assert main([command, address, *more.get(command, [])]) == 2
    assert f"folder {address}" in capsys.readouterr().err
