"""Conversations with a checkpoint of a run: the only thing that a page can start.

    Chats    the table of conversations, with limits on their number and time, and the one model that is loaded
    Chat     one conversation (`rollout.chat.ChatSession`) and the task that owns it: opened, waited for and closed in one place

A conversation uses the agent, tools and environment that the run's config names, so it executes the code that they name. The
model is loaded in this process, by the local engine, whatever engine trained it. It is unloaded after its last conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..agents.base import BaseAgent
from ..config import Config
from ..engines import engine_options
from ..errors import AgentFlyError, ConfigError, RolloutError
from ..render.token_text import TokenDecoder
from ..rollout.chat import ChatSession
from ..rollout.setup import as_sampling
from ..runs.directory import RunDirectory
from ..runs.filters import ChainFilter
from ..runs.query import RunReader
from ..training.build import build_agent, checkpoint_config
from ..types import Sampling, Task, Trajectory
from .answers import plain
from .chains import message_json, open_tokenizer, result_json, task_json, turn_json
from .library import Library, NotFound

MAX_SESSIONS = 4
IDLE_S = 900.0
"""Seconds without a message after which a conversation is closed."""
MAX_S = 3600.0
"""Seconds after which a conversation is closed in any case."""
LINGER_S = 120.0
"""Seconds that a model stays loaded after its last conversation."""
OPEN_S = 600.0
"""Seconds that loading a model and starting an environment may take."""
MAX_TEXT = 20_000
BASE = "model"
"""The name of the model that the run began with, in place of a checkpoint."""
KEPT_OPTIONS = ("dtype", "chat_template", "template_args", "max_context")
"""The options of the run's engine that the local engine takes over."""
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
    def parse(cls, body: Any) -> Wish:
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
        return wish


@dataclass(slots=True)
class _Model:
    """A loaded model with its agent. `users` counts conversations."""

    key: tuple[Path, str]
    config: Config
    agent: BaseAgent
    decoder: TokenDecoder | None
    users: int = 0
    linger: asyncio.TimerHandle | None = None


