"""Where a run begins: before its first step, or after that of a checkpoint, to which it may go back. `describe_run` says it in
the store.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..learn.algorithms import find_algorithm, reference_of
from ..runs import RunDirectory
from ..runs.checkpoints import (
    STATE,
    best_checkpoint,
    discard,
    find_checkpoint,
    list_checkpoints,
    set_aside,
    step_of,
    sweep,
    why_broken,
)
from ..watch.observers import Observer
from .draws import fingerprint
from .evidence import HALF
from .idle import Plateau
from .parts import RunParts
from .saving import finish_in_thread


@dataclass(frozen=True, slots=True)
class Start:
    """The step after which a run goes on. `opening` are metrics from before the first step; `before` and `after` validations.

    `draws` are the groups that a resumed run draws again. `recorded` is what the store holds of the step.
    `plateau` is the state of `idle.Plateau`.
    """

    step: int = 0
    checkpoint: Path | None = None
    opening: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    draws: dict[str, Any] | None = None
    recorded: dict[str, float] = field(default_factory=dict)
    plateau: dict[str, Any] | None = None


def find_start(directory: RunDirectory, *, resumes: bool, observe: Observer) -> Path | None:
    """Remove what a killed trainer left behind. Returns the checkpoint to resume from, or None for a run from the start."""
    sweep(directory.checkpoints)
    if not resumes:
        directory.check_new()  # again: before this process had the lock, another one may have trained here
        for path in list_checkpoints(directory.checkpoints):  # of step 0
            discard(path)
        return None
    newest, broken = find_checkpoint(directory.checkpoints)
    if newest is None and broken:
        raise ConfigError(
            f"cannot resume: {directory.path} holds no intact checkpoint: {why_broken(broken)}. "
            f"Start again under another run.name"
        )
    for path in broken:
        observe.note(f"{why_broken({path: broken[path]})}: it is now {set_aside(path)}, and the run goes back to an older one")
    if newest is None:
        observe.note(f"{directory.path} holds no checkpoint: the run starts from the beginning")
    return newest


def start_over(parts: RunParts) -> Start:
    """Drop what a run without a finished step left in the folder."""
    parts.observe.truncate_after(-1)
    return Start(opening=parts.opening)


def resume(parts: RunParts, checkpoint: Path) -> Start:
    """Load a checkpoint and drop the records of later steps. Raises ConfigError if it does not fit this run."""
    from ..learn.model.storage import load_state, restore_random_state

    state = load_state(checkpoint / STATE)
    if "learner" not in state:
        raise ConfigError(
            f"{checkpoint} holds a model but no state of a training run (agentfly sft saves none): "
            f"start a new run with agent.model={checkpoint}"
        )
    try:
        parts.learner.restore(checkpoint, state["learner"])
        same_order = parts.draws.restore(state["cursor"])
        parts.ledger.groups.update(state.get("tasks", {}))
        step, before = int(state["step"]), dict(state["before"])
        opening = dict(state.get("opening", {}))
        restore_random_state(state["random"])
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise ConfigError(
            f"{checkpoint} does not fit this run ({reason}): resume with the model and config it was saved with"
        ) from error
    recorded = _restore_records(parts, step)
    same_validation = state.get("validation") in (None, fingerprint(parts.validation_tasks))
    validations = {name: value for name, value in recorded[step].items() if name.startswith("validation/")}
    first = {name: value for name, value in recorded[0].items() if name.startswith("validation/")}
    parts.saver.loaded(step, checkpoint)
    best = best_checkpoint(parts.directory.checkpoints)
    if same_validation and best is not None:
        parts.saver.validated(step_of(best), recorded.get(step_of(best), {}), linked=True)
    if same_validation:
        parts.saver.validated(step, recorded[step])
    parts.engine.publish(parts.learner.version)
    parts.observe.note(f"resumed at step {step} from {checkpoint}")
    if not same_order:
        changed = "the training rows, data.sampler, data.shuffle or the seed are not those of the saved run"
        parts.observe.note(f"{changed}: the rows are drawn from the start")
    if not same_validation:
        parts.observe.note("the validation rows are not those of the saved run: their figures cannot be compared")
    draws = state.get("stream") if same_order else None
    after = validations if same_validation and step else {}
    plateau = state.get("plateau") if same_validation else None
    return Start(step, checkpoint, opening, before or first, after, draws, recorded[step], plateau)


async def go_back(parts: RunParts, plateau: Plateau, step: int) -> dict[str, float]:
    """Load the best checkpoint if `plateau` asks for it (`train.restart_from_best`). Returns what the step records of it.

    The step, the order of the rows, the seeds and the schedule go on, so the run takes another way from there. The version of
    the weights rises by one, because no chain of an older version fits them.
    """
    from ..learn.model.storage import load_state

    await parts.saver.wait()  # the best one may still be written
    best, why = best_checkpoint(parts.directory.checkpoints), plateau.restart
    if why is None or best is None or parts.saver.is_best(step) or step >= parts.config.train.steps:
        return {}
    learner, engine = parts.learner, parts.engine
    state = load_state(best / STATE)["learner"]
    goes_on = {"version": learner.version + 1, "updates": learner.state_dict()["updates"]}

    def load() -> None:
        engine.rest()
        learner.restore(best, {**state, **goes_on})
        engine.publish(learner.version)

    await parts.probe.replies()  # those of the weights that are left
    await finish_in_thread(load)
    parts.ledger.check_published(engine, learner)
    parts.ledger.adam_steps = state["optimizer"].get("steps")
    left = plateau.restarted()
    parts.observe.note(f"the run goes back to {best} after step {step}: {why}. {left} more restarts (train.restart_from_best)")
    return {"train/restarted_from": float(step_of(best))}


def _restore_records(parts: RunParts, step: int) -> dict[int, dict[str, float]]:
    """Drop the records of later steps; the ledger goes on from the rest. Returns those of step 0, this one and the best."""
    parts.observe.truncate_after(step)
    rows = parts.writer.store.metrics()
    best = best_checkpoint(parts.directory.checkpoints)
    steps = {0, step} if best is None else {0, step, step_of(best)}
    left = next((int(row.value) for row in rows if row.step == step and row.name == "train/restarted_from"), step)
    steps.add(left)
    recorded = {at: {row.name: row.value for row in rows if row.step == at} for at in steps}
    parts.ledger.first_gap = next((row.value for row in rows if row.name == "train/logprob_gap"), None)
    if step:
        parts.ledger.adam_steps = recorded[left].get("train/adam_steps")
    return recorded


def revisions(parts: RunParts) -> dict[str, str]:
    """What `Environment.revision` says of the environments in use. Raises ConfigError if a resumed run began with another."""
    kinds: set[Any] = {kind for tool in parts.agent.tools.values() for kind in tool.envs}
    kinds.add(None if parts.agent.env is None else parts.agent.env.cls)
    now = {kind.__name__: str(kind.revision) for kind in kinds if getattr(kind, "revision", "")}
    for name, before in parts.writer.store.meta().get("revisions", {}).items():
        if now.get(name, before) != before:
            raise ConfigError(f"{name} is at {now[name]}, but the run began with {before}: go back to that, or start a new run")
    return now


def describe_run(parts: RunParts, step: int) -> dict[str, Any]:
    """Who runs what, with the settings of the steps after this one, from which `agentfly replay` computes them again."""
    config, train, algorithm = parts.config, parts.config.train, find_algorithm(parts.config.algorithm)
    lr = config.train.lr_of(sum(each.numel() for each in parts.learner.model.parameters()), config.lora.rank > 0)
    rules = {
        "from": step + 1, "algorithm": reference_of(config.algorithm), "loss": asdict(algorithm.complete(config.loss)),
        "optim": asdict(replace(train.named(), lr=lr, total_steps=train.total_steps or train.steps)),
        "seed": config.seed, "window": config.rollout.max_lag, "exact": parts.exact,
        "recomputes": config.rollout.at_update != "keep", "full": parts.ledger.bounds is not HALF,
        "shares": parts.engine.shares_weights, "truncates": parts.ledger.truncates, "reward": repr(parts.agent.reward),
        "call_bonus": [config.rollout.call_bonus, config.rollout.call_bonus_steps],
    }  # fmt: skip
    return {
        "kind": "train", "model": config.agent.model, "world": config.agent.env or config.data.name,
        "algorithm": algorithm.name, "seed": config.seed, "total_steps": config.train.steps, **parts.spending.meta,
        "revisions": revisions(parts),
        "rules": [*(earlier for earlier in parts.writer.store.meta().get("rules", ()) if earlier["from"] <= step), rules],
    }  # fmt: skip
