"""Run by path in each process of a fleet: `python -I member_main.py LIFE PARENT NAME`, with the ticket on standard input.

    read the ticket --> take over the trainer's import path --> tie to the parent --> call the function that the ticket names

The ticket is JSON: `name`, `address`, `token`, `index`, `attempt` and `health_s` for the `Connection`; `program`, the function
as "module:function"; `path`, the import path; `here`, the address of this machine for other processes. Nothing of AgentFly is
imported before the path is known. LIFE is a pipe whose other end only the parent holds; with the parent-death signal it ends
this process and its group when the parent ends (`resources.rpc.worker_main.tie_to`). NAME is for a list of processes.
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
    from agentfly.resources.rpc.worker_main import tie_to

    tie_to(int(sys.argv[2]), int(sys.argv[1]))
    run_program(ticket)


def run_program(ticket: dict[str, object]) -> None:
    """Call the function that the ticket names."""
    from importlib import import_module

    module, _, name = str(ticket["program"]).partition(":")
    getattr(import_module(module), name)(ticket)


if __name__ == "__main__":
    main()
