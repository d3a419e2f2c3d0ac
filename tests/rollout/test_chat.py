"""A conversation with an agent: the ids that the model reads, tools and environments, forks of stored chains, stopping."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentfly import ReactAgent, reward, tool
from agentfly.errors import ConfigError, EngineError
from agentfly.rollout.chat import ChatSession
from agentfly.rows import OpenRow
from agentfly.testing import GuessEnv, ScriptedEngine
from agentfly.types import Event, Message, Outcome, Request, Task


@tool(name="multiply", register=False)
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: one
        b: another
    """
    return a * b


@tool(name="guess", register=False)
async def guess(n: int, env: GuessEnv) -> str:
    """Guess the number.

    Args:
        n: your guess
    """
    return env.guess(n)


@reward(name="solved")
def solved(env: GuessEnv, prediction: str) -> dict[str, float]:
    return {"reward": float(env.solved), "long": float(len(prediction))}


def call(name: str, **arguments: Any) -> str:
    return f"Thought: use it\nAction: {name}\nInput: {json.dumps(arguments)}"


def agent_for(replies: Any, **options: Any) -> tuple[ReactAgent, ScriptedEngine]:
    engine = ScriptedEngine(replies, record=True)
    return ReactAgent(engine, renderer=engine.renderer, **({"tools": [multiply]} | options)), engine


async def said(session: ChatSession, text: str | None = None) -> list[Event]:
    return [event async for event in session.send(text)]


def test_a_conversation_goes_on_and_the_model_reads_its_own_tokens() -> None:
    agent, engine = agent_for([call("multiply", a=6, b=7), "Answer: 42", "Answer: you are welcome"])

    async def talk() -> None:
        async with await ChatSession.open(agent) as chat:
            events = await said(chat, "What is 6 * 7?")
            assert [event.kind for event in events] == ["text", "tool_call", "observation", "text", "finished"]
            assert events[2].data["result"].observation == "42"
            assert events[-1].data["outcome"] is Outcome.FINISHED
            events = await said(chat, "Thanks")
            assert [event.kind for event in events] == ["text", "finished"]
            assert chat.trajectory.prediction == "you are welcome"
            # What the model read the third time is what it had read and sampled before, and the new message.
            third = engine.requests[2].prompt_ids
            second = [*engine.requests[1].prompt_ids, *chat.trajectory.turns[1].completion.token_ids]
            assert third[: len(second)] == second
            assert "Thanks" in engine.renderer.decode(third[len(second) :])
            assert OpenRow.resume(chat.trajectory).prompt == [*third, *chat.trajectory.turns[2].completion.token_ids]
            assert [turn.restarts for turn in chat.trajectory.turns] == [True, False, False]
        assert engine.released == [chat.trajectory.id]

    asyncio.run(talk())


def test_every_message_has_all_turns() -> None:
    agent, _ = agent_for(lambda request: call("multiply", a=2, b=2), max_turns=2)

    async def talk() -> None:
        async with await ChatSession.open(agent) as chat:
            for number in (1, 2):
                events = await said(chat, "Again")
                assert events[-1].data["outcome"] is Outcome.MAX_TURNS
                assert len(chat.trajectory.turns) == 2 * number

    asyncio.run(talk())


def guesser(replies: Any, **options: Any) -> tuple[ReactAgent, ScriptedEngine]:
    return agent_for(replies, tools=[guess], env=GuessEnv, reward=solved, **options)


TASK = Task("t", (Message("user", "Guess my number."),), {"secret": 7})


def test_a_task_is_played_in_its_environment_and_scored() -> None:
    agent, engine = guesser([call("guess", n=3), call("guess", n=7), "Answer: 7"])

    async def talk() -> None:
        async with await ChatSession.open(agent, task=TASK) as chat:
            events = await said(chat)
            assert [e.data["result"].observation for e in events if e.kind == "observation"] == ["higher", "correct"]
            scored = await chat.score()
            assert scored == (1.0, {"solved": 1.0, "long": 1.0})
            assert await chat.score() == scored  # asking twice changes nothing
        assert "Guess my number." in engine.renderer.decode(engine.requests[0].prompt_ids)

    asyncio.run(talk())


def test_a_text_replaces_the_question_of_a_task_and_keeps_its_fields() -> None:
    agent, engine = guesser([call("guess", n=7), "Answer: 7"])

    async def talk() -> None:
        async with await ChatSession.open(agent, task=TASK) as chat:
            await said(chat, "Try seven.")
            asked = engine.renderer.decode(engine.requests[0].prompt_ids)
            assert "Try seven." in asked and "Guess my number." not in asked
            assert (await chat.score())[0] == 1.0

    asyncio.run(talk())


def test_an_environment_that_needs_a_task_says_so() -> None:
    agent, _ = guesser(["Answer: 7"])
    with pytest.raises(ConfigError, match="secret"):
        asyncio.run(ChatSession.open(agent))


