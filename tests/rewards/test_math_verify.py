"""Agreement of `math_equal` with the package math-verify, and the reward `math_verify`."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import random
import subprocess
import sys
import threading
from typing import Any

import pytest

from agentfly.errors import ConfigError, MissingExtra
from agentfly.rewards import as_reward
from agentfly.rewards.math.math_answer import math_equal

installed = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed: pip install 'agentfly[math-verify]'"
)

# GSM8K's answers are numbers; replies name them in these ways.
GSM8K = [
    "{n}", "{c}", "${c}", "#### {n}", "#### {c}", r"\boxed{{{n}}}", r"\boxed{{{c}}}", r"$\boxed{{{n}}}$", "The answer is {n}.",
    "The answer is ${c}.", "The answer is {c} dollars.", "She pays ${c} in total.", "So he has {n} apples left.", "**{n}**",
    "{m}",
    "The answer is **{n}**.", "3 + 4 = 7, so the final answer is {n}.", r"The final answer is $\boxed{{{n}}}$.", "{n}.0",
    "{n} miles",
    "#### {m}", r"\boxed{{{m}}}", "The answer is {m}.", r"\boxed{{{n}}} no, wait: \boxed{{{m}}}", r"\boxed{{-{n}}}", "{n}0",
    "{n}.5",
]  # fmt: skip

# Pairs of a prediction and a reference in the style of MATH.
MATH = [
    (r"\boxed{\frac{1}{2}}", "0.5"), (r"\boxed{\frac12}", r"\frac{1}{2}"), (r"\boxed{\dfrac{3}{4}}", r"\frac{3}{4}"),
    (r"\boxed{0.75}", r"\frac34"),
    (r"\boxed{-\frac{2}{3}}", r"\frac{-2}{3}"), (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{2x+1}", "1+2x"), (r"\boxed{x=5}", "5"), (r"\boxed{(1,2)}", "(1, 2)"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{[1,2)}", "[1,2)"), (r"\boxed{[1,2]}", "(1,2)"), (r"\boxed{\{1,2\}}", r"\{2,1\}"), (r"\boxed{1,2}", "2, 1"),
    (r"\boxed{(-\infty,2]\cup[3,4)}", r"(-\infty, 2] \cup [3, 4)"), (r"\boxed{2\pi}", r"2\pi"), (r"\boxed{\pi}", "3"),
    (r"\boxed{50\%}", "0.5"), (r"\boxed{50\%}", "50"), (r"\boxed{90^\circ}", "90"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{12,345}", "12345"), (r"\boxed{12{,}345}", "12345"), (r"\boxed{\$18}", "18"), (r"\boxed{3\frac{1}{2}}", "3.5"),
    (r"\boxed{\frac{x}{2}}", "0.5x"), (r"\boxed{a+b}", "b+a"), (r"\boxed{a-b}", "b-a"),
    (r"\boxed{1.5}", r"\frac{3}{2}"),
    (r"\boxed{0.333333}", r"\frac13"), (r"\boxed{0.33}", r"\frac13"), (r"\boxed{y=2x+1}", "y = 2x+1"),
    (r"\boxed{x^2+2x}", "(x+1)^2"),
    (r"\boxed{6}", r"\boxed{6}"), (r"We get $\frac{7}{8}$.", r"\frac78"),
    ("The answer is $-3$.", "-3"),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{4}"), (r"\boxed{i}", "i"), (r"\boxed{1 \text{ or } 2}", "1,2"),
    (r"\boxed{x \in [1,2]}", "[1,2]"),
]  # fmt: skip

# Where the two differ: prediction, reference, the verdict of math_equal, the reason.
DIFFERENT = [
    ("18 million", "18", 0, "a scale word is a factor"),
    ("18 dozen", "18", 0, "a scale word is a factor"),
    ("70 thousand", "70000", 1, "a scale word is a factor"),
    ("18 cents", "18", 0, "cents are hundredths of a dollar"),
    ("1800%", "18", 0, "a percentage is a share or its number, not a count"),
    ("The answer is 18 or 19.", "18", 0, "two values are no answer"),
    ("The answer is between 18 and 19", "18", 0, "two values are no answer"),
    (r"\boxed{18} or 19", "18", 0, "two values are no answer"),
    ("The answer is not 18", "18", 0, "a denied value is no answer"),
    ("18 is wrong", "18", 0, "a denied value is no answer"),
    ("She has 18, not 19.", "18", 1, "a denied value is no answer"),
    (r"not \boxed{18}", "18", 0, "a denied value is no answer"),
    ("at least 18", "18", 0, "a bound is no value"),
    ("x > 18", "18", 0, "a bound is no value"),
    ("minus 18", "18", 0, "a sign may be a word"),
    ("18 squared", "18", 0, "a power may be a word"),
    ("18 and a half", "18", 0, "a mixed number may be in words"),
    ("eighteen", "18", 1, "a number may be in words"),
    ("18x", "18", 0, "a term with a variable is no number"),
    ("18:30", "18", 0, "a time or a ratio is no number"),
    (r"\boxed{18 dollars}", "18", 1, "a unit inside the box is no variable"),
    ('{"answer": "18"}', "18", 1, "an answer may be JSON"),
    ("<answer>18</answer>", "18", 1, "an answer may be in tags"),
    ("1.8e1", "18", 1, "scientific notation without LaTeX"),
    (r"\boxed{19} no, \boxed{18}", "18", 1, "the last box counts"),
    ("US$18", "18", 1, "a currency may have a prefix"),
    (r"\boxed{10!}", "3628800", 0, "a number has to be worked out"),
    (r"\boxed{2^{10}}", "1024", 0, "a number has to be worked out"),
    (r"\boxed{\sqrt[3]{27}}", "3", 0, "a number has to be worked out"),
    (r"\boxed{\cos(\pi)}", "-1", 0, "a number has to be worked out"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 0, "a product is not its sum"),
]


def verdict(prediction: str, reference: str) -> float:
    from math_verify import parse, verify

    gold = parse(rf"\boxed{{{reference}}}", parsing_timeout=None)
    return float(verify(gold, parse(prediction, parsing_timeout=None), timeout_seconds=None))


@installed
def test_both_agree_on_answers_in_the_style_of_gsm8k(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    numbers = [*random.Random(7).sample(range(3, 3000), 6), 70000, 1250000]
    for number in numbers:
        for way in GSM8K:
            text = way.format(n=number, c=f"{number:,}", m=number + 1)
            ours = math_equal(prediction=text, answer=str(number))
            if text.startswith(r"\boxed{") and "no, wait" in text:
                assert ours == 0.0  # math-verify also reads the first box here
                continue
            assert ours == verdict(text, str(number)), text


@installed
@pytest.mark.parametrize(("prediction", "reference"), MATH)
def test_both_agree_on_answers_in_the_style_of_math(prediction: str, reference: str) -> None:
    assert math_equal(prediction=prediction, answer=reference) == verdict(prediction, reference)


@installed
@pytest.mark.parametrize(("prediction", "reference", "ours", "reason"), DIFFERENT)
def test_they_differ_where_the_table_says_so(prediction: str, reference: str, ours: int, reason: str) -> None:
    assert math_equal(prediction=prediction, answer=reference) == ours, reason
    assert verdict(prediction, reference) == 1 - ours, f"math-verify agrees now: remove this row ({reason})"


@installed
def test_the_reward_scores_in_worker_processes_while_the_loop_runs(chain: Any) -> None:
    reward = as_reward("math_verify")

    async def score_all() -> list[float]:
        chains = [chain(r"\boxed{\frac12}", answer="0.5"), chain("2", answer="3"), chain("#### 4", answer="2+2\n#### 4")]
        return [score.reward for score in await asyncio.gather(*map(reward.score, chains))]

    assert asyncio.run(score_all()) == [1.0, 0.0, 1.0]
    outside: list[float] = []
    thread = threading.Thread(target=lambda: outside.append(reward(prediction="7", answer="7")["reward"]))  # type: ignore[operator]
    thread.start()
    thread.join(120)
    assert outside == [1.0]


@installed
def test_a_comparison_without_end_is_cut_off_and_the_next_one_works(chain: Any) -> None:
    reward = as_reward({"math_verify": {"timeout_s": 2.0}})

    async def score(text: str) -> tuple[float, float]:
        result = await reward.score(chain(text, answer="18"))
        return result.reward, result.components["undecided"]

    async def both() -> list[tuple[float, float]]:
        return [await score(r"\boxed{9^{9^{9^{9}}}}"), await score("18")]

    assert asyncio.run(both())[0] == (0.0, 1.0)
    assert asyncio.run(as_reward("math_verify").score(chain("18", answer="18"))).reward == 1.0


def test_without_the_package_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(MissingExtra, match=r"pip install 'agentfly\[math-verify\]'"):
        as_reward("math_verify")


def test_a_limit_that_is_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout_s must be above 0"):
        as_reward({"math_verify": {"timeout_s": 0}})


def test_naming_the_reward_loads_no_sympy() -> None:
    code = "import sys, agentfly.rewards as r; r.math_verify; assert not {'sympy', 'math_verify'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800)
