"""The routes of conversations. Every request but GET must come from the dashboard's own page, or show the token itself.

POST /api/chat      {run, checkpoint?: "step-000020" or "model" (before training); the newest if absent,
                     task?: id of a task of the run | chain?: id to fork, turn?: before its reply (0), the number of turns:
                     after the last, sampling?: {temperature, top_p, top_k, min_p, max_tokens, seed}}
                    -> 201 CHAT.  Loading a model may take a minute.
GET /api/chat/ID    CHAT  {session, run, checkpoint, agent, tools: [{name, description}], environment?, task?: TASK,
                     messages: [MESSAGE], turns: [TURN], forked?: {chain, turn}, differences: [sentence], scorable, busy,
                     limits: {idle_s, max_s, max_text, max_turns, max_tokens}}
                    `differences` say where the environment of a fork answered otherwise than in the stored chain.
POST /api/chat/ID   {text?: what to say} -> a stream of events (text/event-stream). Without a text the agent answers the
                     task, or goes on where the chain was forked. Closing the connection stops the reply.
    event: text     {text}                               as it is sampled
    event: reply    {turn, text, stop, ids, pieces?, logprobs, versions, num_context, seconds}      a whole reply
    event: call     {turn, name, arguments, id, error?}
    event: result   {turn, name, observation, reward?, done, error?, image: bool}
    event: score    {reward?, components, error?}        if the task is one of the data set
    event: end      {outcome, answer, turns, tokens, messages: [MESSAGE]}
    event: error    {error}                              the reply failed; the conversation can go on
GET /api/chat       {sessions: [{session, run, checkpoint, opened}], max_sessions}
DELETE /api/chat/ID {closed: true}
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import ConfigError
from ..net.json_body import load_json
from .answers import EventStream, answer, dumps
from .chat import BUSY, MAX_TEXT, Chat, Wish
from .chats import Chats


def routes(chats: Chats) -> list[Route]:
    """The routes of `chats`."""

    async def listed(request: Request) -> Response:
        return answer(chats.to_json())

    async def opened(request: Request) -> Response:
        chat = await chats.open(Wish.parse(await _body(request)))
        return answer(chat.to_json(), 201)

    async def shown(request: Request) -> Response:
        return answer(chats.find(request.path_params["id"]).to_json())

    async def said(request: Request) -> Response:
        chat = chats.find(request.path_params["id"])
        text = parse_text(await _body(request))
        if chat.talk.busy:
            return answer({"error": BUSY}, 409)
        return EventStream(_stream(chat, text))

    async def closed(request: Request) -> Response:
        await chats.find(request.path_params["id"]).close()
        return answer({"closed": True})

    return [
        Route("/api/chat", listed, methods=["GET"]),
        Route("/api/chat", opened, methods=["POST"]),
        Route("/api/chat/{id}", shown, methods=["GET"]),
        Route("/api/chat/{id}", said, methods=["POST"]),
        Route("/api/chat/{id}", closed, methods=["DELETE"]),
    ]


def parse_text(body: object) -> str | None:
    """The text of a message; None if there is none. Raises ConfigError."""
    if not isinstance(body, dict) or set(body) - {"text"}:
        raise ConfigError("the request holds a JSON object with the key 'text', or an empty one")
    text = body.get("text")
    if text is None:
        return None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("text is what to say: it must not be empty")
    if len(text) > MAX_TEXT:
        raise ConfigError(f"a message has at most {MAX_TEXT:,} characters")
    return text


async def _body(request: Request) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form of another page cannot send this type
        raise ConfigError("the content type of a request is application/json")
    try:
        return load_json(await request.body() or b"{}")
    except ValueError as error:
        raise ConfigError(f"the request is not JSON: {error}") from error


async def _stream(chat: Chat, text: str | None) -> AsyncGenerator[bytes, None]:
    async with aclosing(chat.send(text)) as events:
        async for kind, data in events:
            yield b"event: " + kind.encode() + b"\ndata: " + dumps(data) + b"\n\n"
