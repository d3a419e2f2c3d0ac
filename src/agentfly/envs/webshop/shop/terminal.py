"""A page of the shop as lines for a person in a terminal.

One product per line; clickables come last, as actions to type. The instruction is left out, because the player has read it.
Brief pages are unchanged.
"""

from __future__ import annotations

import re

from .visit import SEPARATOR

BUTTONS = ("Back to Search", "< Prev", "Next >", "Description", "Features", "Reviews", "Buy Now")
_ASIN = re.compile(r"[A-Z0-9]{10}")
_SCORE = "Your score (min 0.0, max 1.0)"


def shown(page: str) -> str:
    """The page as lines."""
    parts = page.split(SEPARATOR)
    if len(parts) == 1:
        return page
    if _SCORE in parts[:-1]:
        return f"{parts[0]}\n{_SCORE}: {parts[parts.index(_SCORE) + 1]}"
    lines: list[str] = []
    buttons: list[str] = []
    rest = iter(parts)
    for part in rest:
        if part.endswith("Instruction:"):
            next(rest, None)
            note = part.removesuffix("Instruction:").strip()  # why the last action had no effect
            lines += [note] if note else []
        elif part in BUTTONS:
            buttons.append(f"click[{part.lower()}]")
        elif part == "Search":
            buttons.append("search[...]")
        elif _ASIN.fullmatch(part):
            lines.append("  ".join([part, next(rest, ""), next(rest, "")]).rstrip())
        else:
            lines.append(part)
    return "\n".join([*lines, *(["  ".join(buttons)] if buttons else [])])
