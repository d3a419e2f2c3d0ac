"""What the engines of ALFWorld and WebShop answer, as digests: equality with the originals is guarded on a fresh clone.

The recordings of the original engines are too large for the repository; the engines were compared with them when the digests
were written (see the READMEs of the two worlds). `python -m tests.envs.digests` writes `digests.json` anew: do that only after
the tests in test_recorded.py of both worlds have passed on the recordings.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from agentfly.envs.alfworld.engine import State
from agentfly.envs.alfworld.oracle import plan
from agentfly.envs.alfworld.tasks import alfworld_tasks, open_game
from agentfly.envs.webshop.catalogue.catalogue import open_catalogue
from agentfly.envs.webshop.catalogue.goals import ShopGoal
from agentfly.envs.webshop.shop.visit import Visit
from agentfly.envs.webshop.solver import solve
from agentfly.envs.webshop.tasks import easy_webshop_tasks, webshop_tasks

FILE = Path(__file__).parent / "digests.json"
SEED = 6
NUM_GAMES, NUM_RANDOM = 40, 30
NUM_GOALS, NUM_EASY_GOALS, NUM_CLICKS = 40, 20, 20
WORDS = ("mug", "women's cardigans", "blue rug with tassel edge", "pack of 12", "zzzz", "wool hat", "gluten-free snacks!")


@cache
def _households() -> list[dict[str, Any]]:
    return alfworld_tasks("train", NUM_GAMES, SEED)


@cache
def _goals() -> list[dict[str, Any]]:
    return [*webshop_tasks("train", NUM_GOALS, SEED), *easy_webshop_tasks("train", NUM_EASY_GOALS, SEED)]


def alfworld_stream(number: int) -> Iterator[object]:
    """One generated household: the walk of the solver, then seeded random admissible commands in a new playthrough."""
    row = _households()[number]
    game = open_game(row)
    yield row["id"], row["kind"], row["question"]
    walk = plan(State(game))
    assert walk is not None
    yield from _household(State(game), lambda admissible, at: walk[at] if at < len(walk) else "")
    rng = random.Random(f"digest {number}")
    odd = ("dance", "examine", "take  mug 1 from desk 1", "GO TO desk 1", "help")

    def wander(admissible: list[str], at: int) -> str:
        return "" if at == NUM_RANDOM else rng.choice(odd) if at % 10 == 9 else rng.choice(admissible)

    yield from _household(State(game), wander)


def _household(state: State, choose: Callable[[list[str], int], str]) -> Iterator[object]:
    admissible, at = state.admissible(), 0
    yield state.game.intro, admissible
    while command := choose(admissible, at):
        said = state.step(command)
        admissible, at = state.admissible(), at + 1
        yield command, said, admissible, state.progress(), state.won


def webshop_stream(number: int) -> Iterator[object]:
    """One goal of a generated shop: the solver's visit, then a visit of seeded random clicks and searches."""
    row = _goals()[number]
    shelves, goal = open_catalogue(row["catalogue"]), ShopGoal.from_dict(row["goal"])
    yield row["id"], row["question"], row["goal"]
    visit = Visit(shelves, goal)
    yield visit.observation, visit.clickables
    for action in solve(visit):
        yield action, *visit.step(action), visit.clickables, visit.note
    rng = random.Random(f"digest {number}")
    visit = Visit(shelves, goal)
    for _ in range(NUM_CLICKS):
        clickable = [what for what in visit.clickables if what != "search"]
        if clickable and rng.random() < 0.8:
            action = f"click[{rng.choice(clickable)}]"
        else:
            action = rng.choice(("click[nowhere]", "hm", *(f"search[{word}]" for word in (*WORDS, goal.query))))
        yield action, *visit.step(action), visit.clickables, visit.note
    yield goal.asin, shelves.price(goal.asin), list(shelves.nouns(goal.asin, goal.name))


STREAMS: dict[str, tuple[Callable[[int], Iterator[object]], int]] = {
    "alfworld": (alfworld_stream, NUM_GAMES),
    "webshop": (webshop_stream, NUM_GOALS + NUM_EASY_GOALS),
}


def lines_of(world: str, number: int) -> list[str]:
    """The stream as lines of JSON."""
    return [json.dumps(record, ensure_ascii=False, sort_keys=True) for record in STREAMS[world][0](number)]


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def recorded() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def write() -> None:
    found = {world: [digest(lines_of(world, number)) for number in range(count)] for world, (_, count) in STREAMS.items()}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
