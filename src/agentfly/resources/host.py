"""An environment host: lends instances through `rpc.host_server`, and reports to the driver of the run. See `host_main`.

    to the driver      "hello", then every second "status" {lag_s, instances}; "ready" {url} or "failed" [type, text]
    from the driver    "beat", "stop"

Messages are [kind, id, value], as in `fleet.link`. The host ends itself when the connection is lost, or the
driver is silent for ten times `health_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import AgentFlyError
from .rpc.frames import BadFrame, FrameReader, pack_message
from .rpc.host_server import HostServer, kind_from
from .rpc.worker_main import die

CONNECT_S = 30.0
TURN_S = 0.25
"""The event loop notes so often that it turns."""


class DriverLink(threading.Thread):
    """The connection to the driver. `on_stop` is called in its thread."""

    def __init__(self, ticket: Mapping[str, Any], on_stop: Callable[[], Any]) -> None:
        super().__init__(name="agentfly-driver", daemon=True)
        host, port, token = ticket["driver"]
        self.turned = time.monotonic()
        self.num_instances = 0
        self._health_s = float(ticket["health_s"])
        self._on_stop = on_stop
        self._lock = threading.Lock()  # one message at a time
        try:
            self._socket = socket.create_connection((host, port), CONNECT_S)
        except OSError as error:
            die(f"the driver cannot be reached at {host}:{port}: {error}")
        self.send("hello", {"token": token, "index": ticket["index"], "attempt": ticket["attempt"], "pid": os.getpid()})

    def send(self, kind: str, value: Any) -> None:
        """Send a message, from any thread."""
        try:
            with self._lock:
                self._socket.sendall(pack_message([kind, 0, value]))
        except OSError as error:
            die(f"the connection to the driver was lost: {error}")

    def run(self) -> None:
        pause = min(1.0, self._health_s / 5)
        reader, heard = FrameReader(), time.monotonic()
        self._socket.settimeout(pause)
        told = 0.0
        while time.monotonic() - heard < 10 * self._health_s:
            now = time.monotonic()
            if now - told >= pause:
                told = now
                self.send("status", {"lag_s": max(0.0, now - self.turned), "instances": self.num_instances})
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not data:
                die("the connection to the driver was lost")
            heard = time.monotonic()
            try:
                kinds = [message[0] for message in reader.values(data)]
            except (BadFrame, TypeError, IndexError) as error:
                die(f"the driver sent no valid message: {error}")
            if "stop" in kinds:
                self._on_stop()
        die(f"the driver was silent for {10 * self._health_s:g} s")


def serve(ticket: Mapping[str, Any]) -> None:
    """Lend instances until the driver says "stop". Does not return."""
    asyncio.run(_serve(ticket))
    os._exit(0)  # threads of the environments must not hold the process up


async def _serve(ticket: Mapping[str, Any]) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    link = None
    if "driver" in ticket:
        link = DriverLink(ticket, partial(loop.call_soon_threadsafe, stopped.set))
        link.start()
    try:
        async with HostServer(map(kind_from, ticket["kinds"]), host=ticket["bind"], token=ticket["token"]) as server:
            if link is None:
                with contextlib.suppress(NotImplementedError):
                    loop.add_signal_handler(signal.SIGTERM, stopped.set)
                print(f"lending {', '.join(server.kinds)} at {server.url}", flush=True)  # from now on SIGTERM ends it in order
                await stopped.wait()
                return
            link.send("ready", {"url": server.url})
            while not stopped.is_set():
                link.turned, link.num_instances = time.monotonic(), server.num_instances
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TURN_S):
                        await stopped.wait()
    except AgentFlyError as error:
        if link is None:
            die(str(error))
        link.send("failed", [type(error).__name__, str(error)])
        await stopped.wait()  # the driver reads why, and ends this process; without it, the link does
