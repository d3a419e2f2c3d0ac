"""The order of tasks is seeded, complete, and can be taken up again at any place."""

from __future__ import annotations

import pytest

from agentfly.data import load_tasks
from agentfly.training.cursor import TaskCursor

TASKS = load_tasks([{"question": f"q{i}"} for i in range(7)])


def ids(cursor: TaskCursor, count: int) -> list[str]:
    return [task.id for task in cursor.take(count)]


def test_every_task_comes_once_before_any_comes_again() -> None:
    cursor = TaskCursor(TASKS, shuffle=True, seed=3)
    first, second = ids(cursor, 7), ids(cursor, 7)
    assert sorted(first) == sorted(second) == [str(i) for i in range(7)]
    assert first != second


def test_without_shuffling_the_order_is_the_files() -> None:
    assert ids(TaskCursor(TASKS, shuffle=False, seed=0), 9) == [*map(str, range(7)), "0", "1"]


@pytest.mark.parametrize("taken", [0, 3, 7, 12])
def test_a_restored_cursor_goes_on_exactly(taken: int) -> None:
    cursor = TaskCursor(TASKS, shuffle=True, seed=1)
    cursor.take(taken)
    again = TaskCursor(TASKS, shuffle=True, seed=1)
    again.restore(cursor.state())
    assert ids(cursor, 20) == ids(again, 20)
