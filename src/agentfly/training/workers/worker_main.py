"""The program of a rollout worker, run by path: `python -I worker_main.py LIFE PARENT`, with the ticket on standard input.

    read the ticket --> take over the trainer's import path --> tie to the trainer --> worker.serve

Nothing of AgentFly is imported before the path is known. LIFE is a pipe whose other end only the trainer holds; with the
parent-death signal it ends this process and its group when the trainer ends (`resources.rpc.worker_main.tie_to`).
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
    from agentfly.training.workers.worker import serve

    serve(ticket)


if __name__ == "__main__":
    main()
