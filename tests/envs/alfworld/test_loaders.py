"""Game files: the published folders, JSONL files of many games, and what is wrong with a file, named with its line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentfly.data import load_tasks
from agentfly.envs.alfworld.engine import State
from agentfly.envs.alfworld.loaders import find_games, load_game
from agentfly.envs.alfworld.oracle import plan
from agentfly.envs.alfworld.tasks import alfworld_games, open_game
from agentfly.errors import ConfigError, DataError
from tests.envs.alfworld.house import INIT, problem

GRAMMAR = 'grammar :: """ { "task": [ { "rhs": "Your task is to: put some mug on shelf." } ] } """;'


def write_game(root: Path, split: str, task: str, trial: str, **changes: Any) -> Path:
    """A game.tw-pddl as the original writes it, in its standard folder."""
    path = root / "json_2.1.1" / split / task / trial / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    row = {"pddl_domain": "(define ...)", "grammar": GRAMMAR, "pddl_problem": problem(), "solvable": True, **changes}
    path.write_text(json.dumps(row), encoding="utf-8")
    return path


def write_lines(path: Path, *lines: Any) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def row(name: str = "valid_seen/pick-1/trial_1", **changes: Any) -> dict[str, Any]:
    return {
        "game": name,
        "task": "put a mug in shelf",
        "pddl_problem": problem(),
        "walkthrough": None,
        "solvable": True,
        **changes,
    }


def test_the_standard_folders_are_read_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "valid_seen", "valid_unseen"):
        write_game(tmp_path, split, f"pick_and_place_simple-Mug-None-Shelf-{split}", "trial_T1")
    write_game(tmp_path, "train", "pick_and_place_simple-Pen-None-Desk-2", "trial_T2")
    write_game(tmp_path, "train", "pick_and_place_simple-AppleSliced-None-Desk-3", "trial_T3")
    write_game(tmp_path, "train", "pick_and_place_with_movable_recep-Pen-Mug-Desk-4", "trial_T4")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert [len(find_games(split)) for split in ("train", "valid_seen", "valid_unseen")] == [2, 1, 1]
    assert find_games("validation") == find_games("valid_seen") and find_games("test") == find_games("valid_unseen")
    (task,) = load_tasks("alfworld_games", split="test")
    assert task.id == "valid_unseen/pick_and_place_simple-Mug-None-Shelf-valid_unseen/trial_T1"
    assert task.messages[0].content.endswith("\nYour task is to: put some mug on shelf.")
    game = open_game(task.fields)
    assert game is open_game(task.fields), "a game that was opened is kept"
    assert plan(State(game)) == ["go to desk 1", "take mug 2 from desk 1", "move mug 2 to shelf 1"]


def test_a_task_without_a_sentence_gets_one_from_its_goal(tmp_path: Path) -> None:
    path = write_game(tmp_path, "train", "pick", "trial", grammar='"Your task is to: UNKNOWN GOAL"')
    assert load_game(str(path)).objective == "Your task is to: put a mug in shelf."


@pytest.mark.parametrize("name", ["games_train.jsonl", "games_train.jsonl.gz"])
def test_a_file_of_many_games_is_read(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / name, row("a/b/c", walkthrough=["look"]), "", row("d/e/f", task="put two mugs."))
    rows = alfworld_games("train", path=tmp_path)
    assert sorted(rows, key=lambda one: one["game"]) == sorted(alfworld_games("train", path=path), key=lambda one: one["game"])
    found = {one["id"]: load_game(one["game"]) for one in rows}
    assert found["a/b/c"].walkthrough == ("look",)
    assert found["d/e/f"].objective == "Your task is to: put two mugs."
    assert {one["game"] for one in rows} == {f"{path}#1", f"{path}#3"}


def test_games_that_cannot_be_solved_are_left_out(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", row("a"), row("b", solvable=False), row("pick-AppleSliced-1"))
    assert [one["id"] for one in alfworld_games("train", path=path)] == ["a"]


def test_a_game_file_that_is_marked_as_unsolvable_is_passed_over(tmp_path: Path) -> None:
    """As in ALFWorld itself, also in the published folders; the count is made up of the others."""
    for number in range(4):
        write_game(tmp_path, "train", f"pick-{number}", "trial", solvable=number > 1)
    assert {one["id"] for one in alfworld_games("train", 2, path=tmp_path)} == {"train/pick-2/trial", "train/pick-3/trial"}
    assert len(alfworld_games("train", path=tmp_path)) == 2
    with pytest.raises(DataError, match="marked as unsolvable"):
        load_game(find_games("train", tmp_path)[0])


def test_where_every_game_is_left_out_that_is_said(tmp_path: Path) -> None:
    write_game(tmp_path, "train", "pick-1", "trial", solvable=False)
    path = write_lines(tmp_path / "some.jsonl", row("b", solvable=False))
    for place in (tmp_path, path):
        with pytest.raises(DataError, match="no game of the split 'train' can be played") as caught:
            alfworld_games("train", path=place)
        assert str(caught.value).startswith(str(place))
    with pytest.raises(ConfigError, match="count must be at least 1"):
        alfworld_games("train", 0, path=tmp_path)


def test_the_games_are_looked_for_where_alfworlds_own_download_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_game(tmp_path / ".cache" / "alfworld", "valid_seen", "pick-1", "trial")
    assert [one["id"] for one in alfworld_games("validation")] == ["valid_seen/pick-1/trial"]


def test_a_row_may_carry_its_problem_itself() -> None:
    assert open_game({"pddl_problem": problem(), "task": "put it away."}).objective == "Your task is to: put it away."
    assert open_game({"pddl_problem": problem()}).objective == "Your task is to: put a mug in shelf."
    with pytest.raises(DataError, match="'task' must be"):
        open_game({"pddl_problem": problem(), "task": 3})


def test_a_file_that_was_rewritten_is_read_again(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", row(task="first"))
    assert load_game(f"{path}#1").task == "first"
    write_lines(path, row(task="second"))
    os.utime(path, ns=(1, 1))
    assert load_game(f"{path}#1").task == "second"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([row(), "{broken"], "line 2: not valid JSON"),
        ([row(), "[1, 2]"], "line 2: a game is an object"),
        ([row(), {"task": "no problem"}], "line 2: a game needs the text field 'pddl_problem'; its fields: task"),
        ([row(pddl_problem=3)], "line 1: a game needs the text field"),
        ([row(), "", row(pddl_problem="(define (problem p))")], r"line 3: the PDDL problem has no \(:objects"),
        ([row(task="")], "line 1: 'task' must be"),
        ([row(), row(pddl_problem=problem(init=f"{INIT} (openable Desk_bar_1 desk)"))], "line 2: the init fact .openable Desk"),
        ([row(pddl_problem=problem(goal="(and " * 5000 + ")" * 5000))], "line 1: the goal is nested too deeply"),
        ([row(walkthrough="look")], "line 1: 'walkthrough' must be a list"),
        ([""], "the file has no games"),
    ],
)
def test_a_malformed_game_is_named_by_its_file_and_line(tmp_path: Path, lines: list[Any], sentence: str) -> None:
    path = write_lines(tmp_path / "games_train.jsonl", *lines)
    with pytest.raises(DataError, match=sentence) as caught:
        alfworld_games("train", path=path)
    assert str(caught.value).startswith(str(path))


def test_a_broken_archive_a_broken_game_file_and_other_bytes_are_named(tmp_path: Path) -> None:
    archive = tmp_path / "games_train.jsonl.gz"
    archive.write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(DataError, match=r"games_train.jsonl.gz: not a readable file.*\(in line 1\)"):
        find_games("train", tmp_path)
    path = write_game(tmp_path / "other", "train", "pick", "trial")
    path.write_text('{"pddl_problem": ')
    with pytest.raises(DataError, match=r"game.tw-pddl: not valid JSON"):
        load_game(str(path))
    path.write_bytes(b"\xff\xfe")
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"game.tw-pddl: not UTF-8 text"):
        load_game(str(path))


def test_what_is_missing_is_named_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match="games of ALFWorld are not there; set ALFWORLD_DATA"):
        alfworld_games("train")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="nowhere: no such file or folder; set ALFWORLD_DATA"):
        alfworld_games("train")
    with pytest.raises(DataError, match=r"neither json_2.1.1/valid_unseen/ nor games_valid_unseen.jsonl"):
        alfworld_games("test", path=tmp_path)
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"there is no <task>/<trial>/game.tw-pddl in it"):
        alfworld_games("train", path=tmp_path)
    with pytest.raises(ConfigError, match="no split is called 'dev'"):
        alfworld_games("dev", path=tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "narnia",
        "home-",
        "easy-1x",
        "/etc/passwd",
        "g.jsonl#one",
        "no.jsonl#1",
        "g.jsonl#0",
        "g.jsonl#²",
        "a/game.tw-pddl",
        "x" * 9999,
        "\0.jsonl#1",
    ],
)
def test_an_unknown_game_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="unknown game|no such file") as caught:
        open_game({"game": name})
    assert len(str(caught.value)) < 400


def test_a_line_that_is_not_there_and_a_row_without_a_game_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", row())
    with pytest.raises(DataError, match="has no game on line 9"):
        load_game(f"{path}#9")
    with pytest.raises(DataError, match="has the field 'game'"):
        open_game({"question": "?"})


@pytest.mark.parametrize(
    "written",
    [
        lambda text: text,
        str.lower,
        lambda text: text.replace("_bar_", "|").replace("_minus_", "-").replace("_dot_", "."),
    ],
)
def test_a_walkthrough_of_raw_ids_is_read_as_commands_that_win(tmp_path: Path, written: Any) -> None:
    desk = "Desk_bar__minus_00_dot_5"
    raw = [f"go to {desk}", f"take Mug_bar_1 from {desk}", "move Mug_bar_1 to Shelf_bar_1"]
    text = problem().replace("Desk_bar_1", desk)
    path = write_lines(tmp_path / "games_valid_unseen.jsonl", row("a/b/c", pddl_problem=text, walkthrough=[*map(written, raw)]))
    (game,) = map(load_game, find_games("test", path.parent))
    assert game.walkthrough == ("go to desk 1", "take mug 2 from desk 1", "move mug 2 to shelf 1")
    state = State(game)
    for command in game.walkthrough:
        assert command in state.admissible()
        state.step(command)
    assert state.won
