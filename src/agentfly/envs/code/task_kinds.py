"""The kinds of tasks of the code world: how each is drawn, asked and answered.

`kinds.json` has the family, the wordings and the solver's program of each kind. Answers are computed here in plain Python,
separately from these programs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..task_sets import read_table

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
Given = dict[str, Any]
"""The numbers and words of one question, by name."""


@dataclass(frozen=True, slots=True)
class TaskKind:
    """`draw` returns the numbers and words of a question, `answer` its answer. `asks` are ways to ask it."""

    name: str
    family: str
    draw: Callable[[random.Random], Given]
    answer: Callable[[Given], Any]
    asks: tuple[str, ...]


FORMS: dict[str, Callable[[int, int, int], int]] = {
    "a * b + c": lambda a, b, c: a * b + c,
    "a * b - c": lambda a, b, c: a * b - c,
    "(a + b) * c": lambda a, b, c: (a + b) * c,
    "a + b * c": lambda a, b, c: a + b * c,
}


def written(given: Given) -> str:
    """Returns the expression of a task of kind `expression`, with its numbers in it."""
    return "".join(str(given[letter]) if letter in "abc" else letter for letter in given["form"])


def word(rng: random.Random, low: int = 2, high: int = 4) -> str:
    """Returns a made-up word of `low` to `high` syllables."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(low, high)))


def _expression(rng: random.Random) -> Given:
    given: Given = {
        "form": rng.choice(tuple(FORMS)),
        "a": rng.randint(11, 99),
        "b": rng.randint(11, 99),
        "c": rng.randint(11, 99),
    }
    return {**given, "expression": written(given)}


def _numbers(low: int, high: int, least: int, most: int) -> Callable[[random.Random], Given]:
    return lambda rng: {"numbers": [rng.randint(low, high) for _ in range(rng.randint(least, most))]}


def _distinct(rng: random.Random) -> Given:
    return {"numbers": rng.sample(range(1, 100), rng.randint(3, 5))}


def _word(rng: random.Random) -> Given:
    return {"word": word(rng)}


def _word_and_letter(rng: random.Random) -> Given:
    chosen = word(rng, 3, 4)
    return {"word": chosen, "letter": rng.choice(chosen)}


def _words(rng: random.Random) -> Given:
    words: dict[str, None] = {}
    while len(words) < rng.randint(4, 6):
        words[word(rng, 1, 4)] = None
    return {"words": list(words)}


def _words_of_all_lengths(rng: random.Random) -> Given:
    words = [word(rng, size, size) for size in rng.sample((1, 2, 3, 4, 5, 6), 4)]
    return {"words": words}


def _caesar(given: Given) -> str:
    return "".join(chr((ord(letter) - 97 + given["shift"]) % 26 + 97) for letter in given["word"])


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _fibonacci(count: int) -> int:
    low, high = 0, 1
    for _ in range(count):
        low, high = high, low + high
    return low


def _collatz(number: int) -> int:
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def _fewest_coins(given: Given) -> int:
    best = [0] * (given["amount"] + 1)
    for amount in range(1, len(best)):
        best[amount] = 1 + min(best[amount - coin] for coin in given["coins"] if coin <= amount)
    return best[-1]


def _longest_rising(numbers: Sequence[int]) -> int:
    ends: list[int] = []
    for at, number in enumerate(numbers):
        ends.append(1 + max((ends[before] for before in range(at) if numbers[before] < number), default=0))
    return max(ends)


def _edit_distance(one: str, other: str) -> int:
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        above, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (left != right))
    return row[-1]


def _ints(**bounds: tuple[int, int]) -> Callable[[random.Random], Given]:
    return lambda rng: {name: rng.randint(low, high) for name, (low, high) in bounds.items()}


def _two_lists(rng: random.Random) -> Given:
    size = rng.randint(3, 6)
    return {side: [rng.randint(1, 30) for _ in range(size)] for side in ("left", "right")}


def _coins(rng: random.Random) -> Given:
    return {"coins": [1, *sorted(rng.sample(range(2, 26), 3))], "amount": rng.randint(30, 150)}


_DRAW_AND_ANSWER: dict[str, tuple[Callable[[random.Random], Given], Callable[[Given], Any]]] = {
    "expression": (_expression, lambda g: FORMS[g["form"]](g["a"], g["b"], g["c"])),
    "remainder": (_ints(a=(500, 9999), b=(7, 97)), lambda g: g["a"] % g["b"]),
    "power": (_ints(a=(4, 99), b=(3, 5)), lambda g: g["a"] ** g["b"]),
    "digit_sum": (_ints(a=(2, 99), b=(10, 60)), lambda g: sum(map(int, str(g["a"] ** g["b"])))),
    "average": (_numbers(1, 200, 4, 4), lambda g: sum(g["numbers"]) / len(g["numbers"])),
    "reverse": (_word, lambda g: g["word"][::-1]),
    "letter_count": (_word_and_letter, lambda g: sum(letter == g["letter"] for letter in g["word"])),
    "capitals": (_word, lambda g: g["word"].upper()),
    "vowels": (_words, lambda g: sum(letter in VOWELS for word in g["words"] for letter in word)),
    "caesar": (lambda rng: {"word": word(rng, 3, 6), "shift": rng.randint(2, 20)}, _caesar),
    "longest_word": (_words_of_all_lengths, lambda g: max(g["words"], key=len)),
    "word_order": (_words, lambda g: " ".join(sorted(g["words"]))),
    "list_sum": (_numbers(1, 99, 3, 5), lambda g: sum(g["numbers"])),
    "list_max": (_distinct, lambda g: max(g["numbers"])),
    "list_sort": (_distinct, lambda g: sorted(g["numbers"])),
    "second_largest": (_distinct, lambda g: sorted(g["numbers"])[-2]),
    "even_squares": (_numbers(1, 60, 5, 9), lambda g: sum(number**2 for number in g["numbers"] if number % 2 == 0)),
    "dot_product": (_two_lists, lambda g: sum(map(int.__mul__, g["left"], g["right"]))),
    "distinct": (_numbers(1, 9, 8, 14), lambda g: len(set(g["numbers"]))),
    "gcd": (lambda rng: {name: rng.randint(2, 60) * rng.randint(5, 90) for name in "ab"}, lambda g: math.gcd(g["a"], g["b"])),
    "primes": (_ints(a=(2, 500), b=(501, 1500)), lambda g: sum(map(_is_prime, range(g["a"], g["b"] + 1)))),
    "fibonacci": (_ints(n=(10, 90), m=(11, 999)), lambda g: _fibonacci(g["n"]) % g["m"]),
    "collatz": (_ints(n=(3, 9999)), lambda g: _collatz(g["n"])),
    "divisors": (_ints(n=(50, 9999)), lambda g: sum(g["n"] % divisor == 0 for divisor in range(1, g["n"] + 1))),
    "coins": (_coins, _fewest_coins),
    "rising": (_numbers(1, 99, 7, 10), lambda g: _longest_rising(g["numbers"])),
    "edit_distance": (lambda rng: {"one": word(rng), "other": word(rng)}, lambda g: _edit_distance(g["one"], g["other"])),
}
KINDS: dict[str, TaskKind] = {
    name: TaskKind(name, text["family"], *_DRAW_AND_ANSWER[name], tuple(text["asks"]))
    for name, text in read_table(__package__, "kinds.json").items()
}
EASY = ("expression", "remainder", "power", "reverse", "letter_count", "capitals", "list_sum", "list_max", "list_sort")
"""Kinds that one line of Python solves; the bundled model knows them."""
