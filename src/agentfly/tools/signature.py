"""`Signature`: which parameters of a function the model fills, which the framework fills, and how a call is bound.

The framework fills parameters named `task`, `trajectory`, `env` and `context`, parameters whose type is an environment, and the
data fields marked by `FromTask[T]` or `inject=(...)`. These are hidden from the model; a call that names one is refused as
unknown. The model fills all others. `bind` raises `BadArguments`, whose text is written for the model.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from ..errors import ConfigError, WorldError
from .docstring import parse_docstring
from .forms import Compiler
from .json_schema import JsonParameters
from .records import unknown
from .scalars import ANY, Convert, Form, Memo, Mismatch, Schema, argument_text, phrase, show
from .text import quote

if TYPE_CHECKING:
    from .context import Context

T = TypeVar("T")
_MARK = "agentfly: from the task"
FromTask = Annotated[T, _MARK]
"""`answer: FromTask[str]` is filled from the data row's field `answer` and hidden from the model."""

RESERVED = ("task", "trajectory", "env", "context")
_MISSING = inspect.Parameter.empty


class BadArguments(Exception):
    """The arguments of a call do not fit; the text is written for the model."""


class Signature:
    """The parameters of a callable. `needs` are the required data fields; `parameters` is the schema for the model.

    With a given schema the model fills what the schema names, and the annotations of those parameters are not read.
    """

    def __init__(
        self, fn: Callable[..., Any], inject: Collection[str] = (), skip_first: bool = False, schema: object = None
    ) -> None:
        try:
            given = list(inspect.signature(fn).parameters.values())[1 if skip_first else 0 :]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"its parameters cannot be read: {error}") from None
        by_schema = None if schema is None else JsonParameters(schema)
        compiler = Compiler()
        _, described = parse_docstring(getattr(fn, "__doc__", None))
        if absent := [name for name in inject if name not in {parameter.name for parameter in given}]:
            raise ConfigError(f"inject names {absent[0]!r}, which is not a parameter")
        self.injected: list[tuple[str, bool]] = []  # name, and whether it has a default
        self.reserved: list[str] = []
        self.envs: dict[str, type] = {}
        self.extra: Convert | None = None
        self.converters: dict[str, Convert] = {}
        properties: dict[str, Schema] = {}
        required: list[str] = []
        for parameter in given:
            name, annotation = parameter.name, parameter.annotation
            if parameter.kind is parameter.VAR_POSITIONAL or parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(f"parameter {name!r} is positional; the model passes arguments by name")
            if by_schema is not None and name in by_schema.forms:
                continue
            if _from_task(compiler, fn, annotation) or (name in inject and name not in RESERVED):
                self.injected.append((name, parameter.default is not _MISSING))
                continue
            if name in RESERVED:
                if annotation in (str, int, float, bool, list, dict, "str", "int", "float", "bool", "list", "dict"):
                    raise ConfigError(
                        f"parameter {name!r} is filled by the framework with the chain's {name}; rename it, or annotate it "
                        f"with FromTask[...] to get the row's field {name!r}"
                    )
                self.reserved.append(name)
                if name == "env" and is_environment(hint := _class_of(compiler, fn, annotation)):
                    self.envs[name] = hint
                continue
            hint = _resolve(compiler, fn, name, annotation)
            if is_environment(hint):
                self.envs[name] = hint
                continue
            if by_schema is not None:
                if parameter.default is _MISSING and parameter.kind is not parameter.VAR_KEYWORD:
                    raise ConfigError(f"parameter {name!r} of the function is not in the given schema")
                continue
            try:
                form = ANY if hint is _MISSING else compiler.compile(hint)
            except ConfigError as error:
                raise ConfigError(f"parameter {name!r}: {error}") from None
            if parameter.kind is parameter.VAR_KEYWORD:
                self.extra = form.convert
                continue
            self.converters[name] = form.convert
            properties[name] = _property(form, described.get(name), parameter.default)
            if parameter.default is _MISSING:
                required.append(name)
        self.required = frozenset(required)
        self.needs = frozenset(name for name, optional in self.injected if not optional)
        self.parameters: Schema = {"type": "object", "properties": properties, "required": required}
        if self.extra is not None:
            self.parameters["additionalProperties"] = True
        if compiler.defs:
            self.parameters["$defs"] = compiler.defs
        if by_schema is not None:
            _check_call(by_schema, given)
            self.converters = {name: form.convert for name, form in by_schema.forms.items()}
            self.required, self.parameters = by_schema.required, by_schema.schema
            self.extra = None if by_schema.rest is None else by_schema.rest.convert
        self.hidden = frozenset(self.reserved) | {name for name, _ in self.injected} | self.envs.keys()

    def bind(self, arguments: Mapping[str, Any], context: Context) -> dict[str, Any]:
        """The keyword arguments of a call, converted, with the parameters that the framework fills. Raises BadArguments."""
        converters = self.converters
        memo: Memo = {}
        made = {}
        try:
            for name, value in arguments.items():
                made[name] = converters[name](value, memo)
        except (KeyError, Mismatch, RecursionError, AttributeError, TypeError):
            made = self._bind_slowly(arguments)
        if not self.required <= made.keys():
            made = self._bind_slowly(arguments)
        if self.hidden:
            self.fill(made, context)
        return made

    def fill(self, made: dict[str, Any], context: Context) -> None:
        """Adds the parameters that the framework fills. Raises WorldError if the task lacks a field."""
        for name in self.reserved:
            made[name] = context if name == "context" else getattr(context, name)
        if self.injected:
            fields = context.task.fields
            for name, optional in self.injected:
                if name in fields:
                    made[name] = fields[name]
                elif not optional:
                    raise WorldError(f"a tool needs the dataset field {name!r}, which task {context.task.id} does not have")

    def _bind_slowly(self, arguments: object) -> dict[str, Any]:
        """Binds again and collects all problems; called only after the fast path has failed."""
        if not isinstance(arguments, Mapping):
            raise BadArguments(f"the arguments must be a JSON object, got {show(arguments)}")
        made: dict[str, Any] = {}
        problems = [f"missing argument {quote(name)}" for name in self.parameters.get("required", ()) if name not in arguments]
        memo: Memo = {}
        for name, value in arguments.items():
            convert = self.converters.get(name) or (self.extra if name not in self.hidden else None)
            if len(problems) >= 4:
                break
            if convert is None or not isinstance(name, str):
                problems.append(unknown(name, self.converters, "argument").removeprefix("an "))
                continue
            try:
                made[name] = convert(value, memo)
            except Mismatch as mismatch:
                mismatch.path.append(name)
                problems.append(str(mismatch))
            except RecursionError:
                problems.append(f"{quote(name)} is nested too deeply")
        if problems:
            raise BadArguments("; ".join(problems))
        return made

    def __str__(self) -> str:
        """`(a: number, b: number = 3, c?: string)`."""
        properties = {name: {} if part is True else part for name, part in self.parameters.get("properties", {}).items()}
        return f"({', '.join(argument_text(name, schema, name in self.required) for name, schema in properties.items())})"


