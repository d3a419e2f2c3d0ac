"""One conversation with a checkpoint: what a page wishes for, the session (`rollout.chat.ChatSession`) and the task that owns
it. The owner opens the session, waits for its end and closes it; `send` turns the events of a reply into JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..agents.base import BaseAgent
from ..config import Config
from ..errors import AgentFlyError, ConfigError, RolloutError
from ..render.token_text import TokenDecoder
from ..rollout.chat import ChatSession
from ..rollout.setup import as_sampling
from ..types import Event as ChainEvent
from ..types import Sampling, Task
from .answers import plain
from .chains import message_json, result_json, task_json, turn_json
from .library import NotFound

OPEN_S = 600.0
"""Seconds that loading a model and starting an environment may take."""
CLOSE_S = 20.0
"""Seconds that a reply may take to end after its conversation was closed."""
MAX_TEXT = 20_000
BUSY = "the agent is still replying: wait for its answer, or stop it"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")

Event = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a page asks for: a checkpoint of a run, and where the conversation begins.

    `chain` and `turn` fork a stored chain before the reply of a turn; `task` names a task of the run; neither is free talk.
    """

    run: str
    checkpoint: str | None = None
    task: str | None = None
    chain: str | None = None
    turn: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, body: object) -> Wish:
        """From the JSON of a request. Raises ConfigError."""
        if not isinstance(body, dict):
            raise ConfigError("the request holds a JSON object")
        kinds: dict[str, type] = {
            "run": str, "checkpoint": str, "task": str, "chain": str, "turn": int, "sampling": dict,
        }  # fmt: skip
        given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            if name not in kinds:
                raise ConfigError(f"there is no key {name[:40]!r}; there are: {', '.join(kinds)}")
            if not isinstance(value, kinds[name]) or isinstance(value, bool):
                raise ConfigError(f"{name} must be of type {kinds[name].__name__}")
        if "run" not in given:
            raise ConfigError("the key 'run' is missing")
        wish = cls(**given)
        if wish.chain is not None and wish.task is not None:
            raise ConfigError("a forked chain has its own task: give chain or task, not both")
        if wish.turn is not None and wish.chain is None:
            raise ConfigError("turn belongs to chain: name the chain to fork")
        for name, value in wish.sampling.items():
            if name not in SAMPLING or isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"sampling takes numbers for {', '.join(SAMPLING)}")
        for name, value in {"turn": wish.turn or 0, **wish.sampling}.items():
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise ConfigError(f"{name} is a number of at most 18 digits")
        return wish


@dataclass(slots=True)
class Model:
    """A loaded model with its agent. `users` counts conversations."""

    key: tuple[Path, str]
    config: Config
    agent: BaseAgent
    decoder: TokenDecoder | None
    users: int = 0
    linger: asyncio.TimerHandle | None = None


