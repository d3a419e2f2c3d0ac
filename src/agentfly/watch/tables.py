"""Prints a trajectory, the table at the end of a run, and lists of metrics on a rich console.

A model's text is printed literally: markup in it is not interpreted, and control codes are replaced by visible characters.

    assistant · turn 1 · 23 tokens trained          the bar marks tokens that the policy sampled; the rest is context
    ▌ Thought: multiply
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..display import visible
from ..types import Trajectory, Turn
from .held_out import interval_text, is_part, left_out
from .honesty import Honesty
from .metrics import METRICS, describe, unknown
from .progress import duration, number

if TYPE_CHECKING:
    from rich.console import Console

COUNTS = ("tasks", "chains", "scored", "judged_answers")
"""Metrics that are shown without decimals."""
STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def why_untrained(trajectory: Trajectory, split: str, step: int, skipped: Mapping[int, float]) -> str | None:
    """Why the tokens of a stored chain changed no weights, or None if they did.

    `skipped` has the metric train/skipped of every finished step.
    """
    if split != "train":
        return "a held-out task"
    if not trajectory.outcome.trainable:
        return f"the chain ended in {trajectory.outcome.value}"
    if not trajectory.trainable:
        return "no reward" if trajectory.reward is None else "no token ids"
    if step not in skipped:
        return f"step {step} is not finished"
    return f"step {step} was skipped, because every advantage was 0" if skipped[step] else None


def show_trajectory(
    console: Console,
    trajectory: Trajectory,
    untrained: str | None = None,
    *,
    trained: Sequence[bool] | None = None,
    advantage: float | None = None,
) -> None:
    """Prints the outcome and the messages of a chain, and marks its replies.

    `untrained` says why they are not trained on; without it, a trainable chain was trained on. `trained` is the learner's
    record: for each sampled token of the chain, whether it was in the loss of an optimizer step.
    """
    from rich.text import Text

    plain = console.options.ascii_only
    mark, hollow, dot = ("|", ":", "-") if plain else ("▌", "┆", "·")
    if untrained is None and not trajectory.trainable:
        untrained = why_untrained(trajectory, "train", 0, {})
    word = "trained" if untrained is None else "sampled, not trained on"
    sampled, counts = sampled_turns(trajectory), _trained_by_turn(trajectory, trained)
    suffix = "" if advantage is None else f", advantage {number(advantage, 3)}"
    _print(console, Text(clean(_headline(trajectory) + suffix, plain), style="bold"))
    if trajectory.error:
        _print(console, Text(clean(trajectory.error, plain), style="red"))
    if faults := Honesty.of(trajectory).faults:
        _print(console, Text(", ".join(faults), style="yellow"))
    for index, message in enumerate(trajectory.messages):
        style = STYLES.get(message.role, "")
        head = [message.role if message.name is None else f"{message.role} {message.name}"]
        gutter = "  "
        if index in sampled:
            number_of_turn, turn = sampled[index]
            size, count = len(turn.completion.token_ids), counts[number_of_turn] if counts else None
            part = (
                f"{size} tokens {word}"
                if count in (None, size) or untrained is not None
                else f"{count} of {size} tokens trained"
            )
            head += [f"turn {number_of_turn + 1}", part, *([f"new row: {turn.why}"] if turn.why not in ("", "first") else [])]
            head += [f"turn reward {number(turn.reward, 3)}"] if turn.reward else []
            gutter = f"{mark} " if count != 0 or untrained is not None else f"{hollow} "
        _print(console, Text(clean(f" {dot} ".join(head), plain), style=f"{style} bold"))
        for line in clean(message.content, plain).split("\n"):
            _print(console, Text.assemble((gutter, "bold"), (line, style)))
        for _ in message.images:
            _print(console, Text("  [image]", style="dim"))
    suffix = " and trained on" if untrained is None else f", not trained on: {untrained}"
    _print(console, Text(f"{mark} sampled by the policy{suffix}", style="dim"))
    if counts and untrained is None and 0 in counts:
        _print(console, Text(f"{hollow} sampled by the policy, left out of the loss", style="dim"))


def _trained_by_turn(trajectory: Trajectory, trained: Sequence[bool] | None) -> list[int] | None:
    """How many tokens of each turn were trained; None if that is not recorded for exactly the tokens of the chain."""
    if trained is None or len(trained) != trajectory.num_sampled:
        return None
    counts, start = [], 0
    for turn in trajectory.turns:
        end = start + len(turn.completion.token_ids)
        counts.append(sum(map(bool, trained[start:end])))
        start = end
    return counts


def before_after(console: Console, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Prints each metric of the held-out tasks before the first step and after the last."""
    from rich.table import Table

    table = Table("", "before", "after", "change", title="held-out tasks", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in _ordered({**before, **after}):
        if is_part(name):
            continue
        left, right = before.get(name, math.nan), after.get(name, math.nan)
        change = right - left
        sign, decimals = "+" if change > 0 else "", 3 * (name.rpartition("/")[2] not in COUNTS)
        cells = [number(side.get(name, math.nan), decimals) + interval_text(side, name) for side in (before, after)]
        table.add_row(name.removeprefix("validation/"), *cells, sign + number(change, decimals))
    console.print(table)
    _notes(console, {"before": before, "after": after})


def cost_line(metrics: Mapping[str, float]) -> str:
    """What a run has used, in words: `used 12m05s, 725 GPU-seconds, $0.81; 4.2 points of held-out success per dollar`."""
    parts = [f"used {duration(metrics['cost/wall_s'])}"]
    for name, before, after, decimals in (
        ("gpu_s", "", " GPU-seconds", 0), ("cpu_s", "", " processor-seconds", 0), ("dollars", "$", "", 2),
    ):  # fmt: skip
        if (value := metrics.get(f"cost/{name}")) is not None:
            parts.append(f"{before}{number(value, decimals)}{after}")
    gained = metrics.get("cost/points_per_dollar")
    return ", ".join(parts) + ("" if gained is None else f"; {number(gained, 1)} points of held-out success per dollar")


def metrics_table(console: Console, metrics: Mapping[str, float]) -> None:
    """Prints metrics with their meaning."""
    from rich.table import Table

    table = Table("metric", "value", "meaning")
    table.columns[1].justify = "right"
    for name in _ordered(metrics):
        if is_part(name):
            continue
        meaning = "" if unknown([name]) else describe(name).description
        value = number(metrics[name], 3 * (name.rpartition("/")[2] not in COUNTS)) + interval_text(metrics, name)
        table.add_row(name, value, meaning)
    console.print(table)
    _notes(console, {"": metrics})


def _notes(console: Console, sides: Mapping[str, Mapping[str, float]]) -> None:
    """What the figures in brackets are, and how many chains are missing from them."""
    from rich.text import Text

    if any("validation/success_ci_low" in metrics for metrics in sides.values()):
        _print(console, Text("in brackets: the 95 % interval, by resampling tasks", style="dim"))
    if any("validation/success_min" in metrics for metrics in sides.values()):
        _print(console, Text("of all: chains without a score counted as failures and as successes", style="dim"))
    for side, metrics in sides.items():
        if (note := left_out(metrics)) is not None:
            _print(console, Text(f"{side}: {note}" if side else note, style="yellow"))


def sampled_turns(trajectory: Trajectory) -> dict[int, tuple[int, Turn]]:
    """The turn of each sampled message, by the index of the message. Assistant messages of the task are not sampled."""
    replies = [index for index, message in enumerate(trajectory.messages) if message.role == "assistant"]
    given = max(0, len(replies) - len(trajectory.turns))
    return dict(zip(replies[given:], enumerate(trajectory.turns), strict=False))


def clean(text: str, ascii_only: bool = False) -> str:
    """The text with control codes replaced by visible characters, so that a model's output cannot control the terminal."""
    text = visible(text)
    return text.encode("ascii", "backslashreplace").decode("ascii") if ascii_only else text


def _headline(trajectory: Trajectory) -> str:
    reward = "no reward" if trajectory.reward is None else f"reward {number(trajectory.total_reward, 3)}"
    parts = ", ".join(f"{name} {number(value, 3)}" for name, value in trajectory.components.items())
    return (
        f"{trajectory.id}: task {trajectory.task.id}, {trajectory.outcome.value}, {reward}"
        + (f" ({parts})" if parts else "")
        + f", {len(trajectory.turns)} turns, {trajectory.num_sampled} tokens, {trajectory.seconds:.1f} s"
    )


def _ordered(names: Mapping[str, float]) -> list[str]:
    """Sorted by the order of the table of metrics; names that it does not have come last."""
    place = {name: index for index, name in enumerate(METRICS)}
    return sorted(
        names, key=lambda name: (place.get(name, place.get(describe(name).name, 99) if not unknown([name]) else 99), name)
    )


def _print(console: Console, text: object) -> None:
    # Soft wrap: long lines are not cut, so they can be copied.
    console.print(text, soft_wrap=True)
