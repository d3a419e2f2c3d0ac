"""The cases that one process and several ranks must compute alike, and what a rank process does with them.

Run as `python -m tests.scale.rank_cases FOLDER RANK PORT`: one of four ranks, which runs every case with 2 and with 4 ranks and
leaves what rank 0 found in FOLDER.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from agentfly.learn.algorithms import ALGORITHMS
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.lora import adapt
from agentfly.learn.settings import LoraSettings, OptimSettings
from tests.learn.chains import tiny_llama
from tests.learn.test_learner import VOCABULARY, make_chain, make_groups

SIZES = (2, 4)
RAGGED = ((1, 0, 0.5, 2), (0, 0), (2, -1, 0), (0.5, 1, 0))
ONE_CHAIN = ((1.0,),)


def case(algorithm: str, rewards: Any = RAGGED, lora: int = 0, updates: int = 2, window: Any = None, **settings: Any) -> dict[str, Any]:
    return {"algorithm": algorithm, "rewards": rewards, "lora": lora, "updates": updates, "window": window, **settings}


CASES: dict[str, dict[str, Any]] = {
    "grpo": case("grpo"),
    "grpo in micro batches": case("grpo", optim={"max_tokens_per_batch": 16}),
    "grpo, two epochs of three minibatches": case("grpo", optim={"epochs": 2, "num_minibatches": 3, "max_tokens_per_batch": 32}),
    "grpo, padded rows": case("grpo", optim={"packing": "off", "max_tokens_per_batch": 24}),
    "grpo, gradient checkpointing": case("grpo", optim={"gradient_checkpointing": True}),
    "grpo, rewritten history": case("grpo", options={"splits": True}, optim={"max_tokens_per_batch": 16}),
    "grpo, kl in the loss": case("grpo", loss={"kl_coef": 0.1, "entropy_coef": 0.01}),
    "grpo, window": case("grpo", window=0, versions=True),
    "grpo, sequence correction": case("grpo", loss={"correction": "sequence"}, versions=True, optim={"max_tokens_per_batch": 16}),
    "grpo, inexact sampler": case("grpo", loss={"correction": "mask"}, exact=False, noise=0.2),
    "dr_grpo": case("dr_grpo"),
    "rloo": case("rloo"),
    "opo": case("opo"),
    "gigpo": case("gigpo"),
    "cispo": case("cispo", optim={"epochs": 2}),
    "gspo": case("gspo", optim={"epochs": 2, "max_tokens_per_batch": 16}),
    "reinforce++": case("reinforce++", loss={"kl_coef": 0.05, "kl_in": "reward"}),
    "reinforce++_baseline": case("reinforce++_baseline", loss={"kl_coef": 0.05}),
    "ppo": case("ppo", optim={"critic_warmup_steps": 0, "max_tokens_per_batch": 32}),
    "ppo, critic warm-up": case("ppo", optim={"critic_warmup_steps": 1}),
    "ppo, shared critic": case("ppo", loss={"critic": "shared"}, optim={"max_tokens_per_batch": 32}),
    "lora": case("grpo", lora=4, loss={"kl_coef": 0.1}),
    "lora, ppo": case("ppo", lora=4, optim={"critic_warmup_steps": 0}),
    "ranks that get nothing": case("reinforce++", rewards=ONE_CHAIN),
    "no advantage": case("grpo", rewards=((1, 1), (0, 0))),
    "tied weights": case("grpo", tied=True, optim={"max_tokens_per_batch": 16}),
    "bfloat16": case("grpo", dtype=torch.bfloat16, updates=1),
}


def make_model(settings: dict[str, Any]) -> Any:
    model = tiny_llama(VOCABULARY)
    if settings.get("tied"):
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    model = model.to(settings.get("dtype", torch.float32))
    if settings["lora"]:
        adapt(model, LoraSettings(rank=settings["lora"]), seed=3)
    return model


def make_learner(settings: dict[str, Any], model: Any, ranks: Any = None) -> Any:
    optim = OptimSettings(**{"lr": 1e-2, "max_grad_norm": 1.0, "total_steps": 9, **settings.get("optim", {})})
    options: dict[str, Any] = {
        "loss": ALGORITHMS[settings["algorithm"]].settings(settings.get("loss")),
        "optim": optim,
        "exact": settings.get("exact", True),
        "seed": 5,
    }
    if ranks is None:
        return PolicyLearner(model, settings["algorithm"], **options)
    from agentfly.learn.ranks.learner import RankLearner

    return RankLearner(model, settings["algorithm"], ranks=ranks, **options)


def groups_of(settings: dict[str, Any], update: int) -> list[Any]:
    plain = tiny_llama(VOCABULARY)
    groups = make_groups(plain, seed=update, rewards=settings["rewards"], **settings.get("options", {}))
    draw = random.Random(update)
    for number, chain in enumerate(chain for group in groups for chain in group):
        for turn in chain.turns:
            completion = turn.completion
            if settings.get("versions"):  # the turns of a chain are drawn by older and older weights
                completion.versions = [update - (number + draw.randrange(2)) % (update + 1)] * len(completion.token_ids)
            if settings.get("noise"):
                completion.logprobs = [min(0.0, p + draw.gauss(0.0, settings["noise"])) for p in completion.logprobs]
    return groups


def run_case(settings: dict[str, Any], ranks: Any = None) -> dict[str, Any]:
    """Returns metrics, weights and scores after some updates."""
    learner = make_learner(settings, make_model(settings), ranks)
    if ranks is not None and not ranks.leads:
        learner.follow()
        return {}
    found: dict[str, Any] = {"metrics": [], "measured": []}
    for update in range(settings["updates"]):
        groups = groups_of(settings, update)
        found["metrics"].append(learner.update(groups, found["measured"].append, None, settings["window"]))
    found["weights"] = {name: tensor.detach().float().clone() for bucket in learner.weights() for name, tensor in bucket}
    found["logprobs"] = learner.logprobs([1, 2, 3], [4, 5, 6, 7])
    found["version"] = learner.version
    if ranks is not None:
        learner.stop()
    return found


def main(folder: Path, rank: int, port: int) -> None:
    from agentfly.learn.ranks.environment import Place, read_place
    from agentfly.learn.ranks.group import RankGroup
    from tests.scale import rank_errors

    torch.set_num_threads(1)
    only = os.environ.get("ONLY")
    for number, size in enumerate(SIZES):
        if rank >= size:
            continue
        os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port + number}"}
        place = read_place()
        assert isinstance(place, Place)
        group = RankGroup.join(place, "cpu", 120.0)
        for name, settings in CASES.items():
            if only and only != name:
                continue
            found = run_case(settings, group)
            group.broken, group._commands = None, 0 if False else group._commands
            if group.leads:
                torch.save(found, folder / f"{size}-{name.replace('/', '_')}.pt")
        for name, check in rank_errors.CHECKS.items():
            if only and only != name:
                continue
            told = check(group, folder)
            group.broken = None
            if group.leads:
                torch.save(told, folder / f"{size}-{name}.pt")
        group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
