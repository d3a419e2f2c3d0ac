"""`Workspace`: a file tree and a shell for one chain, as an environment.

Each `reset` begins a new workspace with the task's tree (`trees`): a layer of its own over files that all workspaces share. A
workspace that is lost (too much memory, killed) is replaced by a fresh one at the next call, and the answer says so. All that a
workspace answers is data: what a chain did is judged in other workspaces (`grade`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, ClassVar

from ...aio.threads import run_in_thread
from ...errors import ConfigError, DataError, WorldError, blame
from ...resources.spec import Cost, Environment
from ...sandbox.limits import TIERS, WorkspaceLayout
from ...types import Task, ToolResult
from . import process, trees, values, verifier
from .box import OUTPUT_CHARS, SLACK_S, Box, Fields, Lost, Settings, open_box, prepare
from .grade import GradedTests, check_tests, kept_changes

LIMIT_S = 60.0
"""How long the tests of a task may run. Its field `tests_limit_s` says otherwise."""
LONGEST_S = 600.0
SUBMITTED = "The work is submitted already; nothing was done."


class Workspace(Environment):
    """A file tree and a shell.

    `network` is "none", or "loopback": 127.0.0.1 alone. `limit_s` is the time limit of a command, `output_chars` what a model
    reads of its output; `memory_mb`, `disk_mb`, `processes` and `cpu_s` bound the workspace. `tier` and `min_tier` say how it
    is isolated (namespace, landlock, process).
    """

    cost: ClassVar[Cost] = Cost(cpu=0.1, memory_mb=16, start_s=0.05)
    task_set: ClassVar[str] = "repair"
    main_tool: ClassVar[str] = "bash"

    def __init__(
        self,
        tier: str | None = None,
        min_tier: str | None = None,
        network: str = "none",
        limit_s: float = 60.0,
        output_chars: int = 12_000,
        memory_mb: int = 512,
        disk_mb: int = 256,
        processes: int = 64,
        cpu_s: int = 600,
    ) -> None:
        if not isinstance(limit_s, int | float) or not limit_s > 0:
            raise ConfigError(f"Workspace: limit_s must be above 0, not {limit_s!r}")
        if type(output_chars) is not int or not 200 <= output_chars <= OUTPUT_CHARS // 2:
            raise ConfigError(f"Workspace: output_chars must be from 200 to {OUTPUT_CHARS // 2:,}, not {output_chars!r}")
        for name in (tier, min_tier):
            if name is not None and name not in TIERS:
                raise ConfigError(f"Workspace: no tier is called {name!r}; there are {', '.join(reversed(TIERS))}")
        self.settings = Settings(tier, min_tier, network, memory_mb, disk_mb, processes, cpu_s)
        try:
            self.settings.limits()
        except ValueError as error:
            raise ConfigError(f"Workspace: {error}") from None
        WorkspaceLayout("", network)  # raises ConfigError
        self.limit_s, self.output_chars = float(limit_s), output_chars
        self.task: Task | None = None
        self.submitted = False
        self._box: Box | None = None
        self._closed = False
        self._turn = asyncio.Lock()

    @staticmethod
    def longest_call_s(limit_s: float = 60.0, **options: object) -> float:
        return float(limit_s) + 2 * SLACK_S

    @staticmethod
    async def make_ready(task: Task | None, **options: Any) -> None:
        """Starts the sandbox server and unpacks the task's tree, so that what cannot work is said before the first chain."""
        if task is not None:
            check_task(task)
        await prepare(Workspace(**options).settings, task.fields if task else {})

    async def reset(self, task: Task | None = None) -> None:
        """Begins a new workspace with the task's tree."""
        await self._drop()
        if task is not None:
            check_task(task)
        self.task, self._closed, self.submitted = task, False, False
        self._box = await open_box(self.settings, self._fields)

    async def bash(self, command: str, limit_s: float | None = None) -> ToolResult:
        """Runs a command in the shell of the workspace, which keeps its folder, variables and background processes."""
        limit = self.limit_s if limit_s is None else limit_s
        if not isinstance(command, str) or "\0" in command:
            return ToolResult(observation="The command must be text without NUL; nothing was run.", error="bad_arguments")
        if len(command) > 100_000:
            return ToolResult(
                observation=f"The command has {len(command):,} characters; at most 100,000 can be run.", error="bad_arguments"
            )
        return await self._use(lambda box: self._run_command(box, command, limit))

    async def _run_command(self, box: Box, command: str, limit: float) -> ToolResult:
        status, note = await box.call("bash", command, limit, limit_s=limit + 2)
        late = note.startswith("stopped")
        text = cut_middle(box.output, self.output_chars).rstrip("\n")
        lines = [text, f"[{note}]" if note else "", f"[exit {status}]" if status else ""]
        shown = "\n".join(line for line in lines if line) or "(no output)"
        return ToolResult(observation=shown, error="timeout" if late else None, limit="time" if late else None)

    async def read(self, path: str, line: int = 1, lines: int = 200) -> ToolResult:
        """Returns numbered lines of a file."""
        if min(line, lines) < 1:
            return ToolResult(observation="line and lines count from 1.", error="bad_arguments")

        async def show(box: Box) -> ToolResult:
            text, refused = await _text(box, path)
            rows = text.splitlines()
            chosen = rows[line - 1 : line - 1 + lines]
            if refused or not chosen:
                return ToolResult(observation=refused or f"{path} has {len(rows)} lines.")
            shown = "\n".join(f"{line + number}: {row}" for number, row in enumerate(chosen))
            left = len(rows) - (line - 1) - len(chosen)
            more = f"\n[{left} more lines]" if left else ""
            return ToolResult(observation=cut_middle(shown, self.output_chars) + more)

        return await self._use(show)

    async def edit(self, path: str, old: str, new: str) -> ToolResult:
        """Replaces the one place in a file where `old` stands, or writes a new file if `old` is empty."""

        async def change(box: Box) -> ToolResult:
            text, refused = await _text(box, path)
            if not old:
                if not refused and text:
                    return ToolResult(observation=f"{path} exists: give the text to replace in `old`.")
                return await _write(box, path, new, f"Wrote {path}.")
            if refused:
                return ToolResult(observation=refused)
            count = text.count(old)
            if count != 1:
                why = mismatch(text, old) if count == 0 else f"`old` stands {count} times in {path}: give more lines around it."
                return ToolResult(observation=f"Nothing was changed. {why}")
            return await _write(box, path, text.replace(old, new), f"Edited {path}.")

        return await self._use(change)

    async def grep(self, pattern: str, path: str = ".") -> ToolResult:
        """Returns the lines of files that match an extended regular expression."""
        argv = ["grep", "-rnIE", "--exclude-dir=.git", "-m", "50", "-e", pattern, "--", path]
        if any("\0" in argument for argument in argv):
            return ToolResult(observation="The pattern and the path must be text without NUL.", error="bad_arguments")

        async def search(box: Box) -> ToolResult:
            status, output = await box.run(argv, limit_s=min(self.limit_s, 30.0))
            if status == 1:
                return ToolResult(observation="No line matches.")
            text = cut_middle(output.decode("utf-8", "replace"), self.output_chars).rstrip("\n")
            return ToolResult(observation=text or "[stopped: out of time]")

        return await self._use(search)

    async def run_tests(self) -> ToolResult:
        """Runs the tests that the task shows: its `test_command`, or pytest."""
        fields = self._fields
        return await self.bash(str(fields.get("test_command") or "python -m pytest -q -x -p no:cacheprovider"))

    async def submit(self) -> ToolResult:
        """Ends the chain: the tree is judged as it is."""
        if self.submitted:
            return ToolResult(observation=SUBMITTED, error="bad_arguments")
        self.submitted = True
        return ToolResult(observation="Submitted.", done=True)

    async def changes(self) -> dict[str, tuple[int, bytes] | None]:
        """What the chain has changed: mode and content of each regular file, None for one that it has removed.

        Raises Lost if there is nothing to judge; the text says why."""
        if self._box is None:
            raise Lost("it has ended")
        async with self._turn:
            count = await self._box.call("changes", limit_s=60.0)
            if isinstance(count, str):
                raise Lost(count)
            pieces = [base64.b85decode(await self._box.call("piece", number)) for number in range(count)]
        try:
            packed = zlib.decompressobj()
            whole = json.loads(packed.decompress(b"".join(pieces), 64 << 20))
            names = set(whole["names"])
            changed = {str(path): (int(mode), base64.b85decode(data)) for path, (mode, data) in whole["changed"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error, RecursionError) as error:
            raise Lost("its tree cannot be read") from error
        before = await self.original()
        made: dict[str, tuple[int, bytes] | None] = {path: None for path in before if path not in names}
        for path, (mode, data) in changed.items():
            if path not in before or before[path] is None or before[path] != data:
                made[path] = mode, data
        return made

    async def original(self) -> dict[str, bytes | None]:
        """The files of the task's tree; None as the content of those that a layer holds."""
        fields = self._fields
        layer = await run_in_thread(trees.layer_of, fields)
        held: dict[str, bytes | None] = dict.fromkeys(trees.names_of(layer) if layer else ())
        return {**held, **(trees.small_files(fields["files"]) if fields.get("files") else {})}

    def fresh(self, files: Mapping[str, bytes | None] | None = None) -> contextlib.AbstractAsyncContextManager[Box]:
        """Another workspace with the task's tree, in which these files are written; None removes one."""
        if self._closed:
            raise WorldError("the workspace is closed: reset it before the next call")
        return self._fresh(files)

    @contextlib.asynccontextmanager
    async def _fresh(self, files: Mapping[str, bytes | None] | None) -> AsyncIterator[Box]:
        box = await open_box(self.settings, self._fields, files)
        try:
            yield box
        finally:
            await box.close()

    async def close(self) -> None:
        self._closed = True
        await self._drop()

    def healthy(self) -> bool:
        return not self._closed

    @staticmethod
    def missing() -> str:
        import sys

        return "" if sys.platform.startswith("linux") else "workspaces need Linux"

    async def grade(self) -> GradedTests:
        """Judges what the chain has changed, in fresh workspaces. A workspace that is gone has passed no test."""
        if self._closed:
            raise WorldError("the workspace is closed: reset it before the next call")
        fields = self._fields
        check_tests(fields)
        limit_s = float(fields.get("tests_limit_s") or LIMIT_S)
        if not 0 < limit_s <= LONGEST_S:
            raise DataError(f"tests_limit_s must be above 0 and at most {LONGEST_S:g}, not {limit_s:g}")
        try:
            changes, before = await self.changes(), await self.original()
        except Lost as error:
            return GradedTests(0, 1, str(error))
        kept = kept_changes(changes, before, fields.get("tests") or {})
        judge = values.judge if fields.get("cases") is not None else verifier.judge if fields.get("verifier") else process.judge
        with blame(WorldError, "the workspace of a reward failed"):
            return await judge(self.fresh, fields, kept, limit_s)

    @staticmethod
    def conformance() -> dict[str, Any]:
        """How `check_env` examines it: the solver must repair two generated repositories."""
        from ...data import load_tasks
        from .repair.solver import act, solve
        from .repair.tasks import easy_repair_tasks

        async def play(work: Workspace, task: Task) -> None:
            for name, arguments in solve(task):
                await getattr(work, name)(**arguments)

        async def score(work: Workspace, task: Task) -> float:
            return float((await work.grade()).success)

        tasks = load_tasks(easy_repair_tasks("test", 2))
        return {"tasks": tasks, "actions": act, "solver": play, "do_nothing": lambda work, task: None, "score": score}

    # ---- parts ----

    @property
    def _fields(self) -> Fields:
        return self.task.fields if self.task is not None else {}

    async def _use(self, action: Callable[[Box], Awaitable[ToolResult]]) -> ToolResult:
        """Runs an action in the workspace of this chain, one at a time. Answers for a workspace that is lost meanwhile."""
        async with self._turn:
            if self.submitted:
                return ToolResult(observation=SUBMITTED, error="bad_arguments")
            if self._closed:
                raise WorldError("the workspace is closed: reset it before the next call")
            try:
                if self._box is None:
                    self._box = await open_box(self.settings, self._fields)
                return await action(self._box)
            except Lost as error:
                await self._drop()
                return ToolResult(observation=f"[the workspace ended: {error}; the next call begins with the task's files]")
            except BaseException:
                await self._drop()  # cancelled in the middle of a call: its state is unknown
                raise

    async def _drop(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.close()


async def _text(box: Box, path: str) -> tuple[str, str]:
    """The text of a file, or an empty one and the sentence why not."""
    if not path or "\0" in path:
        return "", "The path must be a text without NUL."
    try:
        data, size = await box.call("read", path, 100_000)
    except OSError as error:
        return "", f"{path}: {error}"
    raw = base64.b85decode(data)
    if size > len(raw):
        return "", f"{path} has {size:,} bytes; at most {len(raw):,} can be read at once: use bash."
    try:
        return raw.decode(), ""
    except UnicodeDecodeError:
        return "", f"{path} is no text: {size:,} bytes."


async def _write(box: Box, path: str, text: str, done: str) -> ToolResult:
    try:
        await box.write({path: text.encode("utf-8", "replace")})
    except OSError as error:
        return ToolResult(observation=f"{path}: {error}")
    return ToolResult(observation=done)


def check_task(task: Task) -> None:
    """Raises DataError for a task whose tree or tests cannot be had."""
    trees.check_source(task.fields)
    if any(task.fields.get(name) is not None for name in ("cases", "tests", "verifier")):
        check_tests(task.fields)


def cut_middle(text: str, most: int) -> str:
    """The beginning and the end of a long text, and a sentence on what is missing between them."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    missing = len(text) - most
    mark = f"[... {missing:,} characters left out; write long output to a file and read parts of it ...]"
    return f"{text[:head]}\n{mark}\n{text[head - most :]}"


def mismatch(text: str, old: str) -> str:
    """Which line of `old` does not stand in a text where the lines before it do."""
    wanted, rows = old.splitlines(), text.splitlines()
    best, place = 0, -1
    for start in range(len(rows)):
        same = 0
        while same < len(wanted) and start + same < len(rows) and rows[start + same].strip() == wanted[same].strip():
            same += 1
        if same > best:
            best, place = same, start
    if best == len(wanted):
        first = next((n for n in range(best) if rows[place + n] != wanted[n]), 0)
        there = f"line {place + first + 1} of the file is {rows[place + first]!r}"
        return f"The white space of line {first + 1} of `old` differs: {there}."
    line = wanted[best] if best < len(wanted) else ""
    where = f" after line {place + best} of the file" if best else ""
    return f"Line {best + 1} of `old` is not there{where}: {line!r}."
