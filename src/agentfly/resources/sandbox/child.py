"""The inside of a session: reads cells from its socket, runs them like a notebook, replies. Runs behind the walls of `jail`.

In: eight bytes, the length of the code and the number of the cell, and the code. Out: four bytes of length and JSON:
{"id", "stdout", "stderr", "value", "error", "images"}, of which only "id" must be there.
One `__main__` module lives as long as the session. File descriptors 1 and 2 are memory files, so whatever writes to them,
at whatever level, is captured in order, cut in the middle, and cannot break a frame. Nothing here is trusted by the host.

`Session` is made once, in the server, and `open` completes it in the forked child: what is done before the fork costs a
session neither time nor memory.
"""

import __future__

import ast
import base64
import builtins
import fcntl
import io
import linecache
import os
import signal
import sys
import traceback
import types
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from .protocol import CELL, CHUNK, LENGTH

MAX_IMAGES, MAX_IMAGE_BYTES = 4, 1_500_000
_READY = b'\0\0\0\x09{"id": 0}'


def cut(text: str, limit: int, total: int | None = None) -> str:
    """The beginning and the end of a long text, and how much is missing between."""
    if len(text) <= limit and total is None:
        return text
    head = limit * 2 // 3
    missing = (len(text) if total is None else total) - limit
    return f"{text[:head]}\n[... {missing:,} characters left out ...]\n{text[len(text) - (limit - head) :]}"


class Capture:
    """A memory file behind a descriptor, and `kept` beside it."""

    def __init__(self, target: int, kept: int, limit: int) -> None:
        self.target, self.kept, self.limit = target, kept, limit
        self.inode = 0

    def open(self) -> None:
        """Before the system call filter forbids making more."""
        made = os.memfd_create("output")
        fcntl.fcntl(made, fcntl.F_SETFL, os.O_APPEND)
        os.dup2(made, self.kept, False)
        os.dup2(made, self.target)
        if made != self.kept:
            os.close(made)

    def take(self) -> str:
        """What was written since the last call; a cell that closed or replaced the descriptor gets it back."""
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
    raise RuntimeError("input() does not work here, nobody is there to answer: put the value into the code")


