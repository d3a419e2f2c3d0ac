r"""`math_equal` and `code_answer` over numbers and ways of writing them: right ones are accepted, wrong ones refused."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.envs.code.reward import code_answer
from agentfly.rewards.math.math_answer import extract_answer, find_answers, math_equal
from agentfly.rewards.math.math_words import SCALES

NUMBERS = [3, 7, 18, 42, 100, 365, 999, 1000, 1430, 70000, 1234567, 2500000]


def spaced(number: int, space: str) -> str:
    return f"{number:,}".replace(",", space)


# n is the number, c the number with commas.
RIGHT = [
    "{n}", "{n}.0", "+{n}", "{c}", "{c}.00", "${c}", "{c} dollars", "${c}/day", "${c} per day", "{c} a day", "{c} miles/hour",
    "{c} km/h", "{c} cm^2", "{c} cm²", "{c} m/s^2", "{c}kg", "{c} USD", "USD {c}", "US${c}", "€{c}", "{c} €", "{c}th",
    "the {n}th day",
    "#### {c}", "#### {c} miles", "#### ${c}", r"\boxed{{{c}}}", r"\boxed{{{c} dollars}}", r"\boxed{{{c}\text{{ dollars}}}}",
    r"$\boxed{{{c}}}$ apples", r"\boxed{{\text{{{n}}}}}", r"\boxed{{1}} no, \boxed{{{c}}}", r"\[{n}\]", r"\({n}\)", "$${n}$$",
    "$x = {n}$",
    "The answer is {c}.", "The answer is {c}!", "The answer is **{c}**.", "The answer is ${n}$ dollars.", "**Answer:** {c}",
    "**Answer: {c}**", "Answer:\n\n{c}", "answer: `{n}`", "### Final answer\n{c}", "Final answer: ${c} in total",
    "{c} is the answer",
    "{c} is the answer.", "So she pays ${c} in total.", "They sold {c} tickets.", "I think it is {c}", "=> {n}", "→ {n}",
    "= {n}",
    "about {c}", "approximately {c} people", "~{n}", "≈ {n}", r"\approx {n}", "a total of {c} apples",
    '{{"answer": {n}}}', '{{"answer": "{c}"}}', '{{"answer": "{c} dollars"}}', "{{'answer': {n}}}", '{{"answer": [{n}]}}',
    '{{"steps": "1+1", "final_answer": {n}.0}}', '{{"answer": {{"value": {n}}}}}', '{{"answer": {n}, "unit": "km"}}',
    'Here:\n```json\n{{"answer": {n}}}\n```', 'So it is\n{{"answer": {n}}}', "<answer>{c}</answer>",
    "<think>1</think><answer>${n}$</answer>",
    "**{c}**", "`{n}`", '"{c}"', "({n})", "{n},", "{n};", "{n}?", "It is not 1, it is {c}.", "It is {c}, not 1.",
    "not 1 but {n}", "{n} (not 1)",
    "The answer is not 1 but {c}", "The answer is {c}, not 1.", "{n} or {n}.0", "{c} dollars (or {n}00 cents)", "{n}00 cents",
    "{n} dollars and 0 cents", r"\frac{{{n}}}{{1}}", "{n}/1", "{n}e0", r"{n} \times 10^0", "{n} × 10⁰",
    "1 + {n} - 1 = {n}", "We get 3*4 = 12, and in the end {c}.", "{c} students do not play", "{c} more apples",
    "{c} pens and pencils",
    "The answer is {c}, because 1 + 1 = 2.", "{n} percent", "{n}%",
]  # fmt: skip

WRONG = [
    "{n} or {m}", "{m} or {n}", "either {n} or {m}", "The answer is {n} or {m}.", "The answer is either {n} or {m}",
    "{n}, maybe {m}",
    "{n} or maybe {m}", "{n} (or {m})", "{n} apples or {m} apples", "{n} and {m}", "{n}, {m}", "between {n} and {m}",
    "{n} to {m}",
    "from {n} to {m}", "{n}-{m}", "{n}–{m}", "The answer is between {n} and {m}.", "neither {n} nor {m}", "{n} vs {m}",
    "({n}, {m})",
    "[{n}, {m}]", "{n}? {m}?", r"\boxed{{{n}}} or \boxed{{{m}}}", r"\boxed{{{m}}} or \boxed{{{n}}}",
    r"\boxed{{{n}}}, \boxed{{{m}}}",
    r"\boxed{{{n}}} or {m}", r"\boxed{{{n} or {m}}}", r"\boxed{{{n} \text{{ or }} {m}}}", "<answer>{n} or {m}</answer>",
    "**{n}** or **{m}**", "${n}$ or ${m}$", '{{"answer": "{n} or {m}"}}', '{{"answer": [{n}, {m}]}}',
    "not {n}", "Not {n}.", "It is not {n}", "It isn't {n}", "The answer is not {n}", "The answer isn't {n}.", "It can't be {n}",
    "The answer is definitely not {n}", "I don't think it is {n}", "anything but {n}", "The answer is something other than {n}",
    "{n} is wrong", "{n} is incorrect.", "{n} is not the answer", "{c} dollars is wrong", r"not \boxed{{{n}}}",
    r"The answer is not \boxed{{{n}}}", r"\boxed{{{n}}} is wrong", "<answer>not {n}</answer>", '{{"answer": "not {n}"}}',
    "≠ {n}",
    "at least {n}", "{n} or more", "{n} apples or fewer", "could be {m} or could be {n}", "{m} & {n}",
    "The answer is at least {n}", "at most {n}", "more than {c} apples", "less than {n}", "over {n}", "> {n}",
    "<{n}",
    "x > {n}", "x ≥ {n}", r"x \geq {n}", "{n}+", "almost {n}",
    *("{n} " + word for word in sorted(SCALES)), "{n}k", "{n}K", "{n}M", "${n} million", "${n}k", "{n}bn",
    "{n} million dollars",
    r"\boxed{{{n} million}}", r"\boxed{{{n}}} million", r"\boxed{{{n}\text{{ million}}}}", "#### {n} million",
    "The answer is {n} million.",
    "**{n}** million", "${n}$ million", '{{"answer": "{n} million"}}', '{{"answer": {n}, "unit": "million"}}',
    "{n} cents", "{n}¢", "{n} US cents", r"\boxed{{{n} \text{{ cents}}}}", "The answer is {n} cents.", "{n}00%",
    "The answer is {n}00%.",
    '{{"answer": {n}, "unit": "cents"}}', "-{n}", "−{n}", "minus {n}", "negative {n}", "±{n}", r"\pm {n}", "{n} squared",
    "{n} cubed",
    "{n}^2", r"\boxed{{{n}!}}", "{n} and a half", "{n} 1/2", "{n}½", "{n}.5", "{n} plus 1", "{n} minus 1", "{n} times 2",
    "{n} + 1",
    "{n} * 2", "half of {n}", "twice {n}", "the square root of {n}", "2x + {n}", "{n}x", "The value is 2^{n}", "{n}:30",
    "3:{n}",
    "1/{n}", "{n}/{m}", "{n}0", "0.{n}", "{n} dollars and 50 cents", "{m}", "eleven", "",
]  # fmt: skip


def write(way: str, number: int) -> str:
    return way.format(n=number, c=f"{number:,}", m=number + 1)


@pytest.mark.parametrize("way", RIGHT)
def test_a_right_answer_is_accepted_however_it_is_written(way: str) -> None:
    for number in NUMBERS:
        for judge in (math_equal, code_answer):
            assert judge(prediction=write(way, number), answer=str(number)) == 1.0, (judge.name, write(way, number))
            assert judge(prediction=write(way, number), answer=[f"{number:,}", "no"]) == 1.0
        assert math_equal(prediction=write(way, number), answer=f"Some work.\n#### {number:,}") == 1.0


@pytest.mark.parametrize("way", WRONG)
def test_a_wrong_answer_is_refused_however_it_is_written(way: str) -> None:
    for number in NUMBERS:
        text = write(way, number)
        for judge in (math_equal, code_answer):
            assert judge(prediction=text, answer=str(number)) == 0.0, (judge.name, text, find_answers(text))


@pytest.mark.parametrize("space", [" ", "\u2009", "\u202f", "\u00a0", r"\,", r"\;", r"\ ", "~", "'", "’", "_", "{,}", r",\!"])
@pytest.mark.parametrize("around", ["{}", "The answer is {}.", r"\boxed{{{}}}", "#### {} km", "She earns {} a year."])
def test_digits_may_be_grouped_by_any_space(space: str, around: str) -> None:
    for number in (70000, 1234567):
        text = around.format(spaced(number, space))
        assert math_equal(prediction=text, answer=str(number)) == 1.0, text
        assert math_equal(prediction=text, answer=str(number // 1000)) == 0.0, text


@pytest.mark.parametrize(
    ("prediction", "answer", "same"),
    [
        ("70 thousand", "70000", True), ("$1.8 million", "1800000", True), ("1.8M", "1800000", True), ("$70k", "70,000", True),
        ("2 dozen eggs", "24", True), ("a dozen", "12", True), ("three hundred", "300", True),
        ("twenty-five dollars", "25", True),
        ("negative five", "-5", True), ("two and a half", "2.5", True), ("half a million", "500000", True),
        ("two thirds", "2/3", True),
        ("one third", "1", False), ("18,00,000", "1800000", True), ("1.234,50 €", "1234.5", True),
        ("1.234.567", "1234567", True),
        ("70.000", "70", True), ("70.000", "70000", False), ("70,5", "70.5", True), ("1,430", "1.43", False),
        ("1.430", "1430", False),
        ("50 cents", "0.5", True), ("$0.18", "18 cents", True), ("18", "18 cents", True), ("18 dollars", "18 cents", False),
        ("5 dollars and 50 cents", "5.5", True), ("6 feet 6 inches", "6.5 feet", True), ("1 hour 30 minutes", "1.5", True),
        ("500 cm", "5 meters", True), ("5 cm", "5 meters", False), ("90 minutes", "1.5 hours", True),
        ("5 hours", "5 kg", False),
        ("50%", "0.5", True), ("50%", "1/2", True), ("50", "50%", True), ("150%", "1.5", False), ("1.5", "150%", True),
        (r"3\frac{1}{2}", "3.5", True), ("3½ cups", "3.5", True), ("3 1/2 cups", "7/2", True), (r"\pm 3", "3, -3", True),
        ("-3 or 3", r"\pm 3", True), ("3", r"\pm 3", False), ("x = 1 or x = 2", "1, 2", True),
        (r"\boxed{1} and \boxed{2}", "1,2", True),
        ("1 or 2", "x=1 or x=2", True), ("1", "x=1 or x=2", False), ("0.5 or 1/2", "0.5", True), ("1.8 × 10⁶", "1800000", True),
        (r"2\pi\text{ cm}", r"2\pi", True), (r"2\pi \text{ million}", r"2\pi", False),
        ("The result is $2x+1$.", "1 + 2x", True),
        ("It costs $5 and then $18.", "18", True), ("15 trucks / 90 = 0.17, which rounds up to 17%", "17", True),
        ("16 x 16 = 256 ounces", "256", True), ("COVID-19", "19", True), ("Therefore x^18", "18", False),
    ],
)  # fmt: skip
def test_words_and_units_count(prediction: str, answer: str, same: bool) -> None:
    assert math_equal(prediction=prediction, answer=answer) == float(same), find_answers(prediction)


def test_a_question_that_asks_in_a_unit_makes_the_number_in_that_unit_the_answer() -> None:
    assert math_equal(prediction="18 cents", answer="18", question="How many cents does he have left?") == 1.0
    assert math_equal(prediction="He has 18 cents.", answer="18", question="A pen costs 6 cents. What do 3 cost?") == 1.0
    assert (
        math_equal(prediction="18 cents", answer="18", question="A pen costs $6, an eraser 5 cents. What do 3 pens cost?")
        == 0.0
    )
    assert math_equal(prediction="18 dozen", answer="18", question="He has 216 eggs. How many dozens are they?") == 1.0
    assert math_equal(prediction="18 dozen", answer="216", question="How many eggs?") == 1.0
    assert math_equal(prediction="18 million", answer="18", question="How many people live there, in millions?") == 1.0
    assert code_answer(prediction="18 cents", answer="18", question="How many cents?") == 1.0
    assert math_equal(prediction="18 cents", answer="18", question=["no", "text"]) == 0.0


def test_words_of_a_code_answer_are_still_compared_to_the_letter() -> None:
    assert code_answer(prediction='{"answer": "east"}', answer="east") == 1.0
    assert code_answer(prediction="East", answer="east") == 0.0
    assert code_answer(prediction="[1, 2]", answer="1, 2") == 1.0
    assert code_answer(prediction="not east", answer="east") == 0.0


@given(
    value=st.fractions(min_value=Fraction(1, 1000), max_value=10**9, max_denominator=1000),
    scale=st.sampled_from(sorted(SCALES)),
    wrap=st.sampled_from(
        ["{}", r"\boxed{{{}}}", "The answer is {}.", "#### {}", "<answer>{}</answer>", '{{"answer": "{}"}}', "It is {}."]
    ),
)
@settings(max_examples=150, deadline=None)
def test_a_scale_word_multiplies(value: Fraction, scale: str, wrap: str) -> None:
    text = wrap.format(f"{value} {scale}" if value.denominator == 1 else f"{value.numerator}/{value.denominator} {scale}")
    exact = value * SCALES[scale]
    assert math_equal(prediction=text, answer=f"{exact.numerator}/{exact.denominator}") == 1.0
    assert math_equal(prediction=text, answer=str(value)) == 0.0


@given(
    number=st.integers(0, 10**9),
    other=st.integers(0, 10**9),
    way=st.sampled_from(
        ["{n}", "{c}", "${c}", r"\boxed{{{c} dollars}}", "The answer is {c}.", "#### {c} miles", "She has {c} apples."]
    ),
)
@settings(max_examples=150, deadline=None)
def test_a_number_equals_itself_and_no_other(number: int, other: int, way: str) -> None:
    assert math_equal(prediction=write(way, number), answer=str(number)) == 1.0
    assert math_equal(prediction=write(way, number), answer=str(other)) == float(number == other)


_PIECES = st.sampled_from(
    [
        "18",
        "19",
        "1,234",
        "70",
        "000",
        "-",
        "+",
        "=",
        "or",
        "not",
        "and",
        "answer",
        "is",
        "\\boxed{",
        "}",
        "$",
        "%",
        "\\frac{1}{2}",
        "million",
        "cents",
        "half",
        "one",
        "hundred",
        ".",
        ",",
        ";",
        ":",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        '"answer"',
        "<answer>",
        "</answer>",
        "\\text{",
        "**",
        "####",
        "1e999999999",
        "9^9^9^9",
        "\n",
        "½",
        "²",
        "−",
        "\u2009",
        "x",
        "^",
        "!",
        "?",
        "is",
        "wrong",
        "at",
        "least",
        "\\pm",
        '"',
    ]
)


@given(st.lists(st.one_of(_PIECES, st.text(max_size=3)), max_size=40))
@settings(max_examples=300, deadline=None)
def test_no_text_raises(pieces: list[str]) -> None:
    for text in (" ".join(pieces), "".join(pieces)):
        assert math_equal(prediction=text, answer="18") in (0.0, 1.0)
        assert math_equal(prediction="18", answer=text or "x") in (0.0, 1.0)
        assert code_answer(prediction=text, answer="18", question=text) in (0.0, 1.0)
        assert isinstance(extract_answer(text), str)


LONG = [
    "1,234 ", "1 000 ", "$1$ or ", "18 or ", "not ", "is ", "a b c or ", "1.000.", "1,00,", '{"answer":', "<answer>", "**",
    "\\text{",
    "half ", "one ", "one hundred ", "\\boxed{1} or ", "= ", "1=", "$18 and $", "1/", "18 million ", "answer is 1 or ", "½",
    "1½",
    "1\n", ". A 1", "```", "answer:", "1:", "1'000", "1 and a half ", "18 apples, ", "1 x ", "{", "(", "\\boxed{", "-", "9",
    "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("piece", LONG)
def test_ten_times_the_text_takes_no_more_than_a_multiple_of_the_time(piece: str) -> None:
    def seconds(length: int) -> float:
        text = (piece * length)[:length]
        best = 9.0
        for _ in range(3):
            start = time.thread_time()
            math_equal(prediction=text, answer="84")
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(20_000) < 0.02 + 40 * seconds(2_000)
    assert seconds(2_000_000) < 2  # only the end is read


def test_find_answers_gives_no_answer_for_what_is_denied_and_all_that_is_offered() -> None:
    assert find_answers("It is not 18.") == []
    assert find_answers("18 or 19") == ["18", "19"]
    assert extract_answer("The answer is 18 million.") == "18 million."
