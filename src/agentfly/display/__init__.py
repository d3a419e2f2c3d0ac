"""How values show themselves in a notebook: HTML fragments, safe text, and data frames.

A fragment is at most MAX_BYTES long, has no script, and every text in it is escaped. Colours are translucent over those of
the page, so a fragment is readable on a light and on a dark page. Values are read by the names of their attributes: this module
stands below those that define them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ..errors import MissingExtra

MAX_BYTES = 200_000
MAX_TEXT = 6_000
"""Characters of one message that are shown."""
MAX_ROWS = 500
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)  # the eight-bit control codes
_DIRECTIONS = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)}
_FONT = "font:13px/1.45 system-ui,sans-serif;max-width:60em"
_TEXT = (
    "color:inherit;background:none;margin:.2em 0;padding:.3em .6em;white-space:pre-wrap;overflow-wrap:anywhere;"
    "font:12px/1.45 ui-monospace,monospace"
)
_CHIP = "display:inline-block;padding:0 .5em;margin:0 .4em .2em 0;border-radius:.6em;background:rgba(128,128,128,.18)"
_CELL = "padding:.1em .8em .1em 0;text-align:left;border:0"
MASKS = {
    "trained": "background:rgba(46,160,67,.16);border-left:3px solid rgba(46,160,67,.9)",
    "sampled": "background:rgba(210,153,34,.14);border-left:3px dashed rgba(210,153,34,.9)",
    "context": "border-left:3px solid rgba(128,128,128,.25);opacity:.85",
}
"""Sampled by the policy and trained; sampled and not trained; not sampled."""


class Displayed:
    """A value with `_repr_html_`: notebooks get it together with the plain text."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        # A kernel cannot send half of a surrogate pair: the cell would fail. Codes of a terminal in a text would be obeyed.
        return {"text/plain": visible(repr(self)), "text/html": self._repr_html_()}


