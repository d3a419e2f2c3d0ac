"""Going back to the best checkpoint where a run has lost what it had learned (`train.restart_from_best`).

    validation -> worse than the best, or a plateau -> the weights, moments and coefficients of the best -> publish -> save

The step, the order of the rows, the seeds and the schedule go on, so the run takes another way from there. The version of the
weights rises by one, because no chain of an older version fits them.
"""

from __future__ import annotations

from ..runs.checkpoints import STATE, best_checkpoint, step_of
from .idle import Plateau
from .parts import RunParts
from .saving import finish_in_thread


async def go_back(parts: RunParts, plateau: Plateau, step: int) -> dict[str, float]:
    """Load the best checkpoint if `plateau` asks for it. Returns what the step records of it: nothing if it stays."""
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
