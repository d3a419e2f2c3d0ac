"""The endpoint: an HTTP server that speaks the dialects of OpenAI and Anthropic, and asks what a key stands for to answer.

    POST /v1/chat/completions   /v1/responses   /v1/messages   /v1/messages/count_tokens       GET /v1/models

The server runs in the event loop that starts it. A key comes as `Authorization: Bearer` or `x-api-key`. A client that goes away
cancels its call. A stream that is silent for `alive_s` gets events that keep it open, of a type that the client counts as life.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import RolloutError
from ..net.guard import Guard
from ..net.server import Receive, Scope, Send, WebServer
from . import chat, messages
from .calls import Answer, Answerer, Closed, Refused
from .responses import ItemHistory, ResponsesExchange
from .wire import Exchange, Given, Json, RequestMarks, as_json, read_body

log = logging.getLogger(__name__)
CLOSED = {"chat": 401, "responses": 400, "messages": 403}
"""The status of a closed chain, by dialect: the one after which clients end at their first request."""
_PATHS = {
    "/v1/chat/completions": "chat", "/v1/responses": "responses", "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
}  # fmt: skip
_AGENT_MARKS = (
    ("x-claude-code-agent-id", "x-claude-code-agent-id"), ("x-codex-parent-thread-id", "thread-id"),
    ("x-parent-session-id", "x-session-id"),
)  # fmt: skip
_MAX_STORED = 64 << 20  # bytes of histories that `previous_response_id` may name


class Keys:
    """Keys and what they stand for. Calling it with a stranger's key returns the Answerer, or None.

    Only digests of keys are kept, and the time of a look-up tells nothing about a key that exists.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Answerer] = {}

    def open(self, answerer: Answerer, key: str | None = None) -> str:
        """Give the answerer a key, a random one by default. Returns the key."""
        key = key or f"af-{secrets.token_urlsafe(32)}"
        self._known[_digest(key)] = answerer
        return key

    def close(self, key: str) -> None:
        """The key stands for nothing any more: a request with it gets 401."""
        self._known.pop(_digest(key), None)

    def __call__(self, key: str) -> Answerer | None:
        return self._known.get(_digest(key))