def data_frame(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> Any:
    """The rows as a pandas.DataFrame. Raises MissingExtra."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise MissingExtra("a data frame needs the package 'pandas': pip install 'agentfly[pandas]'") from error
    return pd.DataFrame(list(rows), columns=columns)


def visible(text: str) -> str:
    """The text with control codes replaced by visible characters. Half of a surrogate pair becomes a question mark."""
    return text.replace("\r\n", "\n").translate(VISIBLE).encode("utf-8", "replace").decode()


def safe(text: object, limit: int = MAX_TEXT) -> str:
    """A text for HTML: cut, escaped, without control codes and without marks that change the direction of writing."""
    whole = str(text)
    shown = escape(visible(whole[:limit]).translate(_DIRECTIONS))
    return shown if len(whole) <= limit else f"{shown}<i> ... {len(whole) - limit:,} more characters</i>"


# ---- values --------------------------------------------------------------------------------------------------------------


def trajectory_html(trajectory: object, trained: Sequence[bool] | None = None) -> str:
    """One chain: its figures, its opening messages, and a fold per turn. `trained` is the learner's record of each token."""
    page = _Page()
    page.add(f"<div>{_chips(trajectory)}</div>")
    _chain(page, trajectory, trained)
    page.add(f"<div style='opacity:.7'>{_legend(trajectory, trained)}</div>")
    return page.html()


def chains_html(title: str, trajectories: Sequence[Any]) -> str:
    """A list of chains, each a fold with its conversation as far as the space allows."""
    page = _Page()
    page.add(f"<div><b>{safe(title)}</b></div>")
    for number, trajectory in enumerate(trajectories):
        if number >= MAX_ROWS or page.full:
            page.note(f"{len(trajectories) - number:,} more chains are not shown")
            break
        inner = _Page(min(page.room // 2, 40_000))
        _chain(inner, trajectory, None)
        page.add(f"<details><summary>{_headline(trajectory)}</summary>{inner.body}</details>")
    return page.html()


def run_html(
    title: str,
    facts: Mapping[str, Any],
    curves: Mapping[str, Sequence[float]],
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]],
    sample: object = None,
) -> str:
    """A run: facts as chips, curves, tables as (columns, rows), and a chain."""
    page = _Page()
    page.add(f"<div><b>{safe(title)}</b></div>")
    page.add("<div>" + "".join(_chip(name, value) for name, value in facts.items() if value is not None) + "</div>")
    for name, values in curves.items():
        if drawn := curve_svg(values):
            page.add(f"<div>{safe(name)}<br>{drawn}</div>")
    for name, (columns, rows) in tables.items():
        if rows:
            page.add(f"<details open><summary>{safe(name)}</summary>{_table(columns, rows)}</details>")
    if sample is not None:
        inner = _Page(min(page.room // 2, 60_000))
        _chain(inner, sample, None)
        page.add(f"<details><summary>{_headline(sample)}</summary>{inner.body}</details>")
    return page.html()


def curve_svg(values: Sequence[float], width: int = 420, height: int = 70) -> str:
    """A curve without axes, labelled with its first and last value; empty if it has fewer than two finite points."""
    points = [(index, float(value)) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    if len(points) < 2:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    span, last = (high - low) or 1.0, len(values) - 1
    path = " ".join(f"{4 + x / last * (width - 90):.1f},{height - 6 - (y - low) / span * (height - 12):.1f}" for x, y in points)
    return (
        f"<svg viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img' style='max-width:100%'>"
        f"<polyline points='{path}' fill='none' stroke='currentColor' stroke-opacity='.8' stroke-width='1.6'/>"
        f"<text x='{width - 80}' y='{height / 2:.0f}' font-size='11' fill='currentColor'>"
        f"{points[0][1]:.3g} → {points[-1][1]:.3g}</text></svg>"
    )


# ---- parts ---------------------------------------------------------------------------------------------------------------


class _Page:
    """Parts of a fragment, as many as fit into a number of bytes."""

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self.room = limit - 600  # for the frame and a note
        self.full = False
        self._parts: list[str] = []

    def add(self, part: str) -> bool:
        """Adds a part if it fits. After one that does not fit, none does."""
        size = len(part.encode())
        if self.full or size > self.room:
            self.full = True
            return False
        self.room -= size
        self._parts.append(part)
        return True

    def note(self, text: str) -> None:
        self._parts.append(f"<div><i>{safe(text, 200)}</i></div>")

    @property
    def body(self) -> str:
        return "".join(self._parts)

    def html(self) -> str:
        return f"<div style='{_FONT}'>{self.body}</div>"


def _chain(page: _Page, trajectory: Any, trained: Sequence[bool] | None) -> None:
    messages, turns = trajectory.messages, trajectory.turns
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    replies = replies[max(0, len(replies) - len(turns)) :]
    for message in messages[: replies[0] if replies else len(messages)]:
        is_open = " open" if message.role == "user" else ""
        page.add(f"<details{is_open}><summary>{safe(message.role)}</summary>{_text(message.content, 'context')}</details>")
    start = 0
    for number, (index, turn) in enumerate(zip(replies, turns, strict=False)):
        size = len(turn.completion.token_ids)
        part = None if trained is None else trained[start : start + size]
        start += size
        if not page.add(_turn(trajectory, number, turn, messages, index, replies, part)):
            page.note(f"{len(turns) - number:,} more turns are not shown")
            return


def _turn(
    trajectory: Any, number: int, turn: Any, messages: Any, index: int, replies: Sequence[int], part: Sequence[bool] | None
) -> str:
    size, count = len(turn.completion.token_ids), None if part is None else sum(map(bool, part))
    mask = "trained" if (count if count is not None else trajectory.trainable) else "sampled"
    share = f"{count} of {size} tokens trained" if count is not None else f"{size} tokens"
    tools = ", ".join(call.name for call in turn.calls)
    words = [f"turn {number + 1}", share, tools, f"{turn.sampled_s + turn.tools_s:.1f} s" if turn.sampled_s else ""]
    words.append(f"reward {turn.reward:.3g}" if turn.reward else "")
    until = replies[number + 1] if number + 1 < len(replies) else len(messages)
    after = "".join(_text(each.content, "context", each.name or each.role) for each in messages[index + 1 : until])
    summary = safe(" · ".join(word for word in words if word), 300)
    return f"<details open><summary>{summary}</summary>{_text(messages[index].content, mask)}{after}</details>"


def _text(text: str, mask: str, who: str = "") -> str:
    head = f"<span style='opacity:.6'>{safe(who, 100)}: </span>" if who else ""
    return f"<pre style='{_TEXT};{MASKS[mask]}'>{head}{safe(text)}</pre>"


def _chips(trajectory: Any) -> str:
    reward = "no reward" if trajectory.reward is None else f"{trajectory.total_reward:.4g}"
    facts = {"": f"{trajectory.id}, task {trajectory.task.id}", "outcome": trajectory.outcome.value, "reward": reward}
    facts |= {name: f"{value:.4g}" for name, value in list(trajectory.components.items())[:20]}
    facts |= {"turns": len(trajectory.turns), "tokens": trajectory.num_sampled, "seconds": f"{trajectory.seconds:.1f}"}
    if trajectory.error:
        facts["error"] = trajectory.error
    return "".join(_chip(name, value) for name, value in facts.items())


def _chip(name: str, value: object) -> str:
    head = f"<span style='opacity:.65'>{safe(name, 60)} </span>" if name else ""
    return f"<span style='{_CHIP}'>{head}{safe(value, 400)}</span>"


def _headline(trajectory: Any) -> str:
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.total_reward:.4g}"
    answer = f", answer {trajectory.prediction[:80]!r}" if trajectory.prediction else ""
    words = f"{trajectory.id}: task {trajectory.task.id}, {trajectory.outcome.value}, {reward}"
    return safe(f"{words}, {len(trajectory.turns)} turns{answer}", 400)


def _legend(trajectory: Any, trained: Sequence[bool] | None) -> str:
    if trained is not None:
        words = {"trained": "sampled and trained", "sampled": "sampled, not trained", "context": "context"}
    elif trajectory.trainable:
        words = {"trained": "sampled by the policy: what training uses", "context": "context"}
    else:
        words = {"sampled": "sampled by the policy; the chain cannot be trained on", "context": "context"}
    return " ".join(f"<span style='{MASKS[mask]};padding:0 .4em'>{text}</span>" for mask, text in words.items())


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th style='{_CELL};opacity:.65'>{safe(name, 100)}</th>" for name in columns)
    body = "".join(
        "<tr style='background:none'>"
        + "".join(f"<td style='{_CELL}'>{safe(_cell(value), 300)}</td>" for value in row)
        + "</tr>"
        for row in rows[:MAX_ROWS]
    )
    style = "border-collapse:collapse;font:inherit;color:inherit"
    return f"<table style='{style}'><tr style='background:none'>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
