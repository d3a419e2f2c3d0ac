r"""Math equality: by value where it can be read, and never more than a moment's work."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.rewards import as_reward
from agentfly.rewards.math.math_answer import extract_answer, last_boxed, math_equal, same_answer
from agentfly.rewards.math.math_parse import read_math
from agentfly.rewards.math.math_value import exact_value
from agentfly.types import Message

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
        (r"First \boxed{12}, no: \boxed{\frac{1}{2}}.", r"\frac12"),
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


@pytest.mark.timeout(300)  # what runs away needs hours
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


FORMED = [
    ("1776", "1776"), ("-1776", "-1776"), ("1776/1", "1776"), (r"1.776\times 10^3", "1776"), ("1.776e3", "1776"), ("10^6",
    "1000000"),
    (r"\frac{1}{2}", "1/2"), (r"\frac{1}{2}", "0.5"), ("0.5", "1/2"), ("2/4", "1/2"), ("3 1/2", "3.5"), (r"3\frac12", "7/2"),
    ("50%", "0.5"), ("70 thousand", "70000"), ("37*48 = 1776", "1776"), ("x = 1776", "1776"), ("(1776, 2)", "(1776,2)"),
    (r"2\pi", "6.2831853"), (r"\sqrt{2}", "1.414214"), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"), (r"\sqrt{8}",
    r"2\sqrt{2}"),
    ("(x-3)(x-2)", "(x-2)(x-3)"), ("-(2-x)(x-3)", "(x-2)(x-3)"), ("n(n+1)/2", r"\frac{n^2+n}{2}"), ("(n^2+n)/2",
    r"\frac{n(n+1)}{2}"),
    ("3\\ln 2", "3\\ln 2"), ("2^{100}", "2^{100}"), (r"2\sin x\cos x", r"\sin(2x)"), (r"\frac{x+1}{2}", "0.5x+0.5"),
]  # fmt: skip
UNFORMED = [
    ("37*48", "1776"), (r"37 \cdot 48", "1776"), ("37 × 48", "1776"), ("37(48)", "1776"), ("(37)(48)", "1776"), ("1776*1",
    "1776"),
    ("1776+0", "1776"), ("3552/2", "1776"), (r"\frac{3552}{2}", "1776"), ("2000-224", "1776"), ("100!/98!", "9900"), ("5!",
    "120"),
    ("2^{10}", "1024"), (r"\sqrt{16}", "4"), ("|-5|", "5"), (r"\sin(\pi/6)", "1/2"), (r"\sin(\pi/6)", "0.5"), (r"\log_2 8",
    "3"),
    (r"e^{\ln 5}", "5"), ("1.5/3", "0.5"), ("18 squared", "324"), ("(37*48, 2)", "(1776,2)"), (r"\cos(0)\sqrt{2}", r"\sqrt{2}"),
    ("x^2-5x+6", "(x-2)(x-3)"), ("1(x^2-5x+6)", "(x-2)(x-3)"), ("x^2+2x+1", "(x+1)^2"), ("(x-1)(x^2-1)", "(x-1)^2(x+1)"),
    (r"\arcsin(1/2)", r"\frac{\pi}{6}"), ("x = 37*48", "1776"), ("37*48 dollars", "1776"), ("1/2+1/2", "1"), ("3+4/2", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "answer"), FORMED)
def test_an_answer_may_be_written_in_several_forms(chain: Any, prediction: str, answer: str) -> None:
    assert reward_of(chain, rf"\boxed{{{prediction}}}", answer) == 1.0


@pytest.mark.parametrize(("prediction", "answer"), UNFORMED)
def test_a_problem_that_is_not_worked_out_earns_nothing(chain: Any, prediction: str, answer: str) -> None:
    assert same_answer(prediction, answer)
    assert reward_of(chain, rf"\boxed{{{prediction}}}", answer) == 0.0
    assert reward_of(chain, f"The answer is {prediction}.", answer) == 0.0


@pytest.mark.parametrize(
    ("question", "prediction", "answer", "expected"),
    [
        ("Expand $(x-2)(x-3)$.", "(x-3)(x-2)", "x^2-5x+6", 0.0), ("Expand (x - 2)(x - 3).", "(x-2)(x-3)", "x^2-5x+6", 0.0),
        ("Expand $(x-2)(x-3)$.", "6-5x+x^2", "x^2-5x+6", 1.0), ("Simplify $x + x + 1$.", "1+x+x", "2x+1", 0.0),
        ("Expand $(x-2)(x-3)$.", "(3-x)(2-x)", "x^2-5x+6", 0.0), ("Simplify $2x+3x$.", "x+x+x+x+x", "5x", 0.0),
        ("Simplify $(x^2-1)/(x-1)$.", "(x^2-1)(x-1)^{-1}", "x+1", 0.0),
        (r"Simplify $\sqrt{50}$.", "50^{1/2}", r"5\sqrt{2}", 0.0),
        (r"Simplify $\sqrt{50}$.", r"\sqrt[2]{50}", r"5\sqrt{2}", 0.0), ("Halve $x + 1$.", "x/2 + 1/2", "(x+1)/2", 1.0),
        ("Simplify 6/8.", "6/8", "3/4", 0.0), ("Simplify 6/8.", "3/4", "3/4", 1.0), ("Write 3/4 as a decimal.", "3/4",
        "0.75", 1.0),
        ("She ate 1/2 of it. How much?", "1/2", "0.5", 1.0), (r"Simplify $\sqrt{8}$.", r"\sqrt{8}", r"2\sqrt{2}", 0.0),
        (r"Let $f(x) = x+1$. What is $f(x)$?", "x+1", "x+1", 1.0), (r"What is \(\sqrt{2}\cdot\sqrt{3}\)?", r"\sqrt3\sqrt2",
        r"\sqrt6", 0.0),
        ("He has 18 of 20. How many?", "18", "18", 1.0), ("Factor 2x+2.", "2x+2", "2(x+1)", 0.0),
    ],
)  # fmt: skip
def test_an_expression_of_the_question_earns_nothing(
    chain: Any, question: str, prediction: str, answer: str, expected: float
) -> None:
    assert math_equal(prediction=rf"\boxed{{{prediction}}}", answer=answer, question=question) == expected
    asked = replace(chain().task, messages=(Message("user", question),))
    assert math_equal(prediction=rf"\boxed{{{prediction}}}", answer=answer, task=asked) == expected


def test_a_question_that_ends_with_its_answer_is_not_paid_when_it_is_copied() -> None:
    question = "Tom has 18 apples and\ngives none away. How many of the 18 does he keep, if he began with 18?"
    for part in (question, question.replace("\n", "  "), question[10:]):
        assert math_equal(prediction=part, answer="18", question=question) == 0.0
    assert math_equal(prediction="He keeps all of the 18 apples that he had before.", answer="18", question=question) == 1.0


@pytest.mark.parametrize(
    "prediction",
    [
        "The answer is 18; could also be 25", "My answer: 18. Second guess: 25.", r"\boxed{18} (alternatively 25)",
        "18; could also be 25",
        "The answer is 18. Otherwise 25.", "The answer is 18.\nIf that is wrong, 25.", "#### 18\n(or maybe 25)",
        r"\boxed{18}, or else 25",
        "The answer is 18, possibly 25.", r"\boxed{18}. Another possibility is 25.",
        "The answer is 18. My backup answer is 25.",
        "Answer: 18 (not sure, might be 25)", "The answer is either 18 or 25.", r"\boxed{18}. It may also be $25$.",
        "18, perhaps 25", "The answer is 18. Or perhaps it was 25.", "\\boxed{18}\n\nIf that is wrong: \\boxed{25}",
        "<answer>18</answer><answer>25</answer>", "<answer>18</answer> or <answer>25</answer>", "answer: 18\nanswer: 25",
        "#### 18\n#### 25", "18\n25", "Options:\n- 18\n- 25", "| guess | 18 |\n| guess | 25 |",
        "A: 18\nB: 25",
        "First guess: 18. Second guess: 25.", "I think 18. No wait, could be 25, can't tell.", '{"answer": 18, "answer": 25}',
        '{"answer": 18, "alternative": 25}', '{"answer": {"value": 18}, "second_answer": 25}',
        "The answer is 18, unless it is 25.",
        "The answer is 18. Also consider 25.", "The answer is 18. Backup: 25",
        "The answer is 18; fallback 25",
        r"\boxed{18}, with 25 as the runner-up", r"\boxed{18} / \boxed{25}", r"\boxed{18}; \boxed{25}",
        r"\boxed{18}\quad\boxed{25}",
        r"\boxed{18} oder \boxed{25}", r"\boxed{18}\text{ maybe }\boxed{25}", "La respuesta es 18 o 25",
        "Die Antwort ist 18 oder 25",
        "La réponse est 18 ou 25", "答案是18或25", "The answer is 18—25",
        "The answer is 18 respectively 25", "The answer is 18 or twenty-five",
        "18|25", "18 v 25", "18; 25", "**18**, **25**", "one of 18, 25", "The possible answers are 18, 25.",
        "My guesses: 18, 25",
        "(a) 18 (b) 25", "Option A: 18\nOption B: 25", "Case 1: 18. Case 2: 25.", "Guess: 18. Guess: 25.", "A: 18, B: 25",
        "18\nor\n25", "18 eller 25", "18か25", "18还是25", "eighteen or 25", "eighteen or twenty-five", "18 of 25",
        "18 (first guess), 25 (second guess)", "18 is likely. 25 is also likely.", "18 in one case, 25 in the other",
        "18? Or 25?",
        "If the last day counts: 18. If not: 25.", "The answer is 18 if n is even and 25 if n is odd.",
        "The answer is 18 or, if the last day counts, 25.", "It is 18, unless I am off by one, in which case it is 25.",
        "Final answer: 18. Final answer: 25.", "Answer 1: 18\nAnswer 2: 25", "#### 18 #### 25",
        "Case 1: the answer is 18. Case 2: the answer is 25.", "The answer is 18. The answer is also 25.",
        "The answer is 18; 25.",
        "The answer is 18 as well as 25.", "The answer is 18, but 25 is possible too.", "The answer is 18, also 25.",
        r"\boxed{18}, 25", r"\boxed{18} (25)", r"\boxed{18} and 25", r"\boxed{18}. 25 is also possible.",
        r"\boxed{18}? \boxed{25}?",
        r"\boxed{18}. 25 would also be acceptable.", r"\boxed{18}, although 25 cannot be excluded", r"\boxed{18} vs \boxed{25}",
        "<answer>18</answer> (or 25)", "<answer>18</answer> but it could be 25", '{"answer": 18}\n{"answer": 25}',
        '{"answer": 18, "other": 25}', '{"answer": 18, "also": 25}', '{"answer": 18, "second": "25"}',
        '{"answer": 18, "answer2": 25}', '{"answer": 18, "maybe": 25}', '{"answer": 18, "final_answer": 25}',
        "The answer is 18. Wait, actually it is 25.", "The answer is 18 (if you do not count the last, else 25).",
        "The answer is 18 (alternatively: twenty-five)", r"\boxed{18} Correction: 25",
    ],
)  # fmt: skip
def test_a_second_guess_makes_a_hedge_of_an_answer(prediction: str) -> None:
    assert math_equal(prediction=prediction, answer="18") == 0.0
    assert math_equal(prediction=prediction, answer="25") == 0.0


@pytest.mark.parametrize(
    "prediction",
    [
        "It could be 25, but the check fails. The answer is 18.", "Maybe 25? No: 7 is left, so the answer is 18.",
        r"\boxed{18}",
        "There are 20, or 2 more than he has. The answer is 18.", r"If it is 25, then 7 is left over. So \boxed{18}.",
        r"We get \boxed{9}. So the total is \boxed{18}.", r"\boxed{9}, and twice that is \boxed{18}", "16 - 7 = 9\n9 * 2 = 18",
        "<answer>9</answer> No, that is one day. <answer>18</answer>", "answer: 18\n#### 18", "La respuesta es 18.",
        '{"second_step": 9, "other": 3, "answer": 18}', "He had 21. Perhaps 3 are gone, which makes 18 in total.",
        "| eggs | 9 |\n| price | 2 |\n| total | 18 |", "The answer is 18. Unless stated otherwise, amounts are in dollars.",
        "Half of 36 was lost.\n18", "no es 9, es 18",
        r"\boxed{18} (or eighteen)", "The answer is 18 or 18.0.",
        "The answer is 18. Actually, that is 2 times 9.", "The answer is ~~25~~ 18.", r"\cancel{25} 18", "<!-- 25 -->18",
        "Wait, 25 was the number of eggs. The answer is 18.",
        r"The answer is $\boxed{18}$, which might also be written as 18.0.",
        "The answer is 18 (9 eggs at 2 dollars).", "The answer is 18. Check: 9 * 2 = 18.",
        "The answer is 18 if each costs 2 dollars.",
        "In 2 days she sells 9 eggs, 18 dollars in total.", "If n = 3, then 18.", "On day 3: 18",
        "Step 1 answer: 9\nStep 2 answer: 18",
        "The answer is 9, no, the answer is 18.", "Part 1: the answer is 9. Part 2: the answer is 18.",
        "Out of 20 tries 18 failed.",
        '{"answer": 18, "steps": 3, "eggs": 9, "other": "2 dollars each was the price"}', '{"answer": 18, "other": 18.0}',
        '{"answer": 18, "final_answer": "18"}', '{"final_answer": "$18", "answer": 18}',
        '{"answer": 18, "confidence": 0.9, "solution": "9 eggs at 2 dollars"}', "<answer>18</answer> I checked it in 2 ways.",
        "#### 18\n\nNote: Janet has 3 ducks.", r"\boxed{18}, since 9 eggs remain", "Half of 36 is left: 18",
        "The answer is also 18.",
    ],
)  # fmt: skip
def test_a_guess_that_is_given_up_before_the_answer_does_no_harm(prediction: str) -> None:
    assert math_equal(prediction=prediction, answer="18") == 1.0


@pytest.mark.parametrize("denied", ["no es 18", "ce n'est pas 18", "nicht 18", "答案不是18"])
def test_an_answer_that_is_denied_in_another_language_earns_nothing(denied: str) -> None:
    assert math_equal(prediction=denied, answer="18") == 0.0


def test_an_expression_that_vanishes_modulo_a_known_prime_is_not_zero() -> None:
    for prime in (2**61 - 1, 2**31 - 1, 2**89 - 1, 10**9 + 7):
        assert not same_answer(f"x + {prime}y", "x")
        assert not same_answer(f"x^{{{prime}}}", "x")


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


@pytest.mark.parametrize(
    "prediction",
    [
        "18 is what I got, but it is wrong", "18 is too low", "hardly 18", "¬18", "25 ~~18~~", r"\sout{18}",
        "<!-- \\boxed{18} -->25",
        "% \\boxed{18}\n25", "18 below zero",
    ],
)  # fmt: skip
def test_what_is_struck_out_hidden_or_called_wrong_is_no_answer(prediction: str) -> None:
    assert math_equal(prediction=prediction, answer="18") == 0.0


def test_the_amount_of_the_question_is_no_answer_in_another_unit() -> None:
    question = "Convert 2 hours to minutes."
    assert math_equal(prediction="2 hours", answer="120 minutes", question=question) == 0.0
    assert math_equal(prediction="120 minutes", answer="2 hours", question="How long are 120 seconds times 60?") == 1.0
    assert math_equal(prediction="120 minutes", answer="120 minutes", question=question) == 1.0
