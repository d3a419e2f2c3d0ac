"""What becomes of every config key in verl: one rule per key.

A rule sets keys of verl (`to`, `made`), is read by the agent loop in verl's workers (`LOOP`), is used before verl starts
(`BEFORE`), or refuses every value but the default (`refused`). A function of a rule raises `Refusal` for a value that verl
cannot run. `tests/verl/test_verl_translate.py` fails if a key has no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import Config
from ..learn.algorithms import Algorithm

ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))
OFF = 1e9
"""A clip that never applies: verl clamps ratios to exp(20) = 4.9e8."""


class Refusal(Exception):
    """verl cannot run a value; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A config, and what its data and model say. `flat` has every key by its dotted name. Paths are absolute."""

    config: Config
    flat: Mapping[str, Any]
    algorithm: Algorithm
    folder: Path
    model: str
    max_prompt: int
    max_response: int
    max_context: int
    num_train: int
    packs: bool
    resumes: bool = False

    @property
    def gpus_per_node(self) -> int:
        verl, ranks = self.config.verl, int(self.flat.get("learner.ranks", 1))
        if verl.gpus_per_node is not None:
            return verl.gpus_per_node
        if ranks % verl.nodes:
            raise Refusal(f"learner.ranks = {ranks} cannot be divided by verl.nodes = {verl.nodes}: set verl.gpus_per_node")
        return ranks // verl.nodes

    @property
    def megatron(self) -> bool:
        return self.config.verl.strategy == "megatron"


Make = Callable[[Any, Job], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """`text` says where the key goes: keys of verl, who reads it, or why another value is refused."""

    kind: Literal["verl", "loop", "before", "refused"]
    text: str
    make: Make | None = None


def to(*names: str, via: Callable[[Any], Any] = lambda value: value) -> KeyRule:
    """The value, or `via(value)`, under these names of verl."""
    return KeyRule("verl", ", ".join(names), lambda value, job: dict.fromkeys(names, via(value)))


def made(text: str, make: Make) -> KeyRule:
    """A function of the value and the job returns the keys of verl; `text` names them."""
    return KeyRule("verl", text, make)


def refused(why: str) -> KeyRule:
    """Only the default can be run."""
    return KeyRule("refused", why)


LOOP = KeyRule("loop", "read by the agent loop")
BEFORE = KeyRule("before", "used before verl starts")
ESTIMATORS = {
    "grpo": ("grpo", "vanilla"),
    "dr_grpo": ("grpo", "vanilla"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "rloo": ("rloo", "vanilla"),
    "opo": ("opo", "vanilla"),
    "reinforce++": ("reinforce_plus_plus", "vanilla"),
    "reinforce++_baseline": ("reinforce_plus_plus_baseline", "vanilla"),
    "ppo": ("gae", "vanilla"),
}
"""Per algorithm: verl's advantage estimator and policy loss."""
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum-norm",
}
LOGGERS = {"jsonl": "file", "tensorboard": "tensorboard", "wandb": "wandb"}
STORAGE_UNITS = 2
"""Storage units of TransferQueue per node; each reserves a CPU."""
BILLION = 10**9
CRITIC_MINIBATCHES, CRITIC_EPOCHS, CRITIC_WARMUP = 8, 2, 7


def whole(value: float, key: str) -> int:
    """Returns a number that verl keeps as an integer."""
    if value != int(value):
        raise Refusal(f"verl takes a whole number for it ({key})")
    return int(value)


def policy_lr(job: Job) -> float:
    """The learning rate of the policy. verl is for models of a billion weights or more."""
    return job.config.train.lr_of(BILLION, job.config.lora.rank > 0)


def algorithm(name: object, job: Job) -> Mapping[str, Any]:
    if job.algorithm.name not in ESTIMATORS or not isinstance(name, str) or name != job.algorithm.name:
        raise Refusal(f"verl has no such algorithm; it can run {', '.join(ESTIMATORS)}")
    estimator, loss = ESTIMATORS[name]
    return {"algorithm.adv_estimator": estimator, f"{ACTOR}.policy_loss.loss_mode": loss}


