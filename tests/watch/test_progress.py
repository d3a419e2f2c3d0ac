"""The display: plain lines in a log, a live view on a terminal."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from agentfly.watch.progress import Progress, duration, environment_lines, short, sparkline, summary_line

STEP = {
    "reward/mean": 0.4125, "rollout/success": 0.375, "rollout/turns": 2.1, "rollout/tool_calls": 1.25,
    "rollout/tokens_per_s": 1234.4, "time/step_s": 2.0,
}  # fmt: skip


def terminal(**options: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, **options)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_a_step_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10) as progress:
        progress.chains(3, 8)
        progress.step(1, STEP)
        progress.step(2, {**STEP, "validation/success": 0.5})
        progress.note("saved")
        progress.step(10, {"reward/mean": math.nan})
    assert capsys.readouterr().out.splitlines() == [
        "step 1/10  reward 0.412  success 0.38  turns 2.1  tool calls 1.2  1,234 tokens/s  18s left",
        "step 2/10  reward 0.412  success 0.38  turns 2.1  tool calls 1.2  1,234 tokens/s  held-out success 0.50  16s left",
        "saved",
        "step 10/10  reward -",
    ]


def test_a_console_that_is_a_file_gets_plain_lines_too() -> None:
    console = Console(file=io.StringIO(), width=20)
    with Progress(2, console) as progress:
        progress.step(1, STEP)
        progress.note("[bold]as it is[/bold]")
    assert written(console).splitlines()[0].startswith("step 1/2  reward 0.412")
    assert written(console).splitlines()[1] == "[bold]as it is[/bold]"
    assert "\x1b" not in written(console)


def test_supervised_steps_show_their_loss() -> None:
    assert summary_line(1, 2, {"train/loss": 0.5, "validation/nll": 0.25}) == "step 1/2  loss 0.5000  held-out loss 0.2500"


def test_on_a_terminal_the_display_is_live_and_gives_the_cursor_back() -> None:
    console = terminal()
    with Progress(10, console) as progress:
        progress.chains(3, 8)
        progress.step(1, {**STEP, "validation/success": 0.25})
        progress.chains(5, 8)
        progress.note("[red]a note")
        progress.step(2, {**STEP, "reward/mean": 0.9})
    text = written(console)
    for part in (
        "2/10",
        "16s left",
        "reward 0.900",
        "success 0.38",
        "tool calls 1.2",
        "1,234 tokens/s",
        "held-out success 0.25",
        "[red]a note",
    ):
        assert part in text
    assert "\x1b[?25l" in text  # the cursor is hidden,
    assert text.rstrip().endswith("\x1b[?25h")  # and shown again at the end


def test_the_bar_within_a_step_shows_finished_chains() -> None:
    console = terminal()
    progress = Progress(10, console)
    progress.chains(5, 8)
    console.print(progress._render())
    assert "sampling" in written(console)
    assert "5/8 chains" in written(console)
    progress.chains(8, 8)
    console.print(progress._render())
    assert "learning" in written(console)


def test_time_left_is_the_mean_of_the_last_steps_and_nothing_at_the_ends() -> None:
    now = [0.0]
    progress = Progress(10, Console(file=io.StringIO()), clock=lambda: now[0])
    assert progress.seconds_left is None
    progress.start()
    for step, seconds in ((7, 4.0), (8, 2.0)):  # a resumed run begins at 7
        now[0] += seconds
        progress.step(step, {})
    assert progress.seconds_left == 2 * 3.0
    progress.step(10, {})
    assert progress.seconds_left is None


def test_starting_and_stopping_twice_is_fine() -> None:
    console = terminal()
    progress = Progress(1, console)
    progress.stop()
    progress.start()
    progress.start()
    progress.stop()
    progress.stop()
    progress.note("after")
    assert "after" in written(console)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (60, "1m00s"), (130, "2m10s"), (11100, "3h05m"), (-1, "0s")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_sparkline_goes_from_low_to_high() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0, 1.0]) == "▁▁"


ENVIRONMENTS = {
    f"resources/{kind}/{name}": value
    for kind, lent in (("Shop", 12.0), ("total", 12.0))
    for name, value in {
        "allocated": lent, "idle": 4.0, "warming": 2.0, "waiting": 7.0, "recycled": 3.0, "failed": 1.0, "acquire_s": 0.0123,
        "lease_s": 2.5,
    }.items()
}  # fmt: skip
SHOP = "Shop: 12 leased, 4 idle, 2 warming, 7 waiting, 3 recycled, 1 failed; acquire 12.3 ms, held 2.5 s"


def test_the_live_display_tells_how_the_environments_are_while_chains_run() -> None:
    console = terminal()
    with Progress(10, console) as progress:
        progress.chains(0, 8)
        progress.environments(ENVIRONMENTS)
        progress.step(1, STEP)
    assert SHOP in written(console)


def test_environments_are_lines_by_kind_and_a_step_counts_them() -> None:
    assert environment_lines(ENVIRONMENTS) == [SHOP]
    assert environment_lines({}) == []
    assert environment_lines({"resources/Shop/allocated": 1.0})[0].startswith("Shop: 1 leased, - idle")
    line = summary_line(1, 2, {"reward/mean": 1.0, "rollout/envs": 16.0, **ENVIRONMENTS})
    assert line == "step 1/2  reward 1.000  16 envs (1 failed so far)"
    assert summary_line(1, 2, {"reward/mean": 1.0, "rollout/envs": 0.0}) == "step 1/2  reward 1.000"
    assert [short(value) for value in (0.0, 4e-6, 0.25, 90.0, math.nan)] == ["0 us", "4 us", "250.0 ms", "90.0 s", "-"]
