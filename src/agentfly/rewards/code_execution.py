"""Code tests: run the tests of a task against the code the model wrote.

Comes in: the prediction (its last fenced block, or all of it) and the field `tests`: assert code, a list of such pieces, or
pairs of stdin and stdout. Goes out: 1 if all pass, else 0 (or the share, with `partial`). Every run is a fresh process with
limits of time and memory.

    pairs      stdin goes in, stdout is compared here: the process never sees what is expected of it
    asserts    the harness reads a random nonce, the code and the tests from stdin and wipes what it read, turns stdin and
               stdout away from the code, and after test i has passed writes sha256(nonce, i) to a saved descriptor: what is
               written never tells what would have to be written for another test

So exiting early, printing "passed", reading the process's files, or replacing `print` or `exec` earn nothing. Not stopped:
code that searches its own process for the nonce (frames, gc, /proc/self/mem), returns objects whose `==` is always true, or
replaces the functions that the tests themselves call. Nor is the process a sandbox: code that must be kept from the files
and the network of this machine needs a world with walls. Where a task allows it, prefer pairs.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from ..errors import ConfigError, WorldError, blame
from .base import Reward
from .function import FunctionReward
from .lookup import factory

HARNESS = r"""
import hashlib, json, os, sys
def _run():
    nonce, code, tests = json.loads(sys.stdin.buffer.read())
    given = os.fstat(0)
    for entry in os.scandir("."):
        if entry.is_file() and os.path.samestat(entry.stat(), given):
            os.truncate(entry.path, 0)  # stdin was a file: leave nothing to read again
    out, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    # Everything that is needed afterwards is taken now: the code may replace any builtin.
    write, digest, run = os.write, hashlib.sha256, exec
    rest = [(compile(test, "<test>", "exec"), f"{nonce} {number}".encode()) for number, test in enumerate(tests)]
    space = {"__name__": "solution"}
    run(compile(code, "<solution>", "exec"), space)
    for test, secret in rest:
        try:
            run(test, space)
        except BaseException:
            continue
        write(out, digest(secret).hexdigest().encode() + b"\n")
_run()
"""


@factory("code_tests")
def code_tests_reward(timeout_s: float = 10.0, memory_mb: int = 512, partial: bool = False) -> Reward:
    """1 if the code in the prediction passes every test of the field `tests`.

    `tests` is assert code, a list of assert codes, a list of `{"input": ..., "output": ...}` (or [input, output]), or
    `{"inputs": [...], "outputs": [...]}`. `timeout_s` is for one process: all asserts together, or one pair. `partial`
    gives the share that passed instead. Components: `passed` (the share) and `tests` (how many).
    """
    if timeout_s <= 0 or memory_mb < 16:
        raise ConfigError("reward 'code_tests': timeout_s must be above 0 and memory_mb at least 16")

    async def code_tests(prediction: str, tests: Any) -> dict[str, float]:
        asserts, pairs = read_tests(tests)
        code = extract_code(prediction)
        with blame(WorldError, "code_tests could not run"):
            if not code.strip() or not _is_source(code):
                passed = 0
            elif asserts:
                passed = await _pass_asserts(code, asserts, timeout_s, memory_mb)
            else:
                passed = await _pass_pairs(code, pairs, timeout_s, memory_mb, stop_early=not partial)
        share = passed / len(asserts or pairs)
        return {"reward": share if partial else float(share == 1.0), "passed": share, "tests": len(asserts or pairs)}

    code_tests.__doc__ = code_tests_reward.__doc__
    # Each process has its own deadline; a reward's own would cut a long list of pairs short.
    return FunctionReward(code_tests, name="code_tests", timeout_s=None)


async def _pass_asserts(code: str, tests: Sequence[str], timeout_s: float, memory_mb: int) -> int:
    from ..tools.python import run_code

    nonce = secrets.token_hex(16)
    # ASCII JSON: lone surrogates in a reply would not survive the encoding of stdin.
    payload = json.dumps([nonce, code, list(tests)])
    run = await run_code(HARNESS, stdin=payload, timeout_s=timeout_s, memory_mb=memory_mb)
    said = set(run.stdout.splitlines())
    return sum(sha256(f"{nonce} {number}".encode()).hexdigest() in said for number in range(len(tests)))


async def _pass_pairs(code: str, pairs: Sequence[tuple[str, str]], timeout_s: float, memory_mb: int, stop_early: bool) -> int:
    from ..tools.python import run_code

    passed = 0
    for given, expected in pairs:
        run = await run_code(code, stdin=given, timeout_s=timeout_s, memory_mb=memory_mb)
        if not run.timed_out and run.exit_code == 0 and _lines(run.stdout) == _lines(expected):
            passed += 1
        elif stop_early:
            break
    return passed


def _is_source(code: str) -> bool:
    """No file can hold the rest: half of a surrogate pair, or a NUL. That is the model's mistake, not the world's."""
    return "\0" not in code and code.encode("utf-8", "ignore").decode() == code


def _lines(text: str) -> list[str]:
    """Output as people compare it: white space at the ends of lines and of the text does not count."""
    return [line.rstrip() for line in text.strip().splitlines()]


def read_tests(tests: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """Assert codes or pairs of stdin and stdout: one of the two lists is empty."""
    if hasattr(tests, "tolist"):  # a column of a Parquet file
        tests = tests.tolist()
    if isinstance(tests, str):
        tests = [tests]
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        if len(tests["inputs"]) != len(tests["outputs"]):
            raise ValueError(f"the field 'tests' has {len(tests['inputs'])} inputs but {len(tests['outputs'])} outputs")
        tests = list(zip(tests["inputs"], tests["outputs"], strict=True))
    if not isinstance(tests, Sequence) or not tests:
        raise ValueError(f"the field 'tests' must be assert code or a list of tests, not {type(tests).__name__} {tests!r:.60}")
    if all(isinstance(test, str) and test.strip() for test in tests):
        for number, test in enumerate(tests):
            _refuse_broken(test, number)
        return list(tests), []
    return [], [_pair(test, number) for number, test in enumerate(tests)]


def _refuse_broken(test: str, number: int) -> None:
    """A test that is not Python would fail every solution, silently."""
    try:
        compile(test, "<test>", "exec")
    except SyntaxError as error:
        raise ValueError(f"tests[{number}] is not Python: {error.msg} in {test!r:.60}") from error


def _pair(test: Any, number: int) -> tuple[str, str]:
    if isinstance(test, Mapping) and "input" in test and "output" in test:
        test = (test["input"], test["output"])
    if isinstance(test, Sequence) and not isinstance(test, str) and len(test) == 2:
        given, expected = test
        if isinstance(given, str) and isinstance(expected, str):
            return given, expected
    raise ValueError(f"tests[{number}] is neither assert code nor a pair of input and output texts: {test!r:.60}")


def extract_code(prediction: str) -> str:
    """The last fenced block; one that was never closed runs to the end; without a fence, all of it. Linear in the text."""
    block: list[str] | None = None
    last: list[str] | None = None
    for line in prediction.splitlines():
        if line.lstrip().startswith("```"):
            if block is None:
                block = []
            else:
                last, block = block, None
        elif block is not None:
            block.append(line)
    chosen = block if block else last
    return prediction if chosen is None else "\n".join(chosen) + "\n"
