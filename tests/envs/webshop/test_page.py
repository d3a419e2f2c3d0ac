"""The shop as a web page: a browser buys by its buttons, sees only its own visit, and cannot be made to act by others."""

from __future__ import annotations

import html
import json
import logging
import re
import socket
import struct
import time
from collections.abc import Iterator
from email.message import Message
from http.client import HTTPConnection
from urllib.parse import urlencode

import pytest

from agentfly.data import load_tasks
from agentfly.envs import pages as shared_pages
from agentfly.envs.pages import MAX_BODY
from agentfly.envs.webshop.catalogue.catalogue import Catalogue, open_catalogue
from agentfly.envs.webshop.catalogue.goals import ShopGoal
from agentfly.envs.webshop.catalogue.products import ShopProduct
from agentfly.envs.webshop.shop import page as pages
from agentfly.envs.webshop.shop.page import Guest, ShopPage, open_page, render
from agentfly.envs.webshop.shop.visit import Visit
from agentfly.envs.webshop.solver import play
from agentfly.envs.webshop.tasks import easy_webshop_tasks, webshop_tasks
from agentfly.errors import ConfigError
from agentfly.types import Task
from tests.envs.serving import Interrupting, Served, serving


@pytest.fixture
def server() -> Iterator[Served[ShopPage]]:
    with serving(lambda: ShopPage(load_tasks(webshop_tasks("test", 2)))) as server:
        yield server


class Browser:
    """Keeps its cookie, follows redirects, and presses only what the page shows."""

    def __init__(self, server: Served[ShopPage]) -> None:
        self.address = ("127.0.0.1", server.port)
        self.cookie, self.text, self.status, self.headers = "", "", 0, Message()

    def send(self, method: str, body: str = "", path: str = "/", **headers: str) -> str:
        connection = HTTPConnection(*self.address, timeout=60)
        try:
            kind = {"Content-Type": "application/x-www-form-urlencoded"} if method == "POST" else {}
            cookie = {"Cookie": self.cookie} if self.cookie else {}
            connection.request(method, path, body=body or None, headers={**kind, **cookie, **headers})
            response = connection.getresponse()
            self.text, self.status = response.read().decode(), response.status
            self.headers = response.headers
        finally:
            connection.close()
        if given := self.headers.get("Set-Cookie"):
            self.cookie = given.partition(";")[0]
        return self.text if self.status != 303 else self.send("GET")

    @property
    def token(self) -> str:
        return re.findall(r"name=token value='([^']+)'", self.text)[0]

    @property
    def buttons(self) -> list[str]:
        return [html.unescape(value) for value in re.findall(r'<button name=click value="([^"]*)"', self.text)]

    def press(self, **form: str) -> str:
        return self.send("POST", urlencode({"token": self.token, **form}))


def test_a_person_buys_what_the_task_asks_for(server):
    browser = Browser(server)
    goal = ShopGoal.from_dict(server.page.tasks[0].fields["goal"])
    assert html.escape(goal.instruction) in browser.send("GET")
    for action, _ in play(Visit(open_catalogue("generated"), goal)):
        kind, _, value = action.removesuffix("]").partition("[")
        assert kind == "search" or value in browser.buttons
        browser.press(**{kind: value})
    assert "Score 1.00" in browser.text
    assert "Search the shop" not in browser.text
    assert browser.buttons == []
    second = ShopGoal.from_dict(server.page.tasks[1].fields["goal"])
    assert html.escape(second.instruction) in browser.press(visit="next")
    assert html.escape(goal.instruction) in browser.press(visit="next")


def test_each_browser_has_a_visit_of_its_own(server):
    one, other = Browser(server), Browser(server)
    one.send("GET")
    other.send("GET")
    one.press(search="mug")
    assert "results" in one.text
    assert "Search for what your task asks for" in other.send("GET")
    assert one.cookie != other.cookie


def test_a_form_of_another_site_does_nothing(server):
    browser = Browser(server)
    browser.send("GET")
    for form in ({"search": "mug"}, {"search": "mug", "token": "guess"}, {"search": "mug", "token": "é"}):
        browser.send("POST", urlencode(form))
        assert browser.status == 403
    assert "Search for what your task asks for" in browser.send("GET")
    assert "SameSite=strict" in browser.headers["Set-Cookie"]
    assert "HttpOnly" in browser.headers["Set-Cookie"]
    assert "default-src 'none'" in browser.headers["Content-Security-Policy"]


def test_bad_requests_are_answered(server):
    browser = Browser(server)
    browser.send("GET")
    browser.send("POST", "x" * (MAX_BODY + 1))
    assert browser.status == 413
    browser.send("POST", "search=mug", **{"Content-Length": "²"})
    assert browser.status == 400
    browser.send("POST", "search=mug", **{"Content-Length": "9" * 5000})
    assert 400 <= browser.status < 500
    browser.send("GET", path="/etc/passwd")
    assert browser.status == 404
    browser.cookie = "visit=\x7f; broken;;=;"
    browser.send("GET")
    assert browser.status == 200
    page = browser.press(search="<script>alert(1)</script>\x00]")
    assert "<script>" not in page
    browser.send("POST", "&".join(f"a{number}=1" for number in range(50)))
    assert browser.status == 400
    assert "no form of this page" in browser.text


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:{port}", 200),
        ("LocalHost:9", 200),
        ("[::1]:{port}", 200),
        ("shop.example:{port}", 403),
        ("127.0.0.1.shop.example", 403),
        ("localhost@shop.example", 403),
        ("", 403),
    ],
)
def test_only_this_machine_is_answered(server, host, status, method):
    """A name of another site can be made to point here, and its pages would then count as the shop's own."""
    browser = Browser(server)
    browser.send("GET")
    host = host.format(port=server.port)
    browser.send(method, urlencode({"token": browser.token, "search": "mug"}) if method == "POST" else "", Host=host)
    assert browser.status == status
    assert ("Your task." in browser.text) is (status == 200)


