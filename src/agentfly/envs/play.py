"""A person plays a world in the terminal.

A line is an action. It goes to the tool whose name it begins with (`TOOL text` or `TOOL {"argument": ...}`), or else to the
world's main tool: the first one that takes a single text. `help` lists tools and possible actions, `answer TEXT` gives the
final answer, `quit` (or the end of the input) stops; the rewards are shown in every case. The environment is leased from a pool
as for a chain, and the record is a `Trajectory`, so rewards see what they see in training.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from ..errors import ConfigError, RolloutError
from ..resources import ResourceManager
from ..resources.lease import Lease
from ..resources.spec import spec_of
from ..rewards import Reward, as_reward
from ..tools import Context, Tool, call_tools
from ..types import Completion, Message, Outcome, Task, ToolCall, Trajectory, Turn
from .worlds import World, check_usable, rewards_of_world, tools_of_world

T = TypeVar("T")
DAY_S = 86_400.0
PATIENCE_S = 5.0
STOP, HELP = ("quit", "exit"), ("help", "?")
WORDS = "Write an action; `help` lists what is possible, `answer TEXT` gives a final answer, `quit` stops."


def play(world: World, task: Task, ask: Callable[[str], str], say: Callable[[str], None]) -> Trajectory:
    """Play one task. `ask` shows a prompt and returns one line, or raises EOFError; `say` shows a text."""
    check_usable(world)
    # The event loop does not run during `ask`, so Ctrl-C interrupts input() as in any program.
    with asyncio.Runner() as runner:
        game = TextGame(world, task)
        try:
            needs = f" (it needs {world.needs})" if world.needs else ""
            runner.run(_while_waiting(game.open(), f"{world.name} to start{needs}", say))
            say(game.opening())
            while not game.over:
                try:
                    line = ask("> ").strip()
                except EOFError:
                    break
                if line in STOP:
                    break
                if line in HELP:
                    say(runner.run(game.help()))
                elif line:
                    say(runner.run(_while_waiting(game.act(line), f"{world.name} to answer", say)))
            for row in runner.run(game.score()):
                say(row)
        finally:
            runner.run(game.close())
    return game.trajectory


async def _while_waiting(work: Coroutine[Any, Any, T], what: str, say: Callable[[str], None]) -> T:
    """The result of `work`. Says every `PATIENCE_S` seconds what is waited for: a simulator can take minutes, or hang."""
    task, seconds = asyncio.ensure_future(work), 0.0
    try:
        while not (await asyncio.wait({task}, timeout=PATIENCE_S))[0]:
            seconds += PATIENCE_S
            say(f"waiting for {what}: {seconds:g} s so far (Ctrl-C stops)")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=PATIENCE_S)


class TextGame:
    """One task of one world, played line by line. The environment is leased from a pool, as for a chain."""

    def __init__(self, world: World, task: Task) -> None:
        self.world, self.task = world, task
        self.tools = tools_of_world(world)
        if not self.tools:
            raise ConfigError(f"{world.name} has no tools and no methods with a docstring, so there is nothing to play with")
        first = self.tools.get(getattr(world.cls, "main_tool", ""))
        self.main = first or next((tool for tool in self.tools.values() if _text_argument(tool)), None)
        self.trajectory = Trajectory("play", task, messages=list(task.messages))
        self.context = Context(task, self.trajectory)
        # A person may think for long.
        self.spec = spec_of(world.cls, name=world.name, max=1, max_hold_s=DAY_S)
        self.manager = ResourceManager(None, self.spec)
        self.lease: Lease | None = None
        self.over = False

    def shown(self, text: str) -> str:
        """An observation as a person reads it. The trajectory keeps what a model would read."""
        show = getattr(self.world.cls, "shown", None)
        return str(show(text)) if callable(show) else text

    async def open(self) -> None:
        lease = self.lease = await self.manager.acquire([self.world.name], self.task, holder="the player")

        async def lend(kind: type) -> Any:
            await lease.need([kind])
            return lease[kind]

        self.context.lend = lend

    def opening(self) -> str:
        """The task as a model reads it, and the first observation if it says more."""
        assert self.lease is not None
        parts = [message.content for message in self.task.messages]
        seen = self.lease.observation(self.world.name)
        if isinstance(seen, str):
            seen = self.shown(seen.removeprefix(parts[-1]).strip() if parts else seen)
            parts += [seen] if seen and seen not in parts else []
        if not parts:
            parts = [self.world.summary]
        return "\n\n".join([*parts, WORDS])

    async def help(self) -> str:
        lines = [f"task: {message.content}" for message in self.task.messages[-1:]]
        lines.append("tools:")
        for tool in self.tools.values():
            lines.append(
                f"  {tool}{' (takes a plain line)' if tool is self.main else ''}: {' '.join(tool.description.split())}"
            )
        if callable(getattr(self.world.cls, "admissible", None)):
            assert self.lease is not None
            actions = self.lease[self.world.name].admissible()
            actions = await actions if inspect.isawaitable(actions) else actions
            lines += ["possible now:", *(f"  {action}" for action in actions)]
        return "\n".join([*lines, WORDS])

    async def act(self, line: str) -> str:
        """Play one turn: the line as a tool call or as the final answer. Returns the observation."""
        first, _, rest = line.partition(" ")
        if first == "answer" and first not in self.tools:
            self.trajectory.prediction = rest.strip()
            self.trajectory.messages.append(Message("assistant", line))
            self.over = True
            return "answered"
        call = self._call(first, rest.strip(), line)
        if call is None:
            return f"This world has no tool that takes a plain line: begin with {' or '.join(self.tools)}."
        turn = Turn([], not self.trajectory.turns, Completion(text=line), calls=(call,))
        self.trajectory.turns.append(turn)
        self.trajectory.messages.append(Message("assistant", line, (call,)))
        (result,) = turn.results = await call_tools(self.tools, (call,), self.context)
        turn.reward += result.reward or 0.0
        self.trajectory.messages.append(Message("user", result.observation))
        self.trajectory.prediction = result.observation
        self.over = result.done
        return self.shown(result.observation)

    def _call(self, first: str, rest: str, line: str) -> ToolCall | None:
        tool = self.tools.get(first)
        if tool is None:
            argument = None if self.main is None else _text_argument(self.main)
            if self.main is None or argument is None:
                return None
            return ToolCall(self.main.name, {argument: _value(self.main, argument, line)})
        if rest.startswith("{"):
            try:
                arguments = json.loads(rest)
            except ValueError as error:
                return ToolCall(first, {}, error=f"The arguments are not valid JSON: {error}")
            return ToolCall(first, arguments if isinstance(arguments, dict) else {"": arguments})
        names = list(tool.schema["function"]["parameters"]["properties"])
        return ToolCall(first, {names[0]: _value(tool, names[0], rest)} if rest and names else {})

    async def score(self) -> list[str]:
        """One row for each reward of the world that this task has the fields for."""
        self.trajectory.outcome = Outcome.FINISHED if self.over else Outcome.MAX_TURNS
        rows: list[str] = []
        rewards = rewards_of_world(self.world)
        if "answer" in self.task.fields and not any("answer" in reward.needs for reward in rewards.values()):
            rewards["qa_exact_match"] = as_reward("qa_exact_match")
        for name, reward in rewards.items():
            if set(reward.needs) <= set(self.task.fields):
                rows.append(f"{name}: {await self._value(reward)}")
        if not rows:
            solved = self.world.conformance().get("score")
            if solved is not None and self.lease is not None:
                # In a thread: an environment in a process or sandbox is read through blocking calls.
                value = await asyncio.to_thread(solved, self.lease[self.world.name], self.task)
                rows.append(f"score: {await value if inspect.isawaitable(value) else value:g}")
        steps = sum(turn.reward for turn in self.trajectory.turns)
        if any(result.reward for turn in self.trajectory.turns for result in turn.results):
            rows.append(f"step rewards: {steps:g}")
        return rows or ["this world has no reward"]

    async def _value(self, reward: Reward) -> str:
        try:
            score = await reward.score(self.trajectory, self.context.env, self.context.lend)
        except RolloutError as error:
            return f"could not be scored: {error}"
        total = score.reward + sum(score.turn_rewards or ())
        parts = [f"{name} {value:g}" for name, value in score.components.items() if name != reward.name]
        return f"{total:g}" + (f" ({', '.join(parts)})" if parts else "")

    async def close(self) -> None:
        if self.lease is not None:
            await self.lease.release()
        try:
            await self.context.close()
        finally:
            await self.manager.close()


def _text_argument(tool: Tool) -> str | None:
    """The argument of a tool that takes a single text, or None."""
    parameters: Mapping[str, Any] = tool.schema["function"]["parameters"]
    required = parameters["required"]
    names = required or list(parameters["properties"])
    if len(names) != 1 or parameters["properties"][names[0]].get("type") not in ("string", "integer", "number"):
        return None
    return str(names[0])


def _value(tool: Tool, argument: str, text: str) -> Any:
    """A line as an argument: unchanged if the tool takes a text, else parsed as JSON if possible."""
    if tool.schema["function"]["parameters"]["properties"][argument].get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
