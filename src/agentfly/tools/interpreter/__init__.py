"""Python sessions in subprocesses: the tool `python_process`, and `run_code` for programs that run once.

    session.py    in this process: `PythonSession`, the tool, and `run_code`
    process.py    in this process: starts, limits and destroys the subprocess
    child.py      the program in the subprocess
    cells.py      the loop that runs cells there; the sandbox runs the same loop in its sessions
    removal.py    removes a folder, whatever a cell put into it

This is process isolation, not a sandbox. It protects the training process from crashes, hangs, memory bombs and leaked
variables. It does not stop malicious code: the child runs as the same user, with the same files and network.
"""

from .session import CodeRun, PythonSession, python_process, python_tool, run_code

__all__ = ["CodeRun", "PythonSession", "python_process", "python_tool", "run_code"]
