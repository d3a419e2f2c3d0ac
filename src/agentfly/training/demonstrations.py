"""Demonstrations: rows whose `messages` hold the replies, as training rows.

In: a file, or the name of a set (`plugins`, kind "demos": a function `fn(count, seed=0, *, mistakes=0.0) -> rows`). Each row
becomes a `Trajectory` as if the policy had sampled those replies: the same prompt (the agent writes it), the same renderer, the
same `to_samples` and so the same masks as in reinforcement learning. Out: samples. A row that cannot be read, or does not fit
into the context, is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import plugins
from ..agents.base import BaseAgent
from ..data import is_file_name, parse_message, read_rows
from ..errors import ConfigError, DataError
from ..learn.samples import to_samples
from ..types import Completion, Message, Outcome, Sample, Task, Trajectory, Turn

COUNT = 1000
"""Demonstrations that are drawn from a set where no number is asked for."""


def demo_rows(source: str, count: int | None, seed: int, mistakes: float | None = None) -> list[Any]:
    """Rows of a file, or as many as are asked for from a set; `mistakes` is a set's own affair and refused for a file."""
    if is_file_name(source):
        if mistakes:
            raise ConfigError(f"warm_start.mistakes has no effect on {source}: a file is taken as it is. Remove it")
        rows = read_rows(Path(source))[:count]
    else:
        maker = plugins.resolve("demos", source)
        if not callable(maker):
            raise ConfigError(f"the demonstrations {source!r} are not a function fn(count, seed=0, *, mistakes=0.0) -> rows")
        rows = list(maker(COUNT if count is None else count, seed, mistakes=mistakes or 0.0))
    if not rows:
        raise DataError(f"{source}: the data set is empty")
    return rows


def demo_samples(rows: Sequence[Any], agent: BaseAgent) -> list[Sample]:
    """Training rows of all demonstrations; one that the context cannot hold is refused."""
    renderer = agent.renderer
    assert renderer is not None
    limit = agent.plan().limits.max_context
    found: list[Sample] = []
    for index, row in enumerate(rows):
        samples = to_samples(to_trajectory(row, index, agent, renderer, agent.schemas))
        longest = max(len(sample.token_ids) for sample in samples)
        if longest > limit:
            raise DataError(f"row {index}: the demonstration has {longest} tokens, but the context holds {limit}")
        found += samples
    return found


def to_trajectory(row: Any, index: int, agent: BaseAgent, renderer: Any, schemas: Sequence[Any]) -> Trajectory:
    """One demonstration as the trajectory of a chain that replied exactly so."""
    messages = _messages(row, index)
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), None)
    if not first:
        raise DataError(f"row {index}: a demonstration has at least one message before its first assistant reply")
    fields = {key: value for key, value in row.items() if key != "messages"}
    task = Task(str(row.get("id", index)), tuple(messages[:first]), fields)
    trajectory = Trajectory(f"demo-{index}", task, 0, agent.start(task), outcome=Outcome.FINISHED, reward=0.0)
    ids, restarts = renderer.start(trajectory.messages, schemas), True
    position = first
    while position < len(messages):
        reply = messages[position]
        if reply.role != "assistant":
            raise DataError(f"row {index}: message {position} should be an assistant reply")
        text, reply_ids = renderer.write_reply(trajectory.messages, reply, schemas)
        completion = Completion(text=text, token_ids=reply_ids, logprobs=[0.0] * len(reply_ids), versions=[0] * len(reply_ids))
        trajectory.turns.append(Turn(ids, restarts, completion))
        trajectory.messages.append(reply)
        following = position + 1
        while following < len(messages) and messages[following].role != "assistant":
            following += 1
        new = messages[position + 1 : following]
        if following == len(messages):
            break
        if not new:
            raise DataError(f"row {index}: messages {position} and {following} are both the assistant's; join them into one")
        trajectory.messages += new
        extension = renderer.extend(trajectory.messages, len(new), completion, schemas)
        ids, restarts = extension.ids, extension.restarts
        position = following
    return trajectory


def _messages(row: Any, index: int) -> list[Message]:
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise DataError(f"row {index}: a demonstration is an object with a list 'messages'")
    return [parse_message(item, number, f"row {index}") for number, item in enumerate(row["messages"])]
