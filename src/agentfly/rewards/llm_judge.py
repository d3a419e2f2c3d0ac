"""LLM-as-judge: another model reads the result and gives a mark, which becomes a reward from 0 to 1.

If the judge fails or gives no readable mark, the chain counts as a world failure and is not trained on; it never gets reward 0.
A policy can learn to exploit a judge: read its transcripts, and mix the judge with a rule.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, EngineError, WorldError, blame
from ..types import Engine, Message, Renderer, Request, Sampling, Task, Trajectory
from .base import Reward
from .function import FunctionReward
from .lookup import factory

PROMPT = """You are a strict grader. Compare the response with the reference answer.

[Question]
{question}

[Reference answer]
{answer}

[Response]
{prediction}

Say in one or two sentences what is right and what is wrong. Then write, on a line of its own:
Score: N
where N is a number from {lowest} (useless) to {highest} (fully right)."""

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_NUMBER = r"[-+]?\d{1,9}(?:\.\d{1,9})?"
# Most explicit first. Bounded repeats keep each of them linear.
_MARKS = (
    re.compile(rf"\[\[\s{{0,9}}({_NUMBER})"),
    re.compile(
        rf"\b(?:score|rating|grade|mark)\b[\"'*_]{{0,4}}\s{{0,9}}(?:[:=]|\bis\b)\s{{0,9}}[\"'*_]{{0,4}}\s{{0,9}}({_NUMBER})",
        re.I,
    ),
    re.compile(rf"(?<![\d./])({_NUMBER})\s{{0,3}}/\s{{0,3}}\d"),
)
_BARE = re.compile(rf"\s*[*_]{{0,3}}({_NUMBER})[*_]{{0,3}}\.?\s*")
_sessions = itertools.count()


@factory("judge")
def judge(
    engine: Engine | str,
    prompt: str = PROMPT,
    scale: tuple[float, float] = (0.0, 10.0),
    renderer: Renderer | None = None,
    sampling: Sampling | None = None,
    attempts: int = 2,
    timeout_s: float = 60.0,
    name: str = "judge",
) -> Reward:
    """A mark from another model, scaled to 0 .. 1.

    `prompt` may use {question} (the last user message of the task), {prediction}, {transcript}, {lowest}, {highest} and any
    field of the data set; the fields it names are needed. An engine that reads ids needs its `renderer` too; the name of a
    model brings both.
    """
    low, high = _read_scale(scale, name)
    if attempts < 1:
        raise ConfigError(f"reward {name!r}: attempts must be at least 1, not {attempts}")
    judging, renderer = _open(engine, renderer)
    if judging.reads == "ids" and renderer is None:
        raise ConfigError(f"reward {name!r}: its engine reads token ids, so give it a renderer as well")
    drawn = sampling or Sampling(temperature=0.0, max_tokens=512)
    if renderer is not None and not drawn.stop_ids:
        drawn = replace(drawn, stop_ids=tuple(renderer.stop_ids))
    placeholders = set(_PLACEHOLDER.findall(prompt))
    known = {"question", "prediction", "transcript", "lowest", "highest"}

    async def mark(prediction: str, trajectory: Trajectory, task: Task) -> float:
        values = {"question": _question(task), "prediction": prediction, "lowest": f"{low:g}", "highest": f"{high:g}"}
        if "transcript" in placeholders:
            values["transcript"] = transcript(trajectory)
        values |= {field: _text(task.fields[field]) for field in placeholders - known}
        message = Message("user", _PLACEHOLDER.sub(lambda found: values[found.group(1)], prompt))
        reply = ""
        for _ in range(attempts):
            reply = await _ask(judging, renderer, message, drawn)
            score = read_mark(reply, low, high)
            if score is not None:
                return (score - low) / (high - low)
        raise WorldError(
            f"the judge gave no mark from {low:g} to {high:g} in {attempts} attempts; it last said {reply[-80:]!r}"
        )

    mark.__doc__ = judge.__doc__
    return FunctionReward(mark, name=name, timeout_s=timeout_s, needs=placeholders - known)


def _open(engine: Engine | str, renderer: Renderer | None) -> tuple[Engine, Renderer | None]:
    if not isinstance(engine, str):
        return engine, renderer
    from ..engines import open_engine

    opened, found = open_engine(engine)
    return opened, renderer or found


async def _ask(engine: Engine, renderer: Renderer | None, message: Message, sampling: Sampling) -> str:
    session = f"judge-{next(_sessions)}"
    prompt_ids = renderer.start([message], ()) if renderer is not None and engine.reads == "ids" else []
    try:
        with blame(EngineError, "the judge's engine"):
            return (await engine.generate(Request(prompt_ids, sampling, session, [message]))).text
    finally:
        engine.release(session)


def read_mark(reply: str, low: float, high: float) -> float | None:
    """The mark in a judge's reply: JSON, [[7]], "Score: 7", "7/10" or a bare number. The last one counts; outside the scale
    is none."""
    tail = reply[-4000:]  # the mark comes last, and a long reply must not take longer to search
    for found in (_from_json(tail), *(_last(pattern, tail) for pattern in _MARKS)):
        if found is not None:
            return found if low <= found <= high else None
    lines = tail.strip().splitlines()
    bare = _BARE.fullmatch(lines[-1]) if lines else None
    return float(bare.group(1)) if bare and low <= float(bare.group(1)) <= high else None


def _from_json(text: str) -> float | None:
    start, end = text.rfind("{"), text.rfind("}")
    if start < 0 or end < start:
        return None
    try:
        value = json.loads(text[start : end + 1])
    except (ValueError, RecursionError):
        return None
    found = value.get("score", value.get("rating")) if isinstance(value, dict) else None
    if isinstance(found, str) and re.fullmatch(_NUMBER, found.strip()):
        return float(found)
    try:
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None
    except OverflowError:  # an integer of more than 308 digits
        return None


def _last(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.findall(text)
    return float(found[-1]) if found else None


def _read_scale(scale: Any, name: str) -> tuple[float, float]:
    try:
        low, high = (float(end) for end in scale)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {name!r}: scale is a pair such as (0, 10), not {scale!r}") from error
    if not low < high:
        raise ConfigError(f"reward {name!r}: the scale must rise, not go from {low:g} to {high:g}")
    return low, high


def _question(task: Task) -> str:
    return next((message.content for message in reversed(task.messages) if message.role == "user"), "")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def transcript(trajectory: Trajectory) -> str:
    """The conversation as text, for a judge that also marks the intermediate steps."""
    return "\n\n".join(f"[{message.role}]\n{message.content}" for message in trajectory.messages)
