"""The tools of a workspace: `bash`, `read`, `edit`, `grep`, `run_tests` and `submit`, which call the chain's `Workspace`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...tools import Tool, tool
from ...types import ToolResult
from .env import Workspace

LONGEST_S = 24 * 3600.0
"""The deadline of a tool without its own limit. The workspace's `limit_s` and the pool's deadline apply before it."""


async def _bash(command: str, work: Workspace) -> ToolResult:
    """Run a command in a bash shell. The folder, variables and background processes are kept between calls.

    Args:
        command: a bash command
    """
    return await work.bash(command)


async def _read(path: str, work: Workspace, line: int = 1, lines: int = 200) -> ToolResult:
    """Read a file with numbered lines.

    Args:
        path: the file
        line: the first line to show
        lines: how many lines to show
    """
    return await work.read(path, line, lines)


async def _edit(path: str, old: str, new: str, work: Workspace) -> ToolResult:
    """Replace a text that stands exactly once in a file. An empty `old` makes a new file.

    Args:
        path: the file
        old: the text to replace, exactly as it stands in the file
        new: the text to put in its place
    """
    return await work.edit(path, old, new)


async def _grep(pattern: str, work: Workspace, path: str = ".") -> ToolResult:
    """Search files for a regular expression.

    Args:
        pattern: an extended regular expression
        path: the file or folder to search
    """
    return await work.grep(pattern, path)


async def _run_tests(work: Workspace) -> ToolResult:
    """Run the tests of the repository."""
    return await work.run_tests()


async def _submit(work: Workspace) -> ToolResult:
    """Finish: the files are judged as they are now."""
    return await work.submit()


def _make_tool(function: Callable[..., Any], name: str) -> Tool:
    # Stateful: the calls of one turn run in the order in which the model wrote them.
    return tool(function, name=name, stateful=True, timeout_s=LONGEST_S, register=False)


bash = _make_tool(_bash, "bash")
read = _make_tool(_read, "read")
edit = _make_tool(_edit, "edit")
grep = _make_tool(_grep, "grep")
run_tests = _make_tool(_run_tests, "run_tests")
submit = _make_tool(_submit, "submit")
