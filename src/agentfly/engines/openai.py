"""Any OpenAI-compatible chat server as an engine: for running and evaluating agents, and as a judge.

Completions have text and native tool calls but no token ids, so they cannot be trained on (`openai_served` can). A streamed
reply that broke off after its first text is not requested again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Literal

from ..errors import EngineError
from ..net.client import RetryPolicy, Transient
from ..schema import Count, Name, NotNegative, Positive
from ..types import Completion, Request
from .openai_server import ModelServer
from .openai_wire import ChatStream, from_answer, to_body
from .options import Address, ApiKey, Seconds, check_arguments


class OpenAIEngine:
    """A model behind a chat server.

    base_url          such as http://localhost:8000/v1; None: OPENAI_BASE_URL, else OpenAI's
    api_key           None: OPENAI_API_KEY, if it is set
    max_context       context length of the served model; agents end a chain before it overflows
    timeout_s         how long the server may be silent; deadline_s: how long one reply may take, retries included
    max_tokens_key    the server's name for the limit of a reply; newer models want "max_completion_tokens"
    extra_body        keys added to every request, such as {"reasoning_effort": "low"}
    """

    reads: Literal["ids", "messages"] = "messages"

    def __init__(
        self,
        model: str,
        *,
        base_url: Address | None = None,
        api_key: ApiKey | None = None,
        max_context: Count = 1 << 17,
        timeout_s: Positive = 120.0,
        deadline_s: Positive = 600.0,
        max_retries: NotNegative = 8,
        retry_s: Seconds = 0.5,
        max_connections: Count = 256,
        max_tokens_key: Name = "max_tokens",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments(OpenAIEngine, locals())
        self.model_name = model
        policy = RetryPolicy(retries=max_retries, pause_s=retry_s, deadline_s=deadline_s)
        self._server = ModelServer(model, base_url, api_key, timeout_s, max_connections, policy)
        self.base_url = self._server.base_url
        self.version = 0
        self.max_context = max_context
        self._limit_key = max_tokens_key
        self._extra = dict(extra_body or {})

    def __repr__(self) -> str:
        return f"OpenAIEngine({self.model_name!r}, base_url={self.base_url!r})"

    async def generate(self, request: Request) -> Completion:
        if not request.messages:
            raise EngineError("a chat server needs messages, and the request has none")
        body = to_body(self.model_name, request, limit_key=self._limit_key, extra=self._extra)
        return await self._server.retry(lambda: self._once(body, request))

    async def check_alive(self) -> None:
        """Raises EngineError within seconds if the server does not answer."""
        await self._server.check_alive()

    def release(self, session: str) -> None:
        """Nothing to release: a chat server holds no state of a chain."""

    async def close(self) -> None:
        await self._server.client.close()

    async def _once(self, body: dict[str, Any], request: Request) -> Completion:
        url = f"{self.base_url}/chat/completions"
        if request.on_text is None:
            answer = await self._server.client.send("POST", url, json=body)
            return from_answer(answer.body)
        stream = ChatStream(request.on_text)
        try:
            async with aclosing(self._server.client.lines("POST", url, json=body)) as lines:
                async for line in lines:
                    stream.line(line)
            return stream.complete()
        except asyncio.CancelledError:
            if request.on_cut is not None and stream.begun:
                request.on_cut(stream.cut())
            raise
        except Transient as error:
            if stream.begun:  # the text was shown already, so the reply cannot be sampled again
                raise EngineError(f"{self._server.who} broke off in the middle of a reply: {error}") from error
            raise