def _check_call(schema: JsonParameters, given: Collection[inspect.Parameter]) -> None:
    """Raises ConfigError if a call that fits the schema would not fit the function."""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in given)
    names = {parameter.name: parameter for parameter in given if parameter.kind is not parameter.VAR_KEYWORD}
    for name in schema.forms:
        if name not in names and not takes_any:
            raise ConfigError(f"the schema has the argument {name!r}, which the function does not take")
        if name in names and names[name].default is _MISSING and name not in schema.required:
            raise ConfigError(f"parameter {name!r} of the function has no default, but the schema does not require it")
    if schema.rest is not None and not takes_any:
        raise ConfigError("the schema allows any other argument, so the function must take **arguments")


def is_environment(hint: object) -> bool:
    """Whether an annotation is a class with `reset` and `close`, which the framework fills with a leased environment."""
    return isinstance(hint, type) and callable(getattr(hint, "reset", None)) and callable(getattr(hint, "close", None))


def _from_task(compiler: Compiler, fn: Callable[..., Any], annotation: object) -> bool:
    """Whether an annotation is `FromTask[...]`."""
    hint = _class_of(compiler, fn, annotation) if isinstance(annotation, str) else annotation
    return typing.get_origin(hint) is Annotated and _MARK in typing.get_args(hint)[1:]


def _class_of(compiler: Compiler, fn: Callable[..., Any], annotation: object) -> Any:
    """The type that an annotation names, or None if the name cannot be resolved at run time."""
    try:
        return _resolve(compiler, fn, "env", annotation)
    except ConfigError:
        return None


def env_parameters(fn: Callable[..., Any]) -> dict[str, type]:
    """The parameters of a function whose annotation is an environment."""
    try:
        given = inspect.signature(fn).parameters.values()
    except (ValueError, TypeError):
        return {}
    environments: dict[str, type] = {}
    for parameter in given:
        hint = parameter.annotation
        if isinstance(hint, str):
            hint = _class_of(Compiler(), fn, hint)
        if is_environment(hint):
            environments[parameter.name] = hint
    return environments


def _resolve(compiler: Compiler, fn: Callable[..., Any], name: str, annotation: object) -> Any:
    """Evaluates the annotation of one parameter. Others may name types that only a type checker imports."""
    if annotation is _MISSING:
        return _MISSING
    inner = inspect.unwrap(getattr(fn, "__func__", fn))
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        return compiler.hints(holder, getattr(inner, "__globals__", {}))[name]
    except ConfigError as error:
        raise ConfigError(f"parameter {name!r}: {error}") from None


def _property(form: Form, description: str | None, default: object) -> Schema:
    schema = dict(form.schema)
    if description and "description" not in schema:
        schema["description"] = description
    if default is not _MISSING:
        try:
            schema["default"] = json.loads(json.dumps(getattr(default, "value", default), allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            # The default has no JSON form, so the model is told only that the argument is optional.
            schema.setdefault("description", f"optional, {phrase(form.schema)}")
    return schema
