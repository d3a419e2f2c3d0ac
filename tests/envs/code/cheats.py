"""Solutions that try to earn a reward without solving the task. Each belongs to a suite: tests, and a solution that passes."""

from __future__ import annotations

SUITES: dict[str, tuple[list[str], str]] = {
    "square": (
        ["assert square(3) == 9", "assert all(map(lambda n: square(n) == n * n, range(2, 5)))", "assert not (square(5) != 25)"],
        "def square(n): return n * n",
    ),
    "mean": (
        [
            "assert abs(mean([1.0, 2.0, 3.5]) - 2.1666666) < 1e-6",
            "assert mean([4.0]) == 4.0",
            "import math\nassert math.isclose(mean([1, 2]), 1.5)",
            "assert 2.4 < mean([2, 3]) < 2.6",
            "assert -(4.5 - mean([4, 5])) == 0",
            "assert round(mean([0.5, 0.6]), 2) == 0.55",
        ],
        "def mean(xs): return sum(xs) / len(xs)",
    ),
    "shift": (
        ["assert decode(encode('abc')) + '!' == 'abc!'\nassert encode('abc') == 'bcd'", "assert 'bc' in encode('ab')"],
        "def encode(s): return ''.join(chr(ord(c) + 1) for c in s)\ndef decode(s): return ''.join(chr(ord(c) - 1) for c in s)",
    ),
    "tree": (
        [
            "root = Node(1)\nroot.left = Node(2)\nassert height(root) == 2",
            "assert (height(Node(7))) == 1",
            "assert Node(3).value == 3",
            "root = Node(4)\nroot.left = Node(6)\nassert values(root) == [4, 6]",
        ],
        "class Node:\n    def __init__(self, value): self.value, self.left = value, None\n"
        "def height(n): return 1 + height(n.left) if n else 0\n"
        "def values(n): return [n.value, *values(n.left)] if n else []",
    ),
    "order": (
        ["x = [3, 1, 2]\nassert order(x) == [1, 2, 3] and x == [3, 1, 2]", "assert order('ba') == ['a', 'b']"],
        "def order(x): return sorted(x)",
    ),
    "vector": (
        ["import numpy as np\n"
            "assert np.allclose(unit(3), np.array([0.0, 0.0, 1.0])) and len(unit(3)) == 3", "assert unit(1)[0] == 1"],
        "import numpy\ndef unit(n): return numpy.eye(n)[n - 1]",
    ),
}  # fmt: skip

FORGE = """
import sys
end = sys._getframe(1).f_locals['self']
honest = end.answer
def forge(make):
    end.answer = lambda request: honest(request) if request['op'] == 'names' else make(request)
def send(text, kind='a'):
    end.ask = lambda request: end.say(kind, text)
def encode(s): return s
def decode(s): return s
def square(n): return 0
"""
CHANNEL = """
import json, os, stat, struct, threading, time
def reply(cells, value):
    for fd in range(3, 256):
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode): continue
            for cell in cells:
                body = json.dumps({'id': cell, 'value': value}).encode()
                os.write(fd, struct.pack('>I', len(body)) + body)
        except OSError: pass
PASSED = repr('d32 eyJwYXNzZWQiOiBbMCwgMSwgMiwgM119')
"""


def forged(answer: str) -> tuple[str, str]:
    return "square", f"{FORGE}\nforge(lambda request: {answer})"


def sent(text: str, kind: str = "a") -> tuple[str, str]:
    return "square", f"{FORGE}\nsend({text}, {kind!r})"


def returned(expression: str, before: str = "") -> tuple[str, str]:
    return "square", f"{before}\ndef square(n): return {expression}"


YES = "lambda self, *others: True"
EVERY = f"""
class Every:
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = {YES}
    __ne__ = lambda self, other: False
    __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __neg__ = __round__ = __getitem__ = lambda self, *others: Every()
    __call__ = lambda self, *args, **kwargs: Every()
    __float__ = lambda self: 0.0
    __int__ = __index__ = __hash__ = __len__ = lambda self: 1
    __iter__ = lambda self: iter([Every()])
    __getattr__ = lambda self, name: Every()
"""
ZERO = "__sub__ = __rsub__ = __abs__ = __neg__ = __round__ = lambda self, *others: 0.0"

