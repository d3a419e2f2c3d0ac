"""The trainer's side of isolated tests: opens both sessions, and carries requests and answers between them.

Neither session knows the other. The trainer checks length and alphabet of a text from the solution's session and passes it on
unread; a session that sends anything else than an answer has not answered.
"""

from __future__ import annotations

import asyncio
import base64
import json
import marshal
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ....errors import WorldError, blame
from ..session import OVERRUN_S, CodeSession, session
from .wire import MAX_CHARS, PART

_PART = re.compile(r"'([a-z])([1-9]\d{0,7}) ([A-Za-z0-9+/=]+)'")
_MAX_ENCODED = 4 * (MAX_CHARS // 3 + 1)
_NO_ANSWER = base64.b64encode(b'{"e": [["RuntimeError"], "the solution gave no answer"]}').decode()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`passed` is None if the tests cannot run isolated; `why` gives the reason, or the last failure."""

    passed: int | None
    why: str = ""


@cache
def source(*names: str) -> str:
    """Returns the first cell of a session: the files of its side, without their imports of each other.

    They are compiled here, once for all sessions: that takes as long as the rest of a verdict. A session with another version
    of Python compiles them itself."""
    here = Path(__file__).parent
    lines = "".join((here / f"{name}.py").read_text(encoding="utf-8") for name in names).splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("from ."))
    code = base64.b64encode(marshal.dumps(compile(text, "<isolated>", "exec", dont_inherit=True))).decode()
    same = f"sys.hexversion == {sys.hexversion} and sys.implementation.name == {sys.implementation.name!r}"
    return f"import base64, marshal, sys\nexec(marshal.loads(base64.b64decode({code!r})) if {same} else {text!r})"


class _Peer:
    """One of the two sessions. Fetches long values in parts; both sessions share one deadline."""

    def __init__(self, inner: CodeSession, name: str, deadline: float) -> None:
        self.inner, self.name, self.deadline = inner, name, deadline

    async def start(self, *names: str) -> None:
        """Runs the files of this side. Raises WorldError if that fails: no code of a solution has run yet."""
        if await self.run(source(*names)) is None:
            raise WorldError(
                f"the {self.name}'s side of isolated tests does not start: does the session have Python 3.11 or later?"
            )

    async def call(self, method: str, *arguments: object) -> tuple[str, str] | None:
        """Returns the kind and the Base64 text of what `method` returns, or None for anything that is not a message. Raises
        TimeoutError at the deadline."""
        kind, text, total = "", "", 0
        call = f"{self.name}.{method}({', '.join(map(repr, arguments))})"
        while not total or len(text) < total:
            match = _PART.fullmatch(await self.run(call) or "")
            if match is None or (total and (kind, total) != (match[1], int(match[2]))):
                return None
            kind, total, part = match[1], int(match[2]), match[3]
            if total > _MAX_ENCODED or len(part) != min(PART, total - len(text)):
                return None
            text += part
            call = f"{self.name}.part({len(text)})"
        return kind, text

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
                async with asyncio.timeout_at(deadline + OVERRUN_S):
                    return await _decide(solution, judge, code, tests, prelude)
            except TimeoutError:
                return Verdict(0, f"it took longer than {timeout_s:g} s")
            except EOFError:
                return Verdict(0, "the session ended")


async def _decide(solution: _Peer, judge: _Peer, code: str, tests: Sequence[str], prelude: str) -> Verdict:
    await asyncio.gather(judge.start("wire", "forms", "plan", "judge"), solution.start("wire", "solution"))
    message = await judge.call("begin", prelude, list(tests))  # plans the tests: no line of the solution has run yet
    if message is not None and message[0] == "c":
        return Verdict(None, str(_parse(message[1]).get("cannot")))
    if await solution.run(f"solution.load({prelude!r}, {code!r})") is None:
        return Verdict(0, "the solution raised an error")
    while message is not None and message[0] == "r":
        answer = await solution.call("ask", message[1])
        message = await judge.call("reply", answer[1] if answer is not None and answer[0] == "a" else _NO_ANSWER)
    if message is None or message[0] != "d":
        return Verdict(0, "the tests gave no verdict")
    verdict = _parse(message[1])
    numbers = {number for number in verdict.get("passed", []) if type(number) is int and 0 <= number < len(tests)}
    return Verdict(len(numbers), str(verdict.get("because", "")))


def _parse(text: str) -> dict[str, Any]:
    """Returns a verdict. It comes from the judge's session, and has at most one number per test."""
    verdict = json.loads(base64.b64decode(text))
    return verdict if isinstance(verdict, dict) else {}
