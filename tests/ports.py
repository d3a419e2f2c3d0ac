"""A port for a test that needs its number before anything listens there."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Below the range from which a system hands out ports: no other process gets it by asking for any port."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("100 ports between 20000 and 32000 are in use")
