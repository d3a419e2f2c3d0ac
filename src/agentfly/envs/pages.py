"""Web pages of worlds: plain HTML without script, on loopback, for one person at this machine. Needs `agentfly[serve]`.

A `WebPage` has one address. GET shows it; a form posts to it and is answered with a redirect, so that a reload repeats nothing.
`webshop.shop.page` and `game_page` are the two kinds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import parse_qs

from ..errors import MissingExtra
from ..net.guard import Guard
from ..net.server import WebServer, serve_until_stopped

HOST, PORT = "127.0.0.1", 8350
MAX_BODY = 8_192
MAX_FIELDS = 8
COOKIE = "visit"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    # Not "no-referrer": browsers then send "Origin: null" with the page's own forms, and the guard would refuse them.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fafafa}
form{display:inline}button,input{font:inherit;padding:.3rem .7rem;margin:.15rem;border:1px solid #999;border-radius:.3rem}
button{background:#fff;cursor:pointer}button.on{background:#246;color:#fff}input{width:60%}.ask{background:#eef;padding:.8rem}
li{margin:.6rem 0}.price{color:#060}.note{color:#900}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0 1rem}
.did{font-weight:600}"""


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """The inner HTML of a page, or None for a redirect to the page; and the cookie that the browser shall keep."""

    body: str | None = None
    status: int = 200
    cookie: str = ""


class WebPage:
    """Subclasses implement `show` and `act`. `title` stands at the top of the page."""

    title = "AgentFly"

    async def start(self) -> None:
        """Prepare before the server listens."""

    async def close(self) -> None:
        """Release what `start` acquired. Also called if `start` failed."""

    async def show(self, cookie: str) -> PageAnswer:
        raise NotImplementedError

    async def act(self, cookie: str, form: dict[str, str]) -> PageAnswer:
        """Apply a form that the page has posted."""
        raise NotImplementedError


def page_server(page: WebPage, port: int | None) -> WebServer:
    """A server for `page` on loopback. Without a `port` it takes PORT, or a free one if PORT is in use."""
    return WebServer(
        _app(page),
        Guard(HOST, own_pages=True),
        host=HOST,
        port=PORT if port is None else port,
        fallback_port=port is None,
        max_connections=64,
        max_body=MAX_BODY,
    )


def open_in_browser(page: WebPage, what: str, port: int | None, say: Callable[[str], None]) -> None:
    """Serve `page` until Ctrl-C. `what` names it in the two sentences that are said."""
    name = what.replace("{", "{{").replace("}", "}}")

    async def run() -> None:
        try:
            await page.start()
            server = page_server(page, port)
            await serve_until_stopped(server, say, f"{name} is open at {{url}}/ (Ctrl-C closes it)", f"{what} is closed")
        finally:
            await page.close()

    asyncio.run(run())


def _app(page: WebPage) -> Any:
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, RedirectResponse, Response
        from starlette.routing import Route
    except ModuleNotFoundError as error:
        raise MissingExtra(f"a web page needs {error.name!r}: pip install 'agentfly[serve]'") from error

    def respond(answer: PageAnswer) -> Response:
        response: Response
        if answer.body is None:
            response = RedirectResponse("/", status_code=303)
        else:
            html = frame(page.title, answer.body).encode("utf-8", "replace")
            response = HTMLResponse(html, status_code=answer.status, headers=HEADERS)
        if answer.cookie:
            response.set_cookie(COOKIE, answer.cookie, path="/", httponly=True, samesite="strict")
        return response

    async def show(request: Request) -> Response:
        return respond(await page.show(request.cookies.get(COOKIE, "")))

    async def act(request: Request) -> Response:
        try:
            fields = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=MAX_FIELDS)
        except ValueError:
            return respond(PageAnswer("<p>That is no form of this page. <a href='/'>Back</a></p>", 400))
        return respond(await page.act(request.cookies.get(COOKIE, ""), {name: values[0] for name, values in fields.items()}))

    async def not_found(request: Request, error: Exception) -> Response:
        return respond(PageAnswer("<p>There is no such page. <a href='/'>Back</a></p>", 404))

    routes = [Route("/", show, methods=["GET"]), Route("/", act, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers={404: not_found})


def button(token: str, name: str, value: str, text: str, chosen: bool = False) -> str:
    """A form with one button that posts `name=value` and the token."""
    mark = " class=on aria-pressed=true" if chosen else ""
    return (
        f"<form method=post><input type=hidden name=token value='{token}'>"
        f'<button name={name} value="{escape(value, quote=True)}"{mark}>{escape(text)}</button></form>'
    )


def frame(title: str, body: str) -> str:
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>"
    )
