"""The solver of the code world: returns the cells that solve a task.

Programs are written from the task's field `given` and print the answer last; some need several cells. Rows of the loaders have
a `solution`, which is the only cell. A task with neither raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...types import Task

# One string per cell. {name} is replaced by the repr of the value, {expression} by the text of an arithmetic expression.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "expression": ("print({expression})",),
    "remainder": ("print({a} % {b})",),
    "power": ("print({a} ** {b})",),
    "digit_sum": ("print(sum(int(digit) for digit in str({a} ** {b})))",),
    "average": ("numbers = {numbers}", "print(sum(numbers) / len(numbers))"),
    "reverse": ("print({word}[::-1])",),
    "letter_count": ("print({word}.count({letter}))",),
    "capitals": ("print({word}.upper())",),
    "vowels": ("text = ''.join({words})", "print(len([letter for letter in text if letter in 'aeiou']))"),
    "caesar": (
        "def turn(letter, places):\n    return chr((ord(letter) - ord('a') + places) % 26 + ord('a'))",
        "print(''.join(turn(letter, {shift}) for letter in {word}))",
    ),
    "longest_word": ("print(max({words}, key=len))",),
    "word_order": ("words = {words}\nwords.sort()\nprint(' '.join(words))",),
    "list_sum": ("print(sum({numbers}))",),
    "list_max": ("print(max({numbers}))",),
    "list_sort": ("print(sorted({numbers}))",),
    "second_largest": ("print(sorted({numbers}, reverse=True)[1])",),
    "even_squares": ("total = 0\nfor n in {numbers}:\n    if n % 2 == 0:\n        total += n * n\nprint(total)",),
    "dot_product": ("print(sum(a * b for a, b in zip({left}, {right})))",),
    "distinct": ("print(len(set({numbers})))",),
    "gcd": ("def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)", "print(gcd({a}, {b}))"),
    "primes": (
        "def is_prime(n):\n    if n < 2:\n        return False\n    d = 2\n    while d * d <= n:\n        if n % d == 0:\n"
        "            return False\n        d += 1\n    return True",
        "print(len([n for n in range({a}, {b} + 1) if is_prime(n)]))",
    ),
    "fibonacci": (
        "from functools import cache\n\n@cache\ndef fib(n):\n    return 1 if n <= 2 else fib(n - 1) + fib(n - 2)",
        "print(fib({n}) % {m})",
    ),
    "collatz": ("n, steps = {n}, 0\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1\n    steps += 1\nprint(steps)",),
    "divisors": (
        "def divisors(n):\n    d = 1\n    while d * d <= n:\n        if n % d == 0:\n            yield d\n"
        "            if d * d != n:\n                yield n // d\n        d += 1",
        "print(len(list(divisors({n}))))",
    ),
    "coins": (
        "import functools\n\n@functools.lru_cache(maxsize=None)\ndef fewest(amount):\n"
        "    return 0 if amount == 0 else 1 + min(fewest(amount - coin) for coin in {coins} if coin <= amount)",
        "print(fewest({amount}))",
    ),
    "rising": (
        "import bisect\nends = []\nfor number in {numbers}:\n    at = bisect.bisect_left(ends, number)\n"
        "    ends[at:at + 1] = [number]\nprint(len(ends))",
    ),
    "edit_distance": (
        "from functools import cache\none, other = {one}, {other}\n\n@cache\ndef distance(i, j):\n    if not i or not j:\n"
        "        return i + j\n    swap = distance(i - 1, j - 1) + (one[i - 1] != other[j - 1])\n"
        "    return min(swap, distance(i - 1, j) + 1, distance(i, j - 1) + 1)",
        "print(distance(len(one), len(other)))",
    ),
}


def solve(task: Task | Mapping[str, Any]) -> list[str]:
    """Returns cells to run in order in one session. The last one prints the answer, or defines what the tests use."""
    fields = task.fields if isinstance(task, Task) else task
    if fields.get("solution"):
        return [str(fields["solution"])]
    kind, given = fields.get("kind"), fields.get("given")
    if kind not in PROGRAMS or not isinstance(given, Mapping):
        raise ConfigError(f"no solution is known for a task of kind {kind!r}: it is not one that the code world makes")
    return write(kind, given)


def write(kind: str, given: Mapping[str, Any]) -> list[str]:
    """Returns the program of one kind of task, with its numbers and words filled in."""
    values = {name: str(value) if name == "expression" else repr(value) for name, value in given.items()}
    return [cell.format_map(values) for cell in PROGRAMS[kind]]
