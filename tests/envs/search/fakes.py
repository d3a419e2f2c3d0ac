"""Servers on loopback for tests: a provider that plays answers, and a small Redis. Both stop, and wait for their threads."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class FakeProvider(ThreadingHTTPServer):
    """Plays `answers`: a dict is JSON, a tuple (status, headers, text); the last is repeated. Remembers what it was asked."""

    daemon_threads = False

    def __init__(self, answers: list[Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Ask)
        self.answers = answers
        self.asked: list[dict[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/search"


class _Ask(BaseHTTPRequestHandler):
    server: FakeProvider
    timeout = 60

    def do_GET(self) -> None:
        self._answer({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, given: dict[str, Any]) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.asked.append({"method": self.command, "given": given, "headers": headers})
        self.server.gate.wait(60)
        answer = self.server.answers[0] if len(self.server.answers) == 1 else self.server.answers.pop(0)
        status, more, text = answer if isinstance(answer, tuple) else (200, {}, json.dumps(answer))
        self.send_response(status)
        for name, value in {**more, "Content-Length": str(len(text.encode())), "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Tests need no access log."""


class FakeRedis(socketserver.ThreadingTCPServer):
    """GET, SET and whatever else (OK), in the protocol of Redis. `silent`: it takes commands and never answers."""

    daemon_threads = False
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Redis)
        self.data: dict[bytes, bytes] = {}
        self.commands: list[str] = []
        self.open: list[socket.socket] = []
        self.silent = False

    @property
    def url(self) -> str:
        return f"redis://:sesame-secret@127.0.0.1:{self.server_address[1]}/0"

    def drop(self) -> None:
        for connection in self.open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it is gone already


class _Redis(socketserver.StreamRequestHandler):
    server: FakeRedis

    def setup(self) -> None:
        super().setup()
        self.server.open.append(self.request)

    def handle(self) -> None:
        while head := self.rfile.readline():
            parts = []
            for _ in range(int(head[1:])):
                size = int(self.rfile.readline()[1:])
                parts.append(self.rfile.read(size + 2)[:-2])
            command = parts[0].decode().upper()
            self.server.commands.append(command)
            if self.server.silent:
                continue
            if command == "GET":
                found = self.server.data.get(parts[1])
                self.wfile.write(b"$-1\r\n" if found is None else b"$%d\r\n%s\r\n" % (len(found), found))
            else:
                if command == "SET":
                    self.server.data[parts[1]] = parts[2]
                self.wfile.write(b"+OK\r\n")


@contextmanager
def running(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        if isinstance(server, FakeProvider):
            server.gate.set()
        server.shutdown()
        if isinstance(server, FakeRedis):
            server.drop()
        server.server_close()
        thread.join(60)
