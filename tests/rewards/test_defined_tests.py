"""Tests written for pytest or unittest are called: a text that only defines them would pass for every solution."""

from __future__ import annotations

import pytest

from agentfly.rewards.code_execution import read_tests

ADD = "def add(a, b): return a + b"
UNITTEST = """import unittest
class Base(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.two = 2
    def setUp(self): self.one = 1
    def test_above(self): self.assertEqual(add(0, 0), 0)
class TestAdd(Base):
    def test_sum(self): self.assertEqual(add(self.one, self.two), 3)
    def test_error(self):
        with self.assertRaises(TypeError):
            add(1, None)
if __name__ == "__main__":
    unittest.main()
"""
PYTEST = """class TestAdd:
    def setup_method(self): self.one = 1
    def test_sum(self): assert add(self.one, 2) == 3
def helper(): return 3
def test_again(): assert add(1, 2) == helper()
"""


def passes(code: str, *tests: str) -> bool:
    asserts, pairs = read_tests(list(tests))
    assert not pairs
    space: dict[str, object] = {"__name__": "tests"}
    exec(code, space)
    try:
        for test in asserts:
            exec(test, space)
    except (AssertionError, TypeError):
        return False
    return True


@pytest.mark.parametrize("tests", [UNITTEST, PYTEST, "def test_sum():\n    assert add(1, 2) == 3"])
def test_functions_and_classes_of_tests_are_called(tests: str) -> None:
    assert passes(ADD, tests)
    assert not passes("def add(a, b): return a - b", tests)


def test_every_method_of_a_class_counts() -> None:
    assert not passes("def add(a, b): return 3 if a else 1", UNITTEST)
    assert not passes("def add(a, b): return 3 * bool(a)", UNITTEST)


def test_what_the_tests_call_themselves_is_called_once() -> None:
    text = (
        "seen = []\ndef test_data(n):\n    seen.append(n)\n    return n\nassert add(test_data(1), 2) == 3\nassert seen == [1]"
    )
    assert read_tests([text])[0] == [text]
    apart = ["def test_data(n): return n", "assert add(test_data(1), 2) == 3"]
    assert read_tests(apart)[0] == apart


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        (["def test_sum(tmp_path): assert add(1, 2) == 3"], r"tests\[0\]: test_sum takes 'tmp_path': fixtures"),
        (
            ["x = 1", "class TestAdd:\n    def test_sum(self, case): assert add(1, 2) == case"],
            r"tests\[1\]: test_sum takes 'case'",
        ),
        (["async def test_sum(): assert add(1, 2) == 3"], "test_sum is asynchronous: call it with asyncio.run"),
        (["def check(candidate): assert candidate(1, 2) == 3"], "calls none, so every solution would pass"),
        (["import math", "'a text'", "if __name__ == '__main__': assert add(1, 2) == 3"], "calls none"),
    ],
)
def test_tests_that_cannot_be_called_are_refused(tests: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_tests(tests)
