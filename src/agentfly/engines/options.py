"""Options of engines: their types and bounds, each stated once, in `LocalOptions` or in the signature of the engine's class.

`check_value` raises a ConfigError that names the key, the value and what the option takes. In engines of this package a plain
int must be at least 1, a plain float above 0 and a plain str not empty; other bounds are annotations (`Device`, `Fraction`).
Engines of plugins are checked by type alone. This module imports nothing heavy, so a config can be checked without torch.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigError
from ..net.address import is_url
from ..types import Sampling
from .prompt import cuts


@dataclass(frozen=True, slots=True)
class Rule:
    """A bound on a value of the right type, and its description."""

    holds: Callable[[Any], bool]
    words: str


def _is_device(name: str) -> bool:
    return re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", name) is not None


Address = Annotated[str, Rule(is_url, "an address like http://host:port/v1, without a user name or password in it")]
Retries = Annotated[int, Rule(lambda number: number >= 0, "an integer of at least 0")]
Device = Annotated[str, Rule(_is_device, "a device such as 'cpu', 'cuda' or 'cuda:1'")]
Dtype = Literal["float32", "bfloat16", "float16"]
ApiKey = Annotated[str, Rule(lambda text: True, "a string")]  # empty: no key is sent
Seconds = Annotated[float, Rule(lambda number: number >= 0, "a number of at least 0")]
Fraction = Annotated[float, Rule(lambda number: 0 < number <= 1, "a number above 0 and at most 1")]

CACHE_SIZES = ("kv_tokens", "kv_gib", "kv_fraction")
"""The options that set the size of the local engine's cache. At most one may be given."""

_OWN = {
    int: Rule(lambda number: number >= 1, "an integer of at least 1"),
    float: Rule(lambda number: number > 0, "a number above 0"),
    str: Rule(bool, "a string that is not empty"),
}
_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Path: "a path"}


COUNTERS = (
    "prefill_s", "decode_s", "host_s", "idle_s", "prepared_s", "prefilled_tokens", "sampled_tokens", "stale_hits",
)  # fmt: skip
"""What `stats()` of every trainable engine has, counted since the engine was opened. What an engine cannot tell apart is 0.

prefill_s, decode_s     computing prompts and replies; on a GPU both may run at once, and both are counted then
host_s                  the engine's thread worked, and neither of these ran
prepared_s              compiling kernels and capturing CUDA graphs
idle_s                  no request was worked on
stale_hits              reused tokens of the cache that older weights had computed; must stay 0
"""

UpdateMode = Literal["recompute", "keep", "finish"]
"""What happens to the replies in progress when new weights are published: see `TrainableEngine.at_update`."""


class AtUpdate:
    """The attribute `at_update` of an engine. The first mode is the default; one that is not given raises ConfigError.

    `why` is the sentence about the modes that the engine cannot do.
    """

    def __init__(self, *modes: UpdateMode, why: str = "") -> None:
        self._modes, self._why = modes, why

    def __get__(self, engine: Any, owner: Any = None) -> UpdateMode:
        if engine is None:
            return self._modes[0]
        mode: UpdateMode = vars(engine).get("_at_update", self._modes[0])
        return mode

    def __set__(self, engine: Any, mode: UpdateMode) -> None:
        if mode not in self._modes:
            known = " or ".join(map(repr, self._modes))
            why = f": {self._why}" if self._why and mode in get_args(UpdateMode) else ""
            raise ConfigError(f"at_update must be {known} for {type(engine).__name__}, not {mode!r}{why}")
        vars(engine)["_at_update"] = mode


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Options of the local engine. Raises a ConfigError for a value out of bounds.

    max_context       tokens of a prompt and its reply together; None: what the model was made for
    max_batch         requests that run at once; more wait in a queue. None: 256, on a GPU 512
    max_step_tokens   prompt tokens that one step may prefill, so that long prompts do not delay sampling sequences.
                      None: 1,024, on a GPU 4,096
    kv_tokens         tokens that the KV cache may hold
    kv_gib            the same in memory
    kv_fraction       the same as a fraction of the device's free memory. None of the three: 0.4 on a GPU; elsewhere 0.25, and
                      2 GiB at most
    cache             "slots": grows with its use; "pages": one pool of fixed size, and decoding in launches of several steps
                      (CUDA graphs on a GPU). None: pages on a GPU, slots elsewhere
    stop_ids          ids that end every reply; None: the end tokens of the model's generation config
    prepare_s         on a GPU, how long a training may capture CUDA graphs before its first step; 0: each is captured when it
                      is first needed
    """

    max_context: int | None = None
    max_batch: int | None = None
    max_step_tokens: int | None = None
    kv_tokens: int | None = None
    kv_gib: float | None = None
    kv_fraction: Fraction | None = None
    cache: Literal["slots", "pages"] | None = None
    stop_ids: Iterable[int] | None = None
    prepare_s: Seconds = 8.0

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        check_arguments(LocalOptions, values)
        check_cache_size(values)


def options_of(maker: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only arguments of an engine's class with their types; `Any` for types that cannot be resolved."""
    names = [name for name, part in inspect.signature(maker).parameters.items() if part.kind is part.KEYWORD_ONLY]
    made: Any = maker
    try:
        hints = get_type_hints(made.__init__ if inspect.isclass(made) else made, include_extras=True)
    except NameError:  # a type that is imported under TYPE_CHECKING only
        hints = {}
    return {name: hints.get(name, Any) for name in names}


def check_arguments(maker: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a value that an engine's class of this package does not take. Other names are skipped."""
    for name, hint in options_of(maker).items():
        check_value(name, values[name], hint, own=True)


def check_cache_size(options: Mapping[str, Any]) -> None:
    """Raise a ConfigError if more than one of CACHE_SIZES is given."""
    said = [name for name in CACHE_SIZES if options.get(name) is not None]
    if len(said) > 1:
        raise ConfigError(f"agent.engine: {' and '.join(said)} all say how large the cache is: keep one of them")


def check_trained_sampling(sampling: Sampling) -> None:
    """Raise a ConfigError if chains would be drawn from a truncated distribution.

    The learner computes log-probs of the full one, so the policy that acts would not be the policy that is trained.
    """
    cut = cuts(sampling)
    if cut is not None:
        off = 1.0 if cut == "top_p" else 0
        raise ConfigError(
            f"sampling.{cut} cuts the distribution (it is {getattr(sampling, cut)}): chains would be drawn from another policy "
            f"than the one that is trained. Set it to {off} for training; `agentfly eval` and `run` accept it"
        )


def check_value(key: str, value: Any, hint: Any, *, own: bool) -> None:
    """Raise a ConfigError if the option does not take the value. `own`: the engine belongs to this package."""
    if _fits(value, hint, own):
        return
    wanted = f"agent.engine.{key} must be {_words(hint, own)}"
    if key == "api_key" or (key == "base_url" and "@" in str(value)):
        raise ConfigError(f"{wanted}; its value is not shown here, because it may hold a secret")
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
    return kind not in (bool, str, Path, type(None)) or isinstance(value, kind)  # the engine itself checks other types


def _is_list(value: Any, kind: Any) -> bool:
    """Checks the items of a list; an iterator is not consumed. Token ids are at least 0."""
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
