"""Training without rollouts: `sft` on demonstrations and `dpo` on pairs of chains write a model directory, `warm_start`
prepares a model for a training run.

`demonstrations` turns demonstrations into rows with the masks of reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..agents.base import BaseAgent
from ..build import adapt_model, build_agent, build_reference, open_directory, trainable_engine
from ..config import Config
from ..data import split_rows
from ..errors import ConfigError
from ..learn.settings import OptimSettings
from ..runs import Recorder, RunStore, StoreWriter
from ..runs.checkpoints import STATE, write_checkpoint
from ..types import Sample, Trajectory
from ..watch.observers import Observer, Observers, RunWarnings
from ..watch.progress import Progress
from ..watch.trackers import Trackers
from .demonstrations import best_chains, demo_rows, demo_samples, is_run, pairs_of
from .stopping import StopSignals

Learner = TypeVar("Learner")


HELD_OUT = {
    "sft": {"eval/loss": "validation/nll"},
    "dpo": {
        "eval/loss": "validation/preference_loss",
        "eval/accuracy": "validation/preference_accuracy",
        "eval/margin": "validation/preference_margin",
    },
}
"""The metrics of what a learner measures on held-out items."""


@dataclass(slots=True)
class SftResult:
    """`before` and `after` are the loss of held-out demonstrations (mean negative log-likelihood per reply token) or pairs.

    For pairs, `accuracy` is the share of held-out ones whose margin is above 0 at the end.
    """

    directory: Path
    checkpoint: Path
    before: float
    after: float
    steps: int
    accuracy: float | None = None


def sft(
    config: Config,
    *,
    agent: BaseAgent | None = None,
    progress: Progress | None = None,
    best: int | None = None,
    min_reward: float | None = None,
) -> SftResult:
    """Fine-tune the agent's model on demonstrations: `train.steps` steps of `rollout.num_tasks` rows each.

    If `data.train` is the folder of a run, its chains with a high reward are the demonstrations: at most `best` of each task,
    with a reward of at least `min_reward` (by default its `agent.success_at`), and with the ids that were sampled.
    """
    from ..learn.supervised import SupervisedLearner

    agent, progress = agent or build_agent(config), progress or Progress(config.train.steps)
    learner = _open(config, agent, SupervisedLearner, progress)
    train, held = _demonstrations(config, agent, best, min_reward)
    return _fit(config, agent, progress, learner, train, held, "sft", best=best, min_reward=min_reward)


def dpo(
    config: Config,
    *,
    agent: BaseAgent | None = None,
    progress: Progress | None = None,
    beta: float = 0.1,
    min_gap: float = 0.0,
) -> SftResult:
    """Train the agent's model on the pairs of a run, whose folder `data.train` is: `train.steps` steps of `rollout.num_tasks`
    pairs each. A pair is the best and the worst chain of a group, with rewards at least `min_gap` apart.

    The reference is `loss.reference`, or the model before the first step; no copy of it is kept.
    """
    from ..learn.preference import Pair, PreferenceLearner

    if not is_run(config.data.train):
        raise ConfigError(f"pairs come from the folder of a run, and data.train is {config.data.train!r}: give one")
    if config.data.columns:
        raise ConfigError(f"data.columns has no effect on the chains of {config.data.train}: remove it")
    agent, progress = agent or build_agent(config), progress or Progress(config.train.steps)
    learner = _open(config, agent, partial(PreferenceLearner, beta=beta), progress)
    parts = split_rows(pairs_of(config.data.train, min_gap), config.data.holdout, config.seed, key=lambda pair: pair[0].task.id)
    reference = build_reference(config, learner.model, trainable_engine(agent).tokenizer)
    train, held = (
        learner.with_reference(
            [Pair(demo_samples([chosen], agent), demo_samples([rejected], agent)) for chosen, rejected in part], reference
        )
        for part in parts
    )
    return _fit(config, agent, progress, learner, train, held, "dpo", beta=beta, min_gap=min_gap)


def _open(config: Config, agent: BaseAgent, make: Callable[..., Learner], progress: Progress) -> Learner:
    """Returns a learner of the agent's model."""
    from ..learn.model.storage import seed_torch

    seed_torch(config.seed, config.run.threads)
    engine = adapt_model(config, agent, progress.note)
    optim = replace(config.train, total_steps=config.train.total_steps or config.train.steps)
    return make(engine.model, optim=optim, seed=config.seed)


