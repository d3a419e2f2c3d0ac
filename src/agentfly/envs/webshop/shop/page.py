"""The shop as a web page, for a person who plays a task by hand.

Each browser has its own visit, identified by a cookie. Forms carry the visit's token, so a page of another site cannot act for
it. Every text of a catalogue or a person is escaped. At most MAX_VISITS visits are kept; the oldest is evicted.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from ....errors import ConfigError
from ....types import Task
from ...pages import PageAnswer, WebPage, button, open_in_browser
from ..catalogue.catalogue import MADE_HERE, open_catalogue
from ..catalogue.goals import KINDS, read_row
from .visit import Visit

MAX_VISITS = 256
NUM_MORE = 50


@dataclass(slots=True)
class Guest:
    """One browser: its visit, the index of its task, and the token of its forms."""

    visit: Visit
    place: int = 0
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ShopPage(WebPage):
    """Serves some tasks in turn; "another task" goes on to the next. Raises ConfigError if the first cannot be opened."""

    title = "WebShop"

    def __init__(self, tasks: Sequence[Task]) -> None:
        if not tasks:
            raise ConfigError("the shop's page needs at least one task")
        self.tasks = list(tasks)
        self._guests: OrderedDict[str, Guest] = OrderedDict()
        self._enter(0)

    async def guest(self, cookie: str) -> tuple[str, Guest]:
        """The guest of a cookie; an unknown cookie gets a new guest and a new cookie."""
        if cookie in self._guests:
            self._guests.move_to_end(cookie)
            return cookie, self._guests[cookie]
        guest = Guest(await asyncio.to_thread(self._enter, 0))
        cookie = secrets.token_urlsafe(24)
        self._guests[cookie] = guest
        while len(self._guests) > MAX_VISITS:
            self._guests.popitem(last=False)
        return cookie, guest

    async def show(self, cookie: str) -> PageAnswer:
        cookie, guest = await self.guest(cookie)
        async with guest.lock:
            return PageAnswer(render(guest), cookie=cookie)

    async def act(self, cookie: str, form: dict[str, str]) -> PageAnswer:
        cookie, guest = await self.guest(cookie)
        if not secrets.compare_digest(form.get("token", "").encode(), guest.token.encode()):
            return PageAnswer("<p>This form is not of your visit. <a href='/'>To the shop</a></p>", 403, cookie)
        async with guest.lock:
            # In a thread: a search in a large catalogue takes longer than the event loop may be blocked.
            await asyncio.to_thread(self._apply, guest, form)
        return PageAnswer(cookie=cookie)

    def _apply(self, guest: Guest, form: dict[str, str]) -> None:
        if "search" in form:
            guest.visit.step(f"search[{form['search']}]")
        elif "click" in form:
            guest.visit.step(f"click[{form['click']}]")
        elif form.get("visit") in ("again", "next"):
            guest.place = (guest.place + (form["visit"] == "next")) % len(self.tasks)
            guest.visit = self._enter(guest.place)

    def _enter(self, place: int) -> Visit:
        name, goal, _ = read_row(self.tasks[place])
        catalogue = open_catalogue(name)
        catalogue.product(goal.asin)
        return Visit(catalogue, goal)


def open_page(
    port: int | None = None,
    *,
    task: Task | None = None,
    tasks: Sequence[Task] | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the shop until Ctrl-C, starting with `task` and going on with others of its shop; or with `tasks` in turn."""
    more = list(tasks) if tasks is not None else _others(task)
    open_in_browser(ShopPage([*([task] if task else []), *more]), "The shop", port, say)


def _others(task: Task | None) -> list[Task]:
    """More tasks of the same catalogue."""
    from ....data import load_tasks
    from ..tasks import easy_webshop_tasks, row_of, webshop_tasks

    name = "generated" if task is None else read_row(task)[0]
    if name in MADE_HERE:
        return load_tasks((easy_webshop_tasks if name == "easy" else webshop_tasks)("test", NUM_MORE))
    catalogue = open_catalogue(name)
    for kind in KINDS:
        if rows := [row_of(goal, name, place) for place, goal in enumerate(catalogue.goals(kind)[:NUM_MORE])]:
            return load_tasks(rows)
    return []


