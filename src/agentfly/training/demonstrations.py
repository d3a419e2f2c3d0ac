"""Demonstrations as training rows. A demonstration is a row whose `messages` include the replies, or a chain of a run.

They come from a file, a named set (`plugins`, kind "demos": `fn(count, seed=0, *, mistakes=0.0) -> rows`), or the folder of a
run. A row becomes a `Trajectory` as if the policy had sampled the replies, so prompts and masks are those of reinforcement
learning. A chain is trained on the ids that were sampled; nothing of it is rendered again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import plugins
from ..agents.base import BaseAgent
from ..aio.threads import run_to_end
from ..build import build_plan, trainable_engine
from ..config import Config
from ..data import MESSAGES, is_file_name, parse_message, read_rows, rename_columns
from ..engines.prompt import decode
from ..errors import ConfigError, DataError
from ..learn.samples import to_samples
from ..render.demo_reply import same_calls
from ..rollout import Plan, check_prompts, make_plan, opening_messages, run_chains
from ..rollout.shaping import CALL_BONUS
from ..rows import OpenRow
from ..runs import ChainFilter, RunDirectory, RunReader
from ..runs.trained import best_and_worst, by_task, success_of, why_none_is_good
from ..types import Completion, Message, Outcome, Sample, Task, Trajectory
from ..watch.metrics import is_success
from ..watch.observers import Observer

COUNT = 1000
"""Demonstrations drawn from a set if no number is given."""


def demo_rows(
    source: str, count: int | None, seed: int, mistakes: float | None = None, columns: Mapping[str, str] | None = None
) -> list[Any]:
    """Returns the first `count` rows of a file or chains of a run, or `count` rows of a set. `mistakes` is for sets only.

    `columns` renames fields of rows (`data.rename_columns`).
    """
    if is_run(source) and columns:
        raise ConfigError(f"data.columns has no effect on the chains of {source}: remove it")
    if is_file_name(source) or is_run(source):
        if mistakes:
            raise ConfigError(f"warm_start.mistakes has no effect on {source}: it is used unchanged. Remove it")
        rows = (best_chains(source) if is_run(source) else read_rows(source))[:count]
    else:
        maker = plugins.resolve("demos", source)
        if not callable(maker):
            raise ConfigError(f"the demonstrations {source!r} are not a function fn(count, seed=0, *, mistakes=0.0) -> rows")
        rows = list(maker(COUNT if count is None else count, seed, mistakes=mistakes or 0.0))
    if not rows:
        raise DataError(f"{source}: the data set is empty")
    return rename_columns(rows, columns, source)


def is_run(source: str) -> bool:
    """Whether a source of demonstrations is the folder of a run."""
    return (Path(source) / "run.db").is_file()


def best_chains(run: str, best: int | None = None, min_reward: float | None = None) -> list[Trajectory]:
    """Returns the training chains of a run with a high reward, the best of each task first, and none twice.

    `best` limits the chains of a task; `min_reward` is by default the run's `agent.success_at`. Raises DataError without any.
    """
    chains: list[Trajectory] = []
    with RunReader(RunDirectory.existing(run).database, timeout_s=600.0) as reader:
        low = success_of(reader) if min_reward is None else min_reward
        chosen = replace(_trained_split(reader), reward_low=low - 1e-9)
        for rows in by_task(reader, chosen):
            seen: set[tuple[int, ...]] = set()
            for row in rows:
                trajectory = reader.trajectory(row.id)
                if trajectory.total_reward - trajectory.components.get(CALL_BONUS, 0.0) < low - 1e-9:
                    continue
                if trajectory.trainable and (ids := _sampled(trajectory)) not in seen:
                    seen.add(ids)
                    chains.append(trajectory)
                if len(seen) == best:
                    break
        if not chains:
            raise DataError(why_none_is_good(reader, chosen))
    return chains


def pairs_of(run: str, min_gap: float = 0.0) -> list[tuple[Trajectory, Trajectory]]:
    """Returns the best and the worst chain of each group of a run, none twice. Raises DataError without any."""
    pairs: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[Trajectory, Trajectory]] = {}
    with RunReader(RunDirectory.existing(run).database, timeout_s=600.0) as reader:
        for high, low in best_and_worst(reader, _trained_split(reader), min_gap):
            chosen, rejected = reader.trajectory(high.id), reader.trajectory(low.id)
            if chosen.trainable and rejected.trainable:
                pairs.setdefault((high.task_id, _sampled(chosen), _sampled(rejected)), (chosen, rejected))
    if not pairs:
        raise DataError(
            f"no group of {run} has two chains with different rewards"
            + (f" that are at least {min_gap:g} apart: lower --min-gap" if min_gap else ": raise its rollout.num_chains")
        )
    return list(pairs.values())


def _trained_split(reader: RunReader) -> ChainFilter:
    """The chains of training tasks; of an evaluation, all."""
    return ChainFilter(split=None if reader.meta().get("kind") == "eval" else "train")


def _sampled(trajectory: Trajectory) -> tuple[int, ...]:
    return tuple(token for turn in trajectory.turns for token in turn.completion.token_ids)


def _check_text(trajectory: Trajectory, tokenizer: object, model: object) -> None:
    """Raises DataError if the sampled ids of a chain are not its text under this tokenizer."""
    for turn in trajectory.turns:
        ids, text = list(turn.completion.token_ids), turn.completion.text
        if text not in (decode(tokenizer, ids), decode(tokenizer, ids[:-1])):  # the id that ends a reply is not in its text
            raise DataError(
                f"the tokens of chain {trajectory.id} are not its text under {model}, so another tokenizer has sampled them: "
                "`agentfly export RUN chains.jsonl --format sft` and data.train=chains.jsonl train the texts instead"
            )


def demo_samples(rows: Sequence[Any] | Mapping[int, Any], agent: BaseAgent) -> list[Sample]:
    """Returns the training rows of all demonstrations; a mapping gives each its number in the file.

    Raises DataError for a demonstration that does not fit into the context.
    """
    renderer = agent.renderer
    assert renderer is not None
    limit = make_plan(agent).limits.max_context
    all_samples: list[Sample] = []
    for index, row in rows.items() if isinstance(rows, Mapping) else enumerate(rows):
        if isinstance(row, Trajectory):
            _check_text(row, trainable_engine(agent).tokenizer, agent.model)
            samples = _without_examples(row, agent, renderer)
        else:
            samples = to_samples(to_trajectory(row, index, agent, renderer, agent.schemas))
        longest = max(len(sample.token_ids) for sample in samples)
        if longest > limit:
            raise DataError(f"row {index}: the demonstration has {longest} tokens, but the context holds {limit}")
        all_samples += samples
    return all_samples


def _without_examples(trajectory: Trajectory, agent: BaseAgent, renderer: Any) -> list[Sample]:
    """The rows of a chain. If its prompt shows examples that the agent's prompts do not have, they are taken out of it."""
    samples, plain = to_samples(trajectory), opening_messages(agent, trajectory.task)
    shown = opening_messages(agent, trajectory.task, shown=True)
    if shown == plain or trajectory.messages[: len(shown)] != shown:
        return samples
    sampled_under, other = renderer.start(shown, agent.schemas), renderer.start(plain, agent.schemas)
    if sampled_under != list(trajectory.turns[0].context_ids):
        raise DataError(
            f"the prompt of chain {trajectory.id} is not rendered alike a second time, so its examples cannot be taken out: "
            "remove agent.examples_steps"
        )
    from ..learn.hint import with_prompt  # late: torch

    return [with_prompt(sample, sampled_under, other, "agent.examples_steps") for sample in samples]


