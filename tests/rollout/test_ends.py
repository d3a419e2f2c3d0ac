"""Every way a chain can end while it has environments, or waits for them: all of it is given back."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from agentfly import BaseAgent, ReactAgent, Task, reward, tool
from agentfly.errors import ConfigError, UnknownName
from agentfly.resources import Cost
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Action, Completion, Outcome, Request, ToolCall

CALL = "Action: act\nInput: {}"
ANSWER = "Answer: done"


class Pit:
    """Hangs at the configured call and reports it."""

    where = ""
    live = 0
    reached = threading.Event()

    def __init__(self) -> None:
        Pit.live += 1
        self.open = True

    async def stay(self, here: str) -> None:
        if Pit.where == here:
            Pit.reached.set()
            await asyncio.sleep(600)

    async def reset(self, task: Task) -> None:
        await self.stay("reset")

    async def act(self) -> str:
        await self.stay("call")
        return "ok"

    def block(self) -> None:
        if Pit.where == "thread":
            Pit.reached.set()
            until = time.monotonic() + 600
            while time.monotonic() < until:
                time.sleep(0.005)

    async def close(self) -> None:
        if self.open:
            self.open = False
            Pit.live -= 1
            await self.stay("close")


async def make_pit() -> Pit:
    if Pit.where == "start":
        Pit.reached.set()
        await asyncio.sleep(600)
    return Pit()


@pytest.fixture(autouse=True)
def everything_is_closed_in_the_end() -> Any:
    Pit.where, Pit.live = "", 0
    Pit.reached.clear()
    yield
    assert Pit.live == 0


@tool(name="act", register=False)
async def act(env: Any) -> str:
    """Act."""
    return str(await env.act())


@tool(name="act", register=False, timeout_s=600)
def act_in_a_thread(env: Any) -> str:
    """Act."""
    env.block()
    return "ok"


@reward(name="waits")
async def waits(env: Any) -> float:
    await env.stay("reward")
    return 1.0


class Slow(ScriptedEngine):
    async def generate(self, request: Request) -> Completion:
        if Pit.where == "engine":
            Pit.reached.set()
            await asyncio.sleep(600)
        return await super().generate(request)


STATES = ["admission", "start", "reset", "engine", "call", "thread", "reward", "close"]


@pytest.mark.parametrize("state", STATES)
def test_a_run_that_is_cancelled_in_any_state_gives_everything_back(state: str) -> None:
    Pit.where = state if state != "admission" else "call"
    agent = ReactAgent(
        Slow([CALL, ANSWER]),
        tools=[act_in_a_thread if state == "thread" else act],
        reward=waits,
        env=make_pit,
        renderer=ByteRenderer(),
        # Single-use, so that one is being closed while the next chains still run.
        resources={"pools": {"make_pit": {"max": 1, "reusable": state != "close", "close_timeout_s": 0.5}}},
    )

    async def main() -> None:
        run = asyncio.create_task(agent.run([{"question": "q"}], num_chains=3))
        assert await asyncio.to_thread(Pit.reached.wait, 60)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(run, 60)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert left == []

    asyncio.run(main())
    assert not [thread.name for thread in threading.enumerate() if "pit" in thread.name.lower()]


@pytest.mark.parametrize("state", ["start", "reset", "call", "reward"])
def test_a_chain_whose_time_is_up_in_any_state_ends_alone_and_its_siblings_finish(state: str) -> None:
    Pit.where = state
    agent = ReactAgent(
        Slow([CALL, ANSWER]), tools=[act], reward=waits, env=make_pit, renderer=ByteRenderer(), on_tool_error="end"
    )
    pools = {"max": 1, "start_timeout_s": 0.2, "reset_timeout_s": 0.2, "call_timeout_s": 0.2}
    agent.resources["pools"] = {"make_pit": pools}

    def one_hangs(trajectory: Any) -> None:
        Pit.where = ""  # the first has ended; from now on the world is well

    result = agent.run_sync([{"question": "q"}], num_chains=4, max_concurrency=1, on_trajectory=one_hangs)
    first, *others = (trajectory.outcome for trajectory in result)
    assert first in (Outcome.WORLD_FAILURE, Outcome.TOOL_ERROR), result.rewards
    assert others == [Outcome.FINISHED] * 3
    assert result.rewards == [None, 1.0, 1.0, 1.0]


# ---- several tools in one turn


class Room:
    live = 0
    most = 0

    def __init__(self) -> None:
        Room.live += 1
        Room.most = max(Room.most, Room.live)
        self.guests: list[str] = []

    def reset(self, task: Task) -> None:
        self.guests = []

    async def enter(self, name: str) -> int:
        self.guests.append(name)
        await asyncio.sleep(0.001)
        return len(self.guests)

    def close(self) -> None:
        Room.live -= 1


class Hall(Room):
    pass


@tool(register=False)
async def enter(name: str, room: Room) -> int:
    """Enter the room."""
    return await room.enter(name)


@tool(register=False)
async def gather_in(name: str, hall: Hall, room: Room) -> str:
    """Enter both."""
    return f"{await hall.enter(name)} {await room.enter(name)}"


@reward(name="guests")
def guests(room: Room, hall: Hall) -> float:
    return float(len(room.guests) + len(hall.guests))


class Busy(BaseAgent):
    """Calls five tools in its first turn, and then answers."""

    def parse(self, completion: Completion) -> Action:
        if completion.text != "all":
            return Action(answer=completion.text)
        names = ["enter", "gather_in", "enter", "gather_in", "enter"]
        return Action(calls=tuple(ToolCall(name, {"name": str(n)}, str(n)) for n, name in enumerate(names)))


def test_several_tools_of_one_turn_share_the_chains_environments() -> None:
    Room.live = Room.most = 0
    agent = Busy(
        ScriptedEngine(["all", "done"]),
        tools=[enter, gather_in],
        reward=guests,
        renderer=ByteRenderer(),
        resources={"pools": {"Room": {"max": 2}, "Hall": {"max": 2}}},
    )
    result = agent.run_sync([{"question": "q"}], num_chains=6)
    assert result.outcomes == {"finished": 6}
    assert result.rewards == [7.0] * 6  # five calls entered the room and two of them the hall, and the reward saw both
    assert Room.most <= 4
    assert Room.live == 0


# ---- bad input: a clear word, and the run goes on


def test_a_tool_that_returns_what_has_no_json_form_is_told_to_the_model_and_the_chain_goes_on() -> None:
    class Strange:
        def __repr__(self) -> str:
            raise RuntimeError("cannot be shown")

    @tool(name="act", register=False)
    def odd(env: Any) -> Any:
        """Return something odd."""
        return Strange()

    agent = ReactAgent(ScriptedEngine([CALL, ANSWER]), tools=[odd], env=Pit, renderer=ByteRenderer())
    (trajectory,) = agent.run_sync([{"question": "q"}])
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.turns[0].results[0].error == "raised"
    assert "Strange" in trajectory.turns[0].results[0].observation


def test_an_unknown_environment_is_named_before_the_run() -> None:
    with pytest.raises(UnknownName, match="no env is called 'gess'; did you mean 'guess'"):
        ReactAgent(ScriptedEngine([ANSWER]), env="gess", renderer=ByteRenderer())


class Huge(Pit):
    cost = Cost(memory_mb=500)


def test_a_pool_larger_than_the_memory_is_refused_with_the_size_that_fits() -> None:
    def run(size: int) -> Any:
        agent = ReactAgent(
            ScriptedEngine([ANSWER]),
            env=Huge,
            renderer=ByteRenderer(),
            resources={"memory_mb": 1200, "pools": {"Huge": {"max": size}}},
        )
        return agent.run_sync([{"question": "q"}]).outcomes

    with pytest.raises(ConfigError, match=r"8 instances of 'Huge' need 0\.4 CPUs and 4000 MB.*set max to 2 or less"):
        run(8)
    assert run(2) == {"finished": 1}
    small = ReactAgent(ScriptedEngine([ANSWER]), env=Huge, renderer=ByteRenderer(), resources={"memory_mb": 1200})
    assert small.run_sync([{"question": "q"}], num_chains=5).outcomes == {"finished": 5}  # as many as fit, two at a time
    with pytest.raises(
        ConfigError, match=r"1 instance of 'Huge' need .* and 500 MB.*raise the budget: it does not hold even one"
    ):
        ReactAgent(ScriptedEngine([ANSWER]), env=Huge, renderer=ByteRenderer(), resources={"memory_mb": 100}).run_sync(
            [{"question": "q"}]
        )


class Fussy(Pit):
    async def reset(self, task: Task) -> None:
        if task.fields["bad"]:
            raise KeyError("level")


def test_a_task_that_cannot_be_reset_fails_alone() -> None:
    agent = ReactAgent(ScriptedEngine([ANSWER]), env=Fussy, renderer=ByteRenderer())
    result = agent.run_sync([{"question": str(n), "bad": n == 1} for n in range(4)], num_chains=2, max_concurrency=2)
    assert result.outcomes == {"finished": 6, "world_failure": 2}
    assert "Fussy could not be reset for task 1: KeyError: 'level'" in (list(result)[2].error or "")


class Missing(Pit):
    def __init__(self) -> None:
        raise OSError("no display")


@pytest.mark.parametrize("placement", ["loop", "thread", "process"])
def test_a_world_that_never_comes_up_fails_every_chain_with_the_reason_and_the_run_ends(placement: str) -> None:
    agent = ReactAgent(
        ScriptedEngine([ANSWER]),
        env=Missing,
        renderer=ByteRenderer(),
        resources={"pools": {"Missing": {"placement": placement, "max": 2}}},
    )
    result = agent.run_sync([{"question": "q"}], num_chains=3)
    assert result.outcomes == {"world_failure": 3}
    assert all("no display" in (trajectory.error or "") for trajectory in result)
