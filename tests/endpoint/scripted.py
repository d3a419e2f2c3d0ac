"""An answerer that plays a script, for tests of the server and of its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from agentfly.endpoint.calls import Answer, Call
from agentfly.types import Message, ToolCall

_numbers = count(1)


def says(text: str = "", *calls: tuple[str, dict[str, Any]], thinking: str = "", finish: str = "") -> Answer:
    """An answer whose calls have ids that no other call has."""
    made = tuple(ToolCall(name, arguments, f"c{next(_numbers)}") for name, arguments in calls)
    return Answer(
        message=Message("assistant", text, made),
        finish=finish or ("tool_calls" if calls else "stop"),
        thinking=thinking,
        prompt_tokens=11,
        completion_tokens=7,
    )


class Scripted:
    """Gives one answer of the script per call, the last one for ever. An exception is raised, a function is called first."""

    def __init__(self, *script: Answer | Exception | Callable[[Call], Answer]) -> None:
        self.script: Sequence[Any] = script
        self.calls: list[Call] = []
        self.cancelled = 0
        self.gate: asyncio.Event | None = None
        self.waiting = asyncio.Event()
        self.pieces: list[str] = []  # what a stream is told before the answer

    async def answer(self, call: Call) -> Answer:
        self.calls.append(call)
        made = self.script[min(len(self.calls), len(self.script)) - 1]
        for piece in self.pieces if call.on_text is not None else ():
            call.on_text(piece)
        if self.gate is not None:
            self.waiting.set()
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if isinstance(made, Exception):
            raise made
        return made(call) if callable(made) else made

    async def count(self, call: Call) -> int:
        return sum(len(message.content) for message in call.messages)
