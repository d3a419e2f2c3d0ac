"""Python in subprocesses: `run_code` for programs that run once, and what the sandbox shares with it.

    program.py    in this process: `run_code`
    process.py    in this process: starts, limits and destroys the subprocess
    child.py      the program in the subprocess
    cells.py      the loop that runs cells in the sandbox's sessions
    removal.py    removes a folder, whatever a cell put into it

`run_code` is process isolation, not a sandbox. It protects the training process from crashes, hangs and memory bombs. It does
not stop malicious code: the child runs as the same user, with the same files and network.
"""

from .program import CodeRun, run_code

__all__ = ["CodeRun", "run_code"]
