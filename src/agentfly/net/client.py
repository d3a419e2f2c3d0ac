"""The HTTP client of the package: bounded answers, retries within a deadline, and a secret that no error repeats.

    send      one request, one answer            Transient: worth another attempt      Rejected: it is not
    retry     attempts until one succeeds, the attempts are used up, or the deadline passes

Busy servers (408, 409, 425, 429, 5xx) and broken connections are transient. A server's Retry-After is kept. A proxy from the
environment is never used for a loopback address.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from .address import is_loopback
from .json_body import load_json

TRANSIENT = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
MAX_RETRY_AFTER_S = 60.0
MAX_REASON = 300

T = TypeVar("T")


class Transient(Exception):
    """One attempt failed and another may succeed, after `wait_s` if the server said so."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Rejected(Exception):
    """The server refused the request, or its answer cannot be used. `status` is 0 if the answer is at fault."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class OutOfTime(Exception):
    """The deadline passed; the text is the last attempt's failure, or empty."""


class OutOfAttempts(Exception):
    """Every attempt failed; the text is the last one's failure."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The status, headers (lower-case names) and whole body of one response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON, within the limits of `load_json`. Raises ValueError."""
        return load_json(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """`retries` follow the first attempt. Pauses start at `pause_s`, double up to `max_pause_s`, and are randomised."""

    retries: int = 5
    pause_s: float = 0.5
    max_pause_s: float = 30.0
    deadline_s: float = 90.0

    def pause(self, attempt: int) -> float:
        return min(self.pause_s * 2.0**attempt, self.max_pause_s) * random.uniform(0.5, 1.0)


async def retry(attempt: Callable[[], Awaitable[T]], policy: RetryPolicy) -> T:
    """What `attempt` returns. Raises OutOfTime, OutOfAttempts, or what `attempt` raises other than Transient."""
    last = ""
    try:
        async with asyncio.timeout(policy.deadline_s):
            for number in range(policy.retries + 1):
                try:
                    return await attempt()
                except Transient as failure:
                    last = str(failure)
                    if number < policy.retries:
                        await asyncio.sleep(policy.pause(number) if failure.wait_s is None else failure.wait_s)
    except TimeoutError:
        raise OutOfTime(last) from None
    raise OutOfAttempts(last)


class HttpClient:
    """One server. `timeout_s` is how long it may be silent; `secret` is removed from every text that leaves this class.

    `connected_at` is when a connection was last opened, in seconds of `time.monotonic`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        secret: str = "",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
        pool_timeout_s: float | None = None,
        max_body: int = 64 << 20,
        max_connections: int = 256,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.connected_at = -math.inf
        self._secret = secret
        self._headers = dict(headers or {})
        self._timeout_s = timeout_s
        self._pool_timeout_s = pool_timeout_s if pool_timeout_s is not None else timeout_s
        self._max_body = max_body
        self._max_connections = max_connections
        self._proxies = not is_loopback(urlsplit(base_url).hostname)
        # An httpx client belongs to the event loop that it was created in.
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    async def send(self, method: str, url: str, **request: object) -> HttpAnswer:
        """One attempt. `request` takes httpx's `json`, `params`, `headers`. Raises Transient or Rejected if it is not a 200."""
        with self._transient_errors():
            async with self.client().stream(method, url, **request, extensions={"trace": self._trace}) as response:
                answer = await self._read(response)
        return self.check(answer)

    async def lines(self, method: str, url: str, **request: object) -> AsyncGenerator[str, None]:
        """The lines of a streamed answer. Raises like `send`; use `contextlib.aclosing`, which closes the connection."""
        with self._transient_errors():
            async with self.client().stream(method, url, **request, extensions={"trace": self._trace}) as response:
                if response.status_code != 200:
                    self.check(await self._read(response))
                size, rest = 0, bytearray()
                async for part in response.aiter_bytes():
                    size += len(part)
                    if size > self._max_body:
                        raise self._too_large()
                    rest += part
                    if b"\n" in part:
                        *lines, rest = rest.split(b"\n")
                        for line in lines:
                            yield line.decode("utf-8", "replace").rstrip("\r")
                yield rest.decode("utf-8", "replace")

    def send_blocking(self, method: str, url: str, *, timeout_s: float, **request: Any) -> HttpAnswer:
        """The same for a thread without an event loop; `timeout_s` is for the whole answer."""
        import httpx

        deadline = time.monotonic() + timeout_s
        with (
            self._transient_errors(),
            httpx.Client(headers=self._headers, timeout=timeout_s, trust_env=self._proxies) as client,
            client.stream(method, url, **request) as response,
        ):
            body = bytearray()
            for part in response.iter_bytes():
                self._add(body, part)
                if time.monotonic() > deadline:
                    raise Transient(f"the answer took more than {timeout_s:g} s")
        return self.check(HttpAnswer(response.status_code, dict(response.headers), bytes(body)))

    def client(self) -> Any:
        """The httpx client of the running event loop, for requests that `send` does not cover, such as streams."""
        import httpx

        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(self._timeout_s, connect=min(10.0, self._timeout_s), pool=self._pool_timeout_s),
                limits=httpx.Limits(max_connections=self._max_connections, max_keepalive_connections=self._max_connections),
                trust_env=self._proxies,
                follow_redirects=False,
            )
        return client

    async def close(self) -> None:
        """Close the client of the running event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def check(self, answer: HttpAnswer) -> HttpAnswer:
        """The answer. Raises Transient or Rejected unless its status is 200."""
        if answer.status == 200:
            return answer
        reason = f"HTTP {answer.status}: {self.reason(answer)}"
        if answer.status in TRANSIENT:
            raise Transient(reason, retry_after(answer.headers.get("retry-after")))
        raise Rejected(answer.status, reason)

    def reason(self, answer: HttpAnswer) -> str:
        """Why the server refused a request, in its words, without the secret, as one line of at most MAX_REASON characters."""
        text = answer.body[: 64 << 10].decode("utf-8", "replace")
        try:
            reason = reason_in(load_json(text), None)
        except ValueError:
            reason = " ".join(text.split()) or "no reason given"
        # Hidden before the cut: otherwise the cut may leave a part of the secret that `hide` does not recognise.
        return self.hide(reason)[:MAX_REASON]

    def hide(self, text: str) -> str:
        """`text` without the secret, also where it is percent-encoded."""
        for form in {self._secret, quote(self._secret, safe="")} if self._secret else ():
            text = text.replace(form, "***")
        return text

    @contextlib.contextmanager
    def _transient_errors(self) -> Iterator[None]:
        """Raise errors of httpx as Transient, without the secret."""
        import httpx

        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise Transient(self.hide(f"{type(error).__name__}: {error}".rstrip(": "))) from error

    async def _read(self, response: Any) -> HttpAnswer:
        body = bytearray()
        async for part in response.aiter_bytes():
            self._add(body, part)
        return HttpAnswer(response.status_code, dict(response.headers), bytes(body))

    def _add(self, body: bytearray, part: bytes) -> None:
        body += part
        if len(body) > self._max_body:
            raise self._too_large()

    def _too_large(self) -> Rejected:
        return Rejected(0, f"the answer has more than {self._max_body >> 20} MiB")

    async def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        # httpx reconnects without telling its caller; its trace events are the only sign.
        if event.endswith("connect_tcp.complete"):
            self.connected_at = time.monotonic()


def reason_in(answer: object, limit: int | None = MAX_REASON) -> str:
    """The message of a JSON error answer, as one line."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    reason = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(reason).split())[:limit]


def retry_after(header: str | None) -> float | None:
    """Seconds of a Retry-After header; None if it is missing or a date."""
    try:
        return min(max(float(header), 0.0), MAX_RETRY_AFTER_S) if header else None
    except ValueError:
        return None
