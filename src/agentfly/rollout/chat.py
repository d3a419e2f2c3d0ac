"""A conversation of a person with an agent: its own prompt, tools and environment, and the ids that the model really read.

    async with await ChatSession.open(agent) as chat:
        async for event in chat.send("What is 17 * 3?"):      text, tool_call, observation, ..., finished
            ...

The loop is that of a chain (`chain.play`). The conversation is a `Trajectory` that grows with every message. Nothing is
rendered again, so its turns hold the tokens as they were sampled. `fork` starts from a stored chain, before the reply of one of
its turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from ..aio.deadline import TimeLimit
from ..data import check_fields
from ..errors import ConfigError, DataError, DeadlineError, InvariantError, RolloutError
from ..resources import Lease
from ..rows import OpenRow, row_numbers
from ..tools import Context, call_tools
from ..types import Event, Extension, Message, Outcome, Sampling, Task, ToolResult, Trajectory, Turn
from .chain import Plan, borrow, play, score
from .scheduler import score_group
from .setup import RunnableAgent, make_plan, next_run_number, open_environments
from .shaping import opening_messages

STOPPED = "The call was stopped by the user."


class ChatSession:
    """One conversation. Made by `open` or `fork`, which raise ConfigError or RolloutError; `close` gives the environment back.

    `trajectory` holds the messages and turns so far. `scorable` says whether the task is one of the data set, so that `score`
    can be called. `differences` are sentences about observations that a fork did not get again. The agent's engine stays open.
    """

    def __init__(self, agent: RunnableAgent, plan: Plan, task: Task | None) -> None:
        if agent.player is not None:
            raise ConfigError(f"{type(agent).__name__} has a loop of its own, which cannot be talked to: run it on tasks")
        self.agent = agent
        self.scorable = task is not None and agent.reward is not None
        self.differences: list[str] = []
        self.busy = False
        self._task = task
        task = task or Task("chat", ())
        self.trajectory = Trajectory(f"chat{next_run_number()}-0", task, outcome=Outcome.FINISHED)
        self._plan = plan
        self._context = Context(task, self.trajectory)
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._opened = AsyncExitStack()
        self._lease: Lease | None = None
        self._forked: Turn | None = None  # the stored turn whose reply is sampled anew
        self._closed = False
        self._started = time.perf_counter()
        self.trajectory.started = time.time()
        self.trajectory.foreign_marks = list(plan.foreign_marks) or None

    @classmethod
    async def open(
        cls, agent: RunnableAgent, *, task: Task | None = None, sampling: Sampling | Mapping[str, Any] | None = None
    ) -> ChatSession:
        """Start a conversation about a task of the data set, or about anything. Opens the model and an environment."""
        session = cls(agent, make_plan(agent, sampling=sampling), task)
        await session._enter()
        return session

    @classmethod
    async def fork(
        cls,
        agent: RunnableAgent,
        trajectory: Trajectory,
        turn: int,
        *,
        sampling: Sampling | Mapping[str, Any] | None = None,
    ) -> ChatSession:
        """Start where a stored chain was before the reply of `turn` (from 0; the number of its turns continues after the last).

        The prompt is the stored one, id for id. The tool calls of the turns before it run again, so that the environment is
        where it was; `differences` says where it answered otherwise.
        """
        if not 0 <= turn <= len(trajectory.turns):
            raise ConfigError(
                f"chain {trajectory.id} has {len(trajectory.turns)} turns: fork it at 0 to {len(trajectory.turns)}"
            )
        session = cls(agent, make_plan(agent, sampling=sampling), trajectory.task)
        if session._plan.renderer is not None and not all(each.completion.token_ids for each in trajectory.turns):
            raise ConfigError(f"chain {trajectory.id} was sampled without token ids, so this model cannot go on with it")
        await session._enter()
        try:
            await session._restore(trajectory, turn)
        except BaseException:
            await session.close()
            raise
        return session

    async def send(self, text: str | None = None) -> AsyncGenerator[Event, None]:
        """Say something; yields what happens until the agent has answered. The last event is "finished" {trajectory, outcome}.

        Without a text the agent answers the task's own question, or goes on where a forked chain was. With a text, the first
        message of a task replaces its question. Raises RolloutError if the world fails; the conversation can go on. Closing the
        iterator stops the reply.
        """
        if self._closed:
            raise ConfigError("the conversation is closed")
        if self.busy:
            raise ConfigError("the agent is still replying: wait for its answer, or stop it")
        self.busy = True
        self._events = asyncio.Queue()
        replying = asyncio.create_task(self._reply(text))
        replying.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            while (event := await self._events.get()) is not None:
                yield event
            outcome = replying.result()
            data = {"trajectory": self.trajectory, "outcome": outcome}
            yield Event("finished", self.trajectory.task.id, 0, data)
        finally:
            replying.cancel()
            await asyncio.wait([replying])
            self.busy = False

    async def score(self) -> tuple[float, dict[str, float]]:
        """The reward of the conversation so far and its components, as training would score the chain, alone in its group."""
        if not self.scorable or self._plan.reward is None or not self.trajectory.turns:
            raise ConfigError("a reward needs a task of the data set, an agent with a reward, and a reply")
        scored = replace(self.trajectory, turns=[replace(turn) for turn in self.trajectory.turns], components={})
        try:
            async with asyncio.timeout(self._plan.limits.score_timeout_s):
                await score(self._plan.reward, scored, self._context)
                await score_group(self._plan.reward, [scored])
        except TimeoutError as error:
            raise DeadlineError(f"scoring exceeded its time limit of {self._plan.limits.score_timeout_s:g} s") from error
        return scored.total_reward, dict(scored.components)

    async def close(self) -> None:
        """Give the environment back and free the conversation's cache. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._plan.engine.release(self.trajectory.id)
        if self._lease is not None:
            self._lease.release_now()
        await self._context.close()
        await self._opened.aclose()

    async def __aenter__(self) -> ChatSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- inside ----------------------------------------------------------------------------------------------------------

    async def _enter(self) -> None:
        task = self._context.task
        for tool in self.agent.tools.values():
            try:
                check_fields([task], tool.needs, f"the tool {tool.name!r}")
            except DataError as error:
                raise ConfigError(f"{error}. Choose a task of the data set") from error
        try:
            self._plan = await self._opened.enter_async_context(open_environments(self.agent, self._plan, 1))
            self._plan = replace(self._plan, on_event=lambda event: self._events.put_nowait(event))
            if self._plan.manager is not None:
                self._lease = await borrow(self._plan, self._plan.manager, self._context)
        except BaseException:
            await self.close()
            raise

    async def _reply(self, text: str | None) -> Outcome:
        trajectory, plan = self.trajectory, self._plan
        before, num_turns = list(trajectory.messages), len(trajectory.turns)
        forked, self._forked = self._forked, None
        limits = replace(plan.limits, max_turns=num_turns + plan.limits.max_turns)
        try:
            row = self._prepare(text, forked)
            if len(row.prompt) >= limits.max_context:
                raise ConfigError(f"the conversation fills the context of {limits.max_context} tokens: start another one")
            async with TimeLimit(time.monotonic() + limits.chain_timeout_s) as limit:
                outcome = await play(replace(plan, limits=limits), trajectory, self._context, row, None, limit, self._started)
        except BaseException as error:
            if len(trajectory.turns) == num_turns:  # as if it had not been said
                trajectory.messages[:], self._forked = before, forked
            else:
                self._complete_last_turn()
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"the reply exceeded its time limit of {limits.chain_timeout_s:g} s") from error
            raise
        trajectory.outcome = outcome
        return outcome

    def _prepare(self, text: str | None, forked: Turn | None) -> OpenRow:
        """Add the messages that come before the reply. Returns the row whose prompt holds them."""
        trajectory, plan = self.trajectory, self._plan
        messages, turns = trajectory.messages, trajectory.turns
        row = OpenRow.resume(trajectory, self._context.row)
        if forked is not None and text is None:
            return row.extend(Extension(list(forked.context_ids), forked.restarts))
        if not turns and (text is not None or not messages):
            messages[:] = self._opening(text)
        elif text is None:
            if not turns or messages[-1].role == "assistant":
                raise ConfigError("there is nothing to reply to: say something")
        else:
            messages.append(Message("user", text))
        if plan.renderer is None:
            return row.extend(Extension([]))
        if not turns:
            return row.extend(Extension(plan.renderer.start(messages, plan.schemas)))
        history = row.history(messages)
        at = max(index for index, message in enumerate(history) if message.role == "assistant")
        return row.extend(plan.renderer.extend(history, len(history) - at - 1, turns[-1].completion, plan.schemas))

    def _opening(self, text: str | None) -> list[Message]:
        task = self._task
        if text is None:
            if task is None:
                raise ConfigError("there is nothing to reply to: say something")
            return opening_messages(self.agent, task)
        if task is None:
            task = Task("chat", ())
        before = task.messages[:-1] if task.messages and task.messages[-1].role == "user" else task.messages
        return opening_messages(self.agent, replace(task, messages=(*before, Message("user", text))))

    def _complete_last_turn(self) -> None:
        """Answer the calls of a turn that was stopped, so that the conversation can go on."""
        turn, messages = self.trajectory.turns[-1], self.trajectory.messages
        if messages[-1].role == "assistant" and turn.calls:
            stopped = ToolResult(observation=STOPPED, error="raised")
            turn.results = (*turn.results, *(stopped for _ in turn.calls[len(turn.results) :]))
            messages += self.agent.observe(turn.calls, turn.results)

    async def _restore(self, stored: Trajectory, turn: int) -> None:
        if odd := {each.why for each in stored.turns[: turn + 1]} - {"", "first", "template restarts"}:
            raise ConfigError(
                f"chain {stored.id} cannot be forked at turn {turn}: its history was replaced before ({sorted(odd)[0]}), and "
                "the messages of the new prompt are not stored. Fork it at an earlier turn"
            )
        replies = [index for index, message in enumerate(stored.messages) if message.role == "assistant"]
        replies = replies[max(0, len(replies) - len(stored.turns)) :]
        if len(replies) != len(stored.turns):
            raise InvariantError(f"chain {stored.id} has {len(stored.turns)} turns but {len(replies)} replies")
        end = replies[turn] if turn < len(replies) else len(stored.messages)
        self.trajectory.messages += stored.messages[:end]
        self._forked = stored.turns[turn] if turn < len(stored.turns) else None
        again = self._plan.manager is not None or any(tool.stateful for tool in self.agent.tools.values())
        for number, (each, row) in enumerate(zip(stored.turns[:turn], row_numbers(stored.turns), strict=False), 1):
            self.trajectory.turns.append(replace(each, row=row))
            if again and each.calls:
                await self._repeat(number, each)

    async def _repeat(self, number: int, turn: Turn) -> None:
        try:
            results = await call_tools(self.agent.tools, turn.calls, self._context)
        except TimeoutError as error:
            raise RolloutError(f"turn {number} could not be repeated: {error}") from error
        for call, old, new in zip(turn.calls, turn.results, results, strict=False):
            if old.observation != new.observation:
                self.differences.append(f"turn {number}: {call.name} answered otherwise than in the stored chain")
