"""What chains wait for: timings of turns, deadlines that name the phase, and the seconds of the run by its state."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from agentfly import ReactAgent, Task, reward, tool
from agentfly.errors import ConfigError
from agentfly.rollout import Activities, Limits, Plan, describe, make_plan, open_environments, run_chains, watchdog
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Completion, Outcome, Request, Trajectory
from tests.virtual_time import virtual_time

__all__ = ["virtual_time"]
pytestmark = pytest.mark.usefixtures("virtual_time")

CALL = "Action: wait\nInput: {}"
ANSWER = "Answer: done"


class SlowEngine(ScriptedEngine):
    """Waits for `seconds` before each reply."""

    seconds = 0.0

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(self.seconds)
        return await super().generate(request)


def waiting_tool(seconds: float) -> Any:
    @tool(name="wait", register=False, timeout_s=60)
    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "ok"

    return wait


def agent_for(tool: Any, replies: Any = (CALL, ANSWER), engine_s: float = 0.0, **options: Any) -> ReactAgent:
    engine = SlowEngine(list(replies))
    engine.seconds = engine_s
    return ReactAgent(engine, tools=[tool], renderer=ByteRenderer(), **options)


def timeless(text: str) -> str:
    return re.sub(r"\d+ s\)", "N s)", text)


def run(agent: ReactAgent, num_chains: int = 1, **changes: Any) -> tuple[list[Trajectory], Plan]:
    async def main() -> tuple[list[Trajectory], Plan]:
        plan = make_plan(agent)
        limits = replace(plan.limits, **{name: value for name, value in changes.items() if name != "activities"})
        plan = replace(plan, limits=limits, activities=changes.get("activities"))
        async with open_environments(agent, plan, None) as ready:
            return await run_chains(ready, [Task("a", ())], num_chains=num_chains, max_concurrency=None, prefix="t1-"), ready

    return asyncio.run(main())


def test_a_turn_says_how_long_its_reply_and_its_tools_took() -> None:
    ((trajectory,), _) = run(agent_for(waiting_tool(0.06), engine_s=0.03))
    first, last = trajectory.turns
    assert (first.sampled_s, first.tools_s) == pytest.approx((0.03, 0.06))
    assert (last.sampled_s, last.tools_s) == pytest.approx((0.03, 0.0))
    assert trajectory.seconds == pytest.approx(0.12)


def test_the_turn_whose_tools_were_cut_off_says_how_long_they_took() -> None:
    ((trajectory,), _) = run(agent_for(waiting_tool(60)), chain_timeout_s=0.6)
    assert trajectory.turns[-1].tools_s == trajectory.seconds == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("tool_s", "engine_s", "phase"),
    [(60, 0.0, "tools: wait (turn 1)"), (0.0, 60, "sampling (turn 1)")],
)
@pytest.mark.parametrize("whose", ["turn", "chain"])
def test_an_exceeded_limit_is_named_with_its_phase(whose: str, tool_s: float, engine_s: float, phase: str) -> None:
    ((trajectory,), _) = run(agent_for(waiting_tool(tool_s), engine_s=engine_s), **{f"{whose}_timeout_s": 0.4})
    assert trajectory.outcome is Outcome.MAX_TIME
    assert trajectory.error == f"the {whose} exceeded its time limit of 0.4 s, in {phase}"


def test_every_turn_has_the_whole_turn_limit() -> None:
    agent = agent_for(waiting_tool(0.3), [CALL, CALL, CALL, CALL, ANSWER])
    ((trajectory,), _) = run(agent, turn_timeout_s=1.1)
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.seconds > 1.15


def test_the_chains_deadline_holds_in_a_turn_that_may_take_longer() -> None:
    ((trajectory,), _) = run(agent_for(waiting_tool(60)), turn_timeout_s=30, chain_timeout_s=0.3)
    assert "the chain exceeded its time limit of 0.3 s" in (trajectory.error or "")


@pytest.mark.parametrize("replies", [(CALL, ANSWER), (CALL, CALL, ANSWER)])
def test_a_tool_that_swallows_its_cancellation_does_not_outlive_the_turn(replies: tuple[str, ...]) -> None:
    @tool(name="wait", register=False, timeout_s=60)
    async def stubborn() -> Any:
        """Wait."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "late"

    ((trajectory,), _) = run(agent_for(stubborn, replies), turn_timeout_s=0.4)
    assert trajectory.outcome is Outcome.MAX_TIME
    assert trajectory.error == "the turn exceeded its time limit of 0.4 s, in tools: wait (turn 1)"


