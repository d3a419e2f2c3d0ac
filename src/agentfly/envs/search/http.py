"""The little of HTTP/1.1 that the search server needs: a request off a stream, a JSON answer back onto it.

Heads, bodies and waits are bounded. What is not understood is an `HttpError` with the status that it is answered with. A body
that is too large is read and thrown away, so that whoever sends it reads the answer; one that is far too large is not, and
ends the connection. No chunked bodies, no compression, no upgrade.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_HEAD = 16 << 10
MAX_THROWN = 256 << 20
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    411: "Length Required",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class HttpError(Exception):
    """An answer other than 200. `ends`: the connection cannot be used any more."""

    def __init__(self, status: int, sentence: str, *, ends: bool = False) -> None:
        super().__init__(sentence)
        self.status, self.ends = status, ends


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    keep: bool

    def json(self) -> dict[str, Any]:
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is not JSON: {str(error)[:100]}") from None
        if not isinstance(found, dict):
            raise HttpError(400, "the body must be a JSON object")
        return found


async def read_request(reader: asyncio.StreamReader, *, idle_s: float, read_s: float, max_body: int) -> HttpRequest | None:
    """The next request of a connection; None where the other side has ended it, or was silent for too long."""
    try:
        async with asyncio.timeout(idle_s):
            first = await reader.readexactly(1)
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        return None
    try:
        async with asyncio.timeout(read_s):
            head = first + await reader.readuntil(b"\r\n\r\n")
            method, path, headers, keep = _head(head)
            length = _length(headers)
            if length > max_body:
                left = await _thrown_away(reader, length)
                raise HttpError(413, f"the body of a request has at most {max_body} bytes", ends=left or not keep)
            body = await reader.readexactly(length) if length else b""
    except TimeoutError:
        raise HttpError(408, "the request came too slowly", ends=True) from None
    except asyncio.LimitOverrunError:
        raise HttpError(431, f"the head of a request has at most {MAX_HEAD} bytes", ends=True) from None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return HttpRequest(method, path, headers, body, keep)


def answer(status: int, body: Mapping[str, Any], *, keep: bool) -> bytes:
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    head = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        f"Connection: {'keep-alive' if keep else 'close'}",
        *(["Retry-After: 1"] if status == 503 else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + data


def _head(head: bytes) -> tuple[str, str, dict[str, str], bool]:
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise HttpError(400, "this is not an HTTP/1.1 request", ends=True)
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, mark, value = line.partition(":")
        if line and not mark:
            raise HttpError(400, "a header has no colon", ends=True)
        if line:
            headers[name.strip().lower()] = value.strip()
    keep = headers.get("connection", "").lower() != "close" and parts[2] != "HTTP/1.0"
    return parts[0], parts[1].partition("?")[0], headers, keep


async def _thrown_away(reader: asyncio.StreamReader, length: int) -> bool:
    """Read a body that nobody wants; whether some of it was left."""
    if length > MAX_THROWN:
        return True
    left = length
    while left and (chunk := await reader.read(min(left, 1 << 16))):
        left -= len(chunk)
    return left > 0


def _length(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise HttpError(411, "give the body with a Content-Length, not in chunks", ends=True)
    text = headers.get("content-length", "0")
    if not text.isascii() or not text.isdigit():
        raise HttpError(400, "Content-Length must be a number", ends=True)
    return int(text.lstrip("0")[:18] or "0")
