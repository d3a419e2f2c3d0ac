"""`agentfly envs`: every verb works for every world that can be used here, and bad input is one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly import plugins
from agentfly.cli import main
from agentfly.envs.worlds import describe_world

USABLE = [world.name for world in map(describe_world, plugins.names("envs")) if not world.problem]


def test_the_list_names_every_world_with_tasks_tools_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "list"]) == 0
    shown = capsys.readouterr().out
    for name in plugins.BUILTIN["envs"]:
        assert f"\n{name} " in f"\n{shown}"
    assert "tasks: code, easy_code" in shown
    assert "tools: python, code_interpreter" in shown


@pytest.mark.parametrize("name", USABLE)
def test_every_world_can_be_played_from_the_command_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["help", "quit"]
    monkeypatch.setattr("builtins.input", lambda prompt: given.pop(0))
    assert main(["envs", "play", name]) == 0
    shown = capsys.readouterr().out
    assert "tools:" in shown
    assert given == []


def test_a_reader_who_goes_away_ends_the_play_without_a_word() -> None:
    """As `agentfly envs play webshop </dev/null | head -3` does; here the pipe has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "agentfly", "envs", "play", "webshop"],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=800,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_bench_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert main(["envs", "bench", "guess", "--instances", "1,2", "--seconds", "0.05", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [row["instances"] for row in rows] == [1, 2]
    assert all(row["steps_per_s"] > 0 for row in rows)
    assert "steps/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["check"], "needs a name"),
        (["play"], "needs a name"),
        (["bench"], "needs a name"),
        (["play", "gues"], "did you mean 'guess'"),
        (["play", "guess", "--index", "7"], "only 2 such tasks"),
        (["play", "guess", "--index", "-1"], "counts from 0"),
        (["play", "alfworld", "--index", "99999"], "--index 99999: there are only 10,000 such tasks, counted from 0"),
        (["play", "code", "--index", "99999"], "--index 99999: there are only"),
        (["play", "search", "--index", "999999"], "--index 999999: there are only"),
        (["play", "code", "--split", "tst"], "no split is called"),
        (["play", "code", "--task-set", "cod"], "did you mean"),
        (["bench", "guess", "--instances", "1,x"], "whole numbers"),
        (["bench", "guess", "--instances", "0"], "whole numbers"),
        (["bench", "guess", "--seconds", "0"], "above 0"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
