"""The page of each world is true: its table names what there is, its signatures are those of the code, its programs run."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

import agentfly.envs
from agentfly import plugins
from agentfly.cli import make_parser
from agentfly.envs.worlds import find_world

FOLDER = Path(agentfly.envs.__file__).parent
WORLDS = ("alfworld", "webshop", "scienceworld", "search")
KINDS = {"env": "envs", "tool": "tools", "reward": "rewards", "tasks": "tasks", "demos": "demos"}


def page(world: str) -> str:
    return (FOLDER / world / "README.md").read_text(encoding="utf-8")


def blocks(world: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page(world), flags=re.DOTALL)


def table(world: str) -> list[tuple[list[str], list[str], str]]:
    """Names, kinds and the text of each row of the table of names."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([a-z, ]+) \| (.*) \|$", page(world), flags=re.MULTILINE)
    named = [(re.findall(r"\w+", names), kinds.split(", "), text) for names, kinds, text in rows]
    return [row for row in named if set(row[1]) <= set(KINDS)]


@pytest.mark.parametrize("world", WORLDS)
def test_the_table_names_everything_that_belongs_to_the_world_and_nothing_else(world: str) -> None:
    listed: dict[str, set[str]] = {kind: set() for kind in KINDS.values()}
    for names, kinds, _ in table(world):
        for kind in kinds:
            listed[KINDS[kind]] |= set(names)
    found = find_world(world)
    there = {"envs": {world}, "tools": set(found.tools), "rewards": set(found.rewards), "tasks": set(found.tasks)}
    there["demos"] = {name for name, place in plugins.BUILTIN["demos"].items() if f".envs.{world}." in place}
    assert listed == there


@pytest.mark.parametrize("world", WORLDS)
def test_the_options_in_the_table_are_those_of_the_class(world: str) -> None:
    (text,) = [text for _, kinds, text in table(world) if kinds == ["env"]]
    call = ast.parse(text.split("`")[1], mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    cls: Any = plugins.resolve("envs", world)
    assert call.func.id == cls.__name__
    options = inspect.signature(cls).parameters
    for keyword in call.keywords:
        default = options[str(keyword.arg)].default
        assert default is None or ast.literal_eval(keyword.value) == default, keyword.arg
    for method in re.findall(r"`(?:await )?(\w+)\(", text)[1:]:
        assert callable(getattr(cls, method)), method


@pytest.mark.parametrize("world", [world for world in WORLDS if blocks(world, "python")])
def test_the_first_program_runs(world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path))
    space: dict[str, Any] = {}
    for text in blocks(world, "python"):
        exec(compile(text, f"{world}/README.md", "exec"), space)
    assert len(space["result"].trajectories) == 16
    assert all(row.outcome.trainable for row in space["result"].trajectories), "the world has failed"


@pytest.mark.parametrize("world", WORLDS)
def test_commands_and_settings_are_those_of_the_command_line_and_the_config(world: str) -> None:
    lines = [line for text in blocks(world, "bash") for line in text.splitlines()]
    lines += re.findall(r"`(agentfly [^`]+)`", page(world).replace("\n", " "))
    for line in lines:
        command, *words = shlex.split(line)
        assert command == "agentfly"
        make_parser().parse_args(words)
    for text in blocks(world, "toml"):
        tomllib.loads(text)
    for extra in re.findall(r"pip install 'agentfly\[(\w+)\]'", page(world)):
        assert extra in plugins.EXTRAS or extra in set(plugins.EXTRAS.values()), extra
    assert f"recipes/{world}.toml" in page(world)
    assert (FOLDER.parents[2] / "recipes" / f"{world}.toml").is_file()
