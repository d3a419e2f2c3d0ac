"""Agents that the worker processes of `scale_workers.py` build by name: one that waits, one that takes weights."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import agentfly
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Action, Completion, Request, ToolCall

CAPACITY = 64
"""Chains that one engine serves at once."""


@agentfly.tool(name="wait", register=False)
async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "done"


@agentfly.reward(name="one")
def one(trajectory: Any) -> float:
    """Every chain is right."""
    return 1.0


def reply(request: Request) -> str:
    """Two calls whose times are drawn with the seed of the request, then an answer."""
    text = bytes(token for token in request.prompt_ids if token < 256).decode()
    if text.count("Observation") >= 2:
        return "answer"
    median = float(text.rpartition("median ")[2].split()[0])
    drawn = random.Random(request.sampling.seed or 0).gauss(0.0, 0.8)
    return f"wait {median * math.exp(drawn):.4f}"


class Waits(agentfly.BaseAgent):
    """Waits twice and answers."""

    def __init__(self, model: str, **options: Any) -> None:
        engine = ScriptedEngine(reply)
        engine.capacity = CAPACITY  # type: ignore[attr-defined]
        super().__init__(engine, **{**options, "tools": [wait], "reward": one, "renderer": ByteRenderer()})

    def parse(self, completion: Completion) -> Action:
        """A call, or the answer."""
        kind, _, rest = completion.text.partition(" ")
        return Action(calls=(ToolCall("wait", {"seconds": float(rest)}),)) if kind == "wait" else Action(answer=kind)


class Takes(ScriptedEngine):
    """An engine that copies the given weights into separate memory."""

    held: dict[str, Any]

    def take_weights(self, version: int, buckets: Any) -> None:
        """Copy, into the tensors of the version before."""
        self.held = getattr(self, "held", {})
        for bucket in buckets:
            for name, tensor in bucket:
                if name in self.held:
                    self.held[name].copy_(tensor)
                else:
                    self.held[name] = tensor.clone()
        self.publish(version)


class Sink(agentfly.BaseAgent):
    """An agent whose engine takes weights."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(Takes(["x"]), **{**options, "reward": one, "renderer": ByteRenderer()})
