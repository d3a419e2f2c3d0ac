"""The text that a model reads for hits and passages, and the checks of what it writes as a query or id.

    [276] Dostoth Nuskias: Dostoth Nuskias, born in Vultport in 1644, was a noted playwright. She learned ...

Titles and texts are shown on one line each, shortened, and without control characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from .retrieve.passages import MAX_ID, one_line, plain_id
from .retrieve.types import Hit, Passage

MAX_QUERY = 1_000
NOTHING = "Nothing was found. Try other words."


def read_query(query: object) -> tuple[str, str]:
    """The query on one line and an empty text, or an empty text and the reason why it cannot be searched."""
    if not isinstance(query, str):
        return "", f"The query must be text, not {type(query).__name__}."
    if len(query) > MAX_QUERY:
        return "", f"The query has {len(query):,} characters; at most {MAX_QUERY:,} can be searched for. Use a few words."
    text = one_line(query)
    return (text, "") if text else ("", "The query is empty. Write what to search for.")


def read_id(id: object) -> tuple[str, str]:  # noqa: A002
    """The id without brackets and an empty text, or an empty text and the reason why it is not an id."""
    if isinstance(id, bool) or not isinstance(id, str | int):
        return "", f"The id must be one of those in brackets, not {type(id).__name__}."
    text = str(id)
    if len(text) > MAX_ID:
        return "", f"The id has {len(text):,} characters, which no id has."
    text = plain_id(text)
    return (text, "") if text else ("", "The id is empty. Give one of those that a search shows in brackets.")


def show_hits(hits: Sequence[Hit], *, ids: bool = True, cut: int = 300) -> str:
    """One line per hit; with `ids`, the id and title precede the text."""
    if not hits:
        return NOTHING
    return "\n".join(_line(hit.passage, ids, cut) for hit in hits)


def show_passage(passage: Passage, cut: int) -> str:
    """The title and up to `cut` characters of the text."""
    title = one_line(passage.title)
    lines = [one_line(line) for line in passage.text.split("\n")]
    text = shorten("\n".join(line for line in lines if line), cut)
    return f"{title}\n{text}" if title else text


def shorten(text: str, length: int) -> str:
    """At most `length` characters and " ...", cut between words unless a word is very long."""
    if len(text) <= length:
        return text
    cut = text[:length]
    space = cut.rfind(" ")
    return f"{(cut[:space] if space > length * 0.8 else cut).rstrip()} ..."


def _line(passage: Passage, ids: bool, cut: int) -> str:
    text = shorten(one_line(passage.text), cut)
    if not ids:
        return text
    title, name = one_line(passage.title), plain_id(passage.id)
    return f"[{name}] {title}: {text}" if title else f"[{name}] {text}"
