"""A model that plays the user: another prompt, repeatable, and its end is the end of the conversation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfly import ReactAgent
from agentfly.errors import ConfigError
from agentfly.outside.user.simulated import STOP, SimulatedUser
from agentfly.resources import Budget, ResourceManager, spec_of
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Outcome, Request, Task

ROW = {"id": "t0", "question": "Find out what the user wants.", "persona": "You want a red bicycle."}


def talk(lines: list[str], **options: Any) -> tuple[list[str], bool]:
    async def run() -> tuple[list[str], bool]:
        user = SimulatedUser(**options)
        user.reset(Task("t0", (), ROW))
        try:
            return [await user.say(line) for line in lines], user.done
        finally:
            await user.close()

    return asyncio.run(run())


def scripted(reply: Any) -> ScriptedEngine:
    return ScriptedEngine(reply, reads="messages", record=True)


def test_the_model_reads_the_persona_and_the_conversation_from_the_users_side() -> None:
    engine = scripted(lambda request: f"reply {len(request.messages)}")
    replies, done = talk(["hello", "which colour?"], model=engine)
    assert (replies, done) == (["reply 2", "reply 4"], False)
    roles = [(message.role, message.content) for message in engine.requests[1].messages]
    assert roles[0][0] == "system"
    assert roles[0][1].endswith(ROW["persona"])
    assert roles[1:] == [("user", "hello"), ("assistant", "reply 2"), ("user", "which colour?")]


def test_the_user_ends_the_conversation_by_its_mark_or_after_so_many_turns() -> None:
    assert talk(["a", "b"], model=scripted(lambda request: f"thanks {STOP}")) == (["thanks", "The user is gone."], True)
    assert talk(["a", "b"], model=scripted(lambda request: "more"), max_turns=2) == (["more", "more"], True)


def test_a_real_model_gives_equal_replies_to_equal_conversations_and_others_by_another_seed() -> None:
    def replies(seed: int) -> list[str]:
        return talk(["What do you want?"], model="pocket", sampling={"max_tokens": 12, "seed": seed})[0]

    first = replies(0)
    assert first == replies(0)
    assert any(replies(seed) != first for seed in range(1, 5))


def test_an_agent_asks_the_user_and_the_instances_of_a_pool_share_the_model() -> None:
    user = scripted(lambda request: "a red bicycle")

    def reply(request: Request) -> str:
        seen = request.messages[-1].content
        return "Answer: bicycle" if "red bicycle" in seen else 'Action: ask_user\nInput: {"message": "What is it?"}'

    env = spec_of(SimulatedUser, options={"model": user})
    agent = ReactAgent(ScriptedEngine(reply), renderer=ByteRenderer(), env=env, tools=["ask_user"])
    chains = agent.run_sync([ROW], num_chains=3).trajectories
    assert [(chain.outcome, chain.prediction) for chain in chains] == [(Outcome.FINISHED, "bicycle")] * 3
    assert SimulatedUser._shared == {}


def test_a_row_without_a_persona_is_named() -> None:
    async def lease() -> None:
        async with ResourceManager(Budget(), spec_of("user")) as manager, manager.lease(["user"], Task("t0", (), {})):
            pass

    with pytest.raises(ConfigError, match="task t0: the field 'persona' must say who the user is"):
        asyncio.run(lease())