def engine(value: Any, job: Job) -> Mapping[str, Any]:
    """The options of the sampler. Those of the renderer are read by the agent loop."""
    options = {"kind": value} if isinstance(value, str) else dict(value)
    engine_options: dict[str, Any] = {}
    for name, option in options.items():
        if name == "kind" and option not in ("local", "vllm"):
            raise Refusal(f'kind = "{option}" has no place in verl, which starts its own servers: set verl.engine')
        if name in ("kind", "chat_template", "template_args", "stop_ids", "max_context") or option is None:
            continue
        if name == "memory_fraction":
            raise Refusal("set verl.memory_fraction instead of memory_fraction")
        if name not in ENGINE:
            raise Refusal(f"verl's servers have no option {name!r}; it takes {', '.join(ENGINE)}, and verl.overrides the rest")
        engine_options[ENGINE[name]] = option
    return engine_options


ENGINE = {
    "max_batch": f"{ROLLOUT}.max_num_seqs",
    "dtype": f"{ROLLOUT}.dtype",
    "eager": f"{ROLLOUT}.enforce_eager",
    "prefix_caching": f"{ROLLOUT}.enable_prefix_caching",
    "max_step_tokens": f"{ROLLOUT}.max_num_batched_tokens",
}


def temperature(value: float, job: Job) -> Mapping[str, Any]:
    if value == 0:
        raise Refusal("verl divides logits by it: train at a temperature above 0, and set train.validate_temperature = 0")
    return {f"{ROLLOUT}.temperature": value, f"{ROLLOUT}.top_p": 1.0, f"{ROLLOUT}.top_k": -1}


def num_tasks(value: int, job: Job) -> Mapping[str, Any]:
    if value > job.num_train:
        raise Refusal(f"verl draws whole batches, and there are {job.num_train} training rows: use at most that many")
    return {"data.train_batch_size": value}


def max_lag(value: int, job: Job) -> Mapping[str, Any]:
    if not value:
        return {"trainer.v1.trainer_mode": "sync"}
    # verl counts from the step at which a prompt was drawn, so its tokens are at most that old, and a threshold of k admits
    # ages 0 to k - 1.
    return {
        "trainer.v1.trainer_mode": "colocate_async",
        "trainer.v1.sampler.max_off_policy_threshold": value + 1,
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
        "trainer.v1.colocate_async.num_warmup_batches": job.config.rollout.steps_ahead,
    }


def old_logprobs(value: str, job: Job) -> Mapping[str, Any]:
    if value == "auto" and job.config.loss.correction == "off" and job.config.rollout.max_lag:
        raise Refusal("verl uses one kind of log-probs for all tokens of a batch: set it to sampled, or set loss.correction")
    return {"algorithm.rollout_correction.bypass_mode": value == "sampled"}


def correction(value: str, job: Job) -> Mapping[str, Any]:
    cap = job.config.loss.correction_cap
    base = "algorithm.rollout_correction.rollout_is"
    if value == "off":
        return {base: None}
    if value == "mask":
        return {base: "token", f"{base}_threshold": f"{1 / cap!r}_{cap!r}"}
    return {base: "sequence" if value == "sequence" else "token", f"{base}_threshold": cap}


def kl(value: float, job: Job) -> Mapping[str, Any]:
    loss = job.config.loss
    in_loss, in_reward = (value > 0 and loss.kl_in == place for place in ("loss", "reward"))
    return {
        f"{ACTOR}.use_kl_loss": in_loss,
        "algorithm.use_kl_in_reward": in_reward,
        **({f"{ACTOR}.kl_loss_coef": value, f"{ACTOR}.kl_loss_type": loss.kl_estimator} if in_loss else {}),
        **(
            {
                "algorithm.kl_ctrl.type": "fixed",
                "algorithm.kl_ctrl.kl_coef": value,
                "algorithm.kl_penalty": loss.kl_estimator,
            }
            if in_reward
            else {}
        ),
    }


def aggregation(value: str, job: Job) -> Mapping[str, Any]:
    divisor = job.config.loss.sequence_divisor
    scale = whole(divisor, "loss.sequence_divisor") if value == "sequence_sum" else None
    return {f"{ACTOR}.loss_agg_mode": AGGREGATIONS[value], f"{ACTOR}.loss_scale_factor": scale}


