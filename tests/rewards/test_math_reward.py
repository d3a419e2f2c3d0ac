r"""Math equality: by value where it can be read, and never more than a moment's work."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.rewards import as_reward
from agentfly.rewards.math_answer import extract_answer, last_boxed, same_answer
from agentfly.rewards.math_parse import read_math
from agentfly.rewards.math_value import exact_value

EQUAL = [
    # numbers
    ("84", "84"), ("84.0", "84"), ("+84", "84"), ("1,234", "1234"), ("$1,234.50", "1234.5"), ("-5", "−5"), (".5", "0.5"),
    ("2.5e3", "2500"), (r"2.5 \times 10^{3}", "2500"), ("1e400", "10^{400}"), ("1E-3", "0.001"), (r"1{,}000", "1000"),
    (r"1,\!000", "1000"),
    ("50%", "0.5"), ("50%", "50"), (r"50\%", "50%"), ("5 percent", "0.05"), (r"\$18", "18"), ("18 dollars", "18"),
    ("5 cm", "5"),
    (r"10\text{ cm}^2", "10"), (r"90^\circ", "90"), ("90°", "90"), (r"45^{\circ}", "45"),
    # fractions and roots
    (r"\frac{1}{2}", "0.5"), (r"\dfrac12", "1/2"), (r"\tfrac{3}{4}", "3/4"), ("0.333333", "1/3"), ("3 1/2", "7/2"),
    (r"3\frac{1}{2}", "3.5"),
    (r"-\frac{1}{2}", "-1/2"), (r"\frac{-1}{2}", r"-\frac12"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\sqrt[3]{27}", "3"),
    ("√12", r"2\sqrt3"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"), ("1.414214", r"\sqrt{2}"), ("2^{10}", "1024"), ("2**10", "1024"),
    ("5!", "120"),
    (r"2\pi", "6.2831853"), (r"3 \cdot 4", "12"), (r"\cos(\pi)", "-1"), ("e^2", "7.389056"),
    # structure
    ("(1, 2)", "(1,2)"), (r"\left(1,\frac12\right)", "(1, 0.5)"), ("[1,2)", "[1, 2)"), (r"\{1,2\}", r"\{2,1\}"),
    ("1, 2", "2,1"),
    (r"(-\infty, 2]\cup[3,4)", r"[3,4) \cup (-\infty,2]"), ("(1,(2,3))", "(1, (2, 6/2))"), ("(A)", "A"),
    (r"\text{Friday}", "friday"),
    # symbols
    ("x^2+2x+1", "(x+1)^2"), (r"\frac{x}{2}", "0.5x"), ("a+b", "b+a"), ("x = 5", "5"), (r"x \in [1,2]", "[1,2]"),
    ("2xy", "2yx"),
    ("y = 2x+1", "2x + 1"), ("x^2+y^2=1", "y^2+x^2=1"), ("10^{1000000000}", "10^{10^9}"),
    ("(x^{50}-1)/(x-1)*(x-1)", "x^50 - 1"),
]  # fmt: skip

DIFFERENT = [
    ("85", "84"), ("", "84"), ("", "0"), ("0.49", "1/2"), ("0.33", "1/3"), ("1.41", r"\sqrt{2}"), ("10000001", "10000002"),
    ("1000000.01", "1000000.02"), ("[1,2]", "(1,2)"), ("(2,1)", "(1,2)"), ("(1,2,3)", "(1,2)"), ("1,2,2", "1,1,2"),
    ("5x", "5"), ("x", "y"),
    ("east", "seat"), ("1", "x^2+y^2=1"), ("12 7", "84"), ("2^{1000000}", "2^{1000001}"), ("10^{10^{10^{10}}}", "5"),
    ("50%", "5"),
    ("x^2+2x", "(x+1)^2"), ("1/0", "0"), ("0.5%", "50"), (r"-\infty", r"\infty"), ("nothing", ""),
]  # fmt: skip


def reward_of(chain: Any, prediction: str, answer: Any) -> float:
    return asyncio.run(as_reward("math_equal").score(chain(prediction, answer=answer))).reward


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_these_are_the_same_either_way_round(left: str, right: str) -> None:
    assert same_answer(left, right)
    assert same_answer(right, left)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_these_are_not(left: str, right: str) -> None:
    assert not same_answer(left, right)
    assert not same_answer(right, left)


@pytest.mark.parametrize(
    ("prediction", "answer"),
    [
        (r"First \boxed{12}, no: \boxed{\frac{1}{\sqrt{4}}}.", r"\frac12"),
        ("12 * 7 = 84", "84"),
        ("The answer is 84.", "84"),
        ("**Answer:** 42", "42"),
        ("Answer: **42** because 6 * 7", "42"),
        ("So the final answer is: $\\frac{3}{4}$.", "0.75"),
        ("Janet has 3 apples and eats 1.\n#### 2", "2"),
        ("I think 12*7 gives 84 apples in total", "84"),
        ("We get $x=3$ and then $y = 7$, which is all.", "7"),
        ("The temperature is -5 degrees", "-5"),
        ("It is 1,234,567 people", "1234567"),
        ("84", ["83", "84"]),
        ("84", 84),
        ("0.5", 0.5),
        ("2", "Janet has 3.\n#### 2"),
        ("2", r"We see \boxed{2}."),
    ],
)
def test_the_answer_is_found_in_prose(chain: Any, prediction: str, answer: Any) -> None:
    assert reward_of(chain, prediction, answer) == 1.0


@pytest.mark.parametrize(
    ("prediction", "answer"),
    [
        (r"\boxed{84} or rather \boxed{85}", "84"),
        ("1 2 3 84 85", "84"),
        ("The answer is 85, not 84.", "84"),
        ("84 is wrong, it is 85", "84"),
        ("answer is 1, 2, 3, 84", "84"),
    ],
)
def test_naming_many_answers_earns_nothing(chain: Any, prediction: str, answer: str) -> None:
    assert reward_of(chain, prediction, answer) == 0.0


def test_boxes_nest_and_only_closed_ones_count() -> None:
    assert last_boxed(r"\boxed{a{b}\{c} d") == r"a{b}\{c"
    assert last_boxed(r"\boxed{\boxed{3}}") == r"\boxed{3}"
    assert last_boxed(r"\boxed{1} \boxed{2") == "1"
    assert last_boxed(r"} no {boxes}") is None
    assert same_answer(r"\boxed{\boxed{3}}", "3")


NASTY = [
    "\\boxed{" * 30_000, "{" * 200_000, "\\frac{" * 30_000, "1+" * 100_000, "(" * 200_000, "answer is " * 20_000, "1" * 300_000,
    "1,111" * 50_000, "$" * 300_000, "9" * 900 + "^" + "9" * 900, "-" * 100_000 + "1", "\\text{" * 30_000, "1 " * 100_000,
    "\\boxed{" + "(1," * 400 + "}", "\\boxed{" + ",".join(["1"] * 900) + "}", "1e" + "9" * 10, "1e" + "9" * 100,
    "\\boxed{" + "2^" * 900 + "2}",
    "\\boxed{" + "1+" * 900 + "1}", "\\boxed{" + "1 " * 900 + " apples}", "\\boxed{" + "9" * 1900 + "^{9999999}}",
    "answer is 1" + " " * 300_000, "1000!", "9" * 1000 + "!", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{x^{9^{9^{9}}}}",
    "\\boxed{1/3^{10000000}}",
    "\\boxed{\\sqrt{" + "9" * 1900 + "}}", "\\boxed{" + "|" * 500 + "}", "\ud800", "\0", "\\boxed{1e400*1e400*1e400*\\pi}",
]  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("nasty", NASTY, ids=range(len(NASTY)))
def test_no_input_raises_or_runs_away(chain: Any, nasty: str) -> None:
    assert reward_of(chain, nasty, "84") == 0.0
    assert reward_of(chain, "84", nasty) == 0.0


@given(text=st.text(alphabet="0123456789.,%/^{}()[]\\ frac+-=boxedsqrt$!|_", max_size=80))
def test_any_text_is_read_without_an_exception_and_equals_itself(text: str) -> None:
    extract_answer(text)
    assert same_answer(text, text) == bool(same_answer(text, text))
    if read_math(text) is not None and "=" not in text:
        assert same_answer(text, text)


@given(st.fractions(max_denominator=10_000), st.fractions(max_denominator=10_000))
def test_fractions_are_equal_exactly_when_their_values_are(a: Fraction, b: Fraction) -> None:
    latex = rf"\frac{{{a.numerator}}}{{{a.denominator}}}"
    assert same_answer(latex, f"{a.numerator}/{a.denominator}")
    assert same_answer(latex, str(b)) == (a == b)


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(0, 6))
def test_arithmetic_agrees_with_python(a: int, b: int, n: int) -> None:
    tree = read_math(f"({a}+{b}*({a}-{b}))^{n} - {b}^2")
    assert tree is not None
    # In mathematics, as in Python, -3^2 is -(3^2); a literal's own minus belongs to the power's outside.
    assert exact_value(tree) == (a + b * (a - b)) ** n - (b**2 if b >= 0 else -((-b) ** 2))
