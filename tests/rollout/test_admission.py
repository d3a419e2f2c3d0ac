"""Which chains may start: one controller looks at environments, engine and staleness; worlds are ready before them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agentfly import ReactAgent, Task, reward, tool
from agentfly.data import load_tasks
from agentfly.resources import Admission
from agentfly.rollout import controller, make_plan, open_environments, run_chains
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Completion, Request

ANSWER = "Answer: done"


class Kitchen:
    """Counts what is open."""

    live = 0

    def __init__(self) -> None:
        type(self).live += 1
        self.used = 0

    def reset(self, task: Task) -> None:
        self.used = 0

    def use(self) -> int:
        self.used += 1
        return self.used

    def close(self) -> None:
        type(self).live -= 1


class Garden(Kitchen):
    live = 0


class Judge(Kitchen):
    live = 0


@pytest.fixture(autouse=True)
def everything_is_closed_in_the_end() -> Any:
    yield
    assert (Kitchen.live, Garden.live, Judge.live) == (0, 0, 0)


@tool(register=False)
async def cook(kitchen: Kitchen) -> int:
    """Cook."""
    await asyncio.sleep(0.001)
    return kitchen.use()


@tool(register=False)
async def dig(garden: Garden) -> int:
    """Dig."""
    await asyncio.sleep(0.001)
    return garden.use()


@reward(name="judged")
async def judged(judge: Judge) -> float:
    return float(judge.use())


class Watched(ScriptedEngine):
    """An engine that knows how many chains are between their first and last reply."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.in_flight: set[str] = set()
        self.most = 0
        self.versions: list[tuple[str, int]] = []

    async def generate(self, request: Request) -> Completion:
        self.in_flight.add(request.session)
        self.most = max(self.most, len(self.in_flight))
        self.versions.append((request.session, self.version))
        return await super().generate(request)

    def release(self, session: str) -> None:
        self.in_flight.discard(session)
        super().release(session)


def call(name: str) -> str:
    return f"Action: {name}\nInput: {{}}"


def either_order(request: Request) -> str:
    """Half of the chains cook and then dig, the others dig and then cook."""
    done = sum(message.role == "assistant" for message in request.messages)
    order = ["cook", "dig"] if int(request.session.rpartition("-")[2]) % 2 else ["dig", "cook"]
    return call(order[done]) if done < 2 else ANSWER


def agent_for(engine: ScriptedEngine, pools: dict[str, int] | None = None, **options: Any) -> ReactAgent:
    resources = {"pools": {name: {"max": size} for name, size in (pools or {}).items()}}
    return ReactAgent(engine, renderer=ByteRenderer(), resources=resources, **options)


@pytest.mark.parametrize("bounded", [True, False], ids=["admission", "no-admission"])
def test_sixty_chains_with_two_scarce_kinds_in_either_order_all_finish(bounded: bool) -> None:
    engine = Watched(either_order)
    agent = agent_for(engine, {"Kitchen": 2, "Garden": 2}, tools=[cook, dig])

    async def main() -> list[Any]:
        async with open_environments(agent, make_plan(agent), 60) as plan:
            if not bounded:  # without a limit they are safe too: each waits for a claim on both kinds
                plan = replace(plan, admission=Admission(engine_capacity=60))
            return await run_chains(plan, load_tasks([{"question": "q"}]), num_chains=60, max_concurrency=60)

    trajectories = asyncio.run(asyncio.wait_for(main(), 120))
    assert [trajectory.outcome.value for trajectory in trajectories] == ["finished"] * 60
    orders = {tuple(turn.calls[0].name for turn in trajectory.turns[:2]) for trajectory in trajectories}
    assert orders == {("cook", "dig"), ("dig", "cook")}
    assert engine.most == (2 if bounded else 60)


def test_no_more_chains_start_than_the_scarcest_kind_of_a_tool_or_reward_allows() -> None:
    engine = Watched([call("cook"), ANSWER])
    agent = agent_for(engine, {"Kitchen": 5, "Judge": 2}, tools=[cook], reward=judged)
    result = agent.run_sync([{"question": "q"}], num_chains=64, max_concurrency=64)
    assert result.rewards == [1.0] * 64
    assert engine.most == 2


