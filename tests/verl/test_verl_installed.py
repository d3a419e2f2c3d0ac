"""Against the installed verl (0.9.x): its config, agent-loop worker and advantages, and its default path over TransferQueue.

Skipped without verl. The last test starts Ray, which listens on every interface: it runs only where loopback is the one
interface that is up, as in `unshare -rn sh -c 'ip link set lo up && pytest ...'`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl is not installed: pip install 'agentfly[verl]'")

import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout.replica import TokenOutput

from agentfly.config import Config
from agentfly.learn.algorithms import Chains, find_algorithm
from agentfly.learn.algorithms.interface import Tokens
from agentfly.learn.algorithms.losses import cispo, clipped_surrogate, correction_weights, gspo, kl_divergence
from agentfly.runs import RunDirectory
from agentfly.verl import launch
from agentfly.verl.table import ESTIMATORS
from agentfly.verl.verl_loop import AgentFlyLoop, TrainingRow
from agentfly.watch.progress import Progress

from .test_verl_translate import config_of

WORLD = Path(__file__).with_name("verl_world.py")
RECIPE = [
    f"agent.kind={WORLD}:WordAgent", f"agent.tools=[{WORLD}:look, {WORLD}:dig]", f"agent.reward={WORLD}:number",
    "agent.max_turns=3", "rollout.num_tasks=2", "rollout.num_chains=4", "sampling.max_tokens=24",
]  # fmt: skip


def composed(overrides: list[str]) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def written(folder: Path, *overrides: str) -> tuple[DictConfig, Config]:
    """Write a run and compose verl's config from its overrides, as verl's main program does."""
    config = config_of(*RECIPE, *overrides)
    directory = RunDirectory.create(folder)
    made = launch.write_run(config, directory, Progress(1), resumes=False)
    return composed([str(each) for each in made]), config


# ---- its config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ESTIMATORS)
def test_verl_accepts_the_overrides_of_every_algorithm(algorithm: str, tmp_path: Path) -> None:
    found, _ = written(tmp_path / "r", f"algorithm={algorithm}", "loss.kl_coef=0.01")
    OmegaConf.to_container(found, resolve=True)
    validate_config(found, need_reference_policy(found), need_critic(found))
    assert need_critic(found) == (algorithm == "ppo")
    assert need_reference_policy(found)
    actor = omega_conf_to_dataclass(found.actor_rollout_ref.actor)
    assert actor.strategy == actor.engine.strategy == "fsdp2"


@pytest.mark.parametrize(
    "overrides",
    [
        ["verl.strategy=megatron", "train.schedule=linear", "train.warmup_steps=2"],
        ["verl.strategy=megatron", "algorithm=ppo", "verl.offload=true", "lora.rank=8"],
        ["rollout.max_lag=2", "rollout.depth=2", "loss.correction=mask"],
        ["lora.rank=8", "lora.targets=[q_proj, v_proj]", "train.schedule=cosine", "train.packing=on"],
        ["algorithm=ppo", "train.packing=off", "train.gradient_checkpointing=true", "verl.offload=true"],
        [
            "verl.engine=sglang",
            "agent.engine={kind='vllm', max_batch=64, eager=true, dtype='float16'}",
            "loss.old_logprobs=sampled",
        ],
        ["train.warmup_steps=3", "train.betas=[0.9, 0.95]", "train.weight_decay=0.01", "run.trackers=[jsonl, wandb]"],
    ],
)
def test_verl_knows_every_key_that_is_set(overrides: list[str], tmp_path: Path) -> None:
    found, _ = written(tmp_path / "r", *overrides)  # hydra refuses a key that the config does not have
    OmegaConf.to_container(found, resolve=True)
    omega_conf_to_dataclass(found.actor_rollout_ref.actor)
    assert found.trainer.use_v1


def test_warm_up_follows_our_schedule(tmp_path: Path) -> None:
    from verl.utils.torch_functional import get_cosine_schedule_with_warmup

    found, config = written(tmp_path / "r", "train.warmup_steps=3", "train.steps=8")
    optim = found.actor_rollout_ref.actor.optim
    weights = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weights], lr=1.0)
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=optim.lr_warmup_steps, num_training_steps=8, min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles, zero_indexed_step=optim.zero_indexed_step,
    )  # fmt: skip
    rates = []
    for _ in range(8):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([config.train.lr_factor(step) for step in range(8)])


# ---- its agent-loop worker -----------------------------------------------------------------------------------------------


class FakeServers:
    """verl's client of its servers: the chain of a task answers its number after one look."""

    def __init__(self, tokenizer: Any, lost: frozenset[int] = frozenset()) -> None:
        self._tokenizer, self._lost = tokenizer, lost
        self._turns: dict[str, int] = {}
        self._order: list[str] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        assert isinstance(prompt_ids[0], int)
        turn = self._turns.get(request_id, 0)
        self._turns[request_id] = turn + 1
        if request_id not in self._order:
            self._order.append(request_id)
        chain = int(request_id[-1]) if "-" in request_id else self._order.index(request_id) % 4
        if chain in self._lost:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={})
        text = "look" if turn == 0 else str(chain)
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        return TokenOutput(
            token_ids=ids, log_probs=[-0.25] * len(ids), stop_reason="completed", extra_fields={"global_steps": 0}
        )


