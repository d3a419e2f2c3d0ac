"""The loop of a Python session: reads cells of code from a socket, runs them as a notebook does, and replies.

`CellLoop` runs in the processes of the sandbox's sessions, which load this file without the `agentfly` package (see
`process.bootstrap`), so it imports the standard library only.

    cell     CELL (length of the code, number of the cell), then the code
    reply    HEAD, then the bytes of value, error, stdout, stderr (UTF-8) and of up to four images
    HEAD     length of what follows this field, number of the cell, flags, the eight lengths
    ready    a reply with number 0, sent once before the first cell

A reply has no names and no nesting: 41 bytes tell whether all of it is acceptable, before any of it is read.
"""

import __future__

import ast
import builtins
import io
import linecache
import os
import signal
import struct
import sys
import traceback
import types
from typing import Any, NamedTuple

CELL = struct.Struct(">II")
LENGTH = struct.Struct(">I")
HEAD = struct.Struct(">IIB8I")
MAX_IMAGES = 4
_AFTER_LENGTH = HEAD.size - LENGTH.size
_INTERRUPTED, _VALUE, _ERROR = 1, 2, 4
CHUNK = 1 << 16
"""Bytes per read. The C library maps and unmaps a buffer of 128 KiB or more for every read."""


class CellReply(NamedTuple):
    """What a session says of a cell."""

    number: int
    interrupted: bool = False
    value: str | None = None
    error: str | None = None
    stdout: str = ""
    stderr: str = ""
    images: tuple[bytes, ...] = ()


def pack_reply(reply: CellReply) -> bytes:
    """Returns the bytes of a reply. A lone surrogate travels as its escape sequence."""
    number, interrupted, value, error, stdout, stderr, images = reply
    flags = interrupted * _INTERRUPTED | (value is not None) * _VALUE | (error is not None) * _ERROR
    parts = [(text or "").encode("utf-8", "backslashreplace") for text in (value, error, stdout, stderr)]
    parts += images
    sizes = [len(part) for part in parts] + [0] * (MAX_IMAGES - len(images))
    return b"".join((HEAD.pack(_AFTER_LENGTH + sum(sizes), number, flags, *sizes), *parts))


def read_reply(data: bytes | bytearray, max_text: int, max_image: int) -> CellReply | None:
    """Returns the reply that `data` holds, None while it is incomplete. `max_text` and `max_image` are in bytes.

    Raises ValueError for bytes that are no reply, or hold more than one. The lengths are checked as soon as they have arrived,
    so the caller keeps at most one acceptable reply in memory."""
    if len(data) < HEAD.size:
        if len(data) >= LENGTH.size and LENGTH.unpack_from(data)[0] < _AFTER_LENGTH:
            raise ValueError("it is not a reply")
        return None
    length, number, flags, *sizes = HEAD.unpack_from(data)
    if length != _AFTER_LENGTH + sum(sizes) or flags > 7 or max(sizes[:4]) > max_text or max(sizes[4:]) > max_image:
        raise ValueError("it is not a reply")
    if len(data) < LENGTH.size + length:
        return None
    if len(data) > LENGTH.size + length:
        raise ValueError("it is more than one reply")
    parts, start = [], HEAD.size
    for size in sizes:
        parts.append(bytes(data[start : start + size]))
        start += size
    value, error, stdout, stderr = (part.decode() for part in parts[:4])
    shown, raised = value if flags & _VALUE else None, error if flags & _ERROR else None
    return CellReply(number, bool(flags & _INTERRUPTED), shown, raised, stdout, stderr, tuple(filter(None, parts[4:])))


def cut(text: str, limit: int, total: int | None = None) -> str:
    """Returns the beginning and the end of a long text, and a marker that counts what is missing between them."""
    if len(text) <= limit and total is None:
        return text
    head = limit * 2 // 3
    missing = (len(text) if total is None else total) - limit
    return f"{text[:head]}\n[... {missing:,} characters left out ...]\n{text[len(text) - (limit - head) :]}"


def new_main() -> dict[str, Any]:
    """Installs an empty `__main__` module and returns its namespace."""
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return vars(module)


def compile_cell(code: str, name: str) -> list[types.CodeType]:
    """Returns the code objects to evaluate in order. A last expression is separate, so that its value can be shown."""
    if "\n" not in code and "=" not in code and not code[:1].isspace():
        try:
            return [compile(code, name, "eval", dont_inherit=True)]  # one expression: no syntax tree needed
        except SyntaxError:
            tree = None
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        return [compile(tree, name, "exec", dont_inherit=True)]
    tree.body.pop()
    shown = compile(ast.Expression(last.value), name, "eval", dont_inherit=True, flags=_future_flags(tree))
    return [compile(tree, name, "exec", dont_inherit=True), shown] if tree.body else [shown]


def _future_flags(tree: ast.Module) -> int:
    """`from __future__` at the top of a cell also applies to its last expression, which is compiled separately."""
    flags = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for alias in node.names:
                feature = getattr(__future__, alias.name, None)
                flags |= feature.compiler_flag if feature else 0
    return flags


