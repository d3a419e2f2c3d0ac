"""One OpenAI-compatible server: its address and key, and the EngineErrors for everything that goes wrong on the way.

HTTP, retries, Retry-After, bounds and hiding the key are `agentfly.net.client`'s. The key comes from the option or from
OPENAI_API_KEY and never appears in an error, a representation or a log.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ..errors import ConfigError, EngineError
from ..net.address import is_url
from ..net.client import HttpAnswer, HttpClient, OutOfAttempts, OutOfTime, Rejected, RetryPolicy, Transient, retry

DEFAULT_URL = "https://api.openai.com/v1"
ALIVE_S = 10.0
"""How long a server may take to show that it is there."""

T = TypeVar("T")


class RequestRefused(EngineError):
    """The server refused the request; another attempt would be refused, too."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class ModelServer:
    """`timeout_s` is how long the server may be silent; `policy` says how often and how long one answer is retried."""

    def __init__(
        self,
        model: str,
        base_url: str | None,
        api_key: str | None,
        timeout_s: float,
        max_connections: int,
        policy: RetryPolicy,
    ) -> None:
        self.base_url = (base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL).rstrip("/")
        if not is_url(self.base_url):
            raise ConfigError("base_url must look like http://host:port/v1, without a user name or password in it")
        key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY", "")
        self.who = f"{model} at {self.base_url}"
        self.client = HttpClient(
            self.base_url,
            secret=key,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout_s=timeout_s,
            pool_timeout_s=policy.deadline_s,  # a request that waits for a free connection is not a silent server
            max_connections=max_connections,
        )
        self._policy = policy

    def __repr__(self) -> str:
        return f"ModelServer({self.base_url!r})"

    @property
    def root(self) -> str:
        """The address of the endpoints that are not part of OpenAI's API."""
        return self.base_url.removesuffix("/v1")

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What `attempt` returns, after retries. Raises EngineError if the attempts or the time are used up."""
        try:
            return await retry(attempt, self._policy)
        except OutOfTime as last:
            why = f" ({last})" if str(last) else ""
            raise EngineError(f"{self.who} gave no reply within {self._policy.deadline_s:g} s{why}") from None
        except OutOfAttempts as last:
            raise EngineError(f"{self.who} failed {self._policy.retries + 1} times, the last time: {last}") from None
        except Rejected as error:
            raise self.refused(error) from error

    async def check_alive(self) -> None:
        """Raises EngineError within ALIVE_S if the server does not answer, or refuses the key.

        A server that answers with another error is alive: not every server lists its models.
        """

        async def ask() -> None:
            try:
                await self.client.send("GET", f"{self.base_url}/models")
            except Transient as error:
                if not str(error).startswith("HTTP 429"):
                    raise

        try:
            await retry(ask, RetryPolicy(retries=2, pause_s=0.3, deadline_s=ALIVE_S))
        except (OutOfTime, OutOfAttempts) as last:
            why = str(last) or f"no reply within {ALIVE_S:g} s"
            raise EngineError(f"{self.who} does not answer ({why}): start the server, or correct its address") from None
        except Rejected as error:
            if error.status in (401, 403):
                raise self.refused(error) from error

    async def post(self, url: str, body: Mapping[str, Any]) -> Any:
        """The JSON of one attempt. Raises Transient if another attempt could help, else EngineError."""
        try:
            return self._json(await self.client.send("POST", url, json=body))
        except Rejected as error:
            raise self.refused(error) from error

    def call(self, method: str, url: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        """The JSON of one request without retries, from a thread without an event loop: for the server's controls."""
        try:
            answer = self.client.send_blocking(method, url, timeout_s=timeout_s, json=body)
        except Transient as error:
            raise EngineError(f"{self.who} did not answer {urlsplit(url).path}: {error}") from error
        except Rejected as error:
            raise self.refused(error) from error
        return self._json(answer) if answer.body.strip() else {}

    def refused(self, error: Rejected) -> RequestRefused:
        refusing = " refused the request" if error.status else ""
        return RequestRefused(error.status, f"{self.who}{refusing}: {error}")

    def _json(self, answer: HttpAnswer) -> Any:
        try:
            return answer.json()
        except ValueError as error:
            raise EngineError(f"{self.who} answered with something that is not JSON") from error
