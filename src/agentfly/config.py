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

from . import plugins
from .data import DataSettings
from .engines import check_engine, engine_options
from .errors import ConfigError
from .foreign_names import config_hint
from .learn.algorithms import Algorithm, canonical, find_algorithm, reference_of
from .learn.settings import LoraSettings, LossSettings, OptimSettings
from .recipes import find_config
from .resources.spec import check_settings
from .schema import check_fields, read, read_budget, setting, type_hints, type_name
from .types import Reaction, Sampling

SELF = "self"
"""The value of `warm_start.demos` that asks for chains of the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The agent: its kind, model, tools and reward."""

    kind: str = setting("react", "the agent: a name of `agentfly agents list`, or module:Class")
    model: str = setting(
        "pocket", '"pocket", "pocket-worlds", "smollm2", a model directory or hub name, "openai:NAME@URL" (evaluation only)'
    )
    tools: list[str] = setting([], "tools by name, as module:name or as file.py:name")
    reward: str | dict[str, Any] = setting("exact_match", "a reward by name, or a table of names with weights or options")
    env: str | None = setting(None, "environment of one chain, by name")
    system: str | None = setting(None, "system text; replaces the first line of the agent's prompt")
    examples: str | list[dict[str, Any]] = setting(
        [],
        "worked examples in every prompt, before the task: messages with `role` and `content`, a JSON file of them, or "
        '"tools": a call of each tool, in the agent\'s format',
    )
    examples_steps: int | None = setting(
        None,
        "steps over which the share of training tasks whose prompt shows the examples falls to 0, while other prompts have "
        'none; 0: only `warm_start.demos = "self"` shows them; every prompt when not set',
        low=0,
    )
    max_turns: int = setting(8, "replies a chain may give", low=1)
    max_context: int | None = setting(None, "tokens of a chain; the model's limit when not set", low=1)
    chain_timeout_s: float = setting(600.0, "seconds of a chain, replies and tools, until it is ended (`max_time`)", above=0)
    on_no_tool_call: Reaction | None = setting(None, "reaction to a reply without call or answer; not set: the agent's")
    on_invalid_call: Reaction = setting("continue", "reaction to an unknown tool or bad arguments")
    on_tool_error: Reaction = setting("continue", "reaction to a tool that raised or exceeded its time limit")
    success_at: float = setting(1.0, "a reward of at least this counts as success")
    engine: str | dict[str, Any] = setting({}, '"local", "vllm" or "openai", or a table: `kind` and its options, as max_batch')
    options: dict[str, Any] = setting({}, "further arguments of the agent's class, such as parser")

    def __post_init__(self) -> None:
        check_fields(self, "agent.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSettings:
    """The host's resources for environments."""

    cpu: float | None = setting(None, "CPUs for all environments together; no limit when not set", above=0)
    memory_mb: float | None = setting(None, "memory for all environments together; no limit when not set", above=0)
    pools: dict[str, Any] = setting({}, "per kind of environment: placement, max, min_warm, idle_s, max_uses, ...")

    def __post_init__(self) -> None:
        check_fields(self, "resources.")
        for name, settings in self.pools.items():
            check_settings(name, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """Supervised steps on demonstrations before reinforcement learning; none if `demos` is not set."""

    demos: str | None = setting(
        None,
        'a file of rows with messages, a set of `agentfly demos list`, the folder of a run, or "self": the model\'s own chains '
        "with success, played under agent.examples",
    )
    steps: int = setting(100, "supervised weight updates", low=1)
    lr: float = setting(1e-4, "learning rate after a warm-up of a tenth of the steps; falls to 0 along a cosine", above=0)
    num_demos: int = setting(16, "demonstrations of one update", low=1)
    count: int = setting(1000, 'demonstrations drawn from a set, the first rows of a file, or chains played for "self"', low=1)
    mistakes: float = setting(
        0.0, "share of a set's demonstrations with a mistake in them; a file is used unchanged", low=0, high=1
    )

    def __post_init__(self) -> None:
        if self.demos is None:
            changed = [item.name for item in dataclasses.fields(self) if getattr(self, item.name) != item.default]
            if changed:
                raise ConfigError(f"warm_start.{changed[0]} has no effect without warm_start.demos: set that, or remove it")
        if self.demos == SELF and self.mistakes:
            raise ConfigError(
                f'warm_start.mistakes has no effect with demos = "{SELF}", which keeps chains with success: remove it'
            )
        check_fields(self, "warm_start.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """The chains of one step."""

    num_tasks: int = setting(8, "tasks of one step", low=1)
    num_chains: int = setting(8, "sibling chains of each task", low=1)
    max_concurrency: int | None = setting(
        None, "concurrent chains; when not set, the engine's capacity (256 if the engine states none)", low=1
    )
    max_lag: int = setting(
        0,
        "no token is trained that is older than this many versions of the weights; 0: sampling and learning take turns; above "
        "0: chains are sampled while the learner learns",
        low=0,
    )
    depth: int | None = setting(
        None, "steps that sampling may run ahead of learning, at most max_lag; when not set, 1 (0 if max_lag is 0)", low=0
    )
    at_limit: Literal["wait", "mask"] = setting(
        "wait",
        "what happens to a group whose tokens reach max_lag: wait (the step waits for its chains) or mask (the step goes on, "
        "and its tokens that are older than max_lag are not trained)",
    )
    refill: int = setting(
        0,
        "tasks that a step may draw besides num_tasks, one for each whose chains all have the same reward (dynamic sampling)",
        low=0,
    )
    at_update: Literal["recompute", "keep", "finish"] = setting(
        "recompute",
        "replies in progress when new weights arrive: recompute (their keys and values are computed again), keep (they go on "
        "with those of the older weights) or finish (the new weights wait for them). A new request never uses older ones",
    )
    call_bonus: float = setting(
        0.0, "added once to the reward of a chain that calls a tool without an error; falls to 0, and is no success", low=0
    )
    call_bonus_steps: int = setting(0, "steps over which `call_bonus` falls to 0", low=0)
    group_timeout_s: float | None = setting(
        None,
        "seconds from the start of a task's first chain until those that still run are ended (`max_time`)",
        above=0,
    )
    turn_timeout_s: float | None = setting(
        None,
        "seconds of one turn, reply and tools, until its chain is ended (`max_time`); agent.chain_timeout_s always applies",
        above=0,
    )

    def __post_init__(self) -> None:
        check_fields(self, "rollout.")
        if self.depth is not None and self.depth > self.max_lag:
            raise ConfigError(
                f"rollout.depth ({self.depth}) must not be more than rollout.max_lag ({self.max_lag}): tokens would be too old"
            )
        if self.max_lag and self.depth == 0:
            raise ConfigError("rollout.max_lag has no effect with rollout.depth = 0: remove one of them")
        if bool(self.call_bonus) != bool(self.call_bonus_steps):
            missing = "call_bonus_steps" if self.call_bonus else "call_bonus"
            raise ConfigError(f"rollout.call_bonus and rollout.call_bonus_steps need each other: set rollout.{missing}")
        if not self.max_lag and (self.at_limit != "wait" or self.at_update != "recompute"):
            key = "at_limit" if self.at_limit != "wait" else "at_update"
            raise ConfigError(f"rollout.{key} has no effect without rollout.max_lag: set that, or remove it")

    @property
    def steps_ahead(self) -> int:
        """The steps that sampling may run ahead of learning."""
        return min(1, self.max_lag) if self.depth is None else self.depth


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings(OptimSettings):
    """Length, optimizer and checks of a training run."""

    steps: int = setting(100, "weight updates", low=1)
    validate_every: int = setting(10, "steps between validations on held-out rows; 0: only at the start and the end", low=0)
    validate_chains: int = setting(1, "chains of each held-out task; pass@k and pass^k are reported up to this k", low=1)
    validate_temperature: float | None = setting(None, "temperature of validation; as in training when not set", low=0)
    validate_at_start: bool = setting(True, "validate before the first step, for the closing comparison")
    save_every: int = setting(
        20, "steps between checkpoints, at most; 0: no limit. One is always saved at the end, on Ctrl-C and on SIGTERM", low=0
    )
    save_every_s: float = setting(600.0, "seconds between checkpoints, at most (checked after each step); 0: no limit", low=0)
    keep_checkpoints: int = setting(2, "checkpoints to keep; older ones are removed", low=1)
    keep_best: bool = setting(
        False,
        "keep the checkpoint with the best validation, too, as checkpoints/best; it is saved when it is validated",
    )
    stop_after: int = setting(
        0, "end the run after so many validations that are not better by a paired test over the held-out tasks; 0: never", low=0
    )
    restart_from_best: int = setting(
        0,
        "times that a run goes back to its best checkpoint (weights, moments, coefficients) where a validation is worse than "
        "the best by the test of stop_after, or instead of ending by stop_after; needs keep_best and stop_after",
        low=0,
    )
    budget: str | None = setting(
        None, 'end the run in order when it has used this, resumes included: a time ("20min") or dollars ("$2", by run.price)'
    )
    max_logprob_gap: float | None = setting(
        None,
        "largest mean difference between sampled and recomputed log-probs (nats) before the run stops; "
        "not set: a multiple of the run's first one, in float32 at most 0.002 (an engine with a copy of the weights: 0.05), in "
        "half precision at most 0.15, where rounding alone gives 0.04 on an uncertain model",
        above=0,
    )
    max_failed_share: float = setting(
        0.5, "largest share of untrainable chains in one step before the run stops", low=0, high=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The processes that share the learner."""

    ranks: int = setting(
        1, "processes over which weights, gradients and optimizer are sharded (FSDP2), one per GPU; torchrun sets it too", low=1
    )
    reduce: Literal["float32", "bfloat16"] = setting("float32", "precision in which gradients are added up over ranks")
    timeout_s: float = setting(600.0, "seconds that a rank waits for the others in one exchange before the run fails", above=0)
    cpus: float = setting(1.0, "CPUs that each rank reserves on its node of the Ray cluster (cluster.address)", low=0)
    memory_gib: float = setting(0.0, "memory that each rank reserves on its node of the Ray cluster", low=0)

    def __post_init__(self) -> None:
        check_fields(self, "learner.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSettings:
    """What happens if a process of the run is lost."""

    restarts: int = setting(
        3, "times that `agentfly train` restarts all ranks from the last checkpoint after one was killed or froze", low=0
    )

    def __post_init__(self) -> None:
        check_fields(self, "fault.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """The sampler: how many replicas of the engine there are, and where they run."""

    replicas: int = setting(1, "replicas of the engine; more than 1 run in processes, each with its own chains", low=1)
    place: Literal["shared", "process", "own"] = setting(
        "shared",
        "where replicas run: shared (on the learner's devices; a single one inside the trainer's process), process (on the "
        "learner's devices, also a single one in a process) or own (in processes, on GPUs that the learner does not use)",
    )
    gpus: int = setting(1, "GPUs of each replica if place is own; the engines sample on one", low=1, high=1)
    cpus: float = setting(1.0, "CPUs that each replica reserves on its node of the Ray cluster (cluster.address)", low=0)
    memory_gib: float = setting(0.0, "memory that each replica reserves on its node of the Ray cluster", low=0)

    def __post_init__(self) -> None:
        check_fields(self, "sampler.")

    @property
    def in_processes(self) -> bool:
        """Whether chains run in worker processes and not in the trainer's."""
        return self.replicas > 1 or self.place != "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """The machines and worker processes of a run: where they are, and how the trainer watches them."""

    address: str | None = setting(
        None,
        'the Ray cluster that samplers, environment servers and learner ranks are placed on: host:port of its head, or "auto" '
        "on one of its nodes; when not set, everything runs on this machine, without Ray",
    )
    env_hosts: int = setting(
        0, "processes over the nodes of the cluster that hold the environments; 0: environments live beside their chains", low=0
    )
    env_cpus: float = setting(1.0, "CPUs that each environment server reserves on its node", low=0)
    env_memory_gib: float = setting(0.0, "memory that each environment server reserves on its node", low=0)
    health_s: float = setting(
        6.0,
        "seconds of silence after which a worker process, or a node of the cluster, counts as dead; its chains run again in "
        "another",
        above=0.5,
    )

    def __post_init__(self) -> None:
        check_fields(self, "cluster.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Where results are stored and reported."""

    dir: str = setting("runs", "folder of all runs")
    name: str | None = setting(None, "name of this run's folder; algorithm, model and time when not set")
    trackers: list[str] = setting(
        ["jsonl"], "where metrics go besides the run's own database: jsonl, tensorboard, wandb, mlflow, trackio, opentelemetry"
    )
    threads: int | None = setting(None, "torch threads; torch's choice when not set", low=1)
    price: float | None = setting(None, "dollars per hour of one GPU; on a CPU, of the machine", above=0)

    def __post_init__(self) -> None:
        check_fields(self, "run.")
        parts = Path(self.name or "run").parts
        if not parts or ".." in parts or Path(self.name or "run").is_absolute():
            raise ConfigError(
                f"run.name is the name of a folder in run.dir, not {self.name!r}: choose another one, or set run.dir"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlSettings:
    """What only verl's trainer has (`backend = "verl"`)."""

    strategy: Literal["fsdp2", "fsdp", "megatron"] = setting("fsdp2", "how verl shards the learner")
    engine: Literal["vllm", "sglang"] = setting("vllm", "the servers that verl samples from")
    nodes: int = setting(1, "machines of the Ray cluster", low=1)
    gpus_per_node: int | None = setting(None, "GPUs of each machine; when not set, learner.ranks divided by nodes", low=1)
    tensor_parallel: int = setting(1, "GPUs of one server", low=1)
    memory_fraction: float = setting(0.5, "share of a GPU's memory for the server that shares it", above=0, high=1)
    workers: int = setting(
        1, "processes in which chains run; limits of [resources] and rollout.max_concurrency are divided by it", low=1
    )
    offload: bool = setting(
        False, "keep the learner's weights and optimizer state in the host's memory while chains are sampled"
    )
    overrides: list[str] = setting([], "further hydra overrides of verl, as key=value; they come last and are not checked")

    def __post_init__(self) -> None:
        check_fields(self, "verl.")
        for word in self.overrides:
            if "=" not in word:
                raise ConfigError(f"verl.overrides holds key=value words, not {word!r}")


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


def _named(value: Any) -> Any:
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
        raise ConfigError(
            f"{error}; a run has one: start a run for each, as in `for v in 0 1; do agentfly train ... {key}=$v; done`"
        ) from None


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
