"""`CodeInterpreter`: a Python session for one chain, as an environment.

Names, imports and functions stay from cell to cell; `reset` starts with an empty namespace. A lost session (killed at its time
limit, exited, cancelled) is replaced at the next cell, and `replaced` says so. Code that cannot be run is refused with one
sentence, and the session goes on. Chains never share a session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ...errors import ConfigError, WorldError
from ...resources.spec import Cost, Environment
from ...types import Task
from .session import CellResult, CodeSession, check_tier, open_session

LIMIT_S = 20.0
GRACE_S = 40.0
MAX_CODE = 200_000


class CodeInterpreter(Environment):
    """A stateful Python interpreter.

    `limit_s` is the time limit of a cell. `tier` says how sessions are isolated (namespace, landlock, process, docker:IMAGE,
    enroot:NAME, remote:URL), `min_tier` is the weakest tier to accept, `place` holds options of a container or server.
    """

    cost: ClassVar[Cost] = Cost(cpu=0.05, memory_mb=30, start_s=0.1)

    def __init__(
        self,
        tier: str | None = None,
        limit_s: float = LIMIT_S,
        min_tier: str | None = None,
        place: Mapping[str, Any] | None = None,
    ) -> None:
        self.check_options(tier, limit_s, min_tier, place)
        self.tier, self.limit_s, self.min_tier, self.place = tier, float(limit_s), min_tier, place
        self.cells = 0
        self.replaced = False
        """Whether the last cell ran in a new session because the one before it was lost."""
        self._session: CodeSession | None = None
        self._lost = self._closed = self._timed_out = False
        self._ran: list[str] = []
        self._turn = asyncio.Lock()

    @staticmethod
    def check_options(
        tier: str | None = None,
        limit_s: float = LIMIT_S,
        min_tier: str | None = None,
        place: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ConfigError for options that cannot work, before anything is started."""
        if not isinstance(limit_s, int | float) or not limit_s > 0:
            raise ConfigError(f"CodeInterpreter: limit_s must be above 0, not {limit_s!r}")
        check_tier(tier, min_tier, place)

    @staticmethod
    def longest_call_s(limit_s: float = LIMIT_S, **options: object) -> float:
        """Returns how long a call may take: the cell, and time to start, interrupt or kill its session."""
        return float(limit_s) + GRACE_S

    async def reset(self, task: Task | None = None) -> None:
        """Starts with an empty namespace. The first cell opens the session, so a chain without cells costs nothing."""
        await self._drop()
        self.cells, self.replaced, self._lost, self._closed = 0, False, False, False

    async def run(self, code: str | bytes, timeout_s: float | None = None) -> CellResult:
        """Runs one cell. Concurrent calls run one after the other."""
        limit_s = self.limit_s if timeout_s is None else timeout_s
        text, refused = read_code(code)
        if refused:
            return CellResult(error=f"{refused} Nothing was run; the session goes on.")
        async with self._turn:
            if self._closed:
                raise WorldError("the code interpreter is closed: reset it before the next cell")
            if self._session is None:
                self._session = await open_session(self.tier, self.min_tier, self.place)
            self.replaced, self._lost = self._lost, False
            self.cells += 1
            self._ran.append(text.strip())
            try:
                result = await self._session.run(text, limit_s)
            except BaseException:
                # The call was cancelled or the session failed. Its state is unknown, so the next cell gets a new session.
                await self._drop()
                raise
            self._timed_out = self._timed_out or result.timed_out
            if not result.alive:
                await self._drop()
            return replace(result, replaced=True) if self.replaced else result

    async def about(self) -> dict[str, Any]:
        """Returns the actual tier of the session, and sentences on what it stops and does not stop."""
        async with self._turn:
            if self._session is None:
                self._session = await open_session(self.tier, self.min_tier, self.place)
            return {"tier": self._session.tier, "report": list(self._session.report())}

    def state_key(self) -> str:
        """The cells that ran in the session. Empty after one that its time limit stopped, who knows where."""
        return "" if self._timed_out else repr(self._ran)

    async def close(self) -> None:
        self._closed = True
        await self._drop()

    def healthy(self) -> bool:
        return not self._closed

    @staticmethod
    def conformance() -> dict[str, Any]:
        """Returns the arguments of `check_env`: the solver's cells must print the answers of two easy tasks."""
        from ...data import load_tasks
        from .solver import solve
        from .tasks import easy_code_tasks

        async def play(env: CodeInterpreter, task: Task) -> float:
            shown = ""
            for cell in solve(task):
                result = await env.run(cell)
                shown = (result.stdout or result.value or "").strip()
            return float(shown == str(task.fields["answer"]))

        cells = ["x = 1", "x = 2\nprint(x)", "sorted([3, 1, 2])", "1 / 0", "print('a' * 5)"]
        return {
            "tasks": load_tasks(easy_code_tasks("test", 2)),
            "actions": lambda rng, seen: ("run", {"code": rng.choice(cells)}),
            "solver": play,
            "do_nothing": lambda env, task: 0.0,
        }

    async def _drop(self) -> None:
        session, self._session = self._session, None
        self._ran, self._timed_out = [], False
        if session is not None:
            self._lost = True
            await session.close()


def read_code(code: object) -> tuple[str, str]:
    """Returns the code as text, and an empty string or the reason why it cannot be run."""
    if isinstance(code, bytes):
        try:
            code = code.decode()
        except UnicodeDecodeError as error:
            return "", f"The code is not valid UTF-8 (byte {error.start})."
    if not isinstance(code, str):
        return "", f"The code must be text, not {type(code).__name__}."
    if len(code) > MAX_CODE:
        return "", f"The code has {len(code):,} characters; at most {MAX_CODE:,} can be run."
    if "\0" in code:
        return "", f"The code contains a null character at position {code.index(chr(0))}; remove it."
    try:
        code.encode()
    except UnicodeEncodeError as error:
        return "", f"The code contains half of a surrogate pair at position {error.start}, which is not a character; remove it."
    return code, ""
