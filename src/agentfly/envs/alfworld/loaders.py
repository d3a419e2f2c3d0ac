"""Game files: the published `game.tw-pddl` files in their standard folders, and JSONL files of many games.

    $ALFWORLD_DATA/json_2.1.1/<split>/<task>/<trial>/game.tw-pddl      JSON: pddl_problem, grammar, walkthrough, solvable
    $ALFWORLD_DATA/games_<split>.jsonl or .jsonl.gz                    one game per line: game, task, pddl_problem, walkthrough

A game is named by its location: the path of its file, or `file.jsonl#line`. `load_game` opens it from that name in any process.
As in ALFWorld, games about slices and movable receptacles and games marked as unsolvable are left out. Nothing is downloaded.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..task_sets import check_split
from .game import Game, read_problem
from .goal import read_goal, sentences

SPLITS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
SPLITS |= {name: name for name in SPLITS.values()}
"""Names of splits, and their names in the files."""
VARIABLE = "ALFWORLD_DATA"
FOLDER = "json_2.1.1"
FILE = "game.tw-pddl"
KEPT_GAMES, KEPT_FILES = 512, 4
_TASK = re.compile(r'"Your task is to: ([^"]*?)\.?"')
_LEFT_OUT = ("movable", "Sliced")


class Unsolvable(DataError):
    """The file of the game marks it as unsolvable."""


def find_games(split: str, path: str | Path | None = None) -> list[str]:
    """The names of the games of a split, in file order. `path` is a folder as described above, or a JSONL file.

    `game.tw-pddl` files marked as unsolvable are included: `load_game` raises Unsolvable for them.
    """
    check_split(split, SPLITS)
    root = data_folder(path)
    if root.is_file():
        return [f"{root}#{number}" for number in _lines_of(root)]
    name = SPLITS[split]
    for file in (root / f"games_{name}.jsonl", root / f"games_{name}.jsonl.gz"):
        if file.is_file():
            return [f"{file}#{number}" for number in _lines_of(file)]
    for folder in (root / FOLDER / name, root / name):
        if folder.is_dir():
            games = [str(file) for file in sorted(folder.glob(f"*/*/{FILE}")) if _is_played(str(file.relative_to(folder)))]
            if not games:
                raise DataError(f"{folder}: there is no <task>/<trial>/{FILE} in it")
            return games
    raise DataError(f"{root}: there is neither {FOLDER}/{name}/ nor games_{name}.jsonl(.gz) in it")


def data_folder(path: str | Path | None = None) -> Path:
    """The folder of the games: `path`, else `$ALFWORLD_DATA`, else where ALFWorld's download puts them."""
    given = path or os.environ.get(VARIABLE)
    root = Path(given).expanduser() if given else Path.home() / ".cache" / "alfworld"
    if not root.exists():
        what = "no such file or folder" if given else "the games of ALFWorld are not there"
        raise DataError(
            f"{root}: {what}; set {VARIABLE} to the folder that holds {FOLDER}, or to one with games_train.jsonl.gz"
        )
    return root.resolve()


def load_game(name: str) -> Game:
    """A game by its name. The last KEPT_GAMES are cached."""
    file, _, line = name.rpartition("#") if "#" in name else (name, "", "")
    path = Path(file)
    numbered = line.isascii() and line.isdigit() and line.strip("0") != ""
    if not (file.endswith((".jsonl", ".jsonl.gz")) and numbered) and path.name != FILE:
        raise DataError(f"unknown game {name[:200]!r}: it is neither the path of a {FILE} nor FILE.jsonl#LINE")
    try:
        stamp = path.stat().st_mtime_ns
    except (OSError, ValueError):
        raise DataError(f"{file}: no such file") from None
    return _load(name, file, int(line or 0), stamp)


@lru_cache(maxsize=KEPT_GAMES)
def _load(name: str, file: str, line: int, stamp: int) -> Game:
    path = Path(file)
    if not line:
        with _named(path):
            data = path.read_bytes()
        return _read_row(_parse(data, str(path)), name, str(path))
    packed = _file(file, stamp)
    if line not in packed:
        raise DataError(f"unknown game {name!r}: {path.name} has no game on line {line}")
    where = f"{path}: line {line}"
    return _read_row(_parse(zlib.decompress(packed[line]), where), name, where)


def _read_row(row: Mapping[str, Any], name: str, where: str) -> Game:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a game is an object with fields, this is a {type(row).__name__}")
    problem = row.get("pddl_problem")
    if not isinstance(problem, str):
        have = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where}: a game needs the text field 'pddl_problem'; its fields: {have}")
    if row.get("solvable") is False:
        raise Unsolvable(f"{where}: this game is marked as unsolvable, so it is not played")
    walkthrough = row.get("walkthrough") or ()
    if not isinstance(walkthrough, list | tuple) or not all(isinstance(command, str) for command in walkthrough):
        raise DataError(f"{where}: 'walkthrough' must be a list of commands")
    return read_problem(problem, _id(row, name), task_of(row, problem, where), where, walkthrough)


def task_of(row: dict[str, Any], problem: str, where: str) -> str:
    """The sentence of the task: that of the row, else that of the grammar, else one made from the goal."""
    task = row.get("task")
    if task is None:
        match = _TASK.search(str(row.get("grammar", "")))
        task = match[1] if match and "{" not in match[1] and "UNKNOWN" not in match[1] else None
    if task is None:
        goal = problem.lower().rpartition("(:goal")[2]
        return sentences(read_goal(goal, where))[0]
    if not isinstance(task, str) or not task.strip():
        raise DataError(f"{where}: 'task' must be a non-empty string")
    return task.strip().removesuffix(".")


def _id(row: dict[str, Any], name: str) -> str:
    """`<split>/<task>/<trial>`, from the row or from the path."""
    given = row.get("game")
    if isinstance(given, str) and given:
        return given
    return name if "#" in name else "/".join(Path(name).parts[-4:-1])


def _is_played(name: str) -> bool:
    return not any(word in name for word in _LEFT_OUT)


def _lines_of(path: Path) -> Iterator[int]:
    """The lines of a file with playable games."""
    for number, packed in _file(str(path), path.stat().st_mtime_ns).items():
        where = f"{path}: line {number}"
        row = _parse(zlib.decompress(packed), where)
        if not isinstance(row, dict):
            raise DataError(f"{where}: a game is an object with fields, this is a {type(row).__name__}")
        if row.get("solvable", True) is not False and _is_played(str(row.get("game", ""))):
            yield number


@lru_cache(maxsize=KEPT_FILES)
def _file(file: str, stamp: int) -> dict[int, bytes]:
    """Every line of a file, compressed: a game is 40 kB of text, and a file has thousands."""
    packed: dict[int, bytes] = {}
    path = Path(file)
    number = 0
    try:
        with _named(path), gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    packed[number] = zlib.compress(line)
    except DataError as error:
        raise DataError(f"{error} (in line {number + 1})") from error
    if not packed:
        raise DataError(f"{file}: the file has no games")
    return packed


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise DataError with the file's name if it cannot be read."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a readable file: {error}") from error


def _parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error
