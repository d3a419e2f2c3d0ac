"""Any OpenAI-compatible chat server as an engine: for running and evaluating agents, and as a judge.

In: requests with messages and tool schemas. Out: completions with text and native tool calls, without token ids: nothing is
trained from them. Busy servers (408, 429, 5xx) and broken connections are tried again, with growing pauses, until a total
deadline. Every failure is an `EngineError` of one sentence. The key comes from the option or the environment, and never
appears in a sentence, a representation or a log. Refuses to repeat a streamed reply of which something was already shown.
"""

from __future__ import annotations

import asyncio
import os
import random
import weakref
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from ..errors import ConfigError, EngineError
from ..types import Completion, Request
from .openai_wire import Stream, from_answer, reason, to_body

DEFAULT_URL = "https://api.openai.com/v1"
RETRY = {408, 409, 425, 429, 500, 502, 503, 504, 529}
LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class OpenAIEngine:
    """A model behind a server.

    base_url          such as http://localhost:8000/v1; None: OPENAI_BASE_URL, else the public one
    api_key           None: OPENAI_API_KEY; a server that wants none needs none
    max_context       what the served model holds, for agents that cut chains before it overflows
    timeout_s         how long the server may be silent; deadline_s: how long one reply may take, with all its retries
    max_tokens_key    what the server calls the limit of a reply; newer models want "max_completion_tokens"
    extra_body        keys added to every request, such as {"reasoning_effort": "low"}
    """

    reads: Literal["ids", "messages"] = "messages"

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_context: int = 1 << 17,
        timeout_s: float = 120.0,
        deadline_s: float = 600.0,
        max_retries: int = 8,
        retry_s: float = 0.5,
        max_connections: int = 256,
        max_tokens_key: str = "max_tokens",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        self.model_name = model
        self.base_url = (base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL).rstrip("/")
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname or address.username or address.password:
            raise ConfigError("base_url must look like http://host:port/v1, without a user name or password in it")
        for name, number in [("timeout_s", timeout_s), ("deadline_s", deadline_s), ("max_connections", max_connections)]:
            if not number > 0:
                raise ConfigError(f"{name} must be more than 0, not {number}")
        self.version = 0
        self.max_context = max_context
        self._local = address.hostname in LOOPBACK
        self._key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY", "")
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._max_retries = max_retries
        self._retry_s = retry_s
        self._max_connections = max_connections
        self._limit_key = max_tokens_key
        self._extra = dict(extra_body or {})
        # A client belongs to the event loop it was made in.
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"OpenAIEngine({self.model_name!r}, base_url={self.base_url!r})"

    async def generate(self, request: Request) -> Completion:
        if not request.messages:
            raise EngineError("a chat server needs messages, and the request has none")
        body = to_body(self.model_name, request, limit_key=self._limit_key, extra=self._extra)
        last = ""
        try:
            async with asyncio.timeout(self._deadline_s):
                for attempt in range(self._max_retries + 1):
                    try:
                        return await self._once(body, request)
                    except _Again as again:
                        last = str(again)
                        if attempt < self._max_retries:
                            await asyncio.sleep(again.wait_s or self._pause(attempt))
        except TimeoutError:
            why = f" ({last})" if last else ""
            raise EngineError(f"{self._who()} gave no reply within {self._deadline_s:g} s{why}") from None
        raise EngineError(f"{self._who()} failed {self._max_retries + 1} times, the last time: {last}")

    def release(self, session: str) -> None:
        """A chat server keeps nothing of ours."""

    async def close(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _once(self, body: dict[str, Any], request: Request) -> Completion:
        import httpx

        stream = Stream(request.on_text) if request.on_text is not None else None
        try:
            async with self._client().stream("POST", f"{self.base_url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    self._refuse(response.status_code, text, response.headers.get("retry-after"))
                if stream is None:
                    return from_answer((await response.aread()).decode("utf-8", "replace"))
                async for line in response.aiter_lines():
                    stream.line(line)
                return stream.complete()
        except httpx.HTTPError as error:
            if stream is not None and stream.begun:
                raise EngineError(f"{self._who()} broke off in the middle of a reply: {type(error).__name__}") from error
            raise _Again(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    def _refuse(self, status: int, text: str, retry_after: str | None) -> None:
        why = reason(text)
        if self._key:
            why = why.replace(self._key, "***")
        if status in RETRY:
            raise _Again(f"HTTP {status}: {why}", _seconds(retry_after))
        raise EngineError(f"{self._who()} refused the request: HTTP {status}: {why}")

    def _client(self) -> Any:
        import httpx

        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=httpx.Timeout(self._timeout_s, connect=min(10.0, self._timeout_s), pool=self._deadline_s),
                limits=httpx.Limits(max_connections=self._max_connections, max_keepalive_connections=self._max_connections),
                trust_env=not self._local,  # a proxy of the machine must not catch what is meant for the machine itself
            )
        return client

    def _pause(self, attempt: int) -> float:
        return float(min(self._retry_s * 2**attempt, 30.0) * random.uniform(0.5, 1.0))

    def _who(self) -> str:
        return f"{self.model_name} at {self.base_url}"


class _Again(Exception):
    """Not an error yet: worth another try, after `wait_s` where the server said so."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


def _seconds(header: str | None) -> float | None:
    try:
        return min(max(float(header), 0.0), 60.0) if header else None
    except ValueError:  # a date; our own pause will do
        return None
