"""One visit to the shop: actions lead from page to page, and the purchase is scored.

Pages are those of WebShop's text environment, to the letter: visible strings joined by " [SEP] ". Brief pages leave out the
instruction and rarely needed parts, and show the chosen options. An action is `search[words]`, possible on every page, or
`click[what]` on a clickable; anything else leaves the page unchanged, and `note` says why. A visit ends with `buy now`. It is
deterministic and reads nothing from disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from ..catalogue.catalogue import MAX_RESULTS, Catalogue
from ..catalogue.goals import ShopGoal
from ..catalogue.products import ShopProduct
from .score import PurchaseScore, score

SEPARATOR, BRIEF_SEPARATOR = " [SEP] ", " | "
MAX_ACTION = 2_000
SUB_PAGES = ("description", "features", "reviews")
_ACTION = re.compile(r"(.+)\[(.+)\]")


class VisitStep(NamedTuple):
    """The result of an action. The reward is the score of a purchase, and 0 before it."""

    observation: str
    reward: float
    done: bool


class Visit:
    """`page` is one of start, results, item, description, features, reviews, done."""

    def __init__(
        self,
        shelves: Catalogue,
        goal: ShopGoal,
        search: Callable[[str], list[str]] | None = None,
        *,
        brief: bool | None = None,
    ) -> None:
        """`brief`: short or whole pages; None: as the catalogue says."""
        self.shelves, self.goal = shelves, goal
        self.brief = shelves.brief if brief is None else brief
        self._search = search or shelves.search
        self.page = "start"
        self.results: list[str] = []
        self.number = 1
        self.asin = ""
        self.chosen: dict[str, str] = {}
        self.score: PurchaseScore | None = None
        self.note = ""
        """Why the last action had no effect; empty if it had one."""

    @property
    def done(self) -> bool:
        return self.page == "done"

    @property
    def observation(self) -> str:
        return (BRIEF_SEPARATOR if self.brief else SEPARATOR).join(self.lines())

    def state_key(self) -> str:
        """What the next pages depend on. A page depends on nothing that a later search or click replaces."""
        if self.page == "start":
            return "start"
        seen = (self.page, self.number, tuple(self.results))
        return repr(seen if self.page == "results" else (*seen, self.asin, sorted(self.chosen.items())))

    @property
    def told(self) -> str:
        """What a model reads: the note, if any, and the page."""
        return f"{self.note}\n{self.observation}" if self.note else self.observation

    def step(self, action: str) -> VisitStep:
        self.note = ""
        name, argument = read_action(action)
        if self.done:
            self.note = "The visit has ended: something was bought."
        elif len(action) > MAX_ACTION:
            self.note = f"The action has {len(action):,} characters; at most {MAX_ACTION:,} are read."
        elif name == "search" and argument:
            self._open_results(argument.lower())
        elif name == "click" and argument:
            self._click(argument.lower())
        else:
            self.note = "An action is search[words] or click[something on the page]."
        bought = self.page == "done" and not self.note
        return VisitStep(self.observation, self.score.total if bought and self.score else 0.0, self.done)

    @property
    def clickables(self) -> list[str]:
        """The clickables of the page, in its order. "search" is listed, but only `search[...]` searches."""
        if self.page == "start":
            return ["search"]
        if self.page == "results":
            back = ["< prev"] if self.number > 1 else []
            return ["back to search", *back, "next >", *(asin.lower() for asin in self._shown())]
        if self.page == "item":
            values = [value for values in self._product().options.values() for value in values]
            return list(dict.fromkeys(["back to search", "< prev", *SUB_PAGES, "buy now", *values]))
        return [] if self.done else ["back to search", "< prev"]

    # ---- acting

    def _open_results(self, words: str) -> None:
        self.results = self._search(words)[:MAX_RESULTS]
        self.page, self.number, self.asin, self.chosen = "results", 1, "", {}

    def _click(self, what: str) -> None:
        if what == "search" or what not in self.clickables:
            self.note = f"There is nothing called {what[:60]!r} to click on this page."
        elif self.page == "item" and (name := self._option(what)) is not None:
            # Before the buttons: if an option has the name of a button, the original takes the option.
            self.chosen[name] = what
        elif self.page == "results" and (asin := self._result(what)) is not None:
            self.asin, self.page, self.chosen = asin, "item", {}
        elif what == "back to search":
            self.page = "start"
        elif what == "next >":
            self.number += 1
        elif what == "< prev":
            self._go_back()
        elif what == "buy now":
            self._buy()
        else:
            self.page = what

    def _go_back(self) -> None:
        if self.page == "results":
            self.number -= 1
        elif self.page == "item":
            self.page, self.asin, self.chosen = "results", "", {}
        else:
            self.page = "item"

    def _buy(self) -> None:
        product, goal, shelves = self._product(), self.goal, self.shelves
        nouns, wanted = shelves.nouns(product.asin, product.title), shelves.nouns(goal.asin, goal.name)
        self.score = score(product, self.chosen, shelves.price(product.asin), goal, nouns, wanted)
        self.page = "done"

    def _option(self, what: str) -> str | None:
        """The option that has this value; of several the last, as in the original."""
        return next((name for name, values in reversed(list(self._product().options.items())) if what in values), None)

    def _result(self, what: str) -> str | None:
        """The product on this page of results whose lower-case id was clicked."""
        return next((asin for asin in self._shown() if asin.lower() == what), None)

    def _product(self) -> ShopProduct:
        return self.shelves.product(self.asin)

    def _shown(self) -> list[str]:
        size = self.shelves.page_size
        return self.results[(self.number - 1) * size : self.number * size]

    # ---- showing

    def lines(self) -> list[str]:
        """The visible strings of the page."""
        brief = self.brief
        head = [] if brief else ["Instruction:", self.goal.instruction]
        back = [] if brief else ["Back to Search"]
        if self.page == "start":
            return ["WebShop", *head, "Search"]
        if self.page == "done":
            return self._thanks()
        if self.page == "results":
            return [*head, *back, *self._result_lines()]
        if self.page == "item":
            return [*head, *back, *self._item_lines()]
        product = self._product()
        if self.page == "description":
            text = product.description.strip()
            return [*head, *back, "< Prev", *([text] if text else [])]
        if self.page == "features":
            return [*head, *back, "< Prev", *(bullet.strip() for bullet in product.bullets)]
        return [*head, *back, "< Prev"]

    def _result_lines(self) -> list[str]:
        if self.brief:
            lines = [f"Page {self.number}"]
        else:
            lines = [f"Page {self.number} (Total results: {len(self.results)})"]
            lines += ["< Prev"] if self.number > 1 else []
            lines.append("Next >")
        for asin in self._shown():
            product = self.shelves.product(asin)
            lines += [asin, product.title.strip(), product.price_tag]
        return lines

    def _item_lines(self) -> list[str]:
        product, brief = self._product(), self.brief
        lines: list[str] = [] if brief else ["< Prev"]
        for name, values in product.options.items():
            # A brief page shows the chosen value; a page of the original does not.
            lines += [f"{name}: {self.chosen[name]}"] if brief and name in self.chosen else [name, *values]
        lines += [product.title.strip(), f"Price: {product.price_tag}"]
        if brief:
            return [*lines, "Buy Now"]
        return [*lines, f"Rating: {product.rating}", "Description", "Features", "Reviews", "Buy Now"]

    def _thanks(self) -> list[str]:
        total = self.score.total if self.score else 0.0
        if self.brief:
            return ["Thank you for shopping with us!"]
        unknown = ["attrs", "None", "category", "None", "query", "None", "product category", "None"]
        target = ["asin", "options", "attrs", "price upper", "instuction text", "category", "product category", "query"]
        bought = ["asin", self.asin, "options", json.dumps(self.chosen, sort_keys=True), *unknown]
        return [
            *("Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)", "Purchased"),
            *(*bought, "Target", *target, "Goal", "None"),
            *("Reward", "Your score (min 0.0, max 1.0)", str(total), "Reward Details", "None"),
        ]


def read_action(action: str) -> tuple[str, str | None]:
    """`search[red mug]` to ("search", "red mug"); without brackets (action, None)."""
    if len(action) > MAX_ACTION:
        return action[:20], None
    match = _ACTION.match(action)
    return (match[1], match[2]) if match else (action, None)
