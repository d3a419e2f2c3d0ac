"""The display: plain lines in a log, a live view on a terminal."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from agentfly.watch.observers import Observers, RunWarnings
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
        progress.look(ENVIRONMENTS)
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


def plain_progress(steps: int = 10) -> tuple[Progress, Console, list[float]]:
    now = [0.0]
    console = Console(file=io.StringIO(), width=80)
    return Progress(steps, console, clock=lambda: now[0]), console, now


def test_a_log_has_a_line_for_each_phase_before_the_first_step_and_none_within_steps() -> None:
    progress, console, _ = plain_progress()
    with progress:
        progress.phase("opening the model pocket")
        progress.phase("validation", 400)
        for done in range(1, 401):
            progress.advance(done)
        progress.span("rollout")
        progress.span("learn")
        progress.step(1, {"reward/mean": 0.5})
        progress.phase("validation", 400)
    assert written(console).splitlines()[:2] == ["opening the model pocket", "validation: 400 chains"]
    assert len(written(console).splitlines()) == 3


def test_a_long_phase_tells_a_log_every_ten_seconds_how_far_it_is() -> None:
    progress, console, now = plain_progress()
    with progress:
        progress.phase("validation", 400)
        for done in range(1, 401):
            now[0] += 0.125
            progress.advance(done)
    assert written(console).splitlines() == [
        "validation: 400 chains",
        "validation: 80/400 chains  40s left",
        "validation: 160/400 chains  30s left",
        "validation: 240/400 chains  20s left",
        "validation: 320/400 chains  10s left",
    ]


def drawn(progress: Progress, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    progress._console = console
    from agentfly.watch.live_display import _Lines

    return ["".join(part.text for part in line) for line in console.render_lines(_Lines(progress._render()), pad=False)]


def test_the_display_says_what_happens_before_the_first_step_and_how_long_it_takes() -> None:
    now = [0.0]
    progress = Progress(20, terminal(), clock=lambda: now[0])
    progress.phase("opening the model pocket")
    now[0] = 12.0
    assert "opening the model pocket" in drawn(progress)[1] and drawn(progress)[1].rstrip().endswith("12s")
    progress.phase("validation", 400)
    progress.advance(100)
    now[0] = 22.0
    assert "100/400 chains  30s left" in drawn(progress)[1]
    progress.span("rollout")
    progress.chains(3, 8)
    assert "sampling" in drawn(progress)[1] and "3/8 chains" in drawn(progress)[1]
    for name, word in (("learn", "learning"), ("publish", "publishing"), ("save", "saving")):
        progress.span(name)
        assert drawn(progress)[1].startswith(word)


def test_time_left_runs_down_within_a_step_but_not_below_the_steps_that_remain() -> None:
    now = [0.0]
    progress = Progress(10, Console(file=io.StringIO()), clock=lambda: now[0])
    progress.step(1, {"time/step_s": 4.0})
    assert progress.seconds_left == 36.0
    now[0] += 3.0
    assert progress.seconds_left == 33.0
    now[0] += 100.0
    assert progress.seconds_left == 32.0


@pytest.mark.parametrize("width", [20, 40, 79, 200])
def test_no_row_is_wider_than_the_terminal(width: int) -> None:
    progress = Progress(10, terminal())
    progress.phase("validation of a run with a long name", 400)
    progress.look(ENVIRONMENTS)
    progress.step(1, {**STEP, "validation/success": 0.25})
    progress.phase("validation of a run with a long name", 400)
    rows = drawn(progress, width)
    assert max(map(len, rows)) <= width
    assert len(rows) == 4


def test_a_frame_that_did_not_change_is_not_drawn_again() -> None:
    now = [0.0]
    console = terminal()
    progress = Progress(10, console, clock=lambda: now[0])
    with progress:
        progress.chains(3, 8)
        progress._live.refresh()
        size = len(written(console))
        for _ in range(20):
            progress._live.refresh()
        assert len(written(console)) == size
        progress.chains(4, 8)
        progress._live.refresh()
        assert len(written(console)) > size


class Screen:
    """A terminal that wraps long lines again when its width changes, as most do. Knows the codes that the display uses."""

    def __init__(self, width: int) -> None:
        self.width, self.lines, self.row = width, [""], 0  # logical lines; the cursor is at the start or the end of one
        self.cursor = True

    def feed(self, text: str) -> None:
        import re

        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
            elif part == "\x1b[1A":
                self.row -= 1
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part in ("\x1b[?25l", "\x1b[?25h"):
                self.cursor = part.endswith("h")
            elif part == "\r" or part.startswith("\x1b"):
                continue
            else:
                self.lines[self.row] += part

    def resize(self, width: int) -> None:
        """Every row longer than the new width becomes several; the cursor stays after the last character."""
        wrapped: list[str] = []
        row = 0
        for number, line in enumerate(self.lines):
            wrapped += [line[at : at + width] for at in range(0, len(line), width)] or [""]
            row = len(wrapped) - 1 if number == self.row else row
        self.width, self.lines, self.row = width, wrapped, row


def test_after_the_terminal_became_narrower_nothing_of_the_old_frame_is_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    screen = Screen(100)
    progress = Progress(10, console, clock=lambda: 0.0)
    seen = 0

    def show() -> None:
        nonlocal seen
        progress._live.refresh()
        screen.feed(written(console)[seen:])
        seen = len(written(console))

    progress.start()
    progress._live.pause()
    progress.look(ENVIRONMENTS)
    progress.step(1, STEP)
    progress.note("a note")
    show()
    for width in (40, 25, 120):
        console.width = width
        screen.resize(width)
        show()
        progress.chains(width, 200)
        show()
        text = "\n".join(screen.lines)
        assert text.count("steps") == 1, f"{width}: {screen.lines}"
        assert text.count("Shop:") == 1
        assert text.count("a note") == 1
        assert all(len(line) <= width for line in screen.lines)
    console.width = 60
    screen.resize(60)
    progress.note("another note")
    screen.feed(written(console)[seen:])
    seen = len(written(console))
    assert "\n".join(screen.lines).count("steps") == 1
    progress.stop()


def idle_groups(step: int) -> dict[str, float]:
    """Metrics of a step whose groups all have equal rewards."""
    return {"ledger/trained": 0.0, "ledger/filtered": 4.0 * step, "ledger/failed": 0.0, "rollout/success": 0.0}


def test_a_warning_is_told_once_with_what_to_try_and_shown_while_it_holds() -> None:
    progress, console, _ = plain_progress(30)
    notes: list[str] = []
    observe = Observers(progress, SimpleNamespace(note=notes.append))
    observe.add(RunWarnings(observe))
    with progress:
        for step in range(1, 9):
            observe.step(step, idle_groups(step))
        (note,) = notes
        assert note.startswith("warning: 100% of the groups") and "Try: " in note
        assert note in written(console).splitlines()
        assert any("teach nothing" in row for row in drawn(progress))
        for step in range(9, 16):
            observe.step(step, {**idle_groups(8), "ledger/trained": 4.0 * (step - 8)})
        assert progress.warnings == []
        assert not any("teach nothing" in row for row in drawn(progress))
        assert len(notes) == 1


def test_control_codes_in_a_note_do_not_reach_the_terminal() -> None:
    console = terminal()
    with Progress(10, console) as progress:
        progress.note("evil \x1b[2J note")
    assert "\x1b[2J" not in written(console)
    assert "␛[2J" in written(console)