def to_trajectory(row: Any, index: int, agent: BaseAgent, renderer: Any, schemas: Sequence[Any]) -> Trajectory:
    """Returns a demonstration as the trajectory of a chain that sampled its replies. Raises DataError if it is malformed."""
    messages = _without(agent.examples, _messages(row, index))
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), None)
    if not first:
        raise DataError(f"row {index}: a demonstration has at least one message before its first assistant reply")
    fields = {key: value for key, value in row.items() if key not in MESSAGES}
    task = Task(str(row.get("id", index)), tuple(messages[:first]), fields)
    trajectory = Trajectory(f"demo-{index}", task, 0, _opening(agent, task), outcome=Outcome.FINISHED, reward=0.0)
    row = OpenRow.begin("", 0, renderer.start(trajectory.messages, schemas), "first")
    position = first
    while position < len(messages):
        reply = messages[position]
        if reply.role != "assistant":
            raise DataError(f"row {index}: message {position} should be an assistant reply")
        completion = _write(reply, f"row {index}: message {position}", trajectory.messages, agent, renderer, schemas)
        trajectory.turns.append(row.turn(completion))
        row.reply(completion.token_ids)
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
        row = row.extend(renderer.extend(trajectory.messages, len(new), completion, schemas))
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


def _messages(row: object, index: int) -> list[Message]:
    messages = next((row[name] for name in MESSAGES if name in row), None) if isinstance(row, dict) else None
    if not isinstance(messages, list):
        raise DataError(f"row {index}: a demonstration is an object with a list 'messages' or 'conversations'")
    for number, item in enumerate(messages):
        if isinstance(item, Mapping) and item.get("role") == "assistant" and item.get("weight") not in (None, 1):
            raise DataError(
                f"row {index}: message {number} has the weight {item['weight']!r}, but all replies are trained alike"
            )
    return [parse_message(item, number, f"row {index}") for number, item in enumerate(messages)]


