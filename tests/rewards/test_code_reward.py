"""Code tests: code that works passes, and code that only pretends to does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfly.errors import RewardError
from agentfly.rewards import Score
from agentfly.rewards.code_execution import code_tests_reward, extract_code, read_tests

ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
GOOD = "def add(a, b):\n    return a + b\n"


def score(trajectory: Any, **options: Any) -> Score:
    return asyncio.run(code_tests_reward(**options).score(trajectory))


def test_code_that_passes_every_assert_is_worth_one(chain: Any) -> None:
    given = score(chain(f"Here it is:\n```python\n{GOOD}```\nDone.", tests=ASSERTS))
    assert given == Score(1.0, {"code_tests": 1.0, "passed": 1.0, "tests": 2.0})
    assert score(chain(GOOD, tests="\n".join(ASSERTS))).reward == 1.0


def test_a_part_counts_only_where_it_is_asked_for(chain: Any) -> None:
    half = "def add(a, b):\n    return 3\n"
    assert score(chain(half, tests=ASSERTS)) == Score(0.0, {"code_tests": 0.0, "passed": 0.5, "tests": 2.0})
    assert score(chain(half, tests=ASSERTS), partial=True).reward == 0.5


@pytest.mark.parametrize(
    "cheat",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "print('passed\\n' * 100)",
        "def add(a, b):\n    import os; os._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "import sys; print(sys.argv, open(sys.argv[0]).read() if sys.argv and sys.argv[0] not in ('', '-c') else '')",
        "import sys; print(sys.stdin.read())",
        "import os; print(os.environ, open('/proc/self/cmdline').read())",
        "import builtins; builtins.AssertionError = None",
        "def add(a, b): return a - b\nprint = lambda *a: None",
        "syntax error here",
        "import builtins; builtins.exec = builtins.compile = lambda *a, **k: None",
        "import os\nfor name in os.listdir('.'):\n    print(open(name).read())",
        "import atexit, os; atexit.register(lambda: os.write(1, b'0\\n1\\n'))",
        "\ud800",
        "x = '\0'",
        "",
    ],
)
def test_pretending_earns_nothing(chain: Any, cheat: str) -> None:
    assert score(chain(cheat, tests=ASSERTS), partial=True).reward == 0.0


def test_neither_the_tests_nor_the_nonce_are_left_in_a_file_or_argument(chain: Any) -> None:
    spy = (
        "import os, sys\n"
        "seen = [open(n, errors='replace').read() for n in [*os.listdir('.'), '/proc/self/cmdline', '/proc/self/environ']]\n"
        "seen += [repr(sys.argv), sys.stdin.read()]\n"
        "def leaked(): return any('MARK' + 'ER' in text for text in seen)\n"
    )
    assert score(chain(spy, tests=["assert not leaked()  # MARKER"])).reward == 1.0


def test_what_one_test_wrote_does_not_help_to_pass_another(chain: Any) -> None:
    copycat = (
        "import os\n"
        "def add(a, b):\n"
        "    for name in os.listdir('.'):\n"
        "        text = open(name, errors='replace').read()\n"
        "        if name == '.stdout': open(name, 'a').write(text * 5)\n"
        "    return 3\n"
    )
    assert score(chain(copycat, tests=[*ASSERTS, "assert add(2, 2) == 4"]), partial=True).reward == pytest.approx(1 / 3)


def test_what_the_code_prints_does_not_matter_to_its_asserts(chain: Any) -> None:
    assert score(chain("print('x' * 1_000_000)\n" + GOOD + "print('y')", tests=ASSERTS)).reward == 1.0


def test_a_loop_ends_at_its_deadline_without_a_reward(chain: Any) -> None:
    assert score(chain("while True: pass", tests=ASSERTS), timeout_s=1.0).reward == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}],
        [["1 2\n", "3"], ["5 5", "10  \n\n"]],
        {"inputs": ["1 2", "5 5"], "outputs": ["3", "10"]},
    ],
)
def test_pairs_are_fed_and_compared_from_outside(chain: Any, tests: Any) -> None:
    code = "a, b = map(int, input().split())\nprint(a + b)"
    assert score(chain(code, tests=tests)).reward == 1.0
    always = score(chain("print(3)", tests=tests), partial=True)
    assert always.reward == 0.5
    assert score(chain("print(3); raise SystemExit(1)", tests=tests), partial=True).reward == 0.0


def test_the_last_fenced_block_is_the_code() -> None:
    assert extract_code("```\na\n```\ntext\n```python\nb\nc\n```\nend") == "b\nc\n"
    assert extract_code("```py\nunfinished") == "unfinished\n"
    assert extract_code("```\na\n```\n```") == "a\n"
    assert extract_code("plain") == "plain"


@pytest.mark.parametrize(
    "tests", ["", [], None, 3, [""], [{"input": "x"}], [["a"]], {"inputs": ["a"], "outputs": []}, [[1, 2]]]
)
def test_tests_that_are_no_tests_are_an_error_not_a_zero(chain: Any, tests: Any) -> None:
    with pytest.raises(ValueError):
        read_tests(tests)
    with pytest.raises(RewardError, match="reward 'code_tests' on task 't7'"):
        score(chain(GOOD, tests=tests))
