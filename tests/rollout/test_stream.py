"""The stream of groups: nothing is lost or repeated, nothing is older than allowed, and it says what it waits for."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from agentfly import ReactAgent, tool
from agentfly.data import DataSettings, load_tasks
from agentfly.errors import ConfigError
from agentfly.resources import Admission
from agentfly.rollout import Group, GroupStream, Pace, as_groups, make_plan, open_environments
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.training.draws import TaskDraws

TASKS = load_tasks([{"question": f"q{i}", "answer": "a"} for i in range(12)])


def slow_agent(seed: int, scale_s: float = 0.002) -> ReactAgent:
    """An agent whose tool takes a log-normal time; the tasks q0 and q1 take ten times as long."""
    times = random.Random(seed)

    @tool(register=False, inject=["question"])
    async def wait(question: str) -> str:
        """Wait."""
        factor = 10 if question in ("q0", "q1") else 1
        await asyncio.sleep(min(0.3, factor * scale_s * times.lognormvariate(0, 1)))
        return "waited"

    engine = ScriptedEngine(["Action: wait\nInput: {}", "Answer: a"])
    return ReactAgent(engine, renderer=ByteRenderer(), tools=[wait], reward="exact_match")


def play(agent: ReactAgent, pace: Pace, steps: int, **options: Any) -> tuple[list[list[Any]], GroupStream]:
    """Train nothing for so many steps: the version rises by one with each. Returns the batches and the stream."""

    async def work() -> tuple[list[list[Any]], GroupStream]:
        draws = TaskDraws(TASKS, DataSettings(), 1)
        async with open_environments(agent, make_plan(agent), 64) as plan:
            batches = []
            async with GroupStream(plan, pace, draw=draws.draw, seeded=lambda step: plan, **options) as stream:
                for step in range(1, steps + 1):
                    batch = await stream.next_batch(plan.engine.version)
                    if pace.at_limit == "wait":
                        assert all(group.version >= plan.engine.version - pace.max_lag for group in batch)
                    assert len(stream.in_flight) <= (pace.depth + 1) * pace.num_tasks
                    batches.append(batch)
                    await asyncio.sleep(0.002)  # learning
                    plan.engine.version += 1
                    stream.advance(step)
            return batches, stream

    return asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("max_lag", "depth", "at_limit"),
    [(0, 0, "wait"), (1, 1, "wait"), (4, 1, "wait"), (2, 2, "wait"), (3, 3, "wait"), (2, 2, "mask")],
)
def test_every_draw_is_trained_once_and_slow_tasks_are_not_starved(seed: int, max_lag: int, depth: int, at_limit: Any) -> None:
    pace = Pace(num_tasks=4, num_chains=2, num_steps=12, max_lag=max_lag, depth=depth, at_limit=at_limit)
    batches, stream = play(slow_agent(seed), pace, 12)
    groups = [group for batch in batches for group in batch]
    assert Counter(group.task.id for group in groups) == dict.fromkeys((task.id for task in TASKS), 4)
    assert len({(group.step, group.position) for group in groups}) == 48
    assert stream.drawn == stream.trained == 48
    assert not stream.in_flight
    assert stream.admission.running == 0
    if depth == 0:
        assert all({group.step for group in batch} == {step} for step, batch in enumerate(batches, 1))


def test_a_batch_is_in_the_order_of_draws_with_siblings_together() -> None:
    batches, _ = play(slow_agent(0), Pace(num_tasks=4, num_chains=3, num_steps=5, max_lag=3, depth=2), 5)
    for batch in batches:
        assert [(group.step, group.position) for group in batch] == sorted((group.step, group.position) for group in batch)
        for group, trajectories in zip(batch, as_groups(batch), strict=True):
            assert [trajectory.chain for trajectory in trajectories] == [0, 1, 2]
            assert {trajectory.task.id for trajectory in trajectories} == {group.task.id}


def test_the_pace_of_a_stream_must_not_exceed_its_lag() -> None:
    with pytest.raises(ConfigError, match="depth"):
        Pace(num_tasks=1, num_chains=2, max_lag=1, depth=2)


def test_a_bug_in_a_chain_is_raised_by_the_next_batch_and_all_chains_end() -> None:
    agent = slow_agent(0)

    def broken(completion: Any) -> Any:
        raise ZeroDivisionError("a bug of the agent")

    agent.parse = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        play(agent, Pace(num_tasks=4, num_chains=2, max_lag=1, depth=1), 2)


def test_a_restored_stream_draws_what_was_not_trained_under_the_same_names() -> None:
    pace = Pace(num_tasks=3, num_chains=2, max_lag=2, depth=2)
    _, stream = play(slow_agent(1), pace, 2)
    state = stream.state()
    pending = {(group.step, group.position, group.task.id) for group in stream.in_flight}
    assert len(pending) == 9 - 3 or len(pending) == 9  # before or after the next draw

    async def again() -> set[tuple[int, int, str]]:
        agent = slow_agent(2)
        draws = TaskDraws(TASKS, DataSettings(), 1)
        async with open_environments(agent, make_plan(agent), 64) as plan:
            plan.admission.advance(2)  # type: ignore[union-attr]
            plan.engine.version = 2
            stream = GroupStream(plan, pace, draw=draws.draw, seeded=lambda step: plan)
            stream.restore(state, draws.task_at)
            async with stream:
                seen = set()
                for step in (3, 4, 5):
                    batch = await stream.next_batch(plan.engine.version)
                    seen |= {(group.step, group.position, group.task.id) for group in batch}
                    plan.engine.version = step
                    stream.advance(step)
                return seen

    assert asyncio.run(asyncio.wait_for(again(), 60)) >= pending


def test_a_restored_step_holds_all_draws_of_the_step_that_was_stopped() -> None:
    """With depth 0 a chain is stored under the step of its draw, so none may be left for the next step."""
    pace = Pace(num_tasks=3, num_chains=2, refill=4)
    state = {"next": [1, 5], "draws": {}, "pending": [[1, position, 0, 0, position] for position in range(5)]}

    async def work() -> tuple[list[Group], GroupStream]:
        agent = slow_agent(0)
        draws = TaskDraws(TASKS, DataSettings(shuffle=False), 1)
        async with open_environments(agent, make_plan(agent), 64) as plan:
            stream = GroupStream(plan, pace, draw=draws.draw, seeded=lambda step: plan)
            stream.restore(state, draws.task_at)
            async with stream:
                batch = await stream.next_batch(plan.engine.version)
                stream.advance(1)
                return batch, stream

    batch, stream = asyncio.run(asyncio.wait_for(work(), 60))
    assert [(group.step, group.position) for group in batch] == [(1, position) for position in range(5)]
    assert not stream.in_flight


class SimulatedStream:
    """A stream without chains, in simulated time: groups end at random, some after a hundred times the median."""

    def __init__(self, rng: random.Random, pace: Pace) -> None:
        self.rng, self.pace, self.version, self.now, self.number = rng, pace, 0, 0.0, 0
        plan = replace(make_plan(slow_agent(0)), admission=Admission())
        self.stream = GroupStream(plan, pace, draw=None, seeded=None)  # type: ignore[arg-type]
        self.ends: dict[Group, float] = {}

    def draw(self) -> None:
        groups, pace = self.stream._groups, self.pace
        steps, idle = pace.depth + 1, sum(not group.teaches for group in groups)
        while len(groups) < steps * pace.num_tasks + min(idle, steps * pace.refill):
            group = Group(1 + self.number // pace.num_tasks, self.number, 0, TASKS[0], 0, [None], 1)
            if self.rng.random() < 0.8:  # else it waits for admission
                group.version = self.version
            self.ends[group] = self.now + self.rng.lognormvariate(0, 1.5)
            groups.append(group)
            self.number += 1

    def next_batch(self) -> set[Group]:
        self.draw()
        while (batch := self.stream._choose(self.version)) is None:
            first = min((group for group in self.stream._groups if group.missing), key=self.ends.__getitem__)
            self.now = max(self.now, self.ends[first])
            first.version = self.version if first.version is None else first.version
            first.missing = 0
            first.teaches = not self.pace.refill or self.rng.random() < 0.6
            self.draw()
        self.stream._groups = [group for group in self.stream._groups if group not in batch]
        return batch


@pytest.mark.parametrize("seed", range(8))
def test_no_order_in_which_groups_end_leads_to_a_group_that_is_too_old(seed: int) -> None:
    rng = random.Random(seed)
    for refill in (0, 3) * 8:
        max_lag = rng.randint(0, 4)
        pace = Pace(num_tasks=rng.randint(1, 5), num_chains=1, max_lag=max_lag, depth=rng.randint(0, max_lag), refill=refill)
        simulated = SimulatedStream(rng, pace)
        for _ in range(60):
            batch = simulated.next_batch()
            taught = sum(group.teaches for group in batch)
            if not refill:
                assert len(batch) == pace.num_tasks
            assert taught >= pace.num_tasks or len(batch) >= pace.num_tasks + refill
            assert all(group.version is not None and simulated.version - group.version <= max_lag for group in batch)
            simulated.version += rng.random() < 0.9  # an update that learns nothing does not change the weights
