"""Supervised warm start: demonstrations in, a model directory out.

A demonstration is a row whose `messages` hold assistant replies. Each becomes a `Trajectory` as if the policy had sampled
those replies: the same prompt (the agent writes it), the same renderer, the same `to_samples` and so the same masks as in
reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..agents.base import BaseAgent
from ..config import Config
from ..data import parse_message, read_rows, split_rows
from ..errors import ConfigError, DataError
from ..learn.samples import to_samples
from ..runs import RunStore
from ..types import Completion, Message, Outcome, Sample, Task, Trajectory, Turn
from ..watch.progress import Progress
from ..watch.trackers import Trackers
from .build import build_agent, open_directory
from .checkpoint import save_checkpoint
from .loop import trainable_engine


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
    from ..learn.storage import seed_everything, set_threads
    from ..learn.supervised import SupervisedLearner

    if config.run.threads is not None:
        set_threads(config.run.threads)
    seed_everything(config.seed)
    agent = agent or build_agent(config)
    engine = trainable_engine(agent)
    train, held = _demonstrations(config, agent)
    optim = replace(config.train, total_steps=config.train.total_steps or config.train.steps)
    learner = SupervisedLearner(engine.model, optim=optim, seed=config.seed)
    directory = open_directory(config, None)
    directory.config.write_text(config.to_toml(), encoding="utf-8")
    store = RunStore(directory.database)
    trackers = Trackers.open(config.run.trackers, directory.path, config.to_dict(), directory.path.name)
    progress = progress or Progress(config.train.steps)
    progress.directory = directory.path
    before = learner.evaluate(held)["eval/loss"]
    order = random.Random(config.seed)
    step, stopped = 0, False
    with progress:
        try:
            for step in range(1, config.train.steps + 1):
                metrics = learner.update(order.choices(train, k=config.rollout.num_tasks))
                if config.train.validate_every and step % config.train.validate_every == 0:
                    metrics["validation/nll"] = learner.evaluate(held)["eval/loss"]
                store.add_metrics(step, metrics)
                trackers.log(metrics, step)
                progress.step(step, metrics)
        except KeyboardInterrupt:
            stopped = True  # what was learned so far is saved below
        finally:
            trackers.close()
            store.close()
    after = learner.evaluate(held)["eval/loss"]
    engine.publish(engine.version + 1)
    checkpoint = save_checkpoint(
        directory.checkpoints,
        step,
        model=engine.model,
        tokenizer=engine.tokenizer,
        state={"step": step},
        keep=config.train.keep_checkpoints,
    )
    if stopped:
        progress.note(f"stopped at step {step} and saved in {checkpoint}")
        raise KeyboardInterrupt
    return SftResult(directory.path, checkpoint, before, after, step)


def to_trajectory(row: Any, index: int, agent: BaseAgent, renderer: Any, schemas: Sequence[Any]) -> Trajectory:
    """One demonstration as the trajectory of a chain that replied exactly so."""
    messages = _messages(row, index)
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), None)
    if not first:
        raise DataError(f"row {index}: a demonstration has at least one message before its first assistant reply")
    fields = {key: value for key, value in row.items() if key != "messages"}
    task = Task(str(row.get("id", index)), tuple(messages[:first]), fields)
    trajectory = Trajectory(f"demo-{index}", task, 0, agent.start(task), outcome=Outcome.FINISHED, reward=0.0)
    ids, restarts = renderer.start(trajectory.messages, schemas), True
    position = first
    while position < len(messages):
        reply = messages[position]
        if reply.role != "assistant":
            raise DataError(f"row {index}: message {position} should be an assistant reply")
        text, reply_ids = renderer.write_reply(trajectory.messages, reply, schemas)
        completion = Completion(text=text, token_ids=reply_ids, logprobs=[0.0] * len(reply_ids), versions=[0] * len(reply_ids))
        trajectory.turns.append(Turn(ids, restarts, completion))
        trajectory.messages.append(reply)
        following = position + 1
        while following < len(messages) and messages[following].role != "assistant":
            following += 1
        new = messages[position + 1 : following]
        if following == len(messages):
            break
        if not new:
            raise DataError(f"row {index}: messages {position} and {following} are both the assistant's; join them into one")
        trajectory.messages += new
        extension = renderer.extend(trajectory.messages, len(new), completion, schemas)
        ids, restarts = extension.ids, extension.restarts
        position = following
    return trajectory


def _demonstrations(config: Config, agent: BaseAgent) -> tuple[list[Sample], list[Sample]]:
    """Training rows and held-out rows."""
    if not config.data.train:
        raise ConfigError("data.train is not set: point it at a file of demonstrations (rows with messages)")
    rows = read_rows(Path(config.data.train))[: config.data.train_count]
    if not rows:
        raise DataError(f"{config.data.train}: the data set is empty")
    if config.data.validation is not None:
        held = read_rows(Path(config.data.validation))
    else:
        rows, held = split_rows(rows, config.data.holdout, config.seed)
    renderer = agent.renderer
    assert renderer is not None
    limit = agent.plan().limits.max_context

    def convert(some: list[Any]) -> list[Sample]:
        found = []
        for index, row in enumerate(some):
            samples = to_samples(to_trajectory(row, index, agent, renderer, agent.schemas))
            longest = max(len(sample.token_ids) for sample in samples)
            if longest > limit:
                raise DataError(f"row {index}: the demonstration has {longest} tokens, but the context holds {limit}")
            found += samples
        return found

    return convert(rows), convert(held[: config.data.validation_count])


def _messages(row: Any, index: int) -> list[Message]:
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise DataError(f"row {index}: a demonstration is an object with a list 'messages'")
    return [parse_message(item, number, f"row {index}") for number, item in enumerate(row["messages"])]