def _fit(
    config: Config, agent: BaseAgent, progress: Progress, learner: Any, train: Sequence[Any], held: Sequence[Any], kind: str,
    **options: float | None,
) -> SftResult:  # fmt: skip
    """Run the steps of `sft` or `dpo` on their items, and save the model. `options` are recorded."""
    from ..learn.model.storage import save_checkpoint_model, save_state

    engine, names = trainable_engine(agent), HELD_OUT[kind]

    def evaluate() -> dict[str, float]:
        return {names[name]: value for name, value in learner.evaluate(held).items()}

    directory = open_directory(config, None)
    with StopSignals(lambda: "nothing is saved") as signals, directory.lock():
        directory.check_new()
        directory.write_config(config.to_toml())
        progress.opened(directory.path)
        progress.note(f"{kind}: {len(train)} to train on, {len(held)} held out")
        writer = StoreWriter(RunStore(directory.database), warn=progress.note)
        trackers = Trackers.open(config.run.trackers, directory.path, config.to_dict(), directory.path.name, warn=progress.note)
        observe = Observers(progress, recorder := Recorder(writer), trackers)
        observe.add(RunWarnings(observe))
        observe.truncate_after(-1)
        before = evaluate()
        order = random.Random(config.seed)
        step = 0
        # A signal ends the loop after its update; the checkpoint below keeps the steps done so far.
        with progress, signals.calling(lambda: None):
            try:
                with writer, observe.running(**_description(config, kind), options=options):
                    for step in range(1, config.train.steps + 1):
                        observe.begin(step)
                        metrics = learner.update(order.choices(train, k=config.rollout.num_tasks))
                        if config.train.validate_every and step % config.train.validate_every == 0:
                            metrics |= evaluate()
                        observe.log(metrics, step)
                        recorder.look({})
                        observe.step(step, metrics)
                        if signals.received is not None:
                            recorder.stopped = f"stopped by {signals.received.name}"
                            break
            finally:
                observe.close()

            def write(folder: Path) -> None:
                save_checkpoint_model(engine.model, engine.tokenizer, folder)
                save_state(folder / STATE, {"step": step})

            checkpoint = write_checkpoint(directory.checkpoints, step, write, config.train.keep_checkpoints)
        if signals.received is not None:
            progress.note(f"stopped by {signals.received.name} at step {step} and saved in {checkpoint}")
            raise signals.error()
        after = evaluate()
        engine.publish(engine.version + 1)
        loss, accuracy = names["eval/loss"], after.get("validation/preference_accuracy")
        return SftResult(directory.path, checkpoint, before[loss], after[loss], step, accuracy)


def _description(config: Config, kind: str) -> dict[str, Any]:
    return {
        "kind": "sft", "model": config.agent.model, "world": config.data.train, "algorithm": kind, "seed": config.seed,
        "total_steps": config.train.steps,
    }  # fmt: skip


def _demonstrations(
    config: Config, agent: BaseAgent, best: int | None, min_reward: float | None
) -> tuple[list[Sample], list[Sample]]:
    """Returns training rows and held-out rows."""
    data = config.data
    if data.sources:
        raise ConfigError("agentfly sft takes one data set: set data.train instead of data.sources")
    if not data.train:
        raise ConfigError("data.train is not set: point it at demonstrations: a file of rows with messages, or a set's name")
    if is_run(data.train):
        rows: list[Any] = best_chains(data.train, best, min_reward)[: data.train_count]
    elif best is not None or min_reward is not None:
        raise ConfigError(f"--best and --min-reward choose chains of a run, and {data.train} is none: remove them")
    else:
        rows = demo_rows(data.train, data.train_count, config.seed, columns=data.columns)
    if data.validation is not None:
        held = demo_rows(data.validation, data.validated, config.seed + 1, columns=data.columns)
    else:
        first, last = split_rows(list(enumerate(rows)), data.holdout, config.seed, key=_task_of)
        return demo_samples(dict(first), agent), demo_samples(dict(last[: data.validated]), agent)
    return demo_samples(rows, agent), demo_samples(held[: data.validated], agent)


def _task_of(row: tuple[int, Any]) -> Any:
    """What stays on one side of the held-out rows: the chains of a task, or a single row."""
    return row[1].task.id if isinstance(row[1], Trajectory) else row[0]


def warm_start(
    config: Config, agent: BaseAgent, observe: Observer, made: Sequence[Trajectory] | None = None
) -> dict[str, float]:
    """Run the supervised steps of `[warm_start]` on the engine's model. Returns the held-out loss before and after.

    `made` are the self-made demonstrations, if the config asks for them.
    """
    from ..learn.model.storage import seed_torch
    from ..learn.supervised import SupervisedLearner

    settings = config.warm_start
    if settings.demos is None:
        return {}
    seed_torch(config.seed, config.run.threads)
    engine = trainable_engine(agent)
    rows = demo_rows(settings.demos, settings.count, config.seed, settings.mistakes) if made is None else list(made)
    first, last = split_rows(list(enumerate(rows)), 0.1, config.seed, key=_task_of)
    train, kept_back = demo_samples(dict(first), agent), demo_samples(dict(last), agent)
    optim = OptimSettings(
        lr=settings.lr,
        schedule="cosine",
        warmup_steps=settings.steps // 10,
        total_steps=settings.steps,
        max_grad_norm=config.train.max_grad_norm,
        max_tokens_per_batch=config.train.max_tokens_per_batch,
        logprob_chunk=config.train.logprob_chunk,
    )
    learner = SupervisedLearner(engine.model, optim=optim, seed=config.seed)
    before = learner.evaluate(kept_back)["eval/loss"]
    order = random.Random(config.seed)
    observe.phase("warm start", settings.steps, "steps")
    for step in range(1, settings.steps + 1):
        learned = learner.update(order.choices(train, k=settings.num_demos))
        observe.advance(step)
        if step % max(1, settings.steps // 4) == 0:
            observe.note(f"warm start {step}/{settings.steps}  loss {learned['train/loss']:.4f}")
    after = learner.evaluate(kept_back)["eval/loss"]
    observe.note(f"warm start on {len(rows)} demonstrations of {settings.demos}: loss {before:.3f} before, {after:.3f} after")
    return {"warm_start/loss_before": before, "warm_start/loss_after": after}
