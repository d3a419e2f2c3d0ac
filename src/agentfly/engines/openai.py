"""Any OpenAI-compatible chat server as an engine: for running and evaluating agents, and as a judge.

In: requests with messages and tool schemas. Out: completions with text and native tool calls, without token ids: nothing is
trained from them (`openai_served` is the engine for that). Retries, deadlines and the key are `openai_http`'s. Refuses to
repeat a streamed reply of which something was already shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..errors import EngineError
from ..types import Completion, Request
from .openai_http import Again, Server, read
from .openai_wire import Stream, from_answer, to_body
from .options import Address, Count, Key, Pause


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
        base_url: Address | None = None,
        api_key: Key | None = None,
        max_context: int = 1 << 17,
        timeout_s: float = 120.0,
        deadline_s: float = 600.0,
        max_retries: Count = 8,
        retry_s: Pause = 0.5,
        max_connections: int = 256,
        max_tokens_key: str = "max_tokens",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        self.model_name = model
        self._server = Server(
            model,
            base_url,
            api_key=api_key,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            max_retries=max_retries,
            retry_s=retry_s,
            max_connections=max_connections,
        )
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

    def release(self, session: str) -> None:
        """A chat server keeps nothing of ours."""

    async def close(self) -> None:
        await self._server.close()

    async def _once(self, body: dict[str, Any], request: Request) -> Completion:
        import httpx

        stream = Stream(request.on_text) if request.on_text is not None else None
        try:
            async with self._server.client().stream("POST", f"{self.base_url}/chat/completions", json=body) as response:
                if response.status_code != 200:
                    self._server.refuse(response.status_code, await read(response), response.headers.get("retry-after"))
                if stream is None:
                    return from_answer(await read(response))
                async for line in response.aiter_lines():
                    stream.line(line)
                return stream.complete()
        except httpx.HTTPError as error:
            if stream is not None and stream.begun:
                who = self._server.who
                raise EngineError(f"{who} broke off in the middle of a reply: {type(error).__name__}") from error
            raise Again(f"{type(error).__name__}: {error}".rstrip(": ")) from error
