"""A page's server in a thread, for as long as a test needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from agentfly.envs.pages import PageServer

S = TypeVar("S", bound=PageServer)


@contextmanager
def serving(server: S) -> Iterator[S]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(60)
