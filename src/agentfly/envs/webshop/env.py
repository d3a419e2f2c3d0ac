"""`WebShop`: one visit to the shop for one chain, as an environment.

Actions are `search[words]` and `click[what]`; observations are pages as text, and the purchase gives the score. The row of a
task names the `catalogue`, the `goal` and whether pages are `brief`. The catalogue is opened once per process and shared; an
instance holds only its visit, so thousands fit. No text of a model raises; a task without a goal does.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from ...errors import ConfigError, WorldError
from ...resources.spec import Cost, Environment
from ...types import Task, ToolResult
from .catalogue.catalogue import MADE_HERE, Catalogue, is_open, open_catalogue
from .catalogue.goals import read_row
from .catalogue.nouns import NAMES
from .shop.terminal import shown
from .shop.visit import Visit, read_action


class WebShop(Environment):
    """A shop of text pages: search, compare products, choose options, buy what the instruction asks for.

    `nouns` names the tagger that the score uses (see nouns.py); "auto" takes what comes with the data or is installed.
    `notes` puts a line above the page if an action had no effect; None: except on the whole pages of WebShop's own files, which
    are those of the original to the letter.
    """

    cost: ClassVar[Cost] = Cost(cpu=0.01, memory_mb=0.1, start_s=0.01)

    def __init__(self, nouns: str = "auto", notes: bool | None = None) -> None:
        if nouns not in NAMES:
            raise ConfigError(f"WebShop: nouns is {', '.join(NAMES)}, not {nouns!r}")
        if not isinstance(notes, bool | None):
            raise ConfigError(f"WebShop: notes is true or false, not {notes!r}")
        self.tagger, self.notes = nouns, notes
        self.num_steps = self.num_idle = 0
        self._visit: Visit | None = None

    async def reset(self, task: Task) -> str:
        """Enter the shop with the goal of a task. Returns the first page."""
        self._visit = None
        name, goal, brief = read_row(task)
        catalogue = await self._catalogue(name)
        catalogue.product(goal.asin)  # raises for an unknown product, which is a fault of the data
        self._visit, self.num_steps, self.num_idle = Visit(catalogue, goal, brief=brief), 0, 0
        return self._visit.observation

    async def step(self, action: str) -> ToolResult:
        """Act. The reward is the score of the purchase, and 0 before it; after the end every action is refused."""
        visit = self._open()
        if visit.done:
            return ToolResult(
                observation="The visit has ended: something was bought.", reward=0.0, done=True, error="bad_arguments"
            )
        _, reward, done = visit.step(action)
        self.num_steps += 1
        self.num_idle += bool(visit.note)
        malformed = bool(visit.note) and read_action(action)[0] not in ("search", "click")
        with_notes = self.notes if self.notes is not None else visit.brief or visit.shelves.name in MADE_HERE
        observation = visit.told if with_notes else visit.observation
        return ToolResult(observation=observation, reward=reward, done=done, error="bad_arguments" if malformed else None)

    @property
    def score(self) -> float:
        """The published score; 0 until something is bought."""
        return 0.0 if self._visit is None or self._visit.score is None else self._visit.score.total

    async def result(self) -> dict[str, float]:
        """The score and its parts, 0 if nothing was bought; and `idle`, the share of actions without effect."""
        score = self._open().score
        names = ("type", "attributes", "options", "price")
        parts = {name: 0.0 if score is None else getattr(score, name) for name in names}
        idle = self.num_idle / self.num_steps if self.num_steps else 0.0
        return {"score": 0.0 if score is None else score.total, "bought": float(score is not None), "idle": idle, **parts}

    def admissible(self) -> list[str]:
        """The possible actions; "search[...]" stands for any search."""
        visit = self._open()
        if visit.done:
            return []
        return ["search[...]", *(f"click[{what}]" for what in visit.clickables if what != "search")]

    @property
    def done(self) -> bool:
        return self._visit is not None and self._visit.done

    def state_key(self) -> str:
        """The page with its results, product and chosen options."""
        return self._open().state_key()

    async def close(self) -> None:
        self._visit = None

    shown = staticmethod(shown)

    @staticmethod
    def conformance() -> dict[str, Any]:
        """The arguments of `check_env`: the solver buys what two tasks ask for."""
        from ...data import load_tasks
        from .solver import solve_env
        from .tasks import webshop_tasks

        moves = [
            "search[wool hat]",
            "search[mug]",
            "click[next >]",
            "click[< prev]",
            "click[back to search]",
            "click[buy now]",
            "hm",
        ]
        return {
            "tasks": load_tasks(webshop_tasks("test", 2)),
            "actions": moves,
            "solver": solve_env,
            "do_nothing": lambda env, task: 0.0,
        }

    async def _catalogue(self, name: str) -> Catalogue:
        if is_open(name, self.tagger):
            return open_catalogue(name, self.tagger)
        # In a thread: reading 100,000 products takes long, and other chains must go on.
        return await asyncio.to_thread(open_catalogue, name, self.tagger)

    def _open(self) -> Visit:
        if self._visit is None:
            raise WorldError("no visit is open: call reset first")
        return self._visit
