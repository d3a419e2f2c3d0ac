"""One chain whose agent is a client of the endpoint: each of its calls is a turn.

    call -> (joined to the same call that is still running, or place in the tree) -> engine -> Turn -> Answer

The chain is open until the client's code has ended; then its key is worthless and calls in flight are cancelled.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from ..errors import ConfigError, RolloutError
from ..rollout import Plan
from ..rollout.activity import Activity
from ..rollout.chain import sample, sampling_of, tell
from ..tools import Context
from ..types import Message, Outcome, Request, Sampling, Trajectory
from .calls import Answer, Asked, Call, Closed
from .lineage import Lineage
from .replies import Replies
from .wire import refuse


@dataclass(slots=True)
class _OpenCall:
    """A call with a body. It is `delivered` once a client has its answer."""

    task: asyncio.Task[Answer]
    waiting: int = 0
    delivered: bool = False


class ChainAnswerer:
    """Implements `Answerer` for one chain. `hit` is the limit that the chain has reached, `failure` what the engine raised.

    `overrides`: a temperature or truncation that the client asks for is ignored; else it is refused where it is not the run's.
    """

    def __init__(
        self, plan: Plan, trajectory: Trajectory, context: Context, activity: Activity | None, started: float, replies: Replies,
        *, keeps_thinking: bool = False, overrides: bool = False,
    ) -> None:  # fmt: skip
        self.hit: Outcome | None = None
        self.failure: RolloutError | None = None
        self.num_calls = self.num_joined = 0
        self._plan, self._trajectory, self._context, self._activity = plan, trajectory, context, activity
        self._started, self._replies, self._overrides = started, replies, overrides
        self._lineage = Lineage(trajectory.id, plan.renderer, replies, keeps_thinking)
        self._calls: dict[str, _OpenCall] = {}
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._sampling = 0
        self._closed = False

    async def answer(self, call: Call) -> Answer:
        """See `Answerer`. Calls with one body are one call while nobody has its answer, however often they are sent."""
        if self.failure is not None:  # clients repeat a call after a failure, some of them for minutes
            raise Closed("the chain of this key has failed")
        running = self._calls.get(call.digest) if call.digest else None
        if running is None or not (call.is_retry or not (running.delivered or running.waiting)):
            running = _OpenCall(asyncio.create_task(self._reply(call, self._begin())))
            self._calls[call.digest] = running
            self._tasks.add(running.task)
            running.task.add_done_callback(self._ended)
        else:
            self.num_joined += 1
        running.waiting += 1
        try:
            answer = await asyncio.shield(running.task)
            running.delivered = True
            return answer
        except asyncio.CancelledError:
            if running.task.cancelled():
                raise Closed("the chain of this key has ended") from None
            raise  # the client has gone, perhaps to ask again: the reply is sampled to its end
        finally:
            running.waiting -= 1

    async def count(self, call: Call) -> int:
        """See `Answerer`."""
        if self._plan.renderer is None:
            refuse("the model is behind another server, which does not count the tokens of a prompt")
        return len(self._plan.renderer.start(self._replies.with_thinking(call), call.tools))

    async def close(self) -> None:
        """The chain has ended: cancel what is in flight, and release the engine's sessions."""
        self._closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in self._lineage.sessions:
            self._plan.engine.release(session)

    def _ended(self, task: asyncio.Task[Answer]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also where no client waits any more

    def _begin(self) -> int:
        """Returns the number of a new call. Raises Closed if the chain may make no more."""
        if self._closed or self.failure is not None:
            raise Closed("the chain of this key has ended")
        if self.num_calls >= self._plan.limits.max_turns:
            self.hit = Outcome.MAX_TURNS
            raise Closed(f"the chain has made its {self.num_calls} calls (agent.max_turns)")
        self.num_calls += 1
        return self.num_calls - 1

    async def _reply(self, call: Call, number: int) -> Answer:
        plan, trajectory = self._plan, self._trajectory
        asked = self._asked(call.asked)
        if call.tools:
            try:
                self._replies.parser(call.tools)
            except ConfigError as error:
                refuse(str(error))
        state, since = (await self._context.state() if self._context.state else ""), time.perf_counter()
        place = self._lineage.place(call, since)
        row, limit = place.row, plan.limits.max_context
        if (room := limit - len(row.prompt)) < 1:
            self.hit = Outcome.MAX_TOKENS
            refuse(f"the prompt has {len(row.prompt):,} tokens and the context {limit:,} (agent.max_context): send less")
        sampling = sampling_of(asked, room, trajectory, number)
        on_text = None if plan.on_event is None else lambda text: tell(plan, trajectory, "text", text=text)
        request = Request(list(row.prompt), sampling, row.session, place.messages, call.tools, on_text)
        self._enter(since)
        try:
            completion = await sample(plan.engine, request)
        except RolloutError as error:
            self.failure = self.failure or error
            raise
        finally:
            self._leave()
        now = time.perf_counter()
        turn = row.turn(completion, sampled_s=now - since, began_s=since - self._started, state=state)
        answer = self._replies.read(completion, call.tools, sampling.stop, len(row.prompt))
        turn.calls = answer.message.tool_calls
        trajectory.turns.append(turn)
        trajectory.messages += [*place.new, Message("assistant", completion.text, turn.calls)]
        self._lineage.add(place, completion, answer, turn, now)
        self.hit = None
        for made in turn.calls:
            tell(plan, trajectory, "tool_call", call=made)
        return answer

    def _asked(self, asked: Asked) -> Sampling:
        """The run's sampling with the limits that a client may set. Its seed is ours: siblings must differ, and repeat."""
        own = self._plan.sampling
        for name in ("temperature", "top_p", "top_k", "min_p"):
            wanted = getattr(asked, name)
            if wanted is not None and wanted != getattr(own, name) and not self._overrides:
                refuse(
                    f"{name} {wanted:g} is not that of this run, {getattr(own, name):g}: leave it out, set sampling.{name} "
                    'of the run, or let the agent ignore it with asked_sampling = "override"'
                )
        most = own.max_tokens if asked.max_tokens is None else min(asked.max_tokens, own.max_tokens)
        return replace(own, max_tokens=most, stop=tuple(dict.fromkeys((*asked.stop, *own.stop))))

    def _enter(self, now: float) -> None:
        self._sampling += 1
        if self._activity is not None and self._sampling == 1:
            self._activity.leave(now)
            self._activity.enter("sampling", now)

    def _leave(self) -> None:
        self._sampling -= 1
        if self._activity is not None and not self._sampling:
            now = time.perf_counter()
            self._activity.leave(now)
            self._activity.enter("tools", now)
