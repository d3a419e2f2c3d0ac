"""A reward of the whole group: when it is computed, which chains it sees, and what its failures do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfly import ReactAgent
from agentfly.data import DataSettings, load_tasks
from agentfly.errors import RewardError, WorldError
from agentfly.rewards import FunctionReward
from agentfly.rollout import Group, GroupStream, Pace, make_plan, open_environments
from agentfly.rollout.chat import ChatSession
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.training.draws import TaskDraws
from agentfly.training.evaluation import evaluate
from agentfly.types import Completion, Outcome, Request, Trajectory

TASKS = load_tasks([{"question": f"q{i}", "answer": "aa"} for i in range(4)])


def number_of(session: str) -> int:
    return int(session.rpartition("-")[2])


class LastFirst(ScriptedEngine):
    """The chains of a task end in reverse order."""

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0.01 / (number_of(request.session) + 1))
        return await super().generate(request)


def agent_of(reward: Any, lost: tuple[int, ...] = ()) -> ReactAgent:
    """Chain n of a task answers with n + 1 letters; the chains in `lost` are failures of the world."""

    def reply(request: Request) -> Any:
        number = number_of(request.session)
        return WorldError("gone") if number in lost else f"Answer: {'a' * (number + 1)}"

    return ReactAgent(LastFirst(reply), renderer=ByteRenderer(), reward=reward)


def shortest(trajectories: list[Trajectory]) -> list[float]:
    """1 for the shortest answer of the group."""
    least = min(len(each.prediction) for each in trajectories)
    return [float(len(each.prediction) == least) for each in trajectories]


def played(agent: ReactAgent, num_chains: int = 3, **limits: Any) -> tuple[list[Group], list[str]]:
    """The groups of two training steps, and the chains in the order in which they were handed over."""
    ended: list[str] = []

    async def work() -> list[Group]:
        draws = TaskDraws(TASKS, DataSettings(), 1)
        pace = Pace(num_tasks=2, num_chains=num_chains, num_steps=2, max_lag=1, depth=1)
        async with open_environments(agent, make_plan(agent), 64) as plan:
            for name, value in limits.items():
                object.__setattr__(plan.limits, name, value)

            def note(group: Group, chain: Trajectory) -> None:
                assert not plan.reward.grouped or None not in group.chains
                ended.append(chain.id)

            groups = []
            async with GroupStream(plan, pace, draw=draws.draw, seeded=lambda step: plan, on_chain=note) as stream:
                for step in (1, 2):
                    groups += await stream.next_batch(0)
                    stream.advance(step)
            return groups

    return asyncio.run(asyncio.wait_for(work(), 60)), ended


def test_the_last_chain_of_a_group_starts_the_comparison_and_a_mix_adds_it_to_the_rest() -> None:
    reward = 0.5 * FunctionReward(shortest) + FunctionReward(
        lambda prediction, answer: float(prediction == answer), name="right"
    )
    groups, ended = played(agent_of(reward))
    assert len(groups) == 4
    assert len(ended) == len(set(ended)) == 12
    for group in groups:
        assert [chain.reward for chain in group.trajectories] == [0.5, 1.0, 0.0]
        assert [chain.components for chain in group.trajectories] == [
            {"right": 0.0, "shortest": 1.0}, {"right": 1.0, "shortest": 0.0}, {"right": 0.0, "shortest": 0.0},
        ]  # fmt: skip


def test_a_reward_of_the_group_reads_what_the_chains_have_earned_alone() -> None:
    def shortest_of_the_right(trajectories: list[Trajectory]) -> list[float]:
        return [0.25 * (each.components["right"] > 0 and each.reward == 1.0) for each in trajectories]

    reward = FunctionReward(lambda prediction: float(len(prediction) < 3), name="right") + FunctionReward(shortest_of_the_right)
    groups, _ = played(agent_of(reward))
    assert [chain.reward for chain in groups[0].trajectories] == [1.25, 1.25, 0.0]


def test_chains_that_the_world_failed_are_left_out_of_the_comparison() -> None:
    groups, _ = played(agent_of(shortest, lost=(0,)))
    assert [chain.reward for chain in groups[0].trajectories] == [None, 1.0, 0.0]
    groups, _ = played(agent_of(shortest, lost=(0, 1, 2)))
    assert [chain.reward for chain in groups[0].trajectories] == [None] * 3
    assert all(chain.outcome is Outcome.WORLD_FAILURE for chain in groups[0].trajectories)


async def hangs(trajectories: list[Trajectory]) -> list[float]:
    await asyncio.sleep(600)
    return []


async def cancels(trajectories: list[Trajectory]) -> list[float]:
    raise asyncio.CancelledError


async def down(trajectories: list[Trajectory]) -> list[float]:
    raise WorldError("the judge is down")


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        (hangs, "scoring the group exceeded its time limit of 0.05 s"),
        (cancels, "the reward of the group raised CancelledError"),
        (down, "the judge is down"),
    ],
)
def test_a_failure_of_the_world_in_the_comparison_leaves_the_whole_group_without_reward(reward: Any, sentence: str) -> None:
    groups, _ = played(agent_of(reward), score_timeout_s=0.05)
    for chain in groups[0].trajectories:
        assert chain.reward is None
        assert chain.outcome is Outcome.WORLD_FAILURE
        assert sentence in str(chain.error)


def test_a_bug_in_the_comparison_stops_the_run_with_its_name() -> None:
    with pytest.raises(RewardError, match="reward 'odd' on task .* returned 0 rewards for 3 chains"):
        played(agent_of(FunctionReward(lambda trajectories: [], name="odd")))


def test_chains_that_wait_for_their_siblings_have_no_reward_yet() -> None:
    chain = Trajectory("c", TASKS[0], reward=0.0, outcome=Outcome.FINISHED)
    assert [each.reward for each in Group(1, 0, 0, TASKS[0], 0, [chain, None], 2).trajectories] == [None]
    assert [each.reward for each in Group(1, 0, 0, TASKS[0], 0, [chain, None], 1).trajectories] == [0.0]


def test_evaluation_compares_the_chains_of_each_task_and_hands_them_over_scored() -> None:
    rewards: list[Any] = []
    done = evaluate(agent_of(shortest), TASKS, num_chains=3, on_trajectory=lambda chain: rewards.append(chain.reward))
    assert [chain.reward for chain in done.trajectories] == [1.0, 0.0, 0.0] * 4
    assert sorted(rewards) == [0.0] * 8 + [1.0] * 4


def test_a_conversation_is_a_group_of_one() -> None:
    async def talk() -> Any:
        agent = ReactAgent(ScriptedEngine(["Answer: a"]), renderer=ByteRenderer(), reward=shortest)
        async with await ChatSession.open(agent, task=TASKS[0]) as chat:
            async for _ in chat.send():
                pass
            return await chat.score()

    assert asyncio.run(talk()) == (1.0, {"shortest": 1.0})
