"""`@tool` turns a function, a class or a method into a `Tool`, which describes itself to the model and executes its calls.

    @tool                                   the docstring is the description, the annotations are the schema
    @tool(name="search", timeout_s=5)       options; a tool without any description raises ConfigError
    Tool(fn, parameters=SCHEMA, ...)        the arguments by a JSON schema, which the model sees as it is

The tool of a class is its `__call__`, on one shared instance or, with `stateful`, on one instance per chain, which the Context
of the chain closes. A tool in a class body binds as a method: `shop.search` is a Tool. A tool returns its observation, a
`ToolResult`, or a dict with the key "observation" and optionally "reward", "done" and "image". `Tool.run` turns mistakes of the
model and exceptions of the tool into results; it raises only RolloutError, ConfigError, InvariantError and CancelledError.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import re
import threading
import types
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

from .. import plugins
from ..aio.deadline import Expired, within
from ..aio.stalls import stalls
from ..aio.threads import Abandoned, run_in_thread
from ..errors import ConfigError, InvariantError, RolloutError, ToolError, WorldError
from ..types import ToolResult
from .context import Context
from .docstring import parse_docstring
from .signature import BadArguments, Signature, is_environment
from .text import clean, cut, describe_error, finite, render

PASSED_ON = (RolloutError, ConfigError, InvariantError)
"""Exceptions of a tool that are not shown to the model: RolloutError ends the chain, the others end the run."""
MAX_LENGTH = 10_000
TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Tool:
    """Something a model can call. Calling the object calls the decorated function directly."""

    def __init__(
        self,
        target: Any,
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        max_length: int = MAX_LENGTH,
        timeout_s: float = TIMEOUT_S,
        stateful: bool = False,
        inject: Collection[str] = (),
        env_cls: type | None = None,
        pool_size: int | None = None,
    ) -> None:
        if isinstance(target, Tool):  # decorated again, with other options
            target = target.__wrapped__ if target.owner is None else types.MethodType(target.__wrapped__, target.owner)
        if isinstance(target, classmethod):
            raise ConfigError("a class method cannot be a tool; use a method, a static method or a function")
        if isinstance(target, staticmethod):
            target = target.__func__
        if not callable(target):
            raise ConfigError(f"@tool decorates a function, a class or a method, not {type(target).__name__}")
        self.cls: type | None = target if isinstance(target, type) else None
        plain = inspect.isroutine(target) or isinstance(target, functools.partial)
        fn: Any = target if plain and self.cls is None else _call_of(target)
        named = target.func if isinstance(target, functools.partial) else target
        self.name = name or getattr(named, "__name__", None) or type(named).__name__
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} cannot be a tool's name: letters, digits, _ and -, at most 64; give @tool(name=...)"
            )
        _check(self.name, max_length, timeout_s, inject)
        self.max_length, self.timeout_s, self.stateful = max_length, float(timeout_s), bool(stateful)
        self.is_method = self.cls is None and _looks_like_method(target)
        try:
            self._init = _init_signature(self.cls, self.stateful, inject) if self.cls is not None else None
            elsewhere = self._init.hidden if self._init else frozenset()
            names = [name for name in inject if name not in elsewhere or name in inspect.signature(fn).parameters]
            self.signature = Signature(fn, names, self.is_method or self.cls is not None, parameters)
        except ConfigError as error:
            raise ConfigError(f"tool {self.name!r}: {error}") from None
        except RecursionError:
            raise ConfigError(f"tool {self.name!r}: a type alias contains itself; use a dataclass, or Any") from None
        self.pools = self._read_env_cls(env_cls, pool_size)
        self.description = description or _description(target, fn)
        if not self.description:
            raise ConfigError(f"tool {self.name!r} has no description; write a docstring or give @tool(description=...)")
        self.needs = self.signature.needs | (self._init.needs if self._init else frozenset())
        function = {"name": self.name, "description": self.description, "parameters": self.signature.parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": function}
        for kind in (inspect.isasyncgenfunction, inspect.isgeneratorfunction):
            if kind(fn):
                raise ConfigError(f"tool {self.name!r} is a generator; return the whole result instead of yielding")
        self.is_async = inspect.iscoroutinefunction(fn)
        self.owner: Any = getattr(target, "__self__", None) if inspect.ismethod(target) else None
        self._fn: Callable[..., Any] = fn
        self._shared: Any = None
        self._lock = threading.Lock()
        functools.update_wrapper(self, target, updated=())

    __wrapped__: Any

    def _read_env_cls(self, env_cls: type | None, pool_size: int | None) -> dict[type, dict[str, int]]:
        """`env_cls` is the class of the parameter `env`; `pool_size` limits its instances."""
        if env_cls is None:
            if pool_size is not None:
                raise ConfigError(f"tool {self.name!r}: pool_size is the size of env_cls's pool; give env_cls too")
            return {}
        if not is_environment(env_cls):
            raise ConfigError(f"tool {self.name!r}: env_cls must be a class with reset(task) and close()")
        if "env" not in self.signature.reserved:
            raise ConfigError(f"tool {self.name!r}: with env_cls the environment is passed as 'env'; add that parameter")
        if pool_size is not None and (type(pool_size) is not int or pool_size < 1):
            raise ConfigError(f"tool {self.name!r}: pool_size must be a whole number from 1, not {pool_size!r}")
        self.signature.envs["env"] = env_cls
        return {env_cls: {} if pool_size is None else {"max": pool_size}}

    @property
    def envs(self) -> frozenset[type]:
        """The classes of environments that the tool asks for."""
        return frozenset(self.signature.envs.values())

    def __get__(self, owner: object, cls: type | None = None) -> Tool:
        """Binds a method to its instance. Other tools, and a method looked up on the class, stay as they are."""
        if owner is None or not self.is_method:
            return self
        bound = object.__new__(Tool)
        bound.__dict__.update(self.__dict__)
        bound.is_method, bound.owner = False, owner
        bound._fn = types.MethodType(self._fn, owner)
        return bound

    def __call__(self, *args: object, **kwargs: object) -> Any:
        fn = self._fn if self.cls is None else self._shared_instance()
        return fn(*args, **kwargs)

    def __str__(self) -> str:
        """`multiply(a: number, b: number)`."""
        return f"{self.name}{self.signature}"

    def __repr__(self) -> str:
        return f"<Tool {self}>"

    async def run(self, arguments: Mapping[str, Any], context: Context) -> ToolResult:
        """Executes one call of the model: binds its arguments, calls within `timeout_s`, converts the result to text."""
        try:
            kwargs = self.signature.bind(arguments, context)
        except BadArguments as error:
            return self._failed(f"Bad arguments for {self.name}: {error}. Expected {self}.", "bad_arguments")
        if self.is_method:
            raise WorldError(f"tool {self.name!r} is a method; pass it bound to an instance")
        try:
            for name, kind in self.signature.envs.items():
                if kwargs.get(name) is None:  # the parameter `env` may be filled already, by the environment of the agent
                    kwargs[name] = await context.environment(kind)
            if self.is_async:
                fn = self._fn if self.cls is None else self._instance(context)
                value = await within(stalls.steps("tool {!r}".format, self.name, fn(**kwargs)), self.timeout_s)
            else:
                value = await within(run_in_thread(self._work, kwargs, context), self.timeout_s)
                if isinstance(value, ToolResult):
                    return value
                value = await within(_await(value), self.timeout_s)  # a plain function that returned a coroutine
            return self._shown(value)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The chain itself is not cancelled: the tool awaited something that was.
            return self._failed(describe_error(error), "raised")
        except Expired:
            return self._failed(f"{self.name} did not finish within {self.timeout_s:g} s and was stopped.", "timeout")
        except Exception as error:  # noqa: BLE001 - the model is told about any exception of a tool
            return self._raised(error)

    def _work(self, kwargs: dict[str, Any], context: Context) -> ToolResult | Awaitable[Any]:
        """A sync call in its thread, including the conversion of the result, which takes time if it is large."""
        try:
            fn = self._fn if self.cls is None else self._instance(context)
            value = fn(**kwargs)
            if inspect.isawaitable(value):
                return value
            return self._shown(value)
        except Abandoned:
            raise
        except BaseException as error:  # noqa: BLE001 - the model is told about any exception of a tool
            return self._raised(error)

    def _shown(self, value: object) -> ToolResult:
        """The return value of the tool as a ToolResult with at most `max_length` characters."""
        if isinstance(value, dict) and "observation" in value:
            value = self._from_dict(value)
        if type(value) is not ToolResult:
            try:
                text = render(value)
            except ValueError as error:
                return self._failed(f"{self.name} failed: {error}", "raised")
            return ToolResult(observation=text if len(text) <= self.max_length else cut(text, self.max_length))
        if value.reward is not None and not finite(value.reward):
            raise WorldError(f"tool {self.name!r} returned the step reward {value.reward!r}; it must be a finite number")
        observation: object = value.observation
        if type(observation) is str and observation.isascii() and len(observation) <= self.max_length:
            return value
        try:
            text = cut(render(observation), self.max_length)
        except ValueError as error:
            return self._failed(f"{self.name} failed: {error}", "raised")
        return ToolResult(
            observation=text, image=value.image, reward=value.reward, done=value.done, error=value.error, limit=value.limit
        )

    def _from_dict(self, value: dict[str, Any]) -> ToolResult:
        """A returned `{"observation": ..., "reward": ..., "done": ..., "image": ...}`. Other keys stay hidden."""
        reward: Any = value.get("reward")
        if getattr(reward, "shape", None) == () and hasattr(reward, "item"):  # a scalar of numpy or torch
            reward = reward.item()
        if reward is not None and not finite(reward):
            raise WorldError(f"tool {self.name!r} returned the step reward {reward!r}; it must be a finite number")
        observation = value["observation"]
        return ToolResult(
            observation="" if observation is None else observation,
            image=value.get("image"),
            reward=None if reward is None else float(reward),
            done=bool(value.get("done")),
        )

    def _raised(self, error: BaseException) -> ToolResult:
        """The result of an exception: the text of a ToolError, or the type and message of another. Raises PASSED_ON."""
        if isinstance(error, BaseExceptionGroup):
            failures = error.subgroup(PASSED_ON)
            while isinstance(failures, BaseExceptionGroup):
                failures = failures.exceptions[0]  # type: ignore[assignment]
            error = failures or error
        if isinstance(error, PASSED_ON):
            raise error
        text = str(error) if isinstance(error, ToolError) and str(error) else describe_error(error)
        return self._failed(text, "raised")

    def _failed(self, text: str, error: Literal["bad_arguments", "raised", "timeout"]) -> ToolResult:
        return ToolResult(observation=cut(clean(text), self.max_length), error=error)

    def _instance(self, context: Context) -> Any:
        """The object whose `__call__` is the tool: one per chain if stateful, else one for all."""
        assert self.cls is not None
        if not self.stateful:
            return self._shared_instance()
        instance = context.instances.get(self.cls)
        if instance is None:
            kwargs: dict[str, Any] = {}
            if self._init is not None:
                self._init.fill(kwargs, context)
            instance = self.cls(**kwargs)
            if context.closed:
                raise WorldError(f"tool {self.name!r} was called after its chain had ended")
            instance = context.instances.setdefault(self.cls, instance)
        return instance

    def _shared_instance(self) -> Any:
        assert self.cls is not None
        if self._shared is None:
            with self._lock:
                if self._shared is None:
                    self._shared = self.cls()
        return self._shared


async def _await(value: Awaitable[Any]) -> Any:
    return await value


def _call_of(target: object) -> Any:
    """The `__call__` of a class or of an object that has one."""
    call = getattr(target, "__call__", None)  # noqa: B004 - its signature is wanted, not whether there is one
    if isinstance(target, type) and (call is None or isinstance(call, types.MethodWrapperType)):
        raise ConfigError(f"the class {target.__name__} has no __call__, so it cannot be a tool")
    return call


def _looks_like_method(target: object) -> bool:
    """Whether a function is defined in a class body. It is not bound yet, so its name and first parameter decide."""
    if not inspect.isfunction(target):
        return False
    first = next(iter(inspect.signature(target).parameters), "")
    scope = target.__qualname__.rpartition(".")[0]
    return first == "self" and bool(scope) and not scope.endswith("<locals>")


def _init_signature(cls: type, stateful: bool, inject: Collection[str]) -> Signature | None:
    """The signature of a tool class's constructor, which may only have parameters that the framework fills."""
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        return None
    names = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    signature = Signature(cls.__init__, [name for name in inject if name in names], skip_first=True)  # type: ignore[misc]
    if signature.required:
        raise ConfigError(
            f"its constructor needs {sorted(signature.required)[0]!r}; build the object and pass tool(object) instead"
        )
    if signature.hidden and not stateful:
        raise ConfigError("its constructor asks for the chain's context, so it must be @tool(stateful=True)")
    return signature


