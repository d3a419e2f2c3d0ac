"""The texts of a trajectory for the full-text indexes of a store, and the queries that find them there.

    summary_texts    the groups of three characters (trigrams) of a summary: finds any part of a text
    texts            the words of a whole chain with their places: finds a text that begins where a word begins. To index the
                     trigrams of whole chains would take the writer five times as long.

An index names chains that may hold a text; the search then looks for the text in each of them. Upper and lower case are alike.
A text that an index cannot find (too short, or of a script without spaces between words) is looked for in every chain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ...types import Message, ToolCall, Trajectory
from .opaque import MAX_DEPTH, SCALARS, Opaque, left_out, simplify

MAX_TRIGRAMS = 12
"""Trigrams of a text that the index is asked for; more cost more and exclude few chains."""
MIN_PREFIX = 3
"""Characters of an unfinished word that the index of words is asked for: shorter ones begin too many words."""
_WORD = re.compile(r"[^\W_]+")
# Characters that this pattern and SQLite's tokenizer divide into the same words: Latin, Greek and Cyrillic.
_ALPHABETIC = re.compile("[\0-\u024f\u0370-\u052f]*")


def texts_of(trajectory: Trajectory) -> str:
    """All texts that are stored of a trajectory, each once, separated by line breaks."""
    texts: dict[str, None] = {}  # a reply is in the messages and in its turn, a task's prompt in the task and in the messages
    task = trajectory.task
    for text in (trajectory.id, task.id, trajectory.outcome.value, trajectory.prediction, trajectory.error):
        _add(texts, text)
    _add(texts, task.fields)
    _add(texts, trajectory.components)
    for message in (*task.messages, *trajectory.messages):
        _add_message(texts, message)
    for turn in trajectory.turns:
        reply = turn.completion
        _add(texts, reply.text)
        _add(texts, reply.stop)
        _add_calls(texts, reply.tool_calls)
        _add_calls(texts, turn.calls)
        for result in turn.results:
            _add(texts, result.observation)
            _add(texts, result.error)
            if result.image is not None:
                _add(texts, left_out(result.image))
    return clean_text("\n".join(texts))


def _add_message(found: dict[str, None], message: Message) -> None:
    for text in (message.role, message.content, message.name, message.tool_call_id):
        _add(found, text)
    _add_calls(found, message.tool_calls)
    for image in message.images:
        _add(found, left_out(image))


def _add_calls(found: dict[str, None], calls: Iterable[ToolCall]) -> None:
    for call in calls:
        for text in (call.name, call.id, call.error, call.arguments):
            _add(found, text)


def _add(found: dict[str, None], value: object, depth: int = 0) -> None:
    """Add the texts of a value; those that are nested deeper than the store keeps are left out."""
    if type(value) is str:
        found[value] = None
    elif value is None or type(value) in SCALARS or depth > MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _add(found, key, depth + 1)
            _add(found, part, depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            _add(found, part, depth + 1)
    elif isinstance(value, Opaque):
        found[value.type] = found[value.text] = None
    else:
        _add(found, simplify(value), depth + 1)


def match_trigrams(text: str) -> str | None:
    """The query of `summary_texts` for chains that may hold a text; None if the text is too short for it."""
    every = dict.fromkeys(text[at : at + 3] for at in range(len(text) - 2))
    usable = [trigram for trigram in every if "\0" not in trigram]
    if not usable:
        return None
    step = -(-len(usable) // MAX_TRIGRAMS)
    return " AND ".join('"' + trigram.replace('"', '""') + '"' for trigram in usable[::step])


def match_words(text: str) -> str | None:
    """The query of `texts` for chains that may hold a text whose last word may be unfinished; None if it has no such words."""
    words = _WORD.findall(text)
    unfinished = bool(words) and text.endswith(words[-1])
    if unfinished and len(words[-1]) < MIN_PREFIX:
        words, unfinished = words[:-1], False
    if not words or not _ALPHABETIC.fullmatch(text):
        return None
    return f'"{" ".join(words)}"{" *" if unfinished else ""}'


def clean_text(text: str) -> str:
    """The text as SQLite can hold it: half of a surrogate pair becomes a question mark. The body keeps it."""
    return text.encode("utf-8", "replace").decode("utf-8")
