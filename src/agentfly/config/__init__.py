"""Typed config: a TOML file and dotted overrides in, one checked `Config` out.

Every key is a dataclass field with its type, default and help text, from which docs/configuration.md is generated. An unknown
key, a value of the wrong type and a key that the chosen algorithm does not read raise ConfigError. No key is ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .. import plugins
from ..data import DataSettings
from ..engines import check_engine, engine_options
from ..errors import ConfigError
from ..foreign_names import config_hint
from ..learn.algorithms import Algorithm, canonical, find_algorithm, reference_of
from ..learn.settings import LoraSettings, LossSettings
from ..recipes import find_config
from ..schema import read, read_budget, setting, type_hints, type_name
from ..types import Sampling
from .sections import (
    SELF,
    AgentSettings,
    ClusterSettings,
    FaultSettings,
    LearnerSettings,
    ResourceSettings,
    RolloutSettings,
    RunSettings,
    SamplerSettings,
    TrainSettings,
    VerlSettings,
    WarmStartSettings,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole config of one run."""

    algorithm: str | Algorithm = setting(
        "grpo", "a name of `agentfly algorithms list`, file.py:NAME or module:NAME; in Python also an `Algorithm`"
    )
    seed: int = setting(0, "seed of the data order, of sampling and of fresh weights")
    backend: Literal["local", "verl"] = setting(
        "local", "what trains: local (this package) or verl (its distributed trainer; docs/scale.md)"
    )
    agent: AgentSettings = field(default_factory=AgentSettings)
    data: DataSettings = field(default_factory=DataSettings)
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
    resources: ResourceSettings = field(default_factory=ResourceSettings)
    sampling: Sampling = field(default_factory=Sampling)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    fault: FaultSettings = field(default_factory=FaultSettings)
    run: RunSettings = field(default_factory=RunSettings)
    verl: VerlSettings = field(default_factory=VerlSettings)

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
        """Read a TOML file, or a recipe by name, and apply `dotted.key=value` overrides. Raises ConfigError.

        Without a path, the config consists of the overrides and the defaults.
        """
        tree: dict[str, Any] = {}
        if path is not None:
            path = find_config(path)
            try:
                tree = tomllib.loads(path.read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
                kind = "cannot be read" if isinstance(error, OSError) else "not valid TOML"
                raise ConfigError(f"{path}: {kind}: {error}") from error
        for override in overrides:
            _set(tree, *parse_override(override))
        return cls.from_dict(tree)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Config:
        """Build from nested tables over the algorithm's defaults. Raises ConfigError for a key that is unknown or not read."""
        if isinstance(table := tree.get("algorithm"), Mapping) and table:
            raise _unknown("algorithm", table)
        chosen = canonical(tree.get("algorithm", "grpo"))
        algorithm = find_algorithm(chosen)
        loss = tree.get("loss", {})
        if not isinstance(loss, Mapping):
            raise ConfigError(f"[loss] is a table, not {loss!r}")
        rest = {key: value for key, value in tree.items() if key != "loss"}
        config: Config = dataclasses.replace(_build(cls, {**rest, "algorithm": algorithm.name}, ""), algorithm=chosen)
        algorithm.check_num_chains(config.rollout.num_chains)
        if config.rollout.refill and not algorithm.needs_group:
            raise ConfigError(
                f"rollout.refill has no use for {algorithm.name}, which learns from equal rewards, too: remove it"
            )
        check_engine(config.agent.model, config.agent.engine, config.sampling)
        if "api_key" in engine_options(config.agent.engine):
            raise ConfigError("agent.engine.api_key would be written to the run's folder: set OPENAI_API_KEY instead")
        config = dataclasses.replace(config, loss=algorithm.settings(loss))
        config.loss.check_chains(config.rollout.max_lag, config.agent.max_turns)
        algorithm.check_reference(config.loss)
        if config.backend != "verl" and (changed := _changed(config.verl)):
            raise ConfigError(f'verl.{changed[0]} has no effect without backend = "verl": set that, or remove it')
        config.check_ranks(config.learner.ranks)
        config.check_restarts()
        _check_sampler(config)
        _check_cluster(config)
        if config.backend == "verl" and config.warm_start.demos == SELF:
            raise ConfigError(f'warm_start.demos = "{SELF}" needs backend = "local": train there first, then give agent.model')
        if config.rollout.call_bonus and algorithm.needs_reference:
            raise ConfigError(f"rollout.call_bonus is a reward, and {algorithm.name} learns from none: remove it")
        if (budget := config.train.budget) is not None and read_budget("train.budget", budget)[1] and config.run.price is None:
            raise ConfigError(f"train.budget = {budget!r} needs run.price, the dollars per GPU-hour: set it, or give a time")
        if keys := config.train.critic_keys:
            if not algorithm.needs_critic:
                raise ConfigError(f"train.{keys[0]} is not used by {algorithm.name}, which has no critic: remove it")
            if config.loss.critic == "shared" and keys != ["critic_lr"]:
                raise ConfigError('train.critic_epochs, critic_minibatches and critic_warmup_steps need loss.critic = "copy"')
        return config

    def check_ranks(self, ranks: int) -> None:
        """Raises ConfigError for keys that do not work with so many learner ranks."""
        kind = engine_options(self.agent.engine).get("kind", "local")
        if ranks > 1 and kind != "local":
            raise ConfigError(
                f"learner.ranks = {ranks} samples with the local engine, which copies the weights from the ranks: remove "
                f"agent.engine.kind = {kind!r}, or set learner.ranks = 1"
            )
        alone = {
            "loss.reference_hint": self.loss.reference_hint is not None,
            "loss.reference_every": self.loss.reference_every > 0,
            "train.optimizer of your own": self.train.optimizer not in plugins.BUILTIN["optimizers"],
        }
        for name, is_set in alone.items():
            if ranks > 1 and is_set:
                raise ConfigError(f"{name} works on one learner rank: remove it, or set learner.ranks = 1")

    def check_restarts(self) -> None:
        """Raises ConfigError if the run could not go back to its best checkpoint."""
        if not self.train.restart_from_best:
            return
        if not (self.train.keep_best and self.train.stop_after):
            raise ConfigError(
                "train.restart_from_best needs the best checkpoint and its test: set train.keep_best and stop_after"
            )
        if self.rollout.max_lag:
            raise ConfigError(
                "train.restart_from_best works with rollout.max_lag = 0: running chains would go on under other weights"
            )

    def to_dict(self) -> dict[str, Any]:
        """The config as nested tables. An algorithm or a sampler that is an object is named by its module or file."""
        tree = dataclasses.asdict(dataclasses.replace(self, algorithm=reference_of(self.algorithm)))
        return {**tree, "data": _named(tree["data"]), "train": _named(tree["train"])}

    def to_toml(self) -> str:
        """Returns the whole config as TOML; `load` reads it back to an equal config."""
        algorithm = find_algorithm(self.algorithm)
        tree = self.to_dict()
        standard = dataclasses.asdict(algorithm.settings())
        tree["loss"] = {key: value for key, value in tree["loss"].items() if value != standard[key]}
        if self.warm_start.demos is None:
            del tree["warm_start"]
        if not self.lora.rank:
            del tree["lora"]
        if self.backend != "verl":
            del tree["verl"]
        return to_toml(tree)


def _named(value: object) -> Any:
    """The value with the references of the classes and functions in it."""
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items()}
    return plugins.reference_of(value) if callable(value) else value


