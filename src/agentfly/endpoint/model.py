"""A model with fixed weights as an Answerer: what `agentfly serve` puts behind a user's keys."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TypeVar

from ..errors import ConfigError
from ..protocols import Engine, Renderer
from ..types import Request, Sampling
from .calls import Answer, Asked, Call, Refused
from .replies import Replies

_numbers = count(1)
_T = TypeVar("_T")


class ModelAnswerer:
    """Renders each call's history, samples a reply and reads it. Calls are independent of each other.

    `sampling` holds for what a client leaves open; without a `max_tokens` of the client a reply may fill the context if
    `fills_context` is true. `renderer` is None for an engine that reads messages.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer | None,
        sampling: Sampling | None = None,
        *,
        max_context: int | None = None,
        fills_context: bool = True,
    ) -> None:
        self._engine, self._renderer = engine, renderer
        self._sampling = sampling or Sampling()
        self._max_context = min(max_context or engine.max_context, engine.max_context)
        self._fills_context = fills_context
        self._replies = Replies(renderer)

    async def answer(self, call: Call) -> Answer:
        messages = self._replies.with_thinking(call)
        ids = self._ids(call)
        sampling = sampling_of(self._sampling, call.asked, self._room(ids), self._fills_context)
        says = None if call.on_text is None else self._replies.sayer(call, sampling)
        request = Request(ids, sampling, f"served{next(_numbers)}", messages, call.tools, None if says is None else says.hear)
        try:
            completion = await self._engine.generate(request)
        finally:
            self._engine.release(request.session)
        return self._checked(
            lambda: self._replies.read(completion, call.tools, sampling.stop, len(ids), said=says is not None and says.begun)
        )

    async def count(self, call: Call) -> int:
        if self._renderer is None:
            raise Refused(400, "the model is behind another server, which does not count the tokens of a prompt")
        return len(self._ids(call))

    def _ids(self, call: Call) -> list[int]:
        if self._renderer is None:
            return []
        renderer, messages = self._renderer, self._replies.with_thinking(call)
        if call.tools:
            self._checked(lambda: self._replies.parser(call.tools))
        return self._checked(lambda: renderer.start(messages, call.tools))

    def _room(self, ids: list[int]) -> int:
        room = self._max_context - len(ids)
        if room < 1:
            raise Refused(400, f"the prompt has {len(ids):,} tokens and the context {self._max_context:,}: send less")
        return room

    def _checked(self, work: Callable[[], _T]) -> _T:
        """What `work` returns. A ConfigError is the client's: a template refuses its messages or knows no tools."""
        try:
            return work()
        except ConfigError as error:
            raise Refused(400, str(error)) from error


def sampling_of(default: Sampling, asked: Asked, room: int, fills_context: bool) -> Sampling:
    """The sampling of a reply: what the client asks for, else the default, within the room of the context."""

    def either(wanted: _T | None, otherwise: _T) -> _T:
        return otherwise if wanted is None else wanted

    return Sampling(
        temperature=either(asked.temperature, default.temperature),
        top_p=either(asked.top_p, default.top_p),
        top_k=either(asked.top_k, default.top_k),
        min_p=either(asked.min_p, default.min_p),
        max_tokens=min(either(asked.max_tokens, room if fills_context else default.max_tokens), room),
        stop=tuple(dict.fromkeys((*asked.stop, *default.stop))),
        stop_ids=default.stop_ids,
        seed=either(asked.seed, default.seed),
    )
