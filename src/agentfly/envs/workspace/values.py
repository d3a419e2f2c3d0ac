"""Cases that are judged by values: the code runs in a fresh workspace, gets arguments and returns results as JSON.

What is expected never leaves the trainer, which compares. So the code can do no better than to return the right values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from .box import Fields, Fresh, Lost
from .grade import GradedTests

MAX_VALUES = 60_000
CALLER = r"""
import importlib, json, os, sys
calls = json.loads(sys.stdin.buffer.read())
out = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
sys.path[:0] = [os.getcwd()]
for number, (module, name, arguments) in enumerate(calls):
    try:
        value = getattr(importlib.import_module(module), name)(*arguments)
        text = json.dumps([number, value], allow_nan=False)
    except BaseException:
        text = json.dumps([number])
    os.write(out, text.encode() + b"\n")
os._exit(0)
"""


async def judge(fresh: Fresh, fields: Fields, kept: Mapping[str, bytes | None], limit_s: float) -> GradedTests:
    """Calls the functions of the cases over the kept changes of a chain, and compares."""
    cases = fields["cases"]
    calls = [[*str(case["call"]).split(":", 1), list(case["args"])] for case in cases]
    try:
        async with fresh(kept) as box:
            given = json.dumps(calls).encode()
            _, output = await box.run([sys.executable, "-I", "-B", "-c", CALLER], given, limit_s, most=MAX_VALUES)
    except Lost as error:
        return GradedTests(0, len(cases), f"the workspace ended: {error}")
    except OSError as error:
        return GradedTests(0, len(cases), f"the changes cannot be applied: {error}")
    found: dict[int, object] = {}
    for line in output.splitlines():
        try:
            number, *value = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue  # the code wrote it
        if type(number) is int and value:
            found.setdefault(number, value[0])
    return GradedTests(sum(n in found and same(found[n], case["expected"]) for n, case in enumerate(cases)), len(cases))


def same(found: object, expected: object) -> bool:
    """Whether two values of JSON are equal, with their types: True is not 1."""
    if isinstance(found, list) and isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    return type(found) is type(expected) and found == expected
