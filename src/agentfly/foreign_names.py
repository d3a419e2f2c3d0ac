"""Names that other libraries use for settings of this one: one table, read where an unknown name is refused.

    ForeignName("TRL", "num_generations", "rollout.num_chains")

`ours` is a config key, or an argument of a call where no key exists. Configs ask `config_hint`, agents ask `agent_hint`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class ForeignName:
    """One row: `name` in `library` is `ours` here. `note` says how the two differ."""

    library: str
    name: str
    ours: str
    note: str = ""


_TASKS = "a step plays num_tasks x num_chains chains; train.max_tokens_per_batch bounds the memory of a pass"
_MINI = "a count of optimizer steps per pass, not a size"
_EPSILON = "clip_low and clip_high are set separately"
_EPOCHS = "a run has a number of steps; train.epochs are passes over the chains of one step"

FOREIGN_NAMES = tuple(
    ForeignName(*row)
    for row in (
        ("AgentFly-verl", "model_name_or_path", "agent.model"),
        ("AgentFly-verl", "reward_fn", "agent.reward"),
        ("AgentFly-verl", "reward_name", "agent.reward"),
        ("AgentFly-verl", "template", "agent.engine.chat_template", "the model's own template is used unless this is set"),
        ("AgentFly-verl", "backend", "agent.engine", 'a name such as "vllm", or a table: kind and its options'),
        ("AgentFly-verl", "backend_config", "agent.engine", "a table: kind and its options"),
        ("AgentFly-verl", "system_prompt", "agent.system"),
        ("AgentFly-verl", "max_model_len", "agent.max_context"),
        ("AgentFly-verl", "generation_config", "sampling"),
        ("AgentFly-verl", "tool_parser", "agent.options.parser", "ToolAgent(parser=...)"),
        ("AgentFly-verl", "start_messages", "tasks", "the first argument of agent.run: rows with question or messages"),
        ("AgentFly-verl", "messages", "tasks", "the first argument of agent.run: rows with question or messages"),
        ("transformers", "max_new_tokens", "sampling.max_tokens"),
        ("transformers", "learning_rate", "train.lr"),
        ("transformers", "max_steps", "train.steps"),
        ("transformers", "num_train_epochs", "train.steps", _EPOCHS),
        ("transformers", "per_device_train_batch_size", "rollout.num_tasks", _TASKS),
        ("transformers", "gradient_accumulation_steps", "train.max_tokens_per_batch", "accumulation follows from it"),
        ("transformers", "lr_scheduler_type", "train.schedule"),
        ("transformers", "adam_beta1", "train.betas"),
        ("transformers", "adam_beta2", "train.betas"),
        ("transformers", "output_dir", "run.dir"),
        ("transformers", "run_name", "run.name"),
        ("transformers", "report_to", "run.trackers"),
        ("transformers", "save_steps", "train.save_every"),
        ("transformers", "save_total_limit", "train.keep_checkpoints"),
        ("transformers", "eval_steps", "train.validate_every"),
        ("transformers", "train_dataset", "data.train", "the argument data of train"),
        ("transformers", "eval_dataset", "data.validation", "the argument validation of train"),
        ("PEFT", "r", "lora.rank"),
        ("PEFT", "lora_alpha", "lora.alpha"),
        ("PEFT", "target_modules", "lora.targets"),
        ("TRL", "num_generations", "rollout.num_chains"),
        ("TRL", "max_completion_length", "sampling.max_tokens", "limits one reply; agent.max_context limits a chain"),
        ("TRL", "max_prompt_length", "agent.max_context", "prompt and replies together; a prompt is never cut"),
        ("TRL", "beta", "loss.kl_coef"),
        ("TRL", "epsilon", "loss.clip_low", _EPSILON),
        ("TRL", "epsilon_high", "loss.clip_high"),
        ("TRL", "delta", "loss.dual_clip"),
        ("TRL", "num_iterations", "train.epochs"),
        ("TRL", "loss_type", "algorithm", "loss.aggregation sets how token losses are averaged"),
        ("TRL", "scale_rewards", "loss.normalize_std"),
        ("TRL", "reward_funcs", "agent.reward"),
        ("TRL", "use_vllm", "agent.engine", 'engine="vllm"'),
        ("verl", "actor_rollout_ref.model.path", "agent.model"),
        ("verl", "actor_rollout_ref.rollout.n", "rollout.num_chains"),
        ("verl", "actor_rollout_ref.rollout.name", "agent.engine"),
        ("verl", "actor_rollout_ref.rollout.temperature", "sampling.temperature"),
        ("verl", "actor_rollout_ref.rollout.top_p", "sampling.top_p"),
        ("verl", "actor_rollout_ref.rollout.response_length", "sampling.max_tokens"),
        ("verl", "actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "agent.max_turns"),
        ("verl", "actor_rollout_ref.actor.optim.lr", "train.lr"),
        ("verl", "actor_rollout_ref.actor.optim.lr_warmup_steps", "train.warmup_steps"),
        ("verl", "actor_rollout_ref.actor.optim.weight_decay", "train.weight_decay"),
        ("verl", "actor_rollout_ref.actor.grad_clip", "train.max_grad_norm"),
        ("verl", "actor_rollout_ref.actor.ppo_mini_batch_size", "train.num_minibatches", _MINI),
        ("verl", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "train.max_tokens_per_batch", "in tokens"),
        ("verl", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "train.max_tokens_per_batch"),
        ("verl", "actor_rollout_ref.actor.ppo_epochs", "train.epochs"),
        ("verl", "actor_rollout_ref.actor.clip_ratio", "loss.clip_low", _EPSILON),
        ("verl", "actor_rollout_ref.actor.clip_ratio_low", "loss.clip_low"),
        ("verl", "actor_rollout_ref.actor.clip_ratio_high", "loss.clip_high"),
        ("verl", "actor_rollout_ref.actor.clip_ratio_c", "loss.dual_clip"),
        ("verl", "actor_rollout_ref.actor.entropy_coeff", "loss.entropy_coef"),
        ("verl", "actor_rollout_ref.actor.use_kl_loss", "loss.kl_in", 'kl_in = "loss" with kl_coef above 0'),
        ("verl", "actor_rollout_ref.actor.kl_loss_coef", "loss.kl_coef"),
        ("verl", "actor_rollout_ref.actor.kl_loss_type", "loss.kl_kind"),
        ("verl", "actor_rollout_ref.actor.loss_agg_mode", "loss.aggregation"),
        ("verl", "algorithm.adv_estimator", "algorithm"),
        ("verl", "algorithm.gamma", "loss.gamma"),
        ("verl", "algorithm.lam", "loss.lam"),
        ("verl", "algorithm.norm_adv_by_std_in_grpo", "loss.normalize_std"),
        ("verl", "algorithm.use_kl_in_reward", "loss.kl_in", 'kl_in = "reward" with kl_coef above 0'),
        ("verl", "algorithm.kl_ctrl.kl_coef", "loss.kl_coef"),
        ("verl", "critic.optim.lr", "train.critic_lr"),
        ("verl", "critic.cliprange_value", "loss.value_clip"),
        ("verl", "data.train_files", "data.train"),
        ("verl", "data.val_files", "data.validation"),
        ("verl", "data.train_batch_size", "rollout.num_tasks", _TASKS),
        ("verl", "data.max_prompt_length", "agent.max_context", "prompt and replies together; a prompt is never cut"),
        ("verl", "data.max_response_length", "sampling.max_tokens", "limits one reply; agent.max_context limits a chain"),
        ("verl", "trainer.total_training_steps", "train.steps"),
        ("verl", "trainer.total_epochs", "train.steps", _EPOCHS),
        ("verl", "trainer.test_freq", "train.validate_every"),
        ("verl", "trainer.save_freq", "train.save_every"),
        ("verl", "trainer.logger", "run.trackers"),
        ("verl", "trainer.experiment_name", "run.name"),
        ("verl", "trainer.default_local_dir", "run.dir"),
        ("verl", "reward_model", "agent.reward"),
        ("OpenRLHF", "n_samples_per_prompt", "rollout.num_chains"),
        ("OpenRLHF", "rollout_batch_size", "rollout.num_tasks", _TASKS),
        ("OpenRLHF", "generate_max_len", "sampling.max_tokens"),
        ("OpenRLHF", "actor_learning_rate", "train.lr"),
        ("OpenRLHF", "critic_learning_rate", "train.critic_lr"),
        ("OpenRLHF", "advantage_estimator", "algorithm"),
        ("OpenRLHF", "init_kl_coef", "loss.kl_coef"),
        ("OpenRLHF", "eps_clip", "loss.clip_low", _EPSILON),
        ("OpenRLHF", "eps_clip_low_high", "loss.clip_low", _EPSILON),
        ("OpenRLHF", "pretrain", "agent.model"),
        ("OpenRLHF", "prompt_data", "data.train"),
        ("verifiers", "rubric", "agent.reward"),
        ("verifiers", "rollouts_per_example", "rollout.num_chains"),
        ("verifiers", "num_examples", "data.train_count"),
        ("verifiers", "max_concurrent", "rollout.max_concurrency"),
    )
)

_BY_NAME = {row.name: row for row in reversed(FOREIGN_NAMES)}


def find_foreign(name: str, *, exact: bool = False) -> ForeignName | None:
    """Find a row by its whole name or, unless `exact`, by its last part: `loss.beta` finds `beta`."""
    last = name.rpartition(".")[2]
    if exact or name in _BY_NAME:
        return _BY_NAME.get(name)
    return _BY_NAME.get(last) or next((row for row in FOREIGN_NAMES if row.name.rpartition(".")[2] == last), None)


def config_hint(name: str, *, exact: bool = False) -> str | None:
    """Returns a sentence with the config key that another library calls `name`, or None if no row has it."""
    row = find_foreign(name, exact=exact)
    if row is None or row.ours == name:
        return None
    return f"{row.name!r} of {row.library} is {row.ours!r} here{_note(row)}"


def agent_hint(name: str) -> str | None:
    """Returns a sentence with the agent's argument for what another library calls `name`, or None if no row has it."""
    row = find_foreign(name)
    if row is None:
        return None
    section, _, rest = row.ours.partition(".")
    if section in ("agent", "sampling"):
        first, _, inner = rest.partition(".") if section == "agent" else (section, "", rest)
        if first == "options":
            first, inner = inner, ""
        ours = f"{first}={{{inner!r}: ...}}" if inner else f"{first}=..."
    elif section == "tasks":
        ours = "tasks"
    elif section == "data":
        ours = f"agentfly.train(agent, {'validation' if rest == 'validation' else 'data'}=...)"
    else:
        ours = f"agentfly.train(agent, ..., {rest or section}=...)"
    return f"{row.name!r} of {row.library} is {ours} here{_note(row)}"


class UnknownArgument(ConfigError, TypeError):
    """An argument that a call does not have. Also a TypeError, as Python raises for such a call."""


def unknown_argument(owner: str, name: str, known: Iterable[str]) -> UnknownArgument:
    """Returns the error for an argument that `owner` does not have, with the right name if the table or a near name has it."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = agent_hint(name) or (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}")
    return UnknownArgument(f"{owner} has no argument {name!r}; {hint}")


def _note(row: ForeignName) -> str:
    return f" ({row.note})" if row.note else ""