def minibatches(count: int, job: Job, where: str, what: str) -> dict[str, Any]:
    tasks = job.config.rollout.num_tasks
    if tasks % count:
        raise Refusal(f"verl cuts a step by tasks, and rollout.num_tasks = {tasks} cannot be divided by {what} = {count}")
    return {f"{where}.ppo_mini_batch_size": tasks // count}


def critic(make: Callable[[Any, Job], Mapping[str, Any]]) -> Make:
    """A rule of the critic: nothing if the algorithm has none."""
    return lambda value, job: make(value, job) if job.algorithm.needs_critic else {}


def critic_minibatches(value: int | None, job: Job) -> Mapping[str, Any]:
    tasks = job.config.rollout.num_tasks
    count = value or max(each for each in range(1, CRITIC_MINIBATCHES + 1) if tasks % each == 0)
    return minibatches(count, job, "critic", "train.critic_minibatches")


def critic_warmup(value: int | None, job: Job) -> Mapping[str, Any]:
    steps = job.config.train.steps
    alone = min(CRITIC_WARMUP, steps // 3) if value is None else value
    return {"trainer.critic_warmup": alone + 1 if alone else 0}  # verl's actor starts at this step, counted from 1


def value_clip(value: float, job: Job) -> Mapping[str, Any]:
    return {"critic.cliprange_value": value or OFF, "critic.loss_agg_mode": "token-mean"}


def optimizer(name: str, value: object, job: Job) -> dict[str, Any]:
    """A key of the actor's optimizer and, if there is a critic, of the critic's."""
    return {f"{part}.optim.{name}": value for part in (ACTOR, *(("critic",) if job.algorithm.needs_critic else ()))}


def grad_norm(value: float, job: Job) -> Mapping[str, Any]:
    options = optimizer("clip_grad", value, job)
    if not job.megatron:
        options[f"{ACTOR}.grad_clip"] = value
    return options


def schedule(value: object, job: Job) -> Mapping[str, Any]:
    warmup = job.config.train.warmup_steps
    options = optimizer("lr_warmup_steps", warmup or -1, job)
    if job.algorithm.needs_critic:
        options["critic.optim.lr_warmup_steps"] = -1  # as here, only the policy's rate warms up
    if value not in ("constant", "linear", "cosine"):
        raise Refusal('verl has no such schedule: set train.schedule = "cosine"')
    if job.megatron:
        return options | optimizer("lr_decay_style", value, job)
    if value == "linear":
        raise Refusal('verl\'s FSDP trainer has constant and cosine; verl.strategy = "megatron" has linear')
    if value == "constant" and warmup:  # verl's constant schedule begins with a step of rate 0; a cosine of no waves does not
        shape = {"lr_scheduler_type": "cosine", "num_cycles": 0.0, "zero_indexed_step": False}
    else:
        shape = {"lr_scheduler_type": value}
    for name, part in shape.items():
        options |= optimizer(name, part, job)
    return options


def total_steps(value: int | None, job: Job) -> Mapping[str, Any]:
    if value not in (None, job.config.train.steps) and job.config.train.schedule != "constant":
        raise Refusal(f"verl's schedules end with the run, after train.steps = {job.config.train.steps}")
    return {}


def tokens_per_batch(value: int | str, job: Job) -> Mapping[str, Any]:
    if isinstance(value, int) and value < job.max_context:
        raise Refusal(f"a row may have {job.max_context} tokens (agent.max_context), and verl does not divide a row")
    count = max(16384, job.max_context) if value == "auto" else value
    return {
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": count,
        **({"critic.ppo_max_token_len_per_gpu": count} if job.algorithm.needs_critic else {}),
    }


def packing(value: str, job: Job) -> Mapping[str, Any]:
    packs = job.packs if value == "auto" else value == "on"
    models = [MODEL, *(["critic.model"] if job.algorithm.needs_critic else [])]
    options: dict[str, Any] = {f"{model}.use_remove_padding": packs for model in models}
    return options if packs else options | {f"+{model}.override_config.attn_implementation": "sdpa" for model in models}


def checkpointing(value: bool | str, job: Job) -> Mapping[str, Any]:
    models = [MODEL, *(["critic.model"] if job.algorithm.needs_critic else [])]
    return {f"{model}.enable_gradient_checkpointing": bool(value) for model in models}  # "auto": on, verl's own default


def steps(value: int, job: Job) -> Mapping[str, Any]:
    per_epoch = max(1, job.num_train // job.config.rollout.num_tasks)
    return {"trainer.total_training_steps": value, "trainer.total_epochs": value // per_epoch + 1}


def validate_temperature(value: float | None, job: Job) -> Mapping[str, Any]:
    used = job.config.sampling.temperature if value is None else value
    return {f"{ROLLOUT}.val_kwargs.temperature": used, f"{ROLLOUT}.val_kwargs.do_sample": used > 0}


def save_every(value: int, job: Job) -> Mapping[str, Any]:
    return {
        "trainer.save_freq": value or job.config.train.steps,
        "trainer.default_local_dir": str(job.folder / "checkpoints"),
        "trainer.resume_mode": "auto" if job.resumes else "disable",
        f"{ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
    }


def lora(value: int, job: Job) -> Mapping[str, Any]:
    if not value:
        return {}
    settings = job.config.lora
    alpha = whole(settings.alpha, "lora.alpha")
    if job.megatron:
        if settings.targets != ["all"]:
            raise Refusal("Megatron's linear layers have other names: set model.lora.target_modules in verl.overrides")
        return {f"{MODEL}.lora.rank": value, f"{MODEL}.lora.alpha": alpha}
    targets = "all-linear" if "all" in settings.targets else settings.targets
    return {f"{MODEL}.lora_rank": value, f"{MODEL}.lora_alpha": alpha, f"{MODEL}.target_modules": targets}


def trackers(value: list[str], job: Job) -> Mapping[str, Any]:
    for name in value:
        if name not in LOGGERS:
            raise Refusal(f"verl has no tracker {name!r}; it has {', '.join(LOGGERS)}")
    return {"trainer.logger": ["console", *(LOGGERS[name] for name in value)]}


def name(value: str | None, job: Job) -> Mapping[str, Any]:
    return {"trainer.project_name": "agentfly", "trainer.experiment_name": job.folder.name}


def strategy(value: str, job: Job) -> Mapping[str, Any]:
    if job.megatron:
        return {"model_engine": "megatron"}
    return {f"{ACTOR}.strategy": value, **({"critic.strategy": value} if job.algorithm.needs_critic else {})}


def nodes(value: int, job: Job) -> Mapping[str, Any]:
    # verl's 8 storage units take a core each, and wait for ever on a machine with fewer.
    units = STORAGE_UNITS * value
    return {"trainer.nnodes": value, "transfer_queue.backend.SimpleStorage.num_data_storage_units": units}


def offload(value: bool, job: Job) -> Mapping[str, Any]:
    if not value:
        return {}
    parts = ("param_offload", "optimizer_offload")
    owners = [f"{ACTOR}.megatron" if job.megatron else f"{ACTOR}.fsdp_config"]
    if job.algorithm.needs_critic:
        owners.append("critic.megatron" if job.megatron else "critic.fsdp")
    return {f"{owner}.{part}": True for owner in owners for part in parts}


def model(value: str, job: Job) -> Mapping[str, Any]:
    return {f"{MODEL}.path": job.model, **({"critic.model.path": job.model} if job.algorithm.needs_critic else {})}


def context(value: int | None, job: Job) -> Mapping[str, Any]:
    return {
        "data.max_prompt_length": job.max_prompt,
        "data.max_response_length": job.max_response,
        f"{ROLLOUT}.max_model_len": job.max_context,
    }


def data_files(value: str, job: Job) -> Mapping[str, Any]:
    return {
        "data.train_files": str(job.folder / "verl" / "train.parquet"),
        "data.val_files": str(job.folder / "verl" / "validation.parquet"),
        "data.return_raw_chat": True,
        "data.filter_overlong_prompts": False,  # prompts are checked when the files are written
        "data.dataloader_num_workers": 0,  # the rows are small: verl's 8 processes for each file would cost more than they save
        f"{ROLLOUT}.agent.agent_loop_config_path": str(job.folder / "verl" / "loop.yaml"),
        f"{ROLLOUT}.agent.default_agent_loop": "agentfly",
        f"{ROLLOUT}.calculate_log_probs": True,
        "reward.num_workers": 1,  # the agent loop scores its chains itself
        "trainer.rollout_data_dir": str(job.folder / "verl" / "rollouts"),
    }


def backend(value: str, job: Job) -> Mapping[str, Any]:
    return {
        "trainer.use_v1": True,
        # A group without a chain to train on is drawn anew; train.max_failed_share ends a run whose world is broken.
        "trainer.v1.sampler.sync_refill_failed_groups": True,
    }


def address(value: str | None, job: Job) -> Mapping[str, Any]:
    return {} if value is None else {"+ray_kwargs.ray_init.address": value}


OWN_LEARNER = "verl's learner has its own"
PLACES = "verl places its own processes on the cluster"
LIFE = "it belongs to the processes of the local backend; Ray and verl watch theirs"

TABLE: dict[str, KeyRule] = {
    "algorithm": made("algorithm.adv_estimator, actor.policy_loss.loss_mode", algorithm),
    "seed": to("data.seed", f"{ROLLOUT}.seed", f"{ACTOR}.data_loader_seed"),
    "backend": made("trainer.use_v1", backend),
    # ---- agent
    "agent.kind": LOOP,
    "agent.model": made("model.path", model),
    "agent.tools": LOOP,
    "agent.reward": LOOP,
    "agent.env": LOOP,
    "agent.system": LOOP,
    "agent.examples": LOOP,
    "agent.examples_steps": refused("verl's agent loop does not know the step of a chain, so examples stand in every prompt"),
    "agent.max_turns": LOOP,
    "agent.max_context": made("data.max_prompt_length, data.max_response_length, rollout.max_model_len", context),
    "agent.chain_timeout_s": LOOP,
    "agent.on_no_tool_call": LOOP,
    "agent.on_invalid_call": LOOP,
    "agent.on_tool_error": LOOP,
    "agent.success_at": LOOP,
    "agent.engine": made("rollout.max_num_seqs, rollout.dtype, rollout.enforce_eager, ...; the template by the loop", engine),
    "agent.options": LOOP,
    "agent.mcp": LOOP,
    # ---- data
    "data.train": made("data.train_files, data.val_files", data_files),
    "data.validation": BEFORE,
    "data.holdout": BEFORE,
    "data.train_count": BEFORE,
    "data.columns": BEFORE,
    "data.validation_count": BEFORE,
    "data.shuffle": to("data.shuffle"),
    "data.sampler": refused("verl draws the rows itself, in epochs"),
    "data.sources": refused("verl trains on one file: put the rows of all sources into data.train"),
    "warm_start.demos": BEFORE,
    "warm_start.steps": BEFORE,
    "warm_start.lr": BEFORE,
    "warm_start.num_demos": BEFORE,
    "warm_start.count": BEFORE,
    "warm_start.mistakes": BEFORE,
    # ---- resources, sampling, rollout
    "resources.cpu": LOOP,
    "resources.memory_mb": LOOP,
    "resources.pools": LOOP,
    "sampling.temperature": made("rollout.temperature", temperature),
    "sampling.top_p": refused("a truncated distribution cannot be trained"),
    "sampling.top_k": refused("a truncated distribution cannot be trained"),
    "sampling.min_p": refused("a truncated distribution cannot be trained"),
    "sampling.max_tokens": LOOP,
    "sampling.stop": LOOP,
    "sampling.stop_ids": LOOP,
    "sampling.seed": LOOP,
    "rollout.num_tasks": made("data.train_batch_size", num_tasks),
    "rollout.num_chains": to(f"{ROLLOUT}.n"),
    "rollout.max_concurrency": LOOP,
    "rollout.max_lag": made("trainer.v1.trainer_mode, trainer.v1.sampler.max_off_policy_threshold", max_lag),
    "rollout.depth": made("trainer.v1.colocate_async.num_warmup_batches", lambda value, job: {}),
    "rollout.call_bonus": refused("verl's agent loop does not know the step of a chain"),
    "rollout.call_bonus_steps": refused("it belongs to rollout.call_bonus"),
    "rollout.refill": refused("verl's agent loop cannot draw further tasks within a step"),
    "rollout.at_limit": refused("verl does not mask single tokens by their age: it waits for a late group"),
    "rollout.at_update": refused("verl ends the replies in progress and recomputes their cache"),
    "rollout.group_timeout_s": LOOP,
    "rollout.turn_timeout_s": LOOP,
    # ---- loss
    "loss.clip_low": to(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio"),
    "loss.clip_high": to(f"{ACTOR}.clip_ratio_high"),
    "loss.dual_clip": to(f"{ACTOR}.clip_ratio_c", via=lambda value: OFF if value is None else value),
    "loss.aggregation": made("actor.loss_agg_mode", aggregation),
    "loss.sequence_divisor": made("actor.loss_scale_factor", lambda value, job: {}),
    "loss.normalize_std": to("algorithm.norm_adv_by_std_in_grpo"),
    "loss.kl_coef": made("actor.use_kl_loss, algorithm.use_kl_in_reward", kl),
    "loss.kl_in": made("actor.use_kl_loss or algorithm.use_kl_in_reward", lambda value, job: {}),
    "loss.kl_kind": made("actor.kl_loss_type or algorithm.kl_penalty", lambda value, job: {}),
    "loss.kl_target": refused("verl's controller has a horizon, too: set algorithm.kl_ctrl through verl.overrides"),
    **dict.fromkeys(("loss.reference_every", "loss.reference_mix"), refused("verl's reference stays as it is")),
    "loss.reference": refused("verl's reference is the model that the run begins with"),
    "loss.reference_hint": refused("verl's reference reads the policy's rows"),
    "loss.entropy_coef": to(f"{ACTOR}.entropy_coeff"),
    "loss.entropy_target": refused("verl's entropy bonus has a fixed weight: set loss.entropy_coef"),
    "loss.old_logprobs": made("algorithm.rollout_correction.bypass_mode", old_logprobs),
    "loss.correction": made("algorithm.rollout_correction.rollout_is", correction),
    "loss.correction_cap": made("algorithm.rollout_correction.rollout_is_threshold", lambda value, job: {}),
    "loss.truncated": refused("verl trains truncated chains: leave it at train"),
    "loss.turn_credit": refused("verl discounts per token and compares whole chains"),
    "loss.gamma": to("algorithm.gamma"),
    "loss.lam": to("algorithm.lam"),
    "loss.critic": refused("verl's critic is a separate model: leave it at copy"),
    "loss.value_coef": refused("verl's critic is a separate model: set train.critic_lr"),
    "loss.value_clip": made("critic.cliprange_value", critic(value_clip)),
    "loss.options": refused("verl has no algorithm with options"),
    # ---- train
    "train.lr": made(f"{ACTOR}.optim.lr", lambda value, job: {f"{ACTOR}.optim.lr": policy_lr(job)}),
    "train.critic_lr": made(
        "critic.optim.lr",
        critic(lambda value, job: {"critic.optim.lr": job.config.train.critic_lr_of(policy_lr(job))}),
    ),
    "train.critic_epochs": made("critic.ppo_epochs", critic(lambda value, job: {"critic.ppo_epochs": value or CRITIC_EPOCHS})),
    "train.critic_minibatches": made("critic.ppo_mini_batch_size", critic(critic_minibatches)),
    "train.critic_warmup_steps": made("trainer.critic_warmup", critic(critic_warmup)),
    "train.optimizer": refused("verl trains with AdamW here: set actor_rollout_ref.actor.optim through verl.overrides"),
    "train.betas": made("actor.optim.betas", lambda value, job: optimizer("betas", list(value), job)),
    "train.weight_decay": made(
        "actor.optim.weight_decay (there on all weights, norms and biases too)",
        lambda value, job: optimizer("weight_decay", value, job),
    ),
    "train.max_grad_norm": made("actor.optim.clip_grad", grad_norm),
    "train.warmup_steps": made("actor.optim.lr_warmup_steps", lambda value, job: {}),
    "train.schedule": made("actor.optim.lr_scheduler_type", schedule),
    "train.lr_floor": refused("verl's own key is actor.optim.min_lr_ratio: set it through verl.overrides"),
    "train.decay_steps": refused('verl has no such schedule: set train.schedule = "cosine"'),
    "train.total_steps": made("the end of the run", total_steps),
    "train.epochs": to(f"{ACTOR}.ppo_epochs"),
    "train.num_minibatches": made(
        "actor.ppo_mini_batch_size", lambda value, job: minibatches(value, job, ACTOR, "train.num_minibatches")
    ),
    "train.max_tokens_per_batch": made("actor.ppo_max_token_len_per_gpu", tokens_per_batch),
    "train.packing": made("model.use_remove_padding", packing),
    "train.gradient_checkpointing": made("model.enable_gradient_checkpointing", checkpointing),
    "train.logprob_chunk": refused(f"{OWN_LEARNER} (actor.entropy_from_logits_chunk_size, through verl.overrides)"),
    "train.steps": made("trainer.total_training_steps", steps),
    "train.validate_every": made(
        "trainer.test_freq", lambda value, job: {"trainer.test_freq": value or job.config.train.steps}
    ),
    "train.validate_chains": to(f"{ROLLOUT}.val_kwargs.n"),
    "train.validate_temperature": made("rollout.val_kwargs.temperature", validate_temperature),
    "train.validate_at_start": to("trainer.val_before_train"),
    "train.save_every": made("trainer.save_freq", save_every),
    "train.save_every_s": refused("verl counts steps between checkpoints, not seconds: set train.save_every"),
    "train.keep_checkpoints": to("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"),
    "train.keep_best": refused("verl keeps the newest checkpoints: set train.keep_checkpoints"),
    "train.stop_after": refused("verl trains to its last step"),
    "train.restart_from_best": refused("verl trains to its last step"),
    "train.budget": refused("verl trains to its last step"),
    "train.max_logprob_gap": refused("verl reports the gap (training/rollout_probs_diff_mean) and does not stop at it"),
    "train.max_failed_share": LOOP,
    # ---- lora, run, verl
    "lora.rank": made("model.lora_rank", lora),
    "lora.alpha": made("model.lora_alpha", lambda value, job: {}),
    "lora.targets": made("model.target_modules", lambda value, job: {}),
    "run.dir": BEFORE,
    "run.name": made("trainer.experiment_name", name),
    "run.trackers": made("trainer.logger", trackers),
    "run.price": refused("verl's runs record no cost"),
    "run.threads": refused("verl's processes choose theirs (OMP_NUM_THREADS)"),
    "verl.strategy": made("actor.strategy, critic.strategy or model_engine", strategy),
    "verl.engine": to(f"{ROLLOUT}.name"),
    "verl.nodes": made("trainer.nnodes, and two storage units of TransferQueue for each", nodes),
    "verl.gpus_per_node": made("trainer.n_gpus_per_node", lambda value, job: {"trainer.n_gpus_per_node": job.gpus_per_node}),
    "verl.tensor_parallel": to(f"{ROLLOUT}.tensor_model_parallel_size"),
    "verl.memory_fraction": to(f"{ROLLOUT}.gpu_memory_utilization"),
    "verl.workers": to(f"{ROLLOUT}.agent.num_workers"),
    "verl.offload": made("actor.fsdp_config.param_offload, actor.fsdp_config.optimizer_offload", offload),
    "verl.overrides": made("appended as they are", lambda value, job: {}),
    # ---- keys of several processes and machines
    "learner.ranks": made("trainer.n_gpus_per_node x trainer.nnodes", lambda value, job: {}),
    "learner.reduce": refused("verl reduces gradients in float32"),
    "learner.timeout_s": made(
        "actor_rollout_ref.nccl_timeout", lambda value, job: {"actor_rollout_ref.nccl_timeout": int(value)}
    ),
    "sampler.replicas": refused("verl starts as many servers as its GPUs hold: set verl.tensor_parallel"),
    "sampler.place": refused("verl's servers share the learner's GPUs"),
    "sampler.gpus": refused("set verl.tensor_parallel"),
    "sampler.cpus": refused(PLACES),
    "sampler.memory_gib": refused(PLACES),
    "learner.cpus": refused(PLACES),
    "learner.memory_gib": refused(PLACES),
    "fault.restarts": refused(LIFE),
    "cluster.address": made("ray_kwargs.ray_init.address", address),
    "cluster.env_hosts": refused("environments live beside their chains, in verl's agent-loop workers: set verl.workers"),
    "cluster.env_cpus": refused(PLACES),
    "cluster.env_memory_gib": refused(PLACES),
    "cluster.health_s": refused(LIFE),
}
