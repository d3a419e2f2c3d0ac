"""One stored chain as JSON: its conversation, its training rows token by token, and the comparison of sibling chains.

Ids are decoded with the tokenizer of the run (`find_tokenizer`); no template is rendered again. A value per token is null where
the mask is 0: the policy did not sample that token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..pocket import model_dir, worlds_dir
from ..render.token_text import FILE, TokenDecoder
from ..rows import rows_of
from ..runs.catalog import read_config
from ..runs.directory import RunDirectory
from ..runs.query import RunReader
from ..runs.rows import ChainRow, TokenSeries
from ..runs.trained import training_of
from ..types import Message, Task, ToolResult, Trajectory, Turn
from ..watch.honesty import Honesty
from ..watch.tables import sampled_turns, why_untrained
from .answers import plain

MAX_SIBLINGS = 64
BUNDLED = {"pocket": model_dir, "pocket-worlds": worlds_dir}


# ---- the conversation ----------------------------------------------------------------------------------------------------


def chain_json(reader: RunReader, id: str) -> dict[str, Any]:  # noqa: A002 - the name of the field
    """What the page of a chain shows."""
    row, trajectory = reader.row(id), reader.trajectory(id)
    siblings = reader.group(row.step, row.task_id, row.draw, row.split)[:MAX_SIBLINGS]
    place = {number: index for index, (number, _) in sampled_turns(trajectory).items()}
    return {
        "summary": row,
        "task": task_json(trajectory.task),
        "messages": [message_json(message) for message in trajectory.messages],
        "turns": [turn_json(number, turn, place.get(number)) for number, turn in enumerate(trajectory.turns)],
        "times": {
            "started": trajectory.started or None,
            "seconds": trajectory.seconds,
            "waited_s": trajectory.waited_s,
            "scored_s": trajectory.scored_s,
        },
        "untrained": _why_untrained(reader, row, trajectory),
        "honesty": Honesty.of(trajectory).to_json(),
        "siblings": [{"id": each.id, "chain": each.chain, "score": each.score, "outcome": each.outcome} for each in siblings],
    }


def _why_untrained(reader: RunReader, row: ChainRow, trajectory: Trajectory) -> str | None:
    """Why no token of the chain was trained, or only some; None if all were. Derived for a run that did not record it."""
    training = training_of(reader, row, trajectory)
    if training.turns is not None or training.reason is not None:
        return training.reason
    skipped = {step: value or 0.0 for step, _, value in reader.series(["train/skipped"])["train/skipped"]}
    return why_untrained(trajectory, row.split, row.step, skipped)


def task_json(task: Task) -> dict[str, Any]:
    """The row of the data set."""
    return {"id": task.id, "messages": [message_json(message) for message in task.messages], "fields": plain(dict(task.fields))}


def message_json(message: Message) -> dict[str, Any]:
    """One message. Images are not stored; their number is."""
    return {
        "role": message.role,
        "content": message.content,
        "name": message.name,
        "tool_calls": [plain(call) for call in message.tool_calls],
        "images": len(message.images),
    }


def turn_json(number: int, turn: Turn, message: int | None) -> dict[str, Any]:
    """One turn, without its token lists. `message` is the index of its reply among the messages of the chain."""
    reply = turn.completion
    return {
        "turn": number,
        "message": message,
        "text": reply.text,
        "stop": reply.stop,
        "calls": [plain(call) for call in turn.calls],
        "results": [result_json(result) for result in turn.results],
        "reward": turn.reward,
        "state": turn.state,
        "restarts": turn.restarts,
        "why": turn.why,
        "num_context": len(turn.context_ids),
        "num_tokens": len(reply.token_ids),
        "versions": [min(reply.versions), max(reply.versions)] if reply.versions else None,
        "logprob": sum(reply.logprobs) if reply.logprobs else None,
        "generate_s": turn.sampled_s,
        "tools_s": turn.tools_s,
        "began_s": turn.began_s,
        "calls_s": list(turn.calls_s),
    }


def result_json(result: ToolResult) -> dict[str, Any]:
    """A tool's result. An image is not sent."""
    return {**plain(replace(result, image=None)), "image": result.image is not None}


# ---- tokens --------------------------------------------------------------------------------------------------------------


def find_tokenizer(folder: Path) -> tuple[Path | None, str]:
    """The file of the run's own tokenizer and where it was found; (None, why) if there is none on this machine."""
    directory = RunDirectory(folder)
    for step in reversed(directory.saved_steps()):
        file = directory.checkpoints / f"step-{step:06d}" / FILE
        if file.is_file():
            return file, file.parent.relative_to(folder).as_posix()
    agent = read_config(folder).get("agent")
    model = str(agent.get("model", "pocket")) if isinstance(agent, dict) else "pocket"
    if model in BUNDLED:
        return BUNDLED[model]() / FILE, model
    local = Path(model).expanduser() / FILE
    if local.is_file():
        return local, model
    cached = _cached(model)
    if cached is not None:
        return cached, model
    return None, f"the run has no checkpoint with a tokenizer, and the model {model!r} is not on this machine"


