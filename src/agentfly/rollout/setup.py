"""Builds what a run needs from an agent: the engine, the plan that all chains share, and the environments.

open_model -> engine, renderer      make_plan -> Plan      open_environments -> Plan with a resource manager
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from ..engines import open_engine
from ..errors import ConfigError
from ..protocols import Engine, MarkedRenderer, Renderer
from ..resources import Budget, ResourceManager, Spec, spec_of
from ..resources.backends.http import on_servers
from ..resources.directory import ServerDirectory
from ..resources.spec import check_settings
from ..rewards import Reward
from ..tools import Tool
from ..types import Event, Sampling
from .chain import AgentLike, Plan
from .limits import Limits
from .scheduler import controller, most_in_flight


class RunnableAgent(AgentLike, Protocol):
    """An agent with its configuration, from which a run is built."""

    reward: Reward | None
    env: Spec | None
    resources: dict[str, Any]
    limits: Limits
    max_context: int | None
    sampling: Sampling

    @property
    def engine(self) -> Engine: ...
    @property
    def renderer(self) -> Renderer | None: ...
    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def observation_marks(self) -> tuple[str, ...]: ...
    def check_model(self) -> None: ...
    def serving(self) -> AbstractAsyncContextManager[None]: ...


def open_model(
    model: str | Path | Engine, options: Mapping[str, Any], renderer: Renderer | None
) -> tuple[Engine, Renderer | None]:
    """Open the engine. Returns it with its renderer, which is None for an engine that reads messages."""
    engine, own = open_engine(model, **options)
    renderer = renderer or own
    if engine.reads != "ids":
        return engine, None
    if renderer is None:
        raise ConfigError(f"{type(engine).__name__} reads token ids: give the agent a renderer")
    return engine, renderer


def make_plan(
    agent: RunnableAgent,
    *,
    max_turns: int | None = None,
    sampling: Sampling | Mapping[str, Any] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Plan:
    """Returns the plan of one run, without environments. Opens the model."""
    engine = agent.engine
    agent.check_model()
    of_template = agent.renderer.foreign_marks if isinstance(agent.renderer, MarkedRenderer) else ()
    return Plan(
        agent=agent,
        engine=engine,
        renderer=agent.renderer,
        schemas=agent.schemas,
        reward=agent.reward,
        sampling=agent.sampling if sampling is None else as_sampling(sampling),
        limits=replace(
            agent.limits,
            max_context=min(agent.max_context or engine.max_context, engine.max_context),
            max_turns=agent.limits.max_turns if max_turns is None else max_turns,
        ),
        on_event=on_event,
        foreign_marks=tuple(dict.fromkeys((*agent.observation_marks, *of_template))),
    )


@asynccontextmanager
async def open_environments(
    agent: RunnableAgent,
    plan: Plan,
    max_concurrency: int | None,
    *,
    share: tuple[int, int] = (0, 1),
    directory: ServerDirectory | None = None,
) -> AsyncIterator[Plan]:
    """Yields the plan with an admission controller and, if the agent uses environments, with a resource manager.

    `share` (i, n): this process is the i-th of n that share the budget and the sizes of the pools. `directory`: the
    environments live on these servers.
    """
    together = most_in_flight(plan.engine, max_concurrency)
    kinds = environment_kinds(agent, together, share)
    if directory is not None:
        kinds = [on_servers(kind, directory) for kind in kinds]
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(agent.serving())
        if kinds:
            manager = await opened.enter_async_context(ResourceManager(_budget(agent, share[1]), *kinds))
            names = tuple(kind.name for kind in kinds)
            plan = replace(plan, manager=manager, env_kind=agent.env.name if agent.env else None, kinds=names)
        yield replace(plan, admission=controller(plan, together))


def environment_kinds(agent: RunnableAgent, max_concurrency: int, share: tuple[int, int] = (0, 1)) -> list[Spec]:
    """Returns every kind of environment that the agent, its tools or its reward use, with the size of its pool.

    A pool without a set size gets one environment for each concurrent chain, as far as the budget allows. A set size is
    divided among the processes of `share`.
    """
    specs: dict[Any, Spec] = {} if agent.env is None else {agent.env.make: agent.env}
    in_use = [kind for tool in agent.tools.values() for kind in tool.envs]
    for kind in [*in_use, *(agent.reward.envs if agent.reward else ())]:
        specs.setdefault(kind, spec_of(kind))
    pools = agent.resources.get("pools", {})
    if unknown := set(pools) - {spec.name for spec in specs.values()}:
        names = ", ".join(spec.name for spec in specs.values()) or "none"
        raise ConfigError(f"resources.pools names {sorted(unknown)[0]!r}, but the environments in use are: {names}")
    sizes = _pool_sizes(agent.tools.values())
    kinds = []
    for kind, spec in specs.items():
        settings = {**sizes.get(kind, {}), **pools.get(spec.name, {})}
        if spec.max is None and "max" not in settings and settings.get("placement", spec.placement) == "loop":
            fits = _budget(agent, share[1]).holds(settings.get("cost", spec.cost))
            kinds.append(spec_of(spec, **settings, max=max(1, min(max_concurrency, fits))))
        else:
            kinds.append(_share_of(spec_of(spec, **settings), *share))
    return kinds


def check_resources(agent: RunnableAgent) -> None:
    """Raises ConfigError for a pool that nothing uses, or whose options do not fit."""
    if unknown := set(agent.resources) - {"cpu", "memory_mb", "pools"}:
        raise ConfigError(f"resources has no key {sorted(unknown)[0]!r}; it has cpu, memory_mb and pools")
    for name, settings in agent.resources.get("pools", {}).items():
        check_settings(name, settings)
    environment_kinds(agent, 1)


def _pool_sizes(tools: Iterable[Tool]) -> dict[type, dict[str, int]]:
    """Returns the pool sizes that tools ask for. All tools of one kind of environment share its pool."""
    sizes: dict[type, dict[str, int]] = {}
    for tool in tools:
        for kind, wanted in tool.pools.items():
            pool = sizes.setdefault(kind, {})
            if any(pool.get(key, size) != size for key, size in wanted.items()):
                raise ConfigError(
                    f"tools ask for pools of {pool['max']} and {wanted['max']} {kind.__name__}: all of them use one pool, so "
                    f"give one pool_size"
                )
            pool |= wanted
    return sizes


def _share_of(spec: Spec, index: int, count: int) -> Spec:
    """The pool of one process of `count`. Raises ConfigError if there are more processes than places."""
    if count == 1:
        return spec
    changed = {"min_warm": -(-spec.min_warm // count)} if spec.min_warm else {}
    if spec.max is not None:
        changed["max"] = spec.max // count + (index < spec.max % count)
        if not changed["max"]:
            raise ConfigError(
                f"the pool of {spec.name} has at most {spec.max} environments, and {count} samplers share it: each needs one. "
                f"Raise resources.pools.{spec.name}.max, or lower sampler.replicas"
            )
        if changed.get("min_warm", 0) > changed["max"]:
            changed["min_warm"] = changed["max"]
    return spec_of(spec, **changed) if changed else spec


def _budget(agent: RunnableAgent, count: int = 1) -> Budget:
    """The budget of one process of `count`."""
    limits = {name: agent.resources.get(name) for name in ("cpu", "memory_mb")}
    return Budget(**{name: None if limit is None else limit / count for name, limit in limits.items()})


def as_sampling(value: Sampling | Mapping[str, Any] | None) -> Sampling:
    """Returns a Sampling from one, from a mapping of its fields, or from None. Raises ConfigError for an unknown field."""
    if value is None or isinstance(value, Sampling):
        return value or Sampling()
    names = Sampling.__dataclass_fields__
    if unknown := set(value) - set(names):
        raise ConfigError(f"sampling has no key {sorted(unknown)[0]!r}; it has {', '.join(names)}")
    fields: dict[str, Any] = {
        key: tuple(item) if key in ("stop", "stop_ids") and isinstance(item, list) else item for key, item in value.items()
    }
    return Sampling(**fields)


_run_numbers = count(1)


def next_run_number() -> int:
    """Returns a number for session names, so that two runs on one engine never share a session. `next` is atomic."""
    return next(_run_numbers)
