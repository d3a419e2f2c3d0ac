"""The reading list of docs/architecture.md is the way of a step: one step of the quick start is traced."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable
from types import FrameType

import pytest

import agentfly
from agentfly.cli import main
from tests.house.reading import ROOT, SRC

Place = tuple[str, str]
ROW = re.compile(r"^\d\. `([\w/]+\.py)`, `(\w+)`", re.MULTILINE)


def reading_list() -> list[Place]:
    return [(path, name) for path, name in ROW.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))]


def missing(places: Iterable[Place], calls: Iterable[Place]) -> list[Place]:
    """The places from the first one on that is not called after those before it."""
    left, rest = list(places), iter(calls)
    while left and left[0] in rest:
        left.pop(0)
    return left


@pytest.fixture
def calls() -> Iterable[list[Place]]:
    """Calls of the functions on the list, of all threads, in order."""
    wanted = {(str(SRC / path), name): (path, name) for path, name in reading_list()}
    found: list[Place] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (place := wanted.get((frame.f_code.co_filename, frame.f_code.co_name))) is not None:
            found.append(place)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    yield found
    sys.setprofile(before)
    threading.setprofile(None)


def test_a_step_calls_the_functions_of_the_reading_list_in_its_order(calls, tmp_path, capsys):
    assert str(SRC) in str(agentfly.__file__)
    small = ["train.steps=1", "rollout.num_tasks=2", "rollout.num_chains=2", "data.validation_count=2", f"run.dir={tmp_path}"]
    assert main(["train", "quickstart", *small]) == 0, capsys.readouterr().err
    places = reading_list()
    assert len(places) == 9
    assert missing(places, calls) == []


def test_a_list_in_another_order_is_found():
    assert missing([("a.py", "f"), ("b.py", "g")], [("b.py", "g"), ("a.py", "f"), ("b.py", "g")]) == []
    assert missing([("b.py", "g"), ("a.py", "f"), ("b.py", "g")], [("b.py", "g"), ("a.py", "f")]) == [("b.py", "g")]