def _description(target: object, fn: Callable[..., Any]) -> str:
    """The summary of the docstring; a class without a docstring uses that of its base."""
    if isinstance(target, functools.partial):
        target = target.func
    if inspect.isroutine(target):
        return parse_docstring(target.__doc__)[0]
    bases = target.__mro__ if isinstance(target, type) else type(target).__mro__
    texts = [cls.__doc__ for cls in bases if cls.__module__ != "builtins"]
    return next((summary for text in [*texts, fn.__doc__] if (summary := parse_docstring(text)[0])), "")


def _check(name: str, max_length: object, timeout_s: object, inject: object) -> None:
    checks = [
        (type(max_length) is int and max_length >= 1, f"max_length must be a positive integer, not {max_length!r}"),
        (
            isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf,
            f"timeout_s must be a positive number, not {timeout_s!r}",
        ),
        (not isinstance(inject, str), f"inject is a list of names; write inject=({inject!r},)"),
    ]
    for ok, sentence in checks:
        if not ok:
            raise ConfigError(f"tool {name!r}: {sentence}")


class ToolOptions(TypedDict, total=False):
    """The options of `@tool`; the defaults are those of `Tool`."""

    name: str | None
    description: str | None
    parameters: Mapping[str, Any] | None
    max_length: int
    timeout_s: float
    stateful: bool
    inject: Collection[str]
    env_cls: type | None
    pool_size: int | None


