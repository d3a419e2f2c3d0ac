"""Solutions that are right, with tests of ordinary forms. `APART` is decided isolated, `BESIDE` needs one process."""

from __future__ import annotations

_X = "    def __init__(self, x): self.x = x\n"

APART: dict[str, tuple[str, str]] = {
    "seeded numbers": (
        "import random\nrandom.seed(0)\na = pick(list(range(99)))\nrandom.seed(0)\nassert a == random.choice(list(range(99)))",
        "import random\ndef pick(x): return random.choice(x)",
    ),
    "numbers seeded in numpy": (
        "import numpy as np\nnp.random.seed(3)\na = f()\nnp.random.seed(3)\nassert a == np.random.rand()",
        "import numpy as np\ndef f(): return np.random.rand()",
    ),
    "a namedtuple as a result": (
        "assert pt().x == 1 and pt() == (1, 2)",
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef pt(): return P(1, 2)",
    ),
    "a namedtuple as an argument": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\nassert f(P(1, 2)) == 3",
        "def f(p): return p.x + p.y",
    ),
    "a default of a dict": (
        "assert count('aab')['zzz'] == 0",
        "from collections import defaultdict\ndef count(s):\n    d = defaultdict(int)\n    for c in s: d[c] += 1\n    return d",
    ),
    "a scalar of numpy": (
        "import numpy as np\nassert f().dtype == np.float32",
        "import numpy as np\ndef f(): return np.float32(1)",
    ),
    "a scalar of numpy in tests without": ("assert f() == 1.0", "import numpy as np\ndef f(): return np.float32(1)"),
    "a deque with a limit": (
        "from collections import deque\nassert last([1, 2, 3]) == deque([2, 3]) and last([1]).maxlen == 2",
        "from collections import deque\ndef last(x): return deque(x, maxlen=2)",
    ),
    "a method that a class adds to a list": (
        "r = f()\nassert r == [1, 2] and isinstance(r, list) and r.total() == 3 and r.double().total() == 6",
        "class L(list):\n    def total(self): return sum(self)\n    def double(self): return L(2 * x for x in self)\n"
        "def f(): return L([1, 2])",
    ),
    "attributes of a class of dicts": (
        "d = f()\nassert d == {'a': 1} and d['a'] == d.a == 1\nassert not hasattr(d, 'b')",
        "class D(dict):\n    def __getattr__(self, name):\n        if name in self: return self[name]\n"
        "        raise AttributeError(name)\ndef f(): return D(a=1)",
    ),
    "a method that a class adds to a namedtuple": (
        "p = f()\nassert p == (3, 4) and p.x == 3 and p.norm() == 5 and norm(p) == 5",
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int\n"
        "    def norm(self): return (self.x ** 2 + self.y ** 2) ** 0.5\ndef f(): return P(3, 4)\n"
        "def norm(p): return (p[0] ** 2 + p[1] ** 2) ** 0.5",
    ),
    "an enumeration of numbers": (
        "assert level() == 2 and level().name == 'HIGH' and level() + 1 == 3 and isinstance(level(), int)",
        "from enum import IntEnum\nclass Level(IntEnum):\n    LOW = 1\n    HIGH = 2\ndef level(): return Level.HIGH",
    ),
    "a stream as a result": (
        "s = f()\nassert s.readline() == 'a\\n' and list(s) == ['b']",
        "import io\ndef f(): return io.StringIO('a\\nb')",
    ),
    "a key": (
        "d = {K(1): 'a'}\nassert d[K(1)] == 'a' and len({K(1), K(1), K(2)}) == 2",
        f"class K:\n{_X}    def __eq__(self, o): return self.x == o.x\n    def __hash__(self): return hash(self.x)",
    ),
    "objects to sort": (
        "assert [p.x for p in sorted([P(2), P(1)])] == [1, 2]\nxs = [P(3), P(1)]\nxs.sort()\nassert xs[0].x == 1",
        f"class P:\n{_X}    def __lt__(self, o): return self.x < o.x",
    ),
    "a subclass": (
        "assert issubclass(Dog, Animal) and not issubclass(Animal, Dog)",
        "class Animal: pass\nclass Dog(Animal): pass",
    ),
    "a docstring": ("assert f.__doc__ == 'doc' and f.__name__ == 'f'", "def f():\n    'doc'"),
    "many items": ("assert len(big()) == 200_001", "def big(): return list(range(200_001))"),
    "a function with the name of a module": ("assert select([3, 1, 2], 2) == [1, 2]", "def select(x, k): return sorted(x)[:k]"),
    "keys as a set": (
        "assert names({'b': 1, 'a': 2}) == {'a', 'b'} and list(names({'b': 1})) == ['b']",
        "def names(d): return d.keys()",
    ),
    "an operator in place": (
        "m = Money(1)\nm += Money(2)\nassert m.v == 3",
        "class Money:\n    def __init__(self, v): self.v = v\n"
        "    def __iadd__(self, o):\n        self.v += o.v\n        return self",
    ),
    "three dots": ("assert same(...) is ...", "def same(x): return x"),
    "slow items without end": (
        "import itertools\nassert list(itertools.islice(primes(), 4)) == [2, 3, 5, 7]",
        "import time\ndef primes():\n    yield from (2, 3, 5, 7, 11)\n"
        "    while True:\n        time.sleep(0.05)\n        yield 0",
    ),
    "attributes of a library's data": (
        "r = parse('http://a/b?x=1')\nassert r.netloc == 'a' and r[2] == '/b'\nassert day('2024-01-02').tm_year == 2024",
        "import time\nfrom urllib.parse import urlparse as parse\ndef day(s): return time.strptime(s, '%Y-%m-%d')",
    ),
    "an error by the name of its base": (
        "try:\n    f()\n    assert False, 'none'\nexcept ValueError as e:\n    assert 'bad' in str(e)",
        "class Odd(ValueError): pass\ndef f(): raise Odd('bad')",
    ),
    "the text of a KeyError": ("try:\n    f()\nexcept KeyError as e:\n    assert str(e) == \"'x'\"", "def f(): return {}['x']"),
    "a class derived from list": (
        "s = Stack()\ns.push(1)\nassert s.peek() == 1 and len(s) == 1",
        "class Stack(list):\n    def push(self, x): self.append(x)\n    def peek(self): return self[-1]",
    ),
    "a time zone": (
        "import datetime as d\nassert f() == d.datetime(2020, 1, 1, tzinfo=d.timezone.utc)",
        "import datetime\ndef f(): return datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)",
    ),
    "a capital letter of a function": (
        "assert Mean([1, 2]) == 1.5\nassert Mean([4]) == 4\nassert Mean([0, 0]) == 0",
        "def Mean(x): return sum(x) / len(x)",
    ),
}
BESIDE: dict[str, tuple[str, str]] = {
    "a variable that functions change": (
        "add(1)\nassert log == [1] and len(log) == 1\nassert COUNT == 1",
        "log, COUNT = [], 0\ndef add(x):\n    global COUNT\n    COUNT += 1\n    log.append(x)",
    ),
    "an argument that the tests change": (
        "s, x = Stack(), [1]\ns.push(x)\nx.append(2)\nassert s.items == [[1, 2]]",
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)",
    ),
    "an object of a library": (
        "import array\nassert f() == array.array('i', [1, 2])",
        "import array\ndef f(): return array.array('i', [1, 2])",
    ),
    "a class of a library": (
        "import ipaddress\nassert isinstance(f('::1'), ipaddress.IPv6Address)",
        "import ipaddress\ndef f(s): return ipaddress.ip_address(s)",
    ),
    "redirected output": (
        "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): hello()\nassert b.getvalue() == 'hi\\n'",
        "def hello(): print('hi')",
    ),
    "patched input": (
        "from unittest.mock import patch\nwith patch('builtins.input', return_value='5'):\n    assert ask() == 5",
        "def ask(): return int(input())",
    ),
    "standard input": (
        "import io, sys\nsys.stdin = io.StringIO('4 5\\n')\nassert add() == 9",
        "def add():\n    a, b = map(int, input().split())\n    return a + b",
    ),
    "arguments of the program": (
        "import sys\nsys.argv = ['p', '7']\nassert main() == 7",
        "import sys\ndef main(): return int(sys.argv[1])",
    ),
    "a file of the test": (
        "open('in.txt', 'w').write('a\\nb\\n')\nassert lines('in.txt') == 2",
        "def lines(p): return len(open(p).readlines())",
    ),
    "a file of the solution": (
        "from pathlib import Path\nsave('o.txt')\nassert Path('o.txt').read_text() == 'x'",
        "def save(p):\n    with open(p, 'w') as f: f.write('x')",
    ),
    "the environment": (
        "import os\nos.environ['K'] = 'v'\nassert get() == 'v'",
        "import os\ndef get(): return os.environ.get('K')",
    ),
    "a patched clock": (
        "import time\ntime.time = lambda: 5.0\nassert now() == 5.0",
        "import time\ndef now(): return time.time()",
    ),
    "the same object": ("x = [2, 1]\nassert srt(x) is x", "def srt(x):\n    x.sort()\n    return x"),
    "a part of an argument": ("x = [[1], [2]]\nz = x[0]\nbump(x)\nassert z == [9]", "def bump(x): x[0][0] = 9"),
    "an argument that an object keeps": (
        "x = [1]\ns = Keeper(x)\ns.add(2)\nassert x == [1, 2]",
        f"class Keeper:\n{_X}    def add(self, v): self.x.append(v)",
    ),
    "a list of an object": (
        "s = S(0)\ns.y.append(3)\nassert s.total() == 3",
        "class S:\n    def __init__(self, x): self.y = []\n    def total(self): return sum(self.y)",
    ),
    "a context manager": (
        "with Res() as r:\n    assert r.v == 1",
        "class Res:\n    v = 1\n    def __enter__(self): return self\n    def __exit__(self, *a): pass",
    ),
    "an object times a number": ("assert (V(2) * 3).x == 6", f"class V:\n{_X}    def __mul__(self, k): return V(self.x * k)"),
    "an object that equals a number": (
        "assert Half(1) == 0.5",
        f"class Half:\n{_X}    def __eq__(self, o): return self.x / 2 == o",
    ),
    "objects that are equal by computing": (
        "assert Part(1, 2) == Part(2, 4)",
        "class Part:\n    def __init__(self, a, b): self.x = a, b\n"
        "    def __eq__(self, o): return self.x[0] * o.x[1] == self.x[1] * o.x[0]",
    ),
    "an item in an object": (
        "import unittest\nunittest.TestCase().assertIn(3, Box([3]))",
        f"class Box:\n{_X}    def __contains__(self, i): return i in self.x",
    ),
    "a number of an object": ("assert float(T(3)) == 3.0", f"class T:\n{_X}    def __float__(self): return float(self.x)"),
    "a copy of an object": ("import copy\na = T(1)\nb = copy.copy(a)\nb.x = 2\nassert a.x == 1", f"class T:\n{_X}"),
    "the sum of objects": (
        "assert sum([V(1), V(2)], V(0)).x == 3",
        f"class V:\n{_X}    def __add__(self, o): return V(self.x + o.x)",
    ),
    "an attribute of an error": (
        "try:\n    f()\nexcept ValueError as e:\n    assert e.args == (1, 2)",
        "def f(): raise ValueError(1, 2)",
    ),
    "an error of a module": (
        "import json\ntry:\n    f('{')\n    assert False\nexcept json.JSONDecodeError:\n    pass",
        "import json\ndef f(s): return json.loads(s)",
    ),
    "a coroutine": ("import asyncio\nassert asyncio.run(f()) == 3", "async def f(): return 3"),
    "a value sent to a generator": (
        "g = echo()\nnext(g)\nassert g.send(4) == 4",
        "def echo():\n    x = yield\n    while True: x = yield x",
    ),
    "the name of a class": ("assert Dog().__class__.__name__ == 'Dog'", "class Dog: pass"),
    "a signature": ("import inspect\nassert list(inspect.signature(f).parameters) == ['a']", "def f(a): pass"),
    "an expression": ("assert eval(expr(4)) == 24", "def expr(n): return f'{n} * 6'"),
    "a pickle": ("import pickle as p\nassert p.loads(dump([1])) == [1]", "import pickle\ndef dump(x): return pickle.dumps(x)"),
    "a list's method as a callback": (
        "out = []\nbus = Bus()\nbus.on(out.append)\nbus.emit(3)\nassert out == [3]",
        "class Bus:\n    def __init__(self): self.all = []\n    def on(self, f): self.all.append(f)\n"
        "    def emit(self, x):\n        for f in self.all: f(x)",
    ),
    "a dict's method as a function": ("d = {'a': 1}\nassert f(d.get) == 1", "def f(get): return get('a')"),
    "a stream as an argument": (
        "import io\nassert f(io.StringIO('a\\nb')) == 2\ns = io.BytesIO(b'abc')\nassert g(s) == 3",
        "def f(s): return len(s.readlines())\ndef g(s): return len(s.read())",
    ),
    "a variable of the module": ("CONFIG['a'] = 2\nassert get() == 2", "CONFIG = {'a': 1}\ndef get(): return CONFIG['a']"),
    "a list of the module": ("registry.append(2)\nassert get() == [2]", "registry = []\ndef get(): return registry"),
    "a pattern with a class": (
        "match P(1):\n    case P(x=1): pass\n    case _: assert False",
        f"class P:\n{_X}",
    ),
    "conversions": (
        "assert int(T(3)) == 3\nassert float(T(3)) == 3.0\nassert round(T(3)) == 3",
        f"class T:\n{_X}    def __int__(self): return self.x\n    def __float__(self): return 3.0\n"
        "    def __round__(self, digits=0): return self.x",
    ),
    "a date of numpy": (
        "import numpy as np\nassert f() == np.datetime64('2020-01-01')",
        "import numpy as np\ndef f(): return np.datetime64('2020-01-01')",
    ),
    "type hints": ("import typing\nassert typing.get_type_hints(f) == {'a': int}", "def f(a: 'int'): pass"),
}
RUNS_TEXT = (
    "assert eval(f(1)) == 2", "assert list(map(eval, f(1))) == [2]", "exec(f(1))\nassert x == 1",
    "assert __import__(f(1)).x == 2", "import builtins as b\nassert b.eval(f(1)) == 2",
    "assert getattr(__builtins__, 'eval')(f(1)) == 2", "from pickle import loads as read\nassert read(f(1)) == 2",
    "from pickle import *\nassert loads(f(1)) == 2", "import pickle as p\nassert p.loads(f(1)) == 2",
    "import marshal\nassert marshal.loads(f(1)) == 2", "import numpy as np\nassert np.load(f(1), allow_pickle=True) == 2",
    "import numpy as np\nassert getattr(np, 'load')(f(1)) == 2", "import yaml\nassert yaml.load(f(1), yaml.Loader) == 2",
    "import timeit\nassert timeit.timeit(f(1)) < 2", "import subprocess\nassert subprocess.check_output(f(1)) == b'2'",
    "import runpy\nassert runpy.run_path(f(1)) == 2", "import code\ncode.interact(local={})\nassert f(1) == 2",
    "import os\nassert os.system(f(1)) == 0", "import doctest\nassert doctest.run_docstring_examples(f, {}) is None",
    "import ctypes\nassert ctypes.CDLL(f(1)) == 2", "import shelve\nassert shelve.open(f(1))['a'] == 2",
    "import sympy\nassert sympy.sympify(f(1)) == 2", "import math\nassert getattr(math, f(1))(4) == 2",
    "x = f(1)\nimport math\nassert getattr(math, x)(4) == 2",
    "from importlib import import_module\nassert import_module(f(1)).x == 2", "run = eval\nassert run(f(1)) == 2",
    "def value(text):\n    return eval(text)\nassert value(f(1)) == 2", "assert globals()[f(1)]() == 2",
    "import typing\nassert typing.get_type_hints(f) == {}", "import pandas as pd\nassert pd.eval(f(1)) == 2",
)  # fmt: skip