def _changed(section: Any) -> list[str]:
    """The names of the fields that differ from a section's defaults."""
    default = type(section)()
    return [item.name for item in dataclasses.fields(section) if getattr(section, item.name) != getattr(default, item.name)]


def _check_sampler(config: Config) -> None:
    """Raises ConfigError for keys of [sampler] that the engine cannot serve."""
    if not config.sampler.in_processes:
        return
    engine = engine_options(config.agent.engine)
    if engine.get("kind") == "openai" or config.agent.model.startswith("openai:"):
        raise ConfigError(
            "sampler.replicas and sampler.place are for engines that run in processes of this framework; this engine is a "
            "server, which manages its replicas itself: remove them"
        )


def _check_cluster(config: Config) -> None:
    """Raises ConfigError for keys of the Ray cluster, and of worker processes, that have no effect."""
    cluster, default = config.cluster, ClusterSettings()
    ranks = config.learner.ranks > 1
    remote = cluster.address is not None
    uses = config.sampler.in_processes or cluster.env_hosts > 0 or ranks
    if remote and not uses and config.backend != "verl":
        raise ConfigError(
            'cluster.address has no effect: set sampler.place = "process", sampler.replicas, cluster.env_hosts or '
            "learner.ranks, which are placed on the cluster, or remove it"
        )
    if cluster.health_s != default.health_s and not config.sampler.in_processes and not (remote and uses):
        raise ConfigError(
            'cluster.health_s has no effect without worker processes: set sampler.replicas or sampler.place = "process", '
            "or remove it"
        )
    if cluster.env_hosts and not remote:
        raise ConfigError("cluster.env_hosts needs a Ray cluster: set cluster.address, or remove it")
    for name in ("env_cpus", "env_memory_gib"):
        if getattr(cluster, name) != getattr(default, name) and not cluster.env_hosts:
            raise ConfigError(f"cluster.{name} has no effect without cluster.env_hosts: set that, or remove it")
    for section, placed, needed in (
        ("sampler", config.sampler.in_processes, 'sampler.place = "process" or sampler.replicas'),
        ("learner", ranks, "learner.ranks"),
    ):
        for name in set(_changed(getattr(config, section))) & {"cpus", "memory_gib"}:
            if not (remote and placed):
                missing = "cluster.address" if not remote else needed
                raise ConfigError(f"{section}.{name} has no effect without {missing}: set that, or remove it")