def batch_of(found: DictConfig, tokenizer: Any, *, repeat: int) -> DataProto:
    dataset = RLHFDataset(data_files=found.data.train_files, tokenizer=tokenizer, config=found.data)
    rows = collate_fn([dataset[0], dataset[1]])
    batch = DataProto.from_single_dict(rows)
    batch.non_tensor_batch["uid"] = np.array(["a", "b"], dtype=object)
    batch = batch.repeat(repeat, interleave=True)
    batch.meta_info = {"global_steps": 1, "validate": False}
    return batch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("cache")
def test_a_worker_of_verl_plays_our_chains_and_makes_its_batch(tmp_path: Path) -> None:
    found, _ = written(tmp_path / "r")
    client = FakeServers(None)
    worker = AgentLoopWorker(found, client)
    client._tokenizer = worker.tokenizer
    batch = batch_of(found, worker.tokenizer, repeat=4)
    made = asyncio.run(worker.generate_sequences(batch))
    tensors = made.batch
    assert set(tensors.keys()) >= {"prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "attention_mask"}
    assert len(made) == 8
    assert sorted(tensors["rm_scores"].sum(dim=-1).tolist()) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    mask = tensors["response_mask"].bool()
    assert (tensors["rollout_log_probs"][mask] == -0.25).all()
    assert (tensors["rollout_log_probs"][~mask] == 0).all()
    lengths = tensors["attention_mask"][:, tensors["prompts"].shape[1] :].sum(dim=-1)
    last = lengths - 1
    rows = torch.arange(8)
    assert mask[rows, last].all()  # each row ends with a sampled token
    assert (tensors["rm_scores"] != 0)[rows, last].sum() == 6
    text = worker.tokenizer.decode(tensors["responses"][0][: lengths[0]])
    assert text.startswith("look")
    assert "nothing here" in text
    assert list(made.non_tensor_batch["min_global_steps"]) == [0] * 8
    assert made.non_tensor_batch["acc"].dtype == float
    assert list(made.non_tensor_batch["uid"]) == ["a"] * 4 + ["b"] * 4


def test_token_rewards_reach_the_field_that_verl_reads() -> None:
    row = TrainingRow(
        prompt_ids=[1], response_ids=[2, 3, 4], response_mask=[1, 0, 1], response_logprobs=[-1.0, 0.0, -1.0], reward_score=2.5,
        num_turns=3, metrics={}, extra_fields={"reward_extra_info": {}}, token_rewards=[0.5, 0.0, 2.0],
    )  # fmt: skip
    assert isinstance(row, AgentLoopOutput)
    fields = row.as_dict()
    assert fields["rm_scores"].tolist() == [0.5, 0.0, 2.0]
    assert fields["rm_scores"].dtype == torch.float32
    assert "token_rewards" not in fields
    assert fields["response_mask"].tolist() == [1, 0, 1]


def test_the_loop_is_made_by_verl_from_our_file(tmp_path: Path) -> None:
    found, _ = written(tmp_path / "r")
    (entry,) = OmegaConf.load(found.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    assert entry.name == found.actor_rollout_ref.rollout.agent.default_agent_loop
    assert entry._target_ == f"{AgentFlyLoop.__module__}.{AgentFlyLoop.__qualname__}"


# ---- its advantages ------------------------------------------------------------------------------------------------------

GROUPS = [0, 0, 0, 1, 1, 2]
ROWS = [  # per chain: mask of the response, and rewards on the sampled tokens
    ([1, 1, 0, 0, 1], [0.0, 0.5, 1.0]),
    ([1, 0, 1], [0.0, 0.25]),
    ([1, 1, 1, 1], [0.0, 0.0, 0.0, 2.0]),
    ([1, 0, 0, 1, 1], [0.5, 0.0, -1.0]),
    ([1, 1], [0.0, 3.0]),
    ([1, 1, 0, 1], [0.0, 0.0, 1.5]),
]


def both_sides() -> tuple[DataProto, Chains, list[str]]:
    """The same chains for verl and for us. Group 2 has one chain: the agent loop never hands over such a group to GRPO."""
    width = max(len(mask) for mask, _ in ROWS)
    masks, scores = torch.zeros(len(ROWS), width), torch.zeros(len(ROWS), width)
    values = torch.zeros(len(ROWS), width)
    kept = np.random.default_rng(0)
    ours = []
    for number, (mask, rewards) in enumerate(ROWS):
        places = [place for place, flag in enumerate(mask) if flag]
        masks[number, : len(mask)] = torch.tensor(mask, dtype=torch.float32)
        scores[number, places] = torch.tensor(rewards)
        own = kept.normal(size=len(places))
        values[number, places] = torch.tensor(own, dtype=torch.float32)
        ours.append(own)
    data = DataProto(
        batch=TensorDict(
            {"token_level_rewards": scores, "response_mask": masks, "values": values, "rm_scores": scores}, batch_size=len(ROWS)
        ),
        non_tensor_batch={"uid": np.array([f"g{group}" for group in GROUPS], dtype=object)},
    )
    chains = Chains(GROUPS, [np.array(rewards) for _, rewards in ROWS], ours)
    return data, chains, [f"g{group}_{number}_0" for number, group in enumerate(GROUPS)]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "reinforce++", "reinforce++_baseline", "ppo"])
