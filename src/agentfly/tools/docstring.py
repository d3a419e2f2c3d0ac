"""Reads the summary and the descriptions of the arguments from a docstring.

It accepts Google style (`Args:`), NumPy style (`Parameters`, underlined) and `:param name:` lines. The text before the first
section is the summary. Types in a docstring are ignored in favour of the annotations. It never raises and takes linear time.
"""

from __future__ import annotations

import inspect
import re

_ARGS = {"args", "arguments", "parameters", "params", "keyword args", "keyword arguments", "other parameters", "attributes"}
_OTHER = {
    "returns", "return", "yields", "yield", "raises", "example", "examples", "note", "notes", "see also", "references",
    "warning", "warnings", "warns", "todo", "usage",
}  # fmt: skip
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:(?:\s+|$)(.*)")
_NUMPY_ENTRY = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?$")
_PARAM = re.compile(r":(?:param|parameter|arg)\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)")
_FIELD = re.compile(r":\w+[^:]*:")


def parse_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """Returns `(summary, {argument: description})`. The lines of a paragraph are joined; paragraphs stay separate."""
    lines = inspect.cleandoc(text or "").splitlines()
    summary: list[str] = []
    arguments: dict[str, list[str]] = {}
    section: str | None = None  # None: still in the summary
    numpy = False
    current: list[str] | None = None
    indent = -1  # of the entries of a Google section
    index = 0
    while index < len(lines):
        line = lines[index]
        following = lines[index + 1].strip() if index + 1 < len(lines) else ""
        index += 1
        depth = len(line) - len(line.lstrip())
        word = line.strip()
        if depth == 0 and (header := _header(word, following)):
            section, numpy, current, indent = header, bool(following) and set(following) <= {"-", "="}, None, -1
            index += numpy
        elif depth == 0 and (match := _PARAM.match(word)):
            section, current = ":", arguments.setdefault(match[1], [])
            current.append(match[2])
        elif section == ":":
            if _FIELD.match(word):
                current = None
            elif current is not None:
                current.append(word)
        elif section is None:
            if _FIELD.match(word):
                section, current = ":", None
            else:
                summary.append(word)
        elif section in _ARGS and word:
            if numpy and depth == 0:
                match = _NUMPY_ENTRY.match(word)
                current = [] if match else None
                for name in match[1].split(",") if match else ():
                    arguments[name.strip()] = current if current is not None else []
            elif not numpy and (indent < 0 or depth <= indent):
                match = _GOOGLE_ENTRY.match(word)
                indent = depth
                current = arguments.setdefault(match[1], []) if match else None
                if match and current is not None:
                    current.append(match[2])
            elif current is not None:
                current.append(word)
    paragraphs = " ".join(part or "\n" for part in summary).split("\n")
    joined = "\n".join(stripped for part in paragraphs if (stripped := part.strip()))
    return joined, {name: described for name, words in arguments.items() if (described := " ".join(words).strip())}


def _header(word: str, following: str) -> str | None:
    """The name of the section that a line begins, or None. NumPy headers are underlined, Google headers end with a colon."""
    name = word.rstrip(":").lower()
    if (first := word.partition(":")[0].lower()) in ("returns", "raises", "yields") and ":" in word:
        return first  # `Returns: the sum.` on one line
    if name not in _ARGS and name not in _OTHER:
        return None
    underlined = len(following) >= 3 and set(following) <= {"-", "="}
    return name if underlined or word.endswith(":") else None
