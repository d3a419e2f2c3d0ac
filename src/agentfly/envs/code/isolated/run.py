"""The trainer's side of isolated tests: opens both sessions, and carries requests and answers between them.

Neither session knows the other. Text from the solution's session is passed on unread; a session that sends anything else than
an answer has not answered.
"""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ....errors import WorldError, blame
from ..session import CodeSession, session
from .wire import MAX_CHARS

_NO_ANSWER = json.dumps({"e": ["RuntimeError", "the solution gave no answer"]})


@dataclass(frozen=True, slots=True)
class Verdict:
    """`passed` is None if the tests cannot run isolated; `why` gives the reason, or the last failure."""

    passed: int | None
    why: str = ""


@cache
def source(name: str) -> str:
    """Returns what a session runs first: `wire`, then the file of its side without the import of `wire`."""
    here = Path(__file__).parent
    wire, side = ((here / f"{file}.py").read_text(encoding="utf-8") for file in ("wire", name))
    return wire + "".join(line for line in side.splitlines(keepends=True) if not line.startswith("from .wire"))


class _Peer:
    """One of the two sessions. Fetches long values in parts; both sessions share one deadline."""

    def __init__(self, inner: CodeSession, name: str, deadline: float) -> None:
        self.inner, self.name, self.deadline = inner, name, deadline

    async def call(self, method: str, *arguments: object) -> str | None:
        """Returns what `method` returns, or None for anything that is not an answer. Raises TimeoutError at the deadline."""
        text, total = "", 1
        call = f"{self.name}.{method}({', '.join(map(repr, arguments))})"
        while len(text) < total:
            value = await self.run(call)
            try:
                size, _, part = str(ast.literal_eval(value or "")).partition(" ")
                total = int(size)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return None
            text += part
            if not part or not 0 < total <= MAX_CHARS:
                return None
            call = f"{self.name}.part({len(text)})"
        return text

    async def run(self, code: str) -> str | None:
        left = self.deadline - asyncio.get_running_loop().time()
        result = await self.inner.run(code, left) if left > 0 else None
        if result is None or result.timed_out:
            raise TimeoutError
        if not result.alive:
            raise EOFError
        return None if result.error else result.value or ""


async def count_isolated(code: str, tests: Sequence[str], prelude: str, timeout_s: float, tier: str | None) -> Verdict:
    """Counts the tests that pass, one after the other. `timeout_s` is for all of them together."""
    with blame(WorldError, "the sessions of a reward failed"):
        async with session(tier) as first, session(tier) as second:
            deadline = asyncio.get_running_loop().time() + timeout_s
            solution, judge = _Peer(first, "solution", deadline), _Peer(second, "judge", deadline)
            try:
                await judge.run(source("judge"))
                await solution.run(source("solution"))
                if await solution.run(f"solution.load({prelude!r}, {code!r})") is None:
                    return Verdict(0, "the solution raised an error")
                request = await judge.call("begin", prelude, list(tests))
                while request is not None:
                    message = json.loads(request)
                    if "cannot" in message:
                        return Verdict(None, message["cannot"])
                    if "passed" in message:
                        return Verdict(len(message["passed"]), message.get("because", ""))
                    answer = await solution.call("ask", request)
                    request = await judge.call("reply", answer or _NO_ANSWER)
            except TimeoutError:
                return Verdict(0, f"it took longer than {timeout_s:g} s")
            except EOFError:
                return Verdict(0, "the session ended")
    return Verdict(0, "the tests gave no verdict")
