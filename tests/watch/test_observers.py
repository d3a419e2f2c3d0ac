"""Observers: each event reaches those that have a method for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agentfly.training import loop
from agentfly.watch.observers import Observer, Observers


class Listing:
    """Has two events, and an attribute with the name of a third."""

    phase = "an attribute"

    def __init__(self, name: str, told: list[Any]) -> None:
        self.name, self.told = name, told

    def note(self, text: str) -> None:
        self.told.append((self.name, text))

    @contextmanager
    def running(self, **description: Any) -> Iterator[None]:
        self.told.append((self.name, description))
        yield
        self.told.append((self.name, "ended"))


def test_an_event_reaches_the_members_that_have_its_method_in_their_order() -> None:
    told: list[Any] = []
    observe = Observers(Listing("a", told), object())
    observe.note("first")
    observe.add(Listing("b", told))
    observe.note("second")
    observe.step(1, {"m": 1.0})
    observe.phase("opening")
    assert told == [("a", "first"), ("a", "second"), ("b", "second")]


def test_a_run_is_entered_by_every_member_and_left_in_reverse() -> None:
    told: list[Any] = []
    with pytest.raises(ValueError), Observers(Listing("a", told), object(), Listing("b", told)).running(kind="train"):
        raise ValueError
    assert told == [("a", {"kind": "train"}), ("b", {"kind": "train"})]
    told.clear()
    with Observers(Listing("a", told), Listing("b", told)).running(kind="train"):
        pass
    assert told == [("a", {"kind": "train"}), ("b", {"kind": "train"}), ("b", "ended"), ("a", "ended")]


def test_every_event_of_the_loop_is_one_of_an_observer() -> None:
    with open(loop.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    calls = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("observe")
    }
    assert {"note", "phase", "log", "step"} <= calls
    assert calls - {"running"} <= set(vars(Observer))
