"""`env = "user"`: a model plays the user, to whom the agent talks by the tool `ask_user`. It is an engine with another prompt.

A row's field `persona` says who the user is and what the user wants. Equal conversations with equal seeds get equal replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...agents.base import BaseAgent
from ...errors import ConfigError, WorldError
from ...protocols import Engine
from ...resources import Cost
from ...rollout.setup import as_sampling
from ...tools import tool
from ...types import Task, ToolResult

STOP = "[done]"
HOW = (
    "You are the user of an assistant, and you stay in this role. Write what the user says next, in one or two sentences, and "
    f"nothing else. When you have what you want, or it cannot be had, write {STOP}.\n\n"
)


class SimulatedUser:
    """A model that plays the user, one conversation. Instances of a process and event loop share it; its weights stay.

    `model`     what plays the user: a name or a directory, as for an agent. It is not trained
    `sampling`  how its replies are drawn, such as {"max_tokens": 60, "seed": 3}
    `max_turns` what the user says at most
    """

    cost = Cost(cpu=0.1, memory_mb=1.0)
    _shared: dict[Any, tuple[BaseAgent, set[int]]] = {}  # noqa: RUF012 - of the process

    def __init__(
        self, model: str | Path | Engine = "pocket", sampling: Mapping[str, Any] | None = None, max_turns: int = 8
    ) -> None:
        self._sampling = as_sampling({"seed": 0, "max_tokens": 100, **(sampling or {})})
        self._model, self._max_turns = model, max_turns
        self._task: Task | None = None
        self._said: list[dict[str, str]] = []
        self.done = False

    def reset(self, task: Task) -> None:
        persona = task.fields.get("persona")
        if not isinstance(persona, str) or not persona.strip():
            raise ConfigError(f"task {task.id}: the field 'persona' must say who the user is, not {persona!r}")
        self._task, self.done = task, False
        self._said = [{"role": "system", "content": HOW + persona}]

    async def say(self, text: str) -> str:
        """Say something to the user. Returns the reply; `done` is then true if the user has ended the conversation."""
        if self._task is None:
            raise WorldError("the user has not been reset for a task")
        if self.done:
            return "The user is gone."
        self._said.append({"role": "user", "content": text})
        row = {"messages": list(self._said), "id": f"{self._task.id}-user"}
        (trajectory,) = (await self._agent().run([row], sampling=self._sampling)).trajectories
        if not trajectory.outcome.trainable:
            raise WorldError(f"the simulated user failed: {trajectory.error}")
        reply = trajectory.messages[-1].content.strip()
        self._said.append({"role": "assistant", "content": reply})
        turns = sum(message["role"] == "assistant" for message in self._said)
        self.done = STOP in reply or turns >= self._max_turns
        return reply.replace(STOP, "").strip()

    @staticmethod
    def conformance() -> dict[str, Any]:
        """Returns what `check_env` and a player in the terminal need: tasks, and random things to say."""
        wants = ("a red bicycle", "a table for two", "to return a pair of shoes")
        tasks = [{"question": "Find out what the user wants, and say it.", "persona": f"You want {want}."} for want in wants]
        return {"tasks": tasks, "actions": lambda rng, seen: ("say", {"text": rng.choice(("Hello.", "What do you want?"))})}

    def conversation(self) -> list[dict[str, str]]:
        """What the agent ("user") and the simulated user ("assistant") have said, for a reward."""
        return self._said[1:]

    def _key(self) -> Any:
        return (self._model if isinstance(self._model, str) else id(self._model)), id(asyncio.get_running_loop())

    def _agent(self) -> BaseAgent:
        key = self._key()
        if key not in self._shared:
            self._shared[key] = (BaseAgent(self._model, max_turns=1), set())
        agent, users = self._shared[key]
        users.add(id(self))
        return agent

    async def close(self) -> None:
        """The last instance closes the model."""
        agent, users = self._shared.get(self._key(), (None, set()))
        users.discard(id(self))
        if agent is not None and not users:
            del self._shared[self._key()]
            await agent.close()


@tool(register=False)
async def ask_user(message: str, env: SimulatedUser) -> ToolResult:
    """Say something to the user. Returns what the user answers.

    Args:
        message: what to say
    """
    reply = await env.say(message)
    return ToolResult(observation=reply or "The user says nothing more.")