class Session:
    def __init__(self, output_chars: int, files: int) -> None:
        """In the server, whose own input is /dev/null. `files`: how many descriptors a session may have."""
        first = min(200, files - 8)  # out of the way of what cells open
        self.channel = first + 2
        self.limit = output_chars
        self.pid = 0
        self.running = False
        self.count = 0
        self.captures = [Capture(1, first, output_chars), Capture(2, first + 1, output_chars)]
        self.streams = [self.stream(1), self.stream(2)]
        sys.stdout, sys.stderr = self.streams
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the session's life
        sys.argv[:] = [""]
        sys.path.insert(0, "")
        vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
        builtins.input = no_input
        main = types.ModuleType("__main__")
        self.names = vars(main)
        self.names["__builtins__"] = builtins
        sys.modules["__main__"] = main
        signal.signal(signal.SIGINT, self.interrupt)

    def open(self, channel: int) -> None:
        """In the child: its own socket and output files, and no other descriptor of the server's."""
        self.pid = os.getpid()
        os.dup2(channel, self.channel, False)
        for capture in self.captures:
            capture.open()
        os.closerange(3, self.captures[0].kept)
        os.closerange(self.channel + 1, 1024)

    @staticmethod
    def stream(target: int) -> io.TextIOWrapper:
        raw = io.BufferedWriter(io.FileIO(target, "w", closefd=False))
        return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def interrupt(self, number: int, frame: types.FrameType | None) -> None:
        if self.running and os.getpid() == self.pid:
            raise KeyboardInterrupt

    def serve(self) -> None:
        self.send(_READY)
        while (cell := self.read()) is not None:
            number, code = cell
            reply = self.run(code)
            if os.getpid() != self.pid:
                os._exit(0)  # the cell forked and its child came back here
            body = f'{{"id": {number}{reply}}}'.encode()
            self.send(LENGTH.pack(len(body)) + body)

    def send(self, frame: bytes) -> None:
        while frame:
            frame = frame[os.write(self.channel, frame) :]

    def read(self) -> tuple[int, str] | None:
        """The number of a cell and its code; None at the end."""
        header = self.receive(CELL.size)
        if header is None:
            return None
        size, number = CELL.unpack(header)
        body = self.receive(size)
        return None if body is None else (number, body.decode("utf-8", "surrogatepass"))

    def receive(self, count: int) -> bytes | bytearray | None:
        """Exactly so many bytes: what comes after them may be for the cell itself (`SandboxSession.hand_over`)."""
        data: bytes | bytearray = os.read(self.channel, min(count, CHUNK)) if count else b""
        if len(data) == count:
            return data
        data = bytearray(data)
        while more := os.read(self.channel, min(count - len(data), CHUNK)):
            data += more
            if len(data) == count:
                return data
        return None

    def run(self, code: str) -> str:
        """Run a cell; the fields of the reply as JSON, each with a comma before it."""
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        reply = ""
        value: str | None = None
        error: str | None = None
        images: list[str] = []
        try:
            try:
                steps = self.compile(code, name)
                self.running = True
                result: Any = None
                for step in steps:
                    result = eval(step, self.names)
                if result is not None:
                    self.names["_"] = result
                    value = cut(str.__str__(repr(result)), self.limit)
                if "matplotlib.pyplot" in sys.modules:
                    images = self.figures()
            finally:
                self.running = False
        except KeyboardInterrupt:
            error = "KeyboardInterrupt: the cell was interrupted"
        except SystemExit as stop:
            error = f"SystemExit: {self.word(stop.code)} (the session goes on)"
        except BaseException as raised:  # noqa: BLE001 - a session outlives whatever a cell raises
            error = self.explain(raised)
        error = self.flush(error)
        if stdout := self.captures[0].take():
            reply += f', "stdout": {quoted(stdout)}'
        if stderr := self.captures[1].take():
            reply += f', "stderr": {quoted(stderr)}'
        if value is not None:
            reply += f', "value": {quoted(value)}'
        if error is not None:
            reply += f', "error": {quoted(error)}'
        if images:
            reply += ', "images": [' + ", ".join(map(quoted, images)) + "]"
        return reply

    @staticmethod
    def compile(code: str, name: str) -> list[types.CodeType]:
        """The statements, and the last expression on its own so that its value can be shown."""
        if "\n" not in code and "=" not in code and not code[:1].isspace():
            try:
                return [compile(code, name, "eval", dont_inherit=True)]
            except SyntaxError:
                tree = None  # not one expression, so it needs a tree
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr):
            return [compile(tree, name, "exec", dont_inherit=True)]
        tree.body.pop()
        shown = compile(ast.Expression(last.value), name, "eval", dont_inherit=True, flags=_future_flags(tree))
        return [compile(tree, name, "exec", dont_inherit=True), shown] if tree.body else [shown]

    def flush(self, error: str | None) -> str | None:
        for stream, own in zip((sys.stdout, sys.stderr), self.streams, strict=True):
            try:
                stream.flush()
                if own is not stream and not own.closed:
                    own.flush()
            except BaseException as failure:  # noqa: BLE001 - the stream may be anything by now
                error = error or f"{type(failure).__name__}: writing the output failed"
        if self.streams[0].closed or self.streams[1].closed:
            self.streams = [self.stream(1), self.stream(2)]
            sys.stdout, sys.stderr = self.streams
        return error

    @staticmethod
    def word(thing: object) -> str:
        try:
            return str(thing)[:2000]
        except BaseException:  # noqa: BLE001 - its __str__ raised
            return type(thing).__name__

    def explain(self, error: BaseException) -> str:
        """A short traceback: only the cells' own lines, the last few of them."""
        try:
            what = "".join(traceback.format_exception_only(type(error), error)).strip()
            if isinstance(error, SyntaxError) and (error.filename or "").startswith("<cell"):
                return cut(what, self.limit)
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<cell")]
            where = "".join(f"  {frame.filename} line {frame.lineno}, in {frame.name}: {frame.line}\n" for frame in frames[-5:])
            return cut(f"Traceback:\n{where}{what}" if where else what, self.limit)
        except BaseException:  # noqa: BLE001 - its __str__ raised
            return type(error).__name__

    def figures(self) -> list[str]:
        """Open matplotlib figures as PNG, and closed."""
        plots = sys.modules["matplotlib.pyplot"]
        made = []
        for number in plots.get_fignums()[:MAX_IMAGES]:
            picture = io.BytesIO()
            plots.figure(number).savefig(picture, format="png")
            if picture.tell() <= MAX_IMAGE_BYTES:
                made.append(base64.b64encode(picture.getvalue()).decode())
        plots.close("all")
        return made


def _future_flags(tree: ast.Module) -> int:
    """`from __future__` at the top of the cell holds for its last expression as well."""
    flags = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for alias in node.names:
                feature = getattr(__future__, alias.name, None)
                flags |= feature.compiler_flag if feature else 0
    return flags