def test_a_tool_that_needs_a_field_asks_for_a_task() -> None:
    @tool(name="whisper", register=False, inject=["answer"])
    def whisper(answer: str) -> str:
        """Look."""
        return answer

    agent, _ = agent_for(["Answer: 7"], tools=[whisper])
    with pytest.raises(ConfigError, match="Choose a task"):
        asyncio.run(ChatSession.open(agent))


def test_a_fork_reads_the_stored_ids_and_its_environment_is_where_it_was() -> None:
    first, _ = guesser([call("guess", n=3), call("guess", n=9), "Answer: 9"])
    stored = asyncio.run(first.run([{"question": "Guess my number.", "secret": 7}])).trajectories[0]
    assert len(stored.turns) == 3
    agent, engine = guesser([call("guess", n=7), "Answer: 7"])

    async def talk() -> None:
        async with await ChatSession.fork(agent, stored, 1) as chat:
            assert chat.differences == []
            events = await said(chat)
            assert engine.requests[0].prompt_ids == [
                *stored.turns[0].context_ids, *stored.turns[0].completion.token_ids, *stored.turns[1].context_ids
            ]  # fmt: skip
            assert [e.data["result"].observation for e in events if e.kind == "observation"] == ["correct"]
            assert (await chat.score())[0] == 1.0
            assert chat.trajectory.turns[0].completion is stored.turns[0].completion

    asyncio.run(talk())
    assert stored.turns[1].calls[0].arguments == {"n": 9}  # the stored chain is as it was


def test_a_fork_says_where_the_world_answers_otherwise() -> None:
    first, _ = guesser([call("guess", n=3), "Answer: 9"])
    stored = asyncio.run(first.run([{"question": "Guess.", "secret": 7}])).trajectories[0]
    stored.task = Task(stored.task.id, stored.task.messages, {"secret": 2})
    agent, _ = guesser(["Answer: 7"])

    async def talk() -> list[str]:
        async with await ChatSession.fork(agent, stored, 1) as chat:
            await said(chat, "And now?")
            return chat.differences

    assert asyncio.run(talk()) == ["turn 1: guess answered otherwise than in the stored chain"]


@pytest.mark.parametrize("turn", [-1, 4])
def test_a_fork_at_a_turn_that_does_not_exist_is_refused(turn: int) -> None:
    first, _ = guesser([call("guess", n=3), "Answer: 9"])
    stored = asyncio.run(first.run([{"question": "Guess.", "secret": 7}])).trajectories[0]
    with pytest.raises(ConfigError, match="has 2 turns"):
        asyncio.run(ChatSession.fork(first, stored, turn))


def test_a_reply_that_is_stopped_in_a_tool_can_be_followed_by_another_message() -> None:
    begun = asyncio.Event()

    @tool(name="wait", register=False)
    async def wait() -> str:
        """Wait."""
        begun.set()
        await asyncio.sleep(600)
        return "never"

    agent, engine = agent_for([call("wait"), "Answer: fine"], tools=[wait])

    async def talk() -> None:
        async with await ChatSession.open(agent) as chat:
            events = chat.send("Wait for me")
            async for event in events:
                if event.kind == "tool_call":
                    await begun.wait()
                    with pytest.raises(ConfigError, match="still replying"):
                        await said(chat, "Hello?")
                    break
            await events.aclose()
            assert not chat.busy
            events = await said(chat, "Enough")
            assert events[-1].data["outcome"] is Outcome.FINISHED
        told = engine.renderer.decode(engine.requests[-1].prompt_ids)
        assert "stopped by the user" in told and told.index("stopped by") < told.index("Enough")

    asyncio.run(talk())


def test_a_failure_of_the_engine_leaves_the_conversation_as_it_was() -> None:
    broken = [True]

    def reply(request: Request) -> Any:
        return EngineError("down") if broken[0] else "Answer: fine"

    agent, engine = agent_for(reply)

    async def talk() -> None:
        async with await ChatSession.open(agent) as chat:
            with pytest.raises(EngineError):
                await said(chat, "One")
            assert chat.trajectory.messages == []
            broken[0] = False
            await said(chat, "Two")
        assert "One" not in engine.renderer.decode(engine.requests[-1].prompt_ids)

    asyncio.run(talk())


def test_a_full_context_is_one_sentence() -> None:
    agent, _ = agent_for(lambda request: "Answer: yes", max_context=1000)

    async def talk() -> None:
        async with await ChatSession.open(agent) as chat:
            with pytest.raises(ConfigError, match="fills the context of 1000 tokens"):
                await said(chat, "x" * 2000)
            with pytest.raises(ConfigError, match="say something"):
                await said(chat)

    asyncio.run(talk())


def test_an_engine_that_reads_messages_can_be_talked_to() -> None:
    engine = ScriptedEngine(["Answer: one", "Answer: two"], reads="messages", record=True)
    agent = ReactAgent(engine, tools=[multiply])

    async def talk() -> None:
        async with await ChatSession.open(agent) as chat:
            await said(chat, "First")
            await said(chat, "Second")
        contents = [message.content for message in engine.requests[1].messages]
        assert contents[-3:] == ["First", "Answer: one", "Second"]

    asyncio.run(talk())
