"""The rewards of the code world: what earns, what does not, and that a solution can neither see nor alter its tests."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from agentfly import plugins
from agentfly.envs.code.reward import code_answer, code_output_reward, program_of, same, unit_tests_reward
from agentfly.envs.code.session import open_session
from agentfly.errors import ConfigError, RewardError
from agentfly.rewards import Reward, Score, as_reward
from agentfly.rewards.answers import read_literal
from agentfly.rewards.math.math_answer import math_equal
from agentfly.sandbox.shared_server import SERVERS
from agentfly.types import Completion, Task, ToolCall, ToolResult, Trajectory, Turn

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")
TESTS = ["assert square(3) == 9", "assert square(-2) == 4"]


def chain(prediction: str, cells: Sequence[str] = (), **fields: Any) -> Trajectory:
    trajectory = Trajectory("c", Task("t", (), fields), prediction=prediction)
    for cell in cells:
        turn = Turn([], False, Completion(text=cell), (ToolCall("python", {"code": cell}),), (ToolResult(observation=""),))
        trajectory.turns.append(turn)
    return trajectory


def scores(reward: Reward, *chains: Trajectory) -> list[Score]:
    async def main() -> list[Score]:
        return [await reward.score(trajectory) for trajectory in chains]

    return asyncio.run(main())


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("42", "42"),
        (" 42.0 ", "42"),
        ("1,234", "1234"),
        ("1/2", "0.5"),
        ("$18", "18"),
        ("\\boxed{42}", "42"),
        ("'kilo'", "kilo"),
        ("`kilo`", "kilo"),
        ("[1, 2, 3]", "[1, 2, 3]"),
        ("[1,2,3]", "[1, 2, 3]"),
        ("1, 2, 3", "[1, 2, 3]"),
        ("(1, 2, 3)", "[1, 2, 3]"),
        ("sqrt(2)/2", "\\frac{\\sqrt{2}}{2}"),
    ],
)
def test_an_answer_may_be_written_otherwise(found, expected):
    assert same(found, expected)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("43", "42"),
        ("", "42"),
        ("42", ""),
        ("Kilo", "kilo"),
        ("KILO", "kilo"),
        ("kilo", "kilos"),
        ("[1, 3, 2]", "[1, 2, 3]"),
        ("[1, 2]", "[1, 2, 3]"),
        ("123", "[1, 2, 3]"),
        ("[" * 5000, "[1, 2, 3]"),
    ],
)
def test_another_answer_is_not_the_same(found, expected):
    assert not same(found, expected)


def test_code_answer_scores_the_final_answer_against_one_or_several():
    score = scores(code_answer, chain("42", answer="42"), chain("41", answer="42"), chain("b", answer=["a", "b"]))
    assert [one.reward for one in score] == [1.0, 0.0, 1.0]


def test_code_output_runs_the_program_again_in_a_fresh_session():
    cells = ["x = [3, 1, 2]", "print(sum(x))"]
    found = scores(
        code_output_reward(),
        chain("The answer is above.", cells, answer="6"),  # the cells of the chain, one after the other
        chain(block("print(2 * 3)"), answer="6"),  # the block of the final reply
        chain(block("2 * 3"), answer="6"),  # the value, where nothing is printed
        chain(block("print(2 * 3)"), cells, answer="6"),
        chain(block("for i in range(2):\n    print(i)  "), answer="0\n1\n"),
        chain(block("print(x)"), ["x = 6"], answer="6"),  # the fresh session does not know x
        chain(block("print(7)"), answer="6"),
        chain(block("print(6)\n1 / 0"), answer="6"),
        chain("6", answer="6"),  # no program at all
        chain(block("print('\0')"), answer="6"),
    )
    assert [score.reward for score in found] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_code_output_has_a_time_limit_and_can_compare_another_field():
    slow = code_output_reward(timeout_s=0.5)
    assert scores(slow, chain(block("while True: pass"), answer="6"))[0].reward == 0.0
    assert scores(code_output_reward(field="printed"), chain(block("print(1)"), printed="1"))[0].reward == 1.0


def test_unit_tests_pass_for_a_right_solution_and_fail_for_others():
    found = scores(
        unit_tests_reward(),
        chain(block("def square(n):\n    return n * n"), tests=TESTS),
        chain("def square(n):\n    return n * n", tests=TESTS),
        chain("done", ["def square(n):\n    return n * n"], tests=TESTS),
        chain(block("def square(n):\n    return abs(n) * 3"), tests=TESTS),
        chain(block("def square(n:\n    return"), tests=TESTS),
        chain("", tests=TESTS),
        chain(block("def square(n):\n    return helper(n)"), tests=TESTS, prelude="def helper(n):\n    return n ** 2"),
    )
    assert [score.reward for score in found] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert found[3].components["passed"] == 0.5
    assert scores(unit_tests_reward(partial=True), chain("def square(n): return 9", tests=TESTS))[0].reward == 0.5


HOSTILE = {
    "printing success": "print('passed')\nprint('1.0')",
    "exiting early": "import sys\nsys.exit(0)",
    "exiting hard": "import os\nos._exit(0)",
    "raising": "raise SystemExit",
    "replacing exec and compile": "import builtins\nbuiltins.exec = builtins.compile = builtins.eval = lambda *a, **k: None",
    "replacing print and repr": "import builtins\nbuiltins.repr = builtins.print = lambda *a, **k: 'passed'",
    "replacing the harness": "import __main__\n__main__._run = lambda given: 'all passed'",
    "replacing hashlib": "import hashlib\nhashlib.sha256 = None",
    "switching assertions off": "import builtins\nbuiltins.AssertionError = ValueError\n__debug__",
    "an endless loop": "while True: pass",
    "a signal handler": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
}


@pytest.mark.parametrize("code", HOSTILE.values(), ids=HOSTILE)
def test_a_solution_that_only_pretends_earns_nothing(code):
    score = scores(unit_tests_reward(timeout_s=2.0), chain(block(code), tests=TESTS))[0]
    assert score.reward == 0.0
    assert score.components["passed"] == 0.0


def test_a_solution_cannot_read_its_tests_from_source_lines_files_or_its_namespace():
    looks = """
