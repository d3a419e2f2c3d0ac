"""The parent process of a rank on another node: it starts the rank, and tells the supervisor how it is.

    hello --> "open" {rank, arguments, folder, environ} --> reply
          --> "said" text, "status" {frozen} every second, "ended" status --> "stop"

If the connection to the supervisor is lost, this process ends and kills its process group, to which the rank belongs.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from ...fleet.link import Connection, connect, is_stopped
from .process import BEAT_S, FROZEN, QUIET, interface_variables, start_rank

LOOK_S = 0.2


def serve(ticket: Mapping[str, Any]) -> None:
    """Run the rank until the supervisor says "stop". Does not return."""
    asyncio.run(_serve(ticket))
    os._exit(0)


async def _serve(ticket: Mapping[str, Any]) -> None:
    connection, inbox = connect(ticket)
    opening = await inbox.get()
    if opening.kind == "stop":
        return
    value = opening.value
    try:
        rank = start_rank(
            value["rank"],
            [sys.executable, "-m", "agentfly", *value["arguments"]],
            {**QUIET, **interface_variables(ticket["here"]), **os.environ, **value["environ"]},
            cwd=value["folder"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        connection.send("error", opening.id, ["EngineError", f"the rank could not be started: {error}", ""])
        await inbox.get()
        return
    assert rank.process.stdout is not None
    output = rank.process.stdout.fileno()
    os.set_blocking(output, False)
    try:
        connection.send("reply", opening.id, rank.process.pid)
        last = 0.0
        while rank.status is None:
            pass_on(output, connection)
            rank.read()
            if time.monotonic() - last >= BEAT_S:
                last = time.monotonic()
                connection.send("status", 0, {"frozen": rank.why_lost() == FROZEN})
            if await is_stopped(inbox, LOOK_S):
                return
        pass_on(output, connection)
        connection.send("ended", 0, rank.status)
        while (await inbox.get()).kind != "stop":
            continue
    finally:
        rank.kill()


def pass_on(output: int, connection: Connection) -> None:
    """Send what the rank has printed."""
    try:
        while data := os.read(output, 65536):
            connection.send("said", 0, data.decode("utf-8", "replace"))
    except BlockingIOError:
        return
