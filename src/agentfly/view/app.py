"""The application of the dashboard and its server. `Dashboard` is what the command runs; `make_app` is the ASGI application.

    /api/...                   JSON (see `api`), streams of events (`live`, `chat`)
    /static/...                the files of the package's folder `static`, with an ETag; browsers ask each time (no-cache)
    /, /run/..., /compare      index.html: the page reads its state from the address

Security. The guard (`net.guard`) has checked Host, Origin and token before a request comes here. The address that the command
prints holds the token; the first request with it gets a cookie (HttpOnly, SameSite=Strict) and is redirected. Texts of models
and tools leave the server only as JSON. The content policy forbids inline script, frames and every other origin.
"""

from __future__ import annotations

import hashlib
import mimetypes
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from ..errors import AgentFlyError, ConfigError
from ..net.guard import Guard
from ..net.server import App, Receive, Scope, Send, WebServer
from .api import routes as api_routes
from .chat_api import routes as chat_routes
from .chats import Chats
from .library import Library, NotFound
from .live import LibraryWatcher

HOST, PORT = "127.0.0.1", 8360
STATIC = Path(__file__).parent / "static"
MAX_BODY = 256 << 10
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not "no-referrer": browsers then send "Origin: null" with the page's own requests, and the guard would refuse them.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml", ".woff2": "font/woff2"}


class Dashboard:
    """The server: `async with Dashboard(folder) as dashboard: dashboard.address`.

    `token` is drawn if it is not given. `device` is where conversations load their model (see `Chats`).
    Raises ConfigError if the folder does not exist or the address cannot be bound.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        host: str = HOST,
        port: int | None = None,
        token: str | None = None,
        device: str | None = None,
    ) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self.library = Library(folder)
        self.changes = LibraryWatcher(self.library)
        self.chats = Chats(self.library, device=device)
        cookie = cookie_name(self.token)
        guard = Guard(host, self.token, own_pages=True, cookie=cookie, cure="open the address that `agentfly view` has printed")
        self._server = WebServer(
            make_app(self.library, self.changes, self.chats, guard=guard, cookie=(cookie, self.token)),
            guard,
            host=host,
            port=PORT if port is None else port,
            fallback_port=port is None,
            max_connections=256,
            max_body=MAX_BODY,
        )

    @property
    def url(self) -> str:
        """The address without the token."""
        return self._server.url

    @property
    def app(self) -> App:
        """The application behind its guard, as the server runs it."""
        return self._server.app

    @property
    def address(self) -> str:
        """The address to open in a browser; it holds the token."""
        return f"{self.url}/?{urlencode({'token': self.token})}"

    async def __aenter__(self) -> Dashboard:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.changes.close()  # ends the streams: the server would wait for them
        await self.chats.close()
        await self._server.close()
        await self.release()

    async def release(self) -> None:
        """Close readers and conversations: for an application that was never served. Idempotent."""
        self.changes.close()
        await self.chats.close()
        self.library.close()


def cookie_name(token: str) -> str:
    """The cookie of one server. Browsers share cookies between the ports of a host, so two dashboards need two names."""
    return f"agentfly_view_{hashlib.sha256(token.encode()).hexdigest()[:10]}"


def make_app(
    library: Library,
    changes: LibraryWatcher,
    chats: Chats,
    *,
    guard: Guard | None = None,
    cookie: tuple[str, str] | None = None,
    static: Path = STATIC,
) -> App:
    """The ASGI application, without the guard, which the server asks."""
    files = StaticFiles(static)

    async def page(request: Request) -> Response:
        return files.respond("index.html", request)

    async def file(request: Request) -> Response:
        return files.respond(request.path_params["path"], request)

    async def icon(request: Request) -> Response:
        return files.respond("favicon.ico", request)

    routes = [
        *api_routes(library, changes),
        *chat_routes(chats),
        Route("/api/{rest:path}", _no_such_route, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        Route("/static/{path:path}", file),
        Route("/favicon.ico", icon),
        Route("/", page),
        Route("/compare", page),
        Route("/run/{rest:path}", page),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(GZipMiddleware, minimum_size=1000, compresslevel=4)],
        exception_handlers={AgentFlyError: _failed, HTTPException: _failed, OSError: _failed},
    )
    app.router.redirect_slashes = False
    return _Shell(app, guard, cookie)


async def _no_such_route(request: Request) -> Response:
    raise HTTPException(404, "there is no such address in the API")


async def _failed(request: Request, error: Exception) -> Response:
    """The sentence of an error as JSON."""
    if isinstance(error, HTTPException):
        sentences = {404: "there is no such page", 405: "this address does not take such a request"}
        sentence = error.detail if error.detail not in ("Not Found", "Method Not Allowed") else sentences[error.status_code]
        return JSONResponse({"error": sentence}, status_code=error.status_code, headers=error.headers)
    if isinstance(error, OSError):  # such as a checkpoint that the trainer removes at this moment
        return JSONResponse({"error": f"a file cannot be read: {error.strerror or error}"}, status_code=503)
    status = 404 if isinstance(error, NotFound) else 400 if isinstance(error, ConfigError) else 503
    return JSONResponse({"error": str(error)}, status_code=status)


class StaticFiles:
    """The files of a folder. The table of its files is read once, so a request can name nothing else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _files(self) -> dict[str, Path]:
        paths = sorted(path for path in self._folder.rglob("*") if path.is_file() and not path.is_symlink())
        return {path.relative_to(self._folder).as_posix(): path for path in paths}

    def respond(self, name: str, request: Request) -> Response:
        """The file, or 304 if the browser has it. Raises HTTPException."""
        path = self._files.get(name)
        if path is None:
            raise HTTPException(404, "there is no such file")
        data = path.read_bytes()
        tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        tags = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
        if tag in tags:
            return Response(status_code=304, headers=headers)
        kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return Response(data, media_type=kind, headers=headers)


class _Shell:
    """Outermost layer: turns the token of the address into a cookie, and adds the headers that every response has."""

    def __init__(self, app: Any, guard: Guard | None, cookie: tuple[str, str] | None) -> None:
        self._app, self._guard, self._cookie = app, guard, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(event: Any) -> None:
            if event["type"] == "http.response.start":
                present = {name for name, _ in event["headers"]}
                own = {**HEADERS, "cache-control": "no-store"}
                more = [(name.encode(), value.encode()) for name, value in own.items() if name.encode() not in present]
                event = {**event, "headers": [*event["headers"], *more]}
            await send(event)

        query = scope.get("query_string", b"").decode("latin-1")
        is_page = scope["method"] in ("GET", "HEAD") and not scope["path"].startswith("/api/")
        if is_page and self._cookie is not None and self._guard is not None and self._guard.in_query(query):
            # The raw path: a run's name may hold an encoded slash.
            path = scope.get("raw_path") or scope["path"].encode()
            response = self._welcome(path.decode("latin-1"), parse_qsl(query, keep_blank_values=True))
            await response(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _welcome(self, path: str, query: Sequence[tuple[str, str]]) -> Response:
        assert self._cookie is not None
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        # A path that begins with two slashes would be read as another host.
        target = "/" + path.lstrip("/\\") + (f"?{rest}" if rest else "")
        response = RedirectResponse(target, status_code=303)
        name, value = self._cookie
        response.set_cookie(name, value, path="/", httponly=True, samesite="strict")
        return response
