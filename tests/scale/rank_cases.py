"""The cases that one process and several ranks must compute alike."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from agentfly.learn.algorithms import ALGORITHMS, Algorithm, Tokens
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.lora import adapt
from agentfly.learn.settings import LoraSettings, LossSettings, OptimSettings
from tests.learn.chains import tiny_llama
from tests.learn.test_learner import VOCABULARY, make_groups

SIZES = (2, 4)
RAGGED = ((1, 0, 0.5, 2), (0, 0), (2, -1, 0), (0.5, 1, 0))
Weights = dict[str, torch.Tensor]


def case(algorithm: str, rewards: Any = RAGGED, **settings: Any) -> dict[str, Any]:
    return {"algorithm": algorithm, "rewards": rewards, "lora": 0, "updates": 2, "window": None, **settings}


def _centred(tokens: Tokens, settings: LossSettings) -> torch.Tensor:
    """A loss that needs all log-probs of the minibatch at once."""
    return -tokens.advantages * (tokens.logprobs - 0.5 * tokens.logprobs.mean()) * tokens.logprobs.std()


OWN = Algorithm(name="centred", credit=ALGORITHMS["grpo"].credit, loss=_centred, loss_scope="minibatch", needs_group=True)
SMALL = {"max_tokens_per_batch": 16}
CASES: dict[str, dict[str, Any]] = {
    "grpo": case("grpo"),
    "grpo in micro batches": case("grpo", optim=SMALL),
    "grpo, two epochs of three minibatches": case(
        "grpo", optim={"epochs": 2, "num_minibatches": 3, "max_tokens_per_batch": 32}
    ),
    "grpo, padded rows": case("grpo", optim={"packing": "off", "max_tokens_per_batch": 24}),
    "grpo, gradient checkpointing": case("grpo", optim={"gradient_checkpointing": True}),
    "grpo, rewritten history": case("grpo", options={"splits": True}, optim=SMALL),
    "grpo, kl in the loss": case("grpo", loss={"kl_coef": 0.1, "kl_target": 0.01, "entropy_coef": 0.01, "entropy_target": 4.0}),
    "grpo, window": case("grpo", window=0, versions=True),
    "grpo, sequence correction": case("grpo", loss={"correction": "sequence"}, versions=True, optim=SMALL),
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
    "distill": case("distill", teacher=9, optim=SMALL),
    "lora": case("grpo", lora=4, loss={"kl_coef": 0.1}),
    "lora, ppo": case("ppo", lora=4, optim={"critic_warmup_steps": 0}),
    "short moments": case("ppo", optim={"optimizer": "adamw_8bit", "critic_warmup_steps": 0}),
    "bfloat16 moments": case("grpo", optim={"optimizer": "adamw_bf16"}),
    "muon": case("grpo", optim={"optimizer": "muon", "weight_decay": 0.1}),
    "a single row": case("ppo", rewards=((1.0,),), loss={"critic": "shared"}),
    "two rows": case("grpo", rewards=((1, 0),), options={"turns": 1}),
    "a loss over the minibatch": case("grpo", own=True, optim=SMALL),
    "no advantage": case("grpo", rewards=((1, 1), (0, 0))),
    "tied weights": case("grpo", tied=True, optim=SMALL),
    "bfloat16": case("grpo", dtype=torch.bfloat16, updates=1),
}


def make_model(settings: dict[str, Any], device: str = "cpu") -> Any:
    model = tiny_llama(VOCABULARY, seed=settings.get("seed", 0))
    if settings.get("tied"):
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    model = model.to(settings.get("dtype", torch.float32))
    if settings["lora"]:
        adapt(model, LoraSettings(rank=settings["lora"]), seed=3)
    return model.to(device)


def make_learner(settings: dict[str, Any], model: Any, ranks: Any = None, algorithm: Any = None) -> Any:
    # Adam divides by the size of a gradient: where that is rounding alone, weights differ by the learning rate.
    algorithm = algorithm or (OWN if settings.get("own") else settings["algorithm"])
    optim = OptimSettings(**{"lr": 1e-4, "max_grad_norm": 1.0, "total_steps": 9, **settings.get("optim", {})})
    options: dict[str, Any] = {
        "loss": ALGORITHMS[settings["algorithm"]].settings(settings.get("loss")),
        "optim": optim,
        "exact": settings.get("exact", True),
        "seed": 5,
    }
    if settings.get("teacher"):
        options["reference"] = tiny_llama(VOCABULARY, seed=settings["teacher"])
    if not isinstance(algorithm, str):
        options["loss"] = algorithm.settings()
    if ranks is None:
        return PolicyLearner(model, algorithm, **options)
    from agentfly.learn.ranks.learner import RankLearner

    return RankLearner(model, algorithm, ranks=ranks, **options)


def weights_of(learner: Any) -> Weights:
    """Returns a copy of the learner's weights."""
    return {name: tensor.detach().to("cpu", copy=True) for bucket in learner.weights() for name, tensor in bucket}


def groups_of(settings: dict[str, Any], update: int) -> list[Any]:
    plain = tiny_llama(VOCABULARY)
    groups = make_groups(plain, seed=update, rewards=settings["rewards"], **settings.get("options", {}))
    draw = random.Random(update)
    for number, chain in enumerate(chain for group in groups for chain in group):
        for place, turn in enumerate(chain.turns):
            completion = turn.completion
            if settings.get("versions"):  # the turns of a chain are drawn by older and older weights
                drawn = update - (number + draw.randrange(2)) % (update + 1)
                completion = replace(completion, versions=[drawn] * len(completion.token_ids))
            if settings.get("noise"):
                moved = [min(0.0, p + draw.gauss(0.0, settings["noise"])) for p in completion.logprobs]
                completion = replace(completion, logprobs=moved)
            chain.turns[place] = replace(turn, completion=completion)
    return groups


def updates_of(settings: dict[str, Any], size: int) -> int:
    """The updates of a case: one on four ranks, to save time, unless it is about older weights."""
    return 1 if size > 2 and not settings.get("versions") else int(settings["updates"])


def run_case(settings: dict[str, Any], ranks: Any = None, device: str = "cpu", updates: int | None = None) -> dict[str, Any]:
    """Returns metrics, weights and scores after some updates."""
    learner = make_learner(settings, make_model(settings, device), ranks)
    if ranks is not None and not ranks.leads:
        learner.follow()
        return {}
    found: dict[str, Any] = {"metrics": [], "measured": []}
    for update in range(settings["updates"] if updates is None else updates):
        groups = groups_of(settings, update)
        found["metrics"].append(learner.update(groups, found["measured"].append, None, settings["window"]))
    found["weights"] = weights_of(learner)
    found["logprobs"] = learner.logprobs([1, 2, 3], [4, 5, 6, 7])
    found["version"], found["path"] = learner.version, learner.path
    if ranks is not None:
        learner.stop()
    return found