class EndpointServer:
    """`async with EndpointServer(answerers) as server:` clients send requests to `server.base_url` with a key of `answerers`.

    answerers      what a key stands for, or None: such as `Keys`
    model          the name of the model in answers; requests may name any
    max_in_flight  requests of one key that are answered at once; one more gets 429
    alive_s        seconds of silence after which a stream gets an event
    guard          who may talk to the server; by default programs on this machine
    """

    def __init__(
        self,
        answerers: Callable[[str], Answerer | None],
        *,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        max_in_flight: int = 64,
        max_connections: int = 4096,
        max_body: int = 8 << 20,
        alive_s: float = 5.0,
        guard: Guard | None = None,
    ) -> None:
        self.model = model
        self._answerers = answerers
        self._max_in_flight = max_in_flight
        self._alive_s = alive_s
        self._in_flight: Counter[bytes] = Counter()
        self._working: set[asyncio.Task[Any]] = set()
        self._stored: OrderedDict[tuple[bytes, str], tuple[ItemHistory, int]] = OrderedDict()
        self._stored_bytes = 0
        self._started = int(time.time())
        self._web = WebServer(
            self._app, guard or Guard(host), host=host, port=port, max_connections=max_connections, max_body=max_body,
            error_body=lambda path, status, sentence: _error_body(_dialect_of(path), status, sentence),
        )  # fmt: skip

    @property
    def url(self) -> str:
        """The address without a path, which Anthropic's clients want as their base."""
        return self._web.url

    @property
    def base_url(self) -> str:
        """The address that OpenAI's clients want as their base."""
        return f"{self._web.url}/v1"

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound, MissingExtra without `agentfly[serve]`."""
        await self._web.start()

    async def close(self) -> None:
        """Stop listening and cancel the calls that are being answered: their clients read it. Idempotent."""
        for working in self._working:
            working.cancel()
        await self._web.close()

    async def __aenter__(self) -> EndpointServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- one request -----------------------------------------------------------------------------------------------------

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"].rstrip("/"), scope["method"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        body = (await receive()).get("body", b"")
        dialect = _dialect_of(path)
        if method == "HEAD" and path in ("", "/api/hello", "/v1"):
            await _send_json(send, 200, {})
            return
        try:
            key = _key_of(headers)
            answerer = self._answerers(key)
            if answerer is None:
                raise Refused(401, "the key is missing or wrong: send the key of this server as the API key")
            if method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/")):
                await _send_json(send, 200, self._models(None if path == "/v1/models" else path[11:]))
            elif path not in _PATHS:
                raise Refused(404, f"there is no {path[:80] or '/'} here: {_routes(path)}")
            elif method != "POST":
                raise Refused(405, f"{path} takes POST, not {method[:10]}")
            else:
                await self._answer(answerer, _digest(key), path, headers, body, receive, send)
        except Refused as refused:
            await self._refuse(send, dialect, refused)

    async def _answer(
        self, answerer: Answerer, owner: bytes, path: str, headers: Mapping[str, str], body: bytes, receive: Receive, send: Send
    ) -> None:
        text = _Text()
        exchange = self._read(path, headers, body, owner, text)
        if self._in_flight[owner] >= self._max_in_flight:
            raise Refused(429, f"{self._max_in_flight} requests of this key are being answered: wait for one of them")
        counts = path.endswith("/count_tokens")
        working: asyncio.Task[Any] = asyncio.ensure_future(
            answerer.count(exchange.call) if counts else self._reply(answerer, exchange, owner, len(body))
        )
        leaving = asyncio.ensure_future(_left(receive))
        self._in_flight[owner] += 1
        self._working.add(working)
        try:
            begun = exchange.streams and not counts and await self._stream(exchange, working, leaving, text, send)
            if not exchange.streams or counts:
                await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return  # the client has gone
            try:
                result = _result(working)
            except Refused as refused:
                if not begun:
                    raise
                await _send_more(send, exchange.failure(refused.status, refused.sentence), last=True)
                return
            if counts:
                await _send_json(send, 200, {"input_tokens": result})
            elif begun:
                await _send_more(send, b"".join(exchange.events(result, self.model)), last=True)
            elif exchange.streams:
                events = exchange.opening(self.model) + b"".join(exchange.events(result, self.model))
                await _send_stream_head(send, len(events))
                await _send_more(send, events, last=True)
            else:
                await _send_json(send, 200, exchange.whole(result, self.model))
        finally:
            self._working.discard(working)
            self._in_flight[owner] -= 1
            if not self._in_flight[owner]:
                del self._in_flight[owner]
            leaving.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))

    async def _stream(
        self, exchange: Exchange, working: asyncio.Future[Any], leaving: asyncio.Future[None], text: _Text, send: Send
    ) -> bool:
        """Wait for an answer, and send what has been said of it, or an event in silence. Returns whether the stream began."""
        begun = False
        while True:
            hearing = asyncio.ensure_future(text.wait())
            waiting = (working, leaving, hearing)
            done, _ = await asyncio.wait(waiting, timeout=self._alive_s, return_when=asyncio.FIRST_COMPLETED)
            hearing.cancel()
            if working.done() or leaving.done():
                return begun
            opening = b""
            if not begun:
                await _send_stream_head(send)
                opening = exchange.opening(self.model)
            begun = True
            await _send_more(send, opening + (exchange.saying(text.take(), self.model) if done else exchange.quiet))

    async def _reply(self, answerer: Answerer, exchange: Exchange, owner: bytes, size: int) -> Answer:
        answer = await answerer.answer(exchange.call)
        if isinstance(exchange, ResponsesExchange) and exchange.stored:
            self._stored[owner, exchange.id] = exchange.after(answer), size
            self._stored_bytes += size
            while self._stored_bytes > _MAX_STORED:
                self._stored_bytes -= self._stored.popitem(last=False)[1][1]
        return answer

    def _read(self, path: str, headers: Mapping[str, str], body: bytes, owner: bytes, text: _Text) -> Exchange:
        made = read_body(body)
        marks: RequestMarks = {
            "digest": hashlib.sha256(body).hexdigest(),
            "is_retry": headers.get("x-stainless-retry-count", "0") not in ("0", ""),
            "agent": next((headers.get(name, "")[:128] for mark, name in _AGENT_MARKS if mark in headers), ""),
            "on_text": text.hear if made.get("stream") is True else None,
        }
        if path == "/v1/chat/completions":
            return chat.ChatExchange(made, **marks)
        if path == "/v1/responses":
            return ResponsesExchange(made, lambda name: self._stored.get((owner, name), (None, 0))[0], **marks)
        return messages.MessagesExchange(made, **marks)

    def _models(self, name: str | None) -> Json:
        """The one model, in the shape of both vendors."""
        made = {
            "id": self.model if name is None else name, "object": "model", "created": self._started, "owned_by": "agentfly",
            "type": "model", "display_name": self.model,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
        }  # fmt: skip
        if name is not None:
            return made
        return {"object": "list", "data": [made], "has_more": False, "first_id": self.model, "last_id": self.model}

    async def _refuse(self, send: Send, dialect: str, refused: Refused) -> None:
        closed = isinstance(refused, Closed)
        status = CLOSED[dialect] if closed else refused.status
        # Some clients repeat a request after any 401 but this one.
        more = [(b"x-should-retry", b"false")] if closed else []
        await _send_json(send, status, _error_body(dialect, status, refused.sentence), more)


class _Text:
    """The text of an answer that has been said and not yet been sent."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._heard = asyncio.Event()

    def hear(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._heard.set()

    async def wait(self) -> None:
        await self._heard.wait()

    def take(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        self._heard.clear()
        return text


def _result(working: asyncio.Future[Any]) -> Any:
    """The result of an answerer. Raises Refused for whatever it raised."""
    if working.cancelled():
        raise Closed("the call was cancelled: its chain has ended, or the server stops")
    error = working.exception()
    if error is None:
        return working.result()
    if isinstance(error, Refused):
        raise error
    if isinstance(error, RolloutError):
        raise Refused(500, f"the model gave no reply: {error}") from error
    log.error("a request failed", exc_info=error)
    raise Refused(500, "the server failed; its log says how") from error


async def _left(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        continue


def _dialect_of(path: str) -> str:
    path = path.rstrip("/")
    return _PATHS.get(path, "messages" if path.startswith("/v1/messages") else "chat")


def _routes(path: str) -> str:
    if f"/v1{path}" in _PATHS:
        return "the base address of this client ends in /v1"
    if path.startswith("/v1/v1/"):
        return "the base address of this client has no /v1 at its end"
    return ", ".join(_PATHS)


def _error_body(dialect: str, status: int, sentence: str) -> Json:
    return messages.error_body(status, sentence) if dialect == "messages" else chat.error_body(status, sentence)


def _key_of(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key else headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


async def _send_json(send: Send, status: int, value: Given, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    body = as_json(value).encode("utf-8", "replace")
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def _send_stream_head(send: Send, length: int | None = None) -> None:
    head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    if length is not None:  # known, if the answer was there before the stream began
        head.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": head})


async def _send_more(send: Send, body: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})