def self_made(
    config: Config, agent: BaseAgent, tasks: Sequence[Task], observe: Observer,
    opened: Callable[[Plan], AbstractAsyncContextManager[Plan]],
) -> list[Trajectory]:  # fmt: skip
    """Plays about `warm_start.count` chains of training tasks. Returns those with success. Raises DataError without any.

    Each task gets `rollout.num_chains` chains. `opened` opens the environments of a plan.
    """
    num_chains = config.rollout.num_chains
    count = min(len(tasks), max(1, config.warm_start.count // num_chains))
    drawn = random.Random(f"self-made {config.seed}").sample(tasks, count)
    bare = build_plan(config, agent)
    seed = config.seed if config.sampling.seed is None else config.sampling.seed
    plan = replace(bare, shown=True, sampling=replace(bare.sampling, seed=seed * 1_000_003))
    check_prompts(plan, drawn)
    observe.phase("self-made demonstrations", count * num_chains)
    ended: list[Trajectory] = []

    def end(trajectory: Trajectory) -> None:
        ended.append(trajectory)
        observe.advance(len(ended))

    async def play() -> list[Trajectory]:
        async with opened(plan) as ready:
            return await run_chains(
                ready, drawn, num_chains=num_chains, max_concurrency=config.rollout.max_concurrency, prefix="w",
                on_trajectory=end,
            )  # fmt: skip

    chains = run_to_end(play())
    good: dict[tuple[str, tuple[int, ...]], Trajectory] = {}
    for chain in chains:
        if chain.trainable and is_success(chain, config.agent.success_at):
            good.setdefault((chain.task.id, _sampled(chain)), chain)
    solved = len({chain.task.id for chain in good.values()})
    observe.note(f"self-made demonstrations: kept {len(good)} of {len(chains)} chains, which solve {solved} of {count} tasks")
    if solved < 2:
        raise DataError(
            f'warm_start.demos = "self" needs chains with success of two tasks, and {len(chains)} chains solved {solved}: give '
            "other agent.examples, easier tasks or a larger warm_start.count, or demonstrations in a file"
        )
    return list(good.values())