@overload
def tool(target: Callable[..., Any] | type, /, *, register: bool = True, **options: Unpack[ToolOptions]) -> Tool: ...
@overload
def tool(*, register: bool = True, **options: Unpack[ToolOptions]) -> Callable[[Callable[..., Any] | type], Tool]: ...
def tool(target: Any = None, /, *, register: bool = True, **options: Any) -> Tool | Callable[[Any], Tool]:
    """Makes a tool and registers its name (`tools=["search"]`), unless it is a method or `register` is false."""
    if target is None:
        return lambda later: tool(later, register=register, **options)
    made = target if isinstance(target, Tool) and not options else Tool(target, **options)
    if register and not made.is_method and made.owner is None:
        plugins.register("tools", made.name, made)
    return made


def as_tool(thing: object) -> Tool:
    """The tool of a Tool, a function, a class, an object with `__call__`, or a name."""
    if isinstance(thing, str):
        if thing.startswith("mcp:"):
            raise ConfigError(f"{thing!r} is for a config; in Python: tools=[*mcp_tools({thing[4:]!r}, command=...)]")
        thing = plugins.resolve("tools", thing)
    return thing if isinstance(thing, Tool) else Tool(thing)


def tools_of(thing: object) -> list[Tool]:
    """The tools that the class of an object defines, bound to the object; those of base classes come first."""
    tools: dict[str, Tool] = {}
    for cls in reversed(type(thing).__mro__):
        for name, value in vars(cls).items():
            if isinstance(value, Tool):
                tools[name] = getattr(thing, name)
            elif name in tools:
                del tools[name]  # a subclass has replaced it by something else
    return list(tools.values())
