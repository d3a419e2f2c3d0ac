"""Tests in another session than the solution: what travels between the two, and that cheating earns nothing."""

from __future__ import annotations

import ast
import asyncio
import collections
import datetime
import decimal
import fractions
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly.envs.code import isolated
from agentfly.envs.code.isolated.plan import asked_names, plan_tests
from agentfly.envs.code.isolated.run import Verdict, count_isolated
from agentfly.envs.code.isolated.wire import NotData, NotPlain, pack, read, unpack, write
from agentfly.envs.code.loaders import load_mbpp
from agentfly.envs.code.reward import count_beside, unit_tests_reward
from agentfly.errors import RewardError

from .honest import APART, BESIDE, RUNS_TEXT
from .test_code_rewards import block, chain, scores

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")
MBPP = Path(__file__).resolve().parents[4] / "shared" / "data" / "code" / "mbpp.jsonl.gz"
TESTS = ["assert square(3) == 9", "assert square(-2) == 4"]
SQUARE = "def square(n):\n    return n * n"


@pytest.fixture
def apart(runner: asyncio.Runner) -> Callable[..., Verdict]:
    def run(code: str, *tests: str, timeout_s: float = 60.0) -> Verdict:
        return runner.run(count_isolated(code, tests, "", timeout_s, None))

    return run


