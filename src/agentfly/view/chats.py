"""All conversations of a dashboard: limits on their number and time, and the one model that is loaded.

A conversation uses the agent, tools and environment that the run's config names, so it executes the code that they name. The
model is loaded in this process, by the local engine, whatever engine trained it. It is unloaded after its last conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..build import build_agent, checkpoint_config
from ..config import Config
from ..engines import engine_options
from ..errors import ConfigError
from ..rollout.chat import ChatSession
from ..runs.directory import RunDirectory
from ..runs.filters import ChainFilter
from ..runs.query import RunReader
from ..types import Trajectory
from .chains import open_tokenizer
from .chat import Chat, Model, Wish
from .library import Library, NotFound

MAX_SESSIONS = 4
IDLE_S = 900.0
"""Seconds without a message after which a conversation is closed."""
MAX_S = 3600.0
"""Seconds after which a conversation is closed in any case."""
LINGER_S = 120.0
"""Seconds that a model stays loaded after its last conversation."""
BASE = "model"
"""The name of the model that the run began with, in place of a checkpoint."""
KEPT_OPTIONS = ("dtype", "chat_template", "template_args", "max_context")
"""The options of the run's engine that the local engine takes over."""


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
        self._model: Model | None = None
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
            self._refuse_if_closed()
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

    async def _load(self, folder: Path, checkpoint: str) -> Model:
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

        def load() -> Model:
            config = chat_config(folder, checkpoint, self._device or self._spared_device())
            agent = build_agent(config)
            _ = agent.engine  # loads the weights
            decoder, _, _ = open_tokenizer(folder)
            return Model(key, config, agent, decoder)

        model = await self._library.call(load)
        try:
            self._refuse_if_closed()  # `close` may have run while the model was loaded
        except NotFound:
            await model.agent.close()
            raise
        self._model = model
        return model

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise NotFound("the dashboard is closing")

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

    def _unload_later(self, model: Model) -> None:
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
