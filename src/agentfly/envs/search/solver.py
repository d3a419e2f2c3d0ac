"""The solver of the search world: it answers every generated question by searching and reading.

It reads the subject and the relations to follow from the task's field `given`, and never the answer. `walk` plans one call at a
time: `solve` runs the calls in an environment, `demos.py` records them.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any

from ...errors import ConfigError
from ...types import Task
from .generated.articles import read_fact
from .generated.world import RELATIONS

NamedCall = tuple[str, dict[str, str]]
"""The name of a tool and its arguments."""


def walk(fields: Mapping[str, Any]) -> Generator[NamedCall, str, str]:
    """The plan for a task: yields calls, receives their observations, and returns the answer.

    Raises ConfigError if the task has no path, or a page does not contain the fact.
    """
    given = fields.get("given")
    if not isinstance(given, Mapping) or not given.get("path"):
        raise ConfigError("no solution is known for a question that the search world did not make")
    subject, *relations = given["path"]
    easy = str(fields.get("corpus", "")).startswith("easy_search")
    kind = "" if easy else str(fields["kind"]).partition("/")[0]
    for relation in relations:
        shown = yield "search", {"query": subject}
        fact = easy_fact(shown, subject, relation) if easy else read_fact(kind, subject, relation, _hit(shown, subject)[1])
        if fact is None and not easy:
            page = yield "retrieve", {"id": _hit(shown, subject)[0]}
            fact = read_fact(kind, subject, relation, page.partition("\n")[2])
        if fact is None:
            raise ConfigError(f"the page of {subject!r} does not say its {relation}")
        subject, kind = fact, RELATIONS.get(kind, {}).get(relation, "")
    return str(subject)


async def solve(env: object, task: Task) -> str:
    """Play a task in an environment and return the answer."""
    plan = walk(task.fields)
    try:
        name, arguments = next(plan)
        while True:
            result = await getattr(env, name)(**arguments)
            name, arguments = plan.send(result.observation)
    except StopIteration as done:
        return str(done.value)


def easy_fact(text: str, subject: str, relation: str) -> str | None:
    """A fact on a page of the small world; None if the page does not contain it."""
    match = re.search(rf"The {re.escape(relation)} of {re.escape(subject)} is ([^.]+)\.", text)
    return match[1] if match else None


def _hit(shown: str, title: str) -> tuple[str, str]:
    """Id and text of the hit with that title; empty texts if there is none."""
    match = re.search(rf"^\[([^\]]+)\] {re.escape(title)}: (.*)$", shown, re.MULTILINE)
    if not match:
        return "", ""
    text = match[2]
    # The last sentence of a text that was cut may be incomplete.
    return match[1], text[: text.rfind(". ") + 1] if text.endswith(" ...") else text
