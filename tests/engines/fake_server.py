"""A chat server on loopback for tests: plays a list of answers, remembers what it was sent, and always stops."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Chat(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, answers: list[Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    """An answer is a dict (sent as JSON), a list of strings (sent as lines of a stream; at None the stream hangs),
    (status, headers, text), or seconds to sleep."""

    server: Chat

    def do_POST(self) -> None:
        self.server.headers.append(dict(self.headers))
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = self.server.answers.pop(0)
        if isinstance(answer, float):
            time.sleep(answer)
            return
        if isinstance(answer, tuple):
            status, headers, text = answer
        elif isinstance(answer, list):
            lines = answer[: answer.index(None)] if None in answer else answer
            status, headers, text = 200, {"Content-Type": "text/event-stream"}, "".join(f"{line}\n\n" for line in lines)
        else:
            status, headers, text = 200, {}, json.dumps(answer)
        payload = text.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        hangs = isinstance(answer, list) and None in answer
        self.send_header("Content-Length", str(len(payload) + hangs))
        self.end_headers()
        self.wfile.write(payload)
        if hangs:
            self.wfile.flush()
            self.rfile.read(1)  # until the client has gone

    def log_message(self, *args: Any) -> None:
        """Tests need no access log."""


@contextmanager
def chat_server(*answers: Any) -> Iterator[Chat]:
    server = Chat(list(answers))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def said(text: str | None, calls: list[tuple[str, str, str]] = (), finish: str = "stop") -> dict[str, Any]:
    """A whole answer: text, (id, name, arguments) of calls."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} for id, name, arguments in calls
        ]
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def piece(delta: dict[str, Any], finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
