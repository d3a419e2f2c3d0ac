"""The task sets of generated repairs: a split, a count and a seed in, rows out.

    easy_repair   level 1 alone
    repair        levels 1 to 4 in equal shares

    1   one file and one bug; the question shows the wrong line and a case that fails
    2   one file and one bug; `run_tests` shows a case that fails
    3   two files; the tests call one, the bug is in the other
    4   two files with a bug in each

Of levels 2 to 4 one task in twelve is right already: only `submit` is right there. The right code comes first and the bugs are
planted, so the answers are computed. Half of the cases are the visible test; the other half is hidden and never in the tree.
A repository belongs to one split, whatever the seed and the names in it.
"""

from __future__ import annotations

import random
import re
from typing import Any

from ...task_sets import MAX_COUNT, SplitName, check_count, split_of
from .bugs import LEAST, Bug, Input, bugs_of, draw_inputs, run, tidy
from .grammar import NAMES, DrawnFunction, draw_function, draw_helper

Row = dict[str, Any]
Planted = dict[str, tuple[Bug, str]]
"""By module: the bug, and the source with it."""
LEVELS = (1, 2, 3, 4)
TEST = """from {module} import {entry}
CASES = {cases}
for given, expected in CASES:
    got = {entry}(given)
    if got != expected:
        raise SystemExit(f"{entry}({{given}}) is {{got}}, not {{expected}}")
print("all right")
"""
ASK = "A function in this repository is wrong. Find and repair it, then submit. The tests may pass already."


def repair_tasks(split: SplitName, count: int | None = None, seed: int = 0) -> list[Row]:
    """Repairs of all four levels."""
    return _rows(LEVELS, split, count, seed)


def easy_repair_tasks(split: SplitName, count: int | None = None, seed: int = 0) -> list[Row]:
    """Repairs whose wrong line is shown, such as "Line 4 of ash.py is wrong"."""
    return _rows((1,), split, count, seed)


def _rows(levels: tuple[int, ...], split: str, count: int | None, seed: int) -> list[Row]:
    wanted = check_count(split, count, most=MAX_COUNT)
    rng = random.Random(f"repair {levels} {split} {seed}")
    rows: dict[str, Row] = {}
    while len(rows) < wanted:
        level = levels[len(rows) % len(levels)]
        drawn = draw_repair(rng, level)
        if drawn is None:
            continue
        key, row = drawn
        if split_of(key) == split:
            rows.setdefault(repr(row["files"]), row)
    return list(rows.values())


def draw_repair(rng: random.Random, level: int) -> tuple[str, Row] | None:
    """One task and the text that decides on its split, or None if no drawn bug shows on enough inputs."""
    first, second, entry, helper = rng.sample(NAMES, 4)
    functions: dict[str, DrawnFunction] = {}
    if level > 2:
        functions[second] = draw_helper(rng, helper)
    functions[first] = draw_function(rng, entry, helper if level > 2 else "")
    right = {module: tidy(function.source) for module, function in functions.items()}
    inputs = draw_inputs(rng)
    expected = run(right, entry, inputs)
    if any(isinstance(value, str) for value in expected) or len(set(map(repr, expected))) < LEAST:
        return None  # few answers could be guessed
    whole = level > 1 and rng.random() < 1 / 12
    planted = {} if whole else _plant(rng, right, {1: (first,), 2: (first,), 3: (second,), 4: (second, first)}[level])
    if planted is None:
        return None
    wrong = {module: planted[module][1] if module in planted else text for module, text in right.items()}
    got = run(wrong, entry, inputs)
    differ = [n for n, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    if not whole and (len(differ) < LEAST or not _each_shows(right, planted, entry, inputs, expected)):
        return None
    # Both halves have cases on which the bug shows.
    order = sorted(range(len(inputs)), key=lambda n: (n not in differ, n))
    visible, hidden = sorted(order[0::2]), sorted(order[1::2])
    files = {f"{module}.py": text for module, text in wrong.items()}
    if level > 2:
        files[f"{first}.py"] = f"from {second} import {helper}\n{files[f'{first}.py']}"
    cases = [(inputs[n], expected[n]) for n in visible]
    files["test_all.py"] = TEST.format(module=first, entry=entry, cases=cases)
    shift = {first: int(level > 2)}
    edits = [{"path": f"{module}.py", "old": bug.wrong, "new": bug.right} for module, (bug, _) in planted.items()]
    question = ASK
    if level == 1:
        ((module, (bug, _)),) = planted.items()
        n = next(n for n in visible if n in differ)
        question = (
            f"Line {bug.line + shift.get(module, 0)} of {module}.py is wrong: `{bug.wrong}`\n"
            f"{entry}({inputs[n]}) is {got[n]}, not {expected[n]}. Repair the line, then submit."
        )
    key = " ".join(_shape(text, functions) for text in (*right.values(), *wrong.values()))
    row = {
        "question": question, "level": level, "files": files, "test_command": "python test_all.py", "edits": edits,
        "cases": [{"call": f"{first}:{entry}", "args": [inputs[n]], "expected": expected[n]} for n in hidden],
        "kind": "+".join(bug.kind for bug, _ in planted.values()) or "right already",
    }  # fmt: skip
    return key, row


def _plant(rng: random.Random, right: dict[str, str], modules: tuple[str, ...]) -> Planted | None:
    planted: Planted = {}
    for module in modules:
        found = next(bugs_of(right[module], rng), None)
        if found is None:
            return None
        planted[module] = found
    return planted


def _each_shows(right: dict[str, str], planted: Planted, entry: str, inputs: list[Input], expected: list[object]) -> bool:
    """Whether each bug alone still fails: repairing one of two is no repair."""
    return all(run({**right, module: text}, entry, inputs) != expected for module, (_, text) in planted.items())


def _shape(text: str, functions: dict[str, DrawnFunction]) -> str:
    """A source without its drawn names, so that twins with other names are in one split."""
    names = {function.name for function in functions.values()}
    return re.sub(r"\w+", lambda word: "f" if word[0] in names else word[0], text)