def test_both_sides_give_the_same_advantages(name: str) -> None:
    algorithm = find_algorithm(name)
    data, chains, keys = both_sides()
    single = [5] if algorithm.needs_group else []
    kept = [number for number in range(len(ROWS)) if number not in single]
    data = data.select_idxs(kept)
    chains = Chains([GROUPS[n] for n in kept], [chains.rewards[n] for n in kept], [(chains.values or [])[n] for n in kept])
    settings = algorithm.settings({"gamma": 0.9} if "gamma" in algorithm.reads else {})
    credit = algorithm.give_credit(chains, settings)
    made = compute_advantage_for_multi_trajectories(
        data, [keys[n] for n in kept], ESTIMATORS[name][0], gamma=settings.gamma, lam=settings.lam,
        norm_adv_by_std_in_grpo=settings.normalize_std, config=AlgoConfig(gamma=settings.gamma, lam=settings.lam),
    )  # fmt: skip
    for number, ours in enumerate(credit.advantages):
        theirs = made.batch["advantages"][number][made.batch["response_mask"][number].bool()]
        assert theirs.tolist() == pytest.approx(ours.tolist(), abs=2e-5), f"chain {number}"


def test_a_reward_behind_observed_tokens_would_be_lost() -> None:
    """The trap that rows which end with a sampled token avoid. If this fails, verl has changed."""
    scores, mask = torch.zeros(2, 4), torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0]])
    scores[0, 3] = 1.0  # on an observed token
    config = AlgoConfig(gamma=1.0)
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(scores, mask, config=config)
    assert not returns.any()
    scores[0] = torch.tensor([0.0, 1, 0, 0])
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(scores, mask, config=config)
    assert returns[0, :2].tolist() == [1.0, 1.0]


