"""The checks of a run. Each function returns what it has seen, as evidence, and adds problems to its `Check`.

`rows`, `tokens`, `versions`, `texts` and `rewards` have those of single chains already, see `records`.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..build import build_tasks
from ..engines import engine_options
from ..errors import ConfigError
from ..protocols import GroupResult
from ..runs.checkpoints import STATE, broken_files, step_of
from ..training.draws import TaskDraws
from ..training.evidence import format_of, gap_limit
from ..types import Outcome, Task
from .records import Chain, Check, Run, Skip
from .replay import PROMISES as REPLAYED

MAX_HANDOVER_GAP = 0.05
"""The limit of the engines that hold a copy of the weights, unless their option `max_gap` sets another."""


def _stored(run: Run, check: Check) -> str:
    if not run.num_stored:
        raise Skip("no chain is stored")
    return ", ".join(f"{count:,} {split} chains" for split, count in sorted(run.num_stored.items())) + " decoded"


def _made(run: Run, check: Check) -> str:
    """Of a check that was made when the chains were read."""
    if check.skipped is not None:
        raise Skip(check.skipped)
    return check.evidence


def _versions(run: Run, check: Check) -> str:
    chains = run.trained()
    versions, went_back = run.series("train/version"), run.series("train/restarted_from")
    for earlier, later in zip(run.steps, run.steps[1:], strict=False):
        most = later - earlier + (earlier in went_back)
        if earlier in versions and later in versions and not 0 <= versions[later] - versions[earlier] <= most:
            check.add(
                f"the weights are at version {versions[earlier]:g} in step {earlier} and at {versions[later]:g} in step {later}"
            )
    for chain in chains:
        # The version grows by at most 1 per step, so it is at most the number of finished steps.
        published = int(versions.get(chain.step, chain.step - 1))
        if chain.versions and max(chain.versions) > published:
            reached = f"had reached {published}" if chain.step in versions else f"cannot be beyond {published}"
            check.add(
                f"chain {chain.id} of step {chain.step} has tokens of version {max(chain.versions)}; the weights {reached}"
            )
    return f"versions up to {max((max(chain.versions) for chain in chains if chain.versions), default=0)}"


def _lag(run: Run, check: Check) -> str:
    chains, rollout = run.trained(), run.settings().rollout
    versions = run.series("train/version")
    if not versions:
        raise Skip("the run did not record train/version")
    max_lag, masks = getattr(rollout, "max_lag", 0), getattr(rollout, "at_limit", "wait") == "mask"
    masked = run.series("train/masked_tokens")
    largest = 0
    for step in run.steps:
        old = 0
        for chain in run.chains[step]:
            if step not in versions or not chain.trainable:
                continue
            lag = int(versions[step]) - min(chain.versions)
            largest = max(largest, lag)
            if lag > max_lag:
                old += sum(count for version, count in chain.versions.items() if version < versions[step] - max_lag)
                if not masks:
                    check.add(f"chain {chain.id} was trained in step {step} with tokens {lag} versions old (limit {max_lag})")
        if masks and old and not masked.get(step):
            check.add(f"step {step} has {old} tokens older than {max_lag} versions, and none were masked")
    checked = sum(chain.step in versions for chain in chains)
    return f"at most {largest} versions in {checked:,} chains; rollout.max_lag is {max_lag}"


def _groups(run: Run, check: Check) -> str:
    run.trained()
    settings = run.settings().rollout
    failed: Counter[str] = Counter()
    num_groups = 0
    for step in run.steps:
        chains = run.chains[step]
        # A run that was resumed with other settings says in its metrics how many chains a step has.
        planned = settings.num_tasks * settings.num_chains
        expected = int(run.metrics[step].get("rollout/chains", planned))
        size = (
            settings.num_chains
            if expected == planned or settings.refill
            else max((chain.number for chain in chains), default=0) + 1
        )
        if len(chains) != expected:
            check.add(f"step {step} has {len(chains)} of {expected} chains")
        groups: dict[Any, list[Chain]] = defaultdict(list)
        for chain in chains:
            groups[chain.drawn or (chain.task, chain.draw)].append(chain)
            if not Outcome(chain.outcome).trainable:
                failed[chain.outcome] += 1
        num_groups += len(groups)
        for group in groups.values():
            for problem in _group_problems(group, size):
                check.add(f"step {step}, task {group[0].task!r}: {problem}")
    lost = ", ".join(f"{count} ended in {outcome}" for outcome, count in failed.most_common()) or "no chain failed"
    return f"{len(run.steps)} steps, {num_groups:,} groups; {lost}"


def _group_problems(group: list[Chain], num_chains: int) -> Iterator[str]:
    if len({(chain.task, chain.draw) for chain in group}) > 1:
        yield f"chains of different tasks share the place {group[0].drawn} of the draws"
    numbers = sorted(chain.number for chain in group)
    if numbers != list(range(num_chains)):
        yield f"the group has the chains {numbers} instead of 0 to {num_chains - 1}"
    if len({chain.prompt for chain in group} - {None}) > 1:
        yield "sibling chains have different prompts"


def _once(run: Run, check: Check) -> str:
    counted = Counter(chain.id for chains in run.chains.values() for chain in chains)
    if not counted:
        raise Skip("no chain is stored")
    for name, count in counted.items():
        if count > 1:
            check.add(f"chain {name} is stored {count} times")
    return f"{len(counted):,} different ids"


def _draws(run: Run, check: Check) -> str:
    """Tasks are drawn in the order of the sampler; a chain's id says for which step and position its task was drawn."""
    drawn, places, names = _places(run)
    holes = set(range(max(drawn) + 1)) - set(drawn)
    ahead = _in_flight(run)
    if len(holes) > ahead:
        check.add(
            f"{len(holes)} of {max(drawn) + 1} draws were not trained, but at most {ahead} are in flight: the first is "
            f"{names(min(holes))}"
        )
    try:
        for number, task in enumerate(_order(run, places)):
            if number in drawn and drawn[number] != task.id:
                check.add(f"{names(number)} holds task {drawn[number]!r}, but the sampler draws {task.id!r} there")
    except ConfigError as error:
        raise Skip(f"the rows cannot be drawn again: {error}") from None
    return f"{len(drawn):,} draws, {len(holes)} before the last one in flight"


