"""Options of engines: their types and bounds, each stated once, in `LocalOptions` or in the signature of the engine's class.

`check_value` raises a ConfigError that names the key, the value and what the option takes (see `schema`). This module imports
nothing heavy, so a config can be checked without torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_type_hints

from ..errors import ConfigError
from ..net.address import is_url
from ..schema import Bounds, Count, Positive, Rule, read, words
from ..types import Sampling
from .prompt import cuts


def _is_device(name: str) -> bool:
    return re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", name) is not None


Address = Annotated[str, Rule(is_url, "an address like http://host:port/v1, without a user name or password in it")]
Device = Annotated[str, Rule(_is_device, "a device such as 'cpu', 'cuda' or 'cuda:1'")]
Dtype = Literal["float32", "bfloat16", "float16"]
ApiKey = Annotated[str, Rule(lambda text: True, "a string")]  # empty: no key is sent
Seconds = Annotated[float, Bounds(low=0)]
Bytes = Annotated[float, Bounds(low=0)]
Fraction = Annotated[float, Bounds(above=0, high=1)]
TokenId = Annotated[int, Rule(lambda number: number >= 0, "a token id")]
TokenIds = Annotated[Iterable[TokenId], Rule(lambda ids: True, "a list of token ids")]

CACHE_SIZES = ("kv_tokens", "kv_gib", "kv_fraction")
"""The options that set the size of the local engine's cache. At most one may be given."""

DEFAULT_CACHE = 0.4
"""Share of a GPU's free memory that the local engine's cache takes if its size is not given."""

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

    def __get__(self, engine: object, owner: object = None) -> UpdateMode:
        if engine is None:
            return self._modes[0]
        mode: UpdateMode = vars(engine).get("_at_update", self._modes[0])
        return mode

    def __set__(self, engine: object, mode: UpdateMode) -> None:
        if mode not in self._modes:
            modes = " or ".join(map(repr, self._modes))
            why = f": {self._why}" if self._why and mode in get_args(UpdateMode) else ""
            raise ConfigError(f"at_update must be {modes} for {type(engine).__name__}, not {mode!r}{why}")
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
    lend_cache        on a GPU, the learner of the same process gets the memory of the cache for its updates. None: if 16 bytes
                      per weight take more than a third of the GPU's memory, as those of 3 billion weights of 139 GiB
    learner_bytes     memory that a learner of the same process keeps per weight beside this engine; the cache leaves it free
                      unless its size is given
    cache             "slots": grows with its use; "pages": one pool of fixed size, and decoding in launches of several steps
                      (CUDA graphs on a GPU). None: pages on a GPU, slots elsewhere
    stop_ids          ids that end every reply; None: the end tokens of the model's generation config
    prepare_s         on a GPU, how long a training may capture CUDA graphs before its first step; 0: each is captured when it
                      is first needed
    """

    max_context: Count | None = None
    max_batch: Count | None = None
    max_step_tokens: Count | None = None
    kv_tokens: Count | None = None
    kv_gib: Positive | None = None
    kv_fraction: Fraction | None = None
    lend_cache: bool | None = None
    learner_bytes: Bytes = 0.0
    cache: Literal["slots", "pages"] | None = None
    stop_ids: TokenIds | None = None
    prepare_s: Seconds = 8.0

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        check_arguments(LocalOptions, values)
        check_cache_size(values)


def default_cache(free: float, kept: float = 0.0) -> float:
    """Returns the size of a cache that is not given, for memory that is free now and what a learner will keep of it.

    A tenth stays free. A learner that needs nearly everything leaves a small cache: its own check says what it lacks.
    """
    return max(0.05 * free, min(DEFAULT_CACHE * free, 0.9 * free - kept))


def lends_by_default(num_weights: float, total: float) -> bool:
    """Whether the learner of so many weights gets the cache's memory for its updates, on a GPU with `total` bytes."""
    return 16.0 * num_weights > total / 3


def options_of(maker: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only arguments of an engine's class with their types; `Any` for types that cannot be resolved."""
    names = [name for name, part in inspect.signature(maker).parameters.items() if part.kind is part.KEYWORD_ONLY]
    made: object = maker
    try:
        hints = get_type_hints(made.__init__ if inspect.isclass(made) else made, include_extras=True)
    except NameError:  # a type that is imported under TYPE_CHECKING only
        hints = {}
    return {name: hints.get(name, Any) for name in names}


def check_arguments(maker: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a value that an engine's class does not take. Other names are skipped."""
    for name, hint in options_of(maker).items():
        check_value(name, values[name], hint)


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


def check_value(key: str, value: object, hint: object) -> None:
    """Raise a ConfigError if the option does not take the value. A value that may hold a secret is not shown."""
    try:
        read(f"agent.engine.{key}", value, hint)
    except ConfigError:
        if key == "api_key" or (key == "base_url" and "@" in str(value)):
            raise ConfigError(
                f"agent.engine.{key} must be {words(hint)}; its value is not shown here, because it may hold a secret"
            ) from None
        raise