@pytest.mark.parametrize(
    ("capacity", "asked", "most"), [(3, None, 3), (3, 8, 3), (8, 3, 3), (300, None, 280), (None, None, 256)]
)
def test_as_many_chains_are_in_flight_as_the_engine_has_capacity_for(capacity: Any, asked: Any, most: int) -> None:
    engine = Watched([call("cook"), ANSWER])
    engine.capacity = capacity  # type: ignore[attr-defined]
    agent = agent_for(engine, tools=[cook])
    result = agent.run_sync([{"question": "q"}], num_chains=280 if most > 100 else 12, max_concurrency=asked)
    assert set(result.outcomes) == {"finished"}
    assert engine.most == most


def test_environments_of_tools_and_rewards_are_started_before_they_are_asked_for() -> None:
    class Late(Watched):
        async def generate(self, request: Request) -> Completion:
            async with asyncio.timeout(60):  # no tool was called: only the warm-up can have started them
                while (Kitchen.live, Judge.live) != (4, 4):
                    await asyncio.sleep(0.001)
            return await super().generate(request)

    agent = agent_for(Late([call("cook"), ANSWER]), {"Kitchen": 4, "Judge": 6}, tools=[cook], reward=judged)
    result = agent.run_sync([{"question": "q"}], num_chains=16, max_concurrency=16)
    assert result.rewards == [1.0] * 16


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_the_largest_lag_of_the_weights_is_max_lag(max_lag: int) -> None:
    """Rollouts of eight steps are requested at once; each step is trained when its chains have ended."""
    engine = Watched([ANSWER])
    agent = agent_for(engine)
    lags: list[int] = []

    async def main() -> None:
        plan = make_plan(agent)
        admission = Admission(engine_capacity=4, max_lag=max_lag)
        plan = replace(plan, admission=admission)
        tasks = load_tasks([{"question": "q"}])
        rollouts = [
            asyncio.create_task(run_chains(plan, tasks, num_chains=3, max_concurrency=4, prefix=f"t{step}-", step=step))
            for step in range(8)
        ]
        for step, rollout in enumerate(rollouts):
            for _ in range(200):
                await asyncio.sleep(0)  # every chain that may start has started
            for trajectory in await rollout:
                lags.append(step - trajectory.turns[0].completion.versions[0])
            engine.publish(step + 1)
            admission.advance(step + 1)
        assert admission.running == admission.waiting == 0

    asyncio.run(asyncio.wait_for(main(), 120))
    assert len(lags) == 24
    assert max(lags) == max_lag
    assert min(lags) >= 0


def test_a_rollout_without_a_training_step_is_not_limited_by_max_lag() -> None:
    agent = agent_for(Watched([ANSWER]))

    async def main() -> None:
        plan = replace(make_plan(agent), admission=Admission(done=7))
        tasks = load_tasks([{"question": "q"}])
        assert len(await run_chains(plan, tasks, num_chains=2, max_concurrency=2)) == 2
        assert len(await run_chains(plan, tasks, num_chains=2, max_concurrency=2, step=7)) == 2

    asyncio.run(asyncio.wait_for(main(), 60))


def test_two_rollouts_of_one_run_share_one_admission() -> None:
    engine = Watched([call("cook"), ANSWER])
    agent = agent_for(engine, {"Kitchen": 3}, tools=[cook])

    async def main() -> None:
        async with open_environments(agent, make_plan(agent), 50) as plan:
            tasks = load_tasks([{"question": "q"}])
            both = (run_chains(plan, tasks, num_chains=10, max_concurrency=50, prefix=name) for name in ("a", "b"))
            results = await asyncio.gather(*both)
            assert [len(result) for result in results] == [10, 10]
            own = controller(plan, 2)
            assert own.limit == 2

    asyncio.run(asyncio.wait_for(main(), 60))
    assert engine.most == 3
