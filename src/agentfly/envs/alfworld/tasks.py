"""Task sets of ALFWorld. Rows are `{"id", "question", "game", "kind"}`.

    alfworld         generated households of all sizes and the six kinds of task
    easy_alfworld    three or four receptacles, three to six commands
    alfworld_games   the published games, from `$ALFWORLD_DATA` (see loaders.py): "validation" is valid_seen, "test" is
                     valid_unseen

`question` is the agent's first message; `game` is a name that `open_game` opens. A hash of the question decides the split of a
generated game, so no question is in two splits, whatever the seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError, DataError
from ..task_sets import MAX_COUNT, check_count, split_of
from .game import Game, read_problem
from .homes import make
from .loaders import Unsolvable, data_folder, find_games, load_game, task_of

NUMBERS = 1 << 40
_MADE = re.compile(r"(home|easy)-(\d{1,15})")


def alfworld_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generated households: find a thing, clean, heat or cool it, and put it somewhere; look at it under a lamp; put two."""
    return _generated("home", split, count, seed)


def easy_alfworld_tasks(split: str, count: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Small generated households whose tasks take three to six commands, such as "put a pen in desk"."""
    return _generated("easy", split, count, seed)


def alfworld_games(split: str, count: int | None = None, seed: int = 0, path: str | Path | None = None) -> list[dict[str, Any]]:
    """The published games of ALFWorld, from the folder that $ALFWORLD_DATA names, in a seeded order."""
    if count is not None and count < 1:
        raise ConfigError(f"tasks: count must be at least 1, not {count}.")
    names = find_games(split, path)
    # Files are sorted by kind of task: without a shuffle the first `count` would be of one kind.
    random.Random(f"alfworld games {seed}").shuffle(names)
    rows: list[dict[str, Any]] = []
    for name in names:
        if len(rows) == count:
            break
        try:
            rows.append(row_of(load_game(name), name))
        except Unsolvable:
            continue
    if not rows:
        raise DataError(
            f"{data_folder(path)}: no game of the split {split!r} can be played: those about slices and movable receptacles, "
            f"and those marked as unsolvable, are left out"
        )
    return rows


def row_of(game: Game, name: str) -> dict[str, Any]:
    return {"id": game.id, "question": f"{game.room}\n{game.objective}", "game": name, "kind": game.goal.kind}


def open_game(fields: Mapping[str, Any]) -> Game:
    """The game of a row: its `pddl_problem` if it has one, else the game that `game` names."""
    name, problem = fields.get("game"), fields.get("pddl_problem")
    if isinstance(problem, str):
        label = str(name or "given")
        where = f"game {label!r}"
        return read_problem(problem, label, task_of({"task": fields.get("task")}, problem, where), where)
    if not isinstance(name, str) or not name:
        raise DataError("a task of ALFWorld has the field 'game' (a name of its task sets) or 'pddl_problem'")
    made = _MADE.fullmatch(name)
    return make(made[1], int(made[2])) if made else load_game(name)


def split_of_game(game: Game) -> str:
    """The split of a generated game."""
    return split_of(f"{game.room}\n{game.task}")


def _generated(size: str, split: str, count: int | None, seed: int) -> list[dict[str, Any]]:
    wanted = check_count(split, count, most=MAX_COUNT)
    rng = random.Random(f"alfworld {size} {split} {seed}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < wanted:
        game = make(size, rng.randrange(NUMBERS))
        if split_of_game(game) == split:
            rows[game.id] = row_of(game, game.id)
    return list(rows.values())
