"""`agentfly chat`: talk with a checkpoint in the terminal. Its agent, tools and environment are those of its run or recipe.

Tokens are printed as they are sampled, tool calls and results as they happen. Ctrl-C stops a reply, Ctrl-D ends the program.
Without a terminal every line of stdin is a message. With --json every event is a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import AgentFlyError, ConfigError
from ...types import Event, Task

if TYPE_CHECKING:
    from rich.console import Console

    from ...config import Config
    from ...rollout.chat import ChatSession

HELP = "/new starts again, /score shows the reward, /quit ends; Ctrl-C stops a reply"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `chat` to the command line."""
    chat = commands.add_parser("chat", help="talk with a checkpoint: its own agent, tools and environment, tokens streamed")
    chat.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, a run folder (its newest one) or a model's name")
    chat.add_argument("overrides", metavar="key=value", nargs="*", help="set config keys: sampling.temperature=0")
    chat.add_argument("--recipe", metavar="R", help="the config file or recipe of the agent (default: that of the run)")
    chat.add_argument("--task", metavar="TASK", help="a task of the data set, by its id or its number from 0")
    chat.add_argument("--split", default="validation", help="the split of --task: validation (default), train or test")
    chat.add_argument("--fork", metavar="ID", help="continue the stored chain with this id, as `agentfly show` prints it")
    chat.add_argument("--turn", type=int, default=0, metavar="N", help="with --fork: sample its turn N anew (default 0)")
    chat.add_argument(
        "--run", dest="run_dir", metavar="RUN", help="with --fork: the run of the chain (default: the checkpoint's)"
    )
    chat.add_argument("--message", action="append", metavar="TEXT", help="say this and end; may be given several times")
    chat.add_argument("--json", action="store_true", help="print one JSON object per event")
    chat.set_defaults(run=run_chat)


def run_chat(arguments: argparse.Namespace) -> int:
    """Converse until the input ends. Returns 1 if a reply failed and stdin is not a terminal."""
    from rich.console import Console

    from ...build import build_agent, checkpoint_config

    if arguments.fork is None and (arguments.run_dir or arguments.turn):
        raise ConfigError("--run and --turn belong to --fork: name the chain")
    if arguments.fork is not None and arguments.task is not None:
        raise ConfigError("a forked chain has its own task: remove --task or --fork")
    config = checkpoint_config(arguments.checkpoint, arguments.recipe, arguments.overrides)
    if config.run.threads is not None:
        from ...learn.model.storage import set_threads

        set_threads(config.run.threads)
    start = _opener(arguments, config, build_agent(config))
    talk = Talk(start, JsonPrinter() if arguments.json else TextPrinter(Console(highlight=False, soft_wrap=True)))
    goes_first = arguments.task is not None or arguments.fork is not None
    return asyncio.run(talk.run(arguments.message, goes_first and not arguments.message))


def _opener(arguments: argparse.Namespace, config: Config, agent: Any) -> Any:
    """A function that opens a conversation: with a task, from a stored chain, or about anything."""
    from ...build import run_of
    from ...rollout.chat import ChatSession

    if arguments.fork is not None:
        from ...runs import RunDirectory, RunStore

        run = arguments.run_dir or run_of(arguments.checkpoint)
        if run is None:
            raise ConfigError("--fork needs the run that has the chain: give --run RUN")
        with RunStore(RunDirectory.existing(Path(run)).database, readonly=True) as store:
            stored = store.trajectory(arguments.fork)
        return lambda: ChatSession.fork(agent, stored, arguments.turn, sampling=config.sampling)
    task = None if arguments.task is None else find_task(config, arguments.task, arguments.split)
    return lambda: ChatSession.open(agent, task=task, sampling=config.sampling)


def find_task(config: Config, wanted: str, split: str) -> Task:
    """The task of a config's data set with this id or, if none has it, with this number. Raises ConfigError."""
    from ...build import build_tasks, held_out_tasks

    tasks = build_tasks(config)[0] if split == "train" else held_out_tasks(config, split)
    for task in tasks:
        if task.id == wanted:
            return task
    if wanted.isdecimal() and int(wanted) < len(tasks):
        return tasks[int(wanted)]
    raise ConfigError(f"the {split} split has no task {wanted!r}: it has {len(tasks)}, from {tasks[0].id!r} on")


class Talk:
    """One program run: opens conversations, reads messages, prints what happens."""

    def __init__(self, start: Any, printer: TextPrinter | JsonPrinter) -> None:
        self._start, self._printer = start, printer
        self._replying: asyncio.Task[None] | None = None
        self._failed = False

    async def run(self, messages: Sequence[str] | None, goes_first: bool) -> int:
        """Send all messages, those given or those of stdin. Returns the exit code."""
        session = await self._start()
        with self._interrupts():
            try:
                self._printer.begin(session, interactive=messages is None and sys.stdin.isatty())
                if goes_first:
                    await self._say(session, None)
                async for text in self._messages(messages):
                    if text == "/quit":
                        break
                    if text == "/new":
                        await session.close()
                        session = await self._start()
                        self._printer.begin(session, interactive=False)
                    elif text == "/score":
                        await self._score(session)
                    else:
                        await self._say(session, text)
            finally:
                await session.close()
                await session.agent.close()
        return 1 if self._failed else 0

    async def _messages(self, given: Sequence[str] | None) -> AsyncIterator[str]:
        from ...aio.threads import run_in_thread

        if given is not None:
            for text in given:
                yield text
            return
        while True:
            # In a thread: the event loop goes on, so that connections of environments stay alive.
            line = await run_in_thread(self._printer.read)
            if line is None:
                return
            if line.strip():
                yield line.strip()

    async def _say(self, session: ChatSession, text: str | None) -> None:
        self._replying = asyncio.ensure_future(self._reply(session, text))
        try:
            await self._replying
            self._failed = False
        except asyncio.CancelledError:
            if not self._replying.cancelled():
                raise
            self._printer.stopped()
        except AgentFlyError as error:
            self._failed = not sys.stdin.isatty()
            self._printer.error(error)
        finally:
            self._replying = None

    async def _reply(self, session: ChatSession, text: str | None) -> None:
        async with contextlib.aclosing(session.send(text)) as events:
            async for event in events:
                self._printer.show(event)
        if session.scorable:
            await self._score(session)

    async def _score(self, session: ChatSession) -> None:
        try:
            self._printer.score(*await session.score())
        except AgentFlyError as error:
            self._printer.error(error)

    @contextlib.contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Ctrl-C stops the reply if there is one, else the program."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            task = self._replying or main
            if task is not None:
                task.cancel()

        try:
            loop.add_signal_handler(signal.SIGINT, interrupt)
        except (NotImplementedError, ValueError, RuntimeError):  # Windows, or not the main thread
            yield
            return
        try:
            yield
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            loop.remove_signal_handler(signal.SIGINT)