class Chat:
    """One conversation. Its owner task opens and closes it, so that environments are released where they were acquired."""

    def __init__(self, wish: Wish, model: Model, idle_s: float, max_s: float) -> None:
        self.id = secrets.token_urlsafe(12)
        self.wish, self.model = wish, model
        self.session: ChatSession | None = None
        self.task: Task | None = None
        self.opened = self.used = time.time()
        self._idle_s, self._max_s = idle_s, max_s
        self._stop = asyncio.Event()
        self._quiet = asyncio.Event()  # no reply is under way
        self._quiet.set()
        self._owner: asyncio.Task[None] | None = None

    async def open(self, start: Callable[[], Awaitable[ChatSession]], ended: Callable[[Chat], None]) -> None:
        """Start the owner and wait until the session is open. Raises what `start` raises."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(start, ready, ended))
        try:
            await ready
        except asyncio.CancelledError:  # the page is gone, and nothing else would close the session
            self._stop.set()
            self._owner.cancel()
            raise

    async def close(self) -> None:
        """End the conversation and wait for it. Idempotent."""
        self._stop.set()
        if self._owner is not None:
            await asyncio.wait([self._owner], timeout=30)

    async def _own(
        self, start: Callable[[], Awaitable[ChatSession]], ready: asyncio.Future[None], ended: Callable[[Chat], None]
    ) -> None:
        try:
            try:
                async with asyncio.timeout(OPEN_S):
                    self.session = await start()
            except TimeoutError:
                raise RolloutError(f"the conversation did not start within {OPEN_S:g} s") from None
            self.used = time.time()
            if not ready.done():
                ready.set_result(None)
            await self._until_over()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error if isinstance(error, Exception) else RolloutError("the conversation was cancelled"))
        finally:
            self._stop.set()
            if self.session is not None:
                await self._until_quiet()
                await self.session.close()
            ended(self)

    async def _until_quiet(self) -> None:
        """Wait until the reply that is under way has noticed the end: it uses the environment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._quiet.wait()

    async def _until_over(self) -> None:
        while not self._stop.is_set():
            now = time.time()
            last = now if self.session is not None and self.session.busy else self.used
            left = min(last + self._idle_s, self.opened + self._max_s) - now
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._stop.wait()

    # ---- what a page sees ------------------------------------------------------------------------------------------------

    @property
    def talk(self) -> ChatSession:
        """The open session. Raises NotFound if the conversation is over."""
        if self.session is None or self._stop.is_set():
            raise NotFound("this conversation is over: start another one")
        return self.session

    def to_json(self) -> dict[str, Any]:
        """The conversation so far, and its limits."""
        session, agent = self.talk, self.model.agent
        trajectory = session.trajectory
        return {
            "session": self.id,
            "run": self.wish.run,
            "checkpoint": self.model.key[1],
            "agent": type(agent).__name__,
            "tools": [{"name": tool.name, "description": tool.description} for tool in agent.tools.values()],
            "environment": None if agent.env is None else agent.env.name,
            "task": None if self.task is None else task_json(self.task),
            "messages": [message_json(message) for message in trajectory.messages],
            "turns": [turn_json(number, turn, None) for number, turn in enumerate(trajectory.turns)],
            "forked": None if self.wish.chain is None else {"chain": self.wish.chain, "turn": self.wish.turn or 0},
            "differences": session.differences,
            "scorable": session.scorable,
            "busy": session.busy,
            "limits": {
                "idle_s": self._idle_s,
                "max_s": self._max_s,
                "max_text": MAX_TEXT,
                "max_turns": agent.limits.max_turns,
                "max_tokens": self.sampling.max_tokens,
            },
        }

    @property
    def sampling(self) -> Sampling:
        """The run's sampling, with what the page has set."""
        return as_sampling({**asdict(self.model.config.sampling), **self.wish.sampling})

    async def send(self, text: str | None) -> AsyncGenerator[Event, None]:
        """Say something. Yields text, reply, call, result, score, end; or error, which ends the reply, not the conversation."""
        session = self.talk
        if not self._quiet.is_set():
            yield "error", {"error": BUSY}
            return
        num_turns = len(session.trajectory.turns)
        self.used = time.time()
        self._quiet.clear()
        try:
            async with contextlib.aclosing(session.send(text)) as events:
                while (event := await self._next(events)) is not None:
                    if event.kind == "text":
                        yield "text", {"text": event.data["text"]}
                        continue
                    for number in range(num_turns, len(session.trajectory.turns)):
                        yield "reply", self._reply_json(number)
                    num_turns = len(session.trajectory.turns)
                    if event.kind == "tool_call":
                        yield "call", {"turn": num_turns - 1, **plain(event.data["call"])}
                    elif event.kind == "observation":
                        result = result_json(event.data["result"])
                        yield "result", {"turn": num_turns - 1, "name": event.data["call"].name, **result}
                    elif event.kind == "finished":
                        async for scored in self._score(session):
                            yield scored
                        yield "end", self._end_json(session, event.data["outcome"].value)
        except AgentFlyError as error:
            yield "error", {"error": str(error)}
        finally:
            self.used = time.time()
            self._quiet.set()

    async def _next(self, events: AsyncGenerator[ChainEvent, None]) -> ChainEvent | None:
        """The next event of a reply; None after the last. Raises RolloutError if the conversation ends meanwhile."""
        coming, stopped = asyncio.ensure_future(anext(events, None)), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([coming, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (coming, stopped):
                task.cancel()
            await asyncio.wait([coming, stopped])
        if coming.cancelled():
            raise RolloutError("the conversation is over: it was closed, or its time is up")
        return coming.result()

    async def _score(self, session: ChatSession) -> AsyncGenerator[Event, None]:
        if session.scorable:
            try:
                reward, components = await session.score()
                yield "score", {"reward": plain(reward), "components": plain(components)}
            except AgentFlyError as error:
                yield "score", {"reward": None, "components": {}, "error": str(error)}

    def _end_json(self, session: ChatSession, outcome: str) -> dict[str, Any]:
        trajectory = session.trajectory
        figures = {"turns": len(trajectory.turns), "tokens": trajectory.num_sampled}
        messages = [message_json(message) for message in trajectory.messages]
        return {"outcome": outcome, "answer": trajectory.prediction, **figures, "messages": messages}

    def _reply_json(self, number: int) -> dict[str, Any]:
        """A whole reply with its tokens."""
        turn = self.talk.trajectory.turns[number]
        reply, decoder = turn.completion, self.model.decoder
        return {
            "turn": number,
            "text": reply.text,
            "stop": reply.stop,
            "ids": list(reply.token_ids),
            "pieces": None if decoder is None else decoder.pieces(reply.token_ids),
            "logprobs": plain(reply.logprobs),
            "versions": list(reply.versions),
            "num_context": len(turn.context_ids),
            "seconds": turn.sampled_s,
        }
