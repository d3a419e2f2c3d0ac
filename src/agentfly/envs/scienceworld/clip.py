"""Short observations for small models: about `length` characters.

A room becomes one line: no air, agent or doors, things without their state, contents listed beside their containers. Any other
text is cut at a word. Names stay as the simulator writes them, so that actions can use them.
"""

from __future__ import annotations

import re

_PLACE = re.compile(r"is called the (?P<place>[\w -]+)\. (?:In it|Here)(?:,)? you see: *\n")
CARRIED = ("picture", "painting", "drawing", "finger painting", "battery", "glass cup", "paper cup", "metal pot", "jug")
_LEFT_OUT = ("agent", "air", "nothing", "which is off", "which is on")
_ARTICLE = re.compile(r"^(?:a substance called|an?|the) ")
_HOLDS = re.compile(r"(?:\(containing |[Oo]n the [\w ]+ is: )(.*?)[).]")
_STATE = re.compile(r" \(.*|[.,].*| (?:which|in the) .*")


def clipped(text: str, length: int | None) -> str:
    """The short form of `text`; `text` itself if `length` is None."""
    if length is None:
        return text
    text = text.strip()
    if (match := _PLACE.search(text)) is not None:
        return _room(match["place"], text[match.end() :], length)
    text = " ".join(text.split())
    if len(text) <= length:
        return text
    return f"{text[:length].rpartition(' ')[0] or text[:length]} ..."


def _room(place: str, rest: str, length: int) -> str:
    """`greenhouse: apple tree, jug, bee hive, sink`: living and portable things first, because tasks ask for them."""
    things: list[str] = []
    for line in rest.partition("You also see:")[0].splitlines():
        holds = _HOLDS.search(line)
        for part in [line, *(holds[1].split(", ") if holds else ())]:
            name = _name(part)
            if name and name not in things:
                things.append(name)
    things.sort(key=lambda thing: 0 if is_living(thing) else 1 if thing in CARRIED else 2)
    shown = f"{place}:"
    for number, thing in enumerate(things):
        more = f"{' ' if number == 0 else ', '}{thing}"
        if len(shown) + len(more) > length:
            break
        shown += more
    return shown


def _name(line: str) -> str:
    name = _STATE.sub("", _ARTICLE.sub("", line.strip())).strip()
    return "" if name in _LEFT_OUT else name


def is_living(thing: str) -> bool:
    return thing.endswith((" egg", " tree", " plant")) or thing.startswith(("baby ", "juvenile ", "adult "))
