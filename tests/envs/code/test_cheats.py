"""Cheats against the judge: none earns, and none stops or stalls the run. What crosses is data, whatever is sent."""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import datetime
import decimal
import fractions
import json
import operator
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.envs.code import session as sessions
from agentfly.envs.code.isolated import run as isolated_run
from agentfly.envs.code.isolated.judge import BINARY, Judge, RemoteObject
from agentfly.envs.code.isolated.plan import plan_tests
from agentfly.envs.code.isolated.run import Verdict, _Peer, count_isolated
from agentfly.envs.code.isolated.wire import MAX_CHARS, MAX_DEPTH, NotData, NotPlain, decode, pack, read, unpack, write
from agentfly.envs.code.reward import unit_tests_reward
from agentfly.envs.code.session import OVERRUN_S, CellResult

from .cheats import CHEATS, LATE, SUITES
from .test_code_rewards import block, chain

posix = pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")


@pytest.fixture
def apart(runner: asyncio.Runner) -> Callable[..., Verdict]:
    return lambda code, tests, timeout_s=60.0: runner.run(count_isolated(code, tests, "", timeout_s, None))


# ---- cheats ----


@posix
@pytest.mark.parametrize("suite", SUITES)
def test_the_tests_that_are_cheated_can_be_passed(apart, suite):
    tests, solution = SUITES[suite]
    assert apart(solution, tests) == Verdict(len(tests))


@posix
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_passes_no_test_and_the_verdict_is_a_number(apart, name):
    suite, code = CHEATS[name]
    assert apart(code, SUITES[suite][0]).passed == 0


@posix
@pytest.mark.parametrize("name", LATE)
def test_a_cheat_that_takes_all_the_time_passes_no_test_and_the_next_solution_is_decided(apart, name):
    suite, code = LATE[name]
    assert apart(code, SUITES[suite][0], 1.0).passed == 0
    tests, solution = SUITES["square"]
    assert apart(solution, tests).passed == len(tests)


@posix
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    "name", ["naming eval", "a reason to run beside", "a node that is everything", "differences of nothing"]
)
def test_a_cheat_earns_nothing_by_the_reward_and_does_not_stop_it(runner, name, partial):
    suite, code = CHEATS[name]
    for beside in (True, False):
        reward = unit_tests_reward(timeout_s=60, partial=partial, beside=beside)
        score = runner.run(reward.score(chain(block(code), tests=SUITES[suite][0])))
        assert (score.reward, score.components["apart"]) == (0.0, 1.0)


# ---- the grammar ----

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 200), 1 << 200), st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False), st.text(max_size=8), st.binary(max_size=8), st.decimals(allow_nan=False),
    st.fractions(), st.dates(), st.datetimes(), st.timedeltas(), st.sampled_from([int, str, list, type(None)]),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.sets(SCALARS, max_size=4),
        st.frozensets(SCALARS, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.lists(inner, max_size=4).map(collections.deque),
        st.dictionaries(st.text(max_size=4), inner, max_size=4).map(collections.OrderedDict),
    ),
    max_leaves=20,
)  # fmt: skip
PLAIN = (
    type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, slice, type,
    collections.deque, collections.OrderedDict, collections.Counter, decimal.Decimal, fractions.Fraction, datetime.date,
    datetime.datetime, datetime.time, datetime.timedelta, type(iter([])),
)  # fmt: skip
WORDS = st.sampled_from([
    *"ifcbBrDFTykAltszqIdOCon", "eval", "int", "type", "__import__", "date", "0x1f", "1.5", "nan", "<i8", "|O", "", "0",
    "StopIteration",
])  # fmt: skip
TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), WORDS, st.text(max_size=4)),
    lambda inner: st.one_of(
        st.builds(lambda tag, rest: [tag, *rest], WORDS, st.lists(inner, max_size=4)),
        st.lists(inner, max_size=4),
        st.dictionaries(WORDS, inner, max_size=3),
    ),
    max_leaves=12,
)


def no_object(number: int) -> Any:
    raise LookupError(number)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_plain_values_come_back_as_they_were(value):
    found = unpack(read(write({"v": pack(value)}))["v"], no_object)
    assert (found, type(found)) == (value, type(value))


def kinds(value: Any) -> Iterator[type]:
    yield type(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | collections.deque | type(iter([]))):
        for item in value:
            yield from kinds(item)


@given(TREES)
@settings(max_examples=250, deadline=None)
def test_any_tree_is_plain_data_or_refused(tree):
    try:
        value = unpack(tree, no_object, arrays=False)
    except NotData:
        return
    assert set(kinds(value)) <= set(PLAIN)