def render(guest: Guest) -> str:
    """The current page of a visit as HTML."""
    visit, token = guest.visit, guest.token
    parts = [f"<p class=ask><b>Your task.</b> {escape(visit.goal.instruction)}</p>"]
    if visit.note:
        parts.append(f"<p class=note>{escape(visit.note)}</p>")
    if visit.page == "done":
        parts.append(_done(visit))
    else:
        parts.append(
            f"<form method=post><input type=hidden name=token value='{token}'>"
            "<input name=search maxlength=400 placeholder='Search the shop' required autofocus><button>Search</button></form>"
        )
        parts.append(_PAGES.get(visit.page, _sub_page)(visit, token))
    parts.append(f"<hr><p>{button(token, 'visit', 'again', 'Start again')}{button(token, 'visit', 'next', 'Another task')}</p>")
    return "".join(parts)


def _start(visit: Visit, token: str) -> str:
    return "<p>Search for what your task asks for.</p>"


def _results(visit: Visit, token: str) -> str:
    rows, shown = [], {asin.lower(): asin for asin in visit.results}
    for what in visit.clickables:
        if what in shown:
            product = visit.shelves.product(shown[what])
            price = f"<span class=price>{escape(product.price_tag)}</span>"
            rows.append(f"<li>{_click(token, what)} {escape(product.title)} {price}</li>")
    moves = "".join(_click(token, what) for what in visit.clickables if what not in shown)
    listed = (
        f"<ol start={(visit.number - 1) * visit.shelves.page_size + 1}>{''.join(rows)}</ol>" if rows else "<p>Nothing here.</p>"
    )
    return f"<p>Page {visit.number}, {len(visit.results)} results {moves}</p>{listed}"


def _item(visit: Visit, token: str) -> str:
    product = visit.shelves.product(visit.asin)
    options = "".join(
        f"<p>{escape(name)}: {''.join(_click(token, value, visit.chosen.get(name) == value) for value in values)}</p>"
        for name, values in product.options.items()
    )
    offered = {value for values in product.options.values() for value in values}
    moves = "".join(_click(token, what) for what in visit.clickables if what not in offered)
    head = f"<h2>{escape(product.title)}</h2><p class=price>{escape(product.price_tag)}</p>"
    return f"{head}{options}<p>{moves}</p>"


def _sub_page(visit: Visit, token: str) -> str:
    product = visit.shelves.product(visit.asin)
    texts = {"description": [product.description], "features": list(product.bullets)}.get(visit.page, [])
    shown = "".join(f"<p>{escape(text)}</p>" for text in texts if text.strip()) or "<p>There is nothing to read here.</p>"
    moves = "".join(_click(token, what) for what in visit.clickables)
    return f"<h2>{escape(visit.page.capitalize())} of {escape(product.title)}</h2>{shown}<p>{moves}</p>"


def _done(visit: Visit) -> str:
    assert visit.score is not None
    score, product = visit.score, visit.shelves.product(visit.asin)
    rows = {"kind of product": score.type, "attributes": score.attributes, "options": score.options, "price": score.price}
    parts = "".join(f"<li>{name}: {value:.2f}</li>" for name, value in rows.items())
    chosen = ", ".join(f"{name}: {value}" for name, value in visit.chosen.items()) or "no options"
    return f"<h2>Score {score.total:.2f}</h2><p>You bought {escape(product.title)} ({escape(chosen)}).</p><ul>{parts}</ul>"


_PAGES: dict[str, Callable[[Visit, str], str]] = {"start": _start, "results": _results, "item": _item}


def _click(token: str, what: str, chosen: bool = False) -> str:
    return button(token, "click", what, what, chosen)
