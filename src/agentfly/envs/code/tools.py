"""`code_interpreter(code)`: the tool that runs the model's code in the chain's `CodeInterpreter`.

The observation holds what was printed, the value of the last expression and a short traceback, each cut in the middle if it is
long, and a line in brackets if the model must know more (out of time, session replaced).
"""

from __future__ import annotations

from ...tools import Tool, tool
from ...tools.text import clean
from ...types import ToolResult
from .env import GRACE_S, CodeInterpreter
from .session import CellResult

HEAD, TAIL = 4_000, 2_000
LONGEST_S = 24 * 3600.0
"""The deadline of a tool without its own limit. The interpreter's `limit_s` and the pool's deadline apply before it."""


def code_interpreter_tool(*, name: str = "code_interpreter", limit_s: float | None = None) -> Tool:
    """Returns the tool under another name, or with a time limit for a cell in place of the interpreter's `limit_s`."""

    async def code_interpreter(code: str, interpreter: CodeInterpreter) -> ToolResult:
        """Run Python code. Variables are kept between calls; what is printed and the value of the last line come back.

        Args:
            code: Python code
        """
        result = await interpreter.run(code, limit_s)
        # The proxy of an interpreter in another process has no `limit_s`.
        limit = getattr(interpreter, "limit_s", None) if limit_s is None else limit_s
        return ToolResult(
            observation=describe(result, limit),
            image=result.images[-1] if result.images else None,
            error="timeout" if result.timed_out else None,
            limit="time" if result.timed_out else result.limit,
        )

    # Stateful: the cells of one turn run in the order in which the model wrote them.
    timeout_s = LONGEST_S if limit_s is None else limit_s + GRACE_S
    return tool(code_interpreter, name=name, stateful=True, timeout_s=timeout_s, register=False)


def describe(result: CellResult, limit_s: float | None) -> str:
    """Returns what the model reads."""
    limit = "its time limit" if limit_s is None else f"{limit_s:g} s"
    parts = ["[a new session was started; earlier variables are lost]" if result.replaced else ""]
    parts += [shorten(text.rstrip("\n")) for text in (result.stdout, result.stderr, result.value) if text]
    if result.error and result.alive and not result.timed_out:
        parts.append(shorten(result.error))
    if result.images:
        more = "" if len(result.images) == 1 else f"; the last of {len(result.images)} is shown"
        parts.append(f"[figure{more}]")
    if not result.alive:
        why = f"did not stop after {limit} and was killed" if result.timed_out else f"ended: {_reason(result.error)}"
        parts.append(f"[the session {why}; the next call starts a new one, earlier variables are lost]")
    elif result.timed_out:
        parts.append(f"[stopped after {limit}; the session and its variables are kept]")
    return "\n".join(part for part in parts if part) or "(no output)"


def shorten(text: str) -> str:
    """Returns the beginning and the end of a long text, and how much is missing between them."""
    text = clean(text)
    if len(text) <= HEAD + TAIL + 100:  # so that a shortened text is not shortened again
        return text
    return f"{text[:HEAD]}\n[... {len(text) - HEAD - TAIL:,} characters left out ...]\n{text[-TAIL:]}"


def _reason(error: str | None) -> str:
    """Returns why a session ended, without the words around it that `describe` adds."""
    return (error or "it is gone").removeprefix("the session has ended and its variables are lost: ")


code_interpreter = code_interpreter_tool()
python = code_interpreter_tool(name="python")
"""The same tool under the name that `CodeAgent` calls."""