def _order(run: Run, places: dict[int, tuple[int, int]]) -> Iterator[Task]:
    """The tasks as the sampler draws them again. It learns after each step what came of the stored groups."""
    draws = TaskDraws(_load_tasks(run), run.settings().data, run.settings().seed)
    if draws.learns and run.settings().rollout.steps_ahead:
        raise Skip("the sampler learns, and rows were drawn while steps were learned: their order cannot be compared")
    groups: dict[tuple[int, int] | None, list[Chain]] = defaultdict(list)
    for chain in run.trained():
        groups[chain.drawn].append(chain)
    rows: dict[tuple[int, int], int] = {}  # of the running step
    for number in range(max(places) + 1):
        place = places.get(number, (0, 0))
        if rows and draws.learns and place[0] != next(iter(rows))[0]:
            for drawn, row in rows.items():
                chains = sorted((chain for chain in groups[drawn] if chain.trainable), key=lambda chain: chain.number)
                draws.learn(GroupResult(row, tuple(chain.total for chain in chains), tuple(chain.success for chain in chains)))
            rows = {}
        rows[place], task = draws.draw()
        yield task


def _places(run: Run) -> tuple[dict[int, str], dict[int, tuple[int, int]], Callable[[int], str]]:
    """By the number of their draw: the tasks, and the steps and positions; and the name of a draw by its number."""
    chains, rollout = run.trained(), run.settings().rollout
    per_step = rollout.num_tasks
    if any(chain.drawn is None for chain in chains):
        raise Skip("the chains' ids do not say which draw they belong to")
    tasks = {chain.drawn or (0, 0): chain.task for chain in chains}
    if not tasks or (not rollout.refill and max(position for _, position in tasks) >= per_step):
        raise Skip("the run was continued with another rollout.num_tasks")
    if rollout.refill and not rollout.steps_ahead:  # a step draws as many as it needs, one after the other
        numbers = {place: number for number, place in enumerate(sorted(tasks))}
    else:
        numbers = {(step, position): (step - 1) * per_step + position for step, position in tasks}
    places = {number: place for place, number in numbers.items()}

    def name(number: int) -> str:
        step, position = places.get(number, (number // per_step + 1, number % per_step))
        return f"position {position} of step {step}"

    return {numbers[place]: task for place, task in tasks.items()}, places, name


def _in_flight(run: Run) -> int:
    in_flight = run.series("ledger/in_flight")
    if run.steps[-1] in in_flight:
        return int(in_flight[run.steps[-1]])
    return run.settings().rollout.num_tasks * int(getattr(run.settings().rollout, "steps_ahead", 0))


def _load_tasks(run: Run) -> list[Task]:
    """The rows that the config names. Skips if they are not those of the run."""
    if run.settings().data.name is None:
        raise Skip("the rows were given in Python: the order of the draws cannot be compared")
    try:
        tasks = build_tasks(run.settings())[0]
    except Exception as error:  # noqa: BLE001 - a task set of the user's may raise anything
        raise Skip(f"the rows cannot be loaded: {error}") from None
    by_id = {task.id: task for task in tasks}
    for name, task in run.tasks.items():
        if name not in by_id or by_id[name].messages != task.messages:
            raise Skip(f"the rows have changed since the run: task {name!r} is not among them as it was")
    return tasks


def _books(run: Run, check: Check) -> str:
    run.trained()
    names = ("trained", "filtered", "failed", "in_flight")
    books = {step: values for step, values in run.metrics.items() if "ledger/drawn" in values and step in run.steps}
    if not books:
        raise Skip("the run did not record ledger/drawn")
    for step, values in books.items():
        parts = {name: values.get(f"ledger/{name}", 0.0) for name in names}
        if sum(parts.values()) != values["ledger/drawn"]:
            sums = ", ".join(f"{count:g} {name}" for name, count in parts.items())
            check.add(f"step {step}: {values['ledger/drawn']:g} tasks were drawn, but {sums} are {sum(parts.values()):g}")
    last = books[max(books)]
    return ", ".join(f"{last.get(f'ledger/{name}', 0):g} {name.replace('_', ' ')}" for name in ("drawn", *names))


def _metrics(run: Run, check: Check) -> str:
    if not run.metrics:
        raise Skip("no metrics are stored")
    for step, values in sorted(run.metrics.items()):
        for name, value in values.items():
            if not math.isfinite(value) and not _may_be_nan(run, step, name, value):
                check.add(f"step {step}: {name} is {value}")
    for step in run.steps:
        _compare(check, step, run.metrics[step], run.chains[step])
    copied = 0
    for step, name, value in _copies(run):
        stored = run.metrics.get(step, {}).get(name)
        copied += 1
        if stored is not None and math.isfinite(stored) and stored != value:
            check.add(f"step {step}: {name} is {stored:g}, but {value:g} in metrics.jsonl")
    return (
        f"{sum(map(len, run.metrics.values())):,} values of {len(run.metrics)} steps, {copied:,} of them also in metrics.jsonl"
    )


def _copies(run: Run) -> Iterator[tuple[int, str, float]]:
    """The values that the tracker wrote of each step, the last one of a name."""
    copies: dict[tuple[int, str], float] = {}
    path = run.directory.path / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            values = json.loads(line)
            copies |= {(values["step"], name): value for name, value in values.items() if isinstance(value, float)}
        except (ValueError, LookupError, TypeError, AttributeError):
            continue  # the last line of a run that was killed
    copies = {(step, name): value for (step, name), value in copies.items() if name != "time"}
    yield from ((step, name, value) for (step, name), value in copies.items())


def _may_be_nan(run: Run, step: int, name: str, value: float) -> bool:
    """The mean of no chains is NaN. pass@k and pass^k need scored chains."""
    if math.isinf(value):
        return False
    if name.startswith("validation/"):
        return name.startswith("validation/pass_") or (step, "validation") not in run.scored
    return name.startswith(("reward/", "rollout/")) and (step, "train") not in run.scored


def _compare(check: Check, step: int, values: dict[str, float], chains: list[Chain]) -> None:
    """The metrics that the chains of a step determine."""
    scores = [chain.total for chain in chains if chain.scored]
    own = {
        "rollout/chains": float(len(chains)),
        "rollout/trainable": float(sum(chain.trainable for chain in chains)),
        "rollout/tokens": float(sum(chain.num_tokens for chain in chains)),
        **({"reward/mean": math.fsum(scores) / len(scores)} if scores else {}),
    }
    for name, value in own.items():
        if name in values and not math.isclose(values[name], value, rel_tol=1e-6, abs_tol=1e-9):
            check.add(f"step {step}: {name} is {values[name]:g}, but that of the stored chains is {value:g}")


def _gap(run: Run, check: Check) -> str:
    gaps = {step: gap for step, gap in run.series("train/logprob_gap").items() if step in run.steps}
    if not gaps:
        raise Skip("the run did not record train/logprob_gap")
    limit = run.settings().train.max_logprob_gap
    if limit is None:  # as for training
        exact = bool(run.rules) and run.rules[-1]["shares"]
        full = run.rules[-1]["full"] if run.rules else _in_float32(run.checkpoints)
        bounds = format_of(in_full=full, exact=exact)
        limit = gap_limit(bounds, gaps[min(gaps)]) if run.rules else bounds.high
    for step, gap in gaps.items():
        if not gap <= limit:
            check.add(f"step {step}: sampled and recomputed log-probs differ by {gap:.4g} nats (limit {limit:g})")
    return f"at most {max(gaps.values()):.2g} nats (limit {limit:g})"


def _in_float32(checkpoints: list[Path]) -> bool:
    """Whether the newest checkpoint says so."""
    for path in reversed(checkpoints):
        try:
            settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
            return "float32" in (settings.get("dtype"), settings.get("torch_dtype"))
        except (OSError, ValueError, AttributeError):
            continue
    return False


def _steps(run: Run, check: Check) -> str:
    if not run.steps:
        raise Skip("no training step is stored")
    for step in sorted(set(range(1, run.steps[-1] + 1)) - set(run.steps)):
        check.add(f"step {step} is missing: the last stored step is {run.steps[-1]}")
    for step in run.steps:
        if not run.chains[step]:
            check.add(f"step {step} has metrics, but no chains")
    later = sum(len(chains) for step, chains in run.chains.items() if step > run.steps[-1])
    return f"steps 1 to {run.steps[-1]}" + (f"; {later} chains of an unfinished step" if later else "")


def _checkpoints(run: Run, check: Check) -> str:
    if not run.checkpoints:
        raise Skip("there is no checkpoint")
    for path in run.checkpoints:
        files = broken_files(path)
        if files and path.exists():  # the trainer may have removed an old one meanwhile
            check.add(f"{path.name}: missing or altered: {', '.join(files[:3])}")
        step = step_of(path)
        if step and run.steps and step not in run.metrics:
            check.add(f"{path.name} is of a step that the store does not have")
        elif not files and (path / STATE).is_file():
            _optimizer_steps(path, check)
    return f"{len(run.checkpoints)} found: {', '.join(path.name for path in run.checkpoints)}"


def _optimizer_steps(path: Path, check: Check) -> None:
    """Compare the averages' counts with the one that the learner wrote down: a state that changed while saved differs."""
    from ..learn.model.storage import load_state
    from ..learn.optim import counted_steps

    learner = load_state(path / STATE, mapped=True)["learner"]
    for name in ("optimizer", "critic_optimizer"):
        state = learner[name] or {}
        if "steps" in state and (counted := counted_steps(state["adam"]["state"])) != state["steps"]:
            check.add(f"{path.name}: the averages of {name!r} hold {counted} steps instead of {state['steps']}: resume another")


def _handover(run: Run, check: Check) -> str:
    run.trained()
    gaps, moved = run.series("handover/gap"), run.series("handover/moved")
    if not gaps:
        raise Skip("the engine shares the learner's weights, so there are none")
    limit = float(engine_options(run.settings().agent.engine).get("max_gap") or MAX_HANDOVER_GAP)
    first = min(gaps)
    for step in run.steps:
        if step > first and (step not in gaps or step not in moved):
            check.add(f"step {step} has no proof that the engine received its weights")
    for step, gap in gaps.items():
        if not 0.0 <= gap <= limit:
            check.add(f"step {step}: engine and learner differ by {gap:.4g} nats after the hand-over (limit {limit:g})")
    return f"{len(gaps)} proofs; at most {max(gaps.values()):.2g} nats (limit {limit:g})"


def _trained(run: Run, check: Check) -> str:
    if not run.num_learned.total():
        raise Skip("the run did not record which tokens were trained")
    for step in run.steps:
        trainable = sum(chain.trainable for chain in run.chains[step])
        # A run that was resumed by this version has no records of its earlier steps.
        if run.num_learned[step] and run.num_learned[step] != trainable:
            check.add(f"step {step} has {trainable} trainable chains, but the learner recorded {run.num_learned[step]}")
    return f"{run.num_learned.total():,} chains"


def _ledger(run: Run, check: Check) -> str:
    if not run.checked:
        raise Skip("the run did not record its checks")
    for step, name, ok in run.checked:
        if not ok and step in run.steps:
            check.add(f"step {step} counts, but its check {name} failed")
    return f"{len(run.checked):,} checks of {len({step for step, _, _ in run.checked})} steps"


CHECKS: dict[str, tuple[str, Callable[[Run, Check], str]]] = {
    "rows": ("every stored chain can be read, and its columns agree with it", _stored),
    "tokens": ("ids, mask, log-probs and versions of every chain agree", _stored),
    "texts": ("the text of every reply is that of its token ids", _made),
    "versions": ("versions never decrease in a chain and never exceed the published one", _versions),
    "trained": ("the learner's records fit the chains, and no failed chain was trained", _trained),
    "ledger": ("every invariant that was checked at a step that counts held", _ledger),
    "lag": ("no token was trained that was older than rollout.max_lag versions", _lag),
    "groups": ("every group of every step is complete, and its siblings share a prompt", _groups),
    "once": ("no chain is counted twice", _once),
    "draws": ("the tasks are those that the sampler draws: none dropped, none repeated", _draws),
    "books": ("every task drawn was trained, filtered, failed or is in flight", _books),
    "rewards": ("rewards are finite, and their parts add up to the total", _stored),
    "metrics": ("metrics are finite and agree with the stored chains", _metrics),
    "gap": ("sampled and recomputed log-probs agree", _gap),
    "steps": ("no step is missing", _steps),
    "checkpoints": ("checkpoints match their manifests and belong to stored steps", _checkpoints),
    "handover": ("every hand-over of weights to the engine is proven", _handover),
    **{name: (promise, _made) for name, promise in REPLAYED.items()},
}
"""The promise of each check, and the function that makes it."""
