"""A trained agent with its tools as an Answerer: each call is one chain, and its final answer the reply."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

from ..errors import ConfigError
from ..rollout import Plan, make_plan, open_environments, run_chains
from ..rollout.setup import RunnableAgent
from ..types import Message, Sampling, Task, Trajectory
from .calls import Answer, Call, Refused
from .model import sampling_of
from .wire import refuse

_numbers = count(1)


@asynccontextmanager
async def open_agent(agent: RunnableAgent, sampling: Sampling) -> AsyncIterator[AgentAnswerer]:
    """Open the agent's model and environments. Raises ConfigError if a tool needs fields of a task, which a call has not."""
    for tool in agent.tools.values():
        if tool.needs:
            raise ConfigError(
                f"the tool {tool.name!r} needs the field {min(tool.needs)!r} of a task, and a request has none: remove it"
            )
    plan = replace(make_plan(agent, sampling=sampling), reward=None)
    async with open_environments(agent, plan, None) as opened:
        yield AgentAnswerer(opened)


class AgentAnswerer:
    """Plays a chain per call; chains share the environments and the engine's batch. Made by `open_agent`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    async def answer(self, call: Call) -> Answer:
        if call.tools:
            refuse("this agent has its own tools: send none")
        if call.asked.stop:
            refuse("stop is not supported: the agent's own format ends its replies")
        plan = self._plan
        limit = plan.limits.max_context
        sampling = sampling_of(plan.sampling, call.asked, limit, fills_context=False)
        task = self._task(call)
        name = f"served{next(_numbers)}-"
        (trajectory,) = await run_chains(
            replace(plan, sampling=sampling), [task], num_chains=1, max_concurrency=None, prefix=name, on_trajectory=None
        )
        return _answer_of(trajectory)

    async def count(self, call: Call) -> int:
        if self._plan.renderer is None:
            refuse("the model is behind another server, which does not count the tokens of a prompt")
        messages = self._plan.agent.start(self._task(call))
        return len(self._plan.renderer.start(messages, self._plan.schemas))

    def _task(self, call: Call) -> Task:
        if any(message.role == "tool" or message.tool_calls for message in call.messages):
            refuse("this agent has its own tools: send no calls and results of others")
        return Task("served", call.messages)


def _answer_of(trajectory: Trajectory) -> Answer:
    if not trajectory.outcome.trainable:
        raise Refused(500, f"the agent failed: {trajectory.error or trajectory.outcome.value}")
    if not trajectory.turns:
        refuse(trajectory.error or "the messages fill the context: send less")
    said = trajectory.prediction or trajectory.turns[-1].text
    first = trajectory.turns[0]
    return Answer(
        message=Message("assistant", said),
        finish="length" if trajectory.outcome.truncated else "stop",
        prompt_tokens=len(first.context_ids) or first.completion.prompt_tokens,
        completion_tokens=trajectory.num_sampled,
    )