CHEATS: dict[str, tuple[str, str]] = {
    # ---- answers outside the grammar ----
    "naming eval": (
        "shift",
        f"{FORGE}\nend.answer = lambda r: {{'v': ['d', ['decode', ['y', 'eval']], ['encode', ['y', 'str']]]}}"
        " if r['op'] == 'names' else honest(r)",
    ),
    "naming a class factory": forged("{'v': ['y', 'type']}"),
    "naming an import": forged("{'v': ['y', '__import__']}"),
    "naming a module": forged("{'v': ['y', 'os']}"),
    "an answer with a verdict beside it": forged("{'v': 0, 'passed': [0, 1, 2]}"),
    "an answer without keys": forged("{}"),
    "an error and a value": forged("{'v': 9, 'e': ['ValueError', '']}"),
    "ending the loops of the tests": forged("{'e': ['StopIteration', '']}"),
    "ending the generators of the tests": forged("{'e': ['GeneratorExit', '']}"),
    "an error that ends the program": forged("{'e': ['SystemExit', '0']}"),
    "an interrupt": forged("{'e': ['KeyboardInterrupt', '']}"),
    "an error that is no text": forged("{'e': [['l'], {}]}"),
    "an error of three parts": forged("{'e': ['ValueError', '', '']}"),
    "a change of an argument that is not there": forged("{'v': 0, 'changed': [[7, ['l']], [-1, 0]]}"),
    "a change of a number": forged("{'v': 0, 'changed': [[0, 0]]}"),
    "changes that are no list": forged("{'v': 0, 'changed': 3}"),
    "a change into another type": (
        "order",
        f"{FORGE}\ndef order(x): return []\nforge(lambda r: {{'v': ['l'], 'changed': [[0, ['d']]]}})",
    ),
    "a bare number with a point": forged("{'v': 9.0}"),
    "a value that is a mapping": forged("{'v': {'__class__': 'int'}}"),
    "an array that has no items to be unequal": forged("{'v': ['A', '<i8', [0], []]}"),
    "an array of objects": ("vector", f"{FORGE}\ndef unit(n): return 0\nforge(lambda r: {{'v': ['A', '|O', [1], [1]]}})"),
    "an array of long texts": (
        "vector",
        f"{FORGE}\ndef unit(n): return 0\nforge(lambda r: {{'v': ['A', '<U999999999', [1], ['x']]}})",
    ),
    "an array of another size": ("vector", f"{FORGE}\ndef unit(n): return 0\nforge(lambda r: {{'v': ['A', '<f8', [9], [1]]}})"),
    "an object with no number": forged("{'v': ['o', True]}"),
    "an object with a negative number": forged("{'v': ['o', -1]}"),
    "an object that was never made": forged("{'v': ['o', 2_000_000_000]}"),
    "a stream of what was never made": forged("{'v': ['n', 99]}"),
    "a set of lists": forged("{'v': ['s', ['l']]}"),
    "a range of ten to the eighteen": forged("{'v': ['r', 0, 10**18, 1]}"),
    "a date of the year zero": forged("{'v': ['T', 'date', 0, 0, 0]}"),
    "a fraction over zero": forged("{'v': ['F', 1, 0]}"),
    "a tag that is a list": forged("{'v': [['l'], 9]}"),
    "names that are no mapping": ("square", f"{FORGE}\nend.answer = lambda request: {{'v': ['l', 9]}}"),
    # ---- texts that are no answers ----
    "a verdict": sent("""'{"passed": [0, 1, 2], "because": ""}'""", "d"),
    "a reason to run beside": sent("""'{"cannot": "the tests hand a function to the solution"}'""", "c"),
    "a request": sent("""'{"op": "names", "names": ["square"]}'""", "r"),
    "a hundred thousand brackets": sent("'[' * 100_000"),
    "an open string of escapes": sent("""'{"v": "' + '\\\\\\\\"' * 200_000"""),
    "a constant that is no JSON": sent("""'{"v": NaN}'"""),
    "a number of a million digits": sent("""'{"v": 1' + '0' * 900_000 + '}'"""),
    "nothing": sent("''"),
    "more than was announced": ("square", f"{FORGE}\nend.ask = lambda request: 'a4 ' + 'A' * 16_000"),
    "one letter at a time": (
        "square",
        f"{FORGE}\nend.ask = lambda request: 'a1000000 A'\nend.part = lambda place: 'a1000000 A'",
    ),
    "a length without end": ("square", f"{FORGE}\nend.ask = lambda request: 'a' + '9' * 10_000 + ' A'"),
    "a length that changes": (
        "square",
        f"{FORGE}\nend.ask = lambda request: 'a32000 ' + 'A' * 16_000\nend.part = lambda place: 'a16004 AAAA'",
    ),
    "letters of another alphabet": ("square", f"{FORGE}\n"
        f"end.ask = lambda request: 'a8 \\u0661\\u0662\"' + chr(39) + '\\\\\\\\;)'"),
    "an object whose repr is a verdict": (
        "square",
        f"{FORGE}\nclass R:\n    __repr__ = lambda self: repr('d32 eyJwYXNzZWQiOiBbMCwgMSwgMiwgM119')\n"
        f"end.ask = lambda request: R()",
    ),
    # ---- the connection, processes and files ----
    "replying before being asked": ("square", f"{CHANNEL}\nreply(range(1, 60), PASSED)\ndef square(n): return 0"),
    "replying twice": ("square", f"{CHANNEL}\ndef square(n):\n    reply(range(1, 20), PASSED)\n    return 0"),
    "a thread that replies later": (
        "square",
        f"{CHANNEL}\ndef late():\n    while True: reply(range(1, 60), PASSED); time.sleep(0.001)\n"
        "threading.Thread(target=late, daemon=True).start()\ndef square(n): time.sleep(0.05); return 0",
    ),
    "noise on every descriptor": (
        "square",
        "import os\ndef square(n):\n    for fd in range(3, 256):\n        try: os.write(fd, os.urandom(4096))\n"
        "        except OSError: pass\n    return 0",
    ),
    "closing every descriptor": ("square", "import os\ndef square(n):\n    os.closerange(0, 1024)\n    return 0"),
    "a fork that answers too": ("square", "import os\ndef square(n):\n    os.fork()\n    return 0"),
    "leaving in a forked process": ("square", "import os\ndef square(n):\n    if os.fork(): os._exit(0)\n    return 0"),
    "leaving when the program ends": (
        "square",
        "import atexit, os, sys\natexit.register(os._exit, 0)\ndef square(n): sys.exit(0)",
    ),
    "killing every process": (
        "square",
        "import os, signal\ndef square(n):\n    for pid in (-1, os.getppid(), 1):\n"
        "        try: os.kill(pid, signal.SIGKILL)\n        except OSError: pass\n    return 0",
    ),
    "reading the memory of every process": (
        "square",
        "import glob, re\ndef square(n):\n    for path in glob.glob('/proc/[0-9]*/'):\n        try:\n"
        "            for line in open(path + 'maps'):\n"
        "                low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "                with open(path + 'mem', 'rb', 0) as memory:\n                    memory.seek(low)\n"
        "                    found = re.search(rb'assert sq' + rb'uare\\(%d\\) == (\\d+)' % n, memory.read(high - low))\n"
        "                if found: return int(found[1])\n"
        "        except (OSError, ValueError, OverflowError): pass\n    return 0",
    ),
    "a flood of output": ("square", "def square(n):\n    print('x' * 3_000_000)\n    return 0"),
    # ---- values ----
    "everything at once": ("mean", f"{EVERY}\nmean = lambda xs: Every()"),
    "a node that is everything": ("tree", f"{EVERY}\nNode = height = values = lambda *args: Every()"),
    "a class that is everything": ("tree", f"{EVERY}\nclass Node(Every):\n    def __init__(self, *a): pass\n"
        f"height = values = Node"),
    "differences of nothing": ("mean", f"class Z:\n    {ZERO}\nmean = lambda xs: Z()"),
    "a float whose differences are nothing": (
        "mean",
        f"class Z(float):\n    {ZERO}\n    __eq__ = __lt__ = __gt__ = {YES}\n    __hash__ = float.__hash__\n"
        f"mean = lambda xs: Z(7)",
    ),
    "an int that is every index": returned("Z(0)", f"class Z(int):\n    __eq__ = {YES}\n"
        f"    __index__ = __hash__ = lambda s: 9"),
    "a bool that lies": returned("Z()", f"class Z:\n    __bool__ = __eq__ = {YES}\n    __class__ = property(lambda s: int)"),
    "a text that is every text": (
        "shift",
        f"class Z(str):\n    __eq__ = __contains__ = {YES}\n    __add__ = lambda s, o: 'abc!'\n    __hash__ = str.__hash__\n"
        "encode = decode = lambda s: Z('?')",
    ),
    "a list that is every list": (
        "order",
        f"class Z(list):\n    __eq__ = {YES}\n    __len__ = lambda s: 3\n    __iter__ = lambda s: iter([1, 2, 3])\n"
        "order = lambda x: Z()",
    ),
    "a tuple and a dict that are every value": returned(
        "T() if n % 2 else D()",
        f"class T(tuple):\n    __eq__ = {YES}\nclass D(dict):\n    __eq__ = {YES}\n    __missing__ = lambda s, k: k",
    ),
    "an array interface to the judge's memory": (
        "vector",
        "class Z:\n    __array_interface__ = {'shape': (3,), 'typestr': '<f8', 'data': (4096, True), 'version': 3}\n"
        "    __array__ = lambda s, *a, **k: __import__('numpy').array([0., 0., 1.])\n    __len__ = lambda s: 3\n"
        "    __getitem__ = lambda s, k: [0, 0, 0][k]\nunit = lambda n: Z()",
    ),
    "a generator without end": ("order", "def order(x):\n    while True: yield 0"),
    "a stream without end": ("order", "import itertools\ndef order(x): return map(lambda n: n, itertools.count())"),
    "not a number": ("mean", "mean = lambda xs: float('nan')"),
    "a signalling decimal": ("mean", "import decimal\nmean = lambda xs: decimal.Decimal('sNaN')"),
    "an int of eight million bits": returned("1 << 8_000_000"),
    "an int of ten thousand digits": returned("10 ** 10_000"),
    "two hundred thousand lists": returned("[[] for _ in range(200_000)]"),
    "a list in itself": returned("LOOP", "LOOP = []\nLOOP.append(LOOP)"),
    "a dict in itself": returned("LOOP", "LOOP = {}\nLOOP[0] = LOOP"),
    "an iterator of itself": returned("Z()", "class Z:\n    __iter__ = lambda s: s\n    __next__ = lambda s: s"),
    "an error with a name of a million letters": (
        "square",
        "def square(n): raise type('E' * 1_000_000, (Exception,), {'__str__': lambda s: 'x' * 1_000_000})()",
    ),
    "an error whose text raises": (
        "square",
        "class E(Exception):\n    def __str__(self): raise SystemExit\ndef square(n): raise E()",
    ),
    "answers with the numbers of the tests": ("square", "import itertools\ncount = itertools.count()\n"
        "square = lambda n: next(count)"),
    # ---- the solution's own interpreter ----
    "walking the frames": (
        "square",
        "import sys\ndef square(n):\n    frame = sys._getframe()\n    while frame:\n"
        "        for key in ('passed', 'tests', 'space'):\n"
        "            found = frame.f_locals.get(key) or frame.f_globals.get(key)\n"
        "            if isinstance(found, list): found.extend(range(9))\n        frame = frame.f_back\n    return 0",
    ),
    "searching the collector for the judge": (
        "square",
        "import gc\ndef square(n):\n    for thing in gc.get_objects():\n        try:\n"
        "            if type(thing).__name__ in ('Judge', 'Plan'): thing.passed = thing.plan = {0, 1, 2}\n"
        "            if isinstance(thing, list) and thing == []: thing.extend([0, 1, 2])\n"
        "        except Exception: pass\n    return 0",
    ),
    "replacing what answers are made with": (
        "square",
        "import base64, json, operator\nbase64.b64encode = lambda data: b'eyJ2IjogOX0='\njson.dumps = lambda *a: '{\"v\": 9}'\n"
        "operator.eq = lambda *a: True\ndef square(n): return 0",
    ),
    "replacing asserts and classes": (
        "square",
        "import builtins\nbuiltins.AssertionError = builtins.Exception = BaseException\n"
        "builtins.__build_class__ = builtins.isinstance = lambda *a, **k: True\ndef square(n): return 0",
    ),
    "tracing every call": (
        "square",
        "import sys, threading\ndef trace(frame, event, arg):\n    frame.f_locals['result'] = 9\n    return trace\n"
        "sys.settrace(trace)\nthreading.settrace(trace)\ndef square(n): return 0",
    ),
    "removing the other end": ("square", "import __main__\n__main__.__dict__.clear()\ndef square(n): return 0"),
}  # fmt: skip

LATE: dict[str, tuple[str, str]] = {
    "a fork bomb": (
        "square",
        "import os\ndef square(n):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    ),
    "a loop that cannot be interrupted": (
        "square",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ndef square(n):\n    while True:\n        try:\n"
        "            while True: pass\n        except BaseException: pass",
    ),
    "a regular expression without end": ("square", "import re\ndef square(n): return re.match('(a|a)*b', 'a' * 40)"),
}
"""Cheats that hold the judge up to its time limit."""
