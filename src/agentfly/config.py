"""Typed config: a TOML file and dotted overrides in, one checked `Config` out.

Every key is a field of a dataclass with its type, default and help text; docs/configuration.md is generated from them. An
unknown key, a value of the wrong type, and a key that the chosen algorithm would not read are errors with a sentence.
Nothing is ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .engines import check_engine, engine_options
from .errors import ConfigError
from .learn.algorithms import find_algorithm
from .learn.settings import LoraSettings, LossSettings, OptimSettings
from .resources.spec import check_settings
from .types import Sampling


def _key(default: Any, text: str) -> Any:
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Who acts: the agent, its model, tools and reward."""

    kind: str = _key("react", "agent: a name of `agentfly agents list`, or module:Class")
    model: str = _key(
        "pocket", '"pocket", "pocket-worlds", "smollm2", a model directory or hub name, "openai:NAME@URL" (evaluation only)'
    )
    tools: list[str] = _key([], "tools by name, as module:name or as file.py:name")
    reward: str | dict[str, Any] = _key("exact_match", "a reward by name, or a table of names with weights or options")
    env: str | None = _key(None, "environment of one chain, by name")
    system: str | None = _key(None, "system text that replaces the agent's first line")
    max_turns: int = _key(8, "replies a chain may give")
    max_context: int | None = _key(None, "tokens a chain may hold; the model's own limit when not set")
    chain_timeout_s: float = _key(600.0, "seconds after which a chain is ended and masked out")
    on_no_tool_call: Literal["continue", "end", "raise"] | None = _key(
        None, "reply without call or answer; the agent's own default"
    )
    on_invalid_call: Literal["continue", "end", "raise"] = _key("continue", "unknown tool or bad arguments")
    on_tool_error: Literal["continue", "end", "raise"] = _key("continue", "a tool that raised or ran out of time")
    success_at: float = _key(1.0, "a reward of at least this counts as success")
    engine: str | dict[str, Any] = _key({}, '"local", "vllm" or "openai", or a table: `kind` and its options, as max_batch')
    options: dict[str, Any] = _key({}, "further arguments of the agent's class, such as parser")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSettings:
    """What the host gives to environments."""

    cpu: float | None = _key(None, "CPUs for all environments together; no limit when not set")
    memory_mb: float | None = _key(None, "memory for all environments together; no limit when not set")
    pools: dict[str, Any] = _key({}, "per kind of environment: placement, max, min_warm, idle_s, max_uses, ...")

    def __post_init__(self) -> None:
        for name, settings in self.pools.items():
            check_settings(name, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What it acts on."""

    train: str = _key("", "training rows: a .json, .jsonl or .parquet file, or a task set by name")
    validation: str | None = _key(None, "held-out rows; when not set, a share of the training rows or the task set's own split")
    holdout: float = _key(0.1, "share of a training file that is held out when no validation rows are given")
    train_count: int | None = _key(None, "use only the first rows")
    validation_count: int | None = _key(200, "use only the first held-out rows")
    shuffle: bool = _key(True, "draw the training rows in a new seeded order each time through them")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """Supervised steps on demonstrations before the first step of reinforcement learning; none where `demos` is not set."""

    demos: str | None = _key(None, "a file of rows with messages, or a set of `agentfly demos list`")
    steps: int = _key(100, "supervised weight updates")
    lr: float = _key(1e-4, "learning rate after a warm-up of a tenth of the steps; it falls to 0 along a cosine")
    num_demos: int = _key(16, "demonstrations of one update")
    count: int = _key(1000, "demonstrations drawn from a set, or the first rows of a file")
    mistakes: float = _key(0.0, "share of a set's demonstrations that hold a slip; a file is taken as it is")

    def __post_init__(self) -> None:
        if self.demos is None:
            changed = [item.name for item in dataclasses.fields(self) if getattr(self, item.name) != item.default]
            if changed:
                raise ConfigError(f"warm_start.{changed[0]} has no effect without warm_start.demos: set that, or remove it")
        for name in ("steps", "num_demos", "count"):
            if getattr(self, name) < 1:
                raise ConfigError(f"warm_start.{name} must be at least 1, not {getattr(self, name)}")
        if not self.lr > 0.0:
            raise ConfigError(f"warm_start.lr must be greater than 0, not {self.lr}")
        if not 0.0 <= self.mistakes <= 1.0:
            raise ConfigError(f"warm_start.mistakes is a share from 0 to 1, not {self.mistakes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How many chains are played for one step."""

    num_tasks: int = _key(8, "tasks of one step")
    num_chains: int = _key(8, "sibling chains of each task")
    max_concurrency: int | None = _key(
        None, "chains in flight at once; when not set, as many as the engine serves well (256 where it does not say)"
    )

    def __post_init__(self) -> None:
        for name in ("num_tasks", "num_chains", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"rollout.{name} must be at least 1, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings(OptimSettings):
    """How long, how fast, and what is checked on the way."""

    steps: int = _key(100, "weight updates")
    validate_every: int = _key(10, "steps between validations on held-out rows; 0: only at the start and the end")
    validate_chains: int = _key(1, "chains of each held-out task; pass@k is reported up to this k")
    validate_temperature: float | None = _key(None, "temperature of validation; as in training when not set")
    validate_at_start: bool = _key(True, "validate before the first step, for the closing comparison")
    save_every: int = _key(0, "steps between checkpoints; 0: only at the end and on Ctrl-C")
    keep_checkpoints: int = _key(2, "older checkpoints are removed")
    max_logprob_gap: float | None = _key(
        None,
        "largest mean difference between sampled and recomputed log-probs (nats) before the run stops; "
        "not set: 0.05 in float32, 0.15 in half precision, whose rounding alone makes 0.04 on an unsure model",
    )
    max_failed_share: float = _key(0.5, "largest share of chains lost to the world in one step before the run stops")

    def __post_init__(self) -> None:
        OptimSettings.__post_init__(self)
        for name in ("steps", "validate_chains", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Where it is kept and who watches."""

    dir: str = _key("runs", "folder of all runs")
    name: str | None = _key(None, "name of this run's folder; algorithm, model and time when not set")
    trackers: list[str] = _key(["jsonl"], "where metrics go besides the run's own database: jsonl, tensorboard, wandb")
    threads: int | None = _key(None, "torch threads; torch's own choice when not set")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One run, whole."""

    algorithm: str = _key("grpo", "a name of `agentfly algorithms list`")
    seed: int = _key(0, "seed of the data order, of sampling and of fresh weights")
    agent: AgentSettings = field(default_factory=AgentSettings)
    data: DataSettings = field(default_factory=DataSettings)
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
    resources: ResourceSettings = field(default_factory=ResourceSettings)
    sampling: Sampling = field(default_factory=Sampling)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    run: RunSettings = field(default_factory=RunSettings)

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Config:
        """Read a TOML file, then apply `dotted.key=value` overrides."""
        path = Path(path)
        if not path.is_file():
            raise ConfigError(f"no such config file: {path}")
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error
        for override in overrides:
            _set(tree, *parse_override(override))
        return cls.from_dict(tree)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Config:
        """Build from nested tables, over the algorithm's own defaults; a key that the algorithm would not read is refused."""
        algorithm = find_algorithm(_convert(tree.get("algorithm", "grpo"), str, "algorithm"))
        loss = tree.get("loss", {})
        if not isinstance(loss, Mapping):
            raise ConfigError(f"[loss] is a table, not {loss!r}")
        rest = {key: value for key, value in tree.items() if key != "loss"}
        config: Config = _build(cls, {**rest, "algorithm": algorithm.name}, "")
        algorithm.check_num_chains(config.rollout.num_chains)
        check_engine(config.agent.model, config.agent.engine, config.sampling)
        if "api_key" in engine_options(config.agent.engine):
            raise ConfigError("agent.engine.api_key would be written into the run's folder: set OPENAI_API_KEY instead")
        if not algorithm.needs_critic and config.train.critic_lr is not None:
            raise ConfigError(f"train.critic_lr is not used by {algorithm.name}, which has no critic: remove it")
        return dataclasses.replace(config, loss=algorithm.settings(loss))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """The whole config as TOML, which `load` reads back to an equal one for the same algorithm."""
        algorithm = find_algorithm(self.algorithm)
        tree = self.to_dict()
        standard = dataclasses.asdict(algorithm.settings())
        tree["loss"] = {key: value for key, value in tree["loss"].items() if value != standard[key]}
        if not algorithm.needs_critic:
            tree["train"].pop("critic_lr", None)
        if self.warm_start.demos is None:
            del tree["warm_start"]
        if not self.lora.rank:
            del tree["lora"]
        return to_toml(tree)


SECTIONS = tuple(
    item.name for item in dataclasses.fields(Config) if dataclasses.is_dataclass(get_type_hints(Config)[item.name])
)


def parse_override(text: str) -> tuple[str, Any]:
    """`train.lr=1e-5` to a key and a TOML value; what is not TOML is taken as a plain string."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"an override is key=value, not {text!r}")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def apply_overrides(tree: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys into nested tables, in place."""
    for key, value in overrides.items():
        _set(tree, key, value)
    return tree


def keys() -> list[tuple[str, str, Any, str]]:
    """Every key: dotted name, type, default, help."""
    rows = []
    default = Config()
    hints = get_type_hints(Config)
    for item in dataclasses.fields(Config):
        if dataclasses.is_dataclass(hints[item.name]):
            section = getattr(default, item.name)
            inner = get_type_hints(type(section))
            for part in dataclasses.fields(section):
                rows.append(
                    (
                        f"{item.name}.{part.name}",
                        _type_name(inner[part.name]),
                        getattr(section, part.name),
                        _help(item.name, part),
                    )
                )
        else:
            rows.append((item.name, _type_name(hints[item.name]), getattr(default, item.name), item.metadata.get("help", "")))
    return rows


_SAMPLING_HELP = {
    "temperature": "0 is greedy; log-probs are taken at this temperature",
    "top_p": "1 is off",
    "top_k": "0 is off",
    "min_p": "0 is off",
    "max_tokens": "tokens of one reply",
    "stop": "strings that end a reply",
    "stop_ids": "token ids that end a reply, besides the template's own",
    "seed": "taken from `seed` when not set",
}


def _help(section: str, part: dataclasses.Field[Any]) -> str:
    return _SAMPLING_HELP[part.name] if section == "sampling" else str(part.metadata.get("help", ""))


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{dotted}: {parent!r} is a value, not a table")
    tree[last] = value


def _build(cls: Any, tree: Any, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"[{prefix.rstrip('.')}] is a table, not {tree!r}")
    hints = get_type_hints(cls)
    known = {item.name for item in dataclasses.fields(cls)}
    values = {}
    for name, value in tree.items():
        if name not in known:
            raise _unknown(f"{prefix}{name}")
        hint = hints[name]
        values[name] = (
            _build(hint, value, f"{name}.") if dataclasses.is_dataclass(hint) else _convert(value, hint, f"{prefix}{name}")
        )
    try:
        return cls(**values)
    except ConfigError as error:
        section = prefix.rstrip(".")
        raise ConfigError(str(error) if str(error).startswith(section) else f"{section}: {error}") from error


def _unknown(dotted: str) -> ConfigError:
    every = [key for key, *_ in keys()]
    by_last = {key.rpartition(".")[2]: key for key in every}
    near = difflib.get_close_matches(dotted, every, n=2, cutoff=0.6)
    last = dotted.rpartition(".")[2]
    near = ([by_last[last]] if last in by_last else []) + [key for key in near if key != by_last.get(last)]
    hint = f"did you mean {' or '.join(repr(key) for key in near[:2])}?" if near else "`agentfly config` lists every key."
    return ConfigError(f"unknown config key {dotted!r}; {hint}")


def _convert(value: Any, hint: Any, key: str) -> Any:
    """The value as the field's type, or a ConfigError. Numbers may be written without a point; nothing else is bent."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        for option in (arg for arg in args if arg is not type(None)):
            try:
                return _convert(value, option, key)
            except ConfigError:
                continue
    elif origin is Literal:
        if value in args:
            return value
        near = difflib.get_close_matches(str(value), [str(arg) for arg in args], n=1)
        more = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key} is one of {', '.join(map(repr, args))}, not {value!r}{more}")
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        return origin(_convert(item, args[0], f"{key}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return {str(name): _convert(item, args[1], f"{key}.{name}") for name, item in value.items()}
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif hint in (int, bool, str) and type(value) is hint:
        return value
    raise ConfigError(f"{key} must be {_type_name(hint)}, not {value!r}")


def _type_name(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join("nothing" if arg is type(None) else _type_name(arg) for arg in args)
    if origin is Literal:
        return " or ".join(map(json.dumps, args))
    if origin in (list, tuple):
        return f"list of {_type_name(args[0])}"
    if origin is dict:
        return "table"
    return {int: "integer", float: "number", str: "string", bool: "true or false"}.get(hint, "anything")


def to_toml(tree: Mapping[str, Any]) -> str:
    """Nested mappings as TOML; what is None is left out, which means the default."""
    lines, tables = [], []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            tables.append((key, value))
        elif value is not None:
            lines.append(f"{key} = {_toml_value(value)}")
    for key, table in tables:
        body = "\n".join(f"{_toml_name(name)} = {_toml_value(value)}" for name, value in table.items() if value is not None)
        lines.append(f"\n[{key}]\n{body}")
    return "\n".join(lines).strip() + "\n"


def _toml_name(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_name(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    return json.dumps(str(value), ensure_ascii=False)
