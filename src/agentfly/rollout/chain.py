"""One chain: a task in, a `Trajectory` with a typed outcome out.

`play` is the loop. The agent parses replies, tools run calls, the renderer makes ids. A failure of the world (`RolloutError`)
ends this chain alone; a bug or a bad config is raised and stops the run. Time that the chain itself used up ends it as
`max_turns` does. No reply is decoded and encoded again: sampled ids are kept, and only the ids of new messages are appended.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..aio.deadline import TimeLimit
from ..errors import AgentFlyError, ConfigError, DeadlineError, EngineError, RolloutError, WorldError
from ..protocols import Engine, RemoteEngine, Renderer
from ..resources import Admission, Lease, ResourceManager
from ..rewards import Reward, Score
from ..rows import Aside, OpenRow
from ..tools import Context, Tool, call_tools
from ..types import (
    Action,
    Completion,
    Event,
    Extension,
    Message,
    Outcome,
    Reaction,
    Request,
    Sampling,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)
from .activity import Activities, Activity
from .limits import EndedLate, Limits, check_ended, deadline, late_error, used_by_chain, where_ended
from .shaping import Prompted, call_bonus

Player = Callable[..., Awaitable[Outcome]]
"""What plays the chains of an agent that has a loop of its own: it takes the arguments of `play`."""


class AgentLike(Prompted, Protocol):
    """The part of an agent that a chain uses."""

    tools: dict[str, Tool]
    on_no_tool_call: Reaction
    on_invalid_call: Reaction
    on_tool_error: Reaction
    player: Player | None

    def parse(self, completion: Completion) -> Action: ...
    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]: ...
    def nudge(self, action: Action) -> Message: ...
    def rewrite(self, messages: Sequence[Message], turns: Sequence[Turn]) -> list[Message] | None: ...


@dataclass(slots=True)
class Plan:
    """The objects and limits that the chains of one run share.

    A chain acquires `env_kind` at its start, others of `kinds` when a tool or the reward requests them. `admission` controls
    all rollouts of the run (None: each makes one), `activities` lists what chains wait for (None: nothing does), `runner` runs
    them (None: this process). `shown` and `call_bonus` are those of the task's draw (`shaping`). `foreign_marks` begin an
    observation or a user's turn, in the agent's format and in the template: a model that writes one makes something up.
    """

    agent: AgentLike
    engine: Engine
    renderer: Renderer | None
    schemas: Sequence[Mapping[str, Any]] = ()
    reward: Reward | None = None
    manager: ResourceManager | None = None
    env_kind: str | None = None
    kinds: tuple[str, ...] = ()
    admission: Admission | None = None
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    on_event: Callable[[Event], None] | None = None
    activities: Activities | None = None
    runner: ChainRunner | None = None
    shown: bool = False
    call_bonus: float = 0.0
    foreign_marks: Sequence[str] = ()


@dataclass(slots=True)
class Opening:
    """One draw of a task: its opening messages and, for engines that read ids, its prompt. The sibling chains share it.

    A runner that renders elsewhere leaves messages and prompt empty.
    """

    task: Task
    messages: list[Message]
    prompt_ids: list[int]
    draw: int = 0


class ChainRunner(Protocol):
    """Where chains run. In this process: `scheduler.open_task` and `run_chain`."""

    def open(self, plan: Plan, task: Task, draw: int = 0) -> Opening:
        """Returns what the sibling chains of one draw of a task share."""

    async def run(
        self, plan: Plan, opening: Opening, chain: int, trajectory_id: str, *, until: float | None = None
    ) -> Trajectory:
        """Play one chain and score it: see `run_chain`."""


async def run_chain(plan: Plan, opening: Opening, chain: int, trajectory_id: str, *, until: float | None = None) -> Trajectory:
    """Play one chain and score it. Raises only errors that stop the run; the trajectory is then dropped.

    `until` is the deadline of its group, by `time.monotonic`. It ends the chain as `limits.chain_timeout_s` does. A chain that
    used up the time itself, by its replies and tools, is scored; one that waited for the world is a failure of the world.
    """
    trajectory = Trajectory(trajectory_id, opening.task, chain, list(opening.messages), draw=opening.draw)
    trajectory.started = time.time()
    trajectory.foreign_marks = list(plan.foreign_marks) or None
    context = Context(opening.task, trajectory)
    lease: Lease | None = None
    activity = None if plan.activities is None else plan.activities.add(trajectory)
    chain_ends, of_group = deadline(plan.limits, until)
    started, limit, phase = time.perf_counter(), TimeLimit(chain_ends), "environment"
    tell(plan, trajectory, "chain_started")
    try:
        try:
            async with limit:
                if plan.manager is not None:
                    if activity is not None:
                        activity.enter("environment", started)
                    lease = await borrow(plan, plan.manager, context)
                    trajectory.waited_s += time.perf_counter() - started
                    if activity is not None:
                        activity.leave(time.perf_counter())
                phase, row = "play", OpenRow.begin(trajectory_id, 0, opening.prompt_ids, "first")
                run = plan.agent.player or play
                trajectory.outcome = await run(plan, trajectory, context, row, activity, limit, started)
                check_ended(limit)
        except TimeoutError as error:
            whose = "turn" if limit.when() != chain_ends else "group" if of_group else "chain"
            where = where_ended(trajectory, isinstance(error, EndedLate)) if phase == "play" else phase
            late = late_error(plan.limits, whose, where, None if limit.expired() else error)
            if phase != "play" or not limit.expired() or not used_by_chain(plan.limits, whose, context, started):
                raise late from error
            if where.startswith("sampling") and not isinstance(error, EndedLate):
                if isinstance(plan.engine, RemoteEngine):
                    await plan.engine.check_alive()
                _end_reply(plan.agent, trajectory, context.cut)
            trajectory.outcome, trajectory.error = Outcome.MAX_TIME, str(late)
        if trajectory.outcome.trainable and plan.reward is not None:
            phase = "scoring"
            if activity is not None:
                activity.enter("scoring", time.perf_counter())
            since = time.perf_counter()
            try:
                async with TimeLimit(time.monotonic() + plan.limits.score_timeout_s):
                    await score(plan.reward, trajectory, context, plan.call_bonus)
            finally:
                trajectory.scored_s = time.perf_counter() - since
    except TimeoutError:
        fail(trajectory, DeadlineError(f"scoring exceeded its time limit of {plan.limits.score_timeout_s:g} s"))
    except RolloutError as error:
        why = f" (after {trajectory.error})" if trajectory.outcome is Outcome.MAX_TIME else ""
        fail(trajectory, error, why)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            trajectory.outcome, trajectory.reward = Outcome.CANCELLED, None
            tell(plan, trajectory, "finished", trajectory=trajectory)
            raise
        # The chain itself is not cancelled: its environment or the engine awaited something that was.
        fail(trajectory, WorldError("an environment or the engine raised CancelledError"))
    except (KeyboardInterrupt, SystemExit) as error:
        # Tools, rewards and environments are contained. In a task, this exception would end the event loop as Ctrl-C does.
        raise ConfigError(
            f"the code of the agent raised {type(error).__name__} in a chain; raise an Exception there"
        ) from error
    finally:
        trajectory.seconds = time.perf_counter() - started
        if phase == "environment":  # it ended while it waited
            trajectory.waited_s = trajectory.seconds
        if activity is not None:
            activity.end()
        plan.engine.release(trajectory_id)
        if lease is not None:
            lease.release_now()
        await context.close()
    tell(plan, trajectory, "finished", trajectory=trajectory)
    return trajectory


async def play(
    plan: Plan,
    trajectory: Trajectory,
    context: Context,
    row: OpenRow,
    activity: Activity | None,
    limit: TimeLimit,
    started: float,
) -> Outcome:
    """The loop: sample, parse, act, extend. `limit` holds the chain's deadline; each turn sets its own if that is earlier.

    `row` holds the prompt of the first request. `started` is when the chain began, by `time.perf_counter`.
    """
    agent, engine, limits, messages, turns = plan.agent, plan.engine, plan.limits, trajectory.messages, trajectory.turns
    chain_ends, task, clock = limit.when(), asyncio.current_task(), time.perf_counter
    on_text = None if plan.on_event is None else lambda text: tell(plan, trajectory, "text", text=text)
    context.row = row

    def keep(completion: Completion) -> None:
        context.cut = row.turn(completion, sampled_s=clock() - since, began_s=since - started, state=state)

    while True:
        room = limits.max_context - len(row.prompt)
        if room < 1:
            return Outcome.MAX_TOKENS
        sampling = sampling_of(plan.sampling, room, trajectory, len(turns))
        request = Request(row.prompt, sampling, row.session, row.history(messages), plan.schemas, on_text, keep)
        if task is not None and task.cancelling():
            check_ended(limit)
        if limits.turn_timeout_s is not None:
            context.waited_before_turn_s = trajectory.waited_s
            limit.reschedule(min(chain_ends, time.monotonic() + limits.turn_timeout_s))
        state, since = (await context.state() if context.state else ""), clock()
        if activity is not None:
            activity.enter("sampling", since)
        completion = await sample(engine, request)
        now = clock()
        if activity is not None:
            activity.leave(now)
        turn = row.turn(completion, sampled_s=now - since, began_s=since - started, state=state)
        turns.append(turn)
        row.reply(completion.token_ids)
        action = Action() if row.asks else agent.parse(completion)
        calls = turn.calls = action.calls
        messages.append(Message("assistant", completion.text, calls))

        new_messages: list[Message] = []
        if not row.asks:
            trajectory.prediction = completion.text if action.answer is None else action.answer
        if not calls and not row.asks:
            if completion.stop == "length":
                return Outcome.MAX_TOKENS
            if action.answer is not None:
                return Outcome.FINISHED
            if agent.on_no_tool_call != "continue":
                return _react(agent.on_no_tool_call, "the reply has no tool call", completion.text)
            new_messages = [agent.nudge(action)]
        elif calls:
            since = clock()
            if activity is not None:
                activity.enter("tools", since, calls)
            try:
                if plan.on_event is None:  # the common case
                    results = turn.results = await call_tools(agent.tools, calls, context, turn.calls_s)
                else:
                    results = turn.results = await _act_andtell(plan, trajectory, context, turn)
            finally:
                now = clock()
                turn.tools_s = now - since
                if activity is not None:
                    activity.leave(now)
            ended = _settle(agent, trajectory, turn, results)
            new_messages = agent.observe(calls, results)
            if ended is not None:
                messages += new_messages
                return ended
        messages += new_messages
        if len(turns) >= limits.max_turns:
            return Outcome.MAX_TURNS
        row = context.row = _go_on(plan, trajectory, row, len(new_messages))


async def sample(engine: Engine, request: Request) -> Completion:
    """Returns a reply. Raises EngineError for an exception of the engine that has no fate of its own."""
    try:
        return await engine.generate(request)
    except (AgentFlyError, TimeoutError):
        raise
    except Exception as error:
        raise EngineError(f"generate: {type(error).__name__}: {error}") from error


def _go_on(plan: Plan, trajectory: Trajectory, row: OpenRow, num_new: int) -> OpenRow:
    """Returns the row of the next request. The last `num_new` messages follow the reply."""
    renderer, messages = plan.renderer, trajectory.messages
    history = row.history(messages)
    wanted = plan.agent.rewrite(tuple(history), trajectory.turns)
    if wanted is not None or row.asks:
        wanted = _check_rewritten(plan.agent, wanted)
        read = len(history) - num_new
        if len(wanted) <= read or wanted[:read] != history[:read]:
            ids = [] if renderer is None else renderer.start(wanted, plan.schemas)
            row = OpenRow.begin(row.session, row.number + 1, ids, "rewritten", list(wanted), len(messages))
            row.asks = isinstance(wanted, Aside)
            return row
        messages[len(messages) - num_new :] = wanted[read:]
        num_new = len(wanted) - read
    extension = Extension([])
    if renderer is not None:
        extension = renderer.extend(row.history(messages), num_new, trajectory.turns[-1].completion, plan.schemas)
    row = row.extend(extension)
    row.asks = isinstance(wanted, Aside)
    return row


def _check_rewritten(agent: object, wanted: list[Message] | None) -> list[Message]:
    """Raises ConfigError for a history that no reply can follow."""
    name = f"{type(agent).__name__}.rewrite"
    if wanted is None:
        raise ConfigError(f"{name} returned None after the reply to its Aside: return the messages that follow from it")
    if not wanted or not all(isinstance(each, Message) for each in wanted) or wanted[-1].role == "assistant":
        raise ConfigError(f"{name} returns None or a list of Message, the last one not the assistant's, not {wanted!r:.200}")
    return wanted


async def _act_andtell(plan: Plan, trajectory: Trajectory, context: Context, turn: Turn) -> tuple[ToolResult, ...]:
    calls = turn.calls
    for call in calls:
        tell(plan, trajectory, "tool_call", call=call)
    results = await call_tools(plan.agent.tools, calls, context, turn.calls_s)
    for call, result in zip(calls, results, strict=True):
        tell(plan, trajectory, "observation", call=call, result=result)
    return results


def _settle(agent: AgentLike, trajectory: Trajectory, turn: Turn, results: tuple[ToolResult, ...]) -> Outcome | None:
    """Add the step rewards. Returns the outcome if the chain has ended, else None."""
    ended: Outcome | None = None
    for result in results:
        if result.reward is not None:
            turn.reward += result.reward
        if result.error is not None:
            reaction = agent.on_invalid_call if result.invalid else agent.on_tool_error
            if reaction != "continue" and ended is None:
                _react(reaction, "a tool call failed", result.observation)
                # An invalid or endless call is the model's mistake and is trained on; a failed tool is the world's and is not.
                late = Outcome.MAX_TIME if result.error == "timeout" else Outcome.TOOL_ERROR
                ended = Outcome.NO_TOOL_CALL if result.invalid else late
                trajectory.error = result.observation
        if result.done and ended is None:
            trajectory.prediction = result.observation
            ended = Outcome.FINISHED
    return ended


def _react(reaction: Reaction, what: str, detail: str) -> Outcome:
    if reaction == "raise":
        raise ConfigError(f'{what}, and the agent is set to "raise": {detail[:200]!r}')
    return Outcome.NO_TOOL_CALL


def sampling_of(base: Sampling, room: int, trajectory: Trajectory, call: int) -> Sampling:
    """Returns the run's sampling with `max_tokens` cut to the room left and a seed for this draw, chain and call.

    `call` is counted before the request is made: two requests of a chain that run at once have different seeds.
    """
    if base.seed is None:
        return base if base.max_tokens <= room else base.seeded(None, room)
    name = f"{base.seed}/{trajectory.task.id}/{trajectory.chain}/{call}"
    if trajectory.draw:
        # Without it, a task that a step draws twice would give the same chains twice.
        name += f"/{trajectory.draw}"
    return base.seeded(zlib.crc32(name.encode()), min(base.max_tokens, room))


async def score(reward: Reward, trajectory: Trajectory, context: Context, bonus: float = 0.0) -> None:
    """Set the final reward and its components, and add the rewards of turns. Parts that compare a group follow later."""
    trajectory.reward, trajectory.components = 0.0, {}
    add_score(trajectory, await reward.score(trajectory, context.env, context.lend))
    add_score(trajectory, call_bonus(trajectory, bonus))


def add_score(trajectory: Trajectory, result: Score) -> None:
    trajectory.reward = (trajectory.reward or 0.0) + result.reward
    trajectory.components |= result.components
    for turn, extra in zip(trajectory.turns, result.turn_rewards or (), strict=False):
        turn.reward += extra


def _end_reply(agent: AgentLike, trajectory: Trajectory, cut: Turn | None) -> None:
    """Record the reply that was cut off: its tokens are trained. It is empty if the engine passed none to `on_cut`.

    A chain with a loop of its own counts as it stood: replies in flight are not recorded.
    """
    if agent.player is not None:
        return
    turn = cut or Turn([], not trajectory.turns, Completion(text="", stop="length"))
    trajectory.turns.append(turn)
    trajectory.messages.append(Message("assistant", turn.completion.text))
    trajectory.prediction = turn.completion.text


def fail(trajectory: Trajectory, error: RolloutError, before: str = "") -> None:
    trajectory.outcome, trajectory.reward = Outcome.WORLD_FAILURE, None
    trajectory.error = f"{type(error).__name__}: {error}{before}"


async def borrow(plan: Plan, manager: ResourceManager, context: Context) -> Lease:
    """Acquire the chain's lease: the agent's environment now, those of tools and rewards on request."""
    kinds = [plan.env_kind] if plan.env_kind is not None else []
    lease = await manager.acquire(kinds, context.task, holder=context.trajectory.id, may=plan.kinds)
    if plan.env_kind is not None:
        context.env = lease[plan.env_kind]

    async def lend(kind: type) -> Any:
        since, held = time.perf_counter(), kind in lease
        try:
            await lease.need([kind])
        finally:
            context.trajectory.waited_s += time.perf_counter() - since
        if not held and (state := await lease.state()):
            for turn in context.trajectory.turns:  # before it was lent, the environment was as its reset leaves it
                turn.state = turn.state or state
        return lease[kind]

    context.lend, context.state = lend, lease.state
    return lease


def tell(plan: Plan, chain: Trajectory, kind: Any, /, **data: Any) -> None:
    """Tell the listener of the run, if there is one."""
    if plan.on_event is not None:
        plan.on_event(Event(kind, chain.task.id, chain.chain, data))
