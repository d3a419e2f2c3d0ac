"""Names that other libraries use for settings of this one: one table, read where an unknown name is refused.

    TRL,num_generations,rollout.num_chains,            a row of foreign_names.csv: library, their name, ours, note

`ours` is a config key, or an argument of a call where no key exists. Configs ask `config_hint`, agents ask `agent_hint`.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class ForeignName:
    """One row: `name` in `library` is `ours` here. `note` says how the two differ."""

    library: str
    name: str
    ours: str
    note: str = ""


@cache
def foreign_names() -> tuple[ForeignName, ...]:
    """Every row of `foreign_names.csv`."""
    text = files(__package__).joinpath("foreign_names.csv").read_text(encoding="utf-8")
    return tuple(ForeignName(**row) for row in csv.DictReader(text.splitlines()))


def find_foreign(name: str, *, exact: bool = False) -> ForeignName | None:
    """Find a row by its whole name or, unless `exact`, by its last part: `loss.beta` finds `beta`."""
    last = name.rpartition(".")[2]
    by_name = {row.name: row for row in reversed(foreign_names())}
    if exact or name in by_name:
        return by_name.get(name)
    return by_name.get(last) or next((row for row in foreign_names() if row.name.rpartition(".")[2] == last), None)


def config_hint(name: str, *, exact: bool = False) -> str | None:
    """Returns a sentence with the config key that another library calls `name`, or None if no row has it."""
    row = find_foreign(name, exact=exact)
    if row is None or row.ours == name:
        return None
    return f"{row.name!r} of {row.library} is {row.ours!r} here{_note(row)}"


def agent_hint(name: str) -> str | None:
    """Returns a sentence with the agent's argument for what another library calls `name`, or None if no row has it."""
    row = find_foreign(name)
    if row is None:
        return None
    section, _, rest = row.ours.partition(".")
    if section in ("agent", "sampling"):
        first, _, inner = rest.partition(".") if section == "agent" else (section, "", rest)
        if first == "options":
            first, inner = inner, ""
        ours = f"{first}={{{inner!r}: ...}}" if inner else f"{first}=..."
    elif section == "tasks":
        ours = "tasks"
    elif section == "data":
        ours = f"agentfly.train(agent, {'validation' if rest == 'validation' else 'data'}=...)"
    else:
        ours = f"agentfly.train(agent, ..., {rest or section}=...)"
    return f"{row.name!r} of {row.library} is {ours} here{_note(row)}"


class UnknownArgument(ConfigError, TypeError):
    """An argument that a call does not have. Also a TypeError, as Python raises for such a call."""


def unknown_argument(owner: str, name: str, known: Iterable[str]) -> UnknownArgument:
    """Returns the error for an argument that `owner` does not have, with the right name if the table or a near name has it."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = agent_hint(name) or (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}")
    return UnknownArgument(f"{owner} has no argument {name!r}; {hint}")


def _note(row: ForeignName) -> str:
    return f" ({row.note})" if row.note else ""