def test_types_that_travel_are_types_of_data():
    for name in (
        "eval",
        "exec",
        "type",
        "object",
        "print",
        "__import__",
        "open",
        "super",
        "property",
        "Exception",
        "memoryview",
    ):
        with pytest.raises(NotData):
            unpack(["y", name], no_object)


@given(st.one_of(st.text(max_size=200), st.text(alphabet='[]{}"\\,:01ev', max_size=200)))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_message_or_refused(text):
    for make in (read, lambda text: read(decode(text))):
        with contextlib.suppress(NotData):
            assert type(make(text)) is dict


@pytest.mark.parametrize(
    "text",
    ["[" * MAX_CHARS, '{"v": "' + '\\"' * (MAX_CHARS // 2), '"' * MAX_CHARS, '{"v": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}",
     " " * (MAX_CHARS + 1)],
    ids=["brackets", "escapes", "quotes", "too deep", "too long"],
)  # fmt: skip
def test_a_text_is_measured_in_linear_time_before_it_is_parsed(text, monkeypatch):
    started = time.thread_time()
    monkeypatch.setattr(json, "loads", lambda *a, **k: pytest.fail("it was parsed"))
    if set(text) <= set('"') or '\\"' in text:
        monkeypatch.undo()  # flat, so it may be parsed
    with pytest.raises(NotData):
        read(text)
    assert time.thread_time() - started < 10


def test_what_would_be_refused_is_not_sent():
    deep: list[Any] = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(NotPlain, match="levels"):
        write({"v": pack(deep)})
    with pytest.raises(NotPlain, match="characters"):
        write({"v": "x" * MAX_CHARS})


# ---- the judge, whatever it is answered ----

SECRET = 7_236_981_045_112
SECRET_TESTS = [
    f"assert f(1) == {SECRET}",
    f"assert abs(f(2) - {SECRET}) < 1e-9",
    f"x = [1]\nassert f(x) == [{SECRET}]\nassert x == [1]",
    f"assert g(f(3)) == '{SECRET}'",
    f"assert f(4).value == {SECRET}",
    f"assert {SECRET} in f(5)",
    f"assert all(map(lambda n: f(n) == n + {SECRET}, range(3)))",
    f"assert not f(6) != {SECRET}",
    f"assert sum(f(n) for n in range(3)) == {SECRET}",
    f"assert f(7)[0] == {SECRET} and len(f(7)) == {SECRET}",
    f"assert str(f(8)) == '{SECRET}'",
    f"assert max(f(9), {SECRET - 1}) == {SECRET}",
]


def encoded(answer: Any) -> str:
    return base64.b64encode(json.dumps(answer).encode()).decode()


ANSWERS = st.one_of(
    st.builds(lambda tree: encoded({"v": tree}), TREES),
    st.builds(lambda tree, changes: encoded({"v": tree, "changed": changes}), TREES, TREES),
    st.builds(lambda error: encoded({"e": error}), st.one_of(TREES, st.tuples(WORDS, st.text(max_size=3)))),
    st.builds(encoded, TREES),
    st.text(max_size=20),
)
NAMES = encoded({"v": ["d", ["f", ["o", 0]], ["g", ["o", 1]]]})


def verdict_of(judge: Judge, tests: list[str], answers: list[str], then: str) -> dict[str, Any]:
    """Answers the judge's requests from the list, and then always alike. Returns the verdict."""
    message = judge.begin("", tests)
    queue = iter([NAMES, *answers])
    for _ in range(2_000):
        kind, text = message[0], message.partition(" ")[2]
        if kind != "r":
            return {"kind": kind, **json.loads(base64.b64decode(text))}
        message = judge.reply(next(queue, then))
    raise AssertionError("the judge does not come to an end")


@given(st.lists(ANSWERS, max_size=40))
@settings(max_examples=80, deadline=None)
def test_no_answers_pass_a_test_whose_result_is_not_known(answers):
    found = verdict_of(Judge(), SECRET_TESTS, answers, encoded({"e": ["ValueError", ""]}))
    assert (found["kind"], found["passed"]) == ("d", [])


def test_the_judge_passes_tests_that_are_answered_rightly():
    found = verdict_of(Judge(), SECRET_TESTS[:2], [], encoded({"v": SECRET}))
    assert (found["kind"], found["passed"]) == ("d", [0, 1])


@given(
    st.sampled_from([*BINARY, "eq", "ne", "contains"]),
    st.one_of(st.integers(), st.floats(), st.text(), st.lists(st.integers())),
)
@settings(max_examples=200, deadline=None)
def test_an_operator_with_data_never_reaches_the_solution(name, data):
    judge = Judge()
    thing = RemoteObject(judge, 0)
    judge.plan = plan_tests("", ["assert P(1) + P(2) == P(3)"])
    assert judge.plan.operators
    judge.answers.put("")  # a request fails this test instead of waiting
    for operands in ((thing, data), (data, thing)):
        if (name == "contains" and operands[0] is thing) or (name in ("mod", "imod", "iadd") and operands[0] is data):
            continue  # iterates, without the item that is looked for or the list; "%s" asks for a text, without the template
        with contextlib.suppress(TypeError):
            assert getattr(operator, name)(*operands) is (name == "ne")
    for function in (float, int, round, complex, operator.index):
        with pytest.raises(TypeError):
            function(thing)
    assert judge.messages.empty()


@pytest.mark.parametrize(
    "name", ["__array_interface__", "__array__", "__float__", "__rsub__", "__deepcopy__", "__class_getitem__"]
)
def test_protocols_of_a_stand_in_are_not_those_of_the_solution(name):
    judge = Judge()
    judge.answers.put("")
    assert not hasattr(RemoteObject(judge, 0), name)
    assert judge.messages.empty()


# ---- apart or beside, from the tests alone ----

HAND_OVER = {
    "a lambda": "assert f(lambda x: x) == 1",
    "a lambda by a name": "g = lambda x: x\nassert f(g) == 1",
    "a function": "def g(x): return x\nassert f(3, key=g) == 1",
    "functions in a list": "assert f([abs, len]) == 1",
    "a lambda in a dict": "ops = {'a': lambda x: x}\nassert f(ops) == 1",
    "an item of such a dict": "ops = {'a': lambda x: x}\nassert f(ops['a']) == 1",
    "each of some functions": "for g in (len, sum):\n    assert f(g) == 1",
    "each of some pairs": "for g, x in [(len, 1)]:\n    assert f(g, x) == 1",
    "items of a dict": "ops = {'a': len}\nfor name, g in ops.items():\n    assert f(g) == 1",
    "a built-in function": "assert f(len) == 1",
    "a method of a type": "assert f(str.upper) == 1",
    "a function of a module": "import math\nassert f(math.sqrt, 4) == 1",
    "a function of a module from it": "from operator import add\nassert f(add) == 1",
    "a module": "import math\nassert f(math) == 1",
    "an object of a module": "import re\nassert f(re.compile('x')) == 1",
    "an endless iterator": "import itertools\nassert f(itertools.count()) == 1",
    "a partial function": "from functools import partial\ndef g(x, y): return x\nassert f(partial(g, 1)) == 1",
    "a class": "class A: pass\nassert f(A) == 1",
    "an object of a class": "class A: pass\nassert f(A()) == 1",
    "a member of an enumeration": "import enum\nclass C(enum.Enum):\n    RED = 1\nassert f(C.RED) == 1",
    "what a function returns": "def make():\n    return lambda x: x\nassert f(make()) == 1",
    "a function through a check": "def check(c, g):\n    assert c(g) == 1\ncheck(f, lambda x: x)",
    "a choice of functions": "assert f(len if 1 else None) == 1",
    "a list of lambdas": "assert f([lambda: n for n in range(3)]) == 1",
    "a function to a method": "s = Stack()\ns.each(lambda x: x)\nassert s.n == 1",
    "a function to a field's method": "class T:\n    def t(self):\n        self.s = Stack()\n        self.s.each(len)\nT().t()",
    "a function as an attribute": "s = Stack()\ns.key = lambda x: x\nassert s.n == 1",
    "a function to decorate": "@cached\ndef g(x): return x\nassert g(1) == 1",
    "a subclass": "class B(A):\n    pass\nassert B().n == 1",
    "an exception of the solution": "try:\n    f(1)\nexcept EmptyError:\n    pass",
    "a function that depends on an answer": "x = f(1)\nassert g(x if x else (lambda: 1)) == 1",
}
SPLIT = {
    "data": "assert f([1, (2, 'a')], {'k': None}) == {1: 2}",
    "types": "assert f((1, 'a'), int, str) == [1]",
    "a constant of a module": "import math\nassert f(math.pi) == 3",
    "a constant of a module that is not imported": "assert f(sys.maxsize) == 3",
    "a function to Python's own": "assert sorted(f(1), key=lambda x: -x) == [1]\nassert list(map(lambda x: f(x), [1])) == [1]",
    "a key to sort a result by": "x = f(1)\nx.sort(key=lambda p: p[1])\nassert x == [1]",
    "a function of the solution": "assert f(g, 1) == 1",
    "a check with the function": "def check(candidate):\n    assert candidate(1) == 1\ncheck(f)",
    "objects of the solution": "root = Node(1)\nroot.left = Node(2)\nassert f(root) == 1",
    "a dict with a default": "from collections import defaultdict\nd = defaultdict(lambda: 0)\nassert f(d) == 1",
    "a function that is only called": "def g(x): return x + 1\nassert f(g(1)) == 2",
    "an array": "import numpy as np\nassert (f(np.zeros(3)) == 0).all()",
    "a class of tests": "class T:\n    def same(self, x, y): assert x == y\n    def t(self): self.same(f(1), len)\nT().t()",
    "a generator": "assert f(x for x in range(3)) == 1",
}


@pytest.mark.parametrize("name", HAND_OVER)
def test_tests_that_hand_over_code_are_known_before_any_solution(name):
    assert plan_tests("", [HAND_OVER[name]]).cannot.startswith("the tests ")


@pytest.mark.parametrize("name", SPLIT)
def test_tests_that_hand_over_data_run_isolated(name):
    assert plan_tests("", [SPLIT[name]]).cannot == ""


def test_a_prelude_counts_as_part_of_the_tests():
    assert (
        plan_tests("def helper(x): return x", ["assert f(helper) == 1"]).cannot == "the tests hand a function to the solution"
    )
    assert plan_tests("def helper(x): return x", ["assert f(helper(1)) == 1"]).names == {"f"}


# ---- the trainer's side ----


class _Fake:
    """A session whose cells return a given value, or never return."""

    tier = "fake"

    def __init__(self, value: str | None = None) -> None:
        self.value = value
        self.closed = False

    async def run(self, code: str, timeout_s: float) -> CellResult:
        if self.value is None:
            await asyncio.sleep(600)
        return CellResult(value=self.value)

    async def close(self) -> None:
        self.closed = True
        await asyncio.sleep(600)

    def report(self) -> tuple[str, ...]:
        return ()


@given(st.one_of(st.text(max_size=40), st.from_regex(r"'[a-z]\d{1,8} [A-Za-z0-9+/=]*'", fullmatch=True)))
@settings(max_examples=200, deadline=None)
def test_any_value_of_a_cell_is_a_message_or_none(value):
    async def main() -> None:
        peer = _Peer(_Fake(value), "solution", asyncio.get_running_loop().time() + 60)
        found = await peer.call("ask", "x")
        assert found is None or len(found[1]) <= 4 * MAX_CHARS

    asyncio.run(main())


def test_the_time_limit_holds_though_sessions_neither_answer_nor_close(monkeypatch):
    fakes = [_Fake(), _Fake()]

    async def open_session(*args: Any) -> _Fake:
        return fakes.pop()

    monkeypatch.setattr(sessions, "open_session", open_session)
    made = list(fakes)

    async def main() -> tuple[Verdict, float]:
        started = time.monotonic()
        return await count_isolated("x = 1", ["assert x"], "", 0.2, None), time.monotonic() - started

    verdict, took_s = asyncio.run(main())
    assert verdict == Verdict(0, "it took longer than 0.2 s")
    assert took_s < 0.2 + 2 * OVERRUN_S + 15
    assert all(fake.closed for fake in made)


def test_passed_tests_are_a_set_within_the_tests(monkeypatch):
    verdict = base64.b64encode(b'{"passed": [0, 0, 1, 1, 7, -1, true, "0", 1.0, null]}').decode()

    async def call(self: _Peer, method: str, *arguments: object) -> tuple[str, str]:
        return "d", verdict

    @contextlib.asynccontextmanager
    async def session(tier: str | None) -> AsyncIterator[_Fake]:
        yield _Fake("")

    monkeypatch.setattr(_Peer, "call", call)
    monkeypatch.setattr(isolated_run, "session", session)
    assert asyncio.run(count_isolated("", ["assert f(1)"] * 3, "", 5, None)).passed == 2


@posix
def test_a_long_answer_does_not_hold_up_the_loop(runner):
    """The longest text that is accepted crosses while a ticker measures the CPU time of each turn of the loop."""
    answers = "def f(n): return 'x' * n", ["assert len(f(999_000)) == 999_000"], "", 60, None

    async def main() -> tuple[Verdict, float]:
        await count_isolated(*answers)  # imports modules
        turns = []

        async def tick() -> None:
            while True:
                before = time.thread_time()
                await asyncio.sleep(0)
                turns.append(time.thread_time() - before)

        ticker = asyncio.create_task(tick())
        verdict = await count_isolated(*answers)
        ticker.cancel()
        return verdict, max(turns)

    def read_once() -> float:
        """The CPU time of reading such a text on this machine."""
        before = time.thread_time()
        json.loads(base64.b64decode(base64.b64encode(json.dumps("x" * 999_000).encode())))
        return time.thread_time() - before

    verdict, longest = runner.run(main())
    assert verdict.passed == 1
    assert longest < 4 * max(read_once() for _ in range(5))
