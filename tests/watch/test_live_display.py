"""The live display on a real pseudo-terminal: what a user sees after printing, resizing and the end; and rich's public API."""

from __future__ import annotations

import ast
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentfly.watch.live_display

from .test_progress import ENVIRONMENTS, STEP, Screen

CHILD = f"""
import os, sys
from agentfly.watch.progress import Progress
progress = Progress(10, clock=lambda: 0.0)
progress.start()
live = progress._live
assert live is not None, "stdout is not a terminal"
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "pause":
        live.pause()
    elif word == "step":
        progress.look({ENVIRONMENTS!r})
        progress.step(int(rest), {STEP!r})
    elif word == "chains":
        progress.chains(int(rest), 200)
        live.refresh()
    elif word == "told":
        progress.chains(int(rest), 200)
    elif word == "note":
        progress.note(rest)
    elif word == "print":
        print(rest)
    elif word == "complain":
        print(rest, file=sys.stderr)
    elif word == "stop":
        progress.stop()
    os.write(int(sys.argv[1]), b".")
"""


class Terminal:
    """A child process on a pseudo-terminal, and the screen that its user sees."""

    def __init__(self, width: int) -> None:
        self.screen = Screen(width)
        self._master, slave = pty.openpty()
        self._set_width(width)
        self._done, done = os.pipe()
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(done)], stdin=subprocess.PIPE, stdout=slave, stderr=slave, pass_fds=[done],
            env={**kept, "TERM": "xterm", "PYTHONUNBUFFERED": "1"}, text=True,
        )  # fmt: skip
        os.close(slave)
        os.close(done)

    def _set_width(self, width: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))

    def resize(self, width: int) -> None:
        """The program has been read so far, so all that it drew is wrapped again."""
        self._set_width(width)
        self.screen.resize(width)

    def do(self, *commands: str) -> None:
        assert self._child.stdin is not None
        for command in commands:
            self._child.stdin.write(f"{command}\n")
            self._child.stdin.flush()
            ends, done = time.monotonic() + 60, False
            while not done:
                # Output is read first: the child could not write its mark if the terminal's buffer were full.
                assert time.monotonic() < ends, f"no answer to {command!r}; the screen: {self.screen.lines}"
                ready = select.select([self._master, self._done], [], [], 1)[0]
                if self._master in ready:
                    self._read()
                elif self._done in ready:
                    assert os.read(self._done, 1) == b".", f"the program has ended: {self.screen.lines}"
                    done = True
            while select.select([self._master], [], [], 0)[0]:
                self._read()

    def wait_for(self, text: str) -> None:
        ends = time.monotonic() + 60
        while text not in self.text:
            assert time.monotonic() < ends, f"{text!r} is not in {self.screen.lines}"
            if select.select([self._master], [], [], 1)[0]:
                self._read()

    def _read(self) -> None:
        self.screen.feed(os.read(self._master, 1 << 16).decode())

    @property
    def text(self) -> str:
        return "\n".join(self.screen.lines)

    def close(self) -> None:
        """End the program and read the rest of what it wrote. May be called twice."""
        assert self._child.stdin is not None
        if self._child.stdin.closed:
            return
        self._child.stdin.close()
        self._child.wait(60)
        while select.select([self._master], [], [], 0)[0]:
            try:
                self._read()
            except OSError:  # the last one has closed the terminal
                break
        os.close(self._master)
        os.close(self._done)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal(100)
    yield made
    made.close()


def test_on_a_real_terminal_every_resize_leaves_one_frame_and_all_that_was_printed(terminal: Terminal) -> None:
    terminal.do("pause", "step 1", "note a note", "print from stdout", "complain from stderr")
    for step, width in enumerate((60, 33, 21, 140, 80), 2):
        terminal.resize(width)
        terminal.do(f"chains {width}")
        terminal.resize(width - 5)
        terminal.do(f"note after {width}", f"print line {step}", f"step {step}")
        shown = terminal.text
        for word in ("steps", "Shop:", "a note", "from stdout", "from stderr", f"after {width}", f"line {step}"):
            assert shown.count(word) == 1, f"{width}: {word!r} in {terminal.screen.lines}"
        assert terminal.screen.lines[terminal.screen.row], "the cursor is at the end of the frame"
        assert not any(terminal.screen.lines[terminal.screen.row + 1 :]), "nothing is left below the frame"
    terminal.do("stop", "print the end")
    assert terminal.screen.lines[terminal.screen.row - 1] == "the end"
    assert terminal.text.count("steps") == 1


def test_the_display_draws_what_has_changed_by_itself(terminal: Terminal) -> None:
    terminal.do("step 1", "told 117")
    terminal.wait_for("117/200")
    terminal.close()  # the program ends without stopping the display, perhaps in the middle of drawing
    assert terminal.screen.cursor, "the cursor is visible again"


def test_the_display_uses_no_private_name_of_rich() -> None:
    """A later version of rich may change them; the attributes of the display itself are its own."""
    tree = ast.parse(Path(agentfly.watch.live_display.__file__).read_text(encoding="utf-8"))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich")]
    names = [alias.name for node in imported for alias in node.names] + [node.module or "" for node in imported]
    assert names
    assert not [name for name in names if any(part.startswith("_") for part in name.split("."))]
    foreign = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]  # fmt: skip
    assert not foreign, foreign
    bases = {
        base.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    assert bases == {"RenderHook", "FileProxy"}
