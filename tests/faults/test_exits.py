"""Exceptions that are no `Exception`, raised by a user's tool, reward or environment, never end the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfly import ReactAgent, Task, reward, tool
from agentfly.aio.deadline import within
from agentfly.aio.threads import run_in_thread
from agentfly.errors import ConfigError, RewardError
from agentfly.testing import ByteRenderer, ScriptedEngine


class OwnExit(BaseException):
    """A user's exception that is no `Exception`."""


EXITS: dict[str, type[BaseException]] = {
    "interrupt": KeyboardInterrupt,
    "exit": SystemExit,
    "generator": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "own": OwnExit,
}
CALL = 'Action: act\nInput: {"kind": "%s"}'


class Leaver:
    """Raises in the method that the task or the call names."""

    def __init__(self) -> None:
        self.task: Task | None = None

    def reset(self, task: Task) -> None:
        self.task = task
        if task.fields.get("leave") == "reset":
            raise EXITS[task.fields["kind"]]("x")

    def go(self, kind: str) -> str:
        raise EXITS[kind]("x")

    async def go_later(self, kind: str) -> str:
        await asyncio.sleep(0)
        raise EXITS[kind]("x")

    def close(self) -> None:
        if self.task is not None and self.task.fields.get("leave") == "close":
            raise EXITS[self.task.fields["kind"]]("x")


def play(tools: list[Any], kind: str, placement: str | None = None, row: dict[str, Any] | None = None, **options: Any) -> Any:
    resources = None if placement is None else {"pools": {"Leaver": {"placement": placement}}}
    engine = ScriptedEngine([CALL % kind, "Answer: done"])
    agent = ReactAgent(engine, tools=tools, renderer=ByteRenderer(), resources=resources, **options)
    num_chains = 1 if placement == "process" else 3  # a process takes most of a second to start
    return list(agent.run_sync([{"question": "q", **(row or {})}], num_chains=num_chains))


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("form", ["sync", "async"])
def test_an_exit_of_a_tool_is_an_error_that_the_model_reads(form: str, kind: str) -> None:
    @tool(name="act", register=False)
    def act(kind: str) -> str:
        """Act."""
        raise EXITS[kind]("x")

    @tool(name="act", register=False)
    async def act_later(kind: str) -> str:
        """Act."""
        await asyncio.sleep(0)
        raise EXITS[kind]("x")

    for trajectory in play([act if form == "sync" else act_later], kind):
        assert trajectory.outcome == "finished"
        assert EXITS[kind].__name__ in trajectory.turns[0].results[0].observation


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("placement", ["loop", "thread", "process"])
@pytest.mark.parametrize("method", ["go", "go_later"])
def test_an_exit_of_an_environment_is_an_error_of_its_tool(method: str, placement: str, kind: str) -> None:
    @tool(name="act", register=False)
    async def act(kind: str, env: Leaver) -> str:
        """Act."""
        value = getattr(env, method)(kind)
        return await value if asyncio.iscoroutine(value) else value

    for trajectory in play([act], kind, placement):
        assert trajectory.outcome in ("finished", "world_failure")
        assert trajectory.outcome == "world_failure" or trajectory.turns[0].results[0].error == "raised"


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("placement", ["loop", "thread", "process"])
@pytest.mark.parametrize(("method", "outcome"), [("reset", "world_failure"), ("close", "finished")])
def test_an_exit_of_reset_or_close_costs_at_most_its_chain(placement: str, method: str, outcome: str, kind: str) -> None:
    @tool(name="act", register=False)
    def act(kind: str, env: Leaver) -> str:
        """Act."""
        return "ok"

    row = {"leave": method, "kind": kind}
    assert {trajectory.outcome for trajectory in play([act], kind, placement, row)} == {outcome}


@pytest.mark.parametrize("kind", [kind for kind in EXITS if kind != "cancelled"])
@pytest.mark.parametrize("form", ["sync", "async", "thread"])
def test_an_exit_of_a_reward_is_the_rewards_error(form: str, kind: str) -> None:
    def leave(prediction: str) -> float:
        raise EXITS[kind]("x")

    async def leave_later(prediction: str) -> float:
        await asyncio.sleep(0)
        raise EXITS[kind]("x")

    made = reward(name="leave", thread=form == "thread")(leave_later if form == "async" else leave)
    agent = ReactAgent(ScriptedEngine(["Answer: 1"]), reward=made, renderer=ByteRenderer())
    with pytest.raises(RewardError, match=EXITS[kind].__name__):
        agent.run_sync([{"question": "q"}], num_chains=2)


def test_an_exit_in_the_agents_own_code_is_a_bug_with_a_sentence() -> None:
    class Leaving(ReactAgent):
        def parse(self, completion: Any) -> Any:
            raise SystemExit(3)

    agent = Leaving(ScriptedEngine(["Answer: 1"]), renderer=ByteRenderer())
    with pytest.raises(ConfigError, match="the code of the agent raised SystemExit"):
        agent.run_sync([{"question": "q"}])


def test_within_leaves_the_closing_of_a_coroutine_alone() -> None:
    closed: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except GeneratorExit:
            closed.append("closed")
            raise

    async def main() -> None:
        outer = within(work(), 60.0)
        outer.send(None)
        outer.close()

    asyncio.run(main())
    assert closed == ["closed"]


def test_a_cancellation_inside_a_thread_does_not_cancel_the_caller() -> None:
    def work() -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        with pytest.raises(RuntimeError, match="CancelledError"):
            await run_in_thread(work)

    asyncio.run(main())
