"""From a recipe to verl's overrides. verl itself is not needed."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly import ConfigError, Task
from agentfly.api import train
from agentfly.cli import main
from agentfly.codec import decode
from agentfly.config import Config, keys
from agentfly.errors import DataError, InvariantError, MissingExtra
from agentfly.learn.algorithms import find_algorithm
from agentfly.runs import RunDirectory
from agentfly.training.stopping import StopSignals
from agentfly.verl import launch
from agentfly.verl.table import TABLE, Job
from agentfly.verl.translate import flatten, hydra_value, loop_settings, make_job, translate, why_one_row
from agentfly.verl.verl_chains import SPLIT, TASK, LoopSettings
from agentfly.verl.worker import share
from agentfly.watch.progress import Progress

BASE = ['backend="verl"', 'agent.model="pocket"', "agent.tools=[add]", "data.train=arithmetic", "data.train_count=64",
        "data.validation_count=4"]  # fmt: skip


def config_of(*overrides: str) -> Config:
    return Config.load(None, [*BASE, *overrides])


@functools.cache
def base_job() -> Job:
    return make_job(config_of("algorithm=rloo"), Path("/runs/r")).job


def overrides_of(*overrides: str) -> dict[str, Any]:
    """The overrides for the rows of BASE, which are rendered once for all tests."""
    config = config_of(*overrides)
    job = dataclasses.replace(
        base_job(), config=config, flat=flatten(config), algorithm=find_algorithm(config.algorithm), model="/models/m"
    )
    return {each.name: each.value for each in translate(job)}


def test_every_config_key_has_a_rule() -> None:
    missing = [key for key, *_ in keys() if key not in TABLE]
    assert not missing, f"verl/table.py does not say what becomes of {missing}"


@pytest.mark.parametrize("key", [key for key, rule in TABLE.items() if rule.kind == "refused"])
def test_a_key_that_verl_cannot_run_is_refused_by_name(key: str) -> None:
    values = {
        "sampling.top_p": ["sampling.top_p=0.9"],
        "sampling.top_k": ["sampling.top_k=5"],
        "sampling.min_p": ["sampling.min_p=0.1"],
        "data.sampler": ["data.sampler=curriculum"],
        "data.sources": ["data.train=", "data.sources.one.train=arithmetic"],
        "agent.examples_steps": ["agent.examples=tools", "agent.examples_steps=5"],
        "rollout.call_bonus": ["rollout.call_bonus=0.1", "rollout.call_bonus_steps=5"],
        "rollout.call_bonus_steps": ["rollout.call_bonus=0.1", "rollout.call_bonus_steps=5"],
        "rollout.refill": ["rollout.refill=2"],
        "rollout.at_limit": ["rollout.max_lag=1", "rollout.at_limit=mask"],
        "rollout.at_update": ["rollout.max_lag=1", "rollout.at_update=keep"],
        "loss.truncated": ["loss.truncated=mask"],
        "loss.turn_credit": ["loss.turn_credit=true"],
        "loss.critic": ["algorithm=ppo", "loss.critic=shared"],
        "loss.value_coef": ["algorithm=ppo", "loss.critic=shared", "loss.value_coef=0.1"],
        "loss.kl_target": ["loss.kl_coef=0.1", "loss.kl_target=0.02"],
        "loss.reference_every": ["loss.kl_coef=0.1", "loss.reference_every=5"],
        "loss.reference_mix": ["loss.kl_coef=0.1", "loss.reference_every=1", "loss.reference_mix=0.1"],
        "loss.reference": ["loss.kl_coef=0.1", "loss.reference=pocket"],
        "loss.reference_hint": ["loss.kl_coef=0.1", "loss.reference_hint={answer}"],
        "loss.options": ["algorithm=gigpo", "loss.options={turn_weight=0.5}"],
        "train.logprob_chunk": ["train.logprob_chunk=64"],
        "train.save_every_s": ["train.save_every_s=5"],
        "loss.entropy_target": ["loss.entropy_target=0.5"],
        "train.lr_floor": ["train.schedule=cosine", "train.lr_floor=0.1"],
        "train.decay_steps": ["train.schedule=wsd", "train.decay_steps=5"],
        "train.optimizer": ["train.optimizer=muon"],
        "train.stop_after": ["train.stop_after=3"],
        "train.restart_from_best": ["train.keep_best=true", "train.stop_after=2", "train.restart_from_best=1"],
        "train.budget": ["train.budget=20min"],
        "run.price": ["run.price=2.5"],
        "train.keep_best": ["train.keep_best=true"],
        "train.max_logprob_gap": ["train.max_logprob_gap=1.0"],
        "run.threads": ["run.threads=1"],
        "learner.reduce": ["learner.reduce=bfloat16"],
        "sampler.replicas": ["sampler.replicas=2"],
        "sampler.place": ["sampler.place=own"],
        "sampler.gpus": ["sampler.gpus=2"],
        "sampler.cpus": ["cluster.address=auto", "sampler.place=process", "sampler.cpus=2"],
        "sampler.memory_gib": ["cluster.address=auto", "sampler.place=process", "sampler.memory_gib=2"],
        "learner.cpus": ["cluster.address=auto", "learner.ranks=2", "learner.cpus=2"],
        "learner.memory_gib": ["cluster.address=auto", "learner.ranks=2", "learner.memory_gib=2"],
        "cluster.env_hosts": ["cluster.address=auto", "cluster.env_hosts=2"],
        "cluster.env_cpus": ["cluster.address=auto", "cluster.env_hosts=2", "cluster.env_cpus=2"],
        "cluster.env_memory_gib": ["cluster.address=auto", "cluster.env_hosts=2", "cluster.env_memory_gib=2"],
        "fault.restarts": ["fault.restarts=1"],
        "cluster.health_s": ["cluster.health_s=3.0"],
    }
    if key not in {name for name, *_ in keys()}:
        pytest.skip(f"this version has no key {key}")
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        overrides_of(*values[key])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["algorithm=gigpo"], "algorithm = gigpo: verl has no such algorithm"),
        (["rollout.num_tasks=65"], "there are 64 training rows"),
        (["rollout.num_tasks=10", "train.num_minibatches=4"], "cannot be divided by train.num_minibatches = 4"),
        (["algorithm=ppo", "rollout.num_tasks=10", "train.critic_minibatches=4"], "train.critic_minibatches = 4"),
        (["train.schedule=linear"], "train.schedule = linear"),
        (["train.schedule=cosine", "train.total_steps=50"], "train.total_steps = 50: verl's schedules end with the run"),
        (["train.max_tokens_per_batch=512"], "train.max_tokens_per_batch = 512: a row may have 1024 tokens"),
        (["agent.engine={kind='vllm', sleep=false}"], "agent.engine = .*no option 'sleep'"),
        (["agent.engine={kind='vllm', memory_fraction=0.4}"], r"set verl\.memory_fraction"),
        (["agent.engine={kind='openai', base_url='http://h:1/v1'}"], "starts its own servers"),
        (["sampling.temperature=0"], "sampling.temperature = 0.0: verl divides logits by it"),
        (["lora.rank=8", "lora.alpha=0.5"], "lora.rank = 8: verl takes a whole number for it"),
        (["lora.rank=8", "warm_start.demos=arithmetic"], "agentfly sft"),
        (["verl.strategy=megatron", "lora.rank=8", "lora.targets=[q_proj]"], "Megatron's linear layers"),
        (["algorithm=dr_grpo", "loss.sequence_divisor=100.5"], "loss.aggregation = .*a whole number"),
        (["rollout.max_lag=1", "loss.correction=off"], "loss.old_logprobs = auto"),
    ],
)  # fmt: skip
def test_a_recipe_that_verl_cannot_run_says_why(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        overrides_of(*overrides)


def test_a_reward_that_compares_the_chains_of_a_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text("def ranks(trajectories): return [0.0 for _ in trajectories]\n")
    with pytest.raises(ConfigError, match="reward 'ranks' compares the chains of a group"):
        make_job(config_of(f"agent.reward={tmp_path}/ranks.py:ranks"), Path("/runs/r"))


def test_a_chat_server_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match=r"trains the weights of agent\.model"):
        make_job(config_of("agent.model=openai:x@http://h:1/v1"), Path("/runs/r"))


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        overrides_of("run.threads=1", "train.schedule=linear", "rollout.num_tasks=65")
    assert all(name in str(caught.value) for name in ("run.threads", "train.schedule", "rollout.num_tasks"))


@pytest.mark.parametrize(
    ("name", "estimator", "loss"),
    [("grpo", "grpo", "vanilla"), ("dr_grpo", "grpo", "vanilla"), ("rloo", "rloo", "vanilla"), ("opo", "opo", "vanilla"),
     ("reinforce++", "reinforce_plus_plus", "vanilla"), ("ppo", "gae", "vanilla"), ("gspo", "grpo", "gspo"),
     ("reinforce++_baseline", "reinforce_plus_plus_baseline", "vanilla"), ("cispo", "grpo", "cispo")],
)  # fmt: skip
def test_every_algorithm_that_verl_has_is_named_in_its_words(name: str, estimator: str, loss: str) -> None:
    found = overrides_of(f"algorithm={name}")
    assert found["algorithm.adv_estimator"] == estimator
    assert found["actor_rollout_ref.actor.policy_loss.loss_mode"] == loss
    assert ("critic.model.path" in found) == (name == "ppo")


def test_the_settings_of_the_loss_arrive() -> None:
    found = overrides_of("algorithm=dr_grpo", "loss.clip_high=0.28", "loss.kl_coef=0.01", "loss.entropy_coef=0.001")
    actor = "actor_rollout_ref.actor."
    assert found[f"{actor}clip_ratio_low"] == 0.2
    assert found[f"{actor}clip_ratio_high"] == 0.28
    assert found[f"{actor}clip_ratio_c"] == 3.0
    assert found[f"{actor}loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert found[f"{actor}loss_scale_factor"] == 512
    assert found["algorithm.norm_adv_by_std_in_grpo"] is False
    assert (found[f"{actor}use_kl_loss"], found[f"{actor}kl_loss_coef"], found[f"{actor}kl_loss_type"]) == (True, 0.01, "k3")
    assert found[f"{actor}entropy_coeff"] == 0.001
    in_reward = overrides_of("algorithm=rloo", "loss.kl_coef=0.01")
    assert in_reward["algorithm.use_kl_in_reward"] is True
    assert (in_reward["algorithm.kl_ctrl.kl_coef"], in_reward["algorithm.kl_penalty"]) == (0.01, "k1")
    assert in_reward[f"{actor}use_kl_loss"] is False


def test_corrections_and_old_log_probs_arrive() -> None:
    base = "algorithm.rollout_correction."
    assert overrides_of()[f"{base}rollout_is"] == "token"
    assert overrides_of("loss.correction=mask", "loss.correction_cap=4.0")[f"{base}rollout_is_threshold"] == "0.25_4.0"
    assert overrides_of("loss.correction=sequence")[f"{base}rollout_is"] == "sequence"
    sampled = overrides_of("loss.old_logprobs=sampled")
    assert (sampled[f"{base}bypass_mode"], sampled[f"{base}rollout_is"]) == (True, None)


def test_staleness_is_bounded_as_max_lag_says() -> None:
    assert overrides_of()["trainer.v1.trainer_mode"] == "sync"
    found = overrides_of("rollout.max_lag=2", "rollout.depth=2")
    assert found["trainer.v1.trainer_mode"] == "colocate_async"
    assert found["trainer.v1.sampler.max_off_policy_threshold"] == 3  # ages 0, 1 and 2
    assert found["trainer.v1.sampler.max_off_policy_strategy"] == "wait"  # never drawn again
    assert found["trainer.v1.colocate_async.num_warmup_batches"] == 2
    config = config_of("rollout.max_lag=2")
    assert not loop_settings(dataclasses.replace(base_job(), config=config), "").seeded


def test_lengths_are_those_of_the_data() -> None:
    prepared = make_job(config_of("algorithm=rloo"), Path("/runs/r"))
    found = {each.name: each.value for each in translate(prepared.job)}
    assert found["data.max_prompt_length"] == prepared.loop.max_prompt < 200
    assert found["actor_rollout_ref.rollout.max_model_len"] == 1024
    assert prepared.loop.max_response + prepared.loop.max_prompt >= 1024
    several = make_job(config_of(), Path("/runs/r"))  # GRPO: rows may begin with rewritten history
    assert several.loop.max_prompt == 1023
    with pytest.raises(DataError, match="its prompt has"):
        make_job(config_of("agent.max_context=20"), Path("/runs/r"))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [([], ""), (["algorithm=cispo"], ""), (["algorithm=rloo"], "rloo"), (["algorithm=ppo"], "ppo"), (["algorithm=opo"], "opo"),
     (["algorithm=dr_grpo"], "seq-mean-token-sum-norm"), (["algorithm=gspo"], "GSPO"),
     (["loss.correction=sequence"], "sequence"), (["loss.kl_coef=0.1", "loss.kl_in=reward"], "KL")],
)  # fmt: skip
def test_rewritten_history_is_allowed_only_where_verl_counts_chains(overrides: list[str], reason: str) -> None:
    config = config_of(*overrides)
    job = dataclasses.replace(base_job(), config=config, algorithm=find_algorithm(config.algorithm))
    found = why_one_row(job)
    assert found == "" if not reason else reason in found


def test_steps_epochs_checkpoints_and_validation_arrive() -> None:
    found = overrides_of("train.steps=30", "rollout.num_tasks=8", "train.validate_every=0", "train.save_every=0")
    assert found["trainer.total_training_steps"] == 30
    assert found["trainer.total_epochs"] * (64 // 8) >= 30  # verl ends at whichever comes first
    assert found["trainer.test_freq"] == found["trainer.save_freq"] == 30  # at the end
    assert found["trainer.default_local_dir"] == "/runs/r/checkpoints"
    assert found["trainer.resume_mode"] == "disable"
    assert "hf_model" in found["actor_rollout_ref.actor.checkpoint.save_contents"]


def test_the_critic_learns_alone_as_long_as_here() -> None:
    found = overrides_of("algorithm=ppo", "train.critic_warmup_steps=4", "rollout.num_tasks=12")
    assert found["trainer.critic_warmup"] == 5  # verl's actor starts at step 5
    assert found["critic.ppo_mini_batch_size"] == 2  # 6 parts: the largest number up to 8 that divides 12 tasks
    assert found["critic.optim.lr"] == 1e-5  # at least; 2.5 times the policy's 1e-6
    assert overrides_of("algorithm=ppo", "train.critic_warmup_steps=0")["trainer.critic_warmup"] == 0
    assert overrides_of("algorithm=ppo", "loss.value_clip=0")["critic.cliprange_value"] == 1e9


def test_a_warm_up_of_the_rate_is_the_policys_alone() -> None:
    found = overrides_of("algorithm=ppo", "train.warmup_steps=3")
    assert found["actor_rollout_ref.actor.optim.lr_warmup_steps"] == 3
    assert found["critic.optim.lr_warmup_steps"] == -1


def test_warm_up_has_no_step_of_rate_zero() -> None:
    found = overrides_of("train.warmup_steps=3")
    optim = "actor_rollout_ref.actor.optim."
    assert (found[f"{optim}lr_scheduler_type"], found[f"{optim}num_cycles"]) == ("cosine", 0.0)
    assert found[f"{optim}zero_indexed_step"] is False
    assert overrides_of()[f"{optim}lr_scheduler_type"] == "constant"


def test_gpus_come_from_verls_keys() -> None:
    found = overrides_of("verl.nodes=2", "verl.gpus_per_node=8", "verl.tensor_parallel=2", "verl.workers=4")
    assert (found["trainer.nnodes"], found["trainer.n_gpus_per_node"]) == (2, 8)
    assert found["transfer_queue.backend.SimpleStorage.num_data_storage_units"] == 4
    assert found["actor_rollout_ref.rollout.tensor_model_parallel_size"] == 2
    assert found["actor_rollout_ref.rollout.agent.num_workers"] == 4
    if "learner.ranks" in {key for key, *_ in keys()}:
        assert overrides_of("learner.ranks=8", "verl.nodes=2")["trainer.n_gpus_per_node"] == 4
        with pytest.raises(ConfigError, match=r"set verl\.gpus_per_node"):
            overrides_of("learner.ranks=3", "verl.nodes=2")


def test_own_overrides_come_last_and_unchanged() -> None:
    config = config_of("algorithm=rloo", 'verl.overrides=["a.b=[1, {c: 2}]", "+d=\'x=y\'"]')
    words = [str(each) for each in translate(dataclasses.replace(base_job(), config=config, flat=flatten(config)))]
    assert words[-2:] == ["a.b=[1, {c: 2}]", "+d='x=y'"]
    with pytest.raises(ConfigError, match=r"verl\.overrides holds key=value"):
        config_of('verl.overrides=["oops"]')


def test_keys_of_verl_are_refused_without_it() -> None:
    with pytest.raises(ConfigError, match=r'verl\.nodes has no effect without backend = "verl"'):
        Config.load(None, ["verl.nodes=2"])
    assert Config.from_dict(json_round(config_of("verl.nodes=2"))) == config_of("verl.nodes=2")


def json_round(config: Config) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(config.to_toml())


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (1e-05, "1e-05"), ("token-mean", "token-mean"), ("/a b/c", "'/a b/c'"), ("", "''"),
     ("0.5_2.0", "'0.5_2.0'"), ("it's", r"'it\'s'"), ("null", "'null'"), (["a", 1], "[a,1]"), ({"a": "b"}, "{a:b}")],
)  # fmt: skip
def test_values_are_written_in_hydras_grammar(value: Any, text: str) -> None:
    assert hydra_value(value) == text


def test_print_config_needs_no_verl_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch.importlib.util, "find_spec", without("verl", "ray", "pyarrow"))
    (tmp_path / "r.toml").write_text(config_of().to_toml())
    assert main(["verl", "print-config", "r.toml", "train.lr=3e-6"]) == 0
    printed = capsys.readouterr().out
    assert "python -m verl.trainer.main_ppo\n" in printed
    assert "actor_rollout_ref.actor.optim.lr=3e-06" in printed
    assert "# train.lr" in printed
    assert "read by the agent loop in verl's workers: agent.kind" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]
    assert main(["train", "r.toml", "--dry-run"]) == 0
    assert "verl.trainer.main_ppo" in capsys.readouterr().out
    assert main(["verl", "print-config", "r.toml", "run.threads=2"]) == 2
    assert 'backend = "verl" cannot run run.threads = 2' in capsys.readouterr().err
    assert main(["verl", "print-config", "r.toml", "algorithm=rloo"]) == 0
    assert "a chain whose template rewrites history stops the run" in capsys.readouterr().out


def without(*names: str) -> Any:
    from importlib.util import find_spec

    return lambda name, *more: None if name.partition(".")[0] in names else find_spec(name, *more)


def test_without_verl_training_names_the_extra_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", without("verl"))
    with pytest.raises(MissingExtra, match=r"agentfly\[verl\]"):
        train(config_of(f"run.dir={tmp_path}"))
    assert not list(tmp_path.iterdir())


def test_another_release_of_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launch.importlib.metadata, "version", lambda name: "0.7.1")
    with pytest.raises(ConfigError, match=r"0\.7\.1 is installed"):
        launch.check_verl(config_of())


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if verl 0.9.1 were installed, on a machine with two GPUs and 16 CPUs."""
    from agentfly.engines.local import load

    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if name == "trl" else object())
    monkeypatch.setattr(launch.importlib.metadata, "version", lambda name: "0.9.1")
    monkeypatch.setattr(load, "count_gpus", lambda: 2)
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 16)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_more_gpus_than_the_machine_has_are_refused_before_the_run(installed: None) -> None:
    launch.check_verl(config_of("verl.gpus_per_node=2"))
    sentence = (
        r"^verl needs 4 GPUs \(trainer\.n_gpus_per_node = 4 x trainer\.nnodes = 1\), and PyTorch sees 2 on this machine: "
    )
    with pytest.raises(ConfigError, match=sentence):
        launch.check_verl(config_of("verl.gpus_per_node=4"))
    with pytest.raises(ConfigError, match=sentence):
        launch.check_verl(config_of('verl.overrides=["trainer.n_gpus_per_node=4"]'))