import __main__, linecache, os, sys
seen = str(linecache.cache) + str(vars(__main__)) + str(globals()) + str(sys.argv) + str(dict(os.environ))
for folder in (".", "/tmp"):
    for name in os.listdir(folder):
        try:
            seen += open(os.path.join(folder, name)).read()
        except OSError:
            pass
def square(n):
    if "assert" + " square" in seen:
        raise ValueError("the tests can be seen")
    return n * n
"""
    assert scores(unit_tests_reward(), chain(block(looks), tests=TESTS))[0].reward == 1.0


def test_tests_that_are_not_python_or_not_there_are_the_users_mistake():
    with pytest.raises(RewardError, match=r"tests\[0\] is not Python"):
        scores(unit_tests_reward(), chain("x = 1", tests=["assert ("]))
    with pytest.raises(RewardError, match="use the reward 'code_tests'"):
        scores(unit_tests_reward(), chain("x = 1", tests=[["1", "2"]]))


def test_the_program_of_a_chain_is_its_last_block_or_its_cells():
    assert program_of(block("a = 1"), chain("", ["b = 2"])) == ["a = 1\n"]
    assert program_of("no block", chain("", ["b = 2", "c = 3"])) == ["b = 2", "c = 3"]
    assert program_of("no block", chain("")) == []


def test_the_rewards_have_names_and_refuse_a_limit_of_nothing():
    assert plugins.resolve("rewards", "code_answer") is code_answer
    assert as_reward("code_output").needs == {"answer"}
    assert as_reward("unit_tests").needs == {"tests"}
    with pytest.raises(ConfigError, match="timeout_s must be above 0"):
        code_output_reward(timeout_s=0)


def test_a_server_is_shared_by_sessions_and_ends_with_the_loop():
    async def main() -> tuple[int, int]:
        one, two = await open_session(), await open_session()
        servers = {(await session.run("import os\nos.getppid()", 5)).value for session in (one, two)}
        await one.close()
        pid = two.shared.ready.result()._process.pid  # type: ignore[attr-defined]
        return len(servers), pid

    count, pid = asyncio.run(main())
    assert count == 1
    assert not SERVERS
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize(
    "prediction",
    ["[18or 25]", "(1if 2else 3)", "{'answer': '\\d'}", "[0x1for x in y]", "1, 2or 3", "['\\d']", "{'answer': 18or 25}"],
)
def test_a_reply_in_nearly_pythons_notation_prints_no_warning(prediction: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        code_answer(prediction=prediction, answer="18")
        math_equal(prediction=prediction, answer="18")
    assert [str(warning.message) for warning in seen] == []


def test_lists_in_pythons_notation_are_still_read() -> None:
    assert read_literal("['a\\n', 1.5, 0x1f, 1e5, 2j, 'for 3or']") is None  # the words of a text count, too
    assert read_literal("['a\\n', 1.5, 0x1f, 1e5]") == ["a\n", 1.5, 31, 1e5]


def test_tests_that_are_only_defined_are_run():
    tests = ["import unittest\nclass T(unittest.TestCase):\n    def test_three(self): self.assertEqual(square(3), 9)"]
    right, wrong = scores(
        unit_tests_reward(), chain(block("def square(n): return n * n"), tests=tests), chain("square = 9", tests=tests)
    )
    assert (right.reward, right.components["apart"], wrong.reward) == (1.0, 1.0, 0.0)
