"""Who used up the time of a chain: its replies and tools (it is scored, as at `max_turns`), or the world (it is left out)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from agentfly import ReactAgent, Task, reward, tool
from agentfly.errors import EngineError
from agentfly.learn.samples import to_samples
from agentfly.rollout import make_plan, open_environments, open_task, run_chains
from agentfly.rollout.chain import run_chain
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Completion, Outcome, Request, Trajectory

LOOK, HANG, ANSWER = "Action: look\nInput: {}", "Action: hang\nInput: {}", "Answer: done"


class Room:
    """An environment whose reset, or whose call, hangs."""

    hangs_at = ""

    async def reset(self, task: Task) -> None:
        if Room.hangs_at == "reset":
            await asyncio.sleep(600)

    async def enter(self) -> str:
        await asyncio.sleep(600 if Room.hangs_at == "call" else 0)
        return "ok"

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def the_room_is_well() -> None:
    Room.hangs_at = ""


@tool(name="look", register=False)
async def look() -> str:
    """Look."""
    return "nothing"


@tool(name="hang", register=False, timeout_s=600)
async def hang() -> str:
    """Never ends."""
    await asyncio.sleep(600)
    return "late"


@tool(name="enter", register=False, timeout_s=600)
async def enter(room: Room) -> str:
    """Enter the room."""
    return str(await room.enter())


@reward(name="answered")
def answered(prediction: str) -> float:
    return float(prediction == "done")


@reward(name="in_the_room")
async def in_the_room(room: Room) -> float:
    return float(await room.enter() == "ok")


class Server(ScriptedEngine):
    """A server that never replies. It answers whether it is alive."""

    alive = True

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(600)
        return await super().generate(request)

    async def check_alive(self) -> None:
        if not self.alive:
            raise EngineError("the server does not answer")


def play(
    replies: Any, *, until_s: float | None = None, limits: dict[str, float], engine: Any = None, **options: Any
) -> Trajectory:
    options = {"tools": [look, hang], "reward": answered, **options}
    agent = ReactAgent(engine or ScriptedEngine(list(replies)), renderer=ByteRenderer(), **options)

    async def main() -> Trajectory:
        plan = make_plan(agent)
        plan = replace(plan, limits=replace(plan.limits, **limits))  # type: ignore[arg-type]
        async with open_environments(agent, plan, None) as ready:
            until = None if until_s is None else time.monotonic() + until_s
            return await run_chain(ready, open_task(ready, Task("a", ())), 0, "t1-0-0", until=until)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("tokens of a reply", Outcome.MAX_TOKENS), ("tokens of the context", Outcome.MAX_TOKENS),
        ("turns", Outcome.MAX_TURNS), ("time of a chain", Outcome.MAX_TIME), ("time of a turn", Outcome.MAX_TIME),
        ("time of a group", Outcome.MAX_TIME), ("none", Outcome.FINISHED),
    ],
)  # fmt: skip
def test_every_kind_of_limit_truncates_the_chain_and_can_be_penalised_or_masked(kind: str, end: Outcome) -> None:
    options: dict[str, Any] = {"reward": "truncated", "limits": {}}
    replies = [LOOK, HANG] if kind.startswith("time") else [LOOK, ANSWER]
    if kind == "tokens of a reply":
        options["sampling"] = {"max_tokens": 8}
    elif kind == "tokens of the context":
        options["limits"] = {"max_context": 700}
        replies = [LOOK] * 60
    elif kind == "turns":
        options["limits"] = {"max_turns": 1}
    elif kind == "time of a group":
        options |= {"until_s": 0.3, "limits": {"group_timeout_s": 0.3}}
    elif kind.startswith("time"):
        options["limits"] = {f"{kind.rpartition(' ')[2]}_timeout_s": 0.3}
    if kind == "tokens of the context":
        options["limits"]["max_turns"] = 60
    chain = play(replies, **options)
    assert chain.outcome is end
    assert chain.outcome.truncated == (end is not Outcome.FINISHED), 'what loss.truncated = "mask" masks'
    assert chain.reward == -float(end is not Outcome.FINISHED)


@pytest.mark.parametrize("whose", ["chain", "turn", "group"])
def test_a_chain_whose_tool_uses_up_a_time_limit_is_scored_and_its_replies_are_trained(whose: str) -> None:
    until_s = 0.3 if whose == "group" else None
    chain = play([LOOK, HANG], until_s=until_s, limits={f"{whose}_timeout_s": 0.3})
    assert chain.outcome is Outcome.MAX_TIME
    assert chain.reward == 0.0
    assert f"the {'group of the chain' if whose == 'group' else whose} exceeded its time limit" in (chain.error or "")
    assert chain.tool_counts == {"look": 1, "hang": 1}
    (row,) = to_samples(chain)
    assert bytes(each for each in row.token_ids[row.mask].tolist() if each < 256).decode() == LOOK + HANG
    assert row.rewards.sum() == 0.0


def test_the_limit_of_a_group_also_ends_the_chains_of_a_validation() -> None:
    agent = ReactAgent(ScriptedEngine([LOOK, HANG]), renderer=ByteRenderer(), tools=[look, hang], reward=answered)

    async def main() -> list[Trajectory]:
        plan = make_plan(agent)
        plan = replace(plan, limits=replace(plan.limits, group_timeout_s=0.3))
        async with open_environments(agent, plan, None) as ready:
            return await run_chains(ready, [Task("a", ())], num_chains=2, max_concurrency=None)

    for chain in asyncio.run(main()):
        assert (chain.outcome, chain.reward) == (Outcome.MAX_TIME, 0.0)
        assert "the group of the chain exceeded its time limit" in (chain.error or "")


def test_a_chain_that_began_long_after_its_group_is_not_blamed_for_the_groups_limit() -> None:
    chain = play([LOOK, HANG], until_s=0.2, limits={"group_timeout_s": 60.0})
    assert (chain.outcome, chain.reward) == (Outcome.WORLD_FAILURE, None)
    assert "the group of the chain exceeded its time limit" in (chain.error or "")


def test_a_chain_that_waits_for_its_environment_until_its_time_is_over_is_a_failure_of_the_world() -> None:
    Room.hangs_at = "reset"
    chain = play([ANSWER], limits={"chain_timeout_s": 0.3}, env=Room, tools=[look])
    assert (chain.outcome, chain.reward) == (Outcome.WORLD_FAILURE, None)


@pytest.mark.parametrize("limit", ["chain_timeout_s", "turn_timeout_s"])
def test_a_tool_that_waits_for_an_environment_until_the_time_is_over_is_not_the_chains_fault(limit: str) -> None:
    Room.hangs_at = "reset"
    chain = play(["Action: enter\nInput: {}", ANSWER], limits={limit: 0.3}, tools=[enter])
    assert (chain.outcome, chain.reward) == (Outcome.WORLD_FAILURE, None)


@pytest.mark.parametrize("alive", [True, False])
def test_a_server_that_does_not_answer_is_the_worlds_failure_and_a_slow_reply_is_not(alive: bool) -> None:
    server = Server([ANSWER])
    server.alive = alive
    chain = play([], limits={"chain_timeout_s": 0.2}, engine=server)
    assert chain.outcome is (Outcome.MAX_TIME if alive else Outcome.WORLD_FAILURE)
    assert chain.reward == (0.0 if alive else None)
    assert [turn.text for turn in chain] == ([""] if alive else [])


def test_the_reply_that_a_limit_cuts_off_is_empty_and_those_before_it_are_trained() -> None:
    class Slow(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            if len(request.messages) > 2:
                await asyncio.sleep(600)
            return await super().generate(request)

    chain = play([], limits={"chain_timeout_s": 0.3}, engine=Slow([LOOK, ANSWER]))
    assert (chain.outcome, chain.prediction, chain.reward) == (Outcome.MAX_TIME, "", 0.0)
    assert [turn.text for turn in chain] == [LOOK, ""]
    assert chain.error == "the chain exceeded its time limit of 0.3 s, in sampling (turn 2)"
    (row,) = to_samples(chain)
    assert row.mask.sum() == chain.num_sampled == len(chain[0].completion.token_ids)


def test_what_was_sampled_of_a_first_reply_that_a_limit_cuts_off_is_scored_and_trained() -> None:
    class Endless(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                assert request.on_cut is not None
                sampled = list(b"so, ")
                request.on_cut(Completion(text="so, ", token_ids=sampled, logprobs=[-0.5] * 4, versions=[3] * 4, stop="length"))
                raise
            raise AssertionError

    chain = play([], limits={"chain_timeout_s": 0.3}, engine=Endless([]))
    assert (chain.outcome, chain.prediction, chain.reward, chain.trainable) == (Outcome.MAX_TIME, "so, ", 0.0, True)
    assert [turn.text for turn in chain] == ["so, "] == [message.content for message in chain.messages[-1:]]
    assert 0.2 < chain[0].sampled_s <= chain.seconds
    (row,) = to_samples(chain)
    assert bytes(row.token_ids[row.mask].tolist()).decode() == "so, "


def test_a_chain_that_cannot_be_scored_after_its_limit_names_both_reasons() -> None:
    Room.hangs_at = "call"
    chain = play(["Action: enter\nInput: {}"], limits={"chain_timeout_s": 0.3}, tools=[enter], reward=in_the_room)
    assert (chain.outcome, chain.reward) == (Outcome.WORLD_FAILURE, None)
    assert "the environment was closed" in (chain.error or "")
    assert "after the chain exceeded its time limit of 0.3 s, in tools: enter (turn 1)" in (chain.error or "")


def test_a_tool_that_exceeds_its_own_limit_ends_a_chain_as_its_own_fault() -> None:
    @tool(name="hang", register=False, timeout_s=0.1)
    async def slow() -> str:
        """Never ends."""
        await asyncio.sleep(600)
        return "late"

    chain = play([HANG], limits={}, tools=[slow], on_tool_error="end")
    assert (chain.outcome, chain.reward) == (Outcome.MAX_TIME, 0.0)
    assert chain.trainable
