"""An agent with a loop of its own: code that calls the policy as an OpenAI or Anthropic model, in this process or in another.

    @outside_agent
    async def my_agent(task, llm):
        client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
        ...
        return answer

`my_agent("pocket", reward="exact_match")` is an agent as any other: it runs, is evaluated and trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Any, Literal

from .. import plugins
from ..aio.deadline import TimeLimit
from ..aio.threads import run_in_thread
from ..endpoint.chain import ChainAnswerer
from ..endpoint.replies import Replies
from ..endpoint.server import EndpointServer, Keys
from ..errors import ConfigError, RolloutError, WorldError
from ..protocols import Engine
from ..render.parsers import Parser
from ..rewards import reward as as_reward_function
from ..rollout import Plan
from ..rollout.activity import Activity
from ..rows import OpenRow
from ..tools import Context
from ..tools.text import describe_error
from ..types import Outcome, Task, Trajectory
from .base import BaseAgent

MAX_IN_FLIGHT = 64
MAX_OUTPUT = 1 << 20
INHERITED = ("PATH", "LANG", "LC_ALL", "TERM", "TZ", "USER", "SHELL", "TMPDIR", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
"""The variables that a command sees of this process's, which may hold secrets."""
_LAUNCH = (  # a command ends with this process, however that ends
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
KILL_S = 2.0
"""Seconds that a command has to end after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Llm:
    """The policy as a model of OpenAI or Anthropic, for one chain: the key is worthless after it.

    `base_url` ends in /v1, as OpenAI's clients want it; `anthropic_url` does not. `env` are the variables that point both
    vendors' clients here, for a process of its own.
    """

    base_url: str
    api_key: str
    model: str = "policy"

    @property
    def anthropic_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    @property
    def env(self) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": self.base_url, "OPENAI_API_BASE": self.base_url, "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_url, "ANTHROPIC_API_KEY": self.api_key, "AGENTFLY_MODEL": self.model,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }  # fmt: skip


@as_reward_function(name="returned")
def returned(prediction: str, trajectory: Trajectory) -> float:
    """The number that the code of an `OutsideAgent` returned; 0 if a limit ended it before."""
    if trajectory.outcome.truncated and not prediction:
        return 0.0
    try:
        return float({"True": "1", "False": "0"}.get(prediction, prediction))
    except ValueError as error:
        raise ConfigError(
            f"the agent's code returned {prediction[:80]!r}, which is no number: return the reward, or give the agent a reward"
        ) from error


class OutsideAgent(BaseAgent):
    """Runs `function(task, llm)` or a command for each chain; every call of the policy is a turn.

    function        sync (it runs in a thread) or async. What it returns is the prediction or, if the agent has no reward, the
                    reward. With a parameter `env` it gets the chain's environment
    command         a command line in place of a function: its words may hold fields of the task in braces, such as {question}.
                    It runs in a folder of its own, which is its HOME, and what it prints is the prediction. Of this process's
                    variables it sees those of INHERITED, `variables` and `llm.env`. It and what it started end with the chain
    parser          the format of tool calls in replies, as in ToolAgent
    thinking        "exact": a reply that comes back without its thinking begins a new row; "keep": it is taken as complete
    asked_sampling  "refuse" a temperature or truncation that is not the run's, or "override" it
    """

    def __init__(
        self,
        model: str | Path | Engine = "",
        function: Callable[..., object] | None = None,
        *,
        command: str | Sequence[str] | None = None,
        parser: str | Parser = "auto",
        variables: Mapping[str, str] | None = None,
        thinking: Literal["exact", "keep"] = "exact",
        asked_sampling: Literal["refuse", "override"] = "refuse",
        reward: object = returned,
        **options: Any,
    ) -> None:
        super().__init__(model, reward=reward, **options)
        if (function is None) == (command is None):
            raise ConfigError("OutsideAgent runs a function or a command: give one of them")
        if function is not None and not callable(function):
            raise ConfigError(f"the function of OutsideAgent is called with (task, llm), and {function!r} cannot be called")
        given: dict[str, object] = {
            "tools": self.tools,
            "system": self.system,
            "examples": self._examples,
            "history": self.history,
        }
        reactions = ("end", self.on_no_tool_call), ("continue", self.on_invalid_call), ("continue", self.on_tool_error)
        given["reactions"] = any(own != default for default, own in reactions)
        if odd := [name for name, value in given.items() if value]:
            raise ConfigError(
                f"an agent with code of its own has no {odd[0]} here: its code writes the prompts and runs the tools"
            )
        if thinking not in ("exact", "keep") or asked_sampling not in ("refuse", "override"):
            raise ConfigError('thinking is "exact" or "keep", and asked_sampling is "refuse" or "override"')
        self.function, self.parser, self.variables = function, parser, dict(variables or {})
        self.command = shlex.split(command) if isinstance(command, str) else list(command or ())
        self.thinking, self.asked_sampling = thinking, asked_sampling
        self.player = self.play
        self._servers: dict[asyncio.AbstractEventLoop, list[tuple[EndpointServer, Keys, Replies]]] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """The endpoint listens on loopback while chains run in this event loop."""
        loop, keys = asyncio.get_running_loop(), Keys()
        replies = Replies(self.renderer, self.parser)
        async with EndpointServer(keys, max_in_flight=MAX_IN_FLIGHT) as server:
            opened = self._servers.setdefault(loop, [])
            opened.append(entry := (server, keys, replies))
            try:
                yield
            finally:
                opened.remove(entry)
                if not opened:
                    del self._servers[loop]

    async def play(
        self, plan: Plan, trajectory: Trajectory, context: Context, row: OpenRow, activity: Activity | None, limit: TimeLimit,
        started: float,
    ) -> Outcome:  # fmt: skip
        """Run the code of one chain; see `rollout.chain.play`."""
        if plan.limits.turn_timeout_s is not None:
            raise ConfigError(
                "rollout.turn_timeout_s has no turns to limit where the agent's code runs: set agent.chain_timeout_s"
            )
        if not (opened := self._servers.get(asyncio.get_running_loop())):
            raise ConfigError(f"{type(self).__name__} plays chains where `serving` is open: this backend does not open it")
        server, keys, replies = opened[-1]
        chain = ChainAnswerer(
            plan, trajectory, context, activity, started, replies,
            keeps_thinking=self.thinking == "keep", overrides=self.asked_sampling == "override",
        )  # fmt: skip
        llm = Llm(server.base_url, keys.open(chain))
        trajectory.messages.clear()
        if activity is not None:
            activity.enter("tools", started)
        try:
            value = await (
                self._run_command(trajectory.task, llm) if self.command else self._call(trajectory.task, llm, context)
            )
        except RolloutError:
            raise
        except Exception as error:
            if chain.failure is None and chain.hit is None:
                raise WorldError(f"the code of the agent raised {describe_error(error)}") from error
            value = None
        finally:
            keys.close(llm.api_key)
            await chain.close()
            if activity is not None:
                activity.leave(time.perf_counter())
            if trajectory.turns:
                trajectory.final_row = max(trajectory.turns, key=lambda turn: turn.began_s).row
            else:
                trajectory.messages += trajectory.task.messages
        if chain.failure is not None:
            raise chain.failure
        if not trajectory.turns:
            raise WorldError("the code of the agent made no call of the model that was answered")
        trajectory.prediction = "" if value is None else str(value)
        return chain.hit or Outcome.FINISHED

    async def _call(self, task: Task, llm: Llm, context: Context) -> object:
        function = self.function
        assert function is not None
        more = {"env": context.env} if "env" in inspect.signature(function).parameters else {}
        if inspect.iscoroutinefunction(function):
            return await function(task, llm, **more)
        value = await run_in_thread(lambda: function(task, llm, **more))
        return await value if inspect.isawaitable(value) else value

    async def _run_command(self, task: Task, llm: Llm) -> str:
        question = task.messages[-1].content if task.messages else ""
        words = [_filled(word, {"question": question, **task.fields}) for word in self.command]
        if shutil.which(words[0]) is None:
            raise WorldError(f"there is no program {words[0]!r} on the PATH")
        launch = (sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid())) if sys.platform == "linux" else ()
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        with tempfile.TemporaryDirectory(prefix="agentfly-", ignore_cleanup_errors=True) as folder:
            process = await asyncio.create_subprocess_exec(
                *launch, *words, cwd=folder, start_new_session=True,
                env={**inherited, **self.variables, **llm.env, "HOME": folder},
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            said, complaint = bytearray(), bytearray()
            readers = [asyncio.create_task(_keep_last(*pair)) for pair in ((process.stdout, said), (process.stderr, complaint))]
            try:
                await process.wait()
            finally:
                await _end_group(process)
                await asyncio.wait(readers, timeout=KILL_S)  # what left the group may hold the pipes
                for reader in readers:
                    reader.cancel()
        if process.returncode:
            last = complaint.decode("utf-8", "replace").strip()[-300:]
            raise WorldError(f"{words[0]} ended with status {process.returncode}: {last}")
        return said.decode("utf-8", "replace").strip()


async def _keep_last(stream: asyncio.StreamReader | None, kept: bytearray) -> None:
    """Read a stream to its end, and keep the last MAX_OUTPUT bytes."""
    while stream is not None and (part := await stream.read(1 << 16)):
        kept += part
        del kept[:-MAX_OUTPUT]


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End a command and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_S if number == signal.SIGTERM else None)


def _filled(word: str, fields: Mapping[str, object]) -> str:
    """A word of the command with the fields that it names in braces; other braces stay."""
    for name, value in fields.items():
        word = word.replace("{" + name + "}", str(value))
    return word


class outside_agent:  # noqa: N801 - a decorator
    """Makes a function `(task, llm)` an agent: called with a model and options, it returns an `OutsideAgent`.

    The name of the function, or `file.py:NAME`, is an `agent.kind` of a config.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        update_wrapper(self, function)
        plugins.register("agents", function.__name__, self)

    def __call__(self, model: str | Path | Engine = "", **options: Any) -> OutsideAgent:
        made = OutsideAgent(model, self.function, **options)
        made.described_as = plugins.reference_of(self)
        return made