def explain(error: BaseException, limit: int) -> str:
    """Returns a short traceback: the last five lines of code that belong to cells, then the error."""
    try:
        what = "".join(traceback.format_exception_only(type(error), error)).strip()
        if isinstance(error, SyntaxError) and (error.filename or "").startswith("<cell"):
            return cut(what, limit)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<cell")]
        where = "".join(f"  {frame.filename} line {frame.lineno}, in {frame.name}: {frame.line}\n" for frame in frames[-5:])
        return cut(f"Traceback:\n{where}{what}" if where else what, limit)
    except BaseException:  # noqa: BLE001 - the error's own __str__ raised
        return type(error).__name__


def _exit_text(code: object) -> str:
    try:
        return str(code)[:2000]
    except BaseException:  # noqa: BLE001 - the object's own __str__ raised
        return type(code).__name__


def open_stream(descriptor: int) -> io.TextIOWrapper:
    """Returns a text stream on a descriptor. Each line is written at once, so it stays in order with other writers."""
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


class CellLoop:
    """One namespace, `__main__`, that lives as long as the session.

    `channel` is the descriptor of the socket. `max_chars` limits the shown value and the traceback.
    """

    def __init__(self, channel: int, max_chars: int) -> None:
        self.channel, self.max_chars = channel, max_chars
        self.pid = os.getpid()
        self.running = False
        self.count = 0
        self.names = new_main()
        self.open_streams()
        vars(sys).update(__stdout__=sys.stdout, __stderr__=sys.stderr)
        signal.signal(signal.SIGINT, self.interrupt)

    def open_streams(self) -> None:
        self.streams = [open_stream(1), open_stream(2)]
        sys.stdout, sys.stderr = self.streams

    def interrupt(self, number: int, frame: types.FrameType | None) -> None:
        # A late signal must not raise between two cells, nor in a process that the cell has forked.
        if self.running and os.getpid() == self.pid:
            raise KeyboardInterrupt

    def serve(self) -> None:
        """Answers cells until the other end closes the connection."""
        self.send(pack_reply(CellReply(0)))
        while (cell := self.read()) is not None:
            number, code = cell
            reply = self.run(number, code)
            if os.getpid() != self.pid:
                os._exit(0)  # the cell forked, and the child process returned from it: only the parent may reply
            self.send(pack_reply(reply))

    def send(self, frame: bytes) -> None:
        while frame:
            frame = frame[os.write(self.channel, frame) :]

    def read(self) -> tuple[int, str] | None:
        """Returns the number of the next cell and its code, or None at the end of the connection."""
        header = self.receive(CELL.size)
        if header is None:
            return None
        size, number = CELL.unpack(header)
        body = self.receive(size)
        return None if body is None else (number, body.decode("utf-8", "surrogatepass"))

    def receive(self, count: int) -> bytes | bytearray | None:
        """Reads exactly `count` bytes: bytes after them may be addressed to the cell itself (`SandboxSession.hand_over`)."""
        data: bytes | bytearray = os.read(self.channel, min(count, CHUNK)) if count else b""
        if len(data) == count:
            return data
        data = bytearray(data)
        while more := os.read(self.channel, min(count - len(data), CHUNK)):
            data += more
            if len(data) == count:
                return data
        return None

    def run(self, number: int, code: str) -> CellReply:
        """Runs a cell."""
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        interrupted = False
        value: str | None = None
        error: str | None = None
        try:
            try:
                steps = compile_cell(code, name)
                self.running = True
                result: Any = None
                for step in steps:
                    result = eval(step, self.names)
                if result is not None:
                    self.names["_"] = result
                    value = cut(str.__str__(repr(result)), self.max_chars)
                self.after_cell()
            finally:
                self.running = False
        except KeyboardInterrupt:
            error = "KeyboardInterrupt: the cell was interrupted"
            interrupted = True
        except SystemExit as stop:
            error = f"SystemExit: {_exit_text(stop.code)} (the session goes on)"
        except BaseException as raised:  # noqa: BLE001 - a session survives whatever a cell raises
            error = explain(raised, self.max_chars)
        return CellReply(number, interrupted, value, self.flush(error))

    def after_cell(self) -> None:
        """Called after a cell that raised nothing, while it can still be interrupted."""

    def flush(self, error: str | None) -> str | None:
        """Writes out what the cell printed, and reopens a stream that the cell closed. Returns the error to report."""
        for stream, own in zip((sys.stdout, sys.stderr), self.streams, strict=True):
            try:
                stream.flush()
                if own is not stream and not own.closed:
                    own.flush()
            except BaseException as failure:  # noqa: BLE001 - the cell may have put any object in place of the stream
                error = error or f"{type(failure).__name__}: writing the output failed"
        if self.streams[0].closed or self.streams[1].closed:
            self.open_streams()
        return error
