"""The program of an environment host, run by path: `python -I host_main.py [LIFE PARENT]`, with the ticket on standard input.

    read the ticket --> take over its import path --> tie to the parent --> connect to the driver --> try out every kind
        --> listen --> "ready" with the address --> lend instances until "stop", the end of the driver, or of the parent

The ticket is JSON: `path`, `bind` (the address to listen on), `token`, `kinds` (`rpc.host_server.kind_value`) and, unless it is
started by hand, `driver` ([host, port, token]), `index`, `attempt` and `health_s`. By hand it prints the address and lends
until it is interrupted.

A thread talks to the driver, so an environment that blocks the event loop does not make the host look frozen. It reports how
long the event loop has been blocked; the driver decides.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    ticket = json.loads(sys.stdin.buffer.read())
    # The file's own folder must not be on the path: its modules would hide those of the standard library.
    sys.path[:] = ticket["path"]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if len(sys.argv) > 2:
        from agentfly.resources.rpc.worker_main import tie_to

        tie_to(int(sys.argv[2]), int(sys.argv[1]))
    from agentfly.resources.host import serve

    serve(ticket)


if __name__ == "__main__":
    main()
