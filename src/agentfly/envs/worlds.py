"""What belongs to a world: its class, task sets, tools, rewards and requirements, found by the name of its environment.

A tool or reward belongs to a world if it asks for its environment by annotation; a task set, tool or reward also if its module
is in the world's package. An environment class may declare more, all optional:

    needs          text: what must be installed beside the package ("Java 11 or newer")
    missing()      a sentence with the cure if a requirement is missing, else ""
    admissible()   the actions that are possible now, for the help of a player
    shown(text)    an observation formatted for a person
    task_set       the name of the default task set
    main_tool      the name of the tool that plain lines go to; by default the first one that takes a single text
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .. import plugins
from ..data import load_tasks
from ..errors import AgentFlyError, ConfigError
from ..rewards import Reward, as_reward
from ..tools.definition import Tool, as_tool
from ..types import Task

# Methods that are not offered as tools if a world has no tools and its methods are played instead.
NOT_PLAYED = ("reset", "close", "conformance", "healthy", "missing", "admissible", "page", "score", "shown")


@dataclass(frozen=True, slots=True)
class World:
    """A world and the names of what belongs to it. `problem` says why it cannot be used, or is empty."""

    name: str
    cls: Any
    summary: str
    tasks: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    needs: str = ""
    problem: str = ""

    def conformance(self) -> dict[str, Any]:
        """The arguments of `check_env` that the class declares: tasks, actions, solver; empty if it declares none."""
        where = f"{self.name}: conformance()"
        method = inspect.getattr_static(self.cls, "conformance", None)
        if method is not None and not isinstance(method, staticmethod | classmethod):
            raise ConfigError(f"{where} is called without an instance: make it a @staticmethod")
        arguments: object = getattr(self.cls, "conformance", dict)()
        if not isinstance(arguments, dict):
            raise ConfigError(f"{where} returns the arguments of check_env as a dict, not {type(arguments).__name__}")
        return dict(arguments)


def find_world(name: str) -> World:
    """The world of a name, "module:Class" or "file.py:Class". Raises ConfigError or MissingExtra if it cannot be loaded."""
    cls = plugins.resolve("envs", name)
    missing = getattr(cls, "missing", None)
    tasks = _belonging("tasks", cls)
    first = getattr(cls, "task_set", None)
    if isinstance(first, str):
        tasks = [first, *(each for each in tasks if each != first)]
    return World(
        name=name,
        cls=cls,
        summary=str(getattr(cls, "__doc__", None) or "").strip().partition("\n")[0],
        tasks=tuple(tasks),
        tools=tuple(_belonging("tools", cls)),
        rewards=tuple(_belonging("rewards", cls)),
        needs=str(getattr(cls, "needs", "") or ""),
        problem=str(missing() or "") if callable(missing) else "",
    )


def describe_world(name: str) -> World:
    """Like `find_world`, but a world that cannot be loaded is returned with its `problem`."""
    try:
        return find_world(name)
    except AgentFlyError as error:
        return World(name, None, "", problem=str(error))


def check_usable(world: World) -> None:
    if world.problem:
        raise ConfigError(world.problem)


def tools_of_world(world: World) -> dict[str, Tool]:
    """Its tools by name. A world without tools is played through its public methods that have a docstring."""
    tools = {name: as_tool(name) for name in world.tools}
    if tools:
        return tools
    for name, method in vars(world.cls).items():
        if not name.startswith("_") and name not in NOT_PLAYED and callable(method) and getattr(method, "__doc__", None):
            tools[name] = _method_tool(world.cls, name, method)
    return tools


def rewards_of_world(world: World) -> dict[str, Reward]:
    """Its rewards by name, with default settings."""
    return {name: as_reward(name) for name in world.rewards}


def tasks_of_world(
    world: World, task_set: str | None = None, split: str = "train", count: int | None = None, seed: int = 0
) -> list[Task]:
    """Tasks of the named set, else of the world's default set, else those of `conformance()`."""
    name = task_set or next(iter(world.tasks), None)
    if name is not None:
        return load_tasks(name, split=split, count=count, seed=seed)
    given = world.conformance().get("tasks")
    if not given:
        raise ConfigError(f"{world.name} has no task set: name one, or a file, with --task-set")
    return as_tasks(given)


def as_tasks(rows: Iterable[Task | Mapping[str, Any]]) -> list[Task]:
    """Rows as tasks. A row that is not a task gets its position as id."""
    return [row if isinstance(row, Task) else Task(str(number), (), dict(row)) for number, row in enumerate(rows)]


def _belonging(kind: str, cls: type) -> list[str]:
    """In the order of the built-in table, which lists the main tool and task set first; plugins follow."""
    order = list(plugins.BUILTIN.get(kind, ()))
    names = sorted(plugins.names(kind), key=lambda name: order.index(name) if name in order else len(order))
    return [name for name in names if _belongs(kind, name, cls)]


def _belongs(kind: str, name: str, cls: type) -> bool:
    if _same_folder(_module_of(kind, name), str(getattr(cls, "__module__", ""))):
        return True
    if kind == "tasks":
        return False
    try:
        return cls in getattr(plugins.resolve(kind, name), "envs", ())
    except (AgentFlyError, TypeError):
        return False  # a plugin that cannot be loaded belongs to another world, which reports it


def _module_of(kind: str, name: str) -> str:
    """The module of a name. Built-in names are not imported."""
    target = plugins.BUILTIN.get(kind, {}).get(name)
    if target is not None:
        return target.rpartition(":")[0]
    try:
        thing = plugins.resolve(kind, name)
    except AgentFlyError:
        return ""
    return str(getattr(getattr(thing, "function", thing), "__module__", ""))


def _same_folder(module: str, other: str) -> bool:
    if not module or not other:
        return False
    folder = other.rpartition(".")[0]
    return module == other or ("." in folder and module.startswith(f"{folder}."))


def _method_tool(cls: Any, name: str, method: Callable[..., Any]) -> Tool:
    """A method as a tool with the same arguments and description, called on the chain's environment."""
    signature = inspect.signature(method)
    hints = typing.get_type_hints(method)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(parameter.name, parameter.annotation))
        for parameter in list(signature.parameters.values())[1:]
    ]

    async def call(env: object, **arguments: object) -> Any:
        value = getattr(env, name)(**arguments)
        return await value if inspect.isawaitable(value) else value

    made: Any = call
    made.__name__, made.__doc__ = name, method.__doc__
    made.__signature__ = inspect.Signature([*own, inspect.Parameter("env", inspect.Parameter.KEYWORD_ONLY, annotation=cls)])
    return Tool(made, name=name, env_cls=cls)
