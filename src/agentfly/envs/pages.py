"""What every web page of a world needs: plain HTML without script, on loopback, for a person at this machine.

A request for another host than this one is refused, so that no other name can be made to stand for it; what a form sends is
short and is read here; a browser that goes away in the middle of a page is nobody's trouble. Nothing is logged or written. What
a page shows and does is its world's: see `webshop.page` and `game_page`.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs

from ..errors import ConfigError

HOST, PORT = "127.0.0.1", 8350
NAMES = (HOST, "localhost")
MAX_BODY = 8_192
READ_S = 30.0
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fafafa}
form{display:inline}button,input{font:inherit;padding:.3rem .7rem;margin:.15rem;border:1px solid #999;border-radius:.3rem}
button{background:#fff;cursor:pointer}button.on{background:#246;color:#fff}input{width:60%}.ask{background:#eef;padding:.8rem}
li{margin:.6rem 0}.price{color:#060}.note{color:#900}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0 1rem}
.did{font-weight:600}"""


class PageServer(ThreadingHTTPServer):
    """`title` stands on every page."""

    daemon_threads = True
    title = "AgentFly"

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class PageHandler(BaseHTTPRequestHandler):
    """`show` and `act` are a page's own."""

    server: PageServer
    timeout = READ_S
    server_version = "agentfly-page"
    sys_version = ""

    def show(self) -> None:
        raise NotImplementedError

    def act(self, sent: dict[str, str]) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        if not self._is_for_here():
            return
        if self.path.partition("?")[0] != "/":
            self.send_page(404, "<p>There is no such page. <a href='/'>Back</a></p>")
            return
        self.show()

    def do_POST(self) -> None:
        if not self._is_for_here():
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            self.send_page(413, "<p>That was too long.</p>")
            return
        try:
            form = parse_qs(self.rfile.read(int(length)).decode("utf-8", "replace"), max_num_fields=8)
        except ValueError:
            self.send_page(400, "<p>That is no form of this page. <a href='/'>Back</a></p>")
            return
        self.act({name: values[0] for name, values in form.items()})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """A person's clicks are nobody's log lines."""

    def _is_for_here(self) -> bool:
        """Whether the one host that is asked for is loopback; else it is refused."""
        hosts = [re.sub(r":\d*$", "", host.strip().lower()) for host in self.headers.get_all("Host", [])]
        if len(hosts) == 1 and hosts[0] in NAMES:
            return True
        self.close_connection = True
        self.send_page(403, "<p>This page is for this machine alone.</p>")
        return False

    def send_page(self, status: int, body: str, cookie: str = "") -> None:
        data = frame(self.server.title, body).encode("utf-8", "replace")
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

    def send_back(self, cookie: str = "") -> None:
        """After a form: the page is asked for anew, so that loading it again does nothing twice."""
        self.send_response(303)
        self.send_header("Location", "/")
        self.send_header("Content-Length", "0")
        self._cookie_header(cookie)
        self.end_headers()

    def _cookie_header(self, cookie: str) -> None:
        if cookie:
            self.send_header("Set-Cookie", f"visit={cookie}; Path=/; HttpOnly; SameSite=Strict")


S = TypeVar("S", bound=PageServer)


def listen(make: Callable[[int], S], port: int | None, what: str) -> S:
    """A server on `port`; without one on the usual port, or on any that is free where another page is open there already."""
    try:
        return make(PORT if port is None else port)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return make(0)
        raise ConfigError(f"{what} cannot listen on {HOST}:{port or PORT}: {error.strerror or error}") from error


def serve(server: PageServer, what: str, say: Callable[[str], None]) -> None:
    """Until Ctrl-C."""
    say(f"{what} is open at {server.url} (Ctrl-C closes it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say(f"{what} is closed")


def button(token: str, name: str, value: str, text: str, chosen: bool = False) -> str:
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
