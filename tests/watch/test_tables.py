"""What is printed once: trajectories with the trained part marked, and the closing table."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from agentfly.types import Completion, Message, Outcome, Task, Trajectory, Turn
from agentfly.watch.tables import before_after, metrics_table, show_trajectory, why_untrained


def reply(text: str) -> Completion:
    ids = [*text.encode(), 257]
    return Completion(text=text, token_ids=ids, logprobs=[-0.5] * len(ids), versions=[0] * len(ids))


def chain(**changes: Any) -> Trajectory:
    messages = [
        Message("user", "An example?"),
        Message("assistant", "Like this."),
        Message("user", "12 x 7?"),
        Message("assistant", "Action: multiply"),
        Message("tool", "84", name="multiply"),
        Message("assistant", "Answer:\n84"),
    ]
    turns = [Turn([*b"Q: "], True, reply("Action: multiply")), Turn([*b" O: 84 "], False, reply("Answer:\n84"), reward=0.5)]
    given = {"outcome": Outcome.FINISHED, "prediction": "84", "reward": 1.0, "components": {"exact": 1.0}, "seconds": 1.25}
    return Trajectory("c1", Task("t7", tuple(messages[:3])), 0, messages, turns, **(given | changes))


def printed(show: Any, *args: Any, **options: Any) -> str:
    file = io.StringIO()
    show(Console(file=file, width=100, **options), *args)
    return file.getvalue()


def test_a_reply_says_why_a_new_row_begins_with_it() -> None:
    shown = chain()
    shown.turns[0].why, shown.turns[1].why = "first", "history cut"
    lines = printed(show_trajectory, shown).splitlines()
    assert "assistant · turn 1 · 17 tokens trained" in lines
    assert "assistant · turn 2 · 11 tokens trained · new row: history cut · turn reward 0.500" in lines


def test_a_trajectory_shows_roles_and_marks_what_is_trained() -> None:
    assert printed(show_trajectory, chain()).splitlines() == [
        "c1: task t7, finished, reward 1.500 (exact 1.000), 2 turns, 28 tokens, 1.2 s",
        "user",
        "  An example?",
        "assistant",
        "  Like this.",
        "user",
        "  12 x 7?",
        "assistant · turn 1 · 17 tokens trained",
        "▌ Action: multiply",
        "tool multiply",
        "  84",
        "assistant · turn 2 · 11 tokens trained · turn reward 0.500",
        "▌ Answer:",
        "▌ 84",
        "▌ sampled by the policy and trained on",
    ]


def test_a_chain_that_is_not_trained_on_says_so() -> None:
    text = printed(
        show_trajectory, chain(outcome=Outcome.WORLD_FAILURE, reward=None, components={}, error="WorldError: it broke")
    )
    assert "world_failure, no reward" in text
    assert "WorldError: it broke" in text
    assert "17 tokens sampled, not trained on" in text
    assert "and trained on" not in text


@pytest.mark.parametrize(
    ("split", "step", "changes", "why"),
    [
        ("train", 1, {}, None),
        ("validation", 1, {}, "a held-out task"),
        ("train", 2, {}, "step 2 was skipped, because every advantage was 0"),
        ("train", 3, {}, "step 3 is not finished"),
        ("train", 1, {"outcome": Outcome.TOOL_ERROR, "reward": None}, "the chain ended in tool_error"),
        ("train", 1, {"reward": None}, "no reward"),
        ("train", 1, {"turns": []}, "no token ids"),
    ],
)
def test_trained_on_is_said_only_of_chains_that_changed_the_weights(
    split: str, step: int, changes: dict[str, Any], why: str | None
) -> None:
    stored = chain(**{name: value for name, value in changes.items() if name != "turns"})
    stored.turns = changes.get("turns", stored.turns)
    assert why_untrained(stored, split, step, {1: 0.0, 2: 1.0}) == why
    text = printed(show_trajectory, stored, why)
    assert text.endswith("and trained on\n" if why is None else f"sampled by the policy, not trained on: {why}\n")
    assert ("tokens trained" in text) == (why is None)


def test_roles_have_colours_on_a_terminal() -> None:
    text = printed(show_trajectory, chain(), force_terminal=True, color_system="standard")
    assert "\x1b[32mAction: multiply" in text
    assert "\x1b[36m12 x 7?" in text


def test_what_the_model_wrote_is_text_and_nothing_else() -> None:
    odd = chain()
    odd.messages[-1] = Message("assistant", "[red]x[/red] \x1b[2J\r\x9b2J \ud800 é")
    text = printed(show_trajectory, odd)
    assert "▌ [red]x[/red] ␛[2J␍\ufffd2J ? é" in text
    assert "\x1b" not in text


def test_a_terminal_that_has_only_ascii_still_shows_it() -> None:
    odd = chain()
    odd.messages[-1] = Message("assistant", "é\x1b")
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=100)
    show_trajectory(console, odd)
    before_after(console, {"validation/success": 0.0}, {"validation/success": 1.0})
    file.flush()
    text = file.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "assistant - turn 1 - 17 tokens trained\n| Action: multiply\n" in text
    assert "| \\xe9\\u241b" in text


def test_the_closing_table_shows_before_after_and_change() -> None:
    before = {"validation/turns": 3.0, "validation/success": 0.4, "validation/reward": 0.5}
    after = {"validation/success": 0.95, "validation/pass_at_4": 1.0, "validation/reward": math.nan, "validation/turns": 2.5}
    text = printed(before_after, before, after)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["success", "0.400", "0.950", "+0.550"],
        ["reward", "0.500", "-", "-"],
        ["turns", "3.000", "2.500", "-0.500"],
        ["pass_at_4", "-", "1.000", "-"],
    ]


def test_figures_come_with_their_meaning() -> None:
    text = printed(metrics_table, {"validation/success": 0.5, "mine": 2.0})
    assert "Share of held-out chains that succeeded, of those with a score." in text
    assert "mine" in text
    assert "2.000" in text