@pytest.mark.parametrize("place", ["__init__.py", "experimental/ppo/__init__.py"])
def test_a_trl_that_verl_cannot_import_is_refused_before_the_run(
    installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("from .models import GRPOTrainer\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigError, match="^verl imports trl if it is installed, and this release has no .*pip uninstall trl$"):
        launch.check_verl(config_of())
    path.write_text("from .models import AutoModelForCausalLMWithValueHead\n")
    launch.check_verl(config_of())


def test_fewer_cpus_than_verl_reserves_are_refused_before_the_run(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl would wait for ever: 3 CPUs with each GPU, 2 storage units, TransferQueue's controller, and one to start actors."""
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 7)
    launch.check_verl(config_of())
    with pytest.raises(ConfigError, match=r"^verl reserves 10 CPUs in Ray, and this machine has 7: .*num_cpus=10"):
        launch.check_verl(config_of("verl.gpus_per_node=2"))
    launch.check_verl(config_of("verl.gpus_per_node=2", 'verl.overrides=["ray_kwargs.ray_init.num_cpus=10"]'))
    with pytest.raises(ConfigError, match="this machine has 4"):
        launch.check_verl(config_of('verl.overrides=["ray_kwargs.ray_init.num_cpus=4"]'))


def test_more_gpus_than_the_cluster_has_are_refused_before_the_run(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Cluster:
        """Nodes with 0, 4 and 4 GPUs, and a dead one."""

        def nodes(self) -> list[Any]:
            return [
                SimpleNamespace(alive=alive, gpus=gpus) for alive, gpus in ((True, 0.0), (True, 4.0), (True, 4.0), (False, 8.0))
            ]

        @classmethod
        def connect(cls, address: str) -> Cluster:
            asked.append(address)
            return cls()

        def __enter__(self) -> Cluster:
            return self

        def __exit__(self, *_: object) -> None:
            asked.append("closed")

    monkeypatch.setattr(launch, "Cluster", Cluster)
    launch.check_verl(config_of("verl.gpus_per_node=4", "verl.nodes=2"))  # joins what runs on this machine
    launch.check_verl(config_of("verl.gpus_per_node=2", "verl.nodes=4", "cluster.address=head:6379"))
    launch.check_verl(config_of("verl.gpus_per_node=4", 'verl.overrides=["+ray_kwargs.ray_init.address=other:1"]'))
    launch.check_verl(config_of("verl.gpus_per_node=64", 'verl.overrides=["+ray_kwargs.ray_init.address=ray://x:1"]'))
    assert asked == ["auto", "closed", "head:6379", "closed", "other:1", "closed"]
    with pytest.raises(ConfigError, match=r"^verl needs 12 GPUs \(.* = 4 x .* = 3\), and the cluster at auto has 8: "):
        launch.check_verl(config_of("verl.gpus_per_node=4", "verl.nodes=3"))
    with pytest.raises(ConfigError, match=r"^verl needs 6 GPUs .* 6 of them on one node each time, .* room for 0 of 1: "):
        launch.check_verl(config_of("verl.gpus_per_node=6", "cluster.address=head:6379"))
    monkeypatch.setenv("RAY_ADDRESS", "mine:6379")
    with pytest.raises(ConfigError, match="the cluster at mine:6379 has 8"):
        launch.check_verl(config_of("verl.gpus_per_node=9"))


def test_an_agent_object_cannot_be_handed_over() -> None:
    from agentfly import ReactAgent

    agent = ReactAgent("pocket", tools=["add"], reward="exact_match")
    with pytest.raises(ConfigError, match="pass a Config"):
        train(agent, data=[{"question": "1", "answer": "1"}], backend="verl")


def test_the_rows_arrive_as_verls_parquet_with_our_fields(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'agentfly[parquet]'")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"{n}+1?", "answer": str(n + 1), "deep": {"n": [n]}}) + "\n" for n in range(10))
    )
    config = config_of(f"data.train={rows}", "rollout.num_tasks=4", f"run.dir={tmp_path}", "run.name=r")
    directory = RunDirectory.create(tmp_path / "r")
    overrides = launch.write_run(config, directory, Progress(1), resumes=False)
    written = parquet.read_table(tmp_path / "r" / "verl" / "train.parquet").to_pylist()
    assert len(written) == 9  # one tenth is held out
    first = written[0]
    assert first["prompt"][-1]["role"] == "user"
    assert "+1?" in first["prompt"][-1]["content"]
    assert [row["extra_info"]["index"] for row in written] == list(range(9))  # without it, all rows would have index 0
    assert first["agent_name"] == "agentfly"
    task = decode(first[TASK])
    assert isinstance(task, Task)
    assert first["reward_model"]["ground_truth"] == task.fields["answer"]
    assert task.fields["deep"] == {"n": [int(task.fields["answer"]) - 1]}
    held = parquet.read_table(tmp_path / "r" / "verl" / "validation.parquet").to_pylist()
    assert {row[SPLIT] for row in held} == {"validation"}
    text = (tmp_path / "r" / "verl" / "loop.yaml").read_text()
    assert "_target_: agentfly.verl.verl_loop.AgentFlyLoop" in text
    assert str(tmp_path / "r") in text
    loop = json.loads((tmp_path / "r" / "verl" / "loop.json").read_text())
    assert LoopSettings(**loop["loop"]).num_chains == 8
    assert Config.load(tmp_path / "r" / "config.toml") == config
    assert (tmp_path / "r" / "verl" / "overrides.txt").read_text().splitlines() == [str(each) for each in overrides]


def test_a_row_that_cannot_be_encoded_is_named(tmp_path: Path) -> None:
    task = Task("t", (), {"thing": object()}, row=3)
    with pytest.raises(DataError, match="row 3"):
        launch._row("train", 0, task, [])


def test_a_warm_start_runs_first_and_verl_starts_from_its_weights(tmp_path: Path) -> None:
    config = config_of(
        "warm_start.demos=arithmetic", "warm_start.steps=1", "warm_start.num_demos=2", "warm_start.count=4",
        "agent.engine={kind='vllm', eager=true, dtype='float16'}",
    )  # fmt: skip
    directory = RunDirectory.create(tmp_path / "r")
    overrides = launch.write_run(config, directory, Progress(1), resumes=False)
    (path,) = (each.value for each in overrides if each.name == "actor_rollout_ref.model.path")
    assert path == str(tmp_path / "r" / "verl" / "model")
    assert (Path(path) / "model.safetensors").is_file()
    again = launch.write_run(config, directory, Progress(1), resumes=True)  # a resumed run does not train it again
    assert path in [each.value for each in again]
    assert "auto" in [each.value for each in again if each.name == "trainer.resume_mode"]


def test_the_hosts_limits_are_divided_by_the_workers() -> None:
    config = config_of(
        "verl.workers=4", "resources.cpu=8", "resources.memory_mb=4096", "resources.pools={CodeInterpreter={max=10}}"
    )
    part = share(config).resources
    assert (part.cpu, part.memory_mb, part.pools["CodeInterpreter"]["max"]) == (2.0, 1024.0, 2)
    assert share(config_of("resources.cpu=8")).resources.cpu == 8


def run_program(tmp_path: Path, program: str, signals: StopSignals | None = None) -> None:
    (tmp_path / "verl").mkdir(exist_ok=True)
    launch.run_verl([], tmp_path, signals or StopSignals(lambda: ""), command=("-c", program))


def test_a_failure_of_verl_is_a_sentence(tmp_path: Path) -> None:
    run_program(tmp_path, "import os; assert os.environ['VERL_FILE_LOGGER_PATH'].endswith('metrics.jsonl')")
    with pytest.raises(InvariantError, match="exit status 3"):
        run_program(tmp_path, "raise SystemExit(3)")


def test_the_file_of_a_worker_ends_verl_and_all_that_it_started(tmp_path: Path) -> None:
    program = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        f"pathlib.Path({str(tmp_path / 'verl' / 'stopped.txt')!r}).write_text('RewardError: it raised')\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(ConfigError, match="the agent loop stopped the run: RewardError: it raised"):
        run_program(tmp_path, program)
    assert ended(int((tmp_path / "child").read_text()))


def ended(pid: int, within_s: float = 120.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_reaches_verl(tmp_path: Path) -> None:
    program = (
        "import pathlib, time\n"
        "try:\n"
        f"    pathlib.Path({str(tmp_path / 'started')!r}).write_text('')\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        f"    pathlib.Path({str(tmp_path / 'stopped')!r}).write_text('')\n"
    )

    def press() -> None:
        while not (tmp_path / "started").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with StopSignals(lambda: "") as signals, pytest.raises(KeyboardInterrupt):
        run_program(tmp_path, program, signals)
    assert (tmp_path / "stopped").exists()


def test_a_stopped_run_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any) -> None:
        raise SystemExit(143)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "check_verl", lambda config: None)
    monkeypatch.setattr(launch, "run_verl", stopped)
    (tmp_path / "r.toml").write_text(config_of("run.name=r").to_toml())
    assert main(["train", "r.toml"]) == 143
    assert "to continue: agentfly train --resume runs/r" in capsys.readouterr().out
    monkeypatch.setattr(launch, "run_verl", lambda *_: (tmp_path / "runs" / "r" / "checkpoints" / "global_step_3").mkdir())
    assert main(["train", "--resume", "runs/r"]) == 0
    assert "global_step_3/actor/huggingface" in capsys.readouterr().out
    assert "trainer.resume_mode=auto" in (tmp_path / "runs" / "r" / "verl" / "overrides.txt").read_text()
    assert main(["train", "r.toml", "--profile"]) == 2
    assert "timing_s" in capsys.readouterr().err


def test_verls_metrics_are_the_history(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "data": {"val/x": 1}}\n{"step": 1, "data": {"a": 2.0, "text": "b"}}\n')
    assert launch.read_metrics(path) == [{"val/x": 1.0}, {"a": 2.0}]
    assert launch.read_metrics(tmp_path / "none") == []


def test_a_run_of_verl_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "check_verl", lambda config: None)
    (tmp_path / "r" / "checkpoints" / "global_step_2").mkdir(parents=True)
    with pytest.raises(ConfigError, match="resume it"):
        train(config_of(f"run.dir={tmp_path}", "run.name=r"))


def test_translating_loads_nothing_of_verl() -> None:
    code = "import sys, agentfly.verl; print(sorted({'verl', 'ray', 'omegaconf', 'pyarrow', 'torch'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
