"""The shop as a web page, for a person who wants to do the task by hand.

In: an address and a first task. Out: pages as in `envs.pages`. Each browser has a visit of its own, known by a cookie that only
it has; what it does is sent by forms with that visit's token, so no other site can act for it. Every text of a catalogue or a
person is escaped. Visits are few: the oldest makes room.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from http.cookies import CookieError, SimpleCookie

from ...errors import ConfigError
from ...types import Task
from ..pages import HOST, PORT, PageHandler, PageServer, button, listen, serve
from .catalogue import MADE_HERE, open_catalogue
from .goals import KINDS, read_row
from .shop import Visit

MAX_VISITS = 256
NUM_MORE = 50


@dataclass(slots=True)
class Guest:
    """One browser: its visit, which task it is at, and the token that its forms carry."""

    visit: Visit
    place: int = 0
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    lock: threading.Lock = field(default_factory=threading.Lock)


class ShopServer(PageServer):
    """Serves some tasks in turn; "another task" goes on to the next."""

    title = "WebShop"

    def __init__(self, tasks: Sequence[Task], port: int = PORT) -> None:
        if not tasks:
            raise ConfigError("the shop's page needs at least one task")
        self.tasks = list(tasks)
        self._guests: OrderedDict[str, Guest] = OrderedDict()
        self._lock = threading.Lock()
        self._enter(0)  # a catalogue that cannot be opened is said now
        super().__init__((HOST, port), _Handler)

    def guest(self, cookie: str) -> tuple[str, Guest]:
        """The guest of a cookie, or a new one with its own."""
        with self._lock:
            if cookie in self._guests:
                self._guests.move_to_end(cookie)
                return cookie, self._guests[cookie]
            cookie = secrets.token_urlsafe(24)
            guest = self._guests[cookie] = Guest(self._enter(0))
            while len(self._guests) > MAX_VISITS:
                self._guests.popitem(last=False)
            return cookie, guest

    def restart(self, guest: Guest, place: int) -> None:
        guest.place = place % len(self.tasks)
        guest.visit = self._enter(guest.place)

    def _enter(self, place: int) -> Visit:
        name, goal, _ = read_row(self.tasks[place])
        catalogue = open_catalogue(name)
        catalogue.product(goal.asin)
        return Visit(catalogue, goal)


class _Handler(PageHandler):
    server: ShopServer

    def show(self) -> None:
        cookie, guest = self.server.guest(self._cookie())
        with guest.lock:
            body = render(guest)
        self.send_page(200, body, cookie)

    def act(self, sent: dict[str, str]) -> None:
        cookie, guest = self.server.guest(self._cookie())
        with guest.lock:
            if not secrets.compare_digest(sent.get("token", "").encode(), guest.token.encode()):
                self.send_page(403, "<p>This form is not of your visit. <a href='/'>To the shop</a></p>", cookie)
                return
            if "search" in sent:
                guest.visit.step(f"search[{sent['search']}]")
            elif "click" in sent:
                guest.visit.step(f"click[{sent['click']}]")
            elif sent.get("visit") == "again":
                self.server.restart(guest, guest.place)
            elif sent.get("visit") == "next":
                self.server.restart(guest, guest.place + 1)
        self.send_back(cookie)

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get("visit")
        except CookieError:
            return ""
        return found.value if found else ""


def open_page(
    port: int | None = None,
    *,
    task: Task | None = None,
    tasks: Sequence[Task] | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the shop until Ctrl-C, beginning with `task` and going on with others of its shop; or `tasks` in turn.

    Without a `port` it is PORT, or any that is free where another shop is open there already.
    """
    more = list(tasks) if tasks is not None else _others(task)
    shown = [*([task] if task else []), *more]
    with listen(lambda port: ShopServer(shown, port), port, "the shop") as server:
        serve(server, "The shop", say)


def _others(task: Task | None) -> list[Task]:
    """More tasks of the same shop."""
    from ...data import load_tasks
    from .tasks import easy_webshop_tasks, row_of, webshop_tasks

    name = "generated" if task is None else read_row(task)[0]
    if name in MADE_HERE:
        return load_tasks((easy_webshop_tasks if name == "easy" else webshop_tasks)("test", NUM_MORE))
    catalogue = open_catalogue(name)
    for kind in KINDS:
        if rows := [row_of(goal, name, place) for place, goal in enumerate(catalogue.goals(kind)[:NUM_MORE])]:
            return load_tasks(rows)
    return []


def render(guest: Guest) -> str:
    """What the page that a visit is at shows, as HTML."""
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