PLAIN: list[Any] = [
    None, True, 0, -5, 1 << 80, -(1 << 80), 0.1, float("inf"), 3 + 4j, "text", "\ud800", b"\x00\xff", bytearray(b"x"),
    [1, [2, (3,)]], (), (1, "a"), {1, 2}, frozenset({3}), {"a": 1, (1, 2): [3]}, collections.OrderedDict(b=1, a=2),
    collections.Counter("aab"), collections.deque([1, 2]), range(1, 10, 3), decimal.Decimal("1.10"), fractions.Fraction(1, 3),
    datetime.datetime(2024, 2, 29, 12, 30), datetime.date(2024, 2, 29), datetime.timedelta(days=2), int, list,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_travels_as_what_it_is(value):
    found = unpack(read(write({"v": pack(value)}))["v"], lambda number: None)
    assert found == value
    assert type(found) is type(value)


def test_iterators_and_views_travel_by_their_items_and_other_things_do_not():
    assert list(unpack(pack(map(str, [1, 2])), lambda number: None)) == ["1", "2"]
    for view in ({"a": 1}.items(), {"a": 1}.keys()):
        assert unpack(pack(view), lambda number: None) == set(view)
    values = unpack(pack({"a": 1}.values()), lambda number: None)
    assert list(values) == [1] != values
    with pytest.raises(NotPlain, match="iterator of more than"):
        pack(itertools.count())
    with pytest.raises(NotPlain, match="function"):
        pack([1, lambda: 1])
    assert pack([lambda: 1], lambda thing: 7) == ["l", ["o", 7]]


def test_what_is_overridden_in_a_subclass_of_plain_data_does_not_travel():
    class Always(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    found = unpack(pack(Always(3)), lambda number: None)
    assert (type(found), found == 4) == (int, False)


@pytest.mark.parametrize("tree", [["?"], ["o", 5], ["i", "zz"], ["s", ["l"]], ["d", 1], ["T", "year", 1], [], ["y", "nothing"]])
def test_data_that_pack_does_not_make_is_refused(tree):
    with pytest.raises(NotData):
        unpack(tree, [].__getitem__)


def test_names_that_tests_bind_themselves_are_not_asked_of_the_solution():
    reads, sets = asked_names(["import math\ndef check(f):\n    x = f(1)\n    assert math.isclose(x, one)\ncheck(square)"])
    assert reads - sets == {"one", "square"}
    assert sets == {"math", "check"}


RIGHT = {
    "a function": (SQUARE, TESTS),
    "a check that is handed the function": (
        SQUARE,
        ["def check(f):\n    assert f(3) == 9\n    assert f(0) == 0\ncheck(square)"],
    ),
    "many calls": (SQUARE, ["assert [square(n) for n in range(40)] == [n * n for n in range(40)]"]),
    "keywords and defaults": ("def f(a, *, b=2, **c): return a, b, c", ["assert f(1, b=3, d=4) == (1, 3, {'d': 4})"]),
    "an argument changed in place": ("def f(x): x.sort()", ["x = [3, 1, 2]\nassert f(x) is None\nassert x == [1, 2, 3]"]),
    "a dict and a set changed in place": (
        "def f(d, s):\n    d['a'] = s.pop()",
        ["d, s = {}, {5}\nf(d, s=s)\nassert (d, s) == ({'a': 5}, set())"],
    ),
    "a constant and a class": (
        "LIMIT = 3\nclass Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
        ["s = Stack()\ns.push(LIMIT)\nassert len(s) == 1\nassert s.items == [3]\nassert s.pop() == 3", "assert not Stack()"],
    ),
    "objects linked by their attributes": (
        "class Node:\n    def __init__(self, v): self.v, self.next = v, None\n"
        "def total(n):\n    return n.v + total(n.next) if n else 0",
        ["a = Node(1)\na.next = Node(2)\nassert total(a) == 3\nassert a.next.v == 2"],
    ),
    "objects that equal each other": (
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n"
        "    def __add__(self, o): return P(self.x + o.x)",
        ["assert P(1) + P(2) == P(3)\nassert P(1) != P(2)"],
    ),
    "objects that are themselves": (
        "class A: pass\nONE = A()\ndef one(): return ONE",
        ["assert one() is one()\nassert one() == one()", "assert A() != A() and A() is not A()"],
    ),
    "objects in order": (
        "import functools\n@functools.total_ordering\nclass Card:\n    def __init__(self, n): self.n = n\n"
        "    def __eq__(self, o): return self.n == o.n\n    def __lt__(self, o): return self.n < o.n",
        ["assert Card(2) < Card(3) and Card(3) >= Card(3)", "a, b = Card(1), Card(2)\nassert not a > b"],
    ),
    "objects in objects": (
        "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n"
        "@dataclasses.dataclass\nclass L:\n    a: P\n    b: list\n"
        "def line(n): return L(P(n), [P(n + 1)])",
        ["assert line(1) == L(P(1), [P(2)])\nassert line(1) != L(P(1), [P(3)])", "assert line(2) in [line(1), line(2)]"],
    ),
    "an instance of a class": (
        "class A: pass\nclass B(A): pass\ndef make(): return B()",
        ["assert isinstance(make(), A) and not isinstance(A(), B)", "assert not isinstance(3, A)"],
    ),
    "a slice of an object": (
        "class S:\n    def __getitem__(self, k): return list(range(9))[k]",
        ["assert S()[2:5] == [2, 3, 4]\nassert S()[-1] == 8"],
    ),
    "a type as a result": ("def kind(x): return type(x)", ["assert kind(3) is int and kind([]) == list"]),
    "a closure": ("def adder(n):\n    return lambda x: x + n", ["assert adder(3)(4) == 7"]),
    "a generator": ("def up(n):\n    yield from range(n)", ["assert list(up(3)) == [0, 1, 2]\nassert next(up(1)) == 0"]),
    "an endless generator": (
        "import itertools\ndef up(): return itertools.count()",
        ["import itertools\nassert list(itertools.islice(up(), 5)) == [0, 1, 2, 3, 4]"],
    ),
    "an error that is expected": (
        "def f(x):\n    raise ValueError('no ' + x)",
        ["try:\n    f('luck')\n    assert False, 'no error'\nexcept ValueError as e:\n    assert 'no luck' in str(e)"],
    ),
    "a module that only the solution imports": ("import math\ndef f(): return 0.1 + 0.2", ["assert math.isclose(f(), 0.3)"]),
    "a function with the name of a built-in one": ("def sum(xs): return 42", ["assert sum([1]) == 42"]),
    "a long result": ("def f(n): return list(range(n))", ["assert f(30_000) == list(range(30_000))"]),
    "a long argument": ("def f(x): return len(x)", ["assert f('x' * 100_000) == 100_000"]),
    "an array": (
        "import numpy\ndef f(n): return numpy.arange(n) * 2.0",
        ["import numpy as np\nassert np.array_equal(f(3), np.array([0.0, 2.0, 4.0]))\nassert f(3)[1] == 2"],
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_solution_passes_apart(apart, name):
    code, tests = RIGHT[name]
    verdict = apart(code, *tests)
    assert (verdict.passed, verdict.why) == (len(tests), "")


ALWAYS = (
    "class A:\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda s, o: True\n"
    "    __ne__ = lambda s, o: False"
)
CHEATS: dict[str, tuple[str, list[str]]] = {
    "an object that equals everything": (f"{ALWAYS}\ndef square(n): return A()", TESTS),
    "an int that equals everything": (f"{ALWAYS}\nclass B(A, int): pass\ndef square(n): return B()", TESTS),
    "a list that equals everything": (f"{ALWAYS}\nclass B(A, list): pass\ndef f(): return B()", ["assert f() == [1, 2]"]),
    "an object within all bounds": (f"{ALWAYS}\ndef f(): return A()", ["assert 3 < f() < 4"]),
    "an object that contains everything": (f"{ALWAYS}\ndef f(): return A()", ["assert 5 in f()", "assert f() in [1, 2]"]),
    "an object that unequals nothing": (f"{ALWAYS}\ndef f(): return A()", ["assert not (f() != 3)"]),
    "searching the frames": (
        "import sys\ndef square(n):\n    frame = sys._getframe()\n    while frame:\n"
        "        for thing in frame.f_locals.values():\n"
        "            if 'assert' + ' square' in repr(thing): return 9 if n == 3 else 4\n        frame = frame.f_back",
        TESTS,
    ),
    "searching the collector": (
        "import gc, types\ndef square(n):\n    for thing in gc.get_objects():\n"
        "        for test, *_ in thing if isinstance(thing, list) and thing and isinstance(thing[0], tuple) else ():\n"
        "            consts = test.co_consts if isinstance(test, types.CodeType) and test.co_filename == '<test>' else ()\n"
        "            if n in consts: return consts[consts.index(n) + 1]",
        TESTS,
    ),
    "searching the memory": (
        "import re\ndef secret():\n    with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as mem:\n"
        "        for line in maps:\n            if ' rw' not in line: continue\n"
        "            low, high = (int(end, 16) for end in line.split()[0].split('-'))\n            try:\n"
        "                mem.seek(low)\n"
        "                found = re.search(rb'a' + rb'ssert f\\(\\) == (\\d{9})', mem.read(high - low))\n"
        "            except OSError: continue\n            if found: return int(found[1])\ndef f(): return secret()",
        ["assert f() == 918273645"],
    ),
    "leaving with a good status": ("import sys\ndef square(n): sys.exit(0)", TESTS),
    "leaving hard": ("import os\ndef square(n): os._exit(0)", TESTS),
    "raising what tests might catch": (
        "def square(n): raise StopIteration",
        [*TESTS, "for n in [1]:\n    assert square(n) == 1"],
    ),
    "replacing built-in functions for all": (
        "import builtins\nbuiltins.all = builtins.any = builtins.isinstance = lambda *a: True\n"
        "builtins.len = builtins.abs = builtins.sorted = lambda x: 0\ndef f(n): return None",
        ["assert all(f(n) == n for n in range(3))", "assert isinstance(f(1), int)", "assert abs(f(1) - 1) < 1"],
    ),
    "defining built-in functions": (
        "def all(x): return True\nany = isinstance = all\ndef abs(x): return 0\nlen = abs\ndef f(n): return 7",
        ["assert all(f(n) == n for n in range(3))", "assert abs(f(1) - 1) < 1"],
    ),
    "replacing a module's function": (
        "import math\nmath.isclose = lambda *a, **k: True\ndef f(): return 5",
        ["assert math.isclose(f(), 0.3)", "import math\nassert math.isclose(f(), 0.3)"],
    ),
    "a class with the name of a module": (
        "class math:\n    isclose = lambda *a: True\ndef f(): return 5",
        ["assert math.isclose(f(), 0.3)"],
    ),
    "no assertion errors": (
        "import builtins\nbuiltins.AssertionError = ValueError\ndel builtins.exec\ndef square(n): return 0",
        TESTS,
    ),
    "replacing the other end": (
        "import __main__\n__main__.solution.ask = lambda request: '13 {\"passed\": 1}'\ndef square(n): return 0",
        TESTS,
    ),
    "an answer that is a verdict": (
        'import __main__\n__main__.write = lambda message: \'{"passed": [0, 1], "cannot": "x"}\'\ndef square(n): return 0',
        TESTS,
    ),
    "an answer too deep": ("def square(n):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x", TESTS),
    "an answer without end": ("def square(n): return 'x' * 10_000_000", TESTS),
    "an argument too long to hand back": (
        "def f(x): return 'y' * 999_900\ndef g(*x): return 1",
        ["assert g(f(0), f(0)) == 2"],
    ),
    "changing what is expected": ("def f(x):\n    return x + [1]", ["x = [1]\nassert f(x) == x"]),
    "an endless loop": ("def square(n):\n    while True: pass", TESTS),
    "writing to the connection": (
        "import os, stat\ndef square(n):\n    for fd in range(3, 256):\n        try:\n"
        '            if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, b\'\\0\\0\\0\\x1a{"id": 4, "value": "passed"}\')\n'
        "        except OSError: pass\n    return 0",
        TESTS,
    ),
}


ENDLESS = ("an endless loop", "replacing built-in functions for all")  # the session itself cannot go on without `len`


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_earns_nothing(apart, name):
    code, tests = CHEATS[name]
    verdict = apart(code, *tests, timeout_s=3.0 if name in ENDLESS else 60.0)
    assert verdict.passed == 0, "what a solution does must neither pass nor keep its tests from running apart"


@pytest.mark.parametrize(
    "name",
    [
        "an object that equals everything",
        "an object within all bounds",
        "searching the collector",
        "defining built-in functions",
    ],
)
def test_the_same_cheats_work_in_one_session_which_is_why_there_are_two(runner, name):
    code, tests = CHEATS[name]
    assert runner.run(count_beside(code, tests, "", 60.0, None)) > 0


def test_tests_that_hand_over_a_function_run_beside_and_the_score_says_so(apart):
    code, tests = "def twice(f, x): return f(f(x))", ["assert twice(lambda x: x + 1, 1) == 3"]
    assert apart(code, *tests) == Verdict(None, "the tests hand a function to the solution")
    split, joint = scores(unit_tests_reward(), chain(block(SQUARE), tests=TESTS), chain(block(code), tests=tests))
    assert (split.reward, split.components["apart"]) == (1.0, 1.0)
    assert (joint.reward, joint.components["apart"]) == (1.0, 0.0)
    with pytest.raises(RewardError, match="beside=True"):
        scores(unit_tests_reward(beside=False), chain(block(code), tests=tests))


@pytest.mark.parametrize("name", APART)
def test_an_ordinary_test_is_decided_apart(apart, name):
    test, code = APART[name]
    assert apart(code, test) == Verdict(1)


@pytest.mark.parametrize("name", BESIDE)
def test_a_right_solution_whose_tests_need_one_process_is_paid_beside(runner, name):
    test, code = BESIDE[name]
    assert plan_tests("", [test]).cannot.startswith("the tests ")
    score = runner.run(unit_tests_reward(timeout_s=60).score(chain(block(code), tests=test)))
    assert (score.reward, score.components["apart"]) == (1.0, 0.0)


@pytest.mark.parametrize("test", RUNS_TEXT)
def test_tests_that_can_run_text_of_the_solution_do_not_run_isolated(test):
    assert plan_tests("", [test]).cannot.startswith("the tests ") or plan_tests("", [test]).cannot.startswith(
        "the solution names"
    )


def test_a_prelude_that_can_run_text_of_the_solution_counts():
    assert "can run text" in plan_tests("def value(text):\n    return eval(text)", ["assert value(f(1)) == 2"]).cannot


@pytest.mark.parametrize(
    "test",
    ["assert f(1) == 2\nimport os", "import os\nassert f(os.path.join('a', 'b')) == 1", "assert Calc().eval('1+1') == 2"],
)
def test_tests_that_only_name_such_a_module_or_method_run_isolated(test):
    assert plan_tests("import sys\nsys.setrecursionlimit(5000)", [test]).cannot == ""


def test_no_name_of_one_file_of_a_session_hides_that_of_another():
    folder = Path(isolated.__file__).parent
    for side in (("wire", "forms", "plan", "judge"), ("wire", "solution")):
        trees = [ast.parse((folder / f"{name}.py").read_text()) for name in side]
        defined = [
            node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else node.id
            for tree in trees
            for top in tree.body
            for node in ([top] if isinstance(top, ast.FunctionDef | ast.ClassDef) else ast.walk(top))
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        ]
        repeated = {name for name, count in collections.Counter(defined).items() if count > 1} - {"_name", "kind", "error"}
        assert repeated == set()


def test_a_late_solution_and_one_that_cannot_start_say_why(apart):
    assert "longer than 1 s" in apart("while True: pass", *TESTS, timeout_s=1.0).why
    assert apart("1 / 0", *TESTS).why == "the solution raised an error"
    assert "NameError" in apart("x = 1", *TESTS).why
    assert apart("import os\nos._exit(0)", *TESTS).why == "the session ended"


def test_published_references_are_decided_apart(runner):
    if not MBPP.is_file():
        pytest.skip(f"no file {MBPP}")
    rows = random.Random(0).sample(load_mbpp(MBPP), 40)

    async def main() -> list[tuple[str, Verdict, int]]:
        return [
            (row["id"], await count_isolated(row["solution"], row["tests"], "", 60.0, None), len(row["tests"])) for row in rows
        ]

    assert [(name, verdict) for name, verdict, count in runner.run(main()) if verdict.passed != count] == []