class TextPrinter:
    """Prints a conversation for a person. Control codes in a model's or tool's text are made visible."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._interactive = False
        self._open = False  # whether the cursor is inside of a streamed line

    def begin(self, session: ChatSession, *, interactive: bool) -> None:
        """Says who answers, and how to talk."""
        self._interactive = self._interactive or interactive
        tools = ", ".join(session.agent.tools) or "none"
        self._line(f"{type(session.agent).__name__} with the tools: {tools}", "dim")
        for text in session.differences:
            self._line(f"warning: {text}", "yellow")
        if interactive:
            self._line(HELP, "dim")
        for message in session.trajectory.messages or session.trajectory.task.messages:
            self._line(f"[{message.role}] {message.content}", "cyan")

    def read(self) -> str | None:
        """One message, or None at the end."""
        try:
            return input("> " if self._interactive else "")
        except (EOFError, ValueError):  # ValueError: stdin was closed
            return None

    def show(self, event: Event) -> None:
        """Print an event of a reply."""
        from rich.text import Text

        from ...watch.tables import clean

        data = event.data
        if event.kind == "text":
            self._open = True
            self._console.print(Text(clean(str(data["text"]), self._console.options.ascii_only), style="green"), end="")
        elif event.kind == "tool_call":
            call = data["call"]
            arguments = "could not be read" if call.error else json.dumps(call.arguments, ensure_ascii=False, default=str)
            self._line(f"-> {call.name} {arguments}", "magenta")
        elif event.kind == "observation":
            result = data["result"]
            self._line(f"<- {result.observation}", "red" if result.error else "yellow")
        elif event.kind == "finished":
            trajectory, outcome = data["trajectory"], data["outcome"]
            self._line(f"{outcome.value}; {len(trajectory.turns)} turns, {trajectory.num_sampled} tokens so far", "dim")

    def score(self, reward: float, components: dict[str, float]) -> None:
        """Print the reward of the conversation."""
        parts = ", ".join(f"{name} {value:.4g}" for name, value in components.items())
        self._line(f"reward {reward:.4g}" + (f" ({parts})" if parts else ""), "bold")

    def stopped(self) -> None:
        """Say that a reply was stopped."""
        self._line("stopped", "dim")

    def error(self, error: AgentFlyError) -> None:
        """Print an error; the conversation goes on."""
        self._line(f"{type(error).__name__}: {error}", "red")

    def _line(self, text: str, style: str) -> None:
        from rich.text import Text

        from ...watch.tables import clean

        if self._open:
            self._console.print()
            self._open = False
        self._console.print(Text(clean(text, self._console.options.ascii_only), style=style))


class JsonPrinter:
    """Prints every event as one line of JSON."""

    def begin(self, session: ChatSession, *, interactive: bool) -> None:
        """The opening: agent, tools, the messages so far."""
        opening = session.trajectory.messages or session.trajectory.task.messages
        messages = [{"role": each.role, "content": each.content} for each in opening]
        agent = {"agent": type(session.agent).__name__, "tools": list(session.agent.tools)}
        self._put("opened", **agent, messages=messages, differences=session.differences)

    def read(self) -> str | None:
        """One line of stdin, or None at its end."""
        return sys.stdin.readline() or None

    def show(self, event: Event) -> None:
        """An event of a reply."""
        data = event.data
        if event.kind == "text":
            self._put("text", text=data["text"])
        elif event.kind == "tool_call":
            call = data["call"]
            self._put("tool_call", name=call.name, arguments=call.arguments, error=call.error)
        elif event.kind == "observation":
            result = data["result"]
            self._put("observation", name=data["call"].name, text=result.observation, error=result.error, reward=result.reward)
        elif event.kind == "finished":
            trajectory = data["trajectory"]
            figures = {"turns": len(trajectory.turns), "tokens": trajectory.num_sampled}
            self._put("finished", outcome=data["outcome"].value, prediction=trajectory.prediction, **figures)

    def score(self, reward: float, components: dict[str, float]) -> None:
        """The reward of the conversation."""
        self._put("score", reward=reward, components=components)

    def stopped(self) -> None:
        """A reply was stopped."""
        self._put("stopped")

    def error(self, error: AgentFlyError) -> None:
        """A reply failed."""
        self._put("error", kind=type(error).__name__, text=str(error))

    def _put(self, event: str, **data: Any) -> None:
        print(json.dumps({"event": event, **data}, default=str), flush=True)
