"""Demonstrations for `ReactAgent`: dialogues that search, read and answer, as rows for supervised training.

The calls are the solver's, the observations are the environment's, and the tasks are from the train split. `mistakes` is the
share of dialogues with a wrong answer: a guess without searching, an answer after the first of two searches, or the wrong fact
of the right page.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Generator
from typing import Any

from ...errors import ConfigError
from .env import CUT, PAGE, SMALL, TOP
from .solver import walk
from .sources import Source, open_local
from .tasks import easy_search, encyclopaedia
from .view import show_hits, show_passage

FIRST, NEXT, READ, ENOUGH = (
    ("look it up", "search first"),
    ("now look that up", "one more search"),
    "read the page",
    ("done", "that is it"),
)
MISTAKES = ("guess", "early", "other")
CAREFUL = 0.2
"""The probability of opening a page although the hit shows all of it."""


def encyclopaedia_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Dialogues with the tools `search` and `retrieve`."""
    return _rows(encyclopaedia("train", count, seed), seed, mistakes)


def easy_search_demos(count: int, seed: int = 0, *, mistakes: float = 0.0) -> list[dict[str, Any]]:
    """Dialogues with the tool `search` alone."""
    return _rows(easy_search("train", count, seed), seed, mistakes)


def _rows(tasks: list[dict[str, Any]], seed: int, mistakes: float) -> list[dict[str, Any]]:
    if not 0.0 <= mistakes <= 1.0:
        raise ConfigError(f"demos: mistakes is a share from 0 to 1, not {mistakes}")
    rng = random.Random(f"search demos {seed}")
    return [_row(task, rng, rng.choice(MISTAKES) if rng.random() < mistakes else "") for task in tasks]


def _row(task: dict[str, Any], rng: random.Random, mistake: str) -> dict[str, Any]:
    if mistake == "early" and task["hops"] == 1:
        mistake = "other"
    messages = [{"role": "user", "content": task["question"]}]
    seen: list[str] = []
    answer = ""
    if mistake != "guess":
        plan = walk(task)
        calls = _careful(plan, rng) if task["corpus"] == "encyclopaedia" and not mistake else plan
        try:
            name, arguments = next(calls)
            while not (mistake == "early" and len(seen) == 1):
                thought = READ if name == "retrieve" else rng.choice(NEXT if seen else FIRST)
                written = json.dumps(arguments, ensure_ascii=False)
                messages.append({"role": "assistant", "content": f"Thought: {thought}\nAction: {name}\nInput: {written}"})
                seen.append(observe(task["corpus"], name, arguments))
                messages.append({"role": "user", "content": f"Observation: {seen[-1]}"})
                name, arguments = calls.send(seen[-1])
            # The mistake: the subject of the second search is given as the answer.
            answer = arguments.get("query", "")
        except StopIteration as done:
            answer = str(done.value)
    if mistake in ("guess", "other"):
        answer = _wrong(rng, task, seen)
    messages.append({"role": "assistant", "content": f"Thought: {rng.choice(ENOUGH)}\nAnswer: {answer}"})
    return {**{key: value for key, value in task.items() if key != "question"}, "messages": messages}


def observe(corpus: str, name: str, arguments: dict[str, str]) -> str:
    """What the environment shows for a call, with default settings."""
    retriever = open_local(Source(corpus))
    if name == "retrieve":
        place = retriever.corpus.place_of(arguments["id"])
        return show_passage(retriever.corpus[place], PAGE) if place is not None else ""
    small = SMALL.get(corpus, {})
    (hits,) = retriever.find([arguments["query"]], int(small.get("top", TOP)))
    return show_hits(hits, ids=bool(small.get("ids", True)), cut=CUT)


def _careful(plan: Generator[Any, str, str], rng: random.Random) -> Generator[Any, str, str]:
    """The same calls, with additional calls that open the page of a hit."""
    call = next(plan)
    while True:
        shown = yield call
        name, arguments = call
        if name == "search" and rng.random() < CAREFUL:
            match = re.search(rf"^\[([^\]]+)\] {re.escape(arguments['query'])}: ", shown, re.MULTILINE)
            if match:
                yield "retrieve", {"id": match[1]}
        try:
            call = plan.send(shown)
        except StopIteration as done:
            return str(done.value)


def _wrong(rng: random.Random, task: dict[str, Any], seen: list[str]) -> str:
    """A name or number that is not the answer: from the last page if one was read, else a random one."""
    words = re.findall(r"\b(?:[A-Z]\w+|\d+|red|green|blue|yellow)\b", seen[-1].partition(": ")[2] or seen[-1]) if seen else []
    others = [word for word in words if word not in (task["answer"], "The") and word not in task["answer"].split()]
    if others:
        return str(rng.choice(others))
    guess = str(rng.randint(2, 99)) if task["answer"].isdigit() else rng.choice(("red", "blue", "Bado", "Kilu", "Nomi"))
    return guess if guess != task["answer"] else "Rasu"
