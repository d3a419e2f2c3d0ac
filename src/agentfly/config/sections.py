"""The sections of a config: every key with its type, its limits, its default and what it does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from ..learn.settings import OptimSettings
from ..resources.spec import check_settings
from ..schema import check_fields, setting
from ..types import Reaction

SELF = "self"
"""The value of `warm_start.demos` that asks for chains of the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The agent: its kind, model, tools and reward."""

    kind: str = setting("react", "the agent: a name of `agentfly agents list`, or module:Class")
    model: str = setting(
        "pocket", '"pocket", "pocket-worlds", "smollm2", a model directory or hub name, "openai:NAME@URL" (evaluation only)'
    )
    tools: list[str] = setting(
        [], "tools by name, as module:name or as file.py:name; mcp:NAME for those of a server of agent.mcp"
    )
    mcp: dict[str, Any] = setting(
        {}, "MCP servers whose tools are in `tools` as mcp:NAME: command, args and env, or url and headers; shared, only, ..."
    )
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