SECTIONS = tuple(name for name, hint in type_hints(Config).items() if dataclasses.is_dataclass(hint))


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `train.lr=1e-5` into a key and a TOML value. A value that is not TOML is a plain string.

    A shell removes the quotes of `agent.tools=["add"]`, so `[add, my.py:tool]` is a list of strings too.
    """
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"an override is key=value, not {text!r}")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        words = value.strip()
        if words[:1] == "[" and words[-1:] == "]" and not set(words[1:-1]) & set("[]{}\"'="):
            return key.strip(), [word.strip() for word in words[1:-1].split(",") if word.strip()]
        return key.strip(), value


def apply_overrides(tree: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Write dotted keys into nested tables, in place."""
    for key, value in overrides.items():
        _set(tree, key, value)
    return tree


def keys() -> list[tuple[str, str, Any, str]]:
    """Returns every key as (dotted name, type, default, help)."""
    return list(_rows(Config(), ""))


def _rows(section: Any, prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    hints = type_hints(type(section))
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if item.name in SECTIONS and not prefix:
            yield from _rows(value, f"{item.name}.")
        else:
            text = _SAMPLING_HELP[item.name] if prefix == "sampling." else str(item.metadata.get("help", ""))
            yield f"{prefix}{item.name}", type_name(hints[item.name], item.metadata.get("limit")), value, text


_SAMPLING_HELP = {
    "temperature": "0 is greedy; log-probs are computed at this temperature",
    "top_p": "1 is off",
    "top_k": "0 is off",
    "min_p": "0 is off",
    "max_tokens": "tokens of one reply",
    "stop": "strings that end a reply",
    "stop_ids": "token ids that end a reply, besides those of the template",
    "seed": "taken from `seed` when not set",
}


def _set(tree: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{dotted}: {parent!r} is a value, not a table")
    tree[last] = value


def _build(cls: type, tree: object, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"[{prefix.rstrip('.')}] is a table, not {tree!r}")
    hints = type_hints(cls)
    items = {item.name: item for item in dataclasses.fields(cls)}
    values = {}
    for name, value in tree.items():
        if name not in items:
            raise _unknown(f"{prefix}{name}", value)
        hint, key = hints[name], f"{prefix}{name}"
        is_section = dataclasses.is_dataclass(hint)
        values[name] = _build(hint, value, f"{name}.") if is_section else _read(key, value, items[name], hint)
    try:
        return cls(**values)
    except ConfigError as error:
        section = prefix.rstrip(".")
        raise ConfigError(str(error) if str(error).startswith(section) else f"{section}: {error}") from error


def _unknown(dotted: str, value: object) -> ConfigError:
    while isinstance(value, Mapping) and value:  # name the whole key of another library's nested table
        key, value = next(iter(value.items()))
        dotted = f"{dotted}.{key}"
    every = [key for key, *_ in keys()]
    by_last = {key.rpartition(".")[2]: key for key in every}
    near = difflib.get_close_matches(dotted, every, n=2, cutoff=0.6)
    last = dotted.rpartition(".")[2]
    if (foreign := config_hint(dotted, exact=last in by_last)) is not None:
        return ConfigError(f"unknown config key {dotted!r}; {foreign}")
    near = ([by_last[last]] if last in by_last else []) + [key for key in near if key != by_last.get(last)]
    hint = f"did you mean {' or '.join(repr(key) for key in near[:2])}?" if near else "`agentfly config` lists every key."
    return ConfigError(f"unknown config key {dotted!r}; {hint}")


def _read(key: str, value: object, item: dataclasses.Field[Any], hint: object) -> Any:
    """Returns the value as the field's type. Raises ConfigError for another one."""
    try:
        return read(key, value, hint, item.metadata.get("limit"))
    except ConfigError as error:
        if not (isinstance(value, str) and "," in value and {int, float} & {hint, *get_args(hint)}):
            raise
        raise ConfigError(f"{error}; a run has one value: `agentfly sweep` with the same words trains a run for each") from None


def to_toml(tree: Mapping[str, Any]) -> str:
    """Returns nested mappings as TOML. A value of None is left out, which means the default."""
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


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_name(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    return json.dumps(str(value), ensure_ascii=False)
