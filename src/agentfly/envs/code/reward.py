"""Rewards of the code world: the final answer, what a program prints, and unit tests.

    code_answer   the answer is the expected one: the same number, list or word
    code_output   the program, run again in a new session, prints the expected output
    unit_tests    the code passes the task's tests, which run in another session than the code (see `isolated`)

A program is the fenced block of the final reply or, without one, the cells that the chain ran. It is scored in a session that
no chain has used. Tests that hand a solution more than plain data, for example a function, cannot run isolated; the tests alone
decide that, before a solution is seen. They run beside the solution in one session, and the component `apart` is 0. There,
code that searches its process for the tests' nonce is not stopped, nor are objects that equal everything; `beside=False`
refuses such tasks.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError, WorldError, blame
from ...rewards import Reward
from ...rewards.answers import alternatives, read_literal
from ...rewards.code_execution import RUN_TESTS, count_reported, extract_code, output_lines, read_tests
from ...rewards.function import FunctionReward
from ...rewards.lookup import factory
from ...rewards.math.math_answer import math_equal, tagged_answer
from ...types import Trajectory
from .env import read_code
from .isolated.run import count_isolated
from .session import OVERRUN_S, CellResult, session

_MATH_WORDS = re.compile(r"sqrt|frac|pi|sin|cos|tan|log|ln|exp|infty?|text|cdot|times")
_DIGEST_CHARS = 16  # of each digest, because a session cuts the value of a cell

# Runs as one cell, whose value is the list of digests. The payload is no name of the namespace that the solution sees.
_CELL = (
    RUN_TESTS
    + r"""
def _main(given):
    import json, linecache
    nonce, prelude, code, tests = json.loads(given)
    given = None
    linecache.clearcache()  # it holds the source of this cell, and with it the payload
    passed = []
    keep = passed.append
    _run_tests(nonce, [(prelude, "<prelude>"), (code, "<solution>")], tests, lambda text: keep(text[:DIGEST_CHARS]))
    return " ".join(passed)
""".replace("DIGEST_CHARS", str(_DIGEST_CHARS))
)


def _code_answer(prediction: str, answer: object, question: object = "") -> float:
    """1 if the final answer is the expected one: the same number or list, or exactly the same word."""
    return float(any(same(prediction, expected, question) for expected in alternatives(answer)))


def same(found: str, expected: str, question: object = "") -> bool:
    """Whether two answers agree. Words must be equal to the letter; numbers, formulas and lists may be written differently."""
    inner = tagged_answer(found)
    found, expected = _bare(found if inner is None else inner), _bare(expected)
    if not found or not expected:
        return False
    if found == expected:
        return True
    left, right = _listed(found), _listed(expected)
    if left is not None or right is not None:
        return left == right
    if "\\" not in expected and re.search(r"[^\W\d_]{2}", _MATH_WORDS.sub("", expected)):
        return False
    return bool(math_equal(prediction=found, answer=expected, question=question))


def _bare(text: str) -> str:
    """Returns the text without white space, back-ticks and quotes around it."""
    text = text.strip().strip("`").strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _listed(text: str) -> list[Any] | None:
    """Returns a list or tuple in Python's notation, or None. "3, 4" is one, "1,234" is not."""
    if len(text) > 10_000 or not re.search(r"^[\[(]|, ", text):
        return None
    value = read_literal(text)
    return list(value) if isinstance(value, list | tuple) else None


code_answer = FunctionReward(_code_answer, name="code_answer")


@factory("code_output")
def code_output_reward(timeout_s: float = 10.0, field: str = "answer", tier: str | None = None) -> Reward:
    """1 if the program, run in a fresh session, prints (or ends with the value of) the field `answer`.

    `timeout_s` is for one cell, `field` names the field with the expected output, `tier` is the kind of session.
    """
    _check("code_output", timeout_s)

    async def code_output(prediction: str, trajectory: Trajectory, **fields: object) -> float:
        cells = program_of(prediction, trajectory)
        if not cells or any(read_code(cell)[1] for cell in cells):
            return 0.0
        result = await _run_fresh(cells, timeout_s, tier)
        if result is None or result.error or result.timed_out or not result.alive:
            return 0.0
        shown = (result.stdout if result.stdout.strip() else result.value or "").strip()
        return float(
            any(output_lines(shown) == output_lines(text) or same(shown, text) for text in alternatives(fields[field]))
        )

    code_output.__doc__ = code_output_reward.__doc__
    return FunctionReward(code_output, name="code_output", timeout_s=timeout_s + 60.0, needs=(field,))


