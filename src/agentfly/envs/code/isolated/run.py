"""Unit tests apart from what they test: code and tests in, the number of tests that passed out.

    solution's session <-- arguments -- host -- results --> tests' session

The two sessions know nothing of each other; the host carries plain data between them. The tests, what they expect and the
comparison are where no line of the solution runs, so it cannot read, patch or outvote them: all it can do is answer. Where the
tests hand over what is not data (a function, say), `apart` cannot decide and says why; that is never up to the solution.
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
from .wire import MAX_CHARS
from ..session import Session, session

_NO_ANSWER = json.dumps({"e": ["RuntimeError", "the solution gave no answer"]})


@dataclass(frozen=True, slots=True)
class Verdict:
    """`passed` is None where the tests cannot be run apart, and `why` says why not."""

    passed: int | None
    why: str = ""


@cache
def source(name: str) -> str:
    """What a session is given: the wire, and one side of it."""
    here = Path(__file__).parent
    wire, side = ((here / f"{file}.py").read_text(encoding="utf-8") for file in ("apart_wire", name))
    return wire + "".join(line for line in side.splitlines(keepends=True) if not line.startswith("from .apart_wire"))


class _Line:
    """A session that says long things in parts, until the deadline that both sessions share."""

    def __init__(self, inner: Session, name: str, deadline: float) -> None:
        self.inner, self.name, self.deadline = inner, name, deadline

    async def say(self, method: str, *arguments: object) -> str | None:
        """What `method` gives; None for anything that is not an answer. TimeoutError when the time is up."""
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


async def count_apart(code: str, tests: Sequence[str], prelude: str, timeout_s: float, tier: str | None) -> Verdict:
    """How many tests pass, each in its turn, with the solution in a session of its own. `timeout_s` is for everything."""
    with blame(WorldError, "the sessions of a reward failed"):
        async with session(tier) as first, session(tier) as second:
            deadline = asyncio.get_running_loop().time() + timeout_s
            solution, judge = _Line(first, "solution", deadline), _Line(second, "judge", deadline)
            try:
                await judge.run(source("apart_judge"))
                await solution.run(source("apart_solution"))
                if await solution.run(f"solution.load({prelude!r}, {code!r})") is None:
                    return Verdict(0, "the solution raised an error")
                request = await judge.say("begin", prelude, list(tests))
                while request is not None:
                    message = json.loads(request)
                    if "cannot" in message:
                        return Verdict(None, message["cannot"])
                    if "passed" in message:
                        return Verdict(len(message["passed"]), message.get("because", ""))
                    answer = await solution.say("ask", request)
                    request = await judge.say("reply", answer or _NO_ANSWER)
            except TimeoutError:
                return Verdict(0, f"it took longer than {timeout_s:g} s")
            except EOFError:
                return Verdict(0, "the session ended")
    return Verdict(0, "the tests gave no verdict")
