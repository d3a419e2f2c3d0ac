"""Dialogues of `ReactAgent` with `alfworld_step`, for supervised training; all of the train split.

Things are searched for as in plays.py, and every observation is the engine's answer. `mistakes` is the share of dialogues with
one of `SLIPS`; a slip is played out, so one that does no harm may still end in success.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from .engine import TREATMENTS, State
from .game import Game
from .goal import WORDING
from .plays import listed_order, plausible_order, searched
from .tasks import alfworld_games, alfworld_tasks, easy_alfworld_tasks, open_game

TOOL = "alfworld_step"
MAX_MISSES = 3
MAX_EASY_TURNS = 8


def alfworld_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Generated households of every size; a thing is found after at most MAX_MISSES misses."""
    rng = random.Random(f"alfworld demos {seed}")
    return [_wander(row, rng, mistakes) for row in alfworld_tasks("train", count, seed)]


def easy_alfworld_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Small households; places are searched in the order in which the room lists them."""
    rng = random.Random(f"easy alfworld demos {seed}")
    rows = []
    for row in easy_alfworld_tasks("train", count, seed):
        game = open_game(row)
        rows.append(_row(row, game, searched(State(game), listed_order) or [], rng, mistakes, MAX_EASY_TURNS))
    return rows


def alfworld_games_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Published games of the train split, from $ALFWORLD_DATA; beyond their number they repeat, searched in another order."""
    rng = random.Random(f"alfworld games demos {seed}")
    rows = alfworld_games("train", count, seed)
    return [_wander(rows[number % len(rows)], rng, mistakes) for number in range(count)]


def _wander(row: dict[str, Any], rng: random.Random, mistakes: float) -> dict[str, Any]:
    game = open_game(row)
    commands = searched(State(game), plausible_order(rng, rng.randint(0, MAX_MISSES)))
    return _row(row, game, commands or [], rng, mistakes)


def _row(
    row: dict[str, Any], game: Game, commands: list[str], rng: random.Random, mistakes: float, max_turns: int = 1000
) -> dict[str, Any]:
    if rng.random() < mistakes:
        slip = rng.choice([slip for name, slip in SLIPS.items() if name != "forgets" or game.goal.marks])
        commands = slip(game, list(commands), rng)
    messages = [{"role": "user", "content": row["question"]}]
    state = State(game)
    for command in commands[:max_turns]:
        messages.append({"role": "assistant", "content": _reply(command, state)})
        messages.append({"role": "user", "content": f"Observation: {state.step(command)}"})
        if state.won:
            messages.pop()  # the chain ends with this action, so the model sees no answer
            break
    else:
        if len(commands) < max_turns:
            messages.append({"role": "assistant", "content": "Thought: that is it\nAnswer: done"})
        elif messages[-1]["role"] == "user":
            messages.pop()
    return {"id": row["id"], "game": row["game"], "kind": row["kind"], "messages": messages}


def _reply(command: str, state: State) -> str:
    verb = command.partition(" ")[0]
    # The thought of "go" depends on whether a thing is held.
    thought = WORDING["thoughts"].get(verb) or ("go there" if state.held >= 0 else "look for it")
    return f"Thought: {thought}\nAction: {TOOL}\nInput: {json.dumps({'action': command})}"


def _stops(game: Game, commands: list[str], rng: random.Random) -> list[str]:
    """Says that it is done when it is not."""
    return commands[: rng.randrange(1, max(2, len(commands)))]


def _forgets(game: Game, commands: list[str], rng: random.Random) -> list[str]:
    """Leaves out the cleaning, heating or cooling."""
    return [command for command in commands if command.partition(" ")[0] not in TREATMENTS]


def _misplaces(game: Game, commands: list[str], rng: random.Random) -> list[str]:
    """Puts the thing somewhere else, or goes somewhere else where it should use a lamp."""
    places = [item.name for item in game.receptacles if not item.openable and item.kind != game.goal.target]
    if not places:
        return _stops(game, commands, rng)
    place = rng.choice(places)
    if not commands[-1].startswith("move "):
        return [*commands[:-1], f"go to {place}"]
    thing = commands[-1].removeprefix("move ").partition(" to ")[0]
    walked = [command for command in commands[:-1] if command != f"open {commands[-1].rpartition(' to ')[2]}"]
    back = 1 if walked[-1].startswith("go to ") else 0
    return [*walked[: len(walked) - back], f"go to {place}", f"move {thing} to {place}"]


def _garbles(game: Game, commands: list[str], rng: random.Random) -> list[str]:
    """Writes an action that is not one, and gives up or goes on."""
    at = rng.randrange(len(commands))
    words = commands[at].split(" ")
    wrong = rng.choice((" ".join(words[:-1]), f"find {game.goal.thing} 1", commands[-1]))
    return [*commands[:at], wrong, *(commands[at:] if rng.random() < 0.5 else ())]


SLIPS: dict[str, Callable[[Game, list[str], random.Random], list[str]]] = {
    "stops": _stops,
    "forgets": _forgets,
    "misplaces": _misplaces,
    "garbles": _garbles,
}
