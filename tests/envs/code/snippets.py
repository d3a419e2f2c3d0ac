"""The conformance table: ordinary Python that an interpreter must run exactly as CPython does.

`### name` begins a snippet, `# %%` its next cell; the cells of a snippet share one namespace. What each cell prints, the value
of its last expression and the last line of its error are compared with CPython's own `exec` in one module namespace.
"""

# ruff: noqa: E501, W291, W293

from __future__ import annotations

TABLE = r'''
### print and arithmetic
print(1 + 2 * 3, 7 // 2, -7 // 2, 7 % 3, -7 % 3, 2 ** 10, 7 / 2)
### value of the last expression
x = 20
x + 22
### a last expression that is None shows nothing
print("shown")
None
### a string value is shown as Python writes it
"it's" + ' "quoted"'
### only the last expression is shown
1
2
3
### semicolons
a = 1; b = 2; print(a + b); a * b
### names stay from cell to cell
x = [1, 2, 3]
# %%
x.append(4)
# %%
print(x)
### functions stay from cell to cell
def double(n):
    return 2 * n
# %%
def quadruple(n):
    return double(double(n))
# %%
quadruple(5)
### a function sees a later definition
def first():
    return second()
# %%
def second():
    return "found"
# %%
first()
### a function sees a changed global
rate = 2
def convert(n):
    return n * rate
print(convert(10))
# %%
rate = 3
convert(10)
### recursion
def factorial(n):
    return 1 if n == 0 else n * factorial(n - 1)
factorial(20)
### mutual recursion
def is_even(n):
    return True if n == 0 else is_odd(n - 1)
def is_odd(n):
    return False if n == 0 else is_even(n - 1)
print(is_even(10), is_odd(7), is_even(7))
### recursion in a later cell
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
# %%
[fib(n) for n in range(12)]
### deep recursion raises RecursionError
def forever(n):
    return forever(n + 1)
try:
    forever(0)
except RecursionError as error:
    print(type(error).__name__)
### recursive lambda
gcd = lambda a, b: a if b == 0 else gcd(b, a % b)
gcd(1071, 462)
### an import stays
import math
# %%
def area(radius):
    return math.pi * radius ** 2
round(area(2), 6)
### an import inside a function
def root(n):
    import math
    return math.isqrt(n)
root(99)
### a module imported at the top is seen in nested functions
import json
def outer():
    def inner(value):
        return json.dumps(value)
    return inner({"a": [1, None, True]})
outer()
### from import with alias
from collections import OrderedDict as Ordered, defaultdict
d = defaultdict(list)
d["a"].append(1)
print(dict(d), list(Ordered(b=1, a=2)))
### star import
from math import *
print(floor(2.7), ceil(2.1))
### import of a submodule
import os.path
os.path.join("a", "b", "c.txt")
### comprehension over a top-level name
limit = 5
[n * limit for n in range(limit)]
### nested comprehension over top-level names
rows, columns = 3, 2
[[r * columns + c for c in range(columns)] for r in range(rows)]
### comprehension that calls a top-level function
def square(n):
    return n * n
{n: square(n) for n in range(5) if square(n) % 2 == 0}
### set comprehension
sorted({len(word) for word in ["a", "bb", "cc", "ddd"]})
### generator expression over a top-level name
values = [3, 1, 2]
sum(v * v for v in values if v in values)
### comprehension in a function over globals
factors = [2, 3]
def multiples(n):
    return [n * f for f in factors]
multiples(7)
### comprehension variables do not leak
letters = [c for c in "abc"]
print("c" in globals())
### lambda in a comprehension
adders = [lambda n, k=k: n + k for k in range(3)]
[add(10) for add in adders]
### late binding in a comprehension
adders = [lambda n: n + k for k in range(3)]
[add(10) for add in adders]
### class with methods
class Counter:
    total = 0
    def __init__(self, start=0):
        self.count = start
    def step(self, by=1):
        self.count += by
        Counter.total += by
        return self
c = Counter(5).step().step(3)
print(c.count, Counter.total)
### class from an earlier cell
class Animal:
    def __init__(self, name):
        self.name = name
    def speak(self):
        return f"{self.name} makes a sound"
# %%
class Dog(Animal):
    def speak(self):
        return super().speak() + ": woof"
# %%
Dog("Rex").speak()
### repr of an own class
class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __repr__(self):
        return f"Point({self.x}, {self.y})"
Point(1, 2)
### class and static methods and properties
class Circle:
    def __init__(self, radius):
        self._radius = radius
    @property
    def area(self):
        return 3 * self._radius ** 2
    @classmethod
    def unit(cls):
        return cls(1)
    @staticmethod
    def name():
        return "circle"
print(Circle.unit().area, Circle.name())
### property setter
class Box:
    def __init__(self):
        self._size = 0
    @property
    def size(self):
        return self._size
    @size.setter
    def size(self, value):
        if value < 0:
            raise ValueError("negative")
        self._size = value
box = Box()
box.size = 3
try:
    box.size = -1
except ValueError as error:
    print(box.size, error)
### operators of an own class
class Vector:
    def __init__(self, *parts):
        self.parts = parts
    def __add__(self, other):
        return Vector(*(a + b for a, b in zip(self.parts, other.parts)))
    def __mul__(self, k):
        return Vector(*(a * k for a in self.parts))
    __rmul__ = __mul__
    def __eq__(self, other):
        return self.parts == other.parts
    def __len__(self):
        return len(self.parts)
    def __getitem__(self, i):
        return self.parts[i]
v = 2 * (Vector(1, 2) + Vector(3, 4))
print(v.parts, len(v), v[1], v == Vector(8, 12), list(v))
### multiple inheritance and its order
class A:
    def who(self):
        return "A"
class B(A):
    def who(self):
        return "B" + super().who()
class C(A):
    def who(self):
        return "C" + super().who()
class D(B, C):
    def who(self):
        return "D" + super().who()
print(D().who(), [k.__name__ for k in D.__mro__])
### abstract base class
from abc import ABC, abstractmethod
class Shape(ABC):
    @abstractmethod
    def area(self): ...
try:
    Shape()
except TypeError as error:
    print("abstract" in str(error))
### metaclass
class Meta(type):
    def __new__(cls, name, bases, body):
        body["tag"] = name.lower()
        return super().__new__(cls, name, bases, body)
class Thing(metaclass=Meta):
    pass
Thing.tag
### slots
class Small:
    __slots__ = ("a",)
s = Small()
s.a = 1
try:
    s.b = 2
except AttributeError:
    print("no b")
### descriptor and set_name
class Named:
    def __set_name__(self, owner, name):
        self.name = name
    def __get__(self, instance, owner):
        return f"{owner.__name__}.{self.name}"
class Holder:
    field = Named()
Holder().field
### init_subclass
class Base:
    kinds = []
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Base.kinds.append(cls.__name__)
class One(Base): pass
class Two(Base): pass
Base.kinds
### class body sees globals
base = 10
class Config:
    value = base + 1
    values = [base * n for n in range(3)]
print(Config.value, Config.values)
### callable object and getattr
class Anything:
    def __call__(self, n):
        return n + 1
    def __getattr__(self, name):
        return name.upper()
a = Anything()
print(a(1), a.hello)
### generator
def count_up(n):
    for i in range(n):
        yield i
list(count_up(4))
### generator with send
def averager():
    total, count, average = 0, 0, None
    while True:
        value = yield average
        total += value
        count += 1
        average = total / count
g = averager()
next(g)
print(g.send(10), g.send(20), g.send(60))
### yield from and return value
def inner():
    yield 1
    return "done"
def outer():
    result = yield from inner()
    yield result
list(outer())
### generator close runs finally
def guarded():
    try:
        yield 1
        yield 2
    finally:
        print("closed")
g = guarded()
print(next(g))
g.close()
### infinite generator with islice
from itertools import count, islice
def primes():
    found = []
    for n in count(2):
        if all(n % p for p in found):
            found.append(n)
            yield n
list(islice(primes(), 8))
### a generator lives from cell to cell
numbers = iter(range(5))
print(next(numbers))
# %%
print(next(numbers))
# %%
list(numbers)
### iterator protocol
class Countdown:
    def __init__(self, n):
        self.n = n
    def __iter__(self):
        return self
    def __next__(self):
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n
list(Countdown(3))
### async with asyncio.run
import asyncio
async def add(a, b):
    await asyncio.sleep(0)
    return a + b
asyncio.run(add(2, 3))
### asyncio gather
import asyncio
async def work(n):
    await asyncio.sleep(0.001 * (3 - n))
    return n * n
async def main():
    return await asyncio.gather(*(work(n) for n in range(3)))
print(asyncio.run(main()))
### async generators and comprehensions
import asyncio
async def ticks(n):
    for i in range(n):
        yield i
        await asyncio.sleep(0)
async def main():
    return [t * 2 async for t in ticks(4) if t]
asyncio.run(main())
### async context manager
import asyncio
class Door:
    async def __aenter__(self):
        print("open")
        return self
    async def __aexit__(self, *exc):
        print("shut")
async def main():
    async with Door():
        print("inside")
asyncio.run(main())
### asyncio task cancellation and queue
import asyncio
async def main():
    queue = asyncio.Queue()
    async def producer():
        for n in range(3):
            await queue.put(n)
    task = asyncio.create_task(producer())
    got = [await queue.get() for _ in range(3)]
    await task
    sleeper = asyncio.create_task(asyncio.sleep(100))
    await asyncio.sleep(0)
    sleeper.cancel()
    try:
        await sleeper
    except asyncio.CancelledError:
        got.append("cancelled")
    return got
asyncio.run(main())
### two asyncio runs in two cells
import asyncio
async def one():
    return 1
print(asyncio.run(one()))
# %%
print(asyncio.run(one()) + 1)
### dataclass
from dataclasses import dataclass, field, asdict, replace
@dataclass(order=True)
class Item:
    price: float
    name: str = field(compare=False, default="?")
    tags: list = field(default_factory=list)
a, b = Item(2.5, "pen"), Item(1.0, "nib", ["x"])
print(sorted([a, b])[0], asdict(b), replace(a, price=3))
### frozen dataclass
from dataclasses import dataclass, FrozenInstanceError
@dataclass(frozen=True, slots=True)
class P:
    x: int
    y: int = 0
p = P(1)
try:
    p.x = 2
except FrozenInstanceError as error:
    print(type(error).__name__, hash(p) == hash(P(1)), {p: "ok"}[P(1, 0)])
### dataclass inheritance and post_init
from dataclasses import dataclass
@dataclass
class A:
    x: int
    def __post_init__(self):
        self.double = 2 * self.x
@dataclass
class B(A):
    y: str = "y"
b = B(4)
print(b, b.double)
### namedtuple
from collections import namedtuple
Point = namedtuple("Point", "x y", defaults=[0])
p = Point(3)
print(p, p._replace(y=9), p.x + p.y, *p)
### typing named tuple and typed dict
from typing import NamedTuple, TypedDict
class Row(NamedTuple):
    name: str
    size: int = 1
class Movie(TypedDict):
    title: str
print(Row("a"), Movie(title="b"))
### enum
from enum import Enum, Flag, IntEnum, auto
class Color(Enum):
    RED = 1
    GREEN = auto()
class Bits(Flag):
    A = 1
    B = 2
class Level(IntEnum):
    LOW = 1
print(Color.RED, Color(2).name, list(Color), Bits.A | Bits.B, Level.LOW + 1)
### closure
def make_counter():
    count = 0
    def step():
        nonlocal count
        count += 1
        return count
    return step
step = make_counter()
step(), step(), step()
### closure over a parameter
def power(n):
    return lambda x: x ** n
cube = power(3)
cube(4)
### global statement
total = 0
def add(n):
    global total
    total += n
for n in range(5):
    add(n)
total
### global statement that creates a name
def create():
    global fresh
    fresh = "made"
create()
# %%
fresh
### local assignment hides the global
x = "global"
def f():
    x = "local"
    return x
print(f(), x)
### unbound local
x = 1
def f():
    print(x)
    x = 2
try:
    f()
except UnboundLocalError as error:
    print(type(error).__name__)
### globals and vars
alpha = 1
print("alpha" in globals(), globals()["alpha"], "alpha" in vars(), "alpha" in dir())
### exec and eval inside a cell
exec("made = 6 * 7")
print(made, eval("made + 1"))
### locals of a function
def f(a, b=2):
    c = a + b
    return sorted(locals().items())
f(1)
### name of the module
__name__
### decorator
import functools
def traced(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        result = fn(*args, **kwargs)
        print(f"{fn.__name__}{args} -> {result}")
        return result
    return wrapper
@traced
def add(a, b):
    return a + b
add(2, 3)
### decorator with arguments
def repeat(n):
    def decorate(fn):
        return lambda *args: [fn(*args) for _ in range(n)]
    return decorate
@repeat(3)
def hello(name):
    return f"hi {name}"
hello("you")
### class decorator and stacked decorators
def tag(label):
    def apply(thing):
        thing.tags = getattr(thing, "tags", ()) + (label,)
        return thing
    return apply
@tag("outer")
@tag("inner")
class T: pass
T.tags
### cached recursion
from functools import cache
@cache
def ways(n):
    return 1 if n < 2 else ways(n - 1) + ways(n - 2)
print(ways(80), ways.cache_info().hits)
### f-strings
name, n, pi = "Ada", 42, 3.14159
print(f"{name!r:>8}|{n:05d}|{pi:.2f}|{n:#x}|{n:,}|{n=}|{'nested ' + name}|{{}}")
### nested f-string format
width, value = 10, 3.5
f"{value:{width}.{2}f}"
### f-string with expressions
items = ["a", "b"]
f"{', '.join(items)} {len(items) * 2} {[i for i in items][-1]} {items[0] if items else 'none'}"
### str.format and percent
print("{0}-{1}-{0} {x[0]} {y.real}".format(1, 2, x=[7], y=3), "%s %05.1f %d%% %r" % ("a", 2.345, 9, "q"))
### multi-line strings
text = """first
  second "quoted"
third\tend"""
print(text)
len(text.splitlines())
### multi-line string with a block inside
code = """
def inner():
    return 'from text'
"""
exec(code)
inner()
### raw strings and escapes
print(r"a\nb", "tab\tend", "\x41\u00e9\N{BULLET}", len("\\"))
### line continuation
total = 1 + \
    2 + \
    3
value = (total
         * 2)
print(total, value)
### string methods
s = "  Hello, World  "
print(s.strip().lower(), s.split(","), "-".join("abc"), s.strip().swapcase(), "a-b-c".rpartition("-"), "x".center(5, "*"))
### string tests and translate
print("abc".isalpha(), "12".isdigit(), "hello".translate(str.maketrans("el", "ip")), "aXbX".replace("X", "", 1), "ab" * 3)
### unicode
s = "naïve café 日本 🙂"
print(s, len(s), s.encode()[:8], s[::-1], s.upper())
### unicode names
größe = 3
π = 3.14
print(größe * π)
### slices
x = list(range(10))
print(x[2:5], x[::-1], x[::3], x[-3:], x[5:2:-1], x[100:], x[:-8])
### slice assignment and deletion
x = list(range(8))
x[2:4] = ["a", "b", "c"]
del x[::3]
x[1:1] = [99]
x
### slice objects
class S:
    def __getitem__(self, key):
        return key
print(S()[1:2], S()[1:2, ::3], S()[...])
### star assignment
first, *middle, last = range(6)
(a, b), c = (1, 2), 3
print(first, middle, last, a + b + c)
### swap and chained assignment
a, b = 1, 2
a, b = b, a
x = y = []
x.append(1)
print(a, b, y, x is y)
### star arguments
def f(a, b=2, *args, c, d=4, **kwargs):
    return a, b, args, c, d, kwargs
print(f(1, c=3), f(1, 2, 3, 4, c=5, e=6), f(*[1, 2], **{"c": 3}))
### positional-only and keyword-only
def f(a, /, b, *, c):
    return a + b + c
print(f(1, 2, c=3))
try:
    f(a=1, b=2, c=3)
except TypeError as error:
    print("positional-only" in str(error))
### unpacking in literals
a, b = [1, 2], {"x": 1}
print([*a, 3, *a], {**b, "y": 2}, {*a, 9} == {1, 2, 9}, (*a,))
### default arguments are shared
def f(x, seen=[]):
    seen.append(x)
    return seen
f(1)
f(2)
### walrus
data = [1, 5, 10]
if (n := len(data)) > 2:
    print(n)
print([y for x in data if (y := x * 2) > 5], y)
### walrus in a while loop
stack = [3, 2, 1]
while (top := stack.pop()) != 3:
    print(top)
### conditional expressions and chains
x = 5
print("big" if x > 3 else "small", 1 < x <= 5 != 6, not x, x and 0 or "or", None is None)
### for else and while else
for n in range(3):
    if n == 5:
        break
else:
    print("no break")
while n:
    n -= 1
    if n == 0:
        break
else:
    print("never")
print(n)
### nested loops with continue
for i in range(3):
    for j in range(3):
        if j == i:
            continue
        print(i, j, end=";")
print()
### a loop as the last statement shows nothing
for i in range(2):
    i
### a conditional block then an expression
if True:
    flag = "set"
flag
### enumerate zip and reversed
for i, (a, b) in enumerate(zip("abc", [1, 2, 3]), start=1):
    print(i, a, b, end=" ")
print(list(reversed([1, 2, 3])), list(zip([1, 2], "a")))
### zip strict
try:
    list(zip([1, 2], [1], strict=True))
except ValueError as error:
    print(error)
### sorted with key
words = ["pear", "fig", "apple"]
print(sorted(words, key=len), sorted(words, key=lambda w: (-len(w), w)), max(words, key=len), min(words))
### any all sum map filter
print(any(n > 2 for n in [1, 3]), all([]), sum([[1], [2]], []), list(map(str, range(3))), list(filter(None, [0, 1, "", "a"])))
### try except else finally
def f(n):
    try:
        result = 10 // n
    except ZeroDivisionError as error:
        return f"error: {error}"
    else:
        return result
    finally:
        print("finally", n)
print(f(0), f(3))
### raise from
try:
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("wrapped") from error
except ValueError as error:
    print(error, repr(error.__cause__))
### own exception
class Broken(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code
try:
    raise Broken(7)
except Broken as error:
    print(error, error.code, error.args)
### exception groups
try:
    raise ExceptionGroup("many", [ValueError("a"), TypeError("b"), ValueError("c")])
except* ValueError as group:
    print([str(e) for e in group.exceptions])
except* TypeError as group:
    print("types", len(group.exceptions))
### exception notes and traceback module
import traceback
try:
    1 / 0
except ZeroDivisionError as error:
    error.add_note("while testing")
    print(traceback.format_exception_only(error))
### the exception name is deleted
try:
    raise ValueError
except ValueError as error:
    pass
"error" in globals()
### an uncaught error keeps what was done before
x = 1
print("before")
x = 2
1 / 0
x = 3
# %%
x
### an uncaught error in a function
def risky():
    return [1, 2][5]
risky()
# %%
print("still here")
### name error
undefined_name
### attribute error
(5).nothing
### key error
{"a": 1}["b"]
### type error
"a" + 1
### value error
int("twelve")
### assertion error with message
assert 1 == 2, "not equal"
### import error
import no_such_module_here
### syntax error runs nothing
print("never")
def broken(:
    pass
# %%
print("next cell runs")
### indentation error
def f():
return 1
### unfinished string
print("abc)
### return outside a function
return 5
### await outside a function
await something
### stop iteration
next(iter([]))
### pattern matching on values
def describe(value):
    match value:
        case 0:
            return "zero"
        case int(n) if n < 0:
            return f"negative {n}"
        case [x, y, *rest]:
            return f"list {x} {y} {rest}"
        case {"kind": "point", "at": (x, y)}:
            return f"point {x} {y}"
        case "a" | "b":
            return "letter"
        case _:
            return "other"
print([describe(v) for v in (0, -3, [1, 2, 3, 4], {"kind": "point", "at": (5, 6)}, "b", 9.5)])
### pattern matching on classes
from dataclasses import dataclass
@dataclass
class Num:
    value: int
@dataclass
class Add:
    left: object
    right: object
def evaluate(tree):
    match tree:
        case Num(value):
            return value
        case Add(left=l, right=r):
            return evaluate(l) + evaluate(r)
evaluate(Add(Num(1), Add(Num(2), Num(3))))
### context manager class
class Managed:
    def __enter__(self):
        print("enter")
        return self
    def __exit__(self, kind, value, trace):
        print("exit", kind.__name__ if kind else None)
        return kind is ValueError
with Managed():
    raise ValueError("swallowed")
print("after")
### contextlib
from contextlib import contextmanager, suppress, redirect_stdout, ExitStack
import io
@contextmanager
def tag(name):
    print(f"<{name}>")
    yield name.upper()
    print(f"</{name}>")
with tag("b") as upper, suppress(KeyError):
    print(upper)
    {}["x"]
buffer = io.StringIO()
with redirect_stdout(buffer):
    print("caught")
print(repr(buffer.getvalue()))
with ExitStack() as stack:
    stack.enter_context(tag("i"))
    print("in")
### big integers
print(2 ** 200, len(str(3 ** 500)), (10 ** 30) // 7, pow(3, 1000, 10 ** 9 + 7), (-5) ** 3)
### integer bases and bits
print(bin(37), oct(64), hex(255), int("ff", 16), int("0b101", 0), 0b1010 ^ 0b0110, 1 << 40, (255).bit_length(), ~5, 1_000_000)
### floats
print(0.1 + 0.2, 1e300 * 1e10, -0.0, float("nan") != float("nan"), round(2.5), round(2.675, 2), 7.0.is_integer(), 1 / 3)
### float formatting and conversion
print(f"{1e-7} {123456789.123456789} {1e16} {5e-324}", (0.5).as_integer_ratio(), (255.5).hex(), divmod(-7, 3), abs(-3.5))
### complex numbers
z = 3 + 4j
print(abs(z), z.conjugate(), z * 1j, z ** 2, complex(1, -1), z.real)
### bytes
b = b"abc\x00\xff"
print(b, b[0], b[1:3], b.hex(), bytes([65, 66]), b"a,b".split(b","), int.from_bytes(b"\x01\x00", "big"), (258).to_bytes(2, "little"))
### bytearray and memoryview
data = bytearray(b"hello")
view = memoryview(data)
view[0] = ord("J")
print(data, bytes(view[1:3]))
### encode and decode
print("é".encode("utf-8"), "é".encode("latin-1"), b"\xc3\xa9".decode(), b"\xff".decode("utf-8", "replace"), "a".encode("utf-16-le"))
### sets
a, b = {1, 2, 3}, {3, 4}
print(a | b == {1, 2, 3, 4}, a & b, a - b, a ^ b, {1} < a, a.isdisjoint({9}), frozenset([1]) in {frozenset([1])})
### dictionaries
d = {"a": 1, "b": 2}
d |= {"c": 3}
d.setdefault("d", []).append(4)
print(d, d.get("z", 0), d.pop("a"), list(d.items()), {v: k for k, v in [("x", 1)]}, dict.fromkeys("ab", 0))
### dictionary order and merge
d = {}
for key in "banana":
    d[key] = d.get(key, 0) + 1
print(d, sorted(d.items(), key=lambda kv: -kv[1]), list(d)[::-1])
### lists
x = [3, 1, 2]
x.sort(reverse=True)
x.insert(1, 9)
x.extend([4] * 2)
print(x, x.index(9), x.count(4), x.pop(), x[-1], [0] * 3 + [1], [[]] * 2)
### shallow and deep copies
import copy
a = [[1], [2]]
b, c = copy.copy(a), copy.deepcopy(a)
a[0].append(9)
print(b, c)
### tuples compare and hash
print((1, 2) < (1, 3), (1,) + (2,), {(1, 2): "t"}[1, 2], sorted([(2, "a"), (1, "b")]), tuple("ab"))
### range objects
r = range(10, 0, -3)
print(list(r), len(r), 7 in r, r[1], range(3) == range(0, 3, 1))
### json
import json
text = json.dumps({"b": [1, 2.5, None], "a": "ü", "n": {"x": True}}, sort_keys=True, indent=1, ensure_ascii=False)
print(text)
json.loads(text)["n"]
### re
import re
text = "Tom: 12, Ann: 7, Bob: 103"
print(re.findall(r"(\w+): (\d+)", text), re.sub(r"\d+", lambda m: str(int(m[0]) * 2), text), re.split(r",\s*", text)[1])
m = re.search(r"(?P<name>B\w+)", text)
m.group("name"), m.span()
### math
import math
print(math.gcd(48, 36), math.comb(10, 3), math.factorial(12), math.hypot(3, 4), math.isclose(0.1 + 0.2, 0.3), math.floor(-2.5), math.log2(1024), math.prod([2, 3, 4]))
### itertools
import itertools as it
print(list(it.permutations("abc", 2))[:3], list(it.combinations(range(4), 2)), list(it.product("ab", repeat=2)), list(it.accumulate([1, 2, 3])))
print([(k, len(list(g))) for k, g in it.groupby("aabbbc")], list(it.chain([1], [2])), list(it.pairwise([1, 2, 3])), list(it.takewhile(lambda n: n < 3, it.count())))
### collections
from collections import Counter, deque, ChainMap, OrderedDict
c = Counter("mississippi")
d = deque([1, 2, 3], maxlen=3)
d.append(4)
d.rotate(1)
print(c.most_common(2), c["z"], d, ChainMap({"a": 1}, {"a": 2, "b": 3})["b"], (c - Counter("miss")).total())
### functools
from functools import reduce, partial, lru_cache, singledispatch, total_ordering
@singledispatch
def show(x):
    return "thing"
@show.register
def _(x: int):
    return "int"
@total_ordering
class V:
    def __init__(self, n): self.n = n
    def __eq__(self, o): return self.n == o.n
    def __lt__(self, o): return self.n < o.n
print(reduce(lambda a, b: a * b, [1, 2, 3, 4]), partial(pow, 2)(5), show(1), show("a"), V(2) >= V(1))
### operator and bisect and heapq
import operator, bisect, heapq
h = [5, 1, 4]
heapq.heapify(h)
print(operator.itemgetter(1)([7, 8]), bisect.bisect([1, 3, 5], 3), heapq.heappop(h), heapq.nlargest(2, [3, 9, 4]), list(map(operator.mul, [1, 2], [3, 4])))
### datetime
from datetime import datetime, date, timedelta, timezone
d = date(2024, 2, 28) + timedelta(days=2)
t = datetime(2024, 1, 31, 12, 30, tzinfo=timezone.utc)
print(d, d.strftime("%A %d %B"), (date(2024, 12, 25) - d).days, t.isoformat(), datetime.strptime("2024-05-06", "%Y-%m-%d").weekday())
### calendar
import calendar
print(calendar.isleap(2000), calendar.monthrange(2023, 2), calendar.month_name[5])
### random with a seed
import random
random.seed(7)
print(random.random(), random.randint(1, 100), random.choice("abc"), random.sample(range(20), 4), random.gauss(0, 1))
### random generator of one's own
import random
rng = random.Random(3)
x = list(range(6))
rng.shuffle(x)
# %%
print(x, rng.randrange(100))
### statistics
import statistics as st
print(st.mean([1, 2, 3, 4]), st.median([3, 1, 2]), st.pstdev([2, 4, 4, 4, 5, 5, 7, 9]), st.mode("aab"), st.quantiles([1, 2, 3, 4, 5]))
### fractions
from fractions import Fraction as F
print(F(1, 3) + F(1, 6), F("0.125"), F(3, 4) ** 2, F(7, 3).limit_denominator(2), float(F(1, 8)))
sum(F(1, n) for n in range(1, 6))
### decimal
from decimal import Decimal, getcontext, ROUND_HALF_UP
getcontext().prec = 30
print(Decimal(1) / Decimal(7), Decimal("0.1") + Decimal("0.2"), Decimal("2.675").quantize(Decimal("0.01"), ROUND_HALF_UP))
### hashlib and base64 and zlib
import hashlib, base64, zlib
print(hashlib.sha256(b"abc").hexdigest()[:16], base64.b64encode(b"hello"), zlib.crc32(b"x"), zlib.decompress(zlib.compress(b"same")))
### string module and textwrap
import string, textwrap
print(string.ascii_lowercase[:5], string.Template("$a and ${b}").substitute(a=1, b=2))
print(textwrap.fill("the quick brown fox jumps", width=10))
print(textwrap.dedent("""
    indented
      more
""").strip())
### pprint
from pprint import pprint
pprint({"numbers": list(range(30)), "name": "x" * 40, "nested": {"a": 1}})
### io and csv
import csv, io
out = io.StringIO()
writer = csv.writer(out)
writer.writerow(["a", 'with "quotes"', 3])
print(out.getvalue().strip())
list(csv.DictReader(io.StringIO("x,y\n1,2\n")))
### files in the working directory
with open("notes.txt", "w") as file:
    file.write("one\ntwo\n")
# %%
with open("notes.txt") as file:
    print([line.strip() for line in file])
# %%
import os
os.remove("notes.txt")
os.path.exists("notes.txt")
### tempfile and pathlib
import tempfile
from pathlib import Path
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "a.txt"
    path.write_text("hello")
    print(path.read_text(), path.suffix, path.stem, [p.name for p in Path(folder).iterdir()])
Path(folder).exists()
### pickle of an own class
import pickle
class Saved:
    def __init__(self, n):
        self.n = n
# %%
pickle.loads(pickle.dumps(Saved(5))).n
### struct and array
import struct, array
print(struct.pack(">IH", 1, 2), struct.unpack("<h", b"\xff\xff"), array.array("i", [1, 2]).tolist(), struct.calcsize(">Qb"))
### inspect and types
import types, inspect
def f(a, b: int = 2, *args, **kw) -> str: ...
print(inspect.signature(f), isinstance(f, types.FunctionType), f.__annotations__, types.SimpleNamespace(a=1))
### source of a function is known
import inspect
def documented(n):
    """Says what it does."""
    return n
print(documented.__doc__, inspect.getsource(documented).splitlines()[0])
### type hints and generics
from typing import Generic, TypeVar, Optional, get_type_hints
T = TypeVar("T")
class Stack(Generic[T]):
    def __init__(self) -> None:
        self.items: list[T] = []
    def push(self, item: T) -> None:
        self.items.append(item)
s = Stack[int]()
s.push(1)
def f(x: Optional[int] = None) -> "Stack": ...
print(s.items, get_type_hints(f)["x"], list[int] == list[int])
### future annotations
from __future__ import annotations
def f(x: undefined_type) -> another:
    return x
print(f(3), f.__annotations__["x"])
### annotations at the top
count: int = 3
name: str
print(count, __annotations__)
### threads
import threading
results = []
def work(n):
    results.append(n * n)
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for t in threads: t.start()
for t in threads: t.join()
sorted(results)
### thread pool
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    print(list(pool.map(lambda n: n + 1, range(4))))
### contextvars
import contextvars
var = contextvars.ContextVar("var", default=0)
def f():
    var.set(5)
    return var.get()
print(contextvars.copy_context().run(f), var.get())
### weakref and gc
import weakref, gc
class O: pass
o = O()
r = weakref.ref(o)
print(r() is o)
del o
gc.collect()
r() is None
### del of a name
x = 1
del x
try:
    x
except NameError as error:
    print(error)
### underscore as a name
_ = 5
a, _, b = 1, 2, 3
print(a, b, _)
### print options
print(1, 2, sep="-", end="!\n")
print(*[1, 2, 3], sep=", ")
print()
print("no newline", end="")
### sys.stdout.write
import sys
sys.stdout.write("written\n")
print(sys.version_info >= (3, 11))
### print with flush and file
import io
out = io.StringIO()
print("hidden", file=out, flush=True)
print(out.getvalue().strip() + " shown", flush=True)
### many prints
for n in range(200):
    print(n, end=" " if n % 20 != 19 else "\n")
### long lines
print("x" * 1500)
### help text and doc
def f():
    """One line."""
print(f.__doc__, len.__name__, type(f).__name__)
### isinstance and type
print(type(1) is int, isinstance(True, int), issubclass(bool, int), type("T", (), {"a": 1}).a, callable(print))
### object identity and hash
a = (1, "x")
print(hash(a) == hash((1, "x")), id(a) == id(a), a != (2,))
### getattr setattr hasattr
class N: pass
n = N()
setattr(n, "a", 1)
print(hasattr(n, "a"), getattr(n, "b", "none"), vars(n))
### sorting algorithm
def quicksort(xs):
    if len(xs) <= 1:
        return xs
    pivot, *rest = xs
    return quicksort([x for x in rest if x < pivot]) + [pivot] + quicksort([x for x in rest if x >= pivot])
quicksort([3, 6, 1, 8, 2, 9, 2])
### sieve
def sieve(n):
    flags = [True] * (n + 1)
    for i in range(2, int(n ** 0.5) + 1):
        if flags[i]:
            flags[i * i::i] = [False] * len(flags[i * i::i])
    return [i for i in range(2, n + 1) if flags[i]]
print(sieve(50), len(sieve(10000)))
### dynamic programming over cells
memo = {}
def change(amount, coins):
    if amount == 0:
        return 1
    if amount < 0 or not coins:
        return 0
    key = amount, len(coins)
    if key not in memo:
        memo[key] = change(amount - coins[0], coins) + change(amount, coins[1:])
    return memo[key]
# %%
print(change(100, (50, 25, 10, 5, 1)))
# %%
len(memo) > 0
### breadth-first search
from collections import deque
graph = {"a": ["b", "c"], "b": ["d"], "c": ["d", "e"], "d": ["f"], "e": ["f"], "f": []}
def shortest(start, goal):
    queue, seen = deque([[start]]), {start}
    while queue:
        path = queue.popleft()
        if path[-1] == goal:
            return path
        for node in graph[path[-1]]:
            if node not in seen:
                seen.add(node)
                queue.append(path + [node])
shortest("a", "f")
### matrix product
A, B = [[1, 2], [3, 4]], [[5, 6], [7, 8]]
[[sum(a * b for a, b in zip(row, column)) for column in zip(*B)] for row in A]
### towers of hanoi
moves = []
def hanoi(n, a, b, c):
    if n:
        hanoi(n - 1, a, c, b)
        moves.append((a, c))
        hanoi(n - 1, b, a, c)
hanoi(4, "A", "B", "C")
print(len(moves), moves[:3])
### permutations by recursion with yield
def perms(xs):
    if not xs:
        yield []
    for i, x in enumerate(xs):
        for rest in perms(xs[:i] + xs[i + 1:]):
            yield [x, *rest]
print(list(perms([1, 2, 3])))
### binary search tree over cells
class Node:
    def __init__(self, key):
        self.key, self.left, self.right = key, None, None
# %%
def insert(node, key):
    if node is None:
        return Node(key)
    if key < node.key:
        node.left = insert(node.left, key)
    else:
        node.right = insert(node.right, key)
    return node
def walk(node):
    if node:
        yield from walk(node.left)
        yield node.key
        yield from walk(node.right)
# %%
root = None
for key in [5, 2, 8, 1, 9, 3]:
    root = insert(root, key)
list(walk(root))
### an empty cell
# %%
print("after an empty cell")
### only a comment
# nothing to do here
# %%
1 + 1
### trailing white space and blank lines
print("a")   

   
x = 1   
### tabs for indentation
if True:
	print("tab")
### a string as the last expression of several lines
(
    "one "
    "two"
)
### a dictionary over several lines as value
{
    "a": 1,
    "b": [
        2,
        3,
    ],
}
### ellipsis and not implemented
def later(): ...
print(later(), ..., NotImplemented)
### a last expression that prints and has a value
def noisy():
    print("noise")
    return 7
noisy()
### value whose repr raises
class Bad:
    def __repr__(self):
        raise ValueError("no repr")
bad = Bad()
print("made")
### warnings do not stop a cell
import warnings
warnings.simplefilter("ignore")
warnings.warn("quiet")
print("went on")
### numpy arrays
import numpy as np
a = np.arange(6).reshape(2, 3)
print(a, a.sum(axis=0), a.T.shape, (a * 2)[1, 2], np.dot(a, a.T).tolist())
### numpy over cells
import numpy as np
m = np.array([[2.0, 1.0], [1.0, 3.0]])
# %%
print(np.linalg.solve(m, np.array([3.0, 5.0])).round(6).tolist(), np.linalg.det(m).round(6))
# %%
np.random.default_rng(0).integers(0, 10, 5).tolist()
### numpy value
import numpy as np
np.linspace(0, 1, 5)
### sympy
import sympy
x = sympy.symbols("x")
print(sympy.solve(x**2 - 5*x + 6, x), sympy.factor(x**3 - 1), sympy.diff(sympy.sin(x) * x, x))
### pandas
import pandas as pd
frame = pd.DataFrame({"a": [1, 2, 3], "b": [4.0, 5.0, 6.0]})
print(frame.sum().to_dict(), frame[frame.a > 1].b.mean())
'''

NEEDS = {"numpy": "numpy", "sympy": "sympy", "pandas": "pandas"}
"""A snippet whose name begins with one of these needs that package."""


def snippets() -> dict[str, list[str]]:
    """Name to cells."""
    found: dict[str, list[str]] = {}
    for block in TABLE.removeprefix("\n").removeprefix("### ").split("\n### "):
        name, _, body = block.partition("\n")
        assert name not in found, f"two snippets are called {name!r}"
        found[name] = [cell.strip("\n") + "\n" for cell in ("\n" + body).split("\n# %%")]
    return found