@factory("unit_tests")
def unit_tests_reward(timeout_s: float = 10.0, partial: bool = False, tier: str | None = None, beside: bool = True) -> Reward:
    """1 if the code passes every test of the field `tests`, which run in another session than the code.

    `tests` is assert code or a list of such. `timeout_s` is for all of them. With `partial` the reward is the share that
    passed. `tier` is the kind of session. The optional field `prelude` runs before the solution and before the tests. The
    component `apart` is 0 if the tests hand over more than data and ran beside the solution in one session; `beside=False`
    makes that an error of the task.
    """
    _check("unit_tests", timeout_s)

    async def unit_tests(prediction: str, trajectory: Trajectory, tests: object, prelude: str = "") -> dict[str, float]:
        asserts, pairs = read_tests(tests)
        if pairs:
            raise ValueError("the field 'tests' holds pairs of input and output; use the reward 'code_tests' for those")
        code = "\n".join(program_of(prediction, trajectory) or [prediction])
        passed, apart = 0, 1.0
        if code.strip() and not read_code(code)[1]:
            verdict = await count_isolated(code, asserts, prelude, timeout_s, tier)
            if verdict.passed is not None:
                passed = verdict.passed
            elif beside:
                apart, passed = 0.0, await count_beside(code, asserts, prelude, timeout_s, tier)
            else:
                raise ValueError(f"the tests cannot run isolated from the solution: {verdict.why}; allow it with beside=True")
        share = passed / len(asserts)
        return {"reward": share if partial else float(share == 1.0), "passed": share, "tests": len(asserts), "apart": apart}

    unit_tests.__doc__ = unit_tests_reward.__doc__
    return FunctionReward(unit_tests, name="unit_tests", timeout_s=timeout_s + 60.0)


async def count_beside(code: str, tests: Sequence[str], prelude: str, timeout_s: float, tier: str | None) -> int:
    """Counts the tests that pass after `code`. They run in order, in the same new session as the code."""
    nonce = secrets.token_hex(16)
    payload = json.dumps([nonce, prelude, code, list(tests)])
    result = await _run_fresh([f"{_CELL}\n_main({payload!r})"], timeout_s, tier)
    if result is None or result.error or result.timed_out or result.value is None:
        return 0
    return count_reported(nonce, len(tests), set(result.value.strip("'\"").split()), _DIGEST_CHARS)


def program_of(prediction: str, trajectory: Trajectory) -> list[str]:
    """Returns the fenced block of the final reply; without one, the cells that the chain ran."""
    if "```" in prediction:
        return [extract_code(prediction)]
    return [
        str(call.arguments["code"])
        for turn in trajectory.turns
        for call, result in zip(turn.calls, turn.results, strict=False)
        if "code" in call.arguments and not result.invalid
    ]


async def _run_fresh(cells: Sequence[str], timeout_s: float, tier: str | None) -> CellResult | None:
    """Runs cells in a new session. Returns the result of the last one, or of the one that ended the session."""
    result: CellResult | None = None
    with blame(WorldError, "the session of a reward failed"):
        async with session(tier) as fresh:
            for cell in cells:
                try:
                    async with asyncio.timeout(timeout_s + OVERRUN_S):
                        result = await fresh.run(cell, timeout_s)
                except TimeoutError:
                    return CellResult(error="it did not stop when its time was over", timed_out=True, alive=False)
                if not result.alive or result.timed_out:
                    break
    return result


def _check(name: str, timeout_s: float) -> None:
    if not timeout_s > 0:
        raise ConfigError(f"reward {name!r}: timeout_s must be above 0, not {timeout_s}")