class Chat:
    """One conversation. Its owner task opens and closes it, so that environments are released where they were acquired."""

    def __init__(self, wish: Wish, model: _Model, idle_s: float, max_s: float) -> None:
        self.id = secrets.token_urlsafe(12)
        self.wish, self.model = wish, model
        self.session: ChatSession | None = None
        self.task: Task | None = None
        self.opened = self.used = time.time()
        self._idle_s, self._max_s = idle_s, max_s
        self._stop = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    async def open(self, start: Callable[[], Awaitable[ChatSession]], ended: Callable[[Chat], None]) -> None:
        """Start the owner and wait until the session is open. Raises what `start` raises."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(start, ready, ended))
        try:
            await ready
        except asyncio.CancelledError:  # the page is gone: nobody would close the session
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
            if self.session is not None:
                await self.session.close()
            ended(self)

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
        told = len(session.trajectory.turns)
        self.used = time.time()
        try:
            async with contextlib.aclosing(session.send(text)) as events:
                async for event in events:
                    if event.kind == "text":
                        yield "text", {"text": event.data["text"]}
                        continue
                    for number in range(told, len(session.trajectory.turns)):
                        yield "reply", self._reply_json(number)
                    told = len(session.trajectory.turns)
                    if event.kind == "tool_call":
                        yield "call", {"turn": told - 1, **plain(event.data["call"])}
                    elif event.kind == "observation":
                        result = result_json(event.data["result"])
                        yield "result", {"turn": told - 1, "name": event.data["call"].name, **result}
                    elif event.kind == "finished":
                        async for scored in self._score(session):
                            yield scored
                        yield "end", self._end_json(session, event.data["outcome"].value)
        except AgentFlyError as error:
            yield "error", {"error": str(error)}
        finally:
            self.used = time.time()

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


class Chats:
    """All conversations of a dashboard. `device` is where models are loaded (None: the CPU while a run trains, else the
    engine's choice).
    """

    def __init__(
        self,
        library: Library,
        *,
        device: str | None = None,
        max_sessions: int = MAX_SESSIONS,
        idle_s: float = IDLE_S,
        max_s: float = MAX_S,
    ) -> None:
        self.max_sessions, self.idle_s, self.max_s = max_sessions, idle_s, max_s
        self._library, self._device = library, device
        self._chats: dict[str, Chat] = {}
        self._model: _Model | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()

    def find(self, name: str) -> Chat:
        """Raises NotFound."""
        if (chat := self._chats.get(name)) is None:
            raise NotFound("there is no such conversation: it may have been closed")
        return chat

    def to_json(self) -> dict[str, Any]:
        """Every conversation in a line, and how many there may be."""
        return {
            "sessions": [
                {"session": each.id, "run": each.wish.run, "checkpoint": each.model.key[1], "opened": each.opened}
                for each in self._chats.values()
            ],
            "max_sessions": self.max_sessions,
        }

    async def open(self, wish: Wish) -> Chat:
        """Load the model if it is not, and start a conversation. Raises ConfigError or RolloutError."""
        async with self._opening:
            if self._closed:
                raise NotFound("the dashboard is closing")
            if len(self._chats) >= self.max_sessions:
                raise ConfigError(f"there are {self.max_sessions} conversations already: close one")
            folder = self._library.find(wish.run)
            checkpoint = find_checkpoint_name(folder, wish.checkpoint)
            stored = await self._library.ask(wish.run, lambda reader: find_stored(reader, wish))
            model = await self._load(folder, checkpoint)
            chat = Chat(wish, model, self.idle_s, self.max_s)
            chat.task = None if stored is None else stored.task
            if model.agent.env is not None and chat.task is None:
                self._unload_later(model)
                raise ConfigError(
                    f"this agent acts in the environment {model.agent.env.name!r}, which needs a task: choose a task of the "
                    f"run, or fork a chain"
                )

            def start() -> Awaitable[ChatSession]:
                if wish.chain is not None and stored is not None:
                    return ChatSession.fork(model.agent, stored, wish.turn or 0, sampling=chat.sampling)
                return ChatSession.open(model.agent, task=chat.task, sampling=chat.sampling)

            model.users += 1
            self._chats[chat.id] = chat
            await chat.open(start, self._ended)
            return chat

    async def close(self) -> None:
        """End all conversations and unload the model. Idempotent."""
        self._closed = True
        await asyncio.gather(*(chat.close() for chat in list(self._chats.values())))
        if self._closing:
            await asyncio.wait(self._closing, timeout=30)
        await self._unload()

    # ---- the model -------------------------------------------------------------------------------------------------------

    async def _load(self, folder: Path, checkpoint: str) -> _Model:
        key = folder, checkpoint
        model = self._model
        if model is not None and model.key == key:
            if model.linger is not None:
                model.linger.cancel()
                model.linger = None
            return model
        if model is not None and model.users:
            raise ConfigError(
                f"{model.users} conversations use {model.key[0].name} {model.key[1]}: close them before another checkpoint is "
                f"loaded"
            )
        await self._unload()

        def load() -> _Model:
            config = chat_config(folder, checkpoint, self._device or self._spared_device())
            agent = build_agent(config)
            _ = agent.engine  # loads the weights
            decoder, _, _ = open_tokenizer(folder)
            return _Model(key, config, agent, decoder)

        self._model = await self._library.call(load)
        return self._model

    def _spared_device(self) -> str | None:
        """The CPU while a run of the folder trains: it may need all memory of its device."""
        return "cpu" if any(run.state == "running" for run in self._library.summaries()) else None

    async def _unload(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            if model.linger is not None:
                model.linger.cancel()
            await model.agent.close()

    def _ended(self, chat: Chat) -> None:
        self._chats.pop(chat.id, None)
        chat.model.users -= 1
        self._unload_later(chat.model)

    def _unload_later(self, model: _Model) -> None:
        def unload() -> None:
            if self._model is model and not model.users:
                task = asyncio.ensure_future(self._unload())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

        if not model.users and not self._closed:
            model.linger = asyncio.get_running_loop().call_later(LINGER_S, unload)


def find_checkpoint_name(folder: Path, wanted: str | None) -> str:
    """The checkpoint of a run by its name; the newest, or the model of a run without checkpoints, if none is named."""
    names = [f"step-{step:06d}" for step in RunDirectory(folder).saved_steps()]
    if wanted is None:
        return names[-1] if names else BASE
    if wanted != BASE and wanted not in names:
        raise NotFound(f"the run has no checkpoint {wanted[:80]!r}; it has {', '.join(names) or 'none'}, and {BASE!r}")
    return wanted


def chat_config(folder: Path, checkpoint: str, device: str | None) -> Config:
    """The run's config with the checkpoint as its model, on the local engine."""
    if checkpoint == BASE:
        config = Config.load(folder / "config.toml")
    else:
        config = checkpoint_config(folder / "checkpoints" / checkpoint)
    if config.agent.model.startswith("openai:"):
        return config
    options = {name: value for name, value in engine_options(config.agent.engine).items() if name in KEPT_OPTIONS}
    if device is not None:
        options["device"] = device
    return replace(config, agent=replace(config.agent, engine=options))


def find_stored(reader: RunReader, wish: Wish) -> Trajectory | None:
    """The stored chain that a wish names, or one of the task that it names. Raises NotFound."""
    if wish.chain is not None:
        try:
            return reader.trajectory(wish.chain)
        except ConfigError as error:
            raise NotFound(f"the run has no chain {wish.chain[:200]!r}") from error
    if wish.task is not None:
        rows, _ = reader.page(ChainFilter(task_id=wish.task), "-added", None, 1)
        if not rows:
            raise NotFound(f"the run has no chain of the task {wish.task[:200]!r}")
        return reader.trajectory(rows[0].id)
    return None
