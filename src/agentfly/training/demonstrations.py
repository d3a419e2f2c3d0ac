"""Demonstrations as training rows. A demonstration is a row whose `messages` include the replies.

They come from a file or a named set (`plugins`, kind "demos": `fn(count, seed=0, *, mistakes=0.0) -> rows`). Each becomes a
`Trajectory` as if the policy had sampled the replies, so prompts and masks are those of reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import plugins
from ..agents.base import BaseAgent
from ..data import is_file_name, parse_message, read_rows
from ..errors import ConfigError, DataError
from ..learn.samples import to_samples
from ..render.demo_reply import same_calls
from ..rollout import make_plan, opening_messages
from ..types import Completion, Message, Outcome, Sample, Task, Trajectory, Turn

COUNT = 1000
"""Demonstrations drawn from a set if no number is given."""


def demo_rows(source: str, count: int | None, seed: int, mistakes: float | None = None) -> list[Any]:
    """Returns the first `count` rows of a file, or `count` rows of a set. `mistakes` applies to sets only."""
    if is_file_name(source):
        if mistakes:
            raise ConfigError(f"warm_start.mistakes has no effect on {source}: a file is used unchanged. Remove it")
        rows = read_rows(source)[:count]
    else:
        maker = plugins.resolve("demos", source)
        if not callable(maker):
            raise ConfigError(f"the demonstrations {source!r} are not a function fn(count, seed=0, *, mistakes=0.0) -> rows")
        rows = list(maker(COUNT if count is None else count, seed, mistakes=mistakes or 0.0))
    if not rows:
        raise DataError(f"{source}: the data set is empty")
    return rows


def demo_samples(rows: Sequence[Any] | Mapping[int, Any], agent: BaseAgent) -> list[Sample]:
    """Returns the training rows of all demonstrations; a mapping gives each its number in the file.

    Raises DataError for a demonstration that does not fit into the context.
    """
    renderer = agent.renderer
    assert renderer is not None
    limit = make_plan(agent).limits.max_context
    all_samples: list[Sample] = []
    for index, row in rows.items() if isinstance(rows, Mapping) else enumerate(rows):
        samples = to_samples(to_trajectory(row, index, agent, renderer, agent.schemas))
        longest = max(len(sample.token_ids) for sample in samples)
        if longest > limit:
            raise DataError(f"row {index}: the demonstration has {longest} tokens, but the context holds {limit}")
        all_samples += samples
    return all_samples


def to_trajectory(row: Any, index: int, agent: BaseAgent, renderer: Any, schemas: Sequence[Any]) -> Trajectory:
    """Returns a demonstration as the trajectory of a chain that sampled its replies. Raises DataError if it is malformed."""
    messages = _without(agent.examples, _messages(row, index))
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), None)
    if not first:
        raise DataError(f"row {index}: a demonstration has at least one message before its first assistant reply")
    fields = {key: value for key, value in row.items() if key != "messages"}
    task = Task(str(row.get("id", index)), tuple(messages[:first]), fields)
    trajectory = Trajectory(f"demo-{index}", task, 0, _opening(agent, task), outcome=Outcome.FINISHED, reward=0.0)
    ids, restarts = renderer.start(trajectory.messages, schemas), True
    position = first
    while position < len(messages):
        reply = messages[position]
        if reply.role != "assistant":
            raise DataError(f"row {index}: message {position} should be an assistant reply")
        completion = _write(reply, f"row {index}: message {position}", trajectory.messages, agent, renderer, schemas)
        trajectory.turns.append(Turn(ids, restarts, completion))
        trajectory.messages.append(replace(reply, content=completion.text))
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


def _write(
    reply: Message, where: str, before: Sequence[Message], agent: BaseAgent, renderer: Any, schemas: Sequence[Any]
) -> Completion:
    """The reply as a completion that the agent reads as the same calls. Raises DataError."""
    options = {"parser": parser} if reply.tool_calls and (parser := getattr(agent, "parser", None)) else {}
    try:
        text, ids = renderer.write_reply(before, reply, schemas, **options)
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from error
    completion = Completion(text=text, token_ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids))
    if reply.tool_calls and not same_calls(agent.parse(completion).calls, reply.tool_calls):
        raise DataError(
            f"{where} has tool calls that {type(agent).__name__} does not read in the written reply {text[:80]!r}: give the "
            "reply as plain text in the agent's format"
        )
    return completion


def _opening(agent: BaseAgent, task: Task) -> list[Message]:
    """The agent's opening messages. A row that begins with them already, as an exported chain does, is left as it is."""
    given = list(task.messages)
    bare = replace(task, messages=task.messages[1:])
    return opening_messages(agent, bare if given[0].role == "system" and agent.start(bare) == given else task)


def _without(examples: Sequence[Message], messages: list[Message]) -> list[Message]:
    """Returns the messages of a demonstration without the agent's examples, which an exported chain holds and a prompt adds."""
    at = int(messages[:1] != [] and messages[0].role == "system")
    shown = messages[at : at + len(examples)] == list(examples)
    return [*messages[:at], *messages[at + len(examples) :]] if shown else messages


def _messages(row: Any, index: int) -> list[Message]:
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise DataError(f"row {index}: a demonstration is an object with a list 'messages'")
    for number, item in enumerate(row["messages"]):
        if isinstance(item, Mapping) and item.get("role") == "assistant" and item.get("weight") not in (None, 1):
            raise DataError(
                f"row {index}: message {number} has the weight {item['weight']!r}, but all replies are trained alike"
            )
    return [parse_message(item, number, f"row {index}") for number, item in enumerate(row["messages"])]