def _cached(model: str) -> Path | None:
    """The tokenizer of a hub model in the local cache; nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(model, FILE)
    except (ImportError, ValueError, OSError):  # a model's name that is not one of the hub
        return None
    return Path(path) if isinstance(path, str) else None


@lru_cache(maxsize=4)
def _decoder(file: Path, mtime_ns: int) -> TokenDecoder:
    return TokenDecoder(file)


def open_tokenizer(folder: Path) -> tuple[TokenDecoder | None, str, str | None]:
    """The decoder, the place it is from, and a note if there is no decoder."""
    file, where = find_tokenizer(folder)
    if file is None:
        return None, "", f"{where}: tokens are shown as numbers"
    try:
        return _decoder(file, file.stat().st_mtime_ns), where, None
    except (ConfigError, OSError) as error:
        return None, "", f"the tokenizer cannot be read: {error}; tokens are shown as numbers"


def tokens_json(trajectory: Trajectory, series: TokenSeries, decoder: TokenDecoder | None) -> dict[str, Any]:
    """The training rows of a chain with the values of every token."""
    named = {"advantage": series.advantage, "trainer_logprob": series.trainer_logprob, "entropy": series.entropy}
    more = {name: values for name, values in {**named, **series.others}.items() if values is not None}
    if series.trained is not None:
        more["trained"] = list(series.trained)
    rows, sampled = [], 0
    for numbers in rows_of(trajectory):
        row, sampled = _row_json(trajectory.turns, numbers, more, sampled, decoder)
        rows.append(row)
    return {"num_tokens": sampled, "series": ["logprob", "version", *more], "rows": rows}


def _row_json(
    turns: Sequence[Turn],
    numbers: Sequence[int],
    more: Mapping[str, Sequence[Any]],
    sampled: int,
    decoder: TokenDecoder | None,
) -> tuple[dict[str, Any], int]:
    """One row, and the number of sampled tokens up to its end."""
    ids: list[int] = []
    mask: list[int] = []
    spans = []
    values: dict[str, list[Any]] = {name: [] for name in ("logprob", "version", *more)}
    for number in numbers:
        turn, reply = turns[number], turns[number].completion
        context, count = len(turn.context_ids), len(reply.token_ids)
        spans.append({"turn": number, "start": len(ids), "sampled": len(ids) + context, "end": len(ids) + context + count})
        ids += [*turn.context_ids, *reply.token_ids]
        mask += [0] * context + [1] * count
        for column in values.values():
            column += [None] * context
        values["logprob"] += _short(reply.logprobs)
        values["version"] += reply.versions
        for name, given in more.items():
            own = _short(given[sampled : sampled + count])
            values[name] += own + [None] * (count - len(own))
        sampled += count
    pieces = None if decoder is None else decoder.pieces(ids)
    return {"turns": spans, "ids": ids, "mask": mask, "pieces": pieces, **values}, sampled


def _short(values: Iterable[Any]) -> list[Any]:
    """Seven decimals are more than a colour shows, and half of the bytes."""
    return [round(value, 7) if type(value) is float and isfinite(value) else value for value in values]


# ---- groups --------------------------------------------------------------------------------------------------------------


def group_json(rows: Sequence[ChainRow], chains: Sequence[Trajectory], decoder: TokenDecoder | None) -> dict[str, Any]:
    """Sibling chains side by side: aligned by turn, each compared with the first."""
    longest = max((len(chain.turns) for chain in chains), default=0)
    return {
        "task": task_json(chains[0].task) if chains else None,
        "siblings": list(rows),
        "turns": [
            [turn_json(number, chain.turns[number], None) if number < len(chain.turns) else None for chain in chains]
            for number in range(longest)
        ],
        "differences": [None, *(first_difference(chains[0], chain, decoder) for chain in chains[1:])] if chains else [],
    }


def first_difference(first: Trajectory, other: Trajectory, decoder: TokenDecoder | None = None) -> dict[str, Any] | None:
    """Where a chain begins to differ from its first sibling; None if it does not.

    `part` is "reply" (the model chose another token) or "context" (the same choices, but a tool or the template wrote another
    text before that reply). `token` counts in this part, and `char` is the place in the text of the reply. A chain that goes on
    where the other ends differs at token 0 of the next turn. Chains without token ids are compared by their texts.
    """
    for number in range(max(len(first.turns), len(other.turns))):
        pair = [chain.turns[number] if number < len(chain.turns) else None for chain in (first, other)]
        one, two = pair
        if one is None or two is None:
            return _difference(number, "reply", 0, 0, [], [], decoder)
        for part, left, right in (
            ("context", one.context_ids, two.context_ids),
            ("reply", one.completion.token_ids, two.completion.token_ids),
        ):
            at = _first_unequal(left, right)
            if at is not None:
                char = _first_unequal(one.text, two.text) if part == "reply" else None
                return _difference(number, part, at, char, left[at : at + 1], right[at : at + 1], decoder)
        if (char := _first_unequal(one.text, two.text)) is not None:
            return _difference(number, "reply", None, char, [], [], decoder)
    return None


def _difference(
    turn: int,
    part: str,
    token: int | None,
    char: int | None,
    left: Sequence[int],
    right: Sequence[int],
    decoder: TokenDecoder | None,
) -> dict[str, Any]:
    shown = [decoder.pieces(ids)[0] if decoder is not None and ids else None for ids in (left, right)]
    ids = [part[0] if part else None for part in (left, right)]
    return {"turn": turn, "part": part, "token": token, "char": char, "ids": ids, "pieces": shown}


def _first_unequal(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """The first place where two sequences differ, also if one is the beginning of the other; None if they are equal."""
    for place, (one, two) in enumerate(zip(left, right, strict=False)):
        if one != two:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))
