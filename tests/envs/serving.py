"""A page's server on an event loop in a thread, for as long as a test needs it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from agentfly.envs.pages import WebPage, page_server

P = TypeVar("P", bound=WebPage)


@dataclass(slots=True)
class Served(Generic[P]):
    page: P
    port: int


@contextmanager
def serving(make: Callable[[], P]) -> Iterator[Served[P]]:
    """The page is made and started on the server's loop."""
    ready, found, failed = threading.Event(), list[Served[P]](), list[BaseException]()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        page = make()
        try:
            await page.start()
            async with page_server(page, 0) as server:
                found.append(Served(page, server.port))
                ready.set()
                await stop.wait()
        finally:
            await page.close()

    def main() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(run())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert ready.wait(60)
        if failed:
            raise failed[0]
        yield found[0]
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        thread.join(60)
    assert not thread.is_alive()


class Interrupting(list[str]):
    """A `say` that keeps what is said, and presses Ctrl-C when it is told that a page is open."""

    def __call__(self, text: str) -> None:
        self.append(text)
        if " is open at " in text:
            os.kill(os.getpid(), signal.SIGINT)
