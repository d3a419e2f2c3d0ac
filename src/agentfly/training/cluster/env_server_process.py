"""What runs in the process of an environment server: it lends instances through `resources.rpc.env_server`.

    hello --> "open" {kinds, token}: try out every kind, listen --> reply: the address --> lend, "status" {instances} --> "stop"

The status is sent by the event loop, so an environment that blocks it does not go unnoticed.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Mapping
from typing import Any

from ...fleet.link import connect, is_stopped
from ...resources.rpc.env_server import EnvServer
from ...resources.rpc.served_kind import kind_from

STATUS_S = 0.25


def serve(ticket: Mapping[str, Any]) -> None:
    """Lend instances until the fleet says "stop". Does not return."""
    asyncio.run(_serve(ticket))
    os._exit(0)  # threads of the environments must not hold the process up


async def _serve(ticket: Mapping[str, Any]) -> None:
    connection, inbox = connect(ticket)
    opening = await inbox.get()
    if opening.kind == "stop":
        return
    try:
        kinds = [kind_from(value) for value in opening.value["kinds"]]
        async with EnvServer(kinds, most=None, host=ticket["here"], token=opening.value["token"]) as server:
            connection.send("reply", opening.id, server.url)
            connection.send("status", 0, {"instances": server.lent})
            while not await is_stopped(inbox, STATUS_S):
                connection.send("status", 0, {"instances": server.lent})
    except Exception as error:  # noqa: BLE001 - the trainer raises it, and ends this process
        connection.send("error", opening.id, [type(error).__name__, str(error), traceback.format_exc()])
        await inbox.get()
