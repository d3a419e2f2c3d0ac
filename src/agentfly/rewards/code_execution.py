"""Reward `code_tests`: runs the tests of a task against the code in the prediction, in a new process with limits.

`tests` is assert code, a list of such pieces, or pairs of stdin and stdout.

    pairs      stdin goes in and stdout is compared here: the process never sees what is expected
    asserts    the process reads a nonce, the code and the tests from stdin, wipes that file, and redirects stdin and stdout.
               After test i passes it writes sha256(nonce, i) to a saved descriptor: no digest tells another test's digest

So early exits, printing "passed", reading the process's files and replacing `print` or `exec` earn nothing. Not stopped: code
that searches its process for the nonce (frames, gc, /proc/self/mem), returns objects whose `==` is always true, or replaces
functions that the tests call. The process is not a sandbox either: code that must not reach files and network needs the reward
`unit_tests`.
"""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Mapping, Sequence
from hashlib import sha256

from ..errors import ConfigError, WorldError, blame
from .base import Reward
from .defined_tests import called
from .function import FunctionReward
from .lookup import factory

RUN_TESTS = r"""
def _run_tests(nonce, sources, tests, report):
    import hashlib
    # The code may replace any built-in or module, so everything that is needed after it is bound before it runs.
    digest, run, build = hashlib.sha256, exec, compile
    compiled = [(build(test, "<test>", "exec"), f"{nonce} {number}".encode()) for number, test in enumerate(tests)]
    nonce = tests = None
    space = {"__name__": "solution"}
    for source, name in sources:
        run(build(source, name, "exec"), space)
    for test, secret in compiled:
        try:
            run(test, space)
        except BaseException:
            continue
        report(digest(secret).hexdigest())
"""
"""Source that runs tests after the code they test, in one namespace. Calls `report` with a digest for each test that passes."""

_PROGRAM = (
    RUN_TESTS
    + r"""
def _main():
    import json, os, sys
    nonce, code, tests = json.loads(sys.stdin.buffer.read())
    given = os.fstat(0)
    for entry in os.scandir("."):
        if entry.is_file() and os.path.samestat(entry.stat(), given):
            os.truncate(entry.path, 0)  # stdin is a file: the code must not read the nonce and the tests from it
    out, null, write = os.dup(1), os.open(os.devnull, os.O_RDWR), os.write
    os.dup2(null, 0)
    os.dup2(null, 1)  # what the code prints cannot mix with the digests
    _run_tests(nonce, [(code, "<solution>")], tests, lambda text: write(out, text.encode() + b"\n"))
_main()
"""
)


def count_reported(nonce: str, count: int, reported: set[str], length: int = 64) -> int:
    """Counts the tests whose digest, cut to `length` characters, `RUN_TESTS` has reported."""
    return sum(sha256(f"{nonce} {number}".encode()).hexdigest()[:length] in reported for number in range(count))


@factory("code_tests")
def code_tests_reward(timeout_s: float = 10.0, memory_mb: int = 512, partial: bool = False) -> Reward:
    """1 if the code in the prediction passes every test of the field `tests`.

    `tests` is assert code, a list of assert codes, a list of `{"input": ..., "output": ...}` (or [input, output]), or
    `{"inputs": [...], "outputs": [...]}`. `timeout_s` is for one process: all asserts together, or one pair. With `partial` the
    reward is the share that passed. Components: `passed` (the share) and `tests` (their number).
    """
    if timeout_s <= 0 or memory_mb < 16:
        raise ConfigError("reward 'code_tests': timeout_s must be above 0 and memory_mb at least 16")

    async def code_tests(prediction: str, tests: object) -> dict[str, float]:
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
    # Each process has a deadline. One for the whole reward would cut a long list of pairs short.
    return FunctionReward(code_tests, name="code_tests", timeout_s=None)


async def _pass_asserts(code: str, tests: Sequence[str], timeout_s: float, memory_mb: int) -> int:
    from ..sandbox.interpreter import run_code

    nonce = secrets.token_hex(16)
    # JSON in ASCII: lone surrogates in a reply would not survive the encoding of stdin.
    payload = json.dumps([nonce, code, list(tests)])
    run = await run_code(_PROGRAM, stdin=payload, timeout_s=timeout_s, memory_mb=memory_mb)
    return count_reported(nonce, len(tests), set(run.stdout.splitlines()))


async def _pass_pairs(code: str, pairs: Sequence[tuple[str, str]], timeout_s: float, memory_mb: int, stop_early: bool) -> int:
    from ..sandbox.interpreter import run_code

    passed = 0
    for given, expected in pairs:
        run = await run_code(code, stdin=given, timeout_s=timeout_s, memory_mb=memory_mb)
        if not run.timed_out and run.exit_code == 0 and output_lines(run.stdout) == output_lines(expected):
            passed += 1
        elif stop_early:
            break
    return passed


def _is_source(code: str) -> bool:
    """Whether a file can hold the code. A lone surrogate or a NUL is the model's mistake, not the world's failure."""
    return "\0" not in code and code.encode("utf-8", "ignore").decode() == code


def output_lines(text: str) -> list[str]:
    """Returns output for comparison, without white space at the ends of lines and of the text."""
    return [line.rstrip() for line in text.strip().splitlines()]


def read_tests(tests: object) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns assert codes and pairs of stdin and stdout; one of the two lists is empty. Raises ValueError for other tests.

    Functions and classes for pytest or unittest get the calls that run them.
    """
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
        return called(tests), []
    return [], [_pair(test, number) for number, test in enumerate(tests)]


def _refuse_broken(test: str, number: int) -> None:
    """Raises ValueError for a test that is not Python: it would fail every solution silently."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the data set's code
            compile(test, "<test>", "exec")
    except SyntaxError as error:
        raise ValueError(f"tests[{number}] is not Python: {error.msg} in {test!r:.60}") from error


def _pair(test: object, number: int) -> tuple[str, str]:
    if isinstance(test, Mapping) and "input" in test and "output" in test:
        test = (test["input"], test["output"])
    if isinstance(test, Sequence) and not isinstance(test, str) and len(test) == 2:
        given, expected = test
        if isinstance(given, str) and isinstance(expected, str):
            return given, expected
    raise ValueError(f"tests[{number}] is neither assert code nor a pair of input and output texts: {test!r:.60}")


def extract_code(prediction: str) -> str:
    """Returns the last fenced block, which runs to the end if it is not closed; without a fence, all of the text."""
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
