"""The shop as a web page, for a person who wants to do the task by hand.

In: an address and a first task. Out: plain HTML pages without script, on loopback. Each browser has a visit of its own, known
by a cookie that only it has; what it does is sent by forms with that visit's token, so no other site can act for it, and a
request for another host than this one is refused, so no other name can be made to stand for it. Every text of a catalogue or a
person is escaped. Bodies are short, visits are few: the oldest makes room. Nothing is written anywhere.
"""

from __future__ import annotations

import errno
import re
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from ...errors import ConfigError
from ...types import Task
from .catalogue import MADE_HERE, open_catalogue
from .goals import KINDS, read_row
from .shop import Visit

HOST, PORT = "127.0.0.1", 8350
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MAX_BODY = 8_192
MAX_VISITS = 256
NUM_MORE = 50
READ_S = 30.0
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fafafa}
form{display:inline}button,input{font:inherit;padding:.3rem .7rem;margin:.15rem;border:1px solid #999;border-radius:.3rem}
button{background:#fff;cursor:pointer}button.on{background:#246;color:#fff}input{width:60%}.ask{background:#eef;padding:.8rem}
li{margin:.6rem 0}.price{color:#060}.note{color:#900}"""


@dataclass(slots=True)
class Guest:
    """One browser: its visit, which task it is at, and the token that its forms carry."""

    visit: Visit
    place: int = 0
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    lock: threading.Lock = field(default_factory=threading.Lock)


class ShopServer(ThreadingHTTPServer):
    """Serves some tasks in turn; "another task" goes on to the next."""

    daemon_threads = True

    def __init__(self, tasks: Sequence[Task], host: str = HOST, port: int = PORT) -> None:
        if not tasks:
            raise ConfigError("the shop's page needs at least one task")
        self.tasks = list(tasks)
        self._guests: OrderedDict[str, Guest] = OrderedDict()
        self._lock = threading.Lock()
        self._enter(0)  # a catalogue that cannot be opened is said now
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of a page is nobody's trouble."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

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


class _Handler(BaseHTTPRequestHandler):
    server: ShopServer
    timeout = READ_S
    server_version = "agentfly-webshop"
    sys_version = ""

    def do_GET(self) -> None:
        if not self._is_for_here():
            return
        if self.path.partition("?")[0] != "/":
            self._send(404, _frame("<p>There is no such page. <a href='/'>To the shop</a></p>"))
            return
        cookie, guest = self.server.guest(self._cookie())
        with guest.lock:
            body = render(guest)
        self._send(200, body, cookie)

    def do_POST(self) -> None:
        if not self._is_for_here():
            return
        cookie, guest = self.server.guest(self._cookie())
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            self._send(413, _frame("<p>That was too long.</p>"))
            return
        try:
            form = parse_qs(self.rfile.read(int(length)).decode("utf-8", "replace"), max_num_fields=8)
        except ValueError:
            self._send(400, _frame("<p>That is no form of the shop. <a href='/'>To the shop</a></p>"), cookie)
            return
        sent = {name: values[0] for name, values in form.items()}
        with guest.lock:
            if not secrets.compare_digest(sent.get("token", "").encode(), guest.token.encode()):
                self._send(403, _frame("<p>This form is not of your visit. <a href='/'>To the shop</a></p>"), cookie)
                return
            if "search" in sent:
                guest.visit.step(f"search[{sent['search']}]")
            elif "click" in sent:
                guest.visit.step(f"click[{sent['click']}]")
            elif sent.get("visit") == "again":
                self.server.restart(guest, guest.place)
            elif sent.get("visit") == "next":
                self.server.restart(guest, guest.place + 1)
        self.send_response(303)
        self.send_header("Location", "/")
        self.send_header("Content-Length", "0")
        self._cookie_header(cookie)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """A person's clicks are nobody's log lines."""

    def _is_for_here(self) -> bool:
        """Whether the one host that is asked for is loopback, or what the server was told to listen on; else it is refused."""
        hosts = [re.sub(r":\d*$", "", host.strip().lower()) for host in self.headers.get_all("Host", [])]
        if len(hosts) == 1 and hosts[0] in (*LOOPBACK, str(self.server.server_address[0]).lower()):
            return True
        self.close_connection = True
        self._send(403, _frame("<p>The shop is open for this machine alone.</p>"))
        return False

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get("visit")
        except CookieError:
            return ""
        return found.value if found else ""

    def _send(self, status: int, body: str, cookie: str = "") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self._cookie_header(cookie)
        self.end_headers()
        self.wfile.write(data)

    def _cookie_header(self, cookie: str) -> None:
        if cookie:
            self.send_header("Set-Cookie", f"visit={cookie}; Path=/; HttpOnly; SameSite=Strict")


def open_page(
    host: str = HOST,
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
    with _listen([*([task] if task else []), *more], host, port) as server:
        say(f"The shop is open at {server.url} (Ctrl-C closes it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("The shop is closed")


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


def _listen(tasks: Sequence[Task], host: str, port: int | None) -> ShopServer:
    try:
        return ShopServer(tasks, host, PORT if port is None else port)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return ShopServer(tasks, host, 0)
        raise ConfigError(f"the shop cannot listen on {host}:{port or PORT}: {error.strerror or error}") from error


def render(guest: Guest) -> str:
    """The page that a visit is at, as HTML."""
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
    parts.append(
        f"<hr><p>{_button(token, 'visit', 'again', 'Start again')}{_button(token, 'visit', 'next', 'Another task')}</p>"
    )
    return _frame("".join(parts))


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
    return _button(token, "click", what, what, chosen)


def _button(token: str, name: str, value: str, text: str, chosen: bool = False) -> str:
    mark = " class=on aria-pressed=true" if chosen else ""
    return (
        f"<form method=post><input type=hidden name=token value='{token}'>"
        f'<button name={name} value="{escape(value, quote=True)}"{mark}>{escape(text)}</button></form>'
    )


def _frame(body: str) -> str:
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>WebShop</title>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<style>{STYLE}</style></head><body><h1>WebShop</h1>{body}</body></html>"
    )