def test_verl_counts_rows_for_rloo_and_chains_for_grpo() -> None:
    """Why rewritten history is refused but for GRPO. If this fails, verl has changed, and the table can be relaxed."""
    rewards = [0.0, 1.0, 2.0, 3.0]
    scores = torch.tensor([[0.0, value] for value in rewards for _ in range(2)])
    data = DataProto(
        batch=TensorDict({"token_level_rewards": scores, "response_mask": torch.ones(8, 2)}, batch_size=8),
        non_tensor_batch={"uid": np.array(["g"] * 8, dtype=object)},
    )
    keys = [f"g_{chain}_{row}" for chain in range(4) for row in range(2)]
    options = {"gamma": 1.0, "lam": 1.0, "config": AlgoConfig()}
    rloo = compute_advantage_for_multi_trajectories(data, keys, "rloo", **options).batch["advantages"][:, 0]
    assert rloo[0] == pytest.approx(-12 / 7)  # -2 if chains were counted
    grpo = compute_advantage_for_multi_trajectories(data, keys, "grpo", norm_adv_by_std_in_grpo=False, **options)
    assert grpo.batch["advantages"][:, 0].tolist() == pytest.approx([-1.5, -1.5, -0.5, -0.5, 0.5, 0.5, 1.5, 1.5])


def test_one_chain_alone_would_be_trained_on_its_raw_reward() -> None:
    """Why the agent loop hands over no group of one chain. If this fails, verl has changed."""
    found, _ = core_algos.compute_grpo_outcome_advantage(torch.tensor([[5.0]]), torch.ones(1, 1), np.array(["g"]))
    assert found.item() == pytest.approx(5.0, rel=1e-4)


# ---- its losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_both_sides_give_the_same_policy_loss(name: str, tmp_path: Path) -> None:
    found, config = written(tmp_path / "r", f"algorithm={name}", "loss.correction=off")
    actor = omega_conf_to_dataclass(found.actor_rollout_ref.actor)
    torch.manual_seed(0)
    old, advantages = -torch.rand(3, 4), torch.randn(3, 1).expand(3, 4)
    new = (old + 0.4 * torch.randn(3, 4)).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    theirs, _ = core_algos.get_policy_loss_fn(ESTIMATORS[name][1])(
        old_log_prob=old, log_prob=new, advantages=advantages, response_mask=mask, loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )  # fmt: skip
    chains = torch.arange(3)[:, None].expand(3, 4)[mask]
    tokens = Tokens(
        logprobs=new[mask], old_logprobs=old[mask], advantages=advantages[mask], chains=chains, turns=chains, groups=chains,
        weights=torch.ones(len(chains)), reference_logprobs=None,
    )  # fmt: skip
    limits = {"clip_low": config.loss.clip_low, "clip_high": config.loss.clip_high}
    if name == "grpo":
        losses = clipped_surrogate(new[mask], old[mask], advantages[mask], dual_clip=None, **limits)[0]
    else:
        losses = {"gspo": gspo, "cispo": cispo}[name](tokens, **limits).loss
    weight = 1 / len(chains) if config.loss.aggregation == "token_mean" else 1 / (3 * mask.sum(dim=1)[chains])
    ours = (losses * weight).sum()
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-5)
    (theirs_gradient,) = torch.autograd.grad(theirs, new, retain_graph=True)
    (ours_gradient,) = torch.autograd.grad(ours, new)
    assert torch.allclose(theirs_gradient, ours_gradient, atol=1e-6)


