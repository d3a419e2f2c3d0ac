"""BaseAgent: how a prompt is written, how a reply is read, and `run`.

An agent of one's own overrides two methods: `start(task) -> messages` writes the prompt, `parse(completion) -> Action`
reads a reply. An agent that runs is an agent that trains: `agentfly.train(agent, data=...)` uses the same object. The model
is opened when it is first needed; rows are checked, and every prompt rendered, before the first token is sampled.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from ..data import check_fields, load_tasks
from ..engines import engine_options, open_engine
from ..errors import ConfigError
from ..resources import Budget, ResourceManager, Spec, spec_of
from ..resources.spec import check_settings
from ..rewards import Reward, as_reward
from ..rollout import Limits, Plan, controller, most_in_flight, prepare, run_chains
from ..rollout.chain import Policy
from ..tools import Tool, as_tool
from ..types import Action, Completion, Engine, Event, Message, Renderer, RunResult, Sampling, Task, ToolCall, ToolResult, Trajectory


class BaseAgent:
    """A model, its tools and its reward.

    `model` is a name ("pocket", "pocket-worlds", "smollm2", a directory, a hub name, "openai:NAME@URL") or an engine. `tools`
    are decorated functions or names. `reward` is a decorated function, a name, a mix, or None for running only. `env` is a
    class or function that makes the environment of one chain. `engine` is "local", "vllm" or "openai", or a table of `kind`
    and the engine's options. The three `on_...` policies are "continue" (tell the model), "end" (the chain) or "raise".
    """

    observation_role: ClassVar[Literal["user", "tool"]] = "user"
    native_tools: ClassVar[bool] = False
    required_tools: ClassVar[tuple[str, ...]] = ()
    default_on_no_tool_call: ClassVar[Policy] = "end"
    default_nudge: ClassVar[str] = "Your reply has no tool call and no answer. Use a tool or give your answer."

    def __init__(
        self,
        model: str | Path | Engine,
        *,
        tools: Iterable[Any] = (),
        reward: Any = None,
        env: Any = None,
        system: str | None = None,
        max_turns: int = 8,
        max_context: int | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        chain_timeout_s: float = 600.0,
        on_no_tool_call: Policy | None = None,
        on_invalid_call: Policy = "continue",
        on_tool_error: Policy = "continue",
        renderer: Renderer | None = None,
        engine: str | Mapping[str, Any] | None = None,
        resources: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.tools = self._collect_tools(tools)
        self.reward: Reward | None = None if reward is None else as_reward(reward)
        self.env = None if env is None else spec_of(env)
        self.resources = dict(resources or {})
        self._check_resources()
        self.system = system
        self.max_context = max_context
        self.limits = Limits(max_turns=max_turns, chain_timeout_s=chain_timeout_s)
        self.sampling = as_sampling(sampling)
        self.on_no_tool_call: Policy = on_no_tool_call or self.default_on_no_tool_call
        self.on_invalid_call = on_invalid_call
        self.on_tool_error = on_tool_error
        for name in ("on_no_tool_call", "on_invalid_call", "on_tool_error"):
            if getattr(self, name) not in get_args(Policy):
                raise ConfigError(f"{name} is 'continue', 'end' or 'raise', not {getattr(self, name)!r}")
        if isinstance(model, (str, Path)) and str(model).strip() == "":
            raise ConfigError("the model's name is empty")
        self.engine_options = engine_options(engine)
        self._opened: tuple[Engine, Renderer | None] | None = None
        self._renderer = renderer

    # ---- to override -----------------------------------------------------------------------------------------------------

    def start(self, task: Task) -> list[Message]:
        """Task to opening messages: the agent's system text, then the task's own messages."""
        return with_system(self.system, task.messages)

    def parse(self, completion: Completion) -> Action:
        """A reply to calls, or an answer, or neither. The default: the whole reply is the answer. Must not raise."""
        return Action(calls=completion.tool_calls, answer=None if completion.tool_calls else completion.text.strip())

    def observe(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        """Tool results to the messages that the model reads next."""
        if self.observation_role == "tool":
            return [
                Message("tool", result.observation, name=call.name, tool_call_id=call.id or None, images=_images(result))
                for call, result in zip(calls, results, strict=True)
            ]
        if len(results) == 1 and results[0].image is None:
            return [Message("user", f"Observation: {results[0].observation}")]
        text = "\n".join(f"Observation: {result.observation}" for result in results)
        return [Message("user", text, images=tuple(image for result in results for image in _images(result)))]

    def nudge(self, action: Action) -> Message:
        """What a model is told whose reply had neither a call nor an answer, under the policy "continue"."""
        return Message("user", action.nudge or self.default_nudge)

    # ---- the parts -------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        return self._open()[0]

    @property
    def renderer(self) -> Renderer | None:
        return self._open()[1]

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """What the chat template or the server is told about the tools; empty where the agent writes them into its prompt."""
        return [tool.schema for tool in self.tools.values()] if self.native_tools else []

    def plan(
        self,
        *,
        max_turns: int | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> Plan:
        """All that the chains of one run share."""
        engine, renderer = self._open()
        max_context = min(self.max_context or engine.max_context, engine.max_context)
        limits = replace(
            self.limits, max_context=max_context, max_turns=self.limits.max_turns if max_turns is None else max_turns
        )
        return Plan(
            agent=self,
            engine=engine,
            renderer=renderer,
            schemas=self.schemas,
            reward=self.reward,
            sampling=self.sampling if sampling is None else as_sampling(sampling),
            limits=limits,
            on_event=on_event,
        )

    @asynccontextmanager
    async def environments(self, plan: Plan, max_concurrency: int | None) -> AsyncIterator[Plan]:
        """The plan with a resource manager behind it, where the agent, its tools or its reward use environments."""
        together = most_in_flight(plan.engine, max_concurrency)
        kinds = self._kinds(together)
        if not kinds:
            yield replace(plan, admission=controller(plan, together))
            return
        async with ResourceManager(self._budget, *kinds) as manager:
            names = tuple(kind.name for kind in kinds)
            ready = replace(plan, manager=manager, env_kind=self.env.name if self.env else None, kinds=names)
            yield replace(ready, admission=controller(ready, together))

    @property
    def _budget(self) -> Budget:
        return Budget(cpu=self.resources.get("cpu"), memory_mb=self.resources.get("memory_mb"))

    def _kinds(self, max_concurrency: int) -> list[Spec]:
        """Every kind of environment in use, with the size of its pool: what was set, else one for each chain in flight."""
        found: dict[Any, Spec] = {} if self.env is None else {self.env.make: self.env}
        sizes: dict[type, dict[str, int]] = {}
        for tool in self.tools.values():
            for kind, asked_for in tool.pools.items():
                known = sizes.setdefault(kind, {})
                if any(known.get(key, size) != size for key, size in asked_for.items()):
                    raise ConfigError(
                        f"tools ask for pools of {known['max']} and {asked_for['max']} {kind.__name__}: all of them use one "
                        f"pool, so give one pool_size"
                    )
                known |= asked_for
        asked = [kind for tool in self.tools.values() for kind in tool.envs]
        for kind in [*asked, *(self.reward.envs if self.reward else ())]:
            found.setdefault(kind, spec_of(kind))
        pools = self.resources.get("pools", {})
        if unknown := set(pools) - {spec.name for spec in found.values()}:
            names = ", ".join(spec.name for spec in found.values()) or "none"
            raise ConfigError(f"resources.pools names {sorted(unknown)[0]!r}, but the environments in use are: {names}")
        made = []
        for kind, spec in found.items():
            settings = {**sizes.get(kind, {}), **pools.get(spec.name, {})}
            if spec.max is None and "max" not in settings and settings.get("placement", spec.placement) == "loop":
                settings["max"] = max(1, min(max_concurrency, self._budget.holds(settings.get("cost", spec.cost))))
            made.append(spec_of(spec, **settings))
        return made

    def _check_resources(self) -> None:
        if unknown := set(self.resources) - {"cpu", "memory_mb", "pools"}:
            raise ConfigError(f"resources has no key {sorted(unknown)[0]!r}; it has cpu, memory_mb and pools")
        for name, settings in self.resources.get("pools", {}).items():
            check_settings(name, settings)
        self._kinds(1)  # a pool that nothing uses, or whose options do not fit, is refused before anything starts

    def check(self, tasks: Sequence[Task]) -> None:
        """Every row has what the reward and the tools ask for: an error now, not at step 400."""
        fields = set(tasks[0].fields)
        if self.reward is not None:
            self.reward.check(fields)
            check_fields(tasks, self.reward.needs, f"the reward {self.reward.name!r}")
        for tool in self.tools.values():
            check_fields(tasks, tool.needs, f"the tool {tool.name!r}")

    # ---- running ---------------------------------------------------------------------------------------------------------

    async def run(
        self,
        tasks: str | Path | Iterable[Any],
        num_chains: int = 1,
        max_turns: int | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        max_concurrency: int | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> RunResult:
        """Run `num_chains` chains of every task, at most `max_concurrency` at once, and score them.

        Without `max_concurrency` as many run as the engine serves well.
        """
        if num_chains < 1:
            raise ConfigError(f"num_chains must be at least 1, not {num_chains}")
        if max_concurrency is not None and max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, not {max_concurrency}")
        loaded = load_tasks(tasks)
        self.check(loaded)
        started = time.perf_counter()
        plan = self.plan(max_turns=max_turns, sampling=sampling, on_event=on_event)
        async with self.environments(plan, max_concurrency) as plan:
            trajectories = await run_chains(
                plan,
                prepare(plan, loaded),
                num_chains=num_chains,
                max_concurrency=max_concurrency,
                prefix=f"run{next_run_number()}-",
                on_trajectory=on_trajectory,
            )
        return RunResult(trajectories, num_chains, time.perf_counter() - started)

    def run_sync(self, *args: Any, **kwargs: Any) -> RunResult:
        """`run` for code without an event loop; inside one (a notebook) it runs in a thread of its own."""
        result: RunResult = run_to_end(self.run(*args, **kwargs))
        return result

    async def close(self) -> None:
        """Give the model back. An engine that was passed in belongs to the caller and stays open."""
        if self._opened is not None and self._opened[0] is not self.model:
            await self._opened[0].close()
        self._opened = None

    # ---- building --------------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[Engine, Renderer | None]:
        if self._opened is None:
            engine, renderer = open_engine(self.model, **self.engine_options)
            renderer = self._renderer or renderer
            if engine.reads == "ids" and renderer is None:
                raise ConfigError(f"{type(engine).__name__} reads token ids: give the agent a renderer")
            self._opened = engine, renderer if engine.reads == "ids" else None
        return self._opened

    def _collect_tools(self, tools: Iterable[Any]) -> dict[str, Tool]:
        if isinstance(tools, str):
            raise ConfigError(f"tools is a list, not the string {tools!r}")
        collected: dict[str, Tool] = {}
        for tool in map(as_tool, tools):
            if tool.name in collected:
                raise ConfigError(f"two tools are called {tool.name!r}; give one of them another name")
            collected[tool.name] = tool
        for name in self.required_tools:
            if name not in collected:
                raise ConfigError(f"{type(self).__name__} needs a tool called {name!r}: pass it in tools=[...]")
        return collected


def with_system(system: str | None, messages: Sequence[Message]) -> list[Message]:
    """Put the agent's system text before a row's messages, joined to the row's own system message by a blank line."""
    own = list(messages)
    if not system:
        return own
    if own and own[0].role == "system":
        return [Message("system", f"{own[0].content}\n\n{system}"), *own[1:]]
    return [Message("system", system), *own]


def as_sampling(value: Sampling | Mapping[str, Any] | None) -> Sampling:
    if value is None:
        return Sampling()
    if isinstance(value, Sampling):
        return value
    unknown = set(value) - set(Sampling.__dataclass_fields__)
    if unknown:
        raise ConfigError(f"sampling has no key {sorted(unknown)[0]!r}; it has {', '.join(Sampling.__dataclass_fields__)}")
    fields: dict[str, Any] = {
        key: tuple(item) if key in ("stop", "stop_ids") and isinstance(item, list) else item for key, item in value.items()
    }
    return Sampling(**fields)


def run_to_end(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine from synchronous code, in a thread of its own where a loop is already running here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: dict[str, Any] = {}

    def body() -> None:
        try:
            outcome["value"] = asyncio.run(work)
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, whatever it is
            outcome["error"] = error

    thread = threading.Thread(target=body, name="agentfly-run-sync")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


_run_lock = threading.Lock()
_run_count = 0


def next_run_number() -> int:
    """Runs of one process are numbered, so that two on one engine never share a session's name."""
    global _run_count
    with _run_lock:
        _run_count += 1
        return _run_count


def _images(result: ToolResult) -> tuple[Any, ...]:
    return () if result.image is None else (result.image,)
