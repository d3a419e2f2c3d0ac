"""What the options of engines may be: their types and bounds, as the engines' own signatures say them.

In: an engine's class; an option and its value. Out: the options it has; for a value that it does not take, a `ConfigError` of
one sentence that names the key, the value and what it should be. A bound that no type says stands in the signature, too
(`Device`, `Share`, ...). In engines of this package a plain integer is at least 1, a plain number above 0 and a string not
empty; of engines of others only the types are checked. The local engine's signature is read from its source: importing it
would import torch.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigError
from .openai_http import is_address


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value of the right type must be besides, and how that is said."""

    holds: Callable[[Any], bool]
    words: str


def _is_device(name: str) -> bool:
    return re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", name) is not None


Address = Annotated[str, Rule(is_address, "an address like http://host:port/v1, without a user name or password in it")]
Count = Annotated[int, Rule(lambda number: number >= 0, "an integer of at least 0")]
Device = Annotated[str, Rule(_is_device, "a device such as 'cpu', 'cuda' or 'cuda:1'")]
Dtype = Literal["float32", "bfloat16", "float16"]
Key = Annotated[str, Rule(lambda text: True, "a string")]  # an empty one means that none is sent
Pause = Annotated[float, Rule(lambda number: number >= 0, "a number of at least 0")]
Share = Annotated[float, Rule(lambda number: 0 < number <= 1, "a number above 0 and at most 1")]

CACHE_SIZES = ("kv_tokens", "kv_gib", "kv_fraction")
"""Ways to say how large the local engine's cache is: one at a time, or the others would be ignored."""

_OWN = {
    int: Rule(lambda number: number >= 1, "an integer of at least 1"),
    float: Rule(lambda number: number > 0, "a number above 0"),
    str: Rule(bool, "a string that is not empty"),
}
_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Path: "a path"}


def options_of(maker: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only arguments of an engine's class, with their types; `Any` where those cannot be known."""
    names = [name for name, part in inspect.signature(maker).parameters.items() if part.kind is part.KEYWORD_ONLY]
    made: Any = maker
    try:
        hints = get_type_hints(made.__init__ if inspect.isclass(made) else made, include_extras=True)
    except NameError:  # a type that only a type checker imports
        hints = {}
    return {name: hints.get(name, Any) for name in names}


def options_of_local() -> dict[str, Any]:
    """The same of `LocalEngine`, without importing it and without `version`, which is not for those who write configs."""
    tree = ast.parse((Path(__file__).parent / "local" / "engine.py").read_text(encoding="utf-8"))
    made = next(part for part in tree.body if isinstance(part, ast.ClassDef) and part.name == "LocalEngine")
    init = next(part for part in made.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
    hints = {part.arg: eval(ast.unparse(part.annotation), globals()) for part in init.args.kwonlyargs if part.annotation}
    return {name: hint for name, hint in hints.items() if name != "version"}


def check_cache_size(options: Mapping[str, Any]) -> None:
    """Refuse a size that is said twice."""
    said = [name for name in CACHE_SIZES if options.get(name) is not None]
    if len(said) > 1:
        raise ConfigError(f"agent.engine: {' and '.join(said)} all say how large the cache is: keep one of them")


def check_value(key: str, value: Any, hint: Any, *, own: bool) -> None:
    """Refuse a value that the option does not take. `own`: of an engine of this package."""
    if _fits(value, hint, own):
        return
    wanted = f"agent.engine.{key} must be {_words(hint, own)}"
    if key == "api_key" or (key == "base_url" and "@" in str(value)):
        raise ConfigError(f"{wanted}; what it is now is not repeated here, since it may hold a secret")
    shown = repr(value)
    raise ConfigError(f"{wanted}, not {shown if len(shown) <= 80 else f'{shown[:77]}...'}")


def _fits(value: Any, hint: Any, own: bool) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg, own) for arg in args)
    if origin is Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if origin is Annotated:
        return _is(value, args[0]) and all(rule.holds(value) for rule in args[1:] if isinstance(rule, Rule))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return _is_list(value, args[0])
    return _is(value, hint) and not (own and hint in _OWN and not _OWN[hint].holds(value))


def _is(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind not in (bool, str, Path, type(None)) or isinstance(value, kind)  # what else there is, its engine knows


def _is_list(value: Any, kind: Any) -> bool:
    """Items of a list are looked at; those of an iterator would be used up by that. Ids of tokens begin at 0."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return False
    known = value if isinstance(value, (list, tuple, set, frozenset)) else ()
    return all(_is(item, kind) and not (kind is int and item < 0) for item in known)


def _words(hint: Any, own: bool) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(arg, own) for arg in args if arg is not type(None))
    if origin is Literal:
        return " or ".join(filter(None, [", ".join(map(repr, args[:-1])), repr(args[-1])]))
    if origin is Annotated:
        return next(rule.words for rule in args[1:] if isinstance(rule, Rule))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return "a list of token ids" if args[0] is int else "a list"
    return _OWN[hint].words if own and hint in _OWN else _WORDS.get(hint, str(getattr(hint, "__name__", hint)))