@pytest.mark.parametrize("kind", ["truncate", "mask", "sequence"])
def test_both_sides_give_the_same_importance_weights(kind: Any, tmp_path: Path) -> None:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    found, config = written(tmp_path / "r", f"loss.correction={kind}", "loss.correction_cap=1.5")
    settings = found.algorithm.rollout_correction
    torch.manual_seed(1)
    gaps, mask = 0.6 * torch.randn(4, 5), torch.ones(4, 5)
    theirs, _ = compute_rollout_correction_weights(
        gaps, mask, rollout_is=settings.rollout_is, rollout_is_threshold=settings.rollout_is_threshold
    )
    wanted = gaps.sum(dim=1, keepdim=True) if kind == "sequence" else gaps
    ours, _ = correction_weights(wanted, kind, config.loss.correction_cap)
    assert torch.allclose(theirs, ours.expand(4, 5), atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_both_sides_give_the_same_kl(kind: Any) -> None:
    ours, reference = -torch.rand(6), -torch.rand(6)
    assert torch.allclose(core_algos.kl_penalty(ours, reference, kind), kl_divergence(ours, reference, kind), atol=1e-6)


# ---- its default path over TransferQueue, on a local Ray -----------------------------------------------------------------


def alone() -> bool:
    """Whether loopback is the one interface of this machine, so that nothing can reach Ray's open ports."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


@pytest.fixture
def local_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("TRANSFER_QUEUE_ENABLE", "1")
    ray.init(num_cpus=8, object_store_memory=200 * 2**20, include_dashboard=False, _temp_dir=f"/tmp/r{tmp_path.name[-8:]}")
    yield ray
    ray.shutdown()


@pytest.mark.skipif(not alone(), reason="Ray listens on every interface: run it in a network namespace with loopback alone")
@pytest.mark.usefixtures("cache")
def test_the_default_trainer_reads_our_rows_from_transfer_queue(tmp_path: Path, local_ray: Any) -> None:
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.utils import tensordict_utils as tu

    found, _ = written(tmp_path / "r")
    found.transfer_queue.enable = True
    found.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
    tq.init(found.transfer_queue)
    try:
        tokenizer = omega_conf_to_dataclass(found.actor_rollout_ref.model).tokenizer
        manager = AgentLoopManagerTQ.create(config=found, llm_client=FakeServers(tokenizer, lost=frozenset({1})))
        dataset = RLHFDataset(data_files=found.data.train_files, tokenizer=tokenizer, config=found.data)
        rows = collate_fn([dataset[0], dataset[1]])
        rows["uid"] = np.array(["a", "b"], dtype=object)
        batch = tu.get_tensordict(rows)
        tu.assign_non_tensor_data(batch, "global_steps", 1)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in range(2)]
        tq.kv_batch_put(keys=["a", "b"], partition_id="train", tags=tags)
        manager.generate_sequences(batch)
        buffer = ReplayBuffer(
            "sync", OmegaConf.create({}), 8, "drop", OmegaConf.create({}), poll_interval=0.2, refill_fn=lambda count: None,
            train_batch_size=2, gen_batch_size=1, sync_refill_failed_groups=True,
        )  # fmt: skip
        taken, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
        assert sorted(taken.keys) == [f"{uid}_{chain}_0" for uid in "ab" for chain in (0, 2, 3)]  # chain 1 left no row
        fields = ["uid", "rm_scores", "response_mask", "rollout_log_probs", "num_turns", "extra_fields"]
        data = tq.kv_batch_get(keys=taken.keys, partition_id="train", select_fields=fields)
        order = [key.split("_") for key in taken.keys]
        totals = [scores.sum().item() for scores in data["rm_scores"].unbind()]
        assert totals == [float(chain) for _, chain, _ in order]
        assert all(mask[-1] == 1 for mask in data["response_mask"].unbind())
        extra = SimpleNamespace(**next(iter(data["extra_fields"])))
        assert extra.agentfly_outcome == "finished"
        assert set(extra.reward_extra_info) == {"acc", "sampled_tokens", "tool_calls", "invalid_calls"}
        assert all(tag["min_global_steps"] == tag["max_global_steps"] == 0 for tag in taken.tags)
        padded = DataProto(batch=data.select("rm_scores", "response_mask").to_padded_tensor())
        padded.batch["token_level_rewards"] = padded.batch["rm_scores"]
        padded.non_tensor_batch["uid"] = np.array([uid for uid, _, _ in order], dtype=object)
        made = compute_advantage_for_multi_trajectories(
            padded, taken.keys, found.algorithm.adv_estimator, norm_adv_by_std_in_grpo=False, config=AlgoConfig()
        )
        mean = (0 + 2 + 3) / 3
        assert made.batch["advantages"][:, 0].tolist() == pytest.approx([value - mean for value in totals], abs=1e-5)
    finally:
        tq.close()
