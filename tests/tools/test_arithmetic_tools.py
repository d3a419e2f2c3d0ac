from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.errors import ToolError
from agentfly.tools import as_tool


@pytest.mark.parametrize(
    ("name", "a", "b", "text"),
    [
        ("add", 12, 7, "19"),
        ("add", 0.1, 0.2, "0.3"),
        ("subtract", 12, 7, "5"),
        ("multiply", 12, 7, "84"),
        ("multiply", 1.5, 2, "3.0"),
        ("divide", 12, 4, "3"),
        ("divide", 7, 2, "3.5"),
        ("divide", 10**400, 10**399, "10"),
    ],
)
def test_whole_numbers_stay_whole(call, name, a, b, text):
    assert call(as_tool(name), a=a, b=b).observation == text


def test_the_prompt_of_an_operation_is_one_short_line():
    assert as_tool("add").description == "Add two numbers."
    assert str(as_tool("multiply")) == "multiply(a: number, b: number)"


@pytest.mark.parametrize(
    ("name", "a", "b", "said"),
    [
        ("divide", 1, 0, "division by zero"),
        ("multiply", 1e300, 1e300, "too large"),
        ("multiply", 10**2500, 10**2500, "too large"),
        ("divide", 10**400, 3, "too large"),
    ],
)
def test_what_has_no_result_is_told(call, name, a, b, said):
    result = call(as_tool(name), a=a, b=b)
    assert result.error == "raised"
    assert said in result.observation


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("(3 + 4) * 2 ** 3", "56"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("6 / 2", "3"),
        ("1 / 3", "0.333333333333"),
        ("sqrt(16) + abs(-2)", "6.0"),
        ("max(1, 2, 3) - round(2.6)", "0"),
        ("2 * pi", "6.28318530718"),
        ("3 × 4 ÷ 2 − 1", "5"),
        ("2 ** -1", "0.5"),
        ("(-1) ** 100001", "-1"),
        ("round(2.345, 2)", "2.35"),
        ("  1 + 1 ", "2"),
    ],
)
def test_the_calculator_evaluates(call, expression, text):
    assert call(as_tool("calculator"), expression=expression).observation == text


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("9 ** 9 ** 9", "too large"),
        ("9.0 ** 9 ** 9", "too large"),
        ("2 ** 3 ** 99999", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("sqrt(-1)", "cannot be computed"),
        ("sqrt(1, 2)", "cannot be computed"),
        ("2 ^ 3", "write ** for a power"),
        ("__import__('os').system('true')", "not known"),
        ("(1).__class__", "only numbers"),
        ("[1] * 10", "only numbers"),
        ("'a' * 10", "only numbers"),
        ("x + 1", "x is not known"),
        ("1 +", "not an arithmetic expression"),
        ("True + 1", "only numbers"),
        ("1j", "only numbers"),
        ("1e999", "too large"),
        ("-" * 900 + "1", ""),
        ("(" * 900 + "1", ""),
        ("1" * 2000, "at most 1000"),
        ("round(5, -10 ** 30)", "at most 100"),
        ("\x00", "not an arithmetic expression"),
    ],
)
def test_the_calculator_refuses(call, expression, said):
    result = call(as_tool("calculator"), expression=expression)
    assert result.error == "raised"
    assert said in result.observation


@given(st.text(alphabet="0123456789+-*/%()., esqrtmaxpi", max_size=60))
def test_the_calculator_answers_or_refuses_anything(expression):
    try:
        value = asyncio.run(as_tool("calculator")(expression))
    except ToolError:
        return
    assert math.isfinite(value) if isinstance(value, float) else len(str(value)) <= 3_011


def test_the_final_answer_is_done(call):
    for answer, text in (("84", "84"), (84, "84"), (True, "true")):
        result = call(as_tool("final_answer"), answer=answer)
        assert (result.observation, result.done, result.error) == (text, True, None)