def test_scoring_that_takes_too_long_is_named() -> None:
    @reward(name="slow")
    async def slow() -> float:
        await asyncio.sleep(60)
        return 1.0

    ((trajectory,), _) = run(agent_for(waiting_tool(0), reward=slow), score_timeout_s=0.1)
    assert trajectory.error == "DeadlineError: scoring exceeded its time limit of 0.1 s"


def test_a_timeout_of_the_engine_is_not_called_a_limit_of_the_chain() -> None:
    class Impatient(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            raise TimeoutError("no answer in 5 s")

    agent = ReactAgent(Impatient([ANSWER]), renderer=ByteRenderer())
    ((trajectory,), _) = run(agent)
    assert trajectory.outcome is Outcome.WORLD_FAILURE
    assert trajectory.error == "DeadlineError: sampling (turn 1): TimeoutError: no answer in 5 s"


@pytest.mark.parametrize("name", ["turn_timeout_s", "group_timeout_s"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_a_turn_or_group_limit_must_be_above_0(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be above 0"):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_running_chains_say_what_they_wait_for() -> None:
    activities, seen = Activities(), []

    @tool(name="wait", register=False, timeout_s=60)
    async def look() -> str:
        """Look."""
        async with asyncio.timeout(30):
            while not seen and sum(each.phase == "tools" for each in activities.values()) < 5:
                await asyncio.sleep(0.001)
        seen.append(describe(activities))
        seen.append(describe({name: each for name, each in activities.items() if name == "t1-0-4"}))
        return "ok"

    trajectories, _ = run(agent_for(look), num_chains=5, activities=activities)
    assert all(trajectory.outcome is Outcome.FINISHED for trajectory in trajectories)
    assert timeless(seen[0]).startswith("5 chains: t1-0-0 (task 'a', turn 1, tools: wait, N s), t1-0-1 (task 'a', ")
    assert seen[0].endswith(" and 2 more")
    assert timeless(seen[1]) == "1 chain: t1-0-4 (task 'a', turn 1, tools: wait, N s)"
    assert not activities
    assert describe(activities) == "no chain"


def test_failed_and_cancelled_chains_are_not_listed_any_more() -> None:
    activities = Activities()
    run(agent_for(waiting_tool(60)), num_chains=3, activities=activities, turn_timeout_s=0.3)
    assert not activities
    assert activities.read()[0]["tools"] > 0

    async def cancelled() -> None:
        agent = agent_for(waiting_tool(60))
        plan = replace(make_plan(agent), activities=activities)
        work = asyncio.create_task(run_chains(plan, [Task("a", ())], num_chains=2, max_concurrency=None))
        while len(activities) < 2:
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(cancelled())
    assert not activities
    before = activities.read()[0]
    time.sleep(0.02)
    after = activities.read()[0]
    assert after["host"] > before["host"]
    assert {**after, "host": 0} == {**before, "host": 0}


def test_the_time_of_a_run_is_divided_by_what_its_chains_wait_for() -> None:
    @reward(name="slow")
    async def slow() -> float:
        await asyncio.sleep(0.1)
        return 1.0

    activities = Activities()
    run(agent_for(waiting_tool(0.3), engine_s=0.1, reward=slow), num_chains=4, activities=activities)
    seconds, cpu = activities.read()
    # All four chains wait at the same time, and the time counts once; each samples twice.
    assert seconds == pytest.approx({"sampling": 0.2, "tools": 0.3, "environment": 0.0, "scoring": 0.1, "host": 0.0})
    assert 0 < sum(cpu.values()) <= time.process_time()


def test_time_in_which_another_chain_samples_does_not_count_as_waiting_for_tools() -> None:
    activities = Activities()

    class Uneven(ScriptedEngine):
        async def generate(self, request: Request) -> Completion:
            if request.session.endswith("-1"):
                await asyncio.sleep(0.4)
            return await super().generate(request)

    agent = ReactAgent(Uneven([CALL, ANSWER]), tools=[waiting_tool(0.4)], renderer=ByteRenderer(), max_turns=1)
    trajectories, _ = run(agent, num_chains=2, activities=activities)
    seconds, _ = activities.read()
    # Chain 0 waits for its tool from 0 to 0.4 s, chain 1 samples from 0 to 0.4 s and then waits for its tool.
    assert seconds == pytest.approx({"sampling": 0.4, "tools": 0.4, "environment": 0.0, "scoring": 0.0, "host": 0.0})
    assert [trajectory.turns[0].tools_s for trajectory in trajectories] == pytest.approx([0.4, 0.4])


def test_another_thread_reads_the_seconds_without_changing_them() -> None:
    activities = Activities()
    found: list[float] = []
    time.sleep(0.02)
    thread = threading.Thread(target=lambda: found.append(activities.read()[0]["host"]))
    thread.start()
    thread.join()
    assert found[0] == pytest.approx(0.02)
    assert activities.read()[0]["host"] >= found[0]


def test_a_watchdog_names_the_chains_that_hang_and_says_so_again_after_twice_the_time() -> None:
    activities, told = Activities(), []

    async def main() -> None:
        agent = agent_for(waiting_tool(60))
        plan = replace(make_plan(agent), activities=activities)
        work = asyncio.create_task(run_chains(plan, [Task("a", ())], num_chains=1, max_concurrency=None, prefix="t1-"))
        while not any(each.phase == "tools" for each in activities.values()):
            await asyncio.sleep(0)
        async with watchdog("step 1", activities, told.append, prefix="t1-", patience_s=0.1):
            async with asyncio.timeout(30):
                while len(told) < 2:
                    await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    started = time.perf_counter()
    asyncio.run(main())
    assert [timeless(text) for text in told] == 2 * ["step 1 waits for 1 chain: t1-0-0 (task 'a', turn 1, tools: wait, N s)"]
    assert time.perf_counter() - started >= 0.2


def test_a_watchdog_is_silent_while_chains_go_on_and_names_only_the_chains_it_is_for() -> None:
    activities, told = Activities(), []

    async def main() -> None:
        quick = replace(make_plan(agent_for(waiting_tool(0.05), [CALL] * 30 + [ANSWER], max_turns=40)), activities=activities)
        hung = replace(make_plan(agent_for(waiting_tool(60))), activities=activities)
        other = asyncio.create_task(run_chains(hung, [Task("a", ())], num_chains=1, max_concurrency=None, prefix="t2-"))
        async with watchdog("step 1", activities, told.append, prefix="t1-", patience_s=1.0):
            await run_chains(quick, [Task("a", ())], num_chains=2, max_concurrency=None, prefix="t1-")
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)

    asyncio.run(main())
    assert told == []


def test_a_watchdog_says_that_no_chain_runs() -> None:
    told: list[str] = []

    async def main() -> None:
        async with watchdog("step 3", Activities(), told.append, patience_s=0.05):
            async with asyncio.timeout(30):
                while not told:
                    await asyncio.sleep(0.01)

    asyncio.run(main())
    assert told == ["step 3 waits: none of its chains runs"]
