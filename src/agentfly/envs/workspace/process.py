"""Tests that run in the process of the code: pytest in two fresh workspaces, one with the control of the tests.

The runner gets a key on its standard input and writes one signed, numbered line for each test, and a last line with their
number. An incomplete or unsigned report is worth nothing. Code that finds the key in its process can sign a report, alike in
both workspaces: then its control passes, and a test whose control passes does not count. What stays open is code that tells the
two workspaces apart; they start in random order, and constants change by random amounts.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import random
import secrets
import sys
from collections.abc import Mapping

from .box import Fields, Fresh, Lost
from .control import controlled
from .grade import GradedTests, wanted_tests

MAX_REPORT = 60_000
RUNNER = r"""
import hashlib, hmac, json, os, sys
given = json.loads(sys.stdin.buffer.read())
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
os.environ.pop("PYTEST_ADDOPTS", None)
import _pytest.assertion.rewrite, _pytest.unittest, pytest, unittest, unittest.mock, importlib.metadata

def reporter(key, write, sign):
    state = {"count": 0}
    def say(*what):
        text = json.dumps([state["count"], *what])
        state["count"] += 1
        write(out, (sign(key, text.encode(), "sha256").hexdigest() + " " + text + "\n").encode())
    class Reporter:
        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                say(report.nodeid, report.outcome, report.when)
    return say, Reporter()

say, plugin = reporter(given.pop("key").encode(), os.write, hmac.new)
root = os.getcwd()
place = next((n for n, path in enumerate(sys.path) if "site-packages" in path or "dist-packages" in path), len(sys.path))
sys.path[place:place] = [root, *(p for p in (os.path.join(root, "src"), os.path.join(root, "lib")) if os.path.isdir(p))]
code = pytest.main(
    ["-q", "--tb=no", "-c", os.devnull, "--rootdir", root, "--confcutdir", root, "-p", "no:cacheprovider", "-o", "addopts=",
     *given["files"]],
    plugins=[plugin],
)
say("", "end", int(code))
os._exit(0)
"""


async def judge(fresh: Fresh, fields: Fields, kept: Mapping[str, bytes | None], limit_s: float) -> GradedTests:
    """Runs the tests of a task over the kept changes of a chain."""
    wanted = wanted_tests(fields)
    tests = {path: str(text) for path, text in fields["tests"].items()}
    wrong = {path: controlled(text, path)[0] if path.endswith(".py") else text for path, text in tests.items()}
    runs = [(tests, True), (wrong, False)]
    random.shuffle(runs)
    reports = await asyncio.gather(*(_run(fresh, kept, files, limit_s) for files, _ in runs))
    found = {is_real: report for (_, is_real), report in zip(runs, reports, strict=True)}
    real, control = found[True], found[False]
    if real is None or control is None:
        return GradedTests(0, len(wanted), "the tests did not run to their end")
    passed = sum(_passed(name, real) and not _passed(name, control) for name in wanted)
    return GradedTests(passed, len(wanted))


async def _run(
    fresh: Fresh, kept: Mapping[str, bytes | None], tests: Mapping[str, str], limit_s: float
) -> dict[str, str] | None:
    """The outcomes of the tests by name, None without a complete report."""
    key = secrets.token_hex(16)
    files = sorted(path for path in tests if path.endswith(".py") and not path.endswith(("conftest.py", "__init__.py")))
    given = json.dumps({"key": key, "files": files}).encode()
    try:
        async with fresh({**kept, **{path: text.encode() for path, text in tests.items()}}) as box:
            status, output = await box.run([sys.executable, "-I", "-B", "-c", RUNNER], given, limit_s, most=MAX_REPORT)
    except (Lost, OSError):
        return None  # the changes cannot be applied, or the tests have ended the workspace
    if status != 0:
        return None
    return read_report(key, output)


def read_report(key: str, output: bytes) -> dict[str, str] | None:
    """The outcomes of a report whose lines are signed, numbered and complete; a test reported twice has failed."""
    outcomes: dict[str, str] = {}
    lines = output.splitlines()
    for place, line in enumerate(lines):
        signature, _, text = line.partition(b" ")
        right = hmac.new(key.encode(), text, "sha256").hexdigest().encode()
        try:
            number, name, outcome, _ = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            return None
        if number != place or not hmac.compare_digest(signature, right):
            return None
        if outcome == "end":
            return outcomes if place == len(lines) - 1 else None
        outcomes[str(name)] = "failed" if name in outcomes else str(outcome)
    return None


def _passed(name: str, outcomes: Mapping[str, str]) -> bool:
    """Whether a test passed; a name without parameters stands for all of its parameters."""
    if "[" in name:
        return outcomes.get(name) == "passed"
    mine = [outcome for full, outcome in outcomes.items() if full.partition("[")[0] == name]
    return bool(mine) and all(outcome == "passed" for outcome in mine)
