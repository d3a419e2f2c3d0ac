"""What ranks do beside updates: errors of one rank that all raise, and checkpoints. Each check runs on every rank.

A check returns what rank 0 found; the tests look at it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentfly.errors import AgentFlyError, InvariantError
from agentfly.learn.algorithms import GRPO, Algorithm, TokenLoss, Tokens
from agentfly.learn.algorithms.losses import clipped_surrogate
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.storage import load_state, save_checkpoint_model, save_state
from agentfly.learn.settings import LossSettings
from agentfly.runs.checkpoints import STATE, staging_folder, write_checkpoint
from tests.scale.rank_cases import CASES, Weights, case, groups_of, make_learner, make_model, weights_of

PLAIN = case("grpo", optim={"max_tokens_per_batch": 16})
SAVED = ("ppo", "ppo, shared critic", "lora", "grpo, kl in the loss", "bfloat16", "short moments", "muon")


def _own(spoil: Callable[[Tokens, Any], Any]) -> Algorithm:
    """GRPO with a loss that `spoil` may change."""

    def loss(tokens: Tokens, settings: LossSettings) -> TokenLoss:
        found, clipped = clipped_surrogate(tokens.logprobs, tokens.old_logprobs, tokens.advantages, clip_low=0.2, clip_high=0.2)
        return TokenLoss(spoil(tokens, found), clipped)

    return Algorithm(name="spoiled", credit=GRPO.credit, loss=loss)


def _of_one_chain(tokens: Tokens) -> bool:
    return bool((tokens.chains == 0).any())


def _raises(tokens: Tokens, loss: Any) -> Any:
    if _of_one_chain(tokens):
        raise ZeroDivisionError("the first chain")
    return loss


def _not_finite(tokens: Tokens, loss: Any) -> Any:
    return loss * float("nan") if _of_one_chain(tokens) else loss


def _not_finite_later(tokens: Tokens, loss: Any) -> Any:
    moved = (tokens.logprobs.detach() - tokens.old_logprobs).abs().max() > 1e-6
    return loss * float("nan") if _of_one_chain(tokens) and moved else loss


def _refuse(_: Any = None) -> None:
    raise InvariantError("refused")


def failing(algorithm: Any, *, check: Any = None, changing: Any = None, **optim: Any) -> Callable[[Any, Path], Any]:
    """Returns a check: an update fails, then a good one follows on the same ranks."""

    def run(group: Any, folder: Path) -> Any:
        settings = {**PLAIN, "algorithm": "grpo", "optim": {**PLAIN["optim"], **optim}}
        learner = make_learner(settings, make_model(settings), group, algorithm=algorithm)
        if not group.leads:
            learner.follow()
            return None
        before = weights_of(learner)
        told: dict[str, Any] = {"error": ""}
        try:
            learner.update(groups_of(settings, 0), check, changing)
        except AgentFlyError as error:
            told["error"] = f"{type(error).__name__}: {error}"
        after = weights_of(learner)
        told |= {
            "half_updated": learner.half_updated,
            "version": learner.version,
            "unchanged": all(torch.equal(before[name], after[name]) for name in before),
            "answers": len(learner.logprobs([1, 2], [3, 4])),
        }
        learner.stop()
        return told

    return run


def budgets_differ(group: Any, folder: Path) -> Any:
    """The ranks have measured different free memory: all take the smallest micro batch."""
    learner = make_learner(PLAIN, make_model(PLAIN), group)
    learner._budget.tokens = 16 * (1 + group.rank)
    if not group.leads:
        learner.follow()
        return None
    metrics = learner.update(groups_of(PLAIN, 0))
    found = {"metrics": metrics, "tokens": learner._budget.tokens, "weights": weights_of(learner)}
    learner.stop()
    return found


def save(learner: Any, folder: Path, name: str, step: int = 1) -> Path:
    """Write a checkpoint as the trainer does."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    state = {"learner": learner.state_dict(), "step": step}
    if isinstance(learner, PolicyLearner) and not hasattr(learner, "snapshot"):

        def write(path: Path) -> None:
            save_checkpoint_model(learner.model, None, path)
    else:
        write = learner.snapshot(staging_folder(place, step))

    def write_all(path: Path) -> None:
        write(path)
        save_state(path / STATE, state)

    return write_checkpoint(place, step, write_all, 2)


def go_on(learner: Any, name: str) -> tuple[dict[str, float], Weights]:
    """Returns metrics and weights of the next update."""
    return learner.update(groups_of(CASES[name], 1)), weights_of(learner)


def other_model(settings: dict[str, Any]) -> Any:
    """Other weights than the saved ones. Beside adapters the frozen weights are those of the base model, which is the same."""
    return make_model(settings if settings["lora"] else {**settings, "seed": 9})


def saving(name: str) -> Callable[[Any, Path], Any]:
    """Returns a check: save after an update, load what these ranks and others have saved, and go on from there."""

    def run(group: Any, folder: Path) -> Any:
        settings = CASES[name]
        sources = {f"{size}-ranks": folder / f"{size}-ranks-{name}" / "step-000001" for size in (1, 2, 4)}
        told: dict[str, Any] = {}
        for source in ("", *sources):
            learner = make_learner(settings, other_model(settings) if source else make_model(settings), group)
            if not group.leads:
                learner.follow()
                continue
            if source and sources[source].is_dir():
                learner.restore(sources[source], load_state(sources[source] / STATE)["learner"])
                told[source] = (weights_of(learner), learner.version, *go_on(learner, name))
            elif not source:
                learner.update(groups_of(settings, 0))
                saved = weights_of(learner)
                save(learner, folder, f"{group.size}-ranks-{name}")
                told["own"] = (saved, learner.version, *go_on(learner, name))
            learner.stop()
            group.broken = None
        return told

    return run


GOES_BACK = case("grpo", optim={"warmup_steps": 8, "optimizer": "adamw_bf16"}, loss={"entropy_target": 4.0})


def go_back(learner: Any, folder: Path) -> tuple[Weights, dict[str, float]]:
    """Load the checkpoint of the first update after the second one, with a version and a count of updates that go on."""
    place = None
    for update in range(2):
        learner.update(groups_of(GOES_BACK, update))
        place = place or save(learner, folder, f"back-{type(learner).__name__}")
    state = load_state(place / STATE)["learner"]  # type: ignore[operator]
    learner.restore(place, {**state, "version": learner.version + 1, "updates": learner.state_dict()["updates"]})
    assert learner.version == 3
    metrics = learner.update(groups_of(GOES_BACK, 2))
    return weights_of(learner), metrics


def goes_back(group: Any, folder: Path) -> Any:
    """The learning rate of all ranks goes on, although the other ranks read an older count from the checkpoint."""
    learner = make_learner(GOES_BACK, make_model(GOES_BACK), group)
    if not group.leads:
        learner.follow()
        return None
    found = go_back(learner, folder)
    learner.stop()
    return found


CHECKS: dict[str, Callable[[Any, Path], Any]] = {
    "goes back": goes_back,
    "a check refuses": failing(GRPO, check=_refuse),
    "the announcement fails": failing(GRPO, changing=_refuse),
    "a loss raises on one rank": failing(_own(_raises)),
    "a loss is not finite on one rank": failing(_own(_not_finite)),
    "a later step is not finite": failing(_own(_not_finite_later), epochs=3),
    "budgets differ": budgets_differ,
    **{f"saved {name}": saving(name) for name in SAVED},
}
