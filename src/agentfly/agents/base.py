"""BaseAgent: writes prompts, parses replies, and runs chains.

A custom agent overrides two methods: `start(task) -> messages` writes the prompt, `parse(completion) -> Action` reads a reply.
`agentfly.train(agent, data=...)` trains the same object. The model is opened on first use. `run` checks all rows before the
first token is sampled.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal, Never, get_args

from ..aio.threads import run_to_end
from ..data import check_fields, load_tasks
from ..engines import engine_options
from ..errors import ConfigError
from ..foreign_names import unknown_argument
from ..protocols import Engine, Renderer
from ..resources import spec_of
from ..rewards import Reward, as_reward
from ..rollout import Limits, check_prompts, make_plan, open_environments, run_chains
from ..rollout.chain import Player
from ..rollout.setup import as_sampling, check_resources, next_run_number, open_model
from ..tools import Tool, as_tool
from ..types import (
    Action,
    Completion,
    Event,
    Message,
    Reaction,
    RunResult,
    Sampling,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)
from .examples import TOOLS, as_examples, examples_of_tools
from .history import as_history


class BaseAgent:
    """A model, its tools and its reward.

    `model` is a name ("pocket", "pocket-worlds", "smollm2", a directory, a hub name, "openai:NAME@URL") or an engine. `tools`
    are decorated functions or names. `reward` is a decorated function, a name, a mix, or None for running only. `env` is a
    class or function that makes the environment of one chain. `examples` are messages of worked examples, a JSON file of them,
    or "tools" (a call of each); every prompt shows them between the system text and the task. With `examples_steps` only a
    training shows them, to a share of its tasks that falls to 0. `history` leaves out old steps or folds them into a summary: a
    table of its `kind` ("last" or "fold") and options. `engine` is "local", "vllm" or "openai", or a table of `kind`
    and the engine's options. Each `on_...` argument is "continue" (tell the model), "end" (end the chain) or "raise".
    """

    observation_role: ClassVar[Literal["user", "tool"]] = "user"
    observation_mark: ClassVar[str] = "Observation:"
    native_tools: ClassVar[bool] = False
    required_tools: ClassVar[tuple[str, ...]] = ()
    default_on_no_tool_call: ClassVar[Reaction] = "end"
    default_nudge: ClassVar[str] = "Your reply has no tool call and no answer. Use a tool or give your answer."

    def __init__(
        self,
        model: str | Path | Engine = "",
        *,
        tools: Any = (),
        reward: object = None,
        env: object = None,
        system: str | None = None,
        examples: str | Path | Iterable[Message | Mapping[str, Any]] = (),
        examples_steps: int | None = None,
        max_turns: int = 8,
        max_context: int | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        chain_timeout_s: float = 600.0,
        on_no_tool_call: Reaction | None = None,
        on_invalid_call: Reaction = "continue",
        on_tool_error: Reaction = "continue",
        history: object = None,
        renderer: Renderer | None = None,
        engine: str | Mapping[str, Any] | None = None,
        resources: Mapping[str, Any] | None = None,
        **unknown: Never,
    ) -> None:
        self._refuse_unknown(unknown)
        if isinstance(model, (str, Path)) and str(model).strip() == "":
            raise ConfigError(f"the model's name is empty: {type(self).__name__} needs a name, a directory or an engine")
        self.model = model
        self.tools = self._collect_tools(tools)
        self.reward: Reward | None = None if reward is None else as_reward(reward)
        self.env = None if env is None else spec_of(env)
        self.resources = dict(resources or {})
        check_resources(self)
        self.system = system
        self._examples = None if examples == TOOLS else as_examples(examples)
        self.examples_steps = examples_steps
        if examples_steps is not None and self._examples == ():
            raise ConfigError("examples_steps has no effect without examples: set examples, or remove it")
        self.max_context = max_context
        self.limits = Limits(max_turns=max_turns, chain_timeout_s=chain_timeout_s)
        self.sampling = as_sampling(sampling)
        self.on_no_tool_call: Reaction = on_no_tool_call or self.default_on_no_tool_call
        self.on_invalid_call = on_invalid_call
        self.on_tool_error = on_tool_error
        for name in ("on_no_tool_call", "on_invalid_call", "on_tool_error"):
            if getattr(self, name) not in get_args(Reaction):
                raise ConfigError(f"{name} is 'continue', 'end' or 'raise', not {getattr(self, name)!r}")
        self.history = as_history(history)
        self.engine_options = engine_options(engine)
        self.player: Player | None = None
        self.described_as = ""  # the kind that a config names in place of the class
        self._opened: tuple[Engine, Renderer | None] | None = None
        self._renderer = renderer

    # ---- to override -----------------------------------------------------------------------------------------------------

    def start(self, task: Task) -> list[Message]:
        """Returns the opening messages: the agent's system text, then the task's messages."""
        return with_system(self.system, task.messages)

    def parse(self, completion: Completion) -> Action:
        """Parse a reply into calls, an answer, or neither. By default the whole reply is the answer. Must not raise."""
        return Action(calls=completion.tool_calls, answer=None if completion.tool_calls else completion.text.strip())

    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        """Returns the messages that show tool results to the model.

        An agent that writes them in another form sets `observation_mark` to the text with which one begins.
        """
        if self.observation_role == "tool":
            return [
                Message("tool", result.observation, name=call.name, tool_call_id=call.id or None, images=_images(result))
                for call, result in zip(calls, results, strict=True)
            ]
        if len(results) == 1 and results[0].image is None:
            return [Message("user", f"{self.observation_mark} {results[0].observation}")]
        text = "\n".join(f"{self.observation_mark} {result.observation}" for result in results)
        return [Message("user", text, images=tuple(image for result in results for image in _images(result)))]

    def write(self, action: Action) -> Message:
        """Returns the reply that `parse` reads as this action, for examples that are written from the tools."""
        if not self.native_tools:
            raise ConfigError(
                f"{type(self).__name__} has no method write(action), so examples = {TOOLS!r} cannot be written: give messages"
            )
        return Message("assistant", action.answer or "", action.calls)

    def nudge(self, action: Action) -> Message:
        """Returns the message that follows a reply without call and answer if `on_no_tool_call` is "continue"."""
        return Message("user", action.nudge or self.default_nudge)

    def rewrite(self, messages: Sequence[Message], turns: Sequence[Turn]) -> list[Message] | None:
        """Returns the messages of the next request; None for `messages`, those of the last one and what followed.

        What it returns in place of messages that follow the last reply goes on with the training row. Where a message before
        differs, a new row begins. The reply to a `Aside` is not parsed; it is the last of the next `messages`.
        """
        return None if self.history is None else self.history.rewrite(messages, turns)

    def serving(self) -> AbstractAsyncContextManager[None]:
        """Open while chains run in this event loop: what an agent with a loop of its own needs for them."""
        return nullcontext()

    def check_model(self) -> None:
        """Raises ConfigError if the agent cannot work with the opened model. Runs before the first chain starts."""

    # ---- the model -------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine; the first access opens the model."""
        return self._open()[0]

    @property
    def renderer(self) -> Renderer | None:
        """The renderer of an engine that reads token ids; None for an engine that reads messages."""
        return self._open()[1]

    @property
    def examples(self) -> tuple[Message, ...]:
        """The worked examples."""
        if self._examples is None:
            self._examples = examples_of_tools(self)
        return self._examples

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """The tool schemas for the chat template or the server; empty if the agent writes the tools into its prompt."""
        return [tool.schema for tool in self.tools.values()] if self.native_tools else []

    @property
    def observation_marks(self) -> tuple[str, ...]:
        """The texts with which the agent begins an observation; those of the role "tool" are the template's."""
        return (self.observation_mark,) if self.tools and self.observation_mark and self.observation_role == "user" else ()

    def check(self, tasks: Sequence[Task]) -> None:
        """Raises DataError if a row lacks a field that the reward or a tool requires."""
        if self.reward is not None and tasks:
            self.reward.check(set(tasks[0].fields))
            check_fields(tasks, self.reward.needs, f"the reward {self.reward.name!r}")
        for tool in self.tools.values():
            check_fields(tasks, tool.needs, f"the tool {tool.name!r}")

    # ---- running ---------------------------------------------------------------------------------------------------------

    async def run(
        self,
        tasks: str | Path | Iterable[Any] = (),
        num_chains: int = 1,
        max_turns: int | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        max_concurrency: int | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        **unknown: Never,
    ) -> RunResult:
        """Run `num_chains` chains of every task and score them.

        At most `max_concurrency` chains run at once; None means the engine's capacity.
        """
        self._refuse_unknown(unknown, "run")
        if num_chains < 1:
            raise ConfigError(f"num_chains must be at least 1, not {num_chains}")
        if max_concurrency is not None and max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, not {max_concurrency}")
        loaded = load_tasks(tasks)
        self.check(loaded)
        started = time.perf_counter()
        bare = make_plan(self, max_turns=max_turns, sampling=sampling, on_event=on_event)
        check_prompts(bare, loaded)
        async with open_environments(self, bare, max_concurrency) as plan:
            trajectories = await run_chains(
                plan,
                loaded,
                num_chains=num_chains,
                max_concurrency=max_concurrency,
                prefix=f"run{next_run_number()}-",
                on_trajectory=on_trajectory,
            )
        return RunResult(trajectories, num_chains, time.perf_counter() - started)

    def run_sync(self, *args: Any, **kwargs: Any) -> RunResult:
        """`run` for synchronous code. Inside a running event loop (a notebook) a new thread runs it."""
        return run_to_end(self.run(*args, **kwargs))

    def use_engine(self, engine: Engine, renderer: Renderer | None) -> None:
        """Sample from this engine, and do not open the model."""
        self._opened = (engine, renderer)

    async def close(self) -> None:
        """Close the engine that the agent opened. An engine that was passed in stays open."""
        if self._opened is not None and self._opened[0] is not self.model:
            await self._opened[0].close()
        self._opened = None

    def _open(self) -> tuple[Engine, Renderer | None]:
        if self._opened is None:
            self._opened = open_model(self.model, self.engine_options, self._renderer)
        return self._opened

    def _refuse_unknown(self, names: Iterable[str], method: str = "__init__") -> None:
        for name in names:
            known = {
                key: None
                for kind in type(self).__mro__
                if method in vars(kind)
                for key, parameter in inspect.signature(getattr(kind, method)).parameters.items()
                if key != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            }
            owner = type(self).__name__ + ("" if method == "__init__" else f".{method}")
            raise unknown_argument(owner, name, known)

    def _collect_tools(self, tools: object) -> dict[str, Tool]:
        collected: dict[str, Tool] = {}
        for tool in map(as_tool, tool_list(tools)):
            if tool.name in collected:
                raise ConfigError(f"two tools are called {tool.name!r}; give one of them another name")
            collected[tool.name] = tool
        for name in self.required_tools:
            if name not in collected:
                raise ConfigError(f"{type(self).__name__} needs a tool called {name!r}: pass it in tools=[...]")
        return collected


def tool_list(tools: object) -> list[Any]:
    """Returns the tools as a list. One tool alone counts as a list of one. Raises ConfigError for anything else."""
    if isinstance(tools, str):
        raise ConfigError(f"tools is a list, not the string {tools!r}: write tools=[{tools!r}]")
    if isinstance(tools, Tool) or callable(tools):
        return [tools]
    if tools is None:
        return []
    if not isinstance(tools, Iterable):
        raise ConfigError(f"tools is a list of decorated functions or names, not {type(tools).__name__}")
    return list(tools)


def with_system(system: str | None, messages: Sequence[Message]) -> list[Message]:
    """Put the agent's system text before a row's messages, or after a blank line in the row's own system message."""
    own = list(messages)
    if not system:
        return own
    if own and own[0].role == "system":
        return [Message("system", f"{own[0].content}\n\n{system}"), *own[1:]]
    return [Message("system", system), *own]


def _images(result: ToolResult) -> tuple[Any, ...]:
    return () if result.image is None else (result.image,)