def test_a_browser_that_disconnects_is_not_an_error_and_a_defect_is_logged(server, caplog, monkeypatch):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(b"POST / HTTP/1.0\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()  # with a reset, because of the option
    browser = Browser(server)
    browser.send("GET")
    assert browser.status == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    async def broken(cookie: str) -> None:
        raise LookupError("a mistake of ours")

    monkeypatch.setattr(server.page, "guest", broken)
    browser.send("GET")
    assert browser.status == 500
    assert "a mistake of ours" not in browser.text
    waited_until = time.monotonic() + 30
    while "a mistake of ours" not in caplog.text and time.monotonic() < waited_until:
        time.sleep(0.01)  # the answer is sent before the exception is logged
    assert "a mistake of ours" in caplog.text


def test_a_search_without_results_and_a_click_in_vain(server):
    browser = Browser(server)
    browser.send("GET")
    assert "Nothing here" in browser.press(search="zzzz qqqq")
    assert "There is nothing called" in browser.press(click="nowhere <b>")
    assert "<b>'" not in browser.text


def test_texts_of_a_catalogue_are_escaped():
    evil = "<img src=x onerror=alert(1)>\"'"
    product = ShopProduct(asin="B000000001", title=evil, description=evil, bullets=(evil,), options={evil: (evil.lower(), "b")})
    goal = ShopGoal(asin="B000000001", instruction=evil, attributes=(), options={}, price_upper=1e6, name=evil)
    visit = Visit(Catalogue("evil", [product]), goal)
    guest = Guest(visit)
    shown = [render(guest)]
    for action in ("search[img]", "click[b000000001]", f"click[{evil.lower()}]", "click[description]", "click[< prev]"):
        visit.step(action)
        assert visit.note == ""
        shown.append(render(guest))
    visit.step("click[features]")
    shown.append(render(guest))
    visit.step("click[< prev]")
    visit.step("click[buy now]")
    shown.append(render(guest))
    assert all("<img" not in text for text in shown)
    assert "Score" in shown[-1]


def test_the_oldest_visit_makes_room(server, monkeypatch):
    monkeypatch.setattr(pages, "MAX_VISITS", 3)
    browsers = [Browser(server) for _ in range(4)]
    for browser in browsers:
        browser.send("GET")
        browser.press(search="mug")
    assert "Search for what your task asks for" in browsers[0].send("GET")
    assert "results" in browsers[3].send("GET")


def test_a_page_needs_a_task_and_closes_on_interrupt():
    with pytest.raises(ConfigError, match="at least one task"):
        ShopPage([])
    said = Interrupting()
    open_page(port=0, tasks=load_tasks(webshop_tasks("test", 1)), say=said)
    assert re.match(r"The shop is open at http://127\.0\.0\.1:\d+/ ", said[0])
    assert said[-1] == "The shop is closed"


def test_a_second_shop_takes_another_port_and_a_port_that_was_asked_for_is_named(server, monkeypatch):
    monkeypatch.setattr(shared_pages, "PORT", server.port)
    said = Interrupting()
    open_page(tasks=server.page.tasks, say=said)
    (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/", said[0])
    assert int(port) != server.port
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        open_page(port=server.port, tasks=server.page.tasks, say=said)


def test_a_task_of_another_world_or_of_an_unknown_product_is_one_sentence(server):
    with pytest.raises(ConfigError, match="a WebShop row has a field 'goal'"):
        ShopPage([Task("home", (), {"game": "easy-1"})])
    stranger = {**server.page.tasks[0].fields, "goal": {**server.page.tasks[0].fields["goal"], "asin": "B0NOWHERE0"}}
    with pytest.raises(ConfigError, match="has no product 'B0NOWHERE0'"):
        ShopPage([Task("who", (), stranger)])


@pytest.mark.parametrize("shop", ["generated", "easy", "files"])
def test_another_task_is_one_of_the_same_shop(shop, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path / "cache"))
    name = shop
    if shop == "files":
        row = {"asin": "B000000001", "name": "Mug", "pricing": "$10.00", "query": "mugs", "small_description": ["Blue"]}
        extra = {"instruction": "Find me mugs", "attributes": ["blue"], "instruction_attributes": ["blue"]}
        (tmp_path / "items_shuffle_1000.json").write_text(json.dumps([row, {**row, "asin": "B000000002"}]))
        (tmp_path / "items_ins_v2_1000.json").write_text(json.dumps({"B000000001": extra, "B000000002": extra}))
        name = str(tmp_path)
        goal = open_catalogue(name).goals()[0]
    else:
        goal = ShopGoal.from_dict({"generated": webshop_tasks, "easy": easy_webshop_tasks}[shop]("test", 1)[0]["goal"])
    served: list[ShopPage] = []
    monkeypatch.setattr(pages, "open_in_browser", lambda page, *_: served.append(page))
    open_page(port=0, task=Task("first", (), {"catalogue": name, "goal": goal.to_dict()}), say=lambda text: None)
    tasks = served[0].tasks
    assert tasks[0].id == "first"
    assert len(tasks) == (3 if shop == "files" else 51)
    assert {task.fields["catalogue"] for task in tasks} == {name}
