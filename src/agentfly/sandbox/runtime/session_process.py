"""The inside of a session: the cell loop, with output captured at the level of descriptors. Runs behind `isolation`.

The fork server constructs `SessionProcess` once; `open` completes it in each forked child. What is done before the fork costs
a session neither time nor memory. The trainer trusts nothing that this process says.
"""

import builtins
import errno
import fcntl
import io
import os
import sys
from typing import Any

from ..interpreter.cells import MAX_IMAGES, CellLoop, CellReply, cut
from .protocol import MAX_IMAGE_BYTES


class OutputFile:
    """A memory file behind the descriptor `target`, with a second descriptor `kept` that cells do not know."""

    def __init__(self, target: int, kept: int, limit: int) -> None:
        self.target, self.kept, self.limit = target, kept, limit
        self.inode = 0

    def open(self) -> None:
        """Must run before the system call filter, which refuses memfd_create: no limit counts that memory."""
        made = os.memfd_create("output")
        fcntl.fcntl(made, fcntl.F_SETFL, os.O_APPEND)
        os.dup2(made, self.kept, False)
        os.dup2(made, self.target)
        if made != self.kept:
            os.close(made)

    def take(self) -> str:
        """Returns what was written since the last call. Restores the descriptor if a cell closed or replaced it."""
        if not self.inode:
            self.inode = os.fstat(self.kept).st_ino
        try:
            seen = os.fstat(self.target)
        except OSError:
            seen = None
        if seen is None or seen.st_ino != self.inode:
            os.dup2(self.kept, self.target)
            seen = os.fstat(self.kept)
        size = seen.st_size
        text = ""
        if size > 4 * self.limit:
            head, tail = (
                os.pread(self.kept, 4 * self.limit, place).decode("utf-8", "replace") for place in (0, size - 4 * self.limit)
            )
            text = cut(head[: self.limit] + tail[-self.limit :], self.limit, size)
        elif size:
            text = cut(os.pread(self.kept, size, 0).decode("utf-8", "replace"), self.limit)
        if size:
            os.ftruncate(self.kept, 0)
        return text


def no_input(prompt: object = "", /) -> str:
    if sys.stdin is not sys.__stdin__:  # the cell has put a text there
        line = sys.stdin.readline()
        if not line:
            raise EOFError("EOF when reading a line")
        return str(line).removesuffix("\n")
    raise RuntimeError("input() does not work here, a cell has no terminal: put the value into the code")


def _flock(fd: Any, operation: int, /) -> None:
    """`fcntl.flock` by record locks, because the filter refuses the call. They exclude other processes. An exclusive one needs
    a file that is open for writing, which no file of the machine is; a shared one, a file that is open for reading."""
    try:
        fcntl.lockf(fd, operation)
    except OSError as error:
        if error.errno != errno.EBADF or not operation & fcntl.LOCK_SH:
            raise
        fcntl.lockf(fd, operation & ~fcntl.LOCK_SH | fcntl.LOCK_EX)


class SessionProcess(CellLoop):
    """A cell loop whose replies also carry stdout, stderr and matplotlib figures."""

    def __init__(self, output_chars: int, files: int) -> None:
        """Runs in the fork server, whose stdin is /dev/null. `files` is the number of descriptors that a session may have."""
        first = min(200, files - 8)  # high numbers, out of the way of what cells open
        super().__init__(first + 2, output_chars)
        self.pid = 0  # unknown until the fork
        self.outputs = [OutputFile(1, first, output_chars), OutputFile(2, first + 1, output_chars)]
        self.images: tuple[bytes, ...] = ()
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc] # noqa: SIM115 - open as long as the session
        sys.argv[:] = [""]
        sys.path.insert(0, "")
        builtins.input = no_input
        fcntl.flock = _flock

    def open(self, channel: int) -> None:
        """Runs in the child: keeps its own socket and output files, and closes every other descriptor of the fork server."""
        self.pid = os.getpid()
        os.dup2(channel, self.channel, False)
        for output in self.outputs:
            output.open()
        os.closerange(3, self.outputs[0].kept)
        os.closerange(self.channel + 1, 1024)

    def run(self, number: int, code: str) -> CellReply:
        self.images = ()
        _, interrupted, value, error, *_ = super().run(number, code)
        stdout, stderr = self.outputs[0].take(), self.outputs[1].take()
        return CellReply(number, interrupted, value, error, stdout, stderr, self.images)

    def after_cell(self) -> None:
        """Turns open matplotlib figures into PNG images, and closes them."""
        if "matplotlib.pyplot" not in sys.modules:
            return
        plots = sys.modules["matplotlib.pyplot"]
        made = []
        for number in plots.get_fignums()[:MAX_IMAGES]:
            picture = io.BytesIO()
            plots.figure(number).savefig(picture, format="png")
            if picture.tell() <= MAX_IMAGE_BYTES:
                made.append(picture.getvalue())
        plots.close("all")
        self.images = tuple(made)
