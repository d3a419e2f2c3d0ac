"""The comparison of algorithms: several runs at once, what a file holds is not run again, and curves are drawn from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SMALL = ["--steps", "2", "--tasks", "2", "--held-out", "2", "--set", "rollout.num_chains=2", "--jobs", "2"]


def compare(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    import algorithms

    monkeypatch.setattr(sys, "argv", ["algorithms.py", *words, *SMALL])
    algorithms.main()


def test_runs_are_made_once_with_their_curves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import curves

    file = tmp_path / "runs.json"
    where = ["--json", str(file), "--seeds", "0"]
    compare(monkeypatch, *where, "--algorithms", "grpo")
    first = json.loads(file.read_text())["runs"]
    compare(monkeypatch, *where, "--algorithms", "ppo", "grpo", "distill", "--teacher", "pocket")
    told = capsys.readouterr()
    assert "3/3" in told.err and told.err.count("grpo-1-0") == 1
    held = json.loads(file.read_text())
    assert held["command"].startswith("python benchmarks/algorithms.py --json ")
    assert [run["name"] for run in held["runs"]] == ["grpo-1-0", "ppo-1-0", "distill-1-0"]
    assert held["runs"][0] == first[0], "it was not made again"
    assert "loss.reference=pocket" in held["runs"][2]["command"]
    for run in held["runs"]:
        assert [row["step"] for row in run["steps"]] == [0, 1, 2]
        assert [row["rollout/success"] for row in run["steps"][1:]] == run["success"]
        assert [row["validation/success"] for row in run["steps"] if "validation/success" in row] == [
            run["before"],
            run["after"],
        ]
        assert f"| {run['algorithm']} | 1 | 1 |" in told.out
    drawn = tmp_path / "drawn.svg"
    words = ["draw", str(file), "--svg", str(drawn), "--metric", "rollout/success", "--only", "grpo", "ppo"]
    assert curves.main(words) == 0
    assert "ppo" in drawn.read_text() and "distill" not in drawn.read_text()
    assert curves.main([*words[:-1], "opo"]) == 2
    with pytest.raises(SystemExit, match=r"holds runs with other settings \(agentfly train quickstart algorithm=grpo"):
        compare(monkeypatch, *where, "--algorithms", "ppo", "--minibatches", "2", "--recipe", "search")


def test_a_teacher_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare(monkeypatch, "--algorithms", "distill")
    assert "distill needs --teacher" in capsys.readouterr().err
