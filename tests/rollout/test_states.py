"""What environments call their states is recorded with each turn, and turns of a group that began in one state are compared."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from agentfly import ReactAgent, Task, reward, tool
from agentfly.errors import ConfigError
from agentfly.learn.algorithms import ALGORITHMS, Chains
from agentfly.resources.lease import MAX_STATE
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Completion, RunResult, Trajectory, Turn

ANSWER = "Answer: done"


def go(*where: str) -> str:
    calls = [f'Action: walk\nInput: {{"where": "{each}"}}' for each in where]
    return "\n".join(calls)


class House:
    """Rooms in a row; what the chain reads says where it came from, so observations differ where rooms do not."""

    def reset(self, task: Task) -> None:
        self.room, self.steps = 0, 0

    def walk(self, where: str) -> str:
        self.room += {"left": -1, "right": 1, "stay": 0}[where]
        self.steps += 1
        return f"you went {where}, step {self.steps}"

    def state_key(self) -> str:
        return f"room {self.room}"

    def close(self) -> None: ...


class AsyncHouse(House):
    async def state_key(self) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return f"room {self.room}"


def walks(house: type) -> Any:
    async def walk(where: str, env: Any) -> str:
        """Walk."""
        said = env.walk(where)
        return await said if asyncio.iscoroutine(said) else said

    return tool(walk, name="walk", env_cls=house, register=False)


def run(replies: list[str], house: type = House, **options: Any) -> RunResult:
    agent = ReactAgent(ScriptedEngine(replies), tools=[walks(house)], renderer=ByteRenderer(), **options)
    return agent.run_sync([{"question": "q"}])


def states(trajectory: Trajectory) -> list[str]:
    return [turn.state for turn in trajectory.turns]


@pytest.mark.parametrize("placement", ["loop", "thread", "process"])
def test_each_turn_has_the_state_in_which_it_began_wherever_the_environment_lives(placement: str) -> None:
    replies = [go("right"), go("right"), go("left"), ANSWER]
    (played,) = run(replies, resources={"pools": {"House": {"placement": placement, "max": 1}}})
    assert states(played) == ["House: room 0", "House: room 1", "House: room 2", "House: room 1"]


def test_turns_before_the_environment_is_lent_have_its_first_state() -> None:
    (played,) = run(["Thought: hm", go("stay"), ANSWER], AsyncHouse, on_no_tool_call="continue")
    assert states(played) == ["AsyncHouse: room 0"] * 3


def test_a_chain_that_no_environment_is_lent_to_has_no_states() -> None:
    (played,) = run([ANSWER])
    assert states(played) == [""]


def test_an_environment_of_the_agent_is_asked_from_the_first_turn_on() -> None:
    agent = ReactAgent(ScriptedEngine([ANSWER]), tools=[], renderer=ByteRenderer(), env=House)
    assert states(agent.run_sync([{"question": "q"}])[0]) == ["House: room 0"]


class Nameless(House):
    state_key = None  # type: ignore[assignment]


class Shared(House):
    max_chains = 4


class Unsure(House):
    def state_key(self) -> str:
        return ""


@pytest.mark.parametrize("house", [Nameless, Shared, Unsure])
def test_without_a_name_the_state_is_what_was_observed(house: type) -> None:
    (played,) = run([go("right"), ANSWER], house)
    assert states(played) == ["", ""]
    assert Chains([0], [np.zeros(2)], None, [played]).states_of(0) == [(), ("you went right, step 1",)]


class Verbose(House):
    def state_key(self) -> str:
        return f"room {self.room}" + " and all that is in it" * 100 + "\ud800"


def test_a_digest_stands_for_a_long_name() -> None:
    (played,) = run([go("right"), go("left"), ANSWER], Verbose)
    first, second, third = states(played)
    assert first == third != second
    assert 0 < len(first) <= MAX_STATE


class Wordless(House):
    def state_key(self) -> Any:
        return {"room": self.room}


def test_a_name_that_is_no_text_stops_the_run() -> None:
    with pytest.raises(ConfigError, match=r"Wordless\.state_key returned dict: return a text, such as a digest of the state"):
        run([go("right"), ANSWER], Wordless)


class Broken(House):
    def state_key(self) -> str:
        raise KeyError("room")


def test_an_environment_that_fails_to_name_its_state_fails_the_chain() -> None:
    (played,) = run([go("right"), ANSWER], Broken)
    assert played.outcome == "world_failure"
    assert "Broken.state_key" in (played.error or "")


# ---- comparing turns


def with_states(number: int, *names: str) -> Trajectory:
    reply = Completion(text="ab", token_ids=[1, 2], logprobs=[-0.5, -0.5], versions=[0, 0])
    turns = [Turn([1], not place, reply, state=name) for place, name in enumerate(names)]
    return Trajectory(f"c{number}", Task("t", ()), number, turns=turns)


def states_of(*trajectories: Trajectory) -> list[list[Any]]:
    chains = Chains([0] * len(trajectories), [np.zeros(t.num_sampled) for t in trajectories], None, trajectories)
    return [chains.states_of(each) for each in range(len(trajectories))]


def test_two_ways_to_one_state_are_one_state_and_the_way_back_is_the_task() -> None:
    one, other, silent = states_of(
        with_states(0, "room 0", "room 1", "room 2", "room 1", "room 0"), with_states(1, "room 0", "room 2"), with_states(2, "")
    )
    assert one == [(), "room 1", "room 2", "room 1", ()]
    assert other == [(), "room 2"]
    assert silent == [()], "a chain that was lent nothing began where its siblings did"


def gigpo_by_loop(groups, names, rewards, lengths, gamma, weight) -> list[list[float]]:
    """The formulas of arXiv:2505.10978 as plain loops, without the division by the standard deviation."""
    returns = [[sum(gamma**k * r for k, r in enumerate(own[t:])) for t in range(len(own))] for own in rewards]
    result = []
    for i, own in enumerate(names):
        siblings = [j for j in range(len(names)) if groups[j] == groups[i]]
        episode = sum(rewards[i]) - sum(sum(rewards[j]) for j in siblings) / len(siblings)
        tokens = []
        for t, name in enumerate(own):
            same = [returns[j][u] for j in siblings for u, other in enumerate(names[j]) if other == name]
            tokens += [episode + weight * (returns[i][t] - sum(same) / len(same))] * lengths[i][t]
        result.append(tokens)
    return result


def test_gigpo_over_named_states_is_the_plain_loop() -> None:
    rng = np.random.default_rng(0)
    groups = [0, 0, 0, 1, 1, 0]
    names = [["start", *(f"room {n}" for n in rng.integers(0, 3, size=rng.integers(1, 7)))] for _ in groups]
    trajectories = [with_states(number, *own) for number, own in enumerate(names)]
    rewards = [rng.normal(size=len(own)) for own in names]
    tokens = [np.ravel(np.column_stack([np.zeros(len(own)), own])) for own in rewards]
    row = ALGORITHMS["gigpo"]
    settings = row.settings({"normalize_std": False, "options": {"turn_gamma": 0.9, "turn_weight": 0.7}})
    found = row.credit(Chains(groups, tokens, None, trajectories), settings).advantages
    lengths = [[2] * len(own) for own in names]
    expected = gigpo_by_loop(groups, names, [own.tolist() for own in rewards], lengths, 0.9, 0.7)
    for part, wanted in zip(found, expected, strict=True):
        assert part == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_states_are_compared_where_observations_never_agree() -> None:
    """Both chains come to room 1, one of them by a detour, and read other words there."""

    @reward(name="short")
    def short(trajectory: Trajectory) -> float:
        return 1.0 / len(trajectory.turns)

    (direct,) = run([go("right"), ANSWER], reward=short)
    (detour,) = run([go("stay"), go("stay"), go("right"), ANSWER], reward=short)
    rewards = []
    for played in (direct, detour):
        own = np.zeros(played.num_sampled)
        own[-1] = played.reward
        rewards.append(own)
    row = ALGORITHMS["gigpo"]
    settings = row.settings({"normalize_std": False, "options": {"turn_weight": 1.0, "turn_gamma": 0.5}})
    chains = Chains([0, 0], rewards, None, [direct, detour])
    found = row.credit(chains, settings).advantages
    by_turn = [own[np.unique(chains.turns_of(i), return_index=True)[1]] for i, own in enumerate(found)]
    # room 0: returns 0.25, 0.03125, 0.0625, 0.125; room 1: 0.5 and 0.25; the episode: 0.125 above and below its mean
    mean = (0.25 + 0.03125 + 0.0625 + 0.125) / 4
    assert by_turn[0] == pytest.approx([0.125 + 0.25 - mean, 0.125 + 0.125])
    assert by_turn[1] == pytest.approx([-0.125 + r - mean for r in (0.03125, 0.0625, 0.125)] + [-0.125 - 0.125])
