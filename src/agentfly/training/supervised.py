"""Supervised training on demonstrations: `sft` writes a model directory, `warm_start` prepares a model for a training run.

`demonstrations` turns demonstrations into rows with the masks of reinforcement learning.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..agents.base import BaseAgent
from ..build import adapt_model, build_agent, open_directory, trainable_engine
from ..config import Config
from ..data import split_rows
from ..errors import ConfigError
from ..learn.settings import OptimSettings
from ..runs import Recorder, RunStore, StoreWriter
from ..runs.checkpoints import STATE, write_checkpoint
from ..types import Sample
from ..watch.observers import Observer, Observers, RunWarnings
from ..watch.progress import Progress
from ..watch.trackers import Trackers
from .demonstrations import demo_rows, demo_samples
from .stopping import StopSignals


@dataclass(slots=True)
class SftResult:
    """`before` and `after` are the mean negative log-likelihood per reply token on held-out demonstrations."""

    directory: Path
    checkpoint: Path
    before: float
    after: float
    steps: int


def sft(config: Config, *, agent: BaseAgent | None = None, progress: Progress | None = None) -> SftResult:
    """Fine-tune the agent's model on demonstrations: `train.steps` steps of `rollout.num_tasks` rows each."""
    from ..learn.model.storage import save_checkpoint_model, save_state, seed_torch
    from ..learn.supervised import SupervisedLearner

    seed_torch(config.seed, config.run.threads)
    agent = agent or build_agent(config)
    progress = progress or Progress(config.train.steps)
    engine = adapt_model(config, agent, progress.note)
    train, held = _demonstrations(config, agent)
    optim = replace(config.train, total_steps=config.train.total_steps or config.train.steps)
    learner = SupervisedLearner(engine.model, optim=optim, seed=config.seed)
    directory = open_directory(config, None)
    with StopSignals(lambda: "nothing is saved") as signals, directory.lock():
        directory.check_new()
        directory.write_config(config.to_toml())
        progress.opened(directory.path)
        writer = StoreWriter(RunStore(directory.database), warn=progress.note)
        names = config.run.trackers
        trackers = Trackers.open(names, directory.path, config.to_dict(), directory.path.name, warn=progress.note)
        observe = Observers(progress, recorder := Recorder(writer), trackers)
        observe.add(RunWarnings(observe))
        observe.truncate_after(-1)
        before = learner.evaluate(held)["eval/loss"]
        order = random.Random(config.seed)
        step = 0
        # A signal ends the loop after its update; the checkpoint below keeps the steps done so far.
        with progress, signals.calling(lambda: None):
            try:
                with writer, observe.running(**_description(config)):
                    for step in range(1, config.train.steps + 1):
                        observe.begin(step)
                        metrics = learner.update(order.choices(train, k=config.rollout.num_tasks))
                        if config.train.validate_every and step % config.train.validate_every == 0:
                            metrics["validation/nll"] = learner.evaluate(held)["eval/loss"]
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
        after = learner.evaluate(held)["eval/loss"]
        engine.publish(engine.version + 1)
        return SftResult(directory.path, checkpoint, before, after, step)


def _description(config: Config) -> dict[str, Any]:
    return {
        "kind": "sft", "model": config.agent.model, "world": config.data.train, "algorithm": "sft", "seed": config.seed,
        "total_steps": config.train.steps,
    }  # fmt: skip


def _demonstrations(config: Config, agent: BaseAgent) -> tuple[list[Sample], list[Sample]]:
    """Returns training rows and held-out rows."""
    data = config.data
    if data.sources:
        raise ConfigError("agentfly sft takes one data set: set data.train instead of data.sources")
    if not data.train:
        raise ConfigError("data.train is not set: point it at demonstrations: a file of rows with messages, or a set's name")
    rows = demo_rows(data.train, data.train_count, config.seed)
    if data.validation is not None:
        held = demo_rows(data.validation, data.validated, config.seed + 1)
    else:
        first, last = split_rows(list(enumerate(rows)), data.holdout, config.seed)
        return demo_samples(dict(first), agent), demo_samples(dict(last[: data.validated]), agent)
    return demo_samples(rows, agent), demo_samples(held[: data.validated], agent)


def warm_start(config: Config, agent: BaseAgent, observe: Observer) -> dict[str, float]:
    """Run the supervised steps of `[warm_start]` on the engine's model. Returns the held-out loss before and after."""
    from ..learn.model.storage import seed_torch
    from ..learn.supervised import SupervisedLearner

    settings = config.warm_start
    if settings.demos is None:
        return {}
    seed_torch(config.seed, config.run.threads)
    engine = trainable_engine(agent)
    rows = demo_rows(settings.demos, settings.count, config.seed, settings.mistakes)
    first, last = split_rows(list(enumerate(rows)), 0.1, config.seed)
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
