"""The solver of the search world: it answers every generated question by searching and reading, never from the row's answer.

In: a task with `given`, which names the subject and the facts to follow. It searches for the subject, reads the page (whole,
where a hit was cut), takes the fact and goes on from there. `walk` is the plan, one call at a time, for whoever runs the
calls: `solve` runs them in an environment, `demos.py` writes them down. A question of a file has no path and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any

from ...errors import ConfigError
from ...types import Task
from .generated.articles import read_fact
from .generated.world import RELATIONS

Call = tuple[str, dict[str, str]]


def walk(fields: Mapping[str, Any]) -> Generator[Call, str, str]:
    """Yields calls, is sent their observations, returns the answer."""
    given = fields.get("given")
    if not isinstance(given, Mapping) or not given.get("path"):
        raise ConfigError("no solution is known for a question that the search world did not make")
    subject, *relations = given["path"]
    easy = str(fields.get("corpus", "")).startswith("easy_search")
    kind = "" if easy else str(fields["kind"]).partition("/")[0]
    for relation in relations:
        shown = yield "search", {"query": subject}
        found = easy_fact(shown, subject, relation) if easy else read_fact(kind, subject, relation, _hit(shown, subject)[1])
        if found is None and not easy:
            page = yield "retrieve", {"id": _hit(shown, subject)[0]}
            found = read_fact(kind, subject, relation, page.partition("\n")[2])
        if found is None:
            raise ConfigError(f"the page of {subject!r} does not say its {relation}")
        subject, kind = found, RELATIONS.get(kind, {}).get(relation, "")
    return str(subject)


async def solve(env: Any, task: Task) -> str:
    """Play a task in an environment; the answer."""
    plan = walk(task.fields)
    try:
        name, arguments = next(plan)
        while True:
            result = await getattr(env, name)(**arguments)
            name, arguments = plan.send(result.observation)
    except StopIteration as done:
        return str(done.value)


def easy_fact(text: str, subject: str, relation: str) -> str | None:
    """A fact on a page of the small world."""
    found = re.search(rf"The {re.escape(relation)} of {re.escape(subject)} is ([^.]+)\.", text)
    return found[1] if found else None


def _hit(shown: str, title: str) -> tuple[str, str]:
    """Id and text of the hit with that title."""
    found = re.search(rf"^\[([^\]]+)\] {re.escape(title)}: (.*)$", shown, re.MULTILINE)
    if not found:
        return "", ""
    text = found[2]
    # Of a text that was cut, the last sentence is not to be trusted.
    return found[1], text[: text.rfind(". ") + 1] if text.endswith(" ...") else text
