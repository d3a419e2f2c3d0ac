"""What runs in the processes of `test_fleet.py`: it answers calls, or does what its environment variable says instead."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from agentfly.fleet import link
from agentfly.fleet.bare import software
from agentfly.fleet.link import Connection, LinkMessage

ORDER = "AGENTFLY_TEST_ORDER"


def serve(ticket: Mapping[str, Any]) -> None:
    order = os.environ.get(ORDER, "")
    if order == "no licence":
        print("no licence", file=sys.stderr, flush=True)
        os._exit(3)
    if order == "dies at first" and ticket["attempt"] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if order == "says nothing":
        time.sleep(3600)
    if order == "is older":
        link.software = lambda: {**software(), "agentfly": "0.0.1"}
    asyncio.run(_serve(ticket))
    os._exit(0)


async def _serve(ticket: Mapping[str, Any]) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()

    def handle(message: LinkMessage) -> None:
        if message.kind == "stop":
            stopped.set()
        elif message.kind == "double":
            connection.send("reply", message.id, 2 * message.value)
        elif message.kind == "twice":
            connection.send("reply", message.id, 1)
            connection.send("reply", message.id, 2)
        elif message.kind == "raise":
            connection.send("error", message.id, [*message.value, "where it was raised"])
        elif message.kind == "block":
            time.sleep(message.value)

    connection = Connection(ticket, lambda message: loop.call_soon_threadsafe(handle, message))
    connection.start()
    while not stopped.is_set():
        connection.send("status", 0, {"pid": os.getpid()})
        try:
            async with asyncio.timeout(0.1):
                await stopped.wait()
        except TimeoutError:
            continue
